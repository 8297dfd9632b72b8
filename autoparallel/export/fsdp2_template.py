"""The text of a file for torch alone (jinja2)."""

TEMPLATE = '''"""{{ roles }}, on {{ ranks }} devices, by torch {{ torch_version }} alone.

{% if pipeline %}
    mesh = make_mesh("cuda")
    schedule = parallelize(model, mesh)
    loss = step(schedule, mesh, input_ids, labels)               # each data-parallel rank's rows; then optimizer.step()
{% else %}
    mesh = make_mesh("cuda")
    model = parallelize(model, mesh)
    loss = step(model, batch)                                    # each data-parallel rank's rows; then optimizer.step()
{% endif %}

Gradients are the mean over data-parallel ranks of each rank's mean loss: the loss of the whole batch where ranks (and
micro-batches) count as many tokens.
{% for one in lost %}

Not expressed: {{ one.what }}.
Instead: {{ one.instead }}.
{% endfor %}
"""

from __future__ import annotations

{% if pipeline %}
import copy
{% endif %}
{% if not pipeline and micro_batches > 1 and ddp or loss_parallel %}
import contextlib
{% endif %}
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
{% if recompute == "offload" %}
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper
{% elif recompute != "none" %}
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
{% endif %}
{% if wraps %}
from torch.distributed.fsdp import {% if reduce_dtype %}MixedPrecisionPolicy, {% endif %}fully_shard
{% endif %}
{% if pipeline %}
from torch.distributed.pipelining import PipelineStage, {{ pipeline.schedule }}
{% endif %}
{% if placements %}
from torch.distributed.tensor import {{ placements | join(", ") }}
{% endif %}
{% if styles %}
from torch.distributed.tensor.parallel import (
{% for name in classes %}
    {{ name }},
{% endfor %}
)
{% endif %}
{% if ddp %}
from torch.nn.parallel import DistributedDataParallel
{% endif %}
{% if kept %}
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
{% endif %}

MICRO_BATCHES = {{ micro_batches }}
{% if pipeline %}
#: The first layer of each stage, and the one after its last.
STAGES = {{ pipeline.stages }}
{% endif %}


def make_mesh(device_type: str) -> DeviceMesh:
    """The mesh of all ranks, slowest links first."""
    return init_device_mesh(device_type, {{ shape }}, mesh_dim_names={{ names }})

{% if styles and sequence %}

class Sequence(ParallelStyle):
    """Makes a module's first argument, or its result, whole along the sequence ("whole"), or cuts it ("cut")."""

    def __init__(self, argument: str = "", result: str = "") -> None:
        self.argument, self.result = argument, result

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def moved(x: torch.Tensor, to: str) -> torch.Tensor:
            before, after = (Replicate(), Shard(1)) if to == "cut" else (Shard(1), Replicate())
            return DTensor.from_local(x, mesh, [before]).redistribute(mesh, [after]).to_local()

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (moved(args[0], self.argument), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": moved(kwargs["hidden_states"], self.argument)}

        if self.argument:
            module.register_forward_pre_hook(before, with_kwargs=True)
        if self.result:
            module.register_forward_hook(lambda module, args, result: moved(result, self.result))
        return module

{% endif %}
{% if styles %}

def tensor_parallel_plan() -> dict[str, ParallelStyle]:
    """The style of each module, by name pattern."""
    return {
{% for name, style in styles %}
        "{{ name }}": {{ style }},
{% endfor %}
    }

{% endif %}
{% if kept %}

def saved(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """{{ kept }} kept, everything else is computed again."""
{% if recompute == "selective" %}
    kept = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten._scaled_dot_product", "aten._grouped_mm.")
{% else %}
    kept = ("aten._scaled_dot_product",)
{% endif %}
    return CheckpointPolicy.MUST_SAVE if str(op).startswith(kept) else CheckpointPolicy.PREFER_RECOMPUTE

{% endif %}
{% if pipeline %}

class Skipped(nn.Module):
    """In the place of layers of other stages."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden


class Stage(nn.Module):
    """One stage of the model: takes token ids or the stage before's hidden states, returns hidden states or logits."""

    def __init__(self, model: nn.Module, number: int) -> None:
        super().__init__()
        self.model, self.first, self.last = model, number == 0, number == len(STAGES) - 1
        layers = model.get_submodule("{{ layers }}")
        for layer in range(len(layers)):
            if layer not in range(*STAGES[number]):
                layers[layer] = Skipped()
        if not self.first:
            model.set_submodule("{{ pipeline.embedding }}", nn.Identity())
        if not self.last:
            model.set_submodule("{{ pipeline.norm }}", nn.Identity())
            model.set_submodule("{{ pipeline.head }}", nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.model.get_submodule("{{ pipeline.base }}")
        given = {"input_ids": x} if self.first else {"inputs_embeds": x}
        hidden = base(**given, use_cache=False).last_hidden_state
        return self.model.get_submodule("{{ pipeline.head }}")(hidden)


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over tokens, each of which predicts the next."""
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), shifted.flatten())

{% endif %}

def {{ "parallelize_part" if pipeline else "parallelize" }}(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The model, cut, recomputed and wrapped; in this order."""
{% if layers and (recompute != "none" or wraps) %}
    layers = {{ "model.model" if pipeline else "model" }}.get_submodule("{{ layers }}")
{% endif %}
{% if styles and not pipeline %}
    parallelize_module(model, mesh["{{ tensor }}"], tensor_parallel_plan())
{% endif %}
{% if recompute == "full" and layers %}
    for name, layer in layers.named_children():
{% if pipeline %}
        if not isinstance(layer, Skipped):
            layers.register_module(name, checkpoint_wrapper(layer))
{% else %}
        layers.register_module(name, checkpoint_wrapper(layer))
{% endif %}
{% elif recompute == "offload" and layers %}
    for name, layer in layers.named_children():
{% if pipeline %}
        if not isinstance(layer, Skipped):
            layers.register_module(name, offload_wrapper(layer))
{% else %}
        layers.register_module(name, offload_wrapper(layer))
{% endif %}
{% elif kept and layers %}
    for name, layer in layers.named_children():
        wrapped = checkpoint_wrapper(layer, context_fn=lambda: create_selective_checkpoint_contexts(saved))
        layers.register_module(name, {{ "layer if isinstance(layer, Skipped) else " if pipeline }}wrapped)
{% endif %}
{% if wraps %}
    data = mesh[{{ data | map("tojson") | join(", ") }}]
    options = {"mesh": data, "reshard_after_forward": {{ reshard }}}
{% if reduce_dtype %}
    options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.{{ reduce_dtype }})
{% endif %}
{% if layers %}
    for layer in layers:
{% if pipeline %}
        if not isinstance(layer, Skipped):
            fully_shard(layer, **options)
{% else %}
        fully_shard(layer, **options)
{% endif %}
{% endif %}
    fully_shard(model, **options)
{% elif ddp %}
    model = DistributedDataParallel(model)
{% endif %}
    return model

{% if pipeline %}

def parallelize(model: nn.Module, mesh: DeviceMesh) -> {{ pipeline.schedule }}:
    """The schedule of this rank's stages; their modules are `schedule.stages`, for the optimizer."""
    pipeline = mesh["pipeline"]
    device = next(model.parameters()).device
{% if styles %}
    parallelize_module(model, mesh["{{ tensor }}"], tensor_parallel_plan())
{% endif %}
    stages = []
    for number in range(pipeline.get_local_rank(), len(STAGES), {{ pipeline.ranks }}):
        part = parallelize_part(Stage(copy.deepcopy(model), number), mesh)
        stages.append(PipelineStage(part, number, len(STAGES), device, group=pipeline.get_group()))
    held = {{ "stages[0]" if pipeline.single else "stages" }}
    schedule = {{ pipeline.schedule }}(held, MICRO_BATCHES, loss_fn=next_token_loss)
    schedule.stages = stages
    return schedule


def step(schedule: {{ pipeline.schedule }}, mesh: DeviceMesh, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
    """Forward and backward of this rank's rows; returns the loss on the last stage's ranks, None on others."""
    rank, losses = mesh.get_local_rank("pipeline"), list[torch.Tensor]()
    given = (input_ids,) if rank == 0 else ()
    holds_last = rank == (len(STAGES) - 1) % {{ pipeline.ranks }}
{% if loss_parallel %}
    with loss_parallel():
        schedule.step(*given, target=labels if holds_last else None, losses=losses)
{% else %}
    schedule.step(*given, target=labels if holds_last else None, losses=losses)
{% endif %}
    return torch.stack(losses).mean() if losses else None
{% else %}

def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Forward and backward of this rank's rows; returns their mean loss."""
{% if micro_batches > 1 %}
    parts = [dict(zip(batch, values)) for values in zip(*(value.chunk(MICRO_BATCHES) for value in batch.values()))]
    total = torch.zeros(())
    for number, part in enumerate(parts):
{% if ddp %}
        is_last = number == len(parts) - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = model(**part).loss / len(parts)
            loss.backward()
{% else %}
{% if keeps %}
        model.set_requires_gradient_sync(number == len(parts) - 1)
{% endif %}
{% if loss_parallel %}
        with loss_parallel():
            loss = model(**part).loss / len(parts)
            loss.backward()
{% else %}
        loss = model(**part).loss / len(parts)
        loss.backward()
{% endif %}
{% endif %}
        total += loss.detach(){{ ".full_tensor()" if loss_parallel else "" }}.to(total.device)
    return total
{% else %}
{% if loss_parallel %}
    with loss_parallel():
        loss = model(**batch).loss
        loss.backward()
    return loss.detach().full_tensor()
{% else %}
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()
{% endif %}
{% endif %}
{% endif %}
'''
