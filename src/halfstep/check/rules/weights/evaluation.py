"""HS137: an evaluation, or a save in the training loop, that casts the model in training to 16 bits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.exercise import is_exercise
from halfstep.check.script.flow.sources import latest
from halfstep.check.script.objects.expressions import arguments_of, conditions_of, options_of
from halfstep.check.script.objects.formats import SIXTEEN_BIT, VariableCast, base_of, cast_formats, passed_for
from halfstep.check.script.objects.lifted import listed_models
from halfstep.check.script.objects.values import argument, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.trained.variable_casts import casts_in

__all__ = ["RULES", "is_copied"]

_EVALUATES = regex(r"^_*(run_|do_|log_)?(eval|valid|test|infer|sampl|generat)", re.IGNORECASE)
_COPY = regex(r"copy|(^|[._])ema", re.IGNORECASE)
_UNWRAPS = "unwrap_model_for_generation"
_PIPELINE = regex(r"pipe|model|unet|transformer", re.IGNORECASE)
_VALIDATOR = regex(r"(Validator|Evaluator)$")
_TRAINER_MODEL = regex(r"trainer\.([\w.]*\.)?(model|ema|net|module)$")
_STORED, _LOW = regex(r"\.dtype\b"), regex(r"torch\.(b?float16|half)\b")
_ENGINE = """\
import torch
def train_one_epoch(model, loader, optimizer):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    {half}
    for x, y in loader:
        metric.update(model(x.half()), y)
{restore}"""
_PREPARED = """\
import torch
from accelerate import Accelerator
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
accelerator = Accelerator(mixed_precision="fp16")
unet = UNet2DConditionModel.from_pretrained(name, subfolder="unet")
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-5)
unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
for epoch in range(10):
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_fn(unet(x), y))
        optimizer.step()
{validate}    pipeline = StableDiffusionPipeline.from_pretrained(name, unet={unet}).to("cuda")
    pipeline("a photo of a cat").images[0].save(f"{{epoch}}.png")
