"""Cost models: numbers in, seconds and bytes out. No torch. See README.md."""

from cost_models import collectives, compute, memory
from cost_models.cluster import Cluster, Device, Group, Host, Link
from cost_models.description import known_clusters
from cost_models.errors import AutoparallelError, ClusterError

__all__ = [
    "AutoparallelError",
    "Cluster",
    "ClusterError",
    "Device",
    "Group",
    "Host",
    "Link",
    "collectives",
    "compute",
    "known_clusters",
    "memory",
]
