"""What Megatron-LM checks of its arguments before it runs, as a table.

Restated from megatron/training/arguments.py, core/parallel_state.py, core/num_microbatches_calculator.py,
core/pipeline_parallel/schedules.py, core/transformer/transformer_config.py and pipeline_parallel_layer_layout.py at
d98e8a64dd (August 2026).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoparallel.errors import PlanError, shown

VERSION = "d98e8a64dd (August 2026)"


@dataclass(frozen=True)
class Flags:
    """Arguments by name, without dashes in front (a switch: True), and the environment. ``world``: processes."""

    given: Mapping[str, int | str | bool]
    world: int
    environment: Mapping[str, str]

    def number(self, name: str, default: int = 1) -> int:
        value = self.given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise PlanError(f"--{name} is {shown(value)}: give a whole number")
        return value

    def __getitem__(self, name: str) -> int | str | bool | None:
        return self.given.get(name)

    def on(self, *names: str) -> bool:
        return any(self.given.get(name) not in (None, False) for name in names)

    @property
    def tp(self) -> int:
        return self.number("tensor-model-parallel-size")

    @property
    def pp(self) -> int:
        return self.number("pipeline-model-parallel-size")

    @property
    def cp(self) -> int:
        return self.number("context-parallel-size")

    @property
    def ep(self) -> int:
        return self.number("expert-model-parallel-size")

    @property
    def etp(self) -> int:
        return self.number("expert-tensor-parallel-size", self.tp)

    @property
    def dp(self) -> int:
        return max(1, self.world // (self.tp * self.pp * self.cp))

    @property
    def micro_batches(self) -> int:
        return self.number("global-batch-size") // (self.number("micro-batch-size") * self.dp)

    @property
    def interleaved(self) -> bool:
        stages = len(layout_stages(str(self["pipeline-model-parallel-layout"]))) if self.on(LAYOUT) else 0
        return self.on(*_INTERLEAVING[:2]) or stages > self.pp

    @property
    def layers(self) -> int:
        """Number of layers that Megatron distributes over stages: embedding and loss are counted as one each where the
        arguments say so."""
        return self.number("num-layers") + self.on("account-for-embedding-in-pipeline-split") + self.on(
            "account-for-loss-in-pipeline-split")


LAYOUT = "pipeline-model-parallel-layout"
_INTERLEAVING = ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank", LAYOUT)
_UNEVEN = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", LAYOUT)


@dataclass(frozen=True)
class Rule:
    """``text``: what is required. ``holds``: of given flags; rules of arguments that are not given hold."""

    name: str
    text: str
    holds: Callable[[Flags], bool]


def layout_stages(text: str) -> list[str]:
    """The stages of a layout string, each as letters: ``Ett|(tt|)*2,tL`` -> ["Ett", "tt", "tt", "tL"].

    >>> layout_stages("Et*2|(tt|)*2,tL")
    ['Ett', 'tt', 'tt', 'tL']
    """
    text = text.replace(",", "").replace(" ", "")
    while found := re.search(r"\(([^()]*)\)\*(\d+)|([EtmL])\*(\d+)", text):
        inside, times = (found[1], int(found[2])) if found[2] else (found[3], int(found[4]))
        text = text[:found.start()] + inside * times + text[found.end():]
    return text.split("|")


def _layout_holds(flags: Flags) -> bool:
    if not flags.on(LAYOUT):
        return True
    stages = layout_stages(str(flags[LAYOUT]))
    text = "".join(stages)
    ends = text.count("E") == text.count("L") == 1 and text[0] == "E" and text[-1] == "L"
    return ends and not set(text) - set("EtmL") and text.count("t") == flags.number("num-layers")


def _mtp_holds(flags: Flags) -> bool:
    stages = layout_stages(str(flags[LAYOUT])) if flags.on(LAYOUT) else []
    having = [number for number, stage in enumerate(stages) if "m" in stage]
    if not having:
        return True
    text = "".join(stages)
    return len(having) == 1 and text.rindex("t") < text.index("m") and (
        having[0] % flags.pp != 0 or having[0] == len(stages) - flags.pp)


def _layers_per_stage_hold(flags: Flags) -> bool:
    if not flags.on(_INTERLEAVING[0]):
        stages = flags.number(_INTERLEAVING[1])
        return flags.on(*_UNEVEN) or flags.layers // flags.pp % stages == 0
    return flags.layers // flags.pp % flags.number(_INTERLEAVING[0]) == 0


def _groups_hold(flags: Flags) -> bool:
    if not flags.interleaved:
        return True
    group, count = flags.number("microbatch-group-size-per-virtual-pipeline-stage", flags.pp), flags.micro_batches
    return flags.pp <= group <= count and (count % group == 0 or count % group >= flags.pp)


def _kv_groups_hold(flags: Flags) -> bool:
    groups = flags.number("num-query-groups", 0) if flags.on("group-query-attention") else 0
    return not groups or groups % flags.tp == 0 or flags.tp % groups == 0


def _is_fsdp(flags: Flags) -> bool:
    return flags.on("use-megatron-fsdp", "use-torch-fsdp2")


def _connections_hold(flags: Flags) -> bool:
    """Before Blackwell."""
    one = flags.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    return not one if _is_fsdp(flags) else one or (flags.tp == 1 and flags.cp == 1)


def _recompute_holds(flags: Flags) -> bool:
    details = flags.on("recompute-method", "recompute-num-layers")
    if flags["recompute-granularity"] == "full":
        return flags.on("recompute-method") and flags.on("recompute-num-layers")
    return not details


def _hierarchy_holds(flags: Flags) -> bool:
    sizes = str(flags["hierarchical-context-parallel-sizes"] or "").split()
    return not sizes or math.prod(map(int, sizes)) == flags.cp


RULES: tuple[Rule, ...] = (
    Rule("world", "processes are a multiple of tensor x pipeline x context",
         lambda f: f.world % (f.tp * f.pp * f.cp) == 0),
    Rule("experts' world", "processes are a multiple of expert-tensor x expert x pipeline",
         lambda f: f.world % (f.etp * f.ep * f.pp) == 0),
    Rule("batch", "the global batch is a multiple of micro-batch x data-parallel ranks",
         lambda f: f.micro_batches >= 1
         and f.number("global-batch-size") % (f.number("micro-batch-size") * f.dp) == 0),
    Rule("layers", "layers (and what embedding and loss count as) are a multiple of the pipeline's ranks, unless the "
         "first or last stage's, or a layout, are given",
         lambda f: f.on(*_UNEVEN) or f.layers % f.pp == 0),
    Rule("virtual layers", "layers of a pipeline rank are a multiple of those of a virtual stage",
         _layers_per_stage_hold),
    Rule("layout stages", "a layout's stages are a multiple of the pipeline's ranks",
         lambda f: not f.on(LAYOUT) or len(layout_stages(str(f[LAYOUT]))) % f.pp == 0),
    Rule("layout", "a layout has one E, first, one L, last, and a t for each layer", _layout_holds),
    Rule("layout mtp", "a layout's m come after all t, in one stage, not on the first rank but in its last chunk",
         _mtp_holds),
    Rule("one interleaving", "at most one of " + ", ".join("--" + name for name in _INTERLEAVING) + " is given",
         lambda f: sum(f.on(name) for name in _INTERLEAVING) <= 1),
    Rule("interleaving", "interleaving needs 2 pipeline ranks, and 3 without overlap of sends",
         lambda f: not f.interleaved or f.pp > (2 if f.on("no-overlap-p2p-communication") else 1)),
    Rule("interleaved micro-batches", "interleaving needs pipeline ranks <= group <= micro-batches, and a last group "
         "of no or of at least as many micro-batches as pipeline ranks", _groups_hold),
    Rule("heads", "attention heads are a multiple of tensor-parallel ranks",
         lambda f: not f.on("num-attention-heads") or f.number("num-attention-heads") % f.tp == 0),
    Rule("query groups", "query groups are a multiple or a divisor of tensor-parallel ranks", _kv_groups_hold),
    Rule("experts", "experts are a multiple of expert-parallel ranks, and there are some",
         lambda f: f.ep == 1 or (f.on("num-experts") and f.number("num-experts") % f.ep == 0)),
    Rule("sequence", "the sequence is a multiple of 2 x context-parallel ranks",
         lambda f: f.cp == 1 or not f.on("seq-length") or f.number("seq-length") % (2 * f.cp) == 0),
    Rule("context hierarchy", "hierarchical context sizes multiply to the context-parallel ranks", _hierarchy_holds),
    Rule("sequence parallel", "--sequence-parallel needs 2 tensor-parallel ranks",
         lambda f: not f.on("sequence-parallel") or f.tp > 1),
    Rule("experts with tensor", "expert parallelism with tensor parallelism needs --sequence-parallel",
         lambda f: f.ep == 1 or f.tp == 1 or f.on("sequence-parallel")),
    Rule("tensor overlap", "--tp-comm-overlap needs --sequence-parallel",
         lambda f: not f.on("tp-comm-overlap") or f.on("sequence-parallel")),
    Rule("gather overlap", "--overlap-param-gather needs --overlap-grad-reduce, and the distributed optimizer or "
         "Megatron's FSDP",
         lambda f: not f.on("overlap-param-gather") or (
             f.on("overlap-grad-reduce") and f.on("use-distributed-optimizer", "use-megatron-fsdp"))),
    Rule("gather with step", "--overlap-param-gather-with-optimizer-step needs interleaving and --overlap-param-gather",
         lambda f: not f.on("overlap-param-gather-with-optimizer-step") or (
             f.interleaved and f.on("overlap-param-gather"))),
    Rule("torch fsdp", "--use-torch-fsdp2 goes with one pipeline rank, one expert-parallel rank, no distributed "
         "optimizer, no gradient-accumulation fusion, untied embeddings, no fp16, and --ckpt-format torch_dist or "
         "torch_dcp",
         lambda f: not f.on("use-torch-fsdp2") or (
             f.pp == 1 and f.ep == 1 and not f.on("use-distributed-optimizer", "fp16")
             and f.on("no-gradient-accumulation-fusion") and f.on("untie-embeddings-and-output-weights")
             and f["ckpt-format"] in ("torch_dist", "torch_dcp"))),
    Rule("megatron fsdp", "--use-megatron-fsdp goes with --ckpt-format fsdp_dtensor and --optimizer adam or sgd",
         lambda f: not f.on("use-megatron-fsdp") or (
             f["ckpt-format"] == "fsdp_dtensor" and f.given.get("optimizer", "adam") in ("adam", "sgd"))),
    Rule("connections", "CUDA_DEVICE_MAX_CONNECTIONS is 1 with tensor or context parallelism, and not 1 with FSDP",
         _connections_hold),
    Rule("recompute", "full recompute needs --recompute-method and --recompute-num-layers; selective forbids both",
         _recompute_holds),
    Rule("activation offload", "--cpu-offloading-num-layers goes with one pipeline rank and without recompute",
         lambda f: not f.on("cpu-offloading-num-layers") or (
             f.pp == 1 and not f.on("recompute-granularity", "recompute-activations"))),
)


def broken(flags: Flags) -> list[Rule]:
    """The rules that the arguments break; those that others make meaningless are not tried once one is broken."""
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
                 "expert-model-parallel-size", "expert-tensor-parallel-size", "micro-batch-size", "global-batch-size"):
        if flags.number(name) < 1:
            raise PlanError(f"--{name} is {flags.number(name)}: give a whole number, 1 or more")
    return [rule for rule in RULES if not rule.holds(flags)]


def flags_of(words: Sequence[str], world: int, environment: Mapping[str, str]) -> Flags:
    """Arguments of a command line. Values are whole numbers where they read as such; several words are one text."""
    given: dict[str, int | str | bool] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            given[name] = _value(value) if equals else True
        elif name:
            given[name] = _value(word) if given[name] is True else f"{given[name]} {word}"
    return Flags(given, world, environment)


def _value(text: str) -> int | str:
    return int(text) if re.fullmatch(r"\d+", text) else text


__all__ = ["RULES", "VERSION", "Flags", "Rule", "broken", "flags_of", "layout_stages"]
