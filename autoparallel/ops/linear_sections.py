"""A linear layer whose result is split into sections, as one op: ``x, weight, sizes -> sections``."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

_library = torch.library.Library("autoparallel", "FRAGMENT")
_library.define("linear_sections(Tensor x, Tensor weight, Tensor? bias, int[] sizes) -> Tensor[]")


def _linear_sections(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sizes: list[int]
                     ) -> list[torch.Tensor]:
    return list(F.linear(x, weight, bias).split(sizes, dim=-1))


_library.impl("linear_sections", _linear_sections, "CompositeImplicitAutograd")
linear_sections = torch.ops.autoparallel.linear_sections.default
