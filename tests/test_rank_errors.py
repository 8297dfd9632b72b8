"""Calls, meshes, plans and models that do not fit the ranks: refused on each of them, before anything runs."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoparallel
from autoparallel import Cluster
from autoparallel.calibration.measure import memory_bytes
from autoparallel.errors import (
    MeshError,
)
from autoparallel.runtime.mesh import cluster_of, suggested
from tests.support.messages import message_of, says
from tests.support.models import CASES
from tests.support.ranks import mesh_of


def test_no_process_group() -> None:
    says(MeshError, "no process group", "torchrun", "autoparallel.init()",
         of=lambda: autoparallel.compile(nn.ReLU(), 4))


def test_devices_without_a_description(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh: Any = SimpleNamespace(device_type="cuda", size=lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    says(MeshError, "'NVIDIA H100 80GB HBM3 MIG 1g.10gb'", "cluster=", "h100-sxm", "autoparallel calibrate",
         of=lambda: suggested(mesh, None, "eager", 8))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA B200")
    assert suggested(mesh, None, "eager", 8).name == "b200"
    assert suggested(mesh, None, "inductor", 8).profile.software == "torch-compile"  # type: ignore[union-attr]


def test_hosts_with_fewer_devices_than_described(caplog: pytest.LogCaptureFixture) -> None:
    mesh: Any = SimpleNamespace(device_type="cuda", size=lambda: 16)

    def inside(cluster: str, on_host: int) -> tuple[int, int | None]:
        links = suggested(mesh, cluster, "eager", on_host).links
        return links[0].num_devices, links[1].nics_per_host

    assert inside("a100-sxm", 0) == inside("a100-sxm", 8) == (8, 8)
    assert inside("gb200-nvl72", 4) == (72, 72)    # NVLink joins the hosts of a rack
    assert not caplog.records
    assert inside("a100-sxm", 4) == (4, 4)
    assert inside("l4", 4) == (4, 1)
    assert "hosts of a100-sxm have 8 devices, and this job has 4 processes a host" in caplog.records[0].getMessage()


def test_processes_share_the_memory_of_their_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh: Any = SimpleNamespace(device_type="cpu", size=lambda: 8)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 3 * 2**24}.__getitem__)    # 192 GiB
    alone, two_hosts = suggested(mesh, None, "eager", 0), suggested(mesh, None, "eager", 4)
    assert (alone.device.memory_bytes, two_hosts.device.memory_bytes) == (16 * 2**30, 32 * 2**30)
    assert alone.host.memory_bytes == 192 * 2**30
    assert memory_bytes("cpu", 4) == two_hosts.device.memory_bytes    # as calibrate writes it
    assert suggested(mesh, "local-cpu", "eager", 4) == Cluster.load("local-cpu", num_devices=8)


def meshes_of_other_sizes() -> list[str]:
    from torch.distributed.device_mesh import DeviceMesh

    part = DeviceMesh("cpu", [[0], [1]])
    machine = Cluster.load("local-cpu", num_devices=2)
    return [message_of(lambda: autoparallel.compile(nn.Linear(2, 2), part)),
            message_of(lambda: autoparallel.compile(nn.Linear(2, 2), 3)),
            message_of(lambda: cluster_of(mesh_of(4), machine)),
            message_of(lambda: autoparallel.compile(nn.Linear(2, 2), mesh_of(4), cluster="local-gpu"))]


def test_a_mesh_of_another_size_than_the_world(ranks: Any) -> None:
    for smaller, more, machine, unknown in ranks(4).run(meshes_of_other_sizes):
        assert "MeshError" in smaller and "2 devices (2, 1)" in smaller and "the world 4 ranks" in smaller
        assert "every rank must be on the mesh" in smaller
        assert "MeshError: 3 devices were asked for and the world has 4 ranks: give 4, or start 3 processes" in more
        assert "MeshError: the cluster has 2 devices and the mesh 4" in machine
        assert "ClusterError" in unknown and "local-gpu" in unknown and "local-cpu" in unknown


def other_calls() -> dict[str, Any]:
    """A model compiled for a batch of 8, called in other forms; and parameters asked for too early."""
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
    single = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
    single.load_state_dict(model.state_dict())
    early = autoparallel.compile(model, mesh_of(4))
    found: dict[str, Any] = {
        "parameters": message_of(lambda: list(early.parameters())),
        "state": message_of(early.state_dict),
        "plan": message_of(lambda: early.plan),
    }
    parallel = autoparallel.compile(model, mesh_of(4), example_inputs=(torch.ones(8, 8),), baseline="fsdp")
    before = [(id(p), p._local_tensor.data_ptr(), p.placements) for p in parallel.parameters()]
    errors = []
    for shape in ((8, 8), (16, 8), (3, 8), (2, 5, 8)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        single.zero_grad()
        parallel.zero_grad()
        expected, actual = single(x), parallel(x)
        actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
        expected.square().sum().backward()
        actual.square().sum().backward()
        errors.append(float((actual - expected).detach().abs().max()))
        pairs = zip(single.parameters(), parallel.parameters(), strict=True)
        errors += [float((q.grad.full_tensor() - p.grad).abs().max() / p.grad.abs().max()) for p, q in pairs]
    found["errors"] = errors
    found["in place"] = before == [(id(p), p._local_tensor.data_ptr(), p.placements) for p in parallel.parameters()]
    found["structure"] = message_of(lambda: parallel(torch.ones(8, 8), torch.ones(8, 8)))
    found["keyword"] = message_of(lambda: parallel(y=torch.ones(8, 8)))
    found["wrong shape"] = message_of(lambda: parallel(torch.ones(8, 9)))
    found["step"] = message_of(lambda: parallel.step(torch.ones(8, 8)))
    return found


def test_other_calls_are_traced_anew_or_refused(ranks: Any) -> None:
    """Other shapes: the right result from the same parameters, where they are. What the model itself does not take is
    an error of ours that carries the model's own."""
    for found in ranks(4).run(other_calls):
        for early in ("parameters", "state", "plan"):
            assert found[early].startswith("InputError: the model has not been traced yet"), found[early]
            assert "call it once, or give example_inputs" in found[early]
        assert max(found["errors"]) < 1e-5 and found["in place"]
        assert "CaptureError" in found["structure"] and "positional argument" in found["structure"]
        assert "This call: (float32[8, 8], float32[8, 8])" in found["structure"]
        assert "Traced before: (float32[8, 8]); (float32[16, 8])" in found["structure"], found["structure"]
        assert "CaptureError" in found["keyword"] and "'input'" in found["keyword"]
        assert "CaptureError" in found["wrong shape"] and "9" in found["wrong shape"]
        assert "InputError: step needs a scalar loss" in found["step"] and "return the loss" in found["step"]


