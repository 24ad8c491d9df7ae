"""Settings that ask for one 16-bit format in a file that only computes in the other: a run with it is in float32.

An option lists both, `choices=["fp32", "fp16", "bf16"]`, and only `precision == "fp16"` enters autocast.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from halfstep.check.regex import regex
from halfstep.check.script.flow.run_format import COMPUTES, FORMAT_NAMES, computed_formats
from halfstep.check.script.idle.idle_commands import commands_of
from halfstep.check.script.objects.command_line import Options, stays_here
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.formats import SIXTEEN_BIT
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Outline
from halfstep.check.script.syntax.scope import default_of
from halfstep.check.script.syntax.shown import is_only_shown

__all__ = ["unanswered_formats"]

_COMPARED = regex(r"^[\w.]+ == ['\"]([\w-]+)['\"]$")
_OTHER = {"float16": "bfloat16", "bfloat16": "float16"}
_CASTS = {"float16": {"float16", "half"}, "bfloat16": {"bfloat16"}}  # attributes that compute in the format


def unanswered_formats(script: Script) -> Iterator[tuple[ast.AST, str, str, str]]:
    """Parameters and options, each with its name, the format that it asks for and the only one that the file computes in."""
    outline = script.outline
    regions = [a for a in script.autocasts if a.enabled != "no"]
    computed = computed_formats(script) if regions else frozenset()
    if len(computed) != 1 or not computed <= SIXTEEN_BIT:
        return
    (computed_format,) = computed
    asked = _OTHER[computed_format]
    # A region that is on all the same is HS136's: it computes in one format when the other was asked for.
    if not all(_is_for(outline, a.enabled, computed_format) or conditions_of(outline, a.node) for a in regions):
        return
    nodes = all_nodes(script.tree)
    if any(isinstance(n, ast.Attribute) and n.attr in _CASTS[asked] for n in nodes) or "getattr" in outline.calls:
        return
    places: dict[str, ast.AST] = {}
    for name, place in (*_fixed(script, asked), *_listed(script, nodes, asked)):
        places.setdefault(name, place)
    yield from (
        (node, name, asked, computed_format)
        for name, node in places.items()
        if _is_only_compared(outline, nodes, name, computed_format)
    )


def _names(text: object, dtype: str) -> bool:
    """Whether a string is the name of a format, as people write it."""
    name = str(text).lower().removesuffix("-mixed").removesuffix("-true").removeprefix("torch.")
    return FORMAT_NAMES.get(name) == dtype


def _fixed(script: Script, asked: str) -> Iterator[tuple[str, ast.AST]]:
    """Parameters and options whose default, and every value that the file passes, is the format."""
    outline = script.outline
    for function in outline.functions:
        for name in function.params if not isinstance(function.node, ast.Module) else ():
            default = default_of(function, name) if COMPUTES.fullmatch(name) else None
            passed = list(outline.passed(name, function)) if default is not None else []
            if default is not None and all(_names(constant(v), asked) for v in (default, *(v for v, _ in passed))):
                yield name, default
    for call, _ in outline.calls.get("add_argument", ()):
        name = str(constant(call.args[0])).lstrip("-").replace("-", "_") if call.args else ""
        default = argument(call, None, "default")
        if COMPUTES.fullmatch(name) and default is not None and _names(constant(default), asked):
            yield name, default


def _listed(script: Script, nodes: Collection[ast.AST], asked: str) -> Iterator[tuple[str, ast.AST]]:
    """Options that list the format among others: of argparse, click and typer, and those with a `Literal` as their type."""
    options = Options(script)
    own = [(call, name) for call, _, name in options.declared if _lists(argument(call, None, "choices"), asked)]
    if own and stays_here(options):
        yield from ((name, call) for call, name in own)
    for function in commands_of(script):
        for decorator in getattr(function.node, "decorator_list", ()):
            choice = argument(decorator, None, "type") if isinstance(decorator, ast.Call) else None
            if isinstance(choice, ast.Call) and choice.args and _lists(choice.args[0], asked):
                flags = [str(constant(a)) for a in decorator.args]
                flag = next((f for f in flags if f.startswith("--")), flags[0] if flags else "")
                named = [f for f in flags if f.isidentifier()]
                yield (named or [flag.lstrip("-").replace("-", "_")])[0], decorator
    for node in nodes:
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else key_of(node.target)
            literals = [
                n
                for n in ast.walk(node.annotation)
                if isinstance(n, ast.Subscript) and key_of(n.value).endswith("Literal")
            ]
            if any(_lists(literal.slice, asked) for literal in literals):
                yield name.rpartition(".")[2], node


def _lists(node: ast.expr | None, asked: str) -> bool:
    """Whether a collection of literals names both 16-bit formats."""
    names = [constant(element) for element in getattr(node, "elts", ())]
    return all(any(_names(name, dtype) for name in names) for dtype in (asked, _OTHER[asked]))


def _is_for(outline: Outline, flag: str, dtype: str) -> bool:
    """Whether a flag is a comparison with the name of a format."""
    bound = [text_of(b.value) for b in outline.bindings.get(flag, ()) if b.value is not None]
    matches = [_COMPARED.search(text) for text in bound or [flag]]
    return all(match is not None and _names(match[1], dtype) for match in matches)


def _is_only_compared(outline: Outline, nodes: Collection[ast.AST], name: str, dtype: str) -> bool:
    """Whether a setting is compared with a format, and used for nothing else than tests, messages and copies of itself."""
    is_tested = False
    for node in nodes:
        is_name = (node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")) == name
        if not is_name or not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        if is_only_shown(outline, node) or any(
            isinstance(part, ast.Raise | ast.Assert) for part in outline.above(node)
        ):
            continue
        parent = outline.parents.get(node)
        if isinstance(parent, ast.Assign) and parent.value is node:
            if any(key_of(target).rpartition(".")[2] != name for target in parent.targets):
                return False
        elif isinstance(parent, ast.keyword) and parent.arg == name:
            continue  # a copy: `train(precision=args.precision)`, whose own uses are looked at
        elif not isinstance(parent, ast.Compare):
            return False
        else:
            strings = [n.value for n in ast.walk(parent) if isinstance(n, ast.Constant)]
            names_asked = any(_names(string, _OTHER[dtype]) for string in strings)
            if _rejects(outline, parent):
                # `if precision not in (...): raise` accepts what it names, `if precision == "bf16": raise` rejects it.
                if names_asked != isinstance(parent.ops[0], ast.NotIn):
                    return False
                continue
            if names_asked or not isinstance(parent.ops[0], ast.Eq | ast.In):
                return False
            is_tested |= any(_names(string, dtype) for string in strings)
    return is_tested


def _rejects(outline: Outline, test: ast.expr) -> bool:
    """Whether a test only raises: `if precision not in (...): raise`."""
    parent = outline.parents.get(test)
    return isinstance(parent, ast.If) and isinstance(parent.body[-1], ast.Raise)
