"""A published run as typed data: model, machine, plan, and the software that ran it; or why it cannot be told.

What a row leaves out is filled in by what its software does by default, and only where that is known; `AbstainError`
says what is missing otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cost_models import Cluster, Group, Link

Row = Mapping[str, Any]

#: Machines of cost_models by what a GPU's name contains; of several that fit the first.
MACHINES = (
    (r"V100.*16 ?GB", "v100-sxm-16"), (r"V100", "v100-sxm-32"),
    (r"A[18]00.*PCI", "a100-pcie"), (r"A[18]00.*40 ?GB", "a100-sxm-40"), (r"A[18]00", "a100-sxm"),
    (r"H100.*(HBM2E|500 ?W|96 ?GB)", "h100-hbm2e"), (r"H[18]00(?!.*(PCI|NVL))", "h100-sxm"), (r"H200", "h200"),
    (r"B200", "b200"), (r"B300", "b300"), (r"GB200", "gb200-nvl72"), (r"GB300", "gb300-nvl72"),
    (r"MI300X", "mi300x"), (r"L4(?!\d)", "l4"),
)

#: What no row can mean: more ranks than anybody has, and larger numbers than any model's sizes.
MOST_DEVICES = 2**18
LARGEST = 2**32

#: NVIDIA's releases from which on its software counts as a generation of its own: 25.11 dropped no tokens any more,
#: 26.02 came with new expert dispatch, 26.06 with graphs over layers with experts (on Blackwell: on H100 the same jobs
#: take as long as before).
RELEASES = ("25.09", "25.11", "26.02", "26.06")

#: What Megatron-Bridge's recipes say where its tables do not (scripts/performance/configs/*/*workload_base_configs.py,
#: 2025-10 to 2026-06): by release, by "model gpu precision"; of several that fit the first. How much of a layer with
#: experts CUDA graphs launch (else nothing):
GRAPHS = (
    ("26.06", r"(deepseekv3|gptoss120b) gb\d+ mxfp8", "step"),
    ("26", r"(deepseekv3|kimik2) (gb\d+|b300)", "parts"),
    ("26", r"qwen3235b\w* gb\d+", "parts"),
    ("26", r"qwen330b\w* g?b\d+", "parts"),
    ("26", r"gptoss120b (gb300|b300)", "parts"),
    ("25.09", r"qwen3(30b\w* g?b|235b\w* gb)\d+", "step"),
)
#: And the dispatcher of tokens (else one that sends a token once to each host):
DISPATCHERS = (
    ("26.06", r"gptoss120b gb\d+ mxfp8", ""),
    ("", r"gptoss", "alltoall"),
    ("25", r"qwen3", "alltoall"),
    ("26", r"qwen3235b\w* (b\d+|h100)", "alltoall"),
)

#: vTrain's steps on one host are added up of traces of single layers, taken kernel by kernel (its src/predictor.py).
TRACED = "traced"

#: torch with FSDP2: compiled ("torch-compile") where the row says so, else "torch-eager".
TORCH = "torch"

#: Generations of software, by words of a source's title. What they do differently: `cost_models/profiles.toml`.
STACKS = (
    (TORCH, ("torchtitan", "fms-fsdp")),
    ("megatron-deepspeed", ("bigscience", "bloom", "vtrain", "mt-nlg", "deepspeed")),
    ("nemo-26.02", ("megatron-bridge skills",)),
    ("megatron-core", ("megatron-bridge", "nemo", "examples/llama", "llama 3", "megatron-core", "mlperf")),
    ("composer", ("mosaicml", "llm-foundry", "composer")),
    (TORCH, ("fsdp",)),
    ("alpa", ("alpa",)),
    ("internevo", ("internevo", "internlm")),    # torch with flash attention, nothing compiled
    ("megatron-2022", ("korthikanti",)),
    ("megatron-2021", ("megatron", "sc21")),
)


#: Software whose plans a row's columns cannot tell.
UNTOLD = ("nnscaler", "cubeplanner")


class AbstainError(Exception):
    """A row that lacks a fact without which no prediction would be more than a guess; the message names it."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in ``layers`` of the model's layers; the others are dense. ``biased``: each expert adds a
    vector of its own after its products."""

    number: int
    top_k: int
    ffn: int
    shared_ffn: int
    layers: int
    biased: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.number or self.ffn < 1 or self.shared_ffn < 0 or self.layers < 1:
            raise AbstainError(f"impossible experts: {self}")


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): ranks of the query and key-value projections and head sizes."""

    query_rank: int
    key_value_rank: int
    rope: int
    query_key: int
    value: int


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer; ``query_groups`` are key-value heads; every other layer's attention looks back
    ``window`` tokens only, where that is not 0. ``further``: layers with experts and heads of their own that predict
    tokens after the next (multi-token prediction, DeepSeek-V3), beside the others."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    query_groups: int
    head_dim: int
    vocab: int
    seq_len: int
    gated: bool = False
    tied: bool = True
    experts: Experts | None = None
    latent: Latent | None = None
    window: int = 0
    further: int = 0

    def __post_init__(self) -> None:
        sizes = (self.layers, self.hidden, self.heads, self.query_groups, self.head_dim, self.vocab, self.seq_len)
        if min(sizes) < 1 or self.ffn < 0 or self.query_groups > self.heads:
            raise AbstainError(f"impossible sizes: {self}")

    @property
    def mixed_layers(self) -> int:
        """Layers with experts."""
        return min(self.experts.layers, self.layers) if self.experts else 0

    @property
    def mlp_factor(self) -> int:
        """Matrices of an MLP: up and down, and a gate."""
        return 3 if self.gated else 2

    def attention_parameters(self) -> float:
        """Of one layer's projections."""
        h, a, d = self.hidden, self.heads, self.head_dim
        if self.latent is None:
            return h * d * (2 * a + 2 * self.query_groups)
        z = self.latent
        query = h * z.query_rank + z.query_rank * a * z.query_key if z.query_rank else h * a * z.query_key
        key_value = h * (z.key_value_rank + z.rope) + z.key_value_rank * a * (z.query_key - z.rope + z.value)
        return query + key_value + a * z.value * h

    def mlp_parameters(self, active: bool = False) -> tuple[float, float]:
        """Of a dense layer, and of a layer with experts (those that a token uses, if ``active``)."""
        dense, mixed = self.mlp_factor * self.hidden * self.ffn, 0.0
        if self.experts:
            e = self.experts
            used = e.top_k if active else e.number
            mixed = self.mlp_factor * self.hidden * (used * e.ffn + e.shared_ffn) + self.hidden * e.number
        return dense, mixed

    def parameters(self, active: bool = False) -> float:
        """All of the model, embeddings included."""
        dense, mixed = self.mlp_parameters(active)
        layers = self.layers * self.attention_parameters() + (self.layers - self.mixed_layers) * dense
        return layers + self.mixed_layers * mixed + self.vocab * self.hidden * (1 if self.tied else 2)

    def flops(self, sequences: float) -> float:
        """Of forward and backward, nothing recomputed: 6 per matrix parameter and token, attention not halved for
        being causal (PaLM, appendix B)."""
        matrices = self.parameters(active=True) - (0 if self.tied else self.vocab * self.hidden)
        width = self.heads * (self.latent.query_key + self.latent.value if self.latent else 2 * self.head_dim)
        return sequences * self.seq_len * (6 * matrices + 6 * self.layers * self.seq_len * width)


