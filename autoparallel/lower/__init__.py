"""Lowering: plan -> one program per rank. See README.md."""

from autoparallel.lower.check import check, count_collectives, order_digest
from autoparallel.lower.emit import Program, emit
from autoparallel.lower.parameter_reads import sum_gradients_in

__all__ = ["Program", "check", "count_collectives", "emit", "order_digest", "sum_gradients_in"]
