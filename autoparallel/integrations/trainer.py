"""transformers' `Trainer` on a parallel module: `AutoparallelTrainer`, and the mixin for its subclasses."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from accelerate.utils import convert_to_fp32
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from autoparallel.errors import InfeasibleError, InputError, shown
from autoparallel.integrations.accelerator import AutoparallelAccelerator
from autoparallel.integrations.batches import first_batches, one_of, rows_of
from autoparallel.integrations.loss import with_loss
from autoparallel.integrations.prepared import move_optimizer
from autoparallel.optim import adafactor_of_transformers
from autoparallel.runtime.checkpoint.job import IN_OTHERS
from autoparallel.runtime.module import ParallelModule
from autoparallel.runtime.tracing import first_form

#: File of a checkpoint with the samples of a step on all ranks.
_SAMPLES = "samples_per_step.txt"
#: Options of `autoparallel.compile` that say how a step is split.
_SPLITTING = frozenset({"plan", "micro_batches"})
_Base: Any = object  # a Trainer, where the mixin is used


class AutoparallelTraining(_Base):
    """Makes a Trainer train a parallel module: ``class Mine(AutoparallelTraining, Seq2SeqTrainer)``.

    parallel: options of `autoparallel.compile` (``baseline``, ``plan``, ``mesh``, ``zero_stage``, ...).
    """

    model: Any
    model_wrapped: Any
    accelerator: Any
    optimizer_cls_and_kwargs: Any
    #: Whether the loss is that of a trainer beside this mixin (None: if that has one of its own); methods of such a
    #: trainer that the class replaces knowingly.
    inherits_loss: bool | None = None
    replaces: tuple[str, ...] = ()

    def __init__(self, *args: Any, parallel: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._parallel_options = dict(parallel or {})
        self._waiting: list[_Waiting] = []
        self._apart = False  # whether a batch of gradient accumulation cannot be a micro-batch of one step
        self._evaluated = EvaluatedValues()
        super().__init__(*args, **kwargs)
        _check_beside(type(self))
        if self.inherits_loss is None:
            self.inherits_loss = _inherits_loss(type(self))
        self._own_loss = self.inherits_loss or type(self).compute_loss is not AutoparallelTraining.compute_loss
        smoother, function = self.label_smoother, self.compute_loss_func
        in_model = (smoother is not None or function is not None) and not self.inherits_loss
        if in_model and not isinstance(self.model, ParallelModule):
            with_loss(self.model, _loss_of(self), self.model_accepts_loss_kwargs)

    # ---- the accelerator and the data -------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, with accelerate's class replaced; refuses ways to distribute that would meet ours."""
        super().create_accelerator_and_postprocess()
        args = self.args
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if args.world_size != ranks:
            raise InputError(f"TrainingArguments are for {args.world_size} rank{'s' * (args.world_size != 1)}, and "
                             f"{ranks} were started: each would train batches of its own\n  Import "
                             "autoparallel.integrations before you make them; on CPUs also use_cpu=True says it.")
        for name in ("fsdp", "deepspeed", "auto_find_batch_size", "torch_compile"):
            if getattr(args, name, None):
                raise InputError(f"TrainingArguments({name}={shown(getattr(args, name))}): leave it out; what "
                                 "AutoparallelTrainer(..., parallel={...}) takes are options of autoparallel.compile")
        if args.train_sampling_strategy == "batch_rebalance" and ranks > 1:
            raise InputError("TrainingArguments(train_sampling_strategy='batch_rebalance') deals batches out to the "
                             "ranks, and here every rank reads all of a batch: leave it out, or write "
                             "'group_by_length'")
        self.accelerator.__class__ = AutoparallelAccelerator
        self.accelerator.adopt(self._parallel_options)
        self.accelerator.values_of_ranks = False
        args._n_gpu = min(args.n_gpu, 1)  # no DataParallel without a launcher
        args.average_tokens_across_devices = False  # each rank counts those of the global batch
        if args.activation_checkpointing:
            args.activation_checkpointing = False
            self.accelerator.preparation.options.setdefault("recompute", "full")

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The model stays where it is: only its shards are moved, when it is compiled."""

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Compile the model for the first step's batch, before the optimizer is made of its parameters."""
        self._compile(train_dataloader, self.args.gradient_accumulation_steps)
        if self.args.optim == "adafactor" and self.optimizer_cls_and_kwargs is None:  # one that steps shards
            _, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer_cls_and_kwargs = adafactor_of_transformers(), options
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _compile(self, loader: Any, count: int) -> None:
        if isinstance(self.model, ParallelModule):
            return
        given = list(first_batches(loader, count))
        if any(not isinstance(batch, Mapping) for batch in given):
            raise InputError(f"batches of {type(self).__name__} are {type(given[0]).__name__}s, and here each must be "
                             "a mapping of the model's arguments, for which it is compiled before the first step\n"
                             "  Trainers that generate what they train on (GRPO) do not run here: write the loop with "
                             "autoparallel.compile, which has generate too.")
        batches = [_with_items(self, batch, [batch]) for batch in given]
        if not batches:
            raise InputError("the data loader is empty: the model is compiled for its first batch")
        options, joined = self.accelerator.preparation.options, _joined(batches)
        splits = count > 1 and joined is not None and len(batches) == count and not options.keys() & _SPLITTING
        if splits:
            options["micro_batches"] = count
        self.model.train()
        make = partial(self.accelerator.preparation.parallelise, self.model)
        try:
            parallel = make(((), self._prepare_inputs(joined or batches[0])))
        except InfeasibleError:
            if not splits or "pipeline_stages" in options:
                raise
            del options["micro_batches"]  # the model computes across samples, as routers' losses do
            self._apart = True
            parallel = make(((), self._prepare_inputs(batches[0])))
        if self.optimizer is not None:  # Trainer(optimizers=(...)), made of the original's parameters
            move_optimizer(self.optimizer, self.model, parallel)
        self.model = self.model_wrapped = parallel
        self.accelerator.prepare_model(parallel)

    # ---- a step -------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None
                      ) -> torch.Tensor:
        """As the Trainer's. Batches of gradient accumulation wait for the last, and run as micro-batches of one step
        where that computes the same: where the loss counts items of the whole batch, and lengths are equal."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        count = getattr(self, "current_gradient_accumulation_steps", self.args.gradient_accumulation_steps)
        self._waiting.append(_Waiting(dict(self._prepare_inputs(inputs)), num_items_in_batch, count))
        loss = torch.zeros((), device=self.args.device)
        if not self.accelerator.sync_gradients:
            return loss
        assert isinstance(model, ParallelModule)
        waiting, self._waiting = self._waiting, []
        scaler = self.accelerator.scaler
        with nullcontext() if scaler is None else scaler.scaling():
            while waiting:  # more than one group after an epoch of unknown length whose last one was not complete
                together, waiting = waiting[: waiting[0].size], waiting[waiting[0].size :]
                loss = loss + _of_group(self, model, [one.batch for one in together], together[0].items)
        return loss

    def _forward_and_backward(self, model: ParallelModule, batch: dict[str, Any], share: float, items: Any
                              ) -> torch.Tensor:
        """The loss times ``share``, whose gradients are added to those there are."""
        hybrid, rows = model._state.hybrid, rows_of(batch)
        fits = rows is None or rows % hybrid.micro_batches == 0
        if not self._own_loss and share == 1.0 and (fits or hybrid.stages > 1):
            return model.step(**batch)
        if hybrid.stages > 1:
            raise InputError("gradient accumulation over batches of different lengths, or with a compute_loss of the "
                             "trainer's own, does not run in pipeline stages: pad to one length, or leave out "
                             "pipeline_stages")
        if self._own_loss:
            batch.pop("num_items_in_batch", None)
        loss = self.compute_loss(model, batch, num_items_in_batch=items) if self._own_loss else _loss(model(**batch))
        loss = (loss.full_tensor() if isinstance(loss, DTensor) else loss) * share  # computed of outputs in shards
        (loss if self.accelerator.scaler is None else self.accelerator.scaler.scale(loss)).backward()
        return loss.detach()

    def compute_loss(self, model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False,
                     num_items_in_batch: Any = None) -> Any:
        """The loss of a call, label smoothing and ``compute_loss_func`` included, which the model computes; or that of
        the trainer beside this mixin, as TRL's SFTTrainer has one."""
        if self.inherits_loss:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        batch = _with_items(self, dict(inputs), [inputs], num_items_in_batch)
        assert isinstance(model, ParallelModule)
        if model._state.hybrid.stages > 1 and not torch.is_grad_enabled():
            loss = model.step(**batch)
            outputs = {"loss": loss}
        else:
            outputs = convert_to_fp32(model(**batch))
            loss = _loss(outputs)
        return (loss, outputs) if return_outputs else loss

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        return self.accelerator.autocast()

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.accelerator.clip_grad_norm_(model.parameters(), float("inf")) if grad_norm is None else grad_norm

    # ---- counts, of global batches on every rank -------------------------------------------------------------------

    def floating_point_ops(self, inputs: dict[str, Any]) -> Any:
        whole: Any = self.model._state.model if isinstance(self.model, ParallelModule) else self.model
        name = getattr(whole, "main_input_name", "input_ids")
        if name not in inputs or not hasattr(whole, "num_parameters"):
            return 0
        return 6 * inputs[name].numel() * whole.num_parameters(exclude_embeddings=True) / self.args.world_size

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self.args.world_size

    # ---- evaluation -------------------------------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        self._compile(dataloader, 1)
        self._evaluated.accelerator = self.accelerator
        self.gather_function = self._evaluated
        return super().evaluation_loop(dataloader, description, *args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: Any, prediction_loss_only: bool,
                        ignore_keys: list[str] | None = None) -> Any:
        assert isinstance(model, ParallelModule)
        if model._state.hybrid.stages > 1 and not prediction_loss_only:
            raise InputError("a pipeline returns the loss only: evaluate with prediction_loss_only=True in "
                             "TrainingArguments, without compute_metrics, or train without pipeline_stages")
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        self._evaluated.loss_rows = None if loss is None else rows_of(inputs)
        return loss, logits, labels

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Weights as from_pretrained reads them, gathered tensor by tensor; all ranks call this."""
        if not isinstance(self.model, ParallelModule):
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        self.model.save_pretrained(folder)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if self.args.should_save:
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert isinstance(self.model, ParallelModule)
        self.model.save(Path(output_dir) / IN_OTHERS, self.optimizer.optimizer, step=self.state.global_step)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")
            (Path(output_dir) / IN_OTHERS / _SAMPLES).write_text(str(_samples_of_step(self)))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights before training; those of a whole run are loaded with its optimizer, when there is one."""
        if (Path(resume_from_checkpoint) / IN_OTHERS).exists():
            return
        if isinstance(self.model, ParallelModule):
            self.model.load_pretrained(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint) / IN_OTHERS
        if not folder.exists():
            return  # weights only
        assert isinstance(self.model, ParallelModule)
        self.model.load(folder, self.optimizer.optimizer)
        if self.args.should_save and (folder / _SAMPLES).exists():
            _tell_other_batches(int((folder / _SAMPLES).read_text()), _samples_of_step(self), checkpoint)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True))

    def _load_best_model(self) -> None:
        assert isinstance(self.model, ParallelModule) and self.state.best_model_checkpoint is not None
        self.model.load_pretrained(self.state.best_model_checkpoint)


