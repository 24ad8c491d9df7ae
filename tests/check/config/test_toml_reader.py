"""TOML: the values tomllib reads, each with its position."""

import tomllib

import pytest

from halfstep.check.config.toml_reader import parse_toml
from halfstep.errors import SettingError
from halfstep.precision.node import UNKNOWN, Block, Items, Node, Scalar

TEXTS = (
    '[model]\nname = "llama3"\nflavor = \'8B\'\n\n[training]\nlocal_batch_size = 8\nmixed_precision_param = "bfloat16"\n',
    'a.b.c = 1 # note\na.b.d = 2\n"quoted key" = true\n[a.e]\nf = [1, 2, # one\n 3,]\n',
    "[[run]]\nlr = 1e-4\n[run.inner]\nx = {y = {z = [{w = 1}, {}]}, 'q.r' = -0.5}\n[[run]]\nlr = inf\n",
    "when = 1979-05-27 07:32:00Z\nday = 1979-05-27\nhex = 0xDEAD_BEEF\n",
    's = """one "two" \\""" three\n""""\nt = \'\'\'it\'s\n\'\'\'\nu = "tab\\tend"\nempty = ""\n',
    "[a]\nx = 1\n[b]\n[a.sub]\ny = 2\n",
    "",
)


def _values(node: Node) -> object:
    if isinstance(node, Block):
        return {entry.key: _values(entry.value) for entry in node.entries}
    if isinstance(node, Items):
        return [_values(item) for item in node.items]
    return node.value


@pytest.mark.parametrize("text", TEXTS)
def test_the_tree_has_the_values_that_tomllib_reads(text: str) -> None:
    """Headers in pieces, dotted keys, inline tables, arrays of tables and every literal."""
    assert _values(parse_toml(text, "train.toml")) == tomllib.loads(text)


@pytest.mark.parametrize("text", TEXTS)
def test_every_scalar_stands_where_its_span_points(text: str) -> None:
    """Parsing the characters of a span again gives the scalar's value, and those of a key's span its key."""

    def visit(node: Node) -> None:
        if isinstance(node, Scalar):
            assert text[node.span.start : node.span.end] == node.text
            assert tomllib.loads(f"v = {node.text}")["v"] == node.value
        for item in node.items if isinstance(node, Items) else ():
            visit(item)
        for entry in node.entries if isinstance(node, Block) else ():
            assert text[entry.key_span.start : entry.key_span.end].strip("\"'") == entry.key
            visit(entry.value)

    visit(parse_toml(text, "train.toml"))


def test_a_placeholder_is_unknown() -> None:
    """A string that a template fills in decides nothing."""
    tree = parse_toml('dtype = "${DTYPE}"\n', "train.toml")
    assert _values(tree) == {"dtype": UNKNOWN}


@pytest.mark.parametrize(
    "text", ["a = ", "a = 1\na = 2\n", "[a\n", "x = " + "[" * 3000 + "]" * 3000, "x = " + "1" * 5000]
)
def test_invalid_toml_is_one_error_that_names_the_file(text: str) -> None:
    """No other exception leaves the reader."""
    with pytest.raises(SettingError, match=r"train\.toml"):
        parse_toml(text, "train.toml")


def test_the_error_of_invalid_toml_has_its_place() -> None:
    """Line and column are in the form that the checker reads."""
    with pytest.raises(SettingError, match=r"train\.toml, line 2, column \d+: "):
        parse_toml("a = 1\nb = = 2\n", "train.toml")
