"""Ascend rank tables (1.0), read: the hosts of a job. (`manifest.py` writes them.)"""

from __future__ import annotations

import json
from pathlib import Path

from autoparallel.errors import LaunchError


def table_hosts(path: Path) -> tuple[str, ...]:
    """The hosts of a rank table (their ``server_id``), in the order of their first ranks.

    Raises LaunchError for a file that cannot be read, or whose devices do not have the ranks 0, 1, 2, ....
    """
    try:
        ranks = {str(server["server_id"]): [int(device["rank_id"]) for device in server["device"]]
                 for server in json.loads(path.read_text())["server_list"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(f"{path} is no rank table: {type(error).__name__}: {error}\n  Required is JSON with a "
                          "server_list, whose servers have a server_id and devices with a rank_id.") from error
    numbers = sorted(rank for mine in ranks.values() for rank in mine)
    if not numbers or numbers != list(range(len(numbers))) or not all(ranks.values()):
        raise LaunchError(f"the rank table {path} has the ranks {numbers}: 0, 1, 2, ..., some on each server, are "
                          "required")
    return tuple(sorted(ranks, key=lambda host: min(ranks[host])))


__all__ = ["table_hosts"]
