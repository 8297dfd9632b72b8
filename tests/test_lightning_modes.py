"""Lightning sets modes and freezes parameters of submodules that are traced in between, and metrics count: as without
autoparallel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autoparallel.errors import InputError
from tests.support.tiers import slow

lightning = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")

VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513", "TORCHELASTIC_RUN_ID": "x"}


@pytest.fixture
def as_torchrun(mesh_of_one: Any) -> Iterator[None]:
    os.environ.update(VARIABLES)
    yield
    for name in VARIABLES:
        os.environ.pop(name, None)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, 0.8), nn.LeakyReLU(0.2, inplace=True),
                                   nn.Linear(16, 16), nn.Tanh())

    def forward(self, z: Tensor) -> Tensor:
        return self.model(z).view(len(z), 1, 4, 4) * (1.0 if self.training else 0.5)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(0.2), nn.BatchNorm1d(16), nn.Linear(16, 1))

    def forward(self, image: Tensor) -> Tensor:
        return self.model(image.flatten(1)) * (1.0 if self.training else 0.5)


class Gan(lightning.LightningModule):
    """Lightning's example: example_input_array, toggled optimizers, a picture after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator, self.discriminator = Generator(), Discriminator()
        self.example_input_array = torch.ones(2, 8)
        self.seen: list[float] = []

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def training_step(self, batch: Any) -> None:
        images = batch[0]
        judge = nn.functional.binary_cross_entropy_with_logits
        z = torch.sin(torch.arange(len(images) * 8).view(-1, 8) + self.global_step).type_as(images)
        valid, fake = torch.ones(len(images), 1), torch.zeros(len(images), 1)
        generating, judging = self.optimizers()
        for optimizer, loss_of in (
                (generating, lambda: judge(self.discriminator(self(z)), valid)),
                (judging, lambda: (judge(self.discriminator(images), valid)
                                   + judge(self.discriminator(self(z).detach()), fake)) / 2)):
            self.toggle_optimizer(optimizer)
            loss = loss_of()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.seen.append(float(loss.detach()))

    def validation_step(self, batch: Any) -> None:
        self.seen.append(float(self(torch.ones(len(batch[0]), 8)).square().mean()))

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self(torch.ones(3, 8).type_as(self.generator.model[0].weight)).abs().sum()))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), lr=1e-2, betas=(0.5, 0.999), eps=1e-4)
                for part in (self.generator, self.discriminator)]


def fitted(strategy: Any, validates: bool, summarised: bool) -> tuple[list[float], list[bool]]:
    """What was seen, and the modes that modules are in at last."""
    images = DataLoader(TensorDataset(torch.sin(torch.arange(16.0 * 16)).view(16, 1, 4, 4)), batch_size=8)
    module = Gan()
    lightning.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, logger=False,
                      enable_progress_bar=False, enable_model_summary=summarised, enable_checkpointing=False,
                      ).fit(module, images, images if validates else None)
    return module.seen, [part.training for part in module.modules()]


@pytest.mark.parametrize(("validates", "summarised"), [(True, False), slow(False, False), slow(False, True)])
def test_the_gan_example(as_torchrun: None, validates: bool, summarised: bool) -> None:
    """The first calls are in eval mode (Lightning's sanity check, its summary), or while one part is frozen."""
    from autoparallel.integrations import AutoparallelStrategy

    expected, modes = fitted("auto", validates, summarised)
    found, our_modes = fitted(AutoparallelStrategy(), validates, summarised)
    assert found == pytest.approx(expected, rel=1e-5)
    assert our_modes == modes


class Counting(lightning.LightningModule):
    """Metrics that count, in a list and by themselves, and a sum over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.confusion = torchmetrics.ConfusionMatrix("multiclass", num_classes=4)
        self.others = nn.ModuleList([torchmetrics.SumMetric()])

    def validation_step(self, batch: Any) -> None:
        targets = torch.arange(len(batch[0])) % 4
        self.confusion.update(self.layer(batch[0].flatten(1)).argmax(-1), targets)
        self.others[0].update(targets)
        self.log("rows", float(len(targets)), reduce_fx="sum", sync_dist=True)
        self.log("total", self.others[0])

    def on_validation_epoch_end(self) -> None:
        self.log("counted", self.confusion.compute().sum().float(), sync_dist=True)


class Tuned(lightning.LightningModule):
    """A backbone that is frozen at first, and a head that is one layer: a submodule with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)), nn.Linear(8, 4)

    def on_train_start(self) -> None:
        self.seen = sorted(self.state_dict()), sum(p.numel() for p in self.parameters()), len([*self.buffers()])

    def training_step(self, batch: Any) -> Tensor:
        return self.head(self.backbone(batch[0].flatten(1))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def tuned(strategy: Any) -> tuple[Any, list[float], dict[str, Tensor]]:
    """What the module has before its submodules are traced, the learning rates, the weights."""
    images = TensorDataset(torch.sin(torch.arange(8.0 * 16)).view(8, 1, 4, 4))
    callback = lightning.pytorch.callbacks.BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_lr=0.01)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=3, logger=False,
                                callbacks=[callback], enable_progress_bar=False, enable_model_summary=False,
                                enable_checkpointing=False)
    trainer.fit(module := Tuned(), DataLoader(images, batch_size=4))
    weights = {name: getattr(value, "full_tensor", lambda value=value: value)().detach()
               for name, value in module.state_dict().items()}
    return module.seen, [group["lr"] for group in trainer.optimizers[0].param_groups], weights


def test_a_head_of_one_layer(as_torchrun: None) -> None:
    """Before its first call the module lacked the head's parameters, which callbacks for finetuning look up."""
    from autoparallel.integrations import AutoparallelStrategy

    seen, rates, weights = tuned("auto")
    found = tuned(AutoparallelStrategy())
    assert found[:2] == (seen, rates)
    assert found[2].keys() == weights.keys()
    for name, value in weights.items():
        assert torch.allclose(found[2][name], value, rtol=1e-4, atol=1e-6), name


