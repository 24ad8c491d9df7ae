"""The keys of a DeepSpeed configuration: unknown, misspelt, misplaced, renamed or removed.

DeepSpeed validates some blocks strictly and reads the top level with plain lookups: a wrong key in `fp16` stops the run,
a wrong key beside it is ignored without a word. Both are spelling mistakes to whoever made them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed, DeepSpeedRule
from halfstep.check.config.deepspeed_schema import BLOCK_KEYS, HOME, REMOVED, RENAMED
from halfstep.check.config.edits import remove, rename, replace_value
from halfstep.check.config.kind import DEEPSPEED_KEYS
from halfstep.check.finding import Finding, Fix, Severity
from halfstep.check.rule import Rule
from halfstep.errors import nearest
from halfstep.precision.deepspeed_keys import BLOCKS
from halfstep.precision.node import Block, Entry, Scalar

__all__ = ["RULES"]

_DOCS = "https://www.deepspeed.ai/docs/config-json/"
_REMOVALS = "https://github.com/deepspeedai/DeepSpeed/issues/8489"


class UnknownKeyInBlock(DeepSpeedRule):
    """A block that DeepSpeed validates strictly has a key it does not know."""

    code = "HS251"
    name = "unknown-key-in-block"
    severity = "error"
    reason = (
        "fp16, bf16, zero_optimization and its offload blocks are validated with no extra keys allowed: a misspelt or foreign key "
        "stops the run with 'Extra inputs are not permitted'. bf16 has no loss scale, so fp16's settings copied into it are such "
        "keys."
    )
    bad = (
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16}}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "loss_scale_windows": 1000}}',
        '{"zero_optimization": {"stage": 3, "stage3_max_live_paramters": 1e9}, "bf16": {"enabled": true}}',
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "buffer_size": 1e8}}}',
    )
    good = (
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}',
        '{"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9, "sub_group_size": 1e9}}',
    )
    references = (_DOCS, "measured: DeepSpeedConfig of 0.19.8 raises ValidationError, extra_forbidden")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Every key of every strict block; other programs (GPT-NeoX) take their own keys out first."""
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
            instead = f"Write {close[0]!r}."
            block = config.block(*path)
            if block and close[0] not in block and _is_typo(entry.key, close[0]):
                fix = rename(config, entry, close[0], f"Write {close[0]}")
        elif path[0] in {"bf16", "bfloat16"} and entry.key in BLOCK_KEYS["fp16",]:
            instead = "Remove it: bf16 has no loss scale; it is a setting of fp16."
        elif entry.key in HOME:
            instead = f"It belongs into {HOME[entry.key]}."
        elif entry.key in DEEPSPEED_KEYS:
            instead = "It belongs to the top level."
        else:
            instead = "Remove it."
        message = f"{name} has no key {entry.key!r}, and DeepSpeed refuses the configuration."
        return self.finding(config.where(entry.key_span), message, instead=instead, fix=fix)


