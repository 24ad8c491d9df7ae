"""Precisions that a script chooses and does not train with: of a policy of FSDP, an Accelerator, a region, a dtype to load."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.objects.chosen import is_local, num_reads, own_bindings
from halfstep.check.script.objects.engines import ACCELERATORS
from halfstep.check.script.objects.values import DTYPES, argument, constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import key_of

__all__ = ["idle_choices"]

_LOADED = regex(r"((torch|model|load|weight)_)?dtype")

# What a script that trains by itself asks an Accelerator for; none of these has the precision.
_WITHOUT_PRECISION = frozenset({
    "device", "num_processes", "process_index", "local_process_index", "is_main_process", "is_local_main_process",
    "is_last_process", "print", "wait_for_everyone", "log", "init_trackers", "end_training", "gather", "reduce", "trackers",
    "gather_for_metrics", "main_process_first", "local_main_process_first", "distributed_type", "split_between_processes",
})  # fmt: skip


def idle_choices(script: Script) -> Iterator[tuple[ast.AST, str, str]]:
    """The place of each choice, what is wrong with it and the cure."""
    for call, name in _policies(script):
        text = f"`{name}` is created and passed to nothing: the model keeps its own dtype"
        yield call, text, f"pass it to FSDP (mixed_precision={name}) or fully_shard (mp_policy={name})"
    for call, name in _accelerators(script):
        text = f"the precision of `{name}` has no effect: it prepares no model, and nothing enters `{name}.autocast()`"
        yield call, text, f"model, optimizer = {name}.prepare(model, optimizer), and {name}.backward(loss)"
    for node, name in _contexts(script):
        text = f"`{name}` is created and never entered: the training runs without autocast, whatever the format that it names"
        yield node, text, f"with {name}: around the forward pass and the loss"
    for node, name, chosen, loaded in _dtypes(script):
        text = f"`{name}` is {chosen} here and never read: the model is loaded in {loaded} all the same"
        yield node, text, f"pass dtype={name} to from_pretrained"


def _policies(script: Script) -> Iterator[tuple[ast.Call, str]]:
    """The mixed-precision policies of FSDP that a function assigns to a variable and uses nowhere, each with that variable."""
    for name in ("MixedPrecision", "MixedPrecisionPolicy"):
        for call, function in script.outline.calls.get(name, ()):
            statement = script.outline.parents.get(call)
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if not isinstance(target, ast.Name) or isinstance(function.node, ast.Module):
                continue
            is_read = any(
                isinstance(n, ast.Name) and n.id == target.id and isinstance(n.ctx, ast.Load)
                for n in ast.walk(function.node)
            )
            if "fsdp" in script.outline.names.full(call.func) and not is_read:
                yield call, target.id


def _accelerators(script: Script) -> Iterator[tuple[ast.Call, str]]:
    """The Accelerators with a precision of which a script that steps an optimizer uses nothing that has it, each with its variable."""
    sites = [site for name in ACCELERATORS for site in script.outline.library_calls.get(name, ())]
    if len(sites) != 1 or not script.has("opt_step") or script.autocasts:
        return
    call, function = sites[0]
    precision = argument(call, 2, "mixed_precision")
    statement = script.outline.parents.get(call)
    target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    is_module = isinstance(function.node, ast.Module)
    if precision is None or constant(precision) in {"no", None} or not isinstance(target, ast.Name) or is_module:
        return
    uses = [n for n in ast.walk(function.node) if isinstance(n, ast.Name) and n.id == target.id and n is not target]
    parents = [script.outline.parents.get(n) for n in uses]
    asked = {parent.attr if isinstance(parent, ast.Attribute) else "" for parent in parents}
    others = (n for n in all_nodes(script.tree) if isinstance(n, ast.Attribute) and n.attr in {"backward", "prepare"})
    if uses and asked <= _WITHOUT_PRECISION and not any(key_of(n.value) == target.id for n in others):
        yield call, target.id


def _contexts(script: Script) -> Iterator[tuple[ast.AST, str]]:
    """The autocast regions that a script which trains assigns to a variable and never enters, each with that variable.

    With a scaler, the missing region is what HS134 reports.
    """
    outline = script.outline
    if (
        not script.autocasts
        or script.scalers
        or "backward" not in outline.calls
        or not script.has("opt_step", "owned_step")
    ):
        return
    idle = []
    for region in script.autocasts:
        statement: ast.AST | None = outline.parents.get(region.node)
        while isinstance(statement, ast.IfExp):
            statement = outline.parents.get(statement)
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        name = targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else ""
        # Another file may import what the module of a script has, unless only the program itself runs the statement.
        is_private = name and (is_local(outline, outline.bindings.get(name, [])) or "__main__" in script.source.text)
        if statement is None or not is_private or region.enabled == "no" or num_reads(script.source.text, name):
            return
        idle.append((statement, name))
    if not outline.calls.keys() & {"globals", "locals", "exec"}:
        yield from idle[:1]


def _dtypes(script: Script) -> Iterator[tuple[ast.AST, str, str, str]]:
    """Formats that a function chooses by branches for a model and never reads, while it loads every model in one that it fixes.

    Each with the variable, its format and the one of the model.
    """
    outline = script.outline
    for key in outline.bindings if "from_pretrained" in outline.calls else ():
        bindings = own_bindings(outline, key) if _LOADED.fullmatch(key) else []
        formats = [DTYPES.get(outline.names.full(b.value), "") if b.value is not None else "" for b in bindings]
        if len(set(formats)) < 2 or not all(formats) or not is_local(outline, bindings):
            continue
        functions = {b.function.node for b in bindings}
        loads = [call for call, f in outline.calls["from_pretrained"] if f.node in functions]
        named = [k.value for call in loads for k in call.keywords if k.arg in {"dtype", "torch_dtype"}]
        loaded = {DTYPES.get(outline.names.full(value), "") for value in named}
        if len(functions) != 1 or len(loaded) != 1 or "" in loaded or num_reads(script.source.text, key):
            continue
        actual = loaded.pop()
        yield from ((b.node, key, f, actual) for b, f in zip(bindings, formats, strict=True) if f != actual)
