"""The report page in a real browser: headless Chromium, as Debian packages it."""

import json

import pytest

from chromium import BROWSER, Page
from comparison_cases import write_case
from halfstep.comparison.result import read_comparison
from halfstep.report.page import render_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="Requires: [chromium (apt-get install chromium)]"),
]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    rows = (
        ("fp32", 0.010, {}),
        ("bf16", 0.005, {}),
        ("fp16", 0.006, {"scaled": True, "skips": (3, 5)}),
        ("fp16-lean", 0.1, {}),
    )
    failures = {"fp16-lean": {"kind": "out of memory", "reason": "</script><b>bold</b>"}}
    return read_comparison([write_case(tmp_path_factory.mktemp("case") / "c", rows, failures=failures)])


@pytest.fixture(scope="module")
def page(comparison, tmp_path_factory):
    pytest.importorskip("websocket", reason="Requires: [websocket-client]")
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_page(comparison), encoding="utf-8")
    tab = Page()
    try:
        tab.open(path)
        yield tab
    finally:
        tab.close()


def colours(page):
    return page.ask("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")


def test_the_page_is_silent_and_asks_for_nothing(page):
    """No console message, no error, and no request but for the file itself."""
    assert page.messages == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in page.requests if url.startswith("file:")]) == 1


def test_every_plot_is_drawn(page):
    """Each has a drawing of some size with something in it."""
    drawn = page.ask(
        "Array.from(document.querySelectorAll('.plot')).map(p => [p.id, p.querySelector('svg.main-svg').getBoundingClientRect().width,"
        " p.querySelectorAll('.points path, .lines path, .js-line, .js-fill').length])"
    )
    assert len(drawn) == 9
    assert all(width > 200 and marks > 0 for _, width, marks in drawn), drawn


def test_values_in_the_page_are_those_of_the_file(page, comparison):
    """Cells and bars against the JSON, exactly."""
    values = json.loads(json.dumps(comparison.as_dict()))
    cells = page.ask(
        "Array.from(document.querySelectorAll('[data-metric]')).map(c => [c.dataset.row, c.dataset.metric, c.dataset.value])"
    )
    figures = {row["label"]: row["figures"] for row in values["rows"]}
    assert len(cells) == 30
    for row, metric, value in cells:
        known = figures[row][metric]
        assert (value is None and known is None) or float(value) == known
    bars = page.ask("document.getElementById('plot-speed').data[0].x.map(Number)")
    assert bars == [row["figures"]["samples_per_second"] for row in values["rows"] if row["samples_per_second"]]
    assert page.ask("JSON.parse(document.getElementById('comparison').textContent)") == values


def test_hostile_text_stays_text(page):
    """A reason that tries to close the script is shown as it was written."""
    assert (
        page.ask("document.querySelector('tr.failed td').textContent")
        == "out of memory (3 of 3 runs): </script><b>bold</b>"
    )


def test_dark_mode_follows_the_system_and_the_button(page):
    """Page and plots change together, and the button overrides the system."""
    page.prefer("light")
    page.wait("getComputedStyle(document.body).backgroundColor === 'rgb(247, 247, 245)'")
    light = page.ask("document.querySelector('#plot-speed .ytick text').style.fill")
    page.prefer("dark")
    page.wait("getComputedStyle(document.body).backgroundColor === 'rgb(17, 20, 23)'")
    page.wait(f"document.querySelector('#plot-speed .ytick text').style.fill !== '{light}'")
    page.ask("document.getElementById('theme').click()")
    assert colours(page)[0] == "rgb(247, 247, 245)"
    page.ask("document.getElementById('theme').click()")
    assert colours(page)[0] == "rgb(17, 20, 23)"
    page.ask("document.getElementById('theme').click()")
    page.prefer("light")
    page.wait("getComputedStyle(document.body).backgroundColor === 'rgb(247, 247, 245)'")
    assert page.messages == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(page, scheme):
    """Text against its own background is at least 4.5 to 1, as WCAG asks."""
    page.prefer(scheme)
    ratios = page.ask(
        """(() => {
          const value = c => { const m = c.match(/[\\d.]+/g).map(Number).slice(0, 3).map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : Math.pow((v + 0.055) / 1.055, 2.4)); return 0.2126*m[0] + 0.7152*m[1] + 0.0722*m[2]; };
          const ground = e => { while (e) { const c = getComputedStyle(e).backgroundColor;
            if (!c.endsWith(', 0)') && c !== 'transparent') return c; e = e.parentElement; } return 'rgb(255,255,255)'; };
          return Array.from(document.querySelectorAll('p, td, th, h1, h2, h3, a, summary, figcaption, dt, dd, button, li'))
            .filter(e => e.textContent.trim() && e.offsetParent).map(e => {
              const a = value(getComputedStyle(e).color), b = value(ground(e));
              return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.tagName, e.textContent.slice(0, 20)]; })
            .sort((x, y) => x[0] - y[0]).slice(0, 3);
        })()"""
    )
    page.prefer("light")
    assert all(ratio >= 4.5 for ratio, *_ in ratios), ratios


