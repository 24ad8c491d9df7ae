"""Precisions that a script chooses and hands to something that it does not train with: a policy of FSDP, an Accelerator."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.script.objects.engines import ACCELERATORS
from halfstep.check.script.objects.values import argument, constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import key_of

__all__ = ["idle_accelerators", "idle_policies"]

# What a script that trains by itself asks an Accelerator for; none of these has the precision.
_WITHOUT_PRECISION = frozenset({
    "device", "num_processes", "process_index", "local_process_index", "is_main_process", "is_local_main_process",
    "is_last_process", "print", "wait_for_everyone", "log", "init_trackers", "end_training", "gather", "reduce", "trackers",
    "gather_for_metrics", "main_process_first", "local_main_process_first", "distributed_type", "split_between_processes",
})  # fmt: skip


def idle_policies(script: Script) -> Iterator[tuple[ast.Call, str]]:
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


def idle_accelerators(script: Script) -> Iterator[tuple[ast.Call, str]]:
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
