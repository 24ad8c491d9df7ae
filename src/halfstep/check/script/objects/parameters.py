"""The models whose parameters an optimizer is given: `model.parameters()`, groups of them, lists that a loop fills; their parts and copies."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from halfstep.check.regex import regex
from halfstep.check.script.objects.expressions import arms_of
from halfstep.check.script.objects.formats import SIXTEEN_BIT, base_of, cast_formats, formats_of, keyword_of, passed_for
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.syntax.children import statements_in
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = [
    "is_cast_in_place",
    "is_cast_with",
    "is_listed",
    "is_merged",
    "is_model_name",
    "may_freeze",
    "mentions_masters",
    "owners_of",
    "parts_of",
]

_GROUPS = regex(r"param|group|decay|layer", re.IGNORECASE)
_ADAPTERS = regex(r"lora|adapter|peft", re.IGNORECASE)
_MASTERS = regex(
    r"master_?(weight|param|copy|copies|dtype|grad|fp32|model)|fp32_(master|param|copy|copies|weight|group|from)|"
    r"params?_(fp32|master)|FP16_?Optimizer|(?-i:^amp_C$)|kahan|stochastic_?round|^optimi$|AnyPrecision|from_fp16_groups|"
    r"cast_training_params|upcast_trainable",
    re.IGNORECASE,
)
_REFERENCE = regex(r"teacher|ref|frozen|target|vae|tokeni|text_enc|reward|ema|old", re.IGNORECASE)  # not trained
_OPTION = regex(r"^(\w*args|opts?|\w*cfg|\w*config|flags|FLAGS|hparams)\.\w[\w.]*$")
_UNTRACKED = regex(r"no_grad|inference_mode")
_PATH = regex(r"^(pathlib\.)?Path\(|^os\.path\.|/ f?['\"]|^f?['\"].*(/|\.(pth?|bin|ckpt|safetensors))['\"]?")
_is_master = lru_cache(maxsize=4096)(_MASTERS.search)  # the files of a project share most of their names


def owners_of(
    outline: Outline, params: ast.expr, function: Function, depth: int = 4
) -> Iterator[tuple[ast.expr, Function]]:
    """The models whose own parameters an expression contains, each with the function to look it up in."""
    # Copies of the parameters, such as float32 masters, are other tensors.
    names = {n.attr for n in ast.walk(params) if isinstance(n, ast.Attribute)}
    if names & {"clone", "float", "float32", "detach", "master", "deepcopy"}:
        return
    stack: list[ast.AST] = [params]
    while stack:
        node = stack.pop()
        func = node.func if isinstance(node, ast.Call) else None
        if isinstance(func, ast.Attribute) and func.attr in {"parameters", "named_parameters"}:
            yield from _instances(outline, func.value, function)
            continue
        if isinstance(node, ast.Attribute) and is_listed(outline, node.value):
            yield node.value, function
            continue
        target = outline.call_target(node, function) if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and target is None and _is_grouping(text_of(node.func)):
            # A function of another file that sorts the parameters into groups, or a method of the model.
            receiver = [func.value] if isinstance(func, ast.Attribute) else []
            yield from ((arg, function) for arg in (*receiver, *node.args) if is_model_name(key_of(arg)))
        elif target is not None and depth:
            for call, inner in _parameter_calls(outline, target):
                yield from _instances(outline, call, inner)
        elif isinstance(node, ast.Name) and depth:
            for binding in outline.lookup(node.id, function):
                if binding.value is not None and binding.function is function:
                    yield from owners_of(outline, binding.value, function, depth - 1)
                    if isinstance(binding.value, ast.Call) and _is_parameter(outline, binding.value):
                        yield node, function
            if node.id in function.params:  # `def build_optimizer(params, lr)`
                for value, caller in passed_for(outline, node.id, function):
                    yield from owners_of(outline, value, caller, depth - 1)
            for call, inner in _appended(outline, node.id, function):
                yield from _instances(outline, call, inner)
            for value in _extended(outline, node.id, function):
                yield from owners_of(outline, value, function, depth - 1)
        elif isinstance(node, ast.Attribute) and key_of(node).startswith("self.") and depth:
            # `self.params = [p for p in self.net.parameters() if p.requires_grad]` of another method
            for binding in outline.lookup(key_of(node), function):
                is_own = binding.key == key_of(node) and binding.function.cls == function.cls
                if is_own and binding.value is not None and binding.index is None:
                    yield from owners_of(outline, binding.value, binding.function, depth - 1)
        stack.extend(ast.iter_child_nodes(node))


def _is_grouping(name: str) -> bool:
    """Whether a function of another file is named for a model's parameters, and not for those of its adapters alone."""
    return bool(_GROUPS.search(name)) and not _ADAPTERS.search(name)


