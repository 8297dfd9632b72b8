"""`save_pretrained` and `load_pretrained` of a parallel module: safetensors with whole tensors."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoparallel.errors import InputError, shown
from autoparallel.layout import from_torch, local_boxes
from autoparallel.runtime import initialise
from autoparallel.runtime.agree import decide_once, made_equally
from autoparallel.runtime.checkpoint import names
from autoparallel.runtime.checkpoint.files import Entry, Reader, Writer, bytes_of, is_of_weights
from autoparallel.runtime.checkpoint.whole import whole_tensors
from autoparallel.runtime.state import State

#: Options of other libraries' save_pretrained that say what is so here anyway.
_ALWAYS_SO = frozenset({"is_main_process", "save_function", "safe_serialization", "save_peft_format"})


def save(parallel: nn.Module, state: State, directory: str | os.PathLike[str], max_shard_size: int | str,
         state_dict: Mapping[str, torch.Tensor] | None, options: Mapping[str, Any]) -> None:
    """Write the weights to ``directory``, as `ParallelModule.save_pretrained` says. All ranks call this."""
    options = {name: value for name, value in options.items() if name not in _ALWAYS_SO}
    if options.pop("push_to_hub", False):
        raise InputError("push_to_hub: save first, then call huggingface_hub.upload_folder on one rank")
    values = dict(nn.Module.state_dict(parallel)) if state_dict is None else dict(state_dict)
    folder, limit = Path(directory), made_equally("where to save", lambda: bytes_of(max_shard_size),
                                                  lambda size: f"{directory} {size}")
    if folder.is_file():
        raise InputError(f"{folder} is a file: give a folder, which is made if it is not there")
    if names.is_adapter(state.model):
        _save_adapters(values, state, folder, options)
    else:
        _save_all(values, state, folder, limit, options)


def _save_all(values: Mapping[str, torch.Tensor], state: State, folder: Path, limit: int, options: Mapping[str, Any]
              ) -> None:
    conversions, files = names.to_files(state.model)
    entries = [Entry(name, value.dtype, tuple(value.shape)) for name, value in files.items()]
    stream = whole_tensors(values, [n for c in conversions for n in c.sources], state.position, state.device)
    failure: Exception | None = None
    with _replaced(folder) as made:
        writer = None
        for conversion in conversions:
            tensors = dict([next(stream) for _ in conversion.sources])
            if dist.get_rank() != 0 or failure is not None:
                continue  # a failed rank 0 takes part in the rest: the others wait for it
            try:
                writer = writer or _begun(state.model, made, entries, limit, options)
                for name, value in conversion.make(tensors).items():  # type: ignore[arg-type]
                    writer.write(name, value)
            except Exception as error:
                failure = error

        def finish() -> None:
            if writer is not None:
                writer.close(failure is None)
            if failure is not None:
                raise failure
            _move(made, folder)

        decide_once(finish)


def _begun(model: nn.Module, folder: Path, entries: list[Entry], limit: int, options: Mapping[str, Any]) -> Writer:
    if names.is_of_transformers(model):
        names.save_configuration(model, folder, options)
        for file in filter(lambda file: is_of_weights(file.name), list(folder.iterdir())):
            file.unlink()
    elif options:
        raise InputError(f"save_pretrained of {type(model).__name__}, which is no model of transformers, has no "
                         f"options {sorted(options)}")
    return Writer(folder, entries, limit)


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """A folder beside the target for rank 0 to write in, so that a broken save leaves an older one whole."""
    if dist.get_rank() != 0:
        yield folder
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
        yield Path(made)


def _move(made: Path, folder: Path) -> None:
    """Move all files to ``folder``; weights that were there before and have other names are removed."""
    folder.mkdir(exist_ok=True)
    written = {file.name for file in made.iterdir()}
    for name in written:
        (made / name).replace(folder / name)
    for file in list(folder.iterdir()):
        if is_of_weights(file.name) and file.name not in written:
            file.unlink()


def _save_adapters(values: Mapping[str, torch.Tensor], state: State, folder: Path, options: Mapping[str, Any]) -> None:
    model: Any = state.model
    wanted = sorted({name for adapter in model.peft_config for name in names.of_adapter(model, adapter).values()})
    wholes = {name: whole for name, whole in whole_tensors(values, wanted, state.position, state.device)
              if whole is not None}

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(str(folder), state_dict=wholes, **options)

    decide_once(write)


def load(parallel: nn.Module, state: State, path: str | os.PathLike[str], strict: bool) -> Any:
    """Read weights, as `ParallelModule.load_pretrained` says. All ranks call this; each reads its shards."""
    here = _held(parallel)

    def check() -> tuple[Reader, list[names.Conversion], list[str], list[str]]:
        if not Path(path).exists():
            raise InputError(f"{shown(str(path))} is not there: give the folder of save_pretrained, or a file")
        reader = Reader(Path(path))
        conversions, unexpected = names.from_files(state.model, reader.names)
        found = {target for conversion in conversions for target in conversion.targets}
        missing = _missing(state.model, parallel, found)
        if strict and (missing or unexpected):
            raise InputError(f"{path} does not fit the model: missing {missing[:5]}, unexpected {unexpected[:5]} "
                             f"({len(missing)} and {len(unexpected)})\n  strict=False loads the rest; then "
                             "init_weights() gives values to what is still on the meta device.")
        for conversion in conversions:
            _check_shapes(conversion, reader, here)
        _check_tied(conversions, reader, here)
        return reader, conversions, missing, unexpected

    reader, conversions, missing, unexpected = made_equally("a checkpoint", check, lambda _: "")
    for conversion in conversions:
        _load(parallel, conversion, reader, here, state.device)
    for name, value in initialise.lost_buffers(state.model, state.device).items():
        initialise.set_value(parallel, name, value, state.device)
    return nn.modules.module._IncompatibleKeys(missing, unexpected)


def _held(parallel: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(nn.Module.named_parameters(parallel, remove_duplicate=False)),
            **dict(nn.Module.named_buffers(parallel, remove_duplicate=False))}


def _missing(model: nn.Module, parallel: nn.Module, found: set[str]) -> list[str]:
    """Names of the model's state dict, or of its adapter's, that the file lacks, tied ones aside."""
    if names.is_adapter(model):
        return sorted(set((names.of_active_adapter(model) or {}).values()) - found)
    own = model.state_dict(keep_vars=True)
    has = {id(own[name]) for name in found if name in own}
    return names.may_be_missing(model, [name for name, value in own.items() if id(value) not in has])


def _is_plain(conversion: names.Conversion) -> bool:
    return len(conversion.sources) == len(conversion.targets) == 1


def _check_shapes(conversion: names.Conversion, reader: Reader, here: Mapping[str, torch.Tensor]) -> None:
    if not _is_plain(conversion) or conversion.targets[0] not in here:
        return
    entry, old = reader.entry(conversion.sources[0]), here[conversion.targets[0]]
    if entry.shape != tuple(old.shape):
        raise InputError(f"{conversion.targets[0]} has shape {list(old.shape)}, and {list(entry.shape)} in the file")
    if old.is_meta:
        initialise.check_unwatched(conversion.targets[0], old)


def _check_tied(conversions: Sequence[names.Conversion], reader: Reader, here: Mapping[str, torch.Tensor]) -> None:
    """Raises InputError where a file has different values for weights that the model ties: one would be lost."""
    first: dict[int, names.Conversion] = {}
    for conversion in conversions:
        held = here.get(conversion.targets[0])
        if held is None or not _is_plain(conversion):
            continue
        other = first.setdefault(id(held), conversion)
        if other is not conversion and not torch.equal(*(
                _own(_shard(reader, one.sources[0], held)) for one in (other, conversion))):
            raise InputError(f"{other.targets[0]} and {conversion.targets[0]} are one weight of this model, and have "
                             "different values in the file: they were not tied there; set tie_word_embeddings=False "
                             "(or what ties them), or remove one from the file")


def _own(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _load(parallel: nn.Module, conversion: names.Conversion, reader: Reader, here: Mapping[str, torch.Tensor],
          device: torch.device) -> None:
    """Read one conversion's tensors: a plain one's shard only, others whole."""
    old = here.get(conversion.targets[0])
    if old is None and len(conversion.targets) == 1:
        return  # another pipeline stage's
    if _is_plain(conversion):
        assert old is not None
        initialise.set_value(parallel, conversion.targets[0], _shard(reader, conversion.sources[0], old), device)
        return
    for name, value in conversion.make({source: reader.read(source) for source in conversion.sources}).items():
        if name in here:
            initialise.set_value(parallel, name, value, device)


def _shard(reader: Reader, name: str, old: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor of a file, as a DTensor like ``old``; whole if ``old`` is."""
    if not isinstance(old, DTensor):
        return reader.read(name)
    mesh, layout, shape = old.device_mesh, from_torch(tuple(old.placements)), tuple(old.shape)
    boxes = local_boxes(shape, layout, mesh.shape, mesh.get_coordinate() or ())
    local = initialise.joined_boxes(boxes, lambda box: reader.read(name, (box.offsets, box.shape)))
    local = local.to(device=mesh.device_type)
    return initialise.as_dtensor(local, mesh, layout, shape)


__all__ = ["load", "save"]
