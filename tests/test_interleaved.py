"""Interleaved shards of fused projections: found, priced and pinned; trained, saved and loaded as in one process."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import autoparallel
from autoparallel.capture import capture
from autoparallel.errors import PinError
from autoparallel.kernels import collectives
from autoparallel.layout import (
    INVARIANT,
    Layout,
    from_torch,
    layout_fits,
    local_box,
    local_boxes,
    local_shape,
    parse_layout,
    shard,
    to_torch,
)
from autoparallel.optim import Adafactor, transformers_adafactor
from autoparallel.runtime.dtensors import watch
from autoparallel.runtime.initialise import cut_out
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster
from tests.support.fused import EVEN, build
from tests.support.language import VOCABULARY, llama, whole
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

transformers = pytest.importorskip("transformers")


def gpt2(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32,
                                     use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options)
    return transformers.GPT2LMHeadModel(config)


def phi3(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, use_cache=False, pad_token_id=0, **options)
    return transformers.Phi3ForCausalLM(config)


BUILDS = {"gpt2": gpt2, "phi3": phi3}
#: The fused parameters of each, where tensor parallelism cuts them.
PINS = {
    "gpt2": {"*.c_attn.weight": _StridedShard(1, split_factor=3), "*.c_attn.bias": _StridedShard(0, split_factor=3)},
    "phi3": {"*.qkv_proj.weight": _StridedShard(0, split_factor=3),
             "*.gate_up_proj.weight": _StridedShard(0, split_factor=2)},
}


def batch(number: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids}


# ------------------------------------------------------------------------------------------------------------ layouts


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, tuple[int, ...]]:
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.sampled_from([3, 4, 12, 24, 36]), min_size=1, max_size=2)))
    parts = [draw(st.sampled_from([1, 2, 3, 4])) for _ in shape]
    kinds = st.sampled_from([INVARIANT, *(shard(d, k) for d, k in enumerate(parts)), *map(shard, range(len(shape)))])
    return shape, tuple(draw(st.lists(kinds, min_size=len(mesh), max_size=len(mesh)))), mesh


def torchs(shape: tuple[int, ...], layout: Layout, mesh: tuple[int, ...], at: tuple[int, ...]) -> Tensor:
    """The numbers of the elements that torch's own placements give a rank."""
    held = torch.arange(math.prod(shape)).view(shape)
    for placement, n, rank in zip(to_torch(layout), mesh, at, strict=True):
        if not isinstance(placement, Replicate):
            held = placement._split_tensor(held, n, with_padding=False)[0][rank]  # type: ignore[attr-defined]
    return held


@given(laid_out())
def test_shards_are_torchs(case: tuple[tuple[int, ...], Layout, tuple[int, ...]]) -> None:
    shape, layout, mesh = case
    assert parse_layout("·".join(map(str, layout))) == layout == from_torch(to_torch(layout))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    if not layout_fits(shape, layout, mesh):
        return
    for at in itertools.product(*map(range, mesh)):
        expected = torchs(shape, layout, mesh, at)
        assert local_shape(shape, layout, mesh, at) == tuple(expected.shape)
        found = np.full(expected.shape, -1)
        for offsets, places, size in local_boxes(shape, layout, mesh, at):
            here, there = (tuple(slice(o, o + n) for o, n in zip(begin, size, strict=True))
                           for begin in (places, offsets))
            found[here] = numbers[there]
        assert (found == expected.numpy()).all()


def test_parts_are_cut_evenly_or_not_at_all() -> None:
    assert layout_fits((24,), (shard(0, 3),), (4,)) and not layout_fits((24,), (shard(0, 3),), (5,))
    for other in (shard(0), shard(0, 3)):
        assert not layout_fits((24,), (shard(0, 3), other), (2, 2)), "one axis alone cuts parts"
    with pytest.raises(ValueError, match="too many values"):
        local_box((12,), (shard(0, 3),), (2,), (0,))


