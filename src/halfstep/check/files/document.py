"""A file as it was read: its bytes, the text rules see, and the way back from edits of that text to bytes.

Rules look at clean text: decoded, without a byte order mark, every line ending with a plain line feed, a notebook's
code cells joined. A fix is made of edits in characters of that text. Applying it must leave every other byte of the
file as it was, so edits are carried back through the same steps: to the text as decoded (a file with mixed line
endings keeps each of them), to the JSON of a notebook, and through the file's own encoding.

Nothing here raises on a bad file: a document that could not be read has an empty text and one `problem`.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from halfstep.check.files.notebook import Notebook, read_notebook
from halfstep.check.files.source import Language, Source
from halfstep.check.finding import Edit, Finding
from halfstep.check.rules.files import FileTooLarge, NotText, SyntaxFault

__all__ = ["LANGUAGES", "Document", "apply_edits", "language_of", "read_document", "size_limit"]

LANGUAGES: dict[str, Language] = {
    ".py": "python",
    ".pyw": "python",
    ".ipynb": "notebook",
    ".json": "json",
    ".jsonc": "json",
    ".hjson": "json",
    ".yaml": "yaml",
    ".yml": "yaml",
}

MAX_BYTES = 2**20  # a training script of 1,000 lines has 40 kB
MAX_NOTEBOOK_BYTES = 32 * 2**20  # notebooks carry their pictures

# PEP 263: a comment in one of the first two lines, the first of which must be blank or a comment too.
_COOKIE = re.compile(rb"[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_BLANK = re.compile(rb"[ \t\f]*(?:#.*)?\r?$")
# Text codecs whose decoders take quadratic time, or that are no encodings of files.
_REFUSED_CODECS = frozenset({"punycode", "idna", "unicode_escape", "raw_unicode_escape", "undefined"})


@dataclass(frozen=True)
class Document:
    """One file's bytes and what was made of them."""

    source: Source
    data: bytes = b""
    raw: str = ""  # decoded, with the line endings as written
    encoding: str = "utf-8"
    notebook: Notebook | None = None
    problem: Finding | None = None  # why there is nothing to check
    notes: tuple[Finding, ...] = ()  # what could not be read while the rest could


def language_of(path: str) -> Language | None:
    """What a file is written in, by its name; None for files that are not checked."""
    dot = path.rfind(".")
    return LANGUAGES.get(path[dot:].lower()) if dot >= 0 else None


def size_limit(language: Language) -> int:
    """The most bytes a file of this language may have."""
    return MAX_NOTEBOOK_BYTES if language == "notebook" else MAX_BYTES


def read_document(path: str, data: bytes, language: Language) -> Document:
    """The document that `data` is."""
    empty = Source(path, "", language)
    limit = size_limit(language)
    if len(data) > limit:
        return Document(empty, problem=too_large(path, limit))
    where = (path, 1, 1, None, None, None)
    zero = data.find(b"\0")
    if zero >= 0:
        message = f"Byte {zero} is zero, so this is a binary file or UTF-16, and it was not checked."
        return Document(empty, problem=NotText.finding(where, message, instead="Save it as UTF-8."))
    body = data.removeprefix(codecs.BOM_UTF8)
    encoding = _declared(body) if language == "python" and body is data else "utf-8"
    try:
        raw = _decode(body, encoding)
    except LookupError:
        message = f"Its first lines declare the encoding {encoding!r}, which Python does not have."
        return Document(empty, problem=NotText.finding(where, message, instead="Declare utf-8, and save it so."))
    except UnicodeError as error:
        start = getattr(error, "start", 0)
        where = (path, body.count(b"\n", 0, start) + 1, 1, None, None, None)
        message = f"Byte {start} is not {encoding.upper()}, so the file was not checked."
        advice = "Save it as UTF-8" + (", or name its encoding in the first line: # -*- coding: latin-1 -*-") * (
            language == "python"
        )
        return Document(empty, problem=NotText.finding(where, message, instead=advice + "."))
    if language == "notebook":
        return _notebook(path, data, raw)
    text = raw.replace("\r\n", "\n").replace("\r", "\n") if "\r" in raw else raw
    return Document(Source(path, text, language), data, raw, encoding)


def too_large(path: str, limit: int) -> Finding:
    """The finding for a file past its size limit."""
    message = f"The file has more than {limit:,} bytes, far beyond a script or a configuration, and was not checked."
    return FileTooLarge.finding((path, 1, 1, None, None, None), message, instead="Leave it out with `exclude`.")


def apply_edits(document: Document, edits: Iterable[Edit]) -> bytes | None:
    """The file's bytes after `edits` of its text, none overlapping; None where they cannot be carried back exactly."""
    ordered = sorted(edits)
    if document.notebook is not None:
        changed = document.notebook.edit(document.raw, ordered)
    else:
        changed = _edit_lines(document.raw, ordered)
    if changed is None or _decode_or_none(document) != document.raw:
        return None
    mark = codecs.BOM_UTF8 if document.data.startswith(codecs.BOM_UTF8) else b""
    try:
        return mark + changed.encode(document.encoding)
    except UnicodeError:
        return None


def _decode_or_none(document: Document) -> str | None:
    """The text, if encoding it again gives the file's bytes: some encodings have two spellings for one character."""
    mark = codecs.BOM_UTF8 if document.data.startswith(codecs.BOM_UTF8) else b""
    try:
        same = mark + document.raw.encode(document.encoding) == document.data
    except UnicodeError:
        return None
    return document.raw if same else None


def _edit_lines(raw: str, edits: list[Edit]) -> str:
    pairs = [match.start() for match in re.finditer("\r\n", raw)]
    marks = [start - i for i, start in enumerate(pairs)]  # where those line feeds stand in the text rules saw
    newline = _newline(raw, len(pairs))
    parts, done = [], 0
    for edit in edits:
        start = edit.start + bisect_left(marks, edit.start)
        end = edit.end + bisect_left(marks, edit.end)
        parts += [raw[done:start], edit.text.replace("\n", newline)]
        done = end
    return "".join([*parts, raw[done:]])


def _newline(raw: str, num_pairs: int) -> str:
    """The line ending most lines have."""
    feeds, returns = raw.count("\n") - num_pairs, raw.count("\r") - num_pairs
    best = max(num_pairs, feeds, returns)
    return "\n" if best == feeds else "\r\n" if best == num_pairs else "\r"


def _declared(data: bytes) -> str:
    first, _, rest = data.partition(b"\n")
    lines = [first, rest.partition(b"\n")[0]] if _BLANK.match(first) else [first]
    for line in lines:
        found = _COOKIE.match(line)
        if found:
            name = found.group(1).decode("ascii", "replace")
            return "utf-8" if name.lower().replace("_", "-") == "utf-8-sig" else name
    return "utf-8"


def _decode(data: bytes, encoding: str) -> str:
    if codecs.lookup(encoding).name.replace("-", "_") in _REFUSED_CODECS:
        raise LookupError(encoding)
    return data.decode(encoding)


def _notebook(path: str, data: bytes, raw: str) -> Document:
    read = read_notebook(path, raw)
    if isinstance(read, Finding):
        return Document(Source(path, "", "notebook"), data, raw, problem=read)
    source = Source(path, read.text, "notebook", read.cells)
    notes = tuple(
        SyntaxFault.finding((path, fault.line, fault.column, None, None, fault.cell), fault.message, severity="advice")
        for fault in read.faults
    )
    return Document(source, data, raw, notebook=read, notes=notes)
