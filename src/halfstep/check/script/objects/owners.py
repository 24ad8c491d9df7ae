"""Which optimizer a step uses, where it comes from, and which parameters it owns.

`Adam(netD.parameters())` owns what `clip_grad_norm_(netD.parameters())` clips.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import (
    STEPS,
    between,
    is_setting,
    later,
    loops_around,
    only_settings,
    switched_off,
)
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.expressions import arguments_of, arms_of, conditions_of, options_of
from halfstep.check.script.objects.parameters import owners_of
from halfstep.check.script.objects.values import argument, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.unread import inherits

__all__ = [
    "clipped_models",
    "clips_all",
    "created_here",
    "have_same",
    "is_of_another",
    "left_scaled",
    "list_of",
    "members_of",
    "models_of",
    "optimized_models",
    "prepared_if",
    "share",
]

# What decides how a run is launched, and so whether there is anything to prepare.
_LAUNCHED = regex(
    r"accelerat|distrib|deepspeed|fsdp|megatron|ddp|tpu|xla|cuda|device|process|rank|world|prepare", re.IGNORECASE
)
_OPTIMIZER = regex(r"_*(optim|optimizer|optimiser|opt)$")
_TRAINABLE = regex(r"^[\w.]+\.(requires_grad|grad is not None)$")  # leaves out nothing that is clipped or stepped
_CHANGES = ("backward", "owned_backward", "autograd_grad", "handed", "zero_grad", *STEPS)
_READS = {"hasattr", "getattr", "isinstance", "super", "type", "print"}
_LISTS = {"parameters", "named_parameters"}
_LOOPS = {"enumerate", "zip", "list", "tuple", "len", "print"}
MAX_NAMES = 4  # variables on the way from an optimizer to the parameters of a model


class _Owned(NamedTuple):
    """What an optimizer steps."""

    created: frozenset[ast.AST]
    models: frozenset[str]
    filters: frozenset[str]  # which of their parameters it has; "" for all of them


def clipped_models(script: Script, event: Event) -> frozenset[str]:
    """The models whose gradients a clip changes; empty if the text does not show it."""
    call = event.node
    if not isinstance(call, ast.Call):
        return frozenset()
    if call.args or call.keywords:
        owners = _owners(script, argument(call, 0, "parameters"), event.function)
        return frozenset(_in_caller(owner, event) for owner in owners)
    return frozenset()


def optimized_models(script: Script, event: Event) -> frozenset[str]:
    """The models whose parameters the optimizer of a step or unscale_ was constructed with; empty if not known."""
    call = event.node
    key = key_of(argument(call, 0, "optimizer")) if isinstance(call, ast.Call) else ""
    if event.kind == "opt_step" and isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        key = key_of(call.func.value)
    models: set[str] = set()
    values = script.outline.values(key, event.function) if key else []
    owner, _, name = key.rpartition(".")
    if not values and _OPTIMIZER.match(name) and owner not in {"", "self"}:
        return frozenset({_plain(owner)})  # `netD.optim`, an attribute of the model
    options = [option for value in values for option in options_of(value)]
    for value in (o for o in options if not (isinstance(o, ast.Constant) and o.value is None)):
        if not isinstance(value, ast.Call):
            return frozenset()
        owners = _owners(script, argument(value, 0, "params"), event.function) or _passed_models(script, value)
        if not owners:
            return frozenset()
        models |= owners
    return frozenset(models)


def _passed_models(script: Script, call: ast.Call) -> frozenset[str]:
    """The models that a function of another file makes an optimizer for: `build_optimizer(model, args)`."""
    keys = {key_of(value) for value in arguments_of(call)}
    trained = {
        key_of(c.func.value) for c, _ in script.outline.calls.get("parameters", ()) if isinstance(c.func, ast.Attribute)
    }
    return frozenset(_plain(key) for key in keys & trained)


def share(a: frozenset[str], b: frozenset[str]) -> bool:
    """Whether two sets of models may have parameters in common: `model` has those of `model.encoder`."""
    return any(x == y or x.startswith(f"{y}.") or y.startswith(f"{x}.") for x in a for y in b)


def have_same(script: Script, first: Event, second: Event) -> bool:
    """Whether the optimizers of two steps, or of unscale_, were created apart, each from all the parameters of one model."""
    a, b = _owned(script, first), _owned(script, second)
    if a is None or b is None or a.created & b.created or not len(a.created) == len(b.created) == 1:
        return False
    if a.filters != {""} or b.filters != {""} or a.models != b.models or len(a.models) != 1:
        return False
    nodes = sorted((*a.created, *b.created), key=lambda node: getattr(node, "lineno", 0))
    homes = {[script.outline.module.node, *script.above(node)][-1] for node in nodes}
    model = next(iter(a.models))
    low, high = (getattr(node, "lineno", 0) for node in nodes)
    bound = [getattr(b.node, "lineno", 0) for b in script.outline.bindings.get(model, ())]
    # A variable may mean another model in another function, and after an assignment between the two.
    return (len(homes) == 1 or model.startswith("self.")) and not any(low < line <= high for line in bound)


def is_of_another(script: Script, trace: Trace, event: Event, clip: Event) -> bool:
    """Whether a step or unscale_ is certainly about other parameters than a clip: each has its own optimizer here."""
    clipped, stepped = clipped_models(script, clip), optimized_models(script, event)
    if not clipped or not stepped or share(clipped, stepped):
        return False
    others = [e for e in trace if e.kind in {"scaler_step", "unscale"} and e.optimizer != event.optimizer]
    return any(share(clipped, optimized_models(script, e)) for e in others)


def list_of(script: Script, event: Event) -> str:
    """The list from which a step takes its optimizer, `optimizers[0].step()` or `for o in optimizers: o.step()`; "" if none."""
    key = _collection_of(script, event)
    bound = script.outline.lookup(key, event.function) if key else []
    is_list = any(b.index is None and isinstance(b.value, (ast.List, ast.ListComp)) for b in bound)
    return key.rsplit(".", 1)[-1] if is_list else ""


def members_of(script: Script, event: Event) -> tuple[str, list[ast.expr]]:
    """The list or dictionary from which a step takes its optimizer, with what it contains, if only loops of the file get it."""
    key = _collection_of(script, event)
    return (key, _members(script, key, event.function)) if key else ("", [])


@lru_cache(maxsize=64)
def _members(script: Script, key: str, function: Function) -> list[ast.expr]:
    outline = script.outline
    bound = outline.lookup(key, function)
    if len(bound) != 1 or bound[0].index is not None or any(name.startswith(f"{key}[") for name in outline.bindings):
        return []
    others = (site.call for name, sites in outline.calls.items() if name not in _LOOPS for site in sites)
    if any(key_of(part) == key for call in others for part in arguments_of(call)):
        return []
    value = bound[0].value
    if isinstance(value, (ast.ListComp, ast.DictComp)):
        return [value.elt if isinstance(value, ast.ListComp) else value.value]
    return value.elts if isinstance(value, ast.List) else value.values if isinstance(value, ast.Dict) else []


def _collection_of(script: Script, event: Event) -> str:
    """What a step takes its optimizer from: `optimizers` of `optimizers[0].step()` and of a loop over `optimizers.values()`."""
    func = event.node.func if isinstance(event.node, ast.Call) else None
    value = func.value if isinstance(func, ast.Attribute) else None
    source = value.value if isinstance(value, ast.Subscript) else None
    if isinstance(value, ast.Name):
        loops = [loop for loop in loops_around(script, event) if isinstance(loop, ast.For)]
        targets = ((loop, loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]) for loop in loops)
        source = next((loop.iter for loop, parts in targets if any(text_of(p) == value.id for p in parts)), None)
        while isinstance(source, ast.Call) and key_of(source.func) in {"enumerate", "list"} and source.args:
            source = source.args[0]
        method = source.func if isinstance(source, ast.Call) else None
        if isinstance(method, ast.Attribute) and method.attr in {"values", "items"}:
            source = method.value
    return key_of(source) if source is not None else ""


def created_here(script: Script, event: Event, engine: str, creator: Function | None) -> bool:
    """Whether one function creates an engine and the optimizer of an event, or one class that has no base and passes the engine on to nothing."""
    outline = script.outline
    bound = outline.lookup(event.optimizer, event.function)
    if event.optimizer.isidentifier():
        return bool(bound) and all(b.function is event.function for b in bound) and creator is event.function
    cls = event.function.cls
    if not cls or creator is None or {creator.cls, *(b.function.cls for b in bound)} != {cls} or inherits(outline, cls):
        return False
    others = (sites for name, sites in outline.calls.items() if name not in _READS)
    keys = (key_of(part) for sites in others for call, _ in sites for part in arguments_of(call))
    return event.optimizer.startswith("self.") and bool(bound) and not {"self", engine} & set(keys)


def prepared_if(script: Script, event: Event, owner: str) -> str:
    """The setting without which nothing passes the optimizer of a step to `accelerator.prepare`; "" if every run does, or may.

    The one call is in an `if` without an `else`, and neither the step nor what creates the optimizer depends on that setting.
    """
    outline = script.outline
    sites = [
        (call, function) for call, function in outline.calls.get("prepare", ()) if _is_passed(call, event.optimizer)
    ]
    bound = outline.lookup(event.optimizer, event.function)
    if (
        len(sites) != 1
        or sites[0][1] is not event.function
        or not text_of(sites[0][0].func).endswith(f"{owner}.prepare")
    ):
        return ""
    statement = script.statement(sites[0][0])
    block = outline.parents.get(statement) if statement is not None else None
    others = [b for b in bound if b.node is not statement]
    if not isinstance(block, ast.If) or statement not in block.body or block.orelse or len(others) != 1:
        return ""
    guards = conditions_of(outline, statement)
    is_open = conditions_of(outline, others[0].node) == guards[:-1] and not set(guards) & set(event.guards)
    text = guards[-1].text if guards[-1].is_true else f"not {guards[-1].text}"
    return text if is_open and not _LAUNCHED.search(text) and is_setting(script, guards[-1], event) else ""


def _is_passed(call: ast.Call, optimizer: str) -> bool:
    return any(key_of(value) == optimizer for value in arguments_of(call))


def _owners(script: Script, params: ast.expr | None, function: Function) -> frozenset[str]:
    """The models in `net.parameters()`, in lists, chains and groups of them, and in variables assigned to them."""
    if params is None:
        return frozenset()
    key = key_of(params)
    options = script.outline.values(key, function) if key else [params]
    owners = {
        key_of(part.func.value)
        for option in options
        for part in ast.walk(option)
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute)
        if part.func.attr in {"parameters", "named_parameters"}
    }
    if "" in owners:
        return frozenset()
    return frozenset(_plain(owner) for owner in owners)


def _plain(owner: str) -> str:
    return owner.removesuffix(".module").removesuffix("._orig_mod")


def _in_caller(owner: str, event: Event) -> str:
    """A model's name in the calling function, where the function that clips has it as a parameter."""
    root, dot, rest = owner.partition(".")
    params = list(event.function.params)
    if root not in params or root == "self" or not event.roots or not isinstance(event.roots[-1], ast.Call):
        return owner
    position = params.index(root) - (event.function.method and params[0] in {"self", "cls"})
    passed = key_of(argument(event.roots[-1], position, root))
    return _plain(passed) + dot + rest if passed else owner


