"""The objects whose state a call saves or restores, beyond `optimizer.state_dict()` written out.

A checkpoint also takes objects: `save_checkpoint(model, optimizer, path)` of another file, `torch.save({"optimizer":
optimizer})`, `save(path, **objects)`, and loops such as `{name: part.state_dict() for name, part in objects.items()}`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.script.objects.values import Scaler, text_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = [
    "has_progress",
    "is_setting",
    "looks_up",
    "looped_objects",
    "passed_objects",
    "restored_copies",
    "restores",
    "restores_models",
    "saves",
    "written_out",
]

MAX_DEPTH = 4
_RESTORES = re.compile(r"resume|restore|restart_?from|load_(ckpt|checkpoint|state|snapshot|training)", re.IGNORECASE)
_SAVES = re.compile(r"^_*save$|save_?(the_?|current_?|latest_?|training_?|full_?)?(ckpt|checkpoint|check_point|ckpoint|state|snapshot|"
                    r"training|model|network|weights|all|dict)|(ckpt|checkpoint|snapshot)_?save", re.IGNORECASE)  # fmt: skip

_CHECKPOINT = re.compile(r"ckpt|check_?point|state|resum|restor|saved|loaded|snapshot", re.IGNORECASE)
_SETTING = re.compile(r"^(args?|cfg|conf|config|opts?|hps|hparams|params|flags|settings|options)(\.|$)|(^|\.)opts?$|"
                      r"name|path|type|file|dir|cfg|config|class|kwargs|params|groups|_lr$|_fn$|state(_dict)?s?$", re.IGNORECASE)  # fmt: skip

# How far a run is: what a checkpoint contains next to the optimizer only if a run is to continue from it.
_NO_MODEL = re.compile(r"optim|sched|(^|_)opt($|_)|scaler", re.IGNORECASE)
_SCHEDULE = re.compile(r"sched", re.IGNORECASE)
_PROGRESS = re.compile(
    r"^(global_?|total_?|cur(rent)?_?|iter_?)?(epoch|step|iteration|iter|iter_num)s?$", re.IGNORECASE
)


def saves(name: str) -> bool:
    """Whether a function of this name writes a checkpoint."""
    return bool(_SAVES.search(name))


def restores(name: str) -> bool:
    """Whether a function of this name restores a checkpoint."""
    return bool(_RESTORES.search(name))


def restored_copies(outline: Outline, scalers: tuple[Scaler, ...]) -> Iterator[tuple[Scaler, ast.Call]]:
    """The scalers that are created in the arguments of a function that restores a checkpoint, each with that call."""
    for scaler in scalers:
        parent: ast.AST | None = scaler.parent
        while isinstance(parent, (ast.keyword, ast.Dict)):
            parent = outline.parents.get(parent)
        if isinstance(parent, ast.Call) and restores(key_of(parent.func).rsplit(".", 1)[-1]):
            yield scaler, parent


def looks_up(node: ast.AST) -> bool:
    """Whether an entry of a checkpoint is looked up: `"scaler" in checkpoint`, `checkpoint["scaler"]`, `checkpoint.get("scaler")`."""
    if isinstance(node, ast.Compare):
        return (
            len(node.ops) == 1 and isinstance(node.ops[0], (ast.In, ast.NotIn)) and _is_checkpoint(node.comparators[0])
        )
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Load) and _is_checkpoint(node.value)
    is_get = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"get", "pop"}
    return is_get and _is_checkpoint(node.func.value)  # type: ignore[attr-defined]


def _is_checkpoint(node: ast.expr) -> bool:
    return bool(_CHECKPOINT.search(key_of(node).rsplit(".", 1)[-1]))


def has_progress(entry: ast.AST | None) -> bool:
    """Whether a checkpoint contains the epoch or step that it was written at."""
    names: list[object] = []
    if isinstance(entry, ast.Dict):
        names = [key.value for key in entry.keys if isinstance(key, ast.Constant)]
    elif isinstance(entry, ast.Call):
        names = [*(keyword.arg for keyword in entry.keywords), *map(key_of, entry.args)]
    return any(isinstance(name, str) and _PROGRESS.search(name.rsplit(".", 1)[-1]) for name in names)


def restores_models(outline: Outline, entry: ast.AST | None) -> bool:
    """Whether the file loads weights again that the checkpoint contains: those of another model show nothing about it."""
    loads = outline.calls.get("load_state_dict", ())
    if not loads:
        return any(outline.names.full(call.func) == "torch.load" for call, _ in outline.calls.get("load", ()))
    if any(_SCHEDULE.search(_owner(call)) for call, _ in loads):
        return False  # a schedule that goes on belongs to a run that goes on
    owners = {_owner(call) for call, function in loads if not _is_best(outline, call, function)}
    saved = {_owner(part) for part in ast.walk(entry) if isinstance(part, ast.Call)} if entry is not None else set()
    models = {key for key in saved if key and not _NO_MODEL.search(key)}
    return bool(owners & (models | {""})) if models else bool(owners)


def _is_best(outline: Outline, call: ast.Call, function: Function) -> bool:
    """Whether the loaded weights are the best ones so far, by the name of their file: for a test, not for resuming."""
    sources = list(call.args[:1])
    for _ in range(MAX_DEPTH):
        if any("best" in text_of(source).lower() for source in sources):
            return True
        keys = {key_of(part) for source in sources for part in ast.walk(source)} - {""}
        sources = [value for key in keys for value in outline.values(key, function)]
    return False


def _owner(call: ast.Call) -> str:
    """The object whose state a call saves or loads, without wrappers: `model` of `model.module.state_dict()`."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in {"state_dict", "load_state_dict"}:
        return ""
    return key_of(call.func.value).removesuffix(".module").removesuffix("._orig_mod")


