"""What an expression may be: a literal, a string, a device, a number format.

Every question is answered with all possibilities in the text: `torch.bfloat16 if ok else torch.float16` is both, and so is
`{"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]` unless the choices of `--dtype` leave one. "?" stands for
what the text does not show.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import lru_cache

from halfstep.check.regex import regex
from halfstep.check.script.syntax.children import all_children_of
from halfstep.check.script.syntax.names import chain, key_of, last_name
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import default_of

__all__ = [
    "DTYPES",
    "MAX_VALUES",
    "UNKNOWN",
    "argument",
    "compared_formats",
    "constant",
    "devices_of",
    "dtypes_of",
    "field_values",
    "is_configuration",
    "is_float32_on_cpu",
    "keyed_values",
    "pairs_of",
    "strings_of",
    "text_of",
]

UNKNOWN = "?"
MAX_DEPTH = 4
_CONFIGURATION = regex(r"(^|[._])\w*(args|arguments|cfg|conf|config|opts?|options|hparams|settings)$", re.IGNORECASE)
_AMP_DTYPE = regex(r"(amp|precision|autocast|compute|train\w*)_dtype$")
MAX_VALUES = 8  # of one variable; more are not followed
DTYPES = {
    "torch.float16": "float16",
    "torch.half": "float16",
    "torch.bfloat16": "bfloat16",
    "torch.float32": "float32",
    "torch.float": "float32",
    "torch.float64": "float64",
    "torch.double": "float64",
    **{f"torch.float8_{name}": "float8" for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")},
}
# Tests of the device: true with CUDA, and true without.
_CUDA = regex(r"cuda(?!.*(bf16|capability))|(^|[._])gpu", re.IGNORECASE)
_CPU = regex(r"== ['\"]cpu['\"]")
Choices = frozenset[str]
_NOTHING: Choices = frozenset({UNKNOWN})


def constant(node: ast.AST | None) -> object:
    """The value of a literal, also negative numbers and powers such as 2**10; `...` for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = constant(node.operand)
        return -value if isinstance(value, (int, float)) else ...
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        left, right = constant(node.left), constant(node.right)
        if isinstance(left, (int, float)) and isinstance(right, (int, float)) and 0 < left < 100 and abs(right) < 200:
            return left**right
    return ...


def argument(call: ast.Call, position: int | None, name: str) -> ast.expr | None:
    """An argument by keyword or position; None if absent or hidden in `*args`."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is not None and position < len(call.args):
        value = call.args[position]
        if not any(isinstance(a, ast.Starred) for a in call.args[: position + 1]):
            return value
    return None


def text_of(node: ast.AST | None) -> str:
    """An expression as text, for comparing and for messages."""
    return "" if node is None else key_of(node) or ast.unparse(node)


def _either(
    outline: Outline, node: ast.expr, function: Function, depth: int, read: Callable[..., Choices]
) -> Choices | None:
    """The choices of both arms, of `a or b`, of a variable's values, or of what a function of the file returns."""
    if isinstance(node, ast.IfExp):
        return read(outline, node.body, function, depth - 1) | read(outline, node.orelse, function, depth - 1)
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        return frozenset().union(*(read(outline, value, function, depth - 1) for value in node.values))
    key = key_of(node)
    if not key:
        target = outline.call_target(node, function) if isinstance(node, ast.Call) else None
        if target is None or target.name == "__init__":
            return None
        every = (n.value for n in ast.walk(target.node) if isinstance(n, ast.Return) and n.value is not None)
        returns = list({text_of(value): value for value in every}.values())
        parts = [read(outline, value, target, depth - 1) for value in returns[:MAX_VALUES]]
        return frozenset().union(*parts) if parts and len(returns) <= MAX_VALUES else _NOTHING
    values = outline.sources(key, function)
    # Callers outside the file may pass anything for a parameter.
    outside = _NOTHING if key in function.params or _has_value_before(outline, key) else frozenset()
    default = default_of(function, key) if key in function.params else None
    if default is not None and constant(default) is not None:
        values = [*values, (default, function)]
    if not values:
        return None
    if len(values) > MAX_VALUES:
        return _NOTHING
    return outside.union(*(read(outline, v, scope, depth - 1) for v, scope in values if v is not node))


