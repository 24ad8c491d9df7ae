"""HS121-HS122: where a scaler is created, and whether it is used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.examples import PLAIN_LOOP, SCALED_LOOP
from halfstep.check.finding import Finding, Severity
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.scaler.bf16 import ScalerWithBf16
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import TraceRule, loops_around, only_settings
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.window import targets_of
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.values import Scaler, constant, text_of
from halfstep.check.script.pairing.replaced import is_unread_variable, replaced_by
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.unread import is_hidden

__all__ = ["RULES"]

_DOCS = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
_AMP = "https://docs.pytorch.org/docs/stable/amp.html"
_RIGHT = SCALED_LOOP.format(scaler='scaler = torch.amp.GradScaler("cuda")', dtype="float16")
_OWN_SCALER = """\
def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
_RUN = regex(r"(^|_)(fold|seed|trial|run|split|repeat|experiment)s?($|_)", re.IGNORECASE)  # names of loop variables
_ONE_STEP = regex(
    r"^_*(train|training|optimi[sz]ation|optimi[sz]e|update)_?(one_?|single_?)?(step|batch|iteration|iter)$",
    re.IGNORECASE,
)
_USES = ("scale", "scaler_step", "unscale", "handed")
_FORMAT = regex(r"16|dtype|bf|half|float", re.IGNORECASE)


def _initial_scale(scaler: Scaler) -> str:
    """The scale that a new scaler starts with: torch's default, unless an argument may set it."""
    call = scaler.node
    is_default = all(isinstance(constant(a), str) for a in call.args) and not any(
        k.arg in {"init_scale", None} for k in call.keywords
    )
    return "65536" if is_default else "its initial value"


