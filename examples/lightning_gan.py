"""A GAN by Lightning, as its basic GAN: two networks, two optimizers, stepped by hand; on pictures made here.

    autoparallel launch --ranks 4 -- python lightning_gan.py --devices 4 --batch_size 4
"""

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from autoparallel.integrations import AutoparallelStrategy  # was:

LATENT, SIDE = 8, 6


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(LATENT, 32), nn.LeakyReLU(0.2), nn.Linear(32, 64), nn.BatchNorm1d(64),
                                   nn.LeakyReLU(0.2), nn.Linear(64, SIDE * SIDE), nn.Tanh())

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.model(z).view(z.size(0), 1, SIDE, SIDE)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(SIDE * SIDE, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, img: torch.Tensor) -> torch.Tensor:
        return self.model(img.view(img.size(0), -1))


class GAN(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = Generator()
        self.discriminator = Discriminator()

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.generator(z)

    def adversarial_loss(self, y_hat: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch: list) -> None:
        imgs, z = batch
        optimizer_g, optimizer_d = self.optimizers()
        self.toggle_optimizer(optimizer_g)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake = torch.zeros(imgs.size(0), 1).type_as(imgs)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)
        if self.trainer.is_global_zero:
            print(f"step {self.global_step // 2} {float((g_loss + d_loss).detach()):.7f}", flush=True)

    def configure_optimizers(self) -> tuple:
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-4)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-4)
        return [opt_g, opt_d], []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=16, help="of each process")
    parser.add_argument("--output_dir", default="out")
    args = parser.parse_args()
    lightning.seed_everything(7)
    places = torch.linspace(-1, 1, SIDE)
    pictures = torch.stack([torch.sin(places * (1 + n % 5))[:, None] * torch.cos(places * (n % 3)) for n in range(64)])
    saving = ModelCheckpoint(dirpath=args.output_dir, every_n_train_steps=4, save_last=True)  # two for each batch
    trainer = lightning.Trainer(
        accelerator="cpu", devices=args.devices, max_epochs=2, logger=False, callbacks=[saving],
        strategy=AutoparallelStrategy(),  # was: strategy="auto",
        enable_progress_bar=False, enable_model_summary=False,
    )
    data = TensorDataset(pictures[:, None], torch.randn(64, LATENT))
    last = Path(args.output_dir, "last.ckpt")
    trainer.fit(GAN(), DataLoader(data, batch_size=args.batch_size), ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