def _has_value_before(outline: Outline, key: str) -> bool:
    """Whether a setting of another object is only changed under a condition: `if not torch.cuda.is_available(): cfg.device = "cpu"`."""
    bindings = outline.bindings.get(key, []) if "." in key and not key.startswith("self.") else []
    nodes = {b.node for b in bindings}
    return bool(nodes) and not any(_always_sets(_outermost_if(outline, node), nodes) for node in nodes)


def _outermost_if(outline: Outline, node: ast.AST) -> ast.AST:
    while isinstance(parent := outline.parents.get(node), ast.If):
        node = parent
    return node


def _always_sets(statement: ast.AST, nodes: set[ast.AST]) -> bool:
    """Whether a statement is one of the assignments, or an `if` with one in each branch."""
    blocks = (statement.body, statement.orelse) if isinstance(statement, ast.If) else ()
    return statement in nodes or (bool(blocks) and all(any(_always_sets(s, nodes) for s in block) for block in blocks))


def strings_of(outline: Outline, node: ast.expr | None, function: Function, depth: int = 5) -> Choices:
    """The strings an expression may be, including "?" if part of it is unknown."""
    if node is None or depth == 0:
        return _NOTHING
    value = constant(node)
    if value is not ...:
        return frozenset({value}) if isinstance(value, str) else _NOTHING
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"lower", "strip"}:
        return strings_of(outline, node.func.value, function, depth - 1)
    choices = _either(outline, node, function, depth, strings_of)
    if choices is not None:
        return choices
    return _options(outline, node) if isinstance(node, ast.Attribute) else _NOTHING


def _options(outline: Outline, node: ast.Attribute) -> Choices:
    """The strings of a command-line option, from the `add_argument` or field that declares it: its choices, or its default."""
    for call, _ in outline.calls.get("add_argument", ()):
        flags = [str(constant(a)).lstrip("-").replace("-", "_") for a in call.args]
        if node.attr not in (*flags, constant(argument(call, None, "dest"))):
            continue
        choices = argument(call, None, "choices")
        if isinstance(choices, (ast.List, ast.Tuple, ast.Set)):
            return frozenset(str(constant(c)) if constant(c) is not ... else UNKNOWN for c in choices.elts)
        default = constant(argument(call, None, "default"))
        return frozenset({default, UNKNOWN}) if isinstance(default, str) else _NOTHING
    defaults = {constant(field) for field in field_defaults(outline, node.attr)}
    return frozenset(d for d in defaults if isinstance(d, str)) | {UNKNOWN}


def field_defaults(outline: Outline, name: str) -> list[ast.expr]:
    """The defaults of the fields of this name: `dtype: str = "bfloat16"` and `= field(default="bfloat16")`."""
    bindings = [b for b in outline.bindings.get(name, ()) if isinstance(outline.parents.get(b.node), ast.ClassDef)]
    defaults = [argument(b.value, None, "default") if isinstance(b.value, ast.Call) else b.value for b in bindings]
    return [default for default in defaults if default is not None]


def field_values(outline: Outline, name: str) -> list[tuple[ast.expr, Function]]:
    """What a field is set to where this file creates its class: `Config(dtype=...)`, or `cls(dtype=...)` in a method of it."""
    owners = ("cls", *(owner for owner in outline.classes if owner not in outline.names.table))
    sites = [site for owner in owners for site in outline.calls.get(owner, ())]
    return [(k.value, function) for call, function in sites for k in call.keywords if k.arg == name]


