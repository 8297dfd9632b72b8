"""Cost models: numbers in, seconds and bytes out. No torch. See README.md.

Names are imported when first used: errors and plan files need no numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cost_models.errors import AutoparallelError, ClusterError, TimelineError

if TYPE_CHECKING:
    from cost_models import calibrate, collectives, compute, memory, timeline
    from cost_models.cluster import Cluster, Correction
    from cost_models.description import LOCAL_CPU, known_clusters
    from cost_models.devices import Device, Host, Tiles
    from cost_models.links import Group, Link, Protocol

_HOMES = {**dict.fromkeys(("Cluster", "Correction"), "cost_models.cluster"),
          **dict.fromkeys(("Device", "Host", "Tiles"), "cost_models.devices"),
          **dict.fromkeys(("Group", "Link", "Protocol"), "cost_models.links"),
          **dict.fromkeys(("LOCAL_CPU", "known_clusters"), "cost_models.description")}
_MODULES = ("calibrate", "collectives", "compute", "memory", "timeline")

__all__ = [
    "LOCAL_CPU",
    "AutoparallelError",
    "Cluster",
    "ClusterError",
    "Correction",
    "Device",
    "Group",
    "Host",
    "Link",
    "Protocol",
    "Tiles",
    "TimelineError",
    "calibrate",
    "collectives",
    "compute",
    "known_clusters",
    "memory",
    "timeline",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"cost_models.{name}")
    raise AttributeError(f"module 'cost_models' has no attribute {name!r}")
