"""accelerate's loop on four ranks computes what it computes in one process; only the class's name changes."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autoparallel.errors import AutoparallelError
from tests.support.language import Text, as_ranks, llama, reset_accelerate, whole
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

accelerate = pytest.importorskip("accelerate")


def accelerator_of(parallel: dict[str, Any], shape: tuple[int, ...], **options: Any) -> Any:
    """Ours on ranks, accelerate's own in one process."""
    if not dist.is_initialized():
        reset_accelerate()
        return accelerate.Accelerator(cpu=True, **options)
    from autoparallel.integrations import AutoparallelAccelerator

    as_ranks()
    return AutoparallelAccelerator(cpu=True, parallel={"mesh": mesh_of(*shape), **parallel}, **options)


def language(folder: Path, parallel: dict[str, Any], shape: tuple[int, ...], options: dict[str, Any], resumed: bool
             ) -> tuple[list[float], list[Any], dict[str, Tensor]]:
    """As accelerate's nlp_example: losses, metrics of each epoch, weights. Saved after the first of two epochs."""
    accelerator = accelerator_of(parallel, shape, **options)
    torch.manual_seed(0)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    train = DataLoader(Text(), batch_size=8 // ranks, shuffle=True, drop_last=True)
    evaluation = DataLoader(Text(), batch_size=8 // ranks)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    model, optimizer, train, evaluation = accelerator.prepare(model, optimizer, train, evaluation)
    losses, metrics = [], []
    if resumed:
        accelerator.load_state(str(folder / "state"))
        scheduler.step()
    for epoch in range(int(resumed), 2):
        model.train()
        torch.manual_seed(epoch)
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
        scheduler.step()
        model.eval()
        seen = []
        for batch in evaluation:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(-1)
            seen.append(accelerator.gather_for_metrics((predictions, batch["labels"]))[0])
        metrics.append((sum(len(part) for part in seen), torch.cat(seen)))
        if epoch == 0:
            accelerator.save_state(str(folder / "state"))
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(folder / "out", is_main_process=accelerator.is_main_process,
                              save_function=accelerator.save, state_dict=accelerator.get_state_dict(model))
    reset_accelerate()
    return losses, metrics, {name: value.detach() for name, value in whole(unwrapped).items()}


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-4) -> None:
    losses, metrics, weights = actual
    assert losses == pytest.approx(expected[0][-len(losses):], rel=tolerance)
    for (count, predictions), (their_count, theirs) in zip(metrics, expected[1][-len(metrics):], strict=True):
        assert count == their_count == 44
        assert (predictions != theirs).float().mean() < 0.01
    for name, value in weights.items():
        assert (value - expected[2][name]).abs().max() <= tolerance * max(1.0, float(value.abs().max())), name


@pytest.mark.parametrize(("parallel", "shape", "options"), [
    slow({"baseline": "fsdp"}, (4,), {}),
    ({"baseline": "tensor_parallel"}, (2, 2), {"gradient_accumulation_steps": 2}),
])
def test_a_loop_of_accelerate(ranks: Any, tmp_path: Path, parallel: dict[str, Any], shape: tuple[int, ...],
                              options: dict[str, Any]) -> None:
    expected = language(tmp_path / "one", {}, (1,), options, False)
    for actual in ranks(4).run(language, tmp_path / "four", parallel, shape, options, False, timeout_s=200):
        assert_same(actual, expected)
    for actual in ranks(2).run(language, tmp_path / "four", parallel, (2,), options, True, timeout_s=200):
        assert_same(actual, expected)
    assert (tmp_path / "four/out/config.json").exists()


def losses_of(accelerator: Any, optimizer: Any, losses: Iterator[Tensor]) -> list[float]:
    """The losses of steps on each of these, of which each is made after the step before it."""
    found = []
    for loss in losses:
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    reset_accelerate()
    return found


def images(parallel: dict[str, Any], shape: tuple[int, ...], options: dict[str, Any]) -> list[float]:
    """As accelerate's cv_example: tuples of images and labels, the loss outside the model."""
    accelerator = accelerator_of(parallel, shape, **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    data = TensorDataset(torch.randn(20, 3, 8, 8), torch.arange(20) % 10)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, DataLoader(
        data, batch_size=4 // ranks), scheduler)
    return losses_of(accelerator, optimizer, (nn.functional.cross_entropy(model(image), label)
                                              for image, label in loader))


def metrics(split: bool, whole_size: bool) -> list[tuple[list[float], list[int]]]:
    """Of an epoch with an incomplete last batch: what a script gathers of losses, as run_clm_no_trainer does, and
    samples. ``whole_size``: losses are repeated by the batch size of the loader, that of all ranks."""
    options = {"dataloader_config": accelerate.DataLoaderConfiguration(split_batches=True)} if split else {}
    accelerator = accelerator_of({}, (4,), **options)
    ranks = dist.get_world_size() if dist.is_initialized() and not split else 1
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(22)), batch_size=8 // ranks))
    each = 8 // (dist.get_world_size() if dist.is_initialized() and not whole_size else 1)
    found = [accelerator.gather_for_metrics((rows.float().mean().repeat(each), rows)) for (rows,) in loader]
    reset_accelerate()
    return [(loss.tolist(), rows.tolist()) for loss, rows in found]


@pytest.mark.parametrize(("split", "whole_size"), [(False, False), (True, False), (True, True)])
def test_losses_are_gathered_as_often_as_there_are_samples(ranks: Any, split: bool, whole_size: bool) -> None:
    expected = metrics(split, whole_size)
    assert [len(losses) for losses, _ in expected] == [8, 8, 6]
    assert ranks(4).run(metrics, split, whole_size, timeout_s=100) == 4 * [expected]


def gathered() -> list[Any]:
    """What scripts before gather_for_metrics gather in a loop and after it, and what differs over ranks."""
    accelerator = accelerator_of({}, (2,))
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(22)), batch_size=8 // ranks))
    found: list[Any] = []
    for (rows,) in loader:
        found.append([one.tolist() for one in accelerator.gather((rows, rows % 3 == 0))])
        found.append(accelerator.gather(rows.float().mean().repeat(8 // ranks)).tolist()[:len(rows)])
    found.append(accelerator.gather(torch.cat([rows for (rows,) in loader])).tolist())
    found.append(accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == [*range(ranks)])
    found.append(accelerator.gather(torch.tensor(2)).sum().item() // accelerator.num_processes)
    reset_accelerate()
    return found


def test_rows_of_a_batch_are_gathered_once(ranks: Any) -> None:
    expected = gathered()
    assert ranks(2).run(gathered, timeout_s=100) == 2 * [expected]


def shuffled() -> Any:
    """A loader of 12 samples in batches of 4, in an order drawn for each epoch."""
    from accelerate.data_loader import prepare_data_loader

    return prepare_data_loader(DataLoader(TensorDataset(torch.arange(12)), batch_size=4, shuffle=True), num_processes=1,
                               process_index=0, use_seedable_sampler=True, data_seed=3)


@pytest.mark.parametrize("taken", [1, 2, 3, 4, 5])
def test_loaders_go_on_in_their_epoch(taken: int, tmp_path: Path) -> None:
    """Saved after so many batches of three epochs of three, within the loop; accelerate alone starts with the first
    epoch's order again, and repeats the epoch that it left out a part of."""
    from autoparallel.integrations.epochs import load_epochs, rest_of_epoch, save_epochs

    torch.manual_seed(0)
    accelerate.state.PartialState(cpu=True)
    expected, loader = list[list[int]](), shuffled()
    for _ in range(3):
        for (rows,) in loader:
            expected.append(rows.tolist())
            if len(expected) == taken:
                save_epochs([loader], tmp_path / "state")
    assert len(expected) == 9 and sorted(expected[0]) != sorted(expected[3])
    torch.manual_seed(0)
    again = shuffled()
    load_epochs([again], tmp_path / "state")
    found = list[list[int]]()
    for epoch in range(taken // 3, 3):
        skipped = taken % 3 if epoch == taken // 3 else 0
        rest = rest_of_epoch(accelerate.skip_first_batches(again, skipped), again) if skipped else again
        found += [rows.tolist() for (rows,) in rest]
    assert found == expected[taken:]
    reset_accelerate()


@pytest.mark.filterwarnings("error")
def test_loaders_of_other_batches_are_told(tmp_path: Path) -> None:
    from autoparallel.integrations.epochs import load_epochs, save_epochs

    accelerate.state.PartialState(cpu=True)
    save_epochs([shuffled()], tmp_path / "state")
    other = accelerate.data_loader.prepare_data_loader(DataLoader(TensorDataset(torch.arange(12)), batch_size=3),
                                                       num_processes=1, process_index=0)
    with pytest.raises(UserWarning, match=r"batches of 4 samples.*3 now.*\n.*split_batches=True"):
        load_epochs([other], tmp_path / "state")
    with pytest.raises(UserWarning, match="1 prepared loaders, and there are 2"):
        load_epochs([other, other], tmp_path / "state")
    load_epochs([other], tmp_path)  # of an older release
    reset_accelerate()


_SCHEDULES: dict[str, Any] = {
    "lambda": lambda o, ranks: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 - step / (10 * ranks)),
    "cosine": lambda o, ranks: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10 * ranks),
    "one cycle": lambda o, ranks: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10 * ranks),
    "sequence": lambda o, ranks: torch.optim.lr_scheduler.SequentialLR(o, [
        torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2 * ranks),
        torch.optim.lr_scheduler.CosineAnnealingLR(o, 8 * ranks)], [2 * ranks])}


def prepared(kind: str, ranks: int) -> Any:
    """A schedule as accelerate wraps it."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    return SimpleNamespace(scheduler=_SCHEDULES[kind](optimizer, ranks), split_batches=False, step_with_optimizer=True)


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("kind", list(_SCHEDULES))
def test_a_schedule_goes_on_with_another_number_of_ranks(kind: str) -> None:
    """After 3 training steps on 4 ranks, as after 3 on 2, then and after each further step."""
    from autoparallel.integrations.schedules import Begun, moved

    saved, fresh, loaded = prepared(kind, 4), prepared(kind, 2), prepared(kind, 2)
    for _ in range(12):
        saved.scheduler.step()
    begun = Begun.of(loaded)
    loaded.scheduler.load_state_dict(saved.scheduler.state_dict())
    moved([begun], 4, 2)
    for _ in range(6):
        fresh.scheduler.step()
    for step in range(8):
        assert loaded.scheduler.get_last_lr() == pytest.approx(fresh.scheduler.get_last_lr(), rel=1e-6), step
        assert [group["lr"] for group in loaded.scheduler.optimizer.param_groups] == loaded.scheduler.get_last_lr()
        fresh.scheduler.step()
        loaded.scheduler.step()


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_of_other_steps_is_refused() -> None:
    from autoparallel.integrations.schedules import Begun, moved

    loaded = prepared("lambda", 2)
    begun = Begun.of(loaded)
    loaded.scheduler.step()
    with pytest.raises(AutoparallelError, match="LambdaLR was saved after 1 steps on 4 ranks"):
        moved([begun], 4, 2)


def copied() -> tuple[float, float]:
    """What a copy with weights of zero computes, and the prepared model."""
    accelerator = accelerator_of({}, (2,))
    model, x = accelerator.prepare(nn.Linear(4, 4, bias=False)), torch.ones(4, 4)
    model(x)
    copy = deepcopy(model)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.zero_()
        found = float(copy(x).abs().sum()), float(model(x).abs().sum())
    reset_accelerate()
    return found


def test_a_copy_computes_with_its_own_weights(ranks: Any) -> None:
    """As averages of weights do: it called the forward of the model that was copied."""
    for of_copy, of_model in ranks(2).run(copied, timeout_s=100):
        assert of_copy == 0 < of_model


def apart(first: str) -> list[float]:
    """Losses where model and optimizer are prepared apart, one or the other first."""
    accelerator = accelerator_of({}, (2,))
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    made: list[Any] = [accelerator.prepare(model) if first == "model" else model]
    optimizer = accelerator.prepare(torch.optim.AdamW(made[-1].parameters(), lr=1e-2))
    if first != "model":
        made.append(accelerator.prepare(model))
    return losses_of(accelerator, optimizer, (nn.functional.mse_loss(made[-1](x), y) for _ in range(3)))


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_model_and_optimizer_prepared_apart(ranks: Any, first: str) -> None:
    """The optimizer was refused at its step, as one of the original's parameters."""
    expected = apart(first)
    for losses in ranks(2).run(apart, first, timeout_s=100):
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("options", "tolerance"), [({}, 1e-5), ({"mixed_precision": "bf16"}, 2e-2)])
def test_a_loss_outside_the_model(ranks: Any, options: dict[str, Any], tolerance: float) -> None:
    """Traced at its first call: the batch is not the model's arguments."""
    expected = images({}, (1,), options)
    assert len(expected) == 5
    for shape, parallel in (((4,), {"baseline": "ddp"}), ((2, 2), {"baseline": "fsdp"})):
        for actual in ranks(4).run(images, parallel, shape, options, timeout_s=100):
            assert actual == pytest.approx(expected, rel=tolerance)


def refusals(folder: Path) -> list[str]:
    accelerator = accelerator_of({"baseline": "ddp"}, (2,))
    told = []
    folder.mkdir(exist_ok=True)
    for action in (lambda: accelerator.prepare(nn.Linear(2, 2), nn.Linear(2, 2)),
                   lambda: accelerator.load_state(),
                   lambda: accelerator.prepare(DataLoader(Text(), batch_size=None))):
        try:
            action()
            told.append("no error")
        except AutoparallelError as error:
            told.append(str(error))
    reset_accelerate()
    return told


def test_impossible_options_are_refused(ranks: Any, tmp_path: Path) -> None:
    for two, folder, batches in ranks(2).run(refusals, tmp_path / "x"):
        assert "several models" in two and "needs the folder" in folder
        assert "batch_size=None" in batches
