"""Scaled dot-product attention: batch, heads and queries may be cut (causal ones by a variant), and the whole sequence
by ring attention; grouped queries are cut with their key-value head."""

from __future__ import annotations

import torch

from autoparallel.layout import REPLICATE, shard
from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import Dims, Exchange, Row, Rule

aten = torch.ops.aten


@rule_for(aten.scaled_dot_product_attention.default)
def attention(op: OpView) -> Rule | None:
    q, k, v = op.shapes[:3]
    if len(q) != 4:
        return None
    batch, heads, s, d = q
    kv_heads, t, e = k[1], k[2], v[3]
    mask = op.arg("attn_mask")
    rows = () if op.arg("is_causal") else (("s", s),)  # a causal mask counts them
    sizes = {f: n for f, n in (("b", batch), ("h", heads), *rows) if n != 1}
    b, h, queries = (f if f in sizes else None for f in ("b", "h", "s"))
    inputs: list[Dims] = [(b, h, queries, None), (b, h, None, None), (b, h, None, None)]
    saves, extra = frozenset({0, 1, 2}), {0: 4.0 / d}  # the logarithm of each row's sum
    if mask is not None:
        if mask.dtype == torch.bool:  # torch makes numbers of it
            extra[3] = float(op.inputs[0].dtype.itemsize)
        else:
            saves |= {3}
        own = (b, h, queries, None)[4 - len(mask.shape) :]
        inputs.append(tuple(f if n != 1 else None for f, n in zip(own, mask.shape, strict=True)))
    even = {"h": (heads, kv_heads)} if heads != kv_heads else {}
    dropout = float(op.arg("dropout_p") or 0.0)
    alike = mask is None and not dropout and s == t != 1
    causal = 0.5 if op.arg("is_causal") else 1.0
    points = float(batch * heads * s * t)
    return Rule(
        tuple(inputs), ((b, h, queries, None),), sizes, even=even,
        linear=() if dropout else (frozenset({2}),), flops=2.0 * points * (d + e) * causal,
        op_class="attention", saves=saves, saves_output=True, random=dropout > 0, backward_flops=2.5, extra_bytes=extra,
        variants=_of_sequence(op) if alike else (),
    )


def _of_sequence(op: OpView) -> tuple[Row, ...]:
    """Pieces of the sequence: of a causal one each rank's queries meet all keys up to their own; or keys and values
    are cut too, and go around."""
    causal, cut = bool(op.arg("is_causal")), shard(2)
    messages = tuple(Exchange("ring", i, float(op.inputs[i].dtype.itemsize), 1, 2) for i in (1, 2))
    ring = Row("ring", (cut, cut, cut), (cut,), "s", (op.shapes[0][2],), "ring", messages,
               frozenset({"ring", "queries"} if causal else {"ring"}), triangular=causal)
    queries = Row("queries", (cut, REPLICATE, REPLICATE), (cut,), "s", variant="queries", triangular=True)
    return (queries, ring) if causal else (ring,)
