"""Which variables are models with 16-bit weights: where each model comes from, and what was cast on the way.

A model passes through many names: a function loads and returns it, `main` casts it, a wrapper shards it, and the optimizer
receives `ddp.parameters()`. `Lineage` walks back from the last name to the calls that created the model, through
assignments, wrappers, parameters and return values of the same file, and collects every cast and every load with a dtype.
Modules are cast in place, so `model.half()` counts under any of the names that the walk visits.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from halfstep.check.regex import regex
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.objects.expressions import (
    ADAPTER_FLAG,
    asks_for_adapters,
    conditions_of,
    is_adapter_branch,
    is_after_training,
    is_quantized_with,
    may_be_none,
)
from halfstep.check.script.objects.formats import (
    AUTO,
    SAME_MODEL,
    SIXTEEN_BIT,
    VariableCast,
    base_of,
    cast_formats,
    entries_named,
    formats_of,
    is_written,
    keyword_of,
    keywords_of,
    passed_for,
    property_values,
    returned_by,
)
from halfstep.check.script.objects.parameters import is_cast_with, is_merged, may_freeze, parts_of
from halfstep.check.script.objects.tensors import created_formats, low_layer, makes_model, part_dtype
from halfstep.check.script.objects.values import UNKNOWN, argument, constant, text_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline, last_name_of
from halfstep.check.script.trained.library_models import library_formats
from halfstep.check.script.trained.places import (
    LOADS,
    MAX_PLACES,
    bindings_of,
    is_loaded,
    is_part_of_model,
    passed_as,
    place_of,
)
from halfstep.check.script.trained.variable_casts import casts_in, swept_model

__all__ = ["Cast", "Lineage", "VariableCast", "base_of", "cast_formats", "casts_in", "conditions_of", "trace_model"]

_WRAPPERS = {
    "compile", "DataParallel", "DistributedDataParallel", "DDP", "FSDP", "FullyShardedDataParallel", "fully_shard", "replicate",
    "prepare", "prepare_model", "setup", "setup_module", "deepcopy", "checkpoint_wrapper", "parallelize_module", "unwrap_model",
}  # fmt: skip
_SAME_MODEL = SAME_MODEL | {"merge_and_unload"}
_QUANTIZED = ("quantization_config", "load_in_8bit", "load_in_4bit", "gptq_config")
_MODEL_CLASS = regex(r"Model|For[A-Z]|LM|Transformer|UNet|ControlNet|VAE|Autoencoder|Pipeline")
# These classes read a configuration, a tokenizer or the like.
_OTHER_CLASS = regex(r"Tokenizer|Processor|Config$|Scheduler|FeatureExtractor|Dataset|Adapter|Peft|Lora")
FREEZE_FLAG = regex(r"^(?!not |.* not ).*(freeze|frozen|tune_|_only)", re.IGNORECASE)
_OPTION = regex(r"^(\w*args|opts?|\w*cfg|\w*config|flags|FLAGS|hparams)\.\w[\w.]*$")
_PART = regex(r"^(?!self\.)\w+\.([\w.]+\.)?(wte|wpe|\w*embed\w*|\w*head)$")  # layers that are cast alone


@dataclass(frozen=True, eq=False)
class Cast:
    """A call that decides the dtype of a model's weights."""

    node: ast.Call
    function: Function
    key: str  # the variable that is cast or assigned; "" if it has no name
    formats: frozenset[str]
    form: str  # cast, load, constructor, factory (a function of another file), or checkpoint: a load without a dtype
    dtype: ast.expr | None = None  # of a load, perhaps one of several in `**options`

    @property
    def low(self) -> frozenset[str]:
        """The 16-bit formats it may choose."""
        return self.formats & SIXTEEN_BIT

    @property
    def may_be_low(self) -> bool:
        """Whether the weights have 16 bits in some run, or with some checkpoint."""
        return bool(self.low) or AUTO in self.formats

    @property
    def is_certain(self) -> bool:
        """Whether the weights have 16 bits in every run."""
        return bool(self.formats) and self.formats <= SIXTEEN_BIT


class Creation(NamedTuple):
    """A call that creates a model."""

    node: ast.Call
    function: Function


