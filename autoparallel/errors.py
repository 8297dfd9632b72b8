"""The exception tree.

    AutoparallelError
      ClusterError          a cluster name or description that cannot be used
      TimelineError         tasks that cannot be simulated (cost_models.timeline)
      CaptureError          the model cannot be traced (data-dependent branch, unsupported construct), or fails itself
      RuleError             an op without a rule, or a rule that does not fit its op
      PinError              a pin that names nothing, or a placement that cannot hold
      PlanError             an option that cannot be, or a plan that does not belong to this model, version or mesh
      InfeasibleError       no plan meets the limits; says by how much and what would do
      SearchError           a search asked for something it cannot do (unknown name, malformed problem)
      LoweringError         the rewritten program failed its own check (a bug of ours: please report)
      LaunchError           a launcher's environment that describes no rank, or two; a command that cannot be started
      MeshError             no process group, one that is closed, or a mesh that does not fit the world
      InputError            a call whose inputs do not fit the traced program
        StateDictError      a state dict with other names or shapes than the model's; a RuntimeError too, as torch's
        StageError          a parameter that only other pipeline stages read; an AttributeError too, as torch's
      PeerError             a call in which another rank failed (`rank`), or anything after such a call
      ServerError           parameter servers that are told what cannot be, do not answer, or have lost their state

Every message says what was given, what is required and what to write instead.
"""

from typing import Any

from cost_models.errors import AutoparallelError, ClusterError, TimelineError

__all__ = [
    "AutoparallelError",
    "CaptureError",
    "ClusterError",
    "InfeasibleError",
    "InputError",
    "LaunchError",
    "LoweringError",
    "MeshError",
    "PeerError",
    "PinError",
    "PlanError",
    "RuleError",
    "SearchError",
    "ServerError",
    "StageError",
    "StateDictError",
    "TimelineError",
    "printable",
    "shown",
]


def printable(text: str) -> str:
    """Text for a terminal: control characters (but for line ends and tabs) as Python writes them, so that a name from a
    file cannot move the cursor or colour the screen."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


_LONGEST = 500    # characters


def shown(value: Any) -> str:
    """A value in an error message: short ones as they are, others by their type."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"of type {type(value).__name__}"


def clipped(text: str) -> str:
    """A text in a message: of a long one the beginning."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ... ({len(text)} characters)"


class CaptureError(AutoparallelError, RuntimeError):
    """The model cannot be traced."""


class RuleError(AutoparallelError, RuntimeError):
    """An op without a sharding rule, or a rule that does not fit its op."""


class PinError(AutoparallelError, ValueError):
    """A pin that names no parameter, input or module, or whose placement cannot hold there."""


class PlanError(AutoparallelError, ValueError):
    """An option that cannot be, or a plan that does not belong to this model, format version or mesh."""


class InfeasibleError(AutoparallelError, ValueError):
    """No plan meets the limits."""


class SearchError(AutoparallelError, ValueError):
    """A search was asked for something that it cannot do."""


class LoweringError(AutoparallelError, RuntimeError):
    """The rewritten program failed its own check."""


class LaunchError(AutoparallelError, RuntimeError):
    """The environment describes no rank, or two; or ranks cannot be started."""


class MeshError(AutoparallelError, RuntimeError):
    """No process group, or a mesh that does not fit the world."""


class InputError(AutoparallelError, ValueError):
    """A call whose inputs do not fit the traced program."""


class StageError(InputError, AttributeError):
    """A parameter is asked for that only other pipeline stages than this rank's read."""


class StateDictError(InputError, RuntimeError):
    """A state dict with other names or shapes than the model's."""


class BoundError(AutoparallelError, ValueError):
    """A call whose mask has more true elements than `autoparallel.bound` was told of."""


class ServerError(AutoparallelError, RuntimeError):
    """Parameter servers that cannot start, do not answer in time, or have lost their state."""


class PeerError(AutoparallelError, RuntimeError):
    """A call in which another rank failed, or after such a call; ``rank`` is the one that failed first."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
