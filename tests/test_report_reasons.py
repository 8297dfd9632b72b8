"""What the first screen says of the job and of plans that are not there: impossible, not priced, the same but for their
axes; how sure the seconds are."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import autoparallel
from autoparallel.capture import capture
from autoparallel.partition import Splits
from autoparallel.planning.by_hand import ByHand
from autoparallel.planning.hand_layouts import HandEstimate
from autoparallel.planning.options import Options
from autoparallel.planning.plan_by_hand import estimate_by_hand, plan_by_hand
from autoparallel.planning.tuned import tuned
from autoparallel.planning.usual import UsualPlans, state_bytes, usual_plans
from autoparallel.plans import Combinations, Plan
from autoparallel.plans.record import EXCLUDED, LATE, Alternative, LeftOut
from autoparallel.plans.reports import text
from autoparallel.plans.reports.asked import alternative_of
from autoparallel.plans.reports.build import report_of
from autoparallel.plans.reports.page import page
from autoparallel.plans.reports.report import Collectives
from autoparallel.plans.reports.summary import summary
from autoparallel.plans.reports.units import bytes_str, seconds_str
from cost_models import Cluster
from cost_models.memory import TrainingState
from tests.support.captured import plan_of
from tests.support.reported import HIDDEN, SEQUENCE, TOKENS, VOCABULARY, Block, another, graph, left, made
from tests.support.tiers import slow

BATCH, LAYERS = TOKENS // SEQUENCE, 8


@functools.cache
def by_hand(plan: str, devices: int = 4) -> Plan:
    return made(devices, by_hand=plan)


def left_out(options: Options, devices: int = 4) -> dict[str, LeftOut]:
    """The usual plans that are left out where there is no time to price any."""
    found = usual_plans(Splits(graph()), Cluster.load("h100-sxm", num_devices=devices), options, 0.0)
    assert not found.priced
    return {one.by_hand: one for one in found.left_out}


def test_usual_plans_that_are_not_priced_have_a_reason() -> None:
    plain = left_out(Options(), devices=8 * BATCH)
    ranks = 8 * BATCH
    assert plain[f"dp={ranks},zero=3"].why == f"a batch of {BATCH} is smaller than {ranks} data-parallel ranks"
    assert plain["tp=8,zero=3,sequence_parallel,recompute=auto"].why == LATE
    fixed = left_out(Options(zero_stage=1))
    assert (fixed["dp=4,zero=3"].why, fixed["dp=4,zero=1"].why) == (EXCLUDED, LATE)


def test_state_that_exceeds_the_limit_is_told_with_optimizer_states() -> None:
    limit = 12e6
    found = left_out(Options(memory_limit_bytes=limit))
    elements = sum(node.outputs[0].num_elements for node in graph().of_kind("parameter"))
    assert found["dp=4"].least_bytes == 16 * elements > limit            # float32: weight, gradient, two states
    assert found["dp=4,zero=1"].least_bytes == (8 + 8 / 4) * elements
    assert found["dp=4,zero=3"].why == LATE and not found["dp=4,zero=3"].least_bytes
    away = left_out(Options(memory_limit_bytes=limit, offload="host"))
    assert away["dp=4"].why == LATE  # gradients leave the device too


def test_frozen_weights_have_no_gradients_and_states() -> None:
    assert state_bytes(ByHand(dp=2), TrainingState(8.0, 0.0, 0.0)) == 8.0
    with torch.device("meta"):
        model, x = nn.Linear(512, 512, bias=False), torch.zeros(64, 512)
    model.weight.requires_grad_(False)
    cluster, size = Cluster.load("h100-sxm", num_devices=4), 4 * 512 * 512
    found = usual_plans(Splits(capture(model, (x,), {})), cluster, Options(memory_limit_bytes=size - 1.0), 0.0)
    assert next(one for one in found.left_out if one.by_hand == "dp=4").least_bytes == size


def test_ranks_in_vain_are_told() -> None:
    vain, shared = (plan_of("llama", Cluster.load("h100-sxm", num_devices=2), mesh_shape=(2,), **options).summary()
                    for options in ({}, {"baseline": "ddp"}))
    assert vain.startswith("2 ranks that compute the same") and "One device would be as fast" in vain
    assert "One device" not in shared


def test_a_limit_beyond_the_device_is_told() -> None:
    plan = by_hand("dp=2,tp=2,zero=1")
    told = replace(plan, prediction=replace(plan.prediction, limit_bytes=200 * 2**30))
    assert "of the 200 GiB that tensors may take, more than the 80 GiB that a device has" in told.summary()


def test_the_first_screen_says_why_not() -> None:
    plan = by_hand("dp=2,tp=2,zero=1")
    limit, state = 64e9, "weights, gradients and optimizer states"
    gone = (left("dp=4", state, 4e12), left("dp=4,zero=1", state, 1e12),
            left("dp=4,zero=3", "a batch of 2 is not divided by 4 data-parallel ranks"),
            left("pp=2,micro_batch=1", LATE), left("dp=4,ep=4", LATE), left("tp=4,zero=3", EXCLUDED))
    told = replace(plan, prediction=replace(plan.prediction, limit_bytes=limit),
                   record=replace(plan.record, left_out=gone))
    last = told.summary().split("\n")[3]
    assert last == (
        f"Why no other: not possible, since {state} take more than the {bytes_str(limit)} that tensors may take: DDP "
        f"by hand (dp=4: at least {bytes_str(4e12)} a device), ZeRO-1 by hand (dp=4,zero=1: at least {bytes_str(1e12)} "
        "a device); not possible, since a batch of 2 is not divided by 4 data-parallel ranks: FSDP by hand "
        "(dp=4,zero=3); not priced for lack of time: by hand pipeline parallel, expert parallel; excluded by the "
        "options given: by hand FSDP with tensor parallel.")
    large = another(1.0, 1e12, "", "tp=4"), another(1.0, 2e12, "", "dp=2,cp=2")
    own = replace(plan, prediction=told.prediction, record=replace(plan.record, alternatives=large)).summary()
    assert "tensor parallel by hand" not in own and "context parallel by hand (dp=2,cp=2), needs" in own  # it is one
    report = report_of(told)
    table = text.alternatives_table(report, details=True)
    assert list(table.columns[0].cells)[-6:] == [f"by hand {one.by_hand.replace(',', ', ')}" for one in gone]
    assert list(table.columns[2].cells)[-1] == EXCLUDED
    assert text.alternatives_table(report).caption == "6 usual plans were not priced: --details says why"
    shown = page(told)
    assert f'state does not fit</td><td class="n">{bytes_str(4e12)} or more</td>' in shown and EXCLUDED in shown
    again = Plan.from_json(told.to_json())
    assert again.summary() == told.summary()


def told(plan: Plan, alternatives: tuple[Alternative, ...] = (), gone: tuple[LeftOut, ...] = (), **prediction: float
         ) -> str:
    """Why no other plan, of a plan with these others."""
    return replace(plan, prediction=replace(plan.prediction, **{"p50": 0.05, **prediction}),
                   record=replace(plan.record, alternatives=alternatives, left_out=gone)).summary().split("\n", 3)[3]


def test_plans_by_hand_are_whole_on_a_narrow_screen() -> None:
    """As they are given to --by-hand; a line ends within them where there is no room."""
    long = "dp=2,tp=8,pp=16,zero=1,virtual=4,micro_batch=1,recompute=selective,sequence_parallel"
    plan = by_hand("dp=2,tp=2,zero=1")
    plan = replace(plan, record=replace(plan.record, alternatives=(another(9.0, 1.0, "", long),)))
    shown = text.as_text(lambda console: text.print_summary(report_of(plan), console), 60)
    assert long in "".join(shown.split()) and "\u2026" not in shown


def test_ddp_and_zero_are_families_of_their_own() -> None:
    plan = by_hand("dp=2,tp=2,zero=1")
    step_s = plan.prediction.step_s
    others = another(2 * step_s, 1.0, "", "dp=4"), another(1.5 * step_s, 1.0, "", "dp=4,zero=1")
    said = told(plan, others)
    assert "; DDP by hand (dp=4), " in said and "100 % slower" in said
    assert "Why no other: ZeRO-1 by hand (dp=4,zero=1), " in said and "50 % slower; DDP" in said


def test_plans_of_a_priced_family_that_were_left_for_lack_of_time_are_counted() -> None:
    plan = by_hand("dp=2,tp=2,zero=1")
    gone = (*(left(f"pp={n},micro_batch=1", LATE) for n in (2, 4, 8)), left("dp=4,zero=3", LATE),
            left("pp=16", "a batch of 2 is not divided"), left("tp=4", LATE), left("tp=2", EXCLUDED))
    said = told(plan, (another(1.0, 1.0, "", "pp=2,micro_batch=2"),), gone)
    assert said.endswith("; not priced for lack of time: by hand FSDP, 3 more of pipeline parallel, 1 more of tensor "
                         "parallel.")


def test_zero_1_is_priced_with_recompute_and_what_does_not_fit_says_if_it_has_none() -> None:
    split, cluster = Splits(graph()), Cluster.load("h100-sxm", num_devices=4)
    plain, again = (f"dp=4,zero=1,micro_batch=1{more}" for more in ("", ",recompute=full"))
    peak = {text: plan.prediction.peak_bytes for text, plan in usual_plans(split, cluster, Options()).priced.items()}
    assert peak[again] < peak[plain]
    plan = by_hand("dp=2,tp=2,zero=1")
    large = another(1.0, 2e12, "", plain), another(1.0, 3e12, "", "dp=4,zero=3,recompute=auto")
    said = told(plan, large, limit_bytes=64e9)
    assert f"ZeRO-1 by hand ({plain}), needs {bytes_str(2e12)} a device without recompute" in said
    assert said.endswith(f"needs {bytes_str(3e12)} a device.")


def test_the_best_plan_of_a_family_is_told_by_hand_or_searched() -> None:
    plan = by_hand("dp=2,tp=2,zero=1")
    step_s, hand, found = plan.prediction.step_s, "pp=2,micro_batch=1", "Context parallel 2, pipeline parallel 2 (1F1B)"
    slow, fast, tensor = (another(factor * step_s, 1.0, title, text, kind) for factor, title, text, kind in (
        (1.9, "", hand, ""), (1.5, found, "", "pipeline parallel"),
        (1.7, "Data parallel 2, tensor parallel 2", "", "tensor parallel")))
    first = f"Why no other: pipeline parallel by the search (c{found[1:]}), "
    for others in ((slow, fast), (tensor, fast, slow)):
        said = told(plan, others)
        assert said.startswith(first) and "50 % slower" in said and hand not in said
    assert "; another that the search found: data parallel 2, tensor parallel 2, " in said  # the plan's own family
    assert told(plan, (fast, replace(slow, step_s=1.2 * step_s))).startswith(
        f"Why no other: pipeline parallel by hand ({hand}), ")


def test_nine_in_ten_is_two_sided() -> None:
    plan = by_hand("dp=4,zero=3")
    plan = replace(plan, prediction=replace(plan.prediction, p50=0.1, p90=0.2))
    step_s, (least_s, most_s) = plan.prediction.step_s, plan.prediction.nine_in_ten_s
    for measured_s in (least_s, most_s):
        assert abs(step_s - measured_s) / measured_s == pytest.approx(0.2)
    fast, sure = plan.summary().split("\n")[1:3]
    assert f"measured between {seconds_str(least_s)} and {seconds_str(most_s)})" in fast and "p90" not in fast
    assert "Typical error of such predictions 10 %: " in sure
    assert "two-sided" in page(plan) and f"between {seconds_str(least_s)} and {seconds_str(most_s)}" in page(plan)
    wild = replace(plan, prediction=replace(plan.prediction, p90=1.5))
    assert wild.prediction.nine_in_ten_s[1] == math.inf
    assert "and any time)" in wild.summary() and "and any time</dd>" in page(wild)


def test_the_software_is_named() -> None:
    plan = made(cluster=Cluster.load("h100-sxm", num_devices=4, software="torch-compile"), by_hand="dp=4,zero=3")
    assert " on 4 H100 SXM5 80GB with torch-compile (" in plan.summary()
    assert ">torch-compile</abbr> runs it" in page(plan)


@pytest.mark.parametrize(("devices", "joined"), [(4, False), (16, True)])
def test_boxes_are_joined_where_there_are_several(devices: int, joined: bool) -> None:
    plan = by_hand(f"dp={devices}", devices)
    assert plan.record.workload.link_names == (("NVLink 4", "InfiniBand NDR") if joined else ("NVLink 4",))
    assert ("the boxes by InfiniBand NDR" in page(plan)) == joined
    older = replace(plan, record=replace(plan.record, workload=replace(
        plan.record.workload, link_names=("NVLink 4", "InfiniBand NDR"))))
    assert ("the boxes by InfiniBand NDR" in page(older)) == joined


def test_missing_master_weights_are_said() -> None:
    plan, none = by_hand("dp=4"), ", no float32 master weights)"
    for state, said in (({"parameter": 2.0, "gradient": 2.0, "adamw states": 4.0}, True),
                        ({"parameter": 2.0, "gradient": 2.0, "adamw states with float32 master copy": 12.0}, False),
                        ({"parameter": 4.0, "gradient": 4.0, "adamw states": 8.0}, False)):
        work = replace(plan.record.workload, state_bytes=state)
        assert (none in replace(plan, record=replace(plan.record, workload=work)).summary()) == said


def test_bounds_are_rounded_up_and_alike() -> None:
    plan = by_hand("dp=4")
    evidence = replace(plan.evidence, stop_reason="gap", objective_s=1.2526, lower_bound_s=1.0,
                       step_bound_s=plan.prediction.step_s / 2.0211)
    sure = replace(plan, evidence=evidence)
    assert "Not proven to be the best: a plan 2.03 times as fast is not ruled out." in sure.summary()
    assert "Its sharding is proven within 26 % of" in sure.summary()
    assert ", at most 26 % above it" in text.text_report(sure, width=300)
    close = replace(sure, evidence=replace(evidence, step_bound_s=plan.prediction.step_s / 1.2526))
    assert "&le; 26 %</dd>" in page(close) and "any combination &le; 26 %</dd>" in page(close)
    assert "25 %" not in close.summary()


@pytest.mark.parametrize(("seconds", "said"), [
    ((4.0, 4.5, 1.5), "(of all communication 45 % is for gradients, 40 % for parameters)"),
    ((1.0, 1.0, 8.0), "(of all communication 80 % is for activations)"), ((0.0, 0.0, 0.0), ""),
])
def test_exposed_communication_is_told_by_what_it_moves(seconds: tuple[float, ...], said: str) -> None:
    moved = (("parameters", "all_gather", seconds[0]), ("gradients", "reduce_scatter", 0.6 * seconds[1]),
             ("gradients", "all_reduce", 0.4 * seconds[1]), ("activations", "all_reduce", seconds[2]))
    uses = tuple(Collectives(what, how, "dp", "forward", 1, 1.0, one_s) for what, how, one_s in moved)
    report = report_of(by_hand("dp=4"))
    line = summary(replace(report, exposed_share=0.2, collectives=uses)).summary[2]
    assert f"communication exposed 20 % {said}" in line if said else "of all communication" not in line
    assert "of all communication" not in summary(replace(report, exposed_share=0.05, collectives=uses)).summary[2]


def test_combinations_planned_in_full_are_told_as_some_of_those_estimated() -> None:
    assert str(Combinations(1125, 0, 3, 155, 0)) == (
        "1,125 estimated (3 of them planned in full), 155 ruled out by bounds")
    assert str(Combinations(5, 2, 3, 0, 4)) == ("5 estimated (3 of them planned in full, 2 of them without a plan that "
                                                "fits), 0 ruled out by bounds, 4 left for lack of time")


class Translator(nn.Module):
    """An encoder and a decoder with one table of tokens, perhaps one of positions, and labels that are shifted."""

    def __init__(self, positions: bool) -> None:
        super().__init__()
        self.shared, self.encoder, self.decoder = nn.Embedding(VOCABULARY, HIDDEN), Block(), Block()
        self.positions = nn.Embedding(VOCABULARY, HIDDEN) if positions else None

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.shared(ids)
        if self.positions is not None:
            apart = torch.arange(ids.shape[1], device=ids.device)         # a lookup for each pair of positions
            x = x + self.positions((apart[:, None] - apart).abs()).mean(1)
            x = x + self.positions((ids > 0).long())                      # as types of tokens: one lookup each
        read = F.pad(labels[:, :-1], (1, 0))
        y = self.decoder(self.shared(read) + self.encoder(x).mean(1, keepdim=True))
        return F.cross_entropy((y @ self.shared.weight.T).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("positions", [False, slow(True)])
def test_tokens_of_encoder_and_decoder_are_counted_and_said(positions: bool) -> None:
    with torch.device("meta"):
        model, ids = Translator(positions), torch.zeros(8, 64, dtype=torch.int64)
        labels = torch.zeros(8, 32, dtype=torch.int64)
    cluster = Cluster.load("h100-sxm", num_devices=2)
    plan = autoparallel.plan(model, cluster, example_inputs=(ids, labels), by_hand="dp=2")
    assert plan.record.workload.count == 8 * 64 + 8 * 32
    assert " a step of 768 tokens (of encoder and decoder) on 2 " in plan.summary()
    assert by_hand("dp=4,zero=3").record.workload.count == TOKENS
    assert "(of encoder" not in by_hand("dp=4,zero=3").summary()


def test_plans_that_differ_by_the_order_of_axes_say_so() -> None:
    plan = by_hand("dp=2,cp=4,zero=1", 8)
    turned = replace(
        plan, mesh_shape=plan.mesh_shape[::-1], axis_names=plan.axis_names[::-1],
        strategies={name: names[::-1] for name, names in plan.strategies.items()},
        blocks=tuple(replace(block, lines=tuple((name, "·".join(s.split("·")[::-1]), "·".join(at.split("·")[::-1]))
                                                for name, s, at in block.lines)) for block in plan.blocks))
    told = "The same with the axes cp 4 x dp 2, not dp 2 x cp 4, slowest links first"
    assert alternative_of(plan, turned).title == told
    found = replace(plan, record=replace(plan.record, alternatives=(alternative_of(plan, turned),)))
    assert f"another that the search found: t{told[1:]}, " in found.summary()
    layouts = replace(plan, strategies={**plan.strategies, "layers.0.k_proj.weight": ("I", "I")})
    assert alternative_of(plan, layouts).title == ""
    found = replace(plan, record=replace(plan.record, alternatives=(alternative_of(plan, layouts),)))
    assert "the same with other layouts of k_proj.weight, " in found.summary()


def test_plans_of_one_configuration_are_told_apart_by_what_they_cut() -> None:
    """In the words of the report's parts, not by ops and placements."""
    plan = by_hand("dp=2,tp=2,zero=1")
    blocks = tuple(replace(block, lines=tuple((name, strategy, "S(0)·S(2)" if "norm" in name else at)
                                              for name, strategy, at in block.lines)) for block in plan.blocks)
    other = replace(plan, strategies={**plan.strategies, "layers.0.k_proj.weight": ("I", "I")}, blocks=blocks)
    told = "The same but norms of the blocks cut by batch x hidden (here batch x whole)"
    assert alternative_of(plan, other).title == told
    table = replace(plan, record=replace(plan.record, alternatives=(alternative_of(plan, other),)))
    assert list(text.alternatives_table(report_of(table)).columns[0].cells) == [told]