@dataclass(eq=False)
class Lineage:
    """The names of one model, and the casts on the way to it."""

    outline: Outline
    places: dict[tuple[str, Function | str], Function] = field(default_factory=dict)
    casts: list[Cast] = field(default_factory=list)
    creations: list[Creation] = field(default_factory=list)  # calls of classes and functions of other files
    loads: list[ast.Call] = field(default_factory=list)  # also those that quantize
    copied: dict[tuple[str, Function | str], ast.Call] = field(default_factory=dict)  # that deepcopy was called on
    is_adapted: bool = False  # quantized, or wrapped with an adapter
    frozen_when: dict[str, None] = field(default_factory=dict)  # options that freeze the model

    def has(self, key: str, function: Function) -> bool:
        """Whether a variable is one of this model's names."""
        return bool(key) and place_of(self.outline, key, function) in self.places

    @property
    def is_restored(self) -> bool:
        """Whether some cast returns the weights to float32 for training."""
        casts = (c for c in self.casts if c.form == "cast" and not c.low and "float32" in c.formats)
        return not all(self._changes_nothing(c) or is_after_training(self.outline, c.node, c.function) for c in casts)

    def is_frozen_by_option(self, node: ast.AST) -> bool:
        """Whether an option such as `args.freeze_backbone` decides what `node` does: without it, the weights are trained."""
        guards = conditions_of(self.outline, node)
        flag = _OPTION if isinstance(node, ast.Call) and "freez" in text_of(node.func) else FREEZE_FLAG
        texts = [text.removesuffix(" is not None") for text, is_true in guards if is_true]
        options = [text for text in texts if flag.search(text) or FREEZE_FLAG.search(text)]
        passed = map(text_of, node.args[:1] if isinstance(node, ast.Call) else [])  # `requires_grad_(not use_lora)`
        options += [text[4:] for text in passed if text.startswith("not ")]
        self.frozen_when.update(dict.fromkeys(options))
        return bool(options)

    def _changes_nothing(self, cast: Cast) -> bool:
        """Whether a cast runs only where no other does, or the dtype is float32 anyway: `if dtype == torch.float32: model.to(dtype)`."""
        guards, low = conditions_of(self.outline, cast.node), [c.node for c in self.casts if c.may_be_low]
        is_other_branch = bool(low) and not any(possible(guards, conditions_of(self.outline, node)) for node in low)
        return is_other_branch or any(is_true and text.endswith("== torch.float32") for text, is_true in guards)


def trace_model(outline: Outline, node: ast.expr, function: Function, casts: tuple[VariableCast, ...]) -> Lineage:
    """The lineage of the model that an expression is; `casts` are those of the whole file, from `casts_in`."""
    lineage = Lineage(outline)
    pending: list[tuple[ast.expr, Function, int | None, str]] = [(node, function, None, key_of(node))]
    while pending and len(lineage.places) < MAX_PLACES:
        value, scope, index, name = pending.pop()
        pending += _flow(lineage, value, scope, index, name)
    visited = {c.node for c in lineage.casts}
    for call, scope, key, formats in casts:
        copy = lineage.copied.get(place_of(outline, key, scope))
        if copy is not None and call.lineno > copy.lineno:
            continue  # the copy was made before
        is_part = bool(_PART.search(key)) and formats <= SIXTEEN_BIT and not may_freeze(outline)
        is_known = lineage.has(key, scope) or (is_part and lineage.has(key.partition(".")[0], scope))
        is_known = is_known or any(is_cast_with(outline, name, call, scope, key) for name, _ in lineage.places)
        if call not in visited and is_known:
            lineage.casts.append(Cast(call, scope, key, formats, "cast"))
    return lineage


def _flow(
    lineage: Lineage, node: ast.expr, function: Function, index: int | None, name: str
) -> Iterator[tuple[ast.expr, Function, int | None, str]]:
    """One step back from a value: what it was made from, each with its function, tuple index and name."""
    outline = lineage.outline
    key = key_of(node)
    if key:
        place = place_of(outline, key, function)
        if place not in lineage.places:
            lineage.places[place] = function
            yield from _origins(outline, key, function)
    elif isinstance(node, ast.IfExp):
        yield node.body, function, index, name
        yield node.orelse, function, index, name
    elif isinstance(node, (ast.Tuple, ast.List)):
        if index is not None and index < len(node.elts):
            yield node.elts[index], function, None, name
    elif isinstance(node, ast.Subscript) and isinstance(position := constant(node.slice), int):
        yield node.value, function, position, name  # `load(name)[0]`
    elif isinstance(node, ast.Call):
        yield from _flow_of_call(lineage, node, function, index, name)


