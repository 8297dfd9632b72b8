"""Model and example inputs -> OpGraph."""

from __future__ import annotations

import itertools
import logging
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import Node as FxNode

from autoparallel.capture import left
from autoparallel.capture.contents import is_users
from autoparallel.capture.dependencies import Dependencies, Recorder, hooks_of_all
from autoparallel.capture.devices import moved, program_device
from autoparallel.capture.export import trace
from autoparallel.capture.graph import Node, OpGraph, Ref, TensorMeta, is_floating
from autoparallel.capture.impure import OthersDrawError
from autoparallel.capture.left import Left
from autoparallel.capture.numbers import numbers_as_arguments, refuse_elsewhere
from autoparallel.capture.passes.autocast import ambient, without_autocast
from autoparallel.capture.passes.behind_experts import branches_behind_experts
from autoparallel.capture.passes.editing import module_path, source_line, source_of
from autoparallel.capture.passes.inline_modes import inline_modes
from autoparallel.capture.passes.normalise import normalise
from autoparallel.capture.passes.ordering import order_independent
from autoparallel.capture.remedies import WITHOUT_FUNCTIONS
from autoparallel.capture.sparse import check_sparse_gradients, refuse_sparse_values
from autoparallel.capture.tracing.hf_caches import register_caches
from autoparallel.capture.tracing.repeated_blocks import Calls, UnlikeError, find_repeated
from autoparallel.capture.tracing.unfold_blocks import unfold
from autoparallel.errors import CaptureError, InputError, clipped, shown
from autoparallel.garbage import collected_later

#: Held while a model is traced: torch.export is for one thread at a time, and our state of a trace too.
_ONE_AT_A_TIME = threading.RLock()
#: Within `once_each`, the graphs of the calls captured there, with what their keys are the ids of.
_KEPT: ContextVar[dict[object, tuple[object, OpGraph]] | None] = ContextVar("kept captures", default=None)
PLACEHOLDERS = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "buffer",
                InputKind.USER_INPUT: "input"}


def canonical_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The one form of a call: keyword arguments sorted by name, so that their order never matters. (Caches of
    transformers are trees of tensors from here on.)"""
    register_caches()
    return tuple(args), dict(sorted(kwargs.items()))


def refuse_other_layouts(leaves: Iterable[Any]) -> None:
    """Raises InputError for sparse and nested tensors, which have no shards to give to ranks."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (leaf.layout != torch.strided or leaf.is_nested):
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            raise InputError(f"an input is a {kind} tensor: give a dense one, x.to_dense(), or padded and with a mask")


def call_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The form of a call, as (float32[8, 16], labels=int64[8])."""

    def text(value: Any) -> str:
        leaves = pytree.tree_map(
            lambda leaf: f"{leaf.dtype}{list(leaf.shape)}".removeprefix("torch.") if isinstance(leaf, torch.Tensor)
            else shown(leaf), value)
        return leaves if isinstance(leaves, str) else repr(leaves).replace("'", "")

    return f"({', '.join([*map(text, args), *(f'{name}={text(value)}' for name, value in kwargs.items())])})"


@collected_later()
@contextmanager
def once_each() -> Iterator[None]:
    """In here a call of the same objects (model, tensors) is captured once: of models that nobody changes meanwhile."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def capture(model: torch.nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
            numbers: Sequence[int] = ()) -> OpGraph:
    """Trace and normalise ``model(*args, **kwargs)``, in the model's present mode (train or eval).

    The tensors may be on the meta device; nothing is computed. Threads that capture wait for each other; others may
    call other models meanwhile. ``numbers``: places of Python numbers among the leaves of the call, which are inputs of
    the program. Raises CaptureError, with the user's source line and the call, and InputError for tensors that are not
    dense.
    """
    args, kwargs = canonical_call(args, kwargs or {})
    leaves, spec = pytree.tree_flatten((args, kwargs))
    refuse_other_layouts(leaves)
    kept, key = _KEPT.get(), (id(model), tuple(map(id, leaves)), str(spec), tuple(numbers))
    if kept is not None and key in kept:
        return kept[key][1]
    try:
        with _ONE_AT_A_TIME:
            graph = _on_its_device(model, args, kwargs, tuple(numbers))
            _refuse_unregistered(model, graph)
            if kept is not None:
                kept[key] = (model, leaves), graph
            return graph
    except CaptureError as error:
        error.args = (f"{error}\n  This call: {clipped(call_text(args, kwargs))}",)
        raise


