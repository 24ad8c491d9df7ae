"""Layers and adapters that a file casts to 16 bits or creates so, and the optimizers without master weights that it creates or defines."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from halfstep.check.regex import regex
from halfstep.check.script.objects.adapters import attachments, upcasts_parameters
from halfstep.check.script.objects.expressions import arms_of
from halfstep.check.script.objects.formats import SIXTEEN_BIT, formats_of, keyword_of, table_of
from halfstep.check.script.objects.freezing import trains_part_of
from halfstep.check.script.objects.loading import lasting_casts
from halfstep.check.script.objects.parameters import may_freeze
from halfstep.check.script.objects.tensors import created_formats, dtype_of_weight
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.objects.weights import Cast, Lineage, VariableCast, conditions_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline, last_name_of
from halfstep.check.script.syntax.scope import CallSite
from halfstep.check.script.trained.lowered_modules import marked_adapters

__all__ = [
    "MAKES_OPTIMIZER",
    "added_adapters",
    "cast_layers",
    "created_adapters",
    "defined_optimizers",
    "enabled_with_adapters",
    "is_created_low",
    "is_of_trained",
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
_WRITES = regex(r"\b(p|param|w|weight|theta|x)(?:\.data)?\.(?:copy_|add_|addcdiv_|sub_)\(")
_KEEPS_MASTER = {"master_weights", "bf16_stochastic_round", "kahan_sum", "use_kahan_summation", "stochastic_rounding"}
MAKES_OPTIMIZER = regex(r"(^|_)(make|build|create|get|init|setup|configure)_?\w*optim|^instantiate$", re.IGNORECASE)
_FAMILY = regex(r"^([A-Z]\w*)?(Adam\w*|Lion|Muon|SGD|SophiaG?|Shampoo|SOAP)$")
_KEPT = regex(r"16|32|kahan|stoch|master|mixed|precision|cpu", re.IGNORECASE)
_PEFT_CONFIG = regex(r"(Lo[RrHhKk][AaRr]|LoKr|OFT|BOFT|Vera|DoRA|Adapter|Peft)\w*Config$")
_LIFTS = regex(
    r"upcast|fp32|float32|cast_|_dtype", re.IGNORECASE
)  # a function that may cast what is trained to float32
_ADAPTER = regex(r"lora|adapter", re.IGNORECASE)
_FROZEN = regex(r"requires_grad(_\(|\s*=\s*)False|\.float\(\)\)")
_OF_LAYER = regex(r"^(self\.)?\w+(\.\w+)*\.weight\.dtype$")  # of the layer that is adapted
_OF_MODEL = regex(r"lora|adapter|model|module|param|layer|^p$|^data$", re.IGNORECASE)
_NO_MODEL = regex(r"Tokenizer|Processor|Config\b|Scheduler|FeatureExtractor|Dataset")
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


def created_adapters(outline: Outline, casts: Iterable[VariableCast]) -> Iterator[Cast]:
    """The 16-bit weights of adapters that a class of this file defines: `self.lora_A = nn.Parameter(torch.zeros(..., dtype=torch.bfloat16))`.

    Their dtype is written, or is that of the layer that they adapt, where every model of the file is loaded in 16 bits. PEFT
    would keep them in float32.
    """
    lifted = [c.key for c in casts if "float32" in c.formats and _OF_MODEL.search(c.key.rsplit(".", 1)[-1])]
    for name, methods in outline.classes.items() if not lifted else ():
        init = methods.get("__init__")
        if init is None or name not in outline.calls:
            continue
        for node in ast.walk(init.node):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if not targets or not _ADAPTER.search(f"{name} {text_of(targets[0])}"):
                continue
            weights = [n for n in ast.walk(node) if isinstance(n, ast.Call) and _is_layer(outline, n)]
            low = [(call, formats) for call in weights if (formats := _adapter_formats(outline, call, init))]
            if low:
                # Asked last: the text of a class takes longer than everything before.
                if not _FROZEN.search(" ".join(ast.unparse(method.node) for method in methods.values())):
                    yield Cast(low[0][0], init, text_of(targets[0]), low[0][1], "constructor")
                break


def _is_layer(outline: Outline, call: ast.Call) -> bool:
    return outline.names.full(call.func).startswith("torch.nn.")


def _adapter_formats(outline: Outline, call: ast.Call, function: Function) -> frozenset[str]:
    """The 16-bit formats of a weight of an adapter; empty if it may be float32."""
    formats = created_formats(outline, call, function)
    if formats and formats <= SIXTEEN_BIT:
        return formats
    dtype = dtype_of_weight(outline, call, function)
    values = outline.values(key_of(dtype), function) if dtype is not None and key_of(dtype) else []
    texts = [text_of(value) for value in values] or [text_of(dtype)]
    if not all(map(_OF_LAYER.search, texts)):
        return frozenset()
    sites = [s for name in ("from_pretrained", "from_config") for s in outline.calls.get(name, ())]
    loads = [s for s in sites if not _NO_MODEL.search(text_of(s.call.func))]
    if any(
        keyword_of(outline, s.call, s.function, "quantization_config", "load_in_4bit", "load_in_8bit") for s in loads
    ):
        return frozenset()  # the layer stores integers
    chosen = [
        formats_of(outline, keyword_of(outline, s.call, s.function, "torch_dtype", "dtype"), s.function) for s in loads
    ]
    loaded = frozenset().union(*chosen)
    return loaded if loaded and loaded <= SIXTEEN_BIT else frozenset()


def is_created_low(lineage: Lineage) -> bool:
    """Whether a layer of the file's own is created in 16 bits, `nn.Linear(..., dtype=torch.bfloat16)`: no adapter replaces it."""
    layers = [c for c in lineage.casts if _is_layer(lineage.outline, c.node)]
    return bool(layers) and len(layers) == len(lineage.casts)