def _flow_of_call(
    lineage: Lineage, call: ast.Call, function: Function, index: int | None, name: str
) -> Iterator[tuple[ast.expr, Function, int | None, str]]:
    outline = lineage.outline
    func = call.func
    last = last_name_of(func)
    target = outline.call_target(call, function)
    is_own = target is not None and target.name != "__init__" and any(True for _ in returned_by(target))
    formats = cast_formats(outline, call, function)
    if formats:
        if formats != {UNKNOWN}:
            lineage.casts.append(Cast(call, function, key_of(base_of(call)) or name, formats, "cast"))
        assert isinstance(func, ast.Attribute)
        yield func.value, function, index, name
    elif isinstance(func, ast.Attribute) and last in _SAME_MODEL and key_of(func) not in outline.names.table:
        yield func.value, function, index, name
    elif last in _WRAPPERS and not is_own and len(call.args) > (index or 0):
        if last == "deepcopy" and key_of(call.args[0]):
            lineage.copied[place_of(outline, key_of(call.args[0]), function)] = call
        yield call.args[index or 0], function, None, name
    elif last in _WRAPPERS and not is_own and call.keywords:
        yield from ((k.value, function, None, name) for k in call.keywords if k.arg in {"model", "module"})
    elif last in LOADS:
        _add_load(lineage, call, function, name)
        if call.args and "Peft" in text_of(func) and (lineage.is_adapted or is_merged(outline, call, function)):
            yield call.args[0], function, None, name  # `PeftModel.from_pretrained(model, path)`
    elif target is not None and target.name != "__init__":
        yield from ((value, target, index, name) for value in returned_by(target))
    elif own := library_formats(outline, call, function):
        lineage.casts.append(Cast(call, function, name, own, "constructor"))
    else:
        lineage.creations.append(Creation(call, function))
        yield from ((part, scope, None, key_of(part)) for part, scope in parts_of(outline, call, function, target))
        _add_constructor(lineage, call, function, name)
        _add_layers(lineage, call, function, target, name)


def _origins(outline: Outline, key: str, function: Function) -> Iterator[tuple[ast.expr, Function, int | None, str]]:
    """What is assigned to a variable, or passed for it."""
    bindings = bindings_of(outline, key, function)
    yield from ((b.value, b.function, b.index, key) for b in bindings if b.value is not None)
    yield from ((value, method, None, key) for value, method in property_values(outline, key, function))
    scope = place_of(outline, key, function)[1]
    if isinstance(scope, Function) and key in scope.params:
        passed = list(passed_for(outline, key, scope))
        yield from ((value, caller, None, key_of(value) or key) for value, caller in passed)
        others = {b.function for b in outline.bindings.get(key, ())} - {scope}
        if not passed and len(others) == 1:  # passed from somewhere else, under the same name as in nearly all code
            yield ast.Name(key, ast.Load()), others.pop(), None, key
    elif not bindings and key.endswith("]"):
        yield from ((v, inner, None, key_of(v) or key) for v, inner in entries_named(outline, key, function))
    elif not bindings and "." in key:
        owner, _, part = key.rpartition(".")
        own = list(outline.bindings.get(f"self.{part}", ()))
        loaders = [(v, f) for v, f in outline.sources(owner, function)[:MAX_PLACES] if isinstance(v, ast.Call)]
        loaders = [(v, f) for v, f in loaders if part_dtype(outline, v, f, part) is not None]
        if loaders:  # `unet` of `components = load_components(unet_dtype=torch.bfloat16)`
            yield from ((value, scope, None, key) for value, scope in loaders)
        elif is_loaded(outline, owner, function):
            yield ast.Name(owner, ast.Load()), function, None, key
        elif owner != "self" and len({b.function.cls for b in own}) == 1:  # `agent.model`: of the only such class
            yield ast.Attribute(ast.Name("self", ast.Load()), part, ast.Load()), own[0].function, None, key
        elif key == "self.model" and isinstance(scope, str) and not function.name.startswith("create_optimizer"):
            # A Trainer of this file with an optimizer of its own: what it is created with.
            is_own = any(text_of(base).endswith("Trainer") for base in outline.bases.get(scope, ()))
            made = [(argument(c, 0, "model"), f) for c, f in outline.calls.get(scope, ()) if is_own]
            yield from ((value, f, None, key_of(value)) for value, f in made if value is not None)
        elif parts := passed_as(outline, owner, part, function):
            yield from ((value, scope, None, key_of(value)) for value, scope in parts)
        else:
            yield from _whole(outline, owner, function)


def _whole(outline: Outline, key: str, function: Function) -> Iterator[tuple[ast.expr, Function, int | None, str]]:
    """The model that a part belongs to: `model` of `model.transformer.wte`, whose layers have its dtype."""
    names = key.split(".")
    for count in range(len(names), 0, -1):
        owner = ".".join(names[:count])
        if owner == "self" or "[" in owner:
            return
        if is_part_of_model(outline, owner, function):
            node = ast.parse(owner, mode="eval").body
            yield node, function, None, owner
            return


