"""A language model by Lightning, as the LanguageModel of its examples: the demo's Transformer, on words made here.

    autoparallel launch --ranks 4 -- python lightning_lm.py --devices 4 --batch_size 4
"""

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos import Transformer
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from autoparallel.integrations import AutoparallelStrategy  # was:

BLOCK, WORDS = 16, 50


class Words(Dataset):
    """Words that follow one another by a rule."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple:
        words = (torch.arange(BLOCK + 1) * (1 + index % 5) + index) % WORDS
        return words[:-1], words[1:]


class LanguageModel(lightning.LightningModule):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size, ninp=32, nhead=4, nhid=64, dropout=0.0)

    def training_step(self, batch, batch_idx):
        input, target = batch
        output = self.model(input, target)
        loss = functional.nll_loss(output, target.view(-1))
        self.log("train_loss", loss)
        if self.trainer.is_global_zero:
            print(f"step {self.global_step} {float(loss.detach()):.7f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=16, help="of each process")
    parser.add_argument("--output_dir", default="out")
    args = parser.parse_args()
    lightning.seed_everything(42)
    model = LanguageModel(WORDS)
    saving = ModelCheckpoint(dirpath=args.output_dir, every_n_train_steps=2, save_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=args.devices, max_steps=8, gradient_clip_val=0.25, logger=False, callbacks=[saving],
        strategy=AutoparallelStrategy(),  # was: strategy="auto",
        enable_progress_bar=False, enable_model_summary=False,
    )
    last = Path(args.output_dir, "last.ckpt")
    trainer.fit(model, DataLoader(Words(), batch_size=args.batch_size), ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
