"""Tables that are looked up in the memory of the host: equal to one process; planned, priced, reported and refused."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import autoparallel
from autoparallel.errors import InfeasibleError, PinError, PlanError
from autoparallel.kernels.host_lookups import cross
from autoparallel.plans import Plan
from autoparallel.runtime import placing
from autoparallel.runtime.initialise import is_table
from cost_models import Cluster
from tests.support.captured import plan_again
from tests.support.ranks import mesh_of
from tests.support.recommenders import DLRM, WideAndDeep, example, trained
from tests.support.tiers import slow

HOST = {"tables*": "host"}
ALL = {"tables*": "host", "wide*": "host"}


def local_bytes(value: Any) -> int:
    return (value._local_tensor if isinstance(value, DTensor) else value).nbytes


#: Rows of the largest table of a model that no devices hold: 1.6 MB of weights, four times with gradient and states.
ROWS_BEYOND, LIMIT = 50_000, 2e5


def beyond(kind: type[nn.Module]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The example with a large table."""
    model, batch = example(kind)
    name = "wide" if kind is WideAndDeep else "tables.2"
    width = model.get_submodule(name).embedding_dim
    model.set_submodule(name, nn.EmbeddingBag(ROWS_BEYOND * 8 // width, width, mode="sum"))
    return model, batch


def by_itself(kind: type[nn.Module], devices: int, optimizer: str) -> tuple[list[float], dict[str, Tensor], Plan]:
    """Trained where the search has to find room for the table."""
    model, batch = beyond(kind)
    parallel = autoparallel.compile(model, mesh_of(devices), example_inputs=batch, offload="auto",
                                    memory_limit_bytes=LIMIT, optimizer=optimizer.lower())
    return *trained(parallel, batch, optimizer), parallel.plan


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "devices", "optimizer"), [
    (DLRM, 2, "Adagrad"), slow(DLRM, 4, "AdamW"), slow(WideAndDeep, 2, "SGD"), slow(WideAndDeep, 4, "Adagrad"),
    slow(DLRM, 4, "SGD"), slow(WideAndDeep, 2, "AdamW")])
def test_a_table_beyond_all_devices_goes_to_the_host_by_itself(ranks: Any, kind: type[nn.Module], devices: int,
                                                               optimizer: str) -> None:
    losses, parameters = trained(*beyond(kind), optimizer)
    large = max(parameters, key=lambda name: parameters[name].numel())
    assert parameters[large].nbytes / devices > LIMIT    # even a shard of it alone does not fit
    for found, made, plan in ranks(devices).run(by_itself, kind, devices, optimizer, timeout_s=120):
        assert large in plan.hybrid.on_host and plan.prediction.peak_bytes <= LIMIT
        assert f"{large} on the host" in plan.evidence.stop_reason.replace(" and ", " on the host ")
        assert found == pytest.approx(losses, rel=1e-5)
        for name, wanted in parameters.items():
            assert float((made[name] - wanted).abs().max()) <= 1e-4 * max(float(wanted.abs().max()), 0.05), name


def on_ranks(kind: type[nn.Module], shape: tuple[int, ...], options: dict[str, Any], optimizer: str, ours: bool
             ) -> dict[str, Any]:
    """Four steps, then a call in eval mode without gradients; what tables, their gradients and states take."""
    model, batch = example(kind)
    parallel = autoparallel.compile(model, mesh_of(*shape), example_inputs=batch, optimizer=optimizer.lower(),
                                    **options)
    make: Any = getattr(torch.optim, optimizer)
    stepper: Any = parallel.optimizer(make, lr=0.05) if ours else make(parallel.parameters(), lr=0.05)
    losses = []
    for number in range(4):
        losses.append(float(parallel.step(*batch)))
        stepper.step()
        if number < 3:
            stepper.zero_grad()
    tables = [p for name, p in parallel.named_parameters() if name in parallel.plan.hybrid.on_host]
    held = sum(local_bytes(p) + local_bytes(p.grad) + sum(
        local_bytes(state) for state in stepper.state[p].values() if isinstance(state, Tensor) and state.dim())
        for p in tables)
    parallel.eval()
    with torch.no_grad():
        after = parallel.step(*batch) if "pipeline_stages" in options else parallel(*batch)
    return {"losses": losses, "after": float(after.full_tensor() if isinstance(after, DTensor) else after),
            "held": held, "host": parallel.plan.prediction.host_bytes, "tables": parallel.plan.hybrid.on_host,
            "parameters": {name: p.full_tensor().detach() for name, p in parallel.named_parameters()},
            "placements": {name: p.placements for name, p in parallel.named_parameters()}}


