"""Tensors on which a registered rule is proven: sizes that are cut unevenly, values that hide nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autoparallel.rules.notation import Notation
from autoparallel.rules.rule import Dims, Rule

#: Where no example says otherwise: dims that ``*`` stands for, and the size of a dim that stays whole.
STAR_DIMS, WHOLE_SIZE = 2, 6
SHORTEST = 5
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Samples:
    """``dims`` and ``shapes_given``: of the example's tensors, or of those that stand for them."""

    dims: tuple[Dims, ...]
    shapes_given: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    example: list[Tensor] | None

    @classmethod
    def of(cls, notation: Notation, example: list[Tensor] | None) -> Samples:
        """Raises RuleError when the pattern does not fit the example."""
        if example is None:
            shapes = [tuple(n for d in dims for n in _usual_sizes(d)) for _, dims in notation.inputs]
            dtypes, device = [torch.float32] * len(shapes), torch.device("cpu")
        else:
            notation.refuse_counts(len(example), len(notation.outputs))
            shapes, dtypes = [tuple(t.shape) for t in example], [t.dtype for t in example]
            device = example[0].device
        return cls(tuple(notation.dims(shapes)), tuple(shapes), tuple(dtypes), device, example)

    def lengths(self) -> dict[str, int]:
        """A length for each factor: cut into 2 or 3 shards these are unequal, and no two factors have the same."""
        found: dict[str, int] = {}
        for factor, size in self._sizes().items():
            found[factor] = _uneven(size, found.values())
        return found

    def shapes(self, longer: Collection[str] | None = None) -> list[Shape]:
        """Of the tensors with every factor (those named in ``longer``) at its length. A dim of size 1 beside longer
        ones of its factor is broadcast, and stays."""
        sizes, lengths = self._sizes(), self.lengths()
        return [tuple(lengths[f] if f is not None and (longer is None or f in longer) and n == sizes[f] else n
                      for f, n in zip(dims, shape, strict=True))
                for dims, shape in zip(self.dims, self.shapes_given, strict=True)]

    def shapes_like(self, rule: Rule) -> Callable[[Sequence[Shape], str | None], list[Shape]]:
        """Shapes of a call in a model, with factors at lengths as above, but for ``true``, which keeps the call's."""
        known = self._sizes()
        lengths: dict[str, int] = {}
        for factor in rule.sizes:
            lengths[factor] = _uneven(min(known.get(factor, 1), rule.sizes[factor]), lengths.values())

        def shapes(given: Sequence[Shape], true: str | None) -> list[Shape]:
            return [tuple(n if f is None or f == true else lengths[f] for f, n in zip(dims, shape, strict=True))
                    for dims, shape in zip(rule.inputs, given, strict=True)]

        return shapes

    def drawn(self, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], magnitude: float) -> list[Tensor]:
        """Random numbers; integers and truth values are picked from the example's."""
        generator = torch.Generator().manual_seed(0)
        return [
            (magnitude * torch.randn(shape, generator=generator, device="cpu",
                                     dtype=torch.complex64 if dtype.is_complex else torch.float32)
             ).to(self.device, dtype) if dtype.is_floating_point or dtype.is_complex
            else self._picked(i, shape, dtype, generator)
            for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]

    def picked(self, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Numbers picked from the example's, each shrunk by up to four."""
        generator = torch.Generator().manual_seed(1)
        return [self._picked(i, shape, dtype, generator)
                for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]

    def resampled(self, shapes: Sequence[Shape]) -> list[list[Tensor]]:
        """The example's tensors made longer by repeating entries along factors, in order, each scaled down by up to
        four (a matrix that stays whole by one number, which leaves it symmetric, positive, ...); and the same without
        making different what is equal everywhere."""
        if self.example is None:
            return []
        varied, plain = [], []
        generator = torch.Generator().manual_seed(0)
        for t, dims, shape in zip(self.example, self.dims, shapes, strict=True):
            for dim, (old, new) in enumerate(zip(t.shape, shape, strict=True)):
                if old != new:
                    t = t.index_select(dim, torch.arange(new, device=t.device) * old // new)
            if t.is_floating_point() or t.is_complex():
                scales = [n if f is not None else 1 for f, n in zip(dims, t.shape, strict=True)]
                scaled = (t * _shrinks(scales, generator).to(t.device)).to(t.dtype)
                plain.append(scaled)
                varied.append(scaled if t.any() else torch.rand(t.shape, generator=generator, device="cpu").to(t))
            else:
                plain.append(t)
                varied.append(_vary(t, generator))
        return [varied, plain]

    def _picked(self, position: int, shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        if self.example is None or position >= len(self.example):
            return torch.randint(0, 2, shape, generator=generator, device="cpu").to(self.device, dtype)
        values = self.example[position]
        if not values.is_floating_point() and not values.is_complex():
            values = _vary(values, generator)
        values = values.reshape(-1).cpu()
        found = values[torch.randint(0, values.numel(), shape, generator=generator, device="cpu")]
        if dtype.is_floating_point or dtype.is_complex:
            found = found * _shrinks(list(shape), generator)
        return found.to(self.device, dtype)

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for dims, shape in zip(self.dims, self.shapes_given, strict=True):
            for factor, size in zip(dims, shape, strict=True):
                if factor is not None:
                    sizes[factor] = max(size, sizes.get(factor, 1))
        return sizes


def tells(results: Sequence[Tensor]) -> bool:
    """Whether a result has different numbers, or is one number that is not 0."""
    for result in results:
        known = result[result.isfinite()] if result.is_floating_point() or result.is_complex() else result.reshape(-1)
        if known.numel() and bool((known != known[0]).any() if result.numel() > 1 else known.any()):
            return True
    return False


def hidden_by(tensors: Sequence[Tensor]) -> int | None:
    """The first tensor with equal entries everywhere."""
    return next((i for i, t in enumerate(tensors) if t.numel() > 1 and bool((t == t.reshape(-1)[0]).all())), None)


def _usual_sizes(factor: str | None) -> list[int]:
    if factor is None:
        return [WHOLE_SIZE]
    return [SHORTEST] * STAR_DIMS if factor.startswith("*") else [SHORTEST]


def _uneven(at_least: int, taken: Collection[int]) -> int:
    size = max(at_least, SHORTEST)
    while size % 2 == 0 or size % 3 == 0 or size in taken:
        size += 1
    return size


def _shrinks(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return 0.25 + 0.75 * torch.rand(list(shape), generator=generator, device="cpu")


def _vary(t: Tensor, generator: torch.Generator) -> Tensor:
    """A sample of integers (or bools) that are all equal, with about half of them changed by one: equal ones would
    hide a wrong order of shards. Other tensors as they are."""
    if hidden_by([t]) is None:
        return t
    value = t.reshape(-1)[0]
    other = ~value if t.dtype == torch.bool else value - 1 if value > 0 else value + 1
    return torch.where(torch.rand(t.shape, generator=generator, device="cpu").to(t.device) < 0.5, t, other)
