"""Models by name: of a Hugging Face config, or of a factory, on the meta device, with the arguments of a call."""

from __future__ import annotations

import difflib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autoparallel.errors import InputError, shown

if TYPE_CHECKING:
    from torch import nn

    from cost_models import Cluster

    Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

#: In which a config's model may be; where none is asked for, the first that all clusters have a rate for.
DTYPES = ("bfloat16", "float16", "float32", "float64")
SEQUENCE_LENGTH = 2048


def is_factory(source: str | dict[str, Any]) -> bool:
    """Whether a model is named as ``module:function``, or ``file.py:function``."""
    return isinstance(source, str) and ":" in source and not Path(source).exists()


def dtype_on(clusters: Sequence[Cluster], source: str, asked: str | None) -> str:
    """The dtype of a config's model, for `load_model`. Raises InputError for one that devices of the clusters have no
    rate for, and where a factory makes the model."""
    if asked is not None and is_factory(source):
        raise InputError(f"--dtype is {asked}, and {source} makes its model in a dtype of its own: leave --dtype out, "
                         "and make the model in that dtype there")
    _check_dtype(asked or DTYPES[0])
    for cluster in clusters:
        rates = [kind.device.peak_flops_per_s for kind in cluster.kinds()]
        known = [dtype for dtype in DTYPES if all(dtype in by_dtype for by_dtype in rates)]
        if asked is not None and asked not in known:
            raise InputError(f"--dtype is {asked}, and devices of {cluster.name} have no rate for it: one of "
                             f"{', '.join(known)} is required, or a description of the cluster (TOML) with such a rate")
    rates = [kind.device.peak_flops_per_s for cluster in clusters for kind in cluster.kinds()]
    return asked or next(dtype for dtype in DTYPES if all(dtype in by_dtype for by_dtype in rates))


def load_planned(source: str, inputs: Mapping[str, Sequence[int]], dtype: str, global_batch: int | None = None,
                 sequence_length: int | None = None) -> Made:
    """`load_model` with the dtype of a saved plan of that model, and with the batch and sequence length of its
    ``inputs`` (their shapes) where none are given."""
    batch, *first = next(iter(inputs.values()), (1,))
    if is_factory(source):
        return load_model(source, global_batch or batch, sequence_length or (first[0] if first else 1))
    length = [*inputs.get("labels", ())][1:] or (first if len(first) == 1 else [])
    return load_model(source, global_batch or batch, sequence_length or (length[0] if length else None), dtype)


def load_model(source: str | dict[str, Any], global_batch: int, sequence_length: int | None = None,
               dtype: str = DTYPES[0], usual_length: int = SEQUENCE_LENGTH) -> Made:
    """(model, args, kwargs) on the meta device, from a Hugging Face config (file, its folder, or dict) or a
    ``module:function``, also ``path/to/file.py:function``.

    The factory is called as ``function(global_batch, sequence_length)`` and returns (model, args, kwargs).
    ``sequence_length``: None: ``usual_length``, if there are sequences, or as many tokens as the model has positions.
    """
    import torch

    _check_dtype(dtype)
    precision = getattr(torch, dtype)
    if isinstance(source, dict):
        return _hugging_face(source, "the config", global_batch, (sequence_length, usual_length), precision)
    if is_factory(source):
        sequence_length = sequence_length or usual_length
        module, function = source.rsplit(":", 1)
        try:
            factory = getattr(_module(module), function)
        except Exception as error:
            raise InputError(f"{source}: {type(error).__name__}: {error}; write module:function, the module importable "
                             "from here, or path/to/file.py:function") from error
        try:
            with torch.device("meta"):
                made = factory(global_batch, sequence_length)
        except Exception as error:
            raise InputError(f"{source}({global_batch}, {sequence_length}) raised {type(error).__name__}: {error}; it "
                             "is called with the batch and the sequence length, and tensors are made on the meta "
                             "device: name no device there, and read no data") from error
        if not isinstance(made, tuple) or len(made) != 3:
            what = f"a tuple of {len(made)}" if isinstance(made, tuple) else shown(made)
            raise InputError(f"{source} returned {what}: return (model, args, kwargs)")
        return made
    return _hugging_face(*read_config(source), global_batch, (sequence_length, usual_length), precision)


def read_config(source: str) -> tuple[Any, str]:
    """What a Hugging Face config file, or that of a folder, says, and its path. Raises InputError for one that cannot
    be read."""
    if (inside := Path(source, "config.json")).is_file():
        source = str(inside)
    try:
        return json.loads(Path(source).read_text(encoding="utf-8")), source
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        instead = "a Hugging Face config.json, or module:function, which makes the model"
        if source.endswith(".py"):
            why, instead = "it is Python", f"{source}:function, the function in it that makes the model"
        elif source.count("/") == 1 and not source.endswith(".json") and not Path(source).exists():
            instead += f" (names on the Hub are not looked up: save the config.json of {source} to a file)"
        raise InputError(f"cannot read the config file {source}: {why}; give {instead}") from error


