"""Whether a loss is computed in bfloat16 by a region of another file: what is passed to its helper, or a setting for it."""

from __future__ import annotations

import ast
from functools import lru_cache

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.values import DTYPES, Scaler, argument, constant
from halfstep.check.script.scaling.device_tests import asks_for_cuda, tests_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import statements_in
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = ["bfloat16_by_default", "enters_bfloat16"]

_HELPER = regex(
    r"^_?(get_|make_|maybe_|build_|create_)?(amp_)?autocast(_?(context|ctx|manager|cm))?$|^amp_(context|ctx)$"
)
_DTYPE = regex(r"^(amp|autocast|mixed_precision)_(dtype|precision)$")
_NAMES = {"bf16", "bfloat16", "torch.bfloat16"}


def enters_bfloat16(script: Script, event: Event) -> bool:
    """Whether every region around an event's function comes from a helper of another file that is asked for bfloat16."""
    if script.autocasts:
        return False
    calls = _helpers_entered(event.function.node)
    own = any(script.outline.call_target(call, event.function) is not None for call in calls)
    return bool(calls) and not own and all(_asks_for_bfloat16(script, call) for call in calls)


@lru_cache(maxsize=1)
def _helpers_entered(function: ast.AST) -> tuple[ast.Call, ...]:
    """The calls of `with` statements that are named like a helper for autocast; all events of a function ask for them."""
    items = [i.context_expr for n in statements_in(function) if isinstance(n, ast.With) for i in n.items]
    return tuple(c for c in items if isinstance(c, ast.Call) and _HELPER.search(last_name(key_of(c.func))))


def _asks_for_bfloat16(script: Script, call: ast.Call) -> bool:
    values = [*call.args, *(k.value for k in call.keywords if (k.arg or "").endswith(("dtype", "precision")))]
    return any(_is_bfloat16(script, value) for value in values)


def _is_bfloat16(script: Script, value: ast.expr | None) -> bool:
    return constant(value) in _NAMES or (
        value is not None and DTYPES.get(script.outline.names.full(value)) == "bfloat16"
    )


def bfloat16_by_default(script: Script, scaler: Scaler) -> tuple[str, ast.AST] | None:
    """The setting `amp_dtype: str = "bfloat16"` of the class whose flag, with the device, is all that enables a scaler.

    Only where the file has no region: another one computes in the dtype of this setting.
    """
    tests = [(test, is_true) for test, is_true in tests_of(script, scaler) if not asks_for_cuda(test)]
    flags = {last_name(key_of(test)) for test, is_true in tests if is_true and "." in key_of(test)}
    if script.autocasts or scaler.enabled == "no" or len(flags) != 1 or len(flags) < len(tests):
        return None
    owners = [n for n in script.tree.body if isinstance(n, ast.ClassDef)]
    for owner in owners:
        fields = {n.target.id: n for n in owner.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        for name, node in fields.items() if flags <= fields.keys() else ():
            default = argument(node.value, None, "default") if isinstance(node.value, ast.Call) else node.value
            if _DTYPE.search(name) and _is_bfloat16(script, default):
                return name, node
    return None
