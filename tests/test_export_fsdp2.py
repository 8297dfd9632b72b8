"""Files for torch alone that plans are exported to: run on four ranks, they give one process's gradients."""

from __future__ import annotations

import functools
import re
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import autoparallel
from autoparallel.errors import PlanError
from autoparallel.export import export_plan
from benchmarks.zoo import build
from cost_models import Cluster
from tests.support.captured import plan_again
from tests.support.tiers import slow

IDS = torch.randint(128, (8, 16), generator=torch.Generator().manual_seed(17))
Gradients = dict[str, Tensor]


@functools.cache
def model_once(name: str) -> Any:
    """Which nobody trains."""
    return model_of(name)


def model_of(name: str) -> Any:
    model: Any = build(name.removesuffix(" of 4 layers"))
    if name.endswith(" of 4 layers"):
        torch.manual_seed(4)
        model.config.num_hidden_layers = 4
        model = type(model)(model.config)
    if name == "mixtral":  # its auxiliary loss is of the whole batch: the mean over ranks of theirs is another
        model.config.output_router_logits = False
    return model


@functools.cache
def exported(name: str, by_hand: str) -> Any:
    return export_plan(planned(name, by_hand=by_hand), "fsdp2")


def planned(name: str, devices: int = 4, **options: Any) -> autoparallel.Plan:
    return plan_again(model_once(name), Cluster.load("h100-sxm", num_devices=devices), **options,
                             example_kwargs={"input_ids": IDS, "labels": IDS})


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def gradients_of(module: torch.nn.Module) -> Gradients:
    """By the original's names."""
    found = {}
    for name, parameter in module.named_parameters():
        name = re.sub(r"^module\.|_checkpoint_wrapped_module\.", "", name)
        assert parameter.grad is not None, name
        found[name] = whole(parameter.grad)
    return found


def run(text: str, name: str) -> tuple[float, Gradients]:
    """Loss (mean over ranks that know it) and gradients of one step by an exported file."""
    module = types.ModuleType("parallel_fsdp2")
    exec(compile(text, "parallel_fsdp2.py", "exec"), vars(module))
    mesh, model = module.make_mesh("cpu"), model_of(name)
    data = [axis for axis in mesh.mesh_dim_names if axis not in ("tp", "pipeline", "unsharded")]
    parts, number = 1, 0
    for axis in data:
        parts, number = parts * mesh[axis].size(), number * mesh[axis].size() + mesh.get_local_rank(axis)
    rows = IDS.chunk(parts)[number]
    if "Schedule" in text:
        schedule = module.parallelize(model, mesh)
        loss = module.step(schedule, mesh, rows, rows)
        found = {}
        for stage in schedule.stages:
            found |= {key.removeprefix("model."): value for key, value in gradients_of(stage.submod).items()}
    else:
        parallel = module.parallelize(model, mesh)
        loss = module.step(parallel, {"input_ids": rows, "labels": rows})
        found = gradients_of(parallel)
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, (None if loss is None else float(loss), found))
    known = [one for one, _ in every if one is not None]
    together = {key: value for _, some in every for key, value in some.items()}
    return sum(known) / len(known), together


def check(ranks: Any, name: str, by_hand: str) -> None:
    model = model_of(name)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    found, gradients = ranks(4).run(run, exported(name, by_hand).files["parallel_fsdp2.py"], name, timeout_s=120)[0]
    assert found == pytest.approx(float(loss.detach()), rel=1e-5)
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert set(gradients) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(gradients[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


#: A plan of each kind.
FEW = [("llama", "dp=2,tp=2,sequence_parallel"), ("llama", "dp=2,pp=2,zero=2,micro_batch=2,recompute=full"),
       ("mixtral", "dp=2,tp=2,zero=3")]
MORE = [("gpt2", "tp=2,pp=2,micro_batch=2"), ("gpt2", "dp=4,zero=3,shards=2,recompute=selective"),
        ("llama", "dp=4"), ("llama", "dp=2,tp=2,zero=3"), ("llama", "tp=2,pp=2,micro_batch=2"),
        ("llama", "dp=4,micro_batch=1"), ("llama", "dp=4,zero=1,micro_batch=1"), ("llama", "tp=4"),
        ("gpt2", "dp=4"), ("gpt2", "dp=4,zero=3"), ("gpt2", "dp=4,zero=2,micro_batch=1"),
        ("gpt2", "dp=4,zero=3,recompute=full"),
        ("gpt2", "dp=2,tp=2,micro_batch=1"), ("llama", "dp=2,cp=2"), ("gpt2", "dp=2,pp=2,micro_batch=1"),
        ("mixtral", "dp=4,ep=2"), ("mixtral", "dp=4"), ("mixtral", "dp=4,zero=3,recompute=full"),
        ("mixtral", "dp=4,zero=3,shards=2"), ("mixtral", "dp=2,tp=2,sequence_parallel"),
        ("mixtral", "dp=2,pp=2,micro_batch=2,schedule=gpipe"),
        ("llama", "tp=2,pp=2,micro_batch=2,schedule=zero_bubble"),
        ("mixtral", "dp=2,pp=2,micro_batch=2,zero=3,schedule=zero_bubble"),
        ("llama of 4 layers", "dp=2,pp=2,virtual=2,zero=3,micro_batch=1"),
        ("llama of 4 layers", "pp=4,micro_batch=2,schedule=zero_bubble"),
        ("llama of 4 layers", "dp=2,pp=2,virtual=2,micro_batch=1,schedule=zero_bubble,recompute=full")]


@pytest.mark.parametrize(("name", "by_hand"), FEW)
def test_an_exported_file_equals_one_process(ranks: Any, name: str, by_hand: str) -> None:
    check(ranks, name, by_hand)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "by_hand"), MORE)
