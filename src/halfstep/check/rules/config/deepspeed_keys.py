"""Rules for the keys of a DeepSpeed configuration: unknown, misspelled, misplaced, renamed or removed.

DeepSpeed validates some blocks strictly and reads the top level with plain dictionary lookups: an unknown key inside
`fp16` raises an error, an unknown key next to it is silently ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed, DeepSpeedRule
from halfstep.check.config.deepspeed_schema import (
    ARGUMENTS,
    BLOCK_KEYS,
    OFF_BY_DEFAULT,
    PARENT_BLOCK,
    REMOVED,
    RENAMED,
)
from halfstep.check.config.edits import remove, rename, replace_value
from halfstep.check.config.kind import DEEPSPEED_KEYS, is_comment
from halfstep.check.finding import Finding, Fix, Severity
from halfstep.check.rule import Rule
from halfstep.errors import nearest
from halfstep.precision.node import Block, Entry, Scalar

__all__ = ["RULES"]

_DOCS = "https://www.deepspeed.ai/docs/config-json/"
# Keys of libraries that wrap deepspeed.initialize and read the same file.
_EXTENSIONS = {"msamp": "https://azure.github.io/MS-AMP/docs/user-tutorial/usage/"}
_REMOVALS = "https://github.com/deepspeedai/DeepSpeed/issues/8489"


class UnknownKeyInBlock(DeepSpeedRule):
    """A strictly validated block contains an unknown key."""

    code = "HS251"
    name = "unknown-key-in-block"
    severity = "error"
    reason = (
        "`fp16`, `bf16`, `zero_optimization` and its offload blocks forbid extra keys: an unknown key raises 'Extra "
        "inputs are not permitted'. That includes fp16 loss-scale settings copied into `bf16`, which has no loss "
        "scale."
    )
    bad = (
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16}}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "loss_scale_windows": 1000}}',
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true, "auto_cast": true}}',
        '{"zero_optimization": {"stage": 3, "stage3_max_live_paramters": 1e9}, "bf16": {"enabled": true}}',
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "buffer_size": 1e8}}}',
    )
    good = (
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}',
        '{"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9, "sub_group_size": 1e9}}',
    )
    references = (_DOCS, "measured: DeepSpeed 0.19.8, DeepSpeedConfig raises ValidationError, extra_forbidden")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Check every key of every strict block; other programs (GPT-NeoX) remove their own keys first."""
        if not config.strict:
            return
        for path, known in BLOCK_KEYS.items():
            block = config.block(*path)
            for entry in block.entries if block else ():
                if entry.key in known or (path == ("zero_optimization",) and entry.key in REMOVED):
                    continue
                yield self._unknown(config, path, entry, known)

    def _unknown(self, config: Config, path: tuple[str, ...], entry: Entry, known: tuple[str, ...]) -> Finding:
        name = ".".join(path)
        close = difflib.get_close_matches(entry.key, known, n=1, cutoff=0.8)
        fix = None
        if close:
            instead = f"Rename it to `{close[0]}`."
            block = config.block(*path)
            if block and close[0] not in block and _is_typo(entry.key, close[0]):
                fix = rename(config, entry, close[0], f"Rename to {close[0]}")
        elif path[0] in {"bf16", "bfloat16"} and entry.key in BLOCK_KEYS["fp16",]:
            instead = "Remove it; it is an fp16 setting, and bf16 has no loss scale."
        elif entry.key == "max_grad_norm":
            instead = "Remove it and set `gradient_clipping` at the top level."
        elif entry.key in PARENT_BLOCK:
            instead = f"Move it to `{PARENT_BLOCK[entry.key]}`."
        elif entry.key in DEEPSPEED_KEYS:
            instead = "Move it to the top level."
        else:
            instead = "Remove it."
        message = f"`{name}` has an unknown key `{entry.key}`; DeepSpeed raises a validation error."
        return self.finding(config.where(entry.key_span), message, instead=instead, fix=fix)