def left_scaled(script: Script, trace: Trace, first: int, last: int) -> Event | None:
    """The step of an optimizer whose gradients the clip `trace[last]` includes while they are still multiplied by the scale.

    Those of another optimizer, with other parameters of the same model, have been unscaled since the backward `trace[first]`.
    """
    back, clip = trace[first], trace[last]
    since = between(trace, first, last, "unscale", "handed", *STEPS)
    clipped = clipped_models(script, clip)
    unscaled = [_owned(script, e) for e in since if e.kind == "unscale"]
    known = [o for o in unscaled if o is not None and share(clipped, o.models)]
    if not known or not len(known) == len(unscaled) == len(since) or not clips_all(script, clip):
        return None
    for index in later(trace, last, *_CHANGES):
        step = trace[index]
        if step.kind != "scaler_step":
            if step.kind != "zero_grad" or step.optimizer not in {e.optimizer for e in since}:
                return None
        elif step.scaler == back.scaler and step.loops == clip.loops and only_settings(script, step, clip):
            own = _owned(script, step)
            is_clipped = own is not None and share(clipped, own.models) and not switched_off(script, step)
            if own is not None and is_clipped and all(_is_apart(own, other) for other in known):
                return step
    return None


def clips_all(script: Script, clip: Event) -> bool:
    """Whether a clip receives all parameters of its models."""
    params = argument(clip.node, 0, "parameters") if isinstance(clip.node, ast.Call) else None
    return params is not None and set(_filters(script.outline, params, clip.function)) == {""}