def calls_of_other_types() -> list[str]:
    """Integers for a linear layer, in each way to compile and call; then the right call."""
    model, x = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)), torch.ones(8, 8)
    parallel = autoparallel.compile(model, mesh_of(2), example_inputs=(x,), baseline="tensor_parallel")
    wrong = x.long()
    return [message_of(lambda: parallel(wrong)),
            message_of(lambda: parallel.step(wrong)),
            message_of(lambda: parallel.shard_batch((wrong,))),
            message_of(lambda: autoparallel.compile(model, mesh_of(2), example_inputs=(wrong,))),
            message_of(lambda: autoparallel.compile(model, 2, example_inputs=(wrong,))),
            message_of(lambda: autoparallel.compile(model, mesh_of(2))(wrong)),
            message_of(lambda: parallel(x))]


def test_calls_of_other_types_are_refused_before_they_run(ranks: Any) -> None:
    """On every rank, and the process groups stay as they are (the ranks failed in the product, and closed them)."""
    for *refused, after in ranks(2).run(calls_of_other_types):
        for said in refused:
            assert said.startswith("CaptureError: aten.linear.default does not take tensors of these types: int64[8, 8]"
                                   ", float32[12, 8], float32[12]"), said
            assert "in 0\n" in said and "Write x.to(torch.float32)" in said and "This call: (int64[8, 8])" in said
        assert after == "no error"


def models_on_ranks_already() -> list[str]:
    """Given by themselves and as a part; then one that is not."""
    from torch.distributed.fsdp import fully_shard

    mesh, x = mesh_of(2), torch.ones(8, 8)
    ours = autoparallel.compile(nn.Linear(8, 8), mesh, example_inputs=(x,))
    ddp, fsdp = nn.parallel.DistributedDataParallel(nn.Linear(8, 8)), fully_shard(nn.Linear(8, 8), mesh=mesh)
    return [message_of(lambda m=model: autoparallel.compile(m, mesh, example_inputs=(x,)))
            for model in (ours, nn.Sequential(ours), ddp, fsdp, nn.Sequential(nn.Linear(8, 8)))]


def test_models_that_are_on_several_ranks_already(ranks: Any) -> None:
    """A trace ran their collectives, or what closes process groups."""
    for own, held, ddp, fsdp, after in ranks(2).run(models_on_ranks_already):
        assert own.startswith("CaptureError: the model has a ParallelModule, which is on several ranks")
        assert held == own.replace("ParallelModule,", "ParallelModule (0),")
        assert ddp.startswith("CaptureError: the model has a DistributedDataParallel") and "was made of" in ddp
        assert "CaptureError: parameters of the model are DTensors already (weight, bias)" in fsdp, fsdp
        assert "before fully_shard" in fsdp and after == "no error"


