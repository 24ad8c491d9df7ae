"""The objects whose state a call saves or restores, beyond `optimizer.state_dict()` written out.

A checkpoint also takes objects: `save_checkpoint(model, optimizer, path)` of another file, `torch.save({"optimizer":
optimizer})`, `save(path, **objects)`, and loops such as `{name: part.state_dict() for name, part in objects.items()}`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from halfstep.check.regex import regex
from halfstep.check.script.objects.expressions import options_of
from halfstep.check.script.objects.values import Scaler, constant, text_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Binding, Function, Outline
from halfstep.check.script.syntax.scaler_class import data_scalers, is_data_scaler

__all__ = [
    "adds_entries",
    "entry_of",
    "is_setting",
    "looks_up",
    "looped_objects",
    "names_scaler",
    "passed_objects",
    "restored_copies",
    "restored_counter",
    "restores",
    "saves",
    "written_out",
]

MAX_DEPTH = 4
_COUNTERS = {
    "epoch", "step", "global_step", "iter", "iteration", "iters", "iter_num", "global_iter", "start_epoch", "current_epoch", "current_step",
}  # fmt: skip
_RANGES = {"range", "trange"}
_START = regex(r"start|resum|initial|begin|last", re.IGNORECASE)  # of the parameter with the epoch to start at
_RESTORES = regex(r"resume|restore|restart_?from|load_(ckpt|checkpoint|state|snapshot|training)", re.IGNORECASE)
# Also `save_best_model`, `save_sft_checkpoint`; a final one is not for resuming.
_SAVES = regex(r"^_*save$|save_?(the_?|current_?|latest_?|training_?|full_?|((?!final_)[a-z0-9]+_){1,2})?(ckpt|checkpoint|check_point|ckpoint|state|snapshot|"
                    r"training|model|network|weights|all|dict)|(ckpt|checkpoint|snapshot)_?save|^_*(write_?|store_?|dump_?)?(ckpt|checkpoint)$", re.IGNORECASE)  # fmt: skip

_CHECKPOINT = regex(r"ckpt|check_?point|state|resum|restor|saved|loaded|snapshot", re.IGNORECASE)
_SETTING = regex(r"^(args?|cfg|conf|config|opts?|hps|hparams|params|flags|settings|options)(\.|$)|(^|\.)opts?$|"
                      r"name|path|type|file|dir|cfg|config|class|kwargs|params|groups|_lr$|_fn$|state(_dict)?s?$", re.IGNORECASE)  # fmt: skip
# Calls whose keywords are the parts of a checkpoint: save(optimizer=...), state.update(...), TrainState(...).
_HOLDS = regex(r"save|update|(State|Checkpoint|Ckpt|Snapshot)s?$|(checkpoint|ckpt|snapshot)_(payload|state|dict|data)$")
# Functions of another file whose result is saved: `torch.save(build_checkpoint(model, optimizer), path)`.
_BUILDS = regex(r"(^|\.)_*(build|make|create|pack|compose|assemble|prepare)_(\w+_)?(checkpoint|ckpt|snapshot)(_\w+)?$")
_ABOUT = regex(r"^(getattr|hasattr|delattr|print)$|(^|\.)(info|debug|warning|add_scalar|add_argument|log)$")
_OWNS_STATE = regex(r"save|load|ckpt|checkpoint|resume|state|register|Trainer|Engine|Manager", re.IGNORECASE)
_FLAG = regex(r"(use|uses|enable|enabled|has|with|is)_")
_COLLECTIONS = {"dict", "OrderedDict", "SimpleNamespace"}
_VIEWS = {"zip", "enumerate", "list", "tuple", "sorted", "vars"}
_COMPREHENSIONS = (ast.ListComp, ast.DictComp, ast.GeneratorExp)


def saves(name: str) -> bool:
    """Whether a function of this name writes a checkpoint."""
    return bool(_SAVES.search(name))


def restores(name: str) -> bool:
    """Whether a function of this name restores a checkpoint."""
    return bool(_RESTORES.search(name))


def _continues(outline: Outline) -> bool:
    """Whether a file reads the epoch or step of a checkpoint to train from the next one: `start = state["epoch"] + 1`."""
    if "load" not in outline.calls or not _COUNTERS & outline.strings:
        return False
    for node in outline.parents:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and text_of(node.right) == "1":
            value = node.left.args[0] if isinstance(node.left, ast.Call) and node.left.args else node.left
            if _reads_counter(node.left) or _reads_counter(value):
                return True
    return _starts_at_counter(outline)


def _starts_at_counter(outline: Outline) -> bool:
    """Whether a loop starts at a variable with the counter of a checkpoint: `range(self.epoch + 1, n)`, `while step < n`."""
    keys = {key for key, bindings in outline.bindings.items() if any(_is_restored(outline, b) for b in bindings)}
    for node in outline.parents if keys else ():
        if isinstance(node, ast.While) and isinstance(node.test, ast.Compare):
            is_below, key = isinstance(node.test.ops[0], (ast.Lt, ast.LtE)), key_of(node.test.left)
            copied = {key_of(b.value) for b in outline.bindings.get(key, ())}  # `step = start_step` of a parameter
            if is_below and keys & {key, *copied}:
                return True
        elif isinstance(node, ast.Call) and key_of(node.func) in _RANGES and len(node.args) > 1:
            start = node.args[0]
            if key_of(start.left if isinstance(start, ast.BinOp) else start) in keys:
                return True
    return False


def _is_restored(outline: Outline, binding: Binding) -> bool:
    """Whether an assignment is of the counter of a checkpoint, also one that a function of the file returns."""
    target = outline.call_target(binding.value, binding.function) if isinstance(binding.value, ast.Call) else None
    returns = [n.value for n in ast.walk(target.node) if isinstance(n, ast.Return)] if target is not None else []
    for result in returns or [binding.value]:
        value = result
        if binding.index is not None:
            parts = result.elts if isinstance(result, ast.Tuple) else []
            value = parts[binding.index] if 0 <= binding.index < len(parts) else None
        while isinstance(value, ast.Call) and key_of(value.func) == "int" and value.args:
            value = value.args[0]
        owner = value.func if isinstance(value, ast.Call) else value
        owner = owner.value if isinstance(owner, (ast.Attribute, ast.Subscript)) else None
        if value is not None and _reads_counter(value) and owner is not None and _is_checkpoint(owner):
            return True
    return False


def restored_counter(outline: Outline, scalers: tuple[Scaler, ...], function: Function, scaler: str) -> str:
    """What a resumed run continues from, besides the optimizer, in words; "" if the text shows no resumed run.

    Where a function creates the scaler and starts at an epoch that it is passed, nobody else can restore that scaler.
    """
    if _continues(outline):
        return "the weights and the epoch are restored"
    if not any(s.function is function and s.key == scaler and "." not in scaler for s in scalers):
        return ""
    loops = (n for n in ast.walk(function.node) if isinstance(n, ast.For))
    calls = (n for loop in loops for n in ast.walk(loop.iter) if isinstance(n, ast.Call) and len(n.args) > 1)
    names = (key_of(call.args[0]) for call in calls if key_of(call.func) in _RANGES)  # also tqdm(range(...))
    start = next((name for name in names if name in function.params and _START.search(name)), "")
    return f"`{start}` is restored" if start else ""


def _reads_counter(node: ast.expr) -> bool:
    """Whether a value is `state["epoch"]` or `state.get("epoch", 0)`."""
    index: ast.expr | None = node.slice if isinstance(node, ast.Subscript) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        index = node.args[0]
    return isinstance(index, ast.Constant) and index.value in _COUNTERS


def adds_entries(outline: Outline) -> bool:
    """Whether an `update` may add entries of unknown names to a checkpoint; a meter, a bar or written names add none."""
    for call, function in outline.calls.get("update", ()):
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        added = call.args[0] if len(call.args) == 1 and not call.keywords else None
        if receiver is None or added is None or isinstance(added, ast.Constant) or "scal" in text_of(receiver):
            continue  # `meter.update(loss, n)`, `bar.update(1)`
        written = added.keys if isinstance(added, ast.Dict) else [None]
        if all(isinstance(key, ast.Constant) and "scaler" not in str(key.value) for key in written):
            continue
        values = outline.values(key_of(receiver), function) if key_of(receiver) else []
        objects = [
            v for v in values if isinstance(v, ast.Call) and key_of(v.func) != "dict" and not _is_checkpoint(v.func)
        ]
        if not values or len(objects) < len(values):
            return True
    return False


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


def entry_of(outline: Outline, node: ast.AST) -> ast.AST | None:
    """Where a saved state ends up: a dictionary, a save call or an item assignment; None for comparisons and copies."""
    parent = outline.parents.get(node)
    if isinstance(node, ast.Call) and saves(text_of(node.func).rsplit(".", 1)[-1]):
        return node  # a call that saves the objects it receives
    # deepcopy(optimizer.state_dict()), [o.state_dict() for o in optimizers] and the like still end up in the checkpoint.
    while (
        (isinstance(parent, ast.Attribute) and parent.attr == "copy")
        or isinstance(parent, (ast.IfExp, ast.Starred, ast.BoolOp, ast.Tuple, ast.List, *_COMPREHENSIONS))
        or (isinstance(parent, ast.Call) and not text_of(parent.func).rsplit(".", 1)[-1].startswith("save"))
    ):
        node, parent = parent, outline.parents.get(parent)
    if isinstance(parent, ast.Dict):
        return None if _stays(outline, parent) else parent
    if isinstance(parent, ast.Return) and isinstance(node, _COMPREHENSIONS):
        return parent
    if isinstance(parent, ast.keyword):
        call = outline.parents.get(parent)
        name = text_of(call.func) if isinstance(call, ast.Call) else ""
        return call if name == "dict" or _HOLDS.search(name) else None
    if isinstance(parent, ast.Call) and text_of(parent.func).rsplit(".", 1)[-1].startswith("save"):
        return None if _is_on_tpu(outline, parent) else parent
    if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Subscript):
        return parent
    return _stored(outline, parent) if isinstance(parent, ast.Assign) else None


def _is_on_tpu(outline: Outline, call: ast.Call) -> bool:
    """Whether `xm.save` writes the checkpoint, in a file without the scaler of torch_xla: a TPU needs none."""
    is_xla = outline.names.full(call.func).startswith("torch_xla.")
    return is_xla and not any(name.startswith("torch_xla.amp") for name in outline.names.table.values())


def _stays(outline: Outline, states: ast.Dict) -> bool:
    """Whether a dictionary stays in memory: a variable of which at most entries are read. Its `torch.save` may be commented out."""
    assign = outline.parents.get(states)
    name = assign.targets[0] if isinstance(assign, ast.Assign) and len(assign.targets) == 1 else None
    scope: ast.AST | None = assign
    while scope is not None and not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
        scope = outline.parents.get(scope)
    if not isinstance(name, ast.Name) or scope is None:
        return False
    names = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name.id]
    shared = any(isinstance(n, (ast.Global, ast.Nonlocal)) and name.id in n.names for n in ast.walk(scope))
    above = [outline.parents.get(n) for n in names if isinstance(n.ctx, ast.Load)]
    return not shared and all(isinstance(parent, (ast.Subscript, ast.Compare, ast.If)) for parent in above)


def _stored(outline: Outline, assign: ast.Assign) -> ast.AST | None:
    """The dictionary or save call into which the same function puts an assigned state."""
    scope: ast.AST = assign
    while not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
        scope = outline.parents[scope]
    key = key_of(assign.targets[0])
    for part in ast.walk(scope):
        values = part.values if isinstance(part, ast.Dict) else []
        if isinstance(part, ast.Call) and saves(text_of(part.func).rsplit(".", 1)[-1]):
            values = part.args
        if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Subscript):
            values = [part.value]  # `checkpoint["optimizer"] = state`
        if key and any(key_of(value) == key for value in values):
            return part
    return None


def is_setting(key: str, stepped: Collection[str] = ()) -> bool:
    """Whether a variable is about an optimizer or scaler without being one: `args.optimizer`, `optimizer_path`, `opt` unless it is stepped."""
    return key.removeprefix("self.") not in stepped and bool(_SETTING.search(key))


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
    elif isinstance(node, (ast.IfExp, ast.BoolOp)):
        parts = options_of(node)  # `scaler if amp else None`
    elif isinstance(node, ast.Call):
        name = key_of(node.func)
        is_built = bool(_BUILDS.search(name)) and outline.call_target(node, function) is None
        if is_built or name.rpartition(".")[2] in _COLLECTIONS | _VIEWS:
            parts = [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node.func, ast.Attribute) and node.func.attr in {"items", "values"}:
            parts = [node.func.value]
        elif not node.args and not node.keywords and (target := outline.call_target(node, function)) is not None:
            # `self._active_scaler()`, a method that returns an attribute, or None
            parts = [n.value for n in ast.walk(target.node) if isinstance(n, ast.Return) and n.value is not None]
            parts = [part for part in parts if isinstance(part, (ast.IfExp, ast.BoolOp, ast.Attribute, ast.Tuple))]
    elif key := key_of(node):
        yield key
        yield from _collected(outline, key, function)
        collections = [v for v in outline.values(key, function) if _is_collection(v)]
        for value in collections[:MAX_DEPTH]:
            yield from _members(outline, value, function, depth + 1)
        for added, bindings in outline.bindings.items() if collections else ():
            if added.startswith((f"{key}[", f"{key}.")):
                for value in (b.value for b in bindings if b.value is not None):
                    if isinstance(value, ast.Call) and not text_of(value.func).endswith("state_dict"):
                        yield added  # `kit.scaler = GradScaler()`
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
        return key_of(node.func).rpartition(".")[2] in _COLLECTIONS
    return isinstance(node, (ast.Tuple, ast.List, ast.Dict))


def names_scaler(outline: Outline, scalers: tuple[Scaler, ...]) -> bool:
    """Whether a key or attribute has "scaler" in its name: the scaler is saved some other way."""
    others = data_scalers(outline)
    if not any("scaler" in text for text in outline.strings - others if text.isidentifier()):
        return False
    for node in ast.walk(outline.module.node):
        if isinstance(node, ast.Dict):
            if _is_setup(outline, scalers, node):
                continue
            entries = ((str(constant(k)), v) for k, v in zip(node.keys, node.values, strict=True))
            logged = [v for name, v in entries if _is_state(name, others) and not _is_of_data(v) and constant(v) is ...]
            if not all(isinstance(v, ast.Call) and text_of(v.func).endswith("get_scale") for v in logged):
                return True
        elif (isinstance(node, ast.Call) and _ABOUT.search(text_of(node.func))) or looks_up(node):
            continue  # whether there is a scaler, or its name in a log, not what a checkpoint contains
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            continue  # a read, `parts["scaler"]`; what is called on it is an event of its own
        elif isinstance(node, ast.Tuple) and any(map(_is_of_data, node.elts)):
            continue  # a step of a scikit-learn pipeline, `("scaler", StandardScaler())`
        elif not isinstance(node, ast.Constant):
            texts = [c.value for c in ast.iter_child_nodes(node) if isinstance(c, ast.Constant)]
            if any(isinstance(t, str) and t.isidentifier() and _is_state(t, others) for t in texts):
                return True
    return False


def _is_state(name: str, others: frozenset[str]) -> bool:
    """Whether a key may be that of a scaler's state; `use_scaler` is a setting."""
    return "scaler" in name and name not in others and not _FLAG.match(name)


def _is_of_data(node: ast.expr) -> bool:
    """Whether an expression creates a scaler of data."""
    return isinstance(node, ast.Call) and is_data_scaler(text_of(node.func).rsplit(".", 1)[-1])


def _is_setup(outline: Outline, scalers: tuple[Scaler, ...], node: ast.Dict) -> bool:
    """Whether a dictionary is what a function returns for the training loop: its entry is the scaler itself, not its state."""
    function = outline.parents.get(node)
    if not isinstance(function, ast.Return):
        return False
    while function is not None and not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        function = outline.parents.get(function)
    values = [v for k, v in zip(node.keys, node.values, strict=True) if "scaler" in str(constant(k))]
    names = {s.key.rsplit(".", 1)[-1] for s in scalers}
    objects = all(key_of(v) and key_of(v).rsplit(".", 1)[-1] in names for v in values)
    return objects and function is not None and not _OWNS_STATE.search(function.name)
