"""HS133: command-line options that switch precision."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.script import Script
from halfstep.check.script.values import argument, constant, text_of

__all__ = ["RULES"]

_PRECISION = re.compile(r"(^|_)(use_?|enable_?|with_?|no_?)?(amp|fp16|bf16|fp32|tf32|half|float16|bfloat16|mixed_?precision|mixed|autocast|16bit|fp8)(_|$)")  # fmt: skip


class BooleanOption(ScriptRule):
    """A precision option is declared with type=bool and cannot be switched off."""

    code = "HS133"
    name = "precision-option-bool"
    severity = "warning"
    reason = (
        "argparse calls the type with the text of the option, and `bool` of any non-empty text is True: `--fp16 False` and `--fp16 0` "
        "both turn fp16 on, silently. A run that is meant to be in float32 is not."
    )
    bad = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--fp16', type=bool, default=False)\n",
    )
    good = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--fp16', action='store_true')\n",
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--fp16', action=argparse.BooleanOptionalAction)\n",
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--shuffle', type=bool, default=False)\n",
    )
    references = (
        "https://docs.python.org/3/library/argparse.html#type",
        "https://github.com/python/cpython/issues/65407",
    )
    words = ("type=bool",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Options named after a precision whose type is bool."""
        for call, _ in script.outline.calls.get("add_argument", ()):
            kind = argument(call, None, "type")
            flags = [str(constant(a)) for a in call.args if isinstance(constant(a), str)]
            if kind is None or text_of(kind) != "bool" or not flags or not flags[-1].startswith("-"):
                continue
            name = flags[-1].lstrip("-").replace("-", "_").lower()
            if _PRECISION.search(name):
                yield self.finding(
                    script.where(call),
                    f"`{flags[-1]} False` is True: bool of a non-empty string",
                    instead="action=argparse.BooleanOptionalAction, or action='store_true'",
                )


RULES: tuple[type[Rule], ...] = (BooleanOption,)
