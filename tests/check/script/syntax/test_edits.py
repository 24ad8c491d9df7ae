"""Places in bytes, edits in characters."""

import ast

from hypothesis import given
from hypothesis import strategies as st

from halfstep.check.script.syntax.edits import Lines

LETTERS = st.text("ab\u00e9\u4e2d\U0001f600 ", max_size=8)


@given(LETTERS, LETTERS, st.sampled_from(["\n", "\r\n", "\r"]))
def test_a_nodes_own_text_is_found_behind_any_letters(first, second, newline):
    """Whatever letters stand before it, a node's span is its text."""
    text = f'a = "{first}"{newline}b = "{second}" + target{newline}'
    lines = Lines(text)
    node = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name) and n.id == "target")
    assert lines.source(node) == "target"
    assert lines.column(node.lineno, node.col_offset) == len(f'b = "{second}" + ') + 1


def test_new_lines_have_the_indentation_and_line_end_of_their_place():
    """A line put before or after a statement looks like its neighbours."""
    text = "if x:\r\n    a()  # why\r\n    b()"
    lines = Lines(text)
    a, b = ast.parse(text).body[0].body
    before, after = lines.before(a, "new()"), lines.after(b, "if y:\n    z()")
    assert text[: before.start] + before.text + text[before.end :] == "if x:\r\n    new()\r\n    a()  # why\r\n    b()"
    assert text[: after.start] + after.text == text + "\r\n    if y:\r\n        z()"
    assert lines.after(a, "c()").start == text.index("# why") + len("# why")


def test_a_statement_that_shares_its_line_is_not_alone():
    """A line can be put only next to a statement that has its lines to itself."""
    text = "a(); b()\nif x: c()\nd()  # fine\n"
    lines = Lines(text)
    statements = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Expr)]
    alone = {lines.source(s): lines.alone(s) for s in statements}
    assert alone == {"a()": False, "b()": False, "c()": False, "d()": True}
