"""The values of expressions: autocast regions with their devices and dtypes, and scalers.

A region has every dtype that the text allows (see `choices`). A rule that needs certainty uses the single answer
(`Autocast.dtype`), which is None if there are several.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from dataclasses import dataclass

from halfstep.check.finding import Place
from halfstep.check.script.objects.choices import (
    DTYPES,
    MAX_VALUES,
    UNKNOWN,
    argument,
    constant,
    devices_of,
    dtypes_of,
    keyed_values,
    pairs_of,
    text_of,
)
from halfstep.check.script.syntax.evaluate import OPEN, value_of
from halfstep.check.script.syntax.excluded import is_never_equal
from halfstep.check.script.syntax.names import chain, key_of
from halfstep.check.script.syntax.outcome import outcome
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.reexports import OWN_AUTOCAST
from halfstep.check.script.syntax.returned import is_never_created, returned_to
from halfstep.check.script.syntax.scaler_class import scaler_class

__all__ = [
    "DTYPES",
    "MAX_VALUES",
    "UNKNOWN",
    "Autocast",
    "Scaler",
    "argument",
    "autocasts_of",
    "constant",
    "dtypes_of",
    "enabled_of",
    "is_misplaced",
    "make_scaler",
    "text_of",
]

AUTOCASTS = {OWN_AUTOCAST, *(f"torch.{part}amp.autocast" for part in ("", "cuda.", "cpu.", "xpu."))}
_DEFAULTS = {
    "cuda": frozenset({"float16"}),
    "xpu": frozenset({"float16"}),
    "mps": frozenset({"float16"}),
    "cpu": frozenset({"bfloat16"}),
    "own": frozenset({UNKNOWN}),
}


@dataclass(frozen=True, eq=False)
class Autocast:
    """One autocast region's settings."""

    node: ast.Call
    where: Place
    api: str  # torch.amp.autocast, torch.cuda.amp.autocast, ...
    devices: frozenset[str]  # "cuda", "cpu", ...; "?": unknown
    dtypes: frozenset[str]
    enabled: str  # "yes", "no", or the text of the flag
    function: Function  # where it is created
    dtype_node: ast.expr | None = None  # the dtype as written; None: the default of the device

    @property
    def device(self) -> str | None:
        """The one device type it is for, or None if the text does not decide it."""
        return next(iter(self.devices)) if len(self.devices) == 1 and UNKNOWN not in self.devices else None

    @property
    def dtype(self) -> str | None:
        """The one number format it computes in, or None if the text does not decide it."""
        return next(iter(self.dtypes)) if len(self.dtypes) == 1 and UNKNOWN not in self.dtypes else None


@dataclass(frozen=True, eq=False)
class Scaler:
    """One GradScaler that the script creates."""

    node: ast.Call
    function: Function
    key: str  # the variable it is assigned to; "" if it is passed on directly
    api: str
    enabled: str  # "yes", "no", or the text of the flag
    parent: ast.AST


def enabled_of(outline: Outline, node: ast.expr | None, function: Function) -> str:
    """An `enabled=` argument as "yes", "no", or the text of its condition."""
    if node is None:
        return "yes"
    value = constant(node)
    if value is not ...:
        return "yes" if value else "no"
    key = key_of(node)
    if key and "." not in key and "[" not in key:
        values = [constant(v) for v in outline.values(key, function)]
        literal = key not in function.params and values and all(v is not ... for v in values)
        if literal and len({bool(v) for v in values}) == 1:
            return "yes" if values[0] else "no"
    if is_never_equal(outline, node, function):
        return "no"
    # `enabled=scaler is not None` where nothing creates the scaler
    is_enabled = value_of(node, lambda leaf: None if is_never_created(outline, leaf, function) else OPEN)
    return text_of(node) if is_enabled is OPEN else "yes" if is_enabled else "no"


def _spread(outline: Outline, call: ast.Call, function: Function) -> ast.Call:
    """A call with its `**options` expanded, if a dictionary of this file shows what they are."""
    keywords: list[ast.keyword] = []
    for keyword in call.keywords:
        keywords += [keyword] if keyword.arg is not None else _entries(outline, keyword, function, call.lineno)
    return ast.copy_location(ast.Call(call.func, call.args, keywords), call)


