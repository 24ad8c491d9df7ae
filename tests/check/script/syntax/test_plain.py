"""Forms of statements that are read as plain ones."""

import ast

import pytest

from check_scripts import reported
from halfstep.check.script.syntax.plain import make_plain


def plain(text: str) -> str:
    """A script in its plain form."""
    tree = ast.parse(text)
    make_plain(tree)
    return ast.unparse(tree)


def test_annotated_assignments_are_plain():
    """The annotation of a variable says nothing that its value does not."""
    assert plain("x: int = 1\ndef f():\n    self.y: float = 2\n    z: int") == plain(
        "x = 1\ndef f():\n    self.y = 2\n    z: int"
    )


def test_fields_of_classes_keep_their_annotations():
    """Without its annotation, a name is no field of a dataclass."""
    assert plain("class A:\n    x: int = 1") == "class A:\n    x: int = 1"


def test_entered_contexts_are_blocks():
    """What follows `enter_context` in the block of its stack runs inside the context."""
    text = (
        "with ExitStack() as stack:\n    a()\n    stack.enter_context(one())\n    stack.enter_context(two())\n    b()"
    )
    assert plain(text) == "with ExitStack() as stack:\n    a()\n    with one():\n        with two():\n            b()"


@pytest.mark.parametrize("call", ["other.enter_context(one())", "if amp:\n        stack.enter_context(one())"])
def test_other_contexts_stay_calls(call):
    """A stack of another block, and a context that is entered under a condition, are left as they are."""
    text = f"with ExitStack() as stack:\n    {call}\n    b()"
    assert plain(text) == ast.unparse(ast.parse(text))


def test_a_backward_after_enter_context_is_inside_autocast():
    """HS140 sees the region that a stack enters."""
    text = (
        "import contextlib\nimport torch\nfor x, y in loader:\n    optimizer.zero_grad()\n    with contextlib.ExitStack() as stack:\n"
        "        stack.enter_context(torch.autocast('cuda', dtype=torch.bfloat16))\n        loss = loss_fn(model(x), y)\n"
        "        loss.backward()\n    optimizer.step()\n"
    )
    assert "HS140" in reported(text)