def test_all_exported_files_equal_one_process(ranks: Any, name: str, by_hand: str) -> None:
    check(ranks, name, by_hand)


def test_layers_without_a_style_are_listed_and_replicated() -> None:
    lost = exported("mixtral", "dp=2,tp=2,zero=3").lost
    assert len(lost) == 1 and "mlp.experts" in lost[0].what and "mlp.gate" in lost[0].what


class Trunk(torch.nn.Module):
    """A decoder's parts, and no list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(32, 16), torch.nn.LayerNorm(16)
        self.up, self.down, self.head = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16), torch.nn.Linear(16, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        x = self.head(x + self.down(self.up(self.norm(x)).relu()))
        return torch.nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())


def test_norms_along_the_sequence_outside_layers_are_listed() -> None:
    ids = torch.zeros(4, 8, dtype=torch.long)
    plan = autoparallel.plan(Trunk(), Cluster.load("h100-sxm", num_devices=2), by_hand="tp=2,sequence_parallel",
                             example_kwargs={"input_ids": ids, "labels": ids})
    made = export_plan(plan, "fsdp2")
    assert [one.what for one in made.lost] == ["norms along the sequence in a model without a list of layers"]
    assert made.by_hand.tp == 2 and not made.by_hand.sequence_parallel
    assert "SequenceParallel" not in code(made.files["parallel_fsdp2.py"])


def code(text: str) -> str:
    """Of a file, without its own description and with axes by their kinds."""
    assert compile(text, "parallel_fsdp2.py", "exec")
    text = text.split('"""', 2)[2]
    return re.sub(r"""["'](axis0_axis1|dp|tp)["']""", '"axis"', text)


def twice(plan: autoparallel.Plan) -> autoparallel.Plan:
    """A plan on a mesh of one axis, on two of that kind."""
    blocks = tuple(replace(block, lines=tuple((name, f"{strategy}·{strategy}", f"{layout}·{layout}")
                                              for name, strategy, layout in block.lines)) for block in plan.blocks)
    return replace(plan, mesh_shape=(2, 2), axis_names=("axis0", "axis1"), blocks=blocks,
                   strategies={name: one * 2 for name, one in plan.strategies.items()},
                   model=replace(plan.model, heads=2 * plan.model.heads))


@pytest.mark.parametrize(("name", "kind"), [
    slow("llama", "tp=2"), slow("gpt2", "dp=2,zero=3"), ("mixtral", "dp=2,zero=1")])
def test_axes_of_one_role_are_one_axis(name: str, kind: str) -> None:
    plan = planned(name, devices=2, by_hand=kind)
    one, two = export_plan(plan, "fsdp2"), export_plan(twice(plan), "fsdp2")
    assert code(two.files["parallel_fsdp2.py"]) == code(one.files["parallel_fsdp2.py"]).replace("(2,)", "(4,)")
    assert two.lost == one.lost == () and (two.by_hand.dp, two.by_hand.tp) in ((1, 4), (4, 1))