def _entries(outline: Outline, options: ast.keyword, function: Function, line: int) -> list[ast.keyword]:
    """The keywords of `**options` on which all possible dictionaries (literal, assigned or returned) agree."""
    node = options.value
    name = key_of(node)
    if isinstance(node, ast.Call):
        target = outline.call_target(node, function)
        inside = ast.walk(target.node) if target is not None else ()
        values = [n.value for n in inside if isinstance(n, ast.Return) and n.value is not None] or [node]
        values = [_with_values(outline, v, target) for v in values] if target is not None else values
    else:
        values = outline.values(name, function) if name else [node]
    read = [_table(value) for value in values[:MAX_VALUES]]
    tables = [table for table in read if table is not None]
    if not tables or len(tables) < len(read):
        return [options]
    # `options["dtype"] = dtype`, perhaps under a condition, comes after the dictionary and before the call.
    added = {key for key in outline.bindings if key.startswith(f"{name}[")} if name else set()
    common = [
        ast.keyword(key, value)
        for key, value in tables[0].items()
        if all(text_of(table.get(key)) == text_of(value) for table in tables) and f"{name}[{key!r}]" not in added
    ]
    set_later = [_set_later(outline, name, key, function, line) for key in sorted(added)]
    common += [keyword for keyword in set_later if keyword is not None]
    return common if len(tables) == 1 and None not in set_later else [*common, options]


def _with_values(outline: Outline, table: ast.expr, function: Function) -> ast.expr:
    """A dictionary that a function returns, with the only values of its variables: the caller has others of these names."""
    if not isinstance(table, ast.Dict):
        return table
    names = [v.id if isinstance(v, ast.Name) and v.id not in function.params else "" for v in table.values]
    own = [outline.values(name, function) if name else [] for name in names]
    values = [one[0] if len(one) == 1 else value for one, value in zip(own, table.values, strict=True)]
    return ast.copy_location(ast.Dict(table.keys, values), table)


def _set_later(outline: Outline, name: str, key: str, function: Function, line: int) -> ast.keyword | None:
    """The entry of the one line that adds a key before a call: always, or unless the value is None, which leaves the default."""
    entry, bound = re.fullmatch(r"\['(\w+)'\]", key.removeprefix(name)), outline.bindings[key]
    value = bound[0].value
    if entry is None or value is None or len(bound) > 1 or bound[0].function is not function or value.lineno >= line:
        return None
    parent = outline.parents.get(outline.parents.get(value, value))
    while isinstance(parent, ast.If):
        if text_of(parent.test) not in {f"{text_of(value)} is not None", text_of(value)} or parent.orelse:
            return None
        parent = outline.parents.get(parent)
    return ast.keyword(entry[1], value) if not isinstance(parent, (ast.Try, ast.ExceptHandler)) else None


def _table(node: ast.expr) -> dict[str, ast.expr] | None:
    """The entries of a dictionary with plain keys; None for anything else."""
    pairs = pairs_of(node)
    if pairs is None or not all(isinstance(constant(key), str) for key, _ in pairs):
        return None
    return {str(constant(key)): value for key, value in pairs}


def _read_autocast(outline: Outline, call: ast.Call, api: str, function: Function) -> Autocast:
    written = _spread(outline, call, function) if any(k.arg is None for k in call.keywords) else call
    hidden = any(k.arg is None for k in written.keywords) or any(isinstance(a, ast.Starred) for a in call.args)
    if api == "torch.amp.autocast":
        device_node, dtype_node = argument(written, 0, "device_type"), argument(written, 1, "dtype")
        enabled_node = argument(written, 2, "enabled")
        devices = devices_of(outline, device_node, function)
    else:
        devices = frozenset({api.split(".")[1]})
        enabled_node, dtype_node = argument(written, 0, "enabled"), argument(written, 1, "dtype")
    if dtype_node is not None:
        dtypes = _without_none(outline, dtype_node, function)
    else:
        # An unknown device may be CUDA, whose default is float16.
        defaults = frozenset().union(*(_DEFAULTS.get(d, {"float16", UNKNOWN}) for d in devices))
        dtypes = frozenset({UNKNOWN}) if hidden else defaults
    enabled = enabled_of(outline, enabled_node, function)
    if hidden and enabled_node is None:
        enabled = UNKNOWN
    where = Place("", call.lineno, call.col_offset + 1)
    return Autocast(call, where, api, devices, dtypes, enabled, function, dtype_node)


def _without_none(outline: Outline, node: ast.expr, function: Function) -> frozenset[str]:
    """The formats of a dtype; where it is float16 or None it is float16, the default of CUDA, wherever the region is enabled."""
    dtypes = dtypes_of(outline, node, function)
    if not {"float16", UNKNOWN} <= dtypes:
        return dtypes
    leaves = _leaves(outline, node, function)
    known = [(leaf, scope) for leaf, scope in leaves if constant(leaf) is not None]
    read = frozenset().union(*(dtypes_of(outline, leaf, scope) for leaf, scope in known)) if known else dtypes
    return read if len(known) < len(leaves) and key_of(node) not in function.params else dtypes


