"""What a rule is: a code, a name, why it matters, what is wrong and right, and a function over facts.

One class per rule, one file per family under `rules/`. The class carries everything that is said about the rule, so
that the tests, docs/rules.md and `halfstep explain HS104` are made from it and nothing is written twice:

    class ClipBeforeUnscale(ScriptRule):
        "Gradients are clipped while still multiplied by the loss scale."
        code = "HS104"
        name = "clip-before-unscale"         # names the fault, not the cure
        severity = "error"
        reason = "..."                       # a paragraph: what happens in training, with numbers
        bad = ("...", )                      # whole small scripts, each of which gives this finding
        good = ("...", )                     # and their right forms, which give no finding at all
        references = ("https://...",)        # public incidents, documentation, or how the reason was measured

        def check(self, script): yield self.finding(...)

A rule is silent when it cannot decide from the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from halfstep.check.files.source import Settings
from halfstep.check.finding import Finding, Fix, Severity

if TYPE_CHECKING:
    from halfstep.check.config.config import Config
    from halfstep.check.script.script import Script

__all__ = ["ConfigRule", "Rule", "ScriptRule"]


class Rule:
    """One mistake that can be recognised: what it is called, why it matters, how it looks."""

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity]
    reason: ClassVar[str]
    bad: ClassVar[tuple[str, ...]]
    good: ClassVar[tuple[str, ...]]
    references: ClassVar[tuple[str, ...]]
    settings: ClassVar[Settings] = Settings()  # what the cases are checked under, where a rule needs a GPU or a version

    @classmethod
    def title(cls) -> str:
        """The rule in one sentence: the first line of its docstring."""
        return (cls.__doc__ or "").strip().split("\n", 1)[0]

    @classmethod
    def finding(
        cls,
        where: tuple[str, int, int, int | None, int | None, int | None],
        message: str,
        *,
        instead: str = "",
        fix: Fix | None = None,
        severity: Severity | None = None,
    ) -> Finding:
        """A finding of this rule; `where` is path, line, column, end line, end column, cell."""
        path, line, column, end_line, end_column, cell = where
        return Finding(
            cls.code,
            cls.name,
            severity or cls.severity,
            path,
            line,
            column,
            message,
            instead,
            end_line,
            end_column,
            cell,
            fix,
        )


class ScriptRule(Rule):
    """A rule over the facts of one Python script or notebook."""

    def check(self, script: Script) -> Iterator[Finding]:
        """The findings in `script`."""
        raise NotImplementedError


class ConfigRule(Rule):
    """A rule over one configuration: a file, or a dictionary or call in a script."""

    def check(self, config: Config) -> Iterator[Finding]:
        """The findings in `config`."""
        raise NotImplementedError
