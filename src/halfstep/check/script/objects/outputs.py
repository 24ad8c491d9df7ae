"""The dtype of what a model returns: logits that leave an autocast region, and classes that cast their own output."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from halfstep.check.regex import regex
from halfstep.check.script.flow.sources import Source, element_of, sources_of
from halfstep.check.script.objects.formats import SIXTEEN_BIT, passed_for, returned_by
from halfstep.check.script.objects.modules import attribute_values, created_classes
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.objects.weights import Creation, cast_formats, conditions_of
from halfstep.check.script.regions.callers import formats_of, regions_around
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import CallSite, default_of

if TYPE_CHECKING:
    from halfstep.check.script.script import Script

__all__ = [
    "MODEL_NAME",
    "Exit",
    "in_no_grad",
    "is_product",
    "keeps_dtype",
    "leaves_autocast",
    "leaves_engine",
    "runs_in_autocast",
]

MAX_CALLS = 4  # functions between the output of a model and its loss
_CASTS = regex(r"float\(|float32|fp32|softmax|upcast|\.double\(")
# A function or module with such a name is no model whose last layer is a matrix product.
MODEL_NAME = regex(
    r"model|net|classifier|head|backbone|student|encoder|decoder|policy|actor|gpt|llm|\blm\b|vit|bert", re.IGNORECASE
)
_ASKS_ENGINE = {"fp16_enabled": "float16", "bfloat16_enabled": "bfloat16"}  # methods of a DeepSpeed engine
_MODES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}  # blocks of a DeepSpeed configuration
_ENGINE_KEYS = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"}
_OTHER_CONTEXT = regex(
    r"no_grad|enable_grad|set_grad|inference_mode|record_function|profile|torch\.device|no_sync|tqdm|open\(|staticmethod"
)
_PRODUCT = regex(r"^torch\.nn\.(Linear|Bilinear|Conv(Transpose)?\dd)$")
_LIBRARIES = ("torchvision.models.", "timm.", "torch.nn.")
# These cast the output of a model that they wrap back to float32, or open regions of their own.
_FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning", "lightning_fabric")


class Exit(NamedTuple):
    """Logits that a model computes under autocast and that are used after the region."""

    model: str
    formats: frozenset[str]
    is_certain: bool  # the text shows that the model casts nothing back
    cause: str = "autocast ends before this loss"
    is_training: bool = True  # False if a caller computes the logits without gradients
    flags: frozenset[str] = frozenset()  # variables that turn the region on


def in_no_grad(script: Script, node: ast.AST) -> bool:
    """Whether a `with` or a decorator around a node turns gradients off."""
    contexts = _contexts_around(script, node)
    return any(re.search(r"no_grad|inference_mode", ast.unparse(context)) for context in contexts)


def _contexts_around(script: Script, node: ast.AST) -> list[ast.expr]:
    """The contexts of every `with` around a node, and the decorators of its functions."""
    contexts: list[ast.expr] = []
    parent = script.outline.parents.get(node)
    while parent is not None:
        if isinstance(parent, (ast.With, ast.AsyncWith)):
            contexts += [item.context_expr for item in parent.items]
        elif isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            contexts += parent.decorator_list
        parent = script.outline.parents.get(parent)
    return contexts


def keeps_dtype(script: Script, creation: Creation) -> bool:
    """Whether a class returns what its last layer computes: one of this file without a cast, or a library's."""
    outline = script.outline
    if outline.names.full(creation.node.func).startswith(_LIBRARIES):
        return True
    classes = created_classes(outline, creation.node)
    return bool(classes) and all(_casts_nothing(outline, name) for name in classes)


def _casts_nothing(outline: Outline, name: str) -> bool:
    forward = outline.classes.get(name, {}).get("forward")
    return forward is not None and not _CASTS.search(ast.unparse(forward.node))


def leaves_autocast(
    script: Script, logits: ast.expr, function: Function, line: int, depth: int = MAX_CALLS
) -> Exit | None:
    """The autocast region that logits come from, if they are the output of a model and nothing casts them since.

    The region is in the same function, in a function of the file that returns the logits, or in a caller that passes them.
    """
    if not depth or script.outline.names.uses(*_FRAMEWORKS):
        return None
    sources = sources_of(script.outline, logits, function, line)
    if any(isinstance(s.node, ast.Call) for s in sources) and function in script.functions_in_autocast:
        return None
    return _exit_of_all(script, sources, function, depth)


