"""Intermediate outputs that Hugging Face's models collect in lists (router logits, attention weights): a copied block
appends to these lists, as the block that was traced did."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

#: Values appended by a call, by the name of the list.
Added = dict[str, list[Any]]


class CollectedOutputs:
    """The lists, by name, of the model that runs now, and their lengths; none where nothing is collected."""

    def __init__(self) -> None:
        module = sys.modules.get("transformers.utils.output_capturing")
        collector = module._active_collector.get() if module is not None else None
        self._lists: Mapping[str, list[Any]] = {
            name: value for name, value in (collector or {}).items() if type(value) is list}
        self._lengths = {name: len(value) for name, value in self._lists.items()}

    @property
    def names(self) -> Sequence[str]:
        """Names of all lists, in order."""
        return tuple(sorted(self._lists))

    def added(self) -> Added:
        """The values appended since this was made."""
        found = {name: value[self._lengths[name]:] for name, value in self._lists.items()}
        return {name: values for name, values in found.items() if values}

    def add(self, values: Added) -> None:
        """Add to the lists as they were when this was made, in place of what was added since."""
        for name, some in self._lists.items():
            some[self._lengths[name]:] = values.get(name, [])


__all__ = ["Added", "CollectedOutputs"]
