"""Gradients between backward and step: have those of these parameters been unscaled, and does a call only measure them.

`unscale_` works on the parameters of one optimizer; `script.owners` knows which models those are. Where that is unknown, an
`unscale_` and a clip are taken to belong together.
"""

from __future__ import annotations

import ast
import re

from halfstep.check.regex import regex
from halfstep.check.script.flow.conditions import Conditions
from halfstep.check.script.flow.event import Event, Guard, compatible, is_accumulation
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.flow.order import (
    STEPS,
    between,
    earlier,
    implied,
    is_amp,
    is_setting,
    later,
    rebound_between,
)
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.owners import is_of_another
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.scaling.counted_windows import ends_counted_window
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = [
    "backward_of_other_branch",
    "checked_by_hand",
    "clears",
    "dropped_loss",
    "is_other_choice",
    "is_trial",
    "joins_unscaled",
    "may_lack_scaler",
    "measured_when",
    "measures_only",
    "moves_gradients",
    "never_stepped",
    "scaled_alternatives",
    "scaled_elsewhere",
    "skipped_unscale",
    "steps_only",
    "unscaled_between",
    "unstepped_when",
]

_INFINITE = regex(r"^(float\(['\"]\+?inf(inity)?['\"]\)|(math|np|numpy|torch)\.inf|sys\.maxsize)$", re.IGNORECASE)
_TESTS = regex(r"finite|nan|inf|norm|grad|valid|skip|overflow|ok\b", re.IGNORECASE)
# Calls that may compute gradients themselves.
_COMPUTES = regex(r"backward|grad|train|learn|fit\b|optimi[sz]e\b|update|closure|engine|strategy", re.IGNORECASE)
_DEVICE = regex(r"cuda|gpu|cpu|mps|device|available", re.IGNORECASE)
_HARMLESS = regex(
    r"requires_grad|\.grad is (not )?None|is(finite|nan|inf)\(\w+\.grad|'[^']*'|\"[^\"]*\"|"
    r"clip_grad\w*|zero_grad|no_grad|grad_?(norm|accum|clip|scal)\w*|\w*(norm|clip)_grad\w*|gradient_\w+|sync_gradients"
)
_EVERY = regex(r"(\w+) % [\w.]+ == 0")
_ONE_PROCESS = regex(r"^(?!not )[\w.]*(main_process|master|rank_?(0|zero))(\(\))?$|^[\w.]*rank(\(\))? == 0$")
_HAS_GRADIENT = regex(r"\.(grad|requires_grad)$")  # of a guard: `is not None` is left out
_WRAPS = frozenset({"prepare", "setup", "setup_optimizers"})
_BUILDS = regex(r"(^|[._])[a-z]+_optimi[sz]ers?$")
_AROUND = frozenset({"Lookahead", "LARC", "SWA"})  # optimizers around another one, whose step clears nothing
_WORD = regex(r"[A-Za-z_]\w+")
_COMMON = {
    "args",
    "self",
    "config",
    "cfg",
    "opt",
    "opts",
    "hparams",
    "params",
    "None",
    "training",
    "train",
    "CFG",
    "hps",
}


def may_lack_scaler(script: Script, step: Event) -> bool:
    """Whether a step is for the case that another file passes a scaler, which may depend on the one setting that is assumed."""
    if not script.is_assumed or script.has("scale") or script.scalers_named(step.scaler):
        return False
    return any(g.is_true and last_name(g.text) == last_name(step.local.scaler) for g in step.local.guards)


def measures_only(call: ast.AST) -> bool:
    """Whether a clipping function is called only for the norm that it returns: its limit is infinite or None."""
    if not isinstance(call, ast.Call):
        return False
    limit = argument(call, 1, "max_norm")
    return limit is not None and _is_infinite(limit)


def _is_infinite(limit: ast.expr) -> bool:
    value = constant(limit)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value is None or bool(_INFINITE.match(text_of(limit))) or (is_number and float(str(value)) >= 1e6)


