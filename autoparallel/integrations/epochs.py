"""The epochs of accelerate's loaders, which its states leave out: a run that goes on takes the next samples.

accelerate counts a loader's epochs in its ``iteration``, from which a seedable sampler draws its order. A loader of a
new process starts at 0, whatever epoch the state was saved in.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: File in a state's folder of parallel modules; written last, so that a state with it is whole.
EPOCHS = "loaders.json"


@dataclass(frozen=True)
class Loaded:
    """A loader in a state: the epoch that its next batch is of, and the samples of a batch (None: not told)."""

    epoch: int
    batch_size: int | None

    @staticmethod
    def of(loader: Any) -> Loaded:
        active = loader.gradient_state.active_dataloader
        whole = getattr(active, "whole_loader", active)
        ends = whole is loader and active.end_of_dataloader  # in the last batch the next one is of the next epoch
        sampler = getattr(loader, "batch_sampler", None)
        return Loaded(loader.iteration + ends, getattr(sampler, "batch_size", None))


def rest_of_epoch(rest: Any, whole: Any) -> Any:
    """``rest``, made of ``whole`` by accelerate's ``skip_first_batches``; at its end ``whole`` is an epoch further."""
    ended, epoch = rest.end, whole.iteration

    def end() -> None:
        ended()
        whole.iteration = epoch + 1

    rest.end, rest.whole_loader = end, whole
    return rest


def save_epochs(loaders: Sequence[Any], folder: Path) -> None:
    """Write where the loaders are into a folder of a state."""
    folder.mkdir(exist_ok=True)
    (folder / EPOCHS).write_text(json.dumps([asdict(Loaded.of(loader)) for loader in loaders]))


def load_epochs(loaders: Sequence[Any], folder: Path) -> None:
    """Let loaders go on in the epochs of a state; one without that file (of an older release) leaves them.

    Warns where there are other loaders, or other batches, than those of the state.
    """
    if not (folder / EPOCHS).exists():
        return
    saved = [Loaded(**one) for one in json.loads((folder / EPOCHS).read_text())]
    if len(saved) != len(loaders):
        warnings.warn(f"{folder.parent} was saved with {len(saved)} prepared loaders, and there are {len(loaders)}: "
                      "these start with their first epoch", stacklevel=3)
        return
    for loader, before in zip(loaders, saved, strict=True):
        loader.set_epoch(before.epoch)
        now = Loaded.of(loader)
        if now.batch_size != before.batch_size:
            warnings.warn(f"{folder.parent} was saved with batches of {before.batch_size} samples on all ranks, which "
                          f"are {now.batch_size} now: losses, schedules and the samples that skip_first_batches leaves "
                          "out are others\n  Divide the batch size by accelerator.num_processes, or give "
                          "DataLoaderConfiguration(split_batches=True), where it is that of all ranks.", stacklevel=3)


__all__ = ["EPOCHS", "Loaded", "load_epochs", "rest_of_epoch", "save_epochs"]
