"""Options of the command line and the project, combined into the settings that rules see."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.check.pins import Pin, installed_pins, parse_pin
from halfstep.check.project import Project
from halfstep.check.select import Selection, parse_selectors, path_matches
from halfstep.check.settings import Settings
from halfstep.errors import SettingError

if TYPE_CHECKING:
    from halfstep.hardware.devices import Device

__all__ = ["Options", "find_device", "make_options", "parse_version"]


@dataclass(frozen=True)
class Options:
    """Options of the command line or a call; the project provides the rest."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    deepspeed: str | None = None
    gpu: str | None = None
    pins: tuple[Pin, ...] = ()

    def settings(self, project: Project) -> Settings:
        """What rules may know beyond the text."""
        pins = (*self.pins, *project.pins)
        pinned = next((pin.version for pin in pins if pin.package == "deepspeed"), None)
        version = self.deepspeed or pinned or project.deepspeed
        gpu = self.gpu or project.gpu
        deepspeed = parse_version(version) if version else installed_deepspeed()
        if version:
            pins = (Pin("deepspeed", version, "--deepspeed" if self.deepspeed else "pyproject.toml"), *pins)
        if not gpu:
            return Settings(deepspeed, pins=pins, look_up=True)
        origin = "nvidia-smi" if gpu == "auto" else f"--gpu {gpu}" if self.gpu else f"gpu = {gpu!r} in pyproject.toml"
        return Settings(deepspeed, find_device(gpu), origin, pins, look_up=True)

    def selection(self, project: Project, path: str) -> Selection:
        """Which findings in the file at `path` to report.

        What the command line selects is reported even if the project ignores it; a per-file ignore always applies.
        """
        selection = Selection(self.select, self.ignore)
        if not self.select:
            selection = Selection(project.select, (*self.ignore, *project.ignore))
        if not project.per_file_ignores:
            return selection
        file = Path(path).absolute()
        for ignore in project.per_file_ignores:
            if path_matches(ignore.pattern, file, project.root):
                selection = selection.without(ignore.selectors)
        return selection


def make_options(
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    deepspeed: str | None,
    gpu: str | None,
    versions: tuple[str, ...] = (),
) -> Options:
    """Options from text, each one validated."""
    if deepspeed is not None:
        parse_version(deepspeed)
    if gpu is not None and gpu != "auto":
        find_device(gpu)
    pins = tuple(parse_pin(text, "--with") for text in versions)
    return Options(parse_selectors(select, "--select"), parse_selectors(ignore, "--ignore"), deepspeed, gpu, pins)


def parse_version(text: str) -> tuple[int, ...]:
    """A DeepSpeed version such as "0.19.8" or "0.16.4+cu124" as numbers."""
    match = re.match(r"v?(\d{1,4}(?:\.\d{1,6}){1,3})(?![\d.])", text.strip())
    if match is None:
        raise SettingError(f"{text!r} is not a version of DeepSpeed. Write it like 0.19.8.")
    return tuple(int(part) for part in match.group(1).split("."))


def installed_deepspeed() -> tuple[int, ...] | None:
    """The version of DeepSpeed installed alongside Halfstep."""
    version = next((pin.version for pin in installed_pins() if pin.package == "deepspeed"), None)
    return parse_version(version) if version else None


@cache
def find_device(name: str) -> Device:
    """The GPU called `name`, or with "auto" the first one nvidia-smi reports."""
    from halfstep.hardware.devices import ARCHITECTURES, Device
    from halfstep.hardware.probe import find_gpu, nvidia_gpus  # slow to import, so only when needed

    if name == "auto":
        gpus = nvidia_gpus()
        if not gpus:
            raise SettingError(
                "--gpu auto runs nvidia-smi, which is not installed or reports no GPU. Name a GPU instead: --gpu A100."
            )
        hardware = gpus[0]
    else:
        hardware = find_gpu(name)
    # A GPU between two entries of the table supports what its neighbour supports, and shares its facts.
    arch = next((a.name for a in ARCHITECTURES.values() if a.facts is hardware.support), None)
    if hardware.arch in ARCHITECTURES:
        arch = hardware.arch
    if arch is None:
        raise SettingError(f"Halfstep has no data about {hardware}. Name a GPU of the table, such as --gpu A100.")
    memory = round(hardware.memory_bytes / 2**30) if hardware.memory_bytes else None
    return Device(hardware.name, arch, memory)
