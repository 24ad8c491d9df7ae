"""A plan as a section of a page."""

import dataclasses
from html.parser import HTMLParser

from halfstep.planning import plan
from halfstep.report.plan_page import PLAN_CSS, plan_section, render_plan_page
from planning_jobs import small_job

FOUND = plan(small_job(), 64, precision=("fp32", "bf16"), memory="2GiB", name="small")


class Nesting(HTMLParser):
    """Follows open elements."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_section_is_well_formed_and_complete():
    """Every element is closed, and every precision and cause is there."""
    parser = Nesting()
    text = plan_section(FOUND)
    parser.feed(text)
    assert not parser.open
    for word in ("fp32", "bf16", "activations", "plan-bar"):
        assert word in text


def test_names_are_escaped():
    """A job's name is text, whatever is in it."""
    text = render_plan_page(dataclasses.replace(FOUND, job="<script>alert(1)</script>"))
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_bars_share_one_scale():
    """The longest bar fills the width, and no bar is longer."""
    widths = {}
    for entry in FOUND.entries:
        widths[entry.precision] = entry.peak_bytes
    text = plan_section(FOUND)
    total = sum(float(piece.split("%")[0]) for piece in text.split('style="width:')[1:] if "background" in piece[:40])
    expected = 100 * sum(widths.values()) / max(widths.values())
    assert abs(total - expected) < 0.5


def test_style_needs_no_network():
    """The style names nothing outside the page."""
    assert "url(" not in PLAN_CSS
