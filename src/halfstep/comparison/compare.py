"""`halfstep.compare()`: the same job in several precisions, side by side."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from signal import Signals
from typing import Any

from halfstep.comparison.gate import parse_gate
from halfstep.comparison.process import INSIDE
from halfstep.comparison.ranks.checks import check_rows
from halfstep.comparison.record import RUNS
from halfstep.comparison.remainder import Remainder, read_remainder
from halfstep.comparison.result import Comparison, read_comparison
from halfstep.comparison.runner import Observer, Runner, SilentObserver
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.survey import SURVEY
from halfstep.comparison.variant import DEFAULT_PRECISIONS, Variant, parse_variants
from halfstep.errors import SettingError
from halfstep.hardware.torch_build import require_torch
from halfstep.jobs.job import Job

__all__ = ["PAGE", "RESULT", "compare", "new_folder", "prepare_out", "resume_comparison", "target_of"]

RESULT, PAGE = "comparison.json", "report.html"
_LOADED = "halfstep.jobs.files."  # prefix of the module names of files that were loaded as targets
_GUARD = 'if __name__ == "__main__":'


def compare(
    target: Job | str | None = None,
    precisions: Iterable[str] = DEFAULT_PRECISIONS,
    *,
    peers: Iterable[str] = (),
    steps: int | None = None,
    repeats: int | None = None,
    batch: int | None = None,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    data_dir: str | os.PathLike[str] | None = None,
    fail_if: Iterable[str] = (),
    observer: Observer | None = None,
    **settings: Any,
) -> Comparison:
    """Train a job in each precision, in processes that take turns, and compare speed, memory and loss.

    `target` is a target as on the command line (None is `digits`), or a `Job` that is a module-level variable.
    `precisions` may include `compile=on`; `peers` are `torch-amp`, `accelerate` and `fabric`. Further `settings` are the
    fields of `CompareSettings`: seed, max_norm, warmup, device, and backend, ranks and timeout, with which each run is trained by
    several processes that are started here. Run files and `comparison.json` are written to `out`, by
    default a new directory under `runs/`; a directory that is not empty raises unless `force` is set. Ctrl-C stops early,
    and the result contains what was done. The gates in `fail_if` are only checked for mistakes before anything runs; call
    `comparison.gate(text)` to evaluate one.
    """
    require_torch("halfstep.compare()")
    if os.environ.get(INSIDE):
        raise SettingError(
            f"This file compares itself: loading the job called compare() again. Move the call under `{_GUARD}`."
        )
    precisions, peers, fail_if = map(_as_list, (precisions, peers, fail_if))
    variants = parse_variants(precisions, peers)
    for gate in fail_if:
        parse_gate(gate, [variant.label for variant in variants])
    overrides = {"steps": steps, "repeats": repeats, "batch": batch, **settings}
    config = _settings({key: value for key, value in overrides.items() if value is not None or key == "max_norm"})
    check_rows(config, variants)
    source = target_of(target) if isinstance(target, Job) else target
    folder = Path(out) if out is not None else new_folder(source)
    prepare_out(folder, force=force)
    return _run(variants, config, folder, source, data_dir, observer or SilentObserver())


def resume_comparison(
    folder: str | os.PathLike[str], *, fail_if: Iterable[str] = (), observer: Observer | None = None
) -> Comparison:
    """Finish a comparison that was stopped: the runs that are missing or were cut short, in the same directory."""
    require_torch("halfstep compare --resume")
    earlier = read_remainder(Path(folder))
    survey = earlier.survey
    for gate in fail_if:
        parse_gate(gate, survey.labels)
    return _run(
        survey.variants,
        survey.settings,
        Path(folder),
        survey.source,
        survey.data_dir,
        observer or SilentObserver(),
        earlier,
    )


def _run(
    variants: Sequence[Variant],
    config: CompareSettings,
    out: Path,
    target: str | None,
    data_dir: str | os.PathLike[str] | None,
    observer: Observer,
    earlier: Remainder | None = None,
) -> Comparison:
    from halfstep.train.stop import StopRequest  # its package needs torch, and rebuilding a report does not

    root = None if data_dir is None else os.fspath(data_dir)
    with StopRequest() as stop:
        runner = Runner(
            variants,
            config,
            out,
            target=target,
            data_dir=root,
            command=_command(variants, config, target, root) if earlier is None else earlier.survey.command,
            observer=observer,
            stopped=lambda: bool(stop),
            earlier=earlier,
        )
        try:
            runner.run()
        finally:
            if not (out / SURVEY).exists():
                for path in (out / RUNS, out):  # still empty, so that the same command works again
                    with contextlib.suppress(OSError):
                        path.rmdir()
    if not (out / SURVEY).exists():
        message = "The comparison was stopped before anything was measured."
        raise KeyboardInterrupt(message) if stop.signal is Signals.SIGINT else SettingError(message)
    signal = None if stop.signal is None else stop.signal.name
    comparison = read_comparison([out], stopped_by=signal)
    (out / RESULT).write_text(json.dumps(comparison.as_dict(), indent=1) + "\n", encoding="utf-8")
    return comparison


def _as_list(texts: Iterable[str]) -> Iterable[str]:
    """A single string counts as a list of one, not as its characters."""
    return (texts,) if isinstance(texts, str) else texts


def _settings(overrides: dict[str, Any]) -> CompareSettings:
    try:
        return CompareSettings(**overrides)
    except TypeError:
        known = CompareSettings().as_dict()
        unknown = sorted(set(overrides) - set(known))
        raise SettingError(f"compare() has no setting {unknown[0]!r}; it has {', '.join(known)}.") from None


def prepare_out(folder: Path, *, force: bool) -> None:
    """Raise if `folder` is not empty, or with `force`, remove the files that a comparison wrote there."""
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"{folder} is a file; --out needs a directory.")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not force:
        raise SettingError(
            f"{folder} exists and is not empty; use another --out, or --force to replace the comparison in it."
        )
    if not (folder / SURVEY).exists():
        return  # not a comparison: files in its runs/ belong to something else
    for name in (RESULT, PAGE, SURVEY):
        (folder / name).unlink(missing_ok=True)
    for kind in ("*.jsonl", "*.log", "*.part", "*.spec.json", "*.safetensors"):
        for path in (folder / RUNS).glob(kind):
            path.unlink()


def target_of(job: Job) -> str:
    """The target that loads this job in another process."""
    for name, module in list(sys.modules.items()):
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if value is not job or not key.isidentifier():
                continue
            file = getattr(module, "__file__", None)
            by_file = name == "__main__" or name.startswith(_LOADED)
            if not by_file:
                return f"{name}:{key}"
            if file is not None and file.endswith(".py"):
                return f"{Path(file).resolve()}:{key}"
    raise SettingError(
        "Each run is a separate process that loads the job again, and this Job is not a module-level variable. Assign it to a name "
        f"at the top level of a file, with the call of compare() under `{_GUARD}`, or pass the target as a string."
    )


def new_folder(target: str | None) -> Path:
    """A new directory name under runs/."""
    name = Path(target).name if target else "digits"
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:100].strip("-.")  # file systems allow 255
    return Path("runs") / f"compare-{plain}-{time.strftime('%Y%m%d-%H%M%S')}"


def _command(
    variants: Sequence[Variant], config: CompareSettings, target: str | None, data_dir: str | None
) -> tuple[str, ...]:
    """The command line that repeats this comparison."""
    words = ["halfstep", "compare", target or "digits"]
    for variant in variants:
        words += ["--precision" if variant.baseline is None else "--peer", variant.label]
    defaults = CompareSettings().as_dict()
    flags = {"steps": config.steps, "repeats": config.repeats, "batch": config.batch, "data": data_dir}
    if config.strategy != "single":
        flags |= {"backend": config.strategy, "ranks": config.ranks}
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}", str(value)]
    for name, value in config.as_dict().items():
        if name not in flags and value != defaults[name]:
            words += ["--set", f"{name}={'none' if value is None else value}"]
    threads = os.environ.get("OMP_NUM_THREADS")
    return (*([f"OMP_NUM_THREADS={threads}"] if threads else []), *(shlex.quote(word) for word in words))