def is_listed(outline: Outline, model: ast.expr) -> bool:
    """Whether an expression reads the parameters that a model lists itself, `model.expert_parameters`: those are trained, whatever is frozen."""
    listed = outline.parents.get(model)
    if not isinstance(listed, ast.Attribute) or not is_model_name(key_of(model)):
        return False
    parent = outline.parents.get(listed)
    is_called = isinstance(parent, ast.Call) and parent.func is listed
    return listed.attr.endswith(("_parameters", "_params")) and _is_grouping(listed.attr) and not is_called


def _is_parameter(outline: Outline, call: ast.Call) -> bool:
    return outline.names.full(call.func) == "torch.nn.Parameter"


def _parameter_calls(outline: Outline, target: Function) -> Iterator[tuple[ast.expr, Function]]:
    for name in ("parameters", "named_parameters"):
        for call, inner in outline.calls.get(name, ()):
            if inner is target and isinstance(call.func, ast.Attribute):
                yield call.func.value, inner


def _appended(outline: Outline, name: str, function: Function) -> Iterator[tuple[ast.expr, Function]]:
    """The models of a loop `for n, p in model.named_parameters(): groups.append(p)`."""
    for call, inner in outline.calls.get("append", ()):
        lists = arms_of(call.func.value) if isinstance(call.func, ast.Attribute) else []
        if inner is function and name in map(key_of, lists):  # also `(decay if p.ndim > 1 else other).append(p)`
            parent: ast.AST | None = call
            while parent is not None and not isinstance(parent, (ast.For, ast.FunctionDef)):
                parent = outline.parents.get(parent)
            if isinstance(parent, ast.For):
                for part in ast.walk(parent.iter):
                    if isinstance(part, ast.Attribute) and part.attr in {"parameters", "named_parameters"}:
                        yield part.value, function


def _extended(outline: Outline, name: str, function: Function) -> Iterator[ast.expr]:
    """What `groups.extend(...)` and `groups += ...` add to a list, and `groups.append({"params": ...})` of a dictionary."""
    for method in ("extend", "append"):
        for call, inner in outline.calls.get(method, ()):
            is_list = isinstance(call.func, ast.Attribute) and key_of(call.func.value) == name
            if (
                inner is function
                and is_list
                and call.args
                and (method == "extend" or isinstance(call.args[0], ast.Dict))
            ):
                yield call.args[0]
    for node in statements_in(function.node):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and key_of(node.target) == name:
            yield node.value


def _instances(outline: Outline, owner: ast.expr, function: Function) -> Iterator[tuple[ast.expr, Function]]:
    """The variable itself, or those of the list that a loop takes it from; for `self`, the variables that instances of its class are assigned to."""
    key = key_of(owner)
    listed = list(_listed(outline, owner, function)) if key.isidentifier() and key != "self" else []
    if listed:
        yield from ((model, function) for model in listed)
        return
    if key != "self":
        if key or isinstance(owner, ast.Call):
            yield owner, function
        return
    init = outline.classes.get(function.cls, {}).get("__init__")
    if (
        init is not None and function.cls not in outline.calls
    ):  # `self.parameters()` of a LightningModule: another file creates it
        yield from _low_parts(outline, init)
    for call, scope in outline.calls.get(function.cls, ()):
        yield call, scope
        node: ast.AST = call
        while isinstance(node, (ast.expr, ast.keyword)):
            node = outline.parents[node]
        if isinstance(node, ast.Assign) and key_of(node.targets[0]):
            yield node.targets[0], scope


