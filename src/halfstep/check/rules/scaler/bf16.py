"""HS120: a scaler where the gradients have the range of float32."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.examples import PLAIN_LOOP, SCALED_LOOP
from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.scaler.calls import framework_precisions
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import earlier, is_amp, scalers_at
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.formats import formats_of
from halfstep.check.script.objects.values import (
    UNKNOWN,
    Autocast,
    Scaler,
    constant,
    text_of,
)
from halfstep.check.script.pairing.bf16_regions import (
    arm_with_bf16,
    chooses_format,
    dtypes_here,
    flag_texts,
    is_absent_otherwise,
    is_documented,
    is_entered_with,
    is_low_with,
    only_off_cuda,
    only_switch,
    trained_regions,
)
from halfstep.check.script.pairing.device_tests import (
    is_always_on_cuda,
)
from halfstep.check.script.pairing.elsewhere import bfloat16_by_default, enters_bfloat16
from halfstep.check.script.pairing.other_values import enabled_by_value
from halfstep.check.script.pairing.runs import Run, runs_of
from halfstep.check.script.script import Script

__all__ = ["RULES", "ScalerWithBf16"]

_RIGHT = SCALED_LOOP.format(scaler='scaler = torch.amp.GradScaler("cuda")', dtype="float16")
# `dtype is not torch.float32`: enabled for both 16-bit formats
_NOT_FLOAT32 = regex(r"^([A-Za-z_][\w.]*) (?:!=|is not) (?:torch\.)?['\"]?(?:float32|fp32|float)['\"]?$")
_FULL_PRECISION = regex(r"== (torch\.)?['\"]?(float32|fp32|float)['\"]?$")
# Engines have a scaler of their own.
_OF_DEVICE = regex(r"device|cuda|deepspeed|fsdp|\b(use_)?(tpu|xla)\b", re.IGNORECASE)
_SWITCH = regex(
    r"(^|[._'\"])(use_|with_|enable_)?(amp|mixed_precision|autocast)(_enabled|(['\"]\])?(\.enabled|\[['\"]enabled['\"]\]))?$"
)
_ONLY_BF16 = regex(r"^[\w.\[\]'\"]+ (== (torch\.)?['\"]?(bfloat16|bf16)|!= (torch\.)?['\"]?(float16|fp16|half))['\"]?$")
_BF16 = regex(r"bf(loat)?_?16|bfloat", re.IGNORECASE)
# `dtype in ("float16", "bfloat16")`
_BOTH_FORMATS = regex(r" in [\[({](?=.*['\".](fp16|float16|half)\b)(?=.*['\".](bf16|bfloat16)\b)[^\])}]*[\])}]$")
_NEGATED = regex(r"!=|\bnot\b|\bor\b|supported", re.IGNORECASE)
_CALLS = regex(r"\b(half|float)\(")  # casts of a tensor, not of the computation
_FORMAT = regex(r"16|dtype|bf|half|float", re.IGNORECASE)


def _creation(script: Script, scaler: Scaler) -> Event | None:
    return next((e for e in script.events("make_scaler") if e.node is scaler.node), None)


class ScalerWithBf16(ScriptRule):
    """A GradScaler is used with bfloat16 autocast."""

    code = "HS120"
    name = "scaler-with-bf16"
    severity = "warning"
    reason = (
        "bfloat16 has the range of float32 (3.4e38), so gradients underflow or overflow only where float32 gradients do, and a "
        "scaler does not help. It reads and writes every gradient and synchronizes with the GPU on each step, can still skip "
        "steps, and with bfloat16 parameters `unscale_` raises on CUDA: not implemented for 'BFloat16'. The same holds for the runs in "
        "which a setting enables the scaler and not the format of the region."
    )
    bad = (
        SCALED_LOOP.format(scaler='scaler = torch.amp.GradScaler("cuda")', dtype="bfloat16"),
        SCALED_LOOP.format(scaler="scaler = torch.cuda.amp.GradScaler()", dtype="bfloat16"),
    )
    good = (
        SCALED_LOOP.format(scaler='scaler = torch.amp.GradScaler("cuda", enabled=False)', dtype="bfloat16"),
        _RIGHT,
        PLAIN_LOOP.format(dtype="bfloat16"),
        SCALED_LOOP.format(
            scaler='scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))', dtype="bfloat16"
        ),
    )
    references = (
        "https://github.com/pytorch/pytorch/issues/127176",
        "https://github.com/huggingface/accelerate/pull/1036",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """Scalers that may be enabled for a loss computed under bfloat16 autocast."""
        certain = list(self.idle(script))
        for scaler in certain:
            yield self.finding(
                script.where(scaler.node),
                "autocast computes in bfloat16, which has the range of float32: the scaler only costs time and skips steps",
                instead="remove the scaler: loss.backward(), optimizer.step()",
            )
        for scaler in script.scalers:
            if scaler not in certain and _ONLY_BF16.search(scaler.enabled) and script.has("scaler_step"):
                yield self.finding(
                    script.where(scaler.node),
                    f"the scaler is enabled when `{scaler.enabled}`: bfloat16 needs no scaler, and float16 trains without one",
                    instead="enable it for float16 only",
                )
        for scaler in self._without_float16(script):
            if scaler not in certain:
                certain.append(scaler)
                yield self.finding(
                    script.where(scaler.node),
                    f"{_enabled_when(script, scaler)} computes in bfloat16, which has the range of float32: it only costs time and skips steps",
                    instead="remove the scaler: loss.backward(), optimizer.step()",
                )
        reported = {scaler.key for scaler in certain}
        for scaler, region in self._idle_when_bf16(script):
            if scaler.key not in reported:
                reported.add(scaler.key)
                dtype = arm_with_bf16(script, region)
                yield self.finding(
                    script.where(scaler.node),
                    f"when `{dtype}` ({script.at(region.node)}) is bfloat16, the scaler is still enabled: it only costs time and skips steps",
                    instead=f"enabled={dtype} == torch.float16",
                )
        for scaler in script.scalers:
            dtype = _low_dtype(script, scaler)
            if dtype and scaler.key not in reported:
                reported.add(scaler.key)
                yield self.finding(
                    script.where(scaler.node),
                    f"when `{dtype}` is bfloat16, the scaler is still enabled (`{scaler.enabled}`): it only costs time and skips steps",
                    instead=f"enabled={dtype} == torch.float16",
                )
            setting = bfloat16_by_default(script, scaler) if scaler.key not in reported else None
            if setting is not None:
                yield self.finding(
                    script.where(scaler.node),
                    f"`{setting[0]}` is bfloat16 by default ({script.at(setting[1])}), and the scaler is enabled whatever it is: in bfloat16 "
                    "it only costs time and skips steps",
                    instead=f"create it where {setting[0]} is float16",
                )
        for scaler in sorted(script.scalers, key=lambda scaler: scaler.node.lineno):
            value = enabled_by_value(script, scaler) if scaler.key not in reported else None
            if value is not None and scaler.key.rsplit(".", 1)[-1] in self._stepped_in_bf16(script):
                yield self.finding(
                    script.where(scaler.node),
                    f"with `{value[0]}` '{value[1]}' the scaler is enabled, but autocast computes in bfloat16 whatever it is: the scaler only "
                    "costs time and skips steps",
                    instead=f"take the dtype of autocast from `{value[0]}`, or remove the scaler",
                )
                continue
            run = self._idle_run(script, scaler) if scaler.key not in reported else None
            if run is not None and run.case not in reported:
                reported |= {scaler.key, run.case}  # once for the scalers of several optimizers
                yield self.finding(
                    script.where(scaler.node),
                    f"{run.case} autocast computes in bfloat16 and the scaler is enabled: it only costs time and skips steps",
                    instead="enable it for float16 only",
                )
        if not script.is_assumed:  # what another file does with a setting is open
            yield from self._passed_in(script)

    def _passed_in(self, script: Script) -> Iterator[Finding]:
        """Scalers that another file creates, whose loss comes from a bfloat16 region of this one."""
        reported = set()
        for trace in script.traces:
            for index, event in enumerate(trace):
                if event.kind != "backward" or script.scalers_named(event.scaler) or event.scaler in reported:
                    continue
                last = self._in_bf16(script, trace, index)
                if last and not any(last in text for text, _ in event.guards):  # `if scaler is not None` allows both
                    reported.add(event.scaler)
                    scaler = event.local.scaler
                    yield self.finding(
                        script.where(event.node),
                        f"autocast computes in bfloat16: unless `{scaler}` is created with enabled=False, it only costs time and skips steps",
                        instead="loss.backward(), optimizer.step()",
                    )

    @staticmethod
    def _without_float16(script: Script) -> Iterator[Scaler]:
        """Scalers with the flag that chooses between bfloat16 and float32: `dtype = torch.bfloat16 if use_amp else torch.float32`."""
        regions = [a for a in script.autocasts if a.enabled != "no"]
        if not regions or not all(dtypes_here(script, a) == {"bfloat16", "float32"} for a in regions):
            return
        stepped = {e.scaler.rsplit(".", 1)[-1] for e in script.events("scaler_step")}
        for scaler in script.scalers:
            creation = _creation(script, scaler)
            on_cuda = scaler.enabled == "yes" or is_always_on_cuda(script, scaler)
            is_always = on_cuda and creation is not None and not any(map(is_amp, creation.guards))
            is_low = is_always or all(is_low_with(script, region, scaler) for region in regions)
            if is_low and scaler.key.rsplit(".", 1)[-1] in stepped:
                yield scaler

    @staticmethod
    def _idle_when_bf16(script: Script) -> Iterator[tuple[Scaler, Autocast]]:
        """Scalers that are enabled whichever dtype the regions use, with a region that may use bfloat16."""
        regions = trained_regions(script)
        chosen = [a for a in regions if a.dtype_node is not None]
        # An option that is bfloat16 by default: the file does not show the others.
        either = [
            a
            for a in chosen
            if {"float16", "bfloat16"} <= a.dtypes or a.dtypes == {"bfloat16", UNKNOWN} or is_documented(script, a)
        ]
        stepped = {e.scaler.rsplit(".", 1)[-1] for e in script.events("scaler_step") if not _format_tests(script, e)}
        if not either or len(either) != len(regions):
            return
        all_stated = all(is_documented(script, a) for a in either)
        for scaler in script.scalers:
            creation = _creation(script, scaler)
            if scaler.key.rsplit(".", 1)[-1] not in stepped or creation is None or _format_tests(script, creation):
                continue
            on_cuda = scaler.enabled == "yes" or is_always_on_cuda(script, scaler)
            is_stated = all_stated and not chooses_format(script, scaler, scaler.enabled)
            is_open = any(UNKNOWN in a.dtypes for a in either) and not is_stated
            if is_open and not (on_cuda or _SWITCH.search(scaler.enabled)):
                continue
            values = script.outline.values(scaler.key, scaler.function)
            switches = flag_texts(script, scaler.enabled, scaler.function)
            # A flag for mixed precision as a whole says nothing about the dtype.
            texts = {*switches, *map(text_of, scaler.node.keywords)}
            amp = _SWITCH.search(scaler.enabled) and not any(map(_FORMAT.search, texts))
            together = on_cuda or all(is_entered_with(script, a, switches) for a in either)
            together = together or any(map(_BOTH_FORMATS.search, switches))
            others = [v for v in values if v is not scaler.node]
            # Replaced by None, or switched by a flag of its own; on another device, or for an engine, it is another object.
            is_only = len(values) == 1 or (
                len(others) < len(values)
                and all(
                    _is_other(script, v) or _is_same_kind(script, v, scaler) or is_absent_otherwise(script, v, scaler)
                    for v in others
                )
            )
            if is_only and (together or amp) and not all(only_off_cuda(script, a, scaler, switches) for a in either):
                yield scaler, either[0]

    @staticmethod
    def _idle_run(script: Script, scaler: Scaler) -> Run | None:
        """The settings with which a scaler is enabled and every region of its losses is bfloat16."""
        regions = trained_regions(script)
        if scaler.enabled == "no" or not any("bfloat16" in a.dtypes or UNKNOWN in a.dtypes for a in regions):
            return None
        steps = [e for e in script.events("scaler_step") if scaler in scalers_at(script, e)]
        if not steps or any(_format_tests(script, e) for e in steps):
            return None
        runs = runs_of(script, regions, scaler)
        return runs.where("bfloat16", is_scaled=True) if runs is not None else None

    @classmethod
    def idle(cls, script: Script) -> Iterator[Scaler]:
        """The scalers that certainly run in bfloat16; other rules do not report scalers that should be removed."""
        owned = framework_precisions(script) == {"bfloat16"}
        if not owned and not enters_bfloat16(script) and not any(a.dtype == "bfloat16" for a in script.autocasts):
            return
        if owned and not script.autocasts:
            stepped = {e.scaler.rsplit(".", 1)[-1] for e in script.events("scaler_step")}
        else:
            stepped = cls._stepped_in_bf16(script)
        spared = cls._stepped_elsewhere(script) if stepped and len(script.scalers) > 1 else set()
        for scaler in script.scalers:
            creation = _creation(script, scaler)
            flags = (
                {scaler.enabled, *(text for text, _ in creation.guards)} if creation is not None else {scaler.enabled}
            )
            # A flag that names a number format may be set for float16 only, unless it enables the one region.
            others = [f for f in flags if not _is_bf16(f) and f != only_switch(script)]
            is_stepped = scaler.key.rsplit(".", 1)[-1] in stepped and scaler.node not in spared
            if is_stepped and not any(_FORMAT.search(f) or f == "no" for f in others):
                yield scaler

    @classmethod
    def _stepped_elsewhere(cls, script: Script) -> set[ast.AST]:
        """The scalers whose own losses are from no bfloat16 region, although another function has one under the same name."""
        inside: dict[ast.AST, bool] = {}
        for trace in script.traces:
            for index, event in enumerate(trace):
                if event.kind == "backward" and event.scaled == "yes":
                    for scaler in scalers_at(script, event):
                        is_low = bool(cls._in_bf16(script, trace, index))
                        inside[scaler.node] = inside.get(scaler.node, False) or is_low
        return {node for node, is_low in inside.items() if not is_low}

    @classmethod
    def _stepped_in_bf16(cls, script: Script) -> set[str]:
        """The scalers of a loss from a bfloat16 region."""
        return {last for trace in script.traces for i in range(len(trace)) if (last := cls._in_bf16(script, trace, i))}

    @staticmethod
    def _in_bf16(script: Script, trace: Trace, index: int) -> str:
        """The scaler of a scaled backward or step whose loss comes from a bfloat16 region; "" if that is uncertain."""
        event = trace[index]
        if event.kind != "scaler_step" and not (event.kind == "backward" and event.scaled == "yes"):
            return ""
        switch = only_switch(script)
        others = [(text, is_true) for text, is_true in event.guards if not (is_true and text == switch)]
        if any(_FORMAT.search(text) and not (is_true and _is_bf16(text)) for text, is_true in others):
            return ""
        if event.kind == "scaler_step":
            # The loss that a step is for is the one that its scaler scaled; other branches may have other regions.
            backward = next((i for i in earlier(trace, index, "backward") if trace[i].scaler == event.scaler), None)
            if backward is not None and trace[backward].scaled == "yes":
                return ScalerWithBf16._in_bf16(script, trace, backward)
        if enters_bfloat16(script, event.function):
            return event.scaler.rsplit(".", 1)[-1]
        before = next(earlier(trace, index, "enter_autocast"), None)
        if before is not None and not trace[before].inside("no_grad"):
            regions = list(trace[before].regions[-1].autocasts)
        else:
            # Those of a function with a loss of its own are for that one.
            trained = {e.function for e in script.events("backward")} - {event.function}
            regions = [a for a in script.autocasts if a.enabled != "no" and a.function not in trained]
        # One region with a literal dtype is in bfloat16 whatever its flag is called; of several, one may be for float16.
        named = [a for a in regions if _FORMAT.search(a.enabled) and not _is_bf16(a.enabled)]
        certain = bool(regions) and all(a.dtype == "bfloat16" for a in regions) and (len(regions) == 1 or not named)
        return event.scaler.rsplit(".", 1)[-1] if certain else ""


def _low_dtype(script: Script, scaler: Scaler) -> str:
    """The dtype whose test for float32 alone switches a scaler, if the file may set it to bfloat16; "" otherwise."""
    match = _NOT_FLOAT32.match(scaler.enabled)
    creation = _creation(script, scaler)
    if match is None or (creation is not None and any(_FORMAT.search(text) for text, _ in creation.guards)):
        return ""
    steps = [e for e in script.events("scaler_step") if e.scaler.rsplit(".", 1)[-1] == scaler.key.rsplit(".", 1)[-1]]
    is_only = len(script.outline.values(scaler.key, scaler.function)) == 1
    if not is_only or (steps and all(_format_tests(script, e) for e in steps)):
        return ""
    node = ast.parse(match[1], mode="eval").body
    return match[1] if "bfloat16" in formats_of(script.outline, node, scaler.function) else ""


def _enabled_when(script: Script, scaler: Scaler) -> str:
    if scaler.enabled == "yes" or is_always_on_cuda(script, scaler):
        always = "always enabled" if scaler.enabled == "yes" else "enabled on CUDA"
        return f"the scaler is {always}, and autocast, where it is not float32,"
    return f"the scaler is enabled when `{scaler.enabled}`, and autocast then"


def _is_first_none(script: Script, value: ast.expr) -> bool:
    """Whether a value is the None that a variable has before mixed precision is set up."""
    return isinstance(value, ast.Constant) and value.value is None and not conditions_of(script.outline, value)


def _is_off(script: Script, value: ast.expr) -> bool:
    """Whether a value is the None that a variable has where mixed precision as a whole is off."""
    last = conditions_of(script.outline, value)[-1:]
    return constant(value) is None and any(_SWITCH.search(text) and not is_true for text, is_true in last)


def _is_other(script: Script, value: ast.expr) -> bool:
    """Whether a value takes the place of a scaler on another device, or where mixed precision is off."""
    return _is_for_device(script, value) or _is_first_none(script, value) or _is_off(script, value)


def _is_same_kind(script: Script, value: ast.expr, scaler: Scaler) -> bool:
    """Whether a value is another scaler that is enabled alike, such as the one for an old version of torch."""
    return any(s.node is value and s.enabled == scaler.enabled for s in script.scalers)


def _is_for_device(script: Script, value: ast.expr) -> bool:
    """Whether the innermost condition of a value is the kind of device."""
    return any(_OF_DEVICE.search(text) for text, _ in conditions_of(script.outline, value)[-1:])


def _is_bf16(flag: str) -> bool:
    """Whether a flag, when true, means bfloat16: `use_bf16`, not `dtype != torch.bfloat16`."""
    return bool(_BF16.search(flag)) and not _NEGATED.search(flag)


def _format_tests(script: Script, event: Event) -> bool:
    """Whether a condition on an event, or what a flag in it is assigned, mentions a number format."""
    # `dtype == torch.float32` leaves both 16-bit formats, and so does what follows `if dtype not in (float16, bfloat16): raise`.
    both = {g for g in event.guards if _BOTH_FORMATS.search(g.text) and g.is_true != (" not in " in g.text)}
    for text in (g.text for g in event.guards if not _FULL_PRECISION.search(g.text) and g not in both):
        values = script.outline.values(text, event.function) if text.isidentifier() else []
        if any(_FORMAT.search(_CALLS.sub("", t)) for t in (text, *map(text_of, values))):
            return True
    return False


RULES: tuple[type[Rule], ...] = (ScalerWithBf16,)
