"""Scaled dot-product attention: batch, heads and queries may be cut (causal ones by a variant), and the whole sequence
by ring attention; grouped queries are cut with their key-value head, or all have one, or by a variant without it."""

from __future__ import annotations

import torch

from autoparallel.layout import REPLICATE, shard
from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import AxisStrategy, Dims, Exchange, Rule

aten = torch.ops.aten


@rule_for(aten.scaled_dot_product_attention.default)
def attention(op: OpView) -> Rule | None:
    q, k, v = op.shapes[:3]
    rank = len(q)
    if not len(k) == len(v) == rank or q[:-2] != op.out.shape[:-2]:
        return None
    *_, s, d = q
    t, e = k[-2], v[-1]
    heads = {x[-3] for x in (q, k, v)} - {1} if rank > 2 else set()
    mask = op.arg("attn_mask")
    named = [*(f"b{i or ''}" for i in range(rank - 3)), "h"][: rank - 2]
    rows = () if op.arg("is_causal") else (("s", s),)  # a causal mask counts them
    sizes = {f: n for f, n in (*zip(named, q, strict=False), *rows) if n != 1}
    *leading, queries = (f if f in sizes else None for f in (*named, "s"))
    inputs: list[Dims] = [(*leading, queries, None)]
    inputs += [(*(f if n != 1 else None for f, n in zip(leading, x, strict=False)), None, None) for x in (k, v)]
    saves, extra = frozenset({0, 1, 2}), {0: 4.0 / d}  # the logarithm of each row's sum
    if mask is not None:
        if mask.dtype == torch.bool:  # torch makes numbers of it
            extra[3] = float(op.inputs[0].dtype.itemsize)
        else:
            saves |= {3}
        own = inputs[0][rank - len(mask.shape) :]
        inputs.append(tuple(f if n != 1 else None for f, n in zip(own, mask.shape, strict=True)))
    even = {"h": tuple(sorted(heads, reverse=True))} if len(heads) > 1 else {}
    dropout = float(op.arg("dropout_p") or 0.0)
    equivalent = rank == 4 and mask is None and not dropout and s == t != 1 and _match(op)
    causal = 0.5 if op.arg("is_causal") else 1.0
    points = float(op.inputs[0].num_elements // d * t)
    return Rule(
        tuple(inputs), (inputs[0],), sizes, even=even,
        linear=() if dropout else (frozenset({2}),), flops=2.0 * points * (d + e) * causal,
        op_class="attention", saves=saves, saves_output=True, random=dropout > 0, backward_flops=2.5, extra_bytes=extra,
        variants=(*_of_heads(op, inputs), *(_of_sequence(op) if equivalent else ())),
    )


def _match(op: OpView) -> bool:
    """Whether queries and keys have the same batch and heads, but for grouped heads."""
    q, k, v = (x[: 1 if op.arg("enable_gqa") else 2] for x in op.shapes[:3])
    return q == k == v


def _of_heads(op: OpView, inputs: list[Dims]) -> tuple[AxisStrategy, ...]:
    """Shards of grouped queries' heads, of any number, which find theirs among all heads of keys and values."""
    keys, values = (x[-3] if op.arg("enable_gqa") and len(x) == 4 else 1 for x in op.shapes[1:3])
    if not 1 < keys == values < op.shapes[0][1]:
        return ()
    cut = tuple(shard(dims.index("h")) if "h" in dims and place not in (1, 2) else REPLICATE
                for place, dims in enumerate(inputs))
    return (AxisStrategy("heads", cut, (shard(1),), "h", variant="heads", inner=True),)


def _of_sequence(op: OpView) -> tuple[AxisStrategy, ...]:
    """Shards of the sequence: of a causal one each rank's queries meet all keys up to their own; or keys and values
    are cut too, and go around, which asks for as many heads of values as of keys. Where shards of a causal ring are
    halved, two chunks of each move before and after, so that all ranks have equal work."""
    causal, cut, length = bool(op.arg("is_causal")), shard(2), op.shapes[0][2]
    sizes = [float(op.inputs[i].dtype.itemsize) for i in range(3)]
    messages = [Exchange("ring", i, sizes[i], 1, 1) for i in (1, 2)]
    messages += [Exchange("ring_gradients", i, max(4.0, sizes[i]), 0, 1) for i in (1, 2)]    # summed in float32
    if causal:    # queries and the result; in backward it, its gradient and that of the queries; keys and values
        messages += [Exchange("neighbours", i, size, *times) for i, (size, times) in enumerate(
            zip(sizes, ((2, 3), (1, 1), (1, 1)), strict=True))]
    ring = AxisStrategy("ring", (cut, cut, cut), (cut,), "s", (length,), "ring", tuple(messages),
                        frozenset({"ring", "queries"} if causal else {"ring"}), triangular=causal, halved=length)
    queries = AxisStrategy("queries", (cut, REPLICATE, REPLICATE), (cut,), "s", variant="queries", triangular=True)
    around = (ring,) if op.shapes[1][1] == op.shapes[2][1] else ()
    return (queries, *around) if causal else around
