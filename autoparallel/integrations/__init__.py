"""Training scripts of other libraries on a mesh, with another name for one class. Each name is imported when used."""

from __future__ import annotations

import importlib
import os
from collections.abc import MutableMapping
from typing import Any

from autoparallel.errors import InputError
from autoparallel.launch.environment import set_torch_variables

#: Name -> (file, what it needs installed).
_HOMES = {
    "AcceleratorWriter": ("accelerator", "accelerate"),
    "AutoparallelTrainer": ("trainer", "trainer"),
    "AutoparallelTraining": ("trainer", "trainer"),
    "AutoparallelAccelerator": ("accelerator", "accelerate"),
    "AutoparallelFabricStrategy": ("lightning", "lightning"),
    "AutoparallelLightningLog": ("lightning_log", "lightning"),
    "AutoparallelSFTTrainer": ("sft", "sft"),
    "AutoparallelStrategy": ("lightning", "lightning"),
    "AutoparallelTrainerLog": ("trainer_log", "trainer"),
}
__all__ = ["AcceleratorWriter", "AutoparallelAccelerator", "AutoparallelFabricStrategy", "AutoparallelLightningLog",
           "AutoparallelSFTTrainer", "AutoparallelStrategy", "AutoparallelTrainer", "AutoparallelTrainerLog",
           "AutoparallelTraining"]


def _say_cpus(environment: MutableMapping[str, str]) -> None:
    """Tell accelerate of ranks without accelerators: it takes each of them for a job of its own otherwise."""
    import torch  # seconds to import

    if int(environment.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available():
        environment.setdefault("ACCELERATE_USE_CPU", "1")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autoparallel.integrations' has no attribute {name!r}")
    file, extra = _HOMES[name]
    set_torch_variables(os.environ)  # mpirun's and srun's; the libraries read them before they call ours
    _say_cpus(os.environ)
    try:
        return getattr(importlib.import_module(f"autoparallel.integrations.{file}"), name)
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("accelerate", "lightning", "transformers", "trl"):
            raise
        raise InputError(f"{name} needs {error.name}: pip install 'autoparallel[{extra}]'") from error
