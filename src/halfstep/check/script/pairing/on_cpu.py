"""Whether a loss is computed in float16 on the CPU, where the condition of its scaler disables it."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.values import DTYPES, Autocast, Scaler, argument, constant, text_of
from halfstep.check.script.pairing.device_tests import Test, asks_for_cuda, parts_of, tests_of, tests_of_guards
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import key_of

__all__ = ["float16_on_cpu"]

_FORMAT = regex(r"16|dtype|precision|half")
_EXITS = regex(r"exit|abort|error|fail")


def float16_on_cpu(script: Script, scalers: Sequence[Scaler], opened: Event) -> tuple[Scaler, ast.expr] | None:
    """The scaler that a test of the device, `device != "cpu"`, disables on the CPU, while its region is float16 there."""
    regions = opened.regions[-1].autocasts
    own = [s for s in scalers if all(a.dtype == "float16" or _sets_float16(script, s, a) for a in regions)]
    test = _test_of(script, own[0], opened) if len(own) == 1 else None
    return (own[0], test) if test is not None else None


def _sets_float16(script: Script, scaler: Scaler, region: Autocast) -> bool:
    """Whether the block that creates a scaler also sets the dtype of a region, to float16."""
    statement, key = script.statement(scaler.node), key_of(region.dtype_node)
    block = script.outline.parents.get(statement) if statement is not None and key else None
    arms = [arm for name in ("body", "orelse") if isinstance(arm := getattr(block, name, None), list)]
    block_of_scaler = next((arm for arm in arms if statement in arm), [])
    values = [s.value for s in block_of_scaler if isinstance(s, ast.Assign) and key in map(key_of, s.targets)]
    return bool(values) and DTYPES.get(script.outline.names.full(values[-1])) == "float16"


def _test_of(script: Script, scaler: Scaler, opened: Event) -> ast.expr | None:
    """The test of the device in the condition of a scaler, if nothing else excludes the CPU."""
    tests = list(tests_of(script, scaler))
    devices = [test for test in tests if _excludes_cpu(test)]
    others = [test for test in tests if test not in devices]
    if not devices or not all(_FORMAT.search(text_of(test)) for test, _ in others):
        return None
    regions = opened.regions[-1].autocasts
    if any(map(_excludes_cpu, tests_of_guards(script, opened.guards, opened.function))):
        return None
    if not all(_is_on_cpu(script, region, devices[0][0]) for region in regions) or _needs_cuda(script):
        return None
    return devices[0][0]


def _excludes_cpu(test: Test) -> bool:
    """Whether a test is false on the CPU: `device.type == "cuda"`, `device != "cpu"`."""
    node, is_true = test
    if is_true and asks_for_cuda(node):
        return True
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or "device" not in text_of(node.left):
        return False
    is_equal = isinstance(node.ops[0], ast.Eq)
    return (
        constant(node.comparators[0]) == "cpu"
        and (is_equal or isinstance(node.ops[0], ast.NotEq))
        and is_equal != is_true
    )


def _is_on_cpu(script: Script, region: Autocast, test: ast.expr) -> bool:
    """Whether a region is for whatever device there is, in float16 on each."""
    device, enabled = argument(region.node, 0, "device_type"), argument(region.node, 2, "enabled")
    if region.api != "torch.amp.autocast" or region.dtype_node is None:
        return False
    if device is None or constant(device) is not ... or region.enabled == "no":
        return False
    flags = script.outline.values(key_of(enabled), region.function) if key_of(enabled) else []
    parts = [part for flag in (enabled, *flags) if flag is not None for part in parts_of(script, flag, region.function)]
    if any(map(_excludes_cpu, parts)):
        return False
    # The device that the scaler's test is about, or one that the file itself chooses.
    return "cpu" in region.devices or bool(_names(device) & _names(test))


def _names(node: ast.expr) -> set[str]:
    return {
        n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute))
    } - {"type", "self", "torch"}


def _needs_cuda(script: Script) -> bool:
    """Whether the script ends without CUDA: `if not torch.cuda.is_available(): raise`, or the same as an assertion."""
    for node in all_nodes(script.tree):
        if isinstance(node, ast.Assert) and "cuda" in text_of(node.test) and "cpu" not in text_of(node.test):
            return True
        if isinstance(node, ast.If) and ("cuda" in text_of(node.test) or "cpu" in text_of(node.test)):
            inside = [n for s in (*node.body, *node.orelse) for n in ast.walk(s)]
            if any(
                isinstance(n, ast.Raise) or (isinstance(n, ast.Call) and _EXITS.search(text_of(n.func))) for n in inside
            ):
                return True
    return False
