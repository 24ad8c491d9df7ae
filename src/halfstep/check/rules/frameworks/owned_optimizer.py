"""HS198: optimizers that a framework does not unscale."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import TraceRule, earlier
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.engines import (
    ACCELERATE,
    Engine,
    engine_at,
    loop_class,
    scaling_accelerator,
)
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.owners import created_here, list_of, members_of, prepared_if
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.scaling.lightning_optimizers import wrapping_of
from halfstep.check.script.scaling.prepared import prepared_for, prepared_in, stays_in
from halfstep.check.script.scaling.trainer_loops import steps_of_own_loops
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.scope import Binding

__all__ = ["RULES"]

_UNPREPARED = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")
optimizer = torch.optim.AdamW(model.parameters())
{prepare}
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
"""
_LISTED = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")
optimizers = [torch.optim.AdamW(part.parameters()) for part in parts]
model, loader, {star}optimizers = accelerator.prepare(model, loader, {star}optimizers)
for x, y in loader:
    accelerator.backward(loss_fn(model(x), y))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""
_MODULE = """\
import lightning as L

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers({option})
        optimizer.zero_grad()
        self.manual_backward(self.compute_loss(batch))
        optimizer.step()
"""
_FACTORY = regex(r"^_?(get|make|build|create|init)_\w*optim(izer)?$|^\w*(Adam|AdamW|SGD|Adafactor|Lion)(8bit)?$")


