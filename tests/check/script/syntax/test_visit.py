"""The walk that collects an outline."""

import ast

from halfstep.check.script.syntax.visit import read_outline

TEXT = """\
import torch

def train(cfg, model):
    scaler = torch.amp.GradScaler("cuda", enabled=cfg.fp16)
    loss = model(x) / cfg.steps if cfg.divide else model(y)
    scaler.scale(loss).backward()
"""


def test_names_and_attributes_are_counted_where_they_are_read():
    """What is read counts once per place, under the last name; what is assigned does not count."""
    loads = read_outline(ast.parse(TEXT)).loads
    assert [loads[name] for name in ("cfg", "model", "fp16", "loss", "GradScaler")] == [3, 2, 1, 1, 1]


def test_every_node_has_its_parent():
    """The parents lead from each visited node to the module, also through names, attributes and keywords."""
    tree = ast.parse(TEXT)
    parents = read_outline(tree).parents
    for node in ast.walk(tree):
        if isinstance(node, (ast.expr, ast.keyword, ast.stmt, ast.arg)):
            assert any(node is child for child in ast.iter_child_nodes(parents[node]))


def test_calls_of_a_statement_are_in_the_order_they_run():
    """An inner call comes before the call around it."""
    tree = ast.parse(TEXT)
    outline = read_outline(tree)
    last = tree.body[1].body[-1]
    assert [ast.unparse(c.call.func) for c in outline.statement_calls[last]] == [
        "scaler.scale",
        "scaler.scale(loss).backward",
    ]


def test_branches_of_a_conditional_expression_are_choices():
    """A call in a branch of `a if test else b` is under that branch."""
    tree = ast.parse(TEXT)
    calls = read_outline(tree).statement_calls[tree.body[1].body[1]]
    assert [[choice.is_true for choice in call.choices] for call in calls] == [[True], [False]]


def test_statements_that_mention_a_scale_are_marked():
    """Only those are searched for a scaled loss later."""
    tree = ast.parse(TEXT)
    first, _, third = tree.body[1].body
    assert read_outline(tree).scaling == {first, third}
