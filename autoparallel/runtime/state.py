"""State of a parallel module beside its parameters: mesh, forms, seed, train modes, trainable parameters."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from autoparallel.errors import InputError
from autoparallel.kernels import groups
from autoparallel.layout import Layout
from autoparallel.layout.redistribution import Axes, name_of
from autoparallel.plans import Hybrid
from autoparallel.runtime import initialise
from autoparallel.runtime.failing import Closed, Together
from autoparallel.runtime.form import Compile, Forms
from autoparallel.runtime.generation_caches import Caches
from autoparallel.runtime.guards import Places, SharedAttributes
from autoparallel.runtime.inputs import Inputs
from autoparallel.runtime.left_values import in_copies
from autoparallel.runtime.let_go import Root
from autoparallel.runtime.marks import Marks
from autoparallel.runtime.offload.gradients import HostGradients
from autoparallel.runtime.offload.mapped import MappedFiles
from autoparallel.runtime.offload.optimizer import Limits
from autoparallel.runtime.offload.saved_file import SavedFile
from autoparallel.runtime.originals import Originals
from autoparallel.runtime.scaler import make_torchs_right
from autoparallel.runtime.shared import Ranks
from autoparallel.schedule.tiers import ON_DEVICE

_training = attrgetter("training")
#: What outputs are: of the plan's layout, or whole. A third way is whole in eval mode, and of models without a scalar
#: loss, whose users compute it from whole outputs (`integrations`).
OUTPUTS = LAYOUT, WHOLE = "layout", "whole"
WHOLE_WITHOUT_LOSS = "whole without loss"


@dataclass(eq=False)
class State:
    """State of a parallel module beside its parameters. ``outputs``: one of `OUTPUTS`; ``calls``: calls that have drawn
    random numbers; ``gathers``: whether outputs are returned whole (within ``generate``); ``caches``: of that call."""

    root: Root
    position: groups.MeshPosition
    hybrid: Hybrid
    compile_call: Compile
    inputs: Inputs
    outputs: str
    max_forms: int
    limits: Limits

    def __post_init__(self) -> None:
        self.mesh = self.position.mesh
        self.axes = groups.bind(self.mesh)
        self.together = Together(self.position.whole)
        self.forms = Forms(self.max_forms)
        self.attributes: SharedAttributes | None = None
        self.places: Places | None = None
        self.originals: Originals | None = None
        self.held_at = 0    # compiled forms, when somebody was found to have a part of the original
        make_torchs_right(self.position)
        self.parts: dict[nn.Module, nn.Module] = {}
        self.original_modes: list[bool] = []
        self.calls_traced: dict[str, None] = {}
        self.numbers_told: set[str] = set()
        #: Attributes in which forward leaves tensors, with the last call's values, or marks: of the model itself by
        #: name; of modules in it by path, each with its place in ``parts``.
        self.left_in_root: dict[str, Any] = {}
        self.left: dict[str, tuple[int, dict[str, Any]]] = {}
        self.layouts: dict[str, Layout] = {}
        self.shared_groups: dict[Ranks, dist.ProcessGroup] = {}
        self.calls = 0
        self.marks = Marks(self.inputs)
        self.nothing: nn.Parameter | None = None  # of an optimizer on a pipeline stage without parameters
        self.offload = ON_DEVICE  # of the first form's plan
        self.host_gradients: HostGradients | None = None
        self.files: MappedFiles | None = None  # of parameters and gradients on disk
        self.saved_file: SavedFile | None = None  # of tensors that blocks save on disk
        self.optimizers = WeakSet[Any]()    # with states elsewhere, which share the limits
        self.keeps_away = False    # optimizers that would keep states on the device are refused
        self.gathers = False
        self.caches: Caches | None = None
        self.seed = initialise.shared_seed(torch.initial_seed())
        self.device = torch.device(self.mesh.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())

    @property
    def model(self) -> nn.Module:
        """The original."""
        return self.root.module

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        """The state of a copied module: parameters of its own, the same process groups."""
        made = memo[id(self)] = object.__new__(State)
        memo.update({id(shared): shared for shared in (self.together, *self.shared_groups.values())})
        memo[id(self.optimizers)] = WeakSet()
        memo.update(in_copies(self))
        with warnings.catch_warnings():     # torch's, of copies of a call's structure
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
            made.__dict__.update({**deepcopy(self.__dict__, memo), "keeps_away": False})
        return made

    def __reduce__(self) -> Any:
        raise InputError("a parallel module cannot be pickled: its programs and process groups are of this process\n"
                         "  Save its state: parallel.save(folder, optimizer), parallel.save_pretrained(folder) or "
                         "torch.distributed.checkpoint; pickle the model that it was made of.")

    def gives_whole(self, training: bool, has_loss: bool) -> bool:
        """Whether the outputs of a call are whole tensors. ``has_loss``: one of them is a scalar loss."""
        beside_loss = training and has_loss
        return self.gathers or self.outputs == WHOLE or (self.outputs == WHOLE_WITHOUT_LOSS and not beside_loss)

    def join(self, sets: Iterable[Axes]) -> None:
        """Bind the axes of programs whose steps run on several mesh axes together. All ranks call this."""
        for axes in sets:
            if (name := name_of(axes, self.position.axis_names)) not in self.axes:
                self.axes[name], group = groups.joint_axis(self.position, axes)
                self.together.own(group)

    def check(self) -> None:
        """Compare the model's parts, and the original if somebody has any of it, with what they were when placed. (An
        original that is gone has no values from now on.)"""
        if self.places is not None:
            self.places.check()
        if self.originals is None:
            return
        if self.root.is_gone() and not self._is_held():
            self.originals = None
            self.root.drop_values()
        else:
            self.originals.check()

    def _is_held(self) -> bool:
        """Whether somebody has a part of the original, whose root is gone. (Asked again when a form has been compiled:
        this takes a while, and what a trace leaves has parts until garbage is collected.)"""
        if self.held_at == self.forms.compiled:
            return True
        assert self.originals is not None and self.attributes is not None
        holders = [self.parts, *self.originals.holders(), *self.attributes.holders(), *self.forms.holders()]
        if self.root.is_held(holders):
            gc.collect()
            if self.root.is_held(holders):
                self.held_at = self.forms.compiled
        return self.held_at == self.forms.compiled

    def close(self) -> None:
        """Let go of the programs and of the process groups of this module's own."""
        self.forms, self.shared_groups = Forms(self.max_forms), {}
        self.together = Closed(type(self.model).__name__)
        if self.host_gradients is not None:
            self.host_gradients.close()

    def modes(self) -> tuple[bool, ...]:
        """Train (True) or eval mode of each module. One that was set on the original is its part's, too."""
        if list(map(_training, self.parts)) != self.original_modes:
            for (module, part), was in zip(self.parts.items(), self.original_modes, strict=True):
                if module.training != was:
                    part.training = module.training
            self._note_modes()
        return tuple(map(_training, self.parts.values() or self.model.modules()))

    def trainable(self) -> tuple[bool, ...]:
        """``requires_grad`` of each parameter; () with several stages. There, raises InputError for a parameter that
        was frozen when compiled and is trainable now: other stages, which have other parameters, would not know. What
        is set on the original's parameters is set on the parts', too."""
        self._share_trainable()
        if self.hybrid.stages == 1:
            parts = self.parts.values() or self.model.modules()
            return tuple([p.requires_grad for part in parts for p in part._parameters.values() if p is not None])
        for module, part in self.parts.items():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.requires_grad > module.get_parameter(name).requires_grad:
                    raise InputError(f"{type(part).__name__}.{name} was frozen when the pipeline was compiled, and "
                                     "requires a gradient now\n  Compile again with every parameter unfrozen that may "
                                     "be trained (freezing is possible at any time).")
        return ()

    def _share_trainable(self) -> None:
        """Set ``requires_grad`` on parameters whose original has been set. Raises InputError with several stages."""
        for name, trainable in self.originals.newly_trainable().items() if self.originals is not None else ():
            if self.hybrid.stages > 1:
                raise InputError(f"requires_grad of {name} was set on the model that was compiled, and each stage of "
                                 "its pipeline has other parameters\n  Compile again; to freeze parameters, set it on "
                                 "the parallel module's.")
            path, _, leaf = name.rpartition(".")
            initialise.registered(self.parts[self.model.get_submodule(path)], leaf).requires_grad_(trainable)

    def check_stepped(self, what: str) -> None:
        """Raises InputError if a backward has stepped parameters, which ``what`` reads, and no step() has ended."""
        for optimizer in self.optimizers:
            optimizer.check_stepped(what)

    def set_mode(self, mode: bool) -> None:
        """Train (True) or eval mode as the original's ``train`` sets it, which may keep some modules in eval mode."""
        self.model.train(mode)
        for module, part in self.parts.items():
            part.training = module.training
        self._note_modes()

    def _note_modes(self) -> None:
        self.original_modes = list(map(_training, self.parts))

    def stand_in(self) -> list[nn.Parameter]:
        """An empty parameter for the optimizer of a pipeline stage without parameters, since torch's optimizers want
        one; [] without a pipeline and for a model without parameters."""
        if self.hybrid.stages == 1 or next(self.model.parameters(), None) is None:
            return []
        if self.nothing is None:
            self.nothing = nn.Parameter(torch.empty(0, device=self.device))
        return [self.nothing]

    def take_modes(self) -> None:
        """Copy train modes and, without stages, ``requires_grad`` to the original's modules, which are traced."""
        for module, part in self.parts.items():
            module.training = part.training
            for name, parameter in part._parameters.items():
                if parameter is not None and self.hybrid.stages == 1:
                    module.get_parameter(name).requires_grad_(parameter.requires_grad)
        self._note_modes()
        if self.originals is not None:
            self.originals.take_trainable()
