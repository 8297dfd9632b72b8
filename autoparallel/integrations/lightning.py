"""Lightning's strategies: `AutoparallelStrategy` for ``lightning.Trainer``, `AutoparallelFabricStrategy` for Fabric.

Both are Lightning's DDP strategies without the wrapper: processes and groups are theirs, modules are compiled at their
first call, and loaders yield the batches of all ranks. Checkpoint files are those of one process, with whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import lightning.fabric.fabric
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.wrappers import _FabricModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import RandomSampler
from torchmetrics import Metric

from autoparallel.errors import InputError
from autoparallel.integrations.batches import equal_on_ranks, joined_loader
from autoparallel.integrations.prepared import Preparation, load_whole_state, move_optimizer, whole_state
from autoparallel.runtime.agree import decide_once
from autoparallel.runtime.module import ParallelModule


class _NoControl(_BackwardSyncControl):
    """Gradients of every backward are reduced: those of several add up right."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()


class _SetUp(_FabricModule):
    """The module that ``fabric.setup`` returns: one of a parallel module has the parameters, state and methods of that,
    where Fabric gives those of the original."""

    def __init__(self, forward_module: nn.Module, strategy: Any, original_module: nn.Module | None = None) -> None:
        parallel = isinstance(forward_module, ParallelModule)
        super().__init__(forward_module, strategy, None if parallel else original_module)


lightning.fabric.fabric._FabricModule = _SetUp  # type: ignore[misc]


class AutoparallelFabricStrategy(FabricDDP):
    """``Fabric(strategy=AutoparallelFabricStrategy())``; ``parallel``: options of `autoparallel.compile`.

    A batch is that of all ranks, the same on each. ``fabric.save`` writes, and ``fabric.load`` reads, files of one
    process, on any number of ranks.
    """

    def __init__(self, parallel: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._preparation = Preparation(parallel)
        self._backward_sync_control = _NoControl()

    @property
    def distributed_sampler_kwargs(self) -> Any:
        return None

    def process_dataloader(self, dataloader: Any) -> Any:
        return joined_loader(_in_one_order(dataloader), self.world_size)

    def module_to_device(self, module: nn.Module) -> None:
        """The module stays where it is: only its shards are moved, when it is compiled."""

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """As DDP's, but rows that are equal on all ranks, as those of a batch, once: with a first dim of 1."""
        once = _rows_once(tensor, group)
        return super().all_gather(tensor, group, sync_grads) if once is None else once

    def setup_module(self, module: nn.Module) -> Any:
        return self._preparation.parallelise(module)

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[torch.optim.Optimizer],
                                    scheduler: Any = None) -> Any:
        made = self._preparation.parallelise(module)
        for optimizer in optimizers:
            self._preparation.when_traced(made, partial(move_optimizer, optimizer, module, made))
        return made, optimizers, scheduler

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """As Fabric's; one made before the first call steps the parallel module's parameters from then on."""
        self._preparation.moves(optimizer)
        return super().setup_optimizer(optimizer)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return whole_state_dict(module)

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return whole_state(optimizer)

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
                        ) -> dict[str, Any]:
        """As Lightning's; optimizers that are given get shards."""
        held = {} if not isinstance(state, dict) else {
            name: thing for name, thing in state.items() if isinstance(thing, torch.optim.Optimizer)}
        if not held:
            return super().load_checkpoint(path, state, strict, weights_only)
        rest = {name: thing for name, thing in state.items() if name not in held}
        found = super().load_checkpoint(path, rest, False, weights_only) if rest else (
            self.checkpoint_io.load_checkpoint(path, weights_only=weights_only))
        for name, optimizer in held.items():
            if name not in found and strict:
                raise InputError(f"{path} has no {name!r}")
            if name in found:
                load_whole_state(optimizer, found.pop(name))
        state.update(rest)
        return found

    def clip_gradients_norm(self, module: Any, optimizer: torch.optim.Optimizer, max_norm: float,
                            norm_type: float = 2.0, error_if_nonfinite: bool = True) -> torch.Tensor:
        if not isinstance(module, ParallelModule):
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        self.precision.unscale_gradients(optimizer)
        norm = module.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise InputError(f"the norm of the gradients is {float(norm)}: error_if_nonfinite=False goes on")
        return norm


