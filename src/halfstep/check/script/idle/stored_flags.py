"""Precision flags that a class stores in an attribute, and that its training does not depend on."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from halfstep.check.regex import regex
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.outputs import in_no_grad
from halfstep.check.script.objects.values import Autocast, Scaler, constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Binding, Function
from halfstep.check.script.syntax.shown import is_only_shown
from halfstep.check.script.syntax.unread import inherits, is_setting, read_names

__all__ = ["idle_flags", "powerless_flags", "shadowed_flags"]

# What may compute in 16 bits, and what of another file may do that for a training loop.
_SIXTEEN = regex(r"autocast|half\(|float16|bf16\b|Accelerator|deepspeed|apex|Fabric|GradScaler")
_ELSEWHERE = regex(
    r"scaler|MixedPrecision|mixed_precision_|\bhalf\b|\bamp\.|amp_context|__dict__|vars\(", re.IGNORECASE
)


def powerless_flags(script: Script, flags: re.Pattern[str]) -> Iterator[tuple[ast.AST, str, str]]:
    """Flags of a class that trains, in a file where nothing computes in 16 bits: what sets them, their key and what is wrong.

    They are read for messages only, or nowhere.
    """
    outline, text = script.outline, script.source.text
    keys = [key for key in outline.bindings if key.startswith("self.") and flags.fullmatch(key[len("self.") :])]
    if not keys or "backward" not in outline.calls or _SIXTEEN.search(text):
        return
    trained = {function.cls for _, function in outline.calls["backward"]}
    for key in keys:
        name, first = key.removeprefix("self."), outline.bindings[key][0]
        if first.function.cls not in trained:
            continue
        uses = [n for n in all_nodes(script.tree) if isinstance(n, ast.Attribute) and n.attr == name]
        loads = [n for n in uses if isinstance(n.ctx, ast.Load) and key_of(n) == key]
        if loads and all(is_only_shown(outline, n) for n in loads):
            yield first.node, key, "only decides what is printed"
        elif len(outline.bindings[key]) == 1 and _is_left(script, first, name, uses):
            yield first.node, key, "is stored and never read"


def _is_left(script: Script, binding: Binding, name: str, uses: Collection[ast.AST]) -> bool:
    """Whether nothing can read a flag that is stored once: its class steps an optimizer itself, extends nothing and is passed nowhere."""
    outline, function, value = script.outline, binding.function, binding.value
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "bool" and value.args:
        value = value.args[0]
    if isinstance(value, ast.Name):
        # A parameter with another use may decide the precision there.
        is_given = value.id in function.params
        is_given &= sum(isinstance(n, ast.Name) and n.id == value.id for n in ast.walk(function.node)) == 1
    else:
        is_given = is_setting(value)
    if not is_given or inherits(outline, function.cls) or _ELSEWHERE.search(script.source.text):
        return False
    own = [call for call, f in outline.calls["backward"] if f.cls == function.cls]
    steps = [call for call, f in outline.calls.get("step", ()) if f.cls == function.cls]
    # `engine.backward(loss)` is the backward pass of a library.
    if not steps or any(call.args for call in own):
        return False
    here = set(ast.walk(binding.node))
    if not here.issuperset(uses):  # `config.fp16` there is what it stores
        return False
    nodes = all_nodes(script.tree)
    owners = {n.value for n in nodes if isinstance(n, ast.Attribute)}
    for node in nodes:
        is_named = isinstance(node, ast.Constant) and node.value == name and node not in here
        if is_named or (isinstance(node, ast.Name) and node.id == "self" and node not in owners):
            return False
    return True


def idle_flags(script: Script, flags: re.Pattern[str], read: Collection[str]) -> Iterator[tuple[ast.AST, str, str]]:
    """Flags that a class stores and nothing reads, next to a scaler or an autocast region of its own that is always on."""
    outline = script.outline
    switches = [(s.function.cls, s.enabled, "the scaler is always enabled") for s in script.scalers]
    classes = {call: function.cls for call, function in outline.calls.get("autocast", ())}
    for region in script.autocasts:
        if not in_no_grad(script, region.node):
            is_on = region.enabled == "yes" and not conditions_of(outline, region.node)
            switches.append((classes.get(region.node, ""), "yes" if is_on else "", "autocast is always on"))
    for key, bindings in outline.bindings.items() if switches else ():
        name = key.removeprefix("self.")
        if name == key or not flags.search(name) or len(bindings) != 1:
            continue
        is_copied = name in read_names(list(ast.walk(bindings[0].node)))
        if name in read and not is_copied:
            continue
        # By the text: the tree has the default of the parameter in the place of the attribute.
        if len(re.findall(rf"(?<!torch)(?<!cuda)[.\"']{name}\b", script.source.text)) > 1 + is_copied:
            continue
        function = bindings[0].function
        own = [(enabled, effect) for cls, enabled, effect in switches if cls == function.cls]
        is_always = {enabled for enabled, _ in own} == {"yes"}
        if is_always and not inherits(outline, function.cls) and _is_given(function, bindings[0].value):
            yield bindings[0].node, key, own[0][1]


def _is_given(function: Function, value: ast.expr | None) -> bool:
    """Whether a value is a parameter with no other use, or is read from settings by a name: `args.use_amp`, `cfg["amp"]`."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "bool" and value.args:
        value = value.args[0]
    return _is_parameter(function, value) or is_setting(value)


def _is_parameter(function: Function, value: ast.expr | None) -> bool:
    """Whether a value is a parameter that its function has no other use of, or a condition on one: `use_amp and is_cuda`."""
    if not isinstance(value, ast.Name | ast.BoolOp):
        return False
    named = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)} & set(function.params)
    uses = [n for n in ast.walk(function.node) if isinstance(n, ast.Name) and n.id in named]
    return len(named) == len(uses) == 1


def shadowed_flags(
    script: Script, flags: re.Pattern[str], read: Collection[str]
) -> Iterator[tuple[ast.arg, Function, Function]]:
    """Parameters that a method only stores, with the method and the one whose own parameter switches mixed precision instead.

    The attribute has other values only as a default, nothing in the file reads it, and the class extends nothing but a module of torch,
    which has no such attribute.
    """
    regions = [a for a in script.autocasts if not in_no_grad(script, a.node)]
    switches: list[Autocast | Scaler] = [*regions, *script.scalers]
    outline = script.outline
    for key, bindings in outline.bindings.items() if switches else ():
        name = key.removeprefix("self.")
        stored = [b for b in bindings if constant(b.value) is ...] if name != key and flags.fullmatch(name) else []
        if len(stored) != 1 or name in read:
            continue
        function = stored[0].function
        bases = [b for b in outline.bases.get(function.cls, ()) if outline.names.full(b) != "torch.nn.Module"]
        if any(getattr(base, "id", "") != "object" for base in bases):
            continue
        own = [s for s in switches if s.function.cls == function.cls]
        taken = [s.function for s in own if s.enabled == name and name in s.function.params]
        parameter = _only_stored(function, stored[0].value, name)
        if parameter is not None and taken and len(taken) == len(own) and function not in taken:
            yield parameter, function, taken[0]


def _only_stored(function: Function, value: ast.expr | None, name: str) -> ast.arg | None:
    """The parameter that a value is, if the function has no other use of it."""
    node = function.node
    if isinstance(node, ast.Module) or not isinstance(value, ast.Name) or value.id != name:
        return None
    uses = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name]
    arguments = (*node.args.args, *node.args.kwonlyargs)
    return next((a for a in arguments if a.arg == name), None) if len(uses) == 1 else None
