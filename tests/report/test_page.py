"""The report page: its values, its plots and its text."""

import json
import re
import sys

import pytest

from comparison_cases import write_case
from halfstep.comparison.result import read_comparison
from halfstep.errors import MissingError
from halfstep.planning.ledger import CATEGORIES
from halfstep.report import page
from halfstep.report.page import build_plots, page_values, render_page
from halfstep.report.plots.curves import thin

NASTY = '</script><script>alert("x")</script><!-- &amp; '


@pytest.fixture
def plain(monkeypatch):
    """Without the four megabytes of plotly's script, which these tests do not read."""
    monkeypatch.setattr(page, "_plotly_script", lambda: "/* plotly */")


def embedded(html, name):
    return json.loads(re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', html, re.DOTALL)[1])


def test_the_page_has_the_values_of_the_file(tmp_path, plain):
    """The embedded JSON is the comparison's, and the cells carry its exact values."""
    comparison = read_comparison([write_case(tmp_path / "c")])
    html = render_page(comparison)
    values = json.loads(json.dumps(comparison.as_dict()))
    assert embedded(html, "comparison") == values
    for row in values["rows"]:
        for name in ("step_ms", "samples_per_second", "speedup", "loss", "skips"):
            assert f'data-row="{row["label"]}" data-metric="{name}" data-value="{row["figures"][name]}"' in html


def test_values_of_the_page_are_computed_before_the_template(tmp_path):
    """Headline, tiles, rows and machines are plain values that need neither jinja2 nor plotly."""
    failures = {"fp16": {"kind": "out of memory", "reason": "no memory"}}
    comparison = read_comparison([write_case(tmp_path / "c", failures=failures, notes=["a note"])])
    values = page_values(comparison, comparison.as_dict())
    assert values["title"] == "digits: 3 precisions compared"
    assert values["verdict"]["headline"] == "Use bf16"
    assert values["verdict"]["tiles"][1:3] == [("5 ms", "per step"), ("400 MiB", "peak memory")]
    assert "a note" in values["verdict"]["notes"]
    rows = {row.label: row for row in values["summary"].rows}
    assert [row.kind for row in rows.values()] == ["", "used", "failed"]
    assert all(len(row.cells) == len(values["summary"].heads) - 1 for row in rows.values() if row.kind != "failed")
    assert rows["fp16"].cells == ()
    assert "no memory" in rows["fp16"].reason
    assert values["failed"] == []  # its reason is in the table
    ((machine, pairs),) = values["environments"]
    assert machine == "a CPU"
    assert dict(pairs)["matmul rate, GFLOP/s"] == "fp32 100, bf16 100, fp16 100"
    assert values["truth"].heads == ("", "fp32", "bf16")
    assert "multiple of 8" in values["censuses"][0].about


def test_the_page_has_a_heat_map_of_each_sample(tmp_path, plain):
    """With the underflow and the worst layer of each row in the results."""
    comparison = read_comparison([write_case(tmp_path / "c")])
    values = page_values(comparison, comparison.as_dict())
    assert [sample["label"] for sample in values["samples"]] == ["fp32", "bf16", "fp16"]
    html = render_page(comparison)
    assert html.count('aria-label="Heat map of the exponents of gradients in ') == 3
    assert 'data-row="fp16" data-metric="underflow" data-value="0.125">12.5 %<small>blocks.1.fc 50 %</small>' in html


def test_every_string_is_escaped(tmp_path, plain):
    """Labels, reasons, notes, commands and truth tables from a hostile file open no element."""
    failures = {"bf16": {"kind": "job", "reason": NASTY}}
    folder = write_case(tmp_path / "c", failures=failures, notes=[NASTY], machine=NASTY, target=NASTY, command=[NASTY])
    html = render_page(read_comparison([folder]))
    assert html.count("<script") == 4
    assert html.count("</script") == 4
    assert "alert(&#34;x&#34;)" in html
    assert "<b>lossy</b>" not in html
    assert "<!--" not in html


def test_parts_of_memory_keep_their_order_and_colour(tmp_path, plain):
    """Every category of a plan has a place in the bars and a colour that no other category has."""
    values = read_comparison([write_case(tmp_path / "c")]).as_dict()
    parts = [*CATEGORIES, "not predicted"]
    values["rows"][0] |= {
        "memory": dict.fromkeys(reversed(parts), 2.0**30),
        "predicted_bytes": 2.0**30,
        "predicted_gpu": None,
        "predicted_parts": None,
    }
    values["rows"][1] |= {"memory": {"optimizer": 2.0**30, "weights": 2.0**30}, "predicted_bytes": None}
    (plot,) = (plot for plot in build_plots(values) if plot.id == "plot-memory")
    names = [bar["name"] for bar in plot.data]
    assert names[:2] == ["process", "weights"]
    assert names[-1] == "not predicted"
    assert names.index("optimizer") + 1 == names.index("states")
    colours = {bar["name"]: bar["marker"]["color"] for bar in plot.data}
    assert len({colours[name] for name in parts}) == len(parts)
    assert colours["optimizer"] == colours["states"]
    assert "Compiled runs are not predicted" in plot.caption


def test_every_plot_has_a_name_and_a_table(tmp_path, plain):
    """Every plot has a title, a caption, and its values in rows and columns for a screen reader."""
    comparison = read_comparison([write_case(tmp_path / "c")])
    html = render_page(comparison)
    plots = build_plots(comparison.as_dict())
    assert {plot.id for plot in plots} == {
        "plot-speed", "plot-memory", "plot-planned", "plot-split", "plot-flops", "plot-loss", "plot-gap", "plot-norm", "plot-scale", "plot-census",
    }  # fmt: skip
    for plot in plots:
        assert f'<div id="{plot.id}" class="plot" role="img" aria-labelledby="{plot.id}-title"' in html
        assert f'<h3 id="{plot.id}-title">' in html
        assert plot.table.rows
        assert all(len(row) == len(plot.table.heads) for row in plot.table.rows)
    assert html.count("Show as a table") == len(plots)
    assert '<html lang="en">' in html


def test_skips_are_marked_on_the_scale(tmp_path):
    """The loss-scale plot has a cross at each skipped step."""
    plots = {p.id: p for p in build_plots(read_comparison([write_case(tmp_path / "c")]).as_dict())}
    marks = next(trace for trace in plots["plot-scale"].data if trace["mode"] == "markers")
    assert marks["x"] == [3, 5]
    assert marks["y"] == [16, 16]


def test_missing_values_are_not_drawn(tmp_path, plain):
    """No scale without scaling, no gap without fp32, nothing at all without a completed run."""
    alone = read_comparison([write_case(tmp_path / "a", (("bf16", 0.01, {}),))])
    names = {p.id for p in build_plots(alone.as_dict())}
    assert "plot-scale" not in names
    assert "plot-gap" not in names
    assert "No run uses loss scaling" in render_page(alone)
    failed = {"fp32": {"kind": "job", "reason": "no"}}
    empty = read_comparison([write_case(tmp_path / "b", (("fp32", 0.01, {}),), failures=failed)])
    assert build_plots(empty.as_dict()) == []
    assert "No recommendation" in render_page(empty)


def test_several_machines_have_a_page(tmp_path, plain):
    """A page of two machines has the rows, environments and commands of both."""
    one = write_case(tmp_path / "a", machine="CPU A", command=["first"])
    two = write_case(tmp_path / "b", machine="GPU B", device="cuda", command=["second"])
    html = render_page(read_comparison([one, two]))
    assert "bf16 @ CPU A" in html
    assert "bf16 @ GPU B" in html
    assert "first\nsecond" in html


def test_without_plotly_the_error_has_the_line_that_installs_it(tmp_path, monkeypatch):
    """A missing plotly is a MissingError that names the extra, not a traceback."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MissingError, match=r'pip install "halfstep\[train\]"'):
        render_page(read_comparison([write_case(tmp_path / "c")]))


def test_curves_are_thinned_by_means():
    """Each point is the mean of its steps, and a missing value stays missing."""
    assert thin([1.0, 3.0, 5.0, "nan", 7.0], 2) == [2.0, None, 7.0]
    assert thin([None, 1.0], 1) == [None, 1.0]
