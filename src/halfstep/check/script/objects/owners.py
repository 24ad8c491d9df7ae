"""Which optimizer a step uses, where it comes from, and which parameters it owns.

`Adam(netD.parameters())` owns what `clip_grad_norm_(netD.parameters())` clips.
"""

from __future__ import annotations

import ast
import re

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import is_setting, loops_around
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.expressions import arguments_of, conditions_of, options_of
from halfstep.check.script.objects.values import argument, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["clipped_models", "is_of_another", "list_of", "optimized_models", "prepared_if", "share"]

# What decides how a run is launched, and so whether there is anything to prepare.
_LAUNCHED = regex(
    r"accelerat|distrib|deepspeed|fsdp|megatron|ddp|tpu|xla|cuda|device|process|rank|world|prepare", re.IGNORECASE
)
_OPTIMIZER = regex(r"_*(optim|optimizer|optimiser|opt)$")


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


def is_of_another(script: Script, trace: Trace, event: Event, clip: Event) -> bool:
    """Whether a step or unscale_ is certainly about other parameters than a clip: each has its own optimizer here."""
    clipped, stepped = clipped_models(script, clip), optimized_models(script, event)
    if not clipped or not stepped or share(clipped, stepped):
        return False
    others = [e for e in trace if e.kind in {"scaler_step", "unscale"} and e.optimizer != event.optimizer]
    return any(share(clipped, optimized_models(script, e)) for e in others)


def list_of(script: Script, event: Event) -> str:
    """The list from which a step takes its optimizer, `optimizers[0].step()` or `for o in optimizers: o.step()`; "" if none."""
    func = event.node.func if isinstance(event.node, ast.Call) else None
    value = func.value if isinstance(func, ast.Attribute) else None
    source = value.value if isinstance(value, ast.Subscript) else None
    if isinstance(value, ast.Name):
        loops = [loop for loop in loops_around(script, event) if isinstance(loop, ast.For)]
        source = next((loop.iter for loop in loops if text_of(loop.target) == value.id), None)
    name = key_of(source) if source is not None else ""
    bound = script.outline.lookup(name, event.function) if name else []
    is_list = any(b.index is None and isinstance(b.value, (ast.List, ast.ListComp)) for b in bound)
    return name.rsplit(".", 1)[-1] if is_list else ""


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
