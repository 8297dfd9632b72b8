"""Reports: why this plan, what it costs. See README.md."""

from autoparallel.planning.block_summary import block_layouts
from autoparallel.plans.text import bytes_str, print_report, seconds_str, text_report

__all__ = ["block_layouts", "bytes_str", "print_report", "seconds_str", "text_report"]
