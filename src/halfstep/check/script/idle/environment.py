"""Precision flags of the environment that are tested as the text that they are: `if os.getenv("USE_AMP", False):`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.script.objects.values import argument, constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import key_of

__all__ = ["environment_flags"]

_READS = {"os.getenv", "os.environ.get"}
# Arguments that are tested like a flag.
_FLAGS = {"enabled", "fp16", "bf16", "use_amp", "amp", "tf32"}
# Defaults that mean on or off; with None, "" or no default the flag may be meant to be set or not set.
_SWITCHES = {"0", "1", "true", "false", "yes", "no", "on", "off"}


def environment_flags(script: Script, names: re.Pattern[str]) -> Iterator[tuple[ast.Call, str]]:
    """The reads of variables with such a name whose text is only asked to be true, each with the variable of the environment.

    The default shows that on and off are meant. A text that is compared, converted or passed on is another value.
    """
    if "os.environ" not in script.source.text and "getenv" not in script.source.text:
        return
    nodes = list(all_nodes(script.tree))
    for node in nodes:
        if isinstance(node, ast.Call) and len(node.args) == 2 and script.outline.names.full(node.func) in _READS:
            name, default = constant(node.args[0]), constant(argument(node, 1, "default"))
            is_named = isinstance(name, str) and names.search(name.lower()) is not None
            if is_named and _is_switch(default) and _is_tested(script, node, nodes):
                yield node, str(name)


def _is_switch(default: object) -> bool:
    return isinstance(default, (bool, int)) or (isinstance(default, str) and default.lower() in _SWITCHES)


def _is_tested(script: Script, node: ast.expr, nodes: list[ast.AST]) -> bool:
    """Whether nothing but the truth of an expression counts, also through a variable."""
    parents = script.outline.parents
    parent = parents.get(node)
    if _is_asked(parent, node):
        return True
    if not isinstance(parent, (ast.Assign, ast.AnnAssign)) or parent.value is not node:
        return False
    targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
    key = key_of(targets[0]) if len(targets) == 1 else ""
    reads = [
        n
        for n in (nodes if key else ())
        if isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Load) and key_of(n) == key
    ]
    is_local = "." not in key and len(script.outline.bindings.get(key, ())) == 1
    return is_local and bool(reads) and all(_is_asked(parents.get(n), n) for n in reads)


def _is_asked(parent: ast.AST | None, node: ast.AST) -> bool:
    """Whether what is around an expression asks for its truth."""
    if isinstance(parent, (ast.If, ast.IfExp, ast.While)):
        return parent.test is node
    if isinstance(parent, ast.Call):
        return key_of(parent.func) == "bool" and node in parent.args
    if isinstance(parent, ast.keyword):
        return parent.arg in _FLAGS
    return isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not)
