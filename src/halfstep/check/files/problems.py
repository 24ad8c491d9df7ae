"""HS0xx: files that cannot be checked, and comments that silence nothing.

Whatever stands in the way of checking a file becomes one finding at one place, like any other: it can be selected,
ignored and shown in every format. These rules have no `check`; the readers that meet the obstacle make the finding.
They are advice: they say that a file was not checked, which is no mistake in its precision. A Python 2 script, or syntax
newer than this interpreter, is right where it is used. Only a configuration that does not parse is an error (HS004),
because the library it is written for refuses it too.
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
    severity = "advice"
    reason = (
        "A file that cannot be opened was not checked, and a green result would be a lie about it. It vanished after it "
        "was listed, it may not be read, or it is a device, a socket or a broken link."
    )
    bad = ()
    good = ()
    references = ("measured: tests/check/test_runner.py opens a vanished, an unreadable and a special file",)


class NotText(Rule):
    """The file holds bytes that are not text in its encoding."""

    code = "HS002"
    name = "not-text"
    severity = "advice"
    reason = (
        "Python reads a source file as UTF-8 unless its first two lines name another encoding, and stops at the first byte "
        "that does not fit; JSON and YAML are UTF-8 too. A zero byte means a binary file or UTF-16. Nothing in such a "
        "file was checked."
    )
    bad = ()
    good = ()
    references = ("https://peps.python.org/pep-0263/", "https://www.rfc-editor.org/rfc/rfc8259#section-8.1")


class FileTooLarge(Rule):
    """The file is too large to be a script or a configuration."""

    code = "HS003"
    name = "file-too-large"
    severity = "advice"
    reason = (
        "Scripts and configurations are kilobytes. A megabyte of Python or JSON is generated code or data, and analysing it "
        "would take the time of a thousand real scripts. It was left alone. Notebooks, which carry their output, "
        "may be larger."
    )
    bad = ()
    good = ()
    references = ("measured: 11.7 MB of torch's own files took 8.2 s to parse on one core, so 1 MiB takes about 0.7 s",)


class SyntaxFault(Rule):
    """The file is not valid Python, JSON or YAML."""

    code = "HS004"
    name = "syntax-error"
    severity = "advice"
    reason = (
        "What does not parse was not checked. The place is where the parser gave up, which is often just after the "
        "mistake. In a notebook, the cells that do parse are checked without it."
    )
    bad = ("import torch\n\nscaler = torch.amp.GradScaler('cuda'\n", "print 'Python 2'\n")
    good = ("import torch\n\nmodel = torch.nn.Linear(2, 2)\n",)
    references = ("https://docs.python.org/3/reference/grammar.html", "https://www.rfc-editor.org/rfc/rfc8259")


class TooDeep(Rule):
    """The file is nested too deeply or is too involved to be analysed."""

    code = "HS005"
    name = "too-deep"
    severity = "advice"
    reason = (
        "Python itself refuses expressions nested beyond a few hundred levels, and so does the analysis. Such files are "
        "generated or hostile. The file was given up as a whole, within a bounded time."
    )
    bad = ("x = " + "-" * 20_000 + "1\n",)
    good = ()
    references = ("https://docs.python.org/3/library/ast.html#ast.parse",)


class CheckerFailure(Rule):
    """A rule failed on this file: a fault of Halfstep's, not of the file."""

    code = "HS006"
    name = "checker-failure"
    severity = "advice"
    reason = (
        "A rule that fails on one file says so here and the others go on, so that a fault of the checker never stops a "
        "build or hides other findings. Please report it with the file, or the smallest part of it that shows the failure."
    )
    bad = ()
    good = ()
    references = ("measured: tests/check/test_runner.py breaks a rule on purpose",)


class UnusedSuppression(Rule):
    """A suppression comment silences nothing."""

    code = "HS007"
    name = "unused-suppression"
    severity = "advice"
    reason = (
        "The comment was needed once, or stands on the wrong line. Left there, it will hide the next real finding of its "
        "code at that place."
    )
    bad = ("import torch\n\nx = torch.ones(2)  # halfstep: ignore[HS104] clipped elsewhere\n",)
    good = ("import torch\n\nx = torch.ones(2)\n",)
    references = ("measured: a suppression that matched no finding in this very run",)


class UnknownSuppression(Rule):
    """A suppression comment names a rule that does not exist."""

    code = "HS008"
    name = "unknown-suppression"
    severity = "advice"
    reason = "A misspelt code silences nothing, and the finding it was meant for is still reported."
    bad = ("import torch\n\nx = torch.ones(2)  # halfstep: ignore[HS999] reason\n",)
    good = ("import torch\n\nx = torch.ones(2)\n",)
    references = ("measured: compared with the list of rules in this version",)


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
