"""What to write where torch refuses DTensors, told below the traceback of an error that ends the script."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache, partial
from types import TracebackType

#: What torch says, and what to write.
_HINTS = (
    ("an exception occurred : ('aten.copy_.default got mixed torch.Tensor and DTensor",
     "A part of a parallel module does not load whole tensors: its parameters are DTensors.\n  Load by the parallel "
     "module, on all ranks, with the names from its root: parallel.load_state_dict({f\"encoder.{name}\": value for "
     "name, value in state.items()}, strict=False)."),
    ("got mixed torch.Tensor and DTensor",
     "Parameters of a parallel module, and outputs that its plan shards, are DTensors, and a plain tensor does not mix "
     "with them.\n  Write value.full_tensor() of the DTensor, on all ranks (gradients flow back), or of the plain "
     "one distribute_tensor(plain, value.device_mesh, value.placements); for a loss or a metric of a parallel module's "
     "outputs: autoparallel.compile(..., outputs=\"whole\")."),
    *((said, "torch does not run this op on DTensors as they are laid out here; parameters of a parallel module are "
             "DTensors, and outputs that its plan shards.\n  Apply it to value.full_tensor(), on all ranks; gradients "
             "flow back. Or compile with outputs=\"whole\".")
      for said in ("does not have a sharding strategy registered", "as_strided not supported with DTensor",
                   "Sharding propagation failed", "unevenly sharded tensor", "along the sharded dimension")),
    ("in-place operations that require placement changes are not supported",
     "torch does not write this into the shards of a DTensor.\n  Write to the whole: `whole = value.full_tensor()`, on "
     "all ranks, and then `with torch.no_grad(): value.copy_(distribute_tensor(whole, value.device_mesh, "
     "value.placements))`."),
    ("Attempted to access the data pointer on an invalid python storage",
     "safetensors writes files from memory, which DTensors, as parameters of a parallel module are, do not have.\n"
     "  Write parallel.save_pretrained(folder), of the whole module, on all ranks; of other tensors "
     "value.full_tensor(), on all ranks. Adapters are merged in one process: PeftModel.from_pretrained(model, "
     "folder).merge_and_unload()."),
    ("its data is not allocated yet",
     "torch.tensor reads a list of tensors from memory, which DTensors, as parameters of a parallel module, their "
     "gradients and norms are, do not have.\n  Write torch.stack([value.full_tensor() for value in values]), or "
     "torch.tensor([float(value) for value in values]), on all ranks. The norm of all gradients, as Lightning's "
     "grad_norm makes it, is parallel.clip_grad_norm_(float(\"inf\"))."),
    ("needed for gradient computation has been modified by an inplace operation",
     "If the plan steps parameters during backward (step_in_backward=True), a parameter may be read twice: with "
     "gradient, and, in an earlier layer, without (detach(), torch.no_grad()), where backward comes after its step.\n  "
     "Compile without step_in_backward, or read it with gradient."),
    ("marked with @once_differentiable",
     "Gradients of attention along a dim that a plan cuts are not differentiated again (create_graph=True).\n  "
     "Compile with a plan that cuts no such dim: baseline=\"ddp\" or \"fsdp\"."),
)
#: Of an assertion without words, which fails where torch dispatches an op.
_WRITTEN_INTO = ("a DTensor is written into a plain tensor.\n  Write loss = loss + term in place of loss += term, or "
                 "plain.copy_(value.full_tensor()), on all ranks.")
#: Of an output, which has the rows of all ranks, and a target of one rank's rows.
_OF_ROWS = ("Expected input batch_size", "must match the size of tensor", "must be the same as input size",
            "got mixed torch.Tensor and DTensor")
_ALL_ROWS = ("With inputs=\"local\" outputs have the rows of all ranks, in rank order.\n  For a loss outside of the "
             "model take the targets with the batch: x, y = parallel.shard_batch((x, y)), then "
             "criterion(parallel(x), y).")
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@cache
def add_hints() -> None:
    """Tell these, from now on, before what the process does with an error now."""
    sys.excepthook = partial(_told, sys.excepthook)


@cache
def add_hint_of_rows() -> None:
    """Also tell, from now on, whose rows outputs of a module with ``inputs="local"`` have."""
    sys.excepthook = partial(_told_of_rows, sys.excepthook)


def _told_of_rows(hook: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, (RuntimeError, ValueError)) and any(said in str(error) for said in _OF_ROWS):
        error.add_note(_ALL_ROWS)
    hook(kind, error, trace)


def _told(hook: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    hints = (hint for said, hint in _HINTS if said in str(error))
    if isinstance(error, RuntimeError) and (hint := next(hints, None)):
        error.add_note(hint)
    if isinstance(error, AssertionError) and not error.args and _raised_in(trace).endswith("tensor/_dispatch.py"):
        error.add_note(_WRITTEN_INTO)
    hook(kind, error, trace)


def _raised_in(trace: TracebackType | None) -> str:
    """The file in which an error was raised."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else trace.tb_frame.f_code.co_filename.replace(os.sep, "/")


__all__ = ["add_hint_of_rows", "add_hints"]
