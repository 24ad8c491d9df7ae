"""A complete check: from paths to findings, and to fixed files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.check.files.document import Document, language_of, located_source, read_document
from halfstep.check.finding import Finding
from halfstep.check.options import Options, check_preview, make_options
from halfstep.check.parallel import check_targets
from halfstep.check.project import find_project
from halfstep.check.runner import FileResult, check_document, read_target
from halfstep.check.walk import Target, find_files
from halfstep.errors import SettingError

if TYPE_CHECKING:
    from halfstep.check.cache import Cache  # hashlib takes 10 ms to import
    from halfstep.check.fixing import Fixed

__all__ = ["Outcome", "check_path", "check_paths", "check_stdin"]


@dataclass(frozen=True)
class Outcome:
    """The findings of a check, and what it changed or would change."""

    results: tuple[FileResult, ...]
    num_files: int
    fixed: tuple[Fixed, ...] = ()
    num_unsafe_fixes: int = 0  # of the findings, those whose fix is applied only with --unsafe-fixes
    num_known: int = 0  # findings that the baseline has, which are not among the results

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Every finding, file by file."""
        return tuple(finding for result in self.results for finding in result.findings)


def check_path(
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    deepspeed: str | None = None,
    gpu: str | None = None,
    transformers: str | None = None,
    versions: Mapping[str, str] | None = None,
) -> tuple[Finding, ...]:
    """The precision mistakes in one or more files and folders; no checked code is imported, run or changed.

    `select` and `ignore` accept codes (`"HS104"`), prefixes (`"HS1"`), names and severities. `deepspeed` is the DeepSpeed
    version that configurations are checked for, `transformers` the version that scripts run with, `gpu` the hardware, `versions` those of other libraries. The project's pyproject.toml applies as it does for
    `halfstep check`.
    """
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    pairs = tuple(f"{name}={version}" for name, version in (versions or {}).items())
    options = make_options(_words(select), _words(ignore), deepspeed, gpu, transformers, pairs)
    return check_paths(paths, options).findings


def _words(texts: Iterable[str]) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts)


def check_paths(
    paths: Iterable[str | os.PathLike[str]],
    options: Options,
    *,
    fix: bool = False,
    write: bool = False,
    limit: bool = False,
    cache: Cache | None = None,
) -> Outcome:
    """Check files and folders; with `fix`, compute the fixes, and with `write`, write them to the files."""
    targets = find_files(paths, gitignore=options.respect_gitignore, force_exclude=options.force_exclude)
    check_preview(options, {target.project for target in targets})
    by_path = {target.path: target for target in targets}
    results = [result for result in _check(targets, options, cache, limit=limit) if result.findings]
    if not fix:
        return Outcome(tuple(results), len(targets), (), _num_unsafe(results, by_path, options))
    fixed = []
    for index, result in enumerate(results):
        if any(finding.fix for finding in result.findings):
            fixed_file = _fix(by_path[result.path], result, options, write=write)
            fixed.append(fixed_file)
            if not fixed_file.problem:
                results[index] = FileResult(result.path, fixed_file.findings, located_source(fixed_file.after))
    num_unsafe = _num_unsafe(results, by_path, options)
    results = [r for r in results if r.findings]
    return Outcome(tuple(results), len(targets), tuple(f for f in fixed if f.applied), num_unsafe)


def _num_unsafe(results: Iterable[FileResult], targets: dict[str, Target], options: Options) -> int:
    """How many findings have a fix that these options and the projects do not allow."""
    fixes = [(f.fix, targets[result.path].project) for result in results for f in result.findings if f.fix is not None]
    return sum(not fix.safe and not options.allows_unsafe(project) for fix, project in fixes)


def _check(targets: Sequence[Target], options: Options, cache: Cache | None, *, limit: bool) -> Iterable[FileResult]:
    """The results of all files in order, those of unchanged files from the cache."""
    if cache is None:
        return check_targets(targets, options, limit=limit)
    results = {target.path: cache.find(target) for target in targets}
    misses = [target for target in targets if results[target.path] is None]
    for result in check_targets(misses, options, limit=limit):
        cache.store(result)
        results[result.path] = result
    cache.save()
    return [result for result in results.values() if result is not None]


def _fix(target: Target, result: FileResult, options: Options, *, write: bool) -> Fixed:
    from halfstep.check.fixing import fix_document, write_back

    document = read_target(target)
    settings, selection = options.settings(target.project), options.selection(target.project, target.path)

    def check_again(changed: Document) -> tuple[Finding, ...]:
        return check_document(changed, settings, selection, named=target.named)

    unsafe = options.allows_unsafe(target.project)
    fixed_file = fix_document(document, check_again(document), check_again, unsafe=unsafe)
    if write and fixed_file.applied:
        problem = write_back(fixed_file)
        if problem:
            return replace(fixed_file, findings=result.findings, problem=problem)
    return fixed_file


def check_stdin(data: bytes, name: str, options: Options, *, fix: bool = False) -> Outcome:
    """Check a text from standard input; `name` determines its language and its project."""
    language = language_of(name)
    if language is None:
        raise SettingError(
            f"Unknown file type {name!r}. Pass a --stdin-filename that ends in .py, .ipynb, .json, .yaml, .yml or .toml."
        )
    project = find_project(Path(name).absolute().parent)
    check_preview(options, (project,))
    document = read_document(name, data, language)
    settings, selection = options.settings(project), options.selection(project, name)
    findings = check_document(document, settings, selection)
    unsafe = options.allows_unsafe(project)

    def num_unsafe(findings: Iterable[Finding]) -> int:
        return sum(f.fix is not None and not f.fix.safe and not unsafe for f in findings)

    if not fix:
        return Outcome(_result(document, findings), 1, (), num_unsafe(findings))
    from halfstep.check.fixing import fix_document

    def check_again(changed: Document) -> tuple[Finding, ...]:
        return check_document(changed, settings, selection)

    fixed_file = fix_document(document, findings, check_again, unsafe=unsafe)
    result = _result(fixed_file.after, fixed_file.findings)
    return Outcome(result, 1, (fixed_file,), num_unsafe(fixed_file.findings))


def _result(document: Document, findings: Sequence[Finding]) -> tuple[FileResult, ...]:
    return (FileResult(document.source.path, tuple(findings), located_source(document)),) if findings else ()
