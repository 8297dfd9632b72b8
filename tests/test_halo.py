"""Halo exchange: convolution and pooling cut along space compute what the whole computes, forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import autoparallel
from autoparallel.capture import capture
from autoparallel.pricing import Prices
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster
from tests.support.ranks import mesh_of
from tests.support.reference import differences, gathered, gradients_of
from tests.support.rule_cases import strategies_that_hold
from tests.support.tiers import slow, with_slow

aten = torch.ops.aten

#: Op and arguments (a tuple is a tensor's shape); axis strategies of space, or with an exchange of borders.
CASES: dict[str, tuple[tuple[Any, ...], set[str]]] = {
    "padded": ((aten.conv2d.default, (2, 4, 12, 9), (6, 4, 3, 3), (6,), [1, 1], [1, 1]), {"halo s0", "halo s1"}),
    "of ResNet's stem": ((aten.conv2d.default, (1, 3, 17, 12), (4, 3, 7, 7), None, [2, 2], [3, 3]),
                         {"halo s0", "halo s1"}),
    "not padded": ((aten.conv1d.default, (2, 4, 13), (6, 4, 4), (6,)), {"halo s0"}),
    "of steps that leave a rest": ((aten.conv1d.default, (2, 4, 20), (6, 4, 2), (6,), [3]), {"halo s0"}),
    "dilated": ((aten.conv1d.default, (2, 4, 14), (6, 4, 3), (6,), [1], [2], [2]), {"halo s0"}),
    "wider than shards": ((aten.conv1d.default, (2, 4, 6), (6, 4, 5), None, [1], [2]), {"halo s0"}),
    "with more filled up than there is": ((aten.conv1d.default, (2, 4, 4), (6, 4, 2), None, [1], [6]), {"halo s0"}),
    "grouped": ((aten.conv2d.default, (2, 4, 8, 5), (8, 2, 3, 3), (8,), [1, 1], [1, 1], [1, 1], 2),
                {"halo s0", "halo s1"}),
    "by channel": ((aten.conv2d.default, (1, 4, 9, 9), (4, 1, 7, 7), (4,), [1, 1], [3, 3], [1, 1], 4),
                   {"halo s0", "halo s1"}),
    "in a volume": ((aten.conv3d.default, (1, 2, 6, 5, 4), (3, 2, 3, 1, 2), (3,), [1, 1, 2], [1, 0, 0]),
                    {"halo s0", "s1", "s2", "halo s2"}),
    "same": ((aten.conv2d.padding, (1, 2, 9, 7), (3, 2, 4, 3), (3,), [1, 1], "same"), {"halo s0", "halo s1"}),
    "valid": ((aten.conv1d.padding, (1, 2, 9), (3, 2, 4), (3,), [1], "valid"), {"halo s0"}),
    "without a batch": ((aten.conv1d.default, (4, 9), (6, 4, 3), (6,), [1], [1]), {"halo s0"}),
    "a patch embedding": ((aten.conv2d.default, (2, 3, 24, 12), (5, 3, 4, 4), (5,), [4, 4]),
                          {"s0", "s1", "halo s0", "halo s1"}),
    "of points, in steps": ((aten.conv2d.default, (2, 3, 12, 7), (5, 3, 1, 1), (5,), [2, 2]),
                            {"s0", "halo s0", "halo s1"}),
    "of points": ((aten.conv2d.default, (2, 3, 9, 7), (5, 3, 1, 1), (5,)), {"s0", "s1"}),
    "transposed": ((aten.conv_transpose1d.default, (2, 4, 9), (4, 6, 4), (6,), [2], [1]), {"halo s0"}),
    "transposed, filled up at the end": ((aten.conv_transpose2d.input, (2, 4, 8, 6), (4, 6, 3, 2), (6,), [2, 2], [1, 0],
                                          [1, 0]), {"halo s0", "s1", "halo s1"}),
    "transposed, with places between": ((aten.conv_transpose1d.default, (2, 4, 8), (4, 6, 2), (6,), [3], [1], [2]),
                                        {"halo s0"}),
    "transposed, of steps of one": ((aten.conv_transpose1d.default, (2, 4, 9), (4, 6, 3), (6,), [1], [1], [0], 1, [2]),
                                    {"halo s0"}),
    "transposed, wider than shards": ((aten.conv_transpose1d.default, (4, 4), (4, 6, 9), None, [1], [2]), {"halo s0"}),
    "transposed, grouped": ((aten.conv_transpose1d.default, (2, 4, 8), (4, 3, 5), (6,), [2], [2], [1], 2), {"halo s0"}),
    "maxima": ((aten.max_pool2d.default, (2, 3, 12, 9), [3, 3], [2, 2], [1, 1]), {"halo s0", "halo s1"}),
    "maxima, dilated": ((aten.max_pool1d.default, (2, 3, 15), [3], [2], [1], [2]), {"halo s0"}),
    "maxima to the end": ((aten.max_pool2d.default, (2, 3, 12, 10), [3, 3], [2, 2], [0, 0], [1, 1], True),
                          {"halo s0", "halo s1"}),
    "maxima of tiles": ((aten.max_pool2d.default, (2, 3, 12, 9), [2, 3]), {"s0", "s1", "halo s0", "halo s1"}),
    "means": ((aten.avg_pool2d.default, (2, 3, 12, 9), [3, 3], [2, 2], [1, 1]), {"halo s0", "halo s1"}),
    "means of what there is": ((aten.avg_pool2d.default, (2, 3, 12, 9), [3, 3], [2, 2], [1, 0], False, False),
                               {"halo s1"}),
    "means to the end": ((aten.avg_pool2d.default, (2, 3, 12, 9), [3, 3], [2, 2], [0, 0], True), {"halo s1"}),
    "sums to the end": ((aten.avg_pool2d.default, (2, 3, 12, 9), [3, 3], [2, 2], [0, 0], True, False, 1),
                        {"halo s0", "halo s1"}),
    "means in a volume": ((aten.avg_pool3d.default, (1, 2, 6, 8, 4), [2, 3, 2], [1, 2, 2], [0, 1, 0]),
                          {"halo s0", "halo s1", "halo s2", "s2"}),
    "a slice": ((aten.slice.Tensor, (2, 9, 3), 1, 1, 9), {"halo d1"}),
    "a slice of the middle": ((aten.slice.Tensor, (2, 13, 3), 1, 3, 11), {"halo d1"}),
    "a slice of half": ((aten.slice.Tensor, (2, 12), 1, 6, 12), set()),
    "a slice in steps": ((aten.slice.Tensor, (2, 12), 1, 0, 12, 2), set()),
    "filled up": ((aten.constant_pad_nd.default, (2, 9, 8), [1, 2, 3, 0], 0.5), {"halo d1", "halo d2"}),
    "filled up and cut off": ((aten.pad.default, (2, 9, 8), [-1, 2, 0, 0]), {"halo d2"}),
    "mirrored": ((aten.pad.default, (2, 9, 8), [1, 2], "reflect"), set()),
    "means of a sequence": ((aten.avg_pool1d.default, (2, 3, 11), [2], [1]), {"halo s0"}),
}


@pytest.mark.parametrize("name", with_slow(
    CASES, "not padded", "dilated", "grouped", "valid", "without a batch", "a patch embedding", "of points",
    "transposed", "transposed, with places between", "transposed, of steps of one", "transposed, wider than shards",
    "maxima", "maxima of tiles", "means of what there is", "a slice of half", "filled up", "by channel", "same",
    "transposed, grouped", "in a volume", "means", "with more filled up than there is"))
def test_windows_on_shards(name: str) -> None:
    """Even and uneven shards on 2, 3 and 4 ranks; each axis strategy of space applies on some of them."""
    arguments, expected = CASES[name]
    held = strategies_that_hold(*arguments)
    assert {name for name in held if "halo" in name or name in ("s0", "s1", "s2")} == expected


class Block(nn.Module):
    """As in ResNet, with a shortcut of points in steps of two."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width)
        self.conv = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.short = nn.Conv2d(width, 2 * width, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(torch.relu(self.norm(self.down(x)))) + self.short(x))


