"""Train and eval mode, frozen parameters, inference mode and no_grad on a parallel module, as on the original."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoparallel
from autoparallel.schedule.schedules import SCHEDULES, usual
from tests.support.batch_rows import Rows, example, rows_of, stepped, whole
from tests.support.ranks import RankError, mesh_of
from tests.support.reference import gathered, gradients_of


class Growing(nn.Module):
    """A block that reads a buffer, and then writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.scale.clone()
        self.scale.add_(1.0)
        return x + torch.tanh(self.layer(x) * before) * before


class Grown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Growing(), Growing()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def grown(options: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Gradients of two calls together, before whose backward both have been made; without options of one process."""
    torch.manual_seed(0)
    model, x = Grown(), torch.randn(4, 6)
    called = model if options is None else autoparallel.compile(model, mesh_of(2), example_inputs=(x,), **options)
    (called(x) + called(x)).backward()
    return gathered((name, p.grad) for name, p in called.named_parameters() if p.grad is not None)


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"recompute": "offload"},
                                     {"baseline": "fsdp", "zero_stage": 3}], ids=str)
def test_backward_reads_buffers_as_they_were_before_they_were_written(ranks: Any, options: dict[str, Any]) -> None:
    expected = grown(None)
    for found in ranks(2).run(grown, options):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name])


def eval_differs() -> tuple[float, float, float]:
    """Batch norm in eval mode uses the running statistics; the call is traced anew with parameters in place."""
    model, _, kwargs = example("resnet")
    parallel = autoparallel.compile(model, mesh_of(4), example_kwargs=kwargs)
    parallel.eval()
    model.eval()
    with torch.no_grad():
        in_eval = float((whole(parallel(**kwargs).logits) - model(**kwargs).logits).abs().max())
        parallel.train()
        model.train()
        in_train = float((whole(parallel(**kwargs).logits) - model(**kwargs).logits).abs().max())
    buffers = max(float((b.float() - dict(model.named_buffers())[n].float()).abs().max())
                  for n, b in parallel.named_buffers())
    return in_eval, in_train, buffers


def test_train_and_eval(ranks: Any) -> None:
    for in_eval, in_train, buffers in ranks(4).run(eval_differs):
        assert max(in_eval, in_train, buffers) < 1e-5


def learnt_later(mesh_shape: tuple[int, ...] | None, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients of a parameter that was frozen in the first step, and of what was frozen after it."""
    _, called, x = rows_of(mesh_shape, options, frozen=("first",))
    stepped(called, x)
    called.zero_grad()
    called.first.requires_grad_(True)
    called.last.requires_grad_(False)
    stepped(called, x)
    return gradients_of(called)


@pytest.mark.parametrize("options", [{"baseline": "ddp"}, {"baseline": "fsdp"},
                                     {"micro_batches": 2, "zero_stage": 2}], ids=str)
def test_parameters_that_are_frozen_and_learn_later(ranks: Any, options: dict[str, Any]) -> None:
    expected = learnt_later(None, {})
    assert expected.keys() == {"first.weight", "first.bias", "turned"}
    for found in ranks(2).run(learnt_later, (2,), options):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name])


def test_parameters_of_a_pipeline_that_learn_later_are_refused(ranks: Any) -> None:
    with pytest.raises(RankError, match="frozen when the pipeline was compiled"):
        ranks(2).run(learnt_later, (2,), {"pipeline_stages": 2, "micro_batches": 2})


def first_in_inference_mode() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    parallel, x = autoparallel.compile(Rows(), mesh_of(2)), torch.randn(8, 8)
    with torch.inference_mode():
        parallel(x)
    stepped(parallel, x)
    return gradients_of(parallel)


def test_a_module_called_in_inference_mode_first_can_be_trained(ranks: Any) -> None:
    model, _, x = rows_of(None, {})
    stepped(model, x)
    for found in ranks(2).run(first_in_inference_mode):
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(found[name], gradient)


def trained_by_fused_adamw(mesh_shape: tuple[int, ...] | None, options: dict[str, Any]
                           ) -> tuple[dict[str, torch.Tensor], bool]:
    """Parameters after two steps, and whether the original has those of before. The fused optimizer does not look how a
    parameter and its gradient lie in memory."""
    model, called, x = rows_of(mesh_shape, options)
    before = gathered(model.named_parameters())
    optimizer = torch.optim.AdamW(called.parameters(), lr=0.1, eps=1e-4, fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        stepped(called, x)
        optimizer.step()
    after = gathered(called.named_parameters())
    return after, all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("options", [{"baseline": "ddp"}, {"baseline": "fsdp"},
                                     {"pipeline_stages": 2, "micro_batches": 2}], ids=str)
def test_fused_optimizers_train_what_is_not_the_original(ranks: Any, options: dict[str, Any]) -> None:
    expected, _ = trained_by_fused_adamw(None, {})
    for found, original_kept in ranks(2).run(trained_by_fused_adamw, (2,), options):
        assert original_kept
        for name, parameter in found.items():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=1e-5)


