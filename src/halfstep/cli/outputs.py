"""Whether a file that a command is to write can be written, asked before the work and not after it."""

from __future__ import annotations

from pathlib import Path

from halfstep.errors import SettingError

__all__ = ["check_file"]


def check_file(option: str, path: Path) -> None:
    """Raise if `path`, the value of `option`, cannot be written; an existing file keeps its content."""
    try:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise SettingError(f"{option} {path} cannot be written: pass a file name in an existing directory.")
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise SettingError(
            f"{option} {path} cannot be written: {error.strerror or error}. Pass another file."
        ) from error
