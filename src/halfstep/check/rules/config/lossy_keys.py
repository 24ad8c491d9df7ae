"""Rules for programs in whose files one key decides whether there are fp32 master weights: fairseq, verl, nanotron."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.finding import Finding
from halfstep.check.rule import KindRule, Rule
from halfstep.precision.node import UNKNOWN

__all__ = ["RULES"]

_LOST = {"bf16": "1/512", "fp16": "1/4096"}
_FAIRSEQ = "task:\n  _name: audio_pretraining\ncommon:\n  {mode}: true\noptimization:\n  lr: [0.0005]\n"
_VERL = "actor_rollout_ref:\n  actor:\n    optim:\n      lr: 1e-6\n    fsdp_config:\n      model_dtype: {dtype}\n"
_NANOTRON = (
    "parallelism:\n  dp: 2\n  pp: 1\n  tp: 1\nmodel:\n  dtype: {dtype}\n"
    "optimizer:\n  zero_stage: 0\n  accumulate_grad_in_fp32: {wide}\n"
)
# verl: the key, and where the rank of LoRA is written next to it.
_VERL_KEYS = (
    (("actor", "fsdp_config", "model_dtype"), ("model", "lora_rank"), ("actor", "optim", "optimizer_impl")),
    (("fsdp_config", "model_dtype"), ("model", "lora_rank"), ("optim", "optimizer_impl")),
    (("model", "fsdp_config", "model_dtype"), ("model", "lora_rank"), ("optim", "optimizer_impl")),
)
_SHORT = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16"}


class MemoryEfficientFp16(KindRule):
    """fairseq trains 16-bit weights without an fp32 copy."""

    kind = "fairseq"
    code = "HS514"
    name = "fairseq-memory-efficient"
    severity = "warning"
    reason = (
        "With `fp16: true` fairseq keeps an fp32 copy of the weights for the optimizer. `memory_efficient_fp16` (or "
        "`memory_efficient_bf16`) keeps none: each update is computed in fp32 and rounded into the 16-bit weight, so "
        "updates below 1/4096 (bf16: 1/512) of a weight are lost, and small fp16 weights become subnormal or 0. It "
        "implies `fp16`."
    )
    bad = (
        _FAIRSEQ.format(mode="memory_efficient_fp16"),
        _FAIRSEQ.format(mode="memory_efficient_bf16"),
        _FAIRSEQ.format(mode="memory_efficient_fp16").replace("common:\n", "common:\n  fp16: true\n"),
    )
    good = (
        _FAIRSEQ.format(mode="fp16"),
        _FAIRSEQ.format(mode="fp16").replace("common:\n", "common:\n  memory_efficient_fp16: false\n"),
    )
    references = (
        "https://github.com/facebookresearch/fairseq/blob/main/fairseq/optim/fp16_optimizer.py",
        "https://arxiv.org/abs/1710.03740",
    )

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report the flag."""
        for dtype in ("fp16", "bf16"):
            entry = config.entry("common", f"memory_efficient_{dtype}")
            if entry is not None and config.value("common", entry.key) is True:
                message = f"`{entry.key}` keeps no fp32 copy of the weights; updates below {_LOST[dtype]} of a weight are lost."
                yield self.finding(
                    config.where(entry), message, instead=f"Use `{dtype}: true`, which keeps fp32 weights."
                )


class VerlModelDtype(KindRule):
    """verl trains 16-bit weights without an fp32 master copy."""

    kind = "verl"
    code = "HS515"
    name = "verl-16-bit-weights"
    severity = "warning"
    reason = (
        "`fsdp_config.model_dtype` is the dtype of the weights that FSDP shards and the optimizer updates, and it is "
        "fp32 by default; FSDP computes in bf16 from them. In bf16 an update below 1/512 of a weight has no effect, "
        "and at the learning rates of PPO and GRPO (1e-6) that is nearly every update."
    )
    bad = (
        _VERL.format(dtype="bfloat16"),
        "actor_rollout_ref:\n  actor:\n    ppo_mini_batch_size: 32\n    fsdp_config:\n      model_dtype: bf16\n",
        "critic:\n  optim:\n    lr: 1e-5\n  model:\n    fsdp_config:\n      model_dtype: bfloat16\n",
        "model:\n  fsdp_config:\n    model_dtype: bf16\noptim:\n  lr: 1e-5\n",
    )
    good = (
        _VERL.format(dtype="fp32"),
        _VERL.format(dtype="bfloat16") + "  model:\n    lora_rank: 32\n",
        "actor_rollout_ref:\n  ref:\n    fsdp_config:\n      model_dtype: bfloat16\n",
    )
    references = (
        "https://github.com/volcengine/verl/blob/main/verl/workers/config/engine.py",
        "https://arxiv.org/abs/2010.06192",
    )

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report 16 bits where all weights are trained by torch's optimizer."""
        for path, rank, implementation in _VERL_KEYS:
            entry = config.entry(*path)
            value = config.value(*path)
            dtype = _SHORT.get(value) if isinstance(value, str) else None
            lora = config.value(*rank)
            if entry is None or dtype is None or (lora is not None and (lora is UNKNOWN or lora != 0)):
                continue
            if config.value(*implementation) not in {None, "torch.optim"}:
                continue
            message = (
                f"`model_dtype` creates the trained weights in {dtype}, without an fp32 master copy; updates below "
                f"{_LOST[dtype]} of a weight are lost."
            )
            yield self.finding(config.where(entry), message, instead="Remove it: the default is fp32.")


class NanotronBf16Weights(KindRule):
    """nanotron trains bf16 weights without an fp32 copy."""

    kind = "nanotron"
    code = "HS516"
    name = "nanotron-bf16-weights"
    severity = "warning"
    reason = (
        "nanotron's fp32 weights are part of its fp32 gradient accumulator: with `accumulate_grad_in_fp32: false` and "
        "`model.dtype: bfloat16` the optimizer updates the bf16 weights themselves, and an update below 1/512 of a "
        "weight has no effect. The gradients of micro-batches are summed in bf16 too."
    )
    bad = (_NANOTRON.format(dtype="bfloat16", wide="false"),)
    good = (
        _NANOTRON.format(dtype="bfloat16", wide="true"),
        _NANOTRON.format(dtype="float32", wide="false"),
    )
    references = (
        "https://github.com/huggingface/nanotron/blob/main/src/nanotron/helpers.py",
        "https://arxiv.org/abs/2010.06192",
    )

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report the flag with 16-bit weights."""
        entry = config.entry("optimizer", "accumulate_grad_in_fp32")
        value = config.value("model", "dtype")
        dtype = _SHORT.get(value) if isinstance(value, str) else None
        if entry is not None and dtype is not None and config.value("optimizer", entry.key) is False:
            message = (
                f"`{entry.key}: false` leaves the {dtype} weights without an fp32 copy; updates below {_LOST[dtype]} of "
                "a weight are lost."
            )
            yield self.finding(config.where(entry), message, instead=f"Set `{entry.key}: true`.")


RULES: tuple[type[Rule], ...] = (MemoryEfficientFp16, VerlModelDtype, NanotronBf16Weights)
