"""Optimizers on parameters that lie on a mesh step as in one process, or are refused by name."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.optimization import Adafactor as TransformersAdafactor

import autoparallel
from autoparallel.errors import InputError
from autoparallel.optim import Adafactor, transformers_adafactor
from tests.support.ranks import mesh_of
from tests.support.reference import gathered
from tests.support.tiers import slow

O = torch.optim
Parameters = dict[str, Tensor]


class Net(nn.Module):
    """Matrices, vectors and a tensor of three dims, of lengths that two ranks do not share evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = nn.Linear(6, 11), nn.Linear(11, 6), nn.Linear(6, 8), nn.Linear(8, 5)
        self.norm, self.cube = nn.LayerNorm(6), nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.b(self.a(x).tanh())) + self.cube.square().sum() / 100
        return self.d(self.c(y).tanh()).square().mean()


MIXED = {
    "a.weight": (Shard(0), Shard(1)), "b.weight": (Shard(1), Replicate()), "c.weight": (Shard(0), Shard(0)),
    "d.weight": (Shard(1), Shard(0)), "a.bias": (Shard(0), Replicate()), "norm.weight": (Replicate(), Shard(0)),
    "cube": (Shard(0), Shard(2)),
}


@dataclass(frozen=True)
class Case:
    """``make`` in one process, ``parallel`` (the same unless given) on the mesh; of matrices only, resumed before the
    last of three steps."""

    make: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    parallel: Callable[..., Any] | None = None
    matrices: bool = False
    resumed: bool = False
    tolerance: float = 1e-5


def muon_in_float32(*args: Any, **options: Any) -> Any:
    """Its iteration is in bfloat16, whose rounding differs with the order of sums."""
    optimizer = O.Muon(*args, **options)
    step, own = optimizer.step, torch.Tensor.bfloat16

    def in_float32() -> None:
        torch.Tensor.bfloat16 = lambda t: t  # type: ignore[method-assign, assignment]
        try:
            step()
        finally:
            torch.Tensor.bfloat16 = own  # type: ignore[method-assign]

    optimizer.step = in_float32  # type: ignore[method-assign]
    return optimizer


class OwnLBFGS(O.LBFGS):
    pass


HF = {"lr": 1e-3, "relative_step": False, "scale_parameter": False, "beta1": 0.9, "weight_decay": 0.1}
TAKEN = {
    "SGD": Case(O.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": Case(O.Adam, {"lr": 0.01, "amsgrad": True}),
    "Adam fused": Case(O.Adam, {"lr": 0.01, "fused": True}),
    "AdamW": Case(O.AdamW, {"lr": 0.01}),
    "AdamW foreach": Case(O.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW fused": Case(O.AdamW, {"lr": 0.01, "fused": True}),
    "Adamax": Case(O.Adamax),
    "NAdam": Case(O.NAdam),
    "RAdam": Case(O.RAdam),
    "Adagrad": Case(O.Adagrad),
    "Adadelta": Case(O.Adadelta),
    "RMSprop": Case(O.RMSprop, {"momentum": 0.5, "centered": True}),
    "ASGD": Case(O.ASGD),
    "Rprop": Case(O.Rprop),
    "SGD fused": Case(O.SGD, {"lr": 0.01, "momentum": 0.9, "fused": True}),
    "SGD resumed": Case(O.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.3}, resumed=True),
    "Adagrad fused": Case(O.Adagrad, {"fused": True}),
    "AdamW resumed": Case(O.AdamW, {"lr": 0.01, "amsgrad": True}, resumed=True),
    "Muon": Case(O.Muon, {"lr": 0.01}, matrices=True, tolerance=1e-2),
    "Muon in float32": Case(muon_in_float32, {"lr": 0.01}, matrices=True),
    "Adafactor": Case(O.Adafactor, {"lr": 0.1, "weight_decay": 0.1}, Adafactor),
    "Adafactor resumed": Case(O.Adafactor, {"lr": 0.1}, Adafactor, resumed=True),
    "Adafactor of transformers": Case(TransformersAdafactor, {}, transformers_adafactor),
    "Adafactor of transformers with momentum": Case(TransformersAdafactor, HF, transformers_adafactor, resumed=True),
}
EVERY = {
    f"{name} {option}": Case(getattr(O, name), {"lr": 0.01, option: value},
                             Adafactor if name == "Adafactor" else None, name == "Muon",
                             tolerance=1e-2 if name == "Muon" else 1e-5)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop",
                 "Muon", "Adafactor")
    for option, value in (("foreach", True), ("foreach", False), ("maximize", True), ("weight_decay", 0.1))
    if (name != "Muon" or option == "weight_decay") and (name, option) != ("Rprop", "weight_decay")
}
REFUSED = {
    "torch.optim.Adafactor": (Case(O.Adafactor), "autoparallel.optim.Adafactor("),
    "torch.optim.lbfgs.LBFGS": (Case(O.LBFGS), "one flat vector"),
    "transformers.optimization.Adafactor": (Case(TransformersAdafactor), "autoparallel.optim.transformers_adafactor("),
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": (
        Case(ZeroRedundancyOptimizer, {"optimizer_class": O.Adam}), "zero_stage=1"),
    "tests.test_optimizers.OwnLBFGS": (Case(OwnLBFGS), "one flat vector"),
}


