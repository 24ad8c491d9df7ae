"""What happens after an exception that a forward or a backward raises: where its handler continues.

A batch that runs out of memory is often skipped: the handler empties the cache, and the loop continues with the next batch, or
with the lines after the `try`. Those lines run without what the block was to compute.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from itertools import pairwise

from halfstep.check.regex import regex

__all__ = ["LOOPS", "catches_type_error", "caught_block", "raised_past"]

LOOPS = (ast.For, ast.AsyncFor, ast.While)
_CAUGHT = regex(r"\b(RuntimeError|Exception|BaseException|OutOfMemoryError)\b")  # what a forward out of memory raises
_TYPE_ERROR = regex(r"\b(TypeError|Exception|BaseException)\b")
# Calls of a handler that only report and free memory; any other may compute the gradients in another way.
_HARMLESS = regex(
    r"(^|\.)(print|str|repr|len|type|format|lower|empty_cache|collect|synchronize|is_available|reset_peak_memory_stats|sleep|"
    r"debug|info|warning|warn|error|exception|critical|write|print_exc|format_exc|append|zero_grad|hasattr|isinstance)$"
)


def _catches(handler: ast.ExceptHandler) -> bool:
    """Whether a handler is for what a forward out of memory raises."""
    return handler.type is None or bool(_CAUGHT.search(ast.unparse(handler.type)))


def _continues(handler: ast.ExceptHandler) -> bool:
    """Whether a handler of a failed forward neither raises again nor ends the loop."""
    ends = (ast.Raise, ast.Return, ast.Break)
    return _catches(handler) and not any(isinstance(node, ends) for node in ast.walk(handler))


def catches_type_error(call: ast.Call, above: Iterable[ast.AST]) -> bool:
    """Whether a `try` around a call handles its TypeError, as code for several versions of torch does."""
    inner: ast.AST = call
    for outer in above:
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return False
        if isinstance(outer, ast.Try) and inner in outer.body:
            caught = [handler.type for handler in outer.handlers]
            if any(kind is None or _TYPE_ERROR.search(ast.unparse(kind)) for kind in caught):
                return True
        inner = outer
    return False


def caught_block(node: ast.AST, above: Iterable[ast.AST]) -> set[ast.AST]:
    """The nodes whose RuntimeError the handler around a node catches; none if an error in it is caught."""
    inner, handler = node, None
    for outer in above:
        if handler is not None:
            block = outer.body if isinstance(outer, ast.Try) and _catches(handler) else []
            return {part for statement in block for part in ast.walk(statement)}
        if isinstance(outer, ast.Try) and inner in outer.finalbody and any(map(_continues, outer.handlers)):
            return {part for statement in outer.body for part in ast.walk(statement)}
        if isinstance(outer, (ast.Try, *LOOPS)):
            break  # a handler of its own, or a loop in the handler
        inner = outer
        handler = outer if isinstance(outer, ast.ExceptHandler) else None
    return set()


def raised_past(node: ast.AST, above: Iterable[ast.AST], outside: Collection[ast.AST]) -> ast.Try | None:
    """The `try` whose handled exception skips a node, while the loops of `outside` continue with what follows it."""
    path: list[ast.AST] = [node]
    for outer in above:
        if outer in outside or isinstance(outer, ast.ExceptHandler):
            break
        path.append(outer)
    for depth, (inner, outer) in enumerate(pairwise(path), start=1):
        # `continue` leads to the next pass of an inner loop, after which the outer one does the rest.
        ends = {"end", "continue", "break"} if any(isinstance(n, LOOPS) for n in path[depth:]) else {"end"}
        block = getattr(outer, "body", [])
        body: list[ast.AST] = block if isinstance(block, list) else []
        if isinstance(outer, ast.Try) and inner in body and _ends(outer) & ends:
            return outer
        before = body[: body.index(inner)] if inner in body else []
        for attempt in before:
            if isinstance(attempt, ast.Try) and _ends(attempt) & (ends - {"end"}):
                return attempt
    return None


def _ends(attempt: ast.Try) -> set[str]:
    """Where the handlers of a failed forward lead that do no more than report it: to the end of the `try`, or out of it."""
    handlers = [handler for handler in attempt.handlers if _catches(handler)]
    calls = [n for handler in handlers for n in ast.walk(handler) if isinstance(n, ast.Call)]
    if attempt.finalbody or not all(_HARMLESS.search(_name(call)) for call in calls):
        return set()
    return {end for handler in handlers for end in _block_ends(handler.body)}


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)


def _block_ends(body: list[ast.stmt]) -> set[str]:
    """How a block may be left: "end", "continue", "break", or any other way."""
    ends = {"end"}
    for statement in body:
        inside = {"end"}
        if isinstance(statement, (ast.Continue, ast.Break, ast.Raise, ast.Return)):
            inside = {type(statement).__name__.lower()}
        elif isinstance(statement, ast.If):
            inside = _block_ends(statement.body) | _block_ends(statement.orelse)
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            inside = _block_ends(statement.body)
        ends = (ends - {"end"}) | inside
        if "end" not in inside:
            break
    return ends
