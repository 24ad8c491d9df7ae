"""The JSON reader: the values other readers give, the position of each, and one clear error for anything else."""

import contextlib
import json
import math
import re
import string
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from halfstep.errors import SettingError
from halfstep.precision.json_tree import MAX_BYTES, load_json, parse_json
from halfstep.precision.node import UNKNOWN, Block, Items, Scalar, is_placeholder, walk
from halfstep.precision.policy import read_deepspeed

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)
SYNTAX = st.text(alphabet="{}[]\":,/*#\\ntrue1e.' \n$<>AB_", max_size=60)


def plain(node):
    """The tree's values; the last of duplicate keys."""
    if isinstance(node, Block):
        return {entry.key: plain(entry.value) for entry in node.entries}
    if isinstance(node, Items):
        return [plain(item) for item in node.items]
    return node.value


def without_placeholders(value):
    """The values the tree has: strings that look like ${x} are UNKNOWN in it."""
    if isinstance(value, dict):
        return {key: without_placeholders(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_placeholders(inner) for inner in value]
    return UNKNOWN if isinstance(value, str) and is_placeholder(value) else value


def has_duplicates(root):
    return any(isinstance(node, Block) and len(node.entries) != len(node.keys()) for node in walk(root))


def agree(known, value):
    """Whether plain values equal the tree's, wherever the tree has a value (NaN equals NaN)."""
    if known is UNKNOWN:
        return isinstance(value, str)
    if isinstance(known, dict):
        return known.keys() == value.keys() and all(agree(known[key], value[key]) for key in known)
    if isinstance(known, list):
        return len(known) == len(value) and all(map(agree, known, value))
    return type(known) is type(value) and (known == value or (known != known and value != value))  # noqa: PLR0124 - NaN


@given(VALUES, st.sampled_from([None, 1, 4]))
def test_both_entry_points_read_what_json_reads(value, indent):
    """Strict JSON gives the values that the standard library gives, in the tree and as plain values."""
    text = json.dumps({"": value}, indent=indent)
    assert load_json(text) == {"": value}
    assert plain(parse_json(text, "x")) == {"": without_placeholders(value)}


@given(SYNTAX | st.text(string.printable + "\u00e9", max_size=60))
@example('"a": 1\n b: 2,}')
@example('"a": 1, "b": {"a": 1, "a": 2}}')
@example("a: ${STAGE}\n b: some text\n c: NaN // none\n}")
@example('"a": "${STAGE}", "b": True}')
def test_both_entry_points_accept_the_same_texts(text):
    """A text is rejected as a tree or has the same values in both; only duplicate keys are an error in one alone."""
    text = "{" + text
    try:
        root = parse_json(text, "JSON text")
    except SettingError as error:
        with pytest.raises(SettingError, match=f"^{re.escape(str(error))}$"):
            load_json(text)
        return
    if has_duplicates(root):
        with pytest.raises(SettingError, match="twice"):
            load_json(text)
    else:
        assert agree(plain(root), load_json(text))


@given(
    st.lists(
        st.tuples(st.text("ab\"'\\/#*,[]{}\n", max_size=6), st.sampled_from(["// x\n", "# {[,\n", "/* \n } */", " "])),
        max_size=5,
    )
)
def test_comments_and_trailing_commas_change_nothing(items):
    """Comments between tokens and a trailing comma leave the values as they are, whatever the strings contain."""
    body = "".join(f"{comment}{json.dumps(text)}{comment},{comment}" for text, comment in items)
    assert load_json(f'// top\n{{"list": [{body}]}}') == {"list": [text for text, _ in items]}


@given(VALUES)
def test_every_span_is_the_text_of_its_value(value):
    """The characters of a span are the JSON of that node and nothing around it."""
    text = json.dumps(value, indent=2)
    for node in walk(parse_json(text, "x")):
        assert without_placeholders(json.loads(text[node.span.start : node.span.end])) == plain(node)
        for entry in node.entries if isinstance(node, Block) else ():
            assert json.loads(text[entry.key_span.start : entry.key_span.end]) == entry.key


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, // a comment\n "b": [true, 2,],}',
        '{"a": 1, # another\n "b": [true, 2]}',
        '{/* one */ "a": 1 /* two */, "b": [true /* yes */, 2] ,\n}',
        '{\n  "a": 1\n  "b": [true # yes\n  2]\n}',
        "{\n  a: 1 // one\n  b: [true // yes\n  2]\n}",
        "{a: 1, 'b': [true, 2]}",
        '\ufeff{"a": 1, "b": [true, 2]}',
        '{\r\n// windows\r\n"a": 1,\r\n"b": [true\r\n 2]\r\n}\r\n',
    ],
)
def test_reads_what_deepspeed_reads(text):
    """Comments, loose commas, bare keys and a byte order mark are read by both entry points."""
    assert load_json(text) == plain(parse_json(text, "x")) == {"a": 1, "b": [True, 2]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"url": "http://host/#x", "c": "/* , ] */",}', {"url": "http://host/#x", "c": "/* , ] */"}),
        ('{"quote": "a\\"// b",}', {"quote": 'a"// b'}),
        ('# only\n{"a": [{},[],],}', {"a": [{}, []]}),
        ("{type: AdamW\n text: '''x\ny'''}", {"type": "AdamW", "text": "x\ny"}),
    ],
)
def test_strings_are_left_alone(text, value):
    """Text that looks like a comment inside a string stays, and a bare value after a bare key is its text."""
    assert load_json(text) == value


