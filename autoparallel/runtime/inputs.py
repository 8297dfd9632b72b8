"""Plain tensors of a call: global values, equal on all ranks, or each rank's own rows.

Ranks compare one number, a hash of everything that must be equal; only if it differs do they exchange details.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autoparallel.errors import InputError, PlanError, shown
from autoparallel.runtime.failing import all_of, is_same, naming_peers

#: The first calls, all of which are checked.
FIRST_CALLS = 3
_KINDS = ("global", "local")
_WORDS = 2**24  # elements hashed at a time
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_REMEDY = ("  A plain tensor is the global value, the same on all ranks. Where each rank has rows of its own "
           "(DistributedSampler): autoparallel.compile(..., inputs=\"local\"), or parallel.local_batch(batch) for one "
           "batch. Else give all ranks the same batch, or take it from parallel.dataloader(dataset, batch_size).")


@dataclass
class Inputs:
    """Kind of the plain tensors of each argument, "global" or "local": ``by_name``, else ``default``.

    ``period``: ranks compare the values of global tensors every ``period`` calls and in the first ones (0: never).
    ``rest``: name of further positional arguments.
    """

    positional: tuple[str, ...]
    rest: str
    default: str
    by_name: Mapping[str, str]
    period: int
    calls: int = field(default=0, init=False)

    @staticmethod
    def of(model: nn.Module, how: Any, period: Any) -> Inputs:
        """From the options ``inputs`` and ``check_inputs`` of `compile`. Raises PlanError for invalid ones."""
        if isinstance(period, bool) or not isinstance(period, int) or period < 0:
            raise PlanError(f"check_inputs is {shown(period)}: give a number of calls, every so many of which ranks "
                            "compare their inputs; 0 for never")
        kinds = list(how.values()) if isinstance(how, Mapping) else [how]
        if odd := [kind for kind in kinds if not isinstance(kind, str) or kind not in _KINDS]:
            raise PlanError(f"inputs is {shown(odd[0])}: give 'global' (all ranks call with the same tensors) or "
                            "'local' (each with its own rows), or a mapping of argument names to these")
        parameters = list(inspect.signature(model.forward).parameters.values())
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        for name in how if isinstance(how, Mapping) else ():
            if name not in names and not open_ended:
                raise PlanError(f"inputs names {shown(name)}, and {type(model).__name__}.forward has no such argument; "
                                f"there are {difflib.get_close_matches(str(name), names) or names}")
        positional = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
        rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
        by_name = dict(how) if isinstance(how, Mapping) else {}
        return Inputs(positional, rest, "global" if by_name or isinstance(how, Mapping) else how, by_name, period)

    @property
    def are_local(self) -> bool:
        """Whether any argument may be local."""
        return "local" in (self.default, *self.by_name.values())

    def kind(self, name: str) -> str:
        return self.by_name.get(name, self.default)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """The arguments of a call by name."""
        names = (*self.positional[: len(args)], *[self.rest] * (len(args) - len(self.positional)))
        return [*zip(names, args, strict=True), *kwargs.items()]

    def are_compared(self) -> bool:
        """Count a call; whether ranks compare its values."""
        self.calls += 1
        return self.is_compared(self.calls)

    def is_compared(self, number: int) -> bool:
        """Whether ranks compare the values of the call, or the batch, of this number, counted from 1."""
        return self.period > 0 and (number <= FIRST_CALLS or number % self.period == 0)

    def of_all(self, args: Sequence[Any], kwargs: Mapping[str, Any], ranks: int
               ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The global call of ``ranks`` ranks, for planning: local tensors are repeated ``ranks`` times along dim 0."""
        values = [pytree.tree_map(lambda leaf: torch.cat([leaf] * ranks) if _has_rows(leaf) else leaf, value)
                  if self.kind(name) == "local" else value for name, value in self.named(args, kwargs)]
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def taken(self, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: DeviceMesh, device: torch.device,
              compared: bool, all_global: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with each local tensor as a DTensor of the global batch, sharded along dim 0 over ``mesh``.

        ``compared``: compare global values over the ranks. Raises InputError on all ranks if they differ, or if local
        tensors have different shapes. All ranks call this.
        """
        local = [not all_global and self.kind(name) == "local" for name, _ in self.named(args, kwargs)]
        if mesh.size() > 1 and (compared or self.are_local):
            _compare(self.named(args, kwargs), local, compared, device)
        values = [as_rows(value, mesh, device) if rows else value
                  for value, rows in zip(chain(args, kwargs.values()), local, strict=True)]
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def local_batch(batch: Any, mesh: DeviceMesh, device: torch.device) -> Any:
    """A structure of this rank's rows as DTensors of the global batch.

    Raises InputError on all ranks if their tensors have different shapes.
    """
    if mesh.size() > 1:
        _compare([("batch", batch)], [True], False, device)
    return as_rows(batch, mesh, device)


def as_rows(value: Any, mesh: DeviceMesh, device: torch.device) -> Any:
    """A structure with each plain tensor as a DTensor: the rows of all ranks of the mesh, in rank order."""

    def placed(leaf: Any) -> Any:
        if not _has_rows(leaf):
            return leaf
        leaf = leaf.to(device).contiguous()
        whole = torch.empty((leaf.shape[0] * mesh.size(), *leaf.shape[1:]), device="meta")
        return DTensor.from_local(leaf, mesh, [Shard(0)] * mesh.ndim, run_check=False, shape=whole.shape,
                                  stride=whole.stride())

    return pytree.tree_map(placed, value)


def _has_rows(leaf: Any) -> bool:
    """Whether a leaf is a plain tensor with rows. (DTensors have placements of their own.)"""
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.dim() > 0


#: Leaf name -> (form, hash of the values, or 0 if they are not compared); must be equal on all ranks.
_Description = dict[str, tuple[str, int]]


def _compare(named: Sequence[tuple[str, Any]], local: Sequence[bool], compared: bool, device: torch.device) -> None:
    """Raises InputError on all ranks if calls differ. Costs one all-reduce of two numbers if they do not."""
    leaves = {f"{name}{pytree.keystr(path)}": (leaf, rows) for (name, value), rows in zip(named, local, strict=True)
              for path, leaf in pytree.tree_flatten_with_path(value)[0]}
    hashed = {name: digest(leaf) for name, (leaf, rows) in leaves.items() if compared and _has_values(leaf)
              and not (rows and _has_rows(leaf))}
    hashes = dict(zip(hashed, torch.stack([h.to(device) for h in hashed.values()]).tolist() if hashed else (),
                      strict=True))
    mine = {name: (form_text(leaf), hashes.get(name, 0)) for name, (leaf, _) in leaves.items()}
    if not is_same(hash_of(sorted(mine.items())), device):
        found = all_of("the inputs of a call", mine)
        of_rows = {name for name, (leaf, rows) in leaves.items() if rows and _has_rows(leaf)}
        raise InputError(_difference(found, of_rows))


def all_have(text: str, device: torch.device, right: str | None = None) -> str | None:
    """None if all ranks have the same text (equal to ``right``, if given); else each text with its ranks.

    All ranks call this. Raises PeerError where one of them has gone.
    """
    with naming_peers():
        if dist.get_world_size() == 1 or is_same(hash_of(text), device):
            return None if right is None or text == right else text
        every = all_of("what is loaded or read", text)
    ranks: dict[str, list[int]] = {}
    for rank, theirs in enumerate(every):
        if theirs != right:
            ranks.setdefault(theirs, []).append(rank)
    return "; ".join(f"{theirs} (on ranks {some})" for theirs, some in ranks.items())


def _has_values(leaf: Any) -> bool:
    """Whether a leaf is a dense tensor that can be hashed; others are refused later."""
    return (isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and not leaf.is_meta
            and leaf.layout == torch.strided and not leaf.is_nested)


def form_text(leaf: Any) -> str:
    """The part of an argument that tracing fixes, as text that is equal in all processes."""
    if isinstance(leaf, torch.Tensor):
        kind = "" if type(leaf) in (torch.Tensor, nn.Parameter) else f" ({type(leaf).__name__})"
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}{kind}"
    return repr(leaf) if isinstance(leaf, _SCALARS) else type(leaf).__name__


def hash_of(value: Any) -> int:
    """A 56-bit hash of ``repr(value)``, equal in all processes."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "little")


def hash_of_values(batch: Any) -> int:
    """A hash of the plain tensors of a structure, equal in all processes."""
    digests = [digest(leaf) for leaf in pytree.tree_leaves(batch) if _has_values(leaf)]
    return hash_of(torch.stack([each.cpu() for each in digests]).tolist() if digests else [])


@torch.no_grad()
def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of a tensor's bits in order, as an int64 scalar on its device."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if whole.stride() != (1,):    # one element, expanded, is contiguous
        whole = torch.empty_like(whole, memory_format=torch.contiguous_format).copy_(whole)
    flat = whole.view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat.view(torch.int64) if flat.numel() % 8 == 0 else flat
    total = torch.full((), flat.numel(), dtype=torch.int64, device=flat.device)
    for number, part in enumerate(words.split(_WORDS)):
        index = torch.arange(part.numel(), dtype=torch.int64, device=part.device)
        mixed = (part.to(torch.int64) + number) * (index * 0x9E3779B97F4A7C1 | 1)  # wraps around
        total = total * 31 + (mixed ^ (mixed >> 29)).sum()
    return total


def _difference(found: Sequence[_Description], local: set[str]) -> str:
    """The message for calls that differ. ``local``: names of tensors of which only the form must be equal."""
    if odd := [rank for rank, mine in enumerate(found) if mine.keys() != found[0].keys()]:
        return (f"ranks {odd} call with other arguments than rank 0: {list(found[odd[0]])} on rank {odd[0]}, "
                f"{list(found[0])} on rank 0\n  All ranks must make the same calls.")
    texts, shapes, lengths = [], False, False
    for name, first in found[0].items():
        if others := [rank for rank, mine in enumerate(found) if mine[name] != first]:
            forms = dict[str, list[int]]()
            for rank, mine in enumerate(found):
                forms.setdefault(mine[name][0], []).append(rank)
            shapes |= name in local
            lengths |= name in local and len({mine[name][0].partition("[")[2].partition(",")[2] for mine in found}) > 1
            texts.append(f"{name}: " + (", ".join(f"{form} on ranks {ranks}" for form, ranks in forms.items())
                                        if len(forms) > 1 else f"ranks {others} have other values than rank 0"))
    said = "ranks call with different inputs: " + "; ".join(texts)
    if lengths:
        return (f"{said}\n  Local tensors need the same shape on every rank: pad to one length that all ranks know, "
                "and not to the longest row of a rank, as collate_fn=autoparallel.padded_to((512,), input_ids=0, "
                "labels=-100) does.")
    if shapes:
        return (f"{said}\n  Local tensors need the same number of rows on every rank: leave out a shorter last batch, "
                "DataLoader(..., drop_last=True), or fill it up.")
    return f"{said}\n{_REMEDY}"
