"""HS610: parts of a prepared model that are called past the autocast of Accelerate."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.objects.engines import ACCELERATE, Engine, engines_of
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.modules import created_classes
from halfstep.check.script.objects.outputs import in_no_grad
from halfstep.check.script.objects.parameters import is_model_name
from halfstep.check.script.objects.values import argument
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function

__all__ = ["RULES"]

_TRAIN = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="bf16")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        {forward}
        loss = loss_fn(out, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""
# Names of modules, where nothing in the file shows what the attribute is; a method has a verb.
_PART = regex(
    r"(^|_)(encoder|decoder|model|backbone|head|embeddings?|embed_tokens|transformer|unet|projection|projector|proj|layers?|tower|adapter|net)$"
)
_LOADS = regex(r"loader|optim|sched|\bdl\b|_dl$|data")
# With these the strategy decides on the dtype of weights and computation.
_STRATEGIES = regex(r"deepspeed|fsdp|autocast", re.IGNORECASE)
_ASKS = {"hasattr", "getattr", "isinstance", "id", "type", "print", "len", "repr", "str"}


class BypassedAutocast(ScriptRule):
    """Training calls a part of the prepared model, which is not under Accelerate's autocast."""

    code = "HS610"
    name = "autocast-bypassed"
    severity = "warning"
    reason = (
        "`accelerator.prepare` replaces the forward of the model by one under autocast, and nothing else. A loop that calls "
        "`model.encoder(x)`, or another method than `forward`, computes in the dtype of the weights: with `mixed_precision='bf16'` and "
        "float32 weights as slowly and with as much memory as without it. In fp16 the loss is scaled all the same."
    )
    bad = (_TRAIN.format(forward="out = model.head(model.encoder(x))"),)
    good = (
        _TRAIN.format(forward="out = model(x)"),
        _TRAIN.format(forward="with accelerator.autocast():\n            out = model.head(model.encoder(x))"),
        _TRAIN.format(forward="features = model.encoder(x)\n        out = model(features)"),
    )
    references = (
        "https://huggingface.co/docs/accelerate/package_reference/accelerator#accelerate.Accelerator.autocast",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """The first call of a part in training, of each prepared model that the file runs in no other way."""
        engines = {e.name: e for e in engines_of(script) if _is_mixed(script, e)}
        if not engines or _STRATEGIES.search(script.source.text):
            return
        calls = [n for n in all_nodes(script.tree) if isinstance(n, ast.Call)]
        training = {f for c, f in script.outline.calls.get("backward", ()) if _owner(c) in engines}
        trained = {node for function in training for node in ast.walk(function.node)}
        for engine, key, prepared, function in _prepared_models(script, engines):
            keys = {key, f"{key}.module"} | _unwrapped(script, engine, key)
            if any(_runs(script, call, keys, engine) for call in calls):
                continue
            sites = [
                call
                for call in calls
                if _part_of(call, keys)
                and call in trained
                and _is_part(script, call, keys, prepared, function)
                and not in_no_grad(script, call)
                and not _is_detached(script, call)
            ]
            if sites:
                first = min(sites, key=lambda call: (call.lineno, call.col_offset))
                yield self.finding(
                    script.where(first),
                    f"`{key_of(first.func)}` is not under autocast: `{engine.key}.prepare` wraps only the forward of `{key}`, which nothing calls, so "
                    "mixed_precision has no effect on it",
                    instead=f"with {engine.key}.autocast(): around the forward, or call {key}(...) and move this into its forward",
                )


def _is_mixed(script: Script, engine: Engine) -> bool:
    """Whether a script creates an Accelerator with a mixed precision that the text sets or an option decides."""
    if engine.library != ACCELERATE or not engine.is_created or engine.plugin or engine.precision in {"fp32", "half"}:
        return False
    created = [c for c, _ in script.outline.calls.get("Accelerator", ()) if argument(c, 2, "mixed_precision")]
    return engine.precision != "?" or bool(created)


def _owner(call: ast.Call) -> str:
    return last_name(key_of(call.func.value)) if isinstance(call.func, ast.Attribute) else ""


def _prepared_models(script: Script, engines: dict[str, Engine]) -> Iterator[tuple[Engine, str, ast.expr, Function]]:
    """The engine and the variable of each prepared model, with what is passed for it, and the function."""
    for call, function in script.outline.calls.get("prepare", ()):
        statement = script.outline.parents.get(call)
        engine = engines.get(_owner(call))
        if engine is None or not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            continue
        target = statement.targets[0]
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        for variable, value in zip(targets, call.args, strict=False):
            key = key_of(variable)
            if len(targets) == len(call.args) and is_model_name(key) and not _LOADS.search(key):
                yield engine, key, value, function


def _unwrapped(script: Script, engine: Engine, key: str) -> set[str]:
    """The variables that `accelerator.unwrap_model(model)` is assigned to: its forward keeps the autocast."""
    sites = [c for c, _ in script.outline.calls.get("unwrap_model", ()) if _owner(c) == engine.name]
    parents = [script.outline.parents.get(c) for c in sites if c.args and key_of(c.args[0]) == key]
    return {key_of(t) for p in parents if isinstance(p, ast.Assign) for t in p.targets} - {""}


def _runs(script: Script, call: ast.Call, keys: set[str], engine: Engine) -> bool:
    """Whether a call runs the forward of a model, or may do so in a function that it is passed to."""
    called = key_of(call.func)
    if called in keys or called.removesuffix(".forward") in keys:
        return True
    if not any(key_of(value) in keys for value in arguments_of(call)):
        return False
    if _owner(call) == engine.name or called in _ASKS:
        return False
    functions = [f for f in script.outline.functions if f.name == last_name(called)]
    for function in functions:
        inner = [n for n in ast.walk(function.node) if isinstance(n, ast.Call)]
        passed = {p for p, v in zip(function.params, call.args, strict=False) if key_of(v) in keys}
        passed |= {k.arg for k in call.keywords if k.arg is not None and key_of(k.value) in keys}
        uses = [c for c in inner if key_of(c.func) not in _ASKS]
        if any(key_of(part) in passed for c in uses for part in (c.func, *arguments_of(c))):
            return True
    return not functions


def _part_of(call: ast.Call, keys: set[str]) -> str:
    """The part of a model that a call runs: `encoder` of `model.encoder(x)`; "" for any other call."""
    called = key_of(call.func)
    parts = [called[len(key) + 1 :] for key in keys if called.startswith(f"{key}.")]
    return min(parts, key=len) if parts else ""


def _is_part(script: Script, call: ast.Call, keys: set[str], prepared: ast.expr, function: Function) -> bool:
    """Whether what a call runs is a module, or a method of a class of this file that does not run the forward."""
    part, called = _part_of(call, keys), key_of(call.func)
    values = script.outline.values(key_of(prepared), function) if key_of(prepared) else [prepared]
    classes = {name for value in values for name in created_classes(script.outline, value)}
    for name in classes:
        if part in script.outline.classes[name]:
            return not _calls_itself(script, name, part)
    is_object = any(isinstance(n, ast.Attribute) and key_of(n.value) == called for n in all_nodes(script.tree))
    return is_object or bool(_PART.search(last_name(part)))


def _calls_itself(script: Script, name: str, method: str, depth: int = 4) -> bool:
    """Whether a method calls `self(...)`, also in the methods that it calls."""
    methods = script.outline.classes[name]
    calls = {key_of(n.func) for n in ast.walk(methods[method].node) if isinstance(n, ast.Call)}
    if calls & {"self", "self.forward", "super"} or not depth:
        return True
    others = {key.removeprefix("self.") for key in calls if key.startswith("self.")} & methods.keys() - {method}
    return any(_calls_itself(script, name, other, depth - 1) for other in others)


def _is_detached(script: Script, call: ast.Call) -> bool:
    parent = script.outline.parents.get(call)
    return isinstance(parent, ast.Attribute) and parent.attr == "detach"


RULES: tuple[type[Rule], ...] = (BypassedAutocast,)
