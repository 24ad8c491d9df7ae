"""The rendered course: verdicts name their basis, colour only on request, and docs/learn.md is what the code generates."""

import json
import re
from pathlib import Path

import pytest

from halfstep.learning.experiment import EXPERIMENTS, Proof, Reading, run_experiment
from halfstep.learning.practice.record import Grade, Row
from halfstep.learning.progress import Progress
from halfstep.learning.units import UNITS
from halfstep.report.learn.notebook import render_notebook
from halfstep.report.learn.page import render
from halfstep.report.learn.practice import render_grade
from halfstep.report.learn.text import Page, proof_data

PAGE = Path(__file__).resolve().parents[2] / "docs" / "learn.md"
BLOCK = re.compile(r"```text\n.*?\n```", re.DOTALL)


@pytest.mark.parametrize(
    ("basis", "words"),
    [("measured", "true here"), ("predicted", "true by prediction"), ("recorded", "true by recorded facts")],
)
def test_a_verdict_names_what_it_rests_on(basis, words):
    """What was predicted or recorded is not printed as measured here."""
    proof = Proof("x", "c", (Reading("a", 1),), True, "m", 0.0, basis)
    assert f"-> {words} (" in Page().proof(proof)
    assert proof_data(proof)["basis"] == basis
    untrue = Proof("x", "c", (Reading("a", 1),), False, "m", 0.0, basis)
    assert f"-> NOT {words} (" in Page().proof(untrue)


def test_claims_about_gpus_and_deepspeed_are_not_called_measured():
    """No GPU and no DeepSpeed is run."""
    assert EXPERIMENTS["eight-to-four"].basis == "predicted"
    assert {name for name, e in EXPERIMENTS.items() if e.basis == "recorded"} == {"hardware-choice", "zero-and-amp"}


def test_colour_is_only_for_terminals():
    """Escape codes appear on request only, and do not change the text."""
    progress = Progress({"formats": True, "memory": False})
    plain, painted = Page().units(progress), Page(colour=True).units(progress)
    assert "\033" not in plain
    assert re.sub(r"\033\[\d+m", "", painted) == plain


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_units_are_wrapped_to_the_width(width):
    """Prose fits the terminal down to 40 columns; code is left as it is."""
    for unit in UNITS.values():
        code = {line for paragraph in unit.text if "\n" in paragraph for line in paragraph.splitlines()}
        lines = [line for line in Page(width).opening(unit).splitlines() if line not in code]
        assert all(
            len(line) <= max(40, min(width, 80)) or " " not in line.strip() or line == unit.title for line in lines
        )


def test_the_page_is_generated():
    """docs/learn.md without its recorded blocks is what the code renders: python -m halfstep.report.learn.page."""
    text = PAGE.read_text()
    machine = re.search(r"the output of one run on (.+?)\. Speeds", text).group(1)
    expected = render(lambda name: "BLOCK", machine)
    assert BLOCK.sub("```text\nBLOCK\n```", text) == expected


def test_every_recorded_block_is_of_its_experiment_and_confirmed():
    """The blocks are in the order of the units, with today's claims, and none records a claim that failed."""
    names = [name for unit in UNITS.values() for name in unit.experiments]
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) == len(names)
    for name, block in zip(names, blocks, strict=True):
        assert f"({name}, " in block
        assert EXPERIMENTS[name].claim in " ".join(block.split())
        assert "NOT true" not in block


@pytest.mark.parametrize("name", ["range", "standing-still", "clipping-order", "underflow-nan"])
def test_recorded_blocks_have_todays_readings(name):
    """The labels of the readings in the page are those of the experiment."""
    block = next(b for b in BLOCK.findall(PAGE.read_text()) if f"({name}, " in b)
    assert all(reading.label in block for reading in run_experiment(name).readings)


def test_passed_practices_are_counted():
    """The list of units shows how many tasks were passed."""
    assert "practice: 0 of 5 tasks passed" in Page().units(Progress())
    assert "practice: 1 of 5 tasks passed" in Page().units(Progress(practices={3: True, 4: False}))


NOTEBOOK = PAGE.with_name("learn.ipynb")


def test_the_notebook_is_generated():
    """docs/learn.ipynb is what the code renders, and has a cell for every experiment of the units."""
    assert NOTEBOOK.read_text() == render_notebook()
    data = json.loads(render_notebook())
    assert data["nbformat"] == 4
    code = ["".join(cell["source"]) for cell in data["cells"] if cell["cell_type"] == "code"]
    assert code[1:] == [f'show("{name}")' for unit in UNITS.values() for name in unit.experiments]
    assert len({cell["id"] for cell in data["cells"]}) == len(data["cells"])


@pytest.mark.slow
def test_the_notebook_runs(capsys):
    """Its cells run in order in one namespace, and every claim is true."""
    names = {}
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        exec("".join(cell["source"]), names)
    assert capsys.readouterr().out.count("-> true ") == len(cells) - 1


@pytest.mark.parametrize("name", ["learn-training-loops", "learn-optimizers"])
def test_the_code_of_the_continuations_runs(name):
    """Each block of Python runs by itself; its assertions are the claims of the page."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.with_name(f"{name}.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        exec(block, {"__name__": "block"})


def test_a_grade_fits_80_columns_and_shows_what_to_do():
    """A failed row has its to-do; the verdict counts the rows."""
    rows = (
        Row("run", "the script runs", "it did", True),
        Row("clipping", "is clipped " * 9, "1.5e-05 " * 9, False, "Call unscale_ " * 9),
    )
    text = render_grade(Page(), Grade(2, "Clipping", rows), "my.py")
    assert max(map(len, text.splitlines())) <= 80
    assert "to do: Call unscale_" in text
    assert "not passed: 1 of 2 criteria not met" in text
    assert "\npassed" in render_grade(Page(), Grade(2, "Clipping", rows[:1]), "my.py")
