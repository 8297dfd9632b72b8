"""Parts of parameter servers without processes: clocks, tables, the log of events and its replay, roles, options."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autoparallel
from autoparallel.errors import InputError, LaunchError, ServerError
from autoparallel.launch.roles import role_of
from autoparallel.servers.clocks import Clocks
from autoparallel.servers.journal import Journal
from autoparallel.servers.settings import Settings
from autoparallel.servers.state import State
from autoparallel.servers.tables import Shard, initial_rows, made_table

TABLE = made_table("t", 5, 2, torch.optim.Adagrad, {"lr": 0.5}, sparse=True)


def test_a_worker_waits_for_those_further_behind_than_the_staleness() -> None:
    clocks = Clocks(2, 2, {0: 5, 1: 3}, {0, 1})
    assert clocks.admits(5) and not clocks.admits(6)
    assert clocks.missing(6) == [1] and clocks.missing(5) == []
    assert not Clocks(2, 3, {0: 0}, {0}).admits(0)  # not all have joined


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_initial_rows_do_not_depend_on_the_number_of_servers(servers: int) -> None:
    table = made_table("t", 2500, 3, torch.optim.SGD, {"lr": 1.0}, sparse=True, std=0.1, seed=4)
    whole = initial_rows("t", 0, 2500, 3, std=0.1, seed=4)
    for server in range(servers):
        shard = Shard.initial(table, None, server, servers)
        assert len(shard.values) == len(range(server, 2500, servers))
        assert torch.equal(shard.values.detach(), whole[server::servers])
    assert torch.equal(initial_rows("t", 1020, 1030, 3, std=0.1, seed=4), whole[1020:1030])
    assert not torch.equal(initial_rows("u", 0, 9, 3), initial_rows("t", 0, 9, 3))
    assert float(whole.std()) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(("arguments", "said"), [
    ((0, 2, torch.optim.SGD, {"lr": 1.0}), "rows of table 't' is 0: an int of 1 or more"),
    ((5, 2.0, torch.optim.SGD, {"lr": 1.0}), "width of table 't' is 2.0"),
    ((5, 2, torch.optim.Adam, {"lr": 1.0}), "one of torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam is"),
    ((5, 2, torch.optim.SGD, {"lr": 1.0, "momentum": 0.9}), "momentum=0.9 of table 't'"),
    ((5, 2, torch.optim.SGD, {"lr": 1.0, "weight_decay": 0.1}), "with sparse gradients: "),
    ((5, 2, torch.optim.Adagrad, {"rate": 1.0}), "unexpected keyword argument 'rate'"),
])
def test_tables_that_cannot_be_are_refused(arguments: Any, said: str) -> None:
    with pytest.raises(InputError) as error:
        made_table("t", *arguments, sparse=True)
    assert said in str(error.value)


Events = list[tuple[str, list[Any]]]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, Events]:
    """Events of a job that a server could have seen: workers join, push in turns that the staleness allows, leave."""
    staleness = draw(st.integers(0, 2))
    clocks, events = Clocks(staleness, 1), [("declare", [TABLE.plain(), None])]
    for number in range(draw(st.integers(1, 12))):
        able = [worker for worker, step in clocks.pushed.items() if clocks.admits(step)]
        what = draw(st.sampled_from(["join", "push", "push", "push", "remove"]))
        if what == "join" or not able:
            worker = len(clocks.joined)
            clocks.pushed[worker] = clocks.lowest
            clocks.joined.add(worker)
            events.append(("join", [worker, 7 + worker]))
        elif what == "push":
            worker = draw(st.sampled_from(able))
            rows = torch.tensor(draw(st.lists(st.integers(0, 4), max_size=3)), dtype=torch.int64)
            values = torch.full((len(rows), 2), float(number))
            update = (rows, values, draw(st.sampled_from([None, 0.1])))
            events.append(("push", [worker, clocks.pushed[worker], {"t": update}]))
            clocks.pushed[worker] += 1
        else:
            worker = draw(st.sampled_from(able))
            del clocks.pushed[worker]
            events.append(("remove", [worker]))
    return staleness, events


@given(jobs(), st.integers(0, 12))
def test_a_state_and_the_events_after_it_make_the_same_state_again(job: tuple[int, Events], cut: int) -> None:
    staleness, events = job
    through, again = State(0, 1, staleness, 1), State(0, 1, staleness, 1)
    for number, (name, arguments) in enumerate(events):
        if number == min(cut, len(events)):
            again.load(copy.deepcopy(through.dump()))
        through.events[name](*arguments)
        if number >= cut:
            again.events[name](*arguments)
    if cut >= len(events):
        again.load(copy.deepcopy(through.dump()))
    assert same(through.dump(), again.dump())


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


def journal_of(folder: Path) -> Journal:
    journal = Journal(folder, "log")
    journal.begin({"what": 0})
    for number in range(3):
        journal.append("push", [number, torch.arange(number)])
    journal.close()
    return journal


def read(folder: Path) -> list[int]:
    journal = Journal(folder, "log")
    try:
        return [arguments[0] for _, arguments in journal.events(journal.generations()[0])]
    finally:
        journal.close()


def test_what_a_crash_cut_off_was_not_acknowledged(tmp_path: Path) -> None:
    journal_of(tmp_path)
    log = tmp_path / "log-00000001.bin"
    whole = log.read_bytes()
    assert read(tmp_path) == [0, 1, 2]
    for cut in (whole[:-1], whole[:-40], whole + b"\0" * 12, whole + b"\0" * 500):
        log.write_bytes(cut)
        kept = read(tmp_path)
        assert kept == ([0, 1] if len(cut) < len(whole) else [0, 1, 2])
        journal = Journal(tmp_path, "log")
        journal.resume(1)
        journal.append("push", [9])
        journal.close()
        assert read(tmp_path) == [*kept, 9]


def test_a_damaged_log_is_not_read_in_part(tmp_path: Path) -> None:
    journal_of(tmp_path)
    log = tmp_path / "log-00000001.bin"
    whole = log.read_bytes()
    for at in (3, 9, 30, len(whole) // 2):  # a length, a checksum, data
        log.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
        with pytest.raises(ServerError, match="is damaged before byte"):
            read(tmp_path)


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    first = Journal(tmp_path, "log")
    with pytest.raises(ServerError, match="another server writes to"):
        Journal(tmp_path, "log")
    first.close()
    Journal(tmp_path, "log").close()
    (tmp_path / "file").touch()
    with pytest.raises(ServerError, match="cannot write to"):
        Journal(tmp_path / "file", "log")


def test_two_generations_are_kept_and_a_torn_state_is_none(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "log")
    for number in range(4):
        journal.begin({"what": number})
        journal.append("push", [number])
    assert journal.generations() == [4, 3] and journal.state(3) == {"what": 2}
    assert [arguments for _, arguments in journal.events(3)] == [[2], [3]]
    journal.close()
    (tmp_path / "state-00000005.tmp").write_bytes(b"half")
    journal = Journal(tmp_path, "log")
    assert journal.generations() == [4, 3] and not list(tmp_path.glob("*.tmp"))
    journal.close()


BASE = {"AUTOPARALLEL_SERVERS": "2", "AUTOPARALLEL_WORKERS": "3", "MASTER_ADDR": "h", "MASTER_PORT": "5"}


def test_roles_by_environment_and_by_rank() -> None:
    role = role_of({**BASE, "AUTOPARALLEL_ROLE": "server", "AUTOPARALLEL_INDEX": "1"})
    assert (role.kind, role.index, role.servers, role.workers, role.host, role.port) == ("server", 1, 2, 3, "h", 5)
    assert role_of({**BASE, "AUTOPARALLEL_ROLE": "worker"}).index is None
    torchrun = {"RANK": "3", "WORLD_SIZE": "5", "MASTER_ADDR": "h", "MASTER_PORT": "5"}
    role = role_of(torchrun, 2)
    assert (role.kind, role.index, role.workers, role.rank) == ("worker", 1, 3, 3)
    assert role_of({**torchrun, "RANK": "1", "AUTOPARALLEL_SERVERS": "2"}).kind == "server"
    assert role_of({}).kind == "alone"


@pytest.mark.parametrize(("environment", "said"), [
    ({**BASE, "AUTOPARALLEL_ROLE": "master"}, "one of scheduler, server, worker is required"),
    ({**BASE, "AUTOPARALLEL_ROLE": "server"}, "needs AUTOPARALLEL_INDEX too"),
    ({**BASE, "AUTOPARALLEL_ROLE": "server", "AUTOPARALLEL_INDEX": "2"}, "and there are 2 servers"),
    ({"AUTOPARALLEL_ROLE": "worker"}, "needs AUTOPARALLEL_SERVERS, AUTOPARALLEL_WORKERS, MASTER_ADDR, MASTER_PORT"),
    ({**BASE, "AUTOPARALLEL_ROLE": "worker", "MASTER_PORT": "x"}, "MASTER_PORT is 'x': a whole number is required"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "AUTOPARALLEL_SERVERS": "2"}, "start more processes"),
])
def test_environments_that_lack_something(environment: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchError) as error:
        role_of(environment)
    assert said in str(error.value)


@pytest.mark.parametrize(("options", "said"), [
    ({"staleness": -1}, "staleness is -1: an int of 0 or more"), ({"durability": "disk"}, "fsync, log, checkpoint"),
    ({"on_worker_loss": "wait"}, "error, continue"), ({"timeout_s": 0}, "timeout_s is 0"),
    ({"resume": True}, "needs checkpoint_dir"), ({"checkpoint_every": True}, "checkpoint_every is True")])
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ServerError, match=said):
        Settings(1, 1, **options)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("RANK", "WORLD_SIZE", "AUTOPARALLEL_ROLE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with autoparallel.serve_parameters() as servers:
        yield servers


def test_bad_calls_of_a_worker(alone: Any) -> None:
    table = alone.embedding("t", 5, 2, optimizer=torch.optim.SGD, lr=1.0)
    for call, said in (
        (lambda: table(torch.tensor([0, 5])), "ids of table 't' are from 0 to 5: from 0 to 4 are required"),
        (lambda: table(torch.tensor([-1])), "from -1 to -1"),
        (lambda: table(torch.tensor([0.5])), "are torch.float32: torch.int64 or int32"),
        (lambda: alone.embedding("t", 5, 2, optimizer=torch.optim.SGD, lr=1.0), "a table 't' has been made already"),
        (lambda: alone.embedding("u", 5, 2, optimizer=torch.optim.SGD, lr=1.0, weight=torch.zeros(5, 3)), "[5, 2] is"),
        (lambda: alone.embedding_bag("u", 5, 2, optimizer=torch.optim.SGD, lr=1.0, mode="add"), "'sum', 'mean' or"),
        (lambda: alone.module(nn.ReLU(), optimizer=torch.optim.SGD, lr=1.0), "no trainable parameters"),
        (lambda: alone.module(nn.BatchNorm1d(3), optimizer=torch.optim.SGD, lr=1.0), "running_mean"),
        (lambda: alone.whole("v"), "no table 'v': there are ['t'"),
    ):
        with pytest.raises(InputError) as error:
            call()
        assert said in str(error.value)


def test_gradients_of_several_backwards_are_added_and_can_be_dropped(alone: Any) -> None:
    table = alone.embedding("t", 5, 1, optimizer=torch.optim.SGD, std=0.0, lr=1.0)
    for _ in range(2):
        table(torch.tensor([[1, 1], [2, 4]])).sum().backward()
    with torch.no_grad():
        table(torch.tensor([0]))
    alone.step()
    assert alone.whole("t").flatten().tolist() == [0, -4, -2, 0, -2]
    table(torch.tensor([3])).sum().backward()
    alone.zero_grad()
    alone.step()
    assert alone.whole("t").flatten().tolist() == [0, -4, -2, 0, -2] and alone.step_number == 2


def test_learning_rates_change_as_in_torch(alone: Any) -> None:
    table = alone.embedding("t", 3, 2, optimizer=torch.optim.Adagrad, lr=0.5)
    dense = alone.module(nn.Linear(2, 1), optimizer=torch.optim.AdamW, lr=0.1)
    own = nn.Embedding.from_pretrained(initial_rows("t", 0, 3, 2), freeze=False, sparse=True)
    same_dense = copy.deepcopy(dense)
    same_dense._forward_pre_hooks.clear()
    optimizers = torch.optim.Adagrad(own.parameters(), lr=0.5), torch.optim.AdamW(same_dense.parameters(), lr=0.1)
    for step in range(4):
        rates = (0.5 / (step + 1), 0.1 * 0.5**step)
        for names, rate, optimizer in zip(("t", "model.*"), rates, optimizers, strict=True):
            alone.set_lr(rate, names)
            optimizer.param_groups[0]["lr"] = rate
        dense(table(torch.tensor([0, step % 3]))).square().sum().backward()
        same_dense(own(torch.tensor([0, step % 3]))).square().sum().backward()
        alone.step()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(alone.whole("t"), own.weight.detach())
    assert torch.equal(alone.whole("model.weight"), same_dense.weight.detach())
    for lr, names, said in ((-1.0, "*", "lr is -1.0"), (0.1, "u*", "no table is named 'u*'")):
        with pytest.raises(InputError, match=re.escape(said)):
            alone.set_lr(lr, names)


def test_other_initial_values_are_refused(alone: Any) -> None:
    alone.module(nn.Linear(2, 2), optimizer=torch.optim.SGD, lr=1.0)
    alone._tables.clear()  # as another worker, which has made none yet
    with pytest.raises(InputError, match="is there with other digest"):
        alone.module(nn.Linear(2, 2), optimizer=torch.optim.SGD, lr=1.0)


def test_a_finished_job_is_resumed(tmp_path: Path) -> None:
    def run(**more: Any) -> tuple[int, list[float]]:
        with autoparallel.serve_parameters(checkpoint_dir=tmp_path, **more) as servers:
            table = servers.embedding("t", 2, 1, optimizer=torch.optim.SGD, std=0.0, lr=1.0)
            first = servers.step_number
            for _ in range(3):
                table(torch.tensor([1])).sum().backward()
                servers.step()
            return first, servers.whole("t").flatten().tolist()

    assert run() == (0, [0, -3]) and run(resume=True) == (3, [0, -6])
    with pytest.raises(ServerError, match="has the state of another job: give resume=True"):
        run()


def test_a_full_disk_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with (pytest.raises(ServerError, match=r"server 0 has failed: OSError: .*No space left on device"),
          autoparallel.serve_parameters(checkpoint_dir=tmp_path, durability="fsync") as servers):
        table = servers.embedding("t", 2, 1, optimizer=torch.optim.SGD, std=0.0, lr=1.0)
        table(torch.tensor([1])).sum().backward()
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            servers.step()
