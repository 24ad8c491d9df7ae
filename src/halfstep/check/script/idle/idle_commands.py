"""Options of a function that click, typer, fire or tyro runs as a command, which the function never reads, or only for messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.script.script import Script
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.syntax.shown import only_reaches_messages
from halfstep.check.script.syntax.unread import is_unread, last_of
from halfstep.check.script.syntax.unread_settings import PRECISION_USE, Settings

__all__ = ["commands_of", "idle_commands"]

_DECORATORS = {"command", "option", "argument", "pass_context", "version_option", "help_option", "callback", "main"}
_STARTS = {
    "typer.run", "fire.Fire", "tyro.cli", "jsonargparse.CLI", "jsonargparse.auto_cli", "defopt.run", "cyclopts.run",
    "simple_parsing.parse",
}  # fmt: skip
_LIBRARIES = ("click", "typer", "rich_click", "cyclopts", "asyncclick")
_CONTEXT = re.compile(r"\bctx\b|\bcontext\.(params|args)")


def idle_commands(script: Script, settings: Settings) -> Iterator[tuple[ast.AST, str, str]]:
    """The options, each with what is wrong with it and what should use it."""
    outline, text = script.outline, script.source.text
    commands = commands_of(script)
    if not commands or "locals" in outline.calls or _CONTEXT.search(text):
        return
    for function in commands:
        for argument in _arguments(function):
            use = PRECISION_USE if settings.flag.fullmatch(argument.arg) else settings.use_of_number(argument.arg)
            if not use:
                continue
            option = f"the option `--{argument.arg.replace('_', '-')}` of `{function.name}`"
            if is_unread(text, function, argument.arg):
                yield argument, f"{option} is never read", use
            elif is_shown(script, function, argument.arg):
                yield argument, f"{option} only reaches messages", use


def commands_of(script: Script) -> list[Function]:
    """The functions of a script whose parameters are the options of a command."""
    outline = script.outline
    started = set()
    for name in _STARTS & outline.library_calls.keys():
        started |= {
            call.args[0].id
            for call, _ in outline.library_calls[name]
            if call.args and isinstance(call.args[0], ast.Name)
        }
    commands = []
    for function in outline.functions:
        decorators = list(map(last_of, getattr(function.node, "decorator_list", ())))
        is_decorated = {"command", "main"} & set(decorators) and set(decorators) <= _DECORATORS
        if (is_decorated and outline.names.uses(*_LIBRARIES)) or (function.name in started and not decorators):
            commands.append(function)
    return commands


def is_shown(script: Script, function: Function, name: str) -> bool:
    """Whether messages are all that a function uses a parameter for; a name that the tree does not have at all is a value there."""
    nodes = [n for statement in function.body for n in ast.walk(statement)]
    loads = [n for n in nodes if isinstance(n, ast.Name) and n.id == name]
    lines = script.source.text.splitlines()[function.body[0].lineno - 1 : function.body[-1].end_lineno]
    written = sum(len(re.findall(rf"(?<!\.)\b{name}\b(?!\s*=[^=])", line.partition("#")[0])) for line in lines)
    parents = script.outline.parents
    return 0 < written <= len(loads) and all(only_reaches_messages(parents, function.node, n) for n in loads)


def _arguments(function: Function) -> list[ast.arg]:
    if isinstance(function.node, ast.Module):
        return []
    node = function.node.args
    return [*node.posonlyargs, *node.args, *node.kwonlyargs]
