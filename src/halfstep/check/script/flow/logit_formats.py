"""The formats of logits: cast explicitly, or the output of a model whose weights have 16 bits, outside autocast."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.flow.sources import (
    RESHAPES,
    element_of,
    is_move,
    is_parts,
    iterated,
    keeps_format,
    latest,
    selected,
)
from halfstep.check.script.objects.formats import SIXTEEN_BIT, keyword_of, passed_for, returned_by
from halfstep.check.script.objects.loading import stored_low
from halfstep.check.script.objects.modules import attribute_values, created_classes
from halfstep.check.script.objects.outputs import MODEL_NAME, in_no_grad, is_product, keeps_dtype, runs_in_autocast
from halfstep.check.script.objects.values import UNKNOWN, constant, text_of
from halfstep.check.script.objects.weights import Cast, Lineage, cast_formats, conditions_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline, last_name_of
from halfstep.check.script.syntax.scope import Binding
from halfstep.check.script.trained.variable_casts import conditions_of_cast

__all__ = ["logit_formats"]

MAX_STEPS = 12  # operations, assignments and calls between a model and its loss
# These convert the outputs of a prepared model to float32, or run autocast around it.
_FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning", "deepspeed", "lightning_fabric")
_HEADS = frozenset({"lm_head", "output_head"})
# Methods and outputs of models such as CLIP, in the dtype of their weights.
_EMBEDS = frozenset({"get_image_features", "get_text_features", "get_audio_features", "encode_image", "encode_text"})
_OUTPUTS = frozenset({"logits", "logits_per_image", "logits_per_text", "image_embeds", "text_embeds"})
_PRODUCTS = frozenset({"torch.matmul", "torch.mm", "torch.bmm", "torch.nn.functional.linear"})
_SCALE = regex(r"(^|[._])logit_scale(\.exp\(\))?$")
_CREATED = {"load", "checkpoint", "constructor"}  # how a language model comes into a script
_LANGUAGE_MODEL = regex(r"(ForCausalLM|LMHeadModel|ModelLM)(\.\w+)?$")
# A cast there is for something else than training.
_ASIDE = regex(r"eval|infer|test|sampl|generat|export|deploy|save|onnx|valid|serve|predict|bench|convert|debug")
_NOTHING: frozenset[str] = frozenset()


def logit_formats(
    script: Script, node: ast.expr, function: Function, line: int, depth: int = MAX_STEPS
) -> frozenset[str]:
    """The formats of logits, as far as the text decides them; with others than 16-bit ones, only some runs have these."""
    outline = script.outline
    while depth:
        depth -= 1
        if isinstance(node, ast.Subscript) and _is_part(node):
            node = node.value
        elif isinstance(node, ast.BinOp) and (operand := keeps_format(node) or _unscaled(node)) is not None:
            node = operand
        elif (factors := _factors(outline, node)) is not None:
            # A product raises where its factors differ in dtype, so that one of them decides.
            options = [logit_formats(script, factor, function, line, depth) for factor in factors]
            return options[0] or options[1]
        elif isinstance(node, ast.Call) and outline.names.full(node.func) == "torch.nn.functional.normalize":
            if not node.args:
                break
            node = node.args[0]
        elif (inner := selected(outline, node)) is not None:
            node = inner
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            formats = cast_formats(outline, node, function)
            if formats:
                return formats
            if key_of(node.func.value) == "self" and (formats := _layer_formats(script, node, function)):
                return formats
            if node.func.attr in _HEADS | _EMBEDS:
                return _head_formats(script, node, node.func.value, function)
            if node.func.attr not in RESHAPES and not is_move(outline, node, function):
                return _called_formats(script, node, function) or _returned_formats(script, node, function, None, depth)
            node = node.func.value
        elif isinstance(node, ast.Call):
            return _called_formats(script, node, function) or _returned_formats(script, node, function, None, depth)
        elif isinstance(node, ast.Attribute) and node.attr in {"T", "mT"}:
            node = node.value
        elif isinstance(node, ast.Attribute) and node.attr in _OUTPUTS:
            return _output_formats(script, node.value, function, line)
        elif isinstance(node, ast.Subscript) and constant(node.slice) in ("logits", 0):
            # `outputs["logits"]`; without labels the logits are also the first of what transformers returns.
            return _output_formats(script, node.value, function, line)
        else:
            break
    name = key_of(node)
    if not name.isidentifier() or not depth:
        return _NOTHING
    bindings = latest(outline, name, function, line)
    if bindings:
        return _merged([_assigned_formats(script, b, function, depth) for b in bindings])
    if name in function.params:
        sites = [(v, f) for v, f in passed_for(outline, name, function) if not _without_gradients(script, v, f)]
        passed = [logit_formats(script, v, f, v.lineno, depth) for v, f in sites]
        return passed[0] if passed and all(p == passed[0] for p in passed) else _NOTHING
    return _NOTHING


def _factors(outline: Outline, node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """The two factors of a matrix product: `image @ text.t()`, `torch.matmul(image, text.T)`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return node.left, node.right
    is_product = isinstance(node, ast.Call) and outline.names.full(node.func) in _PRODUCTS
    return (node.args[0], node.args[1]) if isinstance(node, ast.Call) and is_product and len(node.args) > 1 else None


