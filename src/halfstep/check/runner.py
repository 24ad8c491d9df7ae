"""One file through all its rules.

This module combines reading, rules and suppression, and handles everything that can go wrong: a failure of a parser or a
rule becomes a finding about that file, and the other files are still checked. No checked code is ever imported or run.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from halfstep.check.files.document import Document, located_source, read_document, size_limit, too_large
from halfstep.check.files.problems import CannotRead, CheckerFailure, SyntaxFault, TooDeep
from halfstep.check.files.python import parse_python, place_of, repeated_keyword, require_python
from halfstep.check.files.source import Source
from halfstep.check.finding import Finding, Place, Severity
from halfstep.check.options import Options
from halfstep.check.regex import regex
from halfstep.check.registry import PER_VALUE, Group, find_rule, rules_of, words_of_rules
from halfstep.check.rule import ConfigRule, Rule, ScriptRule
from halfstep.check.script.syntax.words import contains_any
from halfstep.check.select import Selection
from halfstep.check.settings import Settings
from halfstep.check.suppress import suppress
from halfstep.check.walk import Target
from halfstep.errors import SettingError
from halfstep.hardware.advisory_words import WORDS as AFFECTED_WORDS

if TYPE_CHECKING:
    from halfstep.check.script.script import Script

__all__ = ["FileResult", "check_document", "check_target", "read_target", "with_usable_fix"]

# Words of scripts that contain a configuration; without one, the configuration rules are not even loaded.
_CONFIGURES = (
    "precision=", "precision'", 'precision"', "fp16", "bf16", "deepspeed", "zero_optimization", "train_micro_batch_size",
    "amp_backend", "amp_level",
)  # fmt: skip
# Words of scripts that request something a GPU may not support.
_HARDWARE = (*_CONFIGURES, "float16", "autocast", "tf32", "matmul_precision", "flash_attention")
_PLACE = regex(r".*?\bline (\d+)(?:, column (\d+))?:? ?", re.DOTALL)
_ADDRESS = regex(r" at 0x[0-9a-fA-F]+")
# Parsing takes 2 ms per 100 lines. In a folder, a larger file that does not mention precision is not parsed: no rule
# applies to it, and checking its syntax is up to other tools.
_SMALL = 4000
_DATA = frozenset({"json", "yaml", "toml"})  # languages in which most files of a folder are no configuration
# Characters: each fix is verified in the edited text, which is parsed for that. Later fixes are dropped; a second run has them.
MAX_FIXED_TEXT = 800_000
_OF_LEARNING = frozenset({"HS123"})  # rules about what training learns, which is nothing in a benchmark
NEAR = 5  # lines: a rule may report the same mistake at the region or at the backward pass, by what it knows
MAX_CONFIGS = 500  # in one script; only generated code has more, and each takes a millisecond


@dataclass(frozen=True)
class FileResult:
    """The findings in one file, and its text."""

    path: str
    findings: tuple[Finding, ...]
    source: Source | None = None  # None if there is no finding to show


def check_target(target: Target, options: Options) -> FileResult:
    """The findings in one file on disk."""
    document = read_target(target)
    selection = options.selection(target.project, target.path)
    findings = check_document(document, options.settings(target.project), selection, named=target.named)
    return FileResult(target.path, findings, located_source(document) if findings else None)


def read_target(target: Target) -> Document:
    """Read the file; one that cannot be opened gives a document with a problem."""
    path = target.path
    language = target.language
    empty = Source(path, "", language)
    limit = size_limit(language)
    try:
        state = os.stat(path)  # noqa: PTH116  (called for every file of a project)
        if not stat.S_ISREG(state.st_mode):
            message = "This is not a regular file, so it was not opened."
            return Document(empty, problem=CannotRead.finding(Place(path), message))
        if state.st_size > limit:
            if target.named:
                return Document(empty, problem=too_large(path, limit))
            # Folders contain data next to configurations; a finding for each would be noise.
            problem = None if language in _DATA else replace(too_large(path, limit), severity="advice")
            return Document(empty, problem=problem)
        with open(path, "rb") as file:  # noqa: PTH123
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        message = f"The file cannot be opened: {getattr(error, 'strerror', None) or error}."
        return Document(empty, problem=CannotRead.finding(Place(path), message))
    if not target.named and language in _DATA and not _is_utf8(data):
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
    """The selected findings in a document that no comment suppresses, in order of position."""
    source = document.source
    if document.problem is not None:
        return tuple(finding for finding in (document.problem,) if selection.wants(finding))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parser warns about a script's "\d"
        reported = _reported(source, document.notes, settings, selection, named=named)
        for written in source.files:
            # Their texts are not parts of the notebook's, where a fix would be applied.
            inner = _reported(written, (), settings, selection, named=False)
            reported += [replace(f, fix=None) for f in inner if f.code != SyntaxFault.code]
        ordered = sorted(dict.fromkeys(reported), key=lambda finding: finding.sort_key)
        return tuple(_with_usable_fixes(ordered, source))


def _reported(
    source: Source, notes: Iterable[Finding], settings: Settings, selection: Selection, *, named: bool
) -> list[Finding]:
    """The selected findings in a text that no comment suppresses."""
    findings = list(notes)
    try:
        findings.extend(
            _findings(source, settings, named=named, preview=selection.preview)
        )  # keeps those before a failure
    except (RecursionError, MemoryError):
        findings.append(too_deep(source))
    except Exception as error:
        findings.append(failure(source, "The parser", error))
    return list(suppress(findings, source, selection, has_gpu=settings.gpu is not None))


def _findings(source: Source, settings: Settings, *, named: bool, preview: bool) -> Iterator[Finding]:
    if source.language in {"python", "notebook"}:
        yield from _in_script(source, settings, named=named, preview=preview)
    else:
        yield from _in_config(source, settings, named=named, preview=preview)


def _in_script(source: Source, settings: Settings, *, named: bool, preview: bool) -> Iterator[Finding]:
    from halfstep.check.script.regions.measured import only_measures
    from halfstep.check.script.script import code_of, read_script
    from halfstep.check.script.syntax.raising import lines_that_raise

    try:
        script = read_script(source, settings, words_of_rules("script"))
        tree = script.tree
        configures = contains_any(source.text, _CONFIGURES if settings.gpu is None else _HARDWARE)
        if configures and not script.about and settings.gpu is None:
            configures = contains_any(code_of(source.text), _CONFIGURES)
        affected = settings.gpu is not None or _may_be_affected(source, settings)
        if not script.about and (named or configures or len(source.text) < _SMALL):
            if configures or affected:
                tree = parse_python(source.text)
            else:
                require_python(source.text)
    except SyntaxError as error:
        yield syntax_fault(source, error)
        return
    except ValueError as error:
        yield SyntaxFault.finding(
            Place(source.path), f"Python cannot parse this file: {error}. The file was not checked."
        )
        return
    # By the walk first: compiling every script would take as long as parsing it.
    repeated = repeated_keyword(source.text) if script.outline.repeats_keyword else None
    if repeated is not None:
        yield repeated_keyword_fault(source, repeated)
    # A script that is not about precision has no facts; on most projects these are nine files of ten.
    is_read = script.about or affected
    in_script = tuple(_apply("script", ScriptRule, script, source, settings, preview=preview)) if is_read else ()
    if script.about:
        in_script += tuple(_per_value(script, in_script, preview=preview))
        in_script += tuple(_in_runs(script, in_script))
    raising = lines_that_raise(tree, source.text) if in_script and source.language == "python" else []
    for finding in in_script:
        is_timed = finding.code in _OF_LEARNING and finding.cell is None and only_measures(script, finding.line)
        if not is_timed and not any(finding.line in lines for lines in raising):
            yield finding
    if configures:
        from halfstep.check.config.joint import configs_in_script

        for number, config in enumerate(configs_in_script(tree, source, settings)):
            if number == MAX_CONFIGS:
                message = f"The script contains more than {MAX_CONFIGS} configurations; only the first {MAX_CONFIGS} were checked."
                yield TooDeep.finding(Place(source.path), message, severity="warning")
                return
            yield from _apply("config", ConfigRule, config, source, settings, preview=preview)


def _per_value(script: Script, already: tuple[Finding, ...], *, preview: bool) -> Iterator[Finding]:
    """What the rules that ask for it find in the script for single values of its precision settings, and nowhere near before."""
    from halfstep.check.script.assumed.scripts import assumed_scripts

    rules = [rule for rule in rules_of("script") if rule.code in PER_VALUE and (preview or not rule.preview)]
    reported = {(f.code, f.cell, f.line) for f in already}
    for assumption, assumed in assumed_scripts(script, words_of_rules("script")):
        for finding in (f for rule in rules for f in _run(rule, assumed, script.source) if f.severity == rule.severity):
            near = ((finding.code, finding.cell, finding.line + offset) for offset in range(-NEAR, NEAR + 1))
            if reported.isdisjoint(near):
                reported.add((finding.code, finding.cell, finding.line))
                # The fix would be right for this value only.
                yield replace(finding, message=f"with {assumption}, {finding.message}", fix=None)


def _in_runs(script: Script, already: tuple[Finding, ...]) -> Iterator[Finding]:
    """The mistakes that simulated runs of the script show, of rules that report nothing in it."""
    from halfstep.check.simulation.candidates import trains

    text = script.source.text
    if not trains(text):
        return
    from halfstep.check.simulation.simulate import mishaps

    reported = {f.code for f in already}
    lines = {(f.cell, f.line) for f in already if f.severity == "error"}
    try:
        for mishap in mishaps(parse_python(text, script.source.path), script.outline.names.table):
            where, rule = script.where(mishap.node), find_rule(mishap.code)
            near = {(where.cell, where.line + offset) for offset in range(-NEAR, NEAR + 1)}
            if rule is not None and mishap.code not in reported and lines.isdisjoint(near):
                yield rule.finding(where, mishap.message, instead=mishap.instead)
    except (RecursionError, MemoryError):
        return  # the rules have read it
    except Exception as error:
        yield failure(script.source, "The simulation of runs", error)


def _in_config(source: Source, settings: Settings, *, named: bool, preview: bool) -> Iterator[Finding]:
    from halfstep.check.config.config import parse_any, read_configs

    try:
        configs = read_configs(source, settings)
        if named and not configs:
            parse_any(source)
    except SettingError as error:
        text = str(error)
        place = _PLACE.match(text)
        # YAML has more line separators than editors do, so its line may be past the last one here.
        lines = source.text.split("\n")
        line = min(int(place.group(1)), len(lines)) if place else 1
        column = min(int(place.group(2) or 1), len(lines[line - 1]) + 1) if place else 1
        message = text[place.end() :] if place else text
        message = message[:1].upper() + message[1:]
        yield SyntaxFault.finding(Place(source.path, line, column), message)
        return
    for config in configs:
        yield from _apply("config", ConfigRule, config, source, settings, preview=preview)


def _apply(
    group: Group, kind: type[ScriptRule | ConfigRule], facts: Any, source: Source, settings: Settings, *, preview: bool
) -> Iterator[Finding]:
    # The rules of scripts have nothing to look for in one that does not mention precision.
    rules: Iterable[type[Rule]] = rules_of(group) if group == "config" or facts.about else ()
    if settings.gpu is not None:
        rules = (*rules, *rules_of("hardware"))
    if _may_be_affected(source, settings):
        rules = (*rules, *rules_of("advisories"))
    for rule in rules:
        if issubclass(rule, kind) and (preview or not rule.preview):
            yield from _run(rule, facts, source)


def _may_be_affected(source: Source, settings: Settings) -> bool:
    """Whether a text uses a feature that some version of a library has a defect in, and versions may be known."""
    return bool(settings.pins or settings.look_up) and contains_any(source.text, AFFECTED_WORDS)


def _run(rule: type[Any], facts: Any, source: Source) -> list[Finding]:
    """The findings of one rule; a rule that fails is reported as one finding."""
    try:
        return list(rule().check(facts))
    except (RecursionError, MemoryError):
        return [too_deep(source)]
    except Exception as error:
        return [failure(source, f"{rule.code} ({rule.name})", error)]


def _with_usable_fixes(findings: Iterable[Finding], source: Source) -> Iterator[Finding]:
    """The findings, each with its fix only if that is usable."""
    budget = MAX_FIXED_TEXT
    for finding in findings:
        if finding.fix is None:
            yield finding
            continue
        budget -= len(source.text)
        if budget < 0:
            yield replace(finding, fix=None)
            continue
        try:
            yield with_usable_fix(finding, source)
        except (RecursionError, MemoryError):
            yield replace(finding, fix=None)
        except Exception as error:
            yield replace(finding, fix=None)
            yield failure(source, f"The fix of {finding.code}", error)


def with_usable_fix(finding: Finding, source: Source) -> Finding:
    """The finding without its fix, if the fix would insert a name that may have no value there."""
    if finding.fix is None or source.language not in {"python", "notebook"}:
        return finding
    from halfstep.check.fixes.bound import missing_names

    try:
        usable = not missing_names(source.text, finding.fix.edits)
    except SyntaxError:
        usable = False
    return finding if usable else replace(finding, fix=None)


def failure(source: Source, component: str, error: Exception) -> Finding:
    """The finding for a rule or reader that failed."""
    # Addresses of objects differ from run to run, and a report must not.
    detail = f"{type(error).__name__}: {_ADDRESS.sub('', str(error))}"[:200]
    message = f"{component} failed on this file: {detail}. The other rules were applied."
    return CheckerFailure.finding(Place(source.path), message)


def syntax_fault(source: Source, error: SyntaxError) -> Finding:
    """The finding for Python that does not parse."""
    where = source.place(*place_of(error))
    # Name the version that parsed it: newer syntax is not a mistake in the file.
    version, detail = f"{sys.version_info[0]}.{sys.version_info[1]}", error.msg.rstrip(".?!")
    advice = "If it is valid in a newer Python, run Halfstep with that version."
    return SyntaxFault.finding(
        where, f"This is not valid Python {version}: {detail}. The file was not checked.", instead=advice
    )


def repeated_keyword_fault(source: Source, error: SyntaxError) -> Finding:
    """The finding for Python that parses and does not compile, as a call passes a keyword argument twice."""
    message = f"Python does not compile this file: {error.msg}. The rest of it was checked."
    severity: Severity = "advice" if source.language == "notebook" else "error"  # a notebook fails in one cell
    return SyntaxFault.finding(
        source.place(*place_of(error)), message, instead="Pass the argument once.", severity=severity
    )


def too_deep(source: Source) -> Finding:
    """The finding for a file that exhausts the parser or a rule."""
    message = "The file is nested too deeply to be analysed and was not checked."
    return TooDeep.finding(Place(source.path), message)
