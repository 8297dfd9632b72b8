"""Blocks that are alike are traced twice; the graph is that of the whole model."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import operator
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.capture import OpGraph, build, capture
from autoparallel.capture.passes.editing import emit
from autoparallel.capture.tracing.repeated_blocks import find_repeated
from benchmarks.architectures import ARCHITECTURES, Architecture
from tests.support.tiers import slow, with_slow

Reasons = list[str]


def graphs(model: nn.Module, inputs: dict[str, Any], patch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
           ) -> tuple[OpGraph, OpGraph, Reasons]:
    """The graph as it is captured and as traced whole, and why the former was traced whole."""
    with log.at_level(logging.INFO, logger=build.__name__):
        found = capture(model, (), inputs)
    reasons = [record.getMessage() for record in log.records if record.name == build.__name__]
    patch.setattr(build, "find_repeated", lambda model: [])
    return found, capture(model, (), inputs), reasons


def assert_same(one: OpGraph, other: OpGraph) -> None:
    assert list(one.nodes) == list(other.nodes)
    assert (one.outputs, one.mutations, one.aliases) == (other.outputs, other.mutations, other.aliases)


def deep(architecture: Architecture, layers: int) -> Architecture:
    keys = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
    return dataclasses.replace(architecture, config={key: layers if key in keys else value
                                                     for key, value in architecture.config.items()})


@pytest.mark.parametrize("name", [
    "clip", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "gpt2", "mamba", "t5"))])
def test_models(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    architecture = deep(ARCHITECTURES[name], 5)
    found, whole, reasons = graphs(architecture.model().train(), architecture.inputs(), monkeypatch, caplog)
    assert_same(found, whole)
    assert not reasons


def cached(kind: str, **options: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=16, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=32, max_position_embeddings=32, pad_token_id=0, **options)
    torch.manual_seed(0)
    return cast(nn.Module, transformers.AutoModelForCausalLM.from_config(config))


GEMMA: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 3}


@pytest.mark.parametrize(("kind", "options", "use"), [
    slow("gemma3_text", GEMMA, "training"), ("llama", {}, "a token"), slow("gemma3_text", GEMMA, "a token"),
    slow("llama", {}, "training"),
    *(slow(kind, options, use) for use in ("training", "a token") for kind, options in (
        ("gpt2", {"n_layer": 6, "n_head": 2, "n_embd": 16, "n_positions": 32}), ("mistral", {"sliding_window": 4}),
        ("qwen3", {}), ("mixtral", {"num_local_experts": 4})))])
def test_models_that_return_caches(kind: str, options: dict[str, Any], use: str, monkeypatch: pytest.MonkeyPatch,
                                   caplog: pytest.LogCaptureFixture) -> None:
    """As Hugging Face's do unless told not to: each block has a layer of one cache."""
    model, ids = cached(kind, **options), torch.randint(1, 32, (2, 6))
    if use == "training":
        inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    else:
        with torch.no_grad():
            cache = model.eval()(ids).past_key_values
        inputs = {"input_ids": ids[:, :1], "past_key_values": cache, "use_cache": True}
    found, whole, reasons = graphs(model, inputs, monkeypatch, caplog)
    assert_same(found, whole)
    assert found.out_spec == whole.out_spec
    assert not reasons


@pytest.mark.parametrize(("kind", "options"), [
    slow("mixtral", {"num_local_experts": 4, "output_router_logits": True}),
    ("llama", {"output_attentions": True, "attn_implementation": "eager"}),
    slow("mixtral", {"num_local_experts": 4, "output_router_logits": True, "output_attentions": True,
                     "output_hidden_states": True, "attn_implementation": "eager"})])
def test_models_that_collect_outputs_of_modules_inside(kind: str, options: dict[str, Any],
                                                       monkeypatch: pytest.MonkeyPatch,
                                                       caplog: pytest.LogCaptureFixture) -> None:
    model, ids = cached(kind, **options), torch.randint(1, 32, (2, 6))
    found, whole, reasons = graphs(model, {"input_ids": ids, "labels": ids, "use_cache": False}, monkeypatch, caplog)
    assert_same(found, whole)
    assert found.out_spec == whole.out_spec and len(found.outputs) >= 6
    assert not reasons


class Cached(nn.Module):
    """A block with a layer of a cache, and one of its ways to look at more of the cache than that."""

    def __init__(self, number: int, way: str) -> None:
        super().__init__()
        self.inner, self.number, self.way = nn.Linear(4, 4), number, way

    def forward(self, x: torch.Tensor, cache: Any) -> Any:
        x, _ = cache.update(self.inner(x), x, self.number)
        if self.way == "the first layer":
            return x + cache.layers[0].keys.mean(2, keepdim=True)
        if self.way == "all layers":
            return x * sum(layer.is_initialized for layer in cache.layers)
        if self.way == "their number":
            return x * len(cache.layers)
        if self.way == "in secret":
            with contextlib.suppress(Exception):
                return x * cache.get_seq_length()
        if self.way == "another attribute":
            cache.times = getattr(cache, "times", 0) + 1
            return x * cache.times
        if self.way == "another layer object":
            cache.layers = [*cache.layers]
        if self.way == "returned":
            return x, cache
        return x


