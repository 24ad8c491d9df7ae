"""The parts of a syntax node."""

import ast

from halfstep.check.script.syntax.children import all_statements, children_of


def test_parts_come_in_order_without_contexts_and_operators():
    """Names, calls and statements are visited; load contexts, operators and annotations are not."""
    call = ast.parse("f(a + b, key=c)").body[0].value
    assert [type(part).__name__ for part in children_of(call)] == ["Name", "BinOp", "keyword"]
    assert [part.id for part in children_of(call.args[0])] == ["a", "b"]
    assert children_of(call.func) == []


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