def edited_plans() -> list[str]:
    x = torch.ones(8, 8)
    plan = autoparallel.compile(nn.Linear(8, 8), mesh_of(2), example_inputs=(x,)).plan
    blocks = dataclasses.replace(plan.hybrid, recompute="full", recompute_blocks=("layers.7",))
    wrong = [dataclasses.replace(plan, mesh_shape=(3,)), dataclasses.replace(plan, hybrid=blocks), plan]
    return [message_of(lambda p=p: autoparallel.compile(nn.Linear(8, 8), 2, example_inputs=(x,), plan=p))
            for p in wrong]


def test_plans_for_another_count_of_devices_or_other_blocks(ranks: Any) -> None:
    for count, blocks, after in ranks(2).run(edited_plans):
        assert count.startswith("MeshError: the plan is for a mesh of (3,), and 2 devices were asked for: start 3")
        assert blocks.startswith("PlanError: the plan recomputes blocks ['layers.7'], which the model has not")
        assert after == "no error"


def conversions() -> list[Any]:
    """To other types, after the first call and before it."""
    x = torch.ones(8, 8)
    parallel = autoparallel.compile(nn.Linear(8, 8), mesh_of(2), example_inputs=(x,))
    late = autoparallel.compile(nn.Linear(8, 8), mesh_of(2))
    return [message_of(lambda: parallel.half()), message_of(lambda: parallel.to("meta")),
            message_of(lambda: parallel.to("cpu").float()), message_of(lambda: parallel(x)),
            late.bfloat16()(x.bfloat16()).dtype, [p.dtype for p in late.parameters()]]


def test_a_parallel_module_is_converted_before_its_first_call_only(ranks: Any) -> None:
    """After it, ranks failed in the next call, and before it nothing was converted."""
    for half, meta, same, after, made, parameters in ranks(2).run(conversions):
        assert half.startswith("InputError: weight is torch.float32 on cpu, and cannot become torch.float16 on cpu")
        assert "Convert the model before it is called" in half and "init_weights()" in meta
        assert same == after == "no error"
        assert made == torch.bfloat16 and parameters == [torch.bfloat16] * 2


