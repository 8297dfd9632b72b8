"""What a job of parameter servers is told, checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autoparallel.errors import ServerError, shown
from autoparallel.servers.journal import DURABILITY

ON_LOSS = ("error", "continue")


@dataclass(frozen=True)
class Settings:
    """The arguments of `serve_parameters`, with the numbers of servers and workers."""

    servers: int
    workers: int
    staleness: int = 0
    checkpoint_dir: Path | None = None
    checkpoint_every: int = 1000
    durability: str = "log"
    on_worker_loss: str = "error"
    resume: bool = False
    timeout_s: float = 300.0
    lost_after_s: float = 30.0

    def __post_init__(self) -> None:
        for name, least in (("servers", 1), ("workers", 1), ("staleness", 0), ("checkpoint_every", 1)):
            if type(value := getattr(self, name)) is not int or value < least:
                raise ServerError(f"{name} is {shown(value)}: an int of {least} or more is required")
        for name in ("timeout_s", "lost_after_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
                raise ServerError(f"{name} is {shown(value)}: seconds, above 0 and below 1e6, are required")
        for name, known in (("durability", DURABILITY), ("on_worker_loss", ON_LOSS)):
            if getattr(self, name) not in known:
                raise ServerError(f"{name} is {shown(getattr(self, name))}: one of {', '.join(known)} is required")
        if self.resume and self.checkpoint_dir is None:
            raise ServerError("resume=True needs checkpoint_dir, the folder of the earlier job")

    @property
    def agreed(self) -> tuple[int, int, float, float]:
        """The settings that must be equal on all processes of a job."""
        return self.servers, self.staleness, self.timeout_s, self.lost_after_s


__all__ = ["ON_LOSS", "Settings"]
