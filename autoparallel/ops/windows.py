"""Windows that move over dims (convolution, pooling; a slice, a padding): which input places an output place reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Window:
    """Along one dim. ``before`` and ``after`` are the places filled up at its ends."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0

    @property
    def extent(self) -> int:
        """From the first place that one output place reads to the last."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def border(self) -> int:
        """How many places beyond its own a shard reads."""
        return max(0, self.extent - self.stride)

    def reads(self, start: int, stop: int) -> tuple[int, int]:
        """(first, end) of what output places from ``start`` to before ``stop`` read; what is outside is filled up."""
        return start * self.stride - self.before, (stop - 1) * self.stride - self.before + self.extent

    def tiles(self, size: int, made: int) -> bool:
        """Whether an even shard of the input's ``size`` places makes its shard of the ``made`` ones by itself."""
        return self.extent <= self.stride and not self.before and not self.after and size == made * self.stride


@dataclass(frozen=True)
class Spread(Window):
    """Of a transposed convolution, along one dim: an input place is spread over ``extent`` output places, the first of
    all ``before`` places ahead of the result's."""

    def reads(self, start: int, stop: int) -> tuple[int, int]:
        """What is read spreads over all from ``start`` to ``stop``, also where those only take the bias."""
        start, stop = start + self.before, stop + self.before
        first = min(-((self.extent - 1 - start) // self.stride), start // self.stride)
        return first, max((stop - 1) // self.stride, -((self.extent - stop) // self.stride)) + 1

    @property
    def border(self) -> int:
        first, end = self.reads(0, self.stride)
        return end - first - 1

    def tiles(self, size: int, made: int) -> bool:
        return self.extent <= self.stride and not self.before and made == size * self.stride


def windows_of(op: Any, given: Mapping[str, Any]) -> tuple[Window, ...]:
    """The windows of a convolution (also a transposed one) or a pooling with arguments ``given`` by schema name, one
    for each dim in space."""
    (digit,) = re.findall(r"(\d)d", op._schema.name)
    rank = int(digit)
    kernel = given["weight"].shape[2:] if "weight" in given else of_each(given["kernel_size"], rank)
    stride = of_each(given["stride"] or kernel, rank)
    dilation = of_each(given.get("dilation", 1), rank)
    if given["padding"] == "same":
        ends = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        filled = [(n // 2, n - n // 2) for n in ends]
    else:
        filled = [(n, n) for n in of_each(0 if given["padding"] == "valid" else given["padding"], rank)]
    kind = Spread if "output_padding" in given else Window
    return tuple(kind(k, s, d, *ends) for k, s, d, ends in zip(kernel, stride, dilation, filled, strict=True))


def window_of_rows(op: Any, given: Mapping[str, Any], dim: int, rank: int) -> Window:
    """Of a slice or a padding, whose output places read one place each: how a dim is shortened or lengthened."""
    if "pad" in given:
        before, after = [*given["pad"], *[0] * (2 * rank)][2 * (rank - 1 - dim) :][:2]
        return Window(1, before=before, after=after)
    return Window(1, before=-(given["start"] or 0)) if given["dim"] % rank == dim else Window(1)


def of_each(value: int | Sequence[int], rank: int) -> Sequence[int]:
    values = [value] if isinstance(value, int) else value
    return values if len(values) == rank else [*values] * rank