class Mixer(nn.Module):
    """As in ConvNeXt: a wide convolution of each channel, then an MLP at each point."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        made = self.down(torch.nn.functional.gelu(self.up(self.norm(self.wide(x).permute(0, 2, 3, 1)))))
        return x + made.permute(0, 3, 1, 2)


class Vision(nn.Module):
    """A few layers for one image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.pool = nn.Conv2d(3, 4, 7, 2, 3), nn.MaxPool2d(3, 2, 1)
        self.block, self.mixer = Block(4), Mixer(8)
        self.mean, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mean(self.mixer(self.block(self.pool(self.stem(x))))).flatten(1)).square().sum()


def image(height: int = 88, width: int = 54) -> Tensor:
    return torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(1))


def see_on_ranks(mesh_shape: tuple[int, ...], placements: tuple[Any, ...]) -> tuple[Any, dict[str, tuple[str, ...]]]:
    """A step with the image and the outputs of all layers in space pinned: what differs, and the plan's strategies."""
    layers = ("x", "stem", "pool", "block.down", "block.conv", "block.short", "mixer.wide")
    x, pins = image(), dict.fromkeys(layers, placements)
    model = Vision().double()
    expected = model(x.double())
    expected.backward()
    wanted = gradients_of(model)
    parallel = autoparallel.compile(Vision().double(), mesh_of(*mesh_shape), example_inputs=(x.double(),), pins=pins)
    loss = parallel(x.double())
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    found = {**gathered((n, p.grad) for n, p in parallel.named_parameters()), **gathered(parallel.named_buffers())}
    return differences(found, {**wanted, **gathered(model.named_buffers())}), dict(parallel.plan.strategies)


