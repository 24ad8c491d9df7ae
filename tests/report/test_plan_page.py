"""A plan as an HTML page."""

import dataclasses
from html.parser import HTMLParser

from halfstep.planning import plan
from halfstep.report.plan_page import plan_values, render_plan_page
from planning_jobs import small_job

PLAN = plan(small_job(), 64, precision=("fp32", "bf16"), memory="2GiB", name="small")


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


def test_page_is_well_formed_and_complete():
    """Every element is closed, and every precision and category is there."""
    parser = Nesting()
    text = render_plan_page(PLAN)
    parser.feed(text)
    assert not parser.open
    for word in ("fp32", "bf16", "activations", 'class="bar"'):
        assert word in text


def test_names_are_escaped():
    """A job's name is text, whatever characters it has."""
    text = render_plan_page(dataclasses.replace(PLAN, job="<script>alert(1)</script>"))
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_bars_share_one_scale():
    """The longest bar fills the width, and the others are as long as their share of it."""
    longest = max(entry.peak_bytes for entry in PLAN.entries)
    for entry, bar in zip(PLAN.entries, plan_values(PLAN)["bars"], strict=True):
        total = sum(float(part["percent"]) for part in bar["parts"])
        assert abs(total - 100 * entry.peak_bytes / longest) < 0.1


def test_tables_are_rectangular():
    """Each row of each table has one cell per heading."""
    tables = plan_values(PLAN)["tables"]
    assert [table.caption.split()[0] for table in tables] == ["In", "Minimum", "Activations"]
    assert all(len(row) == len(table.heads) for table in tables for row in table.rows)
