"""The parts of a program that is compiled block by block: a few equal blocks in a row, and what lies between them.

Communication of parameters stays between the parts, where it is issued early and awaited late: inside a part it would
end with the part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from torch.fx import Graph
from torch.fx import Node as FxNode

from autoparallel.kernels import async_communication, gathered_once, regather
from autoparallel.kernels.collectives import item
from autoparallel.lower.parameter_reads import is_read

_ENDS = (async_communication.end, regather.end)
_PARAMETERS = (async_communication.begin_gathers, async_communication.begin_reductions, *_ENDS,
               regather.begin_gathers, regather.gather, gathered_once.begin_gathers, gathered_once.gather)


#: Blocks of one part: a call of compiled code takes the host about 0.1 ms, and a compiler's time grows with its graph.
TOGETHER = 2


def parts_of(graph: Graph, by_block: bool = True, neighbours: bool = True) -> Callable[[FxNode], object]:
    """Returns a function: node -> the part of the program that it is compiled with: its block, or with ``neighbours``
    the group of blocks by `together`; "" outside blocks (or if not ``by_block``); None if it is left out of compiled
    graphs, as communication of parameters is."""
    blocks = [block for node in graph.nodes if (block := node.meta.get("block"))] if by_block else []
    parts = together(blocks) if neighbours else {block: block for block in blocks}

    def part_of(node: FxNode) -> object:
        received = node.target is item and isinstance(node.args[0], FxNode) and node.args[0].target in _ENDS
        if received or node.target in _PARAMETERS or is_read(node):
            return None
        return parts.get(node.meta.get("block") or "", "")

    return part_of


def together(blocks: Iterable[str]) -> dict[str, str]:
    """The part of each block: two neighbours', or three's, where all blocks of a list divide so, that all parts are
    equal; else its own.

    >>> together(["h.3", "h.4", "h.5", "h.6", "head"])
    {'head': 'head', 'h.3': 'h.3', 'h.4': 'h.3', 'h.5': 'h.5', 'h.6': 'h.5'}
    """
    lists, found = dict[str, dict[int, str]](), dict[str, str]()
    for block in blocks:
        if match := re.fullmatch(r"(.*?)(\d+)", block):
            lists.setdefault(match[1], {})[int(match[2])] = block
        else:
            found[block] = block
    for numbered in lists.values():
        size = next((n for n in (TOGETHER, TOGETHER + 1) if len(numbered) % n == 0), 1)
        for place, number in enumerate(order := sorted(numbered)):
            found[numbered[number]] = numbered[order[place // size * size]]
    return found
