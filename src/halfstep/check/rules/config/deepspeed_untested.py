"""The rule for an optimizer that ZeRO's check would reject and that the file allows."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed, DeepSpeedRule
from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.precision.deepspeed_optimizers import BY_LAYER

__all__ = ["RULES"]


class LayerwiseOptimizerSharded(DeepSpeedRule):
    """An optimizer that needs full layers is allowed with ZeRO, which passes it shards."""

    code = "HS240"
    name = "layerwise-optimizer-sharded"
    objects = True
    severity = "warning"
    reason = (
        "`zero_allow_untested_optimizer` disables ZeRO's check of the optimizer, not what the check is for: ZeRO "
        "flattens the parameters of a group and gives each rank a part of that vector as one parameter. LAMB's trust "
        "ratio, Adafactor's row and column means and LBFGS's products are then those of a part of the whole model, and "
        "depend on the number of GPUs. Optimizers that treat every element alone, such as SGD, are not affected. With "
        "any untested optimizer, compare a short run with stage 0."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": true,\n'
        ' "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}',
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": true,\n'
        ' "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": true,\n'
        ' "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}',
    )
    references = (
        "https://www.deepspeed.ai/docs/config-json/#zero-optimizations-for-fp16-training",
        "measured: source code of DeepSpeed 0.19.8, stage_1_and_2.py: one flat parameter per group and rank",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report the flag with a layerwise optimizer at stages 1 to 3."""
        kind = config.value("optimizer", "type")
        by_layer = kind in BY_LAYER or deepspeed.optimizer in BY_LAYER
        if by_layer and deepspeed.stage and config.is_on("zero_allow_untested_optimizer"):
            message = (
                f"`zero_allow_untested_optimizer` lets {kind} run at ZeRO stage {deepspeed.stage}, where it gets flat "
                "shards instead of layers and computes other updates."
            )
            yield self.at(config, ("optimizer", "type"), message, instead='Use `"type": "AdamW"`, or stage 0.')


RULES: tuple[type[Rule], ...] = (LayerwiseOptimizerSharded,)