def added_adapters(outline: Outline, model: Callable[[ast.expr, Function], Lineage]) -> Iterator[Cast]:
    """The 16-bit casts and loads of models that then get adapters by `unet.add_adapter(LoraConfig(...))`, which have their dtype.

    So do adapters that the model itself creates. Only `get_peft_model` and `PeftModel` cast adapters to float32, unless `autocast_adapter_dtype=False`. Nothing is yielded where the file may cast them itself.
    """
    if upcasts_parameters(outline):
        return
    yield from marked_adapters(outline, model)
    for attached in attachments(outline):
        config = argument(attached.call, 0, "adapter_config")
        values = (
            outline.values(key_of(config), attached.function) if config is not None and key_of(config) else [config]
        )
        is_added = last_name_of(attached.call.func) == "add_adapter" and any(
            isinstance(v, ast.Call) and _PEFT_CONFIG.search(text_of(v.func)) for v in values
        )
        if not is_added and constant(argument(attached.call, None, "autocast_adapter_dtype")) is not False:
            continue
        lineage = model(attached.base, attached.function)
        lifts = [site for name, sites in outline.calls.items() if _LIFTS.search(name) for site in sites]
        passed = [(key_of(a), s.function) for s in lifts for a in (*s.call.args, *(k.value for k in s.call.keywords))]
        if lineage.is_restored or any(lineage.has(key, function) for key, function in passed if key):
            continue
        for cast in lasting_casts(lineage):
            is_before = cast.function is attached.function and cast.node.lineno < attached.call.lineno
            if cast.low and is_before:
                yield replace(cast, key=attached.targets[0] if attached.targets else cast.key)
            elif cast.low and cast.form in {"load", "factory"} and cast.function is not attached.function:
                yield cast


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


