"""Causal language modelling by transformers' Trainer, as its own run_clm.py: config, texts, evaluation, resume.

    autoparallel launch --ranks 4 -- python run_clm.py --output_dir out --max_steps 8 --per_device_train_batch_size 2
"""

import math
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from autoparallel.integrations import AutoparallelTrainer as Trainer  # was: from transformers import Trainer

BLOCK = 32
TEXT = "".join(f"{number} times {number % 7} is {number * (number % 7)}. " for number in range(400))


class Blocks(Dataset):
    """Blocks of a text's characters."""

    def __init__(self, text: str) -> None:
        ids = torch.tensor([ord(character) % 64 for character in text])
        self.blocks = ids[: len(ids) // BLOCK * BLOCK].view(-1, BLOCK)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def preprocess_logits_for_metrics(logits, labels):
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


def compute_metrics(predicted):
    preds, labels = predicted.predictions[:, :-1], predicted.label_ids[:, 1:]
    return {"accuracy": float((preds == labels).mean())}


def main() -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=BLOCK, n_embd=32, n_layer=2, n_head=4,
                                       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    train, test = Blocks(TEXT[: len(TEXT) * 9 // 10]), Blocks(TEXT[len(TEXT) * 9 // 10 :])
    trainer = Trainer(model=model, args=args, train_dataset=train, eval_dataset=test,
                      data_collator=default_data_collator, compute_metrics=compute_metrics,
                      preprocess_logits_for_metrics=preprocess_logits_for_metrics)
    last_checkpoint = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    trainer.train(resume_from_checkpoint=last_checkpoint)
    trainer.save_model()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']} {float(entry['loss']):.7f}")
        print(f"final {math.exp(metrics['eval_loss']):.7f} {metrics['eval_accuracy']:.4f}")


if __name__ == "__main__":
    main()
