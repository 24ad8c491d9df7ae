"""The parts of a syntax node."""

import ast

from halfstep.check.script.syntax.children import SIMPLE, all_children_of, all_nodes, all_statements, children_of


def test_parts_come_in_order_without_contexts_and_operators():
    """Names, calls and statements are visited; load contexts, operators and annotations are not."""
    call = ast.parse("f(a + b, key=c)").body[0].value
    assert [type(part).__name__ for part in children_of(call)] == ["Name", "BinOp", "keyword"]
    assert [part.id for part in children_of(call.args[0])] == ["a", "b"]
    assert children_of(call.func) == []


def test_all_children_are_those_of_ast():
    """The kinds whose children are named in the code have the children that ast finds, in its order."""
    tree = ast.parse(
        "x = y = -a.b[c](d, *e, k=f)\nif a < b <= c and d:\n    [1, (2, x)]\nelse:\n    f'{x!r:>{w}}' + 'y'\n"
        "def f(a: int = 1, *b, c=2) -> int:\n    return {**a, 'k': [i for i in b if i]}\nx: int = 1\nlambda: (yield)\n"
    )
    skipped = (ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop)
    for node in ast.walk(tree):
        assert all_children_of(node) == [n for n in ast.iter_child_nodes(node) if not isinstance(n, skipped)]
    assert list(all_nodes(tree)) == [n for n in ast.walk(tree) if not isinstance(n, skipped)]


def test_simple_statements_have_no_block():
    """What is skipped in a search for statements contains none."""
    for kind in SIMPLE:
        assert not {"body", "orelse", "finalbody", "handlers", "cases"} & set(kind._fields)


def test_annotations_are_left_out():
    """A type annotation does not affect what runs."""
    function = ast.parse("def f(x: torch.Tensor) -> torch.Tensor:\n    return x\n").body[0]
    parts = [part for part in children_of(function) if isinstance(part, ast.stmt)]
    assert [type(part) for part in parts] == [ast.Return]
    assert not any(isinstance(part, ast.Attribute) for part in children_of(function))


def test_all_statements_include_those_of_handlers_and_cases():
    """Every statement of a script is listed once, outer ones first."""
    tree = ast.parse(
        "if a:\n    b\nelse:\n    c\ntry:\n    d\nexcept E:\n    e\nfinally:\n    f\nmatch g:\n    case 1:\n        h\n"
    )
    statements = all_statements(tree)
    assert {n for n in statements if isinstance(n, ast.stmt)} == {n for n in ast.walk(tree) if isinstance(n, ast.stmt)}
    assert len(set(statements)) == len(statements)
    assert statements[:4] == (tree, *tree.body)