def _unscaled(node: ast.BinOp) -> ast.expr | None:
    """What a division by its own norm, or the scale of a model such as CLIP, leaves in its format: `x / x.norm(dim=-1)`."""
    left, right = text_of(node.left), text_of(node.right)
    if isinstance(node.op, ast.Div) and right.startswith(
        (f"{left}.norm(", f"torch.norm({left}", f"torch.linalg.norm({left}")
    ):
        return node.left
    if isinstance(node.op, ast.Mult):
        return node.right if _SCALE.search(left) else node.left if _SCALE.search(right) else None
    return None


def _without_gradients(script: Script, value: ast.expr, function: Function) -> bool:
    """Whether logits are passed, or were computed, where no gradients are: those of a reference, in its own format."""
    key = key_of(value)
    bindings = latest(script.outline, key, function, value.lineno) if key.isidentifier() else []
    computed = [b.value for b in bindings]
    return in_no_grad(script, value) or (
        bool(computed) and all(v is not None and in_no_grad(script, v) for v in computed)
    )


def _is_part(node: ast.Subscript) -> bool:
    """Whether a subscript selects rows of logits, not the logits among the outputs of a model."""
    if not isinstance(node.slice, ast.Constant):
        return True
    inner = node.value
    return isinstance(node.slice.value, int) and isinstance(inner, ast.Attribute) and inner.attr == "logits"


def _assigned_formats(script: Script, binding: Binding, function: Function, depth: int) -> frozenset[str]:
    rows = iterated(binding)
    value = rows if rows is not None else element_of(binding)
    if value is not None and is_parts(value):
        return logit_formats(script, value, function, getattr(binding.node, "lineno", 0), depth)
    is_call = isinstance(value, ast.Call) and value is binding.value
    is_first = binding.index in {None, 0} or "logit" in binding.key or rows is not None or not is_call
    if is_call and isinstance(value, ast.Call) and binding.index is not None:
        formats = _returned_formats(script, value, function, binding.index, depth)
        if formats:
            return formats
    if value is None or not is_first:
        return _NOTHING
    return logit_formats(script, value, function, getattr(binding.node, "lineno", 0), depth)


def _returned_formats(
    script: Script, call: ast.Call, function: Function, index: int | None, depth: int
) -> frozenset[str]:
    """The format of what a function of this file returns, or of one element of the tuple that it returns."""
    target = script.outline.call_target(call, function)
    if target is None or target is function or target.name == "__init__" or not depth:
        return _NOTHING
    values = list(returned_by(target))
    if index is not None:
        values = [v.elts[index] for v in values if isinstance(v, ast.Tuple) and index < len(v.elts)]
    if not values or any(in_no_grad(script, value) for value in values):
        return _NOTHING
    return _merged([logit_formats(script, value, target, value.lineno, depth - 1) for value in values[:MAX_STEPS]])


def _merged(options: list[frozenset[str]]) -> frozenset[str]:
    """The formats of several runs; a run that the text does not decide makes the others uncertain."""
    formats = _NOTHING.union(*options)
    return formats | {UNKNOWN} if formats & SIXTEEN_BIT and not all(options) else formats


def _output_formats(script: Script, node: ast.expr, function: Function, line: int) -> frozenset[str]:
    """The format of `model(...).logits`, for a model that transformers loads in 16 bits and that runs without autocast."""
    outline = script.outline
    if outline.names.uses(*_FRAMEWORKS) or _has_trainer(outline):
        return _NOTHING
    key = key_of(node)
    if key.isidentifier():
        bindings = latest(outline, key, function, line)
        value = bindings[0].value if bindings and bindings[0].index is None else None
        node = value if value is not None else node
    if not isinstance(node, ast.Call) or not key_of(node.func) or runs_in_autocast(script, node, function):
        return _NOTHING
    model = key_of(node.func)
    passed = list(passed_for(outline, model, function)) if model in function.params else []
    if passed:  # each caller has its own model: the policy or the reference
        return _merged([_loaded_formats(script, value, caller) for value, caller in passed])
    return _loaded_formats(script, node.func, function) or _formats_elsewhere(script, model, function)