def _listed(outline: Outline, owner: ast.expr, function: Function) -> Iterator[ast.expr]:
    """The models of `for module in [encoder, decoder]:` around a use of `module`; the list may be a variable that is appended to."""
    loop = outline.parents.get(owner)
    while loop is not None and not isinstance(loop, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if isinstance(loop, ast.For) and key_of(loop.target) == key_of(owner):
            break
        loop = outline.parents.get(loop)
    if not isinstance(loop, ast.For):
        return
    name = key_of(loop.iter)
    values = outline.values(name, function) if name else [loop.iter]
    appended = [
        c.args[0] for c, f in outline.calls.get("append", ()) if f is function and c.args and _receiver(c) == name
    ]
    for value in (*values, *([ast.List(appended)] if name else [])):
        if isinstance(value, (ast.List, ast.Tuple)):
            yield from (element for element in value.elts if key_of(element))


def _receiver(call: ast.Call) -> str:
    return key_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def parts_of(
    outline: Outline, call: ast.Call, function: Function, init: Function | None
) -> Iterator[tuple[ast.expr, Function]]:
    """The models that a class of this file trains as its parts, other than frozen ones: those that it receives, and 16-bit ones it creates."""
    if init is None or init.name != "__init__":
        return
    own = ast.unparse(init.node) + "\n"
    text = " ".join(ast.unparse(m.node) for m in outline.classes.get(init.cls, {}).values())
    for param in init.params[1:]:
        is_kept = re.search(rf"\bself\.\w+ = {param}\n", own)
        if (
            not is_kept
            or _REFERENCE.search(param)
            or re.search(rf"\b{param}\.(requires_grad|eval\(|parameters\()", text)
        ):
            continue
        value = argument(call, init.params.index(param) - 1, param)
        if value is not None and key_of(value) and not _OPTION.search(key_of(value)):
            yield value, function
    yield from _low_parts(outline, init)


def _low_parts(outline: Outline, init: Function) -> Iterator[tuple[ast.expr, Function]]:
    """The attributes of a class that it loads or casts in 16 bits, and that nothing in the file may freeze."""
    frozen = _frozen_parts(outline) if may_freeze(outline) else set()
    if frozen is None:
        return
    keys = [key for key in outline.bindings if key.startswith("self.") and key.count(".") == 1 and "[" not in key]
    for key in keys:
        values = [b.value for b in outline.bindings[key] if b.function.cls == init.cls and b.value is not None]
        calls = [part for value in values for part in ast.walk(value) if isinstance(part, ast.Call)]
        casts = [site for method in ("to", "half", "bfloat16") for site in outline.calls.get(method, ())]
        calls += [call for call, f in casts if f.cls == init.cls and key_of(base_of(call)) == key]  # in place
        is_low = any(_is_low(outline, call, init) for call in calls)
        name = key.removeprefix("self.")
        if name in frozen or _REFERENCE.search(name):
            continue
        if is_low and _is_run(outline, key, init.cls):
            yield ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load()), init


def _frozen_parts(outline: Outline) -> set[str] | None:
    """The names of the parts that a file freezes, `vision` of `self.vision.requires_grad_(False)`; None if it may freeze others."""
    if any("freez" in name.lower() for name in (*outline.calls, *outline.bindings)):
        return None
    owners = [
        _iterated(outline, call, call.func.value)
        for call, _ in outline.calls.get("requires_grad_", ())
        if isinstance(call.func, ast.Attribute)
    ]
    for key, bindings in outline.bindings.items():
        if key.endswith(".requires_grad"):
            owners += [_iterated(outline, b.node, ast.Name(key.partition(".")[0], ast.Load())) for b in bindings]
    names = {owner.rpartition(".")[2] for owner in owners}
    return names if all("." in owner and "[" not in owner for owner in owners) else None


def _iterated(outline: Outline, node: ast.AST, owner: ast.expr) -> str:
    """The module whose parameters a loop around a node goes through, if the variable is one of them; else the variable itself."""
    parent: ast.AST | None = node
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
        parent = outline.parents.get(parent)
        if isinstance(parent, ast.For) and any(key_of(n) == key_of(owner) for n in ast.walk(parent.target)):
            func = parent.iter.func if isinstance(parent.iter, ast.Call) else None
            return key_of(func.value) if isinstance(func, ast.Attribute) else ""
    return key_of(owner)


def _is_low(outline: Outline, call: ast.Call, function: Function) -> bool:
    """Whether a call loads a model in 16 bits, or casts one."""
    formats = cast_formats(outline, call, function)
    if isinstance(call.func, ast.Attribute) and call.func.attr == "from_pretrained":
        formats = formats_of(outline, keyword_of(outline, call, function, "torch_dtype", "dtype"), function)
    return bool(formats & SIXTEEN_BIT)


