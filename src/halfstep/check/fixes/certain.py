"""What is certain about variables after statements have run: that they exist, and that they are not None.

`certain_after` walks a block and returns 1 for a variable that exists, 2 for one that is not None, and 0 for one that may be
anything again. Conditions that are assumed to be true or false select branches: under `if use_amp:`, a variable that an
earlier `if use_amp:` assigned is certain.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from halfstep.check.script.syntax.children import all_children_of
from halfstep.check.script.syntax.names import key_of

__all__ = [
    "Assumed",
    "assigned_names",
    "assumptions",
    "certain_after",
    "inside",
    "is_used_later",
    "may_be_none",
    "targets_of",
]

Assumed = frozenset[tuple[str, bool]]  # texts of conditions, and whether each is true
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_PARTS = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.FunctionDef, ast.ClassDef)


def is_used_later(block: Sequence[ast.stmt], key: str, level: int, assumed: Assumed) -> bool:
    """Whether the statements from here on use a variable before they can leave or assign it."""
    for statement in block:
        if {key, key.partition(".")[0].partition("[")[0]} & set(assigned_names(statement)):
            return False
        used: dict[str, int] = {}
        _use_loads(statement, used, assumed)
        if isinstance(statement, (ast.Expr, ast.Assign, ast.AugAssign, ast.With)) and used.get(key, 0) >= level:
            return True
        if any(isinstance(n, (*_LEAVES, ast.Yield, ast.YieldFrom)) for n in ast.walk(statement)):
            return False
    return False


def certain_after(
    block: Sequence[ast.stmt], assumed: Assumed, before: Mapping[str, int] = MappingProxyType({})
) -> dict[str, int]:
    """What is certain after statements: 1 for a variable that exists, 2 for one that is not None, 0 for one that is."""
    known = dict(before)
    for statement in block:
        _add(statement, known, assumed)
    return known


def _add(node: ast.stmt, known: dict[str, int], assumed: Assumed) -> None:
    if isinstance(node, ast.If):
        outcome = _outcome(node.test, assumed)
        branches = {True: [node.body], False: [node.orelse], None: [node.body, node.orelse]}[outcome]
        _use_loads(node.test, known, assumed)
        results = [certain_after(b, assumed, known) for b in branches if not _leaves(b)]
        if results:
            for key in set().union(*results):
                known[key] = min(r.get(key, 0) for r in results)
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        _use_loads(node.iter, known, assumed)
        _forget(node, known)
    elif isinstance(node, ast.While):
        _use_loads(node.test, known, assumed)
        _forget(node, known)
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            _use_loads(item.context_expr, known, assumed)
            if item.optional_vars is not None:
                known.update(dict.fromkeys(targets_of([item.optional_vars]), 2))
        known.update(certain_after(node.body, assumed, known))
    elif isinstance(node, (ast.Try, ast.TryStar)):
        branches = [[*node.body, *node.orelse], *(h.body for h in node.handlers)]
        results = [certain_after(b, assumed, known) for b in branches if not _leaves(b)]
        for key in set().union(*results) if results else ():
            known[key] = min(r.get(key, 0) for r in results)
        known.update(certain_after(node.finalbody, assumed, known))
    elif isinstance(node, ast.Match):
        _use_loads(node.subject, known, assumed)
        _forget(node, known)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        known[node.name] = 2
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        known.update({(a.asname or a.name.split(".")[0]): 2 for a in node.names})
    elif isinstance(node, ast.Delete):
        known.update(dict.fromkeys(targets_of(node.targets), 0))
    else:
        _use_loads(node, known, assumed)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = 2
            if isinstance(node.value, ast.IfExp) and _outcome(node.value.test, assumed) is not None:
                chosen = node.value.body if _outcome(node.value.test, assumed) else node.value.orelse
                value = 1 if may_be_none(chosen) else 2
            elif may_be_none(node.value) or (key_of(node.value) and not known.get(key_of(node.value))):
                value = 1
            known.update(dict.fromkeys(targets_of(targets), value))


def _forget(node: ast.stmt, known: dict[str, int]) -> None:
    """Drop what a loop or match may assign: afterwards it may be anything."""
    for key in {k for s in inside([node]) for k in assigned_names(s)} & known.keys():
        known[key] = 0


def _leaves(block: Sequence[ast.stmt]) -> bool:
    return bool(block) and isinstance(block[-1], _LEAVES)


def _use_loads(node: ast.AST, known: dict[str, int], assumed: Assumed) -> None:
    """Record the variables that evaluating a node uses in any case: those it calls, reads from or passes on."""
    pending: list[ast.AST] = [node]
    while pending:
        part = pending.pop()
        if isinstance(part, _PARTS):
            continue
        if isinstance(part, ast.IfExp):
            pending.append(part.test)
            outcome = _outcome(part.test, assumed)
            if outcome is not None:
                pending.append(part.body if outcome else part.orelse)
            continue
        if isinstance(part, ast.BoolOp):
            pending.append(part.values[0])
            continue
        if isinstance(part, (ast.If, ast.For, ast.While, ast.Try, ast.Match)):
            continue
        if isinstance(part, (ast.Attribute, ast.Subscript)) and isinstance(part.ctx, ast.Load):
            key = key_of(part.value)
            if key:
                known[key] = 2
        if isinstance(part, (ast.Name, ast.Attribute)) and isinstance(part.ctx, ast.Load):
            key = key_of(part)
            if key:
                known[key] = max(known.get(key, 0), 1)
        if isinstance(part, ast.Call):
            owner = part.func.attr if isinstance(part.func, ast.Attribute) else ""
            if owner in {"step", "unscale_"}:  # fail for None
                known.update({key_of(a): 2 for a in part.args if key_of(a)})
        pending += all_children_of(part)


def assumptions(test: ast.expr, *, is_true: bool) -> Iterator[tuple[str, bool]]:
    """The conditions that follow from a test; `x is not None` and `x` are one condition."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from assumptions(test.operand, is_true=not is_true)
    elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == is_true:
        for value in test.values:
            yield from assumptions(value, is_true=is_true)
    elif isinstance(test, ast.Compare) and len(test.ops) == 1 and _is_none(test.comparators[0]):
        if isinstance(test.ops[0], (ast.Is, ast.IsNot)):
            yield from assumptions(test.left, is_true=is_true == isinstance(test.ops[0], ast.IsNot))
    else:
        yield ast.unparse(test), is_true


