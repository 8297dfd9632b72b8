"""`export_plan`: a plan written down for another framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autoparallel.errors import PlanError, shown
from autoparallel.export.accelerate import accelerate
from autoparallel.export.deepspeed import deepspeed
from autoparallel.export.degrees import Degrees, Lost, degrees_of, masters_added, states_lost, tables_lost
from autoparallel.export.fsdp2 import fsdp2
from autoparallel.export.megatron import megatron
from autoparallel.export.torchtitan import torchtitan
from autoparallel.planning.by_hand import ByHand
from autoparallel.plans import Plan
from cost_models.files import write_whole

FORMATS: Mapping[str, Callable[[Plan, Degrees], tuple[dict[str, str], Degrees]]] = {
    "accelerate": accelerate, "deepspeed": deepspeed, "fsdp2": fsdp2, "megatron": megatron, "torchtitan": torchtitan}


@dataclass(frozen=True)
class Exported:
    """A plan for another framework. ``files``: texts by name. ``lost``: what of the plan they do not say.
    ``by_hand``: the degrees that they do say, to price as `autoparallel.plan(..., by_hand=exported.by_hand)`."""

    to: str
    files: Mapping[str, str]
    lost: tuple[Lost, ...]
    by_hand: ByHand

    def save(self, folder: str | Path) -> list[Path]:
        """Write the files; the folder is made if it is not there. Raises PlanError when one cannot be written."""
        written = []
        for name, text in self.files.items():
            path = Path(folder) / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, text)
            except OSError as error:
                raise PlanError(f"cannot write {path}: {error.strerror}") from error
            written.append(path)
        return written


def export_plan(plan: Plan, to: str) -> Exported:
    """``plan`` as files of "fsdp2" (a Python file for torch alone), "torchtitan", "megatron" (Megatron-LM),
    "deepspeed" or "accelerate".

    What the framework can say is said exactly; what it cannot is listed in ``lost``. Raises PlanError for an unknown
    format, and for plans that the framework would refuse, with its rule.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"export_plan of {shown(plan)}: give a Plan, autoparallel.Plan.load(path) of a file")
    if not isinstance(to, str) or to not in FORMATS:
        raise PlanError(f"unknown format {shown(to)}; there are {', '.join(sorted(FORMATS))}")
    degrees = degrees_of(plan)
    if plan.hybrid.offload.is_away and to != "deepspeed":    # whose file says it, where it can
        degrees = degrees.losing([states_lost(plan)])
    if plan.hybrid.offload.steps_there:
        degrees = degrees.losing([Lost(plan.hybrid.offload.told(), "after backward, with all gradients in memory")])
    if to != "fsdp2":    # where the model trains in the dtypes that it has
        degrees = degrees.losing(masters_added(plan))
    if to != "fsdp2" and degrees.hand.recompute == "all_but_attention":
        degrees = degrees.losing([Lost("recompute of all but attention", "of whole blocks")], recompute="full")
    if plan.hybrid.on_host:
        degrees = degrees.losing([tables_lost(plan)])
    files, said = FORMATS[to](plan, degrees)
    return Exported(to, files, said.lost, said.hand)


__all__ = ["FORMATS", "Exported", "export_plan"]
