"""The page in headless Chromium: the policy lets its script run, nothing is asked of a network; and how quickly the
command line answers. Processes of their own, so in the slow tier."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autoparallel.plans.reports.page import page
from tests.support.reported import made

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("by_hand", ["dp=4,zero=3", "dp=2,pp=2,micro_batch=2"])
def test_the_page_runs_in_chromium(tmp_path: Path, by_hand: str) -> None:
    assert CHROMIUM is not None
    made(by_hand=by_hand).save_html(tmp_path / "report.html")
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
         f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'report.html'}"],
        capture_output=True, text=True, timeout=120, check=True)
    assert 'class="with-script"' in done.stdout  # the script ran, so its hash is that of the policy
    assert not re.findall(r"CONSOLE.*", done.stderr)
    picture = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=400,800",
         f"--screenshot={tmp_path / 'report.png'}", f"--user-data-dir={tmp_path / 'profile'}",
         f"file://{tmp_path / 'report.html'}"], capture_output=True, timeout=120, check=True)
    assert picture.returncode == 0 and (tmp_path / "report.png").stat().st_size > 10_000


#: In a frame as wide as a phone: what ends right of it outside of a box that scrolls, and letters below 12 pixels.
PHONE = """
onload = () => setTimeout(() => {
  const page = document.getElementById('phone').contentDocument, root = page.documentElement, wide = [], small = [];
  page.querySelectorAll('details').forEach(one => one.open = true);
  const scrolls = at => at && (['auto', 'scroll', 'hidden'].includes(getComputedStyle(at).overflowX)
    || scrolls(at.parentElement));
  page.querySelectorAll('body *').forEach(one => {
    const box = one.getBoundingClientRect(), text = one.children.length ? '' : one.textContent.trim();
    if (box.width && box.right > root.clientWidth + 1 && !scrolls(one.parentElement)) wide.push(one.outerHTML);
    if (box.width && text && !one.closest('svg') && parseFloat(getComputedStyle(one).fontSize) < 11.9) small.push(text);
  });
  const out = document.createElement('pre');
  out.id = 'found';
  out.textContent = JSON.stringify({
    width: root.clientWidth, scrolls: root.scrollWidth, wide: wide.slice(0, 3), small: small.slice(0, 3)});
  document.body.append(out);
}, 1000);
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("by_hand", ["dp=4,zero=3", "dp=2,pp=2,micro_batch=2"])
def test_the_page_fits_a_phone(tmp_path: Path, by_hand: str) -> None:
    """400 pixels, all details open, long names of pins: the page does not scroll sideways; wide tables do, each in its
    box. (Chromium's own window is no narrower than 500.)"""
    assert CHROMIUM is not None
    plan = made(by_hand=by_hand)
    replace(plan, pins={"a" * 3_000: "S(0)", "model.layers." + "b_" * 500: "I"}).save_html(tmp_path / "report.html")
    (tmp_path / "phone.html").write_text('<body><iframe id="phone" style="width:400px;height:900px" '
                                         f'src="report.html"></iframe><script>{PHONE}</script></body>')
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-web-security", "--dump-dom",
         "--allow-file-access-from-files", "--virtual-time-budget=10000", f"--user-data-dir={tmp_path / 'profile'}",
         f"file://{tmp_path / 'phone.html'}"], capture_output=True, text=True, timeout=120, check=True)
    told = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert told is not None, done.stderr[-1000:]
    found = json.loads(html.unescape(told[1]))
    assert 350 < found["width"] <= 400 and found["scrolls"] == found["width"], found
    assert (found["wide"], found["small"]) == ([], [])


