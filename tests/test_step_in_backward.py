"""Steps on the host while backward goes on: the same numbers to the bit, what is refused, the price."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoparallel
from autoparallel.errors import InputError, PlanError
from autoparallel.plans import Hybrid, Plan
from autoparallel.runtime.stage_module import in_blocks
from autoparallel.schedule.tiers import Offload
from cost_models import Cluster
from tests.support.models import CASES
from tests.support.offloaded import Net, local
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

PLAIN = Cluster.load("a100-sxm", num_devices=4, software="none")
X = torch.linspace(-1, 1, 64).view(8, 8)
Left = tuple[list[float], list[Tensor], dict[str, Tensor], float]


def trained(case_name: str, shape: tuple[int, ...], options: dict[str, Any], early: bool) -> Left:
    """Losses, parameters and states after some steps; the share of tiles that backward stepped in the last one."""
    case = CASES[case_name]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(*shape), example_inputs=args, example_kwargs=kwargs,
                                    **options, step_in_backward=early)
    optimizer: Any = parallel.optimizer(torch.optim.AdamW, lr=1e-3, tile_bytes=4096)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses, share = [], 0.0
    for _ in range(3):
        losses.append(float(parallel.step(*args, **kwargs)))
        if early:
            tiles = sum(len(part.tiles) for part in optimizer._parts if part.on_host)
            share = len(optimizer.backward_steps._now.given) / tiles
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    states = {f"{number}.{name}": local(value) for number, entries in optimizer.state_dict()["state"].items()
              for name, value in entries.items()}
    optimizer.close()
    return losses, [local(p) for p in parallel.parameters()], states, share


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "shape", "options"), [
    slow("llama", (2,), {"zero_stage": 2, "offload": "host"}),
    ("gpt2", (2,), {"zero_stage": 3, "recompute": "full", "offload": "parameters"}),
    ("llama", (2,), {"zero_stage": 1, "offload": {"*layers.0.*": "disk", "*layers.1.*": "host", "*": "none"}}),
    slow("bert", (4,), {"zero_stage": 3, "offload": "disk/disk/disk"}),
    slow("mixtral", (2, 2), {"zero_stage": 1, "offload": "host"}),
    slow("gpt2", (4,), {"zero_stage": 0, "offload": "disk"}),
    slow("bert", (2,), {"zero_stage": 2, "recompute": "selective", "offload": "device/host/disk"}),
    slow("llama", (2,), {"zero_stage": 2, "backend": "aot_eager", "offload": "host"}),
])
def test_the_same_to_the_bit(ranks: Any, tmp_path: Path, case: str, shape: tuple[int, ...], options: dict[str, Any]
                             ) -> None:
    """As of a step after backward; nearly all tiles are stepped before backward ends."""
    if "disk" in str(options["offload"]):
        options = {**options, "disk_path": tmp_path}
    pool = ranks(int(torch.Size(shape).numel()))
    after, early = (pool.run(trained, case, shape, options, one, timeout_s=200) for one in (False, True))
    for (losses, parameters, states, _), (there, found, kept, share) in zip(after, early, strict=True):
        assert there == losses and share > 0.8
        assert all(torch.equal(a, b) for a, b in zip(found, parameters, strict=True))
        assert kept.keys() == states.keys() and all(torch.equal(kept[name], states[name]) for name in states)
    assert list(tmp_path.iterdir()) == []


def made(**options: Any) -> tuple[Any, Any]:
    parallel = autoparallel.compile(Net(), mesh_of(2), example_inputs=(X,), zero_stage=1,
                                    **{"offload": "host", "step_in_backward": True, **options})
    return parallel, parallel.optimizer(torch.optim.AdamW, lr=0.1)


def told(act: Any) -> str:
    """The error of what is done between backward and ``step()``."""
    parallel, optimizer = made()
    parallel(X).backward()
    try:
        act(parallel, optimizer)
    except InputError as error:
        return str(error)
    return ""


def changed(parallel: Any, optimizer: Any) -> None:
    next(parallel.parameters()).grad.mul_(0.5)
    optimizer.step()


def other_rate(parallel: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.step()


def other_rate_after_loading(parallel: Any, optimizer: Any) -> None:
    """`load_state_dict` makes other groups."""
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    parallel(X).backward()
    other_rate(parallel, optimizer)


def clipped(parallel: Any, optimizer: Any) -> None:
    parallel.clip_grad_norm_(1.0)


def again(parallel: Any, optimizer: Any) -> None:
    parallel(X)


def saved(parallel: Any, optimizer: Any) -> None:
    optimizer.state_dict()


def twice(parallel: Any, optimizer: Any) -> str:
    """The error of a second backward of losses that were made before the first."""
    first, second = parallel(X), parallel(X + 1)
    first.backward()
    with pytest.raises(InputError) as error:
        second.backward()
    return str(error.value)


def added_up() -> str:
    return twice(*made())


@pytest.mark.ranks
def test_what_is_refused_between_backward_and_step(ranks: Any) -> None:
    pool = ranks(2)
    for act, wanted in ((changed, "a gradient was changed after backward had stepped with it"),
                        (other_rate, "options of the optimizer changed after backward had stepped with them"),
                        (other_rate_after_loading, "options of the optimizer changed after backward had stepped"),
                        (clipped, "clip_grad_norm_ before optimizer.step()"),
                        (again, "the module was called before optimizer.step()"),
                        (saved, "state_dict() before optimizer.step()")):
        assert all(wanted in found for found in pool.run(told, act)), act.__name__
    assert all("each backward needs a step() of its own" in found for found in pool.run(added_up))


def verified() -> bool:
    """Whether parameters are as before after a verification, and then step."""
    parallel, optimizer = made()
    before = [local(p) for p in parallel.parameters()]
    parallel.verify(X, steps=1)
    same = all(torch.equal(a, local(b)) for a, b in zip(before, parallel.parameters(), strict=True))
    parallel(X).backward()
    optimizer.step()
    return same and not any(torch.equal(a, local(b)) for a, b in zip(before, parallel.parameters(), strict=True))


@pytest.mark.ranks
def test_verification_steps_nothing(ranks: Any) -> None:
    assert all(ranks(2).run(verified))


@pytest.mark.parametrize(("options", "wanted"), [
    ({"step_in_backward": 1, "offload": "host"}, "step_in_backward is 1: give True or False"),
    ({"step_in_backward": True, "offload": "host", "micro_batches": 2}, "micro_batches=2, whose gradients add up"),
    ({"step_in_backward": True, "offload": "host", "offload_fraction": 0.5}, "offload_fraction=0.5"),
])
def test_what_does_not_go_with_it(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(PlanError) as error:
        wide(64, **options)
    assert wanted in str(error.value)


@pytest.mark.parametrize("rows", [2**13, 2**17])
def test_the_price_is_what_backward_does_not_hide(tmp_path: Path, rows: int) -> None:
    """The host's step is counted as far as it exceeds backward, and its last tile always is."""
    after, early = (wide(rows, offload="host", step_in_backward=one) for one in (False, True))
    a, b = after.prediction, early.prediction
    last = early.hybrid.offload.tile_bytes / (a.host_bytes / 3 / 4)    # of gradients and two states, evenly
    assert b.optimizer_s == pytest.approx(max(a.optimizer_s - a.backward_s, last * a.optimizer_s), rel=0.02)
    assert b.optimizer_s < a.optimizer_s and (rows == 2**17) == (a.backward_s > a.optimizer_s)
    assert early.hybrid.offload.told().endswith(", stepped during backward")
    early.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").hybrid.offload == early.hybrid.offload


