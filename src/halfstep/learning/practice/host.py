"""The program that runs a reader's script, observed: `python -m halfstep.learning.practice.host SPEC.json`.

torch is imported once; on Linux each run is then a fork of this process, elsewhere a spec has one run. A run has its own working directory, no
standard input, and its output goes to a file. What it did is written as JSON when it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from halfstep.hardware.onednn import ignore_fallback_warnings
from halfstep.learning.practice.layers import LayerObserver
from halfstep.learning.practice.observe import Observer
from halfstep.learning.practice.pretend import MemoryReads, pretend_gpu
from halfstep.learning.practice.record import RunSpec

__all__ = ["main"]

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns", "monotonic_ns")
_POLL_SECONDS = 0.02
_ENDINGS = {signal.SIGINT, signal.SIGTERM}
_LONGEST_STRING = 20_000


def main(path: str) -> None:
    """Run every run of a spec."""
    spec = json.loads(Path(path).read_text())
    # The first optimizer of a process imports much of torch, seconds on some machines: once, not in every run.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0).step()
    for entry in spec["runs"]:
        folder = Path(entry.pop("folder"))
        original = entry.pop("original")
        run = RunSpec(**(entry | {"inject": tuple(entry["inject"])}))
        if not spec["fork"]:
            _execute(run, folder, original)
            return
        _run_apart(run, folder, original, spec["seconds"])


def _run_apart(run: RunSpec, folder: Path, original: str, seconds: float) -> None:
    """Run a script in a process and session of its own; it ends with this one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)  # none between the fork and what handles it
    process = os.fork()
    if process == 0:
        for number in _ENDINGS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)
        _execute(run, folder, original)
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)
        _wait(process, folder, seconds)
    except BaseException:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # before its session began
            os.kill(process, signal.SIGKILL)
        raise


def _wait(process: int, folder: Path, seconds: float) -> None:
    """Wait for a run; one that takes too long is killed with everything it started."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            (folder / "status").write_text(str(os.waitstatus_to_exitcode(status)))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGKILL)  # what it left running
            return
        time.sleep(_POLL_SECONDS)
    (folder / "status").write_text("timeout")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)


def _execute(spec: RunSpec, folder: Path, original: str) -> None:
    """Run the script in this process, write what it did, and end the process."""
    script = Path(spec.script)
    _redirect(folder)
    observer, layers = Observer(spec), LayerObserver()
    notes: dict[str, list[Any]] = {"clock_reads": [], "memory_reads": [], "resets": []}
    owner, start = os.getpid(), time.perf_counter()
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=str(script), __builtins__=__builtins__)

    def finish(ended: dict[str, Any], code: int = 0) -> None:
        if os.getpid() == owner:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            variables = {k: v for k, v in module.__dict__.items() if not k.startswith("__")}
            _write(
                folder, ended, observer, layers if spec.layers else None, notes, variables, time.perf_counter() - start
            )
        leave(code)

    system: Any = os
    leave, system._exit = system._exit, lambda code: finish({"ended": "exit", "exit_code": code}, code)  # noqa: SLF001 - its public name
    folders = (str(script.parent), original)

    def reset() -> None:
        notes["resets"].append(len(observer.steps))
        observer.operators.reset_peak()

    memory = MemoryReads(
        current=lambda: observer.operators.live_bytes,
        peak=lambda: observer.operators.peak_bytes,
        reset=reset,
        note=lambda name, value: notes["memory_reads"].append((len(observer.steps), name, value)),
    )
    mode = pretend_gpu(folders, memory, bf16=spec.bf16_supported, max_init_scale=spec.max_init_scale)
    observer.patch()
    if spec.layers:
        layers.patch()
    _watch_clocks(folders, lambda: notes["clock_reads"].append(len(observer.steps)))
    _watch_process_memory(folders, memory.note)
    sys.argv, sys.path[:0] = [str(script)], [str(script.parent), original]
    sys.modules["__main__"] = module
    ended: dict[str, Any] = {"ended": "end"}
    try:
        with mode, observer.operators if spec.operators else contextlib.nullcontext():
            exec(compile(script.read_bytes(), str(script), "exec"), module.__dict__)  # noqa: S102 - the reader's own script
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        ended = {
            "ended": "exit",
            "exit_code": code,
            "error": "" if isinstance(error.code, int | None) else str(error.code),
        }
    except BaseException as error:
        ended = {"ended": "error", "error": _message(error), "line": _line(error, script)}
        traceback.print_exc()
    finish(ended)


def _redirect(folder: Path) -> None:
    """No input; output to a file; an empty working directory."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    os.chdir(work)
    sys.stdout.flush()
    for stream, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, os.open(folder / "output", _WRITE)), (2, None)):
        os.dup2(1 if target is None else target, stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - until the process ends
    sys.stdout = open(1, "w", closefd=False, buffering=1, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="replace")  # noqa: SIM115
    warnings.simplefilter("ignore")
    ignore_fallback_warnings()
    torch.manual_seed(0)
    with contextlib.suppress(ImportError):
        import resource

        most = 2**30  # a script that prints without end must not fill the disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def _message(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _line(error: BaseException, script: Path) -> int | None:
    if isinstance(error, SyntaxError) and error.filename == str(script):
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(script)]
    return lines[-1] if lines else None