#: Runs axe-core on the page and leaves what it found in the document.
AXE = """
window.addEventListener('load', () => axe.run(document).then(found => {
  const out = document.createElement('pre');
  out.id = 'axe';
  out.textContent = JSON.stringify({
    violations: found.violations.map(v => [v.id, v.nodes.slice(0, 3).map(n => [n.target.join(' '), n.failureSummary])]),
    passes: found.passes.map(p => p.id), dark: matchMedia('(prefers-color-scheme: dark)').matches});
  document.body.append(out);
}));
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("by_hand", ["dp=4,zero=3", "dp=2,pp=2,micro_batch=2"])
def test_the_page_is_accessible(tmp_path: Path, by_hand: str, dark: bool) -> None:
    """axe-core's rules (contrast, labels, headings, tables, ...), in light and dark; without the policy, which would
    not let axe run. A name of markup and 10,000 letters changes nothing."""
    axe = pytest.importorskip("axe_core_python", reason="pip install axe-core-python")
    assert CHROMIUM is not None
    plan = made(by_hand=by_hand)
    plan = replace(plan, pins={"<script>x</script>": "[/red]", "a" * 10_000: "\u202eback"})
    text = re.sub(r"<meta http-equiv=.Content-Security-Policy.[^>]*>", "", page(plan))
    source = Path(axe.__file__).with_name("axe.min.js").read_text("utf-8")
    scripts = f"<script>{source}</script><script>{AXE}</script></body>"
    (tmp_path / "axe.html").write_text(text.replace("</body>", scripts))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=30000",
         f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--user-data-dir={tmp_path / 'profile'}",
         f"file://{tmp_path / 'axe.html'}"], capture_output=True, text=True, timeout=120, check=True)
    told = re.search(r'<pre id="axe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert told is not None, done.stderr[-1000:]
    found = json.loads(html.unescape(told[1]))
    assert found["violations"] == [] and {"color-contrast", "html-has-lang"} <= set(found["passes"])
    assert found["dark"] == dark


#: Uses the page by pointer and keyboard, and leaves what it shows then in the document.
USED = """
window.addEventListener('load', () => {
  const chart = document.getElementById('timeline1'), told = {}, said = () =>
    document.getElementById('timeline1-said').textContent;
  const press = (key) => chart.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true}));
  press('ArrowRight'); told.first = said(); press('ArrowRight'); told.second = said();
  press('ArrowLeft'); told.again = said();
  const box = chart.querySelectorAll('rect:has(title)')[4];
  box.dispatchEvent(new PointerEvent('pointermove', {bubbles: true})); told.pointed = said();
  told.box = box.querySelector('title').textContent;
  const width = () => chart.getBoundingClientRect().width, before = width();
  press('+'); told.plus = width() / before; press('-'); told.minus = width() / before;
  document.querySelector('[data-zoom="2"]').click(); document.querySelector('[data-zoom="2"]').click();
  told.clicked = width() / before; press('0'); told.all = width() / before;
  const button = document.querySelector('button[data-axis]');
  button.click(); told.pressed = button.getAttribute('aria-pressed');
  told.group = Array.from(document.querySelectorAll('.device.first b')).map((one) => one.textContent).join(',');
  button.click(); told.released = document.querySelectorAll('.device.first').length;
  const out = document.createElement('pre');
  out.id = 'used'; out.textContent = JSON.stringify(told); document.body.append(out);
});
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
def test_pictures_are_read_and_zoomed_by_pointer_and_keyboard(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    text = re.sub(r"<meta http-equiv=.Content-Security-Policy.[^>]*>", "", page(made(by_hand="dp=2,tp=2,zero=1")))
    (tmp_path / "used.html").write_text(text.replace("</body>", f"<script>{USED}</script></body>"))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
         f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'used.html'}"],
        capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="used">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-1000:]
    told = json.loads(html.unescape(found[1]))
    assert told["first"] == told["again"] != told["second"] and told["pointed"] == told["box"]
    assert told["plus"] == pytest.approx(2, rel=0.02) and told["minus"] == pytest.approx(1, rel=0.02)
    assert told["clicked"] == pytest.approx(4, rel=0.02) and told["all"] == pytest.approx(1, rel=0.02)
    assert (told["pressed"], told["group"], told["released"]) == ("true", "0,2", 0)


#: What is cut off, or lies on its neighbour, on a phone.
CUT = """
window.addEventListener('load', () => {
  const box = (one) => one.getBoundingClientRect(), out = document.createElement('pre'), width = innerWidth;
  const beside = (all) => all.filter((one, n) => n && box(one).left < box(all[n - 1]).right);
  const shown = (list) => Array.from(list).filter((one) => box(one).width > 0);
  const texts = (list) => list.map((one) => one.textContent);
  out.id = 'cut'; out.textContent = JSON.stringify({
    width, page: document.documentElement.scrollWidth,
    buttons: texts(shown(document.querySelectorAll('button')).filter((one) => box(one).right > width)),
    rows: texts(shown(document.querySelectorAll('.rows li')).filter((one) => one.scrollWidth > one.clientWidth + 1 ||
      one.scrollHeight > one.clientHeight + 1)),
    marks: Array.from(document.querySelectorAll('.x-marks')).flatMap((one) => texts(beside(shown(one.children)))),
    counted: document.querySelectorAll('button, .rows li, .x-marks span').length});
  document.body.append(out);
});
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize(("by_hand", "devices"), [("dp=4,zero=3", 4), ("dp=4,pp=8,micro_batch=1", 32)])
def test_nothing_is_cut_off_on_a_phone(tmp_path: Path, by_hand: str, devices: int) -> None:
    assert CHROMIUM is not None
    text = re.sub(r"<meta http-equiv=.Content-Security-Policy.[^>]*>", "", page(made(devices, by_hand=by_hand)))
    (tmp_path / "phone.html").write_text(text.replace("</body>", f"<script>{CUT}</script></body>"))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--window-size=400,900",
         f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'phone.html'}"],
        capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="cut">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-1000:]
    told = json.loads(html.unescape(found[1]))
    assert told["page"] <= told["width"] <= 500 and told["counted"] > 10
    assert (told["buttons"], told["rows"], told["marks"]) == ([], [], [])


@pytest.mark.parametrize(("words", "limit_s"), [(["--help"], 0.5), (["show", "plan.json"], 1.0)])
def test_the_command_line_answers_quickly(tmp_path: Path, words: list[str], limit_s: float) -> None:
    """The best of five, in processor time: other work on the machine does not count. Neither imports torch or
    numpy."""
    made(by_hand="dp=4,zero=3").save(tmp_path / "plan.json")
    code = ("import sys, time; from autoparallel.cli import app\n"
            f"try: app({words!r})\nexcept SystemExit: pass\n"
            "print(time.process_time(), sorted({'torch', 'numpy'} & set(sys.modules)), file=sys.stderr)")
    seconds = []
    for _ in range(5):
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60,
                              check=True, env={"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": ""})
        used, there = done.stderr.split()[-2:]
        assert there == "[]" and done.stdout.strip() and time.monotonic() > started
        seconds.append(float(used))
    assert min(seconds) < limit_s