ROWS = {**HOST, "tables.*.weight": (Shard(0),)}
COLUMNS = {**ALL, "tables.*.weight": (Shard(1),)}
WHOLE = {**HOST, "tables.*.weight": (Replicate(),)}


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "shape", "options", "optimizer", "ours"), [
    (DLRM, (2,), {"pins": HOST}, "SGD", False),
    (WideAndDeep, (4,), {"pins": COLUMNS, "micro_batches": 2}, "Adagrad", True),
    (DLRM, (2, 2), {"pins": {**HOST, "tables.*.weight": (Shard(0), Shard(1))}, "zero_stage": 3}, "AdamW", True),
    slow(DLRM, (4,), {"pins": ROWS}, "AdamW", False), slow(DLRM, (4,), {"pins": WHOLE}, "Adagrad", False),
    slow(WideAndDeep, (2,), {"pins": ALL}, "SGD", True), slow(DLRM, (1,), {"pins": HOST}, "AdamW", True),
    slow(WideAndDeep, (2, 2), {"pins": ALL, "zero_stage": 1, "micro_batches": 4}, "AdamW", False),
    slow(DLRM, (2,), {"pins": HOST, "offload": "host"}, "AdamW", True),
    slow(DLRM, (4,), {"pins": HOST, "offload": "parameters"}, "Adagrad", True),
    slow(DLRM, (2,), {"pins": HOST, "micro_batches": 4, "copies": 2, "zero_stage": 1}, "Adagrad", True),
    slow(DLRM, (2,), {"pins": HOST, "recompute": "full"}, "AdamW", False),
    slow(DLRM, (2,), {"pins": ROWS, "recompute": "selective", "zero_stage": 3, "micro_batches": 2}, "SGD", False),
    slow(DLRM, (2,), {"pins": HOST, "recompute": "offload"}, "Adagrad", False),
    (DLRM, (2, 2), {"pins": HOST, "pipeline_stages": 2, "micro_batches": 4, "zero_stage": 2}, "AdamW", True),
    slow(DLRM, (2,), {"pins": HOST, "pipeline_stages": 2, "micro_batches": 2}, "Adagrad", False),
    slow(WideAndDeep, (2, 2), {"pins": ALL, "pipeline_stages": 2, "micro_batches": 4, "zero_stage": 1}, "SGD", True),
    slow(DLRM, (2, 2), {"pins": HOST, "pipeline_stages": 2, "micro_batches": 2, "offload": "parameters"}, "Adagrad",
         True),
])
def test_equal_to_one_process(ranks: Any, kind: type[nn.Module], shape: tuple[int, ...], options: dict[str, Any],
                              optimizer: str, ours: bool) -> None:
    """Losses and parameters, on as many bytes of the host's memory as planned."""
    losses, parameters = trained(*example(kind), optimizer)
    model, batch = example(kind)
    model.load_state_dict(parameters)
    found = ranks(int(torch.Size(shape).numel())).run(on_ranks, kind, shape, options, optimizer, ours, timeout_s=120)
    assert {name for one in found for name in one["parameters"]} == {*parameters}
    for one in found:
        assert one["losses"] == pytest.approx(losses, rel=1e-5)
        assert one["after"] == pytest.approx(float(model(*batch).detach()), rel=1e-5)
        for name, made in one["parameters"].items():    # in a pipeline those of its stage
            wanted = parameters[name]
            assert float((made - wanted).abs().max()) <= 1e-4 * max(float(wanted.abs().max()), 0.05), name
        for name, placements in one["placements"].items():
            if len(pins := options["pins"].get("tables.*.weight", ())) and name.startswith("tables"):
                assert placements == pins
        assert {name for name in parameters if name.startswith("tables")} <= {*one["tables"]}
    if "offload" not in options:
        assert max(one["held"] for one in found) == pytest.approx(found[0]["host"], rel=0.05)


class Bags(nn.Module):
    """A table that is looked up twice, once in bags with trained weights; bags of several lengths; one frozen table."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.ragged = nn.EmbeddingBag(40, 8, mode="sum"), nn.EmbeddingBag(30, 8, mode="max")
        self.frozen, self.weights = nn.Embedding(20, 8), nn.Parameter(torch.randn(3))
        self.frozen.weight.requires_grad_(False)
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor, flat: Tensor, offsets: Tensor) -> Tensor:
        x = self.twice(ids, per_sample_weights=self.weights.expand(len(ids), 3)) + self.twice(ids.flip(1))
        x = x + self.ragged(flat, offsets) + self.frozen(ids[:, 0] % 20)
        return self.head(x).square().mean()


def bags(meta: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(1)
    batch = torch.randint(0, 40, (8, 3)), torch.randint(0, 30, (20,)), torch.tensor([0, 2, 2, 7, 8, 12, 15, 19])
    with torch.device("meta" if meta else "cpu"):
        return Bags(), batch


def clipped(model: Any, batch: tuple[Tensor, ...], clip: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of three steps; the parameters after them."""
    optimizer, told = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        told += [float(loss.detach()), float(clip(model))]
        optimizer.step()
    return told, {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
                  for name, p in model.named_parameters()}


