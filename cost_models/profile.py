"""How software uses a machine: fitted constants of devices, generations of training software and networks.

`profiles.toml` holds the numbers, fitted to published runs (`python -m benchmarks.published_runs --fit`); a constant
belongs to a device, a generation of software or a network, never to one run. `Cluster.load(name, software=...)` takes
them: with a profile, ops are priced by tiles, kernels and traffic as that software runs them; without one, by the
curves of the cluster's description alone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist

from cost_models.devices import Device, Tiles
from cost_models.errors import ClusterError

#: Values by table ("devices", "stacks", "networks"), entry and name.
Table = dict[str, dict[str, dict[str, float]]]

#: Families beyond what a name says (a100-sxm-40 is an a100-sxm is an a100): generations of devices, kinds of software.
PARENTS = {"h100": "hopper", "h200": "hopper", "b200": "blackwell", "b300": "blackwell", "gb200": "blackwell",
           "gb300": "blackwell", "megatron-core": "core", "nemo": "core", "composer": "torch",
           "internevo": "torch-eager", "torch-eager": "torch-fsdp", "torch-compile": "torch-fsdp"}
#: Software that a plan can be priced for, by name.
SOFTWARE = ("torch-eager", "torch-compile", "megatron-core", "megatron-2022", "megatron-2021", "megatron-deepspeed",
            "nemo-26.06", "nemo-26.02", "nemo-25.11", "nemo-25.09", "composer", "alpa", "traced")

FILE = Path(__file__).with_name("profiles.toml")


@dataclass(frozen=True)
class Profile:
    """The constants of one device under one generation of software on one network.

    Of the device:
      share, share8, share4   of the peak in the main loop of matrix products of 2, 1 and 1/2 bytes
      ramp, misaligned        see `cost_models.Tiles`
      memory                  share of the bandwidth
      attention               share of the peak in the best flash attention forward (backward: 0.8 of that)
      legacy                  what is left of that to kernels that do not use what is new in the device
      cache_bytes             of the cache in front of the memory
      uneven                  standard deviation of the clocks of devices of one kind, in their mean (Sinha et al. 2022,
                              "Not All GPUs Are Created Equal", find ranges of 8 % and more); the slowest sets the pace

    Of the generation of software:
      library                 matrix products' speed over that of the newest libraries
      flash, native, attend   1 if scores never go to memory; 1 if attention uses what is new in the device; its speed
                              over the best
      passes                  element-wise traffic over that counted here
      kernel_bytes            traffic of unfused element-wise kernels over that of the tensors that they read and write
      fused, eager            1 if chains of element-wise ops are one kernel; else their traffic over that of fused ones
      quantise, loss_bytes    bytes moved for an element that a product of less than two bytes reads; for a logit
      host_s, host_backward   seconds of the host for a layer forward; for a layer backward, in those
      host_experts            for a layer with experts, in those; host_expert: for each of a rank's experts beside
      host_graphed            what CUDA graphs over parts of a layer leave of host_experts
      host_call_s             for a collective
      host_op_s               for a kernel of a graph whose ops run one by one. Chosen, not fitted: the fastest of four
                              virtual hosts of an H200 took 36 us a kernel (`docs/measurements/gpu.md`)
      tied                    sharpness with which the longer of the host's and the device's time counts on several
                              tensor ranks, which wait for one another's hosts (6 on one: the shorter is all but hidden)
      by_block                1 if sharded parameters are gathered, and their gradients scattered, block by block
      stores_sections         1 if fused projections are stored by head, so that tensor ranks need not exchange parts
      fuses_sums              1 if the products that make weights' gradients add to those of earlier micro-batches
                              themselves (Megatron's gradient_accumulation_fusion, default since 2022)
      copies_sums             1 if gradients that are added up in float32 are first copied there, as DeepSpeed's
                              BF16_Optimizer does (update_hp_grads: 2 + 4 bytes, and 4 + 4 + 4)
      masters                 1 if the optimizer keeps a copy of two-byte parameters, and its state, in float32
      overlaps_activations    1 if communication of activations overlaps with compute as in this project's programs
                              (`autoparallel.schedule.activation_windows`): simulated, in place of hide_tensor
      scatter_sends           1 if tensor ranks share out what they send to the next stage, and gather it there
      early_stop              1 if recompute of a block ends where backward has all it needs, before its last product
      core_only               1 if selective recompute runs the core of attention again, and nothing else
      micro_s, step_s         fixed time of a micro-batch on a stage; of a step
      sync_s                  what each other rank adds to a tensor-parallel collective by being late
      update_bytes            moved for an element beside the optimizer's own: norm, scaling and copies of gradients
      host_memory             share of the rate of its host's memory, as described, that an optimizer step there
                              reaches (`python -m benchmarks.published_offload`): ranks' threads are not bound to the
                              socket that holds their memory
      hide_tensor, hide_experts, hide_data, hide_pipe    shares of communication that can overlap with compute
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
    uneven: float
    library: float
    flash: float
    native: float
    attend: float
    passes: float
    fused: float
    eager: float
    kernel_bytes: float
    quantise: float
    loss_bytes: float
    host_s: float
    host_backward: float
    host_experts: float
    host_expert: float
    host_graphed: float
    host_call_s: float
    host_op_s: float
    tied: float
    by_block: float
    stores_sections: float
    fuses_sums: float
    copies_sums: float
    masters: float
    overlaps_activations: float
    scatter_sends: float
    early_stop: float
    core_only: float
    micro_s: float
    step_s: float
    sync_s: float
    update_bytes: float
    host_memory: float
    hide_tensor: float
    hide_experts: float
    hide_data: float
    hide_pipe: float
    interference: float
    network: float
    fragments: float
    communicators: float
    logit_bytes: float
    software: str = ""
    machine: str = ""

    @staticmethod
    def of(machine: str, software: str, network: str = "default", table: Table | None = None) -> Profile:
        """The constants of a device, software and network: each from its default, its family and its own entry.

        >>> Profile.of("h100-sxm", "torch-compile").fused, Profile.of("h100-sxm", "torch-eager").fused
        (1.0, 0.0)
        """
        values: dict[str, float] = {}
        for kind, name in (("devices", machine), ("stacks", software), ("networks", network)):
            for entry in lineage(name):
                values.update((table or _in_use())[kind].get(entry, {}))
        return Profile(**values, software=software, machine=machine)

    def sum_bytes(self, bytes_each: float, accumulator_bytes: float) -> float:
        """Bytes moved to add a micro-batch's gradient of so many bytes an element to those before, in an accumulator of
        its own or (0 bytes) in place.

        >>> [Profile.of("a100-sxm", name).sum_bytes(2, 4) for name in ("megatron-deepspeed", "torch-eager", "nemo")]
        [18.0, 10.0, 0.0]
        """
        if self.fuses_sums:
            return 0.0
        if not accumulator_bytes:
            return 3.0 * bytes_each
        copied = bytes_each + accumulator_bytes if self.copies_sums else bytes_each
        return copied + (3.0 if self.copies_sums else 2.0) * accumulator_bytes

    def kept(self, dtype: str) -> str:
        """The precision (`memory.PRECISIONS`) in which parameters of a dtype are trained.

        >>> [Profile.of("a100-sxm", name).kept("bfloat16") for name in ("torch-eager", "megatron-core")]
        ['bfloat16', 'bfloat16-master']
        """
        return f"{dtype}-master" if self.masters and dtype in ("float16", "bfloat16") else dtype

    @property
    def unfused(self) -> float:
        """Element-wise traffic over that of chains fused into one kernel each."""
        return 1.0 if self.fused else self.eager

    @property
    def kernel_s(self) -> float:
        """Seconds of the host for one kernel of a graph forward. Where chains are fused a layer's over its kernels, of
        which GPT-2 has 10, on whose layers these times were fitted."""
        return self.host_s / 10 if self.fused else self.host_op_s

    @property
    def kernel_backward_s(self) -> float:
        """And backward, where they have 14."""
        return self.host_s * self.host_backward / 14 if self.fused else self.host_op_s

    def step_of(self, devices: int) -> float:
        """Fixed seconds of a step on so many devices. ``step_s`` is fitted on jobs whose ranks wait for one another at
        a step's end; one alone does not (measured on one H200: GPT-2's kernels leave 1 to 3 ms of a step, which
        ``micro_s`` covers).

        >>> profile = Profile.of("h100-sxm", "torch-eager")
        >>> profile.step_of(1), profile.step_of(8) == profile.step_s
        (0.0, True)
        """
        return self.step_s if devices > 1 else 0.0

    def late_s(self, size: int) -> float:
        """How long a collective of ``size`` ranks waits for the last one: ``sync_s`` for each other rank, as fitted on
        tensor-parallel groups, whose sizes end at 8."""
        return self.sync_s * (min(size, 8) - 1)

    def slowest(self, devices: int) -> float:
        """The mean device's speed over that of the slowest of so many, as one expects it (Blom 1958).

        >>> profile = Profile.of("a100-sxm", "megatron-core")
        >>> profile.slowest(1), profile.slowest(8) < profile.slowest(1024) < 1.1
        (1.0, True)
        """
        if devices <= 1:
            return 1.0
        return 1.0 + self.uneven * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))

    def device(self, device: Device, precision: str = "bf16", devices: int = 1) -> Device:
        """The machine's device with the fitted constants, the slowest of ``devices`` that wait for one another.
        Launches are counted with the kernels of an op, not by `Device.launch_s`."""
        units = device.tiles.units if device.tiles else 108
        low = self.share4 if precision == "fp4" else self.share8
        tiles = Tiles(units, self.share * self.library, self.ramp, self.misaligned, low * self.library)
        slower = self.slowest(devices)
        peaks = {name: peak / slower for name, peak in device.peak_flops_per_s.items()}
        return replace(device, tiles=tiles, peak_flops_per_s=peaks, launch_s=0.0,
                       memory_bandwidth_efficiency=self.memory, overlap_slowdown=min(2.0, 1.0 + self.interference))


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
    """The constants of a file; those in use by default."""
    return tomllib.loads(path.read_text("utf-8"))


@cache
def _in_use() -> Table:
    return load()


def check_software(name: str) -> str:
    """The name of a software profile. Raises ClusterError listing those known."""
    if not isinstance(name, str) or name not in SOFTWARE:
        raise ClusterError(f"unknown software {name!r}: known are {', '.join(SOFTWARE)}")
    return name


def dump(table: Mapping[str, Mapping[str, Mapping[str, float]]], head: str) -> str:
    """TOML, in the order of `Profile`."""
    order = [field.name for field in fields(Profile) if field.type == "float"]
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    for kind, entries in table.items():
        for entry, values in entries.items():
            lines += ["", f'[{kind}."{entry}"]']
            lines += [f"{name} = {float(f'{values[name]:.3g}')!r}" for name in order if name in values]
    return "\n".join(lines) + "\n"