def evaluated(mesh_shape: tuple[int, ...], options: dict[str, Any]) -> tuple[float, int, float, int]:
    """The loss of a step under no_grad and the number of gradients after it; and of one with gradients."""
    _, called, x = rows_of(mesh_shape, options)
    with torch.no_grad():
        before = float(called.step(x)), len(gradients_of(called))
    return *before, float(called.step(x)), len(gradients_of(called))


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2, "zero_stage": 3}, *(
    {"pipeline_stages": 4 if name == usual(2) else 2, "micro_batches": 2, "schedule": name} for name in SCHEDULES)],
    ids=str)
def test_steps_under_no_grad_return_the_loss_only(ranks: Any, options: dict[str, Any]) -> None:
    model, _, x = rows_of(None, {})
    expected = float(model(x).detach())
    for without, none, loss, some in ranks(2).run(evaluated, (2,), options):
        assert (without, loss) == pytest.approx((expected, expected))
        assert none == 0 and some > 0


def in_double_precision(options: dict[str, Any]) -> torch.Tensor:
    """The loss, and the norm of the gradients."""
    torch.manual_seed(0)
    model, x = Rows().double(), torch.randn(8, 8, dtype=torch.float64)
    called = model if not options else autoparallel.compile(model, mesh_of(2), example_inputs=(x,), **options)
    if options:
        return torch.stack([called.step(x), called.clip_grad_norm_(0.1)])
    loss = model(x)
    loss.backward()
    return torch.stack([loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 0.1)])


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"pipeline_stages": 2, "micro_batches": 2}], ids=str)
def test_numbers_in_double_precision_are_whole(ranks: Any, options: dict[str, Any]) -> None:
    for found in ranks(2).run(in_double_precision, options):
        torch.testing.assert_close(found, in_double_precision({}), rtol=1e-12, atol=0.0)


class Taught(torch.nn.Module):
    """A student and its frozen teacher, which has running statistics and dropout."""

    def __init__(self, keeps_mode: bool) -> None:
        super().__init__()
        norms = torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5)
        self.teacher = torch.nn.Sequential(torch.nn.Linear(8, 8), *norms).requires_grad_(False)
        self.student = torch.nn.Linear(8, 8)
        self.keeps_mode = keeps_mode

    def train(self, mode: bool = True) -> Taught:
        super().train(mode)
        if self.keeps_mode:
            self.teacher.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.student(x) - self.teacher(x)).square().mean()


def parts_in_eval_mode() -> list[str]:
    """What differs from one process when a part is in eval mode: before compile, after it, by the model's own train."""
    wrong = []
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    for when in ("before", "after", "own"):
        torch.manual_seed(0)
        model = Taught(keeps_mode=when == "own").train()
        original = Taught(keeps_mode=when == "own").train()
        original.load_state_dict(model.state_dict())
        original.teacher.eval()
        if when == "before":
            model.teacher.eval()
        parallel = autoparallel.compile(model, mesh_of(4), example_inputs=(x,))
        if when == "after":
            parallel.teacher.eval()
        if when == "own":
            parallel.eval().train()
        loss, expected = float(parallel(x)), float(original(x))
        if abs(loss - expected) > 1e-6 * expected:
            wrong.append(f"{when}: {loss}, one process {expected}")
        if not (parallel.training and isinstance(parallel.teacher[1], torch.nn.BatchNorm1d)):
            wrong.append(f"{when}: parts")
        if int(parallel.teacher[1].num_batches_tracked):
            wrong.append(f"{when}: the teacher's statistics")
    return wrong


def test_parts_keep_their_mode(ranks: Any) -> None:
    assert ranks(4).run(parts_in_eval_mode) == [[]] * 4


def test_a_mode_that_is_set_before_the_first_call_is_the_mode_of_that_call(mesh_of_one: Any) -> None:
    """As Lightning puts modes back: by setting ``training`` of each module."""
    class Halved(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.training else x / 2

    parallel = autoparallel.compile(Halved(), mesh_of_one)
    parallel.training = False
    assert float(parallel(torch.ones(2)).sum()) == 1 and not parallel.training
    parallel.training = True
    assert float(parallel(torch.ones(2)).sum()) == 2