def bags_on_ranks(shape: tuple[int, ...], meta: bool, pins: dict[str, Any]) -> Any:
    model, batch = bags(meta)
    parallel = autoparallel.compile(model, mesh_of(*shape), example_inputs=batch, pins=pins)
    if meta:
        parallel.load_state_dict(bags()[0].state_dict())
    return *clipped(parallel, batch, lambda model: model.clip_grad_norm_(0.1)), parallel.plan.hybrid.on_host


@pytest.mark.ranks
@pytest.mark.parametrize(("shape", "meta"), [((2,), False), ((2, 2), True)])
def test_bags_and_norms_are_those_of_one_process(ranks: Any, shape: tuple[int, ...], meta: bool) -> None:
    pins = {"twice": "host", "ragged": "host", "frozen.*": "host"}
    losses, parameters = clipped(*bags(), lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    for found, made, on_host in ranks(2 ** len(shape)).run(bags_on_ranks, shape, meta, pins, timeout_s=120):
        assert found == pytest.approx(losses, rel=1e-5)
        assert set(on_host) == {"twice.weight", "ragged.weight", "frozen.weight"}
        for name, wanted in parameters.items():
            assert float((made[name] - wanted).abs().max()) <= 1e-4 * max(float(wanted.abs().max()), 0.05), name


def placed_in_parts(shape: tuple[int, ...], pins: dict[str, Any]) -> Any:
    """Parameters that come to the hosts a few rows at a time; those of a copy; whether all tables of a model on the
    meta device have values after `init_weights`, in the host's memory."""
    model, batch = example(DLRM)
    with patch.object(placing, "ROWS_BYTES", 100):
        parallel = autoparallel.compile(model, mesh_of(*shape), example_inputs=batch, pins=pins)
    copied = copy.deepcopy(parallel)
    parallel.step(*batch)
    torch.optim.SGD(parallel.parameters(), lr=0.1).step()
    with torch.device("meta"):
        empty, _ = example(DLRM)
    drawn = autoparallel.compile(empty, mesh_of(*shape), example_inputs=batch, pins=pins)
    drawn.init_weights()
    tables = [p for name, p in drawn.named_parameters() if name in drawn.plan.hybrid.on_host]
    good = len(tables) == 4 and all(is_table(p) and bool(p.full_tensor().std() > 0.5) for p in tables)
    return *({name: p.full_tensor().detach() for name, p in one.named_parameters()} for one in (copied, parallel)), good


@pytest.mark.ranks
@pytest.mark.parametrize(("shape", "placements"), [((4,), (Shard(0),)), ((2, 2), (Shard(1), Shard(0)))])
def test_tables_come_to_their_hosts_by_rows(ranks: Any, shape: tuple[int, ...], placements: Any) -> None:
    model, batch = example(DLRM)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(*batch).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    pins = {**HOST, "tables.*.weight": placements}
    for copied, stepped, good in ranks(4).run(placed_in_parts, shape, pins, timeout_s=120):
        assert good and all(torch.equal(copied[name], value) for name, value in before.items())
        for name, value in model.named_parameters():
            assert torch.allclose(stepped[name], value.detach(), atol=1e-6), name


def saved_and_loaded(folder: Path, pins: list[dict[str, Any]]) -> list[float]:
    """The loss after a step that follows a checkpoint under the first pins, continued under each of them."""
    found = []
    for number, some in enumerate(pins):
        model, batch = example(DLRM)
        parallel = autoparallel.compile(model, mesh_of(2), example_inputs=batch, pins=some)
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.05)
        if not number:
            parallel.step(*batch)
            optimizer.step()
            optimizer.zero_grad()
            parallel.save(folder / "saved", optimizer, step=1)
        else:
            parallel.load(folder / "saved", optimizer)
        parallel.step(*batch)
        optimizer.step()
        found.append(float(parallel.step(*batch)))
    return found


