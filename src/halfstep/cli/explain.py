"""`halfstep explain`: the concepts of mixed precision with their numbers, and the rules of `halfstep check`."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from dataclasses import asdict

import click

from halfstep.report.topics import TOPICS, explain

__all__ = ["command"]


@click.command("explain")
@click.argument("topic", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print the explanation as JSON.")
def command(topic: tuple[str, ...], as_json: bool) -> None:
    """Explain a concept of mixed precision with its numbers, or a rule of `halfstep check` by code or name.

    Without TOPIC, lists the topics.

    \b
    halfstep explain loss-scaling
    halfstep explain HS104
    """
    if not topic:
        titles = {name: make().title for name, make in TOPICS.items()}
        width = _width()
        lines = [
            textwrap.fill(f"  {name:20} {title}", width, subsequent_indent=" " * 23, break_on_hyphens=False)
            for name, title in titles.items()
        ]
        rules = textwrap.fill(
            "Rules of `halfstep check` by code or name, e.g. HS104; docs/rules.md lists them all.", width
        )
        click.echo(json.dumps(titles, indent=2) if as_json else "\n".join(["Topics:", *lines, "", rules]))
        return
    words = " ".join(topic)
    width = _width()
    if re.fullmatch(r"hs\d+", words.strip(), re.IGNORECASE) or not _is_topic(words):
        text = _rule(words, width, as_json=as_json)
        if text is not None:
            click.echo(text)
            return
    from halfstep.report.explain import render_topic

    explanation = explain(words)
    click.echo(json.dumps(asdict(explanation), indent=2) if as_json else render_topic(explanation, width))


def _width() -> int:
    return max(40, min(shutil.get_terminal_size((88, 24)).columns, 100))


def _is_topic(words: str) -> bool:
    return "-".join(words.casefold().replace("_", " ").replace("-", " ").split()) in TOPICS


def _rule(words: str, width: int, *, as_json: bool) -> str | None:
    """The rule with this code or name, rendered; None if there is none and it may be a misspelt topic."""
    from halfstep.check.registry import all_rules, find_rule
    from halfstep.errors import unknown
    from halfstep.report.explain import render_rule, rule_data

    rule = find_rule(words.replace(" ", "-"))
    if rule is not None:
        return json.dumps(rule_data(rule), indent=2) if as_json else render_rule(rule, width)
    if re.fullmatch(r"hs\d+", words.strip(), re.IGNORECASE):
        raise unknown("rule", words.upper(), [known.code for known in all_rules()], "docs/rules.md lists all rules.")
    return None