class EvaluatedValues:
    """The Trainer's ``gather_function``: values are of the global batch already, and stay as they are.

    ``loss_rows``: samples of the batch whose loss comes next; it is returned once for each of them. None: no loss.
    """

    def __init__(self) -> None:
        self.accelerator: Any = None
        self.loss_rows: int | None = None

    def __call__(self, value: Any) -> Any:
        if self.loss_rows is not None:
            value, self.loss_rows = value[:1].expand(self.loss_rows), None
        return self.accelerator.gather_for_metrics(value)


def _loss_of(trainer: Any) -> Any:
    """The loss that the Trainer computes from outputs and labels, without the Trainer's call of the model."""
    model, smoother, function = trainer.model, trainer.label_smoother, trainer.compute_loss_func
    inner = getattr(getattr(model, "base_model", None), "model", model) if hasattr(model, "peft_config") else model
    shift = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def loss(outputs: Any, labels: Any, items: Any) -> Any:
        if function is not None:
            return function(outputs, labels, num_items_in_batch=items)
        return smoother(outputs, labels, shift_labels=shift, num_items_in_batch=items)

    return loss


def _beside(kind: type, method: str) -> type | None:
    """The trainer beside the mixin, other than transformers' own, that has this method; None if there is none."""
    mro = kind.__mro__
    found = next((one for one in mro[mro.index(AutoparallelTraining) + 1 :] if method in vars(one)), None)
    return None if found is None or found.__module__.startswith("transformers.") else found


