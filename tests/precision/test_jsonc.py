"""JSON as people write it is read, and what cannot be read is refused with its place."""

import contextlib
import json
import string
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import SettingError
from halfstep.precision.jsonc import MAX_BYTES, load_json
from work_counter import no_hang

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=5), values, max_size=4), st.sampled_from([None, 2]))
def test_plain_json_is_read_as_json_reads_it(value, indent):
    """Strict JSON gives what the standard library gives."""
    assert load_json(json.dumps(value, indent=indent)) == value


@given(
    st.lists(
        st.tuples(st.text("ab\"'\\/#*,[]{}\n", max_size=6), st.sampled_from(["// x\n", "# {[,\n", "/* \n } */", " "])),
        max_size=5,
    )
)
def test_comments_and_trailing_commas_change_nothing(items):
    """Comments between tokens and a last comma leave the values as they are, whatever the strings hold."""
    body = "".join(f"{comment}{json.dumps(text)}{comment},{comment}" for text, comment in items)
    assert load_json(f'// top\n{{"list": [{body}]}}') == {"list": [text for text, _ in items]}


@given(st.text(string.printable + '{}[]",/*#\\\u00e9', max_size=60))
def test_any_text_is_read_or_refused_in_words(text):
    """Text of any kind gives a value or a SettingError."""
    with contextlib.suppress(SettingError):
        load_json("{" + text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1, // one\n "b": [1, 2,], /* two */ # three\n}', {"a": 1, "b": [1, 2]}),
        ('{"url": "http://host/#x", "c": "/* , ] */",}', {"url": "http://host/#x", "c": "/* , ] */"}),
        ('{"quote": "a\\"// b",}', {"quote": 'a"// b'}),
        ('# only\n{"a": [{},[],],}', {"a": [{}, []]}),
        ('\ufeff{"a": 1}', {"a": 1}),
        ("{\r\n// windows\r\n}\r\n", {}),
    ],
)
def test_what_people_write_is_read(text, value):
    """Comments, trailing commas and a byte order mark are taken, and strings are left alone."""
    assert load_json(text) == value


REFUSED = [
    ('{"a": 1, "a": 2}', "'a' is given twice"),
    ('{"b": {"a": 1, "a": 2}, /* x */ }', "'a' is given twice"),
    ('{\n  "a": tru\n}', "line 2, column 8"),
    ('{\n  // comment\n  "a": 1\n  "b": 2\n}', "line 4, column 3"),
    ('{/* \n */ "a": ,}', "line 2"),
    ('{"a": [,]}', "column 8"),
    ("{,}", "column 2"),
    ('{"a": 1,,}', "column"),  # 9 or 10, by Python version
    ("{a: 1}", "double quotes"),
    ("{'a': 1}", "double quotes"),
    ("{ /* never ends", "line 1: the comment"),
    ("{\n/*/}", "line 2: the comment"),
    ('{"a": "no end\n}', "line 1"),
    ('{"a": ' + "9" * 5000 + "}", "number that cannot be read"),
    ("{} {}", "Extra data"),
    ("{\n", "line 2"),
    ("\n", "Expecting value"),
]


@pytest.mark.parametrize(("text", "reason"), REFUSED, ids=[text[:20] for text, _ in REFUSED])
def test_broken_json_is_refused_with_its_place(text, reason):
    """The error names the line and column of the text as written, or the key."""
    with pytest.raises(SettingError) as caught:
        load_json(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize("text", ['{"a":' + "[" * 100_000, '{"a":' * 100_000], ids=["lists", "blocks"])
def test_deep_nesting_is_refused(text):
    """Nesting past what Python can follow is an error in words, not a crash."""
    with pytest.raises(SettingError, match=r"nested too deeply|line"):
        load_json(text)


@pytest.mark.parametrize(
    "text",
    ["{" + "/*" * 500_000, "{" + "/* " * 500_000, '{"' + '"/' * 500_000, "{" + "," * 1_000_000, '{"a' + "\\" * 999_999],
)
def test_hostile_text_does_not_hang(text):
    """A megabyte made to confuse the reader is rejected after one pass, not after hours."""
    with pytest.raises(SettingError), no_hang():
        load_json(text)


def test_file_is_read_by_path_or_name(tmp_path):
    """A file is named by a Path or a string, and its errors carry its name."""
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1, // one\n}')
    assert load_json(path) == load_json(str(path)) == {"a": 1}
    path.write_text('{"a": }')
    with pytest.raises(SettingError, match=r"config\.json, line 1, column 7"):
        load_json(path)


def test_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    """A missing file, a folder, a foreign encoding and a huge file are refused by name."""
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