def test_a_configuration_that_check_reads_is_read_by_the_policy():
    """Unquoted keys, comments and trailing commas give the same policy as strict JSON."""
    loose = "{\n  train_batch_size: 8 // global\n  bf16: {enabled: true,}, # mode\n  'gradient_clipping': 1.0,\n}"
    strict = '{"train_batch_size": 8, "bf16": {"enabled": true}, "gradient_clipping": 1.0}'
    assert read_deepspeed(loose) == read_deepspeed(strict)


@pytest.mark.parametrize(
    "value", ["${STAGE}", "{{ stage }}", "<stage>", "$STAGE", "%(stage)d", "@STAGE@", "STAGE_HERE"]
)
def test_placeholders_are_unknown_in_the_tree_and_text_as_plain_values(value):
    """A placeholder is a value nobody knows yet; as a plain value it is the text, which no number key accepts."""
    text = f'{{"stage": {value}, "next": 1}}'
    root = parse_json(text, "x")
    assert root.entry("stage").value.value is UNKNOWN
    assert root.entry("next").value.value == 1
    assert load_json(text) == load_json(text.replace(value, json.dumps(value))) == {"stage": value, "next": 1}


def test_a_duplicate_key_is_twice_in_the_tree_and_an_error_as_plain_values():
    """A rule can name both positions of a duplicate, of which the last counts; the plain values have neither."""
    text = '{"b": {"a": 1,\n  "a": 2}, /* x */ }'
    block = parse_json(text, "x").entry("b").value
    assert [entry.value.value for entry in block.entries] == [1, 2]
    assert block.entry("a").value.value == 2
    with pytest.raises(SettingError, match="line 2, column 3: key 'a' appears twice.*first at line 1, column 8"):
        load_json(text)


BROKEN = [
    ('{"a": 1', "line 1, column 8", "comma"),
    ('{"a": 1 "b": 2}', "line 1, column 9", "comma"),
    ('{\n "a" 1}', "line 2, column 6", "colon"),
    ('{"a": True}', "line 1, column 7", "true"),
    ('{\n  "a": tru\n}', "line 2, column 8", "quotes"),
    ('{"a": /home/me}', "line 1, column 7", "quotes"),
    ('{"a": "no end\n}', "line 1, column 7", "closing"),
    ("{'a: 1}", "line 1, column 2", "closing"),
    ("{a: '''no end\n}", "line 1, column 5", "no end"),
    ('{"a": 1}\n```', "line 2, column 1", "follows"),
    ("{} {}", "line 1, column 4", "follows"),
    ('{"a": 1 /* open', "line 1, column 9", "no end"),
    ("{\n/*/}", "line 2, column 1", "no end"),
    ('{/* \n */ "a": ,}', "line 2, column 10", "missing"),
    ('{"a": [,]}', "line 1, column 8", "missing"),
    ("{,}", "line 1, column 2", "missing"),
    ('{"a": 1,, "b": 2}', "line 1, column 9", "two commas"),
    ('{"a": ' + "9" * 5000 + "}", "line 1, column 7", "5000"),
    ("{\n", "line 2, column 1", "missing"),
    ("\n", "line 2, column 1", "missing"),
]