def is_of_trained(outline: Outline, call: ast.Call) -> bool:
    """Whether a cast is only of what has gradients: under `if p.requires_grad:`, below `if not p.requires_grad: continue`, or where they are switched on."""
    if any(is_true and "requires_grad" in text for text, is_true in conditions_of(outline, call)):
        return True
    if _switches_on(outline, call):
        return True
    node: ast.AST | None = call
    while node is not None and not isinstance(node, (ast.For, ast.FunctionDef, ast.AsyncFunctionDef)):
        node = outline.parents.get(node)
    above = [s for s in node.body if s.lineno < call.lineno] if isinstance(node, ast.For) else []
    return any(map(_skips_frozen, above))


def _switches_on(outline: Outline, call: ast.Call) -> bool:
    """Whether the statements around a cast make the same parameter trainable: `p.requires_grad = True`."""
    statement: ast.AST | None = call
    while statement is not None and not isinstance(statement, ast.stmt):
        statement = outline.parents.get(statement)
    block = outline.parents.get(statement) if statement is not None else None
    parameter = key_of(call.func.value).removesuffix(".data") if isinstance(call.func, ast.Attribute) else ""
    if not parameter or isinstance(block, ast.Module):  # parameters are cast in a loop
        return False
    neighbours = next((b for b in (getattr(block, "body", ()), getattr(block, "orelse", ())) if statement in b), ())
    return any(_makes_trainable(s, f"{parameter}.requires_grad") for s in neighbours)


def _makes_trainable(statement: ast.stmt, attribute: str) -> bool:
    """Whether a statement is `p.requires_grad = True` or `p.requires_grad_()`."""
    if isinstance(statement, ast.Assign):
        return key_of(statement.targets[0]) == attribute and constant(statement.value) is True
    made = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(made, ast.Call) or key_of(made.func) != f"{attribute}_" or made.keywords:
        return False
    return not made.args or constant(made.args[0]) is True


def _skips_frozen(statement: ast.stmt) -> bool:
    """Whether a statement leaves the iteration for a frozen parameter: `if not p.requires_grad: continue`, also with `or`."""
    if not isinstance(statement, ast.If) or not isinstance(statement.body[-1], ast.Continue):
        return False
    test = statement.test
    tests = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else [test]
    negated = [t.operand for t in tests if isinstance(t, ast.UnaryOp) and isinstance(t.op, ast.Not)]
    return any(key_of(operand).endswith(".requires_grad") for operand in negated)


def model_of_every_parameter(outline: Outline, call: ast.Call) -> str:
    """The model of `for p in model.parameters():` around a cast of each; "" if there is none, or something may be frozen."""
    loop = outline.parents.get(outline.parents.get(call, call))
    source = loop.iter if isinstance(loop, ast.For) else None
    func = source.func if isinstance(source, ast.Call) else None
    if not isinstance(func, ast.Attribute) or func.attr not in {"parameters", "named_parameters"}:
        return ""
    if isinstance(loop, ast.For) and any(isinstance(n, ast.Continue) for n in ast.walk(loop)):
        return ""  # of those that are not skipped
    return "" if may_freeze(outline) else key_of(func.value)


def defined_optimizers(outline: Outline) -> tuple[tuple[ast.Call, Function], ...]:
    """The calls that create an optimizer of a class of this file; none if one keeps the low bits of 16-bit weights."""
    bases = outline.bases.items()
    own = {name for name, parents in bases if any(text_of(base).endswith("Optimizer") for base in parents)}
    own &= outline.calls.keys()
    methods = [method.node for name in own for method in outline.classes.get(name, {}).values()]
    if any(_LOW_BITS.search(ast.unparse(m)) or _stores_copies(m) or _keeps_rest(m) for m in methods):
        return ()
    return tuple((site.call, site.function) for name in sorted(own) for site in outline.calls[name])


def _stores_copies(method: ast.AST) -> bool:
    """Whether a method stores float32 copies of something, most likely of the weights: `state["w"] = p.float().clone()`."""
    stored = [n for n in ast.walk(method) if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Subscript)]
    return any(_FLOAT32_COPY.search(ast.unparse(node.value)) for node in stored)


