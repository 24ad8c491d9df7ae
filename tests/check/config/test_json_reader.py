"""The JSON reader: the values other readers give, with the place of each, and one clear error for what is no JSON."""

import contextlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.check.config.json_reader import parse_json
from halfstep.check.config.node import UNKNOWN, Block, Items, Scalar, walk
from halfstep.errors import SettingError
from work_counter import no_hang

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


def plain(node):
    if isinstance(node, Block):
        return {entry.key: plain(entry.value) for entry in node.entries}
    if isinstance(node, Items):
        return [plain(item) for item in node.items]
    return node.value


def without_placeholders(value):
    """What the reader gives: texts that look like ${x} are unknown to it."""
    from halfstep.check.config.node import is_placeholder

    if isinstance(value, dict):
        return {key: without_placeholders(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_placeholders(inner) for inner in value]
    return UNKNOWN if isinstance(value, str) and is_placeholder(value) else value


@given(VALUES, st.sampled_from([None, 1, 4]))
def test_reads_what_json_reads(value, indent):
    """Every JSON text gives the values that the standard library gives."""
    assert plain(parse_json(json.dumps(value, indent=indent), "x")) == without_placeholders(value)


@given(VALUES)
def test_every_place_is_the_text_of_its_value(value):
    """The characters of a span are the JSON of that node and nothing around it."""
    text = json.dumps(value, indent=2)
    for node in walk(parse_json(text, "x")):
        assert without_placeholders(json.loads(text[node.span.start : node.span.end])) == plain(node)
        for entry in node.entries if isinstance(node, Block) else ():
            assert json.loads(text[entry.key_span.start : entry.key_span.end]) == entry.key


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, // a comment\n "b": 2,}',
        '{"a": 1, # another\n "b": 2}',
        '{/* one */ "a": 1 /* two */, "b": 2 ,\n}',
        '{\n  "a": 1\n  "b": 2\n}',
        "{\n  a: 1\n  b: 2\n}",
        "{'a': 1, 'b': 2}",
        '\ufeff{"a": 1, "b": 2}',
    ],
)
def test_reads_what_deepspeed_reads(text):
    """Comments, loose commas and bare keys are configurations that run."""
    assert plain(parse_json(text, "x")) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "value", ["${STAGE}", "{{ stage }}", "<stage>", "$STAGE", "%(stage)d", "@STAGE@", "STAGE_HERE"]
)
def test_placeholders_are_unknown_not_wrong(value):
    """What a template leaves open is a value nobody knows yet, in quotes or without."""
    root = parse_json(f'{{"stage": {value}, "next": 1}}', "x")
    assert root.entry("stage").value.value is UNKNOWN
    assert root.entry("next").value.value == 1


def test_a_key_given_twice_is_kept_twice():
    """Both places of a duplicate are there for a rule to name, and the last one counts."""
    root = parse_json('{"a": 1, "a": 2}', "x")
    assert [entry.value.value for entry in root.entries] == [1, 2]
    assert root.entry("a").value.value == 2


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ('{"a": 1', "column 8", "comma"),
        ('{"a": 1 "b": 2}', "column 9", "comma"),
        ('{\n "a" 1}', "line 2, column 6", "colon"),
        ('{"a": True}', "column 7", "true"),
        ('{"a": /home/me}', "column 7", "quotes"),
        ('{"a": 1}\n```', "line 2, column 1", "follows"),
        ('{"a": 1 /* open', "column 9", "no end"),
        ('{"a": ,}', "column 7", "missing"),
        ('{"a": 1,, "b": 2}', "column 9", "two commas"),
        ('{"a": ' + "9" * 5000 + "}", "column 7", "5000"),
        ("", "column 1", "missing"),
    ],
)
def test_an_error_says_where_and_what_to_do(text, place, words):
    """One message with line and column, never a traceback of the parser."""
    with pytest.raises(SettingError) as raised:
        parse_json(text, "ds.json")
    assert str(raised.value).startswith("ds.json, line")
    assert place in str(raised.value)
    assert words in str(raised.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000])
def test_deep_nesting_is_refused_at_once(text):
    """A bomb of brackets ends at the limit, not at the stack's."""
    with pytest.raises(SettingError, match="nested more than"):
        parse_json(text, "x")


@pytest.mark.parametrize(
    "text",
    [
        '{"a": ' + "1" * 4000 + "e" * 2_000_000,
        '{"a": "' + "\\" * 4_000_000,
        "{" + "/*" * 2_000_000,
        "{" + "/* " * 1_000_000,
        '{"a": ' + "{" * 4_000_000,
        "{" + '"a": 1,' * 20_000,
    ],
    ids=["number", "escapes", "comments", "open comments", "brackets", "entries"],
)
def test_no_text_takes_long(text):
    """Each character is looked at a few times at most, whatever the text."""
    with contextlib.suppress(SettingError), no_hang():
        parse_json(text, "x")


def test_numbers_that_json_does_not_have():
    """NaN and the infinities are read, so that a rule can speak of them."""
    root = parse_json('{"a": NaN, "b": -Infinity}', "x")
    assert math.isnan(root.entry("a").value.value)
    assert root.entry("b").value.value == -math.inf


@given(st.text(alphabet="{}[]\":,/*#\\ntrue1e.' \n", max_size=60))
def test_no_text_crashes_the_reader(text):
    """Whatever the text, the answer is a tree or a SettingError."""
    with contextlib.suppress(SettingError):
        assert isinstance(parse_json(text, "x"), Scalar | Items | Block)
