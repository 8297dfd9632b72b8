"""Published figures of training with states, gradients and parameters on the host, beside what the planner says.

    python -m benchmarks.published_offload

Figures of whole steps stand beside plans by hand (`ROWS`), those of optimizer steps on the host (`STEPS`) beside
`cost_models.offload`. To the latter one constant is fitted, `Profile.host_memory`; each is compared with what the other
sources give.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import autoparallel
from autoparallel.errors import InfeasibleError
from autoparallel.models import load_model
from autoparallel.plans import Plan
from cost_models import Cluster, offload

#: Whose speed and precision counts: masters and states in float32, as DeepSpeed keeps them.
SOFTWARE = "megatron-deepspeed"
#: FLOP of a parameter and token that these publications count: with recompute (ZeRO-Infinity, section 4).
FLOP = 8


@dataclass(frozen=True)
class Row:
    """A published run: ``config`` of the model, ``batch`` sequences of ``sequence`` tokens on ``devices`` of
    ``cluster``, with a plan by ``hand``. ``figure``: "TFLOP/s" a device, or seconds of a "backward", and the
    ``published`` number; "": only its size counts."""

    name: str
    config: dict[str, Any]
    cluster: str
    devices: int
    batch: int
    sequence: int
    hand: str
    figure: str = ""
    published: float = 0.0
    dtype: str = "float16"

    def plan(self) -> tuple[Plan, int]:
        """The priced plan, and the number of parameters."""
        model, args, kwargs = load_model(self.config, self.batch, self.sequence, self.dtype)
        cluster = Cluster.load(self.cluster, num_devices=self.devices, software=SOFTWARE)
        made = autoparallel.plan(model, cluster, example_inputs=args, example_kwargs=kwargs, by_hand=self.hand)
        return made, sum(p.numel() for p in model.parameters())

    def predicted(self, plan: Plan, parameters: int) -> float:
        """The figure as planned."""
        p = plan.prediction
        if self.figure == "TFLOP/s":
            return FLOP * parameters * self.batch * self.sequence / p.step_s / self.devices / 1e12
        return p.backward_s if self.figure == "backward" else 0.0


@dataclass(frozen=True)
class Step:
    """A published optimizer step of ``parameters`` parameters on the hosts of ``devices`` of ``cluster``: ``published``
    seconds."""

    name: str
    parameters: float
    cluster: str
    devices: int
    published: float
    dtype: str = "bfloat16"

    def predicted(self, host_memory: float) -> float:
        """Seconds, if software reaches this share of the memory's rate."""
        known = Cluster.load(self.cluster, num_devices=self.devices, software=SOFTWARE)
        assert known.profile is not None
        cluster = replace(known, profile=replace(known.profile, host_memory=host_memory))
        kept = known.profile.kept(self.dtype)
        return float(offload.host_step(self.parameters / self.devices, kept, "adamw", cluster,
                                       gradients_there=True).step_s)

    @property
    def share(self) -> float:
        """The share with which this step takes what was published, where memory is what it waits for."""
        return self.predicted(1.0) / self.published


def gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """A GPT-2 of so many layers."""
    return {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": 50257,
            "n_positions": 1024}


