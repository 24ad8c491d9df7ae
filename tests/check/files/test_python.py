"""Python that is newer than the interpreter: parsed as older syntax at the same positions."""

import ast
import sys

import pytest

from halfstep.check.files.python import parse_python, place_of, require_python, to_older_syntax

NEWER = (
    'print(f"{row["loss"]:.3f} {x}")\n',
    "print(f'{row['loss']} {\"it's\"}')\n",
    "print(f\"{'\\n'.join(rows)}\")\n",
    "print(f\"{'a' 'b\\t'!r:>{width}} {{literal}} {d['k']}\")\n",
    'print(f"{f"{f"{x["a"]}"}"}")\n',
    "print(f\"{path / f'epoch_{row['n']}.pt'} {x}\")\n",
    'print(f\'{f"{row["n"]}" + f"{k}"}\')\n',
    'print(f"""{f\'{\'\\n\'.join(rows)}\'}""")\n',
    'print(f"{\n    loss  # the mean\n}", 1)\n',
    'print(f"{"""three"""}" f"{y["b"]}")\n',
    "print(f'''{'\\n'.join(x)} {d['k']}''')\n",
    'print(f"{rows[\'\\u00e9\']} {names["\u65e5"]} {x}")\n',
    "type Batch = dict[str, int]\n",
    "type Pair[A, B] = tuple[A, B]\n",
    "def first[T](items: list[T]) -> T:\n    return items[0]\n",
    "class Stack[T: (int, str) = int](Base):\n    pass\n",
    "def first[\n    T,\n    U,\n](items: list[T]) -> T:\n    return items[0]\n",
    "try:\n    pass\nexcept KeyError, ValueError:\n    pass\n",
    "try:\n    pass\nexcept* KeyError, ValueError:\n    pass\n",
    "message = t'{loss} of {row['name']}'\n",
    "lazy import torch\nlazy from torch import nn\n",
)
OLDER = (
    "return\"a\"'b'\"c\"'d'\nif x in\"ab\" 'cd': pass\n# '\nx = rb'' or Rb''\nf'' '{'\n",
    "type = 3\ntype(x)\nlazy = 1\ntry:\n    pass\nexcept (KeyError, ValueError) as error:\n    pass\n",
    "x = '{' + \"}\" + '''{\n}'''\nr'\\d' # f\"{x[\"a\"]}\"\n",
    "print(f'{x!r:>{w}} {{}} {d[\"k\"]} {(lambda: 1)()}')\nprint(f\"{f'{x}' + d['k']} {f'{y!r:>{w}}'}\")\nclass A(B[int]):\n    def f(self): ...\n",
)


@pytest.mark.parametrize("text", NEWER)
def test_newer_syntax_parses_at_the_same_positions(text: str) -> None:
    """The rewritten text has the same lines, of the same length in characters and bytes, and any Python parses it."""
    rewritten = to_older_syntax(text)
    assert [(len(line), len(line.encode())) for line in rewritten.split("\n")] == [
        (len(line), len(line.encode())) for line in text.split("\n")
    ]
    ast.parse(rewritten, feature_version=(3, 11))
    assert parse_python(text).body


@pytest.mark.parametrize("text", OLDER)
def test_a_text_of_older_syntax_is_not_changed(text: str) -> None:
    """Words that are keywords only in newer versions, and braces in other strings, stay as they are."""
    assert to_older_syntax(text) == text


def test_the_code_around_newer_syntax_keeps_its_names() -> None:
    """Names inside a field and after it are where they were."""
    text = 'print(f"{row["loss"]} {other}")\nscaler.step(optimizer)\n'
    names = {
        (n.id, n.lineno, n.col_offset) for n in ast.walk(ast.parse(to_older_syntax(text))) if isinstance(n, ast.Name)
    }
    assert {("scaler", 2, 0), ("optimizer", 2, 12)} <= names
    assert {name for name, line, _ in names if line == 1} == {"print", "row", "other"}


@pytest.mark.parametrize(
    "text", ["def f(:\n", "x = (\n", "print 'two'\n", 'f"{x["a"]}" = (\n', 'f"{', "f'{x:", 'f"{f"{' * 40]
)
def test_a_text_that_no_version_parses_is_its_own_error(text: str) -> None:
    """The error is that of the text as written, not of the rewritten one."""
    with pytest.raises(SyntaxError) as raised:
        parse_python(text)
    with pytest.raises(SyntaxError) as expected:
        ast.parse(text)
    assert raised.value.msg == expected.value.msg


@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs an interpreter that parses nested quotes")
def test_a_text_that_parses_is_not_rewritten() -> None:
    """The interpreter's own reading comes first."""
    text = 'print(f"{row["loss"]}")\n'
    assert ast.dump(parse_python(text)) == ast.dump(ast.parse(text))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('import torch\nscaler = torch.amp.Grad\\\nScaler(\\"cuda")\n', (3, 8)),
        ("x = 1\ny = )\n", (2, 5)),
        ("x = (\n", (1, 5)),
        ("def f(:\n", (1, 7)),
    ],
)
def test_the_place_of_an_error_is_in_the_text(text: str, place: tuple[int, int]) -> None:
    """Lines that a backslash joins have columns of their own."""
    with pytest.raises(SyntaxError) as caught:
        parse_python(text)
    line, column = place_of(caught.value)
    assert (line, column) == pytest.approx(place, abs=1)  # interpreters differ by a character
    assert column <= len(text.split("\n")[line - 1]) + 1


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n",
        "nonlocal x\n",  # parses; symbols forbid it
        "def f(a, a): pass\n",
        "type Batch = dict[str, int]\n",
        "except_ = 1\nif x\n",
        "x = '\0'\n",
        "(" * 300 + ")" * 300,
    ],
)
def test_a_text_that_needs_no_tree_raises_what_parsing_it_raises(text):
    """The same error with the same message, or none."""

    def outcome(read):
        try:
            read(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return type(error), str(error)
        return None

    assert outcome(require_python) == outcome(parse_python)
