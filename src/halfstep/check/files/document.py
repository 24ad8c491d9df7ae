"""A file as it was read: its bytes, the text that rules see, and the way back from edits of that text to bytes.

Rules see normalized text: decoded, without a byte order mark, every line ending with a line feed, a notebook's code
cells joined. A fix consists of edits in characters of that text. Applying it must not change any other byte of the
file, so edits are mapped back through the same steps: to the decoded text (a file with mixed line endings keeps each of
them), to the JSON of a notebook, and through the file's own encoding.

Nothing here raises on a bad file: a document that could not be read has an empty text and one `problem`.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from halfstep.check.files.problems import FileTooLarge, NotText, SyntaxFault
from halfstep.check.files.repair import Repair, repair
from halfstep.check.files.source import Language, Source
from halfstep.check.finding import Edit, Finding, Place, Severity
from halfstep.check.regex import regex

if TYPE_CHECKING:
    from halfstep.check.files.notebook import Notebook

__all__ = ["LANGUAGES", "Document", "apply_edits", "language_of", "located_source", "read_document", "size_limit"]

LANGUAGES: dict[str, Language] = {
    ".py": "python",
    ".pyw": "python",
    ".ipynb": "notebook",
    ".json": "json",
    ".jsonc": "json",
    ".hjson": "json",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
}

MAX_BYTES = 2**20  # a training script of 1,000 lines has 40 kB
MAX_NOTEBOOK_BYTES = 32 * 2**20  # notebooks carry their pictures

# PEP 263: a comment in one of the first two lines, the first of which must be blank or a comment too.
_COOKIE = regex(rb"[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_BLANK = regex(rb"[ \t\f]*(?:#.*)?\r?$")
# Text codecs whose decoders take quadratic time, or that are not used for files.
_REJECTED_CODECS = frozenset({"punycode", "idna", "unicode_escape", "raw_unicode_escape", "undefined"})


@dataclass(frozen=True)
class Document:
    """One file: its bytes, its text, and what could not be read."""

    source: Source
    data: bytes = b""
    raw: str = ""  # decoded, with the original line endings
    encoding: str = "utf-8"
    notebook: Notebook | None = None
    problem: Finding | None = None  # why there is nothing to check
    notes: tuple[Finding, ...] = ()  # about parts that could not be read, such as one cell


def language_of(path: str) -> Language | None:
    """The language of a file, by its suffix; None for files that are not checked."""
    dot = path.rfind(".")
    return LANGUAGES.get(path[dot:].lower()) if dot >= 0 else None


def size_limit(language: Language) -> int:
    """The maximum size in bytes of a file of this language."""
    return MAX_NOTEBOOK_BYTES if language == "notebook" else MAX_BYTES


def read_document(path: str, data: bytes, language: Language) -> Document:
    """The document with these bytes."""
    empty = Source(path, "", language)
    limit = size_limit(language)
    if len(data) > limit:
        return Document(empty, problem=too_large(path, limit))
    where = Place(path)
    zero = data.find(b"\0")
    if zero >= 0:
        message = f"Byte {zero} is zero: this is a binary file or UTF-16, and was not checked."
        return Document(empty, problem=NotText.finding(where, message, instead="Save it as UTF-8."))
    body = data.removeprefix(codecs.BOM_UTF8)
    encoding = _declared(body) if language == "python" and body is data else "utf-8"
    try:
        raw = _decode(body, encoding)
    except LookupError:
        message = f"The file declares the encoding {encoding!r}, which Python does not support."
        return Document(empty, problem=NotText.finding(where, message, instead="Declare utf-8 and save it as UTF-8."))
    except UnicodeError as error:
        start = getattr(error, "start", 0)
        where = Place(path, body.count(b"\n", 0, start) + 1)
        message = f"Byte {start} is not valid {encoding.upper()}; the file was not checked."
        advice = "Save it as UTF-8" + (", or declare its encoding in the first line: # -*- coding: latin-1 -*-") * (
            language == "python"
        )
        return Document(empty, problem=NotText.finding(where, message, instead=advice + "."))
    if language == "notebook":
        return _notebook(path, data, raw)
    text = raw.replace("\r\n", "\n").replace("\r", "\n") if "\r" in raw else raw
    if language == "python" and (repaired := repair(text)) is not None:
        return Document(Source(path, repaired.text, language), data, raw, encoding, notes=(_note(path, repaired),))
    return Document(Source(path, text, language), data, raw, encoding)


def _note(path: str, repaired: Repair) -> Finding:
    message = f"This line is {repaired.kind}, not Python 3; the file was checked without such lines."
    # An exported notebook runs under IPython; the others fail wherever they are run today.
    severity: Severity = "advice" if repaired.kind == "IPython syntax" else "error"
    return SyntaxFault.finding(Place(path, repaired.line), message, severity=severity)


def located_source(document: Document) -> Source:
    """The text with the places in the file of every line, for reports."""
    if document.notebook is None:
        return document.source
    return replace(document.source, cells=document.notebook.origins(document.raw))


def too_large(path: str, limit: int) -> Finding:
    """The finding for a file past its size limit."""
    message = (
        f"The file is larger than {limit:,} bytes, far more than a script or a configuration, and was not checked."
    )
    return FileTooLarge.finding(Place(path), message, instead="Exclude it with `exclude` in pyproject.toml.")


def apply_edits(document: Document, edits: Iterable[Edit]) -> bytes | None:
    """The file's bytes after non-overlapping `edits` of its text; None if they cannot be mapped back exactly."""
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
    """The text, if encoding it again gives the file's bytes: some encodings have two byte sequences for one character."""
    mark = codecs.BOM_UTF8 if document.data.startswith(codecs.BOM_UTF8) else b""
    try:
        same = mark + document.raw.encode(document.encoding) == document.data
    except UnicodeError:
        return None
    return document.raw if same else None