def trained(model: nn.Module, case: Case, parallel: bool) -> Parameters:
    """Parameters after three steps."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    make = case.parallel if parallel and case.parallel is not None else case.make
    parameters = [p for p in model.parameters() if p.dim() == 2 or not case.matrices]
    optimizer = make(parameters, **case.options)
    for number in range(3):
        if case.resumed and number == 2:
            state = optimizer.state_dict()
            optimizer = make(parameters, **case.options)
            optimizer.load_state_dict(state)

        def closure(optimizer: Any = optimizer) -> Tensor:
            model.zero_grad()
            loss = model(x)
            loss.backward()
            return loss

        if isinstance(optimizer, O.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return {name: p.detach().clone() for name, p in gathered(model.named_parameters()).items()}


def all_trained(cases: dict[str, Case], mesh_shape: tuple[int, ...], pins: Any) -> dict[str, Parameters | str]:
    """By case, on a mesh: the parameters, or the InputError's text. The model is compiled once."""
    model = autoparallel.compile(Net(), mesh_of(*mesh_shape), example_inputs=(torch.zeros(8, 6),), pins=pins)
    first = {name: p.clone() for name, p in model.state_dict().items()}
    found: dict[str, Parameters | str] = {}
    for name, case in cases.items():
        model.load_state_dict(first)
        try:
            found[name] = trained(model, case, parallel=True)
        except InputError as error:
            found[name] = str(error)
            kept = gathered(model.named_parameters()), gathered(first.items())
            assert all(torch.equal(value, kept[1][n]) for n, value in kept[0].items())  # nothing was written
    return found


def assert_as_in_one_process(name: str, case: Case, found: Any) -> None:
    assert not isinstance(found, str), (name, found)
    for parameter, expected in trained(Net(), case, parallel=False).items():
        if case.matrices and expected.dim() != 2:
            assert torch.equal(expected, found[parameter]), (name, parameter)
            continue
        error = (expected - found[parameter]).abs().max() / expected.abs().max()
        assert error <= case.tolerance, (name, parameter, error)


@pytest.fixture(scope="module")
def on_ranks(ranks: Any) -> Iterator[Callable[..., dict[str, Parameters | str]]]:
    """What all of these cases make on 4 ranks, trained once."""
    known: dict[str, dict[str, Parameters | str]] = {}

    def of(key: str, cases: dict[str, Case], mesh_shape: tuple[int, ...] = (2, 2), pins: Any = MIXED
           ) -> dict[str, Parameters | str]:
        if key not in known:
            known[key] = ranks(4).run(all_trained, cases, mesh_shape, pins, timeout_s=180)[3]
        return known[key]

    yield of


