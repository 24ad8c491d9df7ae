"""Steps without gradients of their own batch: nothing computes any since they were cleared, or nothing clears the old ones."""

from __future__ import annotations

import ast
import re

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event, Guard, compatible
from halfstep.check.script.flow.order import STEPS, is_amp, is_setting, later, only_settings
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import blocks_of
from halfstep.check.script.syntax.names import key_of

__all__ = ["may_be_cleared", "never_computed", "not_computed_when", "stepped_empty"]

_GRADIENTS = ("backward", "owned_backward", "autograd_grad", "grad_read", "handed")
# Calls that may compute gradients themselves.
_COMPUTES = regex(r"backward|grad|train|learn|fit\b|optimi[sz]e\b|step|update|closure|engine|strategy", re.IGNORECASE)
# Methods under such names that compute none, and what a loop does with a loss that it only reports.
_PLAIN = frozenset({
    "train", "eval", "step", "zero_grad", "update", "clip_grad_norm_", "clip_grad_value_", "no_grad", "enable_grad",
    "set_grad_enabled", "inference_mode", "requires_grad_", "set_postfix",
})  # fmt: skip
_REPORTS = frozenset({
    "print", "float", "str", "isnan", "isinf", "isfinite", "append", "accumulate", "no_sync", "unwrap_model", "hasattr",
    "isinstance", "getattr", "len", "type",
})  # fmt: skip
# `write_training_log`, `save_train_images`, `plot_step`: what writes or draws does not train.
_WRITES = regex(
    r"^_?(log|write|print|report|record|save|plot|draw|dump)(_|$)|_(log|logs|logger|report)$", re.IGNORECASE
)
# Any way to clear gradients, or to start from new parameters.
_CLEARS = regex(
    r"zero_?grad|clear_?grad|reset_grad|grads?_zero|\.grad\b|set_to_none|grad\.zero_|autograd\.grad|functional_call|value_and_grad|callback|hook",
    re.IGNORECASE,
)
_PRINTS = regex(r"(^|[._])(print\w*|log\w*|info|debug|add_scalar|write)$")
_OPTION = regex(r"^(self\.)?([a-z]+_)?(args|opts?|cfg|config|conf|hps?|hparams|flags|settings)\.[\w.]+$", re.IGNORECASE)
# Runs that are not to train anything.
_IDLE = regex(r"eval|test|valid|infer|debug|dry|prof|bench|train|freez|only|predict|measure|backward", re.IGNORECASE)
_ELSEWHERE = regex(r"hook|deepspeed|lightning|megatron|colossalai|horovod|jax\b|closure", re.IGNORECASE)


def never_computed(script: Script, trace: Trace, index: int) -> ast.Name | None:
    """The loss of a loop that clears gradients and steps, in a file that computes none; None if any line may."""
    event = trace[index]
    loop = next((n for n in script.above(event.node) if isinstance(n, (ast.For, ast.AsyncFor, ast.While))), None)
    if loop is None or script.has(*_GRADIENTS, "owned_step", "engine_step") or _ELSEWHERE.search(script.source.text):
        return None
    cleared = [e for e in trace if e.kind == "zero_grad" and e.loops == event.loops and e.optimizer == event.optimizer]
    forwards = [e for e in trace if e.kind == "forward" and e.loops == event.loops and not e.inside("no_grad")]
    if not cleared or not forwards or not isinstance(event.node, ast.Call) or arguments_of(event.node):
        return None
    nodes = list(ast.walk(loop))
    stores = [n for n in nodes if isinstance(n, ast.Assign) and len(n.targets) == 1]
    losses = [n.targets[0] for n in stores if _is_loss_of(n, event)]
    loss = max((t for t in losses if isinstance(t, ast.Name)), key=lambda t: t.lineno, default=None)
    calls = [n for n in nodes if isinstance(n, ast.Call)]
    if loss is None or any(_computes(call) for call in calls):
        return None
    passed = {key_of(a) for call in calls if _name_of(call) not in _REPORTS for a in arguments_of(call)}
    # What receives the loss, the optimizer or the model may run the backward of another file.
    return None if passed & {loss.id, event.local.optimizer, *(e.local.subject for e in forwards)} else loss


def not_computed_when(script: Script, trace: Trace, index: int) -> Guard | None:
    """The option with which a loop runs none of its backwards, and still clears gradients and steps; None if any line may compute some."""
    event = trace[index]
    above = list(script.above(event.node))
    loop = next((n for n in above if isinstance(n, (ast.For, ast.AsyncFor, ast.While))), None)
    backs = [e for e in trace if e.kind in _GRADIENTS]
    others = ("owned_step", "engine_step", "autograd_grad", "handed", "grad_read")
    if loop is None or not backs or script.has(*others) or _ELSEWHERE.search(script.source.text):
        return None
    cleared = [e for e in trace if e.kind == "zero_grad" and e.loops == event.loops and only_settings(script, e, event)]
    is_here = all(e.loops == event.loops and e.function is event.function for e in backs)
    if not cleared or not is_here or not isinstance(event.node, ast.Call) or arguments_of(event.node):
        return None
    apart = {*event.guards, *(g for e in cleared for g in e.guards)}
    shared = set(backs[0].guards).intersection(*(e.guards for e in backs)) - apart - {g.opposite for g in apart}
    options = [g for g in backs[0].guards if g in shared and _OPTION.match(g.text) and not _IDLE.search(g.text)]
    options = [g for g in options if not is_amp(g) and is_setting(script, g, event)]
    branches = {n for e in backs for n in _branch_of(script, e.node, loop)}
    calls = [n for n in ast.walk(loop) if isinstance(n, ast.Call) and n not in branches]
    calls = [n for n in calls if script.outline.call_target(n, event.function) is None]
    passed = {key_of(a) for call in calls if _name_of(call) not in _REPORTS for a in arguments_of(call)}
    models = {e.local.subject for e in trace if e.kind == "forward"}
    if any(map(_computes, calls)) or passed & {event.local.optimizer, *models}:
        return None
    return options[0] if options else None


