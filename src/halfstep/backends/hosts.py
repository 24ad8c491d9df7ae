"""Host lists as SLURM writes them: `node[01-03,07],login` and `4(x2),3`."""

from __future__ import annotations

import itertools
import re

from halfstep.errors import SettingError

__all__ = ["expand_hosts", "expand_tasks"]

_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(text: str) -> list[str]:
    """The hosts of a compressed list: `a[08-10]b` is a08b, a09b, a10b; several brackets multiply."""
    hosts: list[str] = []
    for item in _split(text):
        parts = [
            _ranges(part[1:-1], text) if part.startswith("[") else [part] for part in re.split(r"(\[[^\]]*\])", item)
        ]
        hosts += ["".join(combination) for combination in itertools.product(*parts)]
    if not hosts or not all(hosts):
        raise _invalid(text)
    return hosts


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    if text.count("[") != text.count("]"):
        raise _invalid(text)
    return [item.strip() for item in re.split(r",(?![^\[]*\])", text)]


def _ranges(text: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        first, dash, last = item.partition("-")
        last = last if dash else first
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
            raise _invalid(whole)
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def expand_tasks(text: str) -> list[int]:
    """The number of tasks on each node: `4(x2),3` is 4, 4, 3."""
    counts: list[int] = []
    for item in text.split(","):
        match = _TASKS.fullmatch(item.strip())
        if match is None:
            raise SettingError(f"{text!r} is not a list of tasks per node as SLURM writes it, such as 4(x2),3.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _invalid(text: str) -> SettingError:
    return SettingError(
        f"{text!r} is not a host list as SLURM writes it, such as node[01-03]. Set MASTER_ADDR yourself."
    )
