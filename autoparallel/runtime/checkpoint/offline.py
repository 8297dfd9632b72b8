"""Checkpoints of `parallel.save` without ranks: what is in one, whether it can be read, its weights as safetensors."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from autoparallel.errors import InputError
from autoparallel.runtime.checkpoint.files import INDEX, Entry, Writer, bytes_of, split
from autoparallel.runtime.checkpoint.job import IN_OTHERS, Checkpoint, newest, reason

_AT_A_TIME = 2**30  # bytes of tensors that are read together
_PREFIX = "model."


@dataclass(frozen=True)
class Contents:
    """A checkpoint's weights (by the model's names) and the bytes of its optimizer's tensors."""

    checkpoint: Checkpoint
    weights: tuple[Entry, ...]
    optimizer_bytes: int

    @property
    def weight_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.weights)


def contents(folder: str | os.PathLike[str], step: int | None = None) -> Contents:
    """The contents of the newest checkpoint of a folder (of ``step``, if given; or of the folder, if it is a checkpoint
    itself, also one of transformers' Trainer or accelerate). Raises InputError if there is none."""
    found = newest(Path(folder), step)
    if found is None:
        raise InputError(f"{folder} has no checkpoint of parallel.save{_instead(Path(folder))}")
    try:
        stored = dcp.FileSystemReader(found.path).read_metadata().state_dict_metadata
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise InputError(f"{found.path} cannot be read: {type(error).__name__}: {error}") from error
    tensors = {name: Entry(name, kept.properties.dtype, tuple(kept.size)) for name, kept in stored.items()
               if isinstance(kept, TensorStorageMetadata)}
    weights = [Entry(name.removeprefix(_PREFIX), entry.dtype, entry.shape) for name, entry in tensors.items()
               if name.startswith(_PREFIX)]
    state = sum(entry.num_bytes for name, entry in tensors.items() if name.startswith("optimizer."))
    return Contents(found, tuple(weights), state)


def _instead(path: Path) -> str:
    """What to give for a folder or file of another kind."""
    if path.is_file():
        return ": it is a file (Lightning's .ckpt has whole tensors, which torch.load reads)"
    if having := sorted(path.glob(f"*/{IN_OTHERS}"), key=lambda one: one.stat().st_mtime):
        return f": give one of the checkpoints in it, such as {having[-1].parent}"
    return ": it has files of weights, which from_pretrained reads" if list(path.glob("*.safetensors")) else ""


def read(found: Contents) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight, whole. Raises InputError for one that cannot be read."""
    for part in split(found.weights, _AT_A_TIME):
        values = {entry.name: torch.empty(entry.shape, dtype=entry.dtype) for entry in part}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is meant
                dcp.load({"model": values}, checkpoint_id=found.checkpoint.path, no_dist=True)
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            raise InputError(f"{found.checkpoint.path}: {part[0].name} to {part[-1].name} cannot be read: "
                             f"{reason(error)}") from error
        yield from values.items()


def verify(found: Contents) -> list[str]:
    """Read all weights; the names of those with values that are not finite."""
    return [name for name, value in read(found) if value.is_floating_point() and not bool(torch.isfinite(value).all())]


def to_safetensors(found: Contents, output: str | os.PathLike[str], max_shard_size: int | str = "5GB") -> None:
    """Write the weights as safetensors files, under the model's names; none, if one cannot be read. Raises InputError
    then, for a folder that has files, and where it cannot be written."""
    folder, limit = Path(output), bytes_of(max_shard_size)
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"{folder} has files: give an empty folder, or one that is not there yet")
        try:
            _write(found, folder, limit)
        except BaseException:
            if is_new:
                folder.rmdir()
            raise
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror or error}: give a folder in which you may "
                         f"write, on a disk with {found.weight_bytes} bytes left") from error


def _write(found: Contents, folder: Path, limit: int) -> None:
    """Files have zeros where nothing was written yet, so that they get their places at the end."""
    with TemporaryDirectory(dir=folder, prefix=".partial-") as made:
        writer, finished = Writer(Path(made), found.weights, limit), False
        try:
            for name, value in read(found):
                writer.write(name, value)
            finished = True
        finally:
            writer.close(finished)
        for file in sorted(Path(made).iterdir(), key=lambda file: file.name == INDEX):
            file.replace(folder / file.name)


__all__ = ["Contents", "contents", "read", "to_safetensors", "verify"]