class OptimizerNotPrepared(TraceRule):
    """An optimizer steps without the framework that scaled the gradients."""

    code = "HS198"
    name = "optimizer-not-prepared"
    severity = "warning"
    reason = (
        "`accelerator.backward` and `fabric.backward` scale the loss in fp16; only an optimizer that went through `prepare` or `setup` "
        "unscales the gradients and skips the step when they overflow. A plain optimizer applies gradients that are 65536 times too "
        "large, infinite ones included. `prepare` wraps an optimizer that is passed by itself, not those in a list. Plain Adam hides the factor in its ratio but not the overflow. With DeepSpeed or FSDP the plain "
        "optimizer has parameters that are not trained. A Lightning module with manual optimization steps what `self.optimizers()` returns; "
        "the torch optimizer itself, or `self.optimizers(use_pl_optimizer=False)`, is not unscaled either."
    )
    bad = (
        _UNPREPARED.format(prepare="model, loader = accelerator.prepare(model, loader)"),
        _MODULE.format(option="use_pl_optimizer=False"),
        _LISTED.format(star=""),
        _UNPREPARED.format(
            prepare="if args.use_audio:\n    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
        ),
    )
    good = (
        _UNPREPARED.format(prepare="model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"),
        _MODULE.format(option=""),
        _LISTED.format(star="*"),
    )
    references = ("https://huggingface.co/docs/accelerate/basic_tutorials/migration",)
    words = ("Accelerator", "Fabric(", "automatic_optimization")
    kinds = ("opt_step",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Every event of the traces, and steps in a Trainer's own loop."""
        yield from super().check(script)
        for call, trainer in steps_of_own_loops(script):
            state = "" if trainer.precision == "fp16" else "in fp16 "
            yield self.finding(
                script.where(call),
                f"this `_inner_training_loop` does not pass `self.optimizer` to `accelerator.prepare`: {state}it steps with gradients that are still scaled",
                instead="self.optimizer = self.accelerator.prepare(self.optimizer) before the loop",
                severity="error" if trainer.precision == "fp16" else None,
            )

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A step of an optimizer that this script creates and does not prepare."""
        event = trace[index]
        owner = loop_class(script, event.function.cls) if event.function.cls else None
        if owner is not None:
            return self._in_module(script, trace, index, owner.precision) if owner.base == "manual" else None
        # A loop without the engine may come after one with it: the gradients are those of the last backward.
        last = next(earlier(trace, index, "owned_backward", "backward"), None)
        if last is None or trace[last].kind == "backward":
            return None
        engine = engine_at(script, trace[last].subject, trace[last].function)
        if engine is None or not engine.is_created or engine.precision not in {"fp16", "?"} or engine.plugin:
            return None
        if not event.roots and event.optimizer in event.function.params:
            return None  # the caller, in another file, may have prepared it
        near = prepared_for(script, engine.library, event)
        # What a caller prepares under the same name is another optimizer.
        is_own = stays_in(script, event.optimizer, event.function)
        prepared = prepared_in(script, engine.library, event.function) if is_own else near
        if engine.library == ACCELERATE and (collection := list_of(script, event)) in prepared.names:
            return self._report(
                script, event, engine, f"`prepare` leaves the list `{collection}` as it is", f"pass `*{collection}`"
            )
        if last_name(event.optimizer) in prepared.names and (condition := prepared_if(script, event, engine.name)):
            return self._report(
                script,
                event,
                engine,
                f"unless `{condition}`, nothing prepares `{event.optimizer}`",
                "prepare it in every run",
            )
        # A file that prepares nothing may leave that to another one; neither fp16 here nor a local optimizer excuses it.
        decided = prepared.is_complete and (
            near.names or engine.precision == "fp16" or _is_local(script, event, engine)
        )
        names = {last_name(event.optimizer), last_name(event.local.optimizer)}
        if not decided or names & prepared.names:
            return None
        group, members = members_of(script, event)
        own = near.names | prepared.names
        left = [m for m in members if _is_left_out(script, m, event, engine, own)] if members else []
        if left and last_name(group) not in near.names and _are_known(members, left, own):
            each = ", ".join(f"`{key}`" for m in left if (key := key_of(m)))
            cause = f"nothing prepares {each or 'the optimizers'} of `{group}`"
            return self._report(script, event, engine, cause, f"pass each of them to `{engine.key}.prepare`")
        values = [v for v in script.outline.values(event.optimizer, event.function) if constant(v) is not None]
        if not values or not all(_is_unprepared(script, value, engine) for value in values):
            return None
        call = "prepare" if engine.library == ACCELERATE else "setup"
        passed = [text_of(part) for site, _ in script.outline.calls.get(call, ()) for part in site.args]
        if any(text.startswith((f"{event.optimizer}.", f"{event.optimizer}[")) for text in passed):
            return None  # an object of several optimizers, which are prepared one by one
        cause = f"`{event.optimizer}` is not passed to `{engine.key}.{call}`"
        return self._report(script, event, engine, cause, f"pass `{event.optimizer}` to `{engine.key}.{call}`")

    def _report(self, script: Script, event: Event, engine: Engine, cause: str, instead: str) -> Finding:
        state = "" if engine.precision == "fp16" else "in fp16 "
        return self.finding(
            script.where(event.node),
            f"{cause}: {state}`{event.local.optimizer or event.optimizer}` steps with gradients that are still scaled",
            instead=instead,
            severity="error" if engine.precision == "fp16" else None,
        )

    def _in_module(self, script: Script, trace: Trace, index: int, precision: str) -> Finding | None:
        """A Lightning module that steps a torch optimizer, not what `self.optimizers()` returns."""
        event = trace[index]
        before = next(earlier(trace, index, "owned_backward"), None)
        if precision not in {"fp16", "?"} or before is None or trace[before].subject != "self":
            return None
        func = event.node.func if isinstance(event.node, ast.Call) else None
        stepped = func.value if isinstance(func, ast.Attribute) else None
        values = [value for b in script.outline.lookup(event.optimizer, event.function) for value in _copied(script, b)]
        is_torch = bool(values) and all(isinstance(v, ast.Call) and _is_torch_optimizer(script, v) for v in values)
        if not is_torch and wrapping_of(script.outline, stepped, event.function) != "raw":
            return None
        state = "" if precision == "fp16" else "with precision='16-mixed' "
        name = event.local.optimizer or event.optimizer
        return self.finding(
            script.where(event.node),
            f"`{name}` is the torch optimizer, not Lightning's: {state}it steps with gradients that are still scaled",
            instead="step what `self.optimizers()` returns",
            severity="error" if precision == "fp16" else None,
        )


def _is_local(script: Script, event: Event, engine: Engine) -> bool:
    """Whether a script with an option for fp16 prepares nothing, and no other file can."""
    if scaling_accelerator(script) is None or {"prepare", "setup"} & script.outline.calls.keys():
        return False
    return created_here(script, event, engine.key, engine.function)


def _copied(script: Script, binding: Binding) -> list[ast.expr | None]:
    """The values of a variable: of `a, b = self.opt_a, self.opt_b` what the attribute is bound to; None for one that is not known."""
    value = binding.value
    if binding.index is not None:
        is_pair = isinstance(value, (ast.Tuple, ast.List)) and binding.index < len(value.elts)
        value = value.elts[binding.index] if is_pair and isinstance(value, (ast.Tuple, ast.List)) else None
    key = key_of(value)
    own = script.outline.lookup(key, binding.function) if key.startswith("self.") and key.count(".") == 1 else []
    return [b.value if b.index is None else None for b in own] if own else [value]


def _is_left_out(script: Script, member: ast.expr, event: Event, engine: Engine, prepared: frozenset[str]) -> bool:
    """Whether a member of a list or dictionary of optimizers is one that nothing prepares, also under its own name."""
    key = key_of(member)
    if not key:
        return _is_unprepared(script, member, engine)
    values = script.outline.values(key, event.function) if last_name(key) not in prepared else []
    return bool(values) and all(_is_unprepared(script, value, engine) for value in values)


def _are_known(members: list[ast.expr], left: list[ast.expr], prepared: frozenset[str]) -> bool:
    """Whether each member is prepared under its name, or certainly not at all."""
    return all(member in left or last_name(key_of(member)) in prepared for member in members)


def _is_unprepared(script: Script, value: ast.expr, engine: Engine) -> bool:
    """Whether a value is an optimizer of a library, also of a class that was chosen, or of a factory without the engine."""
    if not isinstance(value, ast.Call):
        return False
    if _is_torch_optimizer(script, value) or any(value is call for call, _ in script.training.optimizers):
        return True
    passed = {last_name(key_of(part)) for part in arguments_of(value)}
    is_other = script.outline.names.full(value.func).startswith("accelerate.")  # a DummyOptim
    return bool(_FACTORY.search(last_name(key_of(value.func)))) and engine.name not in passed and not is_other


def _is_torch_optimizer(script: Script, call: ast.Call) -> bool:
    full = script.outline.names.full(call.func)
    return full.startswith("torch.optim.") and not {"lr_scheduler", "swa_utils"} & set(full.split("."))


RULES: tuple[type[Rule], ...] = (OptimizerNotPrepared,)