class Listed(lightning.LightningModule):
    """Submodules in a list and a dict, and parameters in a list."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.heads = nn.ModuleList([nn.Linear(16, 8), nn.Tanh()]), nn.ModuleDict({"one": nn.Linear(8, 4)})
        self.scales = nn.ParameterList([torch.ones(4)])
        if shared:
            self.whole = nn.Sequential(*self.layers)

    def training_step(self, batch: Any) -> Tensor:
        value = batch[0].flatten(1)
        for layer in self.layers:
            value = layer(value)
        return (self.heads["one"](value) * self.scales[0] - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def listed(strategy: Any, epochs: int, saved: str | None = None) -> tuple[dict[str, Tensor], lightning.Trainer]:
    """The weights, and those of a checkpoint, which one run writes and another goes on with."""
    images = DataLoader(TensorDataset(torch.sin(torch.arange(8.0 * 16)).view(8, 1, 4, 4)), batch_size=4)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=epochs, logger=False,
                                enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer.fit(module := Listed(), images, ckpt_path=saved)
    weights = {name: getattr(value, "full_tensor", lambda value=value: value)().detach()
               for name, value in module.state_dict().items()}
    return weights, trainer


def test_submodules_in_lists_and_dicts(as_torchrun: None, tmp_path: Any) -> None:
    """Their items are called, and compiled; the list and the dict were, which nobody calls."""
    from autoparallel.integrations import AutoparallelStrategy

    expected, _ = listed("auto", 2)
    _, trainer = listed(AutoparallelStrategy(), 1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert type(trainer.lightning_module.layers[0]).__name__ == "ParallelModule"
    found, _ = listed(AutoparallelStrategy(), 2, str(tmp_path / "one.ckpt"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-6), name


def test_submodules_that_share_parameters_are_refused(as_torchrun: None) -> None:
    """Each would train a copy."""
    from autoparallel.integrations import AutoparallelStrategy

    trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy=AutoparallelStrategy(), max_epochs=1,
                                logger=False, enable_checkpointing=False)
    with pytest.raises(InputError, match=r"0.weight in Sequential and weight in Linear: .*copy(.|\n)*one nn.Module"):
        trainer.fit(Listed(shared=True), DataLoader(TensorDataset(torch.ones(4, 1, 4, 4)), batch_size=4))


class Contrasting(lightning.LightningModule):
    """A contrastive loss of the views that DDP's ranks have together, as SimCLR's scripts gather them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.losses = nn.Linear(16, 4), list[float]()

    def training_step(self, batch: Any) -> Tensor:
        views = self.layer(batch[0].flatten(1)), self.layer(batch[0].flatten(1) + 0.1)
        one, two = (self.all_gather(view, sync_grads=True).reshape(-1, 4) for view in views)
        loss = nn.functional.cross_entropy(one @ two.T, torch.arange(len(one)))
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_epoch_end(self) -> None:
        ranks = self.all_gather(torch.tensor([float(self.global_rank)])).reshape(-1)
        assert ranks.tolist() == [*range(self.trainer.world_size)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def contrasted(strategy: Any = "auto", devices: int = 1) -> list[float]:
    """The losses of 16 rows in batches of 4."""
    images = TensorDataset(torch.sin(torch.arange(16.0 * 16)).view(16, 1, 4, 4))
    trainer = lightning.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, logger=False,
                                enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer.fit(module := Contrasting(), DataLoader(images, batch_size=4 // devices))
    return module.losses


def contrasted_on_ranks() -> tuple[list[float], list[float]]:
    """Also what Fabric gathers: a batch's rows, and the ranks."""
    from autoparallel.integrations import AutoparallelFabricStrategy, AutoparallelStrategy

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(VARIABLES, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    try:
        fabric = lightning.Fabric(accelerator="cpu", devices=int(size), strategy=AutoparallelFabricStrategy())
        fabric.launch()
        gathered = fabric.all_gather(torch.arange(3.0)), fabric.all_gather(torch.full((1,), float(rank)))
        return contrasted(AutoparallelStrategy(), int(size)), torch.cat([one.flatten() for one in gathered]).tolist()
    finally:
        for name in VARIABLES:
            os.environ.pop(name, None)


def test_rows_are_gathered_once(ranks: Any) -> None:
    """Each rank has the rows of all, and the loss had each of them once for each rank."""
    expected = contrasted()
    for losses, gathered in ranks(2).run(contrasted_on_ranks, timeout_s=200):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert gathered == [0.0, 1.0, 2.0, 0.0, 1.0]


def counted() -> dict[str, float]:
    """What is logged of 16 rows."""
    from autoparallel.integrations import AutoparallelStrategy

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(VARIABLES, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    images = TensorDataset(torch.sin(torch.arange(16.0 * 16)).view(16, 1, 4, 4))
    try:
        trainer = lightning.Trainer(accelerator="cpu", devices=int(size), strategy=AutoparallelStrategy(), logger=False,
                                    enable_progress_bar=False, enable_model_summary=False)
        trainer.validate(Counting(), DataLoader(images, batch_size=4), verbose=False)
        return {name: float(value) for name, value in trainer.callback_metrics.items()}
    finally:
        for name in VARIABLES:
            os.environ.pop(name, None)


def test_metrics_count_rows_once(ranks: Any) -> None:
    """Each rank has the batches of all, and metrics that add up ranks counted them once for each."""
    for found in ranks(2).run(counted, timeout_s=200):
        assert found == {"rows": 16.0, "total": 24.0, "counted": 16.0}
