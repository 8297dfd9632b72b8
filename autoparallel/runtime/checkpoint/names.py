"""Names of tensors in files against those of the model: transformers' conversions, PEFT's adapters, tied weights.

The one file that calls transformers' and peft's functions for checkpoints. They are asked with tensors on the meta
device first, which tells what is read and written without values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoparallel.errors import InputError

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Conversion:
    """Tensors that are made of others together: ``make`` of the ``sources`` gives the ``targets``."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    make: Callable[[Tensors], Tensors]


def same(names: Sequence[str]) -> list[Conversion]:
    """Each tensor under its own name."""
    return [Conversion((name,), (name,), dict) for name in names]


def is_adapter(model: nn.Module) -> bool:
    """Whether of this model only adapters are saved: peft's, or those attached to a model of transformers."""
    return bool(getattr(model, "_hf_peft_config_loaded", False)) or any(
        kind.__module__.split(".")[0] == "peft" and kind.__name__ == "PeftModel" for kind in type(model).__mro__)


def is_of_transformers(model: nn.Module) -> bool:
    return any(kind.__module__.split(".")[0] == "transformers" and kind.__name__ == "PreTrainedModel"
               for kind in type(model).__mro__)


def stand_ins(model: nn.Module) -> Tensors:
    """Tensors on the meta device for all that a state dict of the model has; tied ones are one tensor."""
    made: dict[int, torch.Tensor] = {}
    return {name: made.setdefault(id(value), torch.empty(value.shape, dtype=value.dtype, device="meta"))
            for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}


def to_files(model: Any) -> tuple[list[Conversion], Tensors]:
    """(conversions from the model's tensors to a file's, the file's tensors on the meta device). Tied weights once."""
    own = stand_ins(model)
    if not is_of_transformers(model):
        kept = {name: value for name, value in own.items() if name == next(n for n in own if own[n] is value)}
        return same(list(kept)), kept
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kept = remove_tied_weights_from_state_dict({n: v for n, v in own.items() if n not in ignored}, model)

    def make(tensors: Tensors) -> Tensors:
        return dict(revert_weight_conversion(model, tensors))

    files = make(dict(kept))
    if all(files.get(name) is value for name, value in kept.items()) and len(files) == len(kept):
        return same(list(kept)), files
    try:
        parts = [Conversion((name,), tuple(make({name: value})), make) for name, value in kept.items()]
        alone: Tensors = {}
        for part in parts:
            alone.update(make({part.sources[0]: kept[part.sources[0]]}))
    except Exception:  # a conversion of several tensors at once
        alone, parts = {}, []
    if {n: (v.shape, v.dtype) for n, v in alone.items()} != {n: (v.shape, v.dtype) for n, v in files.items()}:
        parts = [Conversion(tuple(kept), tuple(files), make)]
    return parts, files


def of_adapter(model: Any, adapter: str) -> dict[str, str]:
    """Name in an adapter's file -> name in the model, of the tensors that are saved of one adapter."""
    from peft import get_peft_model_state_dict

    own = stand_ins(model)
    name_of = {id(value): name for name, value in own.items()}
    saved = get_peft_model_state_dict(model, state_dict=own, adapter_name=adapter)
    if made := [name for name, value in saved.items() if id(value) not in name_of]:
        raise InputError(f"peft makes {made[:3]} of the adapter's tensors instead of taking them: gather the state "
                         "dict (value.full_tensor() of each DTensor, on all ranks) and save it by peft on one rank")
    return {name: name_of[id(value)] for name, value in saved.items()}


def of_active_adapter(model: Any) -> dict[str, str] | None:
    """As `of_adapter`, of the adapter that is loaded: the first active one. None: weights, and no adapters, are."""
    if not is_adapter(model) or not hasattr(model, "active_adapters"):
        return None
    active = model.active_adapters if not callable(model.active_adapters) else model.active_adapters()
    return of_adapter(model, active[0])


def from_files(model: Any, names: Sequence[str]) -> tuple[list[Conversion], list[str]]:
    """(conversions from the file's tensors to the model's, names in the file that the model has not)."""
    own = stand_ins(model)
    if (known := of_active_adapter(model)) is not None:
        return [Conversion((name,), (known[name],), _renamed(name, known[name])) for name in names if name in known], [
            name for name in names if name not in known]
    if not is_of_transformers(model):
        return same([name for name in names if name in own]), [name for name in names if name not in own]
    return _converted(model, names, own)


def _renamed(source: str, target: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {target: tensors[source]}


def _converted(model: Any, names: Sequence[str], own: Tensors) -> tuple[list[Conversion], list[str]]:
    """As transformers.core_model_loading.convert_and_load_state_dict_in_model pairs names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model) or []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    conversions, unexpected = [], []
    joined: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if target not in own and name in own:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, own)
        if target not in own:
            unexpected.append(name)
        elif pattern is None:
            conversions.append(Conversion((name,), (target,), _renamed(name, target)))
        else:
            joined.setdefault(target, []).append((name, pattern))
    for target, sources in joined.items():
        conversions.append(_joint(model, by_pattern[sources[0][1]], target, sources))
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return conversions, [name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)]


def _joint(model: Any, converter: Any, target: str, sources: Sequence[tuple[str, str]]) -> Conversion:
    def make(tensors: Tensors) -> Tensors:
        mine = deepcopy(converter)
        for name, pattern in sources:
            mine.add_tensor(target, name, pattern, tensors[name])
        made = mine.convert(target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    return Conversion(tuple(name for name, _ in sources), (target,), make)


def may_be_missing(model: nn.Module, names: Sequence[str]) -> list[str]:
    """The missing names without those that transformers knows to be missing."""
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return [name for name in names if not any(re.search(pattern, name) for pattern in ignored)]


def save_configuration(model: Any, folder: Path, options: Mapping[str, Any]) -> None:
    """All that the model's own save_pretrained writes besides weights (configuration, generation, its code).

    The configurations stay as they were: transformers notes the dtype in them, and traced programs read them.
    """
    configurations = {id(c): c for part in model.modules() if (c := getattr(part, "config", None)) is not None}
    before = [(configuration, dict(vars(configuration))) for configuration in configurations.values()]
    try:
        model.save_pretrained(folder, state_dict={}, **options)
    finally:
        for configuration, attributes in before:
            vars(configuration).clear()
            vars(configuration).update(attributes)


__all__ = ["Conversion", "from_files", "is_adapter", "is_of_transformers", "may_be_missing", "of_adapter",
           "save_configuration", "stand_ins", "to_files"]
