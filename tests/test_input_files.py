"""Clusters and search problems from files: what is none is refused by our own error, and what is written is read."""

from __future__ import annotations

import gzip
import json
import math
import os
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoparallel.errors import SearchError
from autoparallel.search.model import iopddl
from autoparallel.search.model.problem import Edge, Node, Problem
from cost_models import Cluster, ClusterError, Link, known_clusters
from cost_models.calibrate import cluster_toml, write_cluster
from cost_models.description import from_table
from cost_models.links import UNLIMITED, Protocol
from tests.support.mutations import mutate, spoil

FUZZ = {"deadline": None, "suppress_health_check": list(HealthCheck)}

# ------------------------------------------------------------------------------------------------------------ clusters


@cache
def described(name: str) -> dict[str, Any]:
    """A known cluster as one file says it."""
    return tomllib.loads(cluster_toml(Cluster.load(name, 8), "measured"))


@pytest.mark.parametrize("name", known_clusters())
def test_known_clusters_are_written_and_read(tmp_path: Path, name: str) -> None:
    for software in (None, "none"):
        cluster = Cluster.load(name, 8, software=software)
        write_cluster(tmp_path / "cluster.toml", cluster, "here")
        assert Cluster.load(tmp_path / "cluster.toml") == cluster


def test_odd_names_and_numbers_are_written_and_read(tmp_path: Path) -> None:
    known = Cluster.load("h100-sxm", 8, software="none")
    odd = 'a "b"\n\x7f\x1b[31m \U0001f600 = [c]'
    links = (replace(known.links[0], name=odd, alpha_s=np.float64(1e-6), num_devices=np.int64(8),
                     protocols={"L.L 128": Protocol(1e-6, 1e-6, 0.5), odd: Protocol(0.0, 0.0, 1.0)}), known.links[1])
    cluster = replace(known, name=odd, links=links, device=replace(known.device, name=odd))
    write_cluster(tmp_path / "cluster.toml", cluster, odd)
    assert Cluster.load(tmp_path / "cluster.toml") == cluster


