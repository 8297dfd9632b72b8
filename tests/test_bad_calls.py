"""Random bad arguments for every public function: our own errors only, and nothing is left changed."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset

import autoparallel
from autoparallel import Cluster, Plan
from autoparallel.errors import AutoparallelError, ClusterError, InputError

JUNK: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "True": lambda: True, "-1": lambda: -1, "0": lambda: 0, "3.7": lambda: 3.7,
    "nan": lambda: float("nan"), "inf": lambda: float("inf"), "10**30": lambda: 10**30, "-1e300": lambda: -1e300,
    "''": lambda: "", "'junk'": lambda: "junk", "escape": lambda: "\x1b[31m[/red]", "bytes": lambda: b"junk",
    "null": lambda: "a\0b", "[]": lambda: [], "[1]": lambda: [1], "['a', 'a']": lambda: ["a", "a"], "()": lambda: (),
    "(2, -1)": lambda: (2, -1), "{}": dict, "{'a': 1}": lambda: {"a": 1}, "{1: None}": lambda: {1: None},
    "object": object, "function": lambda: (lambda *a: 0), "ones(2)": lambda: torch.ones(2),
    "ones(8, 3)": lambda: torch.ones(8, 3), "empty": lambda: torch.empty(0), "scalar": lambda: torch.tensor(2),
    "meta": lambda: torch.empty(8, 4, device="meta"), "nan tensor": lambda: torch.full((8, 4), float("nan")),
    "complex": lambda: torch.ones(8, 4, dtype=torch.complex64), "sparse": lambda: torch.ones(8, 4).to_sparse(),
    "int tensor": lambda: torch.ones(8, 4, dtype=torch.long), "module": lambda: nn.Linear(2, 2),
    "numpy": lambda: np.ones((2, 2)), "path": lambda: Path("/nonexistent/folder/file"), "set": lambda: {1},
    "class": lambda: nn.Linear, "slice": lambda: slice(1), "range": lambda: range(3), "complex number": lambda: 1j,
    "nested": lambda: [[[[]]], {"a": [torch.ones(1)]}],
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (self.last(self.drop(self.first(x)).relu()) * scale).square().mean()


class World:
    """A model, its parallel module, a plan, and the public functions with arguments that are right."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder, self.x = folder, torch.randn(8, 4)
        self.model = Net()
        self.mesh, self.cluster = init_device_mesh("cpu", (1,)), Cluster.load("local-cpu", num_devices=2)
        self.parallel = autoparallel.compile(self.model, self.mesh, example_inputs=(self.x,))
        self.optimizer = torch.optim.AdamW(self.parallel.parameters())
        self.plan = autoparallel.plan(self.model, self.cluster, example_inputs=(self.x,))
        self.plan.save(folder / "plan.json")
        self.parallel.save(folder / "run", self.optimizer, step=1)
        self.parallel.save_pretrained(folder / "weights")

    def calls(self) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
        p, shared = self.parallel, {
            "example_inputs": (self.x,), "example_kwargs": None, "pins": None, "baseline": None, "search": "auto",
            "memory_limit_bytes": None, "memory_confidence": 0.9, "optimizer": "adamw", "time_limit_s": 5.0,
            "micro_batches": None, "pipeline_stages": None, "stage_replicas": None, "schedule": None, "recompute": None,
            "zero_stage": None, "reduce_dtype": None, "progress": None}
        return {
            "plan": (autoparallel.plan, {"model": self.model, "cluster": self.cluster, "mesh_shape": (2,),
                                         "axis_names": None, "joint": False, "by_hand": None, **shared}),
            "compile": (autoparallel.compile, {"model": self.model, "mesh": self.mesh, "plan": None, "cluster": None,
                                               "inputs": "global", "check_inputs": 1, "max_forms": 4,
                                               "peer_timeout_s": 60.0, "backend": "eager", **shared}),
            "Plan.load": (Plan.load, {"path": self.folder / "plan.json"}),
            "Plan.from_json": (Plan.from_json, {"text": self.plan.to_json()}),
            "Plan.diff": (self.plan.diff, {"other": self.plan}),
            "Cluster.load": (Cluster.load, {"name_or_path": "h100-sxm", "num_devices": 8, "software": None}),
            "forward": (p, {"x": self.x, "scale": 1.0}),
            "step": (p.step, {"x": self.x, "scale": 1.0}),
            "trace": (p.trace, {"args": (self.x,), "kwargs": None, "step": True}),
            "clip_grad_norm_": (p.clip_grad_norm_, {"max_norm": 1.0, "norm_type": 2.0}),
            "verify": (lambda batch, steps: p.verify(batch, steps=steps), {"batch": self.x, "steps": 2}),
            "manual_seed": (p.manual_seed, {"seed": 1}),
            "load_run_state": (p.load_run_state, {"state": p.run_state()}),
            "shard_batch": (p.shard_batch, {"batch": (self.x,)}),
            "local_batch": (p.local_batch, {"batch": (self.x,)}),
            "dataloader": (lambda **kwargs: list(p.dataloader(**kwargs)), {
                "dataset": TensorDataset(torch.randn(16, 4)), "batch_size": 8, "shuffle": False, "seed": 0,
                "collate_fn": None, "per_sample": False, "drop_last": False}),
            "load_state_dict": (p.load_state_dict, {"state_dict": copy.deepcopy(p.state_dict()), "strict": True}),
            "load_pretrained": (p.load_pretrained, {"path": self.folder / "weights", "strict": True}),
            "save_pretrained": (p.save_pretrained, {"save_directory": self.folder / "weights",
                                                    "max_shard_size": "5GB"}),
            "save": (p.save, {"folder": self.folder / "run", "optimizer": self.optimizer, "step": 1, "keep": None}),
            "load": (p.load, {"folder": self.folder / "run", "optimizer": self.optimizer, "step": None}),
            "init_weights": (p.init_weights, {"device": "cpu"}),
            **self.calls_of_tools(),
        }

    def calls_of_tools(self) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
        """Functions beside plan, compile and the parallel module."""
        return {
            "advise": (autoparallel.advise, {"model": self.model, "cluster": self.cluster, "example_inputs": (self.x,),
                                             "memory_limit_bytes": None, "optimizer": "adamw", "search_s": 0.0}),
            "size": (autoparallel.size, {"model": lambda devices: (self.model, (self.x,), {}),
                                         "clusters": ("local-cpu",), "step_s": 1.0, "count": 1e6, "days": 10.0,
                                         "budget": 1e9, "most": 2, "software": None, "time_limit_s": 1.0}),
            "replan": (autoparallel.replan, {"plan": self.plan, "cluster": self.cluster, "model": self.model,
                                             "example_inputs": (self.x,), "lost": None, "source": "peers",
                                             "horizon_steps": 10, "horizon_s": None, "time_limit_s": 1.0}),
            "plan by hand": (autoparallel.plan, {"model": self.model, "cluster": self.cluster, "by_hand": "dp=2",
                                                 "example_inputs": (self.x,)}),
            "plan of inference": (autoparallel.plan, {"model": self.model, "cluster": self.cluster, "phase": "prefill",
                                                      "context": 8, "concurrent": 2, "objective": "latency"}),
            "StepLog": (autoparallel.StepLog, {"parallel": self.parallel, "every": 10, "writers": ()}),
            "export_plan": (autoparallel.export_plan, {"plan": self.plan, "to": "fsdp2"}),
            "import_plan": (autoparallel.import_plan, {"path": self.folder / "plan.json"}),
            "init": (autoparallel.init, {"mesh_shape": (1,), "axis_names": None, "plan": None, "launcher": None,
                                         "device": "cpu", "backend": None, "timeout_s": 60.0}),
            "bound": (lambda mask, at_most: autoparallel.bound(mask, at_most=at_most), {
                "mask": self.x > 0, "at_most": 4}),
            "padded_to": (lambda lengths, x: autoparallel.padded_to(lengths, x=x)([{"x": self.x}]), {
                "lengths": (8, 16), "x": 0.0}),
            "register_rule": (autoparallel.register_rule, {
                "op": "aten::sin", "pattern": "x[a, b] -> y[a]", "reduce": "", "additive": "", "linear": (),
                "flops_per_point": None, "arguments": None, "example": None}),
            "inference_call": (autoparallel.inference_call, {"model": self.model, "phase": "prefill", "context": 8,
                                                             "concurrent": 2}),
            "GradScaler": (lambda init_scale, growth_interval: autoparallel.GradScaler(
                init_scale=init_scale, growth_interval=growth_interval), {"init_scale": 8.0, "growth_interval": 2}),
            "profile": (lambda path, x, ranks: self.parallel.profile(path, x, ranks=ranks), {
                "path": self.folder / "step.json", "x": self.x, "ranks": None}),
        }

    def state(self) -> list[Any]:
        """All that a refused call must leave as it was."""
        return [*({name: value.clone() for name, value in module.state_dict().items()}
                  for module in (self.model, self.parallel)),
                {name: {n: v for n, v in vars(m).items() if n not in ("_parameters", "_buffers", "_modules")}
                 for name, m in self.model.named_modules()},
                self.parallel.run_state(), torch.get_rng_state(), torch.get_default_dtype(), self.parallel.training,
                [p.requires_grad for p in self.parallel.parameters()], torch.is_grad_enabled()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in (a, b)]
        return torch.equal(*whole)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b or bool(a == b)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield World(tmp_path)
    finally:
        dist.destroy_process_group()


