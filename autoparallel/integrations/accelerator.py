"""accelerate's `Accelerator` for a parallel module: ``prepare`` compiles the model instead of wrapping it."""

from __future__ import annotations

import inspect
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from autoparallel.errors import InputError
from autoparallel.integrations.batches import equal_on_ranks, first_batches, joined_loader
from autoparallel.integrations.epochs import EPOCHS, load_epochs, rest_of_epoch, save_epochs
from autoparallel.integrations.prepared import Call, Preparation, move_optimizer
from autoparallel.integrations.schedules import Begun, moved, ranks_of_state
from autoparallel.runtime.agree import decide_once
from autoparallel.runtime.checkpoint.job import IN_OTHERS
from autoparallel.runtime.module import ParallelModule
from autoparallel.runtime.scaler import GradScaler
from autoparallel.runtime.step_log import StepLine

T = TypeVar("T")
_OTHERS = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


class AcceleratorWriter:
    """Sends the lines of a `StepLog` to the trackers of an Accelerator: ``StepLog(model, writers=[AcceleratorWriter(
    accelerator)])``. Lines are of rank 0, on which accelerate's trackers log."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def write(self, line: StepLine) -> None:
        values = {f"autoparallel/{name}": value for name, value in asdict(line).items()
                  if name != "steps" and isinstance(value, (int, float))}
        self.accelerator.log(values, step=line.steps)


class AutoparallelAccelerator(Accelerator):
    """`accelerate.Accelerator` whose ``prepare(model, optimizer, loader)`` makes a parallel module.

    parallel: options of `autoparallel.compile` (``baseline``, ``plan``, ``mesh``, ...). Without a mesh or plan the
        search chooses the mesh. ``gradient_accumulation_steps``, ``mixed_precision``, ``accumulate``, ``backward``,
        ``clip_grad_norm_``, ``save_state``, ``load_state``, ``save_model`` and ``gather_for_metrics`` work as ever.

    Batches are those of all ranks together: a loader of batch size 8 yields 8 x ranks samples, the same on every rank,
    as `autoparallel` takes them; so ``gather_for_metrics`` has nothing to gather. In eval mode the model returns whole
    outputs; in train mode too, unless it returns a scalar loss.
    """

    scaler: Any

    #: Whether what is gathered for metrics may have the rows of one rank (the Trainer's has those of the whole batch).
    values_of_ranks = True

    def __init__(self, *args: Any, parallel: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adopt(parallel)

    def adopt(self, parallel: Mapping[str, Any] | None) -> None:
        """The part of the constructor beyond accelerate's. Raises InputError for another way to distribute."""
        if self.distributed_type in _OTHERS or getattr(self, "parallelism_config", None) is not None:
            raise InputError(f"accelerate is configured for {self.distributed_type.value}: leave out FSDP, DeepSpeed "
                             "and parallelism_config, which autoparallel takes the place of")
        self.preparation, self.schedules_begun = Preparation(parallel, self.autocast), list[Begun]()
        if self.scaler is not None:
            self.scaler = GradScaler(self.device.type)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As accelerate's. With a loader whose batches fit the model's arguments, the model is traced now, else at its
        first call; the optimizer's parameters become the parallel module's then, also of one prepared before or after.
        Raises InputError for two models."""
        models = [thing for thing in args if isinstance(thing, nn.Module) and not isinstance(thing, ParallelModule)]
        if len(models) > 1:
            raise InputError("several models are prepared together: which batch is whose? Prepare them one by one, "
                             "each with its optimizer")
        things = [self._with_global_batches(thing) if isinstance(thing, DataLoader) else thing for thing in args]
        optimizers = [thing for thing in args if isinstance(thing, torch.optim.Optimizer)]
        for optimizer in optimizers:
            self.preparation.moves(optimizer)
        if models:
            loader = next((thing for thing in things if isinstance(thing, DataLoader)), None)
            made = self.preparation.parallelise(models[0], None if loader is None else example_call(models[0], loader))
            for optimizer in (*optimizers, *(each.optimizer for each in self._optimizers)):
                self.preparation.when_traced(made, partial(move_optimizer, optimizer, models[0], made))
            things = [made if thing is models[0] else thing for thing in things]
        return super().prepare(*things, device_placement=device_placement)

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
                      ) -> nn.Module:
        if not isinstance(model, ParallelModule):
            return super().prepare_model(model, device_placement, evaluation_mode)
        if not any(model is known for known in self._models):
            self._models.append(model)
        return model

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As accelerate's."""
        made = super().prepare_scheduler(scheduler)
        if made not in [begun.prepared for begun in self.schedules_begun]:
            self.schedules_begun.append(Begun.of(made))
        return made

    def _with_global_batches(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        if getattr(loader, "_is_accelerate_prepared", False):
            return loader
        made = self.prepare_data_loader(loader)
        made._is_accelerate_prepared = True
        return made

    def prepare_data_loader(self, data_loader: DataLoader[Any], device_placement: bool | None = None,
                            slice_fn_for_dispatch: Any = None) -> DataLoader[Any]:
        """The loader with the batches of all ranks, on the device, the same on every rank."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        count = 1 if self.split_batches else self.num_processes
        made = prepare_data_loader(
            joined_loader(data_loader, count), self.device, num_processes=1, process_index=0,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=["torch"] if self.num_processes > 1 else None, dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler, data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking, use_stateful_dataloader=self.use_stateful_dataloader)
        self._dataloaders.append(made)
        return made

    def gather(self, tensor: Any) -> Any:
        """Sharded values whole; rows that are equal on all ranks, as those of a batch, once; others as accelerate's,
        one after another: numbers, and as many rows as a rank's batch (``loss.repeat(batch_size)``)."""
        return pytree.tree_map(lambda value: _whole(value) if isinstance(value, DTensor) or _rows_once(self, value)
                               else super(AutoparallelAccelerator, self).gather(value), tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Sharded values whole; values of the global batch as they are; others with as many rows as a rank's batch
        (``loss.repeat(batch_size)``) as accelerate gathers them: those of each rank, and as many rows as the batch has
        samples, so that means over an epoch weigh each sample once."""
        if not self.values_of_ranks:
            return pytree.tree_map(_whole, input_data)
        return pytree.tree_map(lambda value: self._of_each_rank(_whole(value)), input_data)

    def _of_each_rank(self, value: Any) -> Any:
        state = self.gradient_state
        loader, ends = state.active_dataloader, state.end_of_dataloader
        if not isinstance(value, torch.Tensor) or not value.dim() or loader is None or (ends and state.remainder < 0):
            return value
        most, rows = loader.total_batch_size, len(value)
        samples = state.remainder if ends and state.remainder > 0 else most
        if rows == most:  # (loss.repeat of the whole batch's size, which an incomplete last batch has not)
            return value[:samples]
        if rows == samples or rows != most // self.num_processes:  # (of the whole batch: all of it counts)
            return value
        return torch.cat([value] * (most // rows))[:samples]

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        """As accelerate's; of all parameters of a parallel module, right under every plan."""
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for model in self._models:
            if isinstance(model, ParallelModule) and {id(p) for p in given} == {id(p) for p in model.parameters()}:
                self.unscale_gradients()
                return model.clip_grad_norm_(max_norm, norm_type)
        return super().clip_grad_norm_(given, max_norm, norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """A state dict; that of a parallel module has its DTensors, which its save_pretrained takes."""
        return model.state_dict() if isinstance(model, ParallelModule) else super().get_state_dict(model, unwrap)

    def save_model(self, model: nn.Module, save_directory: Any, max_shard_size: int | str = "10GB",
                   safe_serialization: bool = True) -> None:
        if isinstance(model, ParallelModule):
            model.save_pretrained(save_directory, max_shard_size=max_shard_size)
        else:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """As accelerate's; weights and optimizer of parallel modules in one folder for any mesh and ranks, and the
        loaders' epochs. Gradients are not saved, as ever: warns between batches of ``accumulate``."""
        if not self.sync_gradients and self.is_main_process:
            warnings.warn("a state is saved between the batches of a step, whose gradients it leaves out: save it "
                          "where accelerator.sync_gradients is True", stacklevel=2)
        _decided(self._make_room)
        with self._without_parallel() as pairs:
            folder = super().save_state(output_dir, safe_serialization, **options)
        for number, (model, optimizer) in enumerate(pairs):
            model.save(Path(folder) / IN_OTHERS / f"model-{number}", optimizer, step=0)
        if self.is_main_process:
            save_epochs(self._dataloaders, Path(folder) / IN_OTHERS)  # last: the state is whole
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any
                   ) -> None:
        """As accelerate's, of a state of any number of ranks: schedules go on where as many training steps end here,
        loaders in their epochs. Without a folder the newest whole one of ``automatic_checkpoint_naming``, after whose
        number the next is named; where all are half written nothing is loaded, and a warning says so. Raises InputError
        for a folder without a parallel module's state."""
        if input_dir is None and (input_dir := self._newest_state()) is None:
            return
        ranks = ranks_of_state(Path(input_dir))
        with self._without_parallel() as pairs:
            super().load_state(input_dir, load_kwargs, **options)
        if pairs:
            self.step = _decided(lambda: self.step)  # ranks that were not there when it was saved have read none
        load_epochs(self._dataloaders, Path(input_dir) / IN_OTHERS)
        if ranks not in (0, self.num_processes):
            moved(self.schedules_begun, ranks, self.num_processes)
        for number, (model, optimizer) in enumerate(pairs):
            folder = Path(input_dir) / IN_OTHERS / f"model-{number}"
            if not folder.exists():
                raise InputError(f"{input_dir} has no state of a parallel module: give a folder of this class's "
                                 "save_state")
            self.preparation.when_traced(model, partial(model.load, folder, optimizer))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As accelerate's; after the rest of the epoch ``dataloader`` is in its next one."""
        return rest_of_epoch(super().skip_first_batches(dataloader, num_batches), dataloader)

    def _newest_state(self) -> str | None:
        """The newest whole folder that save_state has named; None where all are half written. Raises InputError where
        there is none."""
        naming = self.project_configuration
        if (folder := self._states_folder) is None:
            raise InputError("load_state needs the folder: accelerator.load_state(\"checkpoints/checkpoint_0\")\n  Or "
                             "the Accelerator ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True): "
                             "then it loads the newest.")
        if not _decided(lambda: any(folder.glob("checkpoint_*"))):
            raise InputError(f"{folder} has no checkpoint_<number>")
        found = _decided(lambda: newest_named(folder))
        naming.iteration = 0 if found is None else _number(found) + 1
        return None if found is None else str(found)

    @property
    def _states_folder(self) -> Path | None:
        """Where save_state names folders itself, as accelerate does; None where it does not."""
        if not self.project_configuration.automatic_checkpoint_naming or self.project_dir is None:
            return None
        return Path(self.project_dir) / "checkpoints"

    def _make_room(self) -> None:
        """Rename an unfinished state at the place of the next one, which accelerate would refuse to overwrite."""
        if (folder := self._states_folder) is not None:
            set_aside(folder / f"checkpoint_{self.save_iteration}")

    @contextmanager
    def _without_parallel(self) -> Iterator[list[tuple[ParallelModule, torch.optim.Optimizer | None]]]:
        """Hide parallel modules and their optimizers from accelerate, and yield them."""
        models, optimizers = list(self._models), list(self._optimizers)
        pairs = []
        for model in models:
            if isinstance(model, ParallelModule):
                mine = next((each for each in optimizers if not model._state.forms or _is_of(each, model)), None)
                pairs.append((model, None if mine is None else mine.optimizer))
        hidden = {id(model) for model, _ in pairs}, {id(optimizer) for _, optimizer in pairs}
        try:
            self._models[:] = [model for model in models if id(model) not in hidden[0]]
            self._optimizers[:] = [each for each in optimizers if id(each.optimizer) not in hidden[1]]
            yield pairs
        finally:
            self._models[:], self._optimizers[:] = models, optimizers


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _rows_once(accelerator: Accelerator, value: Any) -> bool:
    """Whether a value has rows that are equal on all ranks, and not as many as a rank's batch. (An incomplete batch of
    all ranks may have as many.)"""
    if not isinstance(value, torch.Tensor) or not value.dim() or accelerator.num_processes == 1:
        return False
    state = accelerator.gradient_state
    if (loader := state.active_dataloader) is not None:
        most = loader.total_batch_size
        samples = state.remainder if state.end_of_dataloader and state.remainder > 0 else most
        if len(value) == most // accelerator.num_processes != samples:
            return False
    return equal_on_ranks(value)


def _decided(decide: Callable[[], T]) -> T:
    """The result of ``decide()``, on several ranks that of rank 0."""
    return decide_once(decide) if dist.is_initialized() else decide()


def is_whole(state: Path) -> bool:
    """Whether a folder of save_state was written to its end."""
    return (state / IN_OTHERS / EPOCHS).exists()


def set_aside(place: Path) -> None:
    """Rename ``checkpoint_3`` to ``checkpoint_3.partial`` if it exists and was not written to its end, or not by this
    class; the ``.partial`` folder of an earlier call is replaced."""
    if not place.exists() or is_whole(place):
        return
    aside = place.with_name(f"{place.name}.partial")
    warnings.warn(f"{place} is not a whole state of this class, and is renamed to {aside.name}", stacklevel=4)
    shutil.rmtree(aside, ignore_errors=True)
    place.rename(aside)


def newest_named(folder: Path) -> Path | None:
    """The newest whole ``checkpoint_<number>``; None if there is none. Newer ones, that a process which ended has left
    half written, stay until `set_aside` renames them."""
    named = sorted((path for path in folder.glob("checkpoint_*") if _number(path) >= 0), key=_number)
    whole = [path for path in named if is_whole(path)]
    for path in named[named.index(whole[-1]) + 1 :] if whole else named:
        warnings.warn(f"{path} is not whole, and is passed over", stacklevel=4)
    return whole[-1] if whole else None


def _number(path: Path) -> int:
    """Of ``checkpoint_<number>``; -1: another name."""
    number = path.name.removeprefix("checkpoint_")
    return int(number) if number.isdigit() else -1


def _is_of(optimizer: Any, model: nn.Module) -> bool:
    mine = {id(p) for p in model.parameters()}
    return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])


def example_call(model: nn.Module, loader: DataLoader[Any]) -> Call | None:
    """The call of a loader's first batch, as arguments of ``model``; None if they do not fit its signature."""
    batches = first_batches(loader, 1)
    if not batches:
        return None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batches[0], Mapping):
        kwargs = dict(batches[0])
    else:
        args = tuple(batches[0]) if isinstance(batches[0], (tuple, list)) else (batches[0],)
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return None
    return args, kwargs


__all__ = ["AutoparallelAccelerator", "example_call"]
