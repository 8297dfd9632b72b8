"""Lowering: a plan becomes one program per rank. See README.md."""

from autoparallel.lower.emit import Program, emit

__all__ = ["Program", "emit"]
