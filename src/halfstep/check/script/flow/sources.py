"""What a tensor is made from: the call or parameter behind reshapes, slices, a temperature, variables and branches."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

from halfstep.check.regex import regex
from halfstep.check.script.objects.formats import formats_of
from halfstep.check.script.objects.values import UNKNOWN, argument, constant, text_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import Binding

__all__ = [
    "RESHAPES",
    "Source",
    "element_of",
    "is_move",
    "is_parts",
    "iterated",
    "keeps_format",
    "latest",
    "selected",
    "sources_of",
]

MAX_STEPS = 10  # assignments and reshapes between the output of a model and its loss
MAX_SOURCES = 6  # branches that assign one variable
RESHAPES = frozenset({
    "view", "reshape", "flatten", "transpose", "permute", "contiguous", "squeeze", "unsqueeze", "swapaxes", "cuda", "clone",
    "gather", "index_select", "masked_select", "narrow", "expand", "masked_fill", "clamp", "clip", "nan_to_num", "movedim",
    "repeat", "repeat_interleave", "roll", "cpu", "chunk", "split", "unbind", "t",
})  # fmt: skip
_PARTS = {"chunk", "split", "unbind"}  # methods that return a tuple of parts of one tensor
_TEMPERATURE = regex(r"(^|[._])(\w+_)?(temperature|temp|tau|T)$")
_DEVICE = regex(r"device|cuda|gpu|rank|cpu|non_blocking", re.IGNORECASE)
_SELECTS = {
    "torch.masked_select", "torch.index_select", "torch.reshape", "torch.flatten", "torch.squeeze", "torch.gather",
    "torch.clamp", "torch.nan_to_num", "torch.transpose", "torch.permute", "torch.unsqueeze", "torch.masked_fill",
    "torch.chunk", "torch.split", "torch.nn.functional.interpolate", "torch.nn.functional.pad",
}  # fmt: skip


_JOINS = {"torch.stack", "torch.cat", "torch.concat"}


class Source(NamedTuple):
    """What a tensor is made from in one function."""

    node: ast.expr  # a call, or a parameter of the function
    position: int | None = None  # in the tuple that a call returns
    name: str = ""  # the variable that it is assigned to


def sources_of(
    outline: Outline, node: ast.expr, function: Function, line: int, index: int | None = None, steps: int = MAX_STEPS
) -> list[Source]:
    """What a tensor is made from in its function, one source per branch; none if something else is computed on the way."""
    name = ""
    while steps:
        steps -= 1
        if isinstance(node, ast.IfExp):
            arms = [sources_of(outline, arm, function, line, index, steps) for arm in (node.body, node.orelse)]
            return [source for arm in arms for source in arm]
        inner = _kept(outline, node, function)
        if inner is not None:
            # `chosen, rejected = logits.chunk(2)`: the position is that of a part, not one in what a model returns.
            index = None if is_parts(node) else index
            node = inner
        elif isinstance(node, ast.Tuple) and index is not None and index < len(node.elts):
            node, index = node.elts[index], None
        elif isinstance(node, ast.Name):
            rows = _generated(outline, node)
            if rows is not None:
                node = rows
                continue
            bindings = latest(outline, node.id, function, line)
            if not bindings:
                return [Source(node, index)] if node.id in function.params else []
            if len(bindings) > 1:
                parts = [_of_binding(outline, b, function, steps) for b in bindings]
                return [source for part in parts for source in part][:MAX_SOURCES]
            own = _index(bindings[0])
            # `out = model(x)` before `logits, tokens = out`: the position is that in what the call returns.
            name, value, index = node.id, element_of(bindings[0]), index if own is None else own
            if value is None:
                return []
            node, line = value, bindings[0].node.lineno  # type: ignore[attr-defined]
        else:
            break
    return [Source(node, index, name)] if isinstance(node, ast.Call) and key_of(node.func) else []


def _of_binding(outline: Outline, binding: Binding, function: Function, steps: int) -> list[Source]:
    value = element_of(binding)
    if value is None:
        return []
    line: int = binding.node.lineno  # type: ignore[attr-defined]
    inner = sources_of(outline, value, function, line, _index(binding), steps)
    return [source if source.name else source._replace(name=binding.key) for source in inner]


def _kept(outline: Outline, node: ast.expr, function: Function) -> ast.expr | None:
    """The tensor with the same dtype that an expression reshapes, selects from or scales; None if it is something else."""
    if isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "logits"):
        return node.value
    if isinstance(node, ast.BinOp):
        return keeps_format(node)
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute) and (node.func.attr in RESHAPES or is_move(outline, node, function)):
        return node.func.value if outline.names.full(node.func) == "" else _selected(outline, node, function)
    return _selected(outline, node, function)


def is_parts(node: ast.expr | None) -> bool:
    """Whether an expression is a tuple of parts of one tensor: `logits.chunk(2)`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PARTS


def selected(outline: Outline, node: ast.expr) -> ast.expr | None:
    """The tensor that a function of torch or einops selects from or reshapes."""
    full = outline.names.full(node.func) if isinstance(node, ast.Call) else ""
    is_selection = full in _SELECTS or full == "einops.rearrange"
    return argument(node, 0, "input") if isinstance(node, ast.Call) and is_selection else None


