"""The report page in a real browser: playwright drives the Chromium that the system has."""

import json
import shutil

import pytest

from comparison_cases import write_case
from halfstep.comparison.result import read_comparison
from halfstep.report.page import render_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
LIGHT, DARK = "rgb(247, 247, 245)", "rgb(17, 20, 23)"
PATIENCE_MS = 300_000  # how long to wait for a busy machine before calling it a failure
BACKGROUND = "getComputedStyle(document.body).backgroundColor"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Requires: [chromium (apt-get install chromium)]"),
]


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium without a sandbox, which containers lack, and without network requests of its own."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Requires: [playwright (pip install playwright)]")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=PATIENCE_MS)
        yield chromium
        chromium.close()


def open_page(browser, path, width=1280, height=900):
    """A tab with a file, its plots drawn; `log` collects console messages and errors, `requests` the addresses asked for."""
    tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
    tab.set_default_timeout(PATIENCE_MS)
    tab.log, tab.requests = [], []
    tab.on("console", lambda message: tab.log.append(message.text))
    tab.on("pageerror", lambda error: tab.log.append(str(error)))
    tab.on("request", lambda request: tab.requests.append(request.url))
    tab.goto(path.as_uri())
    tab.wait_for_function("document.documentElement.hasAttribute('data-drawn')")
    return tab


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """Three precisions that ran, and one that failed with a hostile reason."""
    rows = (
        ("fp32", 0.010, {}),
        ("bf16", 0.005, {}),
        ("fp16", 0.006, {"scaled": True, "skips": (3, 5)}),
        ("fp16-lean", 0.1, {}),
    )
    failures = {"fp16-lean": {"kind": "out of memory", "reason": "</script><b>bold</b>"}}
    return read_comparison([write_case(tmp_path_factory.mktemp("case") / "c", rows, failures=failures)])


