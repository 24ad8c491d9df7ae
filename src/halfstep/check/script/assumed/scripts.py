"""A script once for each value of its precision settings."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.files.python import parse_python
from halfstep.check.script.assumed.enums import write_members
from halfstep.check.script.assumed.fold import Rejected, fold
from halfstep.check.script.assumed.named_parts import write_named_parts
from halfstep.check.script.assumed.partials import write_partials
from halfstep.check.script.assumed.settings import Assumption, assumptions
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.literals import write_in_place
from halfstep.check.script.syntax.plain import make_plain
from halfstep.check.script.syntax.relevant import NO_WORDS, RuleWords
from halfstep.check.script.syntax.visit import read_outline

__all__ = ["assumed_scripts"]

MAX_TEXT = 120_000  # characters: larger files are libraries, which have many settings and take seconds
MAX_ROUNDS = 4  # a flag that is computed from a flag that is computed from a setting


def assumed_scripts(script: Script, words: RuleWords = NO_WORDS) -> Iterator[tuple[Assumption, Script]]:
    """The script for each value of a setting that changes it and that the file accepts."""
    if len(script.source.text) > MAX_TEXT:
        return
    outline, tree = script.outline, script.tree
    if not {"Enum", "StrEnum"}.isdisjoint(outline.loads):  # what their properties choose is read as well
        tree = parse_python(script.source.text, script.source.path)
        write_members(tree)
        make_plain(tree)
        write_named_parts(tree, script.source.text)
        write_partials(tree, script.source.text)
        outline = read_outline(tree, script.source.text, (*words.words, *words.lines))
    for assumption in assumptions(outline, tree):
        assumed = _assumed(script, assumption, (*words.words, *words.lines))
        if assumed is not None:
            yield assumption, assumed


def _assumed(script: Script, assumption: Assumption, words: tuple[str, ...]) -> Script | None:
    text = script.source.text
    tree = parse_python(text, script.source.path)
    write_members(tree)
    make_plain(tree)
    write_named_parts(tree, text)
    write_partials(tree, text)
    outline = read_outline(tree, text, words)
    settled: set[ast.AST] = set()
    for number in range(MAX_ROUNDS):
        try:
            if not fold(tree, outline, assumption, settled):
                if not number:
                    return None
                break
        except (Rejected, RecursionError):
            return None
        outline = read_outline(tree, text, words)
    write_in_place(outline)
    return Script(script.source, script.settings, tree, outline=outline, is_assumed=True)
