"""Versions of packages, compared as PEP 440 orders them.

Enough of PEP 440 for what packages publish: "2.11", "2.5.0rc10", "1.13.1.post1", "2.13.0+cpu". The local part after
"+" describes a build, not a release, and is ignored. A requirement such as ">=2.11,<2.15" is a list of bounds that all
apply; the empty one matches every version.
"""

from __future__ import annotations

import re
from functools import cache

__all__ = ["is_version", "matches", "version_key"]

Key = tuple[tuple[int, ...], tuple[int, int], int, int]

_VERSION = re.compile(
    r"v?(?P<release>\d+(?:\.\d+)*)(?:[-_.]?(?P<pre>a|alpha|b|beta|c|rc|pre|preview)[-_.]?(?P<number>\d*))?"
    r"(?:[-_.]?(?:post|rev|r)[-_.]?(?P<post>\d*))?(?:[-_.]?dev[-_.]?(?P<dev>\d*))?(?:\+[a-z0-9._-]*)?"
)
_STAGES = {"a": 0, "alpha": 0, "b": 1, "beta": 1, "c": 2, "rc": 2, "pre": 2, "preview": 2}
_FINAL = (3, 0)
_DEV = (-1, 0)  # "2.15.0.dev1" is older than "2.15.0a1"
_BOUND = re.compile(r"(>=|<=|==|<|>)\s*(\S+)")


def is_version(text: str) -> bool:
    """Whether a text is a version that can be compared."""
    return _VERSION.fullmatch(text.strip().lower()) is not None


@cache
def version_key(text: str) -> Key:
    """A version as a key that sorts by age; ValueError if it is not a version."""
    match = _VERSION.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a version. Write it like 2.11.0.")
    release = [int(part) for part in match["release"].split(".")]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    stage = (_STAGES[match["pre"]], int(match["number"] or 0)) if match["pre"] else _FINAL
    if match["dev"] is not None and not match["pre"] and match["post"] is None:
        stage = _DEV
    post = -1 if match["post"] is None else int(match["post"] or 0)
    dev = 10**12 if match["dev"] is None else int(match["dev"] or 0)
    return tuple(release), stage, post, dev


def matches(version: str, requirement: str) -> bool:
    """Whether a version is within every bound of a requirement such as ">=2.11,<2.15"."""
    key = version_key(version)
    for part in filter(None, (part.strip() for part in requirement.split(","))):
        bound = _BOUND.fullmatch(part)
        if bound is None:
            raise ValueError(f"{part!r} is not a bound. Write it like >=2.11.")
        limit = version_key(bound[2])
        inside = {
            ">=": key >= limit,
            "<=": key <= limit,
            "==": key == limit,
            "<": key < limit,
            ">": key > limit,
        }[bound[1]]
        if not inside:
            return False
    return True
