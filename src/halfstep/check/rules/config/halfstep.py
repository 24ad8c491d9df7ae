"""Rules for Halfstep's precision setting in scripts."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.finding import Finding
from halfstep.check.rule import ConfigRule, Rule
from halfstep.errors import SettingError

__all__ = ["RULES"]


class BadPolicy(ConfigRule):
    """The `precision` passed to Halfstep is not a valid policy."""

    code = "HS286"
    name = "bad-policy"
    severity = "error"
    reason = (
        "A policy is a preset name followed by key=value pairs. An invalid or contradictory policy raises a "
        "SettingError when the Engine is created, possibly after hours in a job queue."
    )
    bad = (
        "import halfstep\n\nengine = halfstep.Engine(model, optimizer, precision='bf16-leen')\n",
        "from halfstep import Policy\n\npolicy = Policy.parse('fp16,loss_scale=-1')\n",
    )
    good = (
        "import halfstep\n\nengine = halfstep.Engine(model, optimizer, precision='bf16-lean,states=8bit')\n",
        "import halfstep\n\nengine = halfstep.Engine(model, optimizer, precision='auto')\n",
    )
    references = ("measured: the text is parsed as docs/policies.md describes",)

    def check(self, config: Config) -> Iterator[Finding]:
        """Parse the text with the Engine's parser."""
        entry = config.entry("precision")
        value = config.value("precision") if config.kind == "halfstep" else None
        if entry is None or not isinstance(value, str):
            return
        is_auto = config.origin == "Engine" and value.strip().casefold() == "auto"
        from halfstep.precision.policy import parse_with_notes  # takes 10 ms; only scripts that use Halfstep need it

        try:
            policy = None if is_auto else parse_with_notes(value)[0]
        except SettingError as error:
            yield self.finding(
                config.where(entry), str(error), instead="See docs/policies.md for the presets and keys."
            )
            return
        if policy is not None and policy.compute == "fp8" and config.origin == "Engine":
            message = "The Engine does not support fp8 training yet and raises a SettingError for this preset."
            yield self.finding(config.where(entry), message, instead="Use bf16-lean.")


RULES: tuple[type[Rule], ...] = (BadPolicy,)
