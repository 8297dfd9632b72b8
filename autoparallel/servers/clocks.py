"""Steps of the workers on one server: who may go on, and who is waited for. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Clocks:
    """``pushed``: by worker, the steps that it has pushed, which is also the number of its next step.

    A worker may read and push step ``c`` if every worker has pushed ``c - staleness`` steps (0: it has seen all updates
    of the steps before, as one process does). ``expected``: workers that must have joined before the first step.
    """

    staleness: int
    expected: int
    pushed: dict[int, int] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)

    @property
    def gathered(self) -> bool:
        return len(self.joined) >= self.expected

    @property
    def lowest(self) -> int:
        """Steps that every worker has pushed."""
        return min(self.pushed.values(), default=0)

    def admits(self, step: int) -> bool:
        return self.gathered and step - self.lowest <= self.staleness

    def missing(self, step: int) -> list[int]:
        """Workers whose pushes step ``step`` waits for."""
        return sorted(worker for worker, pushed in self.pushed.items() if step - pushed > self.staleness)


__all__ = ["Clocks"]
