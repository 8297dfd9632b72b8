"""Losses that a script computes outside the model, moved into it: there they are planned and sharded with it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

#: (outputs, labels, num_items_in_batch) -> loss
Loss = Callable[[Any, Any, Any], Any]


def with_loss(model: nn.Module, loss: Loss, passes_items: bool) -> None:
    """Let ``model(**batch, labels=..., num_items_in_batch=...)`` return ``loss(outputs, labels, num_items_in_batch)``
    as its loss; without labels it is as before. The model's class becomes a subclass of the same name.

    ``passes_items``: whether the model's own forward takes ``num_items_in_batch`` too.
    """
    kind: Any = type(model)

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        if labels is None:
            return kind.forward(self, *args, **kwargs)
        more = {"num_items_in_batch": num_items_in_batch} if passes_items and num_items_in_batch is not None else {}
        outputs = kind.forward(self, *args, **kwargs, **more)
        value = loss(outputs, labels, num_items_in_batch)
        if isinstance(outputs, tuple):
            return (value, *outputs)
        outputs["loss"] = value
        return outputs

    vars(forward)["__signature__"] = _with_names(inspect.signature(kind.forward), ("labels", "num_items_in_batch"))
    model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__,
                                                    "__doc__": kind.__doc__})


def _with_names(signature: inspect.Signature, names: tuple[str, ...]) -> inspect.Signature:
    """The signature, with keyword arguments of these names where it has none of that name."""
    given = list(signature.parameters.values())
    rest = given[-1:] if given[-1].kind == inspect.Parameter.VAR_KEYWORD else []
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
             for name in names if name not in signature.parameters]
    return signature.replace(parameters=[*given[: len(given) - len(rest)], *added, *rest])


__all__ = ["Loss", "with_loss"]
