"""Step time and memory of published training runs, predicted from model, machine and plan.

`predict` takes a row as published (see README.md of the benchmarks for its fields); ``python -m
benchmarks.published_runs --runs FILE`` compares a file of rows with what was measured.
"""

from benchmarks.published_runs.predict import AbstainError, explain, predict

__all__ = ["AbstainError", "explain", "predict"]
