"""Published figures of training with states, gradients and parameters on the host, beside what the planner says.

    python -m benchmarks.published_offload
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import autoparallel
from autoparallel.models import load_model
from autoparallel.plans import Plan
from cost_models import Cluster

#: Whose speed and precision counts: masters and states in float32, as DeepSpeed keeps them.
SOFTWARE = "megatron-deepspeed"


@dataclass(frozen=True)
class Row:
    """A published run: ``config`` of the model, ``batch`` sequences of ``sequence`` tokens on ``devices`` of
    ``cluster``, whose hosts have ``host_bytes`` of memory (None: as described), with a plan by ``hand``. ``figure``:
    "TFLOP/s" a device, or seconds of a "backward" or an "optimizer" step, and the ``published`` number."""

    name: str
    config: dict[str, Any]
    cluster: str
    devices: int
    batch: int
    sequence: int
    hand: str
    figure: str = ""
    published: float = 0.0
    host_bytes: float | None = None
    dtype: str = "float16"

    def plan(self) -> tuple[Plan, int]:
        """The priced plan, and the number of parameters. One device has its host's memory bandwidth for itself."""
        model, args, kwargs = load_model(self.config, self.batch, self.sequence, self.dtype)
        known = Cluster.load(self.cluster, num_devices=self.devices, software=SOFTWARE)
        alone = known.devices_per_host / min(known.devices_per_host, self.devices)
        host = replace(known.host, memory_bandwidth_bytes_per_s=known.host.memory_bandwidth_bytes_per_s * alone,
                       memory_bytes=self.host_bytes or known.host.memory_bytes)
        made = autoparallel.plan(model, replace(known, host=host), example_inputs=args, example_kwargs=kwargs,
                                 by_hand=self.hand)
        return made, sum(p.numel() for p in model.parameters())

    def predicted(self, plan: Plan, parameters: int) -> float:
        """The figure as planned; FLOP are 6 of each parameter and token."""
        p = plan.prediction
        if self.figure == "TFLOP/s":
            return 6 * parameters * self.batch * self.sequence / p.step_s / self.devices / 1e12
        return {"backward": p.backward_s, "optimizer": p.optimizer_s}.get(self.figure, 0.0)


def gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """A GPT-2 of so many layers."""
    return {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": 50257,
            "n_positions": 1024}


_LLAMA2 = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000}
_V100, _ALONE = "v100-sxm-32", "dp=1,zero=2,recompute=full,offload=host"
_ZENFLOW = "dp=4,zero=2,recompute=full,micro_batch=8,offload=host"
ROWS = (
    Row("ZeRO-Offload 10B", gpt(50, 4096, 32), _V100, 1, 32, 1024, f"{_ALONE},micro_batch=8", "TFLOP/s", 40.0),
    Row("ZeRO-Offload 13B", gpt(65, 4096, 32), _V100, 1, 1, 1024, _ALONE),
    Row("ZeRO-3 Offload 40B", gpt(50, 8192, 64), _V100, 1, 8, 1024, "dp=1,zero=3,recompute=full,offload=parameters",
        host_bytes=1.5e12),
    Row("ZeRO-3 Offload 1T", gpt(128, 25600, 160), _V100, 512, 1024, 1024,
        "dp=512,zero=3,recompute=full,offload=parameters", "TFLOP/s", 49.0),
    Row("ZeRO-Offload Llama-2-7B", _LLAMA2, "a100-sxm", 4, 32, 2048, _ZENFLOW, "backward", 2.0, dtype="bfloat16"),
    Row("ZeRO-Offload Llama-2-7B", _LLAMA2, "a100-sxm", 4, 32, 2048, _ZENFLOW, "optimizer", 4.0, dtype="bfloat16"),
)


def lines() -> Iterator[str]:
    """A line for each row, and the median error."""
    errors = []
    for row in ROWS:
        plan, parameters = row.plan()
        p, found = plan.prediction, row.predicted(plan, parameters)
        yield (f"{row.name}: {parameters / 1e9:.1f}e9 parameters, device {p.peak_bytes / 1e9:.1f} GB of "
               f"{p.limit_bytes / 1e9:.1f} usable, host {p.host_bytes / 1e9:.0f} GB"
               + (f"; {row.figure} {found:.3g}, published {row.published:g}" if row.figure else ""))
        if row.figure:
            errors.append(abs(found / row.published - 1))
    yield f"median error {median(errors):.0%} of {len(errors)}"


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
