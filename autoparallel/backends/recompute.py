"""What backward computes, again or by itself, as tags on the joint graph that the partitioner reads."""

from __future__ import annotations

import operator

from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.utils.checkpoint import CheckpointPolicy

from autoparallel.backends.traced import STARTS, WAIT, gathers_of, is_move, read_by_moves
from autoparallel.kernels.recomputed import KEPT
from autoparallel.kernels.ring import MOVING, RING

#: A larger number than any block's: the partitioner saves what a region of a larger number reads from a smaller one.
_GATHERS = 2**20


def tag_collectives_of_backward(joint: GraphModule) -> None:
    """Collectives of backward stay there, where the other ranks have them: of a rank whose gradient is all zeros (no
    query of it sees these keys) they do not depend on the loss, and would be issued by forward."""
    for node in joint.graph.nodes:
        if node.target in STARTS and _is_backward(node):
            node.meta["partitioner_tag"] = "must_be_in_backward"


def tag_gathers(joint: GraphModule) -> None:
    """Backward gathers the marked parameters again (ZeRO-3), and repeats what only moves the gathered tensor."""
    gathers = gathers_of(joint.graph)
    for start in gathers:
        for node in read_by_moves(start, lambda user: is_move(user) or user.target is WAIT or user in gathers):
            _tag(node, CheckpointPolicy.MUST_RECOMPUTE, _GATHERS)


def tag_blocks(joint: GraphModule, mode: str) -> None:
    """Backward recomputes blocks (``mode`` "full"), all of them but attention ("all_but_attention"), or all but
    products, attention and collectives ("selective"). A block's results, which other ops read, are saved where backward
    needs them."""
    for node in joint.graph.nodes:
        run = _run(node)
        if run is None:
            continue
        kept = mode in KEPT and _is_kept(node, mode)
        leaves = any(_run(user) != run for user in node.users if not _is_backward(user))
        policy = CheckpointPolicy.MUST_SAVE if kept or leaves else CheckpointPolicy.MUST_RECOMPUTE
        _tag(node, policy, run + 1)


def _tag(node: FxNode, policy: CheckpointPolicy, region: int) -> None:
    node.meta["recompute"], node.meta["ac_graph_id"] = policy, region


def _run(node: FxNode) -> int | None:
    """The number of the run of a recomputed block that a forward node belongs to."""
    found: int | None = (node.meta.get("custom") or {}).get("recomputed")
    return None if _is_backward(node) else found


def _is_backward(node: FxNode) -> bool:
    return node.op == "output" or node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def _is_kept(node: FxNode, mode: str) -> bool:
    """Whether a mode saves an op's result, or each of its several. Of ring attention it is the result of all rounds."""
    if _is_marked(node, RING):
        op = node.args[0] if node.target is operator.getitem else node    # of several results, together
        results = [user for user in op.users if user.target is operator.getitem] or [op]  # type: ignore[union-attr]
        return not all(_is_marked(user, RING) for one in results for user in one.users)
    if _is_marked(node, MOVING):
        return False
    if node.target is operator.getitem:
        return _is_kept(node.args[0], mode)  # type: ignore[arg-type]
    name = node.target._schema.name if hasattr(node.target, "_schema") else ""
    return name.startswith(KEPT[mode]) or (mode == "selective" and (node.target in STARTS or node.target is WAIT))


def _is_marked(node: FxNode, name: str) -> bool:
    """Whether a node is of the forward of what has this mark (`kernels.tracing.marked`)."""
    return not _is_backward(node) and bool((node.meta.get("custom") or {}).get(name))
