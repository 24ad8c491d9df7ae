"""The base classes of rules, and how to write a rule.

How to write a rule
-------------------
A rule is one class in a module under `rules/`, one module per family. The class contains everything that is known about
the rule: the tests run its cases, and docs/rules.md and `halfstep explain HS104` are generated from it.

1. Choose the module, or add one: `rules/script/`, `rules/scaler/`, `rules/weights/` and `rules/frameworks/` for Python scripts and notebooks,
   `rules/config/` for configurations. Every module in these packages is loaded; there is no list to extend.
2. Derive from the base class that provides the facts you need:

       ScriptRule      check(script)                     a script: imports, calls, scalers, autocast regions
       TraceRule       judge(script, trace, index)       one event of a training loop   (halfstep.check.script.flow.order)
       ConfigRule      check(config)                     one configuration of any tool
       KindRule        inspect(config)                   one configuration of the tool `kind`
       DeepSpeedRule   inspect(deepspeed, config)        one DeepSpeed configuration    (...config.deepspeed_facts)
       JointRule       inspect(use, config)              a script with the DeepSpeed configuration it runs (...config.joint)

3. Write the class and add it to the module's `RULES`:

       class ClipBeforeUnscale(TraceRule):
           "Gradients are clipped while still multiplied by the loss scale."    # the title, one sentence
           code = "HS104"                       # HS1xx and HS6xx scripts, HS2xx configurations, HS3xx hardware, HS5xx recipes; never reused
           name = "clip-before-unscale"         # names the fault, not the fix
           severity = "error"                   # error: training is wrong; warning: probably; advice: could be better
           reason = "..."                       # a paragraph: what happens in training, with numbers
           bad = ("...",)                       # complete small scripts, each of which has this finding
           good = ("...",)                      # their correct forms, which have no finding at all
           references = ("https://...",)        # public incidents, documentation, or how the reason was measured
           settings = Settings(...)             # optional: the GPU or DeepSpeed version that the cases are checked with
           preview = True                       # optional: not stable yet, so it runs only with --preview
           words = ("set_detect_anomaly",)      # optional: names that this rule alone looks for; scripts are read by words
           lines = ("cross_entropy",)           # optional: the same in scripts that also mention a 16-bit format or an option
           kinds = ("clip",)                    # of a TraceRule only: the events that it judges

           def judge(self, script, trace, index):
               return self.finding(script.where(trace[index].node), "what happens here", instead="what to write")

4. Where one edit of the text is certain to be right, pass it as `fix=Fix(title, edits)`. `halfstep.check.script.syntax.edits`
   and `halfstep.check.config.edits` build them. A fix that is right only under an assumption is `Fix(..., safe=False)`,
   applied with --unsafe-fixes. Add the code to `registry.FIXABLE`. Each fix is verified: the file is checked again after it is applied.
   A rule about what happens in one run, whatever the script offers, belongs to `registry.PER_VALUE`: it is also checked
   in the script for each value of a precision setting (`halfstep.check.script.assumed`). What follows from the order of calls in
   one run may be easier to see in simulated runs (`halfstep.check.simulation`), which report under the codes of rules.
5. Regenerate docs/rules.md (`python -m halfstep.report.rules_page > docs/rules.md`).

A rule reports nothing when it cannot decide from the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from halfstep.check.finding import Finding, Fix, Place, Severity
from halfstep.check.settings import Settings

__all__ = ["ConfigRule", "KindRule", "Rule", "ScriptRule"]


class Rule:
    """One mistake that can be recognised: its name, why it matters, and examples of it."""

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity]
    reason: ClassVar[str]
    bad: ClassVar[tuple[str, ...]]
    good: ClassVar[tuple[str, ...]]
    references: ClassVar[tuple[str, ...]]
    settings: ClassVar[Settings] = Settings()
    preview: ClassVar[bool] = False
    words: ClassVar[tuple[str, ...]] = ()  # a script or function that contains one is read; see `script.relevant`
    lines: ClassVar[tuple[str, ...]] = ()  # a function that contains one is read, if its script mentions precision

    @classmethod
    def title(cls) -> str:
        """The rule in one sentence: the first line of its docstring."""
        return (cls.__doc__ or "").strip().split("\n", 1)[0]

    @classmethod
    def finding(
        cls,
        where: Place,
        message: str,
        *,
        instead: str = "",
        fix: Fix | None = None,
        severity: Severity | None = None,
    ) -> Finding:
        """A finding of this rule; `severity` replaces the rule's own where one case is milder or worse."""
        return Finding(
            cls.code,
            cls.name,
            severity or cls.severity,
            where.path,
            where.line,
            where.column,
            message,
            instead,
            where.end_line,
            where.end_column,
            where.cell,
            fix,
        )


# The facts are typed where rules override `check`; their types live in packages above this module.
class ScriptRule(Rule):
    """A rule over one Python script or notebook, a `halfstep.check.script.script.Script`."""

    def check(self, script: Any) -> Iterator[Finding]:
        """The findings in `script`."""
        raise NotImplementedError


class ConfigRule(Rule):
    """A rule over one configuration (a file, or a dictionary or call in a script), a `...config.config.Config`."""

    def check(self, config: Any) -> Iterator[Finding]:
        """The findings in `config`."""
        raise NotImplementedError


class KindRule(ConfigRule):
    """A rule over the configurations of one tool."""

    kind: ClassVar[str]  # as `halfstep.check.config.kind` names it

    def check(self, config: Any) -> Iterator[Finding]:
        """The findings in `config`, if it configures this tool."""
        if config.kind == self.kind:
            yield from self.inspect(config)

    def inspect(self, config: Any) -> Iterator[Finding]:
        """The findings in one configuration of this tool."""
        raise NotImplementedError