"""
_LAST = regex(
    r"last|final|end\b|done|finish|(num|max|total)_?(epoch|step|iter)|n_epochs|best|[=>]= [\w.]*\b(epochs|steps|iters)\b",
    re.IGNORECASE,
)


class EvaluationHalvesModel(ScriptRule):
    """An evaluation casts the model in training to 16 bits in place."""

    code = "HS137"
    name = "evaluation-halves-model"
    severity = "warning"
    reason = (
        "`model.half()` changes the module itself, not a copy. After an evaluation during training the next epoch trains float16 weights: a "
        "GradScaler raises ValueError: Attempting to unscale FP16 gradients, and a plain optimizer loses small updates. Casting back with "
        "`float()` does not restore the bits that were rounded away: each evaluation then rounds the weights of the run to 16 bits."
    )
    bad = (
        _ENGINE.format(half="model.half()", restore=""),
        _ENGINE.format(half="model.half()", restore="    model.float()\n"),
        _PREPARED.format(validate="", unet="accelerator.unwrap_model(unet).to(torch.float16)"),
        _PREPARED.format(validate="    unet.half()\n", unet="accelerator.unwrap_model(unet)"),
        _PREPARED.format(validate="", unet="accelerator.unwrap_model(unet)").replace(
            '.to("cuda")', '.to("cuda", torch.float16)'
        ),
    )
    good = (
        _ENGINE.format(half="model = copy.deepcopy(model).half()", restore=""),
        _ENGINE.format(half="state = model.state_dict()", restore=""),
        _PREPARED.format(validate="", unet="accelerator.unwrap_model(unet)"),
        _PREPARED.format(validate="", unet="copy.deepcopy(accelerator.unwrap_model(unet)).half()"),
        _PREPARED.format(validate="    vae.half()\n", unet="accelerator.unwrap_model(unet)"),
        _PREPARED.format(
            validate="    if stop:\n        unet.half()\n        break\n", unet="accelerator.unwrap_model(unet)"
        ),
    )
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.half",
        "https://github.com/huggingface/diffusers/pull/13895",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """In-place casts, in an evaluation, of the model that the file trains."""
        trains = {e.function for e in script.events("backward", "owned_backward")}
        for cast in _unwrapped_for_generation(script):
            yield self._report(script, cast, " or ".join(sorted(cast.formats & SIXTEEN_BIT)), None)
        owned = list(_owned_by_trainer(script))
        for cast, back in owned:
            yield self._report(script, cast, " or ".join(sorted(cast.formats & SIXTEEN_BIT)), back)
        if is_exercise(script) or not trains:
            return
        casts = [c for c in casts_in(script.outline) if _is_evaluation(c.function) and c.function not in trains]
        for cast in (c for c in casts if all(c.call is not other.call for other, _ in owned)):
            low = cast.formats & SIXTEEN_BIT
            if low and _is_trained(script, cast, trains) and not _returns_dtype(script, cast):
                yield self._report(script, cast, " or ".join(sorted(low)), _cast_back(cast, casts))
        for cast, model, upcast in _shared_with_pipeline(script):
            yield self.finding(
                script.where(cast.call),
                f"this casts `{cast.key}` to {' or '.join(sorted(cast.formats & SIXTEEN_BIT))} in place, and with it `{model}` in training, whose weights "
                f"are cast to float32 at {script.at(upcast)}: with fp16 the next step raises ValueError: Attempting to unscale FP16 gradients",
                instead=f"move `{cast.key}` to the device without a dtype",
            )
        for cast, back in _lowered_for_pipeline(script):
            if not cast.formats & SIXTEEN_BIT or not _is_trained(script, cast, trains):
                yield self._report(script, cast, "another dtype", back)
        every = list(casts_in(script.outline))
        in_loop = list(_lowered_in_loop(script))
        known = {cast.call for cast in in_loop}
        for cast in (*in_loop, *(c for c in _rounded_in_loop(script, every) if c.call not in known)):
            back = _cast_back(cast, every)
            effect = "the next steps train 16-bit weights"
            if back is not None:
                effect = f"the cast back to float32 ({script.at(back)}) does not restore the bits"
            yield self.finding(
                script.where(cast.call),
                f"this casts `{cast.key}` to {' or '.join(sorted(cast.formats & SIXTEEN_BIT))} in place inside the loop that trains it: {effect}",
                instead="cast a copy, copy.deepcopy(model).half(), or use autocast",
            )

    def _report(self, script: Script, cast: VariableCast, low: str, back: ast.Call | None) -> Finding:
        after = (
            f"`{cast.function.name}` does not cast it back: if it is the model in training, its next epoch has 16-bit weights"
            if back is None
            else f"the cast back to float32 ({script.at(back)}) does not restore the bits: each evaluation rounds the weights in training"
        )
        return self.finding(
            script.where(cast.call),
            f"this casts `{cast.key}` to {low} in place, and {after}",
            instead="evaluate a copy, copy.deepcopy(model).half(), or use autocast",
        )


def _is_evaluation(function: Function) -> bool:
    return bool(_EVALUATES.search(function.name))


def _is_trained(script: Script, cast: VariableCast, trains: set[Function]) -> bool:
    """Whether a cast changes what the file trains: a parameter that its caller passes, or an attribute of the same object."""
    function, key = cast.function, cast.key
    if key in function.params:
        passed = [text_of(value) for value, _ in passed_for(script.outline, key, function)]
        if passed and all(_COPY.search(text) for text in passed):
            return False
        return any(key in f.params for f in trains) and not is_copied(function, key)
    if not key.startswith("self.") or _COPY.search(key) or not any(f.cls == function.cls for f in trains):
        return False
    methods = script.outline.classes.get(function.cls, {}).values()
    text = " ".join(ast.unparse(method.node) for method in methods)
    return bool(re.search(rf"\b{re.escape(key)}\.(train|parameters|named_parameters)\(", text))


def _returns_dtype(script: Script, cast: VariableCast) -> bool:
    """Whether a cast returns a model to the dtype that it had: `if dtype == torch.float16: model.half()`, after `dtype = p.dtype`."""
    for text, is_true in conditions_of(script.outline, cast.call):
        bound = (
            script.outline.lookup(text.partition(" ")[0], cast.function)
            if text.partition(" ")[0].isidentifier()
            else []
        )
        tests = [text, *(text_of(b.value) for b in bound if b.value is not None)]
        if is_true and any(_STORED.search(test) for test in tests) and any(_LOW.search(test) for test in tests):
            return True
    return False


def _cast_back(cast: VariableCast, casts: list[VariableCast]) -> ast.Call | None:
    """The cast by which the same function returns the model to float32."""
    back = (c.call for c in casts if c.function is cast.function and c.key == cast.key and "float32" in c.formats)
    return next((call for call in back if _end(call) > _end(cast.call)), None)


def _end(call: ast.Call) -> tuple[int, int]:
    """Where a call ends: `float()` of `model.half().float()` after `half()`."""
    return call.end_lineno or call.lineno, call.end_col_offset or 0


def _lowered_for_pipeline(script: Script) -> Iterator[tuple[VariableCast, ast.Call]]:
    """The first cast of a pipeline or model in an evaluation that ends with `cast_training_params(..., dtype=torch.float32)`.

    The pipeline shares its modules with the loop, and only weights that were lowered need that function of diffusers.
    """
    outline = script.outline
    ends: dict[Function, ast.Call] = {}
    for back, function in outline.calls.get("cast_training_params", ()):
        if _is_evaluation(function) and "float32" in text_of(back):
            ends.setdefault(function, back)
    for function, back in ends.items():
        calls = [call for call, f in outline.calls.get("to", ()) if f is function and call.lineno < back.lineno]
        for call in sorted(calls, key=lambda c: c.lineno):
            key = key_of(base_of(call))
            if _PIPELINE.search(key) and any("dtype" in text_of(value) for value in arguments_of(call)):
                yield VariableCast(call, function, key, cast_formats(outline, call, function)), back
                break


def _shared_with_pipeline(script: Script) -> Iterator[tuple[VariableCast, str, ast.Call]]:
    """Casts of a pipeline that a training loop creates from its own model, after `cast_training_params` of that model.

    The pipeline has the module itself. Each comes with the model and that call.
    """
    outline = script.outline
    upcasts = [site for site in outline.calls.get("cast_training_params", ()) if not _is_evaluation(site.function)]
    reported: set[ast.Call] = set()
    for cast in casts_in(outline) if upcasts else ():
        is_restored = any(site.function is cast.function for site in outline.calls["cast_training_params"])
        if not cast.formats & SIXTEEN_BIT or (is_restored and _is_evaluation(cast.function)):
            continue
        for place, caller, key in _places_of(script, cast):
            loop = next((n for n in script.above(place) if isinstance(n, (ast.For, ast.While))), None)
            own = [u for u, function in upcasts if function is caller]
            if loop is None or not own or any(n in own for n in ast.walk(loop)):
                continue  # after the training, or the weights are cast back in the loop
            bound = [b for b in outline.bindings.get(key, ()) if any(n is b.node for n in ast.walk(loop))]
            for model in (m for b in bound if isinstance(b.value, ast.Call) for m in _components(b.value)):
                upcast = next((u for u in own if u.args and model in listed_models(outline, u.args[0], caller)), None)
                if upcast is not None and cast.call not in reported:
                    reported.add(cast.call)
                    yield cast, model, upcast


def _lowered_in_loop(script: Script) -> Iterator[VariableCast]:
    """Casts of a float32 model inside the loop that trains it, by itself or as a part of a pipeline that the loop creates."""
    outline, training = script.outline, script.training
    lineages = [
        training.model(*owner) for by, function in training.optimizers for owner in training.owners(by, function)
    ]
    reported = {tie.cast.node for tie in training.by_optimizers}
    sites = [site for name in ("half", "bfloat16", "to") for site in outline.calls.get(name, ())] if lineages else []
    for call, function in sites:
        formats = cast_formats(outline, call, function)
        loop = _training_loop(script, call) if formats & SIXTEEN_BIT and not _is_evaluation(function) else None
        if loop is None or call in reported:
            continue
        base, inside = base_of(call), set(ast.walk(loop))
        bound = [b.value for b in outline.bindings.get(key_of(base), ()) if b.node in inside]
        if any(_COPY.search(text_of(v)) for v in (base, *bound) if v is not None):
            continue
        created = [v for v in (base, *map(base_of, filter(None, bound))) if isinstance(v, ast.Call)]
        parts = [ast.Name(key, ast.Load()) for v in created for key in _components(v) if key.isidentifier()]
        for model in (base, *parts):
            lineage = training.model(model, function)
            same = [own for own in lineages if own.places.keys() & lineage.places.keys()]
            is_low = any(c.low and c.node not in inside for own in same for c in own.casts)
            if same and not is_low and not lineage.copied:
                yield VariableCast(call, function, key_of(model) or next(iter(lineage.places))[0], formats)
                break


def _rounded_in_loop(script: Script, casts: list[VariableCast]) -> Iterator[VariableCast]:
    """Casts to 16 bits and back of what a loop trains, whoever creates the optimizer: float32 is what the loop wants."""
    for cast in casts:
        lowers = cast.formats <= SIXTEEN_BIT and not _is_evaluation(cast.function) and not _COPY.search(cast.key)
        back = _cast_back(cast, casts) if lowers else None
        loop = _training_loop(script, cast.call) if back is not None else None
        if loop is None or _training_loop(script, back or cast.call) is not loop:
            continue
        inside = set(ast.walk(loop))
        methods = [site.call.func for name in ("train", "parameters") for site in script.outline.calls.get(name, ())]
        is_module = any(f in inside and isinstance(f, ast.Attribute) and key_of(f.value) == cast.key for f in methods)
        bound = [b.value for b in script.outline.lookup(cast.key, cast.function) if b.node in inside]
        is_same = all(value is not None and key_of(base_of(value)) == cast.key for value in bound)
        runs = [e for e in script.events("forward") if e.node in inside and not e.inside("no_grad")]
        if is_module and is_same and any(e.local.subject == cast.key and e.function is cast.function for e in runs):
            yield cast


def _training_loop(script: Script, cast: ast.Call) -> ast.AST | None:
    """The loop around a cast that goes on to train: it contains a backward, and neither leaves nor ends after the cast."""
    guards = conditions_of(script.outline, cast)
    if any(_LAST.search(text) for text, _ in guards):
        return None
    backs = {node for e in script.events("backward", "owned_backward") for node in (*e.roots, e.node)}
    inner: ast.AST = cast
    for outer in script.above(cast):
        block = next(
            (
                b
                for b in (getattr(outer, "body", []), getattr(outer, "orelse", []))
                if isinstance(b, list) and inner in b
            ),
            [],
        )
        if any(isinstance(s, (ast.Break, ast.Return, ast.Raise)) for s in block):
            return None
        if isinstance(outer, (ast.For, ast.While)) and not backs.isdisjoint(ast.walk(outer)):
            return outer
        inner = outer
    return None


def _places_of(script: Script, cast: VariableCast) -> Iterator[tuple[ast.Call, Function, str]]:
    """Where a cast happens, with the name of what is cast there: at itself, or at the calls that pass the parameter that it casts."""
    if cast.key not in cast.function.params:
        yield cast.call, cast.function, cast.key
        return
    for call, caller in script.outline.calls.get(cast.function.name, ()):
        if script.outline.call_target(call, caller) is cast.function:
            yield call, caller, key_of(argument(call, cast.function.params.index(cast.key), cast.key))


def _components(pipeline: ast.Call) -> Iterator[str]:
    """The models that a call which creates a pipeline receives by name: `unet=unwrap_model(unet)`."""
    for keyword in pipeline.keywords if "Pipeline" in text_of(pipeline.func) else ():
        value = keyword.value
        is_unwrapped = isinstance(value, ast.Call) and "unwrap" in text_of(value.func) and len(value.args) == 1
        key = key_of(value.args[0] if isinstance(value, ast.Call) and is_unwrapped else value)
        if keyword.arg and key:
            yield key


def _unwrapped_for_generation(script: Script) -> Iterator[VariableCast]:
    """The casts of what TRL's `unwrap_model_for_generation` returns in a Trainer: the model in training, not a copy."""
    outline = script.outline
    blocks = [outline.parents.get(call) for call, _ in outline.calls.get(_UNWRAPS, ())]
    names = {key_of(b.optional_vars): b for b in blocks if isinstance(b, ast.withitem) and b.optional_vars is not None}
    reported: set[Function] = set()
    for cast in sorted(casts_in(outline), key=lambda c: c.call.lineno) if names else ():
        trains = outline.classes.get(cast.function.cls, {}).keys() & {"compute_loss", "training_step"}
        inner = names.get(cast.key) in {item for n in script.above(cast.call) for item in getattr(n, "items", ())}
        if trains and inner and cast.formats & SIXTEEN_BIT and cast.function not in reported:
            reported.add(cast.function)
            yield cast