def test_faster_plans_are_not_called_about_as_fast() -> None:
    """Of a plan whose options fix what the usual plans choose."""
    plan = by_hand("dp=4,zero=1")
    slow = replace(plan, prediction=replace(plan.prediction, fixed_s=plan.prediction.step_s, p50=0.05))
    other = replace(alternative_of(slow, plan, "dp=4,zero=3"), family="FSDP")
    half = replace(slow, record=replace(plan.record, alternatives=(other,)))
    (screen,) = (one.entries for one in report_of(half).first_screen if one.label == "faster")
    assert screen[0].startswith("by settings that the options fix") and "% faster" in screen[1]
    assert "About as fast" not in half.summary() and "Faster, by settings" in half.summary()
    (slower,) = text.alternatives_table(report_of(half)).columns[2].cells
    assert "within the error" not in slower


def test_other_plans_are_listed_by_their_steps() -> None:
    plan = by_hand("dp=4,zero=1")
    one = alternative_of(plan, by_hand("dp=4,zero=3"))
    listed = replace(plan, record=replace(plan.record, alternatives=(
        replace(one, step_s=3.0), replace(one, step_s=1.0, by_hand="dp=4"), replace(one, step_s=2.0))))
    assert list(text.alternatives_table(report_of(listed)).columns[1].cells) == ["1 s", "2 s", "3 s"]


