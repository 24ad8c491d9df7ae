"""Renders an explanation as text."""

from __future__ import annotations

import textwrap

from halfstep.topics import Topic

__all__ = ["render_topic"]


def render_topic(topic: Topic, width: int = 88) -> str:
    """The topic as wrapped paragraphs; tables, which have line breaks of their own, stay as they are."""
    parts = [topic.title, "=" * len(topic.title)]
    parts += [p if "\n" in p else textwrap.fill(p, width) for p in topic.paragraphs]
    parts.append(textwrap.fill("See also: " + "; ".join(topic.see), width))
    return parts[0] + "\n" + "\n\n".join(parts[1:])
