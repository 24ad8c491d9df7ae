"""Functions left out before they are walked."""

import ast

from check_scripts import RULES, findings
from halfstep.check.script.outline import read_outline
from halfstep.check.script.relevant import relevant_functions

TEXT = """\
class Net:
    def forward(self, x):
        return self.layer(x)

def outer():
    middle()

def middle():
    inner()

def inner():
    loss.backward()

@torch.no_grad()
def evaluate():
    return net(x)
"""


def test_functions_that_matter_and_their_callers_are_kept():
    """A function is kept for its own words, its decorators', or those of a function it calls."""
    found = relevant_functions(ast.parse(TEXT), TEXT)
    assert {f.name for f in found} == {"outer", "middle", "inner", "evaluate"}


def test_a_function_left_out_is_still_known_by_name():
    """Leaving a function out leaves its name and class."""
    outline = read_outline(ast.parse(TEXT), TEXT)
    assert "forward" in outline.classes["Net"]
    assert "layer" not in outline.calls


def test_nothing_is_missed_for_it():
    """Every bad case is found although functions are left out."""
    assert all(findings(text, rule.code) for rule in RULES for text in rule.bad)