def _limit_of(script: Script, clip: Event) -> ast.expr | None:
    """The limit of a clip, also one that is computed before it and assigned to a variable."""
    limit = argument(clip.node, 1, "max_norm") if clip.kind == "clip" and isinstance(clip.node, ast.Call) else None
    values = script.outline.values(limit.id, clip.function) if isinstance(limit, ast.Name) else []
    return values[0] if len(values) == 1 else limit


def measured_when(script: Script, event: Event) -> tuple[Guard, ...] | None:
    """The conditions under which a clip only measures the norm: `inf if clip is None else clip`, `clip or inf`; None if it never does."""
    call, function = event.node, event.function
    if measures_only(call):
        return ()
    limit = _limit_of(script, event)
    conditions = Conditions(script.outline, function)
    if isinstance(script.statement(call), ast.Expr):
        return None  # nothing uses the norm
    if isinstance(limit, ast.IfExp) and _is_infinite(limit.body) != _is_infinite(limit.orelse):
        return conditions.guards(limit.test, is_true=_is_infinite(limit.body))
    if isinstance(limit, ast.BoolOp) and isinstance(limit.op, ast.Or) and _is_infinite(limit.values[-1]):
        return tuple(g for value in limit.values[:-1] for g in conditions.guards(value, is_true=False))
    return None


def unscaled_between(script: Script, trace: Trace, first: int, last: int) -> bool:
    """Whether the gradients that `trace[last]` is about are unscaled, or already used, since `trace[first]`."""
    since = [e for e in between(trace, first, last, "unscale", *STEPS) if not _ends_window(script, trace, e, last)]
    if any(e.kind in STEPS for e in since):
        return True
    unscales = [e for e in since if not is_of_another(script, trace, e, trace[last])]
    partial = [e for e in unscales if _independent(script, e, trace[first], trace[last])]
    # `if a: unscale_ ... else: unscale_` covers every path.
    return len(partial) < len(unscales) or any(not compatible(a, b) for a in partial for b in partial)


def _ends_window(script: Script, trace: Trace, event: Event, last: int) -> bool:
    """Whether an event ends the windows of a loop, and `trace[last]` is for the micro-batches left over after the loop."""
    use = trace[last]
    is_inside = len(event.loops) > len(use.loops) and event.loops[: len(use.loops)] == use.loops
    if not is_inside or event.roots != use.roots or not (event.accumulating or ends_counted_window(script, event)):
        return False
    return any(e.kind == "scaler_step" and e.loops == use.loops and compatible(e, use) for e in trace[last + 1 :])


def skipped_unscale(script: Script, trace: Trace, first: int, last: int) -> str:
    """The condition without which the gradients are still scaled at `trace[last]`; "" if they always are."""
    for event in between(trace, first, last, "unscale"):
        if not is_of_another(script, trace, event, trace[last]):
            guards = _independent(script, event, trace[first], trace[last])
            if guards:
                return guards[0].text if guards[0].is_true else f"not {guards[0].text}"
    return ""


def unstepped_when(script: Script, trace: Trace, first: int, last: int) -> Guard | None:
    """The condition under which no step comes between a backward and a use of the gradients after it: that a window goes on."""
    back, use = trace[first], trace[last]
    if not back.loops or use.loops[: len(back.loops)] != back.loops:
        return None
    # What else decides whether gradients are used may be true in the same iterations as the step.
    own = [g for g in use.guards if g not in back.guards and not _HAS_GRADIENT.search(g.text)]
    steps = [e for e in between(trace, first, last, *STEPS) if e.loops == back.loops]
    ends = [[g for g in e.accumulating if g not in use.guards and g not in back.guards] for e in steps]
    shared = [g for g in ends[0] if all(g in guards for guards in ends)] if ends else []
    if not shared:
        return None
    begins = any(_is_before(script, g, shared[0], steps[0]) for g in own)
    for guard in own:
        in_first = begins and guard.is_true and (_EVERY.fullmatch(guard.text) or _ONE_PROCESS.search(guard.text))
        if not in_first and not is_setting(script, guard, use):
            return None
    return shared[0].opposite


