"""Graph layers with edges that the data say: PyTorch Geometric's at their defaults, and what they are made of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoparallel
from autoparallel.capture import Ref, capture
from autoparallel.errors import CaptureError
from autoparallel.runtime.interpret import values_of
from tests.support.ranks import mesh_of
from tests.support.tiers import with_slow

NODES, EDGES, WIDTH = 10, 30, 8
LAYERS: dict[str, tuple[str, dict[str, Any], int]] = {  # name -> layer, its options, features of edges
    "GCNConv": ("GCNConv", {}, 0), "GCNConv with weights": ("GCNConv", {}, -1), "GCN": ("GCN", {"num_layers": 2}, 0),
    "GATConv": ("GATConv", {"heads": 2}, 0), "GATConv with edges": ("GATConv", {"edge_dim": 3}, 3),
    "GATv2Conv": ("GATv2Conv", {"heads": 2}, 0), "SGConv": ("SGConv", {"K": 2}, 0), "TAGConv": ("TAGConv", {}, 0),
    "ARMAConv": ("ARMAConv", {}, 0)}


def graphs() -> list[tuple[Tensor, Tensor]]:
    """Nodes and edges: some are self loops, all are, none is."""
    g = torch.Generator().manual_seed(0)
    x, edges = torch.randn(NODES, WIDTH, generator=g), torch.randint(0, NODES, (2, EDGES), generator=g)
    loops, other = edges[:1].expand(2, -1).contiguous(), edges.clone()
    other[1] = torch.where(edges[0] == edges[1], (edges[1] + 1) % NODES, edges[1])
    assert (edges[0] == edges[1]).any() and not (other[0] == other[1]).any()
    return [(x, edges), (x.flip(0), loops), (x, other)]


def layer_of(name: str) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    """The layer, and arguments of calls."""
    torch.manual_seed(0)
    kind, options, features = LAYERS[name]
    layer = getattr(pytest.importorskip("torch_geometric.nn"), kind)(WIDTH, 4, **options)
    of_edges = () if not features else (torch.rand(EDGES) if features < 0 else torch.randn(EDGES, features),)
    return layer, [(*graph, *of_edges) for graph in graphs()]


def check(model: nn.Module, calls: list[tuple[Tensor, ...]]) -> None:
    """Forward and gradients, on values that the trace did not see."""
    graph = capture(model, calls[0])
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constant_tensors}
    for inputs in calls:
        known = {Ref(n.index): inputs[int(n.path)] for n in graph.of_kind("input")}
        known |= {Ref(n.index): state[n.path] for kind in ("parameter", "buffer") for n in graph.of_kind(kind)}
        found = values_of(graph, graph.outputs, known, torch.device("cpu"))[graph.outputs[0]]
        expected = model(*inputs)
        torch.testing.assert_close(found, expected)
        parameters = list(model.parameters())
        both = [torch.autograd.grad(y.square().sum(), parameters, allow_unused=True, materialize_grads=True)
                for y in (found, expected)]
        torch.testing.assert_close(*both)


@pytest.mark.parametrize("name", with_slow(LAYERS, "GCN", "GATConv", "GATConv with edges", "SGConv", "TAGConv",
                                           "ARMAConv"))
def test_item_20_graph_layers_at_their_defaults(name: str) -> None:
    check(*layer_of(name))


def on_ranks(name: str) -> float:
    """The largest error of outputs and gradients."""
    model, calls = layer_of(name)
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of(2), baseline="tensor_parallel",
                                    example_inputs=calls[0])
    errors = list[float]()
    for inputs in calls:
        expected, found = model(*inputs), parallel(*inputs)
        found = found.full_tensor() if isinstance(found, DTensor) else found
        errors.append(float((expected - found).detach().abs().max()))
        for call in (expected, found):
            call.square().sum().backward()
        for theirs, ours in zip(model.parameters(), parallel.parameters(), strict=True):
            assert theirs.grad is not None and isinstance(ours.grad, DTensor)
            errors.append(float((theirs.grad - ours.grad.full_tensor()).abs().max() / theirs.grad.abs().max()))
            theirs.grad = ours.grad = None
    return max(errors)


@pytest.mark.parametrize("name", ["GCNConv with weights", "GATConv"])
def test_item_20_graph_layers_on_ranks(ranks: Any, name: str) -> None:
    assert max(ranks(2).run(on_ranks, name, timeout_s=100)) < 1e-5


class Model(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function, self.head = function, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.function(self.head(x), edges)


def joined(x: Tensor, edges: Tensor) -> Tensor:
    """All edges after those that are no loops, and as many ones; a length that is decided beforehand."""
    some = torch.cat([edges[:, edges[0] != edges[1]], edges], dim=1)
    weights = some.new_ones(some.size(1)) * torch.full((some.size(1), 1), 0.5)[:, 0]
    if some.size(1) == 0 or some.size(1) > 2 * EDGES:
        return x * 0
    source, target = some
    return torch.zeros_like(x).index_add(0, target, x[source] * weights[:, None])


def largest(x: Tensor, edges: Tensor) -> Tensor:
    """Only those that are loops are written, in place; other places keep what they had."""
    source, target = edges[:, edges[0] == edges[1]]
    out, places = x * 0.5, target.view(-1, 1).expand_as(x[source])
    return out.scatter_reduce_(0, places, x[source] - 3, reduce="amax", include_self=False)


def products(x: Tensor, edges: Tensor) -> Tensor:
    some = edges[:, edges[0] < edges[1]]
    return x.new_ones(NODES).index_reduce(0, some[0], x[some[1], 0].exp(), "prod")


def put(x: Tensor, edges: Tensor) -> Tensor:
    """Written from behind: of no place two values."""
    out, hit = x.clone(), edges[0] > 4
    out[edges[0][hit] - NODES] = 2.0
    return out


def shifted(x: Tensor, edges: Tensor) -> Tensor:
    """Of rows that are not valid, the place would be outside of the table."""
    after = edges[0][edges[0] > 0] - 1
    return F.embedding(after, x[: NODES - 1]).sum(0) + x[after].sum(0)


@pytest.mark.parametrize("function", [joined, largest, products, put, shifted], ids=lambda f: f.__name__)
def test_reads_and_writes_at_places_of_rows(function: Callable[..., Tensor]) -> None:
    check(Model(function).double(), [(x.double(), *rest) for x, *rest in graphs()])


def lengths_met(x: Tensor, edges: Tensor) -> Tensor:
    return x * torch.ones(3, edges[:, edges[0] != edges[1]].size(1)).sum()


def undecided(x: Tensor, edges: Tensor) -> Tensor:
    some = torch.cat([edges[:, edges[0] != edges[1]], edges[:, :2]], dim=1)
    return x if some.size(1) > 4 else -x


def other_rows(x: Tensor, edges: Tensor) -> Tensor:
    some, loops = edges[:, edges[0] != edges[1]], edges[:, edges[0] == edges[1]]
    return torch.zeros_like(x).index_add(0, some[0], x[loops[0]])


def along_the_rows(x: Tensor, edges: Tensor) -> Tensor:
    return x * edges[:, edges[0] != edges[1]].sort(dim=1).values.sum()


@pytest.mark.parametrize("refused", [lengths_met, undecided, other_rows, along_the_rows], ids=lambda f: f.__name__)
def test_what_needs_the_number_of_rows_is_refused(refused: Callable[..., Tensor]) -> None:
    with pytest.raises(CaptureError, match=rf"(?s)test_graph_layers.py:\d+ in {refused.__name__}"):
        capture(Model(refused), graphs()[0])
