"""Which of torch's tensor-parallel styles each module of a plan has: columns, rows, or whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autoparallel.plans import Plan
from autoparallel.plans.roles import parameters_of

_EMBEDDING, _LINEAR = "embedding", "linear"


@dataclass
class Styles:
    """Of tensor-parallel axes, taken as one. ``columns``, ``rows``: nn.Linear modules whose results stay cut, and those
    that take them. ``whole_columns``, ``whole_rows``: those whose results, or arguments, are whole. ``embeddings``: cut
    by vocabulary. ``head``: the columns of the loss's logits. ``norms``: cut along the sequence. ``inside``: modules
    between norms. ``left``: products that torch has no style for, which every rank computes whole."""

    columns: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    whole_columns: list[str] = field(default_factory=list)
    whole_rows: list[str] = field(default_factory=list)
    embeddings: list[str] = field(default_factory=list)
    head: str = ""
    norms: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def any(self) -> bool:
        return bool(self.columns or self.rows or self.whole_columns or self.whole_rows or self.embeddings or self.head)


@dataclass(frozen=True)
class _Line:
    module: str
    op: str
    strategy: str
    layout: str


def styles_of(plan: Plan, axes: Sequence[int]) -> Styles:
    """The styles of modules on these axes; products that are cut in two ways over them have none."""
    found, stored = Styles(), parameters_of(plan)
    for block in plan.blocks:
        for path in block.paths:
            lines = list(_lines(block.lines, "" if path == "outside blocks" else path, axes))
            cut = {parent for parent in {_parent(line.module) for line in lines} if _stays_cut(lines, parent)}
            for line in lines:
                alone = sum(other.module == line.module for other in lines) == 1  # as in an nn.Linear
                _sort(found, line, _parent(line.module) in cut, stored, axes, lines if alone else [])
            if path != "outside blocks":
                parts = list(dict.fromkeys(line.module[len(path) + 1:].split(".")[0] for line in lines
                                           if line.module.startswith(path + ".")))
                norms = {part for part in parts if "norm" in part or part.startswith("ln_")}
                found.norms += [f"{path}.{part}" for part in parts if part in norms]
                found.inside += [f"{path}.{part}" for part in parts if part not in norms]
    return found


def _lines(lines: tuple[tuple[str, str, str], ...], path: str, axes: Sequence[int]) -> Iterator[_Line]:
    for name, strategy, layout in lines:
        *module, op = name.split(" ")
        yield _Line(".".join(filter(None, (path, *module))), op, _on(strategy.split("·"), axes),
                    _on(layout.split("·"), axes))


def _on(values: Sequence[str], axes: Sequence[int]) -> str:
    """The value on all axes, or "mixed".

    >>> _on(("b0", "n", "n"), [1, 2]), _on(("n", "k"), [0, 1])
    ('n', 'mixed')
    """
    found = {values[axis] for axis in axes}
    return found.pop() if len(found) == 1 else "mixed"


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _stays_cut(lines: list[_Line], parent: str) -> bool:
    """Whether a module takes whole values, cuts them by columns and ends with rows, all values between cut."""
    inside = [line for line in lines if (line.module + ".").startswith(parent + ".") and parent]
    first = next((number for number, line in enumerate(inside) if line.op == _LINEAR and line.strategy == "n"), None)
    last = next((number for number, line in enumerate(inside) if line.op == _LINEAR and line.strategy == "k"), None)
    if first is None or last is None or last < first or last != len(inside) - 1:
        return False
    return all(line.layout[0] == "S" for line in inside[first:last]) and first == 0


def _sort(found: Styles, line: _Line, cut: bool, stored: dict[str, tuple[str, ...]], axes: Sequence[int],
          lines: list[_Line]) -> None:
    """``lines``: of the same block; none if the module has other ops too."""
    if line.strategy in ("repeat", "part"):
        return
    weight = stored.get(f"{line.module}.weight", ())
    placement = _on(weight, axes) if weight else ""
    if line.op == _EMBEDDING and line.layout == "P" and placement == "S(0)" and not _is_shared(line, stored):
        found.embeddings.append(line.module)
    elif lines and line.op == _LINEAR and line.strategy == "n" and placement == "S(0)":
        if _is_head(line, lines):
            found.head = line.module
        else:
            (found.columns if cut else found.whole_columns).append(line.module)
    elif lines and line.op == _LINEAR and line.strategy == "k" and placement == "S(1)":
        (found.rows if cut else found.whole_rows).append(line.module)
    elif line.op in (_LINEAR, _EMBEDDING, "autoparallel.linear_sections", "autoparallel.routed_experts", "conv1d",
                     "conv2d", "conv3d"):
        found.left.append(f"{line.module} {line.op}".strip())


def _is_shared(line: _Line, stored: dict[str, tuple[str, ...]]) -> bool:
    """Whether the embedding is the head's weight too: then no product has a weight of its own."""
    return not any(name.endswith("head.weight") or name == "output.weight" for name in stored)


def _is_head(line: _Line, lines: list[_Line]) -> bool:
    """Whether the loss reads the result over shards of the classes."""
    after = lines[lines.index(line) + 1:]
    return bool(after) and after[0].op == "cross_entropy_loss" and after[0].strategy == "classes"


__all__ = ["Styles", "styles_of"]
