"""Files of weights that do not fit what they are loaded into are refused on all ranks, with nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import autoparallel
from autoparallel.errors import AutoparallelError
from tests.support.language import VOCABULARY, adapted, llama, whole
from tests.support.ranks import mesh_of

pytest.importorskip("transformers")


def on_mesh(model: Any) -> Any:
    ids = torch.randint(0, VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(0))
    return autoparallel.compile(model, mesh_of(2), baseline="fsdp", example_kwargs={"input_ids": ids, "labels": ids})


def told_of(build: Callable[[], Any], folders: list[Path]) -> tuple[list[str], bool]:
    """What is told of each folder; whether all parameters are as they were."""
    parallel, told = on_mesh(build()), []
    before = whole(parallel)
    for folder in folders:
        try:
            parallel.load_pretrained(folder)
            told.append("no error")
        except AutoparallelError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told, all(torch.equal(value, before[name]) for name, value in whole(parallel).items())


def edited(source: Path, target: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """A copy of a folder with one file of tensors, some of which are changed."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, target / file.name, metadata={"format": "pt"})
    return target


def test_adapters_without_some_tensors_are_refused(ranks: Any, tmp_path: Path) -> None:
    """What the file lacked stayed as it was made ("All keys matched")."""
    pytest.importorskip("peft")
    adapted().save_pretrained(tmp_path / "whole")
    short = edited(tmp_path / "whole", tmp_path / "short", lambda tensors: tensors.pop(min(tensors)))
    for (good, lacking), unchanged in ranks(2).run(told_of, adapted, [tmp_path / "whole", short], timeout_s=100):
        assert good == "no error" and unchanged
        assert lacking.startswith("InputError") and "missing ['base_model.model.model.layers.0" in lacking, lacking


def tied() -> Any:
    return llama(tie_word_embeddings=True)


def test_weights_that_were_not_tied_are_refused(ranks: Any, tmp_path: Path) -> None:
    """Of two different values of a weight that is tied here, one was lost."""
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(tmp_path / "untied")
    equal = edited(tmp_path / "untied", tmp_path / "equal", lambda tensors: tensors.update(
        {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    for (other, same), _ in ranks(2).run(told_of, tied, [tmp_path / "untied", equal], timeout_s=100):
        assert other.startswith("InputError") and "are one weight of this model, and have different" in other, other
        assert same == "no error"


def test_broken_files_are_named(ranks: Any, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    second = next(file for file in sorted((tmp_path / "parts").glob("*.safetensors")) if "-00002-" in file.name)
    second.write_bytes(second.read_bytes()[:-100])
    (tmp_path / "gone").mkdir()
    for file in (tmp_path / "parts").iterdir():
        if file != second:
            (tmp_path / "gone" / file.name).write_bytes(file.read_bytes())
    found = ranks(2).run(told_of, llama, [tmp_path / "parts", tmp_path / "gone"], timeout_s=100)
    for told, unchanged in found:
        assert unchanged
        assert all(f"{second.name} cannot be read" in text and "not whole" in text for text in told), told
