"""HS129, HS149: validation needs autocast but not the scaler."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import TraceRule, in_training_step, is_amp, loops_around, without_amp
from halfstep.check.script.flow.phases import (
    is_diagnostic,
    is_drawn,
    is_preview,
    is_validation,
    needs_no_region,
    only_in_training,
    partial_regions,
    reads_data,
    without_reason,
)
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.validations import (
    hands_out,
    has_region,
    named_validations,
    old_probabilities,
)
from halfstep.check.script.objects.expressions import options_of
from halfstep.check.script.objects.modules import created_classes, regions_in_forward
from halfstep.check.script.objects.values import autocasts_of, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.openmmlab import float32_validation
from halfstep.check.script.syntax.outline import Binding, Function

__all__ = ["RULES"]

# Contexts that cannot be autocast: progress, time, memory, random numbers, averaged weights, kernels, devices.
_HARMLESS = regex(
    r"tqdm|progress|open\(|profil|rng|seed|time|set_grad_enabled|record_function|suppress|nullcontext|no_sync|capture|log|memory|"
    r"gpu_safe|average_parameters|(^|[._])ema(_|\.|$)|ema_scope|summon_full|swap|(^|\W)(torch\.cuda\.(device|stream)|lock)\b|"
    r"catch_warnings|sdpa?_kernel|join\(",
    re.IGNORECASE,
)
_AMP = "https://docs.pytorch.org/docs/stable/amp.html"
_TRAIN = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
_VALIDATE = 'with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):\n'
MAX_FORWARDS = 100  # without gradients that are looked at; generated code has more
_OTHER_MODEL = regex(
    r"(^|[._])(ref|reference|teacher|vae|reward|rm|old|frozen|lpips|clip|psnr|ssim|niqe|fid|inception|metrics?)([._]|$)|ref_model|text_enc"
)
_MODEL = regex(r"(model|net|network|policy)$", re.IGNORECASE)
_EVALUATION = regex(
    r"^_*(run_|do_)?(val|valid|validate|validation|eval|evaluate|evaluation|test)(_|$)|_(validate|evaluate)$"
)
_LOSS = regex(r"(loss|crit|criterion)$", re.IGNORECASE)
_KERNEL = regex(r"flash|sdpa|xformers|(^|[._])attn", re.IGNORECASE)
_WRAPPER = regex(r"accelerator|fabric|trainer", re.IGNORECASE)
_METHODS = regex(r"^(generate|predict|encode)")
_SAMPLES = regex(r"generat|(^|_)sampl|complet|(^|_)chat", re.IGNORECASE)
# Exports and images are no validation.
_ASIDE = regex(
    r"visuali|plot|heat_?map|debug|demo|export|onnx|profil|calibrat|^_*(save|dump|draw|render)_", re.IGNORECASE
)


class ScalerInValidation(TraceRule):
    """The loss is scaled although no gradients are computed."""

    code = "HS129"
    name = "scaler-in-validation"
    severity = "warning"
    reason = (
        "Scaling only protects gradients. Without them the validation loss is multiplied by the scale, which starts at 65536, and what is logged, "
        "averaged or used for early stopping changes whenever the scale changes."
    )
    bad = (_TRAIN + _VALIDATE + "    val_loss = scaler.scale(loss_fn(model(x), y))\n",)
    good = (_TRAIN + _VALIDATE + "    val_loss = loss_fn(model(x), y)\n",)
    references = (f"{_AMP}#gradient-scaling",)
    kinds = ("scale",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """scaler.scale inside no_grad or inference_mode."""
        event = trace[index]
        if event.inside("no_grad") is None:
            return None
        if event.roots and event.guards:
            return None  # a function for training and validation that distinguishes the two
        return self.finding(
            script.where(event.node),
            f"`{event.local.scaler}.scale` is called where no gradients are computed: the loss is multiplied by the scale",
            instead="use the loss without scaling",
        )


class EvaluationWithoutAutocast(ScriptRule):
    """Training runs under autocast, but validation does not."""

    code = "HS149"
    name = "evaluation-without-autocast"
    severity = "advice"
    reason = (
        "Validation in float32 needs up to twice the time and memory of validation under autocast, and evaluates different arithmetic "
        "than training uses. Validation needs autocast, but not the scaler; where it needs float32, a comment at `enabled=False` should say so. MMEngine's `ValLoop` opens it only with fp16=True."
    )
    bad = (_TRAIN + "model.eval()\nwith torch.no_grad():\n    for x, y in valid:\n        out = model(x)\n",)
    good = (
        _TRAIN
        + 'model.eval()\nwith torch.no_grad():\n    for x, y in valid:\n        with torch.autocast("cuda", dtype=torch.float16):\n            out = model(x)\n',
    )
    references = (f"{_AMP}#torch.autocast",)

    def check(self, script: Script) -> Iterator[Finding]:
        """The first forward without gradients outside any autocast region, in scripts that train inside one."""
        if "val_cfg" in script.source.text and (loop := float32_validation(script.tree)) is not None:
            message = "validation runs in float32 (`ValLoop` has fp16=False by default), but training under autocast"
            yield self.finding(script.where(loop), message, instead="val_cfg = dict(type='ValLoop', fp16=True)")
        in_traces = list(self._in_traces(script))
        if in_traces or script.outline.names.uses("pytest", "unittest") or not has_region(script):
            yield from in_traces
            return
        for place, flag, name in partial_regions(script):
            yield self._report_phase(script, place, flag, name)
            return
        for call, name in named_validations(script):
            yield self._report(script, call, name)
        for call, name in old_probabilities(script):
            yield self._report(script, call, name, "; the ratio of their probabilities is not 1 for the same weights")

    def _report(self, script: Script, node: ast.AST, name: str, effect: str = "") -> Finding:
        message = f"`{name}` runs in float32 here, but under autocast in training{effect}"
        return self.finding(script.where(node), message, instead='with torch.no_grad(), torch.autocast("cuda", ...):')

    def _report_phase(self, script: Script, place: ast.AST, flag: str, name: str) -> Finding:
        message = f"autocast is on only in training (`{flag}`): {name} is in float32 in validation"
        advice = "leave the phase out of the condition: validation needs autocast, but not the scaler"
        return self.finding(script.where(place), message, instead=advice)

    def _in_traces(self, script: Script) -> Iterator[Finding]:
        forwards = [e for e in script.events("forward") if not _LOSS.search(e.local.subject)]
        forwards = [e for e in forwards if not _generates(e) or is_validation(script, e)]
        without = [e for e in forwards if _without_gradients(e) or _evaluates(script, e)]
        evaluated = set(without)
        trained = [e for e in forwards if e not in evaluated and _has_region(script, e)]
        validated = [e for e in without if e.autocast()]
        backward = script.has("backward", "owned_backward")
        if not trained or not backward or script.outline.names.uses("pytest", "unittest"):
            return  # the test cases of a file have nothing to do with each other
        for event in trained:
            place, flag = only_in_training(script, event)
            if place is not None and not _ASIDE.search(event.function.name):
                yield self._report_phase(script, place, flag, f"`{event.local.subject}`")
                return
        nodes = {e.node for e in trained}
        shared = {guard for e in trained for guard in e.guards}  # conditions under which training has autocast
        for event in (e for e in without[:MAX_FORWARDS] if not in_training_step(script, e)):
            is_off = without_reason(script, event, validated) and is_validation(script, event)
            if event.inside("owned") or (event.inside("autocast") and not is_off):
                continue  # also in a region that is switched off for a part of a model, or with a reason
            other = dataclasses.replace(event, guards=tuple(g for g in event.guards if g not in shared))
            if without_amp(other) or any(_is_alternative(script, e, event, trained) for e in validated):
                continue  # the branch without mixed precision
            node, function, name = _site(script, event, nodes | {e.node for e in validated})
            if _ASIDE.search(function.name) or _samples(script, event, function) or is_drawn(script, event, nodes):
                continue
            if (
                _opens_region(script, event)
                or needs_no_region(script, event)
                or _is_unused(script, event, trained)
                or is_preview(script, event, validated)
                or is_diagnostic(event, trained, validated)
                or _is_called_from_outside(script, event, trained)
            ):
                continue
            # A function that creates the model it runs trains it only if training is part of that function.
            owners = [_function_of(script, root) for root in event.roots if event.node is node]
            owner = next((f for f in owners if _is_own(script, f, event.subject)), None)
            owner = function if _is_own(script, function, name) else owner
            inner = set(ast.walk(owner.node)) if owner is not None else None
            near = trained if inner is None else [e for e in trained if inner.intersection((e.node, *e.roots))]
            if all(_unknown_regions(event, e) for e in near if _is_same(script, event, e)):
                continue
            if _trains_without_region(script, event, [e for e in forwards if e not in evaluated]):
                continue
            yield self._report(script, node, name)
            return


def _without_gradients(event: Event) -> bool:
    """Whether an event is under no_grad, or under `set_grad_enabled(phase == "train")` in a branch where that is false."""
    if event.inside("no_grad") is not None:
        return True
    calls = [r.node for r in event.regions if isinstance(r.node, ast.Call) and r.node.args]
    switches = [c for c in calls if text_of(c.func).endswith("set_grad_enabled")]
    return any((text_of(call.args[0]), False) in event.guards for call in switches)


def _has_region(script: Script, event: Event) -> bool:
    """Whether an event is under autocast, also that of an engine; those of Accelerate and Lightning wrap the model itself."""
    region = event.inside("owned")
    owned = region is not None and not _WRAPPER.search(text_of(region.node))
    if owned and not script.outline.names.uses("accelerate", "lightning", "pytorch_lightning", "lightning_fabric"):
        return event.inside("autocast") is None
    return event.autocast() is not None


def _evaluates(script: Script, event: Event) -> bool:
    """Whether a function named for validation switches the model to evaluation and never trains it."""
    function, calls = event.function, script.outline.calls
    if not _EVALUATION.search(function.name):
        return False
    owners = {
        name: [
            key_of(c.func.value) for c, f in calls.get(name, ()) if f is function and isinstance(c.func, ast.Attribute)
        ]
        for name in ("eval", "train", "backward")
    }
    return event.local.subject in owners["eval"] and not owners["backward"] and not owners["train"]


def _is_alternative(script: Script, validated: Event, event: Event, trained: list[Event]) -> bool:
    """Whether a forward is in the other branch of the condition on which one under autocast depends.

    Where that one has a flag for mixed precision too, the other condition is about something else: `if labels is None:`.
    So it is where the model is trained under autocast in this branch, `elif mode == "slice":`, as well.
    """
    # `flash_attention` needs 16 bits, its other branch may use them.
    plain = dataclasses.replace(event, guards=tuple(g for g in event.guards if not _KERNEL.search(g.text)))
    if compatible(validated, plain):
        return False
    if any(not compatible(e, validated) and compatible(e, event) and _is_same(script, event, e) for e in trained):
        return False
    flags = tuple(g for g in validated.guards if is_amp(g) and g.is_true)
    if not flags:
        first, last = getattr(event.function.node, "lineno", 0), getattr(event.function.node, "end_lineno", None) or 0
        # `if use_tta:` calls a function that runs the model several times, on flipped inputs.
        return not event.roots or not any(first <= loop.line <= last for loop in event.loops)
    return not compatible(dataclasses.replace(validated, guards=flags), plain)


def _name_of(model: str) -> str:
    """The last name of a model, not of the wrapper around it: `model.module`, `model_ema.ema`."""
    name = model.removesuffix(".module").removesuffix(".ema")
    return name.rsplit(".", 1)[-1]


def _names(script: Script, event: Event) -> frozenset[str]:
    """The last names of the model that an event runs, and of what its variable may be a copy of."""
    # In a function that is passed `runner.module` the parameter is the better name.
    keys = {event.subject} | ({event.local.subject} if event.subject.endswith(".module") else set())
    values = script.outline.values(event.local.subject, event.function)
    keys |= {key_of(option) for value in values for option in options_of(value)} - {""}
    return frozenset(_name_of(key) for key in keys)


def _unknown_regions(event: Event, trained: Event) -> bool:
    """Whether a context around the validation, but not around the training, may be a region of another file."""
    shared = {text_of(r.node) for r in trained.regions if r.kind == "other"}
    contexts = (text_of(r.node) for r in event.regions if r.kind == "other")
    return any(not _HARMLESS.search(text) for text in contexts if text not in shared)


def _is_same(script: Script, a: Event, b: Event) -> bool:
    """Whether two forwards may be of one model: the `self.model` of two unrelated classes are two models."""
    if _OTHER_MODEL.search(a.subject) and a.subject.rsplit(".", 1)[-1] != b.subject.rsplit(".", 1)[-1]:
        return False
    names = _names(script, a), _names(script, b)
    plain = [any("model" in name or name in {"net", "network"} for name in each) for each in names]
    if not (names[0] & names[1] or all(plain)):
        return False  # a generator and its discriminator
    if not plain[0] and not is_validation(script, a) and not reads_data(script, a):
        return False  # samples of a generator are not validation
    if not (a.subject.startswith("self.") and b.subject.startswith("self.")):
        return not (_is_created_in_class(script, a) and _is_apart_from(script, b, a.function.cls))
    one, other = a.function.cls, b.function.cls
    bases = {cls: {key_of(base) for base in script.outline.bases.get(cls, ())} for cls in (one, other)}
    return one == other or one in bases[other] or other in bases[one]


def _trains_without_region(script: Script, event: Event, trained: list[Event]) -> bool:
    """Whether the class or function of a forward trains the model itself, and never under autocast: others do that."""
    function = event.function
    own = [e for e in trained if (e.function.cls == function.cls if function.cls else e.function is function)]
    own = [e for e in own if e.local.subject == event.local.subject]
    backward = {f for _, f in script.outline.calls.get("backward", ())}
    if any(e.inside("owned") or any(r.kind in {"autocast", "other"} for r in e.regions) for e in own):
        return False
    return any(e.function in backward for e in own)


def _site(script: Script, event: Event, trained: set[ast.AST]) -> tuple[ast.AST, Function, str]:
    """Where a forward has no region, and the model's name there: in a helper that training calls too, at its call."""
    if not event.roots or event.node not in trained:
        return event.node, event.function, event.local.subject
    return event.roots[-1], _function_of(script, event.roots[-1]), event.subject