def test_optimizers_step_as_in_one_process(on_ranks: Any) -> None:
    """One test: cases of one job would each be run by every process of the tier."""
    found = on_ranks("taken", TAKEN)
    for name, case in TAKEN.items():
        assert_as_in_one_process(name, case, found[name])


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [(2, 2), (4,)])
@pytest.mark.parametrize("name", EVERY)
def test_every_option_steps_as_in_one_process(on_ranks: Any, name: str, mesh_shape: tuple[int, ...]) -> None:
    pins = MIXED if len(mesh_shape) == 2 else {name: layout[:1] for name, layout in MIXED.items()
                                               if name not in ("cube", "d.weight")}
    found = on_ranks(f"every {mesh_shape}", EVERY, mesh_shape, pins)[name]
    assert_as_in_one_process(name, EVERY[name], found)


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_step_is_refused_by_name(on_ranks: Any, name: str) -> None:
    """At its first step, before it writes anything."""
    text = on_ranks("refused", {name: case for name, (case, _) in REFUSED.items()})[name]
    assert isinstance(text, str), "it was taken"
    assert text.startswith(f"{name} cannot step parameters that lie on a mesh") and REFUSED[name][1] in text


@pytest.mark.parametrize("name", ["torch.optim.Adafactor", "torch.optim.lbfgs.LBFGS"])
def test_they_step_other_parameters(name: str) -> None:
    """The check is of parameters on a mesh of ours only."""
    before = [p.detach().clone() for p in Net().parameters()]
    after = trained(Net(), REFUSED[name][0], parallel=False)
    assert any(not torch.equal(a, b) for a, b in zip(before, after.values(), strict=True))


