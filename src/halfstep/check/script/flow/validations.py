"""Functions that validate, or record log-probabilities, without a region in reach, next to functions that train in one.

The forwards of a trace show most validations without autocast. What they do not show are models that validation uses through
other methods than training, `model.reconstruct(x)`, and functions that other files call. Here the names decide: a function named for validation that
disables gradients, runs a model, and reads nothing that could be a region, neither itself nor in what it calls or is called in.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from halfstep.check.regex import regex
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_statements, nodes_in
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function

__all__ = ["hands_out", "has_region", "is_loaded_low", "named_validations", "old_probabilities", "trains_in_region"]

_VALIDATES = regex(r"(^|_)(valid|validat\w+|val|eval|evaluat\w+|test)(_|$|\d)", re.IGNORECASE)
_ASIDE = regex(
    r"sampl|generat|infer|predict|demo|fid|visual|plot|image|export|speed|bench|flops|profil|memory|loader|data|split|config|args|setup|parse|collate",
    re.IGNORECASE,
)
_ASIDE_OF_UPDATES = regex(r"valid|eval|test|demo|plot|visual|reward|benchmark", re.IGNORECASE)
_MODEL = regex(r"(^|[._])(model|net|network|student|unet|backbone|encoder|generator|policy)$", re.IGNORECASE)
_MAKES = regex(r"(^|\.)_*(load|create|build|get|make|init|set|setup|prepare|unwrap|wrap|compile|save)_")
_PRECISION = regex(
    r"autocast|(?<![a-z])amp_|_amp(?![a-z])|\bctx\b|context|precision|mixed|accelerat|fabric|trainer|runner|engine|fp16|bf16|half|float16",
    re.IGNORECASE,
)
_TRAINS = regex(r"(?<![a-z])train(ing)?(?![a-z])")
_VALIDATIONS = ("eval", "val", "valid", "validation", "test")
_NO_GRADIENTS = regex(r"no_grad|inference_mode")
_RATIO = regex(r"exp\(\s*[\w.\[\]]+\s*-\s*\(?[\w.]*(^|[\W_])old_?\w*", re.IGNORECASE)
_PROBABILITIES = regex(r"log_?softmax|log_?prob|logp|logps", re.IGNORECASE)
_REFERENCE = regex(r"(^|[._])(ref|reference|reward|critic|value|teacher)", re.IGNORECASE)
_COMPUTES = regex(
    r"^_*(forward|encod|decod|reconstruct|comput|loss|predict|score|extract|embed|denois|transform|backbone|head|training_)"
)
_LOADER = regex(r"loader|dataset|_dl\b")
_LIBRARIES = {"torch", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "transformers", "diffusers"}
_LOSSES = regex(r"(loss|losses|step|forward|batch)$")


def has_region(script: Script) -> bool:
    """Whether a script opens a region of its own, or one that a function of another module of the project returns by its name."""
    if script.autocasts:
        return True
    table = script.outline.names.table
    imported = {n for n, full in table.items() if "autocast" in n and full.partition(".")[0] not in _LIBRARIES}
    statements = all_statements(script.tree) if imported else ()
    contexts = (item.context_expr for n in statements if isinstance(n, ast.With) for item in n.items)
    return any(isinstance(context, ast.Call) and key_of(context.func) in imported for context in contexts)


def named_validations(script: Script) -> Iterator[tuple[ast.Call, str]]:
    """The calls without autocast of functions that are named for validation, and the name of what each runs."""
    if "backward" in script.outline.calls:
        plain = (*_plain_validations(script), *_twin_validations(script), *_shared_validations(script))
        yield from dict(plain).items()


def _plain_validations(script: Script) -> Iterator[tuple[ast.Call, str]]:
    """The first call of a method of a model in each such function, and the model's name.

    Calls of the model itself are in traces, except those of a part, `model.vision_model(x)`, that training runs by its own name.
    """
    functions = [f for f in script.outline.functions if isinstance(f.node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    owners = {f.cls for f in functions if trains_in_region(f)}
    forwards = list(script.events("forward")) if owners else []
    traced = {event.node for event in forwards}
    trained = {last_name(event.local.subject) for event in forwards if event.autocast() is not None}
    for function in functions:
        if not _VALIDATES.search(function.name) or _ASIDE.search(function.name) or function.cls not in owners:
            continue
        model = next(_forwards(script, function), None)
        if model is None or not _NO_GRADIENTS.search(ast.unparse(function.node)):
            continue
        call, name = model
        is_seen = script.autocasts and key_of(call.func) == name  # traces know of the regions of this file
        if is_seen and (call in traced or not _is_part(name, trained)):
            continue
        if not _MODEL.search(name) and name not in _in_regions(script):
            continue  # something else that has an `eval`
        if not _may_be_in_region(script, function, functions) and not is_loaded_low(script, call, name, function):
            yield model


def _is_part(name: str, trained: set[str]) -> bool:
    """Whether a name is of a part of a model, which training runs by its own name."""
    return "." in name and last_name(name) in trained


def _in_regions(script: Script) -> set[str]:
    """The variables that functions which train use in their regions, as models or what they are passed to."""
    calls = [c for f in script.outline.functions if trains_in_region(f) for c in _calls_in_region(f)]
    return {key_of(part) for call in calls for part in (call.func, *arguments_of(call))} - {""}


def is_loaded_low(script: Script, call: ast.Call, model: str, function: Function) -> bool:
    """Whether the model that a call runs, also by a method such as `generate`, is loaded in 16 bits."""
    func = call.func
    if isinstance(func, ast.Attribute) and key_of(func) != model:
        func = func.value
    return any(c.low and c.form != "cast" for c in script.training.model(func, function).casts)


def _shared_validations(script: Script) -> Iterator[tuple[ast.Call, str]]:
    """The first call outside any region of a function with a model, or of a method without a body, that training calls in one.

    `compute_loss(model, batch)` and `self.compute_loss(batch)`, which each subclass defines.
    Also of a function of the same import for a whole loader: `loss_loader(model, loader)` for `loss_batch(model, batch)`.
    """
    functions = [f for f in script.outline.functions if isinstance(f.node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    trained: dict[str, str] = {}
    for function in filter(trains_in_region, (*functions, script.outline.module)):
        calls = [c for c in _calls_in_region(function) if _gets_model(c) or _is_left_open(script, c, function)]
        trained |= {key_of(call.func): function.cls for call in calls}
    for function in functions if trained else ():
        if not _VALIDATES.search(function.name) or _ASIDE.search(function.name):
            continue
        if not _NO_GRADIENTS.search(ast.unparse(function.node)) or _may_be_in_region(script, function, functions):
            continue
        calls = sorted((n for n in ast.walk(function.node) if isinstance(n, ast.Call)), key=lambda c: c.lineno)
        own = [c for c in calls if trained.get(key_of(c.func)) in {"", function.cls}]
        own = [c for c in own if _gets_model(c) or _is_left_open(script, c, function)]
        # Training opens the region around the function of one batch, so that one is not in the functions of that import.
        siblings = {
            _sibling_of(script, key) for key, cls in trained.items() if cls in {"", function.cls} and key.isidentifier()
        } - {("", "")}
        evaluates = any(key_of(c.func).endswith(".eval") for c in calls) if siblings else False
        own = own or [c for c in calls if evaluates and _is_sibling(script, c, siblings)]
        if own:
            loaders = {c: [key for v in arguments_of(c) if _LOADER.search(key := key_of(v))] for c in own}
            validated = [c for c in own if any(map(_VALIDATES.search, loaders[c]))]
            call = (validated or own)[0]
            yield call, key_of(call.func)
            return


def _sibling_of(script: Script, key: str) -> tuple[str, str]:
    """The import of a function of one batch and what its name starts with: `calc_loss_` of `calc_loss_batch`; "" if neither."""
    module, _, name = script.outline.names.table.get(key, "").rpartition(".")
    start, _, unit = name.rpartition("_")
    return (module, f"{start}_") if module and unit in {"batch", "step"} and "loss" in start else ("", "")


def _is_sibling(script: Script, call: ast.Call, siblings: set[tuple[str, str]]) -> bool:
    """Whether a call passes a model and a loader to a function that was imported with that of one batch."""
    module, _, name = script.outline.names.full(call.func).rpartition(".")
    keys = [key_of(value) for value in arguments_of(call)]
    is_whole = any(map(_MODEL.search, keys)) and any(map(_LOADER.search, keys))
    return is_whole and any(module == origin and name.startswith(start) for origin, start in siblings)


def _calls_in_region(function: Function) -> Iterator[ast.Call]:
    """The calls in what a function's text calls autocast."""
    for block in (n for n in ast.walk(function.node) if isinstance(n, ast.With)):
        if any("autocast" in text_of(item.context_expr) for item in block.items):
            yield from (n for n in ast.walk(block) if isinstance(n, ast.Call))


