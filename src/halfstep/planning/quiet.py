"""Keeps the Engine's own messages out of a plan: a rehearsed choice is made again, and said, when training starts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from halfstep.events import logger

__all__ = ["quietly"]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Say nothing but warnings inside this block."""
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