@lru_cache(maxsize=1)
def keyed_values(outline: Outline) -> dict[str, list[tuple[ast.expr, Function, bool, bool]]]:
    """The values of the file that have a name: those of dictionaries, those of calls, and those of `dict(...)`, which are both."""
    functions: dict[ast.AST, Function] = {f.node: f for f in outline.functions}
    keyed: dict[str, list[tuple[ast.expr, Function, bool, bool]]] = {}
    stack: list[tuple[ast.AST, Function]] = [(outline.module.node, outline.module)]
    while stack:
        part, scope = stack.pop()
        scope = functions.get(part, scope)
        if isinstance(part, ast.Dict):
            for name, value in zip(part.keys, part.values, strict=True):
                if isinstance(key := constant(name), str):
                    keyed.setdefault(key, []).append((value, scope, True, False))
        elif isinstance(part, ast.Call) and part.keywords:
            is_dict = text_of(part.func) == "dict"
            for keyword in part.keywords:
                if keyword.arg is not None:
                    keyed.setdefault(keyword.arg, []).append((keyword.value, scope, is_dict, True))
        stack += [(child, scope) for child in all_children_of(part) if not isinstance(child, (ast.Name, ast.Constant))]
    return keyed


def _arguments_named(outline: Outline, name: str) -> list[tuple[ast.expr, Function]]:
    """What `Strategy(amp_dtype=...)` sets, where this file creates an object of any class, under a name of mixed precision."""
    every = keyed_values(outline).get(name, ()) if _AMP_DTYPE.search(name) else ()
    passed = [(value, scope, outline.parents.get(value)) for value, scope, _, is_in_call in every if is_in_call]
    sites = [(value, scope, outline.parents.get(keyword)) for value, scope, keyword in passed if keyword is not None]
    return [
        (v, f) for v, f, call in sites if isinstance(call, ast.Call) and last_name(text_of(call.func))[:1].isupper()
    ]


def _converted(outline: Outline, name: str) -> list[tuple[ast.expr, Function]]:
    """What a field is set to where its class is created from a dictionary: `d["dtype"] = TABLE[d["dtype"]]`, then `cls(**d)`."""
    fields = [b for b in outline.bindings.get(name, ()) if isinstance(outline.parents.get(b.node), ast.ClassDef)]
    owners = {parent.name for b in fields if isinstance(parent := outline.parents.get(b.node), ast.ClassDef)}
    sites = [site for owner in ("cls", *sorted(owners)) for site in outline.calls.get(owner, ())]
    values: list[tuple[ast.expr, Function]] = []
    for call, function in sites:
        spread = [key_of(k.value) for k in call.keywords if k.arg is None]
        written = [b for key in spread if key for b in outline.bindings.get(f"{key}[{name!r}]", ())]
        is_own = key_of(call.func) != "cls" or function.cls in owners
        values += [(b.value, function) for b in written if is_own and b.function is function and b.value is not None]
    return values


def devices_of(outline: Outline, node: ast.expr | None, function: Function, depth: int = 6) -> Choices:
    """The device types an expression may name, a string or a torch.device, including "?" if part of it is unknown."""
    if node is None or depth == 0:
        return _NOTHING
    first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node  # f"cuda:{rank}"
    value = constant(first)
    if isinstance(value, str):
        return frozenset({value.split(":")[0] or UNKNOWN})
    if isinstance(node, ast.Attribute) and node.attr == "type":
        return devices_of(outline, node.value, function, depth - 1)
    if isinstance(node, ast.Call) and node.args and _names_device(outline, node):
        return devices_of(outline, node.args[0], function, depth - 1)
    choices = _either(outline, node, function, depth, devices_of)
    return frozenset(s.split(":")[0] for s in strings_of(outline, node, function)) if choices is None else choices


def _names_device(outline: Outline, call: ast.Call) -> bool:
    return outline.names.full(call.func) == "torch.device" or text_of(call.func) == "str"