def _refuse_unregistered(model: torch.nn.Module, graph: OpGraph) -> None:
    """Raises CaptureError for a trainable parameter that was traced as a constant: its value would stay the first one,
    and it would have no gradient."""
    constants = [tensor for tensor in graph.constant_tensors.values() if not isinstance(tensor, FakeTensor)]
    memory = {p.data_ptr(): name for name, p in (model.named_parameters() if constants else ())
              if p.requires_grad and not isinstance(p, FakeTensor)}
    for constant in constants:
        if constant.numel() and not constant.is_meta and (name := memory.get(constant.data_ptr())):
            raise CaptureError(f"forward of {type(model).__name__} reads the values of {name} by way of a list, a "
                               "closure or another attribute that has it beside its module: a program would have those "
                               f"of its trace, without a gradient\n  Read it as self.{name} (or keep the list as an "
                               "nn.ParameterList).")


def _on_its_device(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], numbers: tuple[int, ...]
                   ) -> OpGraph:
    """The graph of a call as it runs on the program's device; where that cannot be traced (a tensor that is neither
    parameter nor buffer lies elsewhere), as it runs where the model lies."""
    device = program_device(model, pytree.tree_leaves((args, kwargs)))
    if device is None:
        return _captured(model, args, kwargs, numbers)
    try:
        with torch.inference_mode(False), moved(model, args, kwargs, device) as (there, there_too):
            return _captured(model, there, there_too, numbers)
    except CaptureError as error:
        home = next((t.device for t in (*model.parameters(), *model.buffers())), device)
        if home.type == device.type:
            raise
        logging.getLogger(__name__).info("traced on %s: on %s, %s", home, device, error)
        try:
            with torch.inference_mode(False), moved(model, args, kwargs, home) as (there, there_too):
                return _captured(model, there, there_too, numbers)
        except CaptureError:
            raise error from None


def _captured(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], numbers: tuple[int, ...]
              ) -> OpGraph:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    autocast = ambient([*leaves, *model.parameters()])
    _look_at_hooks(model)
    recorder = Recorder(model)
    with torch.inference_mode(False):
        program = _traced(model, args, kwargs, autocast, recorder, numbers)
    with torch.inference_mode(False), without_autocast():
        dependencies = recorder.dependencies(_equivalent(model))
        results = left.take(program, recorder.returned, dependencies.left)
        return _Builder(model, program, (leaves, spec), results, dependencies, numbers).build()


def _traced(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], autocast: torch.dtype | None,
            recorder: Recorder, numbers: Sequence[int]) -> ExportedProgram:
    """The program in one graph; of equivalent blocks, where a model has them, two are traced."""

    def recorded() -> ExportedProgram:
        try:
            with recorder.recording():
                program = trace(model, args, kwargs, numbers)
        except OthersDrawError:
            with recorder.recording():
                program = trace(model, args, kwargs, numbers)
        refuse_sparse_values(program.graph, _paths(program))
        recorder.refuse_memory(program.graph)
        with recorder.grown(program.graph) as name:
            if name and not _is_traced_alike(program, lambda: trace(model, args, kwargs, numbers), recorder):
                raise recorder.memory(f"adds to {name} and reads it")
        inline_modes(program.graph_module, autocast=autocast)
        return program

    if blocks := find_repeated(model):
        calls = Calls()
        try:
            with calls.recorded(blocks):
                program = recorded()
            unfold(program.graph_module.graph, calls, _paths(program))
            return program
        except (UnlikeError, CaptureError) as error:
            logging.getLogger(__name__).info("traced whole: %s", error)
    return recorded()


def _is_traced_alike(program: ExportedProgram, again: Callable[[], ExportedProgram], recorder: Recorder) -> bool:
    """Whether another trace of the model as the first one left it is the same program."""
    try:
        with recorder.recording():
            return again().graph_module.code == program.graph_module.code
    except CaptureError:
        return False  # it reads tensors of the first trace


def _look_at_hooks(model: torch.nn.Module) -> None:
    """Warn of forward hooks, which run while the model is traced. Raises CaptureError for backward hooks of modules,
    which would never be called, and for hooks of all modules, which see the parallel module as well."""
    traced = []
    if everywhere := hooks_of_all():
        raise CaptureError("a hook of all modules is registered "
                           f"({getattr(everywhere[0], '__qualname__', type(everywhere[0]).__name__)}), and a program "
                           "has no modules to call it for\n  Remove it (the handle's remove()), or register it on the "
                           "modules that it is for.")
    for path, module in model.named_modules():
        name = path or type(model).__name__
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(f"{name} has a backward hook, and a program has no such place\n"
                               "  Use hooks of parameters, parallel.get_parameter(name).register_hook(...), or write a "
                               "torch.autograd.Function.")
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        traced += [f"{getattr(hook, '__qualname__', type(hook).__name__)} of {name}" for hook in hooks
                   if is_users({"__name__": getattr(hook, "__module__", "")})]
    if traced:
        warnings.warn(f"forward hooks are traced as part of the model ({', '.join(traced)}): what they compute is in "
                      "the program; what else they do (append, print) is done once, with tensors that have no data. "
                      "Return intermediate values from forward instead", stacklevel=2)


