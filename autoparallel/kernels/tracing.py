"""Whether AOTAutograd traces what runs, and marks on what it traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.fx import traceback

_library = torch.library.Library("autoparallel", "FRAGMENT")


def is_traced() -> bool:
    """Whether AOTAutograd runs this: tensors have no values, and ops that write to an ``out`` tensor, or make tensors
    of other classes, cannot be traced as what they are."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


@contextmanager
def marked(name: str) -> Iterator[None]:
    """Within this context, if it is traced, nodes have ``meta["custom"][name]``."""
    if not is_traced():
        yield
        return
    meta = traceback.current_meta
    if "custom" in meta:    # that of the traced program's node, to which `annotate` would write
        meta["custom"] = dict(meta["custom"])
    with traceback.annotate({name: True}):
        yield


def _nothing(after: list[Tensor]) -> Tensor:
    return after[0].new_zeros(())


_library.define("nothing(Tensor[] after) -> Tensor")
_library.impl("nothing", _nothing, "CompositeExplicitAutograd")
torch.library.register_fake("autoparallel::nothing", _nothing, lib=_library)


def after(made: Tensor, *others: Tensor) -> Tensor:
    """The tensor, which in a traced graph depends on others.

    Ranks that do not read what they receive would else have graphs in which other nodes depend on one another, and
    AOTAutograd puts nodes in an order by that: collectives would have other orders than on ranks that do.
    """
    return made + torch.ops.autoparallel.nothing(others) if is_traced() else made
