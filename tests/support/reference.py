"""The truth that parallel runs are held to: the same training in one process, and how near is near enough.

In a job on ranks, the model under test is trained by the same `train`, which gathers DTensors:

    actual = train(autoparallel.compile(case.build(), mesh_of(2, 2)), case, "sgd", num_steps=5)

and in the test its result is compared with the one-process result of the same case:

    expected = train_reference(case, "sgd", num_steps=5)
    assert_same_loss(actual, expected)
    assert_same_gradients(actual.gradients, expected, tolerance=1e-5)
    assert_same_parameters(actual.parameters, expected, tolerance=1e-5)

The error of a tensor is max|actual - expected| / max|expected|. A gradient that is zero but for rounding (that of an
attention key's bias, for which softmax does not care) has no meaningful max of its own: it is measured against the
largest of the model. Which gradients those are is found by computing them in float64 too.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rounding import ZERO_IN_FLOAT32, ZERO_IN_FLOAT64, largest_entry
from tests.support.models import BATCH_SIZE, Inputs, ModelCase

# As large as leaves the truth well-conditioned: with SGD at 0.1, ResNet's five steps turn a rounding of 1e-7 into 3e-2.
LEARNING_RATE = {"sgd": 0.05, "adamw": 1e-3}
ADAMW_EPS = 1e-4  # above the rounding of gradients, so that Adam does not blow up what is zero but for rounding
SEED = 29
MAX_LISTED = 8

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """What training left: plain CPU tensors by parameter or buffer name.

    `gradients` are those of the first step; `zero_gradients` names those that are zero but for rounding (known of
    references only).
    """

    loss: float
    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    zero_gradients: frozenset[str] = field(default=frozenset())


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """"sgd" or "adamw", set up as the tests compare them."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=LEARNING_RATE["sgd"])
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE["adamw"], eps=ADAMW_EPS)
    raise ValueError(f"unknown optimizer {name!r}: one of {sorted(LEARNING_RATE)}")