def _called_from(folders: tuple[str, ...]) -> bool:
    """Whether the caller of the caller is the script, or a module next to it."""
    return str(Path(sys._getframe(2).f_code.co_filename).parent) in folders  # noqa: SLF001 - the public ways are slow


def _watch_clocks(folders: tuple[str, ...], note: Callable[[], None]) -> None:
    import timeit

    def watched(original: Callable[[], Any]) -> Callable[[], Any]:
        def read() -> Any:
            if _called_from(folders):
                note()
            return original()

        return read

    for name in _CLOCKS:
        setattr(time, name, watched(getattr(time, name)))
    timer = timeit.timeit

    def timed(*args: Any, **options: Any) -> Any:
        note()
        result = timer(*args, **options)
        note()
        return result

    timeit.timeit, timeit.default_timer = timed, time.perf_counter
    event_class: Any = torch.cuda.Event
    record = event_class.record

    def recorded(event: Any, *args: Any) -> None:
        note()
        record(event, *args)

    event_class.record = recorded


def _watch_process_memory(folders: tuple[str, ...], note: Callable[[str, float], None]) -> None:
    """Other ways to read memory than torch.cuda's: the process, Python's allocator, tensors saved for backward."""
    import tracemalloc

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **options: Any) -> Any:
            if _called_from(folders):
                note(name, float("nan"))
            return original(*args, **options)

        return read

    graph = torch.autograd.graph
    places: list[tuple[Any, str]] = [(tracemalloc, "get_traced_memory"), (graph, "saved_tensors_hooks")]
    with contextlib.suppress(ImportError):
        import resource

        places.append((resource, "getrusage"))
    with contextlib.suppress(ImportError):
        import psutil  # type: ignore[import-untyped]

        places += [(psutil.Process, "memory_info"), (psutil.Process, "memory_full_info")]
    for place, name in places:
        setattr(place, name, watched(name, getattr(place, name)))


def _write(folder: Path, ended: dict[str, Any], observer: Observer, layers: LayerObserver | None,
           notes: dict[str, list[Any]], variables: dict[str, Any], seconds: float) -> None:  # fmt: skip
    data = ended | notes | {
        "seconds": seconds,
        "backwards": [asdict(each) for each in observer.backwards],
        "steps": [asdict(each) for each in observer.steps],
        "num_updates": observer.num_updates,
        "pending_updates": observer.pending_updates,
        "variables": {k: v[:_LONGEST_STRING] for k, v in variables.items() if k.isupper() and isinstance(v, str)},
    }  # fmt: skip
    if layers is not None:
        data |= {"layers": [asdict(each) for each in layers.culprits(variables)],
                 "all_layers": layers.all_names(variables), "formats_forward": sorted(layers.formats)}  # fmt: skip
    temporary = folder / "result.tmp"
    temporary.write_text(json.dumps(data))
    temporary.rename(folder / "result.json")


if __name__ == "__main__":
    main(sys.argv[1])
