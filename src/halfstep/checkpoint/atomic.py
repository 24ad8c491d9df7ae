"""Directories that appear on disk all at once: written aside, synced, renamed.

Everything is written to a temporary directory in the same parent and synced to disk: each file, then the directory. One
rename then moves it into place, and the parent is synced. A process that dies at any moment leaves either nothing or the
complete directory, and at worst a `.tmp-*` directory that nothing reads. A directory that is overwritten changes places
with the new one once that is complete (`exchange.py`), and is removed after that.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfstep.checkpoint.exchange import exchange
from halfstep.checkpoint.files import is_checkpoint_file
from halfstep.errors import HalfstepError, SettingError
from halfstep.hardware.units import bytes_text, few

__all__ = ["TEMPORARY", "aside_of", "cannot_save", "check_target", "folder_lock", "publish", "write_file"]

TEMPORARY = ".tmp-"


@contextmanager
def folder_lock(folder: Path, *, exclusive: bool) -> Iterator[bool]:
    """Lock a folder for saving into it (shared) or cleaning it up (exclusive); yields whether that is allowed.

    The lock ends with its process, so a killed save leaves none behind. Without file locks (Windows, some network
    filesystems) saving is allowed and cleaning up is not.
    """
    if sys.platform == "win32":
        yield not exclusive
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError:
            yield not exclusive
        else:
            yield True
    finally:
        os.close(handle)


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise where writing to `path` would destroy something: only a checkpoint may be overwritten, and only on request."""
    if not os.path.lexists(path):
        return
    entries = None if path.is_symlink() or not path.is_dir() else sorted(entry.name for entry in path.iterdir())
    if entries == []:
        return
    if not overwrite:
        raise SettingError(
            f"{path} exists already and is not overwritten; save under another name, remove it first, or pass overwrite=True."
        )
    foreign = [name for name in entries or () if not is_checkpoint_file(name)]
    if entries is None or "manifest.json" not in entries or foreign:
        contents = "" if entries is None else f" (it has {few(foreign or entries)})"
        raise SettingError(
            f"{path} is not a checkpoint directory{contents}, and overwrite=True replaces nothing else; save under another name."
        )


@contextmanager
def aside_of(path: Path) -> Iterator[Path]:
    """A temporary directory for `publish`; if this block raises, it is removed."""
    parent = path.parent
    if not parent.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        _sync(parent.parent)
    aside = parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    with folder_lock(parent, exclusive=False):
        try:
            aside.mkdir()
            yield aside
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def publish(aside: Path, path: Path) -> None:
    """Sync the directory `aside`, whose files are synced already, and move it to `path`."""
    _sync(aside)
    overwritten = path.is_dir() and any(path.iterdir())
    (exchange if overwritten else Path.replace)(aside, path)
    try:
        _sync(path.parent)
    except BaseException:
        exchange(aside, path) if overwritten else path.rename(aside)
        raise
    if overwritten:
        shutil.rmtree(aside, ignore_errors=True)


def write_file(path: Path, blocks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file and sync it; returns its size and SHA-256 as the manifest has them."""
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("xb") as file:
        for block in blocks:
            file.write(block)
            digest.update(block)
            num_bytes += len(block)
            del block  # it keeps the copy of a tensor alive
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}


def _sync(folder: Path) -> None:
    """Make the entries of a folder durable; Windows has no such call and needs none."""
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # some network filesystems cannot sync a folder
                raise
        finally:
            os.close(handle)


def cannot_save(path: Path, error: OSError, needed: int) -> HalfstepError:
    """The error for a checkpoint whose writing failed."""
    try:
        free = f"{bytes_text(shutil.disk_usage(path.parent).free)} are free"
    except OSError:
        free = "the free space is unknown"
    return HalfstepError(
        f"The checkpoint {path} could not be saved: {error.strerror or error}. It needs {bytes_text(needed)} and {free} in "
        f"{path.parent}. The partial checkpoint was removed and earlier ones are untouched; free disk space, check the "
        "write permission, or save to another folder."
    )
