"""Some forms of statements as the plain ones that rules know, in the same places of the text.

    scaler: GradScaler = GradScaler()          scaler = GradScaler()
    (a if test else b).backward()              if test: a.backward()       else: b.backward(); also where a variable contains it
    stack.enter_context(autocast("cuda"))      with autocast("cuda"):      around the rest of the block of `with ExitStack() as stack`
    match name:  case "fp16" | "half": ...     if name in ("fp16", "half"): ...   elif and else for the other cases

Fields of classes keep their annotations: a dataclass has a field only where there is one.
"""

from __future__ import annotations

import ast
import copy

from halfstep.check.script.syntax.children import SIMPLE, parts_of
from halfstep.check.script.syntax.names import key_of

__all__ = ["branch_matches", "make_plain"]


def branch_matches(tree: ast.Module) -> None:
    """Replace each `match` over values by an `if` with a branch for each case."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        for block in parts_of(node):
            for index, part in enumerate(block):
                if isinstance(part, ast.Match):
                    block[index] = _branched(part)
                if type(part) not in SIMPLE:
                    stack.append(block[index])


def _branched(node: ast.Match) -> ast.stmt:
    """A `match` as a chain of comparisons; itself if a case is no value, or several of them."""
    if not key_of(node.subject) and not isinstance(node.subject, ast.Call):
        return node
    rest: list[ast.stmt] = []
    for case in reversed(node.cases):
        test = _test_of(node.subject, case)
        if test is None:
            return node
        rest = case.body if isinstance(test, bool) else [ast.copy_location(ast.If(test, case.body, rest), case.pattern)]
    first = rest[0] if len(rest) == 1 and isinstance(rest[0], ast.If) else None
    return ast.copy_location(first, node) if first is not None and first.body is node.cases[0].body else node


def _test_of(subject: ast.expr, case: ast.match_case) -> ast.expr | bool | None:
    """The test of a case: a comparison, True for `case _:`, None for anything else."""
    pattern = case.pattern
    values = pattern.patterns if isinstance(pattern, ast.MatchOr) else [pattern]
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None and pattern.name is None:
        return case.guard or True
    if case.guard is not None or not all(isinstance(value, ast.MatchValue | ast.MatchSingleton) for value in values):
        return None
    parts = [v.value if isinstance(v, ast.MatchValue) else ast.Constant(getattr(v, "value", None)) for v in values]
    several = ast.Tuple(parts, ast.Load()) if len(parts) > 1 else parts[0]
    operator = ast.In() if len(parts) > 1 else ast.Is() if isinstance(pattern, ast.MatchSingleton) else ast.Eq()
    test = ast.Compare(copy.deepcopy(subject), [operator], [several])
    for made in (test, several, *parts):
        ast.copy_location(made, pattern)
    return test


def make_plain(tree: ast.Module) -> None:
    """Replace annotated assignments outside the bodies of classes, chosen losses, matches, and contexts that an ExitStack enters."""
    branch_matches(tree)
    stack: list[ast.AST] = [tree]  # an explicit stack, because generated code nests deeper than Python recurses
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.With, ast.AsyncWith)):
            _nest(node)
        for block in parts_of(node):
            for index, part in enumerate(block):
                if type(part) not in SIMPLE:
                    stack.append(part)
                elif isinstance(part, ast.Expr):
                    block[index] = _choose(part, block[index - 1] if index else None)
                elif isinstance(part, ast.AnnAssign) and part.value is not None and not isinstance(node, ast.ClassDef):
                    block[index] = ast.copy_location(ast.Assign([part.target], part.value), part)


def _choose(statement: ast.Expr, before: ast.AST | None) -> ast.stmt:
    """The backward of a loss that is scaled or not, as an `if` with one backward in each branch."""
    call = statement.value
    func = call.func if isinstance(call, ast.Call) else None
    if not isinstance(call, ast.Call) or not isinstance(func, ast.Attribute) or func.attr != "backward":
        return statement
    loss: ast.expr = func.value
    if isinstance(before, ast.Assign) and key_of(loss) and key_of(loss) == key_of(before.targets[0]):
        loss = copy.deepcopy(before.value)
    if not isinstance(loss, ast.IfExp) or _is_scaled(loss.body) == _is_scaled(loss.orelse):
        return statement
    branches: list[list[ast.stmt]] = []
    for chosen in (loss.body, loss.orelse):
        own = copy.deepcopy(statement)
        assert isinstance(own.value, ast.Call)
        assert isinstance(own.value.func, ast.Attribute)
        own.value.func.value = chosen
        branches.append([own])
    return ast.copy_location(ast.If(loss.test, *branches), statement)


def _is_scaled(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "scale"


def _nest(node: ast.With | ast.AsyncWith) -> None:
    """Put what follows `stack.enter_context(context)` in the block of a stack into `with context:`, the last one first."""
    names = {key_of(item.optional_vars) for item in node.items if item.optional_vars is not None}
    for index in range(len(node.body) - 2, -1, -1):
        part = node.body[index]
        entered = _entered(part, names)
        if entered is not None:
            inner = ast.With([ast.withitem(entered)], node.body[index + 1 :])
            node.body[index:] = [ast.copy_location(inner, part)]


def _entered(part: ast.AST, names: set[str]) -> ast.expr | None:
    """The context that a statement enters into one of the stacks; of `if amp: stack.enter_context(autocast(...))` with `enabled=amp`."""
    is_branch = isinstance(part, ast.If) and len(part.body) == 1 and not part.orelse
    statement = part.body[0] if isinstance(part, ast.If) and is_branch else part
    call = statement.value if isinstance(statement, ast.Expr) else None
    func = call.func if isinstance(call, ast.Call) else None
    is_entered = isinstance(func, ast.Attribute) and func.attr == "enter_context" and key_of(func.value) in names
    if not is_entered or not isinstance(call, ast.Call) or len(call.args) != 1:
        return None
    context = call.args[0]
    if not isinstance(part, ast.If):
        return context
    is_region = isinstance(context, ast.Call) and key_of(context.func).rpartition(".")[2] == "autocast"
    if not isinstance(context, ast.Call) or not is_region or any(k.arg in {"enabled", None} for k in context.keywords):
        return None
    enabled = ast.copy_location(ast.keyword("enabled", part.test), part.test)
    return ast.copy_location(ast.Call(context.func, context.args, [*context.keywords, enabled]), context)
