"""Schedules of a loop: of the learning rate, or of another number; and what an object is created by that no plain name calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.objects.choices import text_of
from halfstep.check.script.syntax.names import chain, key_of, last_name
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["called_name", "looped_calls", "schedules_value", "sets_rate", "stored_in"]

# Arguments of a learning-rate schedule.
_OF_OPTIMIZER = regex(r"opt|(^|[_.])lrs?($|_)|learning_?rate|group", re.IGNORECASE)
_COUNT = regex(r"(^|_)(num_)?(steps?|epochs?|iters?|iterations?|updates|batches)$")  # `total_steps=`, `warmup_epochs=`

_MODULES = {"torch.optim", "torch.optim.lr_scheduler"}
_ANY = "Any"  # a class of a module that a setting names
_NAMESPACES = ("SimpleNamespace", "Namespace")


def schedules_value(call: ast.Call, name: str) -> bool:
    """Whether a class is a schedule of another number than the learning rate: nothing it receives is about an optimizer."""
    last = name.rsplit(".", 1)[-1]
    if last[:1].islower() or "LR" in last or name.startswith(("torch.", "transformers.", "timm.")):
        return False
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    counts = {k.value for k in call.keywords if _COUNT.search(k.arg or "")}
    # Any other variable may be the optimizer.
    unknown = [v for v in values if isinstance(v, (ast.Starred, ast.Name)) and v not in counts]
    if not values or any(k.arg is None for k in call.keywords) or unknown:
        return False
    return not any(
        _OF_OPTIMIZER.search(text) for text in (*map(text_of, values), *(k.arg or "" for k in call.keywords))
    )


def called_name(outline: Outline, func: ast.expr) -> str:
    """The name of what a call calls: also an entry of a table of this file, `SCHEDULES[name](opt)`, or `getattr(module, name)(opt)`."""
    name = outline.names.full(func) or ".".join(chain(func))
    if name:
        return name
    is_get = isinstance(func, ast.Call) and isinstance(func.func, ast.Attribute) and func.func.attr == "get"
    table = func.func.value if is_get else func.value if isinstance(func, ast.Subscript) else None  # type: ignore[attr-defined]
    bound = [b.value for b in outline.bindings.get(key_of(table), ())] if table is not None else []
    entries = [table] if isinstance(table, ast.Dict) else [value for value in bound if isinstance(value, ast.Dict)]
    names = [outline.names.full(value) for entry in entries for value in entry.values]
    if names and all(names) and len({full.rpartition(".")[0] for full in names}) == 1:
        return names[0]
    if isinstance(func, ast.Call) and key_of(func.func) == "getattr" and func.args:
        module = outline.names.full(func.args[0])
        return f"{module}.{_ANY}" if module in _MODULES else ""
    return ""


def sets_rate(outline: Outline, cls: str) -> bool:
    """Whether a class of this file has a `step` that sets the learning rate: `group["lr"] = self.rate()`."""
    step = outline.classes.get(cls, {}).get("step")
    if step is None or cls in outline.names.table:
        return False
    # By the tree: a method that names nothing of interest is not in the outline.
    methods = [f.node for f in outline.classes[cls].values()]
    nodes = [n for node in methods for n in ast.walk(node)]
    if any(isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "step" for n in nodes):
        return False  # it steps the optimizer as well
    subscripts = [n for n in nodes if isinstance(n, ast.Subscript)]
    return any(isinstance(n.ctx, ast.Store) and getattr(n.slice, "value", "") == "lr" for n in subscripts)


def looped_calls(outline: Outline, node: ast.AST, name: str, function: Function) -> Iterator[ast.Call]:
    """What creates the objects of a collection of this file that a loop variable goes through: `for s in [StepLR(opt, 5)]`."""
    for part in outline.above(node) if name.isidentifier() else ():
        loops = getattr(part, "generators", [part] if isinstance(part, ast.For) else [])
        for loop in loops:
            if key_of(loop.target) == name:
                source = loop.iter
                if (
                    isinstance(source, ast.Call)
                    and isinstance(source.func, ast.Attribute)
                    and source.func.attr == "values"
                ):
                    source = source.func.value
                values = outline.values(key_of(source), function) if key_of(source) else [source]
                entries = (e for v in values for e in getattr(v, "elts", getattr(v, "values", ())))
                yield from (entry for entry in entries if isinstance(entry, ast.Call))


def stored_in(outline: Outline, key: str) -> list[ast.expr]:
    """What the attributes of a namespace are created with: `SimpleNamespace(schedule=OneCycleLR(...))` for `state.schedule`."""
    owner, _, name = key.rpartition(".")
    if not owner or owner == "self":
        return []
    sites = (site for cls in _NAMESPACES for site in outline.calls.get(cls, ()))
    passed = [(k.value, function) for call, function in sites for k in call.keywords if k.arg == last_name(name)]
    return [
        v
        for value, function in passed
        for v in ((key_of(value) and outline.values(key_of(value), function)) or [value])
    ]