def placements_of_state(make: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """After a step: of the statistics of the matrices."""
    model = autoparallel.compile(Net(), mesh_of(2, 2), example_inputs=(torch.zeros(8, 6),), pins=MIXED)
    optimizer = make([model.get_parameter("a.weight"), model.get_parameter("cube")])
    model(torch.ones(8, 6)).backward()
    optimizer.step()
    return [(name, tuple(value.placements)) for state in optimizer.state.values() for name, value in state.items()
            if isinstance(value, DTensor)]


def test_statistics_are_cut_as_their_matrix_is(ranks: Any) -> None:
    """Of a matrix on (S(0), S(1)) and a cube on (S(0), S(2))."""
    cut, whole = Shard(0), Replicate()
    for found in ranks(4).run(placements_of_state, Adafactor):
        assert found == [("row_var", (cut, whole)), ("col_var", (whole, Shard(1))),
                         ("row_var", (cut, whole)), ("col_var", (cut, Shard(2)))]
    for found in ranks(4).run(placements_of_state, transformers_adafactor):
        assert found == [("exp_avg_sq_row", (cut, whole)), ("exp_avg_sq_col", (whole, Shard(0))),
                         ("exp_avg_sq_row", (cut, whole)), ("exp_avg_sq_col", (cut, Shard(1)))]


class Seen(TorchDispatchMode):
    """Counts the ops on DTensors and on plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[bool]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[any(issubclass(kind, DTensor) for kind in types)] += 1
        return op(*args, **(kwargs or {}))


def steps_and_state(name: str, options: dict[str, Any]) -> tuple[Counter[bool], dict[str, Any], float]:
    """What a second step computes on; placements of the state dict by parameter names; the learning rate."""
    model = autoparallel.compile(Net(), mesh_of(2, 2), example_inputs=(torch.zeros(8, 6),), pins=MIXED)
    optimizer = getattr(O, name)(model.parameters(), **options)
    schedule = O.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        model(torch.ones(8, 6)).backward()
        with Seen() as seen:
            optimizer.step()
        schedule.step()
    state = get_optimizer_state_dict(model, optimizer)["state"]
    placements = {f"{parameter}.{key}": value.placements for parameter, values in state.items()
                  for key, value in values.items() if isinstance(value, DTensor)}
    assert set(optimizer.state) == set(model.parameters())
    return seen.counts, placements, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(("name", "options", "keys"), [
    ("AdamW", {"lr": 0.01}, ("exp_avg", "exp_avg_sq")), ("SGD", {"lr": 0.01, "momentum": 0.9}, ("momentum_buffer",))])
def test_a_step_computes_on_shards_and_keeps_its_state_on_the_mesh(ranks: Any, name: str, options: dict[str, Any],
                                                                   keys: tuple[str, ...]) -> None:
    everywhere = (Replicate(), Replicate())
    expected = {f"{parameter}.{key}": MIXED.get(parameter, everywhere) for parameter, _ in Net().named_parameters()
                for key in keys}
    for counts, placements, rate in ranks(4).run(steps_and_state, name, options):
        assert counts[False] > 0 and counts[True] == 0
        assert {key: placements[key] for key in expected if key.split(".")[0] in "abd"} == {
            key: layout for key, layout in expected.items() if key.split(".")[0] in "abd"}
        assert placements.keys() == expected.keys() and rate == pytest.approx(options["lr"] / 4)


def redistributed(name: str) -> dict[str, Tensor]:
    """Parameters after a step on gradients of other placements than the parameters'."""
    model = autoparallel.compile(Net(), mesh_of(2, 2), example_inputs=(torch.zeros(8, 6),), pins=MIXED)
    model(torch.ones(8, 6)).backward()
    for p in model.parameters():
        p.grad = p.grad.redistribute(placements=[Replicate(), Replicate()])
    getattr(O, name)(model.parameters(), lr=0.01).step()
    return {name: p.detach().clone() for name, p in gathered(model.named_parameters()).items()}


def test_gradients_of_other_placements_are_redistributed(ranks: Any) -> None:
    model = Net()
    model(torch.ones(8, 6)).backward()
    O.AdamW(model.parameters(), lr=0.01).step()
    for found in ranks(4).run(redistributed, "AdamW"):
        for name, expected in model.named_parameters():
            torch.testing.assert_close(found[name], expected.detach())


def test_hooks_of_a_step_are_called_once() -> None:
    """Torch puts its hooks around a class's step: around the base class's, when one was made before, too."""
    model, calls = Net(), list[str]()
    model(torch.ones(8, 6)).backward()
    for base, own in ((O.Adafactor, Adafactor), (TransformersAdafactor, transformers_adafactor)):
        base(model.parameters())
        optimizer = own(model.parameters())  # type: ignore[operator]
        optimizer.register_step_post_hook(lambda *_, base=base: calls.append(base.__module__))
        assert optimizer.step(partial(float, 3.0)) == 3.0
    assert calls == ["torch.optim", "transformers.optimization"]


class Own(O.AdamW):
    """Takes no option of a kernel."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, foreach=False)


def test_the_fused_kernel_is_taken_unless_another_is_named(mesh_of_one: DeviceMesh) -> None:
    """Groups may be generators, and parameters named."""
    parallel = autoparallel.compile(Net(), mesh_of_one, example_inputs=(torch.rand(4, 6),))
    count = len(list(parallel.parameters()))
    for kind, options, fused in (
            (O.AdamW, {}, True), (O.Adam, {}, True), (O.SGD, {"momentum": 0.9}, None), (O.Adagrad, {}, None),
            (Own, {}, None), (O.AdamW, {"foreach": True}, None), (O.AdamW, {"fused": False}, False),
            (O.RMSprop, {}, None)):
        made = parallel.optimizer(kind, lr=0.1, **options)
        assert {group.get("fused") for group in made.param_groups} == {fused}, (kind, options)
        parallel(torch.rand(4, 6)).sum().backward()
        made.step()
        parallel.zero_grad()
    groups = [{"params": parallel.parameters(), "lr": 0.1}]
    assert len(parallel.optimizer(O.AdamW, groups).param_groups[0]["params"]) == count
    named = parallel.optimizer(O.AdamW, list(parallel.named_parameters()))
    assert len(named.param_groups[0]["param_names"]) == count
    other = parallel.optimizer(O.AdamW, [{"params": parallel.parameters(), "foreach": True}])
    assert other.param_groups[0]["fused"] is None


class Ops(TorchDispatchMode):
    """The names of ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


def turned(p: Tensor) -> None:
    """Lay a gradient out by columns."""
    assert isinstance(p.grad, DTensor)
    local = p.grad.to_local().t().contiguous().t()
    p.grad = DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape,
                                stride=local.stride())