def dtypes_of(outline: Outline, node: ast.expr | None, function: Function, depth: int = 5) -> Choices:
    """The number formats an expression may name, including "?" if part of it is unknown."""
    if node is None or depth == 0:
        return _NOTHING
    name = outline.names.full(node)
    if name in DTYPES:
        return frozenset({DTYPES[name]})
    looked_up = _looked_up(outline, node, function, depth)
    if looked_up is not None:
        return looked_up
    choices = _either(outline, node, function, depth, dtypes_of)
    if choices is None and isinstance(node, ast.Attribute):
        values = [(value, function) for value in field_defaults(outline, node.attr)]
        values += _converted(outline, node.attr) if values else []
        values += _arguments_named(outline, node.attr)
        parts = [dtypes_of(outline, value, scope, depth - 1) for value, scope in values[:MAX_VALUES]]
        return frozenset().union(_NOTHING, *parts)
    return _NOTHING if choices is None else choices


def is_float32_on_cpu(outline: Outline, node: ast.expr | None, function: Function) -> bool:
    """Whether a dtype is float32 in the branch without CUDA: `torch.float16 if device == "cuda" else torch.float32`."""
    return any(_is_on_cpu(place, outline) for place in _float32_in(outline, node, function, MAX_DEPTH))


def _float32_in(outline: Outline, node: ast.expr | None, function: Function, depth: int) -> list[ast.expr]:
    """The places that write float32 among those an expression may come from."""
    if node is None or depth == 0:
        return []
    if isinstance(node, ast.IfExp):
        arms = (node.body, node.orelse)
        return [place for arm in arms for place in _float32_in(outline, arm, function, depth - 1)]
    if DTYPES.get(outline.names.full(node)) == "float32":
        return [node]
    target = outline.call_target(node, function) if isinstance(node, ast.Call) else None
    scope, values = function, outline.values(key_of(node), function) if key_of(node) else []
    if target is not None:
        scope = target
        values = [n.value for n in ast.walk(target.node) if isinstance(n, ast.Return) and n.value is not None]
    return [p for v in values[:MAX_VALUES] if v is not node for p in _float32_in(outline, v, scope, depth - 1)]


def _is_on_cpu(place: ast.expr, outline: Outline) -> bool:
    """Whether an expression is in the branch of a test in which the device is not CUDA."""
    node: ast.AST = place
    parent = outline.parents.get(node)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if isinstance(parent, (ast.If, ast.IfExp)) and node is not parent.test:
            text = text_of(parent.test)
            below = parent.orelse if isinstance(parent.orelse, list) else [parent.orelse]
            is_else = any(node is part for part in below)
            if " or " not in text and " and " not in text and not text.startswith("not "):
                if is_else and _CUDA.search(text):
                    return True
                if not is_else and _CPU.search(text):
                    return True
        node, parent = parent, outline.parents.get(parent)
    return False


def _looked_up(outline: Outline, node: ast.expr, function: Function, depth: int) -> Choices | None:
    """The formats of `table[name]`, `table.get(name, default)` or `getattr(torch, name)`; None for anything else."""
    default: ast.expr | None = None
    if isinstance(node, ast.Subscript):
        table, index = node.value, node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        table, index = node.func.value, node.args[0]
        default = node.args[1] if len(node.args) > 1 else None
    elif isinstance(node, ast.Call) and chain(node.func) == ("getattr",) and len(node.args) > 1:
        if outline.names.full(node.args[0]) != "torch":
            return None
        strings = strings_of(outline, node.args[1], function)
        return frozenset(DTYPES.get(f"torch.{s}", UNKNOWN) for s in strings)
    else:
        return None
    tables = (outline.values(key_of(table), function) or _in_class(outline, table)) if key_of(table) else [table]
    entries = pairs_of(tables[0]) if len(tables) == 1 else None
    if entries is None:
        return None
    strings = strings_of(outline, index, function)
    possible = [v for k, v in entries if UNKNOWN in strings or constant(k) in strings or constant(k) is ...]
    possible += [default] if default is not None and (UNKNOWN in strings or not possible) else []
    parts = [dtypes_of(outline, value, function, depth - 1) for value in possible]
    return frozenset().union(*parts) if parts else _NOTHING