def test_the_best_plan_of_a_family_is_tuned() -> None:
    """Larger micro-batches and less recompute, while the step gets shorter, fits, and is what the options allow."""
    split, cluster = Splits(graph()), Cluster.load("h100-sxm", num_devices=4)
    text = "dp=2,tp=2,zero=1,micro_batch=1,recompute=full"
    plan = plan_by_hand(split, cluster, Options(), ByHand.of(text))
    usual = UsualPlans({text: plan}, (), math.inf)
    best = f"dp=2,tp=2,zero=1,micro_batch={BATCH // 2}"
    assert [*tuned(usual, split, cluster, Options(), math.inf).priced] == [text, best]
    assert tuned(usual, split, cluster, Options(), 0.0).priced == {text: plan}
    some = tuned(usual, split, cluster, Options(recompute="full"), math.inf)
    assert [*some.priced] == [text, f"{best},recompute=full"]
    least = replace(usual, limit_bytes=plan.prediction.peak_bytes)
    found = tuned(least, split, cluster, Options(), math.inf)
    assert found.fastest != tuned(usual, split, cluster, Options(), math.inf).fastest
    assert [one for _, one in found.fitting] == sorted(found.priced.values(), key=lambda one: one.prediction.step_s)


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return functools.reduce(lambda value, layer: layer(value).relu(), self.layers, x).square().mean()


