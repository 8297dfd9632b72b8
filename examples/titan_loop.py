"""A loop of one's own with torchtitan's checkpoints: torch's state dicts, written by DCP every so many steps, the
last two kept, loaded from the newest.

    autoparallel launch --ranks 4 -- python titan_loop.py --output_dir out
"""

import argparse
import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import LlamaConfig, LlamaForCausalLM

import autoparallel  # was:

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class ModelWrapper:
    """The model's states, of torch's own functions."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict) -> None:
        set_model_state_dict(self.model, state)


class OptimizersContainer:
    """The optimizer's states by the parameters' names, so that they load on any number of ranks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict:
        return get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)

    def load_state_dict(self, state: dict) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=FLAT)


class CheckpointManager:
    """Writes ``folder/step-<number>`` every ``interval`` steps, and keeps the newest ``keep_latest_k``."""

    def __init__(self, folder: Path, states: dict, interval: int, keep_latest_k: int) -> None:
        self.folder, self.states, self.interval, self.keep = folder, states, interval, keep_latest_k

    def steps(self) -> list[int]:
        """Those that are whole: DCP writes .metadata last."""
        return sorted(int(re.sub("step-", "", path.parent.name)) for path in self.folder.glob("step-*/.metadata"))

    def save(self, step: int) -> None:
        if step % self.interval:
            return
        dcp.save(self.states, checkpoint_id=self.folder / f"step-{step}")
        if dist.get_rank() == 0:
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.folder / f"step-{old}")
        dist.barrier()

    def load(self) -> int:
        found = self.steps()
        if not found:
            return 0
        dcp.load(self.states, checkpoint_id=self.folder / f"step-{found[-1]}")
        return found[-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    world = autoparallel.init()  # was: dist.init_process_group()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2, use_cache=False))
    batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (args.steps, 8, 16))]
    model = autoparallel.compile(model, world.mesh, example_kwargs=batches[0])  # was:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpointer = CheckpointManager(Path(args.output_dir), {
        "model": ModelWrapper(model), "optimizer": OptimizersContainer(model, optimizer)}, interval=2, keep_latest_k=2)
    for step in range(checkpointer.load(), args.steps):
        loss = model(**batches[step]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1} {float(loss.detach()):.7f}", flush=True)
        checkpointer.save(step + 1)


if __name__ == "__main__":
    main()
