"""Gradients that W&B logs in hooks of the backward: `wandb.watch(model)`, and the callback of a Trainer with `WANDB_WATCH=all`.

The method is that of the module, of a run and of Lightning's logger, which `self.logger` of a module may be. The variable is set in the
file, `os.environ["WANDB_WATCH"] = "all"`, or by a magic of a notebook, `%env WANDB_WATCH=all`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.objects.expressions import arms_of
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.syntax.returned import created_by

__all__ = ["WATCH", "logs_gradients", "watched_by_environment"]

WATCH = "WANDB_WATCH"
_LOGS = {"all", "gradients"}
_SETS = {"setdefault", "putenv"}
_CALLBACK = "WandbCallback"
_RUNS = {"wandb", "wandb.init"}
_LOGGER = "WandbLogger"
_LOGGERS = regex(r"^wandb(\.init)?$|Logger$")
_OF_TRAINER = regex(r"^(self\.|trainer\.|pl_module\.|module\.)+logger$")


def logs_gradients(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether a call of `watch` is one of W&B that logs gradients."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    is_run = isinstance(owner, ast.Attribute) and owner.attr == "experiment"
    makers = _makers(script, owner.value if is_run and isinstance(owner, ast.Attribute) else owner, function)
    loggers = [maker for maker in makers if maker.rpartition(".")[2] == _LOGGER]
    # Of several loggers only that of W&B has the method.
    is_known = bool(loggers) or (not is_run and not _RUNS.isdisjoint(makers))
    log = argument(call, 1 if loggers and not is_run else 2, "log")
    return is_known and all(map(_LOGGERS.search, makers)) and (log is None or constant(log) in _LOGS)


def _makers(script: Script, owner: ast.expr | None, function: Function) -> list[str]:
    """What creates the object of a call: the logger of the file's Trainer for `self.logger`, a run for `get_tracker("wandb")`."""
    key = key_of(owner)
    sources = script.outline.sources(key, function) if key else []
    if not sources and _OF_TRAINER.search(key):
        return [_LOGGER] if _LOGGER in script.outline.calls else []
    pairs = [(arm, scope) for value, scope in sources for arm in arms_of(value)] or (
        [(arm, function) for arm in arms_of(owner)] if owner is not None else []
    )
    return [name for arm, scope in pairs for name in _made_by(script, arm, scope)]


def _made_by(script: Script, value: ast.expr, function: Function) -> list[str]:
    is_tracker = isinstance(value, ast.Call) and last_name(key_of(value.func)) == "get_tracker"
    if is_tracker and isinstance(value, ast.Call):
        return ["wandb.init"] if constant(argument(value, 0, "name")) == "wandb" else [""]
    return created_by(script.outline, value, function)


def watched_by_environment(script: Script) -> Iterator[ast.AST]:
    """The statements that ask the callback to log gradients, in a file whose Trainer has that callback."""
    if WATCH not in script.source.text:
        return
    nodes = all_nodes(script.tree)
    places = [node for node in nodes if _value_of(node) in _LOGS]
    if places and _has_callback(script, nodes):
        yield from places[:1]


def _value_of(node: ast.AST) -> object:
    """What a node sets the variable to; None for any other node."""
    if isinstance(node, ast.Expr) and isinstance(text := constant(node.value), str):
        name, _, value = text.partition("=")  # a magic
        return value.strip() if name.strip() == WATCH else None
    if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Subscript):
        return constant(node.value) if constant(target.slice) == WATCH else None
    if not isinstance(node, ast.Call):
        return None
    name = last_name(key_of(node.func))
    if name in _SETS and len(node.args) == 2:
        return constant(node.args[1]) if constant(node.args[0]) == WATCH else None
    if name != "update" or not key_of(node.func).endswith("environ.update"):
        return None
    written = node.args[0] if node.args else None
    pairs = list(zip(written.keys, written.values, strict=True)) if isinstance(written, ast.Dict) else []
    values = [constant(value) for key, value in pairs if key is not None and constant(key) == WATCH]
    values += [constant(k.value) for k in node.keywords if k.arg == WATCH]
    return values[0] if values else None


def _has_callback(script: Script, nodes: tuple[ast.AST, ...]) -> bool:
    """Whether the training arguments report to W&B, or the file has the callback itself."""
    classes = (n for n in nodes if isinstance(n, ast.ClassDef))
    if _CALLBACK in script.outline.calls or any(last_name(key_of(b)) == _CALLBACK for c in classes for b in c.bases):
        return True
    sites = [
        call for name, calls in script.outline.calls.items() if name.endswith("TrainingArguments") for call, _ in calls
    ]
    reported = [text_of(k.value) for call in sites for k in call.keywords if k.arg == "report_to"]
    # Without the argument, transformers 4 reports to everything that is installed.
    return any("wandb" in text or "all" in text for text in reported) or (not reported and _imports(script))


def _imports(script: Script) -> bool:
    return script.outline.names.uses("wandb")
