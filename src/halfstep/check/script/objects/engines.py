"""Objects that own part of a training loop: an Accelerator, a Fabric, a Lightning module, a Trainer of transformers.

Such an object scales the loss, unscales and clips gradients and decides when an optimizer steps; a script that does one
of these itself bypasses it. Each is recognised by the class that creates it, with the precision it is set to: "fp16"
(with a loss scale), "bf16", "fp32", "half" (16-bit weights, no loss scale), "not fp16" where an option decides between
the others, or "?" where another file or the launcher decides.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.expressions import arms_of, may_be_none
from halfstep.check.script.objects.trainers import is_library_trainer, replaces_training
from halfstep.check.script.objects.values import argument, constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.excluded import is_excluded
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Function, Outline
from halfstep.check.script.syntax.returned import returned_to
from halfstep.check.script.trained.defaults import by_default

__all__ = [
    "ACCELERATE", "ACCELERATORS", "FABRIC", "Engine", "LoopClass", "callback_precision", "engine_at", "engines_of", "has_alternative", "leaves_loss",
    "lightning_methods", "loop_class", "scaling_accelerator", "scaling_fabric", "scaling_hooks", "trains_in_fp16",
]  # fmt: skip

ACCELERATE, FABRIC = "Accelerate", "Fabric"
_CREATED_BY = {
    "accelerate.Accelerator": ACCELERATE,
    "accelerate.accelerator.Accelerator": ACCELERATE,
    "lightning.Fabric": FABRIC,
    "lightning.fabric.Fabric": FABRIC,
    "lightning_fabric.Fabric": FABRIC,
}
ACCELERATORS = tuple(name for name, library in _CREATED_BY.items() if library == ACCELERATE)
_ONLY_ACCELERATE = (
    "accumulate", "unwrap_model", "wait_for_everyone", "gather_for_metrics", "prepare", "clip_grad_norm_",
)  # fmt: skip
_LIGHTNING_PACKAGES = {"lightning", "pytorch_lightning"}
_ASKS_CUDA = regex(r"(torch\.)?cuda\.is_available\(\)|(torch\.)?cuda\.device_count\(\) > 0")
_ASKS_FP16 = regex(r"mixed_precision (==|in) [\[({]?['\"]fp16['\"]")
# `accelerator.is_main_process` is no question of whether there is an accelerator.
_WITHOUT = regex(
    r"accelerat(?!or\.(is_|sync_|unwrap_|num_|process|optimizer_|scaler|device))|fabric(?!\.(is_|global_|world_))|deepspeed|engine",
    re.IGNORECASE,
)


@dataclass(frozen=True, eq=False)
class Engine:
    """An Accelerator or a Fabric."""

    library: str  # Accelerate or Fabric
    key: str  # the variable it is assigned to
    precision: str
    steps: ast.expr | None = None  # gradient_accumulation_steps
    plugin: str = ""  # "deepspeed" or "fsdp", if the call names one in every run
    is_created: bool = True  # False: a parameter whose creation is in another file
    function: Function | None = None  # the one that creates it
    call: ast.Call | None = None  # what creates it

    @property
    def name(self) -> str:
        """The last name of its variable: `accelerator` of `self.accelerator`."""
        return last_name(self.key)


@dataclass(frozen=True)
class LoopClass:
    """A class whose base class owns the training loop."""

    base: str  # "manual" or "automatic" (Lightning), "trainer" (transformers)
    precision: str


@lru_cache(maxsize=4)  # rules ask for every event of one script
def engines_of(script: Script) -> tuple[Engine, ...]:
    """Every Accelerator and Fabric of a script; a parameter of such a name counts where the library is imported."""
    outline = script.outline
    engines = [
        _created(outline, call, function, library)
        for full, library in _CREATED_BY.items()
        for call, function in outline.library_calls.get(full, ())
    ]
    names = {engine.name for engine in engines}
    for name, library in (("accelerator", ACCELERATE), ("fabric", FABRIC)):
        imported = any(full in _CREATED_BY and _CREATED_BY[full] == library for full in outline.names.table.values())
        is_param = imported and any(name in function.params for function in outline.functions)
        if name not in names and (is_param or _is_used_as(outline, name, library)):
            engines.append(Engine(library, name, "?", is_created=False))
    return tuple(engine for engine in engines if engine.key)


def _is_used_as(outline: Outline, name: str, library: str) -> bool:
    """Whether a variable of another file is used as an Accelerator is: two methods, one of which only that library has."""
    methods = {
        method
        for method in ("backward", *_ONLY_ACCELERATE)
        for call, _ in outline.calls.get(method, ())
        if isinstance(call.func, ast.Attribute) and last_name(key_of(call.func.value)) == name
    }
    return library == ACCELERATE and bool(methods & {"backward", "accumulate"}) and len(methods) > 1


def engine_at(script: Script, key: str, function: Function) -> Engine | None:
    """The Accelerator or Fabric that a variable of a function is.

    Its precision is unknown if several that the function may see under that name differ in it.
    """
    same = [engine for engine in engines_of(script) if engine.name == last_name(key)] or _copied(script, key, function)
    around: list[Function | None] = [function]
    while around[-1] is not None:
        around.append(around[-1].parent)
    # Tests create an engine each, under one name: the innermost function that creates one decides.
    local = next((here for f in around if (here := [e for e in same if e.function is f and f is not None])), [])
    same = local or same
    if not same or len({engine.library for engine in same}) > 1:
        return None
    if len({engine.precision for engine in same}) == 1:
        return same[0]
    return replace(same[0], precision="?")


def _copied(script: Script, key: str, function: Function) -> list[Engine]:
    """The engines that a variable of another name is a copy of, `acc = self.accelerator`, also as a parameter."""
    values = script.outline.values(key, function)[:MAX_BINDINGS] if key else []
    names = {last_name(key_of(value)) for value in values} - {""}
    return [e for e in engines_of(script) if e.name in names or any(e.call is value for value in values)]


def scaling_accelerator(script: Script) -> Engine | None:
    """An Accelerator that scales the loss: in fp16, or in a precision that an option of the script may set to fp16."""
    engines = [e for e in engines_of(script) if e.library == ACCELERATE and e.is_created and not e.plugin]
    if not engines or any(e.precision not in {"fp16", "?"} for e in engines):
        return None
    if any(e.precision == "fp16" for e in engines):
        return next(e for e in engines if e.precision == "fp16")
    calls = [site.call for name in _CREATED_BY for site in script.outline.library_calls.get(name, ())]
    options = [argument(call, None, "mixed_precision") for call in calls]
    is_open = any(option is not None and not isinstance(option, ast.Constant) for option in options)
    is_open = is_open or "optimizer_step_was_skipped" in script.outline.loads  # only a scaler skips a step
    is_open = is_open or bool(_ASKS_FP16.search(script.source.text))  # the launcher may set it
    strings = script.outline.strings
    return engines[0] if is_open and ("fp16" in strings or "bf16" not in strings) else None


def scaling_fabric(script: Script) -> Engine | None:
    """A Fabric that scales the loss: in 16-mixed, or in a precision that an option of the script may set to it."""
    engines = [e for e in engines_of(script) if e.library == FABRIC and e.is_created and not e.plugin]
    if not engines or any(e.precision not in {"fp16", "?"} for e in engines):
        return None
    is_chosen = all(e.precision == "fp16" for e in engines) or "16-mixed" in script.outline.strings
    return engines[0] if is_chosen else None


def leaves_loss(script: Script, event: Event) -> bool:
    """Whether an engine's backward uses the loss undivided.

    Lightning's manual_backward does, Fabric without DeepSpeed, and an Accelerator that does not know of the accumulation.
    """
    func = event.node.func if isinstance(event.node, ast.Call) else None
    if not isinstance(func, ast.Attribute):
        return False
    if func.attr == "manual_backward":
        return True
    engine = engine_at(script, key_of(func.value), event.function)
    # Where one branch creates it with DeepSpeed, the other one decides.
    same = [e for e in engines_of(script) if engine is not None and e.name == engine.name]
    if engine is None or all(e.plugin == "deepspeed" for e in same):
        return False
    return engine.library == FABRIC or (engine.is_created and _accumulates_nothing(script))


def _accumulates_nothing(script: Script) -> bool:
    """Whether no Accelerator of a script is set to accumulate: the launcher can still set the number of steps."""
    calls = [site.call for name in _CREATED_BY for site in script.outline.library_calls.get(name, ())]
    # DeepSpeed counts by its own configuration; another Accelerator, for the runs without it, does not.
    plain = [call for call in calls if not any(k.arg == "deepspeed_plugin" for k in call.keywords)]
    settings = {"gradient_accumulation_steps", "gradient_accumulation_plugin", None}  # None: **kwargs
    is_set = not plain or any(len(call.args) > 2 or settings & {k.arg for k in call.keywords} for call in calls)
    is_assigned = any(key.endswith(".gradient_accumulation_steps") for key in script.outline.bindings)
    return bool(calls) and not is_set and not is_assigned and "accumulate" not in script.outline.calls


def _created(outline: Outline, call: ast.Call, function: Function, library: str) -> Engine:
    parent = outline.parents.get(call)
    while isinstance(parent, ast.IfExp | ast.BoolOp):
        parent = outline.parents.get(parent)
    target = parent.targets[0] if isinstance(parent, ast.Assign) else getattr(parent, "target", None)
    key = key_of(target) or (returned_to(outline, parent) if parent is not None else "")
    hidden = any(k.arg is None for k in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args)
    if library == FABRIC:
        value = argument(call, None, "precision")
        strategy = str(constant(argument(call, None, "strategy")))
        plugin = next((name for name in ("deepspeed", "fsdp") if name in strategy), "")
        precision = "?" if hidden and value is None else _precision(outline, value, function, absent="fp32")
        return Engine(library, key, precision, None, plugin, function=function, call=call)
    value = argument(call, 2, "mixed_precision")
    steps = _accumulation_steps(outline, call, function)
    # One that only an option creates, `plugin = None` otherwise, is absent in the other runs.
    plugins = {k.arg for k in call.keywords if not may_be_none(outline, k.value, function)}
    plugin = "deepspeed" if "deepspeed_plugin" in plugins else "fsdp" if "fsdp_plugin" in plugins else ""
    precision = _precision(outline, value, function, absent="?")
    return Engine(library, key, precision, steps, plugin, function=function, call=call)


def _accumulation_steps(outline: Outline, call: ast.Call, function: Function) -> ast.expr | None:
    """The steps of an Accelerator, `GradientAccumulationPlugin(num_steps=4)` or `DeepSpeedPlugin(gradient_accumulation_steps=4)`."""
    for name, position, steps in (
        ("gradient_accumulation_plugin", 0, "num_steps"),
        ("deepspeed_plugin", 1, "gradient_accumulation_steps"),
    ):
        plugin = argument(call, None, name)
        options = [plugin] if isinstance(plugin, ast.Call) else outline.values(key_of(plugin), function)
        calls = [option for option in options if isinstance(option, ast.Call)]
        if plugin is not None and len(calls) == 1:
            # A configuration has its own steps, 1 where it names none; all others are for "auto" only.
            if position and len(options) == 1 and argument(calls[0], 0, "hf_ds_config"):
                return None
            if (value := argument(calls[0], position, steps)) is not None:
                return value
    return argument(call, 3, "gradient_accumulation_steps")


def _precision(outline: Outline, node: ast.expr | None, function: Function, absent: str) -> str:
    """The precision that an argument sets; `absent` if there is none, "?" if the text does not decide."""
    if node is None:
        return absent
    known = key_of(node) and key_of(node) not in function.params
    options = (outline.values(key_of(node), function) if known else []) or [node]
    values = {constant(arm) for option in options for arm in arms_of(option)}
    names = {_NAMES.get(str(value).lower(), absent if value is None else "?") for value in values}
    if len(names) == 1 and names != {"?"}:
        return names.pop()
    return "not fp16" if not names & {"fp16", "?"} or is_excluded(outline, node, {"fp16", "16", "16-mixed"}) else "?"


_NAMES = {
    "fp16": "fp16", "16": "fp16", "16-mixed": "fp16", "bf16": "bf16", "bf16-mixed": "bf16", "no": "fp32", "32": "fp32",
    "32-true": "fp32", "fp8": "bf16", "64": "fp32", "64-true": "fp32", "16-true": "half", "bf16-true": "half",
}  # fmt: skip


def has_alternative(trace: Trace, event: Event) -> bool:
    """Whether a bare backward is the path without the engine: another branch goes through it."""
    if any(not is_true and _WITHOUT.search(text) for text, is_true in event.guards):
        return True
    others = (e for e in trace if e.kind == "owned_backward" or (e.kind == "backward" and e.scaled != "no"))
    return any(not compatible(e, event) for e in others)


@lru_cache(maxsize=16)
def loop_class(script: Script, name: str) -> LoopClass | None:
    """What a class inherits its training loop from; None for a class that has its own."""
    bases = set(_bases(script.outline, name))
    packages = {base.split(".")[0] for base in bases}
    if any(base.endswith("LightningModule") for base in bases) and packages & _LIGHTNING_PACKAGES:
        precisions = set(_trainer_precisions(script))
        return LoopClass(_mode(script, name), precisions.pop() if len(precisions) == 1 else "?")
    if any(map(is_library_trainer, bases)) and not replaces_training(script.outline, name):
        return LoopClass("trainer", _arguments_precision(script.outline))
    return None


def _arguments_precision(outline: Outline) -> str:
    """The precision of a Trainer if all training arguments of the file agree in it; with DeepSpeed its configuration decides."""
    calls = [c for n, sites in outline.calls.items() if n.endswith("TrainingArguments") for c, _ in sites]
    flags = [tuple(constant(argument(call, None, name)) for name in ("fp16", "bf16")) for call in calls]
    if flags and all(fp16 is True for fp16, _ in flags):
        return "fp16"
    is_open = "HfArgumentParser" in outline.calls or any(key.endswith(".fp16") for key in outline.bindings)
    is_open |= not calls or any(argument(call, None, "deepspeed") is not None for call in calls)
    return "?" if is_open or not all(fp16 is False or bf16 is True for fp16, bf16 in flags) else "not fp16"


def _bases(outline: Outline, name: str, depth: int = 4) -> Iterator[str]:
    for base in outline.bases.get(name, ()):
        full = outline.names.full(base)
        if full:
            yield full
        elif isinstance(base, ast.Name) and depth:
            yield from _bases(outline, base.id, depth - 1)


def _mode(script: Script, name: str) -> str:
    """Whether a Lightning module steps its optimizers itself; "?" if the text does not decide."""
    text = "automatic_optimization"
    if text not in script.source.text:
        return "automatic"
    values = {
        constant(b.value)
        for key in (f"self.{text}", text)
        for b in script.outline.bindings.get(key, ())
        if b.function.cls in {name, *(_local_bases(script.outline, name))}
    }
    return "manual" if values == {False} else "?"


def _local_bases(outline: Outline, name: str) -> set[str]:
    return {base.id for base in outline.bases.get(name, ()) if isinstance(base, ast.Name)}


def _trainer_precisions(script: Script) -> Iterator[str]:
    for call, function in _trainers(script):
        absent = "?" if any(k.arg is None for k in call.keywords) else "fp32"
        yield _precision(script.outline, argument(call, None, "precision"), function, absent)


def _trainers(script: Script) -> Iterator[tuple[ast.Call, Function]]:
    """The calls that create a Trainer of Lightning."""
    for full, sites in script.outline.library_calls.items():
        if full.split(".")[0] in _LIGHTNING_PACKAGES and full.endswith(".Trainer"):
            yield from sites


def trains_in_fp16(script: Script) -> bool:
    """Whether a script creates Trainers of Lightning, and all of them scale the loss."""
    precisions = [_with_default(script, call, function, "precision") for call, function in _trainers(script)]
    return bool(precisions) and all(_NAMES.get(str(value).lower()) == "fp16" for value in precisions)


def lightning_methods(script: Script) -> Iterator[Function]:
    """The methods of the Lightning modules and callbacks of a script, and those that they inherit from a class of the file."""
    owners: dict[str, None] = {}
    for name in script.outline.classes:
        bases = [base for base in _bases(script.outline, name) if base.split(".")[0] in _LIGHTNING_PACKAGES]
        if any(base.endswith(("LightningModule", "Callback")) for base in bases):
            owners |= dict.fromkeys((name, *_own_bases(script.outline, name)))
    for name in owners:
        yield from script.outline.classes[name].values()


def _own_bases(outline: Outline, name: str, depth: int = 4) -> Iterator[str]:
    """The classes of the file that a class inherits from."""
    for base in outline.bases.get(name, ()) if depth else ():
        if isinstance(base, ast.Name) and base.id in outline.classes:
            yield base.id
            yield from _own_bases(outline, base.id, depth - 1)


@lru_cache(maxsize=16)
def callback_precision(script: Script, name: str) -> str:
    """The precision of the Trainers that run a callback of Lightning, "?" where another file or an option decides; "" for another class."""
    bases = [base for base in _bases(script.outline, name) if base.split(".")[0] in _LIGHTNING_PACKAGES]
    if not any(base.endswith("Callback") for base in bases):
        return ""
    precisions = set(_trainer_precisions(script))
    return precisions.pop() if len(precisions) == 1 else "?"


def scaling_hooks(script: Script) -> dict[Function, str]:
    """The hooks of Lightning in which gradients are still scaled, each with the reason; none unless every Trainer is fp16.

    After a backward they always are. At the end of a batch they are where the batch did not step, because the Trainer
    accumulates. An option that a configuration may set counts as its default: `config.get("precision", "16-mixed")`.
    """
    if not trains_in_fp16(script):
        return {}
    windows = [_with_default(script, c, f, "accumulate_grad_batches") for c, f in _trainers(script)]
    reasons = {"on_after_backward": ""}
    if all(isinstance(value, int) and value > 1 for value in windows):
        reasons["on_train_batch_end"] = f" after a batch without a step (`accumulate_grad_batches={windows[0]}`)"
    return {hook: reasons[hook.name] for hook in lightning_methods(script) if hook.name in reasons}


def _with_default(script: Script, call: ast.Call, function: Function, name: str) -> object:
    """The value of an argument in a run without options: also the default of `config.get(name, default)`, and that with a GPU."""
    node = argument(call, None, name)
    values = (
        script.outline.values(key_of(node), function) if key_of(node) and key_of(node) not in function.params else []
    )
    node = values[0] if len(values) == 1 else node
    if isinstance(node, ast.IfExp) and _ASKS_CUDA.fullmatch(ast.unparse(node.test)):
        node = node.body
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        node = argument(node, 1, "default")
    return by_default(script.outline, node, function) if node is not None else None