@pytest.mark.ranks
def test_checkpoints_go_to_plans_with_and_without_the_pin(ranks: Any, tmp_path: Path) -> None:
    (model, batch), losses = example(DLRM), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(model(*batch))
        losses[-1].backward()
        optimizer.step()
    pins: list[dict[str, Any]] = [HOST, {}, {"tables.0*": "host", "tables.2.weight": (Shard(0),)}, HOST]
    for found in ranks(2).run(saved_and_loaded, tmp_path, pins, timeout_s=120):
        assert found == pytest.approx([float(losses[2])] * 4, rel=1e-5)


# --- plans ------------------------------------------------------------------------------------------------------------

CLUSTER = Cluster.load("h100-sxm", num_devices=2)
TABLE, DIM, BATCH = 50_000, 64, 4096


class Ranked(nn.Module):
    """A table of ids, and a linear layer."""

    def __init__(self, rows: int = TABLE) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(rows, DIM), nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)).square().mean()


@functools.cache
def ranked(rows: int) -> Ranked:
    with torch.device("meta"):
        return Ranked(rows)


def planned(pins: dict[str, Any] | None, shape: tuple[int, ...] = (1,), rows: int = TABLE, **options: Any) -> Plan:
    ids = torch.zeros(BATCH, dtype=torch.long, device="meta")
    count = int(torch.Size(shape).numel())
    return plan_again(ranked(rows), Cluster.load("h100-sxm", num_devices=count), (ids,), mesh_shape=shape, pins=pins,
                      **options)


def test_priced_by_the_hosts_memory_and_the_link() -> None:
    """A known answer on one device: the bytes of the table, its gradient and two states leave the device; ids and
    results cross once, and the results' gradients back; the dense gradient is written whole; the step is the host's."""
    here, there = planned(None), planned({"embed": "host"})
    assert there.hybrid.on_host == ("embed.weight",) and there.pins == {"embed": "host"} and here.hybrid.on_host == ()
    table, results, ids, p = TABLE * DIM * 4, BATCH * DIM * 4, BATCH * 8, there.prediction
    assert p.host_bytes == 4 * table and here.prediction.host_bytes == 0
    assert here.prediction.state_bytes - p.state_bytes == 4 * table
    whole = 8 * 35.3e9    # one device alone has its host's memory for itself
    assert p.lookups_forward_s == pytest.approx((2 * results + ids) / whole + 5e-6)
    assert p.lookups_backward_s == pytest.approx((table + 3 * results + ids) / whole + 5e-6)
    assert p.crossings_s == pytest.approx((2 * results + ids) / 48e9 + 3 * 5e-6)
    assert p.forward_communication_s + p.backward_communication_s == pytest.approx(p.crossings_s)
    assert p.optimizer_s > TABLE * DIM * 28 / whole
    text = there.report(width=160)
    assert "embed.weight looked up in the memory of the host" in text.replace("\n", " ")
    assert "lookups on the host" in text and "in the host's memory" in text
    shares = there.summary().split("Of the step: ")[1].split(". ")[0]
    assert "lookups on the host" in shares and "communication exposed 0 %" in shares    # between devices
    assert sum(float(share) for share in re.findall(r"([\d.]+) %", shares)) == pytest.approx(100, abs=1.5)


def test_micro_batches_add_up_gradients_on_the_host() -> None:
    """Twice the lookups of half the samples; between them a gradient and the sum are read, and the sum is written."""
    whole, halves = planned({"embed": "host"}), planned({"embed": "host"}, micro_batches=2)
    table_s = TABLE * DIM * 4 / (8 * 35.3e9)
    assert halves.prediction.host_bytes == whole.prediction.host_bytes
    more = halves.prediction.lookups_backward_s - whole.prediction.lookups_backward_s
    assert more == pytest.approx(4 * table_s + 5e-6)
    assert halves.prediction.crossings_s - whole.prediction.crossings_s == pytest.approx(3 * 5e-6)


def test_plan_files_have_it(tmp_path: Path) -> None:
    plan = planned({"embed*": "host"}, (2,))
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.hybrid.on_host == ("embed.weight",) and again.prediction == plan.prediction
    assert "on_host: () -> ('embed.weight',)" in planned(None, (2,)).diff(again)


def test_tables_are_read_as_they_are_stored() -> None:
    """No gradient of a table is sent, whatever else the plan does; more than one device never reads it in parts."""
    for shape in ((2,), (2, 2)):
        for zero in (None, 3):
            plan = planned({"embed*": "host"}, shape, zero_stage=zero)
            sent = [use for use in plan.prediction.collectives if use.purpose in ("parameters", "gradients")]
            assert not [use for use in sent if use.num_bytes >= TABLE * DIM], (shape, zero)
            share = {"S(0)": 1, "S(1)": 1}
            cut = [size for name, size in zip(plan.strategies["embed.weight"], shape, strict=True) if name in share]
            whole = TABLE * DIM * 16 / int(torch.Size(cut).numel())
            assert plan.prediction.host_bytes == pytest.approx(whole, rel=1e-3)


