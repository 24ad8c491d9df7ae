"""The tables of docs/many-gpus.md are what benchmarks/plan_gpus.py writes."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def program(monkeypatch):
    """The script, imported."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("plan_gpus")


def test_every_table_has_its_place(program):
    """The page has the markers of each table exactly once; the tests below compare what is between them."""
    page = program.PAGE.read_text()
    for name in program.TABLES:
        assert "CONTENT" in program.put(page, name, "CONTENT")


def test_hours_are_those_of_the_record(program):
    """Running the script would not change them."""
    assert program.main(["hours", "--check"]) == 0


def test_a_changed_table_is_noticed(program, tmp_path, monkeypatch):
    """--check fails on a page whose table was edited, and writing it restores the page."""
    page = program.PAGE.read_text()
    copy = tmp_path / "page.md"
    copy.write_text(program.put(page, "hours", "edited"))
    monkeypatch.setattr(program, "PAGE", copy)
    assert program.main(["hours", "--check"]) == 1
    assert program.main(["hours"]) == 0
    assert copy.read_text() == page
    with pytest.raises(SystemExit, match="markers"):
        program.put("", "hours", "x")


@pytest.mark.slow
@pytest.mark.parametrize("table", ["vit-large-896", "vit-large-1024", "fleet-64", "fleet-1024"])
def test_tables_are_what_plan_computes(program, table):
    """Running the script would not change the planned tables either."""
    assert program.main([table, "--check"]) == 0
