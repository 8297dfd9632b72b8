"""Cost models: numbers in, seconds and bytes out. No torch. See README.md."""

from cost_models import calibrate, collectives, compute, memory, timeline
from cost_models.cluster import Cluster, Correction, Device, Group, Host, Link, Protocol, Tiles
from cost_models.description import known_clusters
from cost_models.errors import AutoparallelError, ClusterError, TimelineError

__all__ = [
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
