"""Rules: what they say, read as a table; parts of complex numbers and classes on ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401, its op of experts' products
from torch import Tensor

from autoparallel.capture import capture
from autoparallel.errors import RuleError
from autoparallel.kernels import collectives, groups, variants
from autoparallel.layout import PARTIAL, shards
from autoparallel.rules import einsum_rule
from autoparallel.rules.families.views import reshape_groups
from autoparallel.strategies.space import StrategySpace
from tests.support.op_calls import OpCall, aten, call, f, ids, mask, table
from tests.support.ranks import mesh_of


def test_linear() -> None:
    """The bias is added once: a summand where k is cut. A single column parallel step needs only axis strategy n."""
    assert table(call(aten.linear.default, f(4, 8, 16), f(32, 16), f(32))) == [
        "repeat: I I I -> I",
        "part: R R R -> R",
        "linear(0,2): P R P -> P",
        "linear(1,2): R P P -> P",
        "b0: S(0) R R -> S(0)",
        "b1: S(1) R R -> S(1)",
        "k: S(2) S(1) P -> P",
        "n: R S(0) S(0) -> S(2)",
    ]


def saved_bytes(made: OpCall) -> int:
    """Of the tensors that torch keeps for the op's backward."""
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in made.inputs]
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes(), x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        made.run(inputs)
    return sum(nbytes for nbytes, _ in kept.values())


def bytes_kept_by_rule(made: OpCall) -> float:
    rule, inputs = made.rule()[0], made.inputs
    return (sum(inputs[i].nbytes for i in rule.saves) + rule.saves_output * made.run(inputs)[0].nbytes
            + sum(n * inputs[i].numel() for i, n in rule.extra_bytes.items()) + rule.work_bytes)


@pytest.mark.parametrize("made", [
    call(aten.where.self, mask(8, 9), f(8, 9), f(8, 1)), call(aten.where.ScalarOther, mask(8, 9), f(8, 9), 1.0),
    call(aten.masked_fill.Scalar, f(8, 9), mask(8, 9), 0.0), call(aten.rsub.Scalar, f(8, 9), 1.0),
    call(aten.lerp.Scalar, f(8, 9), f(8, 9), 0.3), call(aten.addcmul.default, f(8, 9), f(8, 9), f(8, 9)),
    call(aten.gather.default, f(8, 9), 1, ids(9, 8, 2)),
    call(aten.index_add.default, f(8, 9), 0, ids(8, 4), f(4, 9)), call(aten.sort.default, f(8, 9)),
    call(aten.topk.default, f(8, 9), 2), call(aten.avg_pool2d.default, f(2, 3, 8, 8), [2, 2]),
    call(aten.adaptive_avg_pool2d.default, f(2, 3, 8, 8), [2, 2]),
    call(aten.adaptive_avg_pool2d.default, f(2, 3, 8, 8), [1, 1]),
    call(aten.fft_rfft.default, f(8, 9)), call(aten.fft_irfft.default, torch.complex(f(8, 9), f(8, 9))),
], ids=lambda made: str(made.op))
def test_rules_save_what_torch_saves(made: OpCall) -> None:
    assert bytes_kept_by_rule(made) == saved_bytes(made)


@pytest.mark.parametrize(("op", "gates", "states"), [(aten.lstm.input, 4, 2), (aten.gru.input, 3, 1)])
def test_recurrent_layers_keep_their_gates(op: Any, gates: int, states: int) -> None:
    """As torch's own cells, which libraries' kernels resemble."""
    hidden = [f(2, 16, 32) for _ in range(states)]
    weights = [w for inner in (24, 32) for w in (f(gates * 32, inner), f(gates * 32, 32), f(gates * 32), f(gates * 32))]
    made = call(op, f(20, 16, 24), hidden if states > 1 else hidden[0], weights, True, 2, 0.0, True, False, False)
    assert bytes_kept_by_rule(made) == pytest.approx(saved_bytes(made), rel=0.2)


def test_attention_of_three_dims_is_cut_by_the_first() -> None:
    attention = call(aten.scaled_dot_product_attention.default, f(4, 6, 2), f(4, 7, 2), f(4, 7, 3))
    assert {s.factor for s in attention.rule()[0].axis_strategies()} == {"", "h", "s"}


