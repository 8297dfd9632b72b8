"""The whole state of a run on disk: weights, optimizer, random state, data loader and more, by torch's distributed
checkpoints (DCP). A folder holds one folder per checkpoint, ``step-<number>``, complete or not there.

    step-120/ .metadata, *.distcp (DCP: boxes of each tensor, for any mesh), about.json, plan.json
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from autoparallel.errors import InputError, shown
from autoparallel.plans import Plan
from autoparallel.runtime import initialise
from autoparallel.runtime.agree import decide_once, made_equally
from autoparallel.runtime.checkpoint import optimizers
from autoparallel.runtime.checkpoint.others import STRUCTURE, TENSORS, of_this_rank, packed, to_read, unpacked
from autoparallel.runtime.failing import made_with_all, reached
from autoparallel.runtime.state import State

_LOG = logging.getLogger("autoparallel")
_VERSION = 1
#: Of the folder within checkpoints of other libraries' loops (transformers' Trainer, accelerate).
IN_OTHERS = "autoparallel"
_NAME = re.compile(r"step-(\d+)")
#: Of a folder in which a checkpoint is being written: step, host, process (earlier versions: the step alone).
_PARTIAL = re.compile(r"\.step-(\d+)\.(?:(.*)-(\d+)\.)?partial")
#: Before the name of a checkpoint that is being removed.
_REMOVED = ".removed-"
#: Seconds after which a folder that another host has begun to write, and does not go on with, is of a broken save.
_QUIET_S = 3600.0
#: Checkpoints that this process has saved, or told of, by when; and when it began.
_SAVED: dict[Path, int] = {}
_BEGAN_NS = time.time_ns()


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its number, folder, and on how many ranks and which mesh it was saved."""

    step: int
    path: Path
    ranks: int
    mesh_shape: tuple[int, ...]
    parts: tuple[str, ...]
    torch_version: str

    @staticmethod
    def at(path: Path) -> Checkpoint:
        """Raises InputError for a folder that is none."""
        try:
            data = json.loads((path / "about.json").read_text())
            if data.pop("version") != _VERSION:
                raise ValueError("another version")
            return Checkpoint(**{**data, "path": path, "mesh_shape": tuple(data["mesh_shape"]),
                                 "parts": tuple(data["parts"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path} is no checkpoint of parallel.save, version {_VERSION}: {error}") from error

    def text(self) -> str:
        data = {**asdict(self), "version": _VERSION}
        del data["path"]
        return json.dumps(data, indent=2, sort_keys=True) + "\n"


def checkpoints(folder: str | os.PathLike[str]) -> list[Checkpoint]:
    """The complete checkpoints in a folder, oldest first."""
    found = [path for path in Path(folder).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted((Checkpoint.at(path) for path in found), key=lambda checkpoint: checkpoint.step)


class Saving:
    """A save that may still be writing; rank 0 makes it visible when all ranks have written."""

    def __init__(self, target: Path, written: Future[Any], publish: Callable[[], Checkpoint]) -> None:
        self._target, self._written, self._publish = target, written, publish
        self._published: Future[Checkpoint] = Future()
        self.is_told = False    # whether the script has asked for the result, and has got its error
        if dist.get_rank() == 0:
            written.add_done_callback(self._when_written)

    def _when_written(self, written: Future[Any]) -> None:
        """On rank 0, whose part of DCP's save ends after all others'."""
        try:
            written.result()
            self._published.set_result(self._publish())
        except BaseException as error:
            self._published.set_exception(error)

    def wait(self) -> Checkpoint:
        """The checkpoint, once it is visible; an error of any rank is raised on all. All ranks call this."""
        self.is_told = True
        made_equally("a checkpoint", self._result, lambda _: "")
        return decide_once(self._published.result)

    def _result(self) -> None:
        with _as_input_error(self._target):
            self._written.result()


class Job:
    """Saves and loads runs of one parallel module."""

    def __init__(self, parallel: nn.Module, state: State, plan: Plan) -> None:
        self._parallel, self._state, self._plan = parallel, state, plan
        self._saving: Saving | None = None
        self._group: dist.ProcessGroup | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Job:
        """The job of a copied module."""
        return Job(deepcopy(self._parallel, memo), deepcopy(self._state, memo), self._plan)

    def save(self, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None, others: Mapping[str, Any],
             step: int | None, keep: int | None, wait: bool) -> Saving:
        """As `ParallelModule.save` says."""
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise InputError(f"keep is {shown(keep)}: give the number of newest checkpoints to keep, 1 or more")
        number = self._state.calls if step is None else step
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise InputError(f"step is {shown(step)}: give a number, 0 or more")
        _check_others(others)
        self.finish()
        home = Path(folder).absolute()      # the script may change its directory while a thread writes
        made_equally("a checkpoint", lambda: None, lambda _: f"step {number} of {sorted(others)} in {home.name}")
        target, written = home / f"step-{number}", decide_once(lambda: _cleared(home, number))
        with self._state.together.call():
            contents = self._contents(optimizer, others)
        about = Checkpoint(number, target, dist.get_world_size(), tuple(self._state.position.whole.shape),
                           tuple(sorted(contents)), torch.__version__)
        done: Future[Any] = Future()
        if wait:
            with self._state.together.call(), _as_input_error(target):
                dcp.save(contents, checkpoint_id=written, process_group=self._own_group())
            done.set_result(None)
        else:
            done = cast(Future[Any], dcp.async_save(contents, checkpoint_id=written, process_group=self._own_group()))
        self._saving = Saving(target, done, lambda: _published(written, about, self._plan, keep))
        saving = self._saving
        if wait:
            self.finish()
        return saving

    def finish(self) -> None:
        """Wait for a save that is still writing. All ranks call this."""
        saving, self._saving = self._saving, None
        if saving is not None and not saving.is_told:
            saving.wait()

    def load(self, path: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None, others: Mapping[str, Any],
             step: int | None) -> Checkpoint | None:
        """As `ParallelModule.load` says."""
        _check_others(others)
        self.finish()
        found = decide_once(lambda: newest(_no_file(Path(path)), step))
        if found is None:
            return None
        things = {**({"optimizer": optimizer} if optimizer is not None else {}), **others}
        if lacking := sorted({"model", "run", *things} - set(found.parts)):
            raise InputError(f"{found.path} has no {', '.join(lacking)}; it has {', '.join(found.parts)}: load what "
                             "was saved, under the same names")
        if any(p.is_meta for p in self._parallel.parameters()):
            _materialise(self._parallel, self._state)
        with self._state.together.call():
            contents, structures = self._asked(found, things)
        self._read(contents, found)
        for name, value in contents["model"].items():
            if _is_extra(name) and isinstance(value, bytes):
                contents["model"][name] = pickle.loads(value)
        if contents["model"]:
            set_model_state_dict(self._parallel, contents["model"])
        else:
            self._parallel.load_state_dict({})  # as the other ranks do
        self._parallel.load_run_state(contents["run"])  # type: ignore[operator]
        for name, thing in things.items():
            if name in structures:
                thing.load_state_dict(unpacked(structures[name], contents[name][TENSORS]))
            elif not isinstance(thing, torch.optim.Optimizer):
                thing.load_state_dict(contents[name])
            elif not self._is_empty(thing):
                optimizers.take(self._parallel, thing, contents[name], self._state.nothing)
        return found

    def _asked(self, found: Checkpoint, things: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is to be read of a checkpoint into what is there, and the structures of things' states by name. Raises
        InputError on all ranks for weights that no rank has a place for."""
        saved = dcp.FileSystemReader(found.path).read_metadata().state_dict_metadata
        asked: dict[str, Any] = {"model": self._weights(), "run": self._parallel.run_state()}  # type: ignore[operator]
        plain = {name: thing for name, thing in things.items() if not isinstance(thing, torch.optim.Optimizer)}
        structures: dict[str, Any] = {name: {STRUCTURE: b""} for name in plain if f"{name}.{STRUCTURE}" in saved}
        if structures:
            self._read(structures, found)
        for name, thing in plain.items():
            state = thing.state_dict()
            if name in structures:
                structures[name] = of_this_rank(state, pickle.loads(structures[name][STRUCTURE]))
                state = {TENSORS: to_read(state, structures[name], _under(saved, f"{name}.{TENSORS}."))}
            asked[name] = state
        for name in (name for name in things if name not in plain):
            theirs = _under(saved, f"{name}.")
            asked[name] = {} if self._is_empty(things[name]) else optimizers.wanted(
                self._parallel, things[name], theirs, self._state.nothing)
            optimizers.tell_of_rest(name, _left(asked[name], theirs))
        if left := sorted(filter(lambda name: not _is_extra(name), _left(asked["model"], _under(saved, "model.")))):
            raise InputError(f"{found.path} has weights that this model does not have, {', '.join(left[:5])} "
                             f"({len(left)}): load it into the model that was saved")
        return asked, structures

    def _read(self, contents: dict[str, Any], found: Checkpoint) -> None:
        with self._state.together.call():
            try:
                dcp.load(contents, checkpoint_id=found.path, process_group=self._own_group())
            except CheckpointException as error:  # on all ranks, where one failed
                raise InputError(f"{found.path} cannot be read into this model and optimizer: {reason(error)}"
                                 ) from error

    def _weights(self) -> dict[str, Any]:
        """The state dict, with modules' extra state in bytes: DCP would ask for the entries that it has now."""
        found = get_model_state_dict(self._parallel) if self._parallel.state_dict() else {}  # (torch refuses none)
        return {name: pickle.dumps(value) if _is_extra(name) and not isinstance(value, DTensor) else value
                for name, value in found.items()}

    def _contents(self, optimizer: torch.optim.Optimizer | None, others: Mapping[str, Any]) -> dict[str, Any]:
        contents = {"model": self._weights(), "run": self._parallel.run_state()}  # type: ignore[operator]
        for name, thing in {**({"optimizer": optimizer} if optimizer is not None else {}), **others}.items():
            if isinstance(thing, torch.optim.Optimizer):
                contents[name] = optimizers.states_by_name(self._parallel, thing, self._state.nothing)
            else:
                contents[name] = packed(name, thing.state_dict())
        return contents

    def _is_empty(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer is that of a pipeline stage without parameters."""
        return all(p is self._state.nothing for group in optimizer.param_groups for p in group["params"])

    def _own_group(self) -> dist.ProcessGroup:
        """A group for checkpoints alone: a save that goes on beside training must not mix with its collectives."""
        if self._group is None:
            self._group = made_with_all(lambda: dist.new_group(backend="gloo"))
            assert self._group is not None
            self._state.together.own(self._group)
        return self._group


@contextmanager
def _as_input_error(target: Path) -> Iterator[None]:
    """Raise an InputError in place of DCP's error, which is no Exception, and is raised on all ranks where one failed.
    """
    try:
        yield
    except CheckpointException as error:
        raise InputError(f"the checkpoint {target} could not be written: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """An error of torch's distributed checkpoint in a line: the first rank's."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (failure, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {type(failure).__name__}: {failure}"
    return f"{type(error).__name__}: {error}"


def _under(entries: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)}


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def _left(asked: Iterable[str], saved: Iterable[str]) -> set[str]:
    """Keys of a checkpoint that no rank asks for. All ranks call this."""
    left = set(saved) - set(asked)
    found: list[Any] = [None] * dist.get_world_size()
    with reached():
        dist.all_gather_object(found, left)
    return left.intersection(*found)


def _check_others(others: Mapping[str, Any]) -> None:
    for name, thing in others.items():
        if name in ("model", "optimizer", "run") or not (hasattr(thing, "state_dict")
                                                         and hasattr(thing, "load_state_dict")):
            raise InputError(f"{name}={shown(thing)}: give objects with state_dict() and load_state_dict(...), such as "
                             "a scheduler or a loader, under names other than model, optimizer and run")


def _no_file(folder: Path) -> Path:
    if folder.is_file():
        raise InputError(f"{folder} is a file: give the folder of parallel.save, which makes it if it is not there")
    return folder


def _cleared(home: Path, number: int) -> Path:
    """An empty folder to write a checkpoint into, named by this process: two jobs that save to one folder must not mix
    their files. Removes what broken saves have left, and nothing that a process which runs may still write."""
    _no_file(home)
    host, own = socket.gethostname(), f"{socket.gethostname()}-{os.getpid()}"
    for left in home.glob(".step-*partial"):
        if (found := _PARTIAL.fullmatch(left.name)) is None:
            continue
        step, its_host, process = found.groups()
        if its_host == host and int(process) != os.getpid():
            is_broken = not _runs(int(process))
        elif its_host in (None, host):
            is_broken = int(step) == number
        else:
            is_broken = time.time() - max(path.stat().st_mtime for path in (left, *left.iterdir())) > _QUIET_S
        if is_broken:
            shutil.rmtree(left)
    made = home / f".step-{number}.{own}.partial"
    made.mkdir(parents=True)
    return made


def _runs(process: int) -> bool:
    with suppress(PermissionError):  # of another user: it runs
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
    return True


def _warn_of_others(home: Path, found: Iterable[Checkpoint]) -> None:
    """Warn, once of each, of checkpoints that another process has saved here since this one has begun to."""
    times = {one.path: (one.path / "about.json").stat().st_mtime_ns for one in found}
    if others := [path for path, when in times.items() if when > _BEGAN_NS and _SAVED.get(path) != when]:
        _SAVED.update(times)
        _LOG.warning("another job saves to %s, too: it has written %s while this one ran. Each removes and replaces "
                     "the other's checkpoints: give each job a folder of its own", home,
                     ", ".join(path.name for path in others))


def _published(written: Path, about: Checkpoint, plan: Plan, keep: int | None) -> Checkpoint:
    """Make a written checkpoint visible under its name, in one step; then remove the oldest beyond ``keep``, but not
    this one. Warns of later ones: a run that goes on from an earlier step leaves them, and `newest` finds them."""
    plan.save(written / "plan.json")
    (written / "about.json").write_text(about.text())
    for left in about.path.parent.glob(f"{_REMOVED}*"):
        shutil.rmtree(left)
    _warn_of_others(about.path.parent, checkpoints(about.path.parent))
    if about.path.exists():
        _remove(about.path)
    written.replace(about.path)
    _SAVED[about.path] = (about.path / "about.json").stat().st_mtime_ns
    found = [one for one in checkpoints(about.path.parent) if one.step != about.step]
    for old in found[: len(found) + 1 - keep if keep else 0]:
        _remove(old.path)
    if later := [one.step for one in found if one.step > about.step]:
        _LOG.warning("%s has checkpoints of later steps, %s, than the one just saved, %d: parallel.load takes the "
                     "newest unless it is given step=. Remove those of a run that you have given up", about.path.parent,
                     later, about.step)
    return about


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, whose name goes first: a process that is killed meanwhile leaves no broken one."""
    hidden = checkpoint.with_name(f"{_REMOVED}{checkpoint.name}")
    checkpoint.replace(hidden)
    shutil.rmtree(hidden)


def newest(path: Path, step: int | None) -> Checkpoint | None:
    """The checkpoint of this step, the newest, or the one that the folder is; also within a checkpoint of transformers'
    Trainer or accelerate. None if there is none."""
    if (path / "about.json").exists():
        return Checkpoint.at(path)
    inside = next((one for one in (path / IN_OTHERS / "model-0", path / IN_OTHERS) if one.is_dir()), path)
    found = checkpoints(inside)
    if step is None:
        return found[-1] if found else None
    for checkpoint in found:
        if checkpoint.step == step:
            return checkpoint
    raise InputError(f"{path} has no checkpoint of step {step}; it has {[checkpoint.step for checkpoint in found]}")


def _materialise(parallel: nn.Module, state: State) -> None:
    """Memory for the shards of a model on the meta device; their values are read next."""
    for name, value in (*parallel.named_parameters(), *parallel.named_buffers()):
        if value.is_meta:
            initialise.set_value(parallel, name, _empty_like(value, state.device), state.device)
    for name, made in initialise.lost_buffers(state.model, state.device).items():
        initialise.set_value(parallel, name, made, state.device)


def _empty_like(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros_like(value, device=device)


__all__ = ["IN_OTHERS", "Checkpoint", "Job", "Saving", "checkpoints", "newest", "reason"]
