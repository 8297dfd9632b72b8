"""`plan` and `compile` have typed keywords with their defaults, which help() shows, and the same options."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autoparallel
from autoparallel.errors import PlanError
from autoparallel.planning.options import Options


@pytest.mark.parametrize("function", [autoparallel.plan, autoparallel.compile])
def test_options_are_keywords_with_their_defaults(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for field in (field for field in dataclasses.fields(Options) if not field.metadata):
        expected = field.default, field.type
        if function is autoparallel.plan and field.name == "time_limit_s":
            expected = None, "float | None"    # a joint search has another limit
        assert (parameters[field.name].default, parameters[field.name].annotation) == expected


@pytest.mark.parametrize("function", [autoparallel.plan, autoparallel.compile])
def test_help_says_what_each_keyword_is(function: Callable[..., Any]) -> None:
    text = pydoc.render_doc(function, renderer=pydoc.plaintext)
    told = {name.strip() for line in text.splitlines() if ": " in line for name in line.split(": ")[0].split(",")}
    assert set(inspect.signature(function).parameters) <= told


def test_unknown_keywords_name_the_nearest() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(PlanError, match="unknown option 'micro_batch'; there are \\['micro_batches'"):
        autoparallel.plan(torch.nn.Linear(4, 4), "h100-sxm", example_inputs=(x,), micro_batch=2)  # type: ignore[call-arg]
    with pytest.raises(PlanError, match="check_inputs belongs to autoparallel"):
        autoparallel.plan(torch.nn.Linear(4, 4), "h100-sxm", example_inputs=(x,), check_inputs=2)  # type: ignore[call-arg]
