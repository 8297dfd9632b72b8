"""Cost models: numbers in, seconds and bytes out. No torch. See README.md."""

from cost_models import collectives, compute, memory
from cost_models.cluster import Cluster, Device, Group, Link, known_clusters
from cost_models.errors import AutoparallelError, ClusterError

__all__ = [
    "AutoparallelError",
    "Cluster",
    "ClusterError",
    "Device",
    "Group",
    "Link",
    "collectives",
    "compute",
    "known_clusters",
    "memory",
]