class MisspeltKey(DeepSpeedRule):
    """A top-level key is misspelled, and DeepSpeed silently ignores it."""

    code = "HS252"
    name = "misspelt-key"
    severity = "warning"
    reason = (
        "DeepSpeed reads top-level keys with plain dictionary lookups, so an unknown key has no effect: with "
        "`gradient_cliping` the run does not clip at the requested norm, with `fp_16` it trains in fp32. The log "
        "still prints the key with the rest of the configuration."
    )
    bad = (
        '{\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": 2},\n  "gradient_cliping": 1.0\n}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "fp_16": {"enabled": true}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "gradient_accumulation_step": 4}',
    )
    good = (
        '{\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": 2},\n  "gradient_clipping": 1.0\n}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}',
    )
    references = (_DOCS, "measured: DeepSpeed 0.19.8 accepts gradient_cliping and ignores it")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report unknown keys close to a known one."""
        if not config.strict:
            return
        for entry in config.root.entries:
            key = _intended_key(entry.key)
            if key is None:
                continue
            fix = rename(config, entry, key, f"Rename to {key}") if key not in config.root else None
            message = f"DeepSpeed ignores the unknown key `{entry.key}`."
            yield self.finding(config.where(entry.key_span), message, instead=f"Rename it to `{key}`.", fix=fix)


class MisplacedKey(DeepSpeedRule):
    """A setting is in the wrong block, and DeepSpeed ignores it."""

    code = "HS253"
    name = "misplaced-key"
    severity = "warning"
    reason = (
        "DeepSpeed reads `stage`, `offload_optimizer`, `loss_scale` and similar settings inside their block only. At "
        "the top level they are ignored like any unknown key, and the defaults apply. One that repeats its default is "
        "harmless until someone changes it."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "offload_optimizer": {"device": "cpu"}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "fp16": {"enabled": true}, "initial_scale_power": 12}',
        '{\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": 1},\n  "max_grad_norm": 1.0\n}',
        '{"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}, "weight_decay": 0.01}}',
        '{"zero_optimization": {"stage": 3}, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "max_train_micro_batch_size_per_gpu": 64}',
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}',
        '{"zero_optimization": {"stage": 2}, "autotuning": {"enabled": true, "max_train_micro_batch_size_per_gpu": 64}}',
        '{"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}, "no_decay": ["bias"]}}',
    )
    references = (_DOCS,)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report block settings at the top level, and optimizer arguments outside `params`."""
        for entry in config.root.entries if config.strict else ():
            parent = PARENT_BLOCK.get(entry.key)
            if entry.key == "max_grad_norm":
                yield self._clipping(config, entry)
            elif parent and entry.key not in DEEPSPEED_KEYS:
                message = f"DeepSpeed ignores `{entry.key}` at the top level; it belongs in `{parent}`."
                severity: Severity | None = "advice" if _repeats_default(config, entry, parent) else None
                instead = f"Move it to `{parent}`."
                yield self.finding(config.where(entry.key_span), message, instead=instead, severity=severity)
        for name in ("optimizer", "scheduler"):
            block = config.block(name)
            for entry in block.entries if block and "type" in block else ():
                # Any other key may be one that the project reads itself; moved to `params` it would raise TypeError.
                if entry.key in ARGUMENTS[name]:
                    message = f"DeepSpeed ignores `{name}.{entry.key}`; it reads arguments from `{name}.params` only."
                    yield self.finding(config.where(entry.key_span), message, instead=f"Move it to `{name}.params`.")

    def _clipping(self, config: Config, entry: Entry) -> Finding:
        message = "DeepSpeed ignores the unknown key `max_grad_norm`."
        fix = None
        if "gradient_clipping" not in config.root:
            fix = rename(config, entry, "gradient_clipping", "Rename to gradient_clipping")
        instead = "Rename it to `gradient_clipping`."
        severity: Severity | None = "advice" if _repeats_default(config, entry, "") else None
        return self.finding(config.where(entry.key_span), message, instead=instead, fix=fix, severity=severity)


