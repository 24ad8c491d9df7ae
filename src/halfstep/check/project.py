"""The settings of a project: `[tool.halfstep.check]` in the nearest pyproject.toml.

    [tool.halfstep.check]
    select = ["HS1", "HS2"]
    ignore = ["advice"]
    exclude = ["third_party", "*_generated.py"]
    respect-gitignore = true
    preview = false
    baseline = "halfstep-baseline.json"
    deepspeed = "0.16.4"
    gpu = "A100"
    transformers = "5.22.2"
    unsafe-fixes = true

    [tool.halfstep.check.with]
    torch = "2.11.0"

    [tool.halfstep.check.per-file-ignores]
    "tests/*" = ["HS104"]

The first file upwards that has the table is used; the search ends at the root of the repository.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from halfstep.check.pins import Pin, parse_pin
from halfstep.check.select import parse_selectors
from halfstep.errors import SettingError, unknown

__all__ = ["PerFileIgnore", "Project", "find_project"]

_KEYS = (
    "select", "ignore", "per-file-ignores", "exclude", "respect-gitignore", "preview", "baseline", "deepspeed", "gpu",
    "transformers", "unsafe-fixes", "with",
)  # fmt: skip


@dataclass(frozen=True)
class PerFileIgnore:
    """Selectors that are ignored in the files that match a pattern."""

    pattern: str
    selectors: tuple[str, ...]


@dataclass(frozen=True)
class Project:
    """A project's settings for its checks; `root` is the folder of its pyproject.toml."""

    root: Path | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    per_file_ignores: tuple[PerFileIgnore, ...] = ()
    exclude: tuple[str, ...] = ()
    deepspeed: str | None = None
    gpu: str | None = None
    transformers: str | None = None
    respect_gitignore: bool = True
    preview: bool = False
    baseline: str | None = None  # relative to `root`
    unsafe_fixes: bool = False
    pins: tuple[Pin, ...] = ()  # the versions of its libraries, from the table "with"


@cache
def find_project(folder: Path) -> Project:
    """The settings that apply in a folder; all defaults if no pyproject.toml has the table."""
    for parent in (folder, *folder.parents):
        file = parent / "pyproject.toml"
        table = _table(file) if file.is_file() else None
        if table is not None:
            return _read(table, file)
        if (parent / ".git").exists():
            break
    return Project()


def _table(file: Path) -> dict[str, Any] | None:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise SettingError(f"Cannot read {file}: {error}.") from None
    if "halfstep" not in text:
        return None
    import tomllib

    try:
        table: Any = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingError(f"{file} is not valid TOML: {error}.") from None
    for key in ("tool", "halfstep", "check"):
        table = table.get(key) if isinstance(table, dict) else None
    if table is None:
        return None
    if not isinstance(table, dict):
        raise SettingError(f"{file}: tool.halfstep.check is {table!r}; make it a table, [tool.halfstep.check].")
    return table


def _read(table: dict[str, Any], file: Path) -> Project:
    where = f"{file}, [tool.halfstep.check]"
    for key in table:
        if key not in _KEYS:
            raise unknown(f"key in {where}:", key, _KEYS)
    ignores = table.get("per-file-ignores", {})
    if not isinstance(ignores, dict):
        raise SettingError(f"{where}: per-file-ignores is {ignores!r}; write a table of pattern = [codes].")
    return Project(
        file.parent,
        parse_selectors(_texts(table, "select", where), f"{where}, select"),
        parse_selectors(_texts(table, "ignore", where), f"{where}, ignore"),
        tuple(
            PerFileIgnore(pattern, parse_selectors(_texts(ignores, pattern, where), f"{where}, per-file-ignores"))
            for pattern in ignores
        ),
        _texts(table, "exclude", where),
        _text(table, "deepspeed", where),
        _text(table, "gpu", where),
        _text(table, "transformers", where),
        _flag(table, "respect-gitignore", where, default=True),
        _flag(table, "preview", where, default=False),
        _text(table, "baseline", where),
        _flag(table, "unsafe-fixes", where, default=False),
        _pins(table, where),
    )


def _pins(table: dict[str, Any], where: str) -> tuple[Pin, ...]:
    versions = table.get("with", {})
    if not isinstance(versions, dict) or not all(isinstance(version, str) for version in versions.values()):
        raise SettingError(f'{where}: with is {versions!r}; write a table such as torch = "2.11.0".')
    return tuple(
        replace(parse_pin(f"{name}={version}", f"{where}, with"), origin="pyproject.toml")
        for name, version in versions.items()
    )


def _texts(table: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise SettingError(f"{where}: {key} is {value!r}; write a list of strings.")
    return tuple(value)


def _flag(table: dict[str, Any], key: str, where: str, *, default: bool) -> bool:
    value = table.get(key, default)
    if not isinstance(value, bool):
        raise SettingError(f"{where}: {key} is {value!r}; write true or false.")
    return value


def _text(table: dict[str, Any], key: str, where: str) -> str | None:
    value = table.get(key)
    if value is not None and not isinstance(value, str):
        raise SettingError(f"{where}: {key} is {value!r}; write a string.")
    return value