@pytest.mark.parametrize(("mesh_shape", "placements"), [
    slow((4,), (Shard(2),)), slow((4,), (Shard(3),)), ((2, 2), (Shard(2), Shard(3))), ((3,), (Shard(2),)),
])
def test_one_image_on_several_ranks(ranks: Any, mesh_shape: tuple[int, ...], placements: tuple[Any, ...]) -> None:
    """Loss, gradients and statistics of one image cut along its height, its width, or both (88 x 54: unevenly)."""
    for found, strategies in ranks(max(3, mesh_shape[0]) if len(mesh_shape) == 1 else 4).run(
            see_on_ranks, mesh_shape, placements, timeout_s=100):
        assert max(d.error for d in found) < 1e-9, found
        wanted = tuple(f"halo s{p.dim - 2}" for p in placements)
        assert [strategies[name] for name in ("conv2d", "max_pool2d", "conv2d_1", "conv2d_4")] == [wanted] * 4


def layer(size: int) -> StrategySpace:
    x = torch.empty(1, 64, size, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    conv = nn.Conv2d(64, 64, 5, padding=2, device="meta", dtype=torch.bfloat16)
    return StrategySpace(capture(conv, (x,)), (2, 2))


def test_borders_of_one_axis() -> None:
    """A dim is cut by one axis only; two axes cut two dims."""
    space = layer(64)
    s = space.strategy_sets[space.decision_named["conv2d"]]
    pairs = {s.names(strategy) for strategy in s.strategies}
    assert {("halo s0", "halo s1"), ("halo s1", "halo s0"), ("halo s0", "o")} <= pairs
    assert not pairs & {("halo s0", "halo s0"), ("halo s1", "halo s1")}


def test_prices_of_borders() -> None:
    """The borders' bytes are those of four rows, however high the image is."""
    machine = Cluster.load("h100-sxm", num_devices=4)

    def exchange(size: int) -> tuple[float, float]:
        space = layer(size)
        s = space.strategy_sets[space.decision_named["conv2d"]]
        at = s.position[s.axis_strategy_named("halo s0"), s.axis_strategy_named("repeat")]
        exchanged = [(i.exchange, float(i.seconds[at])) for i in Prices(space, machine).op(s).inside]
        return sum(e.forward * t for e, t in exchanged), sum(e.backward * t for e, t in exchanged)

    (forward, backward), high = exchange(64), exchange(4096)
    assert forward == backward > 0 and high == pytest.approx((forward, backward))


def test_search_cuts_a_large_image() -> None:
    """Of one large image the search cuts space by itself, in all convolutions that do the work."""
    layers = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(0)).to("meta", torch.bfloat16)
    x = torch.empty(1, 64, 1024, 1024, dtype=torch.bfloat16, device="meta")
    made = autoparallel.plan(model, Cluster.load("h100-sxm", num_devices=4), example_inputs=(x,), mesh_shape=(4,))
    cuts = [rows for name, rows in made.strategies.items() if name.startswith("conv2d") and ":" not in name]
    assert len(cuts) == 4 and all(row.startswith("halo") for row in itertools.chain(*cuts))
