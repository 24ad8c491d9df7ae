"""From what a person asked and what the project says to the settings that rules see."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.check.files.source import Settings
from halfstep.check.project import Project
from halfstep.check.select import Selection, parse_selectors, path_matches
from halfstep.errors import SettingError

if TYPE_CHECKING:
    from halfstep.hardware.devices import Device

__all__ = ["Options", "find_device", "make_options", "parse_version"]


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line or in a call; a project fills in the rest."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    deepspeed: str | None = None
    gpu: str | None = None

    def settings(self, project: Project) -> Settings:
        """What rules may know beyond the text."""
        version = self.deepspeed or project.deepspeed
        gpu = self.gpu or project.gpu
        known = parse_version(version) if version else installed_deepspeed()
        if not gpu:
            return Settings(known)
        origin = "nvidia-smi" if gpu == "auto" else f"--gpu {gpu}" if self.gpu else f"gpu = {gpu!r} in pyproject.toml"
        return Settings(known, find_device(gpu), origin)

    def selection(self, project: Project, path: str) -> Selection:
        """What to keep of the findings in the file at `path`.

        What the command line selects is shown even if the project ignores it; a per-file ignore holds always.
        """
        chosen = Selection(self.select, self.ignore)
        if not self.select:
            chosen = Selection(project.select, (*self.ignore, *project.ignore))
        if not project.per_file_ignores:
            return chosen
        place = Path(path).absolute()
        for pattern, selectors in project.per_file_ignores:
            if path_matches(pattern, place, project.root):
                chosen = chosen.without(selectors)
        return chosen


def make_options(select: tuple[str, ...], ignore: tuple[str, ...], deepspeed: str | None, gpu: str | None) -> Options:
    """Options from text, each of them known."""
    if deepspeed is not None:
        parse_version(deepspeed)
    if gpu is not None and gpu != "auto":
        find_device(gpu)
    return Options(parse_selectors(select, "--select"), parse_selectors(ignore, "--ignore"), deepspeed, gpu)


def parse_version(text: str) -> tuple[int, ...]:
    """A DeepSpeed version such as "0.19.8" or "0.16.4+cu124" as numbers."""
    found = re.match(r"v?(\d{1,4}(?:\.\d{1,6}){1,3})(?![\d.])", text.strip())
    if found is None:
        raise SettingError(f"{text!r} is not a version of DeepSpeed. Write it like 0.19.8.")
    return tuple(int(part) for part in found.group(1).split("."))


@cache
def installed_deepspeed() -> tuple[int, ...] | None:
    """The version of DeepSpeed that is installed beside Halfstep, by the name of its folder; nothing is imported.

    importlib.metadata would tell as well, and takes several times as long (61 ms against 10 on a busy machine).
    """
    for folder in sys.path:
        try:
            names = [entry.name for entry in os.scandir(folder or ".")]
        except OSError:
            continue
        for name in names:
            found = re.fullmatch(r"deepspeed-(.+)\.dist-info", name)
            if found:
                return parse_version(found.group(1))
    return None


@cache
def find_device(name: str) -> Device:
    """The GPU called `name`, or with "auto" the first one nvidia-smi reports."""
    from halfstep.hardware.devices import ARCHITECTURES, Device
    from halfstep.hardware.probe import find_gpu, nvidia_gpus  # slow to load, so only for those who ask

    if name == "auto":
        seen = nvidia_gpus()
        if not seen:
            raise SettingError(
                "--gpu auto asks nvidia-smi, which is missing or reports no GPU here. Name one: --gpu A100."
            )
        hardware = seen[0]
    else:
        hardware = find_gpu(name)
    # A GPU between two entries of the table runs what its neighbour runs; its facts say whose.
    arch = next((a.name for a in ARCHITECTURES.values() if a.facts is hardware.support), None)
    if hardware.arch in ARCHITECTURES:
        arch = hardware.arch
    if arch is None:
        raise SettingError(
            f"Halfstep has no facts about {hardware}. Name a GPU of the table: halfstep probe --gpu A100."
        )
    memory = round(hardware.memory_bytes / 2**30) if hardware.memory_bytes else None
    return Device(hardware.name, arch, memory)