def _function_of(script: Script, node: ast.AST) -> Function:
    """The function around a node, or the module."""
    parent: ast.AST | None = node
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
        parent = script.outline.parents.get(parent)
    return next((f for f in script.outline.functions if f.node is parent), script.outline.module)


def _samples(script: Script, event: Event, function: Function) -> bool:
    """Whether a forward is for samples: in a function named for them, or in a helper that one calls."""
    callers = [_function_of(script, root).name for root in event.roots]
    own = bool(_SAMPLES.search(function.name)) and not is_validation(script, event)
    loops = loops_around(script, event)
    draws = {n.attr for n in ast.walk(loops[-1]) if isinstance(n, ast.Attribute)} if loops else set()
    return own or "multinomial" in draws or any(map(_SAMPLES.search, callers))


def _is_called_from_outside(script: Script, event: Event, trained: list[Event]) -> bool:
    """Whether the region is that of an unknown caller: of a module that does not train itself, or of a method for one input."""
    first, *others = (_function_of(script, e.roots[0]) if e.roots else e.function for e in (event, *trained))
    bases = [key_of(base).rsplit(".", 1)[-1] for base in script.outline.bases.get(first.cls, ())]
    is_part = "Module" in bases and all(f.cls != first.cls for f in others)
    return is_part or (bool(first.cls) and not event.loops and bool(_METHODS.search(first.name)))


