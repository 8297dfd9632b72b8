"""What a launcher tells a process in its environment: rank, size, rank on the host, and where rank 0 listens.

One table of launchers (`FAMILIES`), read in order; two launchers that tell one process different ranks are an error.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from autoparallel.errors import LaunchError, shown
from autoparallel.launch.rank_table import table_hosts

#: Names the launcher that counts, where several tell a process different ranks.
CHOICE = "AUTOPARALLEL_LAUNCHER"
_DEFAULT_PORT = 29500  # torchrun's
_REMEDY = ("Start by one of them, or say which one counts: autoparallel.init(launcher={!r}), or "
           f"{CHOICE}={{}} in the environment.")


@dataclass(frozen=True)
class Family:
    """Variables of one launcher, each under the names it may have, the first that is set counts.

    ``jobs``: variables that are equal in all processes of a job and different in others; rank 0's port is made of them.
    """

    name: str
    title: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    jobs: tuple[str, ...] = ()


FAMILIES = (
    Family("torchrun", "torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    Family("openmpi", "Open MPI", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",),
           ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",),
           ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri")),
    Family("mpich", "MPICH or Intel MPI", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
    Family("mvapich", "MVAPICH", ("MV2_COMM_WORLD_RANK",), ("MV2_COMM_WORLD_SIZE",), ("MV2_COMM_WORLD_LOCAL_RANK",),
           ("MV2_COMM_WORLD_LOCAL_SIZE",)),
    Family("slurm", "Slurm", ("SLURM_PROCID",), ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), ("SLURM_LOCALID",), (),
           ("SLURM_JOB_ID", "SLURM_STEP_ID")),
    Family("msrun", "msrun", ("RANK_ID",), ("RANK_SIZE", "MS_WORKER_NUM"), (), ()),
)
_BY_NAME = {family.name: family for family in FAMILIES}
_SLURM = _BY_NAME["slurm"]


@dataclass(frozen=True)
class Identity:
    """One process of a job. ``local_rank``, ``local_size``: among those of its host; None if the launcher does not say.

    ``master_addr``, ``master_port``: where rank 0 listens.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    master_addr: str
    master_port: int

    def __post_init__(self) -> None:
        pairs = [("rank", self.rank, self.size)]
        if self.local_rank is not None and self.local_size is not None:
            pairs.append(("rank on the host", self.local_rank, self.local_size))
        for what, number, count in pairs:
            if not 0 <= number < count:
                raise LaunchError(f"{_BY_NAME[self.launcher].title} says {what} {number} of {count}: a number from 0 "
                                  f"to {count - 1} is required")

    @property
    def variables(self) -> dict[str, str]:
        """The same as torchrun would say it, which other libraries read; LOCAL_RANK only if the launcher tells it."""
        said = {"RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": self.local_rank,
                "LOCAL_WORLD_SIZE": self.local_size, "MASTER_ADDR": self.master_addr, "MASTER_PORT": self.master_port}
        return {name: str(value) for name, value in said.items() if value is not None}


def identity_of(environment: Mapping[str, str], launcher: str | None = None) -> Identity | None:
    """The process that an environment describes, or None where no launcher has said anything.

    ``launcher``: the name of the one that counts; None: ``AUTOPARALLEL_LAUNCHER``, else all that are found must agree.
    torchrun's agent counts before the launcher that started the agent, and an interactive Slurm shell not; nor the
    script of sbatch beside another launcher. Raises LaunchError if launchers disagree, a variable is missing or no
    number, rank 0's address is not known, or this is the script of sbatch, whose tasks only srun starts.
    """
    chosen = _chosen(environment, launcher or environment.get(CHOICE))
    return None if chosen is None else _identity(environment, chosen)


