"""transformers' Trainer on four ranks computes what it computes in one process; only the class's name changes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from autoparallel import integrations
from autoparallel.errors import AutoparallelError, InputError
from tests.support.language import LENGTH, SAMPLES, Text, adapted, as_ranks, encoded, llama, reset_accelerate, whole
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


def collated(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Padded to the longest."""
    pads = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {name: torch.nn.utils.rnn.pad_sequence([s[name] for s in samples], batch_first=True, padding_value=pad)
            for name, pad in pads.items()}


def accuracy(evaluated: Any) -> dict[str, float]:
    predicted, labels = np.argmax(evaluated.predictions[:, :-1], -1), evaluated.label_ids[:, 1:]
    return {"accuracy": float((predicted == labels)[labels != -100].mean()), "samples": float(len(labels))}


def squared(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss of the script's own."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    picked = logits[:, :-1].gather(-1, labels[:, 1:, None].clamp(min=0)).squeeze(-1)
    kept = labels[:, 1:] != -100
    return ((picked - 1).square() * kept).sum() / num_items_in_batch


class Classified(nn.Module):
    """A classifier that takes the number of items and does not read it, as BERT's do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.out = nn.Embedding(64, 16), nn.Linear(16, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        logits = self.out((self.embedding(input_ids) * attention_mask[..., None]).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels[:, 0] % 4), "logits": logits}


class Unlabelled(Classified):
    """A classifier without a loss, whose forward takes no number of items."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None  # type: ignore[override]
                ) -> dict[str, Tensor]:
        return {"logits": self.out((self.embedding(input_ids) * attention_mask[..., None]).mean(1))}


def per_item(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(outputs["logits"], labels[:, 0] % 4, reduction="sum") / num_items_in_batch


class Routed(Classified):
    """With a loss of means over all samples, as routers of experts have, which is not the sum of the batches'."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        found = super().forward(input_ids, attention_mask, labels)
        shares = found["logits"].softmax(-1)
        balance = (shares.mean(0) * shares.square().mean(0)).sum()
        return {**found, "loss": found["loss"] * len(labels) / kwargs.get("num_items_in_batch", len(labels)) + balance}


class Streamed(IterableDataset[dict[str, Tensor]]):
    """Sentences whose number is not known: three batches of 8 in an epoch."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (Text()[index] for index in range(24))


class Masking:
    """Masks with random numbers of its own, as DataCollatorForLanguageModeling(seed=...)."""

    generator = None

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        self.generator = self.generator or torch.Generator().manual_seed(1)
        batch = collated(samples)
        kept = torch.rand(batch["labels"].shape, generator=self.generator) < 0.5
        return {**batch, "labels": torch.where(kept, batch["labels"], -100)}


def trainer_of(cls: Any, folder: Path, ranks: int, options: dict[str, Any], **more: Any) -> Any:
    """A Trainer; ``ranks``: among how many the same batch is divided."""
    arguments = {
        "output_dir": str(folder), "per_device_train_batch_size": 8 // ranks, "per_device_eval_batch_size": 8 // ranks,
        "num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", "seed": 3, "use_cpu": True, "dataloader_drop_last": True, "adam_epsilon": 1e-4}
    build, given = options.pop("build", llama), options.pop("given", False)
    more = {**more, **{name: options.pop(name) for name in ("data_collator", "compute_loss_func") if name in options}}
    if options.pop("masking", False):
        more["data_collator"] = Masking()
    padded, streamed = options.pop("padded", True), options.pop("streamed", False)
    arguments.update(options)
    model, texts = build(), Streamed() if streamed else Text(padded)
    if given:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        more["optimizers"] = optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    return cls(model=model, args=transformers.TrainingArguments(**arguments), train_dataset=texts,
               eval_dataset=Text(padded), **more)


def results(trainer: Any, resume: Any = None) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """What was logged, and the weights."""
    trainer.train(resume_from_checkpoint=resume)
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_samples", "epoch", "total_flos",
            "num_input_tokens_seen", "train_loss")
    logs = [{key: float(line[key]) for key in keys if key in line} for line in trainer.state.log_history]
    return logs, {name: value.float() for name, value in whole(trainer.model).items()}


