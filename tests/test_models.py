"""The cases build, train and export alike every time, and the reference is a truth worth the tolerances."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.support.models import BATCH_SIZE, CASES, ModelCase
from tests.support.ranks import RankPool
from tests.support.reference import (
    Trained,
    assert_same_buffers,
    assert_same_gradients,
    assert_same_loss,
    assert_same_parameters,
    assert_same_tensors,
    differences,
    gathered,
    train,
    train_in_float64,
    train_reference,
)
from tests.support.tiers import slow, with_slow

Ranks = Callable[[int], RankPool]

every_case = pytest.mark.parametrize("case", CASES.values(), ids=str)
#: Training is of the tests' own support: a plain and an encoder's loss, draws, and a decoder.
FEW = ("mlp", "transformer_encoder", "gpt2_dropout", "llama")
few_cases = pytest.mark.parametrize(
    "case", [case if str(case) in FEW else slow(case) for case in CASES.values()], ids=str)
EXACT = [case for case in CASES.values() if not case.random and case.float64]


def small_parts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


@pytest.mark.slow
@every_case
def test_export(case: ModelCase) -> None:
    args, kwargs = case.inputs(BATCH_SIZE)
    model = case.build()
    start = time.process_time()
    program = torch.export.export(model, args, kwargs, strict=False)
    assert time.process_time() - start < 5
    assert len(program.graph.nodes) > 10


@pytest.mark.parametrize("case", with_slow(CASES.values(), CASES["gpt2_full_vocab"]), ids=str)
def test_same_model_and_inputs_every_time(case: ModelCase) -> None:
    torch.manual_seed(1)
    first, first_inputs = case.build(), case.inputs(BATCH_SIZE)
    torch.manual_seed(2)
    second, second_inputs = case.build(), case.inputs(BATCH_SIZE)
    assert first.training
    assert_same_tensors(second.state_dict(), first.state_dict(), tolerance=0)
    torch.testing.assert_close(second_inputs, first_inputs, rtol=0, atol=0)
    assert {parameter.dtype for parameter in first.parameters()} == {torch.float32}


@few_cases
@pytest.mark.parametrize("optimizer", ["sgd", slow("adamw")])
def test_training_moves_every_parameter_and_lowers_the_loss(case: ModelCase, optimizer: str) -> None:
    before, after = case.build(), train_reference(case, optimizer, num_steps=5)
    assert after.losses[-1] < after.losses[0]
    assert after.gradients.keys() == after.parameters.keys()
    still = [name for name, p in gathered(before.named_parameters()).items() if torch.equal(p, after.parameters[name])]
    assert set(still) <= after.zero_gradients


@few_cases
def test_reference_is_deterministic(case: ModelCase) -> None:
    expected = train_reference(case, "adamw", num_steps=2)
    again = train(case.build(), case, "adamw", num_steps=2)
    assert_same_loss(again, expected, tolerance=0)
    assert_same_gradients(again.gradients, expected, tolerance=0)
    assert_same_parameters(again.parameters, expected, tolerance=0)
    assert_same_buffers(again.buffers, expected, tolerance=0)


@pytest.mark.parametrize("case", [
    case if str(case) == "mlp" else slow(case) for case in EXACT], ids=str)
def test_rounding_is_well_below_the_tolerances(case: ModelCase) -> None:
    """Half of each tolerance of issue 2 is left to the parallel run's own rounding."""
    for optimizer, tolerance in (("sgd", 0.5e-5), ("adamw", 0.5e-4)):
        expected, exact = train_reference(case, optimizer, 5), train_in_float64(case, optimizer, 5)
        assert_same_loss(exact, expected, tolerance=0.5e-5)
        assert_same_gradients(small_parts(exact.gradients), expected, tolerance=0.5e-5)
        assert_same_parameters(small_parts(exact.parameters), expected, tolerance)
        assert_same_buffers(small_parts(exact.buffers), expected, tolerance)


def test_zero_gradients_are_the_key_biases() -> None:
    assert train_reference(CASES["llama"]).zero_gradients == set()
    for name, word in (("bert", "key.bias"), ("vit", "k_proj.bias")):
        zero = train_reference(CASES[name]).zero_gradients
        assert len(zero) == 2
        assert all(parameter.endswith(word) for parameter in zero)


def test_a_factor_of_the_number_of_ranks_is_named() -> None:
    expected = train_reference(CASES["bert"])
    wrong = {n: 4 * g if "embeddings.word" in n else g for n, g in expected.gradients.items()}
    with pytest.raises(AssertionError, match=r"word_embeddings.weight   actual = 4 x expected") as caught:
        assert_same_gradients(wrong, expected)
    assert "gradients: 1 of " in str(caught.value)
    assert "every one of them is 4 x expected" in str(caught.value)


def test_comparisons_find_differences() -> None:
    expected = train_reference(CASES["mlp"])
    good = expected.gradients
    weight, bias = good["up.weight"], good["up.bias"]
    with pytest.raises(AssertionError, match=r"missing \['up.bias'\], unexpected \['bias'\]"):
        assert_same_gradients({**{n: g for n, g in good.items() if n != "up.bias"}, "bias": bias}, expected)
    with pytest.raises(AssertionError, match=r"up.weight has shape \(32, 32\), expected \(64, 32\)"):
        assert_same_gradients({**good, "up.weight": weight[:32]}, expected)
    with pytest.raises(AssertionError, match=r"inf  up.weight"):
        assert_same_gradients({**good, "up.weight": weight * float("nan")}, expected)
    with pytest.raises(AssertionError, match=r"dtype torch.float64"):
        assert_same_gradients({**good, "up.weight": weight.double()}, expected)
    nudged = {**good, "up.bias": bias + 2e-5 * bias.abs().max()}
    with pytest.raises(AssertionError, match=r"1 of 4 beyond 1e-05"):
        assert_same_gradients(nudged, expected)
    assert_same_gradients(nudged, expected, tolerance=1e-4)
    assert differences(nudged, good)[0].name == "up.bias"


def train_data_parallel(case: ModelCase) -> Trained:
    """A classical plan by hand: half the batch each, gradients averaged."""
    args, kwargs = case.inputs(BATCH_SIZE)
    half = slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4)
    model = case.build()
    case.loss(model(*(a[half] for a in args), **{name: value[half] for name, value in kwargs.items()})).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2
    return Trained(0.0, [], gathered((n, p.grad) for n, p in model.named_parameters()), {}, {})


def test_parallel_runs_are_compared_with_the_reference(ranks: Ranks) -> None:
    for actual in ranks(2).run(train_data_parallel, CASES["mlp"]):
        assert_same_gradients(actual.gradients, train_reference(CASES["mlp"]))
    actual, _ = ranks(2).run(train_data_parallel, CASES["llama"])
    with pytest.raises(AssertionError, match="gradients: "):  # labels that do not count: not a mean of means
        assert_same_gradients(actual.gradients, train_reference(CASES["llama"]))


@pytest.mark.parametrize("case", [
    case if str(case) in (*FEW, "resnet") else slow(case) for case in EXACT], ids=str)
def test_ranks_agree_with_this_process(ranks: Ranks, case: ModelCase) -> None:
    """`train` runs on ranks as it is, and its results travel."""
    expected = train_reference(case, "sgd", num_steps=5)
    for actual in ranks(2).run(train, case.build(), case, "sgd", num_steps=5):
        assert_same_loss(actual, expected)
        assert_same_gradients(actual.gradients, expected)
        assert_same_parameters(actual.parameters, expected)