@dataclass(frozen=True)
class Plan:
    """Who does what. ``recompute`` names what is run again in backward: "none", "selective" (attention's core),
    "full" (the layer). ``graphs``: how much of a layer with experts CUDA graphs launch, "none", "parts" (all but
    dispatch and experts) or "step". ``fsdp``: parameters are gathered layer by layer by torch's FSDP or one like it."""

    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    virtual: int
    micro_batch: int
    micro_batches: int
    zero_stage: int
    fsdp: bool
    hybrid: bool    # FSDP inside a host, replicas across hosts
    sequence_parallel: bool
    recompute: str
    precision: str
    gpipe: bool = False
    again: float | None = None    # share of layers that "selective" runs again whole, where the row tells it
    modules: frozenset[str] = frozenset()    # what "selective" runs again, where the row names it
    dispatcher: str = ""    # of tokens to experts: "alltoall" sends a copy to each expert, others one to each host
    expert_overlap: bool | None = None    # whether dispatch runs beside other micro-batches' compute, where stated
    graphs: str = "none"

    def __post_init__(self) -> None:
        if min(self.data, self.tensor, self.pipeline, self.context, self.expert, self.virtual) < 1:
            raise AbstainError(f"degrees must be at least 1: {self}")
        if min(self.micro_batch, self.micro_batches) < 1:
            raise AbstainError(f"micro-batches must be at least 1: {self}")
        if self.devices > MOST_DEVICES:
            raise AbstainError(f"{self.devices} devices are more than there are: {self}")

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context