def _is_apart(a: _Owned, b: _Owned) -> bool:
    """Whether two optimizers have different parameters: of different models, or filtered by different conditions."""
    if a.created & b.created:
        return False
    return not share(a.models, b.models) or ("" not in a.filters | b.filters and not a.filters & b.filters)


def _owned(script: Script, event: Event) -> _Owned | None:
    """What the optimizer of a step or unscale_ has; None if the text does not show it."""
    outline = script.outline
    key = key_of(argument(event.node, 0, "optimizer")) if isinstance(event.node, ast.Call) else ""
    sources = (
        [s for s in outline.sources(key, event.function) if getattr(s[0], "value", s[0]) is not None] if key else []
    )
    models: set[str] = set()
    filters: set[str] = set()
    for value, function in sources:
        params = argument(value, 0, "params") if isinstance(value, ast.Call) else None
        own = models_of(script, params, function) if params is not None else frozenset()
        texts = set(_filters(outline, params, function)) if params is not None else set()
        if not own or not texts or "" in own:
            return None
        models |= own
        filters |= texts
    return _Owned(frozenset(v for v, _ in sources), frozenset(models), frozenset(filters)) if sources else None


def models_of(script: Script, params: ast.expr, function: Function) -> frozenset[str]:
    """The models whose parameters an optimizer is constructed with, also through lists that loops fill."""
    return frozenset(_plain(key_of(owner)) for owner, _ in owners_of(script.outline, params, function))