def bad_calls(world: World, seed: int, count: int) -> tuple[list[str], int]:
    """(calls that raised foreign errors or left something changed, calls refused) of ``count`` random ones."""
    draw, wrong, refused = random.Random(seed), [], 0
    for _ in range(count):
        calls = world.calls()
        name = draw.choice(sorted(calls))
        function, right = calls[name]
        changed = draw.sample(sorted(right), min(len(right), draw.choice((1, 1, 2))))
        given = {key: draw.choice(sorted(JUNK)) for key in changed}
        told = f"{name}({', '.join(f'{k}={v}' for k, v in given.items())})"
        made = {key: JUNK[junk]() for key, junk in given.items()}
        before = world.state()
        try:
            function(**{**right, **made})
        except AutoparallelError as error:
            refused += 1
            if not same(before, world.state()):
                wrong.append(f"{told}: refused, and something has changed")
            if not str(error) or len(str(error)) > 4000:
                wrong.append(f"{told}: says {len(str(error))} letters")
        except Exception as error:
            wrong.append(f"{told}: {type(error).__name__}: {str(error)[:150]}")
        world.parallel.load_run_state({"version": 1, "seed": 0, "calls": 0})
    return wrong, refused


@pytest.mark.parametrize(("seed", "count"), [(0, 30), pytest.param(1, 500, marks=pytest.mark.slow)])
def test_bad_calls_raise_our_errors_and_change_nothing(world: World, seed: int, count: int) -> None:
    wrong, refused = bad_calls(world, seed, count)
    assert not wrong, "\n".join(wrong)
    assert refused > count / 4


@pytest.mark.parametrize("value", [10**30, -1e300, float("nan")])
def test_a_number_to_pad_with_that_the_dtype_has_not(value: float) -> None:
    rows = torch.ones(2, dtype=torch.float16 if value == -1e300 else torch.int64)
    with pytest.raises(InputError, match="padded_to has"):
        autoparallel.padded_to((4,), x=value)([{"x": rows}])


def test_software_that_is_no_name() -> None:
    with pytest.raises(ClusterError, match="unknown software"):
        Cluster.load("h100-sxm", software=np.ones((2, 2)))  # type: ignore[arg-type]
