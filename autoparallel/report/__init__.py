"""Reports: why this plan, what it costs. See README.md."""

from autoparallel.report.blocks import block_layouts
from autoparallel.report.text import bytes_str, print_report, seconds_str, text_report

__all__ = ["block_layouts", "bytes_str", "print_report", "seconds_str", "text_report"]