def on_ranks(folder: Path, shape: tuple[int, ...], parallel: dict[str, Any], options: dict[str, Any],
             resume: bool = False, **more: Any) -> tuple[Any, ...]:
    from autoparallel.integrations import AutoparallelTrainer

    as_ranks()
    try:
        trainer = trainer_of(AutoparallelTrainer, folder, dist.get_world_size(), dict(options),
                             parallel={"mesh": mesh_of(*shape), **parallel}, **more)
        return (*results(trainer, resume or None), trainer.model._state.forms.compiled)
    finally:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        reset_accelerate()


def one_process(folder: Path, options: dict[str, Any], resume: bool = False, **more: Any) -> Any:
    reset_accelerate()
    try:
        return results(trainer_of(transformers.Trainer, folder, 1, dict(options), **more), resume or None)
    finally:
        reset_accelerate()


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-4) -> None:
    logs, weights, *_ = actual
    their_logs, their_weights = expected
    assert len(logs) == len(their_logs) > 3
    for mine, theirs in zip(logs, their_logs, strict=True):
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance)
    for name, value in weights.items():
        assert (value - their_weights[name]).abs().max() <= tolerance * max(1.0, float(value.abs().max())), name


FSDP, TENSOR = {"baseline": "fsdp"}, {"baseline": "tensor_parallel"}


@pytest.mark.parametrize(("shape", "parallel", "options", "forms"), [
    slow((4,), FSDP, {}, 1),
    slow((2, 2), TENSOR, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}, 2),
    ((4,), FSDP, {"gradient_accumulation_steps": 3, "dataloader_drop_last": False, "max_grad_norm": 0.0}, None),
    ((2, 2), {"pipeline_stages": 2}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "max_steps": 4}, 2),
    slow((2, 2), TENSOR, {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}, None),
    slow((4,), FSDP, {"compute_loss_func": squared}, 1),
    ((4,), {"baseline": "ddp"}, {"build": Unlabelled, "compute_loss_func": per_item,
                                 "gradient_accumulation_steps": 2, "max_steps": 4}, None),
    ((4,), FSDP, {"streamed": True, "gradient_accumulation_steps": 2, "max_steps": 5}, None),
    slow((4,), FSDP, {"masking": True, "max_steps": 4}, 1),
    slow((4,), FSDP,
         {"padded": False, "data_collator": collated, "gradient_accumulation_steps": 2, "max_steps": 3}, None),
    ((4,), {"baseline": "ddp"}, {"build": adapted, "gradient_accumulation_steps": 2}, None),
    slow((4,), {"baseline": "ddp"}, {"build": Classified, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
         None),
    slow((4,), {"baseline": "ddp"}, {"build": Routed, "gradient_accumulation_steps": 2, "max_steps": 4}, None),
    slow((4,), FSDP, {"given": True, "max_steps": 4}, 1),
    slow((4,), FSDP, {"optim": "adafactor", "max_steps": 4}, 1),
    slow((4,), {"zero_stage": 1, "baseline": "fsdp"},
         {"activation_checkpointing": True, "include_num_input_tokens_seen": "all"}, 1),
])
def test_training_is_that_of_one_process(ranks: Any, tmp_path: Path, shape: tuple[int, ...], parallel: dict[str, Any],
                                         options: dict[str, Any], forms: int | None) -> None:
    expected = one_process(tmp_path / "one", options)
    for actual in ranks(4).run(on_ranks, tmp_path / "four", shape, parallel, options, timeout_s=200):
        assert_same(actual, expected)
        assert forms is None or actual[2] == forms  # the number of items is another at every step


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
             "save_total_limit": 2, "load_best_model_at_end": True, "metric_for_best_model": "accuracy",
             "dataloader_drop_last": False, "max_steps": 8}


@pytest.mark.parametrize(("shape", "parallel"), [((4,), FSDP), slow((2, 2), TENSOR)])
def test_evaluation_saving_and_the_best_model(ranks: Any, tmp_path: Path, shape: tuple[int, ...],
                                              parallel: dict[str, Any]) -> None:
    """The last evaluation batch has 4 of 8 samples. The best model is read back at the end."""
    expected = one_process(tmp_path / "one", EVALUATED, compute_metrics=accuracy)
    folder = tmp_path / "four"
    for actual in ranks(4).run(on_ranks, folder, shape, parallel, EVALUATED, compute_metrics=accuracy, timeout_s=200):
        assert_same(actual, expected)
        assert any(line.get("eval_samples") == SAMPLES for line in actual[0])
    assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "one").iterdir()}
    best = json.loads((sorted(folder.iterdir())[-1] / "trainer_state.json").read_text())["best_model_checkpoint"]
    read = transformers.AutoModelForCausalLM.from_pretrained(best).state_dict()
    assert all(torch.allclose(value, read[name], atol=1e-6) for name, value in actual[1].items())


