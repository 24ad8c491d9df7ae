"""The parts of a syntax node."""

import ast

from halfstep.check.script.syntax.children import children_of


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
