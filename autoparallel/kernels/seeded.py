"""Random ops whose seed is an input: traced once, they draw other numbers in every call.

`rng.random_op` sets the generator's seed when Python runs it, which a traced graph does once, while it is traced. Here
each draw becomes an op of its own that takes the seed from a tensor. The numbers are those of `rng.random_op`, bit for
bit, except where one op draws several times.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.errors import InputError
from autoparallel.kernels import rng

aten = torch.ops.aten
#: Draws in place -> the same draw into a new tensor.
OUT_OF_PLACE = {
    aten.bernoulli_.float: aten.bernoulli.p, aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
    aten.uniform_.default: aten.uniform.default, aten.normal_.default: aten.normal_functional.default,
    aten.exponential_.default: aten.exponential.default, aten.geometric_.default: aten.geometric.default,
    aten.log_normal_.default: aten.log_normal.default, aten.cauchy_.default: aten.cauchy.default,
    aten.random_.default: aten.random.default, aten.random_.to: aten.random.to, getattr(aten.random_, "from"):
    getattr(aten.random, "from"),
}
_GENERATOR = re.compile(r"(\*, )?Generator\? generator=None(, )?")
_library = torch.library.Library("autoparallel", "FRAGMENT")


#: A random op's numbers: of its copy (0 without multi-copy), of its decision and of its shard.
Draw = tuple[int, int, int]


def seeds_of(call_seeds: Sequence[int], draws: Sequence[Draw]) -> torch.Tensor:
    """The seeds of one call's random ops, int64 [len(draws)], in host memory. ``call_seeds``: by copy."""
    return torch.tensor([rng.mix(call_seeds[copy], *draw) for copy, *draw in draws], dtype=torch.int64)


def seeded_op(op: Any, seeds: torch.Tensor, number: int, *args: Any, **kwargs: Any) -> Any:
    """`rng.random_op` with the seed ``seeds[number]``, to be traced by a dispatch mode (make_fx, AOTAutograd).

    Raises InputError for an op that has no seeded form.
    """
    with _Drawing(seeds, number):
        return op(*args, **kwargs)


class _Drawing(TorchDispatchMode):
    """Replaces draws by their seeded forms."""

    def __init__(self, seeds: torch.Tensor, number: int) -> None:
        super().__init__()
        self.seeds, self.number, self.draws = seeds, number, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if kwargs.pop("generator", None) is not None:
            raise InputError(f"{func} has a generator of its own: leave it out, the run's seed is used "
                             "(parallel.manual_seed)")
        if func is aten.rrelu_with_noise.default:    # backward reads the noise that it draws
            made, noise = self._drawn(aten.rrelu_with_noise_functional.default, *args[:5], **kwargs)
            args[1].copy_(noise)
            return made
        in_place = func._schema.is_mutable
        if in_place and func not in OUT_OF_PLACE:
            raise InputError(f"{func} draws random numbers and has no form that takes a seed: run it with "
                             "backend=\"eager\"")
        if not in_place:
            return self._drawn(func, *args, **kwargs)
        left_out = [a.default_value for a in func._schema.arguments[len(args):] if not a.kwarg_only]
        return args[0].copy_(self._drawn(OUT_OF_PLACE[func], *args, *left_out, **kwargs))

    def _drawn(self, op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        self.draws += 1
        return seeded_form(op)(self.seeds, self.number, self.draws - 1, *args, **kwargs)


@functools.cache
def seeded_form(op: torch._ops.OpOverload) -> Any:
    """The op ``autoparallel::seeded_<name>(Tensor seeds, int number, int draw, ...)``: ``op`` with the generator's seed
    ``seeds[number]`` (draw 0; a later draw of the same op has another)."""
    schema = str(op._schema)
    given, returned = schema[schema.index("(") + 1 : schema.rindex(") ->")], schema[schema.rindex("->") :]
    given = _GENERATOR.sub(lambda found: "*, " if found[1] and found[2] else "", given).removesuffix(", ")
    name = "seeded_" + re.sub(r"\W+", "_", op._schema.name.split("::")[1] + "_" + op._schema.overload_name).strip("_")
    taken = ", ".join(["Tensor seeds, int number, int draw", *([given] if given else [])])
    _library.define(f"{name}({taken}) {returned}")

    def run(seeds: torch.Tensor, number: int, draw: int, *args: Any, **kwargs: Any) -> Any:
        seed = int(seeds[number])
        return rng.with_seed(rng.mix(seed, draw) if draw else seed, op, *args, **kwargs)

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autoparallel::{name}", lambda seeds, number, draw, *args, **kwargs:
                                op(*args, **kwargs), lib=_library)
    return getattr(torch.ops.autoparallel, name).default
