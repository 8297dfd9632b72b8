"""Capture: model -> OpGraph. See README.md."""

from autoparallel.capture.any_numbers import capture_for_any
from autoparallel.capture.blocks import Block, find_blocks
from autoparallel.capture.build import call_text, canonical_call, capture, once_each, refuse_other_layouts
from autoparallel.capture.devices import traced_on
from autoparallel.capture.graph import Node, OpGraph, Ref, TensorMeta, op_signature

__all__ = ["Block", "Node", "OpGraph", "Ref", "TensorMeta", "call_text", "canonical_call", "capture",
           "capture_for_any", "find_blocks", "once_each", "op_signature", "refuse_other_layouts",
           "traced_on"]