class MisspeltKey(DeepSpeedRule):
    """A top-level key is misspelt, and DeepSpeed ignores it without a word."""

    code = "HS252"
    name = "misspelt-key"
    severity = "warning"
    reason = (
        "DeepSpeed reads its top level with plain lookups, so a key it does not know changes nothing: with gradient_cliping the "
        "run does not clip as asked, with fp_16 it trains in fp32, and the log shows the key among the others as if it counted."
    )
    bad = (
        '{\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": 2},\n  "gradient_cliping": 1.0\n}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "fp_16": {"enabled": true}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "gradient_accumulation_step": 4}',
    )
    good = ('{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}',)
    references = (_DOCS, "measured: DeepSpeed 0.19.8 accepts gradient_cliping and does not read it")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Unknown keys close to a known one."""
        if not config.strict:
            return
        for entry in config.root.entries:
            meant = _meant(entry.key)
            if meant is None:
                continue
            title = f"Write {meant}"
            fix = rename(config, entry, meant, title) if meant not in config.root else None
            message = f"DeepSpeed has no key {entry.key!r} and ignores it."
            yield self.finding(config.where(entry.key_span), message, instead=f"Write {meant!r}.", fix=fix)


class MisplacedKey(DeepSpeedRule):
    """A setting of a block stands at the top level, where DeepSpeed does not look for it."""

    code = "HS253"
    name = "misplaced-key"
    severity = "warning"
    reason = (
        "stage, offload_optimizer, loss_scale and their like are read inside their blocks only. At the top level they are "
        "ignored like any key that DeepSpeed does not know, and the defaults hold."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "offload_optimizer": {"device": "cpu"}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "fp16": {"enabled": true}, "initial_scale_power": 12}',
        '{\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": 1},\n  "max_grad_norm": 1.0\n}',
        '{"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}, "weight_decay": 0.01}}',
    )
    good = ('{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}',)
    references = (_DOCS,)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Keys whose home is a block, and optimizer parameters beside `params`."""
        for entry in config.root.entries if config.strict else ():
            home = HOME.get(entry.key)
            if entry.key == "max_grad_norm":
                yield self._clipping(config, entry)
            elif home and entry.key not in DEEPSPEED_KEYS:
                message = f"{entry.key!r} is a setting of {home}; at the top level DeepSpeed ignores it."
                yield self.finding(config.where(entry.key_span), message, instead=f"Move it into {home}.")
        for name in ("optimizer", "scheduler"):
            block = config.block(name)
            for entry in block.entries if block and "type" in block else ():
                if entry.key not in BLOCKS["optimizer"]:
                    message = f"{entry.key!r} stands beside {name}.params, where DeepSpeed does not read it."
                    yield self.finding(config.where(entry.key_span), message, instead=f"Move it into {name}.params.")

    def _clipping(self, config: Config, entry: Entry) -> Finding:
        message = "max_grad_norm is no key of DeepSpeed's, and nothing is clipped by it."
        fix = None
        if "gradient_clipping" not in config.root:
            fix = rename(config, entry, "gradient_clipping", "Write gradient_clipping")
        return self.finding(config.where(entry.key_span), message, instead="Write gradient_clipping.", fix=fix)


class IgnoredKey(DeepSpeedRule):
    """A top-level key is none of DeepSpeed's."""

    code = "HS250"
    name = "ignored-key"
    severity = "warning"
    reason = (
        "DeepSpeed reads its top level with plain lookups and ignores every key it does not know: the setting has no effect, and "
        "the log prints it among the others as if it had. If a program of your own reads the key, silence this finding."
    )
    bad = ('{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "disable_fused_adam": true}',)
    good = ('{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}',)
    references = (_DOCS,)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Unknown keys close to nothing."""
        for entry in config.root.entries if config.strict else ():
            known = entry.key in DEEPSPEED_KEYS or entry.key in HOME or entry.key in REMOVED
            if not known and _meant(entry.key) is None and not _is_comment(entry.key):
                message = f"DeepSpeed has no key {entry.key!r} and ignores it."
                yield self.finding(
                    config.where(entry.key_span), message, instead="Remove it, unless you read it yourself."
                )


class RemovedKey(DeepSpeedRule):
    """A key belongs to a feature that DeepSpeed has removed."""

    code = "HS256"
    name = "removed-key"
    severity = "warning"
    reason = (
        "DeepSpeed 0.19.8 refuses configurations that still name a feature it has removed, even where the block is switched off: "
        "a silently ignored compression or checkpoint setting would be worse. Releases before it accept them."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "sparse_attention": {"mode": "fixed"}}',
        '{\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": 2},\n  "curriculum_learning": {"enabled": true}\n}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": 8}}',
    )
    good = ('{"train_batch_size": 8, "zero_optimization": {"stage": 3}}',)
    references = (_REMOVALS, "measured: DeepSpeedConfig of 0.19.8 raises DeepSpeedConfigError for each")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Removed keys at the top level and in zero_optimization."""
        gone = deepspeed.since(0, 19, 8)
        if gone is False:
            return
        zero = config.block("zero_optimization")
        for block in (config.root, zero):
            for entry in block.entries if block else ():
                home = "zero_optimization" if block is zero else "top"
                if REMOVED.get(entry.key) != home:
                    continue
                idle = _is_idle(entry)
                fix = remove(config, block, entry, f"Remove {entry.key}, which is off") if block and idle else None
                off = ", even though it is off here" if idle else ""
                message = f"DeepSpeed has removed {entry.key!r}, and 0.19.8 refuses a configuration that names it{off}."
                severity: Severity | None = "error" if gone else ("advice" if idle else None)
                instead = "Remove it, or stay on an earlier release."
                yield self.finding(config.where(entry.key_span), message, instead=instead, fix=fix, severity=severity)