@pytest.fixture(scope="module")
def report(comparison, tmp_path_factory):
    """The page as a file."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_page(comparison), encoding="utf-8")
    return path


@pytest.fixture
def page(browser, report):
    """The page in a fresh tab."""
    tab = open_page(browser, report)
    yield tab
    tab.close()


def test_the_page_is_silent_and_requests_nothing(page):
    """No console message, no error, and no request except for the file itself."""
    assert page.log == []
    assert [url for url in page.requests if not url.startswith("data:")] == [page.url]


def test_every_plot_is_drawn(page):
    """Each plot has a drawing of some size with marks in it."""
    drawn = page.evaluate(
        "Array.from(document.querySelectorAll('.plot')).map(p => [p.id, p.querySelector('svg.main-svg').getBoundingClientRect().width,"
        " p.querySelectorAll('.points path, .lines path, .js-line, .js-fill').length])"
    )
    assert len(drawn) == 10
    assert all(width > 200 and marks > 0 for _, width, marks in drawn), drawn


def test_values_in_the_page_are_those_of_the_file(page, comparison):
    """Cells and bars equal the values of comparison.json exactly."""
    values = json.loads(json.dumps(comparison.as_dict()))
    cells = page.evaluate(
        "Array.from(document.querySelectorAll('[data-metric]')).map(c => [c.dataset.row, c.dataset.metric, c.dataset.value])"
    )
    figures = {row["label"]: row["figures"] for row in values["rows"]}
    assert len(cells) == 36
    for row, metric, value in cells:
        known = figures[row][metric]
        assert (value is None and known is None) or float(value) == known
    bars = page.evaluate("document.getElementById('plot-speed').data[0].x.map(Number)")
    assert bars == [row["figures"]["samples_per_second"] for row in values["rows"] if row["samples_per_second"]]
    assert page.evaluate("JSON.parse(document.getElementById('comparison').textContent)") == values


def test_heat_maps_open_and_fit(page):
    """Each row that was sampled has one behind a disclosure, with a cell for each exponent; on a phone it scrolls inside itself."""
    page.set_viewport_size({"width": 390, "height": 844})
    maps = page.locator("#numerics details svg[aria-label^='Heat map']")
    assert maps.count() == 3
    assert not maps.last.is_visible()
    page.get_by_text("Exponents by layer: fp16").click()
    assert maps.last.is_visible()
    assert maps.last.locator("rect").count() == 30
    assert maps.last.locator("rect").last.bounding_box()["width"] == 14
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_hostile_text_stays_text(page):
    """A reason that tries to close the script is shown as it was written."""
    reason = "out of memory (3 of 3 runs): </script><b>bold</b>"
    assert page.locator("tr.failed td").text_content() == reason


def test_dark_mode_follows_the_system_and_the_button(page):
    """Page and plots change together, and the button overrides the system."""
    fill = "document.querySelector('#plot-speed .ytick text').style.fill"
    assert page.evaluate(BACKGROUND) == LIGHT
    light = page.evaluate(fill)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"{BACKGROUND} === '{DARK}' && {fill} !== '{light}'")
    for theme, background in (("light", LIGHT), ("dark", DARK), ("auto", DARK)):
        page.locator("#theme").click()
        assert page.locator("#theme").text_content() == f"Theme: {theme}"
        assert page.evaluate(BACKGROUND) == background
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"{BACKGROUND} === '{LIGHT}'")
    assert page.log == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(page, scheme):
    """Text has a contrast of at least 4.5 to 1 with its background, as WCAG requires."""
    page.emulate_media(color_scheme=scheme)
    ratios = page.evaluate(
        """() => {
          const value = c => { const m = c.match(/[\\d.]+/g).map(Number).slice(0, 3).map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : Math.pow((v + 0.055) / 1.055, 2.4)); return 0.2126*m[0] + 0.7152*m[1] + 0.0722*m[2]; };
          const ground = e => { while (e) { const c = getComputedStyle(e).backgroundColor;
            if (!c.endsWith(', 0)') && c !== 'transparent') return c; e = e.parentElement; } return 'rgb(255,255,255)'; };
          return Array.from(document.querySelectorAll('p, td, th, h1, h2, h3, a, summary, figcaption, dt, dd, button, li'))
            .filter(e => e.textContent.trim() && e.offsetParent).map(e => {
              const a = value(getComputedStyle(e).color), b = value(ground(e));
              return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.tagName, e.textContent.slice(0, 20)]; })
            .sort((x, y) => x[0] - y[0]).slice(0, 3);
        }"""
    )
    assert all(ratio >= 4.5 for ratio, *_ in ratios), ratios


def test_a_narrow_screen_needs_no_sideways_scrolling(page):
    """At the width of a phone the page fits, plots included; only tables scroll inside themselves."""
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("document.querySelector('#plot-loss .main-svg').getBoundingClientRect().width < 390")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.wait_for_function(
        "Array.from(document.querySelectorAll('.plot svg.main-svg')).every(s => s.getBoundingClientRect().right <= 391)"
    )


def test_a_keyboard_reaches_everything(page):
    """Tab goes first to the skip link, then through links, button, tables and disclosures; Enter opens and closes one."""
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.className + '/' + document.activeElement.tagName"))
    assert reached[0] == "skip/A"
    assert {"/BUTTON", "scroll/DIV", "/SUMMARY"} <= set(reached)
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    page.locator("details table").first.wait_for(state="visible")
    page.keyboard.press("Enter")
    page.locator("details table").first.wait_for(state="hidden")


def test_the_printed_page_is_light(page):
    """Printing switches to the light theme and back."""
    page.emulate_media(color_scheme="dark")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.hasAttribute('data-theme')") is False


def test_without_scripts_the_page_is_complete(browser, report, comparison):
    """With scripts disabled the page still shows the verdict, the results and every table."""
    tab = browser.new_page(java_script_enabled=False)
    tab.set_default_timeout(PATIENCE_MS)
    tab.goto(report.as_uri())
    assert comparison.verdict.text[:20] in tab.locator("#verdict").text_content()
    assert tab.locator("#summary").is_visible()
    assert tab.locator("table").count() >= 11
    tab.close()


def test_long_and_hostile_names_leave_the_results_readable_on_a_phone(browser, tmp_path):
    """Hostile machine names are shown as written in the plots too, and a long name never covers half the screen."""
    rows = (("fp32", 0.010, {}), ("bf16-lean,states=8bit,keep_fp32=*.norm|head,compile=reduce-overhead", 0.005, {}))
    machines = ("CPU", "<b>GPU</b> & <a href='x'>more")
    folders = [write_case(tmp_path / str(number), rows, machine=name) for number, name in enumerate(machines)]
    path = tmp_path / "report.html"
    path.write_text(render_page(read_comparison(folders)), encoding="utf-8")
    tab = open_page(browser, path, 360, 780)
    labels = tab.locator("#plot-speed .ytick text").all_text_contents()
    assert "fp32 @ <b>GPU</b> & <a href='x'>more" in labels
    assert tab.locator("#plot-speed .ytick a").count() == 0
    widths = tab.evaluate("Array.from(document.querySelectorAll('#summary th[scope=row]')).map(t => t.offsetWidth)")
    assert max(widths) <= 180
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert tab.log == []
    tab.close()