def _keeps_rest(method: ast.AST) -> bool:
    """Whether a method computes what rounding took from a weight after it has written it: `p.copy_(new); rest = new - p.float()`."""
    text = ast.unparse(method)
    for written in _WRITES.finditer(text):
        if re.search(rf"(?<=\w|\)) - {written[1]}\b|\.sub_?\({written[1]}\b", text[written.end() :]):
            return True
    return False


def optimizer_factories(outline: Outline) -> tuple[tuple[ast.Call, Function], ...]:
    """The calls of functions and classes of other files that create an optimizer: `optimizer = build_optimizer(cfg, model)`."""
    names = [name for name in outline.calls if MAKES_OPTIMIZER.search(name) or _is_foreign_class(outline, name)]
    sites = [site for name in names for site in outline.calls[name]]
    chosen = [name for name in outline.calls if name in outline.bindings and "optim" in name.lower()]
    sites += [site for name in chosen for site in outline.calls[name] if _is_chosen_class(outline, name, site.call)]
    return tuple(
        (call, function)
        for call, function in sites
        if outline.call_target(call, function) is None and _is_assigned_optimizer(outline, call)
    )


def _is_foreign_class(outline: Outline, name: str) -> bool:
    """Whether an imported class has the name of an optimizer that most likely keeps no master weights: `Muon`, `FusedAdam`."""
    full = outline.names.table.get(name, "")
    return bool(full and _FAMILY.search(name)) and not _KEPT.search(full) and not full.startswith("halfstep")


def _is_chosen_class(outline: Outline, name: str, call: ast.Call) -> bool:
    """Whether a call creates an optimizer of a class that only a run knows: `cls = import_string(path)`, `cls(model.parameters())`."""
    first = argument(call, 0, "params")
    is_parameters = isinstance(first, ast.Call) and text_of(first.func).endswith(".parameters")
    bound = outline.bindings[name]
    return is_parameters and all(isinstance(b.value, ast.Call) and b.index is None for b in bound)


def plain_optimizers(outline: Outline) -> tuple[tuple[ast.Call, Function], ...]:
    """The calls that create an optimizer without master weights."""
    calls = [
        site
        for full, sites in outline.library_calls.items()
        if full.startswith(_PLAIN)
        and "lr_scheduler" not in full
        and ".swa_utils" not in full
        and not full.endswith("Schedule")
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
    """Whether a class that may be one of several keeps no master weights for one of them."""
    options = [func]
    key = key_of(func)
    if key:
        options = [part for v in outline.values(key, function) for part in arms_of(v)]
    return any(outline.names.full(option).startswith(_PLAIN) for option in options)


def _is_assigned_optimizer(outline: Outline, call: ast.Call) -> bool:
    parent = outline.parents.get(call)
    targets = parent.targets if isinstance(parent, ast.Assign) else []
    return any("optim" in key_of(t).lower() for x in targets for t in (x.elts if isinstance(x, ast.Tuple) else [x]))


def enabled_with_adapters(lineage: Lineage, parts: tuple[tuple[str, Function], ...]) -> list[Cast]:
    """The casts of a model some layers of which are trained whole next to adapters: `model.projector.requires_grad_(True)` below them.

    PEFT freezes what was enabled above, and casts its own adapters alone to float32.
    """
    outline = lineage.outline
    is_lifted = any("kbit" in name for name in outline.calls) or outline.names.uses("unsloth")
    if not parts or is_lifted or upcasts_parameters(outline) or lineage.is_adapted or lineage.is_restored:
        return []
    attached = list(attachments(outline))
    for text, function in parts:
        above = [site.call.lineno for site in attached if site.function is function]
        sites = [s for name in ("requires_grad_", "parameters") for s in outline.calls.get(name, ())]
        owned = [c for c, f in sites if f is function and text_of(getattr(c.func, "value", None)) == text]
        is_below = bool(above) and any(call.lineno > max(above) for call in owned)
        if is_below and not _ADAPTER.search(text) and trains_part_of(lineage, ((text, function),)):
            return [replace(cast, key=text) for cast in lasting_casts(lineage) if cast.low]
    return []
