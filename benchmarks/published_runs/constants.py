"""What is fitted, and for whom: `constants.toml` holds the numbers, `fit.py` says how they come about."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from benchmarks.published_runs.rows import Run
from cost_models import Device, Tiles

#: Values by table ("devices", "stacks", "networks"), entry and name.
Table = dict[str, dict[str, dict[str, float]]]

#: Families beyond what a name says (a100-sxm-40 is an a100-sxm is an a100): generations of devices, kinds of software.
PARENTS = {"h100": "hopper", "h200": "hopper", "b200": "blackwell", "b300": "blackwell", "gb200": "blackwell",
           "gb300": "blackwell", "megatron-core": "core", "nemo": "core", "composer": "torch"}

FILE = Path(__file__).with_name("constants.toml")


@dataclass(frozen=True)
class Constants:
    """The constants of one run.

    Of the device:
      share, share8, share4   of the peak in the main loop of matrix products of 2, 1 and 1/2 bytes
      ramp, misaligned        see `cost_models.Tiles`
      memory                  share of the bandwidth
      attention               share of the peak in the best flash attention forward (backward: 0.8 of that)
      cache_bytes             of the cache in front of the memory
      legacy                  what is left of that to kernels that do not use what is new in the device

    Of the generation of software:
      library                 matrix products' speed over that of the newest libraries
      flash, native, attend   1 if scores never go to memory; 1 if attention uses what is new in the device; its speed
                              over the best
      ring                    attention's time over several context ranks, merging of parts included, over that on one
      passes                  element-wise traffic over that counted here
      eager                   element-wise traffic without torch.compile over that with it
      quantise, loss_bytes    bytes moved for an element that a product of less than two bytes reads; for a logit
      host_s, host_backward   seconds of the host for a layer forward; for a layer backward, in those
      host_experts            for a layer with experts, in those; host_expert: for each of a rank's experts beside
      host_graphed            what CUDA graphs over parts of a layer leave of host_experts
      host_call_s             for a collective
      tied                    sharpness with which the longer of the host's and the device's time counts on several
                              tensor ranks, which wait for one another's hosts (6 on one: the shorter is all but hidden)
      micro_s, step_s         fixed time of a micro-batch on a stage; of a step
      sync_s                  what each other rank adds to a tensor-parallel collective by being late
      update_bytes            moved for an element beside the optimizer's own: norm, scaling and copies of gradients
      hide_tensor, hide_experts, hide_data, hide_pipe    shares of communication that can run beside compute
      interference            how much of hidden communication compute is slowed by

      fragments               what the allocator holds beyond what is in use; communicators: bytes of NCCL's buffers
      logit_bytes             held for a logit at the loss's fullest moment

    Of the network: ``network``, the share of the rate between hosts.
    """

    share: float
    share8: float
    share4: float
    ramp: float
    misaligned: float
    memory: float
    attention: float
    legacy: float
    cache_bytes: float
    library: float
    flash: float
    native: float
    attend: float
    ring: float
    passes: float
    eager: float
    quantise: float
    loss_bytes: float
    host_s: float
    host_backward: float
    host_experts: float
    host_expert: float
    host_graphed: float
    host_call_s: float
    tied: float
    micro_s: float
    step_s: float
    sync_s: float
    update_bytes: float
    hide_tensor: float
    hide_experts: float
    hide_data: float
    hide_pipe: float
    interference: float
    network: float
    fragments: float
    communicators: float
    logit_bytes: float

    @staticmethod
    def of(run: Run, table: Table) -> Constants:
        """Those of the run's device, software and network: each from its default, its family and its own entry."""
        values: dict[str, float] = {}
        for kind, name in (("devices", run.machine), ("stacks", run.stack), ("networks", run.network)):
            for entry in lineage(name):
                values.update(table[kind].get(entry, {}))
        return Constants(**values)

    def device(self, device: Device, precision: str) -> Device:
        """The machine's device with what was fitted."""
        units = device.tiles.units if device.tiles else 108
        low = self.share4 if precision == "fp4" else self.share8
        tiles = Tiles(units, self.share * self.library, self.ramp, self.misaligned, low * self.library)
        return replace(device, tiles=tiles, memory_bandwidth_efficiency=self.memory, launch_s=0.0)


def lineage(name: str) -> tuple[str, ...]:
    """From the general to the particular.

    >>> lineage("a100-sxm-40"), lineage("gb200")
    (('default', 'a100', 'a100-sxm', 'a100-sxm-40'), ('default', 'blackwell', 'gb200'))
    """
    path = [name]
    while path[0] != "default":
        path.insert(0, PARENTS.get(path[0]) or (path[0].rpartition("-")[0] or "default"))
    return tuple(path)


def load(path: Path = FILE) -> Table:
    """The committed constants."""
    return tomllib.loads(path.read_text("utf-8"))


def dump(table: Mapping[str, Mapping[str, Mapping[str, float]]], head: str) -> str:
    """TOML, in the order of `Constants`."""
    order = [field.name for field in fields(Constants)]
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    for kind, entries in table.items():
        for entry, values in entries.items():
            lines += ["", f'[{kind}."{entry}"]']
            lines += [f"{name} = {float(f'{values[name]:.3g}')!r}" for name in order if name in values]
    return "\n".join(lines) + "\n"
