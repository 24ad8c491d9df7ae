"""Files that train nothing that matters: tests and benchmarks, by their path."""

from __future__ import annotations

import re

from halfstep.check.regex import regex
from halfstep.check.script.script import Script

__all__ = ["is_exercise"]

_FOLDER = regex(r"(^|/)(tests?|testing|bench\w*)/")
_FILE = regex(r"(^|/)(test_|conftest|bench)[^/]*$|_(test|bench\w*)\.py$")
_IS_TEST = regex(r"^\s*(async )?def test_|^\s*class Test|\b(pytest|unittest)\b", re.MULTILINE)
_SAVES = regex(r"\bsave(_pretrained|_model|_checkpoint|_state|_weights|_file)?\(")


def is_exercise(script: Script) -> bool:
    """Whether a file is a test or a benchmark; not a `test_run.py` without tests that saves what it trains."""
    path = script.source.path.replace("\\", "/")
    name = path.rpartition("/")[2]
    if _FOLDER.search(path):
        return True
    if not _FILE.search(name):
        return False
    text = script.source.text
    return not (name.startswith("test_") and _SAVES.search(text) and not _IS_TEST.search(text))
