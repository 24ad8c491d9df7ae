"""Runs of a reader's script in separate processes, each with a time limit, in an empty working directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halfstep.errors import SettingError
from halfstep.learning.practice.record import Run, RunSpec

__all__ = ["measure"]

_START_SECONDS = 120  # importing torch on a busy machine
_STOP_SECONDS = 5
_LONGEST_OUTPUT = 400_000


def measure(specs: Sequence[RunSpec], seconds: float) -> list[Run]:
    """Run scripts, each for at most `seconds`, and return what they did.

    A script is copied, so that files it writes next to itself land in a temporary directory; modules next to it can be imported.
    """
    fork = sys.platform == "linux"
    with tempfile.TemporaryDirectory(prefix="halfstep-practice-", ignore_cleanup_errors=True) as name:
        folders = []
        entries: list[dict[str, Any]] = []
        for index, spec in enumerate(specs):
            folder = Path(name) / str(index)
            (folder / "script").mkdir(parents=True)
            copy = folder / "script" / Path(spec.script).name
            shutil.copyfile(spec.script, copy)
            original = str(Path(spec.script).absolute().parent)
            entries.append(asdict(spec) | {"script": str(copy), "folder": str(folder), "original": original})
            folders.append(folder)
        for batch in [entries] if fork else [[entry] for entry in entries]:
            _host({"runs": batch, "seconds": seconds, "fork": fork}, Path(name), seconds)
        return [_read(folder, seconds) for folder in folders]


def _host(spec: dict[str, Any], folder: Path, seconds: float) -> None:
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    # A GPU is hidden: every machine runs the practice on its CPU.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "Agg"}
    command = [sys.executable, "-m", "halfstep.learning.practice.host", str(path)]
    limit = _START_SECONDS + (seconds + 10) * len(spec["runs"]) if spec["fork"] else _START_SECONDS + seconds
    host = subprocess.Popen(  # noqa: S603
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _, errors = host.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _stop(host)
        Path(spec["runs"][0]["folder"], "status").write_text("timeout")
        return
    except BaseException:  # Ctrl-C
        _stop(host)
        raise
    started = any(Path(run["folder"], "work").exists() for run in spec["runs"])
    if host.returncode and not started:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        raise SettingError(f"The process that runs the script did not start: {last}")


def _stop(host: subprocess.Popen[str]) -> None:
    """End the host, which ends the script that it runs: a script is in a session of its own, where no Ctrl-C arrives."""
    host.terminate()
    try:
        host.communicate(timeout=_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        host.kill()
        host.communicate()


def _read(folder: Path, seconds: float) -> Run:
    output = ""
    if (folder / "output").exists():
        data = (folder / "output").read_bytes()
        output = data[-_LONGEST_OUTPUT:].decode("utf-8", errors="replace")
    status = (folder / "status").read_text() if (folder / "status").exists() else ""
    result = folder / "result.json"
    if result.exists():
        return Run.from_json(json.loads(result.read_text()) | {"output": output})
    if status == "timeout":
        return Run("timeout", f"It was stopped after {seconds:g} s.", output=output)
    if not (folder / "work").exists():
        return Run("not run")
    return Run("died", f"The process died with status {status or 'unknown'}.", output=output)