def _add_load(lineage: Lineage, call: ast.Call, function: Function, name: str) -> None:
    """A `from_pretrained`: its dtype, or the checkpoint's own where none is written."""
    outline = lineage.outline
    assert isinstance(call.func, ast.Attribute)
    owner = text_of(call.func.value)
    if _OTHER_CLASS.search(owner.rsplit(".", 1)[-1]):
        is_kept = not asks_for_adapters(conditions_of(outline, call)) and not is_merged(outline, call, function)
        lineage.is_adapted |= "Peft" in owner and is_kept
        return
    lineage.loads.append(call)
    dtype = keyword_of(outline, call, function, "torch_dtype", "dtype")
    values = [v for v in keywords_of(outline, call, function, "torch_dtype", "dtype") if constant(v) is not None]
    for option in _QUANTIZED:
        value = keyword_of(outline, call, function, option)
        if value is None or constant(value) in {None, False} or may_be_none(outline, value, function):
            continue
        if not possible(conditions_of(outline, call), conditions_of(outline, value)):
            continue  # `if args.qlora: options["quantization_config"] = ...`, and this load is in the other branch
        if asks_for_adapters(conditions_of(outline, call)):
            return  # `if args.qlora: model = load(quantization_config=...)`: the other branch loads its own
        plain = [v for v in (*values,) or (dtype,) if not is_quantized_with(outline, call, value, v)]
        lineage.is_adapted |= not plain
        values = [v for v in values if v in plain]
    values.sort(key=lambda v: any(map(is_adapter_branch, conditions_of(outline, v))))
    named = {formats_of(outline, value, function): value for value in reversed(values)}  # the first of each
    lineage.casts += [Cast(call, function, name, formats, "load", value) for formats, value in named.items()]
    full, is_written_out = outline.names.full(call.func), call.func.attr == "from_pretrained"
    is_written_out &= all(k.arg or is_written(outline, k.value, function) for k in call.keywords)
    if dtype is None and is_written_out and full.startswith("transformers.") and _MODEL_CLASS.search(owner):
        lineage.casts.append(Cast(call, function, name, frozenset({AUTO}), "checkpoint"))
    elif not values and is_written_out and full.startswith("unsloth."):  # which chooses it where the GPU has it
        lineage.casts.append(Cast(call, function, name, frozenset({"bfloat16"}), "load"))


def _add_constructor(lineage: Lineage, call: ast.Call, function: Function, name: str) -> None:
    """`Model(..., dtype=torch.bfloat16)`; a model class passes its dtype to every layer, `nn.Parameter` keeps that of its tensor."""
    outline = lineage.outline
    full = outline.names.full(call.func)
    formats = created_formats(outline, call, function)
    own = part_dtype(outline, call, function, name) if not formats else None
    formats = formats_of(outline, own, function) if own is not None else formats
    options = keyword_of(outline, call, function, "model_kwargs") if not formats else None
    if options is not None:  # of sentence-transformers
        spread = ast.Call(call.func, [], [ast.keyword(None, options)])
        value = keyword_of(outline, spread, function, "dtype", "torch_dtype")
        formats = formats_of(outline, value, function) if value is not None else formats
    if not formats or (full.startswith("torch.") and not full.startswith("torch.nn.")) or not text_of(call.func):
        return
    last = text_of(call.func).rsplit(".", 1)[-1]
    if last[:1].isupper():
        lineage.casts.append(Cast(call, function, name, formats, "constructor"))
    elif (own is not None or makes_model(last, name)) and not ADAPTER_FLAG.search(name):
        # Of another file, which may keep other weights.
        lineage.casts.append(Cast(call, function, name, formats | {UNKNOWN}, "factory"))


def _add_layers(lineage: Lineage, call: ast.Call, function: Function, target: Function | None, name: str) -> None:
    """Layers and parameters that a class of this file, or a Sequential, creates in 16 bits: `nn.Linear(..., dtype=torch.bfloat16)`."""
    names = lineage.outline.names
    is_module = target is not None and target.name == "__init__"
    if not is_module and names.full(call.func) != "torch.nn.Sequential":
        return
    scope = target if is_module and target is not None else function
    for cast in ast.walk(target.node) if is_module and target is not None else ():  # `self.to(torch.bfloat16)`
        if not isinstance(cast, ast.Call) or not isinstance(cast.func, ast.Attribute):
            continue
        formats = cast_formats(lineage.outline, cast, scope)
        is_own = key_of(cast.func.value) == "self" or swept_model(lineage.outline, cast) == "self"
        if formats & SIXTEEN_BIT and is_own:
            lineage.casts.append(Cast(cast, scope, name, formats, "cast"))
            return
    layer = low_layer(lineage.outline, target.node if is_module and target is not None else call, scope)
    if layer is not None:
        formats = created_formats(lineage.outline, layer.call, layer.function)
        lineage.casts.append(Cast(layer.call, layer.function, name, formats, "constructor"))
