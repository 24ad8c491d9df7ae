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
from typing import Any

from halfstep.comparison.conductor import Conductor, Quiet, Watcher
from halfstep.comparison.contender import DEFAULT_PRECISIONS, Contender, parse_contenders
from halfstep.comparison.gate import parse_gate
from halfstep.comparison.process import INSIDE
from halfstep.comparison.record import RUNS, SURVEY
from halfstep.comparison.remainder import Remainder, read_remainder
from halfstep.comparison.result import Comparison, read_comparison
from halfstep.comparison.settings import CompareSettings
from halfstep.errors import SettingError
from halfstep.hardware.torch_build import require_torch
from halfstep.jobs.job import Job

__all__ = ["PAGE", "RESULT", "compare", "go_on", "home_of", "new_folder", "prepare_out"]

RESULT, PAGE = "comparison.json", "report.html"
_LOADED = "halfstep.jobs.files."  # what files are called that were loaded as targets
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
    watcher: Watcher | None = None,
    **settings: Any,
) -> Comparison:
    """Train a job in each precision, in processes that take turns, and say what each one bought.

    `target` is what commands take (None is `digits`), or a `Job` that is a global of its module. `precisions` may carry
    `compile=on`; `peers` are `torch-amp`, `accelerate` and `fabric`. Further `settings` are the fields of
    `CompareSettings`: seed, max_norm, warmup, device. Run files and `comparison.json` are written to `out`, a new directory
    under `runs/` unless it is given; what is there already is kept unless `force` is set. Ctrl-C ends it early, and the
    result then holds what was done. `fail_if` are checked for mistakes before anything runs; ask `comparison.gate(text)`.
    """
    require_torch("halfstep.compare()")
    if os.environ.get(INSIDE):
        raise SettingError(
            f"This file compares itself: loading the job called compare() again. Put the call under `{_GUARD}`."
        )
    precisions, peers, fail_if = map(_listed, (precisions, peers, fail_if))
    contenders = parse_contenders(precisions, peers)
    for gate in fail_if:
        parse_gate(gate, [contender.label for contender in contenders])
    given = {"steps": steps, "repeats": repeats, "batch": batch, **settings}
    config = _settings({key: value for key, value in given.items() if value is not None or key == "max_norm"})
    source = home_of(target) if isinstance(target, Job) else target
    folder = Path(out) if out is not None else new_folder(source)
    prepare_out(folder, force=force)
    return _run(contenders, config, folder, source, data_dir, watcher or Quiet())


def go_on(folder: str | os.PathLike[str], *, fail_if: Iterable[str] = (), watcher: Watcher | None = None) -> Comparison:
    """Finish a comparison that was stopped: the runs that are missing or were cut short, into the same directory."""
    require_torch("halfstep compare --resume")
    earlier = read_remainder(Path(folder))
    for gate in fail_if:
        parse_gate(gate, [contender.label for contender in earlier.contenders])
    survey = earlier.survey
    return _run(
        earlier.contenders,
        earlier.settings,
        Path(folder),
        survey["source"],
        survey["data_dir"],
        watcher or Quiet(),
        earlier,
    )


def _run(
    contenders: Sequence[Contender],
    config: CompareSettings,
    out: Path,
    target: str | None,
    data_dir: str | os.PathLike[str] | None,
    watcher: Watcher,
    earlier: Remainder | None = None,
) -> Comparison:
    from halfstep.train.stop import StopRequest  # its room needs torch, and rebuilding a report does not

    root = None if data_dir is None else os.fspath(data_dir)
    with StopRequest() as stop:
        conductor = Conductor(
            contenders,
            config,
            out,
            target=target,
            data_dir=root,
            command=_command(contenders, config, target, root) if earlier is None else earlier.survey["command"],
            watcher=watcher,
            stopped=lambda: bool(stop),
            earlier=earlier,
        )
        try:
            conductor.run()
        finally:
            if not (out / SURVEY).exists():
                for made in (out / RUNS, out):  # empty again, so that the same command can be given again
                    with contextlib.suppress(OSError):
                        made.rmdir()
    if not (out / SURVEY).exists():
        raise SettingError("The comparison was stopped before anything was measured.")
    signal = None if stop.signal is None else stop.signal.name
    comparison = read_comparison([out], stopped_by=signal)
    (out / RESULT).write_text(json.dumps(comparison.as_dict(), indent=1) + "\n", encoding="utf-8")
    return comparison


def _listed(texts: Iterable[str]) -> Iterable[str]:
    """One text may stand for a list of one; its letters are not meant."""
    return (texts,) if isinstance(texts, str) else texts


def _settings(given: dict[str, Any]) -> CompareSettings:
    try:
        return CompareSettings(**given)
    except TypeError:
        known = CompareSettings().as_dict()
        unknown = sorted(set(given) - set(known))
        raise SettingError(f"compare() has no setting {unknown[0]!r}; it has {', '.join(known)}.") from None


def prepare_out(folder: Path, *, force: bool) -> None:
    """Make sure that nothing in `folder` is overwritten, or with `force`, clear away what a comparison wrote there."""
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"{folder} is a file; --out names a directory.")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not force:
        raise SettingError(
            f"{folder} exists and is not empty; give another --out, or --force to replace what is in it."
        )
    if not (folder / SURVEY).exists():
        return  # no comparison was made here: what lies in its runs/ is somebody else's
    for name in (RESULT, PAGE, SURVEY):
        (folder / name).unlink(missing_ok=True)
    for kind in ("*.jsonl", "*.log", "*.part", "*.spec.json", "*.safetensors"):
        for path in (folder / RUNS).glob(kind):
            path.unlink()


def home_of(job: Job) -> str:
    """The target text that loads this very job in another process."""
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
        "Each run is a process of its own, which has to load the job again, and this Job is no global of any module. Assign it to "
        f"a name at the top level of a file, with the call of compare() under `{_GUARD}`, or pass the target as text."
    )


def new_folder(target: str | None) -> Path:
    """A directory under runs/ that is not there yet."""
    name = Path(target).name if target else "digits"
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip("-.")
    return Path("runs") / f"compare-{plain}-{time.strftime('%Y%m%d-%H%M%S')}"


def _command(
    contenders: Sequence[Contender], config: CompareSettings, target: str | None, data_dir: str | None
) -> tuple[str, ...]:
    """The command line that makes this comparison again."""
    words = ["halfstep", "compare", target or "digits"]
    for contender in contenders:
        words += ["--precision" if contender.peer is None else "--peer", contender.label]
    defaults = CompareSettings().as_dict()
    flags = {"steps": config.steps, "repeats": config.repeats, "batch": config.batch, "data": data_dir}
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}", str(value)]
    for name, value in config.as_dict().items():
        if name not in flags and value != defaults[name]:
            words += ["--set", f"{name}={'none' if value is None else value}"]
    threads = os.environ.get("OMP_NUM_THREADS")
    return (*([f"OMP_NUM_THREADS={threads}"] if threads else []), *(shlex.quote(word) for word in words))
