"""Lightning and Fabric on four ranks compute what they compute in one process; only the strategy is another."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from autoparallel.errors import InputError
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

lightning = pytest.importorskip("lightning")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")
TrainerFn = pytest.importorskip("lightning.pytorch.trainer.states").TrainerFn

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
             "TORCHELASTIC_RUN_ID")


def as_torchrun() -> int:
    """The variables of a rank that torchrun started; the process group is there. Returns the number of ranks."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(dict(zip(VARIABLES, (rank, rank, size, size, "0", "127.0.0.1", "29512", "x"), strict=True)))
    return int(size)


def data() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(44, 16), torch.arange(44) % 4)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def loop(folder: Path, parallel: dict[str, Any], shape: tuple[int, ...], precision: str, resumed: bool = False
         ) -> list[float]:
    """Fabric's loop: two epochs, saved after the first."""
    strategy: Any = "auto"
    ranks = 1
    if dist.is_initialized():
        from autoparallel.integrations import AutoparallelFabricStrategy

        ranks = as_torchrun()
        strategy = AutoparallelFabricStrategy(parallel={"mesh": mesh_of(*shape), **parallel})
    try:
        fabric = lightning.Fabric(accelerator="cpu", devices=ranks, strategy=strategy, precision=precision)
        fabric.launch()
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(DataLoader(data(), batch_size=8 // ranks))
        shuffled = fabric.setup_dataloaders(DataLoader(data(), batch_size=8 // ranks, shuffle=True, drop_last=True))
        model(next(iter(shuffled))[0])  # the same on all ranks, which they compare
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        if resumed:
            fabric.load(folder / "state.ckpt", state)
        losses = []
        for epoch in range(state["epoch"], 2):
            for inputs, labels in loader:
                loss = nn.functional.cross_entropy(model(inputs), labels)
                fabric.backward(loss)
                norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses += [float(loss.detach()), float(norm)]
            if epoch == 0:
                state["epoch"] = 1
                fabric.save(folder / "state.ckpt", state)
        return losses
    finally:
        for name in VARIABLES:
            os.environ.pop(name, None)


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-4), slow("bf16-mixed", 3e-2)])
def test_a_loop_of_fabric(ranks: Any, tmp_path: Path, precision: str, tolerance: float) -> None:
    for folder in ("one", "four"):
        (tmp_path / folder).mkdir()
    expected = loop(tmp_path / "one", {}, (1,), precision)
    assert len(expected) == 24
    for shape, parallel in (((4,), {"baseline": "fsdp"}), ((2, 2), {"baseline": "tensor_parallel"})):
        for actual in ranks(4).run(loop, tmp_path / "four", parallel, shape, precision, timeout_s=100):
            assert actual == pytest.approx(expected, rel=tolerance)
        for actual in ranks(2).run(loop, tmp_path / "four", parallel, (2,), precision, True, timeout_s=100):
            assert actual == pytest.approx(expected[12:], rel=tolerance)
    assert loop(tmp_path / "four", {}, (1,), precision, True) == pytest.approx(expected[12:], rel=tolerance)


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


class Stepped(lightning.LightningModule):
    """A LightningModule in Fabric's loop, which calls its training_step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)

    def training_step(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def held(shape: tuple[int, ...] = ()) -> dict[str, Any]:
    """What the module that ``fabric.setup`` returns has and does, before the first call, after steps, and after other
    weights are loaded."""
    strategy: Any = "auto"
    ranks = 1
    if shape:
        from autoparallel.integrations import AutoparallelFabricStrategy

        ranks = as_torchrun()
        strategy = AutoparallelFabricStrategy(parallel={"mesh": mesh_of(*shape), "baseline": "tensor_parallel"})
    try:
        fabric = lightning.Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
        fabric.launch()
        model = fabric.setup_module(Stepped())
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        first = {name: whole(value).clone() for name, value in model.state_dict().items()}
        found: dict[str, Any] = {}
        for step, batch in enumerate(fabric.setup_dataloaders(DataLoader(data(), batch_size=8 // ranks))):
            loss = model.training_step(batch) + 1e-3 * sum(whole(p.square().sum()) for p in model.parameters())
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            found[f"loss {step}"] = loss.detach()
        found.update({f"gradient {name}": whole(p.grad) for name, p in model.model.named_parameters()},
                     count=torch.tensor(sum(p.numel() for p in model.parameters())))
        found.update({name: whole(value).clone() for name, value in model.state_dict().items()})
        model.load_state_dict(first)
        return {**found, "output": model(data()[:8][0]).detach()}
    finally:
        for name in VARIABLES:
            os.environ.pop(name, None)


def test_what_fabric_returns_is_the_parallel_module(ranks: Any) -> None:
    """Its state dict, parameters and methods were those of the original, which nothing trains."""
    expected = held()
    assert len(expected) == 16
    for actual in ranks(2).run(held, (2,), timeout_s=100):
        assert actual.keys() == expected.keys()
        for name, value in actual.items():
            assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-6), name


class Adversaries(lightning.LightningModule):
    """Lightning's basic GAN: two models, two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        self.automatic_optimization = False
        self.losses: list[float] = []

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2, eps=1e-4)
                for part in (self.generator, self.discriminator)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        noise = torch.sin(torch.arange(len(real) * 8).view(-1, 8) + batch_idx).to(real)
        judge = nn.functional.binary_cross_entropy_with_logits
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        for optimizer, loss_of in zip(self.optimizers(), (
                lambda: judge(self.discriminator(self.generator(noise)), ones),
                lambda: (judge(self.discriminator(real), ones)
                         + judge(self.discriminator(self.generator(noise).detach()), zeros)) / 2), strict=True):
            loss = loss_of()
            self.manual_backward(loss)
            optimizer.step()
            self.zero_grad()
            self.losses.append(float(loss.detach()))


