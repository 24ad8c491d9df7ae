"""A reader for JSON as people write it: comments and trailing commas, and an error with its place.

DeepSpeed reads its configuration with a tolerant parser, so configurations in the wild carry comments
(`//`, `#`, `/* */`) and commas before a closing bracket. Strict JSON is tried first and costs nothing more.
Only when it fails are comments and trailing commas blanked out, character for character, so that the
line and column of an error are those of the text as written. Duplicate keys are refused: every
other parser keeps the last one and says nothing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from halfstep.errors import SettingError

__all__ = ["MAX_BYTES", "load_json"]

MAX_BYTES = 4 * 2**20  # a configuration is kilobytes; past this it is some other file

# Strings are matched so that what looks like a comment inside one is left alone. A string ends with its line and a
# comment with the text, even when they are not closed, so that each character is looked at once.
_STRING = r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"?'
_COMMENTS = re.compile(_STRING + r"|//[^\n]*|#[^\n]*|/\*[\s\S]*?(?:\*/|\Z)")
# The middle part keeps a comma that has nothing before it, which stays an error.
_TRAILING_COMMAS = re.compile(_STRING + r"|[\[{]\s*,|,(?=\s*[\]}])")


def load_json(source: str | Path) -> Any:
    """Read JSON with comments and trailing commas, from a file or from text.

    A `Path` is a file. A string is JSON text if it has a `{` or a line break in it, and the path of a file otherwise.
    Whatever is wrong (no such file, not UTF-8, not JSON, a key given twice) is a `SettingError`.
    """
    if isinstance(source, str) and ("{" in source or "\n" in source):
        return _parse(source, "JSON text")
    return _parse(_read(Path(source)), str(source))


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        raise SettingError(f"Cannot read {str(path)!r}: {reason}. Give a JSON file, or JSON text in braces.") from None
    if len(data) > MAX_BYTES:
        raise SettingError(
            f"{str(path)!r} has more than {MAX_BYTES} bytes; a configuration is far smaller. Is it the right file?"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingError(f"{str(path)!r} is not UTF-8 text (see byte {error.start}); save it as UTF-8.") from None


def _parse(text: str, name: str) -> Any:
    text = text.removeprefix("\ufeff")
    try:
        return _decode(text, name)
    except SettingError:
        raise
    except (RecursionError, ValueError):
        pass  # perhaps a comment; if it is not, the second reading says what
    try:
        return _decode(_blank(text, name), name)
    except SettingError:
        raise
    except json.JSONDecodeError as error:
        near = text.split("\n")[error.lineno - 1].strip()[:60]
        where = f"{name}, line {error.lineno}, column {error.colno}"
        raise SettingError(f"{where}: {error.msg}, near {near!r}. Correct the JSON there.") from None
    except RecursionError:
        raise SettingError(f"{name} is nested too deeply to be a configuration; flatten it.") from None
    except ValueError as error:  # Python refuses to read integers of thousands of digits
        raise SettingError(f"{name} holds a number that cannot be read: {error}.") from None


def _decode(text: str, name: str) -> Any:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise SettingError(f"{name}: key {key!r} is given twice in the same block; keep one.")
            values[key] = value
        return values

    return json.loads(text, object_pairs_hook=without_duplicates)


def _blank(text: str, name: str) -> str:
    """The text with comments and trailing commas turned into blanks, every other character in its place."""

    def blank_comment(match: re.Match[str]) -> str:
        found = match.group()
        if found.startswith('"'):
            return found
        if found.startswith("/*") and (len(found) < 4 or not found.endswith("*/")):
            line = text.count("\n", 0, match.start()) + 1
            raise SettingError(f"{name}, line {line}: the comment that starts here with /* has no end; add */.")
        return re.sub(r"[^\n]", " ", found)

    without_comments = _COMMENTS.sub(blank_comment, text)
    return _TRAILING_COMMAS.sub(lambda match: " " if match.group() == "," else match.group(), without_comments)
