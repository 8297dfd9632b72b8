"""Torch's wrappers for data parallelism, and converters, are refused by name; the parallel module stays as it was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.ao.quantization import prepare, quantize_dynamic
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import autoparallel
from autoparallel.errors import InputError
from tests.support.ranks import mesh_of


def wrapped() -> tuple[list[str], bool]:
    torch.manual_seed(0)
    parallel = autoparallel.compile(nn.Linear(8, 4), mesh_of(2), example_inputs=(torch.ones(4, 8),), baseline="ddp")
    expected, told = parallel(torch.ones(4, 8)).full_tensor(), []
    for wrap in (DistributedDataParallel, partial(fully_shard, mesh=mesh_of(2)),
                 partial(FullyShardedDataParallel, device_id=torch.device("cpu"))):
        try:
            wrap(parallel)
            told.append("no error")
        except InputError as error:
            told.append(str(error))
    assert not getattr(parallel, "_is_fsdp_managed_module", False)  # as transformers' generate asks
    names = [name for name, _ in parallel.named_parameters()]
    return told, names == ["weight", "bias"] and torch.equal(parallel(torch.ones(4, 8)).full_tensor(), expected)


def test_wrappers_are_refused(ranks: Any) -> None:
    for (ddp, fully, fsdp), unchanged in ranks(2).run(wrapped):
        assert ddp.startswith("DistributedDataParallel cannot wrap a parallel module")
        assert fully.startswith("fully_shard cannot wrap") and fsdp.startswith("FullyShardedDataParallel cannot wrap")
        assert 'baseline="ddp" or "fsdp"' in ddp and unchanged


@pytest.mark.parametrize(("convert", "name"), [
    (quantize_dynamic, "torch.ao.quantization"), (prepare, "torch.ao.quantization"),
    (torch.jit.script, "torch.jit.script"),
])
def test_converters_are_refused(mesh_of_one: Any, convert: Callable[[nn.Module], Any], name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    parallel = autoparallel.compile(model, mesh_of_one, example_inputs=(torch.ones(4, 8),))
    with pytest.raises(InputError, match=f"{name} does not convert a parallel module"):
        convert(parallel)
    assert parallel(torch.ones(4, 8)).shape == (4, 4)


def test_a_trace_by_fx_is_refused(mesh_of_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """(It ended in torch's error of a proxy that is iterated.)"""
    parallel = autoparallel.compile(nn.Linear(8, 4), mesh_of_one, example_inputs=(torch.ones(4, 8),))
    for traced in (parallel, nn.Sequential(parallel)):
        with pytest.raises(InputError, match=r"called within torch\.fx"):
            torch.fx.symbolic_trace(traced)
    trace = torch.fx.Tracer.trace
    monkeypatch.setattr(torch.fx.Tracer, "trace", lambda *args, **options: trace(*args, **options))    # as others do
    with pytest.raises(InputError, match=r"called within torch\.fx"):
        torch.fx.symbolic_trace(parallel)
    assert repr(parallel).startswith("ParallelModule(")


@pytest.mark.parametrize(("send", "name"), [
    (lambda p: dist.all_reduce(p.grad), "all_reduce"), (lambda p: dist.broadcast(p.data, 0), "broadcast"),
    (lambda p: dist.all_gather([torch.empty_like(p.grad)], p.grad), "all_gather"),
    (lambda p: dist.all_reduce_coalesced([p.grad]), "all_reduce"),
])
def test_collectives_of_gradients_and_parameters_are_refused(mesh_of_one: Any, send: Callable[[Any], Any], name: str
                                                             ) -> None:
    """As scripts write them that average gradients by hand: those of a parallel module are of the whole batch."""
    parallel = autoparallel.compile(nn.Linear(8, 4), mesh_of_one)
    parallel(torch.ones(4, 8)).sum().backward()
    with pytest.raises(InputError, match=rf"{name} is given a DTensor \[4, 8\].*\n  Leave the call out"):
        send(parallel.weight)


def test_what_scripts_read_of_a_wrapper_is_told(mesh_of_one: Any) -> None:
    """As AttributeErrors, since libraries ask with hasattr; a model's own is read."""
    parallel: Any = autoparallel.compile(nn.Linear(8, 4), mesh_of_one)
    for name, what in {"module": "write parallel", "no_sync": "gradients of several", "join": "leave"}.items():
        assert not hasattr(parallel, name)
        with pytest.raises(AttributeError, match=rf"'Linear' object has no attribute '{name}'\n.*{what}"):
            getattr(parallel, name)
    assert autoparallel.compile(nn.Sequential(OrderedDict(module=nn.Linear(8, 4))), mesh_of_one).module is not None
