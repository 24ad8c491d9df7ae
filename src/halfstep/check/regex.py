"""Regular expressions that are compiled when they are first used.

The rules for scripts have some 300 and one check uses about 50 of them; compiling the others took 50 ms of 300 at start.
"""

from __future__ import annotations

import re
from typing import Any, AnyStr, Generic, cast

__all__ = ["regex"]


class _Deferred(Generic[AnyStr]):
    """Stands for a compiled expression and gets its methods from there."""

    def __init__(self, text: AnyStr, flags: int) -> None:
        self._text: AnyStr = text
        self._flags = flags

    def __getattr__(self, name: str) -> Any:
        # Kept as an attribute, so that Python finds it without this call from then on.
        self.__dict__[name] = value = getattr(re.compile(self._text, self._flags), name)
        return value


def regex(text: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """The expression `text` for a constant of a module: like `re.compile`, but later."""
    return cast("re.Pattern[AnyStr]", _Deferred(text, flags))
