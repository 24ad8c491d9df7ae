"""When an expression names a number format: the conditions of each way to it.

`formats.formats_of` lists the formats that a dtype may be. An error such as float16 weights under a scaler also needs the
runs in which it is float16: `torch.float16 if args.fp16 else torch.float32` is with `args.fp16`, and
`{"fp16": torch.float16, "fp32": torch.float32}[args.dtype]` with `args.dtype == 'fp16'`. That the device is a GPU is no condition.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.flow.guard import Guard
from halfstep.check.script.objects.choices import field_values, is_configuration, strings_of
from halfstep.check.script.objects.expressions import conditions_of, is_adapter_branch
from halfstep.check.script.objects.formats import assigned, returned_by, table_of
from halfstep.check.script.objects.values import DTYPES, UNKNOWN, constant, text_of
from halfstep.check.script.objects.weights import Cast
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import Binding

__all__ = [
    "chooses_format",
    "chosen_when",
    "condition_text",
    "dtype_values",
    "float16_ways",
    "format_ways",
    "is_local",
    "is_low_with_adapters",
    "is_on_gpu",
    "is_used_instead",
    "num_reads",
    "own_bindings",
]

MAX_DEPTH = 5
MAX_WAYS = 8
Guards = tuple[Guard, ...]
# The names of formats in Lightning and Accelerate.
PRECISIONS = {
    "16-mixed",
    "bf16-mixed",
    "16-true",
    "bf16-true",
    "32-true",
    "64-true",
    "fp16",
    "bf16",
    "fp32",
    "16",
    "32",
    "no",
}
_GPU = regex(r"is_available\(\)|(^|[._])(device|use_cuda|cuda|gpu|has_cuda|use_gpu)(\.type|_type)?$|'cuda'")
_CPU = regex(r"== '(cpu|mps)'$")


def chosen_when(outline: Outline, node: ast.expr, function: Function, name: str) -> list[Guards]:
    """The conditions of each way in which an expression names a format; an empty tuple is every run on a GPU."""
    ways = list(dict.fromkeys(_ways(outline, node, function, name, MAX_DEPTH)))[:MAX_WAYS]
    return [tuple(guard for guard in way if not is_on_gpu(guard)) for way in ways]


def float16_ways(outline: Outline, cast: Cast) -> list[Guards]:
    """The conditions of each way in which a cast or a load is float16, those of adapters aside."""
    return format_ways(outline, cast, "float16")


def format_ways(outline: Outline, cast: Cast, name: str) -> list[Guards]:
    """The conditions of each way in which a cast or a load has this format, those of adapters aside."""
    ways = [way for value in dtype_values(cast) for way in chosen_when(outline, value, cast.function, name)]
    return [way for way in ways if not any(map(is_adapter_branch, way))]


def is_low_with_adapters(outline: Outline, cast: Cast) -> bool:
    """Whether the variable that names a dtype is a 16-bit one only where an option quantizes the model or attaches adapters."""
    named = [(value, name) for value in dtype_values(cast) if key_of(value) for name in cast.low]
    ways = [way for value, name in named for way in chosen_when(outline, value, cast.function, name)]
    return bool(ways) and all(any(map(is_adapter_branch, way)) for way in ways)


def dtype_values(cast: Cast) -> Iterator[ast.expr]:
    """The arguments of a cast or a load that name its dtype."""
    named = [k.value for k in cast.node.keywords if k.arg in {"dtype", "torch_dtype"}]
    yield from named or ([cast.dtype] if cast.dtype is not None else [])
    yield from (cast.node.args if cast.form == "cast" else ())


def is_on_gpu(guard: Guard) -> bool:
    """Whether a condition only means that there is a GPU."""
    text, is_true = guard
    if text.startswith("__name__"):
        return True
    if re.search(r" (and|or|not|if) ", text):
        return False
    return bool(_GPU.search(text)) if is_true else bool(_CPU.search(text))


def condition_text(guards: Guards) -> str:
    """Conditions as the beginning of a message."""
    parts = [f"`{text}`" if is_true else f"not `{text}`" for text, is_true in dict.fromkeys(guards)]
    return f"when {' and '.join(parts)}, " if parts else "on a GPU, "


def _ways(outline: Outline, node: ast.expr, function: Function, name: str, depth: int) -> Iterator[Guards]:
    full = outline.names.full(node)
    if full in DTYPES:
        if DTYPES[full] == name:
            yield ()
        return
    if depth == 0:
        return
    if isinstance(node, ast.Constant):
        if node.value in (name, f"torch.{name}"):
            yield ()
    elif isinstance(node, ast.IfExp):
        for arm in (node.body, node.orelse):
            guard = conditions_of(outline, arm)[-1:]
            yield from ((*guard, *rest) for rest in _ways(outline, arm, function, name, depth - 1))
    elif isinstance(node, ast.Subscript) and (table := table_of(outline, node.value, function)) is not None:
        yield from _entries(outline, table, node.slice, function, name, depth)
    elif isinstance(node, ast.Call):
        yield from _results(outline, node, function, name, depth)
    elif key := key_of(node):
        values = list(assigned(outline, key, function))
        is_field = not values and isinstance(node, ast.Attribute) and is_configuration(key.rpartition(".")[0])
        fields = field_values(outline, key.rpartition(".")[2]) if is_field and name in DTYPES.values() else []
        if any(True for value, scope in fields for _ in _ways(outline, value, scope, name, depth - 1)):
            yield (Guard(f"{key} == torch.{name}", True),)
        if (
            not values and name not in DTYPES.values()
        ):  # an option that is passed on: `mixed_precision=args.mixed_precision`
            yield (Guard(f"{key} == {name!r}", True),)
        for value, scope in values:
            guards = conditions_of(outline, value) if not isinstance(outline.parents.get(value), ast.IfExp) else ()
            yield from ((*guards, *rest) for rest in _ways(outline, value, scope, name, depth - 1))


def _entries(
    outline: Outline, table: ast.Dict, index: ast.expr, function: Function, name: str, depth: int
) -> Iterator[Guards]:
    """The keys of a table under which it has the format."""
    known = strings_of(outline, index, function)
    for key, value in zip(table.keys, table.values, strict=True):
        if constant(key) in known or UNKNOWN in known:
            is_fixed = len(known) == 1 and UNKNOWN not in known
            guard = () if is_fixed else (Guard(f"{text_of(index)} == {constant(key)!r}", True),)
            yield from ((*guard, *rest) for rest in _ways(outline, value, function, name, depth - 1))


def _results(outline: Outline, call: ast.Call, function: Function, name: str, depth: int) -> Iterator[Guards]:
    """The ways of `table.get(key)`, `getattr(torch, name)` and functions of this file."""
    func = call.func
    if isinstance(func, ast.Attribute) and func.attr == "get" and call.args:
        table = table_of(outline, func.value, function)
        if table is not None:
            yield from _entries(outline, table, call.args[0], function, name, depth)
    elif key_of(func) == "getattr" and len(call.args) > 1 and outline.names.full(call.args[0]) == "torch":
        strings = strings_of(outline, call.args[1], function)
        for string in sorted(strings):
            if DTYPES.get(f"torch.{string}") == name:
                yield () if len(strings) == 1 else (Guard(f"{text_of(call.args[1])} == {string!r}", True),)
    elif (target := outline.call_target(call, function)) is not None and target.name != "__init__":
        names = dict(zip(target.params, map(text_of, call.args), strict=False))
        names |= {k.arg: text_of(k.value) for k in call.keywords if k.arg}
        for value in returned_by(target):
            guards = tuple(_renamed(guard, names) for guard in conditions_of(outline, value))
            yield from ((*guards, *rest) for rest in _ways(outline, value, target, name, depth - 1))


def _renamed(guard: Guard, names: dict[str, str]) -> Guard:
    """A condition on a parameter as one on what the call passes for it."""
    first, separator, rest = guard.text.partition(" ")
    return Guard(f"{names.get(first, first)}{separator}{rest}", guard.is_true)


def chooses_format(outline: Outline, value: ast.expr | None) -> bool:
    """Whether an expression chooses one of several number formats: `torch.bfloat16 if ok else torch.float16`.

    The strings that Lightning and Accelerate have for them count as well: `"16-mixed" if args.fp16 else "32-true"`.
    """
    if not isinstance(value, (ast.IfExp, ast.BoolOp, ast.Subscript, ast.Call)):
        return False
    if isinstance(value, ast.IfExp):
        arms = {constant(arm) for arm in (value.body, value.orelse)}
        if len(arms) > 1 and all(isinstance(arm, str) and arm in PRECISIONS for arm in arms):
            return True
    if any(_reads_dtype(outline, n) for n in ast.walk(value)):
        return True
    if _is_looked_up(outline, value):
        return True
    full = outline.names.full
    return len({full(n) for n in ast.walk(value) if isinstance(n, ast.Attribute)} & DTYPES.keys()) > 1


def _reads_dtype(outline: Outline, node: ast.AST) -> bool:
    """Whether an expression is `getattr(torch, args.dtype)`, with an attribute of settings as the name."""
    if not isinstance(node, ast.Call) or key_of(node.func) != "getattr" or len(node.args) < 2:
        return False
    name = node.args[1]
    text = key_of(name) or (ast.unparse(name).lower() if isinstance(name, ast.Call) else "")
    return outline.names.full(node.args[0]) == "torch" and "dtype" in text


def _is_looked_up(outline: Outline, value: ast.expr) -> bool:
    """Whether an expression looks up a table of this file with several formats: `FORMATS[os.environ["PRECISION"]]`."""
    func = value.func if isinstance(value, ast.Call) else None
    is_get = isinstance(func, ast.Attribute) and func.attr == "get"
    table = func.value if isinstance(func, ast.Attribute) and is_get else getattr(value, "value", None)
    bound = [b.value for b in outline.bindings.get(key_of(table), ())] if isinstance(table, ast.Name) else []
    formats = {outline.names.full(v) for t in bound if isinstance(t, ast.Dict) for v in t.values} & DTYPES.keys()
    return len(formats) > 1


def own_bindings(outline: Outline, key: str) -> list[Binding]:
    """The assignments of a variable, without the fields of classes that have its name."""
    bindings = outline.bindings[key]
    return [b for b in bindings if not isinstance(outline.parents.get(b.node), ast.ClassDef)] or bindings


def is_local(outline: Outline, bindings: list[Binding]) -> bool:
    """Whether a variable is one of functions, which no other file can read: not of the module, and not of a class."""
    return all(
        not isinstance(b.function.node, ast.Module) and not isinstance(outline.parents.get(b.node), ast.ClassDef)
        for b in bindings
    )


def num_reads(text: str, name: str) -> int:
    """How often a program reads a variable, as it is written; what calls it in a keyword or a comment does not count."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return len(re.findall(rf"\b{name}\b", text))  # a notebook, with lines that are not Python
    return sum(isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Store) for n in nodes)


def is_used_instead(function: ast.AST, statement: ast.AST) -> bool:
    """Whether a function uses, after `self.dtype = dtype or torch.bfloat16`, the parameter and not what was chosen."""
    params = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)} & {"dtype", "precision", "torch_dtype"}
    last = getattr(statement, "end_lineno", 0)
    return any(isinstance(n, ast.Name) and n.id in params and n.lineno > last for n in ast.walk(function))
