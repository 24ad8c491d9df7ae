"""The formats of `halfstep check` by name; each one is loaded only when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from halfstep.check.session import Outcome

__all__ = ["render"]

_RENDERERS = {
    "concise": ("check_text", "as_concise"),
    "json": ("check_json", "as_json"),
    "sarif": ("check_sarif", "as_sarif"),
    "github": ("check_github", "as_github"),
    "gitlab": ("check_gitlab", "as_gitlab"),
    "junit": ("check_junit", "as_junit"),
}


def render(
    outcome: Outcome, style: str, *, statistics: bool = False, colour: bool = False, width: int | None = None
) -> str:
    """The findings in a format, or the number of findings of each rule; only the format for people is folded at `width`."""
    if statistics:
        from halfstep.report.check_tables import statistics_as_json, statistics_as_text

        return statistics_as_json(outcome) if style == "json" else statistics_as_text(outcome)
    if style == "text":
        from halfstep.report.check_text import as_text

        return as_text(outcome, colour=colour, width=width)
    module, name = _RENDERERS[style]
    renderer: Callable[[Outcome], str] = getattr(importlib.import_module(f"halfstep.report.{module}"), name)
    return renderer(outcome)
