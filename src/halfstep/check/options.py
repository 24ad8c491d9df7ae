"""Options of the command line and the project, combined into the settings that rules see."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

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
    transformers: str | None = None
    unsafe_fixes: bool | None = None  # None: as the project sets it

    def allows_unsafe(self, project: Project) -> bool:
        """Whether `--fix` and `--diff` also apply fixes that need review."""
        return project.unsafe_fixes if self.unsafe_fixes is None else self.unsafe_fixes

    def settings(self, project: Project) -> Settings:
        """What rules may know beyond the text."""
        deepspeed = version_of("deepspeed", self.deepspeed or project.deepspeed)
        transformers = version_of("transformers", self.transformers or project.transformers)
        gpu = self.gpu or project.gpu
        if not gpu:
            return Settings(deepspeed, transformers=transformers)
        origin = "nvidia-smi" if gpu == "auto" else f"--gpu {gpu}" if self.gpu else f"gpu = {gpu!r} in pyproject.toml"
        return Settings(deepspeed, find_device(gpu), origin, transformers)

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
    transformers: str | None = None,
    *,
    unsafe_fixes: bool | None = None,
) -> Options:
    """Options from text, each one validated."""
    if deepspeed is not None:
        parse_version(deepspeed)
    if transformers is not None:
        parse_version(transformers, "transformers")
    if gpu is not None and gpu != "auto":
        find_device(gpu)
    chosen, ignored = parse_selectors(select, "--select"), parse_selectors(ignore, "--ignore")
    return Options(chosen, ignored, deepspeed, gpu, transformers, unsafe_fixes)


_EXAMPLES = {"deepspeed": ("DeepSpeed", "0.19.8"), "transformers": ("transformers", "5.22.2")}


def parse_version(text: str, package: str = "deepspeed") -> tuple[int, ...]:
    """A version such as "0.19.8" or "0.16.4+cu124" as numbers."""
    match = re.match(r"v?(\d{1,4}(?:\.\d{1,6}){1,3})(?!\d|\.\d)", text.strip())
    if match is None:
        name, example = _EXAMPLES[package]
        raise SettingError(f"{text!r} is not a version of {name}. Write it like {example}.")
    return tuple(int(part) for part in match.group(1).split("."))


def version_of(package: str, text: str | None) -> tuple[int, ...] | None:
    """The version to judge by: the one in `text`, else the installed one, else None."""
    return parse_version(text, package) if text else installed_versions().get(package)


@cache
def installed_versions() -> dict[str, tuple[int, ...]]:
    """The libraries installed alongside Halfstep, from the names of their dist-info folders; nothing is imported.

    importlib.metadata finds them as well, but takes several times as long (61 ms instead of 10 on a busy machine).
    """
    versions: dict[str, tuple[int, ...]] = {}
    for folder in sys.path:
        try:
            names = [entry.name for entry in os.scandir(folder or ".")]
        except OSError:
            continue
        for name in names:
            match = re.fullmatch(r"(deepspeed|transformers)-(.+)\.dist-info", name)
            if match:
                versions.setdefault(match[1], parse_version(match[2], match[1]))
    return versions


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