def test_a_pipeline_evaluates_its_loss(ranks: Any, tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    expected = one_process(tmp_path / "one", options)
    assert sum("eval_loss" in line for line in expected[0]) == 2
    for actual in ranks(4).run(on_ranks, tmp_path / "four", (2, 2), {"pipeline_stages": 2}, options, timeout_s=200):
        assert_same(actual, expected)


def broken_off(folder: Path, shape: tuple[int, ...], parallel: dict[str, Any], options: dict[str, Any]) -> None:
    from autoparallel.integrations import AutoparallelTrainer

    class Broken(AutoparallelTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            if self.state.global_step == 5:
                raise KeyboardInterrupt
            return super().training_step(*args, **kwargs)

    as_ranks()
    trainer = trainer_of(Broken, folder, dist.get_world_size(), dict(options), parallel={
        "mesh": mesh_of(*shape), **parallel})
    with contextlib.suppress(KeyboardInterrupt):
        trainer.train()
    reset_accelerate()


@pytest.mark.parametrize(("number", "shape", "parallel"), [
    (2, (2,), FSDP), slow(4, (2, 2), TENSOR), slow(8, (2, 4), {"pipeline_stages": 2})])
def test_a_run_broken_off_goes_on_elsewhere(ranks: Any, tmp_path: Path, number: int, shape: tuple[int, ...],
                                            parallel: dict[str, Any]) -> None:
    """Saved after steps 2 and 4 on four ranks, broken off before the sixth."""
    options = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2, "max_steps": 8,
               "save_total_limit": 1}
    expected = one_process(tmp_path / "one", options)
    ranks(4).run(broken_off, tmp_path / "many", (4,), FSDP, options, timeout_s=200)
    assert [path.name for path in (tmp_path / "many").iterdir()] == ["checkpoint-4"]
    for logs, weights, _ in ranks(number).run(on_ranks, tmp_path / "many", shape, parallel, options, True,
                                              timeout_s=200):
        for line in logs:
            line.pop("train_loss", None)
        theirs = [{k: v for k, v in line.items() if k != "train_loss"} for line in expected[0]]
        assert_same((logs, weights), (theirs, expected[1]), 2e-4)


def scores(folder: Path, options: dict[str, Any]) -> tuple[Any, ...]:
    """Evaluation and prediction without, and after, training."""
    from autoparallel.integrations import AutoparallelTrainer

    parallel = dist.is_initialized()
    (as_ranks if parallel else reset_accelerate)()
    trainer = trainer_of(AutoparallelTrainer if parallel else transformers.Trainer, folder,
                         dist.get_world_size() if parallel else 1, dict(options), compute_metrics=accuracy)
    before = trainer.evaluate()
    trainer.train()
    predicted = trainer.predict(trainer.eval_dataset)
    trainer.save_model(str(folder / "out"))
    reset_accelerate()
    kept = ("eval_loss", "eval_accuracy")
    return [before[key] for key in kept], predicted.metrics["test_loss"], torch.from_numpy(predicted.predictions)


@pytest.mark.parametrize(("options", "tolerance"), [
    ({"max_steps": 3, "bf16": True}, 2e-2), slow({"max_steps": 3}, 1e-4)])
def test_evaluation_and_prediction_without_training_first(ranks: Any, tmp_path: Path, options: dict[str, Any],
                                                          tolerance: float) -> None:
    before, loss, logits = scores(tmp_path / "one", options)
    for mine, my_loss, my_logits in ranks(4).run(scores, tmp_path / "four", options, timeout_s=200):
        assert mine == pytest.approx(before, rel=tolerance) and my_loss == pytest.approx(loss, rel=tolerance)
        assert my_logits.dtype == logits.dtype and (my_logits - logits).abs().max() < 10 * tolerance
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "four/out")
    assert model.config.num_hidden_layers == 2 and (tmp_path / "four/out/training_args.bin").exists()