def gathered(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Plain copies; of a DTensor its full tensor, for which all ranks must call this together."""
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu().clone()
        for name, tensor in named
    }


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return gathered((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)


def scalar(loss: Tensor) -> float:
    return next(iter(gathered([("loss", loss)]).values())).item()


def inputs_of(case: ModelCase, batch_size: int, dtype: torch.dtype) -> Inputs:
    """The case's inputs with floating-point tensors in `dtype`."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    args, kwargs = case.inputs(batch_size)
    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def train(
    model: nn.Module,
    case: ModelCase,
    optimizer: str = "sgd",
    num_steps: int = 1,
    batch_size: int = BATCH_SIZE,
    dtype: torch.dtype = torch.float32,
) -> Trained:
    """Take `num_steps` steps on one batch of the case (each rank is given all of it) and tell all about it."""
    args, kwargs = inputs_of(case, batch_size, dtype)
    torch.manual_seed(SEED)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    stepper: torch.optim.Optimizer | None = None
    for step in range(num_steps):
        loss = case.loss(model(*args, **kwargs))
        loss.backward()
        losses.append(scalar(loss))
        if step == 0:
            gradients = gradients_of(model)
        # Made after the first call: a model compiled at its first call may have no parameters of its own before.
        stepper = stepper or make_optimizer(optimizer, model.parameters())
        stepper.step()
        stepper.zero_grad()
    return Trained(losses[0], losses, gradients, gathered(model.named_parameters()), gathered(model.named_buffers()))


@functools.cache
def train_reference(
    case: ModelCase, optimizer: str = "sgd", num_steps: int = 1, batch_size: int = BATCH_SIZE
) -> Trained:
    """`train` of the case's own model in this process: the truth. Computed once; do not write to its tensors."""
    with torch.random.fork_rng(devices=[]):
        trained = train(case.build(), case, optimizer, num_steps, batch_size)
    try:
        exact, little = train_in_float64(case, batch_size=batch_size).gradients, ZERO_IN_FLOAT64
    except RuntimeError:  # grouped matrix products have no float64 kernel
        exact, little = trained.gradients, ZERO_IN_FLOAT32
    largest = largest_entry(exact)
    zero = [name for name, gradient in exact.items() if largest_entry({name: gradient}) <= little * largest]
    return replace(trained, zero_gradients=frozenset(zero))


@functools.cache
def train_in_float64(
    case: ModelCase, optimizer: str = "sgd", num_steps: int = 1, batch_size: int = BATCH_SIZE
) -> Trained:
    """`train_reference` without its rounding. (Dropout draws other numbers in float64.)"""
    with torch.random.fork_rng(devices=[]):
        return train(case.build().double(), case, optimizer, num_steps, batch_size, torch.float64)


# -------------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Difference:
    """How far one tensor is from the expected one, and by which factor if they differ by a factor."""

    name: str
    error: float
    ratio: float | None

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f"   actual = {self.ratio:.6g} x expected"
        return f"{self.error:10.3e}  {self.name}{ratio}"


def constant_ratio(actual: Tensor, expected: Tensor) -> float | None:
    """r where actual = r expected to within 0.1 % of its largest entry, and r is not 1."""
    a, e = actual.double().flatten(), expected.double().flatten()
    square = e.dot(e)
    if square == 0 or not a.isfinite().all():
        return None
    ratio = (a.dot(e) / square).item()
    fits = (a - ratio * e).abs().max() <= 1e-3 * a.abs().max()
    return ratio if fits and abs(ratio - 1) > 1e-4 else None


def differences(actual: Tensors, expected: Tensors, zero: Collection[str] = ()) -> list[Difference]:
    """The differences of tensors of the same names and shapes, worst first; `zero` are measured against the largest."""
    largest = largest_entry(expected)
    found = []
    for name, e in expected.items():
        a = actual[name]
        if not e.numel():
            continue
        scale = largest if name in zero else e.abs().max().item()
        distance = (a.double() - e.double()).abs().max().item()
        error = distance / scale if scale else (0.0 if distance == 0 else float("inf"))
        # nan compares as neither near nor far: it is as far as can be.
        error = error if error == error else float("inf")
        found.append(Difference(name, error, None if name in zero else constant_ratio(a, e)))
    return sorted(found, key=lambda difference: -difference.error)


def assert_same_tensors(
    actual: Tensors, expected: Tensors, tolerance: float, what: str = "tensors", zero: Collection[str] = ()
) -> None:
    """Same names, shapes and dtypes, and every tensor within the tolerance."""
    missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
    assert not missing and not extra, f"{what}: missing {missing}, unexpected {extra}"
    for name, e in expected.items():
        a = actual[name]
        assert a.shape == e.shape, f"{what}: {name} has shape {tuple(a.shape)}, expected {tuple(e.shape)}"
        assert a.dtype == e.dtype, f"{what}: {name} has dtype {a.dtype}, expected {e.dtype}"
    found = differences(actual, expected, zero)
    wrong = [difference for difference in found if not difference.error <= tolerance]
    if not wrong:
        return
    lines = [f"{what}: {len(wrong)} of {len(found)} beyond {tolerance:g} (max-norm, relative); the worst:"]
    lines += [f"  {difference}" for difference in wrong[:MAX_LISTED]]
    ratios = {round(difference.ratio, 3) for difference in wrong if difference.ratio is not None}
    if len(ratios) == 1 and all(difference.ratio is not None for difference in wrong):
        lines.append(f"  every one of them is {ratios.pop():g} x expected: one sum or mean over ranks too many?")
    raise AssertionError("\n".join(lines))


def assert_same_loss(actual: Trained, expected: Trained, tolerance: float = 1e-5) -> None:
    """The loss of every step; later ones feel the differences of all steps before."""
    assert len(actual.losses) == len(expected.losses), f"{len(actual.losses)} losses, expected {len(expected.losses)}"
    for step, (a, e) in enumerate(zip(actual.losses, expected.losses, strict=True)):
        assert abs(a - e) <= tolerance * abs(e), f"loss of step {step}: {a!r}, expected {e!r}; a/e = {a / e:.6g}"


def assert_same_gradients(actual: Tensors, expected: Trained, tolerance: float = 1e-5) -> None:
    assert_same_tensors(actual, expected.gradients, tolerance, "gradients", expected.zero_gradients)


def assert_same_parameters(actual: Tensors, expected: Trained, tolerance: float = 1e-5) -> None:
    """A parameter that began at zero and has a zero gradient still is rounding, and measured as its gradient is."""
    assert_same_tensors(actual, expected.parameters, tolerance, "parameters", expected.zero_gradients)


def assert_same_buffers(actual: Tensors, expected: Trained, tolerance: float = 1e-5) -> None:
    """Batch norm's running statistics and counts, position ids and masks."""
    assert_same_tensors(actual, expected.buffers, tolerance, "buffers")
