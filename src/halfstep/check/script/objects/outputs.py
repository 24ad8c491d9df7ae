"""The dtype of what a model returns: logits that leave an autocast region, and classes that cast their own output."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from halfstep.check.script.objects.formats import SIXTEEN_BIT, passed_for
from halfstep.check.script.objects.modules import created_classes
from halfstep.check.script.objects.values import UNKNOWN, argument, autocasts_of, constant
from halfstep.check.script.objects.weights import Creation, cast_formats, conditions_of
from halfstep.check.script.syntax.names import chain, key_of
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import Binding, CallSite

if TYPE_CHECKING:
    from halfstep.check.script.script import Script

__all__ = ["Exit", "in_no_grad", "iterated", "keeps_dtype", "keeps_format", "leaves_autocast", "leaves_engine"]

MAX_STEPS = 8  # assignments and reshapes between the output of a model and its loss
_RESHAPES = {
    "view", "reshape", "flatten", "transpose", "permute", "contiguous", "squeeze", "unsqueeze", "swapaxes", "cuda",
}  # fmt: skip
_CASTS = re.compile(r"float\(|float32|fp32|softmax|upcast|\.double\(")
# A function or module with such a name is no model whose last layer is a matrix product.
_MODEL = re.compile(
    r"model|net|classifier|head|backbone|student|encoder|decoder|policy|actor|gpt|llm|\blm\b|vit|bert", re.IGNORECASE
)
_TEMPERATURE = re.compile(r"(^|[._])(temperature|temp|tau|T)$")
_ASKS_ENGINE = {"fp16_enabled": "float16", "bfloat16_enabled": "bfloat16"}  # methods of a DeepSpeed engine
_MODES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}  # blocks of a DeepSpeed configuration
_LIBRARIES = ("torchvision.models.", "timm.", "torch.nn.")
# These cast the output of a model that they wrap back to float32, or open regions of their own.
_FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning", "lightning_fabric")
_SELECTS = {"torch.masked_select", "torch.index_select", "torch.reshape", "torch.flatten", "torch.squeeze"}


class Exit(NamedTuple):
    """Logits that a model computes under autocast and that are used after the region."""

    model: str
    formats: frozenset[str]
    is_certain: bool  # the text shows that the model casts nothing back
    cause: str = "autocast ends before this loss"
    is_training: bool = True  # False if a caller computes the logits without gradients


def in_no_grad(script: Script, node: ast.AST) -> bool:
    """Whether a `with` or a decorator around a node turns gradients off."""
    contexts: list[ast.expr] = []
    parent = script.outline.parents.get(node)
    while parent is not None:
        if isinstance(parent, (ast.With, ast.AsyncWith)):
            contexts += [item.context_expr for item in parent.items]
        elif isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            contexts += parent.decorator_list
        parent = script.outline.parents.get(parent)
    return any(re.search(r"no_grad|inference_mode", ast.unparse(context)) for context in contexts)


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


def leaves_autocast(script: Script, logits: ast.expr, function: Function, line: int) -> Exit | None:
    """The autocast region that logits come from, if they are the output of a model and nothing casts them since."""
    outline = script.outline
    if outline.names.uses(*_FRAMEWORKS):
        return None
    root, _ = _walk_back(outline, logits, function, line)
    if isinstance(root, ast.Name) and root.id in function.params:
        return _leaves_before_call(script, root.id, function)
    node, inside = _output_call(outline, logits, function, line)
    if node is None or inside is None:
        return None
    model = key_of(node.func).removesuffix(".forward")
    formats = _formats_around(script, inside, function)
    if not formats or outline.names.full(node.func) or not _MODEL.search(model):
        return None
    target = outline.call_target(node, function)
    if target is not None and _CASTS.search(ast.unparse(target.node)):
        return None
    creations = script.training.model(node.func, function).creations
    own = [c for c in creations if created_classes(outline, c.node)]
    if any(not keeps_dtype(script, c) for c in own):
        return None
    certain = bool(creations) and all(keeps_dtype(script, c) for c in creations)
    if formats <= SIXTEEN_BIT:
        return Exit(model, formats, certain)
    return Exit(model, formats & SIXTEEN_BIT, False, "autocast, where it is not float32, ends before this loss")


def _leaves_before_call(script: Script, name: str, function: Function) -> Exit | None:
    """The same for logits that a function gets: some caller passes them after its region has ended."""
    for value, caller in passed_for(script.outline, name, function):
        if caller is function or _formats_around(script, value, caller):
            continue
        exit_ = leaves_autocast(script, value, caller, value.lineno)
        if exit_ is not None:
            cause = f"{exit_.cause.removesuffix('before this loss')}before {script.at(value)} passes them here"
            return exit_._replace(cause=cause, is_training=exit_.is_training and not in_no_grad(script, value))
    return None


def leaves_engine(script: Script, logits: ast.expr, function: Function, line: int) -> Exit | None:
    """The DeepSpeed engine that logits come from, if its inputs are cast to 16 bits: so are its weights and its output."""
    outline = script.outline
    created = outline.library_calls.get("deepspeed.initialize", ())
    root, _ = _walk_back(outline, logits, function, line) if created else (None, None)
    if isinstance(root, ast.Name) and root.id in function.params:
        passed = [(v, f) for v, f in passed_for(outline, root.id, function) if f is not function]
        exits = (leaves_engine(script, v, f, v.lineno) for v, f in passed if not in_no_grad(script, v))
        return next((exit_ for exit_ in exits if exit_ is not None), None)
    call, _ = _output_call(outline, logits, function, line) if created else (None, None)
    if call is None:
        return None
    key = key_of(call.func)
    names, models = set(), []
    for site in created:
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


def _configured(outline: Outline, site: CallSite) -> str:
    """The format of an engine whose configuration is a dictionary of this file with `"bf16": {"enabled": True}`."""
    config = argument(site.call, None, "config") or argument(site.call, None, "config_params")
    values = outline.values(key_of(config), site.function) if config is not None and key_of(config) else [config]
    table = values[0] if len(values) == 1 else None
    modes = {}
    for key, value in zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ():
        name = str(constant(key)) if key is not None else "?"
        if name in {"torch_autocast", "amp", "?"}:
            return ""
        inner = zip(value.keys, value.values, strict=True) if isinstance(value, ast.Dict) else ()
        modes[name] = any(k is not None and constant(k) == "enabled" and constant(v) is True for k, v in inner)
    return next((fmt for name, fmt in _MODES.items() if modes.get(name)), "")


def _arguments(call: ast.Call) -> Iterator[str]:
    """The variables that a call receives."""
    yield from (v.id for v in (*call.args, *(k.value for k in call.keywords)) if isinstance(v, ast.Name))


def _casts_before(outline: Outline, name: str, function: Function, line: int) -> Iterator[ast.Call]:
    """The casts of a variable before a line: `x, y = x.to(device).half(), y.to(device)`."""
    for binding in outline.lookup(name, function):
        if binding.function is function and getattr(binding.node, "lineno", line) < line:
            cast = _cast_in(_element(binding))
            if cast is not None and cast_formats(outline, cast, function) & SIXTEEN_BIT:
                yield cast


def _element(binding: Binding) -> ast.expr | None:
    """What an assignment gives its variable; of `a, b = x, y` the element."""
    value = binding.value
    if isinstance(binding.node, ast.For):
        return iterated(binding)
    if binding.index is not None and isinstance(value, (ast.Tuple, ast.List)) and binding.index < len(value.elts):
        return value.elts[binding.index]
    return value if binding.index in {None, 0} else None


def iterated(binding: Binding) -> ast.expr | None:
    """What a loop variable is a row of: `logits` of `for row, ids in zip(logits, input_ids)`."""
    source = binding.node.iter if isinstance(binding.node, ast.For) else None
    if isinstance(source, ast.Call) and binding.index is not None:
        name = key_of(source.func)
        if name == "zip" and binding.index < len(source.args):
            return source.args[binding.index]
        return source.args[0] if name == "enumerate" and binding.index == 1 and source.args else None
    return source if binding.index is None and isinstance(source, ast.Name) else None


def _cast_in(node: ast.expr | None) -> ast.Call | None:
    """The cast in `data.to(device).half()`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in {"half", "bfloat16"} or (
            node.func.attr in {"to", "type"} and (node.args or node.keywords)
        ):
            return node
        node = node.func.value
    return None


