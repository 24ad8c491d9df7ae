"""Models that a Trainer loads itself (`model_init=load`, and TRL's `model_init_kwargs`), and loads that a later cast replaces."""

from __future__ import annotations

import ast

from halfstep.check.script.objects.formats import AUTO, formats_of, keyword_of
from halfstep.check.script.objects.values import argument, constant
from halfstep.check.script.objects.weights import Cast, Lineage, conditions_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["initialized", "is_rebound", "lasting_casts", "loading_options"]


def initialized(trainer: ast.Call) -> ast.expr | None:
    """The model of `Trainer(model_init=load)`: what that function returns."""
    load = argument(trainer, None, "model_init")
    return ast.copy_location(ast.Call(load, [], []), load) if load is not None and key_of(load) else None


def loading_options(outline: Outline, model: ast.expr, arguments: ast.Call, function: Function) -> list[Cast]:
    """The dtype in `model_init_kwargs`, with which TRL loads a model from its name."""
    names = outline.values(key_of(model), function) if key_of(model) else [model]
    options = keyword_of(outline, arguments, function, "model_init_kwargs")
    if options is None or any(isinstance(name, ast.Call) for name in names):
        return []
    spread = ast.Call(arguments.func, [], [ast.keyword(None, options)])
    dtype = keyword_of(outline, spread, function, "torch_dtype", "dtype")
    if dtype is None or constant(dtype) is None or keyword_of(outline, spread, function, "quantization_config"):
        return []
    load = ast.copy_location(ast.Call(ast.Name("dict", ast.Load()), [], [ast.keyword("dtype", dtype)]), dtype)
    return [Cast(load, function, "", formats_of(outline, dtype, function), "load")]


def lasting_casts(lineage: Lineage) -> list[Cast]:
    """The casts of a model, without loads that a cast further down always replaces: `model.to(device, dtype=dtype)`."""
    return [c for c in lineage.casts if c.form != "load" or not any(_replaces(lineage, o, c) for o in lineage.casts)]


def _replaces(lineage: Lineage, later: Cast, load: Cast) -> bool:
    is_after = later.function is load.function and later.node.lineno > load.node.lineno
    if later.form != "cast" or not is_after or not later.formats or AUTO in later.formats:
        return False
    return set(conditions_of(lineage.outline, later.node)) <= set(conditions_of(lineage.outline, load.node))


def is_rebound(lineage: Lineage, load: Cast, owner: ast.expr) -> bool:
    """Whether another load is always assigned to the same variable before the parameters of `owner` are read."""
    if load.form != "load":
        return False
    here = conditions_of(lineage.outline, load.node)
    later = [c for c in lineage.casts if c.form == "load" and c.function is load.function]
    lines = range(load.node.lineno + 1, getattr(owner, "lineno", 0))
    return any(
        c.key == load.key and c.node.lineno in lines and set(conditions_of(lineage.outline, c.node)) <= set(here)
        for c in later
    )
