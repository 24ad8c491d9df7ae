"""The one walk over a script that collects its outline.

Most nodes are names, constants and attributes. They are counted where their parent is visited, which is twice as fast as
visiting each of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import NamedTuple

from halfstep.check.script.syntax.children import SIMPLE, children_of
from halfstep.check.script.syntax.names import key_of, read_names
from halfstep.check.script.syntax.outline import Binding, Function, Outline, last_name_of
from halfstep.check.script.syntax.reexports import resolve_exports, resolve_stars
from halfstep.check.script.syntax.relevant import relevant_functions
from halfstep.check.script.syntax.scope import CallSite, Choice, StatementCall

__all__ = ["read_outline"]

_MAX_STRING = 40  # a longer one is a text
# Most of the expressions that are neither calls nor recorded by their parents.
_PLAIN = {ast.Compare, ast.Dict, ast.FormattedValue, ast.JoinedStr, ast.List, ast.Slice, ast.Subscript, ast.Tuple}


class _Around(NamedTuple):
    """What is around a node during the walk."""

    function: Function
    statement: ast.AST
    cls: str = ""
    guarded: bool = False  # inside try or if
    deferred: bool = False  # inside a lambda
    choices: tuple[Choice, ...] = ()  # the branches of `a if test else b` around it


class _Reads(NamedTuple):
    """The names that a script reads, one entry per place."""

    attributes: list[str]
    variables: list[str]


def read_outline(tree: ast.Module, text: str = "", words: tuple[str, ...] = ()) -> Outline:
    """Walk a script once and collect what rules look up later; without its text, every function is walked."""
    relevant = relevant_functions(tree, text, words) if text else None
    out = Outline(Function(tree, "<module>"))
    imports: list[tuple[ast.Import | ast.ImportFrom, bool]] = []
    # An explicit stack, because generated code nests deeper than Python recurses.
    stack: list[tuple[ast.AST, _Around]] = []
    reads = _Reads([], [])
    _push(out, stack, reads, tree, tuple(reversed(tree.body)), _Around(out.module, tree))
    while stack:
        node, around = stack.pop()
        if isinstance(node, ast.Call):
            last = last_name_of(node.func)
            if last:
                out.calls.setdefault(last, []).append(CallSite(node, around.function))
            if not around.deferred:
                out.statement_calls.setdefault(around.statement, []).append(StatementCall(node, around.choices))
            if len(node.keywords) > 1 and not out.repeats_keyword:
                named = [k.arg for k in node.keywords if k.arg is not None]
                out.repeats_keyword = len(set(named)) < len(named)
            _push(out, stack, reads, node, (node.func, *node.args, *node.keywords), around)
            continue
        if isinstance(node, ast.stmt):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imports.append((node, around.guarded))
                continue
            around = _enter(out, node, around)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if relevant is None or node in relevant:
                    # Decorators and defaults run where the function is defined.
                    outside = around._replace(function=around.function.parent or out.module)
                    for part in children_of(node):
                        _push(out, stack, reads, node, (part,), around if isinstance(part, ast.stmt) else outside)
                else:
                    out.unread.add(node)
                continue
        elif type(node) in _PLAIN:
            pass
        elif isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.Div):  # `//` counts steps; a loss is never divided like this
                out.divisors.add(_text(node.right))
        elif isinstance(node, ast.IfExp):
            _push(out, stack, reads, node, (node.test,), around)
            for part, is_true in ((node.body, True), (node.orelse, False)):
                choices = (*around.choices, Choice(node.test, is_true))
                _push(out, stack, reads, node, (part,), around._replace(choices=choices))
            continue
        elif isinstance(node, ast.Lambda):
            around = around._replace(deferred=True)
        elif isinstance(node, (ast.NamedExpr, ast.withitem)):
            _bind(out, node, around.function)
        _push(out, stack, reads, node, children_of(node), around)
    imports.sort(key=lambda pair: (pair[0].lineno, pair[0].col_offset))
    out.loads.update(reads.attributes)
    out.loads.update(reads.variables)
    out.variables.update(reads.variables)
    # Most names are bound once, and most statements have one call.
    for bindings in out.bindings.values():
        if len(bindings) > 1:
            bindings.sort(key=lambda b: getattr(b.node, "lineno", 0))
    for calls in out.statement_calls.values():
        # Inner calls end before the calls around them, which is also the order in which they run.
        if len(calls) > 1:
            calls.sort(key=lambda c: (c.call.end_lineno or 0, c.call.end_col_offset or 0))
    out.names = read_names(imports)
    resolve_exports(out.names, out.calls)
    resolve_stars(
        out.names, (s for s, _ in imports), out.calls, {*out.bindings, *out.classes, *(f.name for f in out.functions)}
    )
    for key, bindings in out.bindings.items():
        # `autocast = torch.autocast`: a variable that only renames a name of torch.
        if not key.isidentifier() or key in out.names.table:
            continue
        fulls = {out.names.full(b.value) if b.value is not None and b.index is None else "" for b in bindings}
        full = fulls.pop() if len(fulls) == 1 else ""
        if full.startswith("torch.") and ".amp." in full:
            out.names.table[key] = full
    for imported in out.names.imported:
        local = imported.alias.asname or imported.alias.name
        values = [b.value for b in out.bindings.get(local, ())] if imported.guarded else []
        if any(v is not None and _is_named(v, imported.alias.name) for v in values):
            out.names.choices.setdefault(local, frozenset((imported.full, "")))
    return out


def _is_named(value: ast.expr, name: str) -> bool:
    """Whether a value is what a module has under a name, whichever it is: `_amp.GradScaler`, `getattr(_amp, "GradScaler")`."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "getattr":
        return len(value.args) > 1 and isinstance(value.args[1], ast.Constant) and value.args[1].value == name
    return isinstance(value, ast.Attribute) and value.attr == name