@pytest.mark.parametrize(("kind", "options", "dtype", "strided", "fused"), [
    (O.AdamW, {}, torch.float32, False, True), slow(O.Adam, {"amsgrad": True}, torch.float64, False, True),
    (O.AdamW, {"foreach": False}, torch.float32, False, False),
    slow(O.AdamW, {"fused": False}, torch.float32, False, False), slow(O.AdamW, {}, torch.bfloat16, False, False),
    (O.AdamW, {}, torch.float32, True, True)])
def test_adam_on_a_cpu_passes_over_memory_once_where_its_kernel_is_left_open(
        mesh_of_one: DeviceMesh, kind: Any, options: dict[str, Any], dtype: torch.dtype, strided: bool, fused: bool
) -> None:
    """The option stays open; a gradient laid out by columns is not read in memory's order, those beside it are."""
    model, x = Net().to(dtype), torch.rand(4, 6, dtype=dtype)
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of_one, example_inputs=(x,))
    made, expected = kind(parallel.parameters(), lr=0.1, **options), kind(model.parameters(), lr=0.1, **options)
    before = [group["fused"] for group in made.param_groups]
    for _ in range(3):
        for module in (parallel, model):
            module(x).backward()
        if strided:
            turned(parallel.get_parameter("a.weight"))
        with Ops() as seen:
            made.step()
        expected.step()
        assert any(name.startswith("_fused_adam") for name in seen.names) == fused
        assert ("lerp_" in seen.names) == (strided or not fused)
        assert [group["fused"] for group in made.param_groups] == before
        for optimizer in (made, expected):
            optimizer.zero_grad()
    for name, value in model.named_parameters():
        torch.testing.assert_close(gathered(parallel.named_parameters())[name], value.detach(), msg=name)


def test_a_parameter_steps_alike_to_the_bit_whatever_else_its_group_has(mesh_of_one: DeviceMesh) -> None:
    """Copies of a tied weight on two pipeline stages stay the same, though one stage has blocks of another dtype."""
    x, found = torch.rand(4, 6), []
    for other in (None, torch.bfloat16):
        parallel = autoparallel.compile(Net(), mesh_of_one, example_inputs=(x,))
        others = [] if other is None else [nn.Parameter(torch.ones(3, dtype=other))]
        optimizer = O.AdamW([*parallel.parameters(), *others], lr=0.1, amsgrad=True)
        for _ in range(5):
            optimizer.zero_grad()
            (parallel(x) + sum(p.float().square().sum() for p in others)).backward()
            optimizer.step()
        assert all((p < 0.6).all() for p in others)
        found.append(gathered(parallel.named_parameters()))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_after_a_step_that_fails_the_kernel_of_adam_is_still_open(mesh_of_one: DeviceMesh) -> None:
    """Also to the user, who then names one."""
    x = torch.rand(4, 6)
    parallel = autoparallel.compile(Net(), mesh_of_one, example_inputs=(x,))
    optimizer = O.AdamW(parallel.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    parallel(x).backward()
    group["lr"] = "0.1"
    with pytest.raises(TypeError):
        optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["fused"] is None
    group["lr"], group["fused"] = 0.1, False
    with Ops() as seen:
        optimizer.step()
    assert group["fused"] is False
    assert not any(name.startswith("_fused_adam") for name in seen.names)


class Lookahead(O.Optimizer):
    """As timm's: it wraps another optimizer, and has hooks of steps only."""

    def __init__(self, base: O.Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.base, self.param_groups, self.defaults, self.state = base, base.param_groups, base.defaults, base.state

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def test_an_optimizer_that_wraps_another_without_hooks_of_loading_steps(mesh_of_one: DeviceMesh) -> None:
    """(It ended in an AttributeError.)"""
    x, model = torch.rand(4, 6), Net()
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of_one, example_inputs=(x,))
    for each in (model, parallel):
        optimizer = Lookahead(O.AdamW(each.parameters(), lr=0.1))
        optimizer.zero_grad()                                # from here on torch calls hooks of its steps
        each(x).backward()
        optimizer.step()
    found = gathered(parallel.named_parameters())
    for name, value in model.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), msg=name)