def _repeats_default(config: Config, entry: Entry, parent: str) -> bool:
    """Whether a misplaced setting is off by default and switched off; not where its block has another value."""
    where = (parent, entry.key) if parent else ("gradient_clipping",)
    value = entry.value.value if isinstance(entry.value, Scalar) else ...
    is_off = value is None or (isinstance(value, bool | int | float) and not value)
    return is_off and entry.key in OFF_BY_DEFAULT and config.entry(*where) is None


class IgnoredKey(DeepSpeedRule):
    """DeepSpeed ignores an unknown top-level key."""

    code = "HS250"
    name = "ignored-key"
    severity = "warning"
    reason = (
        "DeepSpeed reads top-level keys with plain dictionary lookups and ignores unknown ones: the setting has no "
        "effect, but the log still prints it with the rest of the configuration. If your own code reads the key, "
        "suppress this finding."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "disable_fused_adam": true}',
        '{"train_batch_size": 4, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "steps_per_print": 10, "verbose": false,\n'
        ' "silent_mode": true, "min_train_micro_batch_size_per_gpu": 1}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "monitor_config": {"wandb": {"enabled": true}}}',
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "msamp": {"enabled": true, "opt_level": "O3"}}',
        '{"fsdp": {"sharding_strategy": "FULL_SHARD"}, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW"}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "sequence_parallel_size": 2, "data_parallel_size": 4}',
    )
    references = (_DOCS, _EXTENSIONS["msamp"])

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report unknown keys that are not close to a known one."""
        for entry in config.root.entries if config.strict else ():
            known = entry.key in DEEPSPEED_KEYS or entry.key in PARENT_BLOCK or entry.key in REMOVED
            known |= entry.key in _EXTENSIONS
            if not known and _intended_key(entry.key) is None and not is_comment(entry.key):
                message = f"DeepSpeed ignores the unknown key `{entry.key}`."
                instead = "Remove it, unless your own code reads it."
                yield self.finding(config.where(entry.key_span), message, instead=instead)


class RemovedKey(DeepSpeedRule):
    """A key belongs to a feature that DeepSpeed has removed."""

    code = "HS256"
    name = "removed-key"
    severity = "warning"
    reason = (
        "DeepSpeed 0.19.8 raises an error for keys of removed features, even when the block is disabled, rather than "
        "silently ignoring a compression or checkpoint setting. Earlier releases accept them."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "sparse_attention": {"mode": "fixed"}}',
        '{\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": 2},\n  "curriculum_learning": {"enabled": true}\n}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": 8}}',
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3}}',
    )
    references = (_REMOVALS, "measured: DeepSpeed 0.19.8, DeepSpeedConfig raises DeepSpeedConfigError for each")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report removed keys at the top level and in zero_optimization."""
        removed = deepspeed.since(0, 19, 8)
        if removed is False:
            return
        zero = config.block("zero_optimization")
        for block in (config.root, zero):
            for entry in block.entries if block else ():
                parent = "zero_optimization" if block is zero else "top"
                if REMOVED.get(entry.key) != parent:
                    continue
                disabled = _is_disabled(entry)
                fix = remove(config, block, entry, f"Remove the disabled {entry.key}") if block and disabled else None
                even = ", even when it is disabled" if disabled else ""
                message = f"`{entry.key}` was removed from DeepSpeed; 0.19.8 and later raise an error for it{even}."
                severity: Severity | None = "error" if removed else ("advice" if disabled else None)
                instead = "Remove it, or stay on an earlier release."
                yield self.finding(config.where(entry.key_span), message, instead=instead, fix=fix, severity=severity)