def _edit_lines(raw: str, edits: list[Edit]) -> str:
    pairs = [match.start() for match in re.finditer("\r\n", raw)]
    marks = [start - i for i, start in enumerate(pairs)]  # positions of those line feeds in the text that rules saw
    newline = _newline(raw, len(pairs))
    parts, done = [], 0
    for edit in edits:
        start = edit.start + bisect_left(marks, edit.start)
        end = edit.end + bisect_left(marks, edit.end)
        parts += [raw[done:start], edit.text.replace("\n", newline)]
        done = end
    return "".join([*parts, raw[done:]])


def _newline(raw: str, num_pairs: int) -> str:
    """The most frequent line ending."""
    feeds, returns = raw.count("\n") - num_pairs, raw.count("\r") - num_pairs
    best = max(num_pairs, feeds, returns)
    return "\n" if best == feeds else "\r\n" if best == num_pairs else "\r"


def _declared(data: bytes) -> str:
    first, _, rest = data.partition(b"\n")
    lines = [first, rest.partition(b"\n")[0]] if _BLANK.match(first) else [first]
    for line in lines:
        cookie = _COOKIE.match(line)
        if cookie:
            name = cookie.group(1).decode("ascii", "replace")
            return "utf-8" if name.lower().replace("_", "-") == "utf-8-sig" else name
    return "utf-8"


def _decode(data: bytes, encoding: str) -> str:
    if codecs.lookup(encoding).name.replace("-", "_") in _REJECTED_CODECS:
        raise LookupError(encoding)
    return data.decode(encoding)


def _notebook(path: str, data: bytes, raw: str) -> Document:
    from halfstep.check.files.notebook import read_notebook  # 10 ms with json, and most files are none

    notebook = read_notebook(path, raw)
    if isinstance(notebook, Finding):
        return Document(Source(path, "", "notebook"), data, raw, problem=notebook)
    source = Source(path, notebook.text, "notebook", notebook.cells)
    notes = tuple(
        SyntaxFault.finding(Place(path, fault.line, fault.column, cell=fault.cell), fault.message, severity="advice")
        for fault in notebook.faults
    )
    return Document(source, data, raw, notebook=notebook, notes=notes)