# -------------------------------------------------------------------------------------------------------------- plans


def wide(name: str) -> Any:
    """Heads enough for eight devices, on the meta device."""
    with torch.device("meta"):
        if name == "gpt2":
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(
                vocab_size=8192, n_embd=2048, n_layer=2, n_head=16, n_positions=2048, use_cache=False))
        return transformers.Phi3ForCausalLM(transformers.Phi3Config(
            vocab_size=8192, hidden_size=2048, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=16,
            num_key_value_heads=16, use_cache=False, pad_token_id=0))


def planned(name: str, **options: Any) -> Any:
    ids = torch.zeros(1, 2048, dtype=torch.long, device="meta")
    return autoparallel.plan(wide(name), Cluster.load("h100-sxm", num_devices=8), mesh_shape=(8,),
                             example_kwargs={"input_ids": ids, "labels": ids}, **options)


@pytest.mark.parametrize("name", ["gpt2", slow("phi3")])
def test_tensor_parallel_sends_nothing_for_a_fused_projection(name: str) -> None:
    """The search stores it interleaved; pinned to plain shards, its rows are exchanged, and the step takes longer."""
    plan, plain = planned(name, baseline="tensor_parallel"), planned(
        name, baseline="tensor_parallel", pins={pattern: Shard(pin.dim) for pattern, pin in PINS[name].items()})
    kinds, exchanged = ({use.kind for use in p.prediction.collectives} for p in (plan, plain))
    assert "all_to_all in sections" in exchanged and not any("all_to_all" in kind for kind in kinds)
    assert plan.prediction.step_s < 0.97 * plain.prediction.step_s
    for pattern, pin in PINS[name].items():
        found = [layout for path, layout in plan.strategies.items() if fnmatch(path, pattern)]
        assert found == [(f"S({pin.dim};{pin.split_factor})",)] * 2
        assert re.search(rf"stored by section[^:]*:[^:]*{pattern[2:]}\s+S\({pin.dim};", plan.report(400))
    assert autoparallel.Plan.from_json(plan.to_json()).strategies == plan.strategies
    assert "stored by section" not in plain.report(400)


@pytest.mark.slow
def test_models_without_fused_projections_have_no_such_layouts() -> None:
    """Nor do those whose sections are unequal, or are not cut evenly by any axis."""
    for model, mesh in ((llama(), (2,)), (phi3(), (5,)), (gpt2(), (7,))):
        space = StrategySpace(capture(model, (), batch()), mesh)
        assert not space.spaces.interleaved
        assert not any(";" in one.name for s in space.strategy_sets for one in s.axis_strategies
                       if not one.name.startswith("n;"))


def test_pins_that_cannot_be_name_those_that_can() -> None:
    with pytest.raises(PinError, match=r"on one axis it can be .*_StridedShard\(0, split_factor=3\)"):
        planned("phi3", pins={"*.qkv_proj.weight": _StridedShard(0, split_factor=2)})


# -------------------------------------------------------------------------------------------------------------- ranks


def pins(name: str, mesh_shape: tuple[int, ...]) -> dict[str, Any]:
    return {pattern: (*[Replicate()] * (len(mesh_shape) - 1), pin) for pattern, pin in PINS[name].items()}


def on_mesh(name: str, mesh_shape: tuple[int, ...], **options: Any) -> Any:
    parallel = autoparallel.compile(BUILDS[name](), mesh_of(*mesh_shape), example_kwargs=batch(),
                                    pins=pins(name, mesh_shape), **options)
    parallel.step(**batch())
    found = [p for p in parallel.parameters() if any(isinstance(q, _StridedShard) for q in p.placements)]
    assert len(found) == 2 * len(PINS[name])
    parallel.zero_grad()
    return parallel


