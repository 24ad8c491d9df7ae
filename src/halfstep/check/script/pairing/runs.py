"""The runs in which a scaler does not fit its region: float16 and no scaler, or bfloat16 and a scaler that is enabled.

    self.enable_amp = config["enable_amp"]                          in the run with `enable_amp` and without
    scaler = GradScaler(enabled=config["enable_scaler"])            `enable_scaler` the region is float16, and the
    with torch.autocast("cuda", enabled=self.enable_amp): ...       scaler is off

The flag and the dtype of the region and the flag of the scaler are evaluated for every combination of the settings that they
depend on. Nothing is concluded where one of them is not read, or where settings may depend on each other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.values import Autocast, Scaler, argument, constant
from halfstep.check.script.pairing.evaluated import (
    OTHER,
    Format,
    Leaf,
    Reader,
    Rejected,
    Undecided,
    Unreadable,
)
from halfstep.check.script.pairing.flag_pairs import are_related
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.excluded import is_rejection
from halfstep.check.script.syntax.outline import Function

__all__ = ["Run", "Runs", "runs_of"]

MAX_RUNS = 128  # of one pair: seven settings that are on or off
MAX_CANDIDATES = 4  # that are compared with what the file rejects
_FORMAT = regex(r"16|dtype|bf|half|float|precision", re.IGNORECASE)
_MPS = regex(r"['\"]mps['\"]")
_ORDER = ("setting", "parameter", "device", "test")  # in a message
_DEFAULTS = {"cuda": "float16", "mps": "float16", "xpu": "float16", "cpu": "bfloat16"}
Values = dict[Leaf, object]


@dataclass(frozen=True)
class Run:
    """One combination of settings, and what it makes of a region and a scaler."""

    values: Values
    format: str  # of the region; "" where it is off
    is_scaled: bool
    is_certain: bool  # whether the settings are independent of each other, and the file names their values
    has_own: bool  # whether the scaler has a setting of its own, which whoever sets the format may set to match

    @property
    def case(self) -> str:
        """When it happens, in words."""
        named = sorted(self.values.items(), key=lambda item: _ORDER.index(item[0].kind))
        parts = [_words(leaf, value) for leaf, value in named if value != "cuda"]
        return " and ".join(parts) or "in every run"


@dataclass(frozen=True)
class Runs:
    """Every run of a region and a scaler, as far as their settings decide it."""

    script: Script
    every: tuple[Run, ...]

    def where(self, fmt: str, *, is_scaled: bool) -> Run | None:
        """The simplest run that computes in a format with or without the scaler, if it is certain that there is one."""
        runs = [r for r in self.every if r.format == fmt and r.is_scaled is is_scaled and r.is_certain and r.values]
        runs = [r for r in runs if not (is_scaled and r.has_own)]
        simplest = sorted(runs, key=lambda run: len(run.values))[:MAX_CANDIDATES]
        return next((run for run in simplest if not _is_rejected(self.script, run.values)), None)

    def never(self, fmt: str, *, is_scaled: bool) -> bool:
        """Whether no run computes in a format with or without the scaler."""
        return not any(r.format == fmt and r.is_scaled is is_scaled for r in self.every)


def runs_of(script: Script, regions: Sequence[Autocast], scaler: Scaler, opened: Event | None = None) -> Runs | None:
    """The runs of the regions of one loss and its scaler; None if something that decides about them is not read."""
    try:
        runs = tuple(_divided(script, regions, scaler, opened, {}))
    except (Unreadable, RecursionError):
        return None
    return Runs(script, runs) if 0 < len(runs) <= MAX_RUNS else None


def _divided(
    script: Script, regions: Sequence[Autocast], scaler: Scaler, opened: Event | None, values: Values
) -> Iterator[Run]:
    """The runs with some values, divided by what else is to be known."""
    pending = [values]
    number = 0
    while pending:
        number += 1
        if number > 2 * MAX_RUNS:
            raise Unreadable
        values = pending.pop()
        try:
            yield _run(script, regions, scaler, opened, values)
        except Rejected:
            continue
        except Undecided as undecided:
            pending += [{**values, undecided.leaf: value} for value in reversed(undecided.values)]


def _run(script: Script, regions: Sequence[Autocast], scaler: Scaler, opened: Event | None, values: Values) -> Run:
    of_region, of_scaler = _reader(script, values, opened), _reader(script, values, None)
    formats = {f for region in regions if (f := _format(of_region, region, opened))}
    if len(formats) > 1:
        raise Unreadable  # of several regions
    is_scaled = _is_enabled(of_scaler, scaler)
    if any((text, not is_true) in of_scaler.assumed for text, is_true in of_region.assumed):
        raise Unreadable  # they are in different branches
    is_certain = _is_certain(script, values, of_region.read, of_scaler.read)
    has_own = any(leaf.kind != "device" for leaf in of_scaler.read - of_region.read)
    return Run(values, next(iter(formats), ""), is_scaled, is_certain, has_own)


def _reader(script: Script, values: Values, opened: Event | None) -> Reader:
    """A reader that knows which call opens the region: `with region(device, enabled=cfg.amp):`."""
    reader = Reader(script.outline, values)
    node = opened.regions[-1].node if opened is not None and opened.regions else None
    target = script.outline.call_target(node, opened.function) if isinstance(node, ast.Call) and opened else None
    if target is not None and isinstance(node, ast.Call) and opened is not None:
        reader.calls[target] = (node, opened.function)
    return reader


def _format(reader: Reader, region: Autocast, opened: Event | None) -> str:
    """The format that a region computes in, "" where it is off or not entered."""
    function, call = region.function, region.node
    nodes: list[tuple[ast.AST, Function]] = [(call, function)]
    if opened is not None and opened.function is not function:
        nodes.append((opened.node, opened.function))
    if not all(reader.is_reached(node, scope, assuming=True) for node, scope in nodes):
        return ""
    if any(k.arg is None for k in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args):
        raise Unreadable
    is_typed = region.api == "torch.amp.autocast"
    enabled = argument(call, 2 if is_typed else 0, "enabled")
    if enabled is not None and not reader.value(enabled, function):
        return ""
    device = _device(reader, region) if is_typed else region.api.split(".")[1]
    value = reader.value(region.dtype_node, function) if region.dtype_node is not None else None
    if value is None and device in _DEFAULTS:
        return _DEFAULTS[str(device)]
    if not isinstance(value, Format):
        raise Unreadable
    return value.name if value.name in {"float16", "bfloat16"} else ""


def _device(reader: Reader, region: Autocast) -> object:
    node = argument(region.node, 0, "device_type")
    value = reader.value(node, region.function) if node is not None else None
    if value not in _DEFAULTS:
        raise Unreadable
    return value


def _is_enabled(reader: Reader, scaler: Scaler) -> bool:
    """Whether a scaler is created and enabled; one for CUDA disables itself without it, which is no choice of the file."""
    if not reader.is_reached(scaler.node, scaler.function, assuming=True):
        return False
    if any(k.arg is None for k in scaler.node.keywords) or any(isinstance(a, ast.Starred) for a in scaler.node.args):
        raise Unreadable
    for binding in reader.outline.bindings.get(scaler.key, ()):
        is_below = binding.function is scaler.function and getattr(binding.node, "lineno", 0) > scaler.node.lineno
        if is_below and reader.is_reached(binding.node, binding.function):
            if constant(binding.value) is not None:
                raise Unreadable
            return False  # `if not cfg.scale: scaler = None`
    enabled = argument(scaler.node, None, "enabled")
    return enabled is None or bool(reader.value(enabled, scaler.function))


def _is_certain(script: Script, values: Values, region: set[Leaf], scaler: set[Leaf]) -> bool:
    """Whether nothing but the values that are read decides about a run, and each of them may have its value in it."""
    if any(value is OTHER for leaf, value in values.items() if leaf in region | scaler):
        return False
    if values.get(Leaf("device", "device"), "cuda") == "mps" and not _MPS.search(script.source.text):
        return False
    of_region = [leaf for leaf in region - scaler if leaf.kind != "device"]
    of_scaler = [leaf for leaf in scaler - region if leaf.kind != "device"]
    if not of_scaler:
        return True
    # Each decides something of its own: they must be options that the file does not relate.
    if any(leaf.kind != "setting" or _FORMAT.search(leaf.name) for leaf in (*of_region, *of_scaler)):
        return False
    return not any(are_related(script, one.name, other.name) for one in of_region for other in of_scaler)


def _is_rejected(script: Script, values: Values) -> bool:
    """Whether the file raises with some values, anywhere."""
    functions: dict[ast.AST, Function] = {f.node: f for f in script.outline.functions}
    for node in all_nodes(script.tree):
        if isinstance(node, ast.If) and node.body and is_rejection(node.body[-1]):
            raising = True
        elif isinstance(node, ast.Assert):
            raising = False
        else:
            continue
        around = next((n for n in script.above(node) if n in functions), None)
        function = functions[around] if around is not None else script.outline.module
        reader = Reader(script.outline, values)
        try:
            if bool(reader.value(node.test, function)) is raising and reader.is_reached(node, function):
                return True
        except Rejected:
            return True
        except (Undecided, Unreadable):
            continue
    return False


def _words(leaf: Leaf, value: object) -> str:
    if leaf.kind == "device":
        return "on MPS" if value == "mps" else "on CUDA"
    if isinstance(value, str):
        return f"with `{leaf.name}` '{value}'"
    if leaf.kind == "test":
        return f"where `{leaf.name}` is {str(value).lower()}"
    return f"{'with' if value else 'without'} `{leaf.name}`"
