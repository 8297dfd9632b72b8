"""Programs of different call forms are kept up to a bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autoparallel
from autoparallel.errors import CaptureError, PlanError
from tests.support.models import CASES
from tests.support.ranks import mesh_of


def many_lengths() -> tuple[int, int, list[bool]]:
    """How many programs are kept and were compiled, and whether calls are right, of calls of six lengths, twice."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    parallel = autoparallel.compile(model, mesh_of(2), baseline="ddp", max_forms=3)
    right = []
    for length in (*range(1, 7), *range(1, 7), 6):
        x = torch.ones(length, 4)
        made: Any = parallel(x)
        right.append(torch.allclose(made.full_tensor() if hasattr(made, "full_tensor") else made, model(x)))
    return len(parallel._state.forms), parallel._state.forms.compiled, right


def test_item_16_the_least_recently_used_program_is_dropped(ranks: Any) -> None:
    for kept, compiled, right in ranks(2).run(many_lengths, timeout_s=100):
        assert all(right) and kept == 3
        assert compiled == 6 + 5  # the first is never dropped, and the last call's was there


def test_a_bound_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="max_forms is 1: give"):
        autoparallel.compile(nn.Linear(4, 4), 2, max_forms=1)


def test_item_14_lazy_parameters_are_refused_and_stay_lazy() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(CaptureError, match=r"0\.weight, 0\.bias are not known before the model's first call"):
        autoparallel.plan(model, "h100-sxm", example_inputs=(torch.zeros(2, 3),))
    assert isinstance(model[0].weight, nn.parameter.UninitializedParameter)


def test_a_new_form_says_what_is_another_beside_its_arguments(mesh_of_one: DeviceMesh,
                                                              caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4))
    parallel = autoparallel.compile(model, mesh_of_one, example_inputs=(torch.ones(2, 4),))

    def told(x: Tensor) -> str:
        caplog.clear()
        parallel(x)
        (line,) = [record.getMessage() for record in caplog.records if "another form" in record.getMessage()]
        return line.partition(", since ")[2]

    with torch.autocast("cpu", torch.bfloat16):
        assert told(torch.ones(2, 4)) == "autocast of cpu is torch.bfloat16 and was off"
    parallel.eval()
    assert told(torch.ones(2, 4)) == ("autocast of cpu is off and was torch.bfloat16; "
                                      "4 of 4 modules were switched between train and eval mode")
    parallel.get_parameter("0.weight").requires_grad_(False)
    assert told(torch.ones(2, 4)) == "requires_grad of 1 parameters was set"
    assert told(torch.ones(3, 4)) == "input is float32[3, 4] and was float32[2, 4]"
    assert told(torch.ones(3, 4, requires_grad=True)) == "input is float32[3, 4] with gradients and was float32[3, 4]"


def cuts_of_batches() -> list[tuple[str, ...]]:
    """Where the stages of steps of several batches are cut."""
    case, found = CASES["llama"], []
    parallel = autoparallel.compile(case.build(), mesh_of(2), pipeline_stages=2, micro_batches=2, recompute="full")
    for batch in (4, 12, 32):
        args, kwargs = case.inputs(batch)
        parallel.step(*args, **kwargs)
        found.append(parallel.plan.hybrid.cuts)
    return found


@pytest.mark.ranks
def test_stages_of_other_batches_are_cut_where_the_first_placed_parameters(ranks: Any) -> None:
    for found in ranks(2).run(cuts_of_batches):
        assert len(set(found)) == 1 and found[0]
