"""`halfstep explain`: the ideas of mixed precision, with their numbers."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

import click

from halfstep.report.explain import render_topic
from halfstep.topics import TOPICS, explain

__all__ = ["command"]


@click.command("explain")
@click.argument("topic", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print the explanation as JSON.")
def command(topic: tuple[str, ...], as_json: bool) -> None:
    """Explain an idea of mixed precision, with its numbers.

    Without TOPIC, list the topics.
    """
    if not topic:
        titles = {name: make().title for name, make in TOPICS.items()}
        lines = [f"  {name:20} {title}" for name, title in titles.items()]
        click.echo(json.dumps(titles, indent=2) if as_json else "\n".join(["Topics:", *lines]))
        return
    found = explain(" ".join(topic))
    width = min(shutil.get_terminal_size((88, 24)).columns, 100)
    click.echo(json.dumps(asdict(found), indent=2) if as_json else render_topic(found, width))