class RenamedKey(DeepSpeedRule):
    """A key has an old name."""

    code = "HS257"
    name = "renamed-key"
    severity = "advice"
    reason = (
        "DeepSpeed still takes the old names and warns about most of them. bfloat16 is read only where there is no bf16 block; "
        "the cpu_offload flags stand for offload blocks, and are refused beside those."
    )
    bad = (
        '{\n  "zero_optimization": {"stage": 2},\n  "bfloat16": {"enabled": true}\n}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": true}}',
        '{"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": true}}',
        '{"zero_optimization": {"stage": 2, "cpu_offload": true, "offload_optimizer": {"device": "cpu"}}}',
    )
    good = ('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": true}}',)
    references = (_DOCS, "measured: DeepSpeedConfig of 0.19.8")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Old names, alone or beside the new one."""
        for path, new in RENAMED.items():
            entry = config.entry(*path)
            block = config.block(*path[:-1]) if path[:-1] else config.root
            if entry is None or block is None:
                continue
            if new in block:
                lost = "it is not read" if path == ("bfloat16",) else "DeepSpeed refuses both"
                fatal = path != ("bfloat16",)
                message = f"{path[-1]} is the old name of {new}, which is given as well: {lost}."
                yield self.at(config, path, message, instead=f"Keep {new}.", severity="error" if fatal else "warning")
                continue
            message = f"{path[-1]} is the old name of {new}."
            yield self.at(config, path, message, instead=f"Write {new}.", fix=self._renamed(config, block, entry, new))

    @staticmethod
    def _renamed(config: Config, block: Block, entry: Entry, new: str) -> Fix | None:
        if not new.startswith("offload"):
            return rename(config, entry, new, f"Write {new}")
        value = entry.value.value if isinstance(entry.value, Scalar) else None
        if value is False:
            return remove(config, block, entry, f"Remove {entry.key}, which is off")
        if value is not True:
            return None
        named = rename(config, entry, new, "")
        valued = replace_value(config, entry.value, {"device": "cpu"}, "")
        return Fix(f"Write {new} with device cpu", (*named.edits, *valued.edits))


def _meant(key: str) -> str | None:
    """The top-level key that a misspelt one stands for; None for a key that is known or close to nothing."""
    if key in DEEPSPEED_KEYS or key in HOME or _is_comment(key):
        return None
    close = nearest(key.replace("-", "_"), DEEPSPEED_KEYS)
    if close is None:
        return None
    return close if _is_typo(key, close) else None


def _is_typo(key: str, known: str) -> bool:
    """Whether two names differ by a slip of the hand: letters doubled, dropped or swapped, or another separator."""
    plain = key.replace("-", "_").casefold()
    if plain.replace("_", "") == known.replace("_", ""):
        return True
    return difflib.SequenceMatcher(None, plain, known).ratio() >= 0.93 and plain[:1] == known[:1]


def _is_comment(key: str) -> bool:
    return key.startswith(("_", "#", "//", "$")) or "comment" in key.casefold() or key.casefold() in {"note", "notes"}


def _is_idle(entry: Entry) -> bool:
    """Whether an entry asks for nothing: false, null, or a block that is not enabled."""
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