def _filters(outline: Outline, params: ast.AST, function: Function, depth: int = MAX_NAMES) -> Iterator[str]:
    """The conditions by which an expression selects the parameters of models, one for each list of them; "" for none."""
    stack: list[ast.AST] = [params]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)) and _lists(node.generators[0].iter):
            tests = [text_of(test) for generator in node.generators for test in generator.ifs]
            yield " and ".join(test for test in tests if not _TRAINABLE.match(test))
            continue
        if _lists(node):
            yield ""
            continue
        if isinstance(node, ast.Name) and depth:
            for value, origin in outline.sources(node.id, function):
                yield from _filters(outline, value, origin, depth - 1)
            yield from _appended(outline, node.id, function)
        stack.extend(ast.iter_child_nodes(node))


def _appended(outline: Outline, name: str, function: Function) -> Iterator[str]:
    """The conditions under which loops over the parameters of a model append to a list."""
    for call, inner in outline.calls.get("append", ()):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        arm = next((a for a in arms_of(owner) if key_of(a) == name), None) if owner is not None else None
        loop: ast.AST | None = call
        while loop is not None and not isinstance(loop, (ast.For, ast.FunctionDef)):
            loop = outline.parents.get(loop)
        if arm is None or inner is not function or not isinstance(loop, ast.For) or not _lists(loop.iter):
            continue
        guards = [g for g in conditions_of(outline, arm) if g not in conditions_of(outline, loop)]
        tests = [g.text if g.is_true else f"not ({g.text})" for g in guards]
        yield " and ".join(test for test in tests if not _TRAINABLE.match(test))


def _lists(node: ast.AST) -> bool:
    """Whether an expression lists the parameters of a model: `model.named_parameters()`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LISTS
