"""`halfstep explain` at the command line."""

import json

import pytest
from click.testing import CliRunner

from halfstep.check.registry import all_rules
from halfstep.cli import cli
from halfstep.report.explain import render_rule
from halfstep.report.topics import TOPICS


def run(*args):
    return CliRunner().invoke(cli, ["explain", *args])


def test_without_a_topic_it_lists_them():
    """Every topic is on the list."""
    assert all(name in run().output for name in TOPICS)
    assert set(json.loads(run("--json").output)) == set(TOPICS)


@pytest.mark.parametrize("name", TOPICS)
def test_lines_fit_the_screen(name):
    """No line is wider than the terminal's usual width plus a table's."""
    assert max(map(len, run(name).output.splitlines())) <= 100


def test_words_may_be_separate_and_json_is_json():
    """`explain loss scaling` works, and --json parses."""
    assert json.loads(run("loss", "scaling", "--json").output)["name"] == "loss-scaling"


@pytest.mark.parametrize("asked", [("HS004",), ("hs004",), ("syntax-error",), ("syntax", "error")])
def test_a_rule_is_explained_by_code_and_by_name(asked):
    """What it finds, why, a wrong and a right case, and references."""
    out = run(*asked).output
    assert out.startswith("HS004 syntax-error (error)\n=====")
    assert all(word in out for word in ("Wrong:", "Right:", "References:", "halfstep: ignore[HS004]"))


def test_a_rule_as_json_has_every_field():
    """The JSON of a rule has its code, texts, cases and references."""
    rule = json.loads(run("HS004", "--json").output)
    assert {"code", "name", "severity", "title", "reason", "bad", "good", "references"} == set(rule)


def test_every_rule_can_be_explained():
    """`explain` shows the title of every rule."""
    for rule in all_rules():
        result = run(rule.code)
        assert result.exit_code == 0
        assert rule.title() in " ".join(result.output.split())


def test_the_text_of_every_rule_fits_80_columns():
    """Only examples of code, which are indented, and addresses may be wider: folded, they could not be copied."""
    lines = [line for rule in all_rules() for line in render_rule(rule, 80).splitlines()]
    prose = [line for line in lines if not line.startswith("    ") and "://" not in line]
    assert [line for line in prose if len(line) > 80] == []


def test_an_unknown_rule_is_an_error_with_a_guess():
    """An unknown rule code raises an error instead of being treated as a topic."""
    error = run("HS99999").exception
    assert "Unknown rule 'HS99999'" in str(error)
    assert len(str(error)) < 200
