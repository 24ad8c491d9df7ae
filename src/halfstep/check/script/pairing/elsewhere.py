"""Whether a loss is computed in bfloat16 by a region of another file: what is passed to its helper, or a setting for it."""

from __future__ import annotations

import ast
from functools import lru_cache

from halfstep.check.regex import regex
from halfstep.check.script.objects.values import DTYPES, Scaler, argument, constant
from halfstep.check.script.pairing.device_tests import asks_for_cuda, tests_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["bfloat16_by_default", "enters_bfloat16"]

_HELPER = regex(
    r"^_?(get_|make_|maybe_|build_|create_)?(amp_)?autocast(_?(context|ctx|manager|cm))?$|^amp_(context|ctx)$"
)
_DTYPE = regex(r"^(amp|autocast|mixed_precision)_(dtype|precision)$")
_NAMES = {"bf16", "bfloat16", "torch.bfloat16"}


def enters_bfloat16(script: Script, function: Function | None = None) -> bool:
    """Whether every region of a function, or of some function, comes from a helper of another file that is asked for bfloat16."""
    asked = {} if script.autocasts else _helpers(script.outline)
    return bool(asked) and (any(asked.values()) if function is None else asked.get(function, False))


@lru_cache(maxsize=1)  # rules ask for every event of one script
def _helpers(outline: Outline) -> dict[Function, bool]:
    """The functions that enter a context of another file called after autocast, and whether they always ask it for bfloat16."""
    asked: dict[Function, bool] = {}
    for name, sites in outline.calls.items():
        for call, function in sites if _HELPER.search(name) else ():
            if isinstance(outline.parents.get(call), ast.withitem):
                is_foreign = outline.call_target(call, function) is None
                asked[function] = asked.get(function, True) and is_foreign and _asks_for_bfloat16(outline, call)
    return asked


def _asks_for_bfloat16(outline: Outline, call: ast.Call) -> bool:
    values = [*call.args, *(k.value for k in call.keywords if (k.arg or "").endswith(("dtype", "precision")))]
    return any(_is_bfloat16(outline, value) for value in values)


def _is_bfloat16(outline: Outline, value: ast.expr | None) -> bool:
    return constant(value) in _NAMES or (value is not None and DTYPES.get(outline.names.full(value)) == "bfloat16")


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
            if _DTYPE.search(name) and _is_bfloat16(script.outline, default):
                return name, node
    return None