class Classifier(lightning.LightningModule):
    """Lightning's own loop, with clipping, accumulation and validation."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch[0])
        self.log("accuracy", (logits.argmax(-1) == batch[1]).float().mean(), sync_dist=True)
        self.losses.append(float(nn.functional.cross_entropy(logits, batch[1])))


def fit(kind: str, folder: Path, parallel: dict[str, Any], shape: tuple[int, ...], resume: bool = False
        ) -> list[float]:
    strategy: Any = "auto"
    ranks = 1
    if dist.is_initialized():
        from autoparallel.integrations import AutoparallelStrategy

        ranks = as_torchrun()
        strategy = AutoparallelStrategy(parallel={"mesh": mesh_of(*shape), **parallel})
    try:
        options = {} if kind == "gan" else {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
        trainer = lightning.Trainer(accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=2, logger=False,
                                    enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
                                    num_sanity_val_steps=0, enable_checkpointing=False, **options)
        module: Any = Adversaries() if kind == "gan" else Classifier()
        loader = DataLoader(data(), batch_size=8 // ranks)
        if not resume:
            trainer.fit_loop.max_epochs = 1
            trainer.fit(module, loader, None if kind == "gan" else loader)
            trainer.save_checkpoint(folder / f"{kind}.ckpt")
            return module.losses
        trainer.fit(module, loader, None if kind == "gan" else loader, ckpt_path=folder / f"{kind}.ckpt")
        return module.losses
    finally:
        for name in VARIABLES:
            os.environ.pop(name, None)


class Predictor(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0])


class Writer(callbacks.BasePredictionWriter):
    """Notes which samples predictions are of."""

    def __init__(self) -> None:
        super().__init__("batch")
        self.indices: list[list[int]] = []

    def write_on_batch_end(self, *args: Any) -> None:
        self.indices.append(list(args[3]))


def predictions() -> tuple[list[list[int]], list[Any]]:
    """Of each batch: the samples' numbers, and what is predicted of them."""
    strategy: Any = "auto"
    ranks = 1
    if dist.is_initialized():
        from autoparallel.integrations import AutoparallelStrategy

        ranks = as_torchrun()
        strategy = AutoparallelStrategy(parallel={"baseline": "ddp"})
    try:
        writer = Writer()
        trainer = lightning.Trainer(accelerator="cpu", devices=ranks, strategy=strategy, logger=False,
                                    enable_progress_bar=False, callbacks=[writer])
        found = trainer.predict(Predictor(), DataLoader(data(), batch_size=8 // ranks))
        return writer.indices, [value.tolist() for value in found or ()]
    finally:
        for name in VARIABLES:
            os.environ.pop(name, None)


def test_predictions_are_of_all_samples(ranks: Any) -> None:
    """Every batch was the first one: Lightning's sampler for predictions begins again at each `iter`."""
    indices, expected = predictions()
    assert indices[-1] == [40, 41, 42, 43]
    for noted, found in ranks(2).run(predictions, timeout_s=100):
        assert noted == indices
        assert [len(part) for part in found] == [8, 8, 8, 8, 8, 4]
        for part, other in zip(found, expected, strict=True):
            assert torch.tensor(part).allclose(torch.tensor(other), atol=1e-5)


@pytest.mark.parametrize("callback", [callbacks.StochasticWeightAveraging(1e-2), callbacks.EMAWeightAveraging()])
def test_lightnings_averages_are_refused(callback: Any) -> None:
    """They copy the module before it is compiled, and failed in the words of a copy of a shard."""
    from autoparallel.integrations import AutoparallelStrategy

    trainer = SimpleNamespace(callbacks=[callback], state=SimpleNamespace(fn=TrainerFn.FITTING))
    strategy = AutoparallelStrategy(accelerator=SimpleNamespace())
    strategy._lightning_module = strategy.model = nn.Linear(1, 1)
    with pytest.raises(InputError, match=f"{type(callback).__name__} averages a copy"):
        strategy.setup(trainer)


@pytest.mark.parametrize("kind", [slow("gan"), "classifier"])
def test_lightnings_trainer(ranks: Any, tmp_path: Path, kind: str) -> None:
    """One epoch, saved; the next by other ranks from that file, and by one process from it."""
    for folder in ("one", "four"):
        (tmp_path / folder).mkdir()
    expected = fit(kind, tmp_path / "one", {}, (1,))
    later = fit(kind, tmp_path / "one", {}, (1,), True)
    assert len(expected) == len(later) == 12
    for shape, parallel in (((4,), {"baseline": "fsdp"}), ((2, 2), {"baseline": "tensor_parallel"})):
        for actual in ranks(4).run(fit, kind, tmp_path / "four", parallel, shape, timeout_s=150):
            assert actual == pytest.approx(expected, rel=1e-4)
        for actual in ranks(2).run(fit, kind, tmp_path / "four", parallel, (2,), True, timeout_s=150):
            assert actual == pytest.approx(later, rel=1e-4)
    assert fit(kind, tmp_path / "four", {}, (1,), True) == pytest.approx(later, rel=1e-4)