def _leaves(outline: Outline, node: ast.expr, function: Function, depth: int = 4) -> list[tuple[ast.expr, Function]]:
    """The expressions that a value may be: both arms of a choice, the values of a variable, what a function of the file returns."""
    if isinstance(node, ast.IfExp):
        sources = [(node.body, function), (node.orelse, function)]
    elif key_of(node):
        sources = outline.sources(key_of(node), function)
    else:
        target = outline.call_target(node, function) if isinstance(node, ast.Call) else None
        returns = [n for n in ast.walk(target.node) if isinstance(n, ast.Return)] if target is not None else []
        sources = [(n.value, target) for n in returns if n.value is not None and target is not None]
    if depth == 0 or not sources:
        return [(node, function)]
    return [leaf for value, scope in sources for leaf in _leaves(outline, value, scope, depth - 1)]


def autocasts_of(outline: Outline, node: ast.expr, function: Function, depth: int = 5) -> list[Autocast]:
    """The autocast regions that `with node:` may enter: none, one, or one per binding of the variable."""
    if depth == 0:
        return []
    if isinstance(node, ast.IfExp):
        both = [a for arm in (node.body, node.orelse) for a in autocasts_of(outline, arm, function, depth - 1)]
        both = [a for a in both if a.enabled != "no"] or both  # `autocast() if amp else autocast(enabled=False)`
        return [_under(a, text_of(node.test)) for a in both]
    if isinstance(node, ast.Lambda):
        return autocasts_of(outline, node.body, function, depth - 1)
    if isinstance(node, ast.Call):
        api = outline.names.full(node.func)
        if api in AUTOCASTS:
            return [_read_autocast(outline, node, api, function)]
        if api in {"functools.partial", "contextlib.suppress"} and node.args:
            inner = outline.names.full(node.args[0])
            if inner in AUTOCASTS:
                plain = ast.copy_location(ast.Call(node.args[0], node.args[1:], node.keywords), node)
                return [_read_autocast(outline, plain, inner, function)]
            return []
        target = outline.call_target(node, function)
        if target is not None and _is_context_manager(outline, target):
            return _yielded_in(outline, node, target, depth)
        if target is not None and (decided := outcome(node, target)) is not None:
            regions = autocasts_of(outline, decided, target, depth - 1)
            if all(a.enabled == "no" for a in regions):
                return regions  # `region(False)` of `def region(enabled)`
        if target is not None:
            returns = [n.value for n in ast.walk(target.node) if isinstance(n, ast.Return) and n.value is not None]
            return [a for r in returns for a in autocasts_of(outline, r, target, depth - 1)]
        if chain(node.func) and key_of(node.func):  # a partial, or autocast itself, assigned to a variable
            values = outline.values(key_of(node.func), function)[:MAX_VALUES]
            return [a for v in values for a in _called(outline, v, node, function, depth)]
        return []
    chosen = _in_table(outline, node, function, depth) if isinstance(node, ast.Subscript) else []
    if chosen:
        return chosen
    key = key_of(node)
    if key:
        options = [(v, function) for v in outline.values(key, function)] or _stored(outline, node)
        return [a for v, scope in options[:MAX_VALUES] for a in autocasts_of(outline, v, scope, depth - 1)]
    return []


def _in_table(outline: Outline, node: ast.Subscript, function: Function, depth: int) -> list[Autocast]:
    """The regions of `{"fp16": autocast(...), "fp32": nullcontext()}[args.precision]`, each under its key."""
    tables = [node.value] if isinstance(node.value, ast.Dict) else outline.values(key_of(node.value), function)
    table = tables[0] if len(tables) == 1 and isinstance(tables[0], ast.Dict) else None
    regions = []
    for key, value in zip(table.keys, table.values, strict=True) if table is not None else ():
        entered = autocasts_of(outline, value, function, depth - 1)
        if constant(node.slice) is ...:
            regions += [_under(a, f"{text_of(node.slice)} == {constant(key)!r}") for a in entered]
        elif constant(node.slice) == constant(key):
            regions += entered
    return regions


def _stored(outline: Outline, node: ast.expr) -> list[tuple[ast.expr, Function]]:
    """What the dictionaries of the file have under the key of `env["ctx"]`, and the calls under the name of `env.ctx`."""
    key = constant(node.slice) if isinstance(node, ast.Subscript) else getattr(node, "attr", None)
    every = keyed_values(outline).get(key, ()) if isinstance(key, str) else ()
    if isinstance(node, ast.Subscript):
        return [(value, scope) for value, scope, is_in_dict, _ in every if is_in_dict]
    return [(value, scope) for value, scope, _, is_in_call in every if is_in_call]


