"""Documents: bytes to text, and edits of the text back to bytes with nothing else changed."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.check.files.document import LANGUAGES, MAX_BYTES, apply_edits, language_of, read_document
from halfstep.check.finding import Edit


def read(data, language="python"):
    return read_document("file", data, language)


@given(st.binary(max_size=300), st.sampled_from(sorted(set(LANGUAGES.values()))))
def test_any_bytes_give_a_document(data, language):
    """Reading never raises: there is a text, or a problem and no text."""
    document = read(data, language)
    assert document.problem is None or document.source.text == ""


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        (b"a\0b", 1, "Byte 1 is zero"),
        (b"x = 1\ny = '\xff'\n", 2, "Byte 11 is not valid UTF-8"),
        (b"# coding: nonsense\n", 1, "'nonsense', which Python does not support"),
        (b"# coding: rot13\n", 1, "which Python does not support"),
        (b"# coding: punycode\n", 1, "which Python does not support"),
        ("x = 1".encode("utf-16"), 1, "is zero"),
    ],
)
def test_what_is_not_text_is_one_finding_with_its_place(data, line, words):
    """Zero bytes, bytes outside the encoding and unknown encodings are HS002."""
    problem = read(data).problem
    assert (problem.code, problem.line) == ("HS002", line)
    assert words in problem.message


def test_a_huge_file_is_one_finding():
    """A file above the limit is not read."""
    assert read(b"x" * (MAX_BYTES + 1)).problem.code == "HS003"
    assert read(b"x" * MAX_BYTES).problem is None


def test_the_declared_encoding_is_used_as_python_uses_it():
    """PEP 263: in the first two lines, and in the second only after a comment or a blank."""
    text = "# -*- coding: latin-1 -*-\nname = '\u00e9'\n"
    assert read(text.encode("latin-1")).source.text == text
    assert read(("#!/usr/bin/env python\n" + text).encode("latin-1")).problem is None
    assert read(("x = 1\n" + text).encode("latin-1")).problem.code == "HS002"
    assert read(text.encode("latin-1"), "json").problem.code == "HS002"


def test_a_byte_order_mark_is_not_text_and_stays_in_the_file():
    """The mark is not part of the text, and is written back."""
    document = read(codecs.BOM_UTF8 + b"x = 1\n")
    assert document.source.text == "x = 1\n"
    assert apply_edits(document, [Edit(4, 5, "2")]) == codecs.BOM_UTF8 + b"x = 2\n"


def test_new_lines_have_the_most_frequent_line_ending():
    """An inserted line in a Windows file ends with CRLF."""
    document = read(b"a\r\nb\r\n")
    assert document.source.text == "a\nb\n"
    assert apply_edits(document, [Edit(2, 2, "new\n")]) == b"a\r\nnew\r\nb\r\n"


@given(st.data())
def test_edits_change_what_they_name_and_nothing_else(data):
    """Whatever the line endings, the edited text is the edited text, and the bytes around the edit are as before."""
    raw = "".join(
        data.draw(st.lists(st.sampled_from(["\r\n", "\n", "\r", "ab", "\u00e9", "\t", "x = 1"]), max_size=12))
    )
    document = read(raw.encode())
    text = document.source.text
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    new = data.draw(st.sampled_from(["", "q", "q\nr", "\n"]))
    after = read(apply_edits(document, [Edit(start, end, new)]))
    # A lone \r before an inserted \n would join with it into one line ending, as it does in any editor.
    if "\r" not in raw.replace("\r\n", ""):
        assert after.source.text == text[:start] + new + text[end:]
    head = text[:start].rstrip("\n")
    assert after.source.text.startswith(head)
    if not new:
        assert after.raw in {raw[:i] + raw[j:] for i in range(len(raw) + 1) for j in range(i, len(raw) + 1)}


def test_several_edits_are_applied_together():
    """Edits count in the text as it was, in any order."""
    document = read(b"one two three")
    assert apply_edits(document, [Edit(8, 13, "3"), Edit(0, 3, "1")]) == b"1 two 3"


def test_an_edit_its_encoding_cannot_represent_is_rejected():
    """A character outside the file's encoding gives None."""
    document = read(b"# coding: ascii\nx = 1\n")
    assert apply_edits(document, [Edit(20, 21, "\u00e9")]) is None


@pytest.mark.parametrize(
    ("path", "language"),
    [("a.py", "python"), ("A.PY", "python"), ("n.ipynb", "notebook"), ("c.yml", "yaml"), ("x/ds.hjson", "json")],
)
def test_the_suffix_determines_the_language(path, language):
    """Case does not matter; an unknown suffix has no language."""
    assert language_of(path) == language
    assert language_of("Makefile") is None
