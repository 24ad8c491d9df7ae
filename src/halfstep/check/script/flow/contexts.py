"""What a `with` statement, or a call of `__enter__`, enters: autocast, no_grad, or something else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Guard, Region
from halfstep.check.script.objects.values import Autocast, argument, autocasts_of, text_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outcome import outcome
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["Contexts"]

_NOTHING = regex(r"null|dummy|suppress|noop|no_op|empty", re.IGNORECASE)  # contexts that do nothing
_AUTOCAST = regex(r"autocast(_(context|ctx|manager))?$")  # of a framework or another file
_FLOAT8 = regex(
    r"(^|[._])(fp8|float8|mxfp8|fp4|nvfp4)_"
)  # `fp8_autocast` changes matrix products, not torch's autocast
_NO_GRAD = {"torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad", "torch.autograd.inference_mode"}
_SWITCHES = {"torch.set_grad_enabled", "torch.autograd.set_grad_enabled"}


@dataclass(frozen=True, eq=False)
class _Context:
    """What `with ctx:` enters: its autocast regions, and whether it may be something else as well."""

    autocasts: tuple[Autocast, ...]
    mixed: bool


class Contexts:
    """Reads the contexts of one function."""

    def __init__(self, outline: Outline, function: Function) -> None:
        self.outline = outline
        self.function = function
        self.known: dict[str, _Context] = {}  # by variable
        self.opened: dict[ast.expr, ast.With] = {}  # contexts entered by hand
        self.stacks: dict[ast.AST, str] = {}  # the ExitStack of a context
        self.has_opened = bool({"__enter__", "enter_context"} & outline.calls.keys())

    def region(self, node: ast.expr, guards: tuple[Guard, ...], num_loops: int) -> Region:
        """The region that a context opens."""
        key = key_of(node)
        if key not in self.known:
            autocasts = tuple(autocasts_of(self.outline, node, self.function))
            self.known[key] = _Context(autocasts, bool(autocasts) and self.mixed(node))
        context = self.known[key] if key else self.known.pop(key)
        autocasts, names = context.autocasts, self.outline.names
        if context.mixed:
            return Region("other", node, (), guards, num_loops)
        if isinstance(node, (ast.Name, ast.Attribute)) and names.full(node).endswith(".autocast") and not autocasts:
            return Region("other", node, (), guards, num_loops)
        if autocasts:
            return Region("autocast", node, autocasts, guards, num_loops)
        func = node.func if isinstance(node, ast.Call) else node
        full = names.full(func)
        if full in _NO_GRAD:
            return Region("no_grad", node, (), guards, num_loops)
        if full in _SWITCHES:
            mode = argument(node, 0, "mode") if isinstance(node, ast.Call) else None
            off = mode is not None and text_of(mode) == "False"
            return Region("no_grad" if off else "other", node, (), guards, num_loops, key_of(mode))
        if full == "apex.amp.scale_loss" or key_of(func).endswith(".scale_loss"):
            return Region("scaled_loss", node, (), guards, num_loops)
        is_float8 = bool(_FLOAT8.search(key_of(func))) or full.startswith("transformer_engine.")
        if _AUTOCAST.search(key_of(func)) and not is_float8 and not self._enters_nothing(node):
            return Region("owned", node, (), guards, num_loops)
        return Region("other", node, (), guards, num_loops)

    def _enters_nothing(self, node: ast.expr) -> bool:
        """Whether a function of the file returns `nullcontext()` for the arguments of a call."""
        target = self.outline.call_target(node, self.function) if isinstance(node, ast.Call) else None
        result = outcome(node, target) if target is not None and isinstance(node, ast.Call) else None
        return isinstance(result, ast.Call) and bool(_NOTHING.search(text_of(result.func)))

    def by_hand(
        self,
        statement: ast.stmt,
        rest: list[ast.stmt],
        regions: tuple[Region, ...],
        guards: tuple[Guard, ...],
        depth: int,
    ) -> tuple[tuple[Region, ...], list[ast.With]]:
        """The regions of what follows a statement that may call `__enter__` or `__exit__`, and the blocks that start there."""
        if not self.has_opened:
            return regions, []
        regions = tuple(r for r in regions if not _is_left(statement, r, self.stacks.get(r.node, "")))
        blocks = []
        for context, stack in _entered_by_hand(statement) if rest else ():
            region = self.region(context, guards, depth)
            if region.kind == "autocast":
                # As if the rest of the block were inside `with`.
                new = ast.copy_location(ast.With([ast.withitem(context)], []), context)
                block = self.opened.setdefault(context, new)
                block.body += rest
                self.stacks[context] = stack
                regions = (*regions, region)
                blocks.append(block)
        return regions, blocks

    def is_gradient_switch(self, node: ast.AST) -> bool:
        """Whether a call turns gradients on or off, for the rest of a block if it is a statement."""
        return isinstance(node, ast.Call) and self.outline.names.full(node.func) in _SWITCHES

    def mixed(self, node: ast.expr) -> bool:
        """Whether a context variable may be something other than autocast or a null context, such as `no_sync`."""
        key = key_of(node)
        options = self.outline.values(key, self.function) if key else []
        flat = [o for v in options for o in ((v.body, v.orelse) if isinstance(v, ast.IfExp) else (v,))]
        plain = [o for o in flat if not autocasts_of(self.outline, o, self.function)]
        return any(isinstance(o, ast.Call) and not _NOTHING.search(text_of(o.func)) for o in plain)


def _entered_by_hand(statement: ast.stmt) -> Iterator[tuple[ast.expr, str]]:
    """The contexts that a statement enters for the rest of its block, also under a condition, each with its ExitStack."""
    for call in _calls(statement):
        assert isinstance(call.func, ast.Attribute)
        if call.func.attr == "__enter__":
            yield call.func.value, ""
        elif call.func.attr == "enter_context" and len(call.args) == 1:
            yield call.args[0], key_of(call.func.value)


def _is_left(statement: ast.stmt, region: Region, stack: str) -> bool:
    """Whether a statement leaves a region that was entered by hand, or by a stack: `ctx.__exit__(None, None, None)`."""
    funcs = [call.func for call in _calls(statement)]
    left = [f.value for f in funcs if isinstance(f, ast.Attribute) and f.attr in {"__exit__", "close"}]
    if isinstance(statement, ast.With):
        left += [item.context_expr for item in statement.items]  # `with stack:` leaves what `stack` has entered
    return any(key and key in {stack, key_of(region.node)} for key in map(key_of, left))


def _calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """The method calls that are statements: this one, or those in the branches of an `if` or a `try`."""
    waiting = [statement]
    while waiting:  # a chain of elif can be long
        node = waiting.pop()
        if isinstance(node, (ast.If, ast.Try)):
            waiting += (*node.body, *node.orelse, *getattr(node, "finalbody", ()))
        value = node.value if isinstance(node, (ast.Expr, ast.Assign)) else None
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            yield value
