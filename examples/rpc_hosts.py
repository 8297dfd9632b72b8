"""A pipeline of two hosts by torch.distributed.rpc, with data parallelism inside each by a DeviceMesh of its own.

Each host is a job of its own, with its own plan; ranks of the same number send one another their rows. On both hosts:

    HOSTS=host0:29400 HOST=0 autoparallel launch --ranks 2 -- python rpc_hosts.py
    HOSTS=host0:29400 HOST=1 autoparallel launch --ranks 2 -- python rpc_hosts.py
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.tensor import DTensor, Shard

import autoparallel

ROWS, WIDTH, STEPS = 8, 16, 4
STAGE: Stage


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).relu()


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(x) - y).square().mean()


class Stage:
    """The part of the model that this host has, with its rows cut over the host's mesh."""

    def __init__(self, model: nn.Module, mesh: torch.distributed.DeviceMesh, **inputs: Tensor) -> None:
        pins = {name: {"data": Shard(0)} for name in inputs}
        self.mesh = mesh
        self.parallel = autoparallel.compile(model, mesh, pins=pins, baseline="ddp", example_kwargs=inputs)
        self.optimizer = torch.optim.SGD(self.parallel.parameters(), lr=0.1)

    def rows(self, mine: Tensor) -> DTensor:
        return DTensor.from_local(mine, self.mesh, [Shard(0)])


def last_stage(x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """On the last host: forward and backward of this rank's rows, and a step. The gradient of ``x``, and the loss."""
    x = STAGE.rows(x).requires_grad_()
    loss = STAGE.parallel(x=x, y=STAGE.rows(y))
    loss.backward()
    STAGE.optimizer.step()
    STAGE.optimizer.zero_grad()
    return x.grad.to_local(), float(loss.detach())


def main() -> None:
    global STAGE
    host = int(os.environ["HOST"])
    world = autoparallel.init((2,), ("data",))
    torch.manual_seed(0)
    first, last = First(), Last()
    x, y = torch.randn(STEPS, ROWS, WIDTH), torch.randn(STEPS, ROWS, WIDTH)
    STAGE = Stage(first, world.mesh, x=x[0]) if host == 0 else Stage(last, world.mesh, x=torch.ones(ROWS, 2 * WIDTH),
                                                                     y=y[0])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # that store is of this host's ranks
    rpc.init_rpc(f"host{host}-rank{world.rank}", rank=host * world.size + world.rank, world_size=2 * world.size,
                 rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{os.environ['HOSTS']}"))
    mine = slice(world.rank * ROWS // world.size, (world.rank + 1) * ROWS // world.size)
    for step in range(STEPS if host == 0 else 0):
        sent = STAGE.parallel(x=STAGE.rows(x[step, mine]))
        gradient, loss = rpc.rpc_sync(f"host1-rank{world.rank}", last_stage,
                                      (sent.detach().to_local(), y[step, mine]))
        sent.backward(STAGE.rows(gradient))
        STAGE.optimizer.step()
        STAGE.optimizer.zero_grad()
        if world.rank == 0:
            print(f"step {step + 1} {loss:.7f}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()