_LLAMA2 = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000}
_DGX2, _ALONE = "v100-dgx-2", "dp=1,zero=2,recompute=full,offload=host"
_FULL = "zero=3,recompute=full,micro_batch=1,offload"
ROWS = (
    # batch, layers and hidden size: DeepSpeed docs/_tutorials/zero-offload.md
    Row("ZeRO-Offload 10B", gpt(50, 4096, 32), _DGX2, 1, 10, 1024, _ALONE, "TFLOP/s", 40.0),
    Row("ZeRO-3 Offload 1T", gpt(128, 25600, 160), _DGX2, 512, 1024, 1024,
        "dp=512,zero=3,recompute=full,offload=parameters", "TFLOP/s", 49.0),
    # the batch is the one with which a step without offload takes the published 0.5 s (as planned: 0.59 s)
    Row("ZeRO-Offload Llama-2-7B", _LLAMA2, "a100-sxm", 4, 16, 512, "dp=4,zero=2,offload=host", "backward", 2.0,
        dtype="bfloat16"),
    Row("ZeRO-Offload 13B", gpt(65, 4096, 32), _DGX2, 1, 1, 1024, _ALONE),
    Row("ZeRO-3 Offload 40B", gpt(50, 8192, 64), _DGX2, 1, 8, 1024, f"dp=1,{_FULL}=parameters"),
    Row("ZeRO-Offload 70B, tensor parallel", gpt(69, 9216, 72), _DGX2, 16, 8, 1024,
        "dp=1,tp=16,zero=2,recompute=full,offload=host"),
    Row("ZeRO-Infinity 175B", gpt(96, 12288, 96), _DGX2, 16, 16, 1024, f"dp=16,{_FULL}=parameters"),
    Row("ZeRO-Infinity 175B, states on disk", gpt(96, 12288, 96), _DGX2, 16, 16, 1024, f"dp=16,{_FULL}=disk"),
    Row("ZeRO-Infinity 175B, states on disk, the rest on the host", gpt(96, 12288, 96), _DGX2, 16, 16, 1024,
        f"dp=16,{_FULL}=host/host/disk"),
    Row("ZeRO-Infinity 1T on one DGX-2, all on disk, tensor parallel", gpt(128, 25600, 160), _DGX2, 16, 4, 1024,
        f"dp=4,tp=4,{_FULL}=disk/disk/disk"),
    Row("ZeRO-3 Offload 1T, tensor parallel", gpt(128, 25600, 160), _DGX2, 512, 1024, 1024,
        f"dp=128,tp=4,{_FULL}=parameters"),
)
STEPS = (
    Step("DeepSpeed blogs/deepspeed-zenflow, Llama-2-7B on 4 A100: over 4 s", 6.74e9, "a100-sxm", 4, 4.0),
    Step("DeepSpeed pull request 735, GPT-2 of 11.6B, assumed on a DGX-2", 11.6e9, _DGX2, 1, 8.2, "float16"),
    Step("DeepSpeed issue 6834, Qwen-72B on 32 A100: about 10 s", 72.7e9, "a100-sxm", 32, 10.0),
    Step("DeepSpeed blogs/zenflow-corebinding, Qwen2.5-1.5B on 2 A100: 1.365 s a step, 0.240 s without offload", 1.54e9,
         "a100-sxm-40", 2, 1.125),
)


def left_out(step: Step) -> float:
    """The share that the other sources give."""
    return median(other.share for other in STEPS if other is not step)


def lines() -> Iterator[str]:
    """A line for each row and step, the fitted constant, and the median error."""
    errors = []
    for row in ROWS:
        try:
            plan, parameters = row.plan()
        except InfeasibleError as error:
            yield f"{row.name}: {error}"
            continue
        p, found = plan.prediction, row.predicted(plan, parameters)
        yield (f"{row.name}: {parameters / 1e9:.1f}e9 parameters, device {p.peak_bytes / 1e9:.1f} GB of "
               f"{p.limit_bytes / 1e9:.1f} usable, host {p.host_bytes / 1e9:.0f} GB a device"
               + (f"; {row.figure} {found:.3g}, published {row.published:g} ({found / row.published - 1:+.0%})"
                  if row.figure else ""))
        if row.figure:
            errors.append(abs(found / row.published - 1))
    for step in STEPS:
        found = step.predicted(left_out(step))
        errors.append(abs(found / step.published - 1))
        yield (f"{step.name}: {found:.2f} s by the other sources ({found / step.published - 1:+.0%}); exact with "
               f"host_memory {step.share:.2f}")
    yield f"host_memory {median(step.share for step in STEPS):.2f}"
    yield f"median error {median(errors):.0%} of {len(errors)}"


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