@pytest.mark.parametrize(("text", "position", "words"), BROKEN, ids=[text[:20] for text, _, _ in BROKEN])
def test_an_error_has_a_position_and_a_remedy(text, position, words):
    """Both entry points raise one message with line and column of the text as written, never the parser's traceback."""
    with pytest.raises(SettingError) as raised:
        parse_json(text, "JSON text")
    assert str(raised.value).startswith(f"JSON text, {position}: ")
    assert words in str(raised.value)
    with pytest.raises(SettingError) as again:
        load_json(text)
    assert str(again.value) == str(raised.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000])
def test_deep_nesting_is_rejected(text):
    """Nested brackets end at the reader's limit, not at the interpreter's stack."""
    with pytest.raises(SettingError, match="nested more than"):
        parse_json(text, "x")


@pytest.mark.parametrize(
    "text",
    [
        "{" + "/*" * 500_000,
        '{"' + '"/' * 500_000,
        "{" + "," * 1_000_000,
        '{"a' + "\\" * 999_999,
        '{"a": ' + "1" * 4000 + "e" * 1_000_000,
        '{"a": "' + "\\" * 1_000_000,
        '{"a": ' + "{" * 1_000_000,
        "{a: " + "'" * 1_000_000,
        "{" + "'" * 1_000_001,
        '{"a": true' + " " * 1_000_000 + "x}",
    ],
    ids=["comments", "strings", "commas", "key", "number", "value", "template", "quotes", "quoted key", "blanks"],
)
def test_hostile_text_ends(text):
    """A megabyte made to confuse the reader is an error; a reader in quadratic time would need hours."""
    with pytest.raises(SettingError):
        load_json(text)


def test_numbers_that_json_does_not_have():
    """NaN and the infinities are read, so that a rule can report them."""
    values = load_json('{"a": NaN, "b": -Infinity, "c": [Infinity // top\n]}')
    assert math.isnan(values["a"])
    assert (values["b"], values["c"]) == (-math.inf, [math.inf])


@given(SYNTAX)
def test_no_text_crashes_the_reader(text):
    """Whatever the text, the result is a tree or a SettingError."""
    with contextlib.suppress(SettingError):
        assert isinstance(parse_json(text, "x"), Scalar | Items | Block)


def test_a_file_is_read_by_path_or_name(tmp_path):
    """A file is passed as a Path or a string, and its errors have its name."""
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1, // one\n}')
    assert load_json(path) == load_json(str(path)) == {"a": 1}
    path.write_text('{"a": }')
    with pytest.raises(SettingError, match=r"config\.json, line 1, column 7"):
        load_json(path)


def test_a_file_that_cannot_be_read_is_rejected_by_name(tmp_path):
    """A missing file, a folder, another encoding and a huge file are rejected by name."""
    utf16, huge = tmp_path / "utf16.json", tmp_path / "huge.json"
    utf16.write_bytes('{"a": 1}'.encode("utf-16"))
    huge.write_bytes(b" " * (MAX_BYTES + 1))
    for source, reason in [
        (tmp_path / "nothing.json", "No such file"),
        (str(tmp_path), "Is a directory" if sys.platform != "win32" else "Cannot read"),
        ("a\0b", "Cannot read"),
        ("", "Cannot read"),
        ("x" * 5000, "Cannot read"),
        (utf16, "not UTF-8"),
        (huge, "more than"),
    ]:
        with pytest.raises(SettingError) as caught:
            load_json(source)
        assert reason in str(caught.value)
