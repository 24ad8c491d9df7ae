"""Which regions may compute in bfloat16, and what decides it: a flag, an arm of a choice, a parameter with documented values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import lru_cache

from halfstep.check.regex import regex
from halfstep.check.script.flow.order import earlier
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.formats import passed_for
from halfstep.check.script.objects.values import (
    DTYPES,
    UNKNOWN,
    Autocast,
    Scaler,
    argument,
    constant,
    dtypes_of,
    text_of,
)
from halfstep.check.script.pairing.device_tests import Test, is_without_cuda, parts_of, tests_of, tests_of_guards
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.syntax.scope import default_of

__all__ = [
    "arm_with_bf16", "chooses_format", "dtypes_here", "flag_texts", "is_absent_otherwise", "is_documented", "is_entered_with", "is_low_with",
    "names_bf16", "only_off_cuda", "only_switch", "trained_regions",
]  # fmt: skip

# Where it is false there is no CUDA, and a scaler for CUDA disables itself.
_ON_CUDA = regex(r"^([\w.]+|str\([\w.]+\)) == 'cuda'$|^torch\.cuda\.is_available\(\)$|^[\w.]+\.startswith\('cuda'\)$")
_DEVICE = regex(r"dev(ice)?(_?type)?(\.type)?\)?$")
_BF16 = regex(r"bf(loat)?_?16|bfloat", re.IGNORECASE)
_FLOAT16 = regex(r"(?<!b)(float16|fp16)", re.IGNORECASE)
_EITHER = regex(
    r"\b(fp16|float16)\W{1,3}((or|and) )?(bf16|bfloat16)\b|\b(bf16|bfloat16)\W{1,3}((or|and) )?(fp16|float16)\b",
    re.IGNORECASE,
)
# A switch of the format, or of the scaler itself, which whoever chooses the dtype may set to match it.
_CHOOSES = regex(r"16|dtype|bf|half|float|precision|scal", re.IGNORECASE)


def is_low_with(script: Script, region: Autocast, scaler: Scaler) -> bool:
    """Whether the flag of a scaler is what chooses bfloat16, not float32, for a region; elsewhere than on a device it may be off."""
    outline, node = script.outline, region.dtype_node
    if node is None:
        return False
    choices = outline.values(key_of(node), region.function) if key_of(node) else [node]
    wanted = _switches(tests_of(script, scaler))
    asked = []
    for choice in choices:
        if isinstance(choice, ast.IfExp):
            is_body = names_bf16(script, choice.body)
            asked.append(_switches(parts_of(script, choice.test, region.function, is_true=is_body)))
        elif names_bf16(script, choice):
            asked.append(_switches(tests_of_guards(script, conditions_of(outline, choice), region.function)))
    rest = {text for tests in asked for text, _ in tests - wanted}
    return bool(asked) and all(tests & wanted for tests in asked) and all(map(_ON_CUDA.search, rest))


def _switches(tests: Iterable[Test]) -> set[tuple[str, bool]]:
    return {(text_of(test), is_true) for test, is_true in tests}


def only_switch(script: Script) -> str:
    """The flag that enables every region of a file, all with bfloat16 written out: whatever it is called, it means bfloat16."""
    regions = [a for a in script.autocasts if a.enabled != "no"]
    flags = {a.enabled for a in regions}
    is_literal = all(a.dtype_node is not None and names_bf16(script, a.dtype_node) for a in regions)
    return flags.pop() if len(flags) == 1 and is_literal else ""


def arm_with_bf16(script: Script, region: Autocast) -> str:
    """The dtype of a region as written; of `dtype if amp else torch.float32`, the arm that may be bfloat16."""
    node = region.dtype_node
    while isinstance(node, ast.IfExp) and not (names_bf16(script, node.body) or names_bf16(script, node.orelse)):
        is_body = "bfloat16" in dtypes_of(script.outline, node.body, region.function)
        node = node.body if is_body else node.orelse
    return text_of(node)


def dtypes_here(script: Script, region: Autocast) -> frozenset[str]:
    """The dtypes that the calls of this file give a region, which are all that the scalers of this file are used with."""
    outline, function = script.outline, region.function
    name = key_of(region.dtype_node) if region.dtype_node is not None else ""
    passed = list(passed_for(outline, name, function)) if name in function.params else []
    is_changed = any(b.function is function for b in outline.bindings.get(name, ()))
    if not passed or is_changed or default_of(function, name) is not None:
        return region.dtypes
    return frozenset().union(*(dtypes_of(outline, value, scope) for value, scope in passed))


def is_documented(script: Script, region: Autocast) -> bool:
    """Whether the dtype of a region is a parameter or a field that other files set, which this one says is bfloat16 or float16."""
    key = key_of(region.dtype_node) if region.dtype_node is not None else ""
    if key in region.function.params:
        return UNKNOWN in region.dtypes and (_is_described(region.function.node, key) or _is_validated(script, key))
    if "." not in key or not region.dtypes <= {"float16", "bfloat16", UNKNOWN}:
        return False
    name = last_name(key)
    owners = [c for c in _classes(script, region) if c.name == region.function.cls or name in _fields(c)]
    makers = [s for c in owners for s in c.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"]
    is_set = any(name in _fields(c) for c in owners) or any(_takes(maker, key) for maker in makers)
    is_described = any(_is_described(node, name) for node in (*owners, *makers)) or any(map(_is_for_both, owners))
    return is_set and (is_described or _is_validated(script, name))


def _classes(script: Script, region: Autocast) -> list[ast.ClassDef]:
    """The classes of a file, if the region is in one of them."""
    return [n for n in script.tree.body if isinstance(n, ast.ClassDef)] if region.function.cls else []


def _fields(owner: ast.ClassDef) -> set[str]:
    """The fields of a dataclass."""
    return {s.target.id for s in owner.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}


def _takes(maker: ast.FunctionDef, key: str) -> bool:
    """Whether a constructor only stores a parameter under this name: `self.dtype = dtype`."""
    names = {a.arg for a in (*maker.args.args, *maker.args.kwonlyargs)}
    stores = [s for s in ast.walk(maker) if isinstance(s, ast.Assign) and any(key_of(t) == key for t in s.targets)]
    return len(stores) == 1 and key_of(stores[0].value) in names


def _is_described(node: ast.AST, name: str) -> bool:
    """Whether the line of a docstring about a parameter or a field names both formats."""
    text = ast.get_docstring(node) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else None
    lines = re.findall(rf"^[\s*:`]*(?:param )?{name}\b.*$", text or "", re.MULTILINE)
    return any(_BF16.search(line) and _FLOAT16.search(line) for line in lines)


def _is_for_both(owner: ast.ClassDef) -> bool:
    """Whether the docstring of a class says that it computes in either format: `Enables FP16/BF16 training`."""
    return bool(_EITHER.search(ast.get_docstring(owner) or ""))


def _is_validated(script: Script, name: str) -> bool:
    """Whether a file rejects other values of a dtype than the two formats: `if dtype not in (torch.float16, torch.bfloat16): raise`."""
    return name in _validated(script)


@lru_cache(maxsize=4)  # asked for each region of a script
def _validated(script: Script) -> set[str]:
    """The last names of what a file rejects unless it is one of both formats."""
    names = set()
    for node in all_nodes(script.tree) if _BF16.search(script.source.text) else ():
        test = node.test if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise) else None
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.NotIn):
            right = text_of(test.comparators[0])
            if _BF16.search(right) and _FLOAT16.search(right):
                names.add(last_name(key_of(test.left)))
    return names


def trained_regions(script: Script) -> list[Autocast]:
    """The regions of the losses that a scaler scales; every region of the file, where they are entered elsewhere."""
    regions: dict[ast.AST, Autocast] = {}
    for trace in script.traces:
        for index, event in enumerate(trace):
            if event.kind == "backward" and event.scaled == "yes":
                before = next((i for i in earlier(trace, index, "enter_autocast")), None)
                if before is None or trace[before].inside("no_grad"):
                    return [a for a in script.autocasts if a.enabled != "no"]
                regions.update({a.node: a for a in trace[before].regions[-1].autocasts})
    return [a for a in regions.values() or script.autocasts if a.enabled != "no"]


def is_absent_otherwise(script: Script, value: ast.expr, scaler: Scaler) -> bool:
    """Whether a value is the None of the other branch of the switch below which a scaler is created, one that asks for no format."""
    around = conditions_of(script.outline, scaler.node)
    last = conditions_of(script.outline, value)[-1:]
    if not (isinstance(value, ast.Constant) and value.value is None) or not any(g.opposite in around for g in last):
        return False
    return not any(chooses_format(script, scaler, guard.text) for guard in around)


def chooses_format(script: Script, scaler: Scaler, flag: str) -> bool:
    """Whether a flag around a scaler is, or is assigned, something about formats or the scaler itself, and not about mixed precision."""
    values = script.outline.values(flag, scaler.function)
    return any(_CHOOSES.search(text) for text in (flag, *map(text_of, values)))


def names_bf16(script: Script, value: ast.expr) -> bool:
    """Whether an expression is torch.bfloat16."""
    return DTYPES.get(script.outline.names.full(value)) == "bfloat16"


def only_off_cuda(script: Script, region: Autocast, scaler: Scaler, switches: set[str]) -> bool:
    """Whether a region computes in bfloat16 only without CUDA, `float16 if device == "cuda" else bfloat16`, where the scaler is off."""
    outline, node, function = script.outline, region.dtype_node, region.function
    values = (outline.values(key_of(node), function) or [node]) if node is not None else []
    if values and all(_is_for_cpu(script, value, function) for value in values):
        return True
    low = [v for v in values if not isinstance(v, ast.IfExp) and names_bf16(script, v)]
    if low and all(is_without_cuda(script, v, function) for v in low):
        # `if device == "cuda": dtype = float16`, `else: dtype = bfloat16`
        return not any(isinstance(v, ast.IfExp) and "bfloat16" in dtypes_of(outline, v, function) for v in values)
    tests = {text_of(v.test) for v in values if isinstance(v, ast.IfExp) and names_bf16(script, v.orelse)}
    if not tests or not all(isinstance(v, ast.IfExp) and not names_bf16(script, v.body) for v in values):
        return False
    device = constant(argument(scaler.node, 0, "device"))
    is_cuda = scaler.api == "torch.cuda.amp.GradScaler" or device == "cuda" or not scaler.node.args
    tested = {part for switch in switches for part in switch.split(" and ")}
    return all(_ON_CUDA.search(test) and (is_cuda or test in tested) for test in tests)


def _is_for_cpu(script: Script, value: ast.expr, function: Function) -> bool:
    """Whether a value is the entry of a table by devices in which CUDA has another format: `{"cuda": float16, "cpu": bfloat16}[device]`."""
    func = value.func if isinstance(value, ast.Call) else None
    if isinstance(func, ast.Attribute) and func.attr == "get" and isinstance(value, ast.Call) and value.args:
        owner: ast.expr = func.value
        entries = value.args[:1]
    elif isinstance(value, ast.Subscript):
        owner, entries = value.value, [value.slice]
    else:
        return False
    key = key_of(owner)
    tables = script.outline.values(key, function) or script.outline.values(last_name(key), function) if key else [owner]
    if not _DEVICE.search(text_of(entries[0])) or not tables or not all(isinstance(t, ast.Dict) for t in tables):
        return False
    pairs = [p for t in tables if isinstance(t, ast.Dict) for p in zip(t.keys, t.values, strict=True)]
    of_cuda = [entry for device, entry in pairs if constant(device) == "cuda"]
    return bool(of_cuda) and not any(names_bf16(script, entry) for entry in of_cuda)


def flag_texts(script: Script, flag: str, function: Function) -> set[str]:
    """A flag, and the expressions that it is assigned: those of `amp` for `self.amp` after `self.amp = amp`."""
    values = script.outline.values(flag, function) if flag.replace(".", "").isidentifier() else []
    return {flag, *(text_of(value) for value in values if constant(value) is ...)}


def is_entered_with(script: Script, region: Autocast, switches: set[str]) -> bool:
    """Whether the flag of a scaler enables a region, or is the condition around it: `if use: with autocast(dtype): ...`."""
    around = {text for text, is_true in conditions_of(script.outline, region.node) if is_true}
    return bool((around | flag_texts(script, region.enabled, region.function)) & switches)