class CachedModel(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Cached(number, way) for number in range(6))

    def forward(self, x: torch.Tensor) -> Any:
        cache = transformers.DynamicCache()
        cache.layers = [transformers.cache_utils.DynamicLayer() for _ in self.blocks]
        for number, block in enumerate(self.blocks):
            x = block(x, cache)
            x = x[0] if isinstance(x, tuple) else x
            x = x + cache.layers[number].values.mean()
        return x.sum(), cache.layers[5].keys, cache.layers[2].values


@pytest.mark.parametrize("way", with_slow(
    ["", "the first layer", "all layers", "their number", "in secret", "another attribute", "another layer object",
     "returned"], "the first layer", "all layers", "their number", "another attribute", "another layer object",
    "returned"))
def test_blocks_that_look_beyond_their_layer_of_a_cache_are_traced_whole(
        way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    found, whole, reasons = graphs(CachedModel(way), {"x": torch.ones(2, 2, 3, 4)}, monkeypatch, caplog)
    assert_same(found, whole)
    assert ["cache" in given for given in reasons] == ([True] if way else []), reasons


@pytest.mark.parametrize("use_cache", [slow(False), True])
def test_deep_models_are_traced_as_fast_as_others(use_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []
    trace = build.trace

    def counted(*args: Any) -> Any:
        program = trace(*args)
        traced.append(len(program.graph_module.graph.nodes))
        return program

    monkeypatch.setattr(build, "trace", counted)
    for layers in (4, 9):
        architecture = deep(ARCHITECTURES["llama"], layers)
        model = architecture.model()
        model.config.use_cache = use_cache
        capture(model, (), architecture.inputs())
    assert traced[1] - traced[0] < 5 * 15  # a block: ten placeholders, its op, results


ELSEWHERE: dict[nn.Module, torch.Tensor] = {}


class Block(nn.Module):
    """What a trap is: a block that is not what its siblings are."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner, self.number = nn.Linear(4, 4), number
        self.seen: torch.Tensor | None = None
        self.register_buffer("count", torch.zeros(4))


class Counts(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) * (2 if self.number % 3 == 2 else 1)


class CountsInSecret(Block):
    def forward(self, x: torch.Tensor) -> Any:
        try:
            factor = [1, 1, 2, 1, 1, 3][self.number]
        except Exception:
            factor = 1
        return self.inner(x) * factor


class LeavesBehind(Block):
    def forward(self, x: torch.Tensor) -> Any:
        self.seen = self.inner(x)
        return self.seen.tanh()


class LeavesMoreBehind(Block):
    """What only the last leaves is read: no op outside reads what the first two leave."""

    def forward(self, x: torch.Tensor) -> Any:
        self.last = self.inner(x)
        return self.last.tanh()


class Notes(Block):
    def forward(self, x: torch.Tensor, notes: dict[str, Any]) -> Any:
        notes["times"] += 1
        notes["all"].append(2.0)
        return self.inner(x).tanh() * notes["times"]


class ReadsElsewhere(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) + ELSEWHERE[self]


class Buffers(Block):
    def forward(self, x: torch.Tensor) -> Any:
        self.count.add_(1)
        return self.inner(x) + self.count


class WritesToWhatItIsGiven(Block):
    def forward(self, x: torch.Tensor) -> Any:
        x.mul_(2)
        return self.inner(x)


class WritesToItsOwn(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.inner(x)
        y[:, 1:].mul_(2)
        return y.tanh()


class GivesAView(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return x.transpose(0, 1), self.inner(x)


class ReadsNothing(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.ones_like(self.inner.weight) @ self.inner.weight


class WithoutGradient(Block):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            scale = self.inner(x).abs().amax()
        return {"y": self.inner(x) / scale, "plain": "yes"}


class Model(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(number) for number in range(6))
        self.extra = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in self.blocks)
        ELSEWHERE.update(zip(self.blocks, [p.detach().clone() for p in self.extra], strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.extra[0]
        seen: torch.Tensor | float = 0.0
        notes: dict[str, Any] = {"times": 0, "all": []}
        for number, block in enumerate(self.blocks):
            made = block(x, notes) if isinstance(block, Notes) else block(x)
            if isinstance(made, tuple):
                made = made[0].transpose(0, 1) + made[1]
            x = made["y"] if isinstance(made, dict) else made
            x = x.sin() if number == 3 else x  # what is between blocks may differ
            if block.seen is not None:
                seen = seen + block.seen.square().sum()
        if hasattr(self.blocks[-1], "last"):
            seen = seen + self.blocks[-1].last.sum()  # type: ignore[operator,union-attr]
        return x.square().sum() + seen + sum(notes["all"])


def hooked(model: nn.Module) -> None:
    model.blocks[4].inner.register_forward_hook(lambda module, args, result: result * 2)  # type: ignore[union-attr,index]


def tied(model: nn.Module) -> None:
    model.blocks[4].inner.weight = model.blocks[2].inner.weight  # type: ignore[union-attr,index]


def frozen(model: nn.Module) -> None:
    model.blocks[4].inner.weight.requires_grad_(False)  # type: ignore[union-attr,index]


def patched(model: nn.Module) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block.forward = _doubled


def _doubled(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"y": x * 2}


Change = Callable[[nn.Module], None] | None
TRAPS: list[Any] = [    # kind of block, change of the model, reason to trace it whole
    (Counts, None, "blocks.0: number is looked at"),
    (CountsInSecret, None, "number is looked at"),
    (LeavesBehind, None, "blocks.0 changes its attributes"),
    slow(LeavesMoreBehind, None, "blocks.0 changes its attributes"),
    slow(Notes, None, "blocks.0 changes its arguments"),
    (ReadsElsewhere, None, "blocks.0 reads"),
    (Buffers, None, "writes in place"),
    slow(WritesToWhatItIsGiven, None, "writes in place"),
    (WritesToItsOwn, None, None),
    (GivesAView, None, None),
    slow(WithoutGradient, None, None),
    slow(ReadsNothing, None, None),
    (WithoutGradient, hooked, None),
    slow(WithoutGradient, tied, None),
    slow(WithoutGradient, frozen, None),
    slow(WithoutGradient, patched, None),
]


@pytest.mark.parametrize(("kind", "change", "reason"), TRAPS, ids=lambda value: getattr(value, "__name__", ""))
def test_traps(kind: type[Block], change: Change, reason: str | None,
               monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = Model(kind)
    if change is not None:
        change(model)
    assert len(find_repeated(model)) == {None: 6, tied: 4, patched: 0}.get(change, 5)
    found, whole, reasons = graphs(model, {"x": torch.ones(4, 4)}, monkeypatch, caplog)
    assert_same(found, whole)
    assert [reason in given for given in reasons] == ([] if reason is None else [True]), reasons  # type: ignore[operator]
    for number, block in enumerate(model.blocks):
        assert vars(block)["number"] == number
        assert vars(block).get("forward") is (_doubled if change is patched else None)


def test_what_an_op_makes_of_the_same_values_is_worked_out_once() -> None:
    """Of equal blocks, whose values are the same objects; an op that writes, or other arguments, are run."""
    graph, runs = torch.fx.Graph(), list[object]()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"], y.meta["val"] = torch.empty(4, 6, device="meta"), torch.empty(4, 6, device="meta")

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            runs.append(function)
            return function(*args, **(kwargs or {}))

    aten = torch.ops.aten
    with Watch():
        made = [emit(graph, x, aten.sum.dim_IntList, node, dims) for node, dims in (
            (x, [0]), (x, [0]), (x, [1]), (y, [0]), (x, [True]))]
        assert runs == [aten.sum.dim_IntList] * 4 and [node.meta["val"].shape[0] for node in made] == [6, 6, 4, 6, 4]
        assert made[0].meta["val"] is made[1].meta["val"] and made[0] is not made[1]
        for _ in range(2):
            emit(graph, x, aten.add_.Scalar, x, 1)
            with torch.no_grad():
                emit(graph, x, aten.sum.dim_IntList, x, [0])
    assert runs[4:] == [aten.add_.Scalar, aten.sum.dim_IntList, aten.add_.Scalar]
    assert emit(graph, x, operator.mul, 2, 3).meta["val"] == 6


def test_values_made_from_numbers_have_data_only_where_those_of_their_node_do() -> None:
    """A node with several results has no mode of tensors without data."""
    graph, mode = torch.fx.Graph(), FakeTensorMode()
    x, both = graph.placeholder("x"), graph.placeholder("both")
    x.meta["val"] = mode.from_tensor(torch.empty(2, 3))
    both.meta["val"] = x.meta["val"], x.meta["val"]
    made = [emit(graph, like, torch.ops.aten.full.default, [2, 3], 1.0) for like in (both, x, x)]
    assert [isinstance(node.meta["val"], FakeTensor) for node in made] == [False, True, True]
    assert made[1].meta["val"] is made[2].meta["val"]
    assert isinstance(emit(graph, x, torch.ops.aten.add.Tensor, x, made[1]).meta["val"], FakeTensor)
