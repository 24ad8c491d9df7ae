"""Functions that are skipped before they are walked."""

import ast

from check_scripts import RULES, findings
from halfstep.check.script.syntax.relevant import relevant_functions, shortest
from halfstep.check.script.syntax.visit import read_outline

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


def test_shortest_words_decide_for_all():
    """A word that contains another one need not be searched for; every word contains one that is kept."""
    words = ("bf16=True", "bf16", "--amp", "-amp", "apex", "apex")
    assert shortest(words) == ("bf16", "-amp", "apex")
    assert all(any(short in word for short in shortest(words)) for word in words)


def test_a_function_that_has_the_name_of_a_relevant_one_is_not_its_caller():
    """The line of `def` contains the name too; only the lines below it are searched for calls."""
    text = "class A:\n    def run(self):\n        loss.backward()\n\nclass B:\n    def run(self):\n        pass\n"
    tree = ast.parse(text)
    assert relevant_functions(tree, text) == {tree.body[0].body[0]}


def test_the_constructors_of_a_relevant_method_are_those_of_its_class_and_its_bases():
    """A method reads attributes that the constructor of a base sets; a class without a relevant method has no such reader."""
    text = (
        "class Base:\n    def __init__(self, rate):\n        self.rate = rate\n"
        "class Trainer(Base):\n    def fit(self):\n        loss.backward()\n"
        "class Other:\n    def __init__(self, rate):\n        self.rate = rate\n"
    )
    tree = ast.parse(text)
    base, trainer, _ = tree.body
    assert relevant_functions(tree, text) == {base.body[0], trainer.body[0]}
