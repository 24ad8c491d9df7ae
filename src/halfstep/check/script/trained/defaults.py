"""The value that an expression has in a run without options: defaults of the command line, of fields and of parameters.

parser.add_argument("--precision", default="half")      args.precision
@dataclass class Args: half: bool = True                script_args.half
@click.option("--model", "name", default="t5-large")    the parameter `name`
FLAGS = {"half": {"fp16": True}, "fp32": {}}             TrainingArguments(**FLAGS[args.precision])
"""

from __future__ import annotations

import ast

from halfstep.check.script.objects.choices import field_defaults
from halfstep.check.script.objects.formats import keyword_of, table_of
from halfstep.check.script.objects.values import argument, constant
from halfstep.check.script.syntax.evaluate import OPEN, value_of
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import default_of

__all__ = ["by_default", "keyword_by_default", "option_default", "text_by_default"]

MAX_STEPS = 4  # from variable to variable


def option_default(outline: Outline, name: str) -> object:
    """The one default of an option: of the command line, or of the field of a class; OPEN if there is none, or several."""
    defaults = [
        argument(call, None, "default") for call, _ in outline.calls.get("add_argument", ()) if _declares(call, name)
    ]
    defaults += [argument(c, None, "default") for c, _ in outline.calls.get("option", ()) if _declares(c, name)]
    flags = [c for c, _ in outline.calls.get("add_argument", ()) if _declares(c, name)]
    if len(flags) == 1 and constant(argument(flags[0], None, "action")) == "store_true":
        return constant(defaults[0]) if defaults[0] is not None else False
    values = {constant(default) for default in (*defaults, *field_defaults(outline, name)) if default is not None}
    return values.pop() if len(values) == 1 and ... not in values else OPEN


def _declares(call: ast.Call, name: str) -> bool:
    """Whether a call declares an option: `add_argument("--fp16")`, `option("--model", "model_name")`."""
    return any(str(constant(a)).lstrip("-").partition("/")[0].replace("-", "_") == name for a in call.args)


def by_default(outline: Outline, node: ast.expr, function: Function, depth: int = MAX_STEPS) -> object:
    """The value of an expression in a run without options; OPEN if the text does not decide it."""
    return value_of(node, lambda leaf: _leaf(outline, leaf, function, depth))


def text_by_default(outline: Outline, node: ast.expr, function: Function) -> object:
    """A string in such a run, with "?" for the parts of `f"google/gemma-3-{size}"` that the text does not decide."""
    value = by_default(outline, node, function)
    if value is OPEN and isinstance(node, ast.JoinedStr):
        parts = [by_default(outline, part, function) for part in node.values]
        return "".join("?" if part is OPEN else str(part) for part in parts)
    return value


def _leaf(outline: Outline, node: ast.expr, function: Function, depth: int) -> object:
    key = key_of(node)
    if not key or not depth:
        return OPEN
    if isinstance(node, ast.Name):
        sources = [(v, f) for v, f in outline.sources(key, function) if v is not node]
        if len(sources) == 1:
            return by_default(outline, *sources[0], depth - 1)
        if sources or key not in function.params:
            return OPEN
        own = default_of(function, key)
        return constant(own) if own is not None and constant(own) is not ... else option_default(outline, key)
    values = outline.values(key, function) if key in outline.bindings else []
    if values:
        return by_default(outline, values[0], function, depth - 1) if len(values) == 1 else OPEN
    default = option_default(outline, last_name(key)) if isinstance(node, ast.Attribute) else OPEN
    fields = field_defaults(outline, last_name(key)) if isinstance(node, ast.Attribute) and default is OPEN else []
    # `name = f"google/gemma-{size}-it"` in the body of a class
    return by_default(outline, fields[0], outline.module, depth - 1) if len(fields) == 1 else default


def keyword_by_default(outline: Outline, call: ast.Call, function: Function, name: str) -> ast.expr | None:
    """A keyword argument of a call in such a run, also of `**TABLE[option]`."""
    for keyword in call.keywords:
        if keyword.arg is None and (entry := _entry(outline, keyword.value, function)) is not None:
            spread = ast.Call(call.func, [], [ast.keyword(None, entry)])
            if (value := keyword_of(outline, spread, function, name)) is not None:
                return value
    return keyword_of(outline, call, function, name)


def _entry(outline: Outline, node: ast.expr, function: Function) -> ast.expr | None:
    """The entry of a table that a default selects, also through a variable."""
    values = outline.values(key_of(node), function) if isinstance(node, ast.Name) else [node]
    value = values[0] if len(values) == 1 else None
    table, index = None, None
    if isinstance(value, ast.Subscript):
        table, index = value.value, value.slice
    elif (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr == "get"
        and value.args
    ):
        table, index = value.func.value, value.args[0]
    entries = table_of(outline, table, function) if table is not None else None
    if entries is None or index is None:
        return None
    wanted = by_default(outline, index, function)
    return next((v for k, v in zip(entries.keys, entries.values, strict=True) if constant(k) == wanted), None)