def _in_class(outline: Outline, table: ast.expr) -> list[ast.expr]:
    """What the body of a class assigns to `table` of `self.table` or `Trainer.table`, if no line sets the attribute."""
    bound = outline.bindings.get(table.attr, ()) if isinstance(table, ast.Attribute) else ()
    return [b.value for b in bound if b.value is not None and isinstance(outline.parents.get(b.node), ast.ClassDef)]


def pairs_of(table: ast.expr) -> list[tuple[ast.expr | None, ast.expr]] | None:
    """The entries of `{...}` or `dict(...)`; None for anything else."""
    if isinstance(table, ast.Dict):
        return list(zip(table.keys, table.values, strict=True))
    if isinstance(table, ast.Call) and chain(table.func) == ("dict",) and not table.args:
        return [(ast.Constant(k.arg), k.value) for k in table.keywords]
    return None


def is_configuration(key: str) -> bool:
    """Whether a variable has settings, by its name."""
    return bool(_CONFIGURATION.search(key))


def compared_formats(outline: Outline, node: ast.expr, formats: frozenset[str]) -> frozenset[str]:
    """Those of a variable's formats that the conditions around `node`, a use of it, leave: `if dtype == torch.bfloat16:`."""
    key = key_of(node)
    child: ast.AST = node
    parent = outline.parents.get(node)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
        if isinstance(parent, (ast.If, ast.IfExp)) and child is not parent.test:
            body: list[ast.AST] = [parent.body] if isinstance(parent, ast.IfExp) else [*parent.body]
            is_body, test = child in body, parent.test
            parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and is_body else [test]
            for part in parts:
                names, is_one = _comparison(outline, key, part)
                is_one = is_one is is_body
                left = names if is_one and formats == {UNKNOWN} else formats & names if is_one else formats - names
                formats = left if names and left else formats
        child, parent = parent, outline.parents.get(parent)
    return formats | _asked(outline, key, parent) if formats == {UNKNOWN} and key else formats


def _asked(outline: Outline, key: str, function: ast.AST | None) -> frozenset[str]:
    """The 16-bit formats that a function asks for where another file chooses: `dtype = resolve_dtype(args)`, or an imported `DTYPE`."""
    made = [b.value for b in outline.bindings.get(key, ()) if b.function.node is function]
    is_made = bool(made) and all(isinstance(v, ast.Call) and "dtype" in text_of(v.func) for v in made)
    is_imported = key.partition(".")[0] in outline.names.table and "dtype" in last_name(key).lower() and not made
    if function is None or not (is_made or is_imported):
        return frozenset()
    parts = [_comparison(outline, key, n)[0] for n in ast.walk(function) if isinstance(n, ast.Compare)]
    return frozenset[str]().union(*parts) & {"float16", "bfloat16"}


def _comparison(outline: Outline, key: str, test: ast.expr) -> tuple[frozenset[str], bool]:
    """The formats of `key == torch.bfloat16` or `key in (...)`, and whether the test asks for one of them; none in other tests."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or key_of(test.left) != key:
        return frozenset(), False
    right, is_one = test.comparators[0], isinstance(test.ops[0], (ast.Eq, ast.Is, ast.In))
    values = right.elts if isinstance(right, (ast.Tuple, ast.List, ast.Set)) else [right]
    names = [DTYPES.get(outline.names.full(value), "") for value in values]
    is_test = is_one or isinstance(test.ops[0], (ast.NotEq, ast.IsNot, ast.NotIn))
    return frozenset(names if is_test and all(names) else ()), is_one
