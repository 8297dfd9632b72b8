"""The HTML report: one whole page that loads nothing, with names as text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from autoparallel.cli import main
from autoparallel.plans import Plan
from autoparallel.plans.reports import page as reports_page
from autoparallel.plans.reports.build import report_of
from autoparallel.plans.reports.page import page
from autoparallel.plans.reports.summary import MOST_UNUSUAL, summary
from autoparallel.plans.reports.trace import trace_json
from autoparallel.plans.reports.units import bytes_str
from tests.support.reported import NAMES

VOID = {"meta", "rect", "circle", "path", "br", "input", "link", "img"}
HOSTILE = ["<script>alert(1)</script>", "\"onclick='x'", "</style><b>", "[/red]", "\x1b[31m", "x" * 10_000, "\u202egnp",
           "{{ 7 * 7 }}", "emoji \N{PARTY POPPER}", "--><!--<script"]


class Checker(HTMLParser):
    """Every tag is closed in order; nothing points outside; no handlers, no inline styles; ids are unique."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.ids, self.links, self.scripts, self.text = list[str](), list[str](), list[str](), 0, ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        assert len(named) == len(attrs) and not any(name.startswith("on") or name in ("style", "src") for name in named)
        assert named.get("href", "#").startswith("#")
        self.ids += [named["id"] or ""] if "id" in named else []
        self.links += [(named["href"] or "")[1:]] if "href" in named else []
        self.scripts += tag == "script"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(("name", "picture"), [("fsdp", "memory"), ("1f1b", "held")])
def test_the_limit_of_memory_is_in_the_legend(plans: dict[str, Plan], name: str, picture: str) -> None:
    limit = 1.2 * plans[name].prediction.peak_bytes
    text = page(replace(plans[name], prediction=replace(plans[name].prediction, limit_bytes=limit)))
    legend = text.partition(f'<output id="{picture}-said"')[2].partition("</ul>")[0]
    assert f"</svg> limit {bytes_str(limit)}</li>" in legend
    if name == "fsdp":
        plot = replace(plans[name], prediction=replace(plans[name].prediction, limit_bytes=limit)).plot.memory()
        assert f"limit {bytes_str(limit)}" in [one.get_text() for one in plot.axes[0].get_legend().get_texts()]


def test_what_is_unusual_is_told_once(plans: dict[str, Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tuple((name, *(("n", "S(2)") if name.endswith(" linear") else rest)) for name, *rest in
                  plans["fsdp"].blocks[1].lines)
    blocks = (plans["fsdp"].blocks[0], replace(plans["fsdp"].blocks[1], lines=lines), *plans["fsdp"].blocks[2:])
    plan = replace(plans["fsdp"], blocks=blocks)
    (told,) = report_of(plan).departures
    assert page(plan).count(told) == 1
    many = tuple(f"module {n} is odd (axis dp)" for n in range(MOST_UNUSUAL + 2))
    monkeypatch.setattr(reports_page, "report_of", lambda plan: summary(replace(report_of(plan), departures=many)))
    text = page(plan)
    assert all(text.count(one) == 1 for one in many) and text.count("Also unusual: ") == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_whole_and_points_nowhere(plans: dict[str, Plan], name: str) -> None:
    text = page(plans[name])
    checked = Checker(text)
    assert len(set(checked.ids)) == len(checked.ids) and set(checked.links) <= set(checked.ids)
    shown = re.sub(r"sha256-[\w+/=]*", "", text)  # a hash may have two slashes
    assert not re.search(r"https?:|//\w|@import|url\((?!#)", shown) and "url(#" in shown
    assert checked.scripts == 1 and len(text) < 3e6
    text = " ".join(checked.text.split())
    assert all(entry in text for answer in report_of(plans[name]).first_screen for entry in answer.entries)


def test_the_policy_allows_this_script_and_style_only(plans: dict[str, Plan]) -> None:
    text = page(plans["fsdp"])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1].replace("&#39;", "'")
    for tag in ("script", "style"):
        inside = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert text.index("Content-Security-Policy") < text.index("<style>")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_text(plans: dict[str, Plan], name: str) -> None:
    plan = plans["fsdp"]
    lines = tuple((f"{name} linear", s, o) for _, s, o in plan.blocks[0].lines)
    work = replace(plan.record.workload, links={"dp": name}, device=name)
    moved = tuple(replace(move, source=name) for move in plan.record.redistributions)
    odd = replace(plan, cluster=name, pins={name: name}, fingerprint=name, axis_names=(name,),
                  blocks=(replace(plan.blocks[0], paths=(name,), lines=lines), *plan.blocks[1:]),
                  record=replace(plan.record, workload=work, redistributions=moved))
    text = page(odd)
    checked = Checker(text)
    assert checked.scripts == 1 and "49" not in re.findall(r"\{\{.*?\}\}", checked.text)
    assert not any(c in text for c in "\x1b\u202e")
    assert len(text) < 3e6
    json.loads(trace_json(odd))


def test_a_page_without_jinja2_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    reports_page._template.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setattr("sys.argv", ["autoparallel", "plan", "no:model", "--html", str(tmp_path / "a.html")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "pip install 'autoparallel[report]'" in capsys.readouterr().err
    reports_page._template.cache_clear()
