"""What a function returns for literal arguments."""

import ast

import pytest

from halfstep.check.script.syntax.outcome import outcome
from halfstep.check.script.syntax.visit import read_outline

SOURCE = """\
def pick(name, half=True):
{body}
pick({arguments})
"""


def result(body: str, arguments: str) -> str:
    """The text of what the call returns; "" if it is open."""
    tree = ast.parse(SOURCE.format(body="\n".join(f"    {line}" for line in body.splitlines()), arguments=arguments))
    outline = read_outline(tree)
    value = outcome(outline.calls["pick"][0].call, outline.functions[0])
    return "" if value is None else ast.unparse(value)


@pytest.mark.parametrize(
    ("body", "arguments", "expected"),
    [
        ("return a", "x", "a"),
        ("if name == 'fp16':\n    return a\nreturn b", "'fp16'", "a"),
        ("if name == 'fp16':\n    return a\nreturn b", "'fp32'", "b"),
        (
            "if name.lower() in ('fp16', 'half'):\n    return a\nelif name == 'x':\n    return b\nreturn c",
            "'HALF'",
            "a",
        ),
        ("match name:\n    case 'fp16' | 'half':\n        return a\n    case _:\n        return b", "'half'", "a"),
        ("match name:\n    case 'fp16':\n        return a\n    case _:\n        return b", "name='x'", "b"),
        ("if not half:\n    return a\nreturn b", "x", "b"),
        ("if half and name is not None:\n    return a\nreturn b", "None", "b"),
        ("if ready():\n    log()\nreturn a", "x", "a"),
        ("with lock:\n    return a", "x", "a"),
        ("name = str(name or '').lower()\nif not name:\n    return a\nreturn table[name]", "'FP16'", "table['fp16']"),
        ("name = str(name or '').lower()\nif not name:\n    return a\nreturn table[name]", "None", "a"),
        ("key = name\nif half:\n    key = 'fp16'\nreturn table[key]", "'fp32'", "table['fp16']"),
    ],
)
def test_tests_of_literals_are_decided(body, arguments, expected):
    """A test of a parameter against literals selects the branch."""
    assert result(body, arguments) == expected


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("if name == 'fp16':\n    return a\nreturn b", "option"),
        ("if ready():\n    return a\nreturn b", "'fp16'"),
        ("name = read()\nif name == 'fp16':\n    return a\nreturn b", "'fp16'"),
        ("for x in y:\n    return a\nreturn b", "'fp16'"),
        ("if ready():\n    name = 'bf16'\nif name == 'fp16':\n    return a\nreturn b", "'fp16'"),
        ("with read() as name:\n    if name == 'fp16':\n        return a\nreturn b", "'fp16'"),
        ("if (name or other) == 'fp16':\n    return a\nreturn b", "x"),
        ("match name:\n    case [x]:\n        return a\n    case _:\n        return b", "'fp16'"),
        ("raise ValueError(name)", "'fp16'"),
        ("yield a", "'fp16'"),
        ("log()", "'fp16'"),
    ],
)
def test_anything_else_is_open(body, arguments):
    """A value that the text does not show, an assignment, a loop, a pattern or a generator decides nothing."""
    assert result(body, arguments) == ""