def is_move(outline: Outline, call: ast.Call, function: Function) -> bool:
    """Whether `x.to(...)` names a device and no dtype."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "to":
        return False
    values = [*call.args, *(k.value for k in call.keywords)]
    if any(k.arg == "dtype" for k in call.keywords) or not values:
        return False
    named = [v for v in values if isinstance(constant(v), bool) or _DEVICE.search(text_of(v))]
    return len(named) == len(values) and all(formats_of(outline, v, function) == {UNKNOWN} for v in values)


def latest(outline: Outline, name: str, function: Function, line: int) -> list[Binding]:
    """The assignment to a variable before a line, and those in the other branches of the conditions around it."""
    here = [b for b in outline.lookup(name, function) if b.function is function]
    before = [b for b in here if getattr(b.node, "lineno", 0) < line]
    if not before:
        return []
    last = before[-1]
    bindings = [last]
    node: ast.AST = last.node
    while (parent := outline.parents.get(node)) is not None and parent is not function.node:
        if isinstance(parent, ast.If) and node in parent.orelse and (parent.end_lineno or 0) < line:
            first, end = parent.body[0].lineno, parent.body[-1].end_lineno or 0
            inside = [b for b in before if first <= getattr(b.node, "lineno", 0) <= end]
            bindings += inside[-1:]
        node = parent
    return bindings[:MAX_SOURCES]


def _index(binding: Binding) -> int | None:
    is_tuple = isinstance(binding.value, (ast.Tuple, ast.List))
    return None if is_tuple or isinstance(binding.node, ast.For) else binding.index


def element_of(binding: Binding) -> ast.expr | None:
    """What an assignment gives its variable; of `a, b = x, y` the element."""
    value = binding.value
    if isinstance(binding.node, ast.For):
        return iterated(binding)
    if binding.index is not None and isinstance(value, (ast.Tuple, ast.List)):
        return value.elts[binding.index] if binding.index < len(value.elts) else None
    return value


def iterated(binding: Binding) -> ast.expr | None:
    """What a loop variable is a row of: `logits` of `for row, ids in zip(logits, input_ids)`."""
    source = binding.node.iter if isinstance(binding.node, ast.For) else None
    return _row_of(source, binding.index)


def _row_of(source: ast.expr | None, index: int | None) -> ast.expr | None:
    """What each element of a loop, or of one position in its tuples, is a row of."""
    if isinstance(source, ast.Call) and index is not None:
        name = key_of(source.func)
        if name == "zip" and index < len(source.args):
            return source.args[index]
        return source.args[0] if name == "enumerate" and index == 1 and source.args else None
    return source if index is None and isinstance(source, ast.Name) else None


def _generated(outline: Outline, name: ast.Name) -> ast.expr | None:
    """What the variable of a comprehension is a row of: `outputs` of `sum(loss(o, y) for o in outputs)`."""
    node: ast.AST | None = name
    while node is not None and isinstance(node := outline.parents.get(node), (ast.expr, ast.keyword)):
        for part in node.generators if isinstance(node, (ast.ListComp, ast.GeneratorExp)) else ():
            targets = part.target.elts if isinstance(part.target, ast.Tuple) else [part.target]
            names = [key_of(target) for target in targets]
            if name.id in names:
                index = names.index(name.id) if isinstance(part.target, ast.Tuple) else None
                return _row_of(part.iter, index)
    return None


def _selected(outline: Outline, call: ast.Call, function: Function) -> ast.expr | None:
    """The tensor that a call selects from or reshapes: a function of torch, or one of this file that only does that."""
    if (inner := selected(outline, call)) is not None:
        return inner
    if outline.names.full(call.func) in _JOINS:
        return _joined(outline, argument(call, 0, "tensors"), function)
    target = outline.call_target(call, function) if isinstance(call.func, ast.Name) else None
    param = _returned_parameter(outline, target) if target is not None and target is not function else ""
    return argument(call, target.params.index(param), param) if target is not None and param else None


def _joined(outline: Outline, parts: ast.expr | None, function: Function) -> ast.expr | None:
    """One of the tensors that are joined: of a list that is written out, or that `parts.append(logits)` fills."""
    if isinstance(parts, (ast.List, ast.Tuple)):
        return parts.elts[0] if parts.elts else None
    sites = [call for call, scope in outline.calls.get("append", ()) if scope is function and len(call.args) == 1]
    added = [c.args[0] for c in sites if isinstance(c.func, ast.Attribute) and key_of(c.func.value) == key_of(parts)]
    return added[0] if len(added) == 1 and isinstance(parts, ast.Name) else None


def _returned_parameter(outline: Outline, target: Function) -> str:
    """The parameter that a function without branches returns, reshaped or selected from; "" if it returns anything else."""
    origins = {name: name for name in target.params}
    for statement in target.body:
        if isinstance(statement, ast.Return):
            return origins.get(_reshaped(outline, statement.value), "")
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            origins[statement.targets[0].id] = origins.get(_reshaped(outline, statement.value), "")
        elif not isinstance(statement, ast.Expr):
            return ""
    return ""


def _reshaped(outline: Outline, node: ast.expr | None) -> str:
    """The variable that an expression reshapes or selects from; "" if it computes anything."""
    while node is not None and not isinstance(node, ast.Name):
        if isinstance(node, ast.Call) and outline.names.full(node.func) in _SELECTS:
            node = argument(node, 0, "input")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in RESHAPES:
            node = node.func.value
        else:
            node = node.value if isinstance(node, ast.Subscript) else None
    return node.id if node is not None else ""


def keeps_format(node: ast.BinOp) -> ast.expr | None:
    """The logits of `logits / 2`, `30 * logits` and `logits / temperature`: a number does not change their dtype."""
    if isinstance(constant(node.right), (int, float)) or _TEMPERATURE.search(key_of(node.right)):
        return node.left
    if isinstance(constant(node.left), (int, float)):
        return node.right
    return None
