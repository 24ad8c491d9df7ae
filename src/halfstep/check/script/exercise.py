"""Files that train nothing that matters: tests and benchmarks, by their path."""

from __future__ import annotations

import re

from halfstep.check.regex import regex
from halfstep.check.script.script import Script

__all__ = ["is_exercise", "is_test"]

_TESTS = regex(r"(^|/)(tests?|testing)/|(^|/)(test_|conftest|bench)[^/]*$|_(test|bench\w*)\.py$")
_FOLDER = regex(r"(^|/)(tests?|testing|bench\w*)/")
_FILE = regex(r"(^|/)(test_|conftest|bench)[^/]*$|_(test|bench\w*)\.py$")
_IS_TEST = regex(r"^\s*(async )?def test_|^\s*class Test|\b(pytest|unittest)\b", re.MULTILINE)
_TRAINER = regex(r"\btrainer\.train\(")
_SAVES = regex(r"\bsave(_pretrained|_model|_checkpoint|_state|_weights|_file)?\(")


def is_exercise(script: Script) -> bool:
    """Whether a file is a test or a benchmark; not a `test_run.py` that saves what it trains, or a `run_test.py` with a Trainer, without tests."""
    path = script.source.path.replace("\\", "/")
    name = path.rpartition("/")[2]
    if _FOLDER.search(path):
        return True
    if not _FILE.search(name):
        return False
    text = script.source.text
    is_run = name.endswith("_test.py") and bool(_TRAINER.search(text))
    is_run |= name.startswith("test_") and bool(_SAVES.search(text))
    return not is_run or bool(_IS_TEST.search(text))


def is_test(script: Script) -> bool:
    """Whether a file itself is a test or a benchmark, and not only in a folder with benchmarks, where models are trained as well."""
    path = script.source.path.replace("\\", "/")
    return bool(_TESTS.search(path)) and is_exercise(script)
