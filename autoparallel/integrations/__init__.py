"""Training scripts of other libraries on a mesh, with another name for one class. Each name is imported when used."""

from __future__ import annotations

import importlib
import os
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autoparallel.integrations' has no attribute {name!r}")
    file, extra = _HOMES[name]
    set_torch_variables(os.environ)  # mpirun's and srun's; the libraries read them before they call ours
    try:
        return getattr(importlib.import_module(f"autoparallel.integrations.{file}"), name)
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("accelerate", "lightning", "transformers", "trl"):
            raise
        raise InputError(f"{name} needs {error.name}: pip install 'autoparallel[{extra}]'") from error
