"""Layouts by block, folded to one row for each part of a block: norms, attention, MLP, experts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoparallel.plans.plan import BlockLayouts, Plan
from autoparallel.plans.reports.words import AxisWords
from autoparallel.plans.roles import products_of

#: Parts of a model by words in a module's path, the first that fits; "rest" for all others.
PARTS = (
    ("norms", ("norm", "ln_", "ln1", "ln2", "layernorm")),
    ("experts", ("expert", "moe", "router", "block_sparse")),
    ("attention", ("attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj")),
    ("MLP", ("mlp", "ffn", "feed_forward", "feedforward", "intermediate", "fc1", "fc2", "dense", "wi", "wo")),
    ("embedding", ("embed", "wte", "wpe", "patch")),
    ("head and loss", ("head", "classifier", "logits", "loss", "cross_entropy")),
)
_PRODUCTS = {"data": "batch", "context": "sequence", "tensor": "weights", "expert": "experts", "replicated": "whole"}
_LAYOUTS = {"S(0)": "batch", "S(1)": "sequence", "R": "whole", "I": "whole", "P": "partial sums"}


@dataclass(frozen=True)
class PartRow:
    """A part of a block: its number of ops, and by mesh axis what they are cut by ("batch", "sequence", "weights",
    ...), most frequent first."""

    part: str
    ops: int
    cut_by: tuple[str, ...]


@dataclass(frozen=True)
class BlockRows:
    """Equal blocks: a title, the first one's path, their number, a row per part, and each op with its strategy and
    result layout."""

    title: str
    first: str
    count: int
    rows: tuple[PartRow, ...]
    lines: tuple[tuple[str, str, str], ...]


def block_rows(plan: Plan, axes: Sequence[AxisWords]) -> tuple[BlockRows, ...]:
    """The blocks of a plan, folded."""
    own = [axis for axis in axes if axis.has_strategies]
    roles = {(product.op, product.strategies, product.layouts): product.roles for product in products_of(plan)}
    return tuple(BlockRows(_title(block.paths), block.paths[0], len(block.paths), _rows(block, len(own), roles),
                           block.lines) for block in plan.blocks)


def _rows(block: BlockLayouts, num_axes: int, roles: dict[tuple[str, tuple[str, ...], tuple[str, ...]], tuple[str, ...]]
          ) -> tuple[PartRow, ...]:
    parts: dict[str, list[tuple[str, ...]]] = {}
    for name, strategy, layout in block.lines:
        op, layouts = name.rsplit(" ", 1)[-1], tuple(layout.split("·"))
        product = roles.get((op, tuple(strategy.split("·")), layouts))
        cut = tuple(_PRODUCTS[role] for role in product) if product else tuple(
            "vocabulary" if one in ("vocabulary", "classes") else _cut_by(at)
            for one, at in zip(strategy.split("·"), layouts, strict=True))
        parts.setdefault(part_of(name), []).append(cut)
    return tuple(PartRow(part, len(cuts), tuple(_most(cut[axis] for cut in cuts if axis < len(cut))
                                                for axis in range(num_axes)))
                 for part, cuts in parts.items())


def part_of(name: str) -> str:
    """The part of a model to which an op belongs, by "module.path op".

    >>> part_of("self_attn.q_proj linear"), part_of("input_layernorm pow"), part_of("add")
    ('attention', 'norms', 'rest')
    """
    low = name.lower()
    return next((part for part, words in PARTS if any(word in low for word in words)), "rest")


def _cut_by(layout: str) -> str:
    return _LAYOUTS.get(layout, "hidden" if layout.startswith("S") else layout)


def _most(words: Iterable[str]) -> str:
    """Most frequent first, "whole" last if there are others; at most three."""
    counted = Counter(words)
    order = sorted(counted, key=lambda word: (word == "whole", -counted[word]))
    return ", ".join(order[:3]) + (", ..." if len(order) > 3 else "")


def _title(paths: Sequence[str]) -> str:
    """The paths of equal blocks, consecutive numbers as a range.

    >>> _title(["h.0", "h.1", "h.2", "h.5"]), _title(["model.vision"])
    ('h.0-2, 5 (4 equal blocks)', 'model.vision')
    """
    if len(paths) == 1:
        return paths[0]
    groups: dict[str, list[int]] = {}
    for path in paths:
        found = re.fullmatch(r"(.*?)(\d+)", path)
        groups.setdefault(found[1] if found else path, []).extend([int(found[2])] if found else [])
    return ", ".join(prefix + _ranges(numbers) for prefix, numbers in groups.items()) + f" ({len(paths)} equal blocks)"


def _ranges(numbers: Sequence[int]) -> str:
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


__all__ = ["BlockRows", "PartRow", "block_rows", "part_of"]