def trained(model: Any, numbers: range, optimizer: torch.optim.Optimizer) -> list[float]:
    """Losses and norms of gradients of some steps."""
    found = []
    for number in numbers:
        optimizer.zero_grad()
        if isinstance(model, nn.Module) and hasattr(model, "clip_grad_norm_"):
            found.append(float(model.step(**batch(number))))
            found.append(float(model.clip_grad_norm_(0.5)))
        else:
            loss = model(**batch(number)).loss
            loss.backward()
            found += [float(loss.detach()), float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))]
        optimizer.step()
    return found


def run_training(name: str, mesh_shape: tuple[int, ...], options: dict[str, Any]
                 ) -> tuple[list[float], dict[str, Tensor]]:
    parallel = on_mesh(name, mesh_shape, **options)
    losses = trained(parallel, range(3), torch.optim.AdamW(parallel.parameters(), lr=1e-2, eps=1e-3))
    return losses, whole(parallel)


@pytest.mark.parametrize(("name", "mesh_shape", "options"), [
    slow("gpt2", (4,), {}), slow("phi3", (4,), {}), ("gpt2", (2, 2), {"backend": "aot_eager"}),
    ("phi3", (2, 2), {"micro_batches": 2, "recompute": "full"}), slow("phi3", (4,), {"backend": "aot_eager"}),
    slow("gpt2", (2, 2), {"micro_batches": 2, "zero_stage": 2}),
])
def test_training_is_that_of_one_process(ranks: Any, name: str, mesh_shape: tuple[int, ...], options: dict[str, Any]
                                         ) -> None:
    model = BUILDS[name]()
    losses = trained(model, range(3), torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))
    values = model.state_dict()
    for found, held in ranks(4).run(run_training, name, mesh_shape, options, timeout_s=120):
        assert found == pytest.approx(losses, rel=2e-5)
        for key, value in held.items():
            torch.testing.assert_close(value, values[key], rtol=1e-4, atol=2e-5, msg=key)