@dataclass(frozen=True)
class Run:
    """One row, understood."""

    model: Model
    plan: Plan
    machine: str
    cluster: Cluster
    stack: str
    network: str
    master_in_float32: bool = True
    gradient_bytes: int = 2
    float32_sums: bool = False    # gradients of two bytes are added up in float32, by another pass over them
    groups: dict[tuple[str, float], Group] = field(default_factory=dict, compare=False, repr=False)

    @property
    def ends(self) -> bool:
        """Whether embedding and head count as a layer each where the pipeline is cut: where that alone makes equal
        stages."""
        slots = self.plan.pipeline * self.plan.virtual
        return self.model.layers % slots != 0 and (self.model.layers + 2) % slots == 0

    @property
    def vocab(self) -> int:
        """Classes that are computed: Megatron fills up to a multiple of 128 on each tensor rank, vTrain's layers leave
        the rest of a division out."""
        stated, tensor = self.model.vocab, self.plan.tensor
        if self.stack == TRACED:
            return stated // tensor * tensor
        block = 128 * tensor if self.stack.startswith(("megatron", "nemo")) else 1
        return -(-stated // block) * block


def read(row: Row) -> Run:
    """The run that a row describes. Raises AbstainError naming the fact that is missing."""
    stack = _stack(row)
    model = _model(row)
    machine = _machine(row)
    plan = _plan(row, model, stack)
    cluster = _cluster(row, machine, plan.devices)
    precision = str(_get(row, "plan", "precision") or "bf16").lower()
    pure = "pure" in precision
    float32_sums = _sums_in_float32(stack, precision)
    return Run(
        model, plan, machine, cluster, stack, _network(row),
        master_in_float32=not pure,
        gradient_bytes=4 if "fp32 grad" in precision or float32_sums else 2,
        float32_sums=float32_sums,
    )


def _get(row: Row, *path: str) -> Any:
    value: Any = row
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _sums_in_float32(stack: str, precision: str) -> bool:
    """DeepSpeed's BF16_Optimizer."""
    return stack == "megatron-deepspeed" and "bf16" in precision and "fp16" not in precision


def is_torch(stack: str) -> bool:
    """torch with FSDP2, eager or compiled."""
    return stack in ("torch-eager", "torch-compile")


def is_core(stack: str) -> bool:
    """Megatron-Core, of any release."""
    return stack == "megatron-core" or stack.startswith("nemo-")


def _whole(row: Row, *path: str, default: int | None = None) -> int:
    value = _get(row, *path)
    if value is None or isinstance(value, bool):
        if default is None:
            raise AbstainError(f"{'.'.join(path)} is not stated")
        return default
    if not isinstance(value, int | float) or not math.isfinite(value) or value != int(value):
        raise AbstainError(f"{'.'.join(path)} = {value!r} is not a whole number")
    if abs(value) > LARGEST:
        raise AbstainError(f"{'.'.join(path)} = {value:g} is beyond any model or machine")
    return int(value)


def _stack(row: Row) -> str:
    """By its source's words; else by what the job does that older software could not."""
    title = _title(row)
    if any(name in title for name in UNTOLD):
        raise AbstainError("nnScaler's plans cut and order ops as degrees of parallelism do not tell")
    stack = next((stack for stack, words in STACKS if any(word in title for word in words)), "")
    if stack == "megatron-core":
        return _release(row)
    if stack == "megatron-deepspeed" and "ground_truth_single" in str(_get(row, "source", "locator")):
        return TRACED
    if not stack and "none" not in str(_get(row, "plan", "fsdp") or "none").lower():
        stack = TORCH
    if stack == TORCH:
        return "torch-compile" if _get(row, "plan", "compile") else "torch-eager"
    if stack and stack not in ("megatron-2021", "megatron-2022"):
        return stack
    if _is_modern(row):
        return "megatron-core"
    newer = _get(row, "plan", "sequence_parallel") or "selective" in str(_get(row, "plan", "recompute")).lower()
    return stack or ("megatron-2022" if newer else "megatron-2021")


def _title(row: Row) -> str:
    return f"{_get(row, 'source', 'title') or ''} {_get(row, 'source', 'url') or ''}".lower()


def _by_recipe(row: Row, stack: str, known: tuple[tuple[str, str, str], ...]) -> str:
    """What NVIDIA's recipes of the time say of the job (`GRAPHS`, `DISPATCHERS`); "" where nothing."""
    name = re.sub(r"[\W_]", "", str(_get(row, "model", "name") or ""))
    gpu = str(_get(row, "hardware", "gpu") or "").partition("-")[0]
    job = f"{name} {gpu} {_get(row, 'plan', 'precision') or ''}".lower()
    return next((said for release, words, said in known
                 if stack.startswith(f"nemo-{release}") and re.match(words, job)), "")


def _is_modern(row: Row) -> bool:
    """Flash attention was in use by the time of these devices and models (2023)."""
    heads, groups = _get(row, "model", "heads"), _get(row, "model", "kv_heads")
    old = re.search(r"V100|A[18]00", str(_get(row, "hardware", "gpu")).upper())
    return not old or bool(_get(row, "model", "gated_mlp")) or bool(groups and groups != heads)


def _release(row: Row) -> str:
    """Megatron-Core in one of NVIDIA's dated releases, else as it was in 2024."""
    date = re.search(r"\b(2[5-9]\.\d\d)\b", str(_get(row, "source", "locator") or ""))
    if not date:
        return "megatron-core"
    blackwell = str(_get(row, "hardware", "gpu")).startswith(("B", "GB"))
    since = [release for release in RELEASES if release <= date[1] and (blackwell or release != "26.06")]
    return f"nemo-{since[-1] if since else RELEASES[0]}"


def _machine(row: Row) -> str:
    gpu = str(_get(row, "hardware", "gpu") or "")
    memory = _number(row, "hardware", "gpu_mem_gb")
    name = gpu.upper() if re.search(r"\d ?GB", gpu.upper()) else f"{gpu.upper()} {memory:.0f}GB"
    for words, machine in MACHINES:
        if re.search(rf"(?<![A-Z0-9]){words}", name):
            return machine
    raise AbstainError(f"no description of GPU {gpu!r}")


#: Published configurations of models whose rows leave them out (config.json on huggingface.co).
_LATENT = {
    "deepseekv3": Latent(1536, 512, 64, 192, 128),
    "kimi_k2": Latent(1536, 512, 64, 192, 128),
    "moonlight": Latent(0, 512, 64, 192, 128),
}
_WINDOWS = {"gptoss": 128}
_FURTHER = {"deepseekv3": 1}
_MOONLIGHT = Model(27, 2048, 11264, 16, 16, 128, 163840, 4096, True, False, Experts(64, 6, 1408, 2816, 26),
                   _LATENT["moonlight"])


def _model(row: Row) -> Model:
    name = re.sub(r"[\s-]", "", str(_get(row, "model", "name") or "")).lower()
    if _get(row, "model", "hybrid_mamba"):
        raise AbstainError("state-space layers are not modelled, and the row has no sizes")
    if name.startswith("moonlight") and _get(row, "model", "hidden") is None:
        return replace(_MOONLIGHT, seq_len=_whole(row, "model", "seq_len", default=4096))
    heads = _whole(row, "model", "heads")
    hidden = _whole(row, "model", "hidden")
    moe = _get(row, "model", "moe")
    layers = _whole(row, "model", "layers")
    experts = None
    if isinstance(moe, Mapping):
        number, top_k, ffn = (_whole(row, "model", "moe", key) for key in ("experts", "topk", "expert_ffn"))
        experts = Experts(number, top_k, ffn, _whole(row, "model", "moe", "shared_ffn", default=0),
                          _whole(row, "model", "moe", "moe_layers", default=layers), name.startswith("gptoss"))
    gated = _get(row, "model", "gated_mlp")
    tied = _get(row, "model", "tied_embeddings")
    dense = experts is None or experts.layers < layers
    return Model(
        layers, hidden,
        _whole(row, "model", "ffn", default=None if dense and gated else 4 * hidden if dense else 0),
        heads,
        _whole(row, "model", "kv_heads", default=heads),
        _whole(row, "model", "head_dim", default=hidden // max(1, heads)),
        _whole(row, "model", "vocab", default=51200),
        _whole(row, "model", "seq_len"),
        bool(gated), True if tied is None else bool(tied), experts,
        next((latent for key, latent in _LATENT.items() if name.startswith(key)), None),
        next((window for key, window in _WINDOWS.items() if name.startswith(key)), 0),
        0 if "w/o MTP" in str(row.get("notes")) else next((n for k, n in _FURTHER.items() if name.startswith(k)), 0),
    )


def _plan(row: Row, model: Model, stack: str) -> Plan:
    tensor, pipeline, context = (_whole(row, "plan", key, default=1) for key in ("tp", "pp", "cp"))
    if min(tensor, pipeline, context) < 1:
        raise AbstainError(f"degrees must be at least 1, not tp {tensor}, pp {pipeline}, cp {context}")
    devices = _whole(row, "hardware", "n_gpus", default=0)
    if not devices and _get(row, "plan", "dp") is None:
        raise AbstainError("neither the number of devices nor the data-parallel degree is stated")
    data = _whole(row, "plan", "dp", default=max(1, devices // (tensor * pipeline * context)))
    schedule = str(_get(row, "plan", "schedule") or "").lower()
    virtual = _whole(row, "plan", "virtual_stages", default=2 if "interleaved" in schedule else 1)
    micro, micro_batches = _micro_batches(row, data, pipeline * virtual, stack)
    fsdp = str(_get(row, "plan", "fsdp") or "none").lower()
    zero = _zero_stage(row, is_core(stack))
    if _get(row, "plan", "offload"):
        raise AbstainError("offloading is not modelled")
    core = is_core(stack)
    precision = str(_get(row, "plan", "precision") or "bf16").lower()
    if _sums_in_float32(stack, precision):
        zero = 1    # it shards its state over data ranks whatever the stage
    parallel = _get(row, "plan", "sequence_parallel")
    return Plan(
        data, tensor, pipeline, context, _whole(row, "plan", "ep", default=1), virtual, micro, micro_batches,
        zero_stage=zero,
        fsdp="none" not in fsdp or zero == 3,
        hybrid="hsdp" in fsdp,
        sequence_parallel=tensor > 1 and (core or is_torch(stack) if parallel is None else bool(parallel)),
        recompute=_recompute(row, stack),
        precision="fp4" if "fp4" in precision else "fp8" if "fp8" in precision or "float8" in precision else "bf16",
        gpipe="gpipe" in schedule,
        again=_again(row) if is_torch(stack) else None,
        modules=frozenset(re.findall(r"[a-z_]+", str(_get(row, "plan", "recompute")).lower().partition(":")[2])),
        dispatcher=str(_get(row, "plan", "overlap", "dispatcher") or _by_recipe(row, stack, DISPATCHERS)).lower(),
        expert_overlap=_stated_overlap(row),
        graphs="parts" if _get(row, "plan", "overlap", "cuda_graph") else _by_recipe(row, stack, GRAPHS) or "none",
    )


def _micro_batches(row: Row, data: int, stages: int, stack: str) -> tuple[int, int]:
    """Sequences of a micro-batch and micro-batches of a step, on each data-parallel rank.

    Where neither is stated: torchtitan cuts the batch into as many micro-batches as there are stages, Megatron takes
    one sequence at a time, and others do not accumulate.
    """
    micro, steps, batch = (_number(row, "plan", key) for key in ("micro_batch", "grad_accum", "global_batch"))
    if data < 1:
        raise AbstainError(f"degrees must be at least 1, not dp {data}")
    if not batch and not (micro and steps):
        if micro or steps:
            raise AbstainError("the number of micro-batches is not stated")
        raise AbstainError("neither the micro-batch nor the global batch is stated")
    if not micro and steps:
        micro = batch / data / steps
    if not micro:
        one = stages > 1 or is_core(stack)
        micro = batch // data // stages if is_torch(stack) else 1 if one else batch // data
    micro = max(1, round(micro))
    return micro, max(1, math.ceil(batch / (data * micro) - 1e-6) if batch else round(steps))


def _number(row: Row, *path: str) -> float:
    """A positive number, or 0 where none is stated."""
    value = _get(row, *path)
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LARGEST
    return float(value) if good else 0.0


def _zero_stage(row: Row, core: bool) -> int:
    """As stated, by number or in words ("ZeRO-3"; other words are Alpa's, for stage 2); else what the software does."""
    stated = _get(row, "plan", "zero")
    if stated is None:
        return 1 if core else 0
    number = re.search(r"[0-3](?!\d)", str(stated))
    return int(number[0]) if number and not isinstance(stated, bool) else 2 if stated else 0


def _stated_overlap(row: Row) -> bool | None:
    stated = re.search(r"overlap (on|off)", str(_get(row, "plan", "overlap", "ep") or "").lower())
    return stated[1] == "on" if stated else None


def _recompute(row: Row, stack: str) -> str:
    stated = _get(row, "plan", "recompute")
    if stack == TRACED:
        return "none"    # whatever is stated: no A100 is as fast as these rows if it were so
    if stated is None:
        always = stack.startswith("megatron-2") or stack == "megatron-deepspeed"
        return "full" if always else "selective" if is_torch(stack) else "none"
    stated = str(stated).lower()
    return "full" if stated.startswith("full") else "selective" if stated.startswith("selective") else "none"


def _again(row: Row) -> float | None:
    """The share of layers that are run again, of hardware over model utilisation: a layer again is a third more FLOP.

    >>> _again({"measured": {"mfu": 0.45, "hfu": 0.6}})
    1.0
    """
    model, hardware = (_number(row, "measured", key) for key in ("mfu", "hfu"))
    return min(1.0, 3 * (hardware / model - 1)) if model and hardware >= model else None


def _cluster(row: Row, machine: str, devices: int) -> Cluster:
    """The machine, with as many devices to a host and links as fast as the row says."""
    cluster = Cluster.load(machine, num_devices=devices, software="none")
    inner, outer = cluster.links[0], cluster.links[-1]
    between = cluster.links[1:-1]
    inside = str(_get(row, "hardware", "intra_bw") or "")
    per_host = _whole(row, "hardware", "gpus_per_node", default=inner.num_devices)
    if inner.num_devices <= 16 and per_host != inner.num_devices:
        inner = replace(inner, num_devices=per_host)
        outer = replace(outer, nics_per_host=min(outer.nics_per_host or per_host, per_host))
    stated = None if "vTrain config" in inside else re.match(r"(\d+\.?\d*) GB/s", inside)    # a simulator's
    if stated and float(stated[1]) > 0:
        inner = replace(inner, bandwidth_bytes_per_s=float(stated[1]) * 1e9)
    elif re.search("[AH]800", str(_get(row, "hardware", "gpu")).upper()):    # 400 GB/s of NVLink, not 600 or 900
        left = 2 / 3 if machine.startswith("a100") else 4 / 9
        inner = replace(inner, bandwidth_bytes_per_s=left * inner.bandwidth_bytes_per_s)
    if inner.num_devices == 72 and devices > 64:
        inner = replace(inner, num_devices=64)    # of a rack's 72, large jobs use 64: groups of 64 fit, of 72 do not
    if "NVLink 4 inter-gpu" in inside and per_host == 8:
        inner, between = replace(inner, num_devices=4), (_boards(cluster),)
    rate = host_bits_per_s(str(_get(row, "hardware", "inter_bw") or ""), per_host)
    if rate:
        nics = outer.nics_per_host or per_host
        outer = replace(outer, bandwidth_bytes_per_s=0.9 * rate / 8 / nics)
    return replace(cluster, links=(inner, *between, outer))


def _network(row: Row) -> str:
    """The kind of network between hosts, as far as the row says."""
    stated = str(_get(row, "hardware", "inter_bw") or "").lower()
    kinds = {"omni-path": "omni-path", "roce": "roce", "rdma": "roce", "infiniband": "infiniband", "cx-7": "infiniband"}
    return next((kind for word, kind in kinds.items() if word in stated), "unknown")


def _boards(cluster: Cluster) -> Link:
    """PCIe between two boards of four GPUs. "4 inter-gpu connects" is how a board of four A100s is wired (four NVLinks
    to each of the three others); eight on one switch have no such number."""
    return Link("PCIe between boards", 8, 5e-6, cluster.host.to_device_bytes_per_s)


def host_bits_per_s(stated: str, per_host: int) -> float:
    """Bits per second that leave a host, as a row states it; 0 if it does not.

    >>> host_bits_per_s("4 Omni-Path links per node (OPA, 100 Gb/s each by product)", 8) / 1e9
    400.0
    >>> host_bits_per_s("400 Gb/s RDMA per GPU", 8) / 1e9
    3200.0
    """
    rate = re.search(r"([\d.]+)\s*Gb/s", stated)
    links = re.match(r"(\d+) .*links? per node", stated)
    if not rate:
        return 4e11 if links and "Omni-Path" in stated else 0.0
    times = float(links[1]) if links else per_host if "per GPU" in stated else 1.0
    return float(rate[1]) * 1e9 * times