def test_attention_with_grouped_queries() -> None:
    """Batch, heads, queries; the shards of the heads must divide the key-value heads too, or read all of these."""
    attention = call(aten.scaled_dot_product_attention.default, f(2, 8, 5, 4), f(2, 4, 5, 4), f(2, 4, 5, 4),
                     enable_gqa=True)
    assert table(attention) == [
        "repeat: I I I -> I",
        "part: R R R -> R",
        "linear(2): R R P -> P",
        "b: S(0) S(0) S(0) -> S(0)",
        "h: S(1) S(1) S(1) -> S(1)",
        "s: S(2) R R -> S(2)",
        "heads: S(1) R R -> S(1)",
        "ring: S(2) S(2) S(2) -> S(2)",
    ]
    assert {s.name: s.even for s in attention.rule()[0].axis_strategies()}["h"] == (8, 4)


def test_reshape_cuts_the_leading_dim_of_each_group() -> None:
    """[b, s, (h d)] -> [b, s, h, d] cuts h; a summand stays one."""
    split = call(aten.reshape.default, f(2, 3, 32), [2, 3, 8, 4])
    assert table(split) == [
        "repeat: I -> I", "part: R -> R", "linear(0): P -> P",
        "d0: S(0) -> S(0)", "d1: S(1) -> S(1)", "d2: S(2) -> S(2)",
    ]
    assert {s.name: s.even for s in split.rule()[0].axis_strategies()}["d2"] == (32, 8)


def test_embedding_with_a_cut_vocabulary_is_a_summand() -> None:
    assert table(call(aten.embedding.default, f(16, 6), ids(16, 4, 5))) == [
        "repeat: I I -> I", "part: R R -> R", "linear(0): P R -> P",
        "h: S(1) R -> S(2)", "b0: R S(0) -> S(0)", "b1: R S(1) -> S(1)",
        "vocabulary: S(0) R -> P",
    ]


def test_cross_entropy_sums_over_targets() -> None:
    """Cut targets give summands; cut classes are a variant whose result is whole."""
    assert table(call(aten.cross_entropy_loss.default, f(8, 10), ids(10, 8), None, 2)) == [
        "repeat: I I -> I", "part: R R -> R", "n0: S(0) S(0) -> P", "classes: S(1) I -> I",
    ]


