"""autoparallel: the fastest correct way to run a PyTorch model on many devices.

    parallel = autoparallel.compile(model, mesh)
    plan = autoparallel.plan(model, autoparallel.Cluster.load("h100-sxm", num_devices=64), example_kwargs=...)

Names are imported when first used, so that importing the package is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoparallel import errors, optim
    from autoparallel.advice import Advice, advise
    from autoparallel.api import compile, plan
    from autoparallel.export import Exported, Imported, export_plan, import_plan
    from autoparallel.fitting import Fitting, fit
    from autoparallel.launch.world import World, init
    from autoparallel.ops.bounded import Bounded, bound
    from autoparallel.planning.inference import inference_call
    from autoparallel.plans import Plan
    from autoparallel.regions import Regions, study
    from autoparallel.replanning import Replan, replan
    from autoparallel.rules.custom import register_rule
    from autoparallel.runtime.module import ParallelModule
    from autoparallel.runtime.padding import padded_to
    from autoparallel.runtime.scaler import GradScaler
    from autoparallel.runtime.step_log import JsonLines, StepLog, TensorBoard
    from autoparallel.schedule.table_caches import Cached
    from autoparallel.servers.start import serve_parameters
    from autoparallel.sizing import Sizing, size
    from cost_models import Cluster

__version__ = "0.2.0"
_HOMES = {
    "Advice": "autoparallel.advice",
    "advise": "autoparallel.advice",
    "Bounded": "autoparallel.ops.bounded",
    "bound": "autoparallel.ops.bounded",
    "Cached": "autoparallel.schedule.table_caches",
    "compile": "autoparallel.api",
    "plan": "autoparallel.api",
    "export_plan": "autoparallel.export",
    "import_plan": "autoparallel.export",
    "Fitting": "autoparallel.fitting",
    "fit": "autoparallel.fitting",
    "Exported": "autoparallel.export",
    "Imported": "autoparallel.export",
    "inference_call": "autoparallel.planning.inference",
    "init": "autoparallel.launch.world",
    "World": "autoparallel.launch.world",
    "Plan": "autoparallel.plans",
    "GradScaler": "autoparallel.runtime.scaler",
    "JsonLines": "autoparallel.runtime.step_log",
    "StepLog": "autoparallel.runtime.step_log",
    "TensorBoard": "autoparallel.runtime.step_log",
    "ParallelModule": "autoparallel.runtime.module",
    "padded_to": "autoparallel.runtime.padding",
    "serve_parameters": "autoparallel.servers.start",
    "Regions": "autoparallel.regions",
    "study": "autoparallel.regions",
    "Sizing": "autoparallel.sizing",
    "size": "autoparallel.sizing",
    "Cluster": "cost_models",
    "Replan": "autoparallel.replanning",
    "replan": "autoparallel.replanning",
    "register_rule": "autoparallel.rules.custom",
}
#: Modules that are read through the package, as ``autoparallel.optim.Adafactor``.
_MODULES = frozenset({"errors", "optim"})
__all__ = ["Advice", "Bounded", "Cached", "Cluster", "Exported", "Fitting", "GradScaler", "Imported", "JsonLines",
           "ParallelModule", "Plan", "Regions", "Replan", "Sizing", "StepLog", "TensorBoard", "World", "__version__",
           "advise", "bound", "compile", "errors", "export_plan", "fit", "import_plan", "inference_call", "init",
           "optim", "padded_to", "plan", "register_rule", "replan", "serve_parameters", "size", "study"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"autoparallel.{name}")
    raise AttributeError(f"module 'autoparallel' has no attribute {name!r}")
