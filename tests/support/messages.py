"""Error messages of our own tree, for tests: raised in this process, or on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autoparallel import Cluster, Plan
from autoparallel.api import plan
from autoparallel.errors import (
    AutoparallelError,
)
from tests.support.models import CASES


def planned(case_name: str = "mlp", mesh_shape: tuple[int, ...] | None = (2, 2), **options: Any) -> Plan:
    case = CASES[case_name]
    args, kwargs = case.inputs(8)
    return plan(case.build(), Cluster.load("local-cpu", num_devices=torch.Size(mesh_shape or (4,)).numel()),
                example_inputs=args, example_kwargs=kwargs, mesh_shape=mesh_shape, **options)


def says(error: type[AutoparallelError], *parts: str, of: Callable[[], Any]) -> str:
    """`of()` raises this error and its message has all the parts."""
    with pytest.raises(error) as caught:
        of()
    message = str(caught.value)
    missing = [part for part in parts if part not in message]
    assert not missing, f"{missing} not in: {message}"
    return message


def message_of(call: Callable[[], Any]) -> str:
    """For jobs on ranks: type and message of our own error, or what came instead."""
    try:
        call()
    except AutoparallelError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"not ours: {type(error).__name__}: {error}"
    return "no error"
