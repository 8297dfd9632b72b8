"""Checks of what is planned or compiled: the model, its example call, the cluster, the mesh axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from autoparallel.errors import CaptureError, ClusterError, InputError, MeshError, shown
from autoparallel.planning.options import are_counts
from cost_models import Cluster

#: Where torch has modules with packed weights, as quantize_dynamic and convert make them.
_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
#: Modules that are distributed already.
PARALLEL = frozenset({"autoparallel.runtime.module.ParallelModule",
                      "torch.nn.parallel.distributed.DistributedDataParallel",
                      "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"})


def _check_kinds(model: nn.Module) -> None:
    """Raises CaptureError for modules of torch.jit, quantized ones, and ones that are on several ranks already."""
    for name, part in model.named_modules():
        kind, place = type(part), f" ({name})" if name else ""
        if issubclass(kind, torch.jit.ScriptModule):
            raise CaptureError(f"the model has a {kind.__name__} of torch.jit{place}: give the original module")
        if kind.__module__.startswith(_QUANTIZED):
            raise CaptureError(f"the model has a quantized {kind.__name__}{place}, of {kind.__module__}, whose weights "
                               "are packed for one device\n  Give the module before it was quantized (for smaller "
                               "weights model.to(torch.bfloat16)).")
        if not PARALLEL.isdisjoint(f"{base.__module__}.{base.__name__}" for base in kind.__mro__):
            raise CaptureError(f"the model has a {kind.__name__}{place}, which is on several ranks already: give the "
                               "module that it was made of")


def check_call(model: Any, inputs: Any, keywords: Any) -> None:
    """Raises CaptureError if ``model`` is not a plain module, InputError if the example arguments have the wrong
    types."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"the model is {shown(model)}: give an instance of torch.nn.Module; of a function, write a "
                           "module whose forward calls it")
    _check_kinds(model)
    lazy = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)]
    if lazy:
        raise CaptureError(f"the shapes of {', '.join(lazy[:3])} are not known before the model's first call\n"
                           "  Call the model once with real inputs, model(x), before it is planned or compiled.")
    if cut := [name for name, p in model.named_parameters() if isinstance(p, DTensor)]:
        raise CaptureError(f"parameters of the model are DTensors already ({', '.join(cut[:3])}): give the model "
                           "before fully_shard or parallelize_module, with whole parameters; a part of a parallel "
                           "module runs by an argument of the whole model's forward")
    if isinstance(inputs, Mapping):
        raise InputError("example_inputs is a mapping: give keyword arguments as example_kwargs")
    if inputs is not None and (isinstance(inputs, (Tensor, str)) or not isinstance(inputs, Sequence)):
        raise InputError(f"example_inputs is of type {type(inputs).__name__}: give a tuple of the call's arguments, "
                         "(x,) for one argument x")
    if keywords is not None and not (isinstance(keywords, Mapping) and all(isinstance(k, str) for k in keywords)):
        raise InputError(f"example_kwargs is of type {type(keywords).__name__}: give a dict of the call's keyword "
                         "arguments by name, positional ones as example_inputs")


def check_cluster(cluster: Any) -> Cluster:
    """The cluster of a name or a file; a `Cluster` is returned as it is. Raises ClusterError."""
    if isinstance(cluster, DeviceMesh):
        shape, names = tuple(cluster.shape), cluster.mesh_dim_names
        axes = f"mesh_shape={shape}" + (f", axis_names={tuple(names)}" if names else "")
        raise ClusterError("the cluster is a DeviceMesh, which does not say how fast its devices and links are\n  Give "
                           "the name of a known cluster, or a file that autoparallel calibrate has written, and axes "
                           f"as options: plan(model, Cluster.load(\"h100-sxm\", num_devices={cluster.size()}), {axes}, "
                           "...); autoparallel.compile takes a mesh.")
    return cluster if isinstance(cluster, Cluster) else Cluster.load(cluster)


def check_axes(shape: Any, names: Any, num_devices: int) -> None:
    """Raises MeshError for an invalid mesh shape or axis names, ClusterError if the mesh exceeds the cluster."""
    if shape is not None:
        if not are_counts(shape):
            raise MeshError(f"mesh_shape is {shown(shape)}: give the sizes of the axes, each 1 or more, for example "
                            "(2, 4) or (8,)")
        if math.prod(shape) > num_devices:
            raise ClusterError(f"a mesh of {tuple(shape)} needs {math.prod(shape)} devices, the cluster has "
                               f"{num_devices}: load it with num_devices={math.prod(shape)}")
    if names is not None:
        if not isinstance(names, Collection) or isinstance(names, str) or not all(isinstance(n, str) for n in names):
            raise MeshError(f"axis_names is {shown(names)}: give one name for each axis, for example ('data', 'model')")
        if len(set(names)) < len(names):
            raise MeshError(f"axis_names {tuple(names)} has a name twice: pins and reports need another for each axis")
        if shape is not None and len(names) != len(shape):
            raise MeshError(f"{len(names)} axis names {tuple(names)} for a mesh of {tuple(shape)}: give one for each "
                            "axis")


__all__ = ["check_axes", "check_call", "check_cluster"]
