"""HS160: trained weights in float16 with a scaler."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.weights.default_dtype import defaults_of, trains_under_default
from halfstep.check.rules.weights.masters import remedy, subject, when
from halfstep.check.script.exercise import is_exercise
from halfstep.check.script.flow.event import Event, Guard, compatible
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.flow.order import implied, is_amp, scalers_at, switched_off, without_amp
from halfstep.check.script.objects.adapters import adapted_casts
from halfstep.check.script.objects.chosen import condition_text, dtype_values, float16_ways, is_on_gpu
from halfstep.check.script.objects.layers import managed_casts
from halfstep.check.script.objects.training import Trained
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.objects.weights import Lineage, casts_in, conditions_of
from halfstep.check.script.pairing.device_tests import tests_of
from halfstep.check.script.pairing.scaler_condition import spares_half_weights
from halfstep.check.script.scaling.stepped import steps_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.settled import setting_name

__all__ = ["RULES", "trained_casts"]

_TRAIN = """\
import torch
model = Net().cuda(){cast}
optimizer = torch.optim.{optimizer}(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
_CHOSEN = (
    _TRAIN.replace("import torch\n", "import torch\ndtype = torch.bfloat16 if newer else torch.float16\n")
    .replace('GradScaler("cuda")', 'GradScaler("cuda", enabled=(dtype == torch.float16))')
    .replace("dtype=torch.float16)", "dtype=dtype)")
    .replace("{optimizer}", "SGD")
)
_OPTION = regex(r"^[A-Za-z_][\w.]*(?:\[['\"]\w+['\"]\])*?(?:\.|\[['\"])(\w+)(?:['\"]\])?(?= == |$)")  # its last name
_FLOAT16_TEST = regex(r"([\w.]+) (?:==|is) torch\.(?:float16|half)")
_OTHER_RUNS = regex(r"infer|eval|test|export|predict|cpu|cuda|device|(^|_)mode\b|dtype|backend|bits", re.IGNORECASE)
_NO_TRAINING = regex(r"infer|eval|test|export|predict|cpu|(^|_)mode\b|backend|bits", re.IGNORECASE)
_LOADS = regex(r"load_model|build_model|create_model|make_model|get_model|init|setup|prepare_model|^_?(load|build)$")


def trained_casts(script: Script, dtype: str, kind: str) -> Iterator[Event]:
    """Casts of a model that an optimizer of this script trains with a step of this kind."""
    yielded = set()
    if script.training.adapters == "yes":  # adapters are float32 unless they are cast with their model
        adapted = {c.node for c in adapted_casts(script.outline, casts_in(script.outline))}
    else:
        adapted = None
    for trace in script.traces:
        for index, event in enumerate(trace):
            if event.kind != "cast" or event.scaled != dtype or event.node in yielded or event.inside("no_grad"):
                continue
            if adapted is not None and event.node not in adapted:
                continue
            # A cast after the training loop is for saving or serving, and one that is undone later is harmless.
            if event.loops or any(e.kind == "backward" for e in trace[:index]):
                continue
            if any(
                e.kind == "cast" and e.subject == event.subject and e.scaled == "float32" for e in trace[index + 1 :]
            ):
                continue
            related = [e for t in script.traces for e in t if t is trace or _same_class(e, event)]
            steps = [e for e in related if e.kind == kind and _applies(event, e) and not switched_off(script, e)]
            if any(_trained(script, event, [e for e in related if _steps_with(script, e, step)]) for step in steps):
                yielded.add(event.node)
                yield event


def _applies(cast: Event, step: Event) -> bool:
    """Whether a step runs on the weights that were cast: always, or whenever a flag such as `args.fp16` is set.

    A scaler has its own flags, and two flags may exclude each other, so for its step only "always" counts.
    """
    if implied(cast, step):
        return True
    flags = set(cast.guards) - set(step.guards)
    only_amp = all(value and is_amp((text, value)) for text, value in flags) and not without_amp(cast)
    return step.kind == "opt_step" and only_amp and compatible(cast, step) and not without_amp(step)


def _same_class(other: Event, cast: Event) -> bool:
    """Whether two events of one class refer to the same object: an attribute, or the model that a loader returns."""
    shared = cast.subject.startswith("self.") or _LOADS.search(cast.function.name)
    return bool(shared) and bool(cast.function.cls) and other.function.cls == cast.function.cls


def _steps_with(script: Script, created: Event, step: Event) -> bool:
    """Whether a created optimizer may be the one that steps: it is assigned to that name, or to none."""
    if created.kind != "make_optimizer" or not created.subject:
        return False
    statement = script.statement(created.node)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {key_of(t).rsplit(".", 1)[-1] for t in targets} - {""}
    if statement is not None and getattr(statement, "value", None) is not created.node:
        names = {name for name in names if "opt" in name.lower()}  # wrapped in another optimizer
    return not names or not step.optimizer or step.optimizer.rsplit(".", 1)[-1] in names


def _trained(script: Script, cast: Event, optimizers: list[Event]) -> bool:
    """Whether an optimizer gets the parameters of the cast model, or none is created here and a loader casts it."""
    if optimizers:
        return any(cast.subject in o.subject.split("|") and compatible(o, cast) for o in optimizers)
    if script.has("make_optimizer"):
        return False
    return cast.subject == "model" and bool(_LOADS.search(cast.function.name)) and not cast.guards


def _scaler_steps(script: Script, tie: Trained, chosen: tuple[Guard, ...] = ()) -> bool:
    """Whether an active scaler steps the optimizer of a tie whenever its weights are cast, and its dtype is chosen so."""
    conditions = _options(_of_settings(script, (*conditions_of(script.outline, tie.cast.node), *chosen)))
    for step in steps_of(script, tie.by, "scaler_step"):
        # `enabled=args.fp16` and `if args.fp16: model.half()`: one flag decides both.
        # One of several, `scalers[name]`, is any of them.
        scalers = scalers_at(script, step) or (list(script.scalers) if step.scaler.endswith("]") else [])
        flags = [Guard(scaler.enabled, True) for scaler in scalers]
        # A step means that the one scaler was created: `if args.precision == "fp16": scaler = GradScaler()`.
        created = conditions_of(script.outline, scalers[0].node) if len(scalers) == 1 else ()
        parts = [
            Guard(part, True) for g in created if g.is_true and " or " not in g.text for part in g.text.split(" and ")
        ]
        around = _options(_of_settings(script, (*step.guards, *flags, *created, *parts)))
        # A condition that is not about precision, `if pretrained:`, leaves a run in which both happen.
        if scalers and all(s.enabled == "yes" for s in scalers) and not any(map(is_amp, (*step.guards, *created))):
            missing = [g for g in conditions - around if g.opposite in around or _NO_TRAINING.search(g.text)]
        else:
            missing = [g for g in conditions - around if is_amp(g) or _is_excluded(g, around)]
        if not missing and not switched_off(script, step) and not spares_half_weights(script, step, scalers):
            return True
    return False


def _is_excluded(guard: Guard, around: set[Guard]) -> bool:
    """Whether conditions around a step rule out another one, or may: an option of a device or of inference."""
    return Guard(guard.text, not guard.is_true) in around or bool(_OTHER_RUNS.search(guard.text))


def _of_settings(script: Script, guards: Iterable[Guard]) -> Iterator[Guard]:
    """Conditions on settings: `mode == "fp16"` after `mode = cfg.precision.lower()` as `precision == "fp16"`."""
    for text, is_true in guards:
        name, separator, value = text.partition(" == ")
        bound = script.outline.bindings.get(name, ()) if separator and name.isidentifier() else ()
        names = {setting_name(b.value) if b.value is not None and b.index is None else "" for b in bound}
        yield Guard(f"{names.pop() or name} == {value}" if len(names) == 1 else text, is_true)


def _options(guards: Iterable[Guard]) -> set[Guard]:
    """Conditions by the last name of the option: `cfg["train"]["precision"] == "fp16"` and `train["precision"] == "fp16"` are one.

    What an option is not follows from what it is.
    """
    options = {Guard(_OPTION.sub(r"\1", text), is_true) for text, is_true in guards if not text.startswith("__name__")}
    equal = {text.partition(" == ")[0] for text, is_true in options if is_true and " == " in text}
    return {g for g in options if g.is_true or g.text.partition(" == ")[0] not in equal}


class HalfModelWithScaler(ScriptRule):
    """A GradScaler steps float16 weights."""

    code = "HS160"
    name = "half-model-with-scaler"
    severity = "error"
    reason = (
        "float16 weights have float16 gradients, which the scaler rejects with ValueError: Attempting to unscale FP16 gradients. "
        "Autocast expects float32 weights and casts them to 16 bits itself."
    )
    bad = (
        _TRAIN.format(cast=".half()", optimizer="SGD"),
        _TRAIN.format(cast="\nmodel.to(torch.float16)", optimizer="AdamW"),
        _CHOSEN.format(cast=".to(dtype)"),
    )
    good = (
        _TRAIN.format(cast="", optimizer="SGD"),
        _TRAIN.format(cast="", optimizer="SGD") + "model.half()\n",
        _CHOSEN.format(cast=""),
    )
    references = (
        "https://github.com/Lightning-AI/pytorch-lightning/issues/5140",
        "https://github.com/yk7333/d3po/issues/6",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """float16 casts of trained models in scripts whose scaler steps their optimizer."""
        # FSDP's scaler accepts float16 gradients; next to it, a plain one may be for runs without FSDP.
        has_sharded = any("Sharded" in s.api for s in script.scalers)
        reported: set[int] = set()  # lines: an event may be another node of the same cast
        for event in () if has_sharded else trained_casts(script, "float16", "scaler_step"):
            reported.add(script.where(event.node).line)
            yield self.finding(
                script.where(event.node),
                f"`{event.subject}` is cast to float16, so the scaler raises ValueError: Attempting to unscale FP16 gradients",
                instead=f"keep `{event.subject}` in float32 and let autocast cast",
            )
        for tie in (*script.training.by_optimizers, *_managed_ties(script)):
            cast = tie.cast
            if (
                not has_sharded
                and cast.formats == {"float16"}
                and script.where(cast.node).line not in reported
                and _scaler_steps(script, tie)
            ):
                yield self.finding(
                    script.where(cast.node),
                    f"{when(script, cast, tie.lineage)}{subject(cast)} has float16 weights, so the scaler raises ValueError: Attempting to unscale FP16 gradients",
                    instead=f"{remedy(script, cast)} and let autocast cast",
                )
            elif "float16" in cast.formats and (test := _enabling_test(script, tie)):
                yield self.finding(
                    script.where(cast.node),
                    f"when `{test}`, {subject(cast)} has float16 weights and the scaler is enabled: it raises ValueError: Attempting to unscale FP16 gradients",
                    instead=f"{remedy(script, cast)} and let autocast cast",
                )
            elif not has_sharded and "float16" in cast.formats and script.where(cast.node).line not in reported:
                ways = [guards for guards in float16_ways(script.outline, cast) if _scaler_steps(script, tie, guards)]
                if ways:
                    reported.add(script.where(cast.node).line)
                    yield self.finding(
                        script.where(cast.node),
                        f"{condition_text(ways[0])}{subject(cast)} has float16 weights, so the scaler raises ValueError: Attempting to unscale FP16 gradients",
                        instead=f"{remedy(script, cast)} and let autocast cast",
                    )
        if not has_sharded:
            yield from self._by_default(script)

    def _by_default(self, script: Script) -> Iterator[Finding]:
        """Models that are created under a float16 default dtype, in runs that step them through a scaler."""
        steps = [e for e in script.events("scaler_step") if not without_amp(e) and not switched_off(script, e)]
        defaults = defaults_of(script) if steps and not is_exercise(script) else []
        for call, function, formats in defaults:
            here = conditions_of(script.outline, call)
            is_scaled = any(possible(here, step.guards) for step in steps)
            if formats == {"float16"} and is_scaled and trains_under_default(script, call, function, defaults):
                yield self.finding(
                    script.where(call),
                    "the weights created after this line are float16, so the scaler raises ValueError: Attempting to unscale FP16 gradients",
                    instead="keep the default dtype at float32 and let autocast cast",
                )


def _managed_ties(script: Script) -> Iterator[Trained]:
    """Modules of an object that returns parameters of them, and the optimizer of these."""
    optimizers = script.training.optimizers if script.has("scaler_step") else ()
    for cast, by, function in managed_casts(script.outline, casts_in(script.outline), optimizers):
        yield Trained(cast, by, function, Lineage(script.outline))


def _enabling_test(script: Script, tie: Trained) -> str:
    """The test `dtype == torch.float16` that enables the scaler of a tie, of the dtype that its weights have; "" if none does."""
    names = {key_of(value) for value in _named_dtypes(tie)} - {""}
    for step in steps_of(script, tie.by, "scaler_step"):
        if without_amp(step):
            continue
        for scaler in (s for s in scalers_at(script, step) if "Sharded" not in s.api):
            created = conditions_of(script.outline, scaler.node)
            # Each part of `enabled=amp and dtype == torch.float16` holds where the scaler is enabled.
            parts = [text_of(test) for test, is_true in tests_of(script, scaler) if is_true]
            tests = [text for text in parts if (test := _FLOAT16_TEST.fullmatch(text)) and test[1] in names]
            here = conditions_of(script.outline, tie.cast.node)
            if tests and scaler.function is tie.cast.function and possible(created, here):
                others = [g for g in created if g.text not in tests and g not in here]
                return " and ".join([tests[0], *(g.text if g.is_true else f"not {g.text}" for g in others)])
    return ""


def _named_dtypes(tie: Trained) -> Iterator[ast.expr]:
    """The variables that the weights of a tie have as their dtype; of `dtype if device == "cuda" else None` the first arm."""
    for value in dtype_values(tie.cast):
        is_choice = isinstance(value, ast.IfExp) and is_on_gpu(Guard(text_of(value.test), True))
        yield value.body if is_choice and isinstance(value, ast.IfExp) else value


RULES: tuple[type[Rule], ...] = (HalfModelWithScaler,)