class Weird(nn.Module):
    """A parameter of its own and no way to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def meta_parameters() -> list[str]:
    x = torch.ones(4, 8)
    with torch.device("meta"):
        model, weird = nn.Linear(8, 8), Weird()
    parallel = autoparallel.compile(model, mesh_of(4), example_inputs=(x,))
    odd = autoparallel.compile(weird, mesh_of(4), example_inputs=(x,))
    state = nn.Linear(8, 8).state_dict()
    return [
        message_of(lambda: parallel(x)),
        message_of(lambda: odd.init_weights()),
        message_of(lambda: parallel.load_state_dict({"weight": state["weight"]})),
        message_of(lambda: parallel.load_state_dict({**state, "other": state["bias"]})),
        message_of(lambda: parallel.load_state_dict({**state, "bias": torch.ones(9)})),
        message_of(lambda: (parallel.load_state_dict(state), parallel(x))),
        message_of(lambda: parallel(x[:2])),
    ]


def test_meta_parameters_want_values(ranks: Any) -> None:
    for call, weird, missing, unexpected, shape, right, again in ranks(4).run(meta_parameters):
        assert re.match(r"InputError: (weight|bias) is still on the meta device: call init_weights\(\) or load", call)
        assert "Weird" in weird and "reset_parameters" in weird and "load a state dict instead" in weird
        assert "missing ['bias'], unexpected []" in missing and "strict=False" in missing
        assert "missing [], unexpected ['other']" in unexpected
        assert "bias has shape [8], the value given [9]" in shape
        assert right == "no error" and again == "no error", "another batch is traced anew, on meta again"


def keywords_of_plan() -> list[str]:
    """With a mesh and with a count of devices, before and after tracing."""
    x, names = torch.ones(4, 8), [{"joint": True}, {"mesh_shape": (2,)}, {"axis_names": ("data",)}]
    made = [lambda m=mesh, e=example, k=keywords: autoparallel.compile(nn.Linear(8, 8), m, example_inputs=e, **k)
            for mesh in (mesh_of(2), 2) for example in (None, (x,)) for keywords in names]
    return [message_of(call) for call in made]


def test_keywords_of_plan_given_to_compile_say_where_they_belong(ranks: Any) -> None:
    for said in ranks(2).run(keywords_of_plan):
        for joint, shape, names in zip(said[::3], said[1::3], said[2::3], strict=True):
            assert joint.startswith("PlanError: joint belongs to autoparallel.plan")
            assert "joint=True)" in joint and "autoparallel.compile(model, mesh, plan=plan)" in joint
            assert shape.startswith("PlanError: mesh_shape belongs to autoparallel.plan")
            assert "init_device_mesh(" in shape and "count of devices" in shape
            assert names.startswith("PlanError: axis_names belongs to autoparallel.plan") and "mesh_dim_names" in names


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(8)


def odd_calls() -> list[str]:
    parallel = autoparallel.compile(nn.Linear(8, 8), mesh_of(2), example_inputs=(torch.ones(4, 8),))
    wrong: Any = parallel
    full = nn.Linear(8, 8).state_dict()
    return [
        message_of(lambda: parallel(torch.ones(4, 8, device="meta"))),
        message_of(lambda: wrong(torch.ones(4, 8).numpy())),
        message_of(lambda: wrong.shard_batch(3)),
        message_of(lambda: wrong.dataloader(Samples(), 0)),
        message_of(lambda: wrong.load_state_dict(None)),
        message_of(lambda: wrong.load_state_dict({**full, "bias": 3})),
        message_of(lambda: wrong.load_state_dict({**full, "epoch": 3}, strict=False)),
        message_of(lambda: wrong.load_state_dict({**full, "bias": torch.ones(8, device="meta")})),
        message_of(lambda: wrong.load_state_dict({**full, "bias": torch.ones(8).to_sparse()})),
        message_of(lambda: parallel(torch.ones(4, 8).to_sparse())),
        message_of(lambda: wrong.clip_grad_norm_(None)),
        message_of(lambda: wrong.clip_grad_norm_(1.0, "two")),
        message_of(lambda: wrong.dataloader(Samples(), 4, sampler=[0])),
        message_of(lambda: wrong.dataloader(Samples(), 4, batch_sampler=[[0]])),
        message_of(lambda: [parallel(batch) for batch in parallel.dataloader(Samples(), 4)]),
        message_of(lambda: parallel(torch.ones(4, 8))),
    ]


def test_calls_with_what_is_no_tensor(ranks: Callable[[int], Any]) -> None:
    """And calls after them work."""
    for meta, numpy, batch, loader, state, value, left_out, *others, after in ranks(2).run(odd_calls):
        empty, sparse, call, norm, kind, sampler, batches, bare = others
        for said, name in ((empty, "bias"), (sparse, "bias")):
            assert said.startswith("InputError: state dict has tensors on the meta device") and name in said
        assert "InputError: an input is a sparse_coo tensor" in call and "x.to_dense()" in call
        assert "InputError: max_norm is None" in norm and "InputError: norm_type is 'two'" in kind
        assert "InputError: the sampler has 1 samples, fewer than one batch of 4" in sampler
        assert "batch_sampler is not for this loader" in batches and "give their order as a sampler" in batches
        assert bare == "no error", "samples that are tensors"
        assert "InputError: an input is on the meta device" in meta and "give real ones" in meta
        assert "CaptureError" in numpy and "is given a numpy.ndarray" in numpy and "torch.from_numpy(x)" in numpy
        assert "This call: (of type ndarray)" in numpy
        assert "InputError: a batch is of type int" in batch and "a tuple of arguments" in batch
        assert "InputError: batch_size is 0" in loader and "1 or more" in loader
        assert "InputError: a state dict is a mapping" in state and "NoneType" in state
        assert "InputError: state dict has no tensors for ['bias']" in value
        assert left_out == "no error", "strict=False loads the rest"
        assert after == "no error"


def call_a_pipeline() -> list[str]:
    case = CASES["mlp"]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(2, 2), example_inputs=args, example_kwargs=kwargs,
                                    pipeline_stages=2, schedule="gpipe")
    wrong = dataclasses.replace(parallel.plan, hybrid=dataclasses.replace(parallel.plan.hybrid, cuts=("x",)))
    return [
        message_of(lambda: parallel(*args, **kwargs)),
        message_of(lambda: parallel.shard_batch(args)),
        message_of(lambda: autoparallel.compile(case.build(), mesh_of(4), plan=parallel.plan)),
        message_of(lambda: autoparallel.compile(case.build(), mesh_of(2, 2), example_inputs=args, plan=wrong)),
        message_of(lambda: autoparallel.compile(case.build(), mesh_of(2, 2), plan=parallel.plan, micro_batches=2,
                                                baseline="ddp")),
    ]


def test_what_a_pipeline_refuses(ranks: Callable[[int], Any]) -> None:
    for call, shard, mesh, cuts, both in ranks(4).run(call_a_pipeline):
        assert call.startswith("InputError") and "2 pipeline stages" in call and "step(...)" in call
        assert shard.startswith("InputError") and "step(...)" in shard
        assert mesh.startswith("MeshError") and "pipeline of 2 ranks" in mesh and "first axis 4" in mesh
        assert cuts.startswith("PlanError") and "['x'] do not make 2 stages" in cuts
        assert both.startswith("PlanError: the plan decides baseline, micro_batches: leave them out")