class AutoparallelStrategy(DDPStrategy):
    """``Trainer(strategy=AutoparallelStrategy())``; ``parallel``: options of `autoparallel.compile`.

    Each submodule that the LightningModule holds itself, or in a ModuleList or ModuleDict, and that has parameters
    (``self.model``, or ``self.generator`` and ``self.discriminator``) becomes a parallel module, with whole outputs;
    what ``training_step`` computes of them it computes on every rank, of the batch of all ranks.
    """

    model: Any

    def __init__(self, parallel: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._preparation = Preparation(parallel)

    def process_dataloader(self, dataloader: Any) -> Any:
        """The loader with the batches of all ranks; one for predictions notes their indices, as Lightning's does."""
        noting = {"around": _IndexBatchSamplerWrapper} if isinstance(
            getattr(dataloader, "batch_sampler", None), _IndexBatchSamplerWrapper) else {}
        return joined_loader(_in_one_order(dataloader), self.world_size, **noting)

    def setup(self, trainer: Any) -> None:
        """As DDP's: optimizers of the original's parameters, then the parallel modules in place of the submodules.
        Raises InputError for Lightning's averages of weights."""
        assert self.accelerator is not None and self.model is not None
        for callback in trainer.callbacks:
            if trainer.state.fn == TrainerFn.FITTING and isinstance(
                    callback, (StochasticWeightAveraging, WeightAveraging)):
                raise InputError(f"{type(callback).__name__} averages a copy of the LightningModule from before its "
                                 "submodules are compiled: leave it out\n  torch.optim.swa_utils.AveragedModel("
                                 "self.model) averages a submodule: make it after the first step (in "
                                 "on_train_batch_end), and call its update_parameters(self.model).")
        trainer._accelerator_connector.use_distributed_sampler = False  # every rank takes the batches of all
        for part in self.model.modules():
            if isinstance(part, Metric):
                part.distributed_available_fn = _adds_up_ranks
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        for holder, name, child in list(_called_by_itself(self.model)):
            made = self._preparation.parallelise(child)
            setattr(holder, name, made)
            for optimizer in self.optimizers:
                self._preparation.when_traced(made, partial(move_optimizer, optimizer, child, made))
            self._preparation.when_traced(made, partial(_move_toggled, self.model, child, made))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As DDP's, but for a sum, as of ``log(..., reduce_fx="sum", sync_dist=True)``: the value of each rank is that
        of all ranks' batches already, and is not added up again."""
        return super().reduce(tensor, group, "mean" if reduce_op == "sum" else reduce_op)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """As DDP's, but rows that are equal on all ranks, as those of a batch, once: with a first dim of 1."""
        once = _rows_once(tensor, group)
        return super().all_gather(tensor, group, sync_grads) if once is None else once

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        return whole_state_dict(self.model)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.model is not None
        parts = {f"{name}.": part for name, part in self.model.named_modules() if isinstance(part, ParallelModule)}
        if not parts:
            super().load_model_state_dict(checkpoint, strict)
            return
        state = dict(checkpoint["state_dict"])
        for prefix, part in parts.items():
            mine = {key: state.pop(key) for key in list(state) if key.startswith(prefix)}
            part.load_state_dict({key.removeprefix(prefix): value for key, value in mine.items()}, strict)
        own = {name: value for name, value in (*self.model.named_parameters(), *self.model.named_buffers())
               if not name.startswith(tuple(parts))}
        if strict and set(state) - set(own):
            raise InputError(f"the checkpoint has {sorted(set(state) - set(own))[:5]}, which the module has not")
        with torch.no_grad():
            for name in set(state) & set(own):
                own[name].copy_(state[name])

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return whole_state(getattr(optimizer, "_optimizer", optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_whole_state(optimizer, state)

    def model_to_device(self) -> None:
        """The module stays where it is: only shards are moved, when submodules are compiled."""

    def teardown(self) -> None:
        """As the strategy's; parameters stay where they are."""
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _called_by_itself(holder: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The submodules with parameters that a LightningModule calls, each with its holder and name there: its own, and
    those in its lists and dicts of modules, which are not called themselves. Not its parallel modules."""
    for name, child in holder.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called_by_itself(child)
        elif not isinstance(child, (ParallelModule, nn.ParameterList, nn.ParameterDict)) and any(
                True for _ in child.parameters()):
            yield holder, name, child


def _adds_up_ranks() -> bool:
    """Whether a metric adds up the counts of all ranks: no, for each rank has counted the batches of all."""
    return False


def _rows_once(value: torch.Tensor, group: Any) -> torch.Tensor | None:
    """What gathers rows that all ranks have: one copy, with gradient. None for a number, and where ranks differ."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    if not value.dim() or not dist.is_initialized() or not equal_on_ranks(value, group):
        return None
    return value.unsqueeze(0)


def _in_one_order(loader: Any) -> Any:
    """The loader; a shuffling sampler without a generator gets one with the same seed on all ranks."""
    if isinstance(loader.sampler, RandomSampler) and loader.sampler.generator is None:
        seed = decide_once(lambda: int(torch.empty((), dtype=torch.int64).random_()))
        loader.sampler.generator = torch.Generator().manual_seed(seed)
    return loader


def _move_toggled(holder: Any, child: nn.Module, made: ParallelModule) -> None:
    """What ``toggle_optimizer`` noted of the original's parameters holds for those of the parallel module, which is
    traced before ``untoggle_optimizer``."""
    noted, own = holder._param_requires_grad_state, dict(nn.Module.named_parameters(made, remove_duplicate=False))
    for name, parameter in child.named_parameters(remove_duplicate=False):
        if parameter in noted and name in own:
            noted[own[name]] = noted[parameter]


def whole_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state dict with whole tensors, as of one process. All ranks call this."""
    if isinstance(module, ParallelModule):
        original = not module._state.forms
        values = module._state.model.state_dict() if original else module.state_dict()
    else:
        values = {}
        nn.Module._save_to_state_dict(module, values, "", False)
        for name, child in module.named_children():
            values.update({f"{name}.{key}": value for key, value in whole_state_dict(child).items()})
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}


__all__ = ["AutoparallelFabricStrategy", "AutoparallelStrategy"]
