"""Halfstep's own precision, where a script writes it down."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.finding import Finding
from halfstep.check.rule import ConfigRule, Rule
from halfstep.errors import SettingError

__all__ = ["RULES"]


class BadPolicy(ConfigRule):
    """The precision given to Halfstep is none that it can read."""

    code = "HS286"
    name = "bad-policy"
    severity = "error"
    reason = (
        "A policy is a preset and key=value pairs after it. What cannot be read, or contradicts itself, raises a SettingError when "
        "the Engine is made, which may be hours into a queue."
    )
    bad = (
        "import halfstep\n\nengine = halfstep.Engine(model, optimizer, precision='bf16-leen')\n",
        "from halfstep import Policy\n\npolicy = Policy.parse('fp16,loss_scale=-1')\n",
    )
    good = (
        "import halfstep\n\nengine = halfstep.Engine(model, optimizer, precision='bf16-lean,states=8bit')\n",
        "import halfstep\n\nengine = halfstep.Engine(model, optimizer, precision='auto')\n",
    )
    references = ("measured: the text goes through the parser of docs/policies.md",)

    def check(self, config: Config) -> Iterator[Finding]:
        """The text through the same parser as the Engine's."""
        found = config.entry("precision")
        value = config.value("precision") if config.kind == "halfstep" else None
        if found is None or not isinstance(value, str):
            return
        is_auto = config.origin == "Engine" and value.strip().casefold() == "auto"
        from halfstep.precision.policy import parse_with_notes  # 10 ms that only scripts with Halfstep in them need

        try:
            policy = None if is_auto else parse_with_notes(value)[0]
        except SettingError as error:
            yield self.finding(
                config.where(found), str(error), instead="See docs/policies.md for the presets and keys."
            )
            return
        if policy is not None and policy.compute == "fp8" and config.origin == "Engine":
            message = "fp8 is a preset with a name only: training in it is not built yet, and the Engine refuses it."
            yield self.finding(config.where(found), message, instead="Use bf16-lean.")


RULES: tuple[type[Rule], ...] = (BadPolicy,)