def _equivalent(model: torch.nn.Module) -> Iterable[list[str]]:
    """Paths of repeated blocks, grouped: blocks of one group have equal traces."""
    found: dict[object, list[str]] = {}
    for block in find_repeated(model):
        found.setdefault(block.kind, []).append(block.path)
    return found.values()


def _paths(program: ExportedProgram) -> dict[str, str]:
    """Names of parameters and buffers, by the names of their placeholders."""
    return {spec.arg.name: spec.target for spec in program.graph_signature.input_specs
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target}


class _Builder:
    def __init__(self, model: torch.nn.Module, program: ExportedProgram, call: tuple[list[Any], pytree.TreeSpec],
                 results: tuple[pytree.TreeSpec, tuple[Left, ...]], dependencies: Dependencies,
                 numbers: tuple[int, ...] = ()) -> None:
        self.program, self.dependencies, self.numbers = program, dependencies, numbers
        self.leaves, self.in_spec = call
        self.out_spec, self.left = results
        self.named = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers(remove_duplicate=False)
        )
        first: dict[int, str] = {}
        self.aliases = {name: first.setdefault(id(t), name) for name, t in self.named.items()}
        self.nodes: list[Node] = []
        self.taken: set[str] = set()
        self.times: Counter[str] = Counter()
        self.leaf_nodes: dict[tuple[str, str], Node] = {}
        self.refs: dict[FxNode, Any] = {}
        self.looks: dict[tuple[TensorMeta, ...], tuple[TensorMeta, ...]] = {}  # one for all nodes that look alike
        self.constants: dict[int, Any] = {
            i: leaf for i, leaf in enumerate(self.leaves) if not isinstance(leaf, torch.Tensor)
        }
        self.constant_tensors: dict[str, torch.Tensor] = {}

    def build(self) -> OpGraph:
        signature = self.program.graph_signature
        specs = {spec.arg.name: spec for spec in signature.input_specs if not isinstance(spec.arg, ConstantArgument)}
        buffers = {
            name: spec.target for name, spec in specs.items() if spec.kind is InputKind.BUFFER and spec.target
        }
        self._refuse_mutated_inputs(signature)
        leaf_of = self._input_positions(signature)
        numbers_as_arguments(self.program.graph_module.graph, self._number_inputs(leaf_of), self.leaves)
        for placeholder in self.program.graph.find_nodes(op="placeholder"):
            if (spec := specs.get(placeholder.name)) is not None and spec.kind is InputKind.PARAMETER:
                placeholder.meta["parameter"] = spec.target
        mutated = normalise(self.program.graph_module.graph, buffers)
        parameters = {name for name, spec in specs.items() if spec.kind is InputKind.PARAMETER}
        constants = {name for name, spec in specs.items() if spec.kind is InputKind.CONSTANT_TENSOR}
        order_independent(self.program.graph_module.graph, parameters, constants, mutated)
        branches_behind_experts(self.program.graph_module.graph)
        outputs: tuple[Any, ...] = ()
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                unread = node.name in constants and not node.users and node not in mutated.values()
                if node.name in specs and not unread and leaf_of.get(node.name) not in self.numbers:
                    self._placeholder(node, specs[node.name], leaf_of)
            elif node.op == "call_function":
                self._op(node)
            elif node.op == "output":
                values = pytree.tree_leaves(node.args[0])
                user = [v for v, spec in zip(values, signature.output_specs, strict=True)
                        if spec.kind is OutputKind.USER_OUTPUT]
                outputs = tuple(self.refs[v] if isinstance(v, FxNode) else v for v in user)
                self._add("output", "output", None, outputs, {}, ())
            else:
                users: list[FxNode] = [*node.users, node]
                place = module_path(users[0])
                raise CaptureError(f"torch.{users[0].target} of functions is not supported"
                                   f"{f' (in {place})' if place else ''}\n"
                                   f"  {WITHOUT_FUNCTIONS}")
        mutations = {path: self.refs[mutated[name]] for name, path in buffers.items() if name in mutated}
        aliases = {name: first for name, first in self.aliases.items() if name != first}
        graph = OpGraph(tuple(self.nodes), self.in_spec, self.out_spec, self.constants, outputs,
                        mutations, aliases, self.constant_tensors, self.dependencies, self.numbers, left=self.left)
        check_sparse_gradients(graph)
        return graph

    @staticmethod
    def _refuse_mutated_inputs(signature: Any) -> None:
        if signature.user_inputs_to_mutate:
            names = sorted(set(signature.user_inputs_to_mutate.values()))
            raise CaptureError(f"the model writes in place to its inputs {names}; write to copies (x.clone())")

    def _input_positions(self, signature: Any) -> dict[str, int]:
        specs = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
        if len(specs) != len(self.leaves):
            raise CaptureError(f"the traced program has {len(specs)} inputs and the call {len(self.leaves)} leaves")
        return {spec.arg.name: position for position, spec in enumerate(specs)}

    def _number_inputs(self, leaf_of: Mapping[str, int]) -> dict[FxNode, int]:
        return {node: leaf_of[node.name] for node in self.program.graph.find_nodes(op="placeholder")
                if leaf_of.get(node.name) in self.numbers}

    def _add(self, kind: str, name: str, target: Any, args: Any, kwargs: Any, outputs: tuple[TensorMeta, ...],
             **where: Any) -> Node:
        if name in self.taken:  # a parameter may be called as an op or an input is
            name = next(free for n in itertools.count(1) if (free := f"{name}_{n}") not in self.taken)
        self.taken.add(name)
        outputs = self.looks.setdefault(outputs, outputs)
        node = Node(len(self.nodes), name, kind, target, args, kwargs, outputs, **where)
        self.nodes.append(node)
        return node

    def _numbered(self, name: str) -> str:
        """An op's name: its kind and how many there were, however it was traced."""
        base = re.sub(r"_\d+$", "", name)
        while True:
            number = self.times[base]
            self.times[base] += 1
            if (found := f"{base}_{number}" if number else base) not in self.taken:
                return found

    def _renumbered(self, constant: str) -> str:
        """torch.export's name of a constant without one, with the number of its place in the graph."""
        made = re.fullmatch(r"(.*\blifted_tensor)_\d+", constant)
        if made is None:
            return constant
        self.times[constant := made[1]] += 1
        return f"{constant}_{self.times[constant] - 1}"

    def _placeholder(self, node: FxNode, spec: Any, leaf_of: Mapping[str, int]) -> None:
        kind = PLACEHOLDERS.get(spec.kind)
        if kind is None:
            raise CaptureError(_of_kind(node, spec))
        requires_grad = False
        if kind == "input":
            path = str(leaf_of[node.name])
            requires_grad = self.leaves[int(path)].requires_grad
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            path = f"constant.{self._renumbered(spec.target)}"
            self.constant_tensors[path] = self.program.constants[spec.target]
        else:
            path = self.aliases[spec.target]
            requires_grad = self.named[spec.target].requires_grad
        known = self.leaf_nodes.get((kind, path))
        if known is None:
            value = node.meta["val"]
            meta = TensorMeta(tuple(value.shape), value.dtype, requires_grad)
            name = path if kind != "input" else node.name
            known = self.leaf_nodes[kind, path] = self._add(kind, name, None, (), {}, (meta,), path=path)
        self.refs[node] = Ref(known.index)

    def _op(self, node: Any) -> None:
        if node.target.__name__ == "getitem":
            source, index = node.args
            self.refs[node] = Ref(self.refs[source].node, index)
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise CaptureError(f"{node.target} is not supported{source_line(node)}")
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), self.refs.__getitem__)
        refuse_elsewhere(node.target, args, kwargs)
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Ref)]
        no_grad = bool(node.meta.get("no_grad")) or node.target is torch.ops.aten.detach.default
        grad = not no_grad and any(self.nodes[r.node].outputs[r.output].requires_grad for r in inputs)
        values = node.meta["val"]
        values = tuple(values) if isinstance(values, (tuple, list)) else (values,)
        if not all(isinstance(v, torch.Tensor) for v in values):
            raise CaptureError(f"{node.target} returns {type(values[0]).__name__}, not tensors{source_line(node)}\n"
                               "  Its value would depend on the data; keep it a tensor.")
        metas = tuple(TensorMeta(tuple(v.shape), v.dtype, grad and is_floating(v.dtype)) for v in values)
        made = self._add("op", self._numbered(node.name), node.target, tuple(args), kwargs, metas, no_grad=no_grad,
                         module_path=module_path(node), source=source_of(node))
        self.refs[node] = Ref(made.index)


def _of_kind(node: FxNode, spec: Any) -> str:
    """What is wrong with a placeholder that is no tensor."""
    reader = next(iter(node.users), node)
    if reader.kwargs.get("generator") is node:
        return ("forward draws random numbers from a torch.Generator, and those of a program have seeds of their own"
                f"{source_line(reader)}\n  Leave the generator out (parallel.manual_seed(...) seeds a run), or draw "
                "the numbers outside of forward, and pass them.")
    return f"inputs of kind {spec.kind} are not supported ({spec.target}){source_line(reader)}"