def _called(outline: Outline, value: ast.expr, call: ast.Call, function: Function, depth: int) -> list[Autocast]:
    """The regions of `ctx(...)`, where `ctx` is a partial with more arguments, a lambda, or autocast under another name."""
    if isinstance(value, ast.Lambda):
        return autocasts_of(outline, value.body, function, depth - 1)
    if outline.names.full(value) in AUTOCASTS:
        return autocasts_of(outline, ast.copy_location(ast.Call(value, call.args, call.keywords), call), function)
    if isinstance(value, ast.IfExp):
        both = [a for arm in (value.body, value.orelse) for a in _called(outline, arm, call, function, depth - 1)]
        return [_under(a, text_of(value.test)) for a in both]
    if isinstance(value, ast.Call) and outline.names.full(value.func) == "functools.partial":
        later = {k.arg for k in call.keywords}
        keywords = [*(k for k in value.keywords if k.arg not in later), *call.keywords]
        value = ast.copy_location(ast.Call(value.func, [*value.args, *call.args], keywords), value)
    return autocasts_of(outline, value, function, depth - 1) if isinstance(value, ast.Call) else []


def _is_context_manager(outline: Outline, function: Function) -> bool:
    decorators = getattr(function.node, "decorator_list", ())
    return any(outline.names.full(d) == "contextlib.contextmanager" for d in decorators)


def _yielded_in(outline: Outline, call: ast.Call, function: Function, depth: int) -> list[Autocast]:
    """The regions around the `yield` of a context manager of the file; with another `yield`, its arguments decide."""
    regions: list[Autocast] = []
    inside: set[ast.AST] = set()
    for block in (n for n in ast.walk(function.node) if isinstance(n, ast.With)):
        yields = {n for n in ast.walk(block) if isinstance(n, ast.Yield)}
        items = [item.context_expr for item in block.items] if yields else []
        entered = [a for item in items for a in autocasts_of(outline, item, function, depth - 1)]
        inside |= yields if entered else set()
        regions += entered
    if all(node in inside for node in ast.walk(function.node) if isinstance(node, ast.Yield)):
        return regions
    flag = ", ".join(text_of(value) for value in (*call.args, *(k.value for k in call.keywords))) or UNKNOWN
    return [_under(a, flag) for a in regions]


def _under(autocast: Autocast, flag: str) -> Autocast:
    if autocast.enabled != "yes":
        return autocast
    return dataclasses.replace(autocast, enabled=flag)


def _target_of(outline: Outline, values: ast.Tuple, value: ast.expr) -> str:
    """The variable to which `a, b = f(), g()` assigns one of the values; "" for any other tuple."""
    assign = outline.parents.get(values)
    target = assign.targets[0] if isinstance(assign, ast.Assign) and len(assign.targets) == 1 else None
    if (
        not isinstance(target, (ast.Tuple, ast.List))
        or len(target.elts) != len(values.elts)
        or value not in values.elts
    ):
        return ""
    return key_of(target.elts[values.elts.index(value)])


def make_scaler(outline: Outline, call: ast.Call, function: Function) -> Scaler | None:
    """The scaler that a call creates; None for any other call."""
    api = scaler_class(outline, call.func, function)
    if not api:
        return None
    position = 4 if api == "torch.cuda.amp.GradScaler" else 5
    enabled = enabled_of(outline, argument(call, position, "enabled"), function)
    if any(k.arg is None for k in call.keywords):
        enabled = UNKNOWN
    child: ast.AST = call
    parent: ast.AST = outline.parents.get(call, call)
    flag = ""
    while isinstance(parent, (ast.IfExp, ast.BoolOp)):
        if isinstance(parent, ast.IfExp) and not flag:
            flag = _condition(outline, parent, function, is_body=parent.body is child)
        child, parent = parent, outline.parents[parent]
    key = ""
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        key = key_of(parent.targets[0])
    elif isinstance(parent, (ast.AnnAssign, ast.NamedExpr)):
        key = key_of(parent.target)
    elif isinstance(parent, ast.Tuple):
        key = _target_of(outline, parent, call)
    elif isinstance(parent, ast.Return):
        key = returned_to(outline, parent)
    if flag and enabled == "yes":
        enabled = flag
    return Scaler(call, function, key, api, enabled, parent)


def _condition(outline: Outline, choice: ast.IfExp, function: Function, *, is_body: bool) -> str:
    """The test of `GradScaler() if amp else None`; "yes" or "no" where a literal decides whether the scaler is created."""
    flag = enabled_of(outline, choice.test, function)
    return flag if is_body else {"yes": "no", "no": "yes"}.get(flag, flag)


def is_misplaced(outline: Outline, region: Autocast) -> bool:
    """Whether a dtype or a device type stands where the function does not expect one, so that it raises."""
    first = region.node.args[0] if region.node.args else None
    if first is not None and outline.names.full(first) in DTYPES:
        return True
    device = isinstance(constant(first), str) or any(k.arg == "device_type" for k in region.node.keywords)
    return region.api == "torch.cuda.amp.autocast" and device