def test_the_micro_batch_that_fits_is_found_in_few_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """From one sample: 2, then as many as fit, then half of that; a short time limit ended the doubling early."""
    split, cluster = Splits(capture(Squares(), (torch.zeros(4096, 64),))), Cluster.load("h100-sxm", num_devices=1)
    hands = ByHand.of("dp=1,micro_batch=1"), ByHand.of("dp=1,micro_batch=1024")
    least, most = (plan_by_hand(split, cluster, Options(by_hand=hand), hand) for hand in hands)
    usual, judged = UsualPlans({str(hands[0]): least}, (), 1.1 * most.prediction.peak_bytes), list[int | None]()

    def estimated(split: Splits, cluster: Cluster, options: Options, hand: ByHand, usable: float
                  ) -> HandEstimate | None:
        judged.append(hand.micro_batch)
        return estimate_by_hand(split, cluster, options, hand, usable)

    monkeypatch.setattr("autoparallel.planning.tuned.estimate_by_hand", estimated)
    found = tuned(usual, split, cluster, Options(), math.inf)
    assert judged[:4] == [1, 2, 1024, 512] and len(judged) <= 6
    assert found.fastest is not None and found.fastest[0] == str(hands[1])


def test_a_plan_is_tuned_to_as_few_recomputed_blocks_as_the_limit_requires() -> None:
    """Where neither selective recompute nor none fits."""
    split, cluster = Splits(graph(LAYERS)), Cluster.load("h100-sxm", num_devices=4)
    full, selective = (f"dp=4,zero=1,micro_batch={BATCH // 4},recompute={kind}" for kind in ("full", "selective"))
    plan, more = (plan_by_hand(split, cluster, Options(), ByHand.of(text)) for text in (full, selective))
    limit = (plan.prediction.peak_bytes + more.prediction.peak_bytes) / 2
    found = tuned(UsualPlans({full: plan}, (), limit), split, cluster, Options(), math.inf)
    best = found.priced[full.replace("full", "auto")]
    assert best.prediction.step_s < plan.prediction.step_s and best.prediction.peak_bytes <= limit
    assert 0 < len(best.hybrid.recompute_blocks) < LAYERS and best.prediction.limit_bytes == limit
