"""The rule for command-line options that switch precision."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.finding import Finding
from halfstep.check.rule import ConfigRule, Rule

__all__ = ["RULES"]

_PRECISION = re.compile(
    r"--?(?:use[-_]|enable[-_]|do[-_])?(?:fp16|bf16|tf32|fp8|amp|half|autocast|b?float16|mixed[-_]?precision)(?:[-_]\w+)?"
)


class OptionOfTypeBool(ConfigRule):
    """A precision option of argparse has `type=bool`, which is true for every text."""

    code = "HS279"
    name = "option-of-type-bool"
    severity = "warning"
    reason = (
        "argparse calls `type` with the text of the option, and `bool('False')` is True, as is `bool('0')`: only an empty "
        "text is false. `--bf16 False` therefore enables bf16, and a launcher that passes every hyperparameter as text "
        "cannot disable it."
    )
    bad = (
        "import argparse\n\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--bf16', type=bool, default=True)\n",
        "from argparse import ArgumentParser\n\nparser = ArgumentParser()\n"
        "parser.add_argument('-a', '--use_amp', type=bool, default=False)  # with fp16\n",
    )
    good = (
        "import argparse\n\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--bf16', action=argparse.BooleanOptionalAction, default=True)\n",
        "import argparse\n\nparser = argparse.ArgumentParser()\nparser.add_argument('--fp16', action='store_true')\n",
        "import argparse\n\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--fp16', action='store_true')\nparser.add_argument('--shuffle', type=bool, default=True)\n",
    )
    references = ("https://docs.python.org/3/library/argparse.html#type",)

    def check(self, config: Config) -> Iterator[Finding]:
        """Report an option whose name switches precision."""
        flag = config.value("flag")
        if config.kind == "argparse" and isinstance(flag, str) and _PRECISION.fullmatch(flag):
            message = f"`{flag}` has `type=bool`: `{flag} False` passes the text 'False', which is true."
            instead = "Use `action=argparse.BooleanOptionalAction`, or `action='store_true'`."
            yield self.finding(config.where(config.root), message, instead=instead)


RULES: tuple[type[Rule], ...] = (OptionOfTypeBool,)
