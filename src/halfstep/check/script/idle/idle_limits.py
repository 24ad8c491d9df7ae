"""Limits of the gradient norm and numbers of micro-batches that a training function takes, or its class stores, and nothing reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from halfstep.check.regex import regex
from halfstep.check.script.idle.idle_commands import is_shown
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.outline import Binding, Function
from halfstep.check.script.syntax.shown import is_only_shown
from halfstep.check.script.syntax.unread import inherits, is_setting, is_unread
from halfstep.check.script.syntax.unread_settings import Settings

__all__ = ["idle_attributes", "idle_limits"]

_BY_NAME = regex(r"__dict__|\bvars\(|\blocals\(|\bgetattr\(self, *[^\"' ]")


def idle_limits(script: Script, settings: Settings) -> Iterator[tuple[ast.AST, Function, str, str]]:
    """The parameters of functions that run a backward pass and a step themselves, with the function, what is wrong and the cure.

    A method may have the signature that a base class asks for, and so may a function that is passed on as a value.
    """
    outline, text = script.outline, script.source.text
    last = {
        (f.cls, f.name): f for f in outline.functions
    }  # a function that another one of its name replaces never runs
    stepping = {function for name in ("step", "scaler_step") for _, function in outline.calls.get(name, ())}
    for function in {f: None for _, f in outline.calls.get("backward", ()) if f in stepping}:
        if isinstance(function.node, ast.Module) or (function.cls and inherits(outline, function.cls)):
            continue
        if last.get((function.cls, function.name)) is not function:
            continue
        is_value = outline.loads[function.name] > len(outline.calls.get(function.name, ()))
        if getattr(function.node, "decorator_list", None) or is_value or "locals" in outline.calls:
            continue
        arguments = function.node.args
        for parameter in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            use = settings.use_of_number(parameter.arg)
            if use and is_unread(text, function, parameter.arg):
                yield parameter, function, "never reads", use
            elif use and is_shown(script, function, parameter.arg):
                yield parameter, function, "only prints", use


def idle_attributes(script: Script, settings: Settings) -> Iterator[tuple[ast.AST, str, str]]:
    """What a class that steps an optimizer stores in an attribute once, and nothing but messages read, with the key and the cure."""
    outline, text = script.outline, script.source.text
    keys = [key for key in outline.bindings if key.startswith("self.") and settings.use_of_number(key[len("self.") :])]
    if not keys or _BY_NAME.search(text):
        return
    stepping = {function.cls for _, function in outline.calls.get("step", ())} - {""}
    trained = {function.cls for _, function in outline.calls.get("backward", ())} & stepping
    for key in keys:
        name, bindings = key.removeprefix("self."), outline.bindings[key]
        function = bindings[0].function
        if len(bindings) != 1 or function.cls not in trained or inherits(outline, function.cls) or not function.method:
            continue
        if _is_given(bindings[0]) and _is_idle(script, bindings[0], name):
            yield bindings[0].node, key, settings.use_of_number(name)


def _is_given(binding: Binding) -> bool:
    """Whether a value is a setting or a parameter that its function has no other use of."""
    value = binding.value
    if len(getattr(binding.node, "targets", ())) > 1:
        return False
    while isinstance(value, ast.Call) and getattr(value.func, "id", "") in {"int", "float", "max"} and value.args:
        value = value.args[-1]
    if isinstance(value, ast.Name):
        uses = [n for n in ast.walk(binding.function.node) if isinstance(n, ast.Name) and n.id == value.id]
        return value.id in binding.function.params and len(uses) == 1
    return is_setting(value)


def _is_idle(script: Script, binding: Binding, name: str) -> bool:
    """Whether the file names an attribute only where it is stored and in messages, and its object stays in its class."""
    here = set(ast.walk(binding.node))
    nodes: Collection[ast.AST] = all_nodes(script.tree)
    uses = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr == name]
    if len(re.findall(rf"\.{name}\b", script.source.text)) != len(uses):
        return False  # the tree has a value in the place of one
    if not all(n in here or (isinstance(n.ctx, ast.Load) and is_only_shown(script.outline, n)) for n in uses):
        return False
    owners = {n.value for n in nodes if isinstance(n, ast.Attribute)}
    for node in nodes:
        is_named = isinstance(node, ast.Constant) and node.value == name and node not in here
        if is_named or (isinstance(node, ast.Name) and node.id == "self" and node not in owners):
            return False
    return True