def _formats_elsewhere(script: Script, model: str, function: Function) -> frozenset[str]:
    """The format of a model that another file passes, where each function here that loads one of that name uses 16 bits."""
    if model not in function.params or _has_callers(script.outline, function):
        return _NOTHING
    others = list(
        dict.fromkeys(b.function for b in script.outline.bindings.get(model, ()) if b.function is not function)
    )
    loaded = [_loaded_formats(script, ast.Name(model, ast.Load()), other) for other in others[:MAX_STEPS]]
    is_low = bool(loaded) and all(formats and formats <= SIXTEEN_BIT for formats in loaded)
    return _NOTHING.union(*loaded) | {UNKNOWN} if is_low else _NOTHING


def _has_callers(outline: Outline, function: Function) -> bool:
    return any(outline.call_target(call, caller) is function for call, caller in outline.calls.get(function.name, ()))


def _head_formats(script: Script, call: ast.Call, model: ast.expr, function: Function) -> frozenset[str]:
    """The format of `model.lm_head(hidden)`: a layer that no framework wraps, in the dtype of the loaded model."""
    outline = script.outline
    created = [call for call, _ in outline.calls.get("Accelerator", ())]
    mixed = any(k.arg in {None, "mixed_precision"} and constant(k.value) != "no" for c in created for k in c.keywords)
    wrapped = outline.names.uses(*(name for name in _FRAMEWORKS if name != "accelerate")) or mixed
    in_region = runs_in_autocast(script, call, function)
    if in_region or wrapped or any(name.endswith("Trainer") for name in (*outline.calls, *outline.bases)):
        return _NOTHING
    while (
        isinstance(model, ast.Attribute)
        and model.attr in {"module", "model", "base_model"}
        and key_of(model) != "self.model"
    ):
        model = model.value
    return _loaded_formats(script, model, function)


def _layer_formats(script: Script, call: ast.Call, function: Function) -> frozenset[str]:
    """The format of `self.lm_head(hidden)` in a module of this file: a layer of its own, or the head of a model it receives."""
    outline, key = script.outline, key_of(call.func)
    values = attribute_values(outline, key, function) if function.cls else []
    # A file without a backward may define the model for inference, or for another file that trains it under autocast.
    if not values or "backward" not in outline.calls or outline.names.uses(*_FRAMEWORKS) or _has_trainer(outline):
        return _NOTHING
    # One layer may be cast back on its own: `model.lm_head.float()`.
    if re.search(rf"\b{key[5:]}\b[\w.]*\.(float|to|double)\(", script.source.text) or runs_in_autocast(
        script, call, function
    ):
        return _NOTHING
    if is_product(script, call, function):
        instances = list(_instances(outline, function.cls))[:MAX_STEPS]
        return _merged([_weight_formats(script, site, call, function) for site in instances])
    first = outline.classes.get(function.cls, {}).get("__init__")
    heads = [v for v in values if isinstance(v, ast.Attribute) and v.attr in _HEADS and isinstance(v.value, ast.Name)]
    names = {v.value.id for v in heads if isinstance(v.value, ast.Name)}
    if first is None or len(heads) != len(values) or not names <= set(first.params):
        return _NOTHING
    passed = [site for name in sorted(names) for site in passed_for(outline, name, first)]
    return _merged([_loaded_formats(script, value, caller) for value, caller in passed])


def _instances(outline: Outline, cls: str) -> Iterator[tuple[ast.expr, Function]]:
    """The variables that objects of a class are assigned to: `model = GPT(config).to(device)`."""
    for call, function in outline.calls.get(cls, ()):
        node: ast.AST = call
        while isinstance(parent := outline.parents.get(node), (ast.Attribute, ast.Call)):
            node = parent
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and key_of(parent.targets[0]):
            yield parent.targets[0], function


def _weight_formats(
    script: Script, site: tuple[ast.expr, Function], call: ast.Call, function: Function
) -> frozenset[str]:
    """The format of the weights of a model that is cast as a whole, and whose forward calls a layer."""
    lineage = script.training.model(*site)
    casts = lineage.casts
    if lineage.is_restored or not casts or not all(c.is_certain and c.form == "cast" for c in casts):
        return _NOTHING
    if not all(_is_for_training(script.outline, c, call, function) for c in casts):
        return _NOTHING
    formats = _NOTHING.union(*(c.formats for c in casts))
    return formats | {UNKNOWN} if any(conditions_of_cast(script.outline, c.node) for c in casts) else formats