def _inherits_loss(kind: type) -> bool:
    return _beside(kind, "compute_loss") is not None


def _check_beside(kind: type[AutoparallelTraining]) -> None:
    """Raises InputError for a trainer beside the mixin whose own steps would not run."""
    for method in ("training_step", "autocast_smart_context_manager", "_clip_grad_norm", "_get_grad_norm"):
        if method not in kind.replaces and (other := _beside(kind, method)) is not None:
            raise InputError(f"{other.__name__}.{method} would not run: AutoparallelTraining has its own. Put what it "
                             f"does into {kind.__name__}.{method}, or name it in {kind.__name__}.replaces if it is "
                             "not needed")


class _Waiting(NamedTuple):
    """A batch of gradient accumulation: the items of its group, and the number of batches in the group."""

    batch: dict[str, Any]
    items: Any
    size: int


def _of_group(trainer: Any, model: ParallelModule, batches: list[dict[str, Any]], items: Any) -> torch.Tensor:
    """The loss of batches that the Trainer has read together, with ``items`` (None: not counted) in all of them; its
    gradients are added to those there are."""
    batches = [_with_items(trainer, batch, batches, items) for batch in batches]
    apart = trainer._own_loss or trainer._apart or not _reads_items(model)
    joined = None if apart else _joined(batches)
    if joined is not None:
        return trainer._forward_and_backward(model, joined, 1.0, items)
    share = 1.0 if _counts_items(trainer) and items is not None else 1.0 / len(batches)
    return sum((trainer._forward_and_backward(model, batch, share, items) for batch in batches),
               torch.zeros((), device=trainer.args.device))