def _exit_of_all(script: Script, sources: list[Source], function: Function, depth: int) -> Exit | None:
    """The region that logits with several sources come from: uncertain if one of them comes from none."""
    exits = [_exit_of(script, source, function, depth) for source in sources]
    left = [exit_ for exit_ in exits if exit_ is not None]
    if not left or len(left) == len(exits):
        return left[0] if left else None
    cause = left[0].cause.replace("autocast ends", "autocast, where it is active, ends")
    return left[0]._replace(is_certain=False, cause=cause)


def _exit_of(script: Script, source: Source, function: Function, depth: int) -> Exit | None:
    """The region that one source of logits comes from."""
    outline = script.outline
    node = source.node
    if isinstance(node, ast.Name):
        return _leaves_before_call(script, node.id, function, depth)
    if not isinstance(node, ast.Call) or outline.names.full(node.func):
        return None
    regions = regions_around(script.outline, node, function)
    if not regions:
        return _leaves_in_call(script, node, source, function, depth)
    model = key_of(node.func).removesuffix(".forward")
    formats = formats_of(regions)
    is_first = source.position in {None, 0} or "logit" in source.name
    target = outline.call_target(node, function)
    is_cast = target is not None and _CASTS.search(ast.unparse(target.node))
    if not formats or not is_first or is_cast:
        return None
    creations = script.training.model(node.func, function).creations
    own = [c for c in creations if created_classes(outline, c.node)]
    if any(not keeps_dtype(script, c) for c in own):
        return None
    certain = bool(creations) and all(keeps_dtype(script, c) for c in creations)
    is_matmul = is_product(script, node, function)
    if target is not None and target.name != "__init__" and not creations:
        # `forward_batch(model, x)`, which returns what a model does.
        called = [key_of(v.func) if isinstance(v, ast.Call) else "" for v in returned_by(target)]
        model = called[-1] if called and all(map(MODEL_NAME.search, called)) else model
    if not MODEL_NAME.search(model) and not is_matmul:
        return None
    certain |= is_matmul
    flags = frozenset(name for a in regions for name in re.findall(r"[A-Za-z_]\w*", a.enabled))
    if formats <= SIXTEEN_BIT:
        return Exit(model, formats, certain, flags=flags)
    cause = "autocast, where it is not float32, ends before this loss"
    return Exit(model, formats & SIXTEEN_BIT, False, cause, flags=flags)