def wide(rows: int, **options: Any) -> Plan:
    """A data-parallel plan of eight square layers, whose states are on the host."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16) for _ in range(8)))
        x = torch.empty(rows, 4096, dtype=torch.bfloat16)
    return autoparallel.plan(model, PLAIN, example_inputs=(x,), mesh_shape=(4,), baseline="ddp", zero_stage=0,
                             **options)


def test_old_plans_step_after_backward() -> None:
    assert not Offload("host").in_backward and Offload("host", in_backward=True) != Offload("host")


def test_compiled_graphs_are_of_blocks_where_gradients_leave() -> None:
    """One graph would give all gradients at its end."""
    graph = torch.fx.Graph()
    for block in ("layers.0", "layers.1"):
        graph.call_function(torch.zeros, (2,)).meta["block"] = block
    program = torch.fx.GraphModule({}, graph)
    assert not in_blocks(program, Hybrid()) and in_blocks(program, Hybrid(offload=Offload("host")))


class Tied(nn.Module):
    """A weight that two layers read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = Net()
        self.b = nn.Linear(8, 24)
        self.b.weight = self.a.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x).square().mean()


def tied() -> bool:
    found = []
    for early in (True, False):
        parallel = autoparallel.compile(Tied(), mesh_of(2), example_inputs=(X,), zero_stage=2, offload="host",
                                        step_in_backward=early)
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.1, tile_bytes=4096)
        for number in range(3):
            parallel(X + number).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([local(p) for p in parallel.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.ranks
def test_a_tied_weight(ranks: Any) -> None:
    assert all(ranks(2).run(tied))


def a_frozen_layer() -> bool:
    x, model = torch.randn(8, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    model[0].requires_grad_(False)
    parallel = autoparallel.compile(model, mesh_of(2), example_inputs=(x,), offload="host", step_in_backward=True)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    before = [local(p).clone() for p in parallel.parameters()]
    parallel(x).sum().backward()
    optimizer.step()
    kept = [torch.equal(old, local(p)) for old, p in zip(before, parallel.parameters(), strict=True)]
    return kept == [True, True, False, False]


@pytest.mark.ranks
def test_parameters_that_are_frozen_are_not_stepped(ranks: Any) -> None:
    assert all(ranks(2).run(a_frozen_layer))