class ScalerInLoop(TraceRule):
    """A new GradScaler is created inside the training loop."""

    code = "HS121"
    name = "scaler-in-loop"
    severity = "warning"
    reason = (
        "A scaler adapts its scale over the run: it starts at 65536 and grows after 2000 steps without overflow. Recreated every "
        "epoch, it restarts at 65536 and skips the first steps of each epoch on overflow; recreated every batch, it never "
        "adapts, and a model that overflows at 65536 never takes a step."
    )
    bad = (
        SCALED_LOOP.replace("{scaler}\n", "")
        .replace("    for x, y in loader:", '    scaler = torch.amp.GradScaler("cuda")\n    for x, y in loader:')
        .format(dtype="float16"),
        "import torch\nfrom torch.cuda.amp import GradScaler\ndef train(model, loader, optimizer):\n    scaler = GradScaler()\n"
        "    for x in loader:\n        optimizer.zero_grad()\n        scaler.scale(model(x)).backward()\n        scaler.step(optimizer)\n        scaler.update()\n"
        "model = Net()\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\nfor epoch in range(10):\n    train(model, loader, optimizer)\n",
    )
    good = (
        _RIGHT,
        "import torch\nfor fold in range(5):\n    model = Net()\n    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "    scaler = torch.amp.GradScaler('cuda')\n    for x in loader:\n        optimizer.zero_grad()\n        scaler.scale(model(x)).backward()\n"
        "        scaler.step(optimizer)\n        scaler.update()\n",
    )
    references = (
        "https://github.com/conservationtechlab/animl-py/issues/298",
        f"{_AMP}#torch.amp.GradScaler",
    )
    kinds = ("make_scaler",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A scaler created in a loop that steps with it but does not recreate the optimizer."""
        event = trace[index]
        scaler = script.scaler_of.get(event.node)
        name = _name(scaler) if scaler is not None else ""
        if scaler is None or not name or scaler.enabled == "no":
            return None
        function = event.function
        if event.loops:
            inside = [e for e in trace if e.loops[: len(event.loops)] == event.loops]
            steps = [e for e in inside if e.kind == "scaler_step" and compatible(e, event)]
            steps = steps or ([event] if not scaler.key and _trains(script, scaler) else [])
            fresh = [e for e in inside if e.kind in {"set_model", "set_optimizer", "make_optimizer"}]
            fresh = [e for e in fresh if not _is_replacement(script, e) and not e.inside("no_grad")]
            fresh = [e for e in fresh if not _is_snapshot(trace, e, steps)]
            if not steps or fresh or self._first_time(event, name, steps) or _is_over_runs(script, event):
                return None
            if not only_settings(script, event, steps[0]):
                return None  # a reset after an exception, or after many overflows
            every_step = scaler.key and all(len(e.loops) == len(event.loops) for e in steps)
            severity: Severity = "error" if every_step else "warning"
            loop: ast.AST = next(reversed(loops_around(script, event)), event.node)
            frequency = f"on every iteration of the loop at {script.at(loop)}"
        else:
            # A scaled backward, where a project's optimizer is stepped with the scaler.
            steps = [e for e in trace if len(e.loops) == 1 and (e.kind == "scaler_step" or e.scaled == "yes")]
            per_epoch = "epoch" in function.params or "epoch" in function.name
            passed = any(e.optimizer.partition(".")[0] in function.params for e in trace if e.optimizer)
            fresh = [e for e in trace if e.kind in {"set_optimizer", "make_optimizer"}]
            per_step = bool(_ONE_STEP.search(function.name)) and any(e.kind == "scaler_step" for e in trace)
            per_step = per_step and not any(e.loops for e in trace)
            steps = [event] if per_step else steps
            if not (steps and (per_epoch or per_step) and passed) or fresh or event.roots or "epochs" in function.name:
                return None
            if self._first_time(event, name, steps):
                return None
            unit = "step" if per_step else "epoch"
            severity, frequency = "warning", f"on every call of `{function.name}`, once per {unit}"
        if any(idle.node is scaler.node for idle in ScalerWithBf16.idle(script)):
            return None
        return self.finding(
            script.where(event.node),
            f"`{name}` is recreated {frequency}; the scale restarts at {_initial_scale(scaler)}",
            instead="create the scaler once, next to the optimizer, and pass it in",
            severity=severity,
        )

    @staticmethod
    def _first_time(event: Event, key: str, steps: list[Event]) -> bool:
        last = key.rsplit(".", 1)[-1]
        # Conditions on every step as well are around the entire training.
        guards = [g for g in event.guards if not all(g in step.guards for step in steps)]
        # A guard that is true in one iteration only; `device == 'cpu'` is the same in all of them.
        once = ("first", "init", last)
        counts = (text for text, is_true in guards if is_true and " == " in text)
        return any(word in text for word in once for text, _ in guards) or any(
            not re.search(r"device|== ['\"]", text) for text in counts
        )


def _is_over_runs(script: Script, event: Event) -> bool:
    """Whether the innermost loop around a scaler is over independent runs, such as the folds of a cross-validation."""
    loops = loops_around(script, event)
    return bool(loops) and any(_RUN.search(name) for name in targets_of(loops[-1]))


def _name(scaler: Scaler) -> str:
    """What a message calls a scaler: its variable, or its call where it is created in the arguments of another one."""
    return scaler.key or (text_of(scaler.node) if isinstance(scaler.parent, (ast.Call, ast.keyword)) else "")


def _trains(script: Script, scaler: Scaler) -> bool:
    """Whether a scaler is created in the arguments of a training function of another file, next to the optimizer."""
    parent: ast.AST | None = scaler.parent
    call = script.outline.parents.get(parent) if isinstance(parent, ast.keyword) else parent
    name = text_of(call.func).rsplit(".", 1)[-1] if isinstance(call, ast.Call) else ""
    keys = [key_of(value) for value in arguments_of(call)] if isinstance(call, ast.Call) else []
    return bool(re.search(r"^_?(train|fit|run_epoch|one_epoch)|_train", name)) and any("opt" in key for key in keys)


def _is_replacement(script: Script, event: Event) -> bool:
    """Whether a new model or optimizer only stands in for one that is kept: `optimizer = self.optimizer`, else a new one."""
    statement = script.statement(event.node)
    key = key_of(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
    if not key or not event.guards:
        return False
    absent = [text for text, is_true in event.guards if not is_true]
    if any(text == key or ("hasattr" in text and key.rsplit(".", 1)[-1] in text) for text in absent):
        return True  # if optimizer is None
    here = [b for b in script.outline.bindings.get(key, ()) if b.function is event.function]
    return any(isinstance(b.value, (ast.Name, ast.Attribute)) for b in here)


def _is_snapshot(trace: Trace, event: Event, steps: list[Event]) -> bool:
    """Whether a copy is of the model that has been trained above: `best_model = copy.deepcopy(model)` after the steps."""
    value = getattr(event.node, "value", None)
    is_copy = isinstance(value, ast.Call) and text_of(value.func).rsplit(".", 1)[-1] in {"copy", "deepcopy"}
    return is_copy and all(trace.index(step) < trace.index(event) for step in steps)


class ScalerUnused(ScriptRule):
    """A GradScaler is created and never used."""

    code = "HS122"
    name = "scaler-unused"
    severity = "warning"
    reason = (
        "A GradScaler has no effect by itself: float16 gradients below 6e-8 still underflow to zero. It has to scale the loss, step "
        "the optimizer and be updated. A scaler whose name the training function binds to one of its own is left over: what is "
        "set on it, or restored into it, changes nothing."
    )
    bad = (
        PLAIN_LOOP.format(dtype="bfloat16").replace(
            "import torch\n", 'import torch\nscaler = torch.amp.GradScaler("cuda")\n'
        ),
        "import torch\nfrom torch.cuda.amp import GradScaler, autocast\nscaler = GradScaler()\nfor x in loader:\n"
        "    with autocast(dtype=torch.bfloat16):\n        loss = model(x)\n    loss.backward()\n    optimizer.step()\n",
        "import torch\nscaler = torch.amp.GradScaler('cuda')\n" + _OWN_SCALER,
    )
    good = (PLAIN_LOOP.format(dtype="bfloat16"), _RIGHT, "import torch\n" + _OWN_SCALER)
    references = (f"{_AMP}#gradient-scaling",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Scalers that are never used, or only saved and restored, in scripts that train."""
        active = {e.scaler.rsplit(".", 1)[-1] for e in script.events(*_USES) if not _is_prepared(e.node)}
        for scaler in script.scalers:
            last = scaler.key.rsplit(".", 1)[-1]
            if not scaler.key or "[" in last:
                continue
            if scaler.enabled != "no" and is_unread_variable(script, scaler) and _trains_here(script, scaler, []):
                yield self.finding(
                    script.where(scaler.node),
                    f"`{scaler.key}` is never used: `{scaler.function.name}` does not read it again",
                    instead="pass it to the function that scales the loss, or remove it",
                )
                continue
            if last in active:
                if (value := replaced_by(script, scaler)) is not None and scaler.enabled != "no":
                    yield self._replaced(script, scaler, value)
                    continue
                own = _hides(script, scaler)
                if own is not None:
                    yield self.finding(
                        script.where(scaler.node),
                        f"`{scaler.key}` is never used: `{own.function.name}` creates a scaler of its own ({script.at(own.node)})",
                        instead="remove one of them",
                        severity="advice",
                    )
                continue
            uses = list(_uses(script, last)) if script.outline.loads[last] else []
            saved = [use for use in uses if _is_state(script, use)]
            if last in script.outline.strings and len(saved) == len(uses) and not saved:
                continue  # getattr(self, "scaler")
            returned = [use for use in uses if _is_dropped(script, use, scaler)]
            ignored = [use for use in uses if _is_ignored(script, use)]
            if len(saved) + len(returned) + len(ignored) != len(uses):
                continue
            is_forgotten = (
                not uses and script.source.language == "notebook"
            )  # nothing imports the variables of a notebook
            if not (returned or is_forgotten or _trains_here(script, scaler, saved)):
                continue
            if scaler.enabled == "no":
                if not uses:
                    yield self.finding(
                        script.where(scaler.node),
                        f"`{scaler.key}` is disabled and never used",
                        instead="remove it",
                        severity="advice",
                    )
                continue
            effect = ", so the loss is not scaled" if script.has("backward") else ""
            owner = "" if script.has("backward") else next((e.subject for e in script.events("owned_backward")), "")
            if owner:
                yield self.finding(
                    script.where(scaler.node),
                    f"`{scaler.key}` never scales a loss or steps an optimizer: `{owner}.backward` uses a scaler of its own, if it needs one",
                    instead="remove it",
                )
                continue
            state = "never scales a loss or steps an optimizer" if saved else f"is never used{effect}"
            yield self.finding(
                script.where(scaler.node),
                f"`{scaler.key}` {state}",
                instead=f"{scaler.key}.scale(loss).backward(); {scaler.key}.step(optimizer); {scaler.key}.update(); "
                "or remove it if autocast runs in bfloat16",
            )

    def _replaced(self, script: Script, scaler: Scaler, value: ast.expr) -> Finding:
        is_scaler = any(s.node is value for s in script.scalers)
        return self.finding(
            script.where(scaler.node),
            f"`{scaler.key}` is never used: it is replaced by {'another scaler' if is_scaler else f'`{text_of(value)}`'} ({script.at(value)})",
            instead="remove one of the two assignments",
            severity="advice" if is_scaler else None,
        )


def _hides(script: Script, scaler: Scaler) -> Scaler | None:
    """The scaler of another function under the same name, where every function that reads the name has one of its own."""
    others = (s for s in script.scalers if s.key == scaler.key and s.function is not scaler.function)
    inside = next((s for s in others if not isinstance(s.function.node, ast.Module)), None)
    statement = script.statement(scaler.node)
    if inside is None or "." in scaler.key or not isinstance(statement, ast.Assign | ast.AnnAssign):
        return None
    if isinstance(script.outline.parents.get(statement), ast.ClassDef):
        return None  # read as an attribute
    return inside if is_hidden(script.outline, scaler.key, scaler.function, script.tree) else None


def _trains_here(script: Script, scaler: Scaler, saved: list[ast.expr]) -> bool:
    """Whether the script trains; the class of a `self.scaler` that is saved, which otherwise a derived class may use."""
    backward = script.events("backward", "owned_backward", "opt_step")
    if saved and scaler.key.startswith("self."):
        return any(event.function.cls == scaler.function.cls for event in backward)
    return any(True for _ in backward)


def _uses(script: Script, name: str) -> Iterator[ast.expr]:
    """Where a variable of this last name is read."""
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        if (node.id if isinstance(node, ast.Name) else node.attr) == name:
            yield node


def _is_state(script: Script, use: ast.expr) -> bool:
    """Whether a use only saves, restores or updates a scaler's state, or tests whether there is a scaler."""
    parent = script.outline.parents.get(use)
    if isinstance(parent, ast.Attribute):
        return parent.attr in {"state_dict", "load_state_dict", "update", "is_enabled"}
    if _is_prepared(parent):
        return True
    # Passed to a function of another file that saves or logs it.
    call = script.outline.parents.get(parent) if isinstance(parent, ast.keyword) else parent
    if isinstance(call, ast.Call) and any(event.node is call for event in script.events("stored")):
        return True
    if isinstance(parent, ast.Compare):
        return constant(parent.comparators[0]) is None
    return _is_test(script, use)


def _is_test(script: Script, node: ast.AST) -> bool:
    """Whether a value only decides a condition: `if scaler:`, `if scaler and "scaler" in state:`, `x if scaler else y`."""
    parent = script.outline.parents.get(node)
    if isinstance(parent, ast.UnaryOp | ast.BoolOp):
        return _is_test(script, parent)
    return isinstance(parent, ast.If | ast.IfExp | ast.While | ast.Assert) and parent.test is node


def _is_prepared(node: ast.AST | None) -> bool:
    """Whether a call is `accelerator.prepare`, which returns a scaler unchanged."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "prepare"


def _is_dropped(script: Script, use: ast.expr, scaler: Scaler) -> bool:
    """Whether a use returns a scaler, with others, to calls in this file that unpack it into a variable of the same name."""
    parent = script.outline.parents.get(use)
    if not isinstance(parent, ast.Tuple) or not isinstance(script.outline.parents.get(parent), ast.Return):
        return False
    calls = [site.call for site in script.outline.calls.get(scaler.function.name, ())]
    names = [_unpacked(script, call, parent.elts.index(use)) for call in calls]
    return bool(names) and all(name == scaler.key for name in names)


def _is_ignored(script: Script, use: ast.expr) -> bool:
    """Whether a use passes a scaler to a function of this file that never reads the parameter."""
    parent = script.outline.parents.get(use)
    call = script.outline.parents.get(parent) if isinstance(parent, ast.keyword) else parent
    if not isinstance(call, ast.Call) or use is call.func or any(isinstance(a, ast.Starred) for a in call.args):
        return False
    sites = script.outline.calls.get(text_of(call.func).rsplit(".", 1)[-1], ())
    target = next((script.outline.call_target(c, f) for c, f in sites if c is call), None)
    if target is None or isinstance(target.node, ast.Module):
        return False
    params = target.params[1:] if target.method else target.params
    name = parent.arg if isinstance(parent, ast.keyword) else dict(zip(call.args, params, strict=False)).get(use)
    read = {n.id for n in ast.walk(target.node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return name in params and name not in read and not {"locals", "vars"} & read


def _unpacked(script: Script, call: ast.Call, index: int) -> str:
    """The variable that receives one of the results of a call."""
    statement = script.outline.parents.get(call)
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    return key_of(target.elts[index]) if isinstance(target, ast.Tuple) and index < len(target.elts) else ""


RULES: tuple[type[Rule], ...] = (ScalerInLoop, ScalerUnused)
