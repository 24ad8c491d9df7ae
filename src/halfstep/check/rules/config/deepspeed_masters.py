"""The rule for DeepSpeed's own 16-bit master weights, which it accepts and which lose updates."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed, DeepSpeedRule
from halfstep.check.finding import Finding
from halfstep.check.rule import Rule

__all__ = ["RULES"]

_OFFLOAD = '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},\n'
_LOST = {"bf16": "1/512", "fp16": "1/4096"}


class LossyMasters(DeepSpeedRule):
    """The master weights are stored in 16 bits, so small updates are lost."""

    code = "HS219"
    name = "lossy-masters"
    severity = "warning"
    reason = (
        "ZeRO keeps fp32 master weights, so that a small update is not lost to the rounding of a 16-bit weight. "
        "`bf16_master_weights_and_grads` and `fp16_master_weights_and_grads` store these masters and their gradients in "
        "16 bits: an update below 1/512 (bf16) or 1/4096 (fp16) of a weight has no effect, which at a learning rate of "
        "1e-5 is most of them. `bf16_optimizer_states` rounds the moments of Adam as well. Offloading the optimizer "
        "saves more GPU memory and keeps fp32."
    )
    bad = (
        _OFFLOAD + ' "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}',
        '{"zero_optimization": {"stage": 2},\n'
        ' "bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}}',
        _OFFLOAD + ' "fp16": {"enabled": true, "fp16_master_weights_and_grads": true}}',
    )
    good = (
        _OFFLOAD + ' "bf16": {"enabled": true}}',
        _OFFLOAD + ' "bf16": {"enabled": true, "bf16_master_weights_and_grads": false}}',
        _OFFLOAD + ' "bf16": {"enabled": false, "bf16_master_weights_and_grads": true}, "fp16": {"enabled": true}}',
    )
    references = (
        "https://www.deepspeed.ai/docs/config-json/#bfloat16-training-options",
        "https://arxiv.org/abs/2010.06192",
        "measured: source code of DeepSpeed 0.19.8, base_optimizer.py: the flag decides the dtype of the masters",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report the flag of a mode that is on, where DeepSpeed accepts it (else HS228 does)."""
        bf16 = deepspeed.bf16_name
        states = config.is_on(bf16, "bf16_optimizer_states")
        for block, dtype, accepted in (("fp16", "fp16", False), (bf16, "bf16", states)):
            key = f"{dtype}_master_weights_and_grads"
            if config.value(block, "enabled") is False or not config.is_on(block, key) or deepspeed.stage == 0:
                continue
            if accepted or deepspeed.offloads_optimizer is not False:
                message = (
                    f"`{key}` stores the master weights in {dtype}; updates below {_LOST[dtype]} of a weight are lost."
                )
                instead = "Remove it: the masters are fp32 by default, and `offload_optimizer` moves them off the GPU."
                yield self.at(config, (block, key), message, instead=instead)


RULES: tuple[type[Rule], ...] = (LossyMasters,)