def test_unreadable_clusters_are_not_written(tmp_path: Path) -> None:
    known = Cluster.load("h100-sxm", 8, software="none")
    for wrong in (replace(known, name=""), replace(known, name="\ud800"),
                  replace(known, links=(known.links[0], replace(known.links[1], name=known.links[0].name))),
                  replace(known, links=(known.links[0], Link("far", UNLIMITED + 1, 1e-6, 1e9)))):
        with pytest.raises(ClusterError, match=r"cannot be written"):
            write_cluster(tmp_path / "cluster.toml", wrong)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("old", "new", "parts"), [
    ("launch_s =", "lunch_s =", ("device.launch_s is missing (is it 'lunch_s'?)",)),
    ("nics_per_host =", "nics_per_hosts =", ("links.1.nics_per_hosts (is it 'nics_per_host'?) is not a key",)),
    ("bfloat16 =", "bfloat61 =", ("device.peak_flops_per_s.bfloat61 (is it 'bfloat16'?)",)),
    ("matmul =", "matmull =", ("device.efficiency.matmull (is it 'matmul'?)",)),
    ("units =", "unit =", ("device.tiles.unit (is it 'units'?)",)),
    ("all_reduce =", "allreduce =", ("links.0.slowdown.allreduce (is it 'all_reduce'?)",)),
    ("launch_s = { value = 5e-06", f"launch_s = {{ value = {10**400}", ("device.launch_s =", "not finite, or beyond")),
    ("launch_s = { value = 5e-06", "launch_s = { value = nan", ("device.launch_s = nan is not finite",)),
    ("value = [[10000000.0, 0.02]", "value = [[nan, 0.02]", ("device.efficiency", "required: pairs")),
    ("value = [[10000000.0, 0.02]", 'value = [["1e7", 0.02]', ("device.efficiency", "required: pairs")),
    ("value = [[10000000.0, 0.02]", f"value = [[{10**400}, 0.02]", ("device.efficiency", "required: pairs")),
    ("memory_bytes = { value = 85900000000.0", "memory_bytes = { value = 80",
     ("device.memory_bytes = 80.0 is below 100,000; required: bytes of one device's memory", "80 GB are 80e9")),
    ("bandwidth_bytes_per_s = { value = 45000000000.0", "bandwidth_bytes_per_s = { value = 50",
     ("bandwidth_bytes_per_s = 50.0 is below 100,000", "45 GB/s 45e9")),
    ("to_device_bytes_per_s = { value = 48000000000.0", "to_device_bytes_per_s = { value = 48",
     ("host.to_device_bytes_per_s = 48.0 is below 100,000",)),
    ('algorithms = ["ring", "tree"]', "algorithms = 3", ("algorithms = 3; required: a list of some of",)),
    ('algorithms = ["ring", "tree"]', 'algorithms = ["ring", "ring"]', ("has one twice",)),
    ('name = "InfiniBand NDR"', 'name = "NVLink 4"', ("have a name twice",)),
    ("num_devices = { value = 8", f"num_devices = {{ value = {10**30}", ("links.0.num_devices", "required: how many")),
    ("num_devices = 8", f"num_devices = {10**30}", ("1000000000000000019884624838656 devices", "reaches")),
])
def test_values_that_no_cluster_has(tmp_path: Path, old: str, new: str, parts: tuple[str, ...]) -> None:
    text = cluster_toml(Cluster.load("h100-sxm", 8), "measured")
    assert old in text
    (tmp_path / "mine.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(ClusterError) as error:
        Cluster.load(tmp_path / "mine.toml")
    assert all(part in str(error.value) for part in (*parts, "mine.toml")), str(error.value)
    assert len(str(error.value)) < 600


def test_texts_and_files_that_are_no_clusters(tmp_path: Path) -> None:
    """A pipe, to which nobody writes, is not waited for."""
    path = tmp_path / "mine.toml"
    for text, part in (("a = " + "[" * 5000 + "]" * 5000, "mine.toml"),
                       ("a = " + "[" * 20 + "]" * 20, "more than 8 deep"),
                       (".".join("a" * 30) + " = 1", "more than 8 deep"), ("name = 1\nname = 2", "is not TOML"),
                       ("a = 1" + "0" * 5000, "is not TOML"), ("x" * (2**20 + 1), "more than 1,048,576 bytes")):
        path.write_text(text)
        with pytest.raises(ClusterError, match=part):
            Cluster.load(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ClusterError, match="no regular file"):
        Cluster.load(path)
    for name, part in ((tmp_path, "unknown cluster"), ("h100-sxn", r"is it 'h100-sxm'\?"),
                       ("h100", r"is it 'h100-hbm2e' or 'h100-sxm'\?"),
                       ("a\0.toml", "null character"), ("a" * 5000 + ".toml", "unknown cluster"),
                       (3, "is of type int")):
        with pytest.raises(ClusterError, match=part):
            Cluster.load(name)  # type: ignore[arg-type]


@st.composite
def mutated_clusters(draw: Callable[..., Any]) -> Any:
    return mutate(draw, described(draw(st.sampled_from(["h100-sxm", "local-cpu", "gb200-nvl72"]))))


def is_a_cluster_or_a_cluster_error(data: Any, folder: Path) -> None:
    try:
        found = from_table(data, "mine.toml")
    except ClusterError as error:
        assert 0 < len(str(error)) < 3000
        return
    assert all(math.isfinite(n) for n in (found.device.launch_s, *found.device.peak_flops_per_s.values()))
    write_cluster(folder / "cluster.toml", found)
    assert Cluster.load(folder / "cluster.toml") == found


@settings(max_examples=40, **FUZZ)
@given(data=mutated_clusters())
def test_a_mutated_cluster_is_a_cluster_or_a_cluster_error(data: Any, tmp_path_factory: Any) -> None:
    is_a_cluster_or_a_cluster_error(data, tmp_path_factory.getbasetemp())


@pytest.mark.slow
@settings(max_examples=5000, **FUZZ)
@given(data=mutated_clusters())
def test_5000_mutated_clusters(data: Any, tmp_path_factory: Any) -> None:
    is_a_cluster_or_a_cluster_error(data, tmp_path_factory.getbasetemp())


@st.composite
def spoiled_toml(draw: Callable[..., Any]) -> str:
    return spoil(draw, cluster_toml(Cluster.load("h100-sxm", 8)))


@settings(max_examples=50, **FUZZ)
@given(text=spoiled_toml())
def test_spoiled_toml_is_a_cluster_or_a_cluster_error(text: str, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "spoiled.toml"
    path.write_bytes(text.encode("utf-8", "replace"))
    try:
        assert isinstance(Cluster.load(path), Cluster)
    except ClusterError as error:
        assert str(error)


# ------------------------------------------------------------------------------------------------------------- problems


@cache
def problem() -> dict[str, Any]:
    nodes = tuple(Node(f"n{i}", np.array([1.0, 2.0]), np.array([3.0, 1.0]), (i, i + 2), None, i % 2) for i in range(4))
    edges = tuple(Edge(i, i + 1, np.array([[0.0, 1.0], [math.inf, 0.0]])) for i in range(3))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.json"
        iopddl.write(Problem(nodes, edges, 50.0, "toy", (60.0,)), path)
        return json.loads(path.read_text())  # type: ignore[no-any-return]


@st.composite
def mutated_problems(draw: Callable[..., Any]) -> str:
    return spoil(draw, json.dumps(mutate(draw, problem())))


def first_choices(problem: Problem) -> float:
    """What the first choice of each node costs."""
    return float(sum(node.costs[0] for node in problem.nodes) + sum(edge.costs[0, 0] for edge in problem.edges))


def is_a_problem_or_a_search_error(text: str, folder: Path) -> None:
    path = folder / "problem.json"
    path.write_bytes(text.encode("utf-8", "replace"))
    try:
        found = iopddl.read(path)
    except SearchError as error:
        assert 0 < len(str(error)) < 1000
        return
    assert all(0 <= end < len(found.nodes) for edge in found.edges for end in (edge.source, edge.target))
    assert all(not np.isnan(node.costs).any() and np.isfinite(node.usages).all() for node in found.nodes)
    assert found.limit >= 0 and all(0 <= node.device_class <= len(found.more_limits) for node in found.nodes)
    iopddl.write(found, path)
    again = iopddl.read(path)
    assert len(again.nodes) == len(found.nodes) and again.limit == found.limit
    assert len(found.profiles) == len(found.limits)
    assert first_choices(again) == first_choices(found)


@settings(max_examples=100, **FUZZ)
@given(text=mutated_problems())
def test_a_mutated_problem_is_a_problem_or_a_search_error(text: str, tmp_path_factory: Any) -> None:
    is_a_problem_or_a_search_error(text, tmp_path_factory.getbasetemp())


@pytest.mark.slow
@settings(max_examples=5000, **FUZZ)
@given(text=mutated_problems())
def test_5000_mutated_problems(text: str, tmp_path_factory: Any) -> None:
    is_a_problem_or_a_search_error(text, tmp_path_factory.getbasetemp())


def test_files_that_are_no_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed file that unpacks to more than the limit is refused before it is unpacked."""
    path = tmp_path / "problem.json.gz"
    for raw in (b"", b"no gzip", gzip.compress(b"[" * 100_000), gzip.compress(b"{}"), gzip.compress(b"null")[:-3],
                gzip.compress(b'{"problem": [1]}'), b"\x1f\x8b\x08\x00" + b"\0" * 20):
        path.write_bytes(raw)
        with pytest.raises(SearchError, match=r"problem\.json\.gz"):
            iopddl.read(path)
    monkeypatch.setattr(iopddl, "MOST_BYTES", 2**20)
    path.write_bytes(gzip.compress(b" " * 2**24))
    with pytest.raises(SearchError, match="unpacks to more than 1,048,576 bytes"):
        iopddl.read(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SearchError, match="no regular file"):
        iopddl.read(path)