def test_a_narrow_screen_needs_no_sideways_scrolling(page):
    """At the width of a phone the page fits, plots included; only tables scroll inside themselves."""
    page.resize(390, 844)
    page.wait("document.querySelector('#plot-loss .main-svg').getBoundingClientRect().width < 390")
    assert page.ask("document.documentElement.scrollWidth") <= 390
    assert page.ask(
        "Array.from(document.querySelectorAll('.plot svg.main-svg')).every(s => s.getBoundingClientRect().right <= 391)"
    )
    page.resize(1280, 900)
    page.wait("document.querySelector('#plot-loss .main-svg').getBoundingClientRect().width > 600")


def test_a_keyboard_reaches_everything(page):
    """Tab goes first to the skip link, and on through links, button, tables and disclosures; Enter opens one."""
    page.ask("document.activeElement.blur(), window.getSelection().removeAllRanges(), document.body.focus()")
    seen = []
    for _ in range(30):
        page.press("Tab", 9)
        seen.append(page.ask("document.activeElement.className + '/' + document.activeElement.tagName"))
    assert seen[0] == "skip/A"
    assert {"/BUTTON", "scroll/DIV", "/SUMMARY"} <= set(seen)
    page.ask("document.querySelector('summary').focus()")
    page.press("Enter", 13, text="\r")
    page.wait("document.querySelector('details').open")
    assert page.ask("document.querySelector('details table').offsetHeight") > 0
    page.press("Enter", 13, text="\r")
    page.wait("!document.querySelector('details').open")


def test_the_printed_page_is_light(page):
    """Paper has no dark mode."""
    page.prefer("dark")
    page.ask("window.dispatchEvent(new Event('beforeprint'))")
    assert page.ask("document.documentElement.dataset.theme") == "light"
    page.ask("window.dispatchEvent(new Event('afterprint'))")
    assert page.ask("document.documentElement.hasAttribute('data-theme')") is False
    page.prefer("light")


def test_without_scripts_the_page_says_the_same(comparison, tmp_path):
    """Verdict, figures and tables are in the HTML itself."""
    text = render_page(comparison)
    before_scripts = text[: text.index("<script")]
    assert comparison.verdict.text[:20] in before_scripts
    assert before_scripts.count("<table") >= 11


def test_long_and_hostile_names_leave_the_figures_readable_on_a_phone(tmp_path):
    """Names of machines and long policies: shown as they are written in the plots too, and never wider than half the screen."""
    pytest.importorskip("websocket", reason="Requires: [websocket-client]")
    rows = (("fp32", 0.010, {}), ("bf16-lean,states=8bit,keep_fp32=*.norm|head,compile=reduce-overhead", 0.005, {}))
    machines = ("CPU", "<b>GPU</b> & <a href='x'>more")
    folders = [write_case(tmp_path / str(number), rows, machine=name) for number, name in enumerate(machines)]
    path = tmp_path / "report.html"
    path.write_text(render_page(read_comparison(folders)), encoding="utf-8")
    tab = Page(360, 780)
    try:
        tab.open(path)
        shown = tab.ask("Array.from(document.querySelectorAll('#plot-speed .ytick text')).map(t => t.textContent)")
        assert "fp32 @ <b>GPU</b> & <a href='x'>more" in shown
        assert tab.ask("document.querySelectorAll('#plot-speed .ytick a').length") == 0
        widths = tab.ask("Array.from(document.querySelectorAll('#summary th[scope=row]')).map(t => t.offsetWidth)")
        assert max(widths) <= 180
        assert tab.ask("document.documentElement.scrollWidth") <= 360
        assert tab.messages == []
    finally:
        tab.close()