def _is_unused(script: Script, event: Event, trained: list[Event]) -> bool:
    """Whether nothing calls the function of a forward, in a file that trains when it runs and is no library."""
    function, outline = event.function, script.outline
    if event.roots or function.cls or function is outline.module or outline.loads.get(function.name):
        return False
    return any(e.roots and _function_of(script, e.roots[0]) is outline.module for e in trained)


def _generates(event: Event) -> bool:
    """Whether a forward is a method that returns tokens, predictions or embeddings, not the model itself."""
    func = event.node.func if isinstance(event.node, ast.Call) else None
    return isinstance(func, ast.Attribute) and bool(_METHODS.search(func.attr))


def _opens_region(script: Script, event: Event) -> bool:
    """Whether the model may be of a class of the file that runs its whole forward under autocast itself."""
    if regions_in_forward(script.outline, event.subject, event.function):
        return True
    values = script.outline.values(event.subject, event.function)
    is_known = any(created_classes(script.outline, value) for value in values)
    forwards = [methods["forward"] for methods in script.outline.classes.values() if "forward" in methods]
    decorated = [d for f in forwards for d in getattr(f.node, "decorator_list", ())]
    return not is_known and any(autocasts_of(script.outline, d, script.outline.module) for d in decorated)


def _is_own(script: Script, function: Function, name: str) -> bool:
    """Whether a function creates the model that it runs."""
    if "." in name or isinstance(function.node, ast.Module) or name in function.params:
        return False
    bound = [b for b in script.outline.lookup(name, function) if b.function is function]
    bound = [b for b in bound if not hands_out(script, b.value, function)]
    return bool(bound) and all(isinstance(b.value, ast.Call) and not _wraps(b.value) for b in bound)