def _module(name: str) -> ModuleType:
    """A module that is importable from the working directory, or the one of a file, which imports from its folder."""
    if not name.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(name)
    file = Path(name).resolve(strict=True)
    if (known := sys.modules.get(file.stem)) is not None and getattr(known, "__file__", None) == str(file):
        return known
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem if known is None else f"{file.stem}_of_{file.parent.name}",
                                                  file)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}: give {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")


def _hugging_face(data: Any, origin: str, batch: int, lengths: tuple[int | None, int], dtype: Any) -> Made:
    import torch

    try:
        import transformers
    except ImportError as error:
        raise InputError("a Hugging Face config needs transformers: pip install 'autoparallel[models]'") from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise InputError(f"{origin} has no model_type: a Hugging Face config.json is required")
    if data["model_type"] not in transformers.CONFIG_MAPPING:
        close = difflib.get_close_matches(data["model_type"], list(transformers.CONFIG_MAPPING.keys()))
        raise InputError(f"{origin}: transformers {transformers.__version__} has no model_type {data['model_type']!r}"
                         + (f"; is it one of {close}?" if close else ": write module:function that makes the model"))
    named = data.get("architectures") or [None]
    if not isinstance(named, list) or not isinstance(named[0], str | None):
        raise InputError(f"{origin}: architectures is {shown(named)}: give a list with a class of transformers by name")
    architecture = named[0]
    try:
        config = transformers.AutoConfig.for_model(**{k: v for k, v in data.items() if k != "architectures"})
        config.use_cache = False
        layers = getattr(config, "num_hidden_layers", None)
        if isinstance(layers, int) and layers < 1:
            raise ValueError(f"num_hidden_layers is {layers}, and a model has 1 layer or more")
        with torch.device("meta"):
            if architecture is not None:
                network = getattr(transformers, architecture)(config)
            else:
                network = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise InputError(f"{origin}: transformers cannot make {architecture or 'a causal language model'} of it: "
                         f"{type(error).__name__}: {error}") from error
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        raise InputError(f"{origin} has no decoder_start_token_id, with which the decoder's inputs begin: give it, as "
                         '"decoder_start_token_id": 0')
    with torch.device("meta"):
        network = network.to(dtype).train()
        most = _most_tokens(network, config) if network.main_input_name != "pixel_values" else None
        if most is not None and (lengths[0] or 0) > most:
            raise InputError(f"the sequence length is {lengths[0]}, and the model of {origin} has embeddings of {most} "
                             f"positions: give {most} or less (--sequence-length)")
        lengths = lengths[0], min(lengths[1], most or lengths[1])
        return network, (), _batch_of(network.main_input_name, config, origin, batch, lengths, dtype)


def _most_tokens(network: nn.Module, config: Any) -> int | None:
    """The longest sequence of a model that looks positions up in a table, as its config says; None of others. Where the
    table has a row for padding (RoBERTa), positions begin after it."""
    from torch import nn

    tables = [module for name, module in network.named_modules()
              if isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe"))]
    found = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)
    if not tables or not isinstance(found, int):
        return None
    return found - max(0 if table.padding_idx is None else table.padding_idx + 1 for table in tables)


def _batch_of(name: str, config: Any, origin: str, batch: int, lengths: tuple[int | None, int], dtype: Any
              ) -> dict[str, Any]:
    """A batch, on torch's default device, of a model whose main input has this name: images of the config's size, sound
    (Whisper: as many frames as its encoder takes) with labels of so many tokens, or ids of as many. ``lengths``: the
    number of tokens that was asked for, and the usual one."""
    import torch

    if name == "pixel_values" and lengths[0] is not None:
        raise InputError(f"the sequence length is {lengths[0]}, and {origin} is of a model of images, whose size the "
                         "config says: leave it out")
    sequence = lengths[0] or lengths[1]

    def sizes(what: str, *keys: str) -> list[int]:
        given = [getattr(config, key, None) for key in keys]
        found = [size for size in given if isinstance(size, int)]
        if len(found) < len(keys):
            told = ", ".join(f"{key} is {shown(size)}" for key, size in zip(keys, given, strict=True))
            raise InputError(f"{origin} says no size of {what} ({told}): give both as numbers, or write "
                             "module:function")
        return found

    def ids(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.long)

    if name == "pixel_values":
        size, channels = sizes("images", "image_size", "num_channels")
        return {name: torch.empty(batch, channels, size, size, dtype=dtype), "labels": ids(batch)}
    if name == "input_features":
        bins, positions = sizes("sound", "num_mel_bins", "max_source_positions")
        return {name: torch.empty(batch, bins, 2 * positions, dtype=dtype), "labels": ids(batch, sequence)}
    if name != "input_ids":
        raise InputError(f"{origin}: the model's main input is {name}, and batches are made of input_ids, pixel_values "
                         "and Whisper's input_features: write module:function, which makes the batch too")
    return {"input_ids": ids(batch, sequence), "labels": ids(batch, sequence)}
