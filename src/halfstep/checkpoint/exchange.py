"""Two directories change places.

Linux does it in one call, so that at every moment each name refers to a complete directory. Elsewhere it takes two renames;
a process that dies between them leaves the old directory under the name `<name>.old-*`, which nothing removes.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
from pathlib import Path

__all__ = ["exchange"]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


def exchange(first: Path, second: Path) -> None:
    """Let two directories of one parent change places."""
    if _exchange_at_once(first, second):
        return
    aside = second.with_name(f"{second.name}.old-{secrets.token_hex(8)}")
    second.rename(aside)
    try:
        first.rename(second)
    except BaseException:
        aside.rename(second)
        raise
    aside.rename(first)


def _exchange_at_once(first: Path, second: Path) -> bool:
    """Whether the operating system exchanged the two; older kernels and some filesystems cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    done: int = rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return done == 0
