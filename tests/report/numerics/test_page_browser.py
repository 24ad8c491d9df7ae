"""The page of a real run in a real browser: playwright drives the Chromium that the system has."""

import json
import math
import re
import shutil

import pytest
from click.testing import CliRunner

from comparison_jobs import write_job
from halfstep.checkpoint.runlog import read_runlog
from halfstep.cli import cli

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
LIGHT, DARK = "rgb(247, 247, 245)", "rgb(17, 20, 23)"
PATIENCE_MS = 300_000  # how long to wait for a busy machine before calling it a failure
BACKGROUND = "getComputedStyle(document.body).backgroundColor"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Requires: [chromium (apt-get install chromium)]"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short fp16 run of `halfstep train`, whose first steps are skipped, and the page that `halfstep watch` makes of it."""
    folder = tmp_path_factory.mktemp("watched")
    job, out = write_job(folder), folder / "run"
    train = ["train", str(job), "-p", "fp16", "--steps", "24", "--batch", "8", "--set", "watch=4", "--out", str(out)]
    for arguments in (train, ["watch", str(out), "--html", str(folder / "page.html")]):
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
    assert (out / "report.html").exists()
    return read_runlog(out / "run.jsonl"), folder / "page.html"


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium without a sandbox, which containers lack, and without network requests of its own."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Requires: [playwright (pip install playwright)]")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=PATIENCE_MS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, run):
    """The page in a fresh tab; `log` collects console messages and errors, `requests` the addresses asked for."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    tab.set_default_timeout(PATIENCE_MS)
    tab.log, tab.requests = [], []
    tab.on("console", lambda message: tab.log.append(message.text))
    tab.on("pageerror", lambda error: tab.log.append(str(error)))
    tab.on("request", lambda request: tab.requests.append(request.url))
    tab.goto(run[1].as_uri())
    yield tab
    tab.close()


def last_sample(run):
    return [event for event in run.events if event["event"] == "numerics"][-1]


def test_the_page_is_silent_and_requests_nothing(page):
    """No console message, no error, no script, and no request except for the file itself."""
    assert page.log == []
    assert page.requests == [page.url]
    assert page.locator("script").count() == 0


def test_the_curves_are_those_of_the_run_file(page, run):
    """Loss and scale have one point per step, at the height of its value, and skipped steps are marked."""
    records = run[0].records
    series = {
        "Loss": [r["loss"] for r in records],
        "Loss scale, as a power of 2": [math.log2(r["scale"]) for r in records],
    }
    drawn = dict(
        page.evaluate(
            "Array.from(document.querySelectorAll('figure')).map(f => [f.querySelector('h3').textContent,"
            " Array.from(f.querySelectorAll('polyline')).map(p => p.getAttribute('points')).join(' ')])"
        )
    )
    assert drawn.keys() == series.keys()
    for title, values in series.items():
        points = [tuple(map(float, pair.split(","))) for pair in drawn[title].split()]
        assert len(points) == len(records) == 24
        low, high = min(values), max(values)
        for (x, y), step, value in zip(points, range(24), values, strict=True):
            assert x == pytest.approx(1000 * step / 23, abs=0.06)
            assert (155 - y) / 150 * (high - low) + low == pytest.approx(value, abs=(high - low) / 1000)
    skipped = [r["attempted"] for r in records if r["skipped"]]
    assert skipped  # the initial scale is too high for this job
    assert page.locator(".skip-mark").count() == len(skipped)
    assert f"Skipped steps: {', '.join(map(str, skipped))}." in page.locator("#run").text_content()
    assert page.locator("polyline").first.bounding_box()["width"] > 500


def test_the_heat_map_has_every_exponent_of_the_last_sample(page, run):
    """Each cell is a power of two that occurs, with its share, in the column of that power, and is visible."""
    sample = last_sample(run[0])
    for kind in ("gradient", "weight"):
        expected = {
            (name, int(e), f"{100 * count / sum(stats['exponents'].values()):.3g} %")
            for name, stats in sample[f"{kind}s"].items()
            for e, count in stats["exponents"].items()
        }
        svg = page.locator(f"svg[aria-label='Heat map of the exponents of {kind}s']")
        cells = svg.locator("rect").evaluate_all(
            "all => all.map(r => [r.querySelector('title').textContent, +r.getAttribute('x'), +r.getAttribute('y'), r.getBoundingClientRect().width])"
        )
        names = svg.locator("text[text-anchor=end]").evaluate_all(
            "all => all.map(t => [t.querySelector('title').textContent, +t.getAttribute('y')])"
        )
        rows = {y - 10: name for name, y in names}
        shown = {
            (rows[y], int(re.match(r"2\^(-?\d+): ", title)[1]), title.partition(": ")[2]) for title, _, y, _ in cells
        }
        assert shown == expected
        offsets = {x - 14 * int(re.match(r"2\^(-?\d+): ", title)[1]) for title, x, _, _ in cells}
        assert len(offsets) == 1  # one scale for all
        assert all(width == 14 for *_, width in cells)


def test_names_stand_next_to_the_map(page):
    """No name overlaps a cell, and none is cut off at the left."""
    boxes = page.evaluate(
        """() => Array.from(document.querySelectorAll('svg')).filter(s => s.querySelector('rect')).map(s => [
          s.getBoundingClientRect().left,
          Math.min(...Array.from(s.querySelectorAll('text[text-anchor=end]')).map(t => t.getBoundingClientRect().left)),
          Math.max(...Array.from(s.querySelectorAll('text[text-anchor=end]')).map(t => t.getBoundingClientRect().right)),
          Math.min(...Array.from(s.querySelectorAll('rect')).map(r => r.getBoundingClientRect().left))])"""
    )
    assert len(boxes) == 2
    assert all(edge <= left and right <= cells for edge, left, right, cells in boxes), boxes


def test_numbers_in_the_table_are_those_of_the_sample(page, run):
    """Largest magnitudes and updates of each tensor, to the digits shown."""
    sample = last_sample(run[0])
    lines = page.evaluate(
        "Array.from(document.querySelectorAll('#tables table')[0].tBodies[0].rows).map(r => Array.from(r.cells).map(c => c.textContent))"
    )
    assert len(lines) == 8
    for name, kind, *_, largest, ratio, _lost in lines:
        assert float(largest) == pytest.approx(sample[f"{kind}s"][name]["largest"], rel=1e-3)
        if kind == "weight":
            assert float(ratio) == pytest.approx(sample["updates"][name]["ratio"], rel=0.06)


def test_events_and_their_advice_are_shown(page, run):
    """Each autopsy of the run file is a line of the last table, with its advice."""
    text = page.locator("#tables").text_content()
    autopsies = [event for event in run[0].events if event["event"] == "autopsy"]
    assert autopsies
    assert all(event["advice"] in text for event in autopsies)


def test_dark_mode_follows_the_system(page):
    """Background, text and curves change."""
    colours = f"[{BACKGROUND}, getComputedStyle(document.body).color, getComputedStyle(document.querySelector('polyline')).stroke]"
    light = page.evaluate(colours)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(colours)
    assert (light[0], dark[0]) == (LIGHT, DARK)
    assert all(one != other for one, other in zip(light, dark, strict=True)), json.dumps([light, dark])


def test_a_narrow_screen_needs_no_sideways_scrolling(page):
    """At the width of a phone the page fits; heat maps and tables scroll inside themselves, and cells are in sight."""
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    left = page.evaluate(
        "Math.min(...Array.from(document.querySelectorAll('rect')).map(r => r.getBoundingClientRect().left))"
    )
    assert left < 390