def _output_call(
    outline: Outline, logits: ast.expr, function: Function, line: int
) -> tuple[ast.Call | None, ast.AST | None]:
    """The call of a model that logits are the output of, and its statement: through reshapes and a temperature."""
    node, inside = _walk_back(outline, logits, function, line)
    is_call = isinstance(node, ast.Call) and inside is not None and bool(chain(node.func))
    return (node, inside) if is_call and isinstance(node, ast.Call) else (None, None)


def _walk_back(
    outline: Outline, logits: ast.expr, function: Function, line: int
) -> tuple[ast.expr | None, ast.AST | None]:
    """What logits are made from in their function, and its statement; a parameter has no statement of its own."""
    node = logits
    inside: ast.AST | None = None
    for _ in range(MAX_STEPS):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _RESHAPES:
            node = node.func.value
        elif isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "logits"):
            node = node.value
        elif isinstance(node, ast.BinOp) and keeps_format(node) is not None:
            node = keeps_format(node) or node
        elif isinstance(node, ast.Call) and (selected := _selected(outline, node, function)) is not None:
            node = selected
        elif isinstance(node, ast.Name):
            binding = _last_binding(outline, node.id, function, line)
            if binding is None and node.id in function.params:
                return node, inside
            value = _element(binding) if binding is not None else None
            if binding is None or value is None:
                return None, None
            node, inside, line = value, binding.node, binding.node.lineno  # type: ignore[attr-defined]
        else:
            break
    return node, inside


