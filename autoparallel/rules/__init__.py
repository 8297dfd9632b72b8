"""Rules: the placements with which each op may run on one mesh axis. See README.md."""

from autoparallel.rules.registry import find_rule, rule_for
from autoparallel.rules.rule import AxisStrategy, Rule, einsum_rule

__all__ = ["AxisStrategy", "Rule", "einsum_rule", "find_rule", "rule_for"]
