"""A precision policy: which number format is used where, as one frozen value that prints and parses.

Ten fields are all a training step needs to know about precision:

    params       storage of the weights                     fp32 bf16 fp16
    compute      matmuls and convolutions                   fp32 tf32 bf16 fp16 fp8
    grads        storage of the gradients                   auto fp32 bf16 fp16
    master       where the fp32 copy of the weights is      weights split fp32 none
    states       storage of the optimizer moments           fp32 bf16 8bit
    reduce       reduction of gradients over ranks          fp32 bf16 fp16
    residual     what enters a repeated block               compute fp32
    loss_scale   how the loss is scaled                     the text of `halfstep.LossScale`
    keep_fp32    modules whose weights and compute are fp32 patterns over module names
    compute_fp32 modules that compute in fp32, on weights   patterns over module names
                 stored as `params` says

The text form is `PRESET[,key=value...]`, for example `bf16-lean,states=8bit,keep_fp32=head|*.norm`. The
printed form starts from the preset that leaves the fewest keys to write. Combinations that cannot work,
or in which a setting would have no effect, raise with the reason: the table `_RULES` lists all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.errors import SettingError, unknown
from halfstep.events import log_info
from halfstep.precision.deepspeed import read_settings
from halfstep.precision.deepspeed_write import Driver, write_config
from halfstep.precision.formats import FORMATS_16_BIT, canonical_name
from halfstep.precision.loss_scale import LossScale
from halfstep.precision.names import FOREIGN, REJECTED, fold
from halfstep.precision.patterns import canonical_patterns, covers

__all__ = ["PATTERN_KEYS", "PRESETS", "VALUES", "DeepSpeedReading", "Policy", "parse_with_notes", "read_deepspeed"]

VALUES: dict[str, tuple[str, ...]] = {
    "params": ("fp32", "bf16", "fp16"),
    "compute": ("fp32", "tf32", "bf16", "fp16", "fp8"),
    "grads": ("auto", "fp32", "bf16", "fp16"),
    "master": ("weights", "split", "fp32", "none"),
    "states": ("fp32", "bf16", "8bit"),
    "reduce": ("fp32", "bf16", "fp16"),
    "residual": ("compute", "fp32"),
}
PATTERN_KEYS = ("keep_fp32", "compute_fp32")
KEYS = (*VALUES, "loss_scale", *PATTERN_KEYS)


@dataclass(frozen=True)
class Policy:
    """Which number format a training run uses where.

    Every field but `keep_fp32` and `compute_fp32` is a plain string in canonical spelling. The constructor also accepts
    torch's dtypes and their names (`torch.bfloat16`, "float16"), a number or a `LossScale` for `loss_scale`, and a list
    or a "head|*.norm" string for the patterns, which it sorts without repeats.

    `grads="auto"` is the weights' dtype when each step has one micro-batch, and fp32 when gradients are
    accumulated. `master="weights"`: the weights are fp32 and need no copy. `residual="fp32"`: the residual stream of a
    model with 16-bit weights is fp32; "compute" leaves it to the compute format.
    """

    params: str = "fp32"
    compute: str = "fp32"
    grads: str = "auto"
    master: str = "weights"
    states: str = "fp32"
    reduce: str = "fp32"
    residual: str = "compute"
    loss_scale: str = "none"
    keep_fp32: tuple[str, ...] = ()
    compute_fp32: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # object.__setattr__ because the value is frozen for everyone but its constructor.
        for key in VALUES:
            object.__setattr__(self, key, _canonical_value(key, getattr(self, key)))
        object.__setattr__(self, "loss_scale", _canonical_loss_scale(self.loss_scale))
        for key in PATTERN_KEYS:
            object.__setattr__(self, key, canonical_patterns(key, getattr(self, key)))
        for rule in _RULES:
            if rule.applies(self):
                raise SettingError(rule.message.format(p=self))

    @property
    def scaling(self) -> LossScale:
        """The loss scale as a value with its settings."""
        return LossScale.parse(self.loss_scale)

    @property
    def is_lean(self) -> bool:
        """Whether the weights are stored in 16 bits."""
        return self.params != "fp32"

    def grads_format(self, accumulate: int = 1) -> str:
        """The format gradients are stored in when a step accumulates `accumulate` micro-batches."""
        if self.grads != "auto":
            return self.grads
        return self.params if accumulate == 1 else "fp32"

    def widens_grads(self, accumulate: int = 1) -> bool:
        """Whether 16-bit weights have fp32 gradients, so that their sums are exact enough."""
        return self.params != "fp32" and self.grads_format(accumulate) == "fp32"

    def keeps_fp32(self, module_name: str) -> bool:
        """Whether a module's weights are fp32 and it computes in fp32, by its dotted name in `named_modules()`.

        A pattern is matched against the whole dotted name, case-sensitively, as a glob: `*` matches any
        characters, dots included, `?` for one, `[ab]` for one of a set. A pattern that matches a module covers
        everything inside it: `head` covers `head` and `head.fc`, but not `neck.head` nor `head2`; `*.norm` covers
        `blocks.0.norm` and `encoder.layers.3.norm`, but not a top-level `norm`. The root module, whose name is
        empty, is matched by nothing.
        """
        return any(covers(pattern, module_name) for pattern in self.keep_fp32)

    def computes_fp32(self, module_name: str) -> bool:
        """Whether a module computes in fp32 regardless of `compute`: `keep_fp32` or `compute_fp32` names it."""
        return self.keeps_fp32(module_name) or any(covers(pattern, module_name) for pattern in self.compute_fp32)

    def unused_patterns(self, module_names: Iterable[str], key: str = "keep_fp32") -> tuple[str, ...]:
        """The patterns of a key that cover none of these modules, and so have no effect."""
        names = list(module_names)
        return tuple(p for p in getattr(self, key) if not any(covers(p, name) for name in names))

    @classmethod
    def parse(cls, text: str) -> Policy:
        """The policy written as `PRESET[,key=value...]`; a name of another tool is mapped, and the mapping is logged once."""
        policy, notes = parse_with_notes(text)
        for note in notes:
            _log_once(note)
        return policy

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, Any] | str | Path) -> Policy:
        """The policy of a DeepSpeed configuration; whatever is mapped or not reproduced is logged."""
        reading = read_deepspeed(config)
        for note in reading.notes:
            _log_once(note)
        return reading.policy

    def to_deepspeed(
        self,
        *,
        stage: int = 1,
        max_norm: float | None = None,
        accumulate: int = 1,
        batch_size: int = 1,
        offload_optimizer: bool = False,
        driver: Driver = "deepspeed",
    ) -> dict[str, Any]:
        """The DeepSpeed configuration that trains with this policy; what DeepSpeed cannot do raises with the reason.

        `from_deepspeed` reads the same policy back, except that `master=fp32` becomes `split`, and `grads` becomes
        `auto` where that is the same format for `accumulate` micro-batches. `driver="halfstep"` is for Halfstep's backend,
        which scales, clips, accumulates and casts itself: DeepSpeed then gets a scale of 1 and no clipping.
        """
        return write_config(
            self,
            stage=stage,
            max_norm=max_norm,
            accumulate=accumulate,
            batch_size=batch_size,
            offload_optimizer=offload_optimizer,
            driver=driver,
        )

    def __str__(self) -> str:
        texts = [[name, *_differences(self, preset)] for name, preset in PRESETS.items()]
        shortest = min(texts, key=len)
        return ",".join(shortest)


@dataclass(frozen=True)
class DeepSpeedReading:
    """The settings of a DeepSpeed configuration that Halfstep reads, and notes about the rest."""

    policy: Policy
    max_norm: float | None  # for Engine(max_norm=...); None: no clipping
    accumulate: int | None  # for Engine(accumulate=...); None: not decided by the configuration
    notes: tuple[str, ...]  # everything mapped, ignored or not reproduced, each with its key


def read_deepspeed(config: Mapping[str, Any] | str | Path) -> DeepSpeedReading:
    """Read a DeepSpeed configuration: a dictionary, JSON text, or the path of a file."""
    settings = read_settings(config)
    policy = parse_with_notes(settings.precision)[0]
    return DeepSpeedReading(policy, settings.max_norm, settings.accumulate, settings.notes)


def parse_with_notes(text: str) -> tuple[Policy, tuple[str, ...]]:
    """Parse the text of a policy; the notes about a foreign name are returned instead of logged."""
    if not isinstance(text, str):
        raise SettingError(f"A precision is text such as 'bf16' or 'fp16,loss_scale=128', not {text!r}.")
    name, *items = _split(text)
    preset, notes = _find_preset(name, text)
    settings: dict[str, Any] = {}
    for item in items:
        key, value = _parse_item(item, text)
        if key in settings:
            raise SettingError(f"Precision {text!r} has {key!r} twice; remove one.")
        settings[key] = value
    return dataclasses.replace(preset, **settings), notes


def _find_preset(name: str, text: str) -> tuple[Policy, tuple[str, ...]]:
    if not name:
        raise SettingError(f"Precision {text!r} names no preset; start with one of {', '.join(PRESETS)}.")
    folded = fold(name)
    if folded in PRESETS:
        return PRESETS[folded], ()
    if folded in REJECTED:
        raise SettingError(f"Precision {name!r} cannot be used. {REJECTED[folded]}")
    if folded in FOREIGN:
        foreign = FOREIGN[folded]
        note = f"Precision {folded!r} ({foreign.source}) is read as {foreign.preset!r}: {foreign.note}."
        return PRESETS[foreign.preset], (note,)
    if "=" in name:
        raise SettingError(f"Precision {text!r} starts with a setting; start with a preset, such as 'bf16,{name}'.")
    raise unknown("precision", name, [*PRESETS, *FOREIGN])


def _split(text: str) -> list[str]:
    """The items between commas, except for commas inside the parentheses of a loss scale."""
    items, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and depth <= 0:
            items.append("")
        else:
            items[-1] += char
    return [item.strip() for item in items]


def _parse_item(item: str, text: str) -> tuple[str, str]:
    key, _, value = (part.strip() for part in item.partition("="))
    key = key.casefold()
    if not key:
        raise SettingError(f"Precision {text!r} has an empty setting; write PRESET[,key=value...] with no stray comma.")
    if key not in KEYS:
        raise unknown("precision setting", key, KEYS)
    if not value:
        raise SettingError(f"Precision {text!r} has no value for {key!r}; write {key}=VALUE or leave it out.")
    return key, value


def _canonical_value(key: str, value: object) -> str:
    text = canonical_name(value)
    if text not in VALUES[key]:
        raise unknown(f"value for {key}", value, VALUES[key])
    return text


def _canonical_loss_scale(value: object) -> str:
    text = str(value)
    if isinstance(value, LossScale) and LossScale.parse(text) != value:
        raise SettingError(
            f"loss_scale={value!r} prints as {text!r}, which omits some of its settings, so a policy cannot contain "
            "it. Pass those settings to the scaler itself, and the policy a value that its text can express."
        )
    return str(LossScale.parse(text.strip().casefold()))


def _differences(policy: Policy, preset: Policy) -> list[str]:
    changed = ((key, getattr(policy, key)) for key in KEYS if getattr(policy, key) != getattr(preset, key))
    return [f"{key}={'|'.join(value) if key in PATTERN_KEYS else value}" for key, value in changed]


_LOGGED: set[str] = set()


def _log_once(note: str) -> None:
    if note not in _LOGGED:
        _LOGGED.add(note)
        log_info(note)


class _Rule(NamedTuple):
    """One contradiction: a test on the policy, and the message with the reason and the remedy."""

    applies: Callable[[Policy], bool]
    message: str


# The first that applies is raised, so a cause is listed before its consequences.
_RULES = (
    _Rule(
        lambda p: p.compute == "fp8" and p.params != "bf16",
        "compute=fp8 with params={p.params}: fp8 linears are built on bf16 weights. Use the preset fp8.",
    ),
    _Rule(
        lambda p: p.params in FORMATS_16_BIT and p.compute in {"fp32", "tf32"},
        "params={p.params} with compute={p.compute}: the digits that {p.compute} could use were dropped when the "
        "weights were stored. Use compute={p.params}, or params=fp32.",
    ),
    _Rule(
        lambda p: p.params in FORMATS_16_BIT and p.compute in FORMATS_16_BIT and p.params != p.compute,
        "params={p.params} with compute={p.compute} mixes two 16-bit formats: bf16 drops 3 of fp16's fraction bits, "
        "fp16 overflows above 65504. Use one of them for both, or params=fp32.",
    ),
    _Rule(
        lambda p: p.params in FORMATS_16_BIT and p.master == "weights",
        "params={p.params} with master=weights: 16-bit weights cannot be their own fp32 master, because an update "
        "below half an ulp of a weight vanishes. Use master=split (two more bytes per weight) or master=fp32 (four "
        "more); master=none forces training without one.",
    ),
    _Rule(
        lambda p: p.params == "fp32" and p.master != "weights",
        "master={p.master} has no effect with params=fp32: the weights are the master. Omit master, or use 16-bit "
        "weights (preset bf16-lean or fp16-lean).",
    ),
    _Rule(
        lambda p: p.params == "fp32" and p.grads in FORMATS_16_BIT,
        "grads={p.grads} with params=fp32: the gradients of fp32 weights are fp32, and rounding them to 16 bits only "
        "loses digits. Omit grads, or use 16-bit weights (preset bf16-lean or fp16-lean).",
    ),
    _Rule(
        lambda p: p.params in FORMATS_16_BIT and p.grads in FORMATS_16_BIT and p.grads != p.params,
        "grads={p.grads} with params={p.params}: the backward pass makes {p.params} gradients, and the other 16-bit "
        "format only loses range or digits. Use grads={p.params}, grads=fp32, or omit it.",
    ),
    _Rule(
        lambda p: p.compute == "fp16" and p.loss_scale == "none",
        "compute=fp16 with loss_scale=none: fp16 gradients below 2^-24 vanish. Use loss_scale=dynamic, a number such "
        "as loss_scale=128, or loss_scale=1 to force it.",
    ),
    _Rule(
        lambda p: p.compute != "fp16" and p.loss_scale != "none",
        "loss_scale={p.loss_scale} with compute={p.compute} costs time and protects nothing: only fp16 gradients lack "
        "fp32's range (fp8 linears scale their own tensors). Use loss_scale=none.",
    ),
    _Rule(
        lambda p: p.reduce == "fp16" and p.compute != "fp16",
        "reduce=fp16 with compute={p.compute}: these gradients are not scaled, and fp16 covers only 2^-24 to 65504, so "
        "sums across ranks overflow or vanish. Use reduce=fp32 or reduce=bf16.",
    ),
    _Rule(
        lambda p: p.residual == "fp32" and p.params == "fp32",
        "residual=fp32 has no effect with params=fp32: torch promotes sums with fp32 weights and embeddings by itself. Omit "
        "residual, or use 16-bit weights (preset bf16-lean or fp16-lean).",
    ),
    _Rule(
        lambda p: bool(p.keep_fp32) and p.compute in {"fp32", "tf32"},
        "keep_fp32={p.keep_fp32} has no effect with compute={p.compute}: every module computes in fp32 already (TF32 "
        "is one switch for the whole process). Omit it, or use a 16-bit preset.",
    ),
    _Rule(
        lambda p: bool(p.compute_fp32) and p.compute in {"fp32", "tf32"},
        "compute_fp32={p.compute_fp32} has no effect with compute={p.compute}: every module computes in fp32 already (TF32 "
        "is one switch for the whole process). Omit it, or use a 16-bit preset.",
    ),
    _Rule(
        lambda p: not set(p.keep_fp32).isdisjoint(p.compute_fp32),
        "keep_fp32={p.keep_fp32} and compute_fp32={p.compute_fp32} have a pattern in common: its modules have fp32 weights or "
        "weights stored as params, not both. Leave it in one of them.",
    ),
)

PRESETS: dict[str, Policy] = {
    "fp32": Policy(),
    "tf32": Policy(compute="tf32"),
    "bf16": Policy(compute="bf16"),
    "fp16": Policy(compute="fp16", loss_scale="dynamic"),
    "bf16-lean": Policy(params="bf16", compute="bf16", master="split"),
    "fp16-lean": Policy(params="fp16", compute="fp16", master="split", loss_scale="dynamic"),
    "fp8": Policy(params="bf16", compute="fp8", master="split"),
}
