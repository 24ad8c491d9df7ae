"""Formats that an expression or a literal chooses for a variable which nothing, or nothing but messages, read."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.files.python import parse_python
from halfstep.check.regex import regex
from halfstep.check.script.flow.run_format import names_other_format
from halfstep.check.script.objects.chosen import chooses_format, is_local, is_used_instead, num_reads, own_bindings
from halfstep.check.script.objects.command_line import Options
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.outline import Binding, Outline
from halfstep.check.script.syntax.shown import only_reaches_messages
from halfstep.check.script.syntax.unread import read_names

__all__ = ["idle_formats"]

_FORMAT = regex(
    r"(pt|amp|torch|train|model|weight|compute|autocast)?_?dtype|((train|training|trainer|mixed)_)?precision"
)
_BY_NAME = {"locals", "globals", "exec"}


def idle_formats(script: Script) -> Iterator[tuple[ast.AST, str, str]]:
    """The places of such choices in a file that trains, each with what is wrong and the variable."""
    outline = script.outline
    steps = "backward" in outline.calls and script.has("opt_step", "scaler_step", "owned_step")
    if not steps and not any(name.endswith("Trainer") for name in outline.calls):
        return
    named = [key for key in outline.bindings if _FORMAT.fullmatch(key.removeprefix("self."))]
    read = read_names(all_nodes(script.tree)) if named else set()
    for key in named:
        name, bindings = key.removeprefix("self."), own_bindings(outline, key)
        values = [b for b in bindings if b.index is None]
        chosen = [b for b in values if chooses_format(outline, b.value)]
        chosen = chosen or [b for b in values if names_other_format(script, name, b.value)]
        first = chosen[0] if chosen else None
        is_read = name in read and (name != key or not is_local(outline, bindings))
        is_read |= first is not None and Options(script).may_be_read(first.value)
        if first is None or len(chosen) != len(bindings) or is_read:
            continue
        # By the text: the tree has what a table gives in the place of the variable.
        is_used = name == key and bool(num_reads(script.source.text, name) or _is_read_by_name(outline, bindings))
        is_shown = is_used and _is_only_shown(script, name, bindings)
        if is_used and not is_shown:
            continue
        # Another file may read an attribute, unless this one uses the parameter in its place.
        if name != key and not is_used_instead(first.function.node, first.node):
            continue
        option = Options(script).only_for(first.value) if first.value is not None and len(chosen) == 1 else None
        place, flag = option or (first.node, "")
        what = f"`{flag}` only chooses `{key}`, which" if option else f"`{key}` is assigned and"
        state = "only reaches messages" if is_shown else "is never read" if option else "never read"
        yield place, f"{what} {state}", key


def _is_read_by_name(outline: Outline, bindings: list[Binding]) -> bool:
    """Whether a call such as `globals()` may read a variable; not one that runs before it has a value, as where a file lists its settings."""
    first = min(getattr(binding.node, "lineno", 0) for binding in bindings)
    own = {binding.function for binding in bindings}
    for call, function in (site for name in _BY_NAME for site in outline.calls.get(name, ())):
        loops = (n for n in outline.above(call) if isinstance(n, ast.For | ast.While))
        is_before = own == {function} and call.lineno < first and not any(loops)
        if not is_before:
            return True
    return False


def _is_only_shown(script: Script, name: str, bindings: list[Binding]) -> bool:
    """Whether the reads of a local variable, as the program is written, reach nothing but messages."""
    if not is_local(script.outline, bindings) or _is_read_by_name(script.outline, bindings):
        return False
    try:
        tree = parse_python(script.source.text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    nodes = list(ast.walk(tree))
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    loads = [n for n in nodes if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
    return all(only_reaches_messages(parents, tree, load) for load in loads)