def _owned_by_trainer(script: Script) -> Iterator[tuple[VariableCast, ast.Call | None]]:
    """The casts, in a validator, of the model of the trainer that calls it: `model = trainer.ema.ema or trainer.model`."""
    if not any("trainer" in function.params for function in script.outline.functions):  # most files
        return
    casts = [c for c in casts_in(script.outline) if "trainer" in c.function.params and _validates(c.function)]
    for cast in casts:
        bound = latest(script.outline, cast.key, cast.function, cast.call.lineno) if cast.key.isidentifier() else []
        models = [text_of(option) for b in bound if b.value is not None for option in options_of(b.value)] or [cast.key]
        if cast.formats & SIXTEEN_BIT and all(_TRAINER_MODEL.match(text) for text in models):
            yield cast, _cast_back(cast, casts)


def _validates(function: Function) -> bool:
    return _is_evaluation(function) or bool(_EVALUATES.search(function.cls) or _VALIDATOR.search(function.cls))


def is_copied(function: Function, key: str) -> bool:
    """Whether a function replaces its parameter before it casts it: `model = copy.deepcopy(model)`."""
    for node in ast.walk(function.node):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == key for t in node.targets):
            text = ast.unparse(node.value)
            if "copy" in text or not re.match(rf"{re.escape(key)}\b", text):
                return True
    return False


RULES: tuple[type[Rule], ...] = (EvaluationHalvesModel,)