def test_two_axes_that_cut_a_product_in_two_ways_leave_it_whole() -> None:
    plan = twice(planned("llama", devices=2, by_hand="tp=2"))
    blocks = tuple(replace(block, lines=tuple(
        (name, strategy.replace("k·k", "k·repeat") if "down_proj" in name else strategy, layout)
        for name, strategy, layout in block.lines)) for block in plan.blocks)
    made = export_plan(replace(plan, blocks=blocks), "fsdp2")
    assert "tensor parallelism of model.layers.*.mlp.down_proj linear" in made.lost[-1].what
    assert "RowwiseParallel()" in made.files["parallel_fsdp2.py"]  # o_proj's
    assert '"model.layers.*.mlp.gate_proj": ColwiseParallel(output_layouts=Replicate())' in made.files[
        "parallel_fsdp2.py"]


def test_products_that_every_rank_computes_are_as_planned() -> None:
    plan = planned("llama", devices=2, by_hand="tp=2")
    blocks = tuple(replace(block, lines=tuple((name, "repeat", "I") if "self_attn" in name else (name, strategy, layout)
                                              for name, strategy, layout in block.lines)) for block in plan.blocks)
    whole = replace(plan, blocks=blocks)
    assert not export_plan(whole, "fsdp2").lost
    assert "tensor-parallel, as the others" in export_plan(whole, "megatron").lost[0].instead


#: Plans beyond torch: what is lost, and the plan of the file.
BEYOND = [
    slow("gpt2", "dp=2,tp=2", "take nn.Linear and nn.Embedding, and none of these",
         "dp=4,zero=3,shards=2,micro_batch=2"),
    slow("gpt2", "dp=2,pp=2", "it needs a decoder", "dp=4,zero=3,shards=2,micro_batch=1"),  # its head is the embedding
    ("gpt2", "tp=2,pp=2", "take nn.Linear and nn.Embedding, and none of these", "dp=4,zero=3,micro_batch=1"),
    ("llama", "dp=2,cp=2", "context_parallel is experimental", "dp=4,micro_batch=2"),
    slow("mixtral", "dp=4,ep=2", "torch has no expert-parallel style", "dp=4,zero=3,shards=2,micro_batch=2"),
]


@pytest.mark.parametrize(("name", "by_hand", "said", "instead"), BEYOND)
def test_what_torch_cannot_say_is_listed_and_data_parallel_instead(name: str, by_hand: str, said: str, instead: str
                                                                   ) -> None:
    made = exported(name, by_hand)
    assert any(said in one.what and "data-parallel" in one.instead for one in made.lost)
    assert made.by_hand == autoparallel.planning.by_hand.ByHand.of(instead)
    assert code(made.files["parallel_fsdp2.py"]).count("fully_shard(") == (0 if instead == "dp=4,micro_batch=2" else 2)


def test_heads_that_ranks_do_not_divide_are_not_cut() -> None:
    plan = planned("llama", by_hand="dp=2,tp=2")
    kept = {name: shape for name, shape in plan.model.parameters.items() if "k_proj" not in name}
    halves = {name: (shape[0] // 2, *shape[1:]) for name, shape in plan.model.parameters.items() if "k_proj" in name}
    made = export_plan(replace(plan, model=replace(plan.model, parameters={**kept, **halves})), "fsdp2")
    assert "they do not divide the rows or heads of model.layers.0.self_attn.k_proj" in str(made.lost)
    assert made.by_hand.tp == 1 and made.by_hand.dp == 4


@pytest.mark.slow
def test_a_batch_without_rows_for_more_ranks_is_refused_with_the_list() -> None:
    plan = planned("llama", by_hand="dp=2,cp=2")
    odd = replace(plan, model=replace(plan.model, inputs={"input_ids": (2, 16), "labels": (2, 16)}))
    with pytest.raises(PlanError, match=r"not expressible: the sequence over 2 ranks .*4 do not divide a batch of 2"):
        export_plan(odd, "fsdp2")


def test_a_schedule_with_which_torch_loses_gradients_is_listed_and_another() -> None:
    made = exported("mixtral", "dp=2,pp=2,micro_batch=2,zero=3,schedule=zero_bubble")
    assert "loses gradients with fully_shard" in made.lost[-1].what and made.by_hand.schedule is None
    assert "schedule = Schedule1F1B(" in made.files["parallel_fsdp2.py"]


def test_idle_and_uneven_ranks_are_data_parallel_instead() -> None:
    plan = planned("llama", by_hand="dp=2,pp=2,micro_batch=1")
    uneven = replace(plan, hybrid=replace(plan.hybrid, replicas=(1, 2), pipeline_ranks=3))
    made = export_plan(replace(uneven, model=replace(plan.model, inputs={"input_ids": (12, 16)})), "fsdp2")
    assert "stages have [1, 2] ranks" in made.lost[0].what
    assert made.by_hand == autoparallel.planning.by_hand.ByHand(dp=6, zero=3, shards=3, micro_batch=2)