def test_a_cross_product_names_its_dim() -> None:
    """Of [6, 3] vectors, cut in two, each shard has 3 rows: without a dim, torch takes these for the vectors."""
    class Cross(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.cross(x, y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (made,) = capture(Cross(), (f(6, 3), f(6, 3) + 1)).of_kind("op")
    assert made.target is aten.linalg_cross.default and made.kwargs["dim"] == 1


def test_a_mean_cross_entropy_has_no_rule() -> None:
    """A mean of means is not the mean: capture turns it into a sum and a count, and the rule refuses what is left."""
    assert not call(aten.cross_entropy_loss.default, f(8, 10), ids(10, 8)).rule()[1]


def test_pointwise_broadcasts() -> None:
    """A dim of size 1 is read whole by all; a product is linear in each factor, a sum in both together."""
    assert table(call(aten.mul.Tensor, f(4, 6), f(6))) == [
        "repeat: I I -> I", "part: R R -> R", "linear(0): P R -> P", "linear(1): R P -> P",
        "d0: S(0) R -> S(0)", "d1: S(1) S(0) -> S(1)",
    ]
    assert "linear(0,1): P P -> P" in table(call(aten.add.Tensor, f(4, 6), f(4, 1)))


@pytest.mark.parametrize("made", [
    call(aten.add.Tensor, f(4), 1.0), call(aten.sub.Tensor, f(4), 1.0), call(aten.relu.default, f(4)),
    call(aten.exp.default, f(4)), call(aten.div.Tensor, f(4), 2.0), call(aten.softmax.int, f(4, 4), 1),
], ids=lambda c: str(c.op))
def test_summands_pass_through_linear_ops_only(made: OpCall) -> None:
    """x + 1 on each of n summands would add n; x / 2 is linear."""
    linear = any(PARTIAL in s.inputs for s in made.rule()[0].axis_strategies())
    assert linear == (made.op is aten.div.Tensor)


def test_unknown_ops_are_repeated() -> None:
    """The last resort says so, and may still work for a part (R)."""
    rule, known = call(aten.pdist.default, f(4, 6)).rule()
    assert not known and [s.name for s in rule.axis_strategies()] == ["repeat", "part"]


@pytest.mark.parametrize(("source", "target", "expected"), [
    ((8, 16, 32), (8, 16, 4, 8), [([0], [0]), ([1], [1]), ([2], [2, 3])]),
    ((8, 16, 4, 8), (8, 16, 32), [([0], [0]), ([1], [1]), ([2, 3], [2])]),
    ((8, 16), (128,), [([0, 1], [0])]),
    ((1, 6, 1), (6,), [([1], [0])]),
    ((4, 6), (6, 4), [([0, 1], [0, 1])]),
    ((2, 6, 5), (4, 3, 5), [([0, 1], [0, 1]), ([2], [2])]),
    ((), (1, 1), []),
])
def test_reshape_groups(source: tuple[int, ...], target: tuple[int, ...], expected: Any) -> None:
    assert reshape_groups(source, target) == expected


def test_einsum_rule_reads_patterns() -> None:
    """`*b` takes the leading dims, `.` and dims of size 1 stay whole, optional inputs may be left out."""
    rule = einsum_rule("x[*b, k], w[n, k], bias[n] -> y[*b, n]", [(4, 1, 16), (32, 16)], [(4, 1, 32)], reduce="k",
                       additive="bias", flops_per_point=2.0)
    assert rule.inputs == (("b0", None, "k"), ("n", "k")) and rule.outputs == (("b0", None, "n"),)
    assert rule.sizes == {"b0": 4, "k": 16, "n": 32} and rule.flops == 2 * 4 * 16 * 32
    assert rule.reduce == {"k"} and not rule.additive
    assert einsum_rule("w[., h] -> y[h]", [(3, 5)], [(5,)]).inputs == ((None, "h"),)


@pytest.mark.parametrize(("pattern", "inputs", "says"), [
    ("x[a, b] -> y[a, b]", [(4, 5, 6)], r"gives 2 dims to a tensor of shape \[4, 5, 6\]"),
    ("x[a, a] -> y[a]", [(4, 5)], r"factor a is 4 and 5 \(shape \[4, 5\]\)"),
])
def test_a_rule_that_does_not_fit_says_where(pattern: str, inputs: Any, says: str) -> None:
    with pytest.raises(RuleError, match=says):
        einsum_rule(pattern, inputs, [(4, 5)])


def test_tensors_without_elements_have_strategies() -> None:
    """Where the dim of no elements stays whole."""
    class Ends(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, 6:] + 1

    space = StrategySpace(capture(Ends(), (f(8, 6),)), (4,))
    assert all(s.strategies for s in space.strategy_sets)
    end = next(s for decision, s in zip(space.decisions, space.strategy_sets, strict=True) if "slice" in decision.name)
    assert {str(end.output_layout(strategy)[0]) for strategy in end.strategies} == {"I", "P", "S(0)"}


def complex_shards() -> Tensor:
    (axis,) = groups.bind(mesh_of(2)).values()
    mine = COMPLEX.narrow(0, 2 * axis.rank, 2)
    with groups.use({"x": axis}):
        return collectives.redistribute(mine, "x", "S(0)", "S(1)", (2, 2), (3, 3))


COMPLEX = torch.complex(f(4, 6), f(4, 6) + 1)


def test_complex_numbers_are_exchanged(ranks: Any) -> None:
    """Which gloo's all-to-all does not do by itself."""
    torch.testing.assert_close(torch.cat(ranks(2).run(complex_shards), 1), COMPLEX)


def classes_on_ranks() -> list[tuple[Tensor, Tensor]]:
    """Class-parallel cross-entropy: (loss, whole gradient of the logits) for uneven shards and ignored targets."""
    logits, target = f(8, 11), ids(11, 8)
    target[2] = -100
    axes = groups.bind(mesh_of(torch.distributed.get_world_size()))
    (axis,) = axes.values()
    sizes = shards(11, axis.size)
    start = sum(sizes[: axis.rank])
    found = []
    for shift in (0.0, 1000.0):  # exponentials must not overflow
        mine = (logits + shift).narrow(1, start, sizes[axis.rank]).clone().requires_grad_()
        with groups.use(axes):
            loss = variants.class_cross_entropy(mine, target, None, 2, -100, start=start, length=11,
                                                axes=(axis.name,))
        (3 * loss).backward()
        found.append((loss.detach(), mine.grad))
    target[0] = 11    # no class: torch's error, on every rank
    with groups.use(axes), pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        variants.class_cross_entropy(mine, target, None, 2, -100, start=start, length=11, axes=(axis.name,))
    return found


def test_class_parallel_cross_entropy(ranks: Any) -> None:
    """It computes in float32, whatever the logits are."""
    results = ranks(3).run(classes_on_ranks)
    target = ids(11, 8)
    target[2] = -100
    for case in range(2):
        logits = f(8, 11).requires_grad_()
        loss = torch.nn.functional.cross_entropy(logits, target, reduction="sum")
        (3 * loss).backward()
        tolerance = {"rtol": 1e-5, "atol": 1e-3 if case else 1e-5}
        torch.testing.assert_close(torch.cat([r[case][1] for r in results], 1), logits.grad, **tolerance)
        for held in results:
            torch.testing.assert_close(held[case][0], loss.detach(), **tolerance)
