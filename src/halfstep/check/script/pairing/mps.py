"""Whether a loss is computed in float16 on MPS, where the scaler of the file is for CUDA alone and does nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.values import Autocast, Scaler, argument, constant, text_of
from halfstep.check.script.pairing.device_tests import asks_for_cuda, names_mps, parts_of, tests_of, tests_of_guards
from halfstep.check.script.pairing.scaler_condition import Omission
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["omitted_on_mps", "works_on_cuda_only"]

_DEVICE = regex(r"cuda|gpu|cpu|mps|xpu|npu|device|available", re.IGNORECASE)
_CUDA = regex(r"\bcuda\b")
_NOT_CPU = regex(r"^[\w.]*device[\w.]* != ['\"]cpu['\"]$")
_OPTION = regex(r"(args|arguments|cfg|conf|config|opts?|options|hparams|settings)\.\w+$")
_WRITTEN = {"torch.float16", "torch.half"}


def omitted_on_mps(
    script: Script, trace: Trace, index: int, scalers: Sequence[Scaler], opened: Event
) -> Omission | None:
    """A region that the script opens in float16 on MPS, where all of its scalers are for CUDA.

    `GradScaler("cuda")` disables itself where there is no CUDA, so it needs no condition to be without effect.
    """
    event = trace[index]
    if not works_on_cuda_only(script, event, scalers) or not _is_trained_without(script, trace, index, scalers):
        return None
    if any(_DEVICE.search(text) and not _admits_mps(script, opened, text) for text, _ in opened.guards):
        return None
    for region in opened.regions[-1].autocasts:
        if _is_float16(script, region) and region.enabled != "no" and _is_for_mps(script, region, scalers, opened):
            return _omission(script, region, scalers)
    return None


def _omission(script: Script, region: Autocast, scalers: Sequence[Scaler]) -> Omission:
    """The finding at the scaler for a region of several devices, and at the region for one of MPS alone."""
    is_certain = region.dtype == "float16" or region.dtype_node is None
    when = "" if is_certain else f" where `{text_of(region.dtype_node)}` is float16"
    instead = "torch.amp.GradScaler(device.type, enabled=...), or dtype=torch.bfloat16"
    if scalers and not _names_only_mps(script, region):
        return Omission(scalers[0].node, f"the scaler works on CUDA only, so on MPS{when}", instead)
    made = f" ({script.at(scalers[0].node)})" if scalers else ""
    return Omission(
        region.node,
        f"on MPS this region computes in float16{when}, and the scaler{made} works on CUDA only, so",
        instead,
    )


def works_on_cuda_only(script: Script, event: Event, scalers: Sequence[Scaler]) -> bool:
    """Whether the scaler of a backward does nothing without CUDA, or the condition around the backward asks for it."""
    if scalers and all(_is_for_cuda(script, scaler) for scaler in scalers):
        return True
    return any(
        is_true and asks_for_cuda(test) for test, is_true in tests_of_guards(script, event.guards, event.function)
    )


def _is_for_cuda(script: Script, scaler: Scaler) -> bool:
    """Whether a scaler does nothing without CUDA: its device is CUDA, or its condition asks for it."""
    device = argument(scaler.node, 0, "device") if scaler.api == "torch.amp.GradScaler" else None
    if device is None or constant(device) == "cuda":
        return scaler.api.startswith("torch.")
    return any(is_true and asks_for_cuda(test) for test, is_true in tests_of(script, scaler))


def _is_trained_without(script: Script, trace: Trace, index: int, scalers: Sequence[Scaler]) -> bool:
    """Whether a loss is trained where its scaler does nothing: the backward has no test of it, or another branch does."""
    event = trace[index]
    tests = list(tests_of_guards(script, event.guards, event.function))
    names = {event.scaler, event.local.scaler, *(scaler.key for scaler in scalers)} - {""}
    is_tested = any(asks_for_cuda(test) or names & {key_of(n) for n in ast.walk(test)} for test, _ in tests)
    others = (e for e in trace if e.kind == "backward" and e.scaled == "no" and e.loops == event.loops)
    return not is_tested or any(not compatible(other, event) for other in others)


def _is_float16(script: Script, region: Autocast) -> bool:
    """Whether a region computes in float16 on MPS, which is the default there."""
    if region.dtype == "float16" or region.dtype_node is None:
        return "float16" in region.dtypes
    return "float16" in region.dtypes and not _is_written_for_cuda(script)


def _is_for_mps(script: Script, region: Autocast, scalers: Sequence[Scaler], opened: Event) -> bool:
    """Whether a region names MPS as its device, or is for the device of a branch that does, or of a flag that allows it."""
    if region.device == "mps":
        return True
    device = argument(region.node, 0, "device_type")
    if "cuda.amp" in region.api or device is None or isinstance(device, ast.Constant):
        return False
    enabled = argument(region.node, 2, "enabled")
    flags = list(parts_of(script, enabled, region.function)) if enabled is not None else []
    if any(is_true and asks_for_cuda(test) for test, is_true in flags):
        return False
    if any(is_true and names_mps(test) for test, is_true in (*flags, *_conditions(script, region, scalers, opened))):
        return True
    # The device that the file chooses, on which a setting alone, if anything, enables the region.
    settings = [text_of(test) for test, is_true in flags if is_true and not isinstance(test, ast.Constant)]
    is_set = len(settings) == len(flags) and all(_NOT_CPU.search(t) or _is_option(script, t) for t in settings)
    return "mps" in region.devices and (region.enabled == "yes" or (enabled is not None and is_set))


def _conditions(
    script: Script, region: Autocast, scalers: Sequence[Scaler], opened: Event
) -> Iterator[tuple[ast.expr, bool]]:
    """The tests under which a region is created or entered, or a scaler for it created."""
    yield from ((test, True) for test in _branches(script, region))
    yield from tests_of_guards(script, opened.guards, opened.function)
    for created in script.events("make_scaler"):
        if any(created.node is scaler.node for scaler in scalers):
            yield from tests_of_guards(script, created.guards, created.function)


def _branches(script: Script, region: Autocast) -> Iterator[ast.expr]:
    """The tests in whose branch a region is created."""
    node: ast.AST = region.node
    for parent in script.above(region.node):
        if isinstance(parent, (ast.If, ast.IfExp)):
            body = parent.body if isinstance(parent.body, list) else [parent.body]
            if any(node is part for part in body):
                yield parent.test
        node = parent


def _names_only_mps(script: Script, region: Autocast) -> bool:
    """Whether a region is written for MPS: its device, or the branch that it is in."""
    return region.device == "mps" or any(map(names_mps, _branches(script, region)))


def _admits_mps(script: Script, opened: Event, text: str) -> bool:
    """Whether a condition around a region asks for MPS among other devices."""
    guards = [guard for guard in opened.guards if guard.text == text]
    return any(is_true and names_mps(test) for test, is_true in tests_of_guards(script, guards, opened.function))


def _is_option(script: Script, text: str) -> bool:
    """Whether a flag is a setting of the run, which nothing in the file changes."""
    return bool(_OPTION.search(text)) and not _DEVICE.search(text) and not script.outline.bindings.get(text)


def _is_written_for_cuda(script: Script) -> bool:
    """Whether float16 is chosen where the device is CUDA, or is not MPS, and may be another format elsewhere."""
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Attribute) or text_of(node) not in _WRITTEN:
            continue
        child: ast.AST = node
        for parent in script.above(node):
            if isinstance(parent, ast.Compare):
                break
            if isinstance(parent, (ast.If, ast.IfExp)) and child is not parent.test:
                body = parent.body if isinstance(parent.body, list) else [parent.body]
                test, is_body = text_of(parent.test), any(child is part for part in body)
                if ("mps" in test and not is_body) or ("mps" not in test and is_body and _CUDA.search(test)):
                    return True
            child = parent
    return False