def _loaded_formats(script: Script, model: ast.expr, function: Function, *, is_adapted: bool = False) -> frozenset[str]:
    """The dtype of a model that transformers loads, if the text decides it."""
    outline = script.outline
    lineage = script.training.model(model, function)
    wrapped = [c for c in lineage.creations if last_name_of(c.node.func) == "get_peft_model" and c.node.args]
    if wrapped and not is_adapted and not lineage.casts and wrapped == lineage.creations:
        # The adapters are float32, and the head stays as the model was loaded.
        bases = [_loaded_formats(script, c.node.args[0], c.function, is_adapted=True) for c in wrapped]
        return _merged(bases)
    # Also a project's own copy of such a class: `from models.qwen import Qwen2ForCausalLM`.
    loads = [c for c in lineage.casts if c.form in _CREATED and _is_language_model(outline, c)]
    casts = [c for c in lineage.casts if c.form == "cast"]
    is_open = lineage.is_restored or _is_prepared(outline, lineage)
    if not loads or is_open or len(lineage.casts) != len(loads) + len(casts):
        return _NOTHING
    if casts:
        decided = all(c.is_certain and not conditions_of_cast(outline, c.node) for c in casts)
        return _NOTHING.union(*(c.formats for c in casts)) if decided else _NOTHING
    merged = _NOTHING.union(*(_load_formats(script, c) for c in loads))
    return merged if merged <= SIXTEEN_BIT | {"float32"} else _NOTHING


def _load_formats(script: Script, load: Cast) -> frozenset[str]:
    if load.form == "checkpoint" and keyword_of(script.outline, load.node, load.function, "quantization_config"):
        # Without a dtype, bitsandbytes loads the layers that it does not quantize, such as the head, in float16.
        return frozenset({"float16", "float32"})
    return SIXTEEN_BIT if stored_low(script.outline, load) and load.form == "load" else load.formats


def _is_prepared(outline: Outline, lineage: Lineage) -> bool:
    """Whether `prepare_model_for_kbit_training` casts the head of a quantized model to float32."""
    if any("kbit" in text_of(c.node.func) for c in lineage.creations):
        return True
    sites = [site for name, calls in outline.calls.items() if "kbit" in name for site in calls]
    keys = [(key_of(value), f) for call, f in sites for value in (*call.args, *(k.value for k in call.keywords))]
    return any(lineage.has(key, f) for key, f in keys)


def _is_language_model(outline: Outline, cast: Cast) -> bool:
    is_library = outline.names.full(cast.node.func).startswith("transformers.") and cast.form != "constructor"
    return is_library or bool(_LANGUAGE_MODEL.search(text_of(cast.node.func)))


def _called_formats(script: Script, call: ast.Call, function: Function) -> frozenset[str]:
    """The format of `model(...)`, for a model that is cast to 16 bits and whose class, where it is here, casts nothing back."""
    outline = script.outline
    if outline.names.uses(*_FRAMEWORKS) or not key_of(call.func) or runs_in_autocast(script, call, function):
        return _NOTHING
    lineage = script.training.model(call.func, function)
    own = [c for c in lineage.creations if created_classes(outline, c.node)]
    if lineage.is_restored or not lineage.casts or any(not keeps_dtype(script, c) for c in own):
        return _NOTHING
    is_known = bool(lineage.creations) and all(keeps_dtype(script, c) for c in lineage.creations)
    # An option may choose the format: `model.to({"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype])`.
    conditional = any(not c.is_certain or conditions_of_cast(outline, c.node) for c in lineage.casts)
    formats = _NOTHING.union(*(c.formats for c in lineage.casts))
    if not all(c.low and c.formats <= SIXTEEN_BIT | {"float32"} for c in lineage.casts):
        return _NOTHING
    if is_known and not conditional:
        return formats
    is_plain = MODEL_NAME.search(key_of(call.func)) and not outline.names.full(call.func)
    if (
        not is_plain
        or _has_trainer(outline)
        or not all(_is_for_training(outline, c, call, function) for c in lineage.casts)
    ):
        return _NOTHING
    return formats | {UNKNOWN}


def _has_trainer(outline: Outline) -> bool:
    """Whether a Trainer or Accelerator of a library, or a class derived from one, may run the model under autocast."""
    bases = [key_of(base) for every in outline.bases.values() for base in every]
    return any(
        name.endswith(("Trainer", "Accelerator")) and name not in outline.classes for name in (*outline.calls, *bases)
    )


def _is_for_training(outline: Outline, cast: Cast, call: ast.Call, function: Function) -> bool:
    """Whether a cast of a model comes before a call of it, and is for nothing else, such as an export."""
    guards = [text for text, is_true in conditions_of(outline, cast.node) if is_true]
    aside = any(_ASIDE.search(text.lower()) for text in (*guards, cast.function.name))
    later = cast.function is function and cast.node.lineno > call.lineno
    return cast.form == "cast" and not aside and not later
