"""Jobs of parameter servers: a scheduler, servers and workers as processes of their own, which a test may kill.

    with ServedJob(servers=2, workers=2, staleness=0) as job:
        losses = job.train(train)              # train(servers, *args) in each worker; a result by worker

Processes are forked from the fork server of `tests.support.ranks`. All are ended when the block ends.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

import autoparallel
from autoparallel.launch.local import free_port

LIMIT_S = 90.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.support.preloaded"])


class ServedJob:
    """``settings``: of `autoparallel.serve_parameters`, given to every process."""

    def __init__(self, servers: int, workers: int, **settings: Any) -> None:
        self.servers, self.workers, self.settings = servers, workers, {"timeout_s": 30.0, **settings}
        self.processes: dict[tuple[str, int], BaseProcess] = {}

    def __enter__(self) -> ServedJob:
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        self._port = free_port()
        self.start("scheduler", 0)
        for server in range(self.servers):
            self.start("server", server)
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join(10)
        self._folder.cleanup()

    def start(self, role: str, index: int, function: Callable[..., Any] | None = None, *args: Any) -> BaseProcess:
        (self.folder / f"{role}-{index}.error").unlink(missing_ok=True)
        environment = {"AUTOPARALLEL_ROLE": role, "AUTOPARALLEL_INDEX": str(index), "MASTER_ADDR": "127.0.0.1",
                       "AUTOPARALLEL_SERVERS": str(self.servers), "AUTOPARALLEL_WORKERS": str(self.workers),
                       "MASTER_PORT": str(self._port)}
        process = _CONTEXT.Process(target=_main, args=(str(self.folder), environment, self.settings, function, args),
                                   daemon=True)
        process.start()
        self.processes[role, index] = process
        return process

    def train(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(servers, *args)`` in every worker to its end; and the servers and the scheduler to theirs."""
        for worker in range(self.workers):
            self.start("worker", worker, function, *args)
        made = [self.result(worker) for worker in range(self.workers)]
        self.ended()
        return made

    def kill(self, role: str, index: int) -> None:
        process = self.processes[role, index]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)

    def result(self, worker: int, limit_s: float = LIMIT_S) -> Any:
        """Of a worker's function. Raises AssertionError with its traceback if it raised."""
        self._joined("worker", worker, limit_s)
        assert not (error := self.error("worker", worker)), error
        return pickle.loads((self.folder / f"worker-{worker}.result").read_bytes())

    def error(self, role: str, index: int, limit_s: float = LIMIT_S) -> str:
        """The traceback with which a process ended; empty: none."""
        self._joined(role, index, limit_s)
        path = self.folder / f"{role}-{index}.error"
        return path.read_text() if path.exists() else ""

    def ended(self) -> None:
        """Servers and scheduler end by themselves, without an error."""
        for role, index in [*(("server", one) for one in range(self.servers)), ("scheduler", 0)]:
            assert not (error := self.error(role, index)), error
            assert self.processes[role, index].exitcode == 0

    def wait_for(self, name: str, limit_s: float = LIMIT_S) -> Path:
        """A file that a worker makes in the job's folder, to say how far it is."""
        until, path = time.monotonic() + limit_s, self.folder / name
        while not path.exists():
            assert time.monotonic() < until, f"no {name} in {limit_s} s; {self.errors()}"
            time.sleep(0.02)
        return path

    def errors(self) -> dict[str, str]:
        return {path.stem: path.read_text()[-2000:] for path in self.folder.glob("*.error")}

    def _joined(self, role: str, index: int, limit_s: float) -> None:
        process = self.processes[role, index]
        process.join(limit_s)
        assert not process.is_alive(), f"{role} {index} has not ended in {limit_s} s; {self.errors()}"


def _main(folder: str, environment: dict[str, str], settings: dict[str, Any], function: Callable[..., Any] | None,
          args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment)
    os.chdir(folder)
    name = f"{environment['AUTOPARALLEL_ROLE']}-{environment['AUTOPARALLEL_INDEX']}"
    try:
        with autoparallel.serve_parameters(**settings) as servers:
            assert function is not None
            made = function(servers, *args)
        Path(f"{name}.result").write_bytes(pickle.dumps(made))
    except Exception:
        Path(f"{name}.error").write_text(traceback.format_exc())
        raise SystemExit(1) from None