def is_setting(key: str) -> bool:
    """Whether a variable is about an optimizer or scaler without being one: `args.optimizer`, `optimizer_path`, `opt`."""
    return bool(_SETTING.search(key))


def passed_objects(outline: Outline, call: ast.Call, function: Function) -> list[str]:
    """The variables that a call receives, also inside dictionaries, tuples and `**objects`."""
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    return [key for value in values for key in _members(outline, value, function)]


def written_out(outline: Outline, objects: ast.expr, function: Function) -> ast.Dict | None:
    """The dictionary of this file that a call receives as `**objects`, also through a copy of it."""
    for _ in range(MAX_DEPTH):
        values = outline.values(key_of(objects), function) if key_of(objects) else [objects]
        value = values[0] if len(values) == 1 else None
        if isinstance(value, ast.Dict):
            return value
        if not isinstance(value, ast.Call) or key_of(value.func) != "dict" or len(value.args) != 1:
            return None
        objects = value.args[0]
    return None


def looped_objects(outline: Outline, node: ast.AST, name: str, function: Function) -> list[str]:
    """The variables that a loop variable stands for at `node`, if the loop is over a collection of this file."""
    parent = outline.parents.get(node)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(parent, (ast.ListComp, ast.DictComp, ast.GeneratorExp, ast.SetComp)):
            pairs = [(part.target, part.iter) for part in parent.generators]
        elif isinstance(parent, (ast.For, ast.AsyncFor)):
            pairs = [(parent.target, parent.iter)]
        for target, source in pairs:
            if name in {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}:
                return list(_members(outline, source, function))
        parent = outline.parents.get(parent)
    return []


def _members(outline: Outline, node: ast.expr, function: Function, depth: int = 0) -> Iterator[str]:
    """The variables in a collection: a literal, a variable bound to one, or what `items()`, `zip` and the like return."""
    if depth > MAX_DEPTH:
        return
    if isinstance(node, ast.Starred):
        node = node.value
    parts: list[ast.expr] = []
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        parts = node.elts
    elif isinstance(node, ast.Dict):
        parts = node.values
    elif isinstance(node, ast.Call):
        name = key_of(node.func)
        if name in {"dict", "zip", "enumerate", "list", "tuple", "sorted", "vars"}:
            parts = [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node.func, ast.Attribute) and node.func.attr in {"items", "values"}:
            parts = [node.func.value]
    elif key := key_of(node):
        yield key
        yield from _collected(outline, key, function)
        collections = [v for v in outline.values(key, function) if _is_collection(v)]
        for value in collections[:MAX_DEPTH]:
            yield from _members(outline, value, function, depth + 1)
        for added, bindings in outline.bindings.items() if collections else ():
            if added.startswith(f"{key}["):
                for value in (b.value for b in bindings if b.value is not None):
                    yield from _members(outline, value, function, depth + 1)
    for part in parts:
        if part is not None:
            yield from _members(outline, part, function, depth + 1)


def _collected(outline: Outline, key: str, function: Function) -> Iterator[str]:
    """The scalers that the calls of a function pass for its `*objects` or `**objects`; the calls themselves show the others."""
    arguments = getattr(function.node, "args", None)
    if arguments is None or key not in {getattr(a, "arg", "") for a in (arguments.vararg, arguments.kwarg)}:
        return
    for call, caller in outline.calls.get(function.name, ()):
        if outline.call_target(call, caller) is function:
            values = [
                *call.args[len(arguments.args) :],
                *(k.value for k in call.keywords if k.arg not in function.params),
            ]
            yield from (key for key in map(key_of, values) if "scaler" in key)


def _is_collection(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return key_of(node.func) == "dict"
    return isinstance(node, (ast.Tuple, ast.List, ast.Dict))
