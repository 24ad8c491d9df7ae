"""Layers and parameters that a loop over a model casts, and the optimizers without master weights that a file creates or defines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from halfstep.check.regex import regex
from halfstep.check.script.objects.expressions import arms_of
from halfstep.check.script.objects.formats import SIXTEEN_BIT, table_of
from halfstep.check.script.objects.parameters import may_freeze
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.objects.weights import Cast, VariableCast, conditions_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import CallSite

__all__ = [
    "MAKES_OPTIMIZER",
    "cast_layers",
    "defined_optimizers",
    "managed_casts",
    "model_of_every_parameter",
    "optimizer_factories",
    "plain_optimizers",
]

# Packages whose optimizers update the weights in the dtype the weights have.
_PLAIN = (
    "torch.optim.", "bitsandbytes.optim.", "transformers.AdamW", "transformers.Adafactor", "transformers.optimization.Ada",
    "apex.optimizers.", "torchao.optim.", "torchao.prototype.low_bit_optim.", "lion_pytorch.", "prodigyopt.", "dadaptation.",
    "schedulefree.", "galore_torch.", "torch_optimizer.", "timm.optim.", "came_pytorch.", "adabelief_pytorch.",
)  # fmt: skip
_KEEPS_MASTER = {"master_weights", "bf16_stochastic_round", "kahan_sum", "use_kahan_summation", "stochastic_rounding"}
MAKES_OPTIMIZER = regex(r"(^|_)(make|build|create|get|init|setup|configure)_?\w*optim|^instantiate$", re.IGNORECASE)
_FAMILY = regex(r"^([A-Z]\w*)?(Adam\w*|Lion|Muon|SGD|SophiaG?|Shampoo|SOAP)$")
_KEPT = regex(r"16|32|kahan|stoch|master|mixed|precision|cpu", re.IGNORECASE)
_MATRICES = regex(r"isinstance\(\w+, .*(Linear|Conv[123]d)")
_RETURNS = regex(r"^_?(get_|collect_)?\w+_param(eter)?s$")
# What optimizers keep elsewhere: float32 copies, or the bits that 16-bit weights do not have.
_FLOAT32_COPY = regex(r"^(?!.*(zeros|ones|empty)).*(\.float\(\)|float32)")
_LOW_BITS = regex(r"mantissa|low_bits|error_feedback|compensat", re.IGNORECASE)


def cast_layers(outline: Outline, casts: Iterable[VariableCast]) -> Iterator[tuple[Cast, str]]:
    """`for m in model.modules(): if isinstance(m, nn.Linear): m.bfloat16()`, each with the name of the model.

    Embeddings alone are left out: their updates are sparse and large, and some recipes choose 16 bits for them.
    """
    for call, function, key, formats in casts:
        if not formats <= SIXTEEN_BIT:
            continue
        guards = conditions_of(outline, call)
        loop = outline.parents.get(call)
        while loop is not None and not isinstance(loop, (ast.For, ast.FunctionDef, ast.AsyncFunctionDef)):
            loop = outline.parents.get(loop)
        source = loop.iter if isinstance(loop, ast.For) else None
        func = source.func if isinstance(source, ast.Call) else None
        if not isinstance(func, ast.Attribute) or func.attr not in {"modules", "named_modules"}:
            continue
        names = {key_of(n) for n in ast.walk(loop.target)} if isinstance(loop, ast.For) else set()
        is_layer = key in names or (key.partition(".")[0] in names and key.endswith((".weight", ".weight.data")))
        if is_layer and len(guards) == 1 and guards[0].is_true and _MATRICES.search(guards[0].text):
            yield Cast(call, function, key.removesuffix(".data"), formats, "cast"), key_of(func.value)


def managed_casts(
    outline: Outline, casts: Iterable[VariableCast], optimizers: Iterable[tuple[ast.Call, Function]]
) -> Iterator[tuple[Cast, ast.Call, Function]]:
    """`for part in manager.parts.values(): part.to(dtype)`, each with the optimizer of `manager.get_lora_parameters()`.

    The object has the modules and returns parameters of them to train, so no name of a model connects the two.
    """
    for call, function, key, formats in casts:
        owner = _owner_of_parts(outline, call, key)
        for by, scope in optimizers if owner else ():
            if owner == _manager(outline, argument(by, 0, "params"), scope) and (function is scope or "." in owner):
                yield Cast(call, function, key, formats, "cast"), by, scope


def _owner_of_parts(outline: Outline, call: ast.Call, key: str) -> str:
    """The object whose modules a loop casts without exception, `manager` of `for part in manager.parts: part.half()`; or ""."""
    statement = outline.parents.get(call)
    loop = outline.parents.get(statement) if statement is not None else None
    if not isinstance(loop, ast.For) or not any(key_of(n) == key for n in ast.walk(loop.target)):
        return ""
    source = loop.iter
    if isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and not source.args:
        source = source.func.value  # `parts.values()`
    owner = key_of(source).rpartition(".")[0]
    return owner if owner != "self" else ""


def _manager(outline: Outline, params: ast.expr | None, function: Function) -> str:
    """The object of `manager.trainable_parameters()`, also through a variable; "" for any other expression."""
    values = outline.values(key_of(params), function) if key_of(params) else [params]
    func = values[0].func if len(values) == 1 and isinstance(values[0], ast.Call) else None
    return key_of(func.value) if isinstance(func, ast.Attribute) and _RETURNS.search(func.attr) else ""


def model_of_every_parameter(outline: Outline, call: ast.Call) -> str:
    """The model of `for p in model.parameters():` around a cast of each; "" if there is none, or something may be frozen."""
    loop = outline.parents.get(outline.parents.get(call, call))
    source = loop.iter if isinstance(loop, ast.For) else None
    func = source.func if isinstance(source, ast.Call) else None
    if not isinstance(func, ast.Attribute) or func.attr not in {"parameters", "named_parameters"}:
        return ""
    return "" if may_freeze(outline) else key_of(func.value)


def defined_optimizers(outline: Outline) -> tuple[tuple[ast.Call, Function], ...]:
    """The calls that create an optimizer of a class of this file; none if one keeps the low bits of 16-bit weights."""
    bases = outline.bases.items()
    own = {name for name, parents in bases if any(text_of(base).endswith("Optimizer") for base in parents)}
    own &= outline.calls.keys()
    methods = [method.node for name in own for method in outline.classes.get(name, {}).values()]
    if any(_LOW_BITS.search(ast.unparse(m)) or _stores_copies(m) for m in methods):
        return ()
    return tuple((site.call, site.function) for name in sorted(own) for site in outline.calls[name])


def _stores_copies(method: ast.AST) -> bool:
    """Whether a method stores float32 copies of something, most likely of the weights: `state["w"] = p.float().clone()`."""
    stored = [n for n in ast.walk(method) if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Subscript)]
    return any(_FLOAT32_COPY.search(ast.unparse(node.value)) for node in stored)


def optimizer_factories(outline: Outline) -> tuple[tuple[ast.Call, Function], ...]:
    """The calls of functions and classes of other files that create an optimizer: `optimizer = build_optimizer(cfg, model)`."""
    names = [name for name in outline.calls if MAKES_OPTIMIZER.search(name) or _is_foreign_class(outline, name)]
    sites = [site for name in names for site in outline.calls[name]]
    return tuple(
        (call, function)
        for call, function in sites
        if outline.call_target(call, function) is None and _is_assigned_optimizer(outline, call)
    )


def _is_foreign_class(outline: Outline, name: str) -> bool:
    """Whether an imported class has the name of an optimizer that most likely keeps no master weights: `Muon`, `FusedAdam`."""
    full = outline.names.table.get(name, "")
    return bool(full and _FAMILY.search(name)) and not _KEPT.search(full) and not full.startswith("halfstep")


def plain_optimizers(outline: Outline) -> tuple[tuple[ast.Call, Function], ...]:
    """The calls that create an optimizer without master weights."""
    calls = [
        site
        for full, sites in outline.library_calls.items()
        if full.startswith(_PLAIN) and "lr_scheduler" not in full and ".swa_utils" not in full
        for site in sites
    ]
    # `optimizer_class = bnb.optim.AdamW8bit if ... else torch.optim.AdamW`
    for name, sites in outline.calls.items():
        if "optim" in name.lower() and name in outline.bindings:
            calls += [site for site in sites if _is_plain_class(outline, site.call.func, site.function)]
    calls += _chosen_by_name(outline)
    calls += [
        site
        for site in outline.library_calls.get("torch.distributed.optim.ZeroRedundancyOptimizer", ())
        if outline.names.full(argument(site.call, 1, "optimizer_class") or site.call.func).startswith(_PLAIN)
    ]
    return tuple(
        (call, function)
        for call, function in calls
        if not any(k.arg in _KEEPS_MASTER and constant(k.value) is not False for k in call.keywords)
    )


def _chosen_by_name(outline: Outline) -> Iterator[CallSite]:
    """The optimizers of `getattr(torch.optim, name)(...)` and `OPTIMIZERS[name](...)`, where each of the table is plain."""
    for key, bindings in outline.bindings.items():
        for binding in bindings if "opt" in key.lower() else ():
            value = binding.value
            if isinstance(value, ast.Call) and _is_plain_choice(outline, value.func, binding.function):
                yield CallSite(value, binding.function)


def _is_plain_choice(outline: Outline, func: ast.expr, function: Function) -> bool:
    if isinstance(func, ast.Subscript):
        table = table_of(outline, func.value, function)
        entries = [outline.names.full(entry) for entry in table.values] if table is not None else []
        return bool(entries) and all(entry.startswith(_PLAIN) for entry in entries)
    is_read = isinstance(func, ast.Call) and key_of(func.func) == "getattr" and bool(func.args)
    return is_read and isinstance(func, ast.Call) and outline.names.full(func.args[0]) == "torch.optim"


def _is_plain_class(outline: Outline, func: ast.expr, function: Function) -> bool:
    options = [func]
    key = key_of(func)
    if key:
        options = [part for v in outline.values(key, function) for part in arms_of(v)]
    return bool(options) and all(outline.names.full(option).startswith(_PLAIN) for option in options)


def _is_assigned_optimizer(outline: Outline, call: ast.Call) -> bool:
    parent = outline.parents.get(call)
    targets = parent.targets if isinstance(parent, ast.Assign) else []
    return any("optim" in key_of(t).lower() for x in targets for t in (x.elts if isinstance(x, ast.Tuple) else [x]))
