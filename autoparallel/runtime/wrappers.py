"""Torch's wrappers of modules for data parallelism are refused: the module is parallel already.

Each wrapper leaves a trace on the module before it changes anything: DDP reads an attribute, FSDP sets one, and
fully_shard keeps a list of what was applied.
"""

from __future__ import annotations

from typing import Any

from torch.distributed._composable.contract import REGISTRY_KEY

from autoparallel.errors import InputError

#: Attribute that a wrapper reads -> the wrapper. (Others ask whether a module has FSDP's attribute, which it sets.)
_READ_BY = {"_ddp_params_and_buffers_to_ignore": "DistributedDataParallel"}
_SET_BY = {"_is_fsdp_managed_module": "FullyShardedDataParallel"}


def refuse_reading(attribute: str) -> None:
    """Raises InputError if this attribute is one that a wrapper reads of what it wraps."""
    if (wrapper := _READ_BY.get(attribute)) is not None:
        raise _refusal(wrapper)


def refuse_setting(attribute: str) -> None:
    """Raises InputError if this attribute is one that a wrapper sets on what it wraps."""
    if (wrapper := _SET_BY.get(attribute)) is not None:
        raise _refusal(wrapper)


def refuse_composed(attributes: dict[str, Any]) -> None:
    """Raises InputError if these attributes of a module say that fully_shard or replicate has begun on it."""
    if applied := attributes.pop(REGISTRY_KEY, None):
        raise _refusal(next(iter(applied)))


def _refusal(wrapper: str) -> InputError:
    return InputError(f"{wrapper} cannot wrap a parallel module, which shards its parameters and reduces its gradients "
                      "itself\n  Leave the wrapper out; to have what it does, write "
                      "autoparallel.compile(model, mesh, baseline=\"ddp\" or \"fsdp\").")


__all__ = ["refuse_composed", "refuse_reading", "refuse_setting"]
