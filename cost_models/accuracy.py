"""How far predictions are off: the error that published runs showed, by software and device, and what it means for a
plan's seconds and memory.

Both errors are those of the closed form of a transformer (`benchmarks.published_runs`), whose unit costs plans share;
the errors of captured models' plans were not measured apart (their step times differ from it by 2 % in the median).

`accuracy.toml` is written by ``python -m benchmarks.published_runs --runs FILE --accuracy``: errors of runs under
constants that were fitted without their source (of software that one source alone ran, without a fifth of its runs).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cost_models.cluster import Cluster
from cost_models.profile import Profile, lineage

FILE = Path(__file__).with_name("accuracy.toml")
#: Kinds of parallelism with which predictions were compared, or were not.
KINDS = ("pipeline", "tensor or context", "expert")
#: So many times the devices of the largest run are far beyond it.
FAR = 4
#: Relative errors of step times that half, and nine in ten, predictions stay under where nobody measured anything like
#: them: a guess.
UNKNOWN = (0.25, 0.6)
#: Factors on both errors where the software ran on another generation of devices only (half of the errors are no larger
#: there, by the runs at hand), and on plans of kinds or sizes that none of its runs had (a guess).
ELSEWHERE, UNSEEN = (1.0, 1.5), (1.5, 1.5)
#: What a host half as fast adds to a step, as a share of it, from which error bars tell it: hosts differ by factors of
#: two (a step of GPT-2 took those of four machines with an H200 23 to 41 ms; docs/measurements/gpu.md).
MUCH_OF_HOST = 0.1


@dataclass(frozen=True)
class ErrorBar:
    """Relative errors of a predicted step time that half (``p50``) and nine in ten (``p90``) predictions of its kind
    stay under, and the ``basis``: how many published runs of which kind showed that."""

    p50: float
    p90: float
    basis: str


def error_bar(profile: Profile | None, bars: Mapping[str, Any] | None = None, kinds: Sequence[str] = (),
              devices: int = 1, training: bool = True, slower_host: float = 0.0) -> ErrorBar:
    """The error bar of step times of plans with these `KINDS` of parallelism on so many devices, under a profile;
    without one, and of inference, the wide one of what nobody compared. ``slower_host``: what a host half as fast adds
    to the step, as a share of it. ``bars``: by software and device, in place of the file's.

    >>> error_bar(Profile.of("a100-sxm", "megatron-2021")).p90 < error_bar(None).p90
    True
    >>> error_bar(Profile.of("a100-sxm", "megatron-2021"), training=False).basis
    'no published run of inference to compare with'
    """
    if slower_host > MUCH_OF_HOST:
        known, more = error_bar(profile, bars, kinds, devices, training), slower_host / (1 + slower_host)
        return ErrorBar(max(known.p50, more / 2), max(known.p90, more),
                        f"{known.basis}; a host half as fast at launching adds {slower_host * 100:.0f} % "
                        "(cuda_graphs=True and larger batches wait less for it)")

    def bar(entry: dict[str, Any], factors: tuple[float, float], basis: str) -> ErrorBar:
        unseen = [kind for kind in kinds if kind not in entry["kinds"]]
        far = devices > FAR * entry["most_devices"]
        more = UNSEEN if unseen or far else (1.0, 1.0)
        if unseen or far:
            basis = f"assumed, {more[0]:g} times the error of {basis}"
        if unseen:
            basis += f", none of them with {' or '.join(unseen)} parallelism"
        if far:
            basis += f", on {entry['most_devices']} devices at most"
        return ErrorBar(factors[0] * more[0] * entry["p50"], factors[1] * more[1] * entry["p90"], basis)

    if not training:
        return ErrorBar(*UNKNOWN, "no published run of inference to compare with")
    if profile is None:
        return ErrorBar(*UNKNOWN, "no measured run to compare with: prices of the cluster's description alone")
    families = lineage(profile.machine)[::-1]
    for software in lineage(profile.software)[:0:-1]:
        known = (_table()["time"] if bars is None else bars).get(software, {})
        for device in families:
            if device in known and device != "default":
                return bar(known[device], (1.0, 1.0), f"{known[device]['runs']} published runs of {software} on "
                                                      f"{device}")
        if "all" in known:
            return bar(known["all"], ELSEWHERE, f"none on this device, extrapolated from {known['all']['runs']} "
                                                f"published runs of {software} on others")
    return ErrorBar(*UNKNOWN, f"no published run of {profile.software} to compare with")


def memory_excess(confidence: float) -> float:
    """Measured over predicted peak memory (in closed form), which so large a share of published runs does not exceed.

    >>> memory_excess(0.5) < memory_excess(0.95) < 1.3
    True
    """
    known = _table()["memory"]
    return float(np.interp(confidence, known["shares"], known["ratios"]))


def usable_bytes(cluster: Cluster, confidence: float = 0.95) -> float:
    """Bytes of a device that predicted tensors may take so that this share of runs fits: without the process's own
    (`Device.reserved_bytes`), communicators' buffers and the allocator's fragments, and with room for the error of
    predictions. Without a profile only the first is known. Of an unequal cluster those of the smallest device.

    >>> cluster = Cluster.load("h100-sxm")
    >>> usable_bytes(cluster, 0.95) < usable_bytes(cluster, 0.5) < cluster.device.usable_bytes
    True
    """
    if cluster.is_unequal:
        return min(usable_bytes(kind, confidence) for kind in cluster.kinds())
    profile, device = cluster.profile, cluster.device
    if profile is None:
        return device.usable_bytes
    left = device.usable_bytes - (profile.communicators if cluster.num_devices > 1 else 0.0)
    return min(device.usable_bytes, max(0.0, left) / ((1 + profile.fragments) * memory_excess(confidence)))


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text("utf-8"))
