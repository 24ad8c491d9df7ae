"""Blocks whose exception a test expects."""

import ast

import pytest

from halfstep.check.script.syntax.raising import lines_that_raise


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("with pytest.raises(RuntimeError):", True),
        ("with self.assertRaises(ValueError) as caught:", True),
        ("with open(path), self.assertRaisesRegex(ValueError, 'x'):", True),
        ("with torch.no_grad():  # .raises(", False),
    ],
)
def test_lines_of_blocks_that_expect_an_exception(header, expected):
    """The block and its header, but not the line after it."""
    text = f"{header}\n    step()\nstep()\n"
    assert lines_that_raise(ast.parse(text), text) == [range(1, 3)] * expected