def _is_before(script: Script, guard: Guard, end: Guard, step: Event) -> bool:
    """Whether a use of every so many iterations, `i % 50 == 0`, is in the first one of a window, which `(i + 1) % n == 0` ends."""
    every = _EVERY.fullmatch(guard.text) if guard.is_true and end.is_true else None
    values = script.outline.values(end.text, step.function) if end.text.isidentifier() else []
    texts = [text_of(value) for value in values] if values else [end.text]
    return every is not None and len(texts) == 1 and f"({every[1]} + 1) % " in texts[0]


def _independent(script: Script, unscale: Event, back: Event, use: Event) -> list[Guard]:
    """The settings on which an `unscale_` depends and the use of its gradients does not."""
    limit = _limit_of(script, use)  # `limit = clip or inf` depends on the same setting
    texts = (*(g.text for g in use.guards), text_of(use.node), text_of(limit))
    words = {word for text in texts for word in _WORD.findall(text)}
    return [
        guard
        for guard in unscale.guards
        if guard not in use.guards and guard not in back.guards and not is_amp(guard)
        if is_setting(script, guard, unscale) and not (set(_WORD.findall(guard.text)) - _COMMON) & words
    ]


def dropped_loss(script: Script, trace: Trace, cleared: Event) -> ast.expr | None:
    """The loss that the loop around a zero_grad computes and never uses: no backward, no step, no log."""
    loop = next((n for n in script.above(cleared.node) if isinstance(n, (ast.For, ast.AsyncFor))), None)
    near = {id(n) for n in ast.walk(loop)} if loop is not None else set()
    if loop is None or not any(e.kind in {"forward", "enter_autocast"} and id(e.node) in near for e in trace):
        return None
    nodes = list(ast.walk(loop))
    stores = [t for n in nodes if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
    last = max((t for t in stores if "loss" in t.id.lower()), key=lambda t: t.lineno, default=None)
    calls = {n.func.attr for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)}
    if last is None or calls & {"backward", "manual_backward", "step", "grad"}:
        return None
    uses = [n for n in ast.walk(cleared.function.node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    is_used = any(n.id == last.id and (id(n) in near or n.lineno > last.lineno) for n in uses)
    passed = [a for n in nodes if isinstance(n, ast.Call) for a in (*n.args, *(k.value for k in n.keywords))]
    is_passed = any(key_of(a) == cleared.local.optimizer or "scaler" in key_of(a) for a in passed)
    return None if is_used or is_passed else last


def is_trial(trace: Trace, index: int, step: int) -> bool:
    """Whether a backward comes before the loop of a step, which has a scaled backward of its own."""
    own = (e for e in between(trace, index, step, "backward") if e.scaled == "yes")
    return len(trace[index].loops) < len(trace[step].loops) and any(True for _ in own)


def scaled_alternatives(trace: Trace, index: int, step: int) -> list[Event]:
    """The scaled backwards that may run before a step instead of `trace[index]`.

    Neither those whose gradients another optimizer uses, nor the same lines in another call of their function.
    """
    event, optimizer = trace[index], trace[step].optimizer
    alternatives = []
    for position, other in enumerate(trace):
        if other.kind != "backward" or other.scaled == "no" or other.inside("scaled_loss"):
            continue
        if other.function is event.function and other.roots != event.roots:
            continue
        own = next((trace[i].optimizer for i in later(trace, position, *STEPS)), "")
        if own == optimizer or not own or not optimizer:
            alternatives.append(other)
    return alternatives


def joins_unscaled(trace: Trace, index: int, step: int) -> bool:
    """Whether a backward adds to gradients of the step's optimizer that are no longer scaled."""
    before = next((i for i in earlier(trace, index, "backward") if trace[i].scaled == "yes"), index)
    unscaled = [e for e in between(trace, before, index, "unscale") if implied(e, trace[index])]
    return any(e.optimizer in {trace[step].optimizer, ""} for e in unscaled)


def checked_by_hand(script: Script, unscale: Event, step: Event) -> bool:
    """Whether a step has a condition of its own that may test the unscaled gradients, other than the end of a window."""
    guards = [g for g in step.guards if g not in unscale.guards and not is_accumulation(g) and not is_amp(g)]
    guards = [g for g in guards if not is_setting(script, g, step)]
    return any(_TESTS.search(g.text) for g in guards) or (bool(guards) and rebound_between(script, unscale, step))


def backward_of_other_branch(script: Script, trace: Trace, index: int) -> Event | None:
    """The backward that only the other branch of an `if` around a step has, although this one computes the same loss.

    None if anything on the path of the step may compute gradients.
    """
    step = trace[index]
    kinds = {"backward", "owned_backward", "autograd_grad", "handed", "owned_step", "engine_step"}
    backs = [e for e in trace if e.kind in kinds]
    cleared = [e for e in trace if e.kind == "zero_grad" and e.loops == step.loops and compatible(e, step)]
    if not step.loops or not cleared or any(compatible(e, step) for e in backs):
        return None
    for outer in script.above(step.node):
        for own, other in ((outer.body, outer.orelse), (outer.orelse, outer.body)) if isinstance(outer, ast.If) else ():
            inside, aside = ({n for s in block for n in ast.walk(s)} for block in (own, other))
            back = next((e for e in backs if e.kind == "backward" and e.node in aside and e.loops == step.loops), None)
            if step.node in inside and back is not None:
                return back if _computes_only_loss(inside, step, back) else None
    return None


def never_stepped(script: Script, trace: Trace, index: int) -> Event | None:
    """The scaled backward whose branch has no step, where the plain backward of the other branch has this one.

    None if anything in the file may step with the scaler.
    """
    step = trace[index]
    others = ("scaler_step", "owned_step", "engine_step", "handed", "unscale", "update", "autograd_grad")
    stepping = script.events(*others)
    apart = {e.node for e in stepping if not possible(e.guards, e.guards)}  # `if scaler:` in the `else` of `if scaler:`
    if not step.loops or any(e.node not in apart for e in stepping):
        return None
    near = [e for e in trace if e.loops == step.loops and e.function is step.function]
    backs = [e for e in near if e.kind == "backward"]
    if step is not next(e for e in near if e.kind == "opt_step"):
        return None  # reported for the first one
    scaled = [e for e in backs if e.scaled == "yes" and not compatible(e, step)]
    plain = [e for e in backs if e.scaled == "no" and compatible(e, step)]
    schedules = {e.node for e in script.events("sched_step")}
    passed = [c for c, _ in script.outline.calls.get("step", ()) if c.args and c not in schedules | apart]
    return scaled[0] if scaled and plain and len(scaled) + len(plain) == len(backs) and not passed else None


def clears(trace: Trace, event: Event, use: Event) -> bool:
    """Whether a zero_grad clears what a step uses: of its optimizer, or of the one model that runs where one optimizer steps."""
    if not event.optimizer or event.optimizer == use.optimizer:
        return bool(event.optimizer)
    models = {e.subject for e in trace if e.kind == "forward" and e.loops == event.loops and not e.inside("no_grad")}
    return models == {event.optimizer} and len({e.optimizer for e in trace if e.kind in STEPS}) == 1


def is_other_choice(script: Script, trace: Trace, start: int, index: int) -> bool:
    """Whether a setting that has nothing to do with mixed precision chooses between the step of the scaler and this one."""
    back, event = trace[start], trace[index]
    others = {g for e in trace[start:] if e.kind == "scaler_step" for g in e.guards}
    decisive = [g for g in event.guards if g.opposite in others]
    enabled = " ".join(s.enabled for s in script.scalers_named(back.scaler))
    return (
        bool(decisive)
        and implied(back, event)
        and all(is_setting(script, g, event) and not is_amp(g) and not _DEVICE.search(g.text) for g in decisive)
        and not any(word in enabled for g in decisive for word in set(_WORD.findall(g.text)) - _COMMON)
        and all(s.enabled in {"yes", "no"} or is_amp((s.enabled, True)) for s in script.scalers_named(back.scaler))
    )


def scaled_elsewhere(script: Script, trace: Trace, index: int) -> Event | None:
    """The scaled backward of another method, for an event before a scaler's step in a class that no line of the file unscales."""
    event = trace[index]
    if not event.function.cls or "unscale_" in script.outline.calls or script.has("handed", "get_scale", "owned_step"):
        return None
    if any(e.kind in {"backward", "owned_backward", "autograd_grad"} for e in trace):
        return None
    steps = [e for e in trace[index + 1 :] if e.kind == "scaler_step" and compatible(e, event)]
    backs = [e for e in script.near(event, "backward", "owned_backward") if e.function.cls == event.function.cls]
    own = [e for e in backs if e.scaled == "yes" and any(e.scaler == step.scaler for step in steps)]
    return own[0] if own and all(e.scaled == "yes" or not compatible(e, event) for e in backs) else None


def _computes_only_loss(block: set[ast.AST], step: Event, back: Event) -> bool:
    """Whether a block assigns the loss of another branch's backward, and no call in it may compute gradients."""
    used = {n.id for n in ast.walk(back.node) if isinstance(n, ast.Name)}
    stored = {n.id for n in block if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    losses = {name for name in used & stored if "loss" in name.lower()}
    others = [n for n in block if isinstance(n, ast.Call) and n is not step.node]
    passed = {key_of(a) for n in others for a in (*n.args, *(k.value for k in n.keywords))}
    is_plain = isinstance(step.node, ast.Call) and not step.node.args and not step.node.keywords
    is_silent = not any(_COMPUTES.search(text_of(n.func)) for n in others)
    return is_plain and bool(losses) and is_silent and not passed & {*losses, step.local.optimizer}


def steps_only(script: Script, event: Event) -> bool:
    """Whether the step of an optimizer leaves the gradients as they are: not one of a class or function in this file."""
    name, params = event.local.optimizer, event.function.params
    bindings = script.outline.lookup(name, event.function) if name.isidentifier() else []
    if bindings and all(b.value is not None and b.index is not None and key_of(b.value) in params for b in bindings):
        return True  # `optimizer_g, optimizer_d = optimizers`
    values = script.outline.values(name, event.function)
    values = [v for v in values if not (isinstance(v, ast.Constant) and v.value is None)]  # until it is created
    if not values:
        return name in params
    plain = {call for call, _ in script.training.optimizers}
    return all(v in plain or _is_prepared(v) or _is_built(v) or _is_around(script, v, plain) for v in values)


def _is_built(value: ast.expr) -> bool:
    """Whether a function named for it creates an optimizer: `create_optimizer(model)`, `model.configure_optimizers(rate)`.

    One that this file defines, and that clears gradients, has to name them.
    """
    return isinstance(value, ast.Call) and bool(_BUILDS.search(text_of(value.func)))


def _is_prepared(value: ast.expr) -> bool:
    """Whether a value is an optimizer that a framework wraps: `accelerator.prepare(optimizer)`."""
    return isinstance(value, ast.Call) and text_of(value.func).rsplit(".", 1)[-1] in _WRAPS


def _is_around(script: Script, value: ast.expr, plain: set[ast.Call]) -> bool:
    """Whether a value is a known wrapper, of another file, around a plain optimizer: `Lookahead(AdamW(...))`."""
    sites = [site for name in _AROUND for site in script.outline.calls.get(name, ()) if site.call is value]
    for call, function in sites:
        if script.outline.call_target(call, function) is None and call.args:
            key = key_of(call.args[0])
            inner = script.outline.values(key, function) if key else [call.args[0]]
            return bool(inner) and all(option in plain or option is value for option in inner)
    return False


def moves_gradients(script: Script, first: Event, last: Event) -> bool:
    """Whether a line between two events may save gradients or put them back: it names them, or a helper for them."""
    lines = script.source.text.splitlines()[script.where(first.node).line : script.where(last.node).line - 1]
    return any("grad" in _HARMLESS.sub("", line).partition("#")[0] for line in lines)
