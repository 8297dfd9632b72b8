"""Networks that are no tree of levels (tori, as of TPUs and Trainium), refused by name before anything is priced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cost_models.errors import ClusterError

#: Words in names of machines, devices, links and keys by which such a network is known.
_WORDS = re.compile(r"(?:^|[^a-z])(tpu|torus|tori|ici|trainium|trn1n?|trn2|inferentia)(?:[^a-z]|$)")
_ASK = ("required: levels of links, each of which joins neighbours of any order at one bandwidth (hosts, racks, "
        "sites): describe GPUs by them (docs/guides/topologies.md). A torus is not such a tree, since the time of a "
        "collective on it depends on the mesh's shape along its rings; plan for it with its vendor's tools")


def is_torus(name: str) -> bool:
    """Whether a name is of a machine or link of that kind.

    >>> [name for name in ("tpu-v4", "v5p TPU", "NVLink 4", "3D torus", "ICI", "torusless") if is_torus(name)]
    ['tpu-v4', 'v5p TPU', '3D torus', 'ICI']
    """
    return _WORDS.search(name.lower()) is not None


def refuse(name: str) -> None:
    """Raises ClusterError for the name of a machine whose network is a torus."""
    if is_torus(name):
        raise ClusterError(f"cluster {name[:60]!r} is a torus: links that are no tree of levels are not modelled; "
                           f"{_ASK}")


def refuse_described(data: Mapping[str, Any], where: str) -> None:
    """Raises ClusterError for a description whose names or keys are of a torus, or that gives a topology by a word."""
    device, links = data.get("device"), data.get("links")
    tables = [("", data), ("device.", device), *((f"links.{number}.", link) for number, link in
                                                 enumerate(links if isinstance(links, list) else ()))]
    for path, table in tables:
        if not isinstance(table, Mapping):
            continue
        for key, value in table.items():
            said = str(value.get("value", "") if isinstance(value, Mapping) else value)
            if is_torus(key) or (key in ("name", "topology") and is_torus(said)):
                raise ClusterError(f"{where}: {path}{key} = {said[:60]!r} is of a torus, which is not modelled; {_ASK}")
            if key == "topology":
                raise ClusterError(f"{where}: {path}topology = {said[:60]!r}: a topology is not named but described; "
                                   f"{_ASK.split('. A torus')[0]}")


__all__ = ["is_torus", "refuse", "refuse_described"]
