"""Facts of the planned model that its strategies do not tell: shapes, heads, experts, where pipeline stages begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model that rules of thumb and exported files need.

    ``inputs``, ``parameters``: shapes by name, of the whole batch and of whole parameters. ``dtype``: of most
    parameters' elements. ``heads``: of the first attention (0: none). ``experts``: of the first mixture (0: none).
    ``stage_starts``: of pipeline stages 1, 2, ... the module path of the first op, and the share of its
    repeated block's ops that come before it (0 outside blocks)."""

    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtype: str = "float32"
    heads: int = 0
    experts: int = 0
    stage_starts: tuple[tuple[str, float], ...] = ()