def save(name: str, folder: Path, how: str) -> dict[str, Tensor]:
    parallel = on_mesh(name, (4,))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2, eps=1e-3)
    trained(parallel, range(2), optimizer)
    if how == "job":
        parallel.save(folder, optimizer)
    elif how == "dcp":
        model_state, optimizer_state = get_state_dict(parallel, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    else:
        parallel.save_pretrained(folder)
    losses = trained(parallel, range(2, 4), optimizer) if how != "pretrained" else []
    return {**whole(parallel), "losses": torch.tensor(losses)}


def load(name: str, folder: Path, how: str, mesh_shape: tuple[int, ...], plain: bool) -> dict[str, Tensor]:
    if plain:
        parallel = autoparallel.compile(BUILDS[name](), mesh_of(*mesh_shape), example_kwargs=batch(), baseline="fsdp")
    else:
        parallel = on_mesh(name, mesh_shape)
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2, eps=1e-3)
    if how == "job":
        parallel.load(folder, optimizer)
    elif how == "dcp":
        model_state, optimizer_state = get_state_dict(parallel, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(parallel, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    else:
        assert parallel.load_pretrained(folder) == ([], [])
    losses = trained(parallel, range(2, 4), optimizer) if how != "pretrained" else []
    return {**whole(parallel), "losses": torch.tensor(losses)}


@pytest.mark.parametrize("how", ["job", slow("dcp"), slow("pretrained")])
def test_a_run_goes_on_in_other_layouts(ranks: Any, tmp_path: Path, how: str) -> None:
    """On four ranks in the same layout, on two in the same and in plain shards, and from plain shards."""
    expected, *_ = ranks(4).run(save, "gpt2", tmp_path / "run", how, timeout_s=120)
    for number, plain in ((4, False), (2, False), (2, True)):
        found, *_ = ranks(number).run(load, "gpt2", tmp_path / "run", how, (number,), plain, timeout_s=120)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=2e-5, msg=key)


def forced(strategy: tuple[str, ...], mesh_shape: tuple[int, ...], options: dict[str, Any]) -> dict[str, float]:
    """Largest differences from one process where the parameters are interleaved, whatever the projection reads."""
    model, x = build(*EVEN)
    expected = model(x)
    expected.backward()
    mesh, backend = mesh_of(*mesh_shape), options.pop("backend", "eager")
    interleaved = (*[Replicate()] * (len(mesh_shape) - 1), _StridedShard(0, split_factor=3))
    plan = autoparallel.plan(model, Cluster.load("local-cpu", num_devices=4), mesh_shape=mesh_shape,
                             axis_names=mesh.mesh_dim_names, pins={"qkv.*": interleaved}, example_inputs=(x,),
                             **options)
    (name,) = (n for n in plan.strategies if n.startswith("linear_sections") and ":" not in n)
    plan = dataclasses.replace(plan, strategies={**plan.strategies, name: strategy})
    parallel = autoparallel.compile(build(*EVEN)[0], mesh, plan=plan, example_inputs=(x,), backend=backend)
    loss = parallel.step(x) if "micro_batches" in options else parallel(x)
    if loss.requires_grad:
        loss.backward()
    assert tuple(parallel.qkv.weight.placements) == interleaved
    found = {"loss": float((loss - expected).detach().abs() / expected.detach().abs())}
    for (key, parameter), wanted in zip(parallel.named_parameters(), model.parameters(), strict=True):
        found[key] = float((parameter.grad.full_tensor() - wanted.grad).abs().max() / wanted.grad.abs().max())
    return found


@pytest.mark.parametrize(("strategy", "mesh_shape", "options"), [
    (("b0",), (4,), {}), (("b0",), (4,), {"recompute": "full"}), (("k",), (4,), {}), (("n",), (4,), {}),
    (("b0", "n;3"), (2, 2), {}), slow(("b0", "b1"), (2, 2), {}), slow(("b0",), (4,), {"backend": "aot_eager"}),
    (("b0",), (2,), {"micro_batches": 2, "zero_stage": 3}),
])
def test_projections_read_interleaved_weights_in_any_way(ranks: Any, strategy: tuple[str, ...],
                                                         mesh_shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """Gathered (again in backward), exchanged for plain shards, cut along the other dim."""
    for found in ranks(math.prod(mesh_shape)).run(forced, strategy, mesh_shape, options, timeout_s=100):
        assert max(found.values()) < 1e-5, found


class TwoForms(nn.Module):
    """A projection whose result is split, or is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_up, self.down = nn.Linear(16, 64), nn.Linear(32, 16)

    def forward(self, x: Tensor, split: bool) -> Tensor:
        y = self.gate_up(x)
        if split:
            gate, up = y.chunk(2, -1)
            return self.down(gate.sigmoid() * up).square().mean()
        return y.cumsum(-1).square().mean()


def two_forms(mesh_shape: tuple[int, ...]) -> list[tuple[float, float]]:
    """(difference of the loss, largest one of a gradient) in both forms, the split one first."""
    pin, found = _StridedShard(0, split_factor=2), list[tuple[float, float]]()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    parallel = autoparallel.compile(TwoForms(), mesh_of(*mesh_shape), example_inputs=(x, True), pins={
        "gate_up.*": (*[Replicate()] * (len(mesh_shape) - 1), pin)})
    for split in (True, False):
        model = TwoForms()
        expected, loss = model(x, split), parallel(x, split)
        expected.backward()
        loss.backward()
        assert parallel.gate_up.weight.placements[-1] == pin
        wrong = (parallel.gate_up.weight.grad.full_tensor() - model.gate_up.weight.grad).abs().max()
        found.append((float((loss - expected).detach().abs()), float(wrong)))
        parallel.zero_grad()
    return found


@pytest.mark.parametrize("mesh_shape", [slow((4,)), (2, 2)])
def test_another_form_reads_what_lies_interleaved(ranks: Any, mesh_shape: tuple[int, ...]) -> None:
    for found in ranks(4).run(two_forms, mesh_shape, timeout_s=100):
        assert max(itertools.chain(*found)) < 1e-5, found


def changed(mesh_shape: tuple[int, ...]) -> tuple[int, list[str]]:
    """(how many changes of placement of DTensors on a mesh of ours, those that are wrong)"""
    mesh = mesh_of(*mesh_shape)
    watch(mesh)
    value, at = torch.arange(24 * 8.0).view(24, 8), tuple(mesh.get_coordinate() or ())
    cuts = [INVARIANT, shard(0), shard(1), shard(0, 3), shard(1, 2)]
    layouts = [one for one in itertools.product(cuts, repeat=mesh.ndim) if layout_fits((24, 8), one, mesh_shape)]
    nested = [(shard(0, 3), shard(0, 2)), (shard(1, 2), shard(1, 2)), (shard(1, 4), shard(1))] if mesh.ndim == 2 else []
    wrong, done = list[str](), 0
    for source in layouts:
        held = DTensor.from_local(cut_out(value, local_boxes((24, 8), source, mesh_shape, at)).contiguous(), mesh,
                                  to_torch(source), run_check=False)
        if not torch.equal(held.full_tensor(), value):
            wrong.append(f"{source} whole")
        for target in layouts:
            found = held.redistribute(placements=to_torch(target)).to_local()
            wanted = cut_out(value, local_boxes((24, 8), target, mesh_shape, at))
            done += 1
            if not torch.equal(found, wanted):
                wrong.append(f"{source} to {target}")
        for target in nested:
            there = held.redistribute(placements=to_torch(target))
            done += 1
            if not torch.equal(there.full_tensor(), value) or there.placements != to_torch(target):
                wrong.append(f"{source} to {target} and back")
    return done, wrong


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_dtensors_change_placements_rightly(ranks: Any, mesh_shape: tuple[int, ...]) -> None:
    """torch alone is wrong of some on two axes: `runtime/interleaved.py`."""
    for done, wrong in ranks(4).run(changed, mesh_shape, timeout_s=100):
        assert done >= 16 and not wrong, wrong[:5]


VIEWS: tuple[tuple[int, ...], ...] = (
    (3, 4, 8), (3, 2, 2, 8), (2, 6, 8), (4, 24), (6, 16), (2, 48), (96,), (12, 2, 4), (1, 12, 8), (3, 4, 2, 4))


def viewed(mesh_shape: tuple[int, ...]) -> tuple[int, list[str]]:
    """(how many views of interleaved DTensors, those of which values, gradient or sums per column are wrong)"""
    mesh = autoparallel.compile(nn.Linear(2, 2), mesh_of(*mesh_shape), example_inputs=(torch.ones(2, 2),)).mesh
    value, at = torch.linspace(-3, 3, 96).cos().view(12, 8), tuple(mesh.get_coordinate() or ())
    cuts = [INVARIANT, shard(0), shard(0, 3), shard(0, 2), shard(1, 2), shard(1, 4)]
    layouts = [one for one in itertools.product(cuts, repeat=mesh.ndim)
               if layout_fits((12, 8), one, mesh_shape) and any(p.is_interleaved for p in one)]
    wrong, done = list[str](), 0
    for layout, shape in itertools.product(layouts, VIEWS):
        local = cut_out(value, local_boxes((12, 8), layout, mesh_shape, at)).contiguous()
        held = DTensor.from_local(local, mesh, to_torch(layout), run_check=False).requires_grad_()
        found = held.view(shape)
        weights = value.sin().view(shape)
        (found.full_tensor() * weights).sum().backward()
        pairs = ((found.full_tensor(), value.view(shape)), (held.grad.full_tensor(), value.sin()),
                 (((held > 0).sum(0) // 2).full_tensor(), (value > 0).sum(0) // 2))
        done += 1
        wrong += [f"{layout} {shape}"] * any(not torch.allclose(a, b) for a, b in pairs)
    return done, wrong


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_views_that_regroup_the_cut_dim_are_of_the_whole(ranks: Any, mesh_shape: tuple[int, ...]) -> None:
    """torch alone gives other elements of some, and finds no placements for others."""
    for done, wrong in ranks(math.prod(mesh_shape)).run(viewed, mesh_shape, timeout_s=100):
        assert done >= 40 and not wrong, wrong[:5]


def stepped_by(kind: str, mesh_shape: tuple[int, ...]) -> dict[str, float]:
    """Largest differences from one process after two steps of an optimizer that is not element-wise."""
    model, parallel = phi3(), on_mesh("phi3", mesh_shape)
    own, torchs = {"adafactor": (Adafactor, torch.optim.Adafactor), "transformers": (
        transformers_adafactor, transformers.optimization.Adafactor)}[kind]
    options = {"lr": 1e-2} if kind == "adafactor" else {"lr": 1e-2, "relative_step": False, "scale_parameter": True}
    ours, theirs = own(parallel.parameters(), **options), torchs(model.parameters(), **options)
    for number in range(2):
        ours.zero_grad()
        theirs.zero_grad()
        parallel.step(**batch(number))
        model(**batch(number)).loss.backward()
        ours.step()
        theirs.step()
    return {key: float((value - model.state_dict()[key]).abs().max()) for key, value in whole(parallel).items()}


@pytest.mark.parametrize(("kind", "mesh_shape"), [("adafactor", (4,)), ("transformers", (2, 2))])
def test_optimizers_with_means_of_rows_step_as_one_process(ranks: Any, kind: str, mesh_shape: tuple[int, ...]) -> None:
    for found in ranks(4).run(stepped_by, kind, mesh_shape, timeout_s=100):
        assert max(found.values()) < 2e-4, found


def state_of(name: str) -> tuple[dict[str, Tensor], list[str]]:
    """What users do with parameters: read, copy and write them, take norms."""
    parallel = on_mesh(name, (4,))
    model, wrong = BUILDS[name](), list[str]()
    values = {key: value.clone() for key, value in model.state_dict().items()}
    for key, parameter in parallel.named_parameters():
        assert isinstance(parameter, DTensor)
        if not torch.allclose(parameter.detach().norm().full_tensor(), values[key].norm()):
            wrong.append(f"norm of {key}")
        sums = parameter.detach().sum(0).full_tensor()
        if not torch.allclose(sums, values[key].sum(0), atol=1e-5):
            wrong.append(f"sum of {key}")
        nn.init.zeros_(parameter)
    parallel.load_state_dict(values)
    wrong += [key for key, value in whole(parallel).items() if not torch.equal(value, values[key])]
    parallel.load_state_dict(parallel.state_dict())
    wrong += [key for key, value in whole(parallel).items() if not torch.equal(value, values[key])]
    torch.manual_seed(1)
    for parameter in parallel.parameters():
        nn.init.normal_(parameter)
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    drawn = whole(parallel)
    wrong += [f"drawn {key}" for key, value in model.state_dict().items() if not torch.equal(value, drawn[key])]
    return drawn, wrong


@pytest.mark.parametrize("name", ["gpt2", slow("phi3")])
def test_users_see_the_whole(ranks: Any, name: str) -> None:
    for _, wrong in ranks(4).run(state_of, name, timeout_s=100):
        assert not wrong


def test_what_is_exchanged_is_known_while_a_graph_is_traced() -> None:
    """Tensors have no values then: compiled backends failed on a first exchange of rows between sections."""
    found = []
    for within in (FakeTensorMode(), nullcontext()):
        collectives._exchanged_blocks.cache_clear()
        with within:
            found.append(collectives._exchanged_blocks(1, 3, 2, 0))
    assert found[0] == found[1] == ((0, 2, 1), (2, 1), (2, 1), (0, 1, 2))