def _is_created_in_class(script: Script, event: Event) -> bool:
    """Whether the class of a forward creates the model that it runs: the frozen encoder of `self.model = AutoModel.from_pretrained(name)`."""
    bound = [b for b in script.outline.bindings.get(event.subject, ()) if b.function.cls == event.function.cls != ""]
    return bool(bound) and all(isinstance(b.value, ast.Call) for b in bound) and not any(map(_rewraps, bound))


def _rewraps(binding: Binding) -> bool:
    return isinstance(binding.value, ast.Call) and _wraps(binding.value)


def _is_apart_from(script: Script, event: Event, cls: str) -> bool:
    """Whether a forward runs a variable that is no attribute of an object, outside a class."""
    values = script.outline.values(event.subject, event.function) if event.subject.isidentifier() else [None]
    return event.function.cls != cls and not any(v is None or isinstance(v, ast.Attribute) for v in values)


def _wraps(call: ast.Call) -> bool:
    """Whether a call returns a model that it receives: `unwrap(model)`, `self.model.eval()`, not `load(TextModel)`."""
    parts = [*call.args, *([call.func.value] if isinstance(call.func, ast.Attribute) else [])]
    return any(_wraps(p) if isinstance(p, ast.Call) else _is_variable(key_of(p)) for p in parts)


def _is_variable(key: str) -> bool:
    """Whether a name is that of a model, and not of a class of models."""
    return bool(_MODEL.search(key)) and not key.rpartition(".")[2][:1].isupper()


RULES: tuple[type[Rule], ...] = (ScalerInValidation, EvaluationWithoutAutocast)