def _outcome(test: ast.expr, assumed: Assumed) -> bool | None:
    """Whether a test is known to be true or false."""
    if ast.unparse(test).startswith("__name__ =="):
        return True
    if set(assumptions(test, is_true=True)) <= assumed:
        return True
    return False if set(assumptions(test, is_true=False)) <= assumed else None


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def may_be_none(node: ast.expr | None) -> bool:
    """Whether an expression is None, or is on one of its branches."""
    if isinstance(node, ast.IfExp):
        return may_be_none(node.body) or may_be_none(node.orelse)
    if isinstance(node, ast.BoolOp):
        return isinstance(node.op, ast.And) or may_be_none(node.values[-1])
    return node is not None and _is_none(node)


def inside(block: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Everything in statements, except what belongs to functions and classes defined in them."""
    pending: list[ast.AST] = list(block)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            pending += all_children_of(node)


def targets_of(nodes: Iterable[ast.expr]) -> list[str]:
    """The variables of assignment targets, with tuples unpacked."""
    keys = []
    for node in nodes:
        if isinstance(node, (ast.Tuple, ast.List)):
            keys += targets_of(node.elts)
        elif isinstance(node, ast.Starred):
            keys += targets_of([node.value])
        elif key_of(node):
            keys.append(key_of(node))
    return keys


def assigned_names(node: ast.AST) -> list[str]:
    """The variables that one statement assigns, not those of the statements in it."""
    if isinstance(node, ast.Assign):
        return targets_of(node.targets)
    if isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor, ast.NamedExpr)):
        return targets_of([node.target])
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return targets_of([i.optional_vars for i in node.items if i.optional_vars is not None])
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [a.asname or a.name.split(".")[0] for a in node.names]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    return [node.name] if isinstance(node, ast.ExceptHandler) and node.name else []