def set_torch_variables(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables where another launcher has started this process, for libraries that read no others.

    Raises LaunchError as `identity_of`.
    """
    identity = identity_of(environment)
    if identity is not None and identity.launcher != "torchrun" and identity.size > 1:
        environment.update(identity.variables)


def is_scheduler(environment: Mapping[str, str]) -> bool:
    """Whether this is the extra process that msrun starts beside the ranks, which runs no training."""
    return environment.get("MS_ROLE") == "MS_SCHED"


def tasks_beside_srun(environment: Mapping[str, str]) -> int | None:
    """The tasks that srun would start, where this process is of a Slurm job and srun has not started it: a batch script
    itself, or the shell of salloc. None elsewhere."""
    if _number(environment, ("SLURM_JOB_ID",)) is None or _first(environment, ("SLURM_STEP_ID", "SLURM_STEPID")):
        return None
    return _number(environment, ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")) or 1


def _chosen(environment: Mapping[str, str], name: str | None) -> Family | None:
    if name is not None:
        if name not in _BY_NAME:
            raise LaunchError(f"launcher is {shown(name)}: one of {sorted(_BY_NAME)} is required")
        if _first(environment, _BY_NAME[name].rank) is None:
            raise LaunchError(f"{_BY_NAME[name].title} was to count, and {_BY_NAME[name].rank[0]} is not set: start "
                              "the program by it, or leave the launcher out")
        return _BY_NAME[name]
    found = [family for family in FAMILIES if _first(environment, family.rank) is not None]
    if tasks_beside_srun(environment) is not None and _SLURM in found and (
            len(found) > 1 or _first(environment, _SLURM.size) is None
            or environment.get("SLURM_JOB_NAME") in ("bash", "interactive")):
        found.remove(_SLURM)                             # a script of sbatch or shell of salloc, called task 0
    if "TORCHELASTIC_RUN_ID" in environment and found and found[0].name == "torchrun":
        return found[0]
    said = {family: _place(environment, family) for family in found}
    if len(said) > 1 and said.get(_SLURM) == (0, 1):
        del said[_SLURM]
    if len(set(said.values())) > 1:
        texts = [f"{family.title} says rank {rank} of {size} ({_name(environment, family.rank)}, "
                 f"{_name(environment, family.size)})" for family, (rank, size) in said.items()]
        first = next(iter(said)).name
        raise LaunchError(f"launchers disagree: {'; '.join(texts)}\n  {_REMEDY.format(first, first)}")
    return next(iter(said), None)


def _identity(environment: Mapping[str, str], family: Family) -> Identity:
    rank, size = _place(environment, family)
    if family is _SLURM and size > 1 and tasks_beside_srun(environment) is not None:
        raise LaunchError(f"the Slurm job has {size} tasks, and srun has not started this process: the script of "
                          "sbatch runs once. Write srun python train.py in it; for a process alone, unset SLURM_PROCID")
    local_rank = _number(environment, family.local_rank)
    local_size = _tasks_of_node(environment) if family.name == "slurm" else _number(environment, family.local_size)
    address, port = _master(environment, family, size, local_size)
    return Identity(family.name, rank, size, local_rank, local_size, address, port)


def _place(environment: Mapping[str, str], family: Family) -> tuple[int, int]:
    rank, size = _number(environment, family.rank), _number(environment, family.size)
    assert rank is not None
    if size is None:
        raise LaunchError(f"{family.rank[0]} is set and {' or '.join(family.size)} is not: {family.title} sets both; "
                          "set the number of processes, or unset the rank")
    return rank, size


def _master(environment: Mapping[str, str], family: Family, size: int, local_size: int | None) -> tuple[str, int]:
    """Host and port of rank 0: as given, else as the launcher tells, else this host if all ranks are on it."""
    address, port = environment.get("MASTER_ADDR"), _number(environment, ("MASTER_PORT",))
    if family.name == "slurm" and address is None:
        address = _first(environment, ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
        address = None if address is None else first_host(address)
    if family.name == "msrun":
        address = address or environment.get("MS_SCHED_HOST")
        if address is None and (table := environment.get("RANK_TABLE_FILE")):
            address = table_hosts(Path(table))[0]
        port = _number(environment, ("MS_SCHED_PORT",)) if port is None else port
    if address is None and (size == 1 or local_size == size):
        address = "127.0.0.1"
    if address is None:
        give = {"openmpi": "mpirun -x MASTER_ADDR=host", "mpich": "mpirun -genv MASTER_ADDR host"}
        raise LaunchError(f"{family.title} started {size} processes and does not say where rank 0 is: set MASTER_ADDR "
                          f"to its host on all of them ({give.get(family.name, 'MASTER_ADDR=host')}), and MASTER_PORT "
                          f"if {_DEFAULT_PORT} is taken there")
    return address, _port_of(environment, family) if port is None else port


def _port_of(environment: Mapping[str, str], family: Family) -> int:
    """A port that all processes of a job derive alike and other jobs otherwise; torchrun's without a job's name."""
    names = [environment[name] for name in family.jobs if name in environment]
    return 10_000 + zlib.crc32(" ".join(names).encode()) % 20_000 if names else _DEFAULT_PORT


def _tasks_of_node(environment: Mapping[str, str]) -> int | None:
    """Slurm's tasks on this node, of its list by nodes: ``2(x3),1`` are three nodes with two tasks and one with one."""
    text, node = environment.get("SLURM_STEP_TASKS_PER_NODE", ""), _number(environment, ("SLURM_NODEID",))
    counts = [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
    if len(set(counts)) == 1:
        return counts[0]
    return None if node is None or node >= len(counts) else counts[node]


def first_host(nodes: str) -> str:
    """The first host of Slurm's compressed list: ``gnode[10,20-21],login1`` -> ``gnode10``.

    >>> first_host("gnode[10,20-21],login1"), first_host("rack2n[007-012]"), first_host("alone")
    ('gnode10', 'rack2n007', 'alone')
    """
    first = next(_top_level(nodes))
    return re.sub(r"\[([^\]]*)\]", lambda match: re.split("[,-]", match.group(1))[0], first)


def _top_level(nodes: str) -> Iterator[str]:
    """The parts between commas that stand outside brackets."""
    yield from re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes)


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


def _name(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next(name for name in names if environment.get(name))


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    text = _first(environment, names)
    if text is None:
        return None
    if not text.isdigit():
        raise LaunchError(f"{_name(environment, names)} is {shown(text)}: a whole number is required")
    return int(text)


__all__ = ["CHOICE", "FAMILIES", "Family", "Identity", "first_host", "identity_of", "is_scheduler",
           "set_torch_variables", "tasks_beside_srun"]