def refusals(folder: Path) -> list[str]:
    from autoparallel.integrations import AutoparallelTrainer

    told = []
    for options, parallel in (({"auto_find_batch_size": True}, {}), ({"torch_compile": True}, {}),
                              ({"train_sampling_strategy": "batch_rebalance"}, {}),
                              ({"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1},
                               {"pipeline_stages": 2, "schedule": "gpipe"})):
        as_ranks()
        try:
            trainer_of(AutoparallelTrainer, folder, 2, options, parallel={"mesh": mesh_of(2), **parallel},
                       compute_metrics=accuracy).train()
            told.append("no error")
        except AutoparallelError as error:
            told.append(str(error))
        finally:
            reset_accelerate()
    return told


def test_impossible_options_are_refused(ranks: Any, tmp_path: Path) -> None:
    for find, compiled, sampled, evaluated in ranks(2).run(refusals, tmp_path, timeout_s=100):
        assert "TrainingArguments(auto_find_batch_size=True): leave it out" in find
        assert "TrainingArguments(torch_compile=True): leave it out" in compiled
        assert "every rank reads all of a batch: leave it out, or write 'group_by_length'" in sampled
        assert "a pipeline returns the loss only" in evaluated


def continuations(folder: Path, kind: str) -> tuple[Tensor, float]:
    """Tokens that a language model generates in evaluation, after two steps."""
    from autoparallel.integrations import AutoparallelTraining

    class Ours(AutoparallelTraining, transformers.Seq2SeqTrainer):
        pass

    parallel = dist.is_initialized()
    (as_ranks if parallel else reset_accelerate)()
    ranks = dist.get_world_size() if parallel else 1
    arguments = transformers.Seq2SeqTrainingArguments(
        str(folder), per_device_train_batch_size=8 // ranks, per_device_eval_batch_size=8 // ranks, max_steps=2,
        learning_rate=1e-2, predict_with_generate=True, generation_max_length=LENGTH + 3, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no")
    trainer = (Ours if parallel else transformers.Seq2SeqTrainer)(
        model=encoded(kind) if kind == "t5" else llama(pad_token_id=0, eos_token_id=None), args=arguments,
        train_dataset=Text(), eval_dataset=Text())
    trainer.train()
    predicted = trainer.predict(torch.utils.data.Subset(Text(), range(8)))
    reset_accelerate()
    return torch.from_numpy(predicted.predictions), predicted.metrics["test_loss"]


@pytest.mark.parametrize("kind", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_generation_in_evaluation(ranks: Any, tmp_path: Path, kind: str) -> None:
    tokens, loss = continuations(tmp_path / "one", kind)
    assert tokens.shape == (8, LENGTH + 4)  # padded by one, as the Trainer does
    for mine, my_loss in ranks(4).run(continuations, tmp_path / "four", kind, timeout_s=250):
        assert torch.equal(mine, tokens) and my_loss == pytest.approx(loss, rel=1e-4)


def test_accelerate_is_told_of_ranks_without_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes each of them for a job of its own otherwise, with batches of one rank."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert integrations.AutoparallelTrainer and "ACCELERATE_USE_CPU" not in os.environ
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert integrations.AutoparallelTrainer and os.environ["ACCELERATE_USE_CPU"] == "1"


def test_arguments_for_other_ranks_than_were_started_are_refused(monkeypatch: pytest.MonkeyPatch,
                                                                tmp_path: Path) -> None:
    reset_accelerate()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[])
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match="are for 1 rank, and 4 were started"):
        integrations.AutoparallelTrainer(nn.Linear(2, 2), arguments)


def test_batches_that_are_no_arguments_of_the_model_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                                mesh_of_one: Any) -> None:
    """As of trainers that generate what they train on. (It ended in a ValueError of dict.)"""
    reset_accelerate()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    trainer = integrations.AutoparallelTrainer(
        model=torch.nn.Linear(2, 2), train_dataset=[{"prompt": "a"}] * 8, data_collator=lambda rows: rows,
        args=transformers.TrainingArguments(str(tmp_path), report_to=[], max_steps=1, disable_tqdm=True,
                                            remove_unused_columns=False))
    with pytest.raises(InputError, match="are lists, and here each must be a mapping of the model's arguments"):
        trainer.train()
