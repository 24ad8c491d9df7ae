"""Keeps the Engine's messages out of a plan: it makes the same choices again, and logs them, when training starts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from halfstep.events import logger

__all__ = ["quietly"]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Log only warnings inside this block."""
    before = logger.level
    logger.setLevel(max(before, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(before)
