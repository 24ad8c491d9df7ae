"""Options of which one enables a float16 region and another one its scaler, so that a run may have the one without the other."""

from __future__ import annotations

import ast

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.values import DTYPES, Autocast, Scaler, argument
from halfstep.check.script.pairing.device_tests import tests_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.settled import setting_name

__all__ = ["are_related", "unscaled_option"]

_OPTION = regex(r"(\w+\.)*(args?|cfg|conf|config|opts?|options|hparams|flags|settings)\.\w+$")
_FLOAT16 = regex(r"^(use_|enable_)?(fp16|float16|half)$")
_BFLOAT16 = regex(r"^(use_|enable_)?(bf16|bfloat16)$")
_AMP = regex(r"^(use_|enable_)?(torch_)?(amp|autocast|mixed_precision)$")


def unscaled_option(script: Script, scaler: Scaler, opened: Event) -> tuple[str, str] | None:
    """When a region is float16 without its scaler, in words, and the option that enables the scaler; None if the text shows neither.

    `dtype=torch.bfloat16 if args.bf16 else torch.float16` or `enabled=args.amp`, with a scaler for `args.fp16`.
    """
    tests = list(tests_of(script, scaler))
    if len(tests) != 1 or not tests[0][1] or not _is_option(script, flag := key_of(tests[0][0])):
        return None
    partners = [_partner(script, region, flag, opened) for region in opened.regions[-1].autocasts]
    if not partners or partners[0] is None or len(set(partners)) > 1:
        return None
    case, other = partners[0]
    return None if are_related(script, flag, other) else (case, flag)


def _partner(script: Script, region: Autocast, flag: str, opened: Event) -> tuple[str, str] | None:
    """When a region is float16 whatever the flag of the scaler is, and the other option that decides it; None if never."""
    if opened.guards or region.dtype_node is None or not _FLOAT16.match(last_name(flag)):
        return None
    if region.dtype == "float16":
        other = key_of(_source(script, argument(region.node, None, "enabled"), region))
        is_pair = _is_option(script, other) and bool(_AMP.match(last_name(other)))
        return (f"with `{other}` and without `{flag}`", other) if is_pair else None
    choice = _source(script, region.dtype_node, region)
    if not isinstance(choice, ast.IfExp) or region.enabled != "yes":
        return None
    other, full = key_of(choice.test), script.outline.names.full
    is_rest = DTYPES.get(full(choice.body)) == "bfloat16" and DTYPES.get(full(choice.orelse)) == "float16"
    is_pair = is_rest and _is_option(script, other) and bool(_BFLOAT16.match(last_name(other)))
    return (f"without `{flag}` and `{other}`", other) if is_pair else None


def _source(script: Script, node: ast.expr | None, region: Autocast) -> ast.expr | None:
    """An expression, or the only value of the variable that it is."""
    values = script.outline.values(key_of(node), region.function) if node is not None and key_of(node) else []
    return values[0] if len(values) == 1 else node


def _is_option(script: Script, key: str) -> bool:
    return bool(_OPTION.match(key)) and not script.outline.bindings.get(key)


def are_related(script: Script, one: str, other: str) -> bool:
    """Whether any line other than the two names both options: a check that one of them is set, or a value computed from both.

    Options are compared by their last names, `amp` for `args.amp` and `cfg["amp"]`.
    """
    one, other = last_name(one), last_name(other)
    for node in all_nodes(script.tree):
        if isinstance(node, (ast.If, ast.Assert, ast.IfExp, ast.While)):
            parts: ast.AST = node.test
        elif isinstance(node, (ast.BoolOp, ast.Assign)):
            parts = node
        else:
            continue
        read = (n for n in ast.walk(parts) if isinstance(n, (ast.Name, ast.Attribute, ast.Subscript)))
        keys = {setting_name(n) for n in read if not script.outline.names.full(n)}  # `torch.amp` is no option
        if {one, other} <= keys:
            return True
    return "mutually_exclusive" in script.source.text
