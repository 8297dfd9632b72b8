"""Two sentences that mean the same or not, by accelerate, as accelerate's own nlp_example.py with its checkpoints.

    autoparallel launch --ranks 4 -- python nlp_example.py --output_dir out --batch_size 4
"""

import argparse
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from autoparallel.integrations import AutoparallelAccelerator as Accelerator  # was: from accelerate import Accelerator

LENGTH = 24


class Pairs(Dataset):
    """Pairs of lists of words: the second of words like the first's (1), or of others (0)."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed = length, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict:
        draw = torch.Generator().manual_seed(1000 * self.seed + index)
        first = torch.randint(3, 30, (LENGTH // 2 - 1,), generator=draw)
        second = torch.randint(3, 30, first.shape, generator=draw) if index % 2 else (
            torch.randint(30, 60, first.shape, generator=draw))
        ids = torch.cat([torch.tensor([1]), first, torch.tensor([2]), second])
        kinds = (torch.arange(len(ids)) >= LENGTH // 2).long()
        return {"input_ids": ids, "token_type_ids": kinds, "attention_mask": torch.ones_like(ids), "labels": index % 2}


def training_function(args: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=args.cpu)
    set_seed(args.seed)
    train_dataloader = DataLoader(Pairs(64, 1), shuffle=True, batch_size=args.batch_size, drop_last=True)
    eval_dataloader = DataLoader(Pairs(32, 2), shuffle=False, batch_size=args.batch_size)
    model = BertForSequenceClassification(BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2))
    optimizer = AdamW(params=model.parameters(), lr=args.lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer, num_warmup_steps=len(train_dataloader) // 2,
        num_training_steps=args.num_epochs * len(train_dataloader) // args.gradient_accumulation_steps)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler)
    last = Path(args.output_dir, "last")  # names the newest that is whole
    starting_epoch = int(last.read_text()) + 1 if last.exists() else 0
    if starting_epoch:
        accelerator.load_state(f"{args.output_dir}/epoch_{starting_epoch - 1}")
    for epoch in range(starting_epoch, args.num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            outputs = model(**batch)
            loss = outputs.loss / args.gradient_accumulation_steps
            accelerator.backward(loss)
            if (step + 1) % args.gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = seen = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            right, seen = right + int((predictions == references).sum()), seen + len(references)
        accelerator.print(f"epoch {epoch} {float(loss.detach()):.7f} {right / seen:.4f}", flush=True)
        accelerator.save_state(f"{args.output_dir}/epoch_{epoch}")
        if accelerator.is_main_process:
            last.write_text(str(epoch))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=16, help="of each process")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=42)
    training_function(parser.parse_args())
