"""HTML from values: every text is escaped, unless it was made here."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

__all__ = ["Markup", "embed_json", "join", "tag"]

_VOID = {"meta", "link", "br", "hr"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def join(parts: Iterable[Any]) -> Markup:
    """The parts one after the other, each escaped if it is plain text."""
    return Markup("".join(part if isinstance(part, Markup) else html.escape(str(part)) for part in parts))


def tag(element: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element; `class_` and `for_` lose their underscore, other underscores become hyphens, None leaves out."""
    words = [element]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        plain = key.rstrip("_").replace("_", "-")
        words.append(plain if value is True else f'{plain}="{html.escape(str(value))}"')
    opening = f"<{' '.join(words)}>"
    return Markup(opening) if element in _VOID else Markup(f"{opening}{join(children)}</{element}>")


def embed_json(identifier: str, value: Any) -> Markup:
    """Data for scripts. `<` never appears in it, so that no text can end the element or open a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")
    return Markup(f'<script type="application/json" id="{html.escape(identifier)}">{text}</script>')
