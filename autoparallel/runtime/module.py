"""`ParallelModule`, which `autoparallel.compile` returns: the original's names, with calls that run on the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from html import escape
from os import PathLike
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset

from autoparallel.capture import canonical_call
from autoparallel.capture.tracing.hf_caches import write_back
from autoparallel.errors import InputError
from autoparallel.kernels import groups
from autoparallel.kernels.table_cache import Lookups
from autoparallel.plans import Hybrid, Plan
from autoparallel.runtime import (
    arguments,
    attributes,
    batches,
    data,
    initialise,
    load_hooks,
    loading,
    placing,
    resume,
    streams,
    targets,
    tracing,
)
from autoparallel.runtime.cached_tables import lookups_of
from autoparallel.runtime.calls import Calls
from autoparallel.runtime.checkpoint import pretrained
from autoparallel.runtime.checkpoint.job import Checkpoint, Job, Saving
from autoparallel.runtime.clipping import check_arguments, clip_gradients
from autoparallel.runtime.containers import containing, is_container
from autoparallel.runtime.failing import one_at_a_time
from autoparallel.runtime.form import Compile, Compiled
from autoparallel.runtime.generation import generates, generates_adapted, generating, generating_adapted
from autoparallel.runtime.inputs import Inputs, local_batch
from autoparallel.runtime.let_go import Root
from autoparallel.runtime.offload import making
from autoparallel.runtime.offload.optimizer import Limits
from autoparallel.runtime.profiling import Profile, profiled
from autoparallel.runtime.shared import shared_parameters
from autoparallel.runtime.state import State
from autoparallel.runtime.verify import Verification, measure, undone
from autoparallel.runtime.wrappers import refuse_cached_weights, refuse_composed, refuse_tracers, refuse_transforms

#: Why torch.compile of a parallel module, or of what calls it, leaves its calls as they are.
_OPAQUE = "a parallel module compiles its own program: autoparallel.compile(model, mesh, backend='inductor')"


class ParallelModule(nn.Module):
    """A model on a mesh; call it like the original.

    Plain tensor arguments are global values, equal on all ranks, or with ``inputs="local"`` of `autoparallel.compile`
    each rank's rows; DTensors are what their placements say. Parameters are DTensors under the original names. A call
    of a new form (shapes, structure, train or eval mode of a module, trainable parameters) is traced and planned anew
    with the parameters' layouts fixed.
    """

    def __init__(self, root: Root, position: groups.MeshPosition, hybrid: Hybrid, compile_call: Compile,
                 inputs: Inputs, outputs: str, max_forms: int, limits: Limits) -> None:
        #: The first attribute, so that a deep copy has met it before the parts (`left_values.in_copies`).
        vars(self)["_state"] = State(root, position, hybrid, compile_call, inputs, outputs, max_forms, limits)
        super().__init__()
        model = root.module
        self._calls = Calls(self, self._state)
        self.training = model.training
        if generates(model):
            self.__class__ = generating(ParallelModule, cast(Any, type(model)))
        elif generates_adapted(model):
            self.__class__ = generating_adapted(ParallelModule, cast(Any, type(model)))
        elif is_container(model):
            self.__class__ = containing(ParallelModule, cast(Any, type(model)))

    @property
    def plan(self) -> Plan:
        """The plan of the first call form. Raises InputError before the first trace."""
        return tracing.first_form(self._state).plan

    def _get_name(self) -> str:
        refuse_tracers()
        return super()._get_name()

    def __repr__(self) -> str:
        """The original's parts: those of another pipeline stage cannot tell of parameters that they lack here."""
        model = self._state.model
        return self._get_name() + nn.Module.__repr__(model).removeprefix(model._get_name())

    def _repr_html_(self) -> str:
        """The model's class, its mesh and the plan's summary, for notebooks."""
        name = escape(type(self._state.model).__name__)
        if not self._state.forms:
            return f"<p>{name} on a mesh of {self.mesh.size()}: planned at the first call.</p>"
        return f"<p>{name} on a mesh of {self.mesh.size()}.</p>{self.plan._repr_html_()}"

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh as given to `compile`. (With a pipeline, parameters lie on the stage's submesh.)"""
        return self._state.position.whole

    @property
    def replays(self) -> bool:
        """Whether a program has been recorded as CUDA graphs (``cuda_graphs`` of `autoparallel.compile`)."""
        return any(form.is_recorded for form in self._state.forms)

    def program(self) -> torch.fx.GraphModule:
        """This rank's first program: ``parallel.program().print_readable()`` shows it."""
        return next(iter(tracing.first_form(self._state).programs.values())).module

    def trace(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, step: bool = True,
              runs: bool = False, called: str = "trace") -> Compiled:
        """Trace, plan and lower the call ``self(*args, **kwargs)`` and place the parameters, without running it.

        ``step``: as `step` runs it, in micro-batches and stages; else as one forward. Known forms are not traced again.
        ``runs``: the call runs next, so that ranks compare it even if its form is known. ``called``: the method that
        the user has called, of which errors tell.
        """
        return tracing.trace(self, self._state, args, {} if kwargs is None else kwargs, step, runs, called)

    def taken(self, args: Sequence[Any], kwargs: Mapping[str, Any], compared: bool = False
              ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A user's call in the form that `trace` takes: local tensors (``inputs="local"``) become DTensors.

        Raises InputError on all ranks if local shapes differ or, with ``compared``, global values differ.
        """
        state = self._state
        state.together.check()
        refuse_transforms(pytree.tree_leaves((args, kwargs)))
        refuse_cached_weights(state.model)
        with state.together.call():
            return state.inputs.taken(args, kwargs, self.mesh, state.device, compared, all_global=state.gathers)

    @torch.compiler.disable(reason=_OPAQUE)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's call, on the mesh; backward works as from the original. In a pipeline only `step` runs."""
        state = self._state
        given = args, kwargs
        with one_at_a_time:
            compared = state.inputs.are_compared()
            args, kwargs = self.taken(args, kwargs, compared)
            if not state.forms:
                self.trace(args, kwargs, called="forward")
            if state.hybrid.stages > 1:
                raise InputError(f"the model is cut into {state.hybrid.stages} pipeline stages: call "
                                 "parallel.step(...), which runs forward and backward of a whole step")
            compiled = self.trace(args, kwargs, step=False, runs=True, called="forward")
            result = self._calls.forward(compiled, pytree.tree_leaves(canonical_call(args, kwargs)), compared)
            return write_back(*given, result)

    @torch.compiler.disable(reason=_OPAQUE)
    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one step over the whole batch; returns the loss, detached, on every rank.

        The model must return a scalar loss: alone, first in a tuple, or as ``loss`` of a structure. Micro-batches and
        pipeline stages compute the same step; then DTensor inputs are gathered first, since a micro-batch's samples may
        lie on any rank. Under torch.no_grad only forward runs: the evaluation loss of a pipeline. If a rank fails, the
        others raise PeerError with its reason.
        """
        with one_at_a_time:
            args, kwargs = self.taken(args, kwargs, self._state.inputs.are_compared())
            compiled = self.trace(args, kwargs, runs=True, called="step")
            leaves = pytree.tree_leaves(canonical_call(args, kwargs))
            if len(compiled.stages) > 1 and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves):
                raise InputError("an input requires a gradient, and each rank would have only the part of its own "
                                 "pipeline stages\n  Give it detached, or run the model without a pipeline.")
            return self._calls.step(compiled, leaves)

    def verify(self, *args: Any, steps: int = 10, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
               ) -> Verification:
        """Measure ``steps`` steps (`step`) of this call beside the plan's prediction; every rank must call it.

            found = parallel.verify(**batch)
            print(found)                                          # predicted beside measured, part by part
            found.save("cluster.toml")                            # a corrected cluster for the next plan

        Parameters, buffers, gradients and the run state are left as they were; an ``optimizer``, if given, steps and
        is measured too. Seconds are those of the slowest rank.
        """
        compiled = self.trace(*self.taken(args, kwargs), called="verify")
        assert compiled.cluster is not None
        with undone(self):
            measured = measure(lambda: self.step(*args, **kwargs), self._state.device, steps, optimizer)
        return Verification(compiled.plan.prediction, measured, compiled.cluster,
                            compiled.plan.hybrid.pipeline_ranks)

    def profile(self, path: str | PathLike[str], /, *args: Any, ranks: Sequence[int] | None = None, **kwargs: Any
                ) -> Profile:
        """Run one step (`step`) of this call under torch's profiler, and write it to ``path`` on rank 0 beside the
        predicted one, for ui.perfetto.dev; every rank must call it.

            print(parallel.profile("step.json", **batch))         # predicted beside measured, by kind of op

        Ops have the names of their layers, forward and backward, and collectives what they move; ``autoparallel
        compare-trace`` prints the comparison again. ``ranks``: whose events are written (None: 8, the first of each
        part of the pipeline). Each rank's clock begins at a barrier. Parameters, buffers, gradients and the run state
        are left as they were.
        """
        compiled = self.trace(*self.taken(args, kwargs), called="profile")
        pipeline = self._state.position.pipeline_group
        position = (0, 1) if pipeline is None else (dist.get_rank(pipeline), dist.get_world_size(pipeline))
        with undone(self):
            return profiled(lambda: self.step(*args, **kwargs), lambda: self._calls.modules(compiled), compiled, path,
                            ranks, position, self._state.device)

    def optimizer(self, kind: type[torch.optim.Optimizer], params: Any = None, *, tile_bytes: int | None = None,
                  prefetch: bool = True, threads: int | None = None, **options: Any) -> torch.optim.Optimizer:
        """An optimizer of this module's parameters whose states live where the plan says (``offload``).

            optimizer = parallel.optimizer(torch.optim.AdamW, lr=3e-4, weight_decay=0.1)

        kind: a class of torch.optim; where states leave the device, or backward steps, an element-wise one.
        params: parameters or groups of them, as torch takes them; None: all.
        tile_bytes: of the parameters that are stepped at once, a multiple of 4096; None: the plan's, which are 64 MiB,
            or less by its limit of host memory. States on disk take three times that for each state. Of buckets that
            the device steps during backward (``step_in_backward``): any number; None: the plan's ``bucket_bytes``.
        prefetch: read the next tile and write the one before while one is stepped.
        threads: of steps on the host; None: the cores of this host over its ranks, if torch has fewer, as under
            torchrun, which sets OMP_NUM_THREADS=1; a warning says so.
        options: of ``kind``; ``fused=True`` for Adam and AdamW unless they name a kernel (on the host also others).

        All ranks call this. Raises InputError on all ranks, before any state is made, where states do not fit into the
        limits of `autoparallel.compile` or onto the disk.
        """
        return making.optimizer(self, self._state, kind, params, tile_bytes, prefetch, threads, options)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their total norm is at most ``max_norm``; returns the norm before scaling.

        `torch.nn.utils.clip_grad_norm_` under every plan: the norm is over all shards and pipeline stages, and a
        parameter shared by several pipeline ranks counts once. ``norm_type``: the p of the p-norm; may be inf.
        """
        check_arguments(max_norm, norm_type)
        state, compiled = self._state, tracing.first_form(self._state)
        state.check_stepped("clip_grad_norm_")
        state.together.agree("clip_grad_norm_")
        state.together.check()
        with state.together.call():
            return clip_gradients(self.named_parameters(), shared_parameters(compiled, state.hybrid), state.position,
                                  state.device, float(max_norm), float(norm_type))

    def table_lookups(self, forget: bool = False) -> dict[str, Lookups]:
        """What the caches of tables on the host (`autoparallel.Cached`) have done on this rank, by the table's name:
        looked-up ids, hits, ``hit_rate``, rows loaded from the host and written back. ``forget``: count anew from here.
        """
        return lookups_of(self.named_parameters(), forget)

    def train(self, mode: bool = True) -> ParallelModule:
        """As the original's ``train``, which may keep some of its modules in eval mode."""
        self._state.set_mode(mode)
        self.training = self._state.model.training
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ParallelModule:
        """Behind `to`, `half` and the like: applied to the original before the first trace; after it, InputError if a
        dtype or device would change."""
        state = self._state
        if not state.forms:
            state.model._apply(fn, recurse)
        else:
            placing.check_conversion(fn, (*self.named_parameters(), *self.named_buffers()))
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Raises InputError: the program is compiled already."""
        raise InputError(f"{_OPAQUE}\n  Leave parallel.compile() out; torch.compile(parallel) leaves its calls as they "
                         "are.")

    def manual_seed(self, seed: int) -> None:
        """Restart random ops (dropout) from this seed. Raises InputError on all ranks if they give different seeds."""
        resume.start(self._state, seed, 0)

    def run_state(self) -> dict[str, int]:
        """State for resuming a run beside `state_dict` and the optimizer's: seed of the random ops (dropout) and number
        of calls that have drawn from it. Plain numbers, equal on all ranks.

        On the same mesh and plan a resumed run is equal to the bit; on another mesh dropout masks differ, since each
        shard has its own.
        """
        return resume.run_state(self._state)

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a `run_state`. Raises InputError for an invalid one, and on all ranks if theirs differ."""
        resume.load_run_state(self._state, state)

    def shard_batch(self, batch: Any) -> Any:
        """The batch with each tensor as a DTensor in the layout that the program reads; each rank keeps its shard only.

        ``batch``: a mapping of keyword arguments, or a tuple of arguments, of global tensors (with ``inputs="local"``,
        of this rank's rows). Of what forward does not take (targets, in further entries) rows are cut as the outputs'
        are, for a loss outside of the model. All ranks call this equally often, with the same global tensors: a call
        with the batch is refused where they have not. Raises InputError for a step in micro-batches or stages.
        """
        arguments.check_batch(batch)
        args, kwargs = targets.as_call(batch, self._state.model)
        if not self._state.hybrid.is_plain:
            raise InputError("a step in micro-batches or stages takes the whole batch: call step(...) with it as it is")
        args, kwargs = self.taken(args, kwargs)
        with targets.naming_optional(batch, args, self._state.model):
            compiled = self.trace(args, kwargs, called="shard_batch")
        made = batches.sharded(batch, args, kwargs, compiled, self._state)
        return self._state.marks.mark_sharded(made, batch)

    def local_batch(self, batch: Any) -> Any:
        """The global batch as DTensors, from this rank's rows (dim 0): the rows of all ranks in rank order.

        ``batch``: a tensor, or a structure of tensors; tensors without dims, and other values, stay as they are.

        For one call with a DistributedSampler's batch; ``inputs="local"`` of `autoparallel.compile` is for all calls.
        Targets of a loss outside of the model are cut as its outputs by `shard_batch` only, with ``inputs="local"``.
        Raises InputError on all ranks if their shapes differ.
        """
        state = self._state
        arguments.check_batch(batch)
        state.together.check()
        with state.together.call():
            return local_batch(batch, self.mesh, state.device)

    def dataloader(self, dataset: Dataset[Any], batch_size: int, *, shuffle: bool = False, seed: int = 0,
                   collate_fn: Callable[[list[Any]], Any] | None = None, per_sample: bool = False,
                   drop_last: bool = False, **options: Any) -> data.ShardedLoader | streams.StreamedLoader:
        """Batches of ``batch_size`` samples over all ranks; each rank reads the samples of its shards only.

        A sample (or the result of ``collate_fn`` on a list of samples) is a call of the model: a mapping of keyword
        arguments, or a tuple of arguments; further entries, which forward does not take (targets), come as of
        `shard_batch`. With ``shuffle`` all ranks draw one order from ``seed`` and the epoch (`set_epoch`). Random
        numbers within a sample or ``collate_fn`` (torch, numpy, Python; also of generators that they keep in attributes
        or read as variables) are seeded by seed, epoch and sample or batch.

        With a ``collate_fn`` each rank reads and collates whole batches and keeps its shard, since the function may
        depend on the whole batch (pad to the longest). ``per_sample=True`` promises that it treats each sample alone:
        then each rank reads its own samples only, and the first batch of each epoch is checked. With micro-batches or
        stages each rank reads whole batches.

        Where samples are cut too (a sequence, an image's height and width), a dataset with a method
        ``part(index, slices)`` reads only a rank's part of sample ``index``: ``slices`` has the sample's structure,
        with a tuple of slices in place of each tensor (None: all of it). All samples have the first's shapes; the first
        part of each epoch is compared with the sample.

        A dataset that can only be iterated (streams) is read whole by every rank, which keeps its shards; ranks compare
        that they read the same. Its position is its own `state_dict`, or else what was read is skipped. Samples of
        different lengths: `autoparallel.padded_to` as the ``collate_fn``.

        A last incomplete batch is a call of another form, for which the model is compiled once more (and announced);
        ``drop_last=True`` skips it, every epoch.
        Further options are those of torch's DataLoader; of a ``sampler`` all ranks take the first rank's order. With
        ``pin_memory=True`` batches are read into pinned memory and copied to the device one ahead, while the model
        computes; two are then on the device. It changes nothing on a CPU.

        Raises InputError for a dataset smaller than a batch, or with tensors without a row per sample; while iterating,
        on all ranks, if they read different data or the promise does not hold.
        """
        return batches.loader(self._state, partial(self.trace, called="dataloader"), dataset, batch_size,
                              shuffle=shuffle, seed=seed, collate=collate_fn, per_sample=per_sample,
                              drop_last=drop_last, options=options)

    def init_weights(self, device: torch.device | str | None = None) -> None:
        """Initialise a meta-device model module by module; only local shards are kept.

        Every module that owns parameters needs ``reset_parameters()``, or the model ``_init_weights(module)``. All
        ranks draw the same numbers.
        """
        tracing.first_form(self._state)
        state = self._state
        device = arguments.device_of(device, state.device)
        state.together.agree("init_weights")
        state.seed = initialise.shared_seed(state.seed)
        initialise.init_weights(state.model, self, state.mesh, device, state.seed, state.root.dropped)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load global tensors or DTensors by the original names; each rank takes its shards. All ranks call this.

        Values are copied into the parameters in their dtype, also with ``assign`` once the parameters are placed.
        strict: names that are missing or not the model's are errors; else they are returned, as torch does.

        Raises InputError on all ranks, with nothing changed, for values that do not fit, DTensors that another rank
        saved, or values that differ over ranks.
        """
        state = self._state
        arguments.check_flag("strict", strict)
        arguments.check_flag("assign", assign)
        if not state.forms:
            return loading.load_original(state.model, state_dict, strict, assign)
        state.together.agree("load_state_dict")
        return loading.load_state_dict(state.model, self, state_dict, state.position, state.device, strict)

    def save_pretrained(self, save_directory: str | PathLike[str], *,
                        state_dict: Mapping[str, torch.Tensor] | None = None, max_shard_size: int | str = "5GB",
                        **options: Any) -> None:
        """Write the weights as safetensors files that ``from_pretrained`` reads, with a transformers model's
        configuration; of a PEFT model its adapters. All ranks call this; rank 0 writes.

        Whole tensors are gathered one at a time, so that no rank needs memory for more than its shards and one of them.
        ``state_dict``: instead of the module's own; ``max_shard_size``: bytes of a file; ``options``: further ones of
        the original's ``save_pretrained``. An older save in the folder is replaced when the new one is complete.
        Raises InputError on all ranks; any error of rank 0's is raised on all.
        """
        tracing.first_form(self._state)
        arguments.check_path("save_directory", save_directory)
        self._state.check_stepped("save_pretrained")
        self._state.together.agree("save_pretrained")
        pretrained.save(self, self._state, save_directory, max_shard_size, state_dict, options)

    def load_pretrained(self, path: str | PathLike[str], strict: bool = True) -> Any:
        """Read safetensors files of a folder (or one file), in the original's format, straight into the shards.

        Each rank reads its part of each tensor; tensors that transformers converts when it loads are read whole, one
        group at a time. A model on the meta device gets its values by this. All ranks call this.

        strict: names that are missing or not the model's are errors; else they are returned, as of load_state_dict.
        Raises InputError on all ranks, with nothing changed.
        """
        tracing.first_form(self._state)
        arguments.check_path("path", path)
        arguments.check_flag("strict", strict)
        self._state.together.agree("load_pretrained")
        return pretrained.load(self, self._state, path, strict)

    def save(self, folder: str | PathLike[str], optimizer: torch.optim.Optimizer | None = None, *,
             step: int | None = None, keep: int | None = None, wait: bool = True, **others: Any) -> Saving:
        """Write a checkpoint of the run to ``folder/step-<step>``: weights, optimizer, random state, and ``others``.

        optimizer: over this module's parameters.
        others: objects with ``state_dict`` and ``load_state_dict``, by name: ``scheduler=scheduler, loader=loader``.
        step: its number; None: the calls that the run has made.
        keep: how many of the newest checkpoints stay; None: all.
        wait: False returns when the state has been copied, and writes in a thread; ``wait()`` of the result, or the
            next save or load, waits for that and raises its errors.

        All ranks call this. A checkpoint is there whole or not at all. Raises InputError for options that cannot be.
        """
        arguments.check_path("folder", folder)
        arguments.check_optimizer(optimizer)
        self._state.together.agree("save")
        return self._job.save(folder, optimizer, others, step, keep, wait)

    def load(self, folder: str | PathLike[str], optimizer: torch.optim.Optimizer | None = None, *,
             step: int | None = None, **others: Any) -> Checkpoint | None:
        """Load the newest checkpoint of ``folder``, or that of ``step``; returns it, or None where there is none yet.

        Under any mesh, plan, number of ranks and ZeRO stage. ``others`` as of `save`. Raises InputError on all ranks
        for a checkpoint that lacks what is asked for. (Its files are DCP's, which has pickles: load none from
        strangers.)
        """
        arguments.check_path("folder", folder)
        arguments.check_optimizer(optimizer)
        arguments.check_step(step)
        self._state.together.agree("load")
        return self._job.load(folder, optimizer, others, step)

    def close(self) -> None:
        """Let go of the compiled programs and of the process groups that are this module's own (of pipelines and
        checkpoints), with their threads and connections, after waiting for a save that is still writing.

        A module that is garbage collected does the same. What needs programs or ranks raises InputError afterwards;
        closing again does nothing. All ranks call this.
        """
        job = self.__dict__.pop("_job", None)
        if job is not None:
            job.finish()
        self._calls = Calls(self, self._state)
        self._state.close()

    @cached_property
    def _job(self) -> Job:
        return Job(self, self._state, tracing.first_form(self._state).plan)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        tracing.first_form(self._state)
        self._state.check_stepped("state_dict()")
        found = nn.Module.state_dict(self, *args, **kwargs)
        load_hooks.add_extra_state(self._state.model, self, found, kwargs.get("prefix", ""))
        return found

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        refuse_composed(self.__dict__)
        tracing.first_form(self._state)
        return nn.Module.named_parameters(self, *args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As the original's; on a pipeline stage without parameters one that is empty, since torch's optimizers want at
        least one."""
        found = list(nn.Module.parameters(self, recurse))
        yield from found or (self._state.stand_in() if recurse else [])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the original's, whose gradients these are before the first call."""
        nn.Module.zero_grad(self if self._state.forms else self._state.model, set_to_none)

    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter of a name. Raises AttributeError for none; StageError for another pipeline stage's."""
        with suppress(KeyError):
            initialise.registered(self, target)
        return super().get_parameter(target)

    def __getitem__(self, key: Any) -> Any:
        """As the original's, if it is a container: ``parallel[0]`` of an `nn.Sequential`."""
        return attributes.item(self, self._state, key)

    def __getattr__(self, name: str) -> Any:
        return attributes.read(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes that forward may read are set on the original, which is traced; others on this module."""
        if not attributes.set_on_original(self, name, value):
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if not attributes.delete_on_original(self, name):
            super().__delattr__(name)
