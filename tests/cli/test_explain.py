"""`halfstep explain` at the command line."""

import json

import pytest
from click.testing import CliRunner

from halfstep.cli import cli
from halfstep.topics import TOPICS


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
