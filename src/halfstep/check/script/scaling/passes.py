"""How often a loop over the parts of a model or an optimizer runs: `for group in optimizer.param_groups`."""

from __future__ import annotations

import ast

from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function

__all__ = ["number_of_passes"]

_WRAPS = {"enumerate", "list", "tuple", "reversed", "tqdm", "zip"}
_MANY = {"parameters", "named_parameters"}
# What makes one list of parameters, and so one group.
_FLAT = {"parameters", "filter", "chain", "list", "tuple", "values"}


def number_of_passes(script: Script, source: ast.expr, function: Function) -> int:
    """The passes of a loop over a value: 1 if that is all, 0 if the text does not show whether there are more."""
    while isinstance(source, ast.Call) and last_name(key_of(source.func)) in _WRAPS and source.args:
        source = source.args[0]
    if isinstance(source, ast.Call):
        return 2 if last_name(text_of(source.func)) in _MANY else 0
    if last_name(key_of(source)) == "param_groups":
        return _num_groups(script)
    values = [source] if isinstance(source, (ast.List, ast.Tuple)) else script.outline.values(key_of(source), function)
    lengths = {_length(value) for value in values} or {0}
    return lengths.pop() if len(lengths) == 1 else 0


def _length(value: ast.expr) -> int:
    """The number of elements of a literal, 0 if it may be another one."""
    if not isinstance(value, (ast.List, ast.Tuple)) or any(isinstance(e, ast.Starred) for e in value.elts):
        return 0
    return len(value.elts)


def _num_groups(script: Script) -> int:
    """The number of parameter groups of the optimizers of a file: 1 where each is made from plain parameters."""
    sites = [site for name, sites in script.outline.library_calls.items() if "optim." in name for site in sites]
    made = [
        (arguments_of(call)[:1], function) for call, function in sites if last_name(text_of(call.func))[:1].isupper()
    ]
    values = [
        value
        for arguments, function in made
        for argument in arguments
        for value in (script.outline.values(key_of(argument), function) or [argument])
    ]
    nums = {_groups_in(value) for value in values} or {0}
    return nums.pop() if len(nums) == 1 else 0


def _groups_in(value: ast.expr) -> int:
    if isinstance(value, ast.Call):
        return 1 if last_name(text_of(value.func)) in _FLAT else 0
    if isinstance(value, (ast.ListComp, ast.GeneratorExp)):
        return 0 if isinstance(value.elt, (ast.Dict, ast.Call)) else 1
    if not isinstance(value, (ast.List, ast.Tuple)):
        return 0
    return len(value.elts) if all(isinstance(e, ast.Dict) for e in value.elts) else 1