def _branch_of(script: Script, node: ast.AST, loop: ast.AST) -> list[ast.AST]:
    """What runs with a node inside a loop: the branch of the outermost condition around it."""
    inner, branch = node, list[ast.stmt]()
    for outer in script.above(node):
        block = next((b for b in blocks_of(outer) if inner in b), [])
        branch = block if isinstance(outer, ast.If) else branch
        inner = outer
        if outer is loop:
            break
    return [part for statement in branch for part in ast.walk(statement)]


def _is_loss_of(statement: ast.Assign, event: Event) -> bool:
    """Whether a statement before a step assigns a loss that is computed in place: by an expression, or by a loss function."""
    target, value = statement.targets[0], statement.value
    if not isinstance(target, ast.Name) or not target.id.lower().endswith("loss"):
        return False
    is_before = statement.lineno < event.node.lineno if isinstance(event.node, ast.Call) else False
    called = text_of(value.func) if isinstance(value, ast.Call) else "loss"
    return (
        is_before
        and bool(re.search(r"loss|criterion|entropy|functional|\.mean$|^F\.", called))
        and "no_grad" not in called
    )


def _name_of(call: ast.Call) -> str:
    return text_of(call.func).rsplit(".", 1)[-1]


def _computes(call: ast.Call) -> bool:
    """Whether a call may compute gradients, by its name."""
    name = _name_of(call)
    return name not in _PLAIN and not _WRITES.search(name) and bool(_COMPUTES.search(text_of(call.func)))


def stepped_empty(script: Script, trace: Trace, index: int) -> Event | None:
    """The step that finds nothing because a zero_grad precedes it: after the last window, or before the batch's backward."""
    event = trace[index]
    following = next(later(trace, index, *_GRADIENTS, *STEPS), None)
    if following is None or trace[following].kind not in {"opt_step", "scaler_step"} or not event.optimizer:
        return None
    use = trace[following]
    is_one_block = event.function is use.function and event.loops == use.loops and event.roots == use.roots
    if not is_one_block or event.optimizer != use.optimizer or not only_settings(script, event, use):
        return None
    call = use.node
    if not isinstance(call, ast.Call) or len(call.args) + len(call.keywords) != (use.kind == "scaler_step"):
        return None  # a closure computes the gradients
    if any(e.kind == "handed" for e in trace) or _may_compute(script, event, use):
        return None
    depth = len(event.loops)
    backs = [(i, e) for i, e in enumerate(trace) if e.kind in _GRADIENTS and e.loops[:depth] == event.loops]
    if any(e.kind not in {"backward", "owned_backward"} for _, e in backs):
        return None
    inner = [i for i, e in backs if len(e.loops) > depth]
    if inner and len(inner) == len(backs) and max(inner) < index:
        return use if _ends_windows(trace, use, depth) else None
    is_later = bool(backs) and not inner and all(i > following and compatible(e, use) for i, e in backs)
    others = {e.optimizer for e in trace if e.kind == "zero_grad"} - {event.optimizer}
    steps = [e for e in trace[following + 1 :] if e.kind in STEPS and e.optimizer == event.optimizer]
    return use if depth and is_later and not others and not steps else None


def _ends_windows(trace: Trace, use: Event, depth: int) -> bool:
    """Whether a step after a loop is for the micro-batches that the windows in the loop left over."""
    inside = [e for e in trace if e.kind in STEPS and e.optimizer == use.optimizer and len(e.loops) > depth]
    return bool(inside) and (use.kind == "scaler_step" or all(e.accumulating for e in inside))


def _may_compute(script: Script, first: Event, last: Event) -> bool:
    """Whether a line between two events calls something that may compute gradients."""
    lines = script.source.text.splitlines()[script.where(first.node).line : script.where(last.node).line - 1]
    return any(_COMPUTES.search(line.partition("#")[0]) for line in lines)


def may_be_cleared(script: Script, trace: Trace, event: Event) -> bool:
    """Whether a line of the file may clear the gradients of a step, other than in a branch that its settings exclude."""
    # Most loops clear them here; all lines are read only for the others.
    if any(e.kind == "zero_grad" and not _is_excluded(script, e, event) for e in trace):
        return True
    if not _CLEARS.search(script.source.text):
        return False
    cleared: dict[ast.AST, list[Event]] = {}
    for other in script.events("zero_grad"):
        cleared.setdefault(other.node, []).append(other)
    harmless = [node for node, events in cleared.items() if all(_is_excluded(script, e, event) for e in events)]
    harmless += [
        call
        for sites in script.outline.calls.values()
        for call, _ in sites
        if _PRINTS.search(text_of(call.func)) and "zero" not in text_of(call)
    ]
    lines = {line for n in harmless if isinstance(n, ast.Call) for line in range(n.lineno, (n.end_lineno or 0) + 1)}
    return any(
        number not in lines and not line.lstrip().startswith("#") and _CLEARS.search(line)
        for number, line in enumerate(script.source.text.split("\n"), 1)
    )


def _is_excluded(script: Script, cleared: Event, step: Event) -> bool:
    """Whether a zero_grad is where a setting has the other value than around a step."""
    decisive = [g for g in cleared.guards if g.opposite in step.guards]
    return any(is_amp(g) or is_setting(script, g, cleared) for g in decisive)