class RenamedKey(DeepSpeedRule):
    """A key has been renamed."""

    code = "HS257"
    name = "renamed-key"
    severity = "advice"
    reason = (
        "DeepSpeed still accepts the old names and logs a deprecation warning for most of them. It reads `bfloat16` "
        "only if there is no `bf16` block. The `cpu_offload` flags were replaced by offload blocks, and setting both "
        "raises an error."
    )
    bad = (
        '{\n  "zero_optimization": {"stage": 2},\n  "bfloat16": {"enabled": true}\n}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": true}}',
        '{"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": true}}',
        '{"zero_optimization": {"stage": 2, "cpu_offload": true, "offload_optimizer": {"device": "cpu"}}}',
    )
    good = (
        '{\n  "zero_optimization": {"stage": 2},\n  "bf16": {"enabled": true}\n}',
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": true}}',
    )
    references = (_DOCS, "measured: DeepSpeed 0.19.8, DeepSpeedConfig")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report old names, with or without the new one."""
        for path, new in RENAMED.items():
            entry = config.entry(*path)
            block = config.block(*path[:-1]) if path[:-1] else config.root
            if entry is None or block is None:
                continue
            if new in block:
                fatal = path != ("bfloat16",)
                effect = "DeepSpeed raises an error" if fatal else "DeepSpeed ignores it"
                message = f"`{path[-1]}` is the old name of `{new}`, which is also set; {effect}."
                yield self.at(config, path, message, instead=f"Keep `{new}`.", severity="error" if fatal else "warning")
                continue
            message = f"`{path[-1]}` is the old name of `{new}`."
            block_text = f'Use `"{new}": {{"device": "cpu"}}`.'
            instead = block_text if new.startswith("offload") else f"Rename it to `{new}`."
            yield self.at(config, path, message, instead=instead, fix=self._renamed(config, block, entry, new))

    @staticmethod
    def _renamed(config: Config, block: Block, entry: Entry, new: str) -> Fix | None:
        if not new.startswith("offload"):
            return rename(config, entry, new, f"Rename to {new}")
        value = entry.value.value if isinstance(entry.value, Scalar) else None
        if value is False:
            return remove(config, block, entry, f"Remove the disabled {entry.key}")
        if value is not True:
            return None
        renamed = rename(config, entry, new, "")
        revalued = replace_value(config, entry.value, {"device": "cpu"}, "")
        return Fix(f"Replace with {new} on the CPU", (*renamed.edits, *revalued.edits))


def _intended_key(key: str) -> str | None:
    """The top-level key that a misspelled one stands for; None if `key` is valid or close to no valid key."""
    if key in DEEPSPEED_KEYS or key in PARENT_BLOCK or key in _EXTENSIONS or is_comment(key):
        return None
    close = nearest(key.replace("-", "_"), DEEPSPEED_KEYS)
    if close is None:
        return None
    return close if _is_typo(key, close) else None


def _is_typo(key: str, known: str) -> bool:
    """Whether `key` is a typo of `known`: letters doubled, dropped or swapped, or a different separator."""
    plain = key.replace("-", "_").casefold()
    if plain.replace("_", "") == known.replace("_", ""):
        return True
    return difflib.SequenceMatcher(None, plain, known).ratio() >= 0.93 and plain[:1] == known[:1]


def _is_disabled(entry: Entry) -> bool:
    """Whether an entry enables nothing: false, null, an empty block or a block with `enabled` set to false."""
    if isinstance(entry.value, Scalar):
        return entry.value.value in {False, None}
    if not isinstance(entry.value, Block):
        return False
    switch = entry.value.entry("enabled")
    return not entry.value.entries or (
        switch is not None and isinstance(switch.value, Scalar) and switch.value.value is False
    )


RULES: tuple[type[Rule], ...] = (
    UnknownKeyInBlock,
    MisspeltKey,
    MisplacedKey,
    IgnoredKey,
    RemovedKey,
    RenamedKey,
)
