"""Settings at the top of a program that nothing, or nothing but messages, depends on: `USE_AMP = os.environ.get("AMP") == "1"`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.files.python import parse_python
from halfstep.check.regex import regex
from halfstep.check.script.objects.chosen import chooses_format
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.outline import Binding
from halfstep.check.script.syntax.shown import only_reaches_messages
from halfstep.check.script.syntax.unread_settings import PRECISION_USE, Settings

__all__ = ["idle_constants"]

_RUNS = re.compile(r"__main__|^(for|with|while) |^main\(", re.MULTILINE)
_FORMAT = regex(
    r"((pt|amp|torch|train|training|model|weight|compute|autocast|mixed|half)_?)?(dtype|precision)", re.IGNORECASE
)
_ENVIRONMENT = regex(r"\b(environ|getenv)\b|\benv(_\w+)?\(|^config\(|\bparse_args\b", re.IGNORECASE)


def idle_constants(script: Script, settings: Settings) -> Iterator[tuple[ast.AST, str, str]]:
    """The assignments, each with what is wrong with it and what should use it."""
    outline, text = script.outline, script.source.text
    if not _RUNS.search(text) or "backward" not in outline.calls:
        return
    candidates = [
        (key, b[0], use)
        for key, b in outline.bindings.items()
        if len(b) == 1 and (use := _use(script, key, b[0], settings))
    ]
    for name, binding, use in candidates:
        reads = _reads(text, name)
        if reads == []:
            yield binding.node, f"`{name}` is assigned and never read", use
        elif reads is not None and all(reads):
            yield binding.node, f"`{name}` only reaches messages", use


def _use(script: Script, name: str, binding: Binding, settings: Settings) -> str:
    """What should use a variable of the module, by its name and by what it is set to; empty for one of something else."""
    value = binding.value
    if (
        not isinstance(binding.function.node, ast.Module)
        or binding.index is not None
        or value is None
        or not name.isidentifier()
    ):
        return ""
    if not isinstance(binding.node, ast.Assign | ast.AnnAssign) or isinstance(value, ast.Constant):
        return ""
    if _FORMAT.fullmatch(name) and settings.has_formats and chooses_format(script.outline, value):
        return PRECISION_USE
    if not _ENVIRONMENT.search(ast.unparse(value)):
        return ""
    if settings.flag.fullmatch(name.lower()) and settings.has_formats:
        return PRECISION_USE
    return settings.use_of_number(name)


def _reads(text: str, name: str) -> list[bool] | None:
    """Whether each read of a variable, as the program is written, only reaches messages; None if other files may read it."""
    try:
        tree = parse_python(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    nodes = list(ast.walk(tree))
    if any(isinstance(n, ast.Attribute) and n.attr == name for n in nodes):
        return None
    loads = [n for n in nodes if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)} if loads else {}
    return [only_reaches_messages(parents, tree, load) for load in loads]
