"""Calls between processes over torch.distributed.rpc (TensorPipe). The one file that touches it.

torch's groups of agents cannot lose a member: one joins by a call to all others, and the ranks of a static group are
fixed. Here each process has an agent in a group of its own (a private store), which is told of a peer before the first
call to it (`TensorPipeAgent._update_group_membership`). A process that is started again is another peer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any

import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch._C._distributed_rpc import TensorPipeAgent, WorkerInfo, _is_current_rpc_agent_set
from torch.distributed import rpc
from torch.distributed.rpc import api
from torch.futures import Future

from autoparallel.errors import LaunchError

#: Answers a call (method, arguments) with a future, which any thread may complete.
Service = Callable[[str, tuple[Any, ...]], Future]
MOST_PEERS = 2**15 - 1  # worker ids have 16 bits
_service: Service | None = None


@dataclass(frozen=True)
class Address:
    """A process: unique name and number, and where its agent listens."""

    name: str
    number: int
    url: str

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> Address:
        return Address(**json.loads(text))


@rpc.functions.async_execution
def _answer(method: str, args: tuple[Any, ...]) -> Future:
    if _service is None:
        raise RuntimeError("this process serves nothing")
    return _service(method, args)


class Transport:
    """This process's agent. ``number``: unique among all processes of the job, those that have ended included.

    Raises LaunchError if the process has an agent already (`torch.distributed.rpc.init_rpc`), or too many have been.
    """

    def __init__(self, role: str, number: int, service: Service | None = None, threads: int = 16) -> None:
        global _service
        if _is_current_rpc_agent_set():
            raise LaunchError("torch.distributed.rpc is in use in this process: parameter servers need an agent of "
                              "their own; call rpc.shutdown() first, or leave out rpc.init_rpc()")
        if number > MOST_PEERS:
            raise LaunchError(f"{number} processes have joined this job, and rpc counts up to {MOST_PEERS}: start "
                              "a new job from its checkpoint")
        _service, self._store, self._known, self._lock = service, dist.HashStore(), set[str](), Lock()
        name = f"{role}-{number}"
        dist_autograd._init(number)
        self._agent = TensorPipeAgent(self._store, name, number, None, rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=threads), {}, [])
        api._init_rpc_states(self._agent)
        self.address = Address(name, number, self._store.get(f"addrs/{name}").decode())

    def call(self, to: Address, method: str, *args: Any, timeout_s: float) -> Future:
        """A future of what the peer's service answers. It fails with RuntimeError if the peer has ended, or has not
        answered in time."""
        peer = WorkerInfo(to.name, to.number)
        with self._lock:
            if to.name not in self._known:
                self._store.set(f"addrs/{to.name}", to.url)
                self._agent._update_group_membership(peer, [], {}, True)
                self._known.add(to.name)
        return rpc.rpc_async(peer, _answer, (method, args), timeout=timeout_s)

    def close(self) -> None:
        """End the agent. Calls under way fail."""
        global _service
        rpc.shutdown(graceful=False)
        _service = None


class Alone:
    """In place of a transport, where server and worker are one process: calls are answered here."""

    address = Address("alone", 0, "")

    def __init__(self, service: Service, end: Callable[[], None]) -> None:
        self._service, self.close = service, end

    def call(self, to: Address, method: str, *args: Any, timeout_s: float) -> Future:
        return self._service(method, args)


__all__ = ["Address", "Alone", "Service", "Transport"]
