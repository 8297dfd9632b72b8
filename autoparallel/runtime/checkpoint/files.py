"""Safetensors files: written tensor by tensor, read by boxes. The format: 8 bytes with the header's length, the header
(JSON: name -> dtype, shape, offsets), the tensors' bytes (github.com/huggingface/safetensors)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from autoparallel.errors import InputError, shown

#: Names of dtypes in the files.
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
          torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64"}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_OF_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class Entry:
    """A tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"{self.name} has the dtype {self.dtype}, which safetensors does not have: convert it "
                             "before saving, or save by parallel.save(...)")

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def bytes_of(size: int | str) -> int:
    """A number of bytes, as 5_000_000_000 or "5GB". Raises InputError for anything else.

    >>> bytes_of("5GB"), bytes_of("1.5 KiB"), bytes_of(7)
    (5000000000, 1536, 7)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", str(size), re.IGNORECASE)
    unit = found.group(2).upper() if found else None
    if found is None or (unit or "") not in _UNITS or isinstance(size, bool):
        raise InputError(f"max_shard_size is {shown(size)}: give a number of bytes, as 5_000_000_000 or \"5GB\"")
    return int(float(found.group(1)) * _UNITS[unit or ""])


def split(entries: Sequence[Entry], max_bytes: int) -> list[list[Entry]]:
    """The entries in order, in files of at most ``max_bytes``, or of one larger tensor.

    >>> sizes = [Entry("abc"[n], torch.uint8, (size,)) for n, size in enumerate((3, 4, 9))]
    >>> [[entry.name for entry in part] for part in split(sizes, 8)]
    [['a', 'b'], ['c']]
    """
    parts: list[list[Entry]] = [[]]
    for entry in entries:
        if parts[-1] and sum(e.num_bytes for e in parts[-1]) + entry.num_bytes > max_bytes:
            parts.append([])
        parts[-1].append(entry)
    return parts


class Writer:
    """Writes tensors, in any order, into ``model.safetensors``, or numbered files and an index, of a folder."""

    def __init__(self, folder: Path, entries: Sequence[Entry], max_bytes: int) -> None:
        parts = split(entries, max_bytes)
        self._folder = folder
        self._names = [WEIGHTS] if len(parts) == 1 else [
            f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors" for number in range(len(parts))]
        self._places: dict[str, tuple[int, int, Entry]] = {}
        self._files: list[BinaryIO] = []
        for number, (name, part) in enumerate(zip(self._names, parts, strict=True)):
            self._files.append((folder / name).open("wb"))
            self._begin(number, part)

    def _begin(self, number: int, part: Sequence[Entry]) -> None:
        """Write the header of one file, and note where its tensors go."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entry in sorted(part, key=lambda entry: -entry.dtype.itemsize):  # large ones first: all are aligned
            header[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": list(entry.shape),
                                  "data_offsets": [offset, offset + entry.num_bytes]}
            self._places[entry.name] = number, offset, entry
            offset += entry.num_bytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._files[number].write(len(text).to_bytes(8, "little") + text)
        start = 8 + len(text)
        self._files[number].truncate(start + offset)
        for entry in part:
            known, offset, _ = self._places[entry.name]
            self._places[entry.name] = known, start + offset, entry

    def write(self, name: str, tensor: torch.Tensor) -> None:
        number, offset, entry = self._places[name]
        if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            raise InputError(f"{name} is {tensor.dtype} {list(tensor.shape)}, {entry.dtype} {list(entry.shape)} was "
                             "announced")
        self._files[number].seek(offset)
        self._files[number].write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self, finished: bool) -> None:
        """Close the files; write the index of several if all tensors were written."""
        for file in self._files:
            file.close()
        if finished and len(self._names) > 1:
            total = sum(entry.num_bytes for _, _, entry in self._places.values())
            index = {"metadata": {"total_size": total},
                     "weight_map": {name: self._names[number] for name, (number, _, _) in self._places.items()}}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def is_of_weights(name: str) -> bool:
    """Whether a file of a folder holds weights (or their index) as `Writer` names them."""
    return _OF_WEIGHTS.fullmatch(name) is not None


class Reader:
    """Tensors of a safetensors file, or of all of a folder (by its index, if it has one). Reads only what is asked."""

    def __init__(self, path: Path) -> None:
        self._file_of: dict[str, Path] = {}
        for file in self._files_of(path):
            try:
                with safe_open(file, framework="pt") as opened:
                    self._file_of.update(dict.fromkeys(opened.keys(), file))
            except (SafetensorError, OSError) as error:
                raise InputError(f"{file} cannot be read: {error}\n  It is not there, or not whole: copy or save it "
                                 "again.") from error

    @staticmethod
    def _files_of(path: Path) -> list[Path]:
        if path.is_file():
            return [path]
        if (path / INDEX).exists():
            return [path / name for name in sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))]
        known = [path / name for name in (WEIGHTS, "adapter_model.safetensors") if (path / name).exists()]
        if found := known[:1] or sorted(path.glob("*.safetensors")):
            return found
        raise InputError(f"{path} has no safetensors files: give the folder of save_pretrained, or a file "
                         "(pickled .bin files: convert them by the model's own from_pretrained and save_pretrained)")

    @cached_property
    def names(self) -> list[str]:
        return sorted(self._file_of)

    def entry(self, name: str) -> Entry:
        with safe_open(self._file_of[name], framework="pt") as opened:
            piece = opened.get_slice(name)
            return Entry(name, _BY_NAME[piece.get_dtype()], tuple(piece.get_shape()))

    def read(self, name: str, box: tuple[tuple[int, ...], tuple[int, ...]] | None = None) -> torch.Tensor:
        """The tensor, or its box (offsets, lengths)."""
        with safe_open(self._file_of[name], framework="pt") as opened:
            if box is None or not box[0]:
                return opened.get_tensor(name)
            return opened.get_slice(name)[tuple(slice(start, start + length)
                                                for start, length in zip(*box, strict=True))]


__all__ = ["DTYPES", "INDEX", "WEIGHTS", "Entry", "Reader", "Writer", "bytes_of", "is_of_weights", "split"]
