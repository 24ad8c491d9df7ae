"""HS0xx: files that cannot be checked, and suppression comments with no effect.

A file that cannot be checked gives one finding, which can be selected, ignored and printed in every format like any
other. These rules have no `check`: the reader that fails creates the finding. They are errors, as in other linters: a
file that was not checked must not pass as one without mistakes. A large file in a folder, which is generated code or
data, is advice, and so is a single cell of a notebook.
"""

from __future__ import annotations

from halfstep.check.rule import Rule

__all__ = [
    "RULES",
    "CannotRead",
    "CheckerFailure",
    "FileTooLarge",
    "NotText",
    "SyntaxFault",
    "TooDeep",
    "UnknownSuppression",
    "UnusedSuppression",
]


class CannotRead(Rule):
    """The file cannot be opened."""

    code = "HS001"
    name = "cannot-read"
    severity = "error"
    reason = (
        "A file that cannot be opened was not checked, so a result without findings would be misleading. It was deleted after "
        "it was listed, it is not readable, or it is a device, a socket or a broken link."
    )
    bad = ()
    good = ()
    references = ("measured: tests/check/test_runner.py opens a deleted, an unreadable and a special file",)


class NotText(Rule):
    """The file contains bytes that are invalid in its encoding."""

    code = "HS002"
    name = "not-text"
    severity = "error"
    reason = (
        "Python reads a source file as UTF-8 unless its first two lines declare another encoding, and fails at the first "
        "invalid byte; JSON, YAML and TOML are UTF-8 too. A zero byte indicates a binary file or UTF-16. The file was not checked."
    )
    bad = ()
    good = ()
    references = ("https://peps.python.org/pep-0263/", "https://www.rfc-editor.org/rfc/rfc8259#section-8.1")


class FileTooLarge(Rule):
    """The file is too large to be a script or a configuration."""

    code = "HS003"
    name = "file-too-large"
    severity = "error"
    reason = (
        "Scripts and configurations have kilobytes. A megabyte of Python or JSON is generated code or data, and analysing it "
        "would take as long as a thousand real scripts, so the file was not checked. Notebooks, which include their output, "
        "have a higher limit. In a folder this is advice."
    )
    bad = ()
    good = ()
    references = ("measured: 11.7 MB of torch's own files took 8.2 s to parse on one core, so 1 MiB takes about 0.7 s",)


class SyntaxFault(Rule):
    """The file is not valid Python, JSON, YAML or TOML."""

    code = "HS004"
    name = "syntax-error"
    severity = "error"
    reason = (
        "A file that does not parse was not checked, so a result without findings would be misleading. The location is where the "
        "parser failed, which is often just after the mistake. Python newer than the interpreter that runs Halfstep is rewritten "
        "and checked where possible. In a notebook, the cells that parse are still checked. A keyword argument that a call passes "
        "twice parses, but does not compile: such a script cannot be imported or run, and the rest of it is checked."
    )
    bad = ("import torch\n\nscaler = torch.amp.GradScaler('cuda'\n", "print 'Python 2'\n")
    good = ("import torch\n\nscaler = torch.amp.GradScaler('cuda')\n",)
    references = ("https://docs.python.org/3/reference/grammar.html", "https://www.rfc-editor.org/rfc/rfc8259")


class TooDeep(Rule):
    """The file is nested too deeply or too complex to analyse."""

    code = "HS005"
    name = "too-deep"
    severity = "error"
    reason = (
        "Python itself rejects expressions nested beyond a few hundred levels, and so does the analysis. Such files are "
        "generated or hostile. The analysis of the file was stopped after a bounded time, so nothing in it was checked."
    )
    bad = ("x = " + "-" * 20_000 + "1\n",)
    good = ()
    references = ("https://docs.python.org/3/library/ast.html#ast.parse",)


class CheckerFailure(Rule):
    """A rule crashed on this file: a bug in Halfstep, not in the file."""

    code = "HS006"
    name = "checker-failure"
    severity = "warning"
    reason = (
        "A rule that crashes on a file is reported here and the other rules continue, so a bug in the checker does not "
        "hide other findings. Please report it with the file, or the smallest part of it that reproduces the crash."
    )
    bad = ()
    good = ()
    references = ("measured: tests/check/test_runner.py breaks a rule on purpose",)


class UnusedSuppression(Rule):
    """A suppression comment has no effect."""

    code = "HS007"
    name = "unused-suppression"
    severity = "advice"
    reason = (
        "The comment is no longer needed, or it is on the wrong line. If it stays, it hides the next real finding of its code on "
        "that line."
    )
    bad = ("import torch\n\nx = torch.ones(2)  # halfstep: ignore[HS104] clipped elsewhere\n",)
    good = ("import torch\n\nx = torch.ones(2)\n",)
    references = ("measured: a suppression that matched no finding in this run",)


class UnknownSuppression(Rule):
    """A suppression comment names a rule that does not exist."""

    code = "HS008"
    name = "unknown-suppression"
    severity = "advice"
    reason = "A misspelt code suppresses nothing, and the finding it was meant for is still reported."
    bad = ("import torch\n\nx = torch.ones(2)  # halfstep: ignore[HS999] reason\n",)
    good = ("import torch\n\nx = torch.ones(2)\n",)
    references = ("measured: compared with the rules of this version",)


RULES: tuple[type[Rule], ...] = (
    CannotRead,
    NotText,
    FileTooLarge,
    SyntaxFault,
    TooDeep,
    CheckerFailure,
    UnusedSuppression,
    UnknownSuppression,
)
