"""Trainers beside the mixin that compute a loss of their own, LoRA, and TRL's SFTTrainer on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoparallel.errors import InputError
from tests.support.language import Text, adapted, as_ranks, llama, reset_accelerate
from tests.support.ranks import RankPool, mesh_of
from tests.support.tiers import slow

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


class Doubled(transformers.Trainer):  # type: ignore[misc, name-defined]
    """A Trainer of somebody else's, with a loss of its own."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
                     num_items_in_batch: Any = None) -> Any:
        loss = 2 * model(**inputs).logits.float().square().mean()
        return (loss, {"loss": loss}) if return_outputs else loss


def losses_of(parallel: bool, folder: Path, ranks: int) -> list[float]:
    from autoparallel.integrations import AutoparallelTraining

    kind = type("Mine", (AutoparallelTraining, Doubled), {}) if parallel else Doubled
    reset_accelerate()
    if parallel:
        as_ranks()
    args = transformers.TrainingArguments(str(folder), per_device_train_batch_size=8 // ranks, max_steps=3,
                                          learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no",
                                          use_cpu=True, disable_tqdm=True)
    more = {"parallel": {"mesh": mesh_of(ranks), "baseline": "fsdp"}} if parallel else {}
    trainer = kind(model=llama(), args=args, train_dataset=Text(True), **more)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.ranks
def test_the_loss_of_a_trainer_beside_the_mixin_trains(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    expected = losses_of(False, tmp_path / "one", 1)
    for found in ranks(4).run(losses_of, True, tmp_path / "four", 4, timeout_s=200.0):
        assert found == pytest.approx(expected, rel=1e-3) and len(found) == 3


def adapters(parallel: bool, folder: Path, ranks: int) -> list[float]:
    """Losses of LoRA by the Trainer, and of an evaluation; the adapters are in ``folder``."""
    from autoparallel.integrations import AutoparallelTrainer

    reset_accelerate()
    if parallel:
        as_ranks()
    args = transformers.TrainingArguments(str(folder), per_device_train_batch_size=8 // ranks, max_steps=4,
                                          per_device_eval_batch_size=8 // ranks, learning_rate=1e-2, logging_steps=1,
                                          report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True)
    kind, more = (AutoparallelTrainer, {"parallel": {"mesh": mesh_of(ranks)}}) if parallel else (
        transformers.Trainer, {})
    trainer = kind(model=adapted(), args=args, train_dataset=Text(True), eval_dataset=Text(True), **more)
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]


@pytest.mark.ranks
@pytest.mark.parametrize("number", [4, slow(8)])
def test_adapters_train_and_merge_as_in_one_process(ranks: Callable[[int], RankPool], tmp_path: Path, number: int
                                                    ) -> None:
    peft = pytest.importorskip("peft")
    expected = adapters(False, tmp_path / "one", 1)
    assert len(expected) == 5 and expected[-1] < expected[0]
    for found in ranks(number).run(adapters, True, tmp_path / "several", number, timeout_s=200.0):
        assert found == pytest.approx(expected, rel=1e-6)
    one, several = (peft.PeftModel.from_pretrained(llama(), tmp_path / name).merge_and_unload().state_dict()
                    for name in ("one", "several"))
    assert any((value - llama().state_dict()[name]).abs().max() > 1e-3 for name, value in one.items())
    for name, value in one.items():
        torch.testing.assert_close(several[name], value, rtol=0, atol=1e-5)


class Stepping(transformers.Trainer):  # type: ignore[misc, name-defined]
    """A Trainer of somebody else's, with steps of its own."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs) / 2


def test_steps_that_would_not_run_are_refused() -> None:
    from autoparallel.integrations import AutoparallelTraining

    kind = type("Mine", (AutoparallelTraining, Stepping), {})
    with pytest.raises(InputError, match=r"Stepping\.training_step would not run.*Mine\.replaces"):
        kind(model=llama(), args=transformers.TrainingArguments("out", report_to=[], use_cpu=True))


def tuned(parallel: bool, folder: Path, ranks: int, **options: Any) -> tuple[list[float], float, float]:
    """Losses of fine-tuning steps, the loss of an evaluation, and the tokens counted."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from trl import SFTConfig, SFTTrainer

    from autoparallel.integrations import AutoparallelSFTTrainer

    reset_accelerate()
    if parallel:
        as_ranks()
    words = ["<pad>", "<eos>", *(f"w{n}" for n in range(62))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    generator = torch.Generator().manual_seed(0)
    rows = Dataset.from_list([{"text": " ".join(f"w{n}" for n in torch.randint(0, 62, (15,), generator=generator))}
                              for _ in range(32)])
    args = SFTConfig(output_dir=str(folder), per_device_train_batch_size=8 // ranks, max_steps=3, max_length=16,
                     per_device_eval_batch_size=8 // ranks, learning_rate=1e-2, logging_steps=1, report_to=[],
                     save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
                     eos_token="<eos>", **options)
    more = {"parallel": {"mesh": mesh_of(ranks), "baseline": "fsdp"}} if parallel else {}
    trainer = (AutoparallelSFTTrainer if parallel else SFTTrainer)(
        model=llama(), args=args, train_dataset=rows, eval_dataset=rows.select(range(8)), processing_class=tokens,
        **more)
    trainer.train()
    history = trainer.state.log_history
    return ([entry["loss"] for entry in history if "loss" in entry], trainer.evaluate()["eval_loss"],
            max(entry.get("num_tokens", 0) for entry in history))


@pytest.mark.ranks
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "assistant_only_loss": False}])
def test_fine_tuning_on_ranks_is_that_of_one_process(ranks: Callable[[int], RankPool], tmp_path: Path,
                                                     options: dict[str, Any]) -> None:
    pytest.importorskip("trl", reason="pip install 'autoparallel[sft]'")
    losses, evaluated, tokens = tuned(False, tmp_path / "one", 1, **options)
    for found in ranks(4).run(tuned, True, tmp_path / "four", 4, timeout_s=250.0, **options):
        assert found[0] == pytest.approx(losses, rel=1e-3) and found[1] == pytest.approx(evaluated, rel=1e-3)
        assert found[2] == tokens


def refused(options: dict[str, Any], folder: Path) -> str:
    try:
        tuned(True, folder, 2, **options)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_what_the_fused_head_alone_computes_is_refused(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="pip install 'autoparallel[sft]'")
    for options, words in (({"loss_type": "dft"}, "loss_type='dft'"), ({"packing": True}, "FlashAttention")):
        assert all(words in said for said in ranks(2).run(refused, options, tmp_path, timeout_s=200.0))