def _is_run(outline: Outline, key: str, cls: str) -> bool:
    """Whether a class runs a part of it with gradients, and nowhere puts it into evaluation mode."""
    runs = False
    stack: list[ast.AST] = [method.node for method in outline.classes.get(cls, {}).values()]
    while stack:
        node = stack.pop()
        contexts: list[ast.expr] = []
        if isinstance(node, (ast.With, ast.AsyncWith)):
            contexts = [item.context_expr for item in node.items]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            contexts = node.decorator_list
        called = key_of(node.func) if isinstance(node, ast.Call) else ""
        if called == f"{key}.eval":
            return False
        runs |= called in {key, f"{key}.forward"}
        if not any(_UNTRACKED.search(ast.unparse(context)) for context in contexts):
            stack.extend(ast.iter_child_nodes(node))
    return runs


def may_freeze(outline: Outline) -> bool:
    """Whether a name of the file is about freezing parameters."""
    return any("freez" in name or "requires_grad" in name for name in (*outline.calls, *outline.bindings))


def is_model_name(key: str) -> bool:
    """Whether a variable's name is that of a model."""
    return bool(re.search(r"model|net|unet|transformer|policy|actor|critic|backbone|encoder|decoder", key.lower()))


def mentions_masters(outline: Outline) -> bool:
    """Whether a name of the script is about float32 master weights, or about rounding that needs none."""
    names = [name for name in (*outline.loads, *outline.bindings) if _is_master(name)]
    names = [name for name in names if not _is_path(outline, name)]
    sites = [site.call for name in names if name.startswith("AnyPrecision") for site in outline.calls.get(name, ())]
    # Without Kahan summation, torchdistX's AnyPrecisionAdamW only stores its moments in 16 bits.
    plain = [constant(argument(call, None, "use_kahan_summation")) is False for call in sites]
    if sites and all(plain):
        names = [name for name in names if not name.startswith("AnyPrecision")]
    return bool(names)


def _is_path(outline: Outline, name: str) -> bool:
    """Whether a variable is only ever a file name: `master_weights = folder / "model.bin"`."""
    values = [binding.value for binding in outline.bindings.get(name, ())]
    return bool(values) and all(value is not None and _PATH.search(ast.unparse(value)) for value in values)


def is_cast_in_place(outline: Outline, key: str) -> bool:
    """Whether a statement casts or moves a variable, `net.to(device, dtype=dtype)`: only a module is changed by that."""
    return any(
        isinstance(call.func, ast.Attribute)
        and key_of(call.func.value) == key
        and isinstance(outline.parents.get(call), ast.Expr)
        for name in ("to", "half", "bfloat16")
        for call, _ in outline.calls.get(name, ())
    )


def is_cast_with(outline: Outline, part: str, call: ast.Call, function: Function, owner: str) -> bool:
    """Whether a cast of a model includes a layer that a line before it has replaced: `model.fc = nn.Linear(...)`, `model.half()`."""
    bound = outline.bindings.get(part, ()) if owner and part.startswith(f"{owner}.") else ()
    return bool(bound) and all(
        b.function is function
        and isinstance(b.value, ast.Call)
        and outline.names.full(b.value.func).startswith("torch.nn.")
        and b.value.lineno < call.lineno
        for b in bound
    )


def is_merged(outline: Outline, load: ast.Call, function: Function) -> bool:
    """Whether an adapter is merged into its model before anything is trained: what is trained after that are all weights.

    Both as `PeftModel.from_pretrained(base, path).merge_and_unload()` and through the variable it is assigned to.
    """
    statement = outline.parents.get(load)
    names = {key_of(t) for t in statement.targets} if isinstance(statement, ast.Assign) else set()
    trains = [
        s.call.lineno for n in ("train", "backward", "fit") for s in outline.calls.get(n, ()) if s.function is function
    ]
    for call, scope in outline.calls.get("merge_and_unload", ()):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        is_own = owner is load or (scope is function and key_of(owner) in names - {""} and call.lineno > load.lineno)
        if is_own and not any(load.lineno < line < call.lineno for line in trains):
            return True
    return False
