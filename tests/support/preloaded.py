"""Imported once by the fork server of `tests.support.ranks`, so that no rank imports it again: a tenth of a second of a
rank's start instead of three."""

from __future__ import annotations

import gc
import importlib
import pkgutil

import torch

import autoparallel
import cost_models
from tests.support import overlapped, reference, steps  # noqa: F401
from tests.support.models import CASES

#: Imported by functions as they are called.
LATER = ("accelerate", "networkx", "torch._functorch.compile_utils", "torch._inductor.compile_fx",
         "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.export",
         "torch.export.passes", "torch.utils.flop_counter", "transformers.generation", "transformers.integrations.moe",
         "transformers.trainer")
#: Left out: what needs a package that few tests use or that is not installed for them (an import that fails ends the
#: preload without a word: multiprocessing ignores it), and a process of its own.
LEFT_OUT = ("autoparallel.integrations.lightning", "autoparallel.integrations.sft", "autoparallel.selftest.__main__",
            "autoparallel.search.ilp.highs_worker")

for package in (autoparallel, cost_models):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith(LEFT_OUT):
            importlib.import_module(module.name)
for name in LATER:
    importlib.import_module(name)
for case in CASES.values():  # its modeling file
    with torch.device("meta"):
        case.build()
# Ranks collect garbage among their own objects alone: a parallel module does so at its second call.
gc.collect()
gc.freeze()
gc.set_threshold(10_000, 20, 20)