def is_product(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether a layer is a matrix product, which autocast computes in 16 bits; it runs norms in float32."""
    key = key_of(call.func)
    values = attribute_values(script.outline, key, function)
    names = [script.outline.names.full(value.func) if isinstance(value, ast.Call) else "" for value in values]
    return bool(names) and all(_PRODUCT.search(name) for name in names)


def _leaves_in_call(script: Script, call: ast.Call, source: Source, function: Function, depth: int) -> Exit | None:
    """The same for logits that a function of the file, or the forward of a model, returns after its region has ended."""
    outline = script.outline
    target = outline.call_target(call, function)
    if target is None:
        creations = script.training.model(call.func, function).creations
        classes = {name for c in creations for name in created_classes(outline, c.node)}
        target = outline.classes[classes.pop()].get("forward") if len(classes) == 1 else None
    if target is None or target is function or target.name == "__init__" or _CASTS.search(ast.unparse(target.node)):
        return None
    position = source.position
    returned = [v for v in returned_by(target) if constant(v) is not None and not text_of(v).startswith("(None")]
    values = [(v, sources_of(outline, v, target, v.end_lineno or v.lineno, position)) for v in returned]
    exits = [
        _exit_of_returned(script, sources, target, call, function, depth - 1) for _, sources in values if depth > 1
    ]
    exit_ = exits[0] if exits else None
    if exit_ is None or None in exits or any(_is_off(name, call, target) for name in exit_.flags):
        return None
    is_passed = any(isinstance(s.node, ast.Name) for _, sources in values for s in sources)
    cause = exit_.cause if is_passed else exit_.cause.replace("ends before this loss", f"ends in `{target.name}`")
    is_training = exit_.is_training and not any(in_no_grad(script, value) for value, _ in values)
    return exit_._replace(cause=cause, is_training=is_training)


def _exit_of_returned(
    script: Script, sources: list[Source], target: Function, call: ast.Call, function: Function, depth: int
) -> Exit | None:
    """The region of what a function returns: its own, or that of the logits which this call passes and gets back."""
    passed = [s.node.id for s in sources if isinstance(s.node, ast.Name) and s.node.id in target.params]
    if not passed:
        return _exit_of_all(script, sources, target, depth)
    is_bound = target.method and target.params[:1] == ("self",)
    values = [argument(call, target.params.index(name) - is_bound, name) for name in passed if name != "self"]
    if len(values) != len(sources) or None in values:
        return None
    inner = [s for v in values if v is not None for s in sources_of(script.outline, v, function, call.lineno)]
    return _exit_of_all(script, inner, function, depth)


def _is_off(name: str, call: ast.Call, target: Function) -> bool:
    """Whether a call passes False for a flag of a function, or leaves it at False."""
    if name not in target.params:
        return False
    is_bound = target.method and target.params[0] == "self"
    value = argument(call, target.params.index(name) - is_bound, name) or default_of(target, name)
    return value is not None and constant(value) in {False, None}


def runs_in_autocast(script: Script, node: ast.AST, function: Function) -> bool:
    """Whether a region may be active where a node runs: around it, around a call of its function, or in a context not known."""
    if not script.autocasts:
        return False
    calls = [call for call, _ in script.outline.calls.get(function.name, ())]
    contexts = [context for part in (node, *calls) for context in _contexts_around(script, part)]
    if any(map(_may_autocast, contexts)) or function in script.functions_in_autocast:
        return not (script.has("backward") and _trained_outside(script, node, function))
    # Another file may call the function inside a region, unless it opens its own.
    is_called = isinstance(function.node, ast.Module) or bool(calls)
    own = {part for part in ast.walk(function.node) if isinstance(part, ast.Call)} if not is_called else set()
    return not is_called and not any(region.node in own for region in script.autocasts)


def _trained_outside(script: Script, node: ast.AST, function: Function, depth: int = 3) -> bool:
    """Whether a function that calls backward reaches a node through calls without any region, next to others that have one."""
    outline = script.outline
    if any(map(_may_autocast, _contexts_around(script, node))):
        return False
    for call, caller in outline.calls.get(function.name, ()):
        if outline.call_target(call, caller) is not function or in_no_grad(script, call):
            continue
        if any(map(_may_autocast, _contexts_around(script, call))):
            continue
        is_training = any(where is caller for _, where in outline.calls.get("backward", ()))
        own = {region.node for region in script.autocasts}.intersection(ast.walk(caller.node))
        if is_training and not own and not isinstance(caller.node, ast.Module):
            # Nothing around the calls of the training function may be a region either.
            sites = [c for c, f in outline.calls.get(caller.name, ()) if outline.call_target(c, f) is caller]
            around = [context for site in sites for context in _contexts_around(script, site)]
            if sites and not any(map(_may_autocast, around)) and caller not in script.functions_in_autocast:
                return True
        elif caller is not function and depth and not is_training and _trained_outside(script, call, caller, depth - 1):
            return True
    return False


def _may_autocast(context: ast.expr) -> bool:
    """Whether a context may be a region: any but those of gradients, devices and time."""
    return not _OTHER_CONTEXT.search(ast.unparse(context))


def _leaves_before_call(script: Script, name: str, function: Function, depth: int) -> Exit | None:
    """The same for logits that a function gets: some caller passes them after its region has ended."""
    for value, caller in passed_for(script.outline, name, function):
        if caller is function or formats_of(regions_around(script.outline, value, caller)):
            continue
        exit_ = leaves_autocast(script, value, caller, value.lineno, depth - 1)
        if exit_ is not None:
            cause = exit_.cause.replace("before this loss", f"before {script.at(value)} passes them on")
            return exit_._replace(cause=cause, is_training=exit_.is_training and not in_no_grad(script, value))
    return None


def leaves_engine(script: Script, logits: ast.expr, function: Function, line: int) -> Exit | None:
    """The DeepSpeed engine that logits come from, if its inputs are cast to 16 bits: so are its weights and its output."""
    outline = script.outline
    created = outline.library_calls.get("deepspeed.initialize", ())
    sources = sources_of(outline, logits, function, line) if created else []
    root = sources[-1].node if sources and sources[-1].position in {None, 0} else None
    if isinstance(root, ast.Name):
        passed = [(v, f) for v, f in passed_for(outline, root.id, function) if f is not function]
        exits = (leaves_engine(script, v, f, v.lineno) for v, f in passed if not in_no_grad(script, v))
        return next((exit_ for exit_ in exits if exit_ is not None), None)
    if not isinstance(root, ast.Call):
        return None
    call = root
    key = key_of(call.func)
    names, models = set(), []
    for site in created:
        if _is_other_object(outline, key, function, site):
            continue
        statement = outline.parents.get(site.call)
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        first = [t.elts[0] if isinstance(t, ast.Tuple) and t.elts else t for t in targets]
        model = argument(site.call, None, "model")
        names |= {key_of(node) for node in (*first, model)} - {""}
        models += [(model, site.function)] if model is not None else []
    variables = {key}
    if key in function.params:
        variables |= {key_of(value) for value, _ in passed_for(outline, key, function)}
    if not names & variables:
        return None
    casts = [cast for value in _arguments(call) for cast in _casts_before(outline, value, function, call.lineno)]
    formats: frozenset[str] = frozenset().union(*(cast_formats(outline, cast, function) for cast in casts))
    asked = {fmt for name, fmt in _ASKS_ENGINE.items() if name in outline.calls}
    configured = [_configured(outline, site) for site in created]
    if not formats & SIXTEEN_BIT and not asked and configured and all(configured) and len(set(configured)) == 1:
        mode = configured[0]
        return Exit(key, frozenset({mode}), False, f"the engine computes in {mode}, and no autocast is active")
    if not formats & SIXTEEN_BIT and not asked:
        return None
    conditional = bool(asked) or not formats <= SIXTEEN_BIT or any(conditions_of(outline, cast) for cast in casts)
    formats = (formats & SIXTEEN_BIT) or frozenset(asked)
    creations = [c for model, scope in models for c in script.training.model(model, scope).creations]
    own = [c for c in creations if created_classes(outline, c.node)]
    if any(not keeps_dtype(script, c) for c in own):
        return None
    certain = bool(creations) and all(keeps_dtype(script, c) for c in creations) and not conditional
    condition = "where its inputs are cast, " if conditional else ""
    return Exit(key, formats, certain, f"{condition}the engine has 16-bit weights, and no autocast is active")


def _is_other_object(outline: Outline, key: str, function: Function, site: CallSite) -> bool:
    """Whether a function creates an object of its own under a name that the function with the engine has too: `model = DDP(Net())`."""
    bound = outline.bindings.get(key, ()) if key.isidentifier() and site.function is not function else ()
    own = [b for b in bound if b.function is function]
    if not own or not any(b.function is site.function for b in bound):
        return False
    calls = [b.value for b in own if isinstance(b.value, ast.Call) and b.index is None]
    known = [c for c in calls if created_classes(outline, c) or outline.names.full(c.func).startswith("torch.")]
    return len(known) == len(own)


def _configured(outline: Outline, site: CallSite) -> str:
    """The format of an engine whose configuration is a dictionary of this file with `"bf16": {"enabled": True}`."""
    config = argument(site.call, None, "config") or argument(site.call, None, "config_params")
    values = outline.values(key_of(config), site.function) if config is not None and key_of(config) else [config]
    if len(values) == 1 and isinstance(values[0], ast.Dict):
        return _mode_of(values[0])
    # A function creates it, or a file is read where there is one: the only configuration in this file.
    tables = [n for n in ast.walk(outline.module.node) if isinstance(n, ast.Dict)]
    tables = [t for t in tables if _ENGINE_KEYS & {str(constant(key)) for key in t.keys}]
    return _mode_of(tables[0]) if len(tables) == 1 else ""


def _mode_of(table: ast.Dict) -> str:
    """The format of a DeepSpeed configuration, `"fp16": {"enabled": args.fp16}` included; "" if nothing turns one on."""
    modes = {}
    for key, value in zip(table.keys, table.values, strict=True):
        name = str(constant(key)) if key is not None else "?"
        if name in {"torch_autocast", "amp", "?"}:
            return ""
        inner = zip(value.keys, value.values, strict=True) if isinstance(value, ast.Dict) else ()
        modes[name] = any(k is not None and constant(k) == "enabled" and constant(v) in {True, ...} for k, v in inner)
    formats = {fmt for name, fmt in _MODES.items() if modes.get(name)}
    return formats.pop() if len(formats) == 1 else ""


def _arguments(call: ast.Call) -> Iterator[str]:
    """The variables that a call receives."""
    yield from (v.id for v in (*call.args, *(k.value for k in call.keywords)) if isinstance(v, ast.Name))


def _casts_before(outline: Outline, name: str, function: Function, line: int) -> Iterator[ast.Call]:
    """The casts of a variable before a line: `x, y = x.to(device).half(), y.to(device)`."""
    for binding in outline.lookup(name, function):
        if binding.function is function and getattr(binding.node, "lineno", line) < line:
            cast = _cast_in(element_of(binding))
            if cast is not None and cast_formats(outline, cast, function) & SIXTEEN_BIT:
                yield cast


def _cast_in(node: ast.expr | None) -> ast.Call | None:
    """The cast in `data.to(device).half()`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in {"half", "bfloat16"} or (
            node.func.attr in {"to", "type"} and (node.args or node.keywords)
        ):
            return node
        node = node.func.value
    return None
