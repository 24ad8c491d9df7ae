"""Options of the command line and the project, combined into the settings that rules see."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.check.pins import Pin, installed_pins, parse_pin
from halfstep.check.project import Project
from halfstep.check.registry import find_rule
from halfstep.check.select import Selection, parse_selectors, path_matches
from halfstep.check.settings import Settings
from halfstep.errors import SettingError

if TYPE_CHECKING:
    from halfstep.hardware.devices import Device

__all__ = ["Options", "check_preview", "find_device", "make_options", "parse_version"]


@dataclass(frozen=True)
class Options:
    """Options of the command line or a call; the project provides the rest."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    deepspeed: str | None = None
    gpu: str | None = None
    transformers: str | None = None
    unsafe_fixes: bool | None = None  # this and the next two: None leaves the choice to the project
    preview: bool | None = None
    respect_gitignore: bool | None = None
    force_exclude: bool = False  # treat named files like those of a folder
    pins: tuple[Pin, ...] = ()  # of `--with`

    def allows_unsafe(self, project: Project) -> bool:
        """Whether `--fix` and `--diff` also apply fixes that need review."""
        return project.unsafe_fixes if self.unsafe_fixes is None else self.unsafe_fixes

    def settings(self, project: Project) -> Settings:
        """What rules may know beyond the text."""
        pins = self._pins(project)
        named = {pin.package: pin.version for pin in reversed(pins)}
        deepspeed = version_of("deepspeed", named.get("deepspeed"))
        transformers = version_of("transformers", named.get("transformers"))
        gpu = self.gpu or project.gpu
        if not gpu:
            return Settings(deepspeed, transformers=transformers, pins=pins, look_up=True)
        origin = "nvidia-smi" if gpu == "auto" else f"--gpu {gpu}" if self.gpu else f"gpu = {gpu!r} in pyproject.toml"
        return Settings(deepspeed, find_device(gpu), origin, transformers, pins, look_up=True)

    def _pins(self, project: Project) -> tuple[Pin, ...]:
        """The versions that the user named, the command line first."""
        flags = (("deepspeed", self.deepspeed), ("transformers", self.transformers))
        keys = (("deepspeed", project.deepspeed), ("transformers", project.transformers))
        return (
            *(Pin(name, version, f"--{name}") for name, version in flags if version),
            *self.pins,
            *(Pin(name, version, "pyproject.toml") for name, version in keys if version),
            *project.pins,
        )

    def selection(self, project: Project, path: str) -> Selection:
        """Which findings in the file at `path` to report.

        What the command line selects is reported even if the project ignores it; a per-file ignore always applies.
        """
        preview = project.preview if self.preview is None else self.preview
        selection = Selection(self.select, self.ignore, preview)
        if not self.select:
            selection = Selection(project.select, (*self.ignore, *project.ignore), preview)
        if not project.per_file_ignores:
            return selection
        file = Path(path).absolute()
        for ignore in project.per_file_ignores:
            if path_matches(ignore.pattern, file, project.root):
                selection = selection.without(ignore.selectors)
        return selection


def check_preview(options: Options, projects: Iterable[Project]) -> None:
    """Raise if a rule in preview is selected by its code or name and preview is off: it would report nothing."""
    for project in projects:
        selection = options.selection(project, "")
        for selector in () if selection.preview else selection.select:
            rule = find_rule(selector)
            if rule is not None and rule.preview:
                raise SettingError(f"{rule.code} ({rule.name}) is in preview, so selecting it needs --preview.")


def make_options(
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    deepspeed: str | None,
    gpu: str | None,
    transformers: str | None = None,
    versions: tuple[str, ...] = (),
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
    pins = tuple(parse_pin(text, "--with") for text in versions)
    chosen, ignored = parse_selectors(select, "--select"), parse_selectors(ignore, "--ignore")
    return Options(chosen, ignored, deepspeed, gpu, transformers, unsafe_fixes, pins=pins)


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


def installed_versions() -> dict[str, tuple[int, ...]]:
    """DeepSpeed and Transformers as installed alongside Halfstep; nothing is imported."""
    return {p.package: parse_version(p.version, p.package) for p in installed_pins() if p.package in _EXAMPLES}


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
