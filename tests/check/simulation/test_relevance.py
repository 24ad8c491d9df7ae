"""Which statements of a script matter to its scaler and optimizers."""

import ast
import gc
import weakref

import pytest

from halfstep.check.simulation.relevance import Relevance


def relevance_of(text):
    """The answers for a script, and its tree."""
    tree = ast.parse(text)
    return Relevance(tree), tree


@pytest.mark.parametrize(
    ("text", "matters"),
    [
        ("if a: loss.backward()", True),
        ("if a: train(model)\ndef train(m): inner(m)\ndef inner(m): m.loss().backward()", True),
        ("for x in y:\n    if a: continue", True),
        ("if a: flag = 1\nif flag: optimizer.step()", True),
        ("if a: print(a)", False),
        ("if a: scheduler.step()", False),
    ],
)
def test_what_acts_leaves_or_decides_matters(text, matters):
    """A branch that only logs does not."""
    relevance, tree = relevance_of(text)
    assert relevance.matters(next(n for n in ast.walk(tree) if isinstance(n, ast.If))) is matters


def test_loops_that_train():
    """An epoch has one, also in a function that it calls; an iteration has none."""
    relevance, tree = relevance_of("for e in a:\n    one(e)\ndef one(e):\n    for x in e:\n        optimizer.step()")
    assert [relevance.has_training_loop(n) for n in ast.walk(tree) if isinstance(n, ast.For)] == [True, False]


def test_a_syntax_tree_does_not_outlive_the_check_of_its_file():
    """A project has thousands of files."""
    relevance, tree = relevance_of("if a: loss.backward()")
    relevance.matters(tree.body[0])
    watch = weakref.ref(relevance)
    del relevance, tree
    gc.collect()
    assert watch() is None
