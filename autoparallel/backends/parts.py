"""The parts of a program that is compiled block by block: blocks, and what lies between them.

Communication of parameters stays between the parts, where it is issued early and awaited late: inside a part it would
end with the part.
"""

from __future__ import annotations

from torch.fx import Node as FxNode

from autoparallel.kernels import async_communication, regather
from autoparallel.kernels.collectives import item
from autoparallel.lower.parameter_reads import is_read

_ENDS = (async_communication.end, regather.end)
_PARAMETERS = (async_communication.begin_gathers, async_communication.begin_reductions, *_ENDS,
               regather.begin_gathers, regather.gather)


def part_of(node: FxNode) -> object:
    """The part of a program that an op is compiled with: the path of its block, "" outside blocks; None if it is left
    out of compiled graphs, as communication of parameters is."""
    received = node.target is item and isinstance(node.args[0], FxNode) and node.args[0].target in _ENDS
    if received or node.target in _PARAMETERS or is_read(node):
        return None
    return node.meta.get("block") or ""
