"""One file through all its rules.

Reading, rules and suppression meet here, and so does everything that can go wrong: whatever a file does to a parser or
to a rule ends as a finding about that file, and the other files go on. Nothing that is checked is ever imported or run.
"""

from __future__ import annotations

import ast
import re
import stat
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.check.files.document import Document, read_document, size_limit, too_large
from halfstep.check.files.source import Settings, Source
from halfstep.check.files.suppress import suppress
from halfstep.check.files.walk import Target
from halfstep.check.finding import Finding, Severity
from halfstep.check.options import Options
from halfstep.check.registry import Group, rules_of
from halfstep.check.rule import ConfigRule, Rule, ScriptRule
from halfstep.check.rules.files import CannotRead, CheckerFailure, SyntaxFault, TooDeep
from halfstep.check.select import Selection
from halfstep.errors import SettingError

__all__ = ["FileResult", "check_document", "check_target", "read_target"]

# What a script that writes a configuration down mentions; without it, the configuration rules are not even loaded.
_CONFIGURES = (
    "precision=", "precision'", 'precision"', "fp16", "bf16", "deepspeed", "zero_optimization", "train_micro_batch_size",
)  # fmt: skip
# And what a GPU may not honour, beyond what any rule over scripts looks at.
_ASKS_HARDWARE = (*_CONFIGURES, "float16", "autocast", "tf32", "matmul_precision", "flash_attention")
_PLACE = re.compile(r".*?\bline (\d+)(?:, column (\d+))?:? ?", re.DOTALL)
# Parsing takes 2 ms per 100 lines. In a folder, a larger file that mentions nothing of precision is not parsed: there
# is nothing in it for a rule, and its syntax is the business of other tools.
_SMALL = 4000
MAX_CONFIGS = 500  # in one script; more are generated, and each takes a millisecond


@dataclass(frozen=True)
class FileResult:
    """What was found in one file, and the text it was found in."""

    path: str
    findings: tuple[Finding, ...]
    source: Source | None = None  # None where there is nothing to show of it


def check_target(target: Target, options: Options) -> FileResult:
    """The findings in one file on disk."""
    document = read_target(target)
    selection = options.selection(target.project, target.path)
    findings = check_document(document, options.settings(target.project), selection, named=target.named)
    return FileResult(target.path, findings, document.source if findings else None)


def read_target(target: Target) -> Document:
    """The file as a document; one that cannot be opened is a document with a problem."""
    path = target.path
    language = target.language
    empty = Source(path, "", language)
    limit = size_limit(language)
    try:
        state = Path(path).stat()
        if not stat.S_ISREG(state.st_mode):
            message = "It is not a plain file, so it was not opened."
            return Document(empty, problem=CannotRead.finding((path, 1, 1, None, None, None), message))
        if state.st_size > limit:
            # Folders hold data in JSON and YAML beside configurations; nobody needs to hear of each.
            is_data = not target.named and language in {"json", "yaml"}
            return Document(empty, problem=None if is_data else too_large(path, limit))
        with Path(path).open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        message = f"It cannot be opened: {getattr(error, 'strerror', None) or error}."
        return Document(empty, problem=CannotRead.finding((path, 1, 1, None, None, None), message))
    if not target.named and language in {"json", "yaml"} and not _is_utf8(data):
        return Document(empty)
    return read_document(path, data, language)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeError:
        return False
    return b"\0" not in data


def check_document(
    document: Document, settings: Settings, selection: Selection, *, named: bool = True
) -> tuple[Finding, ...]:
    """The findings in a document that are wanted and not silenced, in order of their places."""
    source = document.source
    if document.problem is not None:
        return tuple(finding for finding in (document.problem,) if selection.wants(finding))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a script's own "\d" is a SyntaxWarning of the parser's
        found = list(document.notes)
        try:
            found.extend(_findings(source, settings, named=named))  # what came before a failure is kept
        except (RecursionError, MemoryError):
            found.append(too_deep(source))
        except Exception as error:
            found.append(failure(source, "Reading it", error))
        kept = suppress(found, source, selection, has_gpu=settings.gpu is not None)
    return tuple(sorted(dict.fromkeys(kept), key=lambda finding: finding.place))


def _findings(source: Source, settings: Settings, *, named: bool) -> Iterator[Finding]:
    if source.language in {"python", "notebook"}:
        yield from _in_script(source, settings, named=named)
    else:
        yield from _in_config(source, settings, named=named)


