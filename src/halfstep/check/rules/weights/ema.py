"""HS153: moving averages of weights that are stored in 16 bits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.weights.masters import when
from halfstep.check.script.exercise import is_exercise
from halfstep.check.script.objects.formats import base_of, passed_for
from halfstep.check.script.objects.parameters import owners_of
from halfstep.check.script.objects.trainers import is_trainer, model_of
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.objects.weights import Cast
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, last_name_of

__all__ = ["RULES"]

_SCRIPT = """\
import copy
import torch
model = Net().cuda().bfloat16()
ema = copy.deepcopy(model){cast}
def update():
    for p, q in zip(ema.parameters(), model.parameters()):
        {update}
"""
# Classes that copy the parameters in the dtype they have.
_CLASSES = {
    "torch.optim.swa_utils.AveragedModel", "timm.utils.ModelEma", "timm.utils.ModelEmaV2", "timm.utils.ModelEmaV3",
    "timm.utils.model_ema.ModelEma", "timm.utils.model_ema.ModelEmaV2", "timm.utils.model_ema.ModelEmaV3",
    "diffusers.training_utils.EMAModel", "diffusers.EMAModel", "torch_ema.ExponentialMovingAverage", "ema_pytorch.EMA",
}  # fmt: skip
# What makes the copies float32, or may; `v.to(average.dtype)` and a test of the dtype change nothing.
_CHOICE = regex(r"\.float\(|\bfloat(32|64)\b|torch\.float\b|double|dtype")
_OWN_DTYPE = regex(r"\.(to|type)\((dtype=)?[\w.\[\]]+\.dtype\)|\.dtype\.is_floating_point|\w+\.dtype (in|==|!=|is) ")
_UPDATES = regex(r"(^|_)ema(_|$)", re.IGNORECASE)  # a function that updates an average
_EMA_CLASS = regex(r"(^|_)EMA|[a-z]E(MA|ma)(V\d)?$|MovingAverage|^Ema")


class EmaInSixteenBits(ScriptRule):
    """An exponential moving average of weights is stored in 16 bits."""

    code = "HS153"
    name = "ema-in-16-bit"
    severity = "warning"
    reason = (
        "An EMA with decay 0.9999 moves by 1/10000 of the difference in each step. A bfloat16 value changes only by more than 1/512 of itself "
        "(float16: 1/4096), so the update is rounded away: the average stays at its first value, or follows in jumps. Store the average in "
        "float32; it needs no gradients, and can be cast after training."
    )
    bad = (
        _SCRIPT.format(cast="", update="p.mul_(0.9999).add_(q, alpha=1e-4)"),
        _SCRIPT.format(cast="", update="p.lerp_(q, 1e-4)"),
        "import torch\nfrom torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn\n"
        "model = Net().cuda().bfloat16()\nema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))\n",
    )
    good = (
        _SCRIPT.format(cast=".float()", update="p.mul_(0.9999).add_(q, alpha=1e-4)"),
        _SCRIPT.format(cast="", update="p.mul_(0.9999).add_(q, alpha=1e-4)").replace(".bfloat16()", ""),
    )
    references = (
        "https://github.com/AndreasBergmeister/ram/issues/6",
        "https://github.com/d8ahazard/sd_dreambooth_extension/issues/1415",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """Averages of 16-bit models: classes of libraries and of this file, and updates in a loop."""
        if is_exercise(script):
            return
        reported: set[ast.AST] = set()
        variables: set[tuple[str, Function]] = set()
        averages = [*_averages(script), *_updates(script)]
        copies = [a for a in _copies(script) if a.call not in {average.call for average in averages}]
        for call, owner, scope, text in (*averages, *copies):
            cast = _low_copy(script, owner, scope, call)
            is_known = (key_of(owner), scope) in variables and any(call is copy.call for copy in copies)
            if cast is None or call in reported or is_known:
                continue
            reported.add(call)
            variables.add((key_of(owner), scope))
            formats = " or ".join(sorted(cast.low))
            place = f" ({script.at(cast.node)})"
            yield self.finding(
                script.where(call),
                f"{when(script, cast)}{text} is stored in {formats}{place}: its small updates are rounded away",
                instead="store the average in float32: copy.deepcopy(model).float()",
                severity=None if cast.is_certain else "advice",
            )


class Average(NamedTuple):
    """A call that creates or updates a moving average."""

    call: ast.Call
    model: ast.expr
    function: Function  # to look the model up in
    text: str


def _averages(script: Script) -> Iterator[Average]:
    """Objects that average a model: the call, the model and its function."""
    outline = script.outline
    sites = [site for full in _CLASSES & outline.library_calls.keys() for site in outline.library_calls[full]]
    for name in outline.classes.keys() & outline.calls.keys():
        if _EMA_CLASS.search(name) and name not in outline.names.table and not _chooses_dtype(script, name):
            sites += outline.calls[name] if not _averages_adapters(script, name) else []
    for call, function in sites:
        if not call.args and not call.keywords:
            continue
        if any(k.arg == "dtype" for k in call.keywords) or _is_cast_up(script, call):
            continue
        model = call.args[0] if call.args else argument(call, None, "model") or argument(call, None, "parameters")
        for owner, scope in _owners(script, model, function):
            yield Average(call, owner, scope, f"the average of `{text_of(owner)}`")
        statement = script.statement(call)
        if isinstance(statement, ast.Assign) and statement.value is call and key_of(statement.targets[0]):
            average = statement.targets[0]
            for cast in script.training.model(average, function).casts:
                if cast.form == "cast" and cast.low:
                    yield Average(cast.node, average, function, f"the average `{text_of(average)}`")


@lru_cache(maxsize=4096)  # the files of a project share most of their names
def _is_average(name: str) -> bool:
    return _UPDATES.search(name) is not None or _EMA_CLASS.search(name) is not None


def _copies(script: Script) -> Iterator[Average]:
    """Copies of a model that a function or class named for an EMA receives: the copy is the average, in the dtype that it has.

    A class of another file may copy once more, in float32; there only a cast of the copy itself counts.
    """
    outline = script.outline
    names = [name for name in outline.calls if _is_average(name)]
    for call, function in (site for name in names for site in outline.calls[name]):
        target = outline.call_target(call, function)
        is_class = last_name_of(call.func)[:1].isupper() or outline.names.full(call.func) in _CLASSES
        if target is not None:
            continue  # its own lines decide
        last = max(
            [call.lineno, *(n.end_lineno or 0 for n in script.above(call) if isinstance(n, (ast.For, ast.While)))]
        )
        for average in (*call.args, *(k.value for k in call.keywords)):
            copy = _copied(script, average, function)
            if copy is None:
                continue
            casts = [c for c in script.training.model(average, function).casts if c.low and c.key == key_of(average)]
            if not is_class:  # after the last update it is cast for its export
                casts = [c for c in casts if c.function is not function or c.node.lineno <= last]
            for cast in casts:
                yield Average(cast.node, average, function, f"the average `{text_of(average)}`")
            if not casts and not is_class:
                yield Average(copy, average, function, f"the average `{text_of(average)}`")


def _copied(script: Script, average: ast.expr, function: Function) -> ast.Call | None:
    """The `copy.deepcopy(model)` that a variable is."""
    bound = script.outline.lookup(key_of(average), function) if key_of(average) else []
    value = base_of(bound[0].value) if len(bound) == 1 and bound[0].value is not None else None
    is_copy = isinstance(value, ast.Call) and last_name_of(value.func) == "deepcopy"
    return value if isinstance(value, ast.Call) and is_copy else None


def _chooses_dtype(script: Script, name: str) -> bool:
    """Whether a class of this file mentions float32 or a dtype, or does not copy weights."""
    methods = script.outline.classes[name].values()
    text = " ".join(ast.unparse(m.node) for m in methods if not isinstance(m.node, ast.Module))
    return bool(_CHOICE.search(_OWN_DTYPE.sub("", text))) or not re.search(r"deepcopy|clone\(", text)


def _averages_adapters(script: Script, name: str) -> bool:
    """Whether a class of this file averages trained weights alone, which are adapters: PEFT creates them in float32 by default."""
    nodes = (n for m in script.outline.classes[name].values() for n in ast.walk(m.node))
    return any(isinstance(n, ast.Attribute) and n.attr == "requires_grad" for n in nodes) and (
        script.training.adapters == "yes"
    )


def _is_cast_up(script: Script, call: ast.Call) -> bool:
    """Whether the object is cast to float32 where it is created: `AveragedModel(model).float()`."""
    parent = script.outline.parents.get(call)
    return isinstance(parent, ast.Attribute) and parent.attr in {"float", "to", "double"}


def _owners(script: Script, node: ast.expr | None, function: Function) -> Iterator[tuple[ast.expr, Function]]:
    """The models of an expression: a model, its `parameters()`, or a parameter that callers pass one of them for."""
    key = key_of(node)
    if node is None:
        return
    if isinstance(node, ast.Call) and "parameters(" not in ast.unparse(node):
        yield node, function  # the model in a wrapper: `accelerator.unwrap_model(unet)`
    elif isinstance(node, ast.Call) or not key:
        yield from owners_of(script.outline, node, function)
    elif key in function.params:
        yield from _of_callback(script, key, function)
        for value, caller in passed_for(script.outline, key, function):
            if isinstance(value, ast.Call):
                yield from owners_of(script.outline, value, caller)
            else:
                yield value, caller
    else:
        values = script.outline.values(key, function)
        lists = [v for v in values if isinstance(v, (ast.Call, ast.ListComp)) and ".parameters()" in ast.unparse(v)]
        for value in lists:
            yield from owners_of(script.outline, value, function)
        models = [] if lists else [m for value in values for m in _looked_up(script, value, function)]
        yield from models
        if not lists and not models:
            yield node, function


def _looked_up(script: Script, value: ast.expr, function: Function) -> Iterator[tuple[ast.expr, Function]]:
    """The model in which a method of this file finds a part: `self._get_head(model)`, in a method that receives the model."""
    if isinstance(value, ast.Call) and script.outline.call_target(value, function) is not None and function.cls:
        for passed in value.args:
            if key_of(passed) in function.params:
                yield from _owners(script, passed, function)


def _of_callback(script: Script, key: str, function: Function) -> Iterator[tuple[ast.expr, Function]]:
    """The models that a Trainer of this file passes to the methods of a callback: `on_step_end(self, args, state, control, model)`."""
    outline = script.outline
    bases = [text_of(base) for base in outline.bases.get(function.cls, ())]
    if (
        key != "model"
        or not any(base.endswith("TrainerCallback") for base in bases)
        or function.cls not in outline.calls
    ):
        return
    for name, sites in outline.calls.items():
        for call, scope in sites if is_trainer(outline, name) else ():
            model = model_of(outline, call, scope)
            if model is not None and key_of(model):
                yield model, scope


def _updates(script: Script) -> Iterator[Average]:
    """In-place updates of a moving average: the call, the averaged model and its function."""
    outline = script.outline
    # The averages in a method of an optimizer are those of gradients.
    optimizers = {c for c, bases in outline.bases.items() if any(text_of(b).endswith("Optimizer") for b in bases)}
    for name in ("lerp_", "add_"):
        for call, function in outline.calls.get(name, ()):
            receiver = _receiver(call)
            share = constant(argument(call, 1, "weight") if name == "lerp_" else argument(call, None, "alpha"))
            if (
                receiver is None
                or function.cls in optimizers
                or (isinstance(share, (int, float)) and not 0 < abs(share) < 0.1)
            ):
                continue
            if name == "add_" and not _scales_itself(script, call, receiver):
                continue
            if isinstance(receiver, ast.Name):
                for owner, scope in _averaged(script, call, receiver.id, function):
                    yield Average(call, owner, scope, f"`{text_of(owner)}`")
                continue
            for owner, scope in _entries(script, key_of(receiver.value), function):
                yield Average(_copied(script, owner, scope) or call, owner, scope, f"the average `{text_of(owner)}`")
    for name in ("_foreach_lerp_", "_foreach_mul_"):
        for call, function in outline.calls.get(name, ()):
            share = constant(argument(call, 2 if name == "_foreach_lerp_" else 1, "weight"))
            is_decay = name == "_foreach_lerp_" or (isinstance(share, float) and 0.9 < share < 1)
            if not is_decay or function.cls in optimizers:
                continue
            for owner, scope in _owners(script, argument(call, 0, "self"), function):
                yield Average(call, owner, scope, f"`{text_of(owner)}`")


def _receiver(call: ast.Call) -> ast.Name | ast.Subscript | None:
    """The variable under `p.data.mul_(decay).add_(...)`, or the entry `averages[name]`; None if it is cast on the way."""
    node: ast.expr = call.func
    while not isinstance(node, (ast.Name, ast.Subscript)):
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Attribute) and node.attr in {"lerp_", "add_", "mul_", "data", "detach"}:
            node = node.value
        else:
            return None
    return node


def _scales_itself(script: Script, call: ast.Call, receiver: ast.Name | ast.Subscript) -> bool:
    """Whether the same value is multiplied by the decay: in the chain, or in the statement before."""
    assert isinstance(call.func, ast.Attribute)
    inner = call.func.value
    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr == "mul_":
        return not (isinstance(constant(argument(inner, 0, "other")), float) and constant(inner.args[0]) < 0.9)  # type: ignore[operator]
    statement = script.statement(call)
    loop = script.outline.parents.get(statement) if statement is not None else None
    calls = [call for call, _ in script.outline.calls.get("mul_", ())]
    multiplied = [c for c in calls if (r := _receiver(c)) is not None and text_of(r) == text_of(receiver)]
    return isinstance(loop, ast.For) and any(
        script.outline.parents.get(script.statement(c) or c) is loop for c in multiplied
    )


def _averaged(script: Script, call: ast.Call, name: str, function: Function) -> Iterator[tuple[ast.expr, Function]]:
    """The model over whose parameters the loop around an update runs with this variable."""
    loop: ast.AST | None = call
    while loop is not None and not isinstance(loop, (ast.For, ast.FunctionDef)):
        loop = script.outline.parents.get(loop)
    if not isinstance(loop, ast.For):
        return
    iterated: ast.expr = loop.iter
    if isinstance(iterated, ast.Call) and text_of(iterated.func) == "zip" and isinstance(loop.target, ast.Tuple):
        for target, values in zip(loop.target.elts, iterated.args, strict=False):
            if name in {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}:
                yield from _owners(script, values, function)
    elif name in {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}:
        yield from _owners(script, iterated, function)


def _entries(script: Script, key: str, function: Function) -> Iterator[tuple[ast.expr, Function]]:
    """The model whose parameters a dictionary contains by their names."""
    for value in script.outline.values(key, function) if key else ():
        if _CHOICE.search(_OWN_DTYPE.sub("", ast.unparse(value))):
            continue  # copies in float32
        for node in ast.walk(value):
            func = node.func if isinstance(node, ast.Call) else None
            if isinstance(func, ast.Attribute) and func.attr in {"named_parameters", "state_dict"}:
                yield from _owners(script, func.value, function)


def _low_copy(script: Script, owner: ast.expr, function: Function, call: ast.Call) -> Cast | None:
    """The cast that gives an average 16 bits, if nothing returns it to float32."""
    lineage = script.training.model(owner, function)
    if lineage.is_restored or script.training.has_masters:
        return None
    # A function that updates averages may be above the code that creates them and passes them to it.
    is_same = any(node is function.node for node in script.above(call))
    line = max(owner.lineno, call.lineno) if is_same else owner.lineno
    for cast in sorted(lineage.casts, key=lambda c: c.node is not call):  # the cast of the average itself first
        is_before = cast.form != "cast" or cast.function is not function or cast.node.lineno <= line
        if cast.low and is_before:
            return cast
    return None


RULES: tuple[type[Rule], ...] = (EmaInSixteenBits,)