def _selected(outline: Outline, call: ast.Call, function: Function) -> ast.expr | None:
    """The tensor that a call selects from or reshapes: a function of torch, or one of this file that only does that."""
    if outline.names.full(call.func) in _SELECTS:
        return argument(call, 0, "input")
    target = outline.call_target(call, function) if isinstance(call.func, ast.Name) else None
    param = _returned_parameter(outline, target) if target is not None and target is not function else ""
    return argument(call, target.params.index(param), param) if target is not None and param else None


def _returned_parameter(outline: Outline, target: Function) -> str:
    """The parameter that a function without branches returns, reshaped or selected from; "" if it returns anything else."""
    origins = {name: name for name in target.params}
    for statement in target.body:
        if isinstance(statement, ast.Return):
            return origins.get(_reshaped(outline, statement.value), "")
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            origins[statement.targets[0].id] = origins.get(_reshaped(outline, statement.value), "")
        elif not isinstance(statement, ast.Expr):
            return ""
    return ""


def _reshaped(outline: Outline, node: ast.expr | None) -> str:
    """The variable that an expression reshapes or selects from; "" if it computes anything."""
    while node is not None and not isinstance(node, ast.Name):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _RESHAPES:
            node = node.func.value
        elif isinstance(node, ast.Call) and outline.names.full(node.func) in _SELECTS:
            node = argument(node, 0, "input")
        else:
            node = node.value if isinstance(node, ast.Subscript) else None
    return node.id if node is not None else ""


def keeps_format(node: ast.BinOp) -> ast.expr | None:
    """The logits of `logits / 2`, `30 * logits` and `logits / temperature`: a number does not change their dtype."""
    if isinstance(constant(node.right), (int, float)) or _TEMPERATURE.search(key_of(node.right)):
        return node.left
    if isinstance(constant(node.left), (int, float)):
        return node.right
    return None


def _last_binding(outline: Outline, name: str, function: Function, line: int) -> Binding | None:
    here = [b for b in outline.lookup(name, function) if b.function is function]
    before = [b for b in here if getattr(b.node, "lineno", 0) < line]
    # In the branches of a condition the earlier one may be the one that runs.
    return before[-1] if before else None


def _formats_around(script: Script, node: ast.AST, function: Function) -> frozenset[str]:
    """The 16-bit formats of the innermost autocast region around a statement."""
    parent = script.outline.parents.get(node)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if isinstance(parent, ast.With):
            regions = [a for item in parent.items for a in autocasts_of(script.outline, item.context_expr, function)]
            if regions:
                dtypes = frozenset().union(*(a.dtypes for a in regions))
                enabled = all(a.enabled != "no" for a in regions)
                return dtypes if enabled and dtypes & SIXTEEN_BIT and UNKNOWN not in dtypes else frozenset()
        parent = script.outline.parents.get(parent)
    return frozenset()