def _counts_items(trainer: Any) -> bool:
    """Whether the loss is divided by ``num_items_in_batch``, of the whole step."""
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
                or trainer.label_smoother is not None)


def _reads_items(model: ParallelModule) -> bool:
    """Whether the model's program reads ``num_items_in_batch``, so that its loss is divided by it; True where the call
    does not pass it. BERT's classifiers take it and do not read it: their losses are means over each micro-batch,
    which the Trainer must average itself."""
    graph = first_form(model._state).micro.whole
    _, names = pytree.tree_unflatten(list(range(graph.in_spec.num_leaves)), graph.in_spec)
    if "num_items_in_batch" not in names:
        return True
    paths = {graph.nodes[ref.node].path for ref in graph.consumers if graph.nodes[ref.node].kind == "input"}
    return str(names["num_items_in_batch"]) in paths


def _samples_of_step(trainer: Any) -> int:
    """Samples of a training step on all ranks."""
    args, ranks = trainer.args, 1 if trainer.accelerator.split_batches else trainer.args.world_size
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks)


def _tell_other_batches(before: int, now: int, checkpoint: str) -> None:
    """Warn of steps of other samples than the checkpoint's, as with another number of ranks."""
    if before != now:
        warnings.warn(f"{checkpoint} was saved by steps of {before} samples, and a step has {now} now: losses, "
                      "schedules and the samples that are left of the epoch are others\n  "
                      "per_device_train_batch_size is the batch of each rank; TrainingArguments(accelerator_config="
                      "{'split_batches': True}) makes it that of all ranks, however many there are.", stacklevel=2)


def _with_items(trainer: Any, batch: Mapping[str, Any], batches: Sequence[Mapping[str, Any]], items: Any = None
                ) -> dict[str, Any]:
    """The batch with the number of items of all ``batches`` as a tensor: one program serves all numbers."""
    items = trainer._get_num_items_in_batch(list(batches), trainer.args.device) if items is None else items
    if items is None or not _counts_items(trainer) or trainer._own_loss:
        return dict(batch)
    return {**batch, "num_items_in_batch": torch.as_tensor(items, device=trainer.args.device)}


def _joined(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The batches as one, whose loss is the sum of theirs; None if their tensors do not fit together, or their losses
    do not count items."""
    if len(batches) == 1:
        return dict(batches[0])
    if any("num_items_in_batch" not in batch for batch in batches):
        return None
    joined = one_of([{n: v for n, v in batch.items() if n != "num_items_in_batch"} for batch in batches])
    if joined is None:
        return None
    return {**joined, "num_items_in_batch": batches[0]["num_items_in_batch"]}


def _loss(outputs: Any) -> Any:
    if isinstance(outputs, dict) and "loss" not in outputs:
        raise InputError(f"the model returned no loss, only {sorted(outputs)}: give it labels, or compute_loss_func")
    return outputs["loss"] if isinstance(outputs, dict) else outputs[0]


class AutoparallelTrainer(AutoparallelTraining, Trainer):
    """`transformers.Trainer` that plans and trains the model on all ranks; only the name changes.

    ``per_device_train_batch_size`` times the number of ranks samples are a batch, whatever the plan, and
    ``gradient_accumulation_steps`` of them a step, run as its micro-batches. ``parallel``: options of
    `autoparallel.compile`; without a plan or mesh the search chooses the mesh.
    """


__all__ = ["AutoparallelTrainer", "AutoparallelTraining"]