def _push(
    out: Outline,
    stack: list[tuple[ast.AST, _Around]],
    reads: _Reads,
    parent: ast.AST,
    children: Iterable[ast.AST],
    around: _Around,
) -> None:
    """Record the names and constants among the children of a node, and put the others on the stack."""
    parents = out.parents
    for child in children:
        parents[child] = parent
        node = child
        if type(node) is ast.keyword:
            parents[node.value] = node
            node = node.value
        while type(node) is ast.Attribute:
            if type(node.ctx) is ast.Load:
                reads.attributes.append(node.attr)
            if "scale" in node.attr.lower():
                out.scaling.add(around.statement)
            parents[node.value] = node
            node = node.value
        if type(node) is ast.Name:
            if type(node.ctx) is ast.Load:
                reads.variables.append(node.id)
            if "scale" in node.id.lower():
                out.scaling.add(around.statement)
        elif type(node) is ast.Constant:
            if isinstance(node.value, str) and len(node.value) < _MAX_STRING:
                out.strings.add(node.value)
        elif type(node) is not ast.arg:
            stack.append((node, around))


def _enter(out: Outline, node: ast.stmt, around: _Around) -> _Around:
    function, cls, guarded = around.function, around.cls, around.guarded
    if type(node) in SIMPLE:
        _bind(out, node, function)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        a = node.args
        params = tuple(p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs))
        method = isinstance(out.parents[node], ast.ClassDef)
        # A function nested in a method still has access to the method's self.
        function = Function(node, node.name, cls, function, params, method=method)
        out.add_function(function)
    elif isinstance(node, ast.ClassDef):
        cls = node.name
        out.classes.setdefault(node.name, {})
        out.bases[node.name] = tuple(node.bases)
    elif isinstance(node, (ast.Try, ast.TryStar, ast.If)):
        guarded = True
    else:
        _bind(out, node, function)
    return _Around(function, node, cls, guarded)


def _text(node: ast.AST) -> str:
    key = key_of(node)
    return key or ast.unparse(node)


def _bind(out: Outline, node: ast.AST, function: Function) -> None:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            _bind_target(out, target, node.value, function, node)
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        if node.value is not None:
            _bind_target(out, node.target, node.value, function, node)
    elif isinstance(node, ast.AugAssign):
        if isinstance(node.op, ast.Div):
            out.divisors.add(_text(node.value))
        elif isinstance(node.op, ast.Mult) and isinstance(node.value, ast.BinOp):
            out.divisors.add(_text(node.value.right))
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        _bind_target(out, node.target, None, function, node)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        _bind_target(out, node.optional_vars, node.context_expr, function, node.optional_vars)


def _bind_target(out: Outline, target: ast.expr, value: ast.expr | None, function: Function, node: ast.AST) -> None:
    if isinstance(target, (ast.Tuple, ast.List)):
        for index, element in enumerate(target.elts):
            key = key_of(element)
            if key:
                out.bindings.setdefault(key, []).append(Binding(key, value, function, node, index))
        return
    key = key_of(target)
    if key:
        out.bindings.setdefault(key, []).append(Binding(key, value, function, node))
