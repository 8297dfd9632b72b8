"""Runs of AdamW whose states, gradients or parameters are on the host or disk, and whether two are equal to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoparallel
from tests.support.models import CASES
from tests.support.ranks import mesh_of
from tests.support.reference import ADAMW_EPS, Trained, assert_same_parameters, gathered, scalar, train_reference

ADAMW = {"lr": 1e-3, "eps": ADAMW_EPS, "fused": True}
Options = dict[str, Any]


class Net(nn.Module):
    """Two layers and a loss, equal on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()).square().mean()


def local(value: Any) -> Tensor:
    return torch.as_tensor(value.to_local() if hasattr(value, "to_local") else value).detach().clone()


def trained(case_name: str, shape: tuple[int, ...], options: Options, tier: str, norm: float | None, calls: int
            ) -> dict[str, Any]:
    """Three steps of AdamW, each on the gradients of so many calls of `step`, clipped to ``norm``; then a call in eval
    mode."""
    case = CASES[case_name]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(*shape), example_inputs=args, example_kwargs=kwargs,
                                    **options, offload=tier)
    optimizer: Any = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    losses, norms, left = [], [], []
    for _ in range(3):
        for _ in range(calls):
            losses.append(scalar(parallel.step(*args, **kwargs)))
        if norm is not None:
            norms.append(float(parallel.clip_grad_norm_(norm)))
        left.append([None if p.grad is None else local(p.grad) for p in parallel.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    states = {f"{number}.{name}": local(value) for number, entries in optimizer.state_dict()["state"].items()
              for name, value in entries.items()}
    parallel.eval()
    with torch.no_grad():
        losses += [] if options.get("pipeline_stages") else [scalar(parallel(*args, **kwargs).loss)]
    on_host = parallel._state.host_gradients
    return {"losses": losses, "norms": norms, "gradients": left, "states": states,
            "parameters": [local(p) for p in parallel.parameters()], "whole": gathered(parallel.named_parameters()),
            "memory": (optimizer.memory() if tier != "none" else {}, parallel.plan.prediction.host_bytes),
            "disk": (optimizer.memory()["disk"] if tier != "none" else 0, parallel.plan.prediction.disk_bytes),
            "bytes": 0 if on_host is None else on_host.largest_bytes}


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], value) for key, value in expected.items())
    return bool(found == expected)


def differing(found: Options, expected: Options) -> list[str]:
    """The names of what two results of `trained` do not share to the bit."""
    return [name for name, value in expected.items()
            if name not in ("bytes", "memory", "disk") and not same(found[name], value)]


def resumed_in_tiers(folder: Path, saved: str, others: Sequence[tuple[str, bool]]) -> list[bool]:
    """Whether one more step after a checkpoint of tier ``saved`` has its loss in each of the ``others`` (tier, whether
    the model is made on the meta device); and whether the parameters of tier ``saved`` are finite."""
    case = CASES["gpt2"]
    args, kwargs = case.inputs(8)

    def made(tier: str, meta: bool = False) -> Any:
        with torch.device("meta" if meta else "cpu"):
            model = case.build()
        where = {"disk_path": folder} if "disk" in tier else {}
        return autoparallel.compile(model, mesh_of(2), example_inputs=args, example_kwargs=kwargs, zero_stage=3,
                                    offload=tier, **where)

    def step(parallel: Any, optimizer: Any) -> float:
        loss = scalar(parallel.step(*args, **kwargs))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    first = made(saved)
    optimizer = first.optimizer(torch.optim.AdamW, **ADAMW)
    step(first, optimizer)
    first.save(folder / "saved", optimizer, step=1)
    found = []
    for tier, meta in others:
        other = made(tier, meta)
        other.load(folder / "saved")
        again = other.optimizer(torch.optim.AdamW, **ADAMW)
        other.load(folder / "saved", again)
        found.append(step(other, again))
    expected = step(first, optimizer)
    whole = gathered(first.named_parameters())
    return [*(loss == expected for loss in found), all(torch.isfinite(value).all() for value in whole.values())]


class Wide(nn.Module):
    """Layers that are large beside what rounding to blocks adds."""

    def __init__(self, width: int = 192, layers: int = 4) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def in_file(value: Any) -> bool:
    """Whether a shard is in a file without a name, by the system's own list."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= value._local_tensor.data_ptr() < end:
            return line.endswith("(deleted)")
    return False


def check_as_one_process(case: str, moved: Any) -> None:
    """A rank's result of `trained`: losses and parameters are those of one process."""
    expected = train_reference(CASES[case], "adamw", num_steps=3, batch_size=8)
    everything = Trained(0, [], {}, expected.parameters | moved["whole"], {})
    assert moved["losses"][:3] == pytest.approx(expected.losses, rel=1e-5)
    assert_same_parameters(everything.parameters, expected, 1e-4)