def _gets_model(call: ast.Call) -> bool:
    """Whether a call passes a model to a function that is named for a forward or a loss."""
    named = bool(_COMPUTES.search(last_name(key_of(call.func))) or _LOSSES.search(last_name(key_of(call.func))))
    return named and any(_MODEL.search(key_of(value)) for value in arguments_of(call))


def _is_left_open(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether a method for a forward or a loss is left to subclasses, so that no trace shows it: `raise NotImplementedError`."""
    owner, _, name = key_of(call.func).rpartition(".")
    method = script.outline.classes.get(function.cls, {}).get(name) if owner == "self" else None
    if method is None or not (_COMPUTES.search(name) or _LOSSES.search(name)):
        return False
    is_empty = all(isinstance(s, ast.Pass) or _is_bare(s) for s in method.body)
    return is_empty or "NotImplementedError" in ast.unparse(method.body[-1])


def _is_bare(statement: ast.stmt) -> bool:
    """Whether a statement is a docstring or an ellipsis."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _twin_validations(script: Script) -> Iterator[tuple[ast.Call, str]]:
    """The first call outside any region of a method whose twin training calls in one: `get_eval_loss(batch)` for `get_train_loss(batch)`."""
    functions = [f for f in script.outline.functions if isinstance(f.node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    twins: dict[str, str] = {}
    for trained in filter(trains_in_region, functions):
        for key in (key_of(call.func) for call in _calls_in_region(trained)):
            owner, dot, name = key.rpartition(".")
            if owner and _TRAINS.search(name):
                twins |= {f"{owner}{dot}{_TRAINS.sub(other, name)}": trained.cls for other in _VALIDATIONS}
    for function in functions if twins else ():
        if not _VALIDATES.search(function.name) or _ASIDE.search(function.name):
            continue
        calls = sorted((n for n in ast.walk(function.node) if isinstance(n, ast.Call)), key=lambda c: c.lineno)
        call = next((c for c in calls if twins.get(key_of(c.func)) == function.cls), None)
        if call is not None and not _may_be_in_region(script, function, functions):
            yield call, key_of(call.func)
            return


def old_probabilities(script: Script) -> Iterator[tuple[ast.Call, str]]:
    """The first forward outside any region that gives the log-probabilities which those of an update under autocast are compared with."""
    functions = [f for f in script.outline.functions if isinstance(f.node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if not _RATIO.search(script.source.text) or not any(map(trains_in_region, (*functions, script.outline.module))):
        return
    for function in functions:
        if not _PROBABILITIES.search(ast.unparse(function.node)) or _ASIDE_OF_UPDATES.search(function.name):
            continue
        for call, name in _forwards(script, function):
            contexts = [text_of(context) for context in _contexts_around(script, call)]
            if _REFERENCE.search(name) or not any(map(_NO_GRADIENTS.search, contexts)):
                continue
            if not any(map(_PRECISION.search, contexts)) and not _is_called_in_region(script, function):
                yield call, name
            return


def _contexts_around(script: Script, node: ast.AST) -> Iterator[ast.expr]:
    """The contexts around a node in its function, and the function's decorators."""
    for parent in script.above(node):
        if isinstance(parent, ast.With):
            yield from (item.context_expr for item in parent.items)
        elif isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from parent.decorator_list


def trains_in_region(function: Function) -> bool:
    """Whether a function calls backward, and opens what its text calls autocast."""
    inside = nodes_in(function.node)
    contexts = [item.context_expr for n in inside if isinstance(n, ast.With) for item in n.items]
    return any(isinstance(n, ast.Attribute) and n.attr == "backward" for n in inside) and any(
        "autocast" in ast.unparse(context) for context in contexts
    )


def _forwards(script: Script, function: Function) -> Iterator[tuple[ast.Call, str]]:
    """The calls of models in a function, in its order, with the names of the models.

    A model is named like one, or switched to evaluation. A loop may also run it in another method of the object, by a variable too:
    `score = self._score_all if full else self._score_some`.
    """
    calls = sorted(
        (n for n in ast.walk(function.node) if isinstance(n, ast.Call)), key=lambda c: (c.lineno, c.col_offset)
    )
    defined = {f.name for f in script.outline.functions}
    evaluated = {owner for call in calls if (owner := _owner_of(call, "eval"))}
    methods = script.outline.classes.get(function.cls, {}) if function.cls and evaluated else {}
    for call in calls:
        key = key_of(call.func)
        owner = key.rpartition(".")[0]
        helpers = _helpers(script, call, function, methods)
        is_plain = not any(_PRECISION.search(ast.unparse(h.node)) for h in helpers)
        if is_plain and any(_runs(n, evaluated) for h in helpers for n in ast.walk(h.node)):
            yield call, min(evaluated)
            continue
        if last_name(key) in defined or _MAKES.search(key) or _is_made_here(function, key.partition(".")[0]):
            continue
        if _MODEL.search(key) or key in evaluated:
            yield call, key
        elif _MODEL.search(owner) and _COMPUTES.search(last_name(key)):
            yield call, owner


def _owner_of(call: ast.Call, method: str) -> str:
    """The object whose method a call without arguments is: `model` of `model.eval()`."""
    func = call.func
    is_call = isinstance(func, ast.Attribute) and func.attr == method and not call.args
    return key_of(func.value) if is_call and isinstance(func, ast.Attribute) else ""


def _helpers(script: Script, call: ast.Call, function: Function, methods: Mapping[str, Function]) -> list[Function]:
    """The other methods of the object that a call in a loop over data runs, itself or by a variable that is one of them."""
    loops = [n for n in script.above(call) if isinstance(n, (ast.For, ast.AsyncFor))]
    if not methods or not loops:
        return []
    key = key_of(call.func)
    values = script.outline.values(key, function) if key.isidentifier() else []
    names = {key_of(value).removeprefix("self.") for value in values} if values else {key.removeprefix("self.")}
    helpers = [methods[name] for name in names if name in methods and methods[name] is not function]
    return helpers if len(helpers) == len(names) else []


def _runs(node: ast.AST, models: set[str]) -> bool:
    """Whether a node is the call of one of these models, or of a method of one that computes."""
    key = key_of(node.func) if isinstance(node, ast.Call) else ""
    return key in models or (key.rpartition(".")[0] in models and bool(_COMPUTES.search(last_name(key))))


def _is_made_here(function: Function, name: str) -> bool:
    """Whether a function makes a variable itself, from a checkpoint for example, rather than from a model that it has."""
    for node in ast.walk(function.node):
        if isinstance(node, ast.Assign) and name in map(key_of, node.targets) and isinstance(node.value, ast.Call):
            arguments = (key_of(value) for value in arguments_of(node.value))
            if not any(map(_MODEL.search, arguments)):
                return True
    return False


def _may_be_in_region(script: Script, function: Function, functions: list[Function]) -> bool:
    """Whether a function, or one that it calls, mentions a precision, or is called where the text does."""
    reached, waiting = {function.name}, [function]
    while waiting:
        node = waiting.pop().node
        body = [*getattr(node, "body", ()), *getattr(node, "decorator_list", ())]
        if any(_PRECISION.search(ast.unparse(part)) for part in body):
            return True
        calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
        # `self.model.train()` is no call of the trainer's `train`; neither is `G.train()` next to `G.eval()`.
        evaluated = {_owner_of(call, "eval") for call in calls} - {""}
        owners = {key: key.rpartition(".")[0] for key in (key_of(call.func) for call in calls)}
        called = {last_name(k) for k, o in owners.items() if not _MODEL.search(o) and o not in evaluated} - reached
        reached |= called
        waiting += [f for f in functions if f.name in called]
    return _is_called_in_region(script, function)


def _is_called_in_region(script: Script, function: Function) -> bool:
    """Whether a function is called in a context that mentions a precision."""
    for node in ast.walk(script.tree):
        contexts = [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
        if any(_PRECISION.search(text_of(context)) for context in contexts):
            calls = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
            if function.name in {last_name(key_of(func)) for func in calls}:
                return True
    return False


def hands_out(script: Script, value: ast.expr | None, function: Function) -> bool:
    """Whether a call returns what its object has and creates nothing: `self.part("g")`, with `return getattr(self.model, name)`."""
    target = script.outline.call_target(value, function) if isinstance(value, ast.Call) else None
    if target is None or not target.method:
        return False
    nodes = list(ast.walk(target.node))
    bound = {key_of(t): n.value for n in nodes if isinstance(n, ast.Assign) for t in n.targets}
    returned = [n.value for n in nodes if isinstance(n, ast.Return) and n.value is not None]
    return bool(returned) and all(_is_held(bound.get(key_of(r).removesuffix(".module"), r)) for r in returned)


def _is_held(value: ast.expr) -> bool:
    """Whether a value is an attribute of the object, or a part of one."""
    is_read = isinstance(value, ast.Call) and key_of(value.func) == "getattr" and bool(value.args)
    return key_of(value.args[0] if is_read and isinstance(value, ast.Call) else value).startswith("self.")
