"""The mesh that a job runs on, checked against its processes, and the cluster that prices the search for it."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoparallel.errors import MeshError, shown
from autoparallel.kernels import groups
from autoparallel.kernels.host_copies import machine_bytes, process_bytes
from autoparallel.plans import Plan
from autoparallel.runtime.agree import decide_once, made_equally
from autoparallel.runtime.failing import check_groups
from cost_models import LOCAL_CPU, Cluster, known_clusters
from cost_models.cluster import in_hosts_of
from cost_models.description import cluster_of_device

_LOG = logging.getLogger("autoparallel")


def check_mesh(mesh: DeviceMesh | int, plan: Plan | None = None) -> DeviceMesh:
    """The mesh, checked against the world; of a device count with the plan's axes, or one."""
    if not isinstance(mesh, (int, DeviceMesh)) or isinstance(mesh, bool):
        raise MeshError(f"mesh is {shown(mesh)}: give a torch.distributed.DeviceMesh, as init_device_mesh makes, or a "
                        "device count")
    if not dist.is_initialized():
        raise MeshError("no process group: start the program with torchrun, mpirun or srun and call "
                        "autoparallel.init() before autoparallel.compile")
    check_groups()
    world = dist.get_world_size()
    if isinstance(mesh, int):
        if mesh != world:
            raise MeshError(f"{mesh} devices were asked for and the world has {world} ranks: give {world}"
                            f"{f', or start {mesh} processes' if mesh > 0 else ''}")
        shape, names = ((mesh,), ("devices",)) if plan is None else plan.axes
        if math.prod(shape) != mesh:
            raise MeshError(f"the plan is for a mesh of {shape}, and {mesh} devices were asked for: start "
                            f"{math.prod(shape)} processes, or plan again")
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        if plan is not None and plan.devices:
            return groups.ordered_mesh(kind, plan.devices, shape, names)
        return init_device_mesh(kind, shape, mesh_dim_names=names)
    if mesh.size() != world:
        raise MeshError(f"the mesh has {mesh.size()} devices {tuple(mesh.shape)} and the world {world} ranks: "
                        "every rank must be on the mesh")
    if groups.ascends(mesh):
        groups.check_order(mesh)
    else:    # torch sorts the ranks of a group: some are at their place, and go on to wait for the others
        made_equally("the order of the mesh", lambda: groups.check_order(mesh), lambda _: "")
    if plan is not None and plan.devices and mesh.mesh.flatten().tolist() != list(plan.devices):
        _LOG.warning("the plan takes the devices of an unequal cluster in the order %s, and the mesh has the ranks %s: "
                     "autoparallel.init(plan=plan) makes the mesh so; here steps may take longer than planned",
                     list(plan.devices), mesh.mesh.flatten().tolist())
    return mesh


#: No host has more GPUs: a link that joins more joins the hosts of a rack.
_MOST_ON_HOST = 16


def cluster_of(mesh: DeviceMesh, cluster: Cluster | str | Path | None, backend: str = "eager") -> Cluster:
    """The cluster that prices the search, the same on all ranks: a `Cluster` as it is given; else the description of
    that name or file, or of rank 0's device, with the software profile of the backend and hosts of the job's size."""
    if isinstance(cluster, Cluster):
        if cluster.num_devices != mesh.size():
            raise MeshError(f"the cluster has {cluster.num_devices} devices and the mesh {mesh.size()}")
        return cluster
    return decide_once(lambda: suggested(mesh, cluster, backend, int(os.environ.get("LOCAL_WORLD_SIZE", "0"))))


def suggested(mesh: DeviceMesh, cluster: str | Path | None, backend: str, on_host: int) -> Cluster:
    """The cluster of that name or file, or of this rank's device; ``on_host``: processes of the job on a host, as its
    launcher says (0: not known)."""
    name = _known_name(mesh.device_type) if cluster is None else cluster
    found = Cluster.load(name, num_devices=mesh.size())
    if cluster is None and mesh.device_type == "cpu":
        return _with_memory(found, on_host or mesh.size())
    if found.profile is not None and backend == "inductor":
        found = Cluster.load(name, num_devices=mesh.size(), software="torch-compile")
    each = found.devices_per_host
    if not 0 < on_host < min(each, mesh.size()) or found.links[0].num_devices > _MOST_ON_HOST or found.is_unequal:
        return found
    _LOG.warning("hosts of %s have %d devices, and this job has %d processes a host: planned as hosts of %d, with NICs "
                 "and memory in proportion. Describe yours (autoparallel calibrate --links) and give it as cluster=",
                 found.name, each, on_host, on_host)
    return in_hosts_of(found, on_host)


def _with_memory(cluster: Cluster, on_host: int) -> Cluster:
    """The cluster of CPU processes with the memory of this machine, which has so many of them."""
    return replace(cluster, device=replace(cluster.device, memory_bytes=process_bytes(on_host)),
                   host=replace(cluster.host, memory_bytes=machine_bytes()))


def _known_name(device_type: str) -> str:
    if device_type == "cpu":
        return LOCAL_CPU
    name = torch.cuda.get_device_name() if device_type == "cuda" else device_type
    found = cluster_of_device(name)
    if found is None:
        raise MeshError(f"no description of a cluster of {name!r} is known: give cluster=, one of "
                        f"{', '.join(known_clusters())} if it is like one, or the path of a TOML file "
                        "(autoparallel calibrate measures these devices and writes one)")
    return found


__all__ = ["check_mesh", "cluster_of", "suggested"]
