"""Small rules that look for words in the text, to test the machinery around rules without real rules."""

import re

from halfstep.check import registry, runner
from halfstep.check.files.problems import RULES as FILE_RULES
from halfstep.check.finding import Edit, Fix
from halfstep.check.rule import ScriptRule
from halfstep.check.script.syntax.relevant import RuleWords


class WordRule(ScriptRule):
    """A word that is not wanted."""

    word = ""
    cure = None
    safe = True
    severity = "error"
    reason = "Toy rules have no reason beyond the test."
    bad = ()
    good = ()
    references = ("https://example.org/toy",)

    def check(self, script):
        text = script.source.text
        for match in re.finditer(rf"\b{self.word}\b", text):
            line = text.count("\n", 0, match.start()) + 1
            column = match.start() - (text.rfind("\n", 0, match.start()) + 1) + 1
            where = script.source.place(line, column, line, column + len(self.word))
            edits = (Edit(*match.span(), self.cure or ""),)
            fix = None if self.cure is None else Fix(f"write {self.cure}", edits, self.safe)
            yield self.finding(where, f"{self.word} is here", instead=self.cure or "", fix=fix)


class Bad(WordRule):
    """BAD becomes FINE."""

    code, name, word, cure = "HS901", "bad-word", "BAD", "FINE"


class Hmm(WordRule):
    """HMM has no fix."""

    code, name, word, severity = "HS902", "hmm-word", "HMM", "advice"


class Crash(WordRule):
    """CRASH breaks the rule itself."""

    code, name, word = "HS903", "crash-word", "CRASH"

    def check(self, script):
        if "CRASH" in script.source.text:
            raise KeyError("CRASH")
        return iter(())


class Breaks(WordRule):
    """The fix of BREAK does not parse."""

    code, name, word, cure = "HS904", "break-word", "BREAK", "(("


class Worse(WordRule):
    """The fix of WORSE causes a new error."""

    code, name, word, cure = "HS905", "worse-word", "WORSE", "BAD"


class Chain(WordRule):
    """The fix of CHAIN leads to a LINK, which has a fix as well."""

    code, name, word, cure, severity = "HS906", "chain-word", "CHAIN", "LINK", "warning"


class Link(WordRule):
    """The second link of the chain."""

    code, name, word, cure, severity = "HS907", "link-word", "LINK", "END", "advice"


class Odd(WordRule):
    """The fix of ODD needs review."""

    code, name, word, cure, safe = "HS908", "odd-word", "ODD", "EVEN", False


class Soon(WordRule):
    """SOON is in preview."""

    code, name, word, preview = "HS909", "soon-word", "SOON", True


TOYS = (Bad, Hmm, Crash, Breaks, Worse, Chain, Link, Odd, Soon)


def use_toys(monkeypatch):
    """Replace the real rules with the toy rules."""

    def rules_of(group):
        return {"files": FILE_RULES, "script": TOYS}.get(group, ())

    monkeypatch.setattr(registry, "rules_of", rules_of)
    monkeypatch.setattr(runner, "rules_of", rules_of)
    monkeypatch.setattr(runner, "words_of_rules", lambda _group: RuleWords(tuple(rule.word for rule in TOYS)))
    monkeypatch.setattr(runner, "with_usable_fix", lambda finding, source: finding)  # the words are not variables