def _in_script(source: Source, settings: Settings, *, named: bool) -> Iterator[Finding]:
    from halfstep.check.script.script import read_script

    try:
        script = read_script(source, settings)
        tree = script.tree
        configures = _mentions(source, _CONFIGURES if settings.gpu is None else _ASKS_HARDWARE)
        if not script.about and (named or configures or len(source.text) < _SMALL):
            tree = ast.parse(source.text)
    except SyntaxError as error:
        yield syntax_fault(source, error)
        return
    except ValueError as error:
        yield SyntaxFault.finding((source.path, 1, 1, None, None, None), f"Python cannot read this file: {error}.")
        return
    yield from _apply("script", ScriptRule, script, source, settings)
    if configures:
        from halfstep.check.config.config import configs_in_script

        for number, config in enumerate(configs_in_script(tree, source, settings)):
            if number == MAX_CONFIGS:
                message = f"The script writes down more than {MAX_CONFIGS} configurations; the first were checked."
                yield TooDeep.finding((source.path, 1, 1, None, None, None), message)
                return
            yield from _apply("config", ConfigRule, config, source, settings)


def _mentions(source: Source, words: tuple[str, ...]) -> bool:
    return any(word in source.text for word in words)  # several times faster than one pattern of alternatives


def _in_config(source: Source, settings: Settings, *, named: bool) -> Iterator[Finding]:
    from halfstep.check.config.config import read_configs

    # A configuration of ours that does not parse is refused by whoever it is for: that is more than advice.
    severity: Severity | None = "error"
    try:
        configs = read_configs(source, settings)
        severity = None
        if named and not configs:
            _parse_any(source)
    except SettingError as error:
        text = str(error)
        place = _PLACE.match(text)
        # YAML ends lines at more characters than editors do, so its line may be past the last one here.
        lines = source.text.split("\n")
        line = min(int(place.group(1)), len(lines)) if place else 1
        column = min(int(place.group(2) or 1), len(lines[line - 1]) + 1) if place else 1
        message = text[place.end() :] if place else text
        message = message[:1].upper() + message[1:]
        yield SyntaxFault.finding((source.path, line, column, None, None, None), message, severity=severity)
        return
    for config in configs:
        yield from _apply("config", ConfigRule, config, source, settings)


def _parse_any(source: Source) -> None:
    """Raise where a file that a person named, and that is no configuration of ours, cannot be parsed at all."""
    from halfstep.check.config import yaml_reader as config_yaml
    from halfstep.precision import json_tree as config_json

    if source.language == "json":
        config_json.parse_json(source.text, source.path)
    else:
        config_yaml.parse_yaml(source.text, source.path)


def _apply(
    group: Group, kind: type[ScriptRule | ConfigRule], facts: Any, source: Source, settings: Settings
) -> Iterator[Finding]:
    rules: Iterable[type[Rule]] = rules_of(group)
    if settings.gpu is not None:
        rules = (*rules, *rules_of("hardware"))
    for rule in rules:
        if issubclass(rule, kind):
            yield from _run(rule, facts, source)


def _run(rule: type[Any], facts: Any, source: Source) -> list[Finding]:
    """The findings of one rule; a rule that fails says so in one."""
    try:
        return list(rule().check(facts))
    except (RecursionError, MemoryError):
        return [too_deep(source)]
    except Exception as error:
        return [failure(source, f"{rule.code} ({rule.name})", error)]


def failure(source: Source, what: str, error: Exception) -> Finding:
    """The finding for a rule that failed."""
    detail = f"{type(error).__name__}: {error}"[:200]
    message = f"{what} failed on this file: {detail}. The other rules were applied."
    return CheckerFailure.finding((source.path, 1, 1, None, None, None), message)


def syntax_fault(source: Source, error: SyntaxError) -> Finding:
    """The finding for Python that does not parse."""
    cell, line = source.place(max(error.lineno or 1, 1))
    where = (source.path, line, max(error.offset or 1, 1), None, None, cell)
    # The Python that reads is named: what is newer than it is no fault of the file.
    said = error.msg.rstrip(".?!")
    return SyntaxFault.finding(where, f"This is not valid Python {sys.version_info[0]}.{sys.version_info[1]}: {said}.")


def too_deep(source: Source) -> Finding:
    """The finding for a file that exhausts the parser or a rule."""
    message = "The file is nested too deeply to be analysed, and was not checked."
    return TooDeep.finding((source.path, 1, 1, None, None, None), message)
