"""Functions that are skipped before they are walked."""

import ast

from check_scripts import RULES, findings
from halfstep.check.script.syntax.outline import read_outline
from halfstep.check.script.syntax.relevant import relevant_functions

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


def test_functions_that_matter_and_their_callers_are_relevant():
    """A function is relevant for its own words, its decorators', or those of a function it calls."""
    functions = relevant_functions(ast.parse(TEXT), TEXT)
    assert {f.name for f in functions} == {"outer", "middle", "inner", "evaluate"}


def test_a_skipped_function_is_still_known_by_name():
    """The outline has the name and class of a skipped function."""
    outline = read_outline(ast.parse(TEXT), TEXT)
    assert "forward" in outline.classes["Net"]
    assert "layer" not in outline.calls


def test_skipping_functions_misses_nothing():
    """Every bad case still gives its finding."""
    assert all(findings(text, rule.code) for rule in RULES for text in rule.bad)


def test_words_of_a_rule_make_functions_relevant():
    """A function with a word that a rule declares is walked, although no common word occurs in it."""
    text = "def setup():\n    torch.autograd.set_detect_anomaly(True)\n"
    tree = ast.parse(text)
    assert relevant_functions(tree, text) == set()
    assert relevant_functions(tree, text, ("set_detect_anomaly",)) == {tree.body[0]}
    assert "set_detect_anomaly" in read_outline(tree, text, ("set_detect_anomaly",)).calls
