"""Ops that no parameter decides, and constants, are in one order however they were traced."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from autoparallel.capture import OpGraph, capture
from autoparallel.capture.graph import Ref
from tests.support.hash_seeds import LoopsOverSets

KINDS = sorted(LoopsOverSets.KINDS)


def traced(kinds: list[str]) -> OpGraph:
    """As a process traces the model in which a set has its names in this order."""
    torch.manual_seed(0)
    model = LoopsOverSets()
    model.KINDS = kinds  # type: ignore[assignment]
    return capture(model, (torch.ones(8, 16),))


def test_any_order_of_a_loop_gives_one_program() -> None:
    """Masks, constants (each with its own value under its name) and updates of buffers."""
    first = traced(KINDS)
    for kinds in itertools.islice(itertools.permutations(KINDS), 1, None, 23):
        other = traced(list(kinds))
        assert [node.name for node in other] == [node.name for node in first]
        assert other.fingerprint == first.fingerprint and other.lines() == first.lines()
        assert list(other.mutations.items()) == list(first.mutations.items())
        torch.testing.assert_close(other.constant_tensors, first.constant_tensors, rtol=0, atol=0)


def test_ops_are_in_topological_order_and_none_is_lost() -> None:
    graph = traced(KINDS[::-1])
    assert all(ref.node < node.index for node in graph for ref in node.inputs)
    assert len(graph.of_kind("op")) == len(traced(KINDS).of_kind("op"))
    cosines = [node for node in graph if node.op_name == "aten.cos.default"]
    assert len(cosines) == len(KINDS)  # each constant is read by its own
    assert len({node.inputs for node in cosines}) == len(KINDS)


class Interleaved(nn.Module):
    """Ops that read parameters, in the order of the names, and a mask between them that the second reads first."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({kind: nn.Linear(4, 4) for kind in ("near", "far")})

    def forward(self, x: torch.Tensor, kinds: tuple[str, ...]) -> torch.Tensor:
        masks = {"far": x.cos(), "near": x.sin()}
        made = {kind: self.heads[kind](x) for kind in kinds}
        return (made["near"] * masks["near"] + made["far"] * masks["far"]).sum()


def test_ops_that_read_parameters_keep_the_order_of_the_trace() -> None:
    for kinds in (("near", "far"), ("far", "near")):
        graph = capture(Interleaved(), (torch.ones(2, 4), kinds))
        ops = [node.op_name.split(".")[1] for node in graph.of_kind("op")]
        assert ops == ["sin", "cos", "linear", "linear", "mul", "mul", "add", "sum"]  # as they are read
        heads = [node.module_path for node in graph.of_kind("op") if node.op_name == "aten.linear.default"]
        assert heads == [f"heads.{kind}" for kind in kinds]


def test_two_equal_values_keep_their_readers() -> None:
    """Which of two is which shows in who reads it, and in nothing else."""

    def program(first: str) -> OpGraph:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                made = {kind: x.cos() for kind in ((first, "b") if first == "a" else (first, "a"))}
                return (self.weight * made["a"] - made["b"]).sum()

        return capture(Twice(), (torch.ones(4),))

    one, other = program("a"), program("b")
    assert one.fingerprint == other.fingerprint
    assert one.nodes[-1].args == (Ref(len(one.nodes) - 2),)
