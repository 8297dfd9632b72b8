"""Models that lie on the CPU or on the meta device are traced as they run on the mesh's device."""

from __future__ import annotations

import subprocess
import sys
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn

from autoparallel.capture import capture, traced_on
from autoparallel.capture.devices import moved, program_device
from autoparallel.errors import CaptureError
from autoparallel.kernels import collectives


class Recurrent(nn.Module):
    """Asks its input for a device; a list of parameters, a tied one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = nn.Embedding(4, 8), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 4, bias=False)
        self.head.weight = self.rows.weight
        self.register_buffer("shift", torch.ones(8))

    def forward(self, ids: Tensor) -> Tensor:
        y = self.layer(self.rows(ids))[0] + self.shift
        made: Tensor = self.head(y + torch.arange(8, device=ids.device))
        return made


class WithConstant(nn.Module):
    """A tensor that is neither parameter nor buffer stays where it is when a model moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), torch.full((2,), 3.0)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x) * self.scale
        return made


IDS = torch.zeros(2, 3, dtype=torch.int64)


def tensors(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(t), t.data_ptr()) for name, t in [*model.named_parameters(), *model.named_buffers()]}


def test_a_program_has_the_same_fingerprint_from_every_device() -> None:
    with torch.device("meta"):
        without_data = Recurrent()
    assert capture(without_data, (IDS,)).fingerprint == capture(Recurrent(), (IDS,)).fingerprint


def test_while_it_is_traced_a_model_has_no_data_and_is_itself_again() -> None:
    model = Recurrent()
    before, attributes = tensors(model), set(vars(model.layer))
    with moved(model, (IDS,), {}, torch.device("cpu")) as ((ids,), _):
        assert model.head.weight is model.rows.weight and model.rows.weight.requires_grad
        assert isinstance(model.rows.weight, nn.Parameter)
        assert all(a is b for a, b in zip(model.layer._flat_weights, model.layer.parameters(), strict=True))
        with pytest.raises(RuntimeError):
            ids.tolist()
    assert tensors(model) == before and set(vars(model.layer)) == attributes
    assert model(IDS).shape == (2, 3, 4)


def test_the_device_of_a_trace() -> None:
    model = Recurrent()
    assert program_device(model, [IDS]) is None
    with traced_on(torch.device("cpu")):
        assert program_device(model, [IDS]) is None
    with traced_on(torch.device("cuda", 1)):
        assert program_device(model, [IDS]) == torch.device("cuda", 1)


def test_autocast_of_a_model_without_data() -> None:
    """A trace on the meta device does not show what autocast does; one as on the CPU does."""
    with torch.device("meta"):
        without_data = nn.Linear(4, 4)
    with traced_on(torch.device("cpu")), torch.autocast("cpu", torch.bfloat16):
        found, wanted = (capture(model, (torch.ones(2, 4),)) for model in (without_data, nn.Linear(4, 4)))
    assert found.fingerprint == wanted.fingerprint and found.nodes[-2].outputs[0].dtype == torch.bfloat16


def test_in_inference_mode() -> None:
    """The tensors that a model has while it is traced are no inference tensors."""
    with torch.device("meta"):
        without_data = nn.Linear(4, 4)
    with torch.inference_mode(), traced_on(torch.device("cpu")), torch.autocast("cpu", torch.bfloat16):
        assert len(capture(without_data, (torch.ones(2, 4),)).nodes)


class Beside(nn.Module):
    """Has a parameter in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.weights = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x) @ self.weights[0]
        return made


def test_a_parameter_that_would_be_a_constant() -> None:
    model = Beside()
    with pytest.raises(CaptureError, match=r"reads the values of layer\.weight by way of a list"):
        capture(model, (torch.ones(3, 2),))
    assert len(capture(model.requires_grad_(False), (torch.ones(3, 2),)).constant_tensors) == 1


def test_without_data_it_is_traced_on_the_device_of_the_program() -> None:
    with torch.device("meta"):
        model = WithConstant()
    model.scale = torch.full((2,), 3.0)
    with traced_on(torch.device("cpu")):
        assert program_device(model, [torch.ones(3, 2)]) == torch.device("cpu")
        (scale,) = capture(model, (torch.ones(3, 2),)).constant_tensors.values()
    assert scale.tolist() == [3.0, 3.0]


def as_on_a_gpu() -> None:
    """In a process of its own, which takes GPU tensors that have no data."""
    from autoparallel.capture.passes import dtype_check
    from benchmarks.cuda_without_gpu import load_guard
    from tests.support.models import BATCH_SIZE, CASES

    load_guard()
    vars(dtype_check)["_error"] = lambda *args: None     # computes on the device
    for model, args, kwargs in [(Recurrent(), (IDS,), {}), *((case.build(), *case.inputs(BATCH_SIZE)) for case in (
            CASES["llama"], CASES["bert"], CASES["resnet"]))]:
        plain, before = capture(model, args, kwargs), tensors(model)
        with traced_on(torch.device("cuda")):
            there = capture(model, args, kwargs)
        assert there.fingerprint == plain.fingerprint and tensors(model) == before
        made = [v for node in there.nodes for v in node.kwargs.values() if isinstance(v, torch.device)]
        assert all(device.type == "cuda" for device in made)
    with traced_on(torch.device("cuda")):
        (scale,) = capture(WithConstant(), (torch.ones(3, 2),)).constant_tensors.values()
        assert scale.tolist() == [3.0, 3.0]


@pytest.mark.ranks
def test_traced_as_on_a_gpu() -> None:
    run = subprocess.run([sys.executable, "-c", "from tests.test_capture_devices import as_on_a_gpu; as_on_a_gpu()"],
                         capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize(("device", "sends", "together"), [("cpu", True, False), ("cuda", True, True),
                                                           ("cuda", False, False)])
def test_gloo_sends_tensors_of_a_gpu_one_by_one(device: str, sends: bool, together: bool) -> None:
    """Its collectives of several tensors read the CPU's memory only."""
    shards, axis = [Mock(device=torch.device(device)) for _ in range(2)], Mock(size=2)
    with patch.object(collectives, "_begin_whole", return_value="one"), patch.object(
            collectives, "_begin_group", return_value=["all"]), patch.object(
            collectives.groups, "sends", return_value=sends), patch.object(collectives.groups, "group_of"):
        assert collectives.begin_whole_tensors(shards, axis) == (["all"] if together else ["one", "one"])