def test_the_hosts_memory_is_limited() -> None:
    """Where a whole table on each rank is too much, it is cut; where a shard is too, the error says what is lacking."""
    state = 4 * TABLE * DIM * 4.0
    cut = planned({"embed": "host"}, (2,), host_memory_limit_bytes=0.6 * state)
    assert cut.prediction.host_bytes == state / 2 and cut.strategies["embed.weight"][0].startswith("S")
    with pytest.raises(InfeasibleError, match=r"a plan with 1 tables on the host needs .* of the host's memory for"):
        planned({"embed": "host"}, (2,), host_memory_limit_bytes=0.4 * state)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(64, 8), nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.norm(self.embed(ids)) @ self.embed.weight.t()).square().mean()


@pytest.mark.parametrize(("model", "pins", "options", "said"), [
    (Ranked, {"head": "host"}, {}, r"pin 'head': linear.* reads head.weight\n  On the host run embeddings"),
    (Ranked, {"tables*": "host"}, {}, "'host' is of parameters, and this names none; did you mean"),
    (Tied, {"embed*": "host"}, {}, r"reads embed.weight\n"),
    (Ranked, {"embed*": "hots"}, {}, "give a placement for each mesh axis, or 'host' for a table"),
    (Ranked, {"embed*": "host"}, {"offload": "host", "offload_fraction": 0.5}, "offload_fraction=0.5: leave"),
    (Ranked, {"embed*": "host"}, {"offload": "host/disk/disk"}, "take a tier with parameters and gradients in memory"),
])
def test_refused_by_name(model: type[nn.Module], pins: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises((PinError, PlanError), match=said):
        autoparallel.plan(model(), CLUSTER, example_inputs=(torch.zeros(8, dtype=torch.long),), pins=pins, **options)


def refused_backend() -> str:
    model, batch = example(DLRM)
    with pytest.raises(PlanError) as caught:
        autoparallel.compile(model, mesh_of(1), example_inputs=batch, pins=HOST, backend="aot_eager")
    return str(caught.value)


@pytest.mark.ranks
def test_compiled_backends_are_refused(ranks: Any) -> None:
    assert "looked up op by op" in ranks(1).run(refused_backend, timeout_s=60)[0]


class Twice(nn.Module):
    """A table that its first and its last layer look up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(64, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).relu()
        return (x + self.embed(ids + 1)).square().mean()


def refused_stages() -> str:
    with pytest.raises(PlanError) as caught:
        autoparallel.compile(Twice(), mesh_of(2), example_inputs=(torch.arange(8),), pins={"embed": "host"},
                             pipeline_stages=2, micro_batches=2)
    return str(caught.value)


@pytest.mark.ranks
def test_tables_of_several_stages_are_refused(ranks: Any) -> None:
    assert all("embed.weight lives in the memory of the host and is looked up on several pipeline ranks" in said
               for said in ranks(2).run(refused_stages, timeout_s=60))


def crossings() -> list[tuple[str, str]]:
    model, batch = example(WideAndDeep)
    parallel = autoparallel.compile(model, mesh_of(1), example_inputs=batch, pins=ALL)
    (program,) = parallel._state.forms.first().programs.values()
    return [node.args[1:] for node in program.module.graph.nodes if node.target is cross]


@pytest.mark.ranks
def test_programs_have_the_crossings_as_nodes(ranks: Any) -> None:
    """Of each lookup its ids down and its rows up, and nothing else."""
    down, up = ("cpu", "host"), ("host", "cpu")
    assert ranks(1).run(crossings, timeout_s=60)[0] == [down, up] * 3


# --- the search decides -----------------------------------------------------------------------------------------------


def test_auto_moves_a_table_where_the_device_lacks_memory_and_nothing_else() -> None:
    limit = 2 * TABLE * DIM * 4.0
    with pytest.raises(InfeasibleError):
        planned(None, memory_limit_bytes=limit)
    found = planned(None, memory_limit_bytes=limit, offload="auto")
    assert found.hybrid.on_host == ("embed.weight",)
    assert "embed.weight on the host, looked up there" in found.evidence.stop_reason
    enough = planned(None, memory_limit_bytes=100 * limit, offload="auto")
    plain = planned(None, memory_limit_bytes=100 * limit)
    assert enough.hybrid == plain.hybrid and enough.strategies == plain.strategies
    assert enough.prediction == plain.prediction
