"""Operations in the forward of modules that run under autocast, and regions that no computation with gradients enters."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from halfstep.check.regex import regex
from halfstep.check.script.objects.engines import loop_class
from halfstep.check.script.objects.losses import BCE
from halfstep.check.script.objects.values import Autocast, argument, autocasts_of, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.syntax.scope import default_of

__all__ = [
    "bce_in_forward",
    "calls_losses_only",
    "calls_steps_only",
    "idle_regions",
    "is_configured",
    "is_created_plain",
    "is_null_context",
    "loads_in_dtype",
    "mentions_16_bits",
    "off_by_default",
    "was_forgotten",
]

# Anything that may compute in 16 bits without the word "autocast" in this file.
_SIXTEEN = regex(
    r"autocast|half\(|float16|\bapex\b(?<!\w\.apex)(?! = (?:True|False))|fp16_run|fp16=True|deepspeed|fairscale|custom_fwd|precision_scope|\bAMP\(|amp_context|amp_ctx"
)
_SWITCHES = regex(r"autocast|custom_fwd|float32|fp32|no_amp|force", re.IGNORECASE)
_ASKED = regex(r"autocast.*enabled")
_COMMENT = regex(r"^\s*#.*|#[^'\"]*$")
_LOSS = regex(r"loss|crit|entropy|^(bce|mse|mae|l1|ce|nll|dice|hinge|kl)\w*$", re.IGNORECASE)
_NETWORK = regex(r"vgg|percep|lpips|content|style|feature|clip|model|net", re.IGNORECASE)  # losses that run a network
_OF_TENSORS = {
    "mean", "sum", "float", "view", "squeeze", "unsqueeze", "reshape", "detach", "size", "to", "long", "flatten", "permute",
    "transpose", "contiguous", "argmax", "item", "len", "clone", "cuda", "append", "items", "values", "print",
}  # fmt: skip
_STEPS = {
    "scale", "backward", "unscale_", "clip_grad_norm_", "clip_grad_value_", "parameters", "step", "update", "zero_grad", "item",
}  # fmt: skip
_COMMENTED = regex(r"^\s*#\s*with [\w.]*autocast\(", re.MULTILINE)
_MOVES = {"cuda", "to", "float", "train"}  # methods that return the model itself
_WRAPS = {"DataParallel", "DistributedDataParallel", "DDP", "compile", "convert_sync_batchnorm"}
_SETTINGS = regex(
    r"^(\*\*)?(self\.)?(\w*_)?(args|cfg|config|conf|hparams|opts?|flags|settings|params|hps|hp)$|^\*\*|^(\*\*)?vars\(",
    re.IGNORECASE,
)
_PRECISION = regex(r"amp(?<![a-z]amp)|fp16|half|mixed|precision|16|dtype", re.IGNORECASE)
_LIBRARIES = ("torchvision.models", "timm.", "transformers.", "torch.nn.", "segmentation_models_pytorch.")
_WRAPPERS = (
    "torch.nn.DataParallel",
    "torch.nn.parallel.",
    "torch.compile",
    "torch.nn.SyncBatchNorm.",
    "torch.distributed.fsdp.",
)
_LOSSES = {"torch.nn.BCELoss", "torch.nn.modules.loss.BCELoss"}


def bce_in_forward(script: Script) -> Iterator[ast.Call]:
    """Binary cross-entropies on probabilities, in the forward of a module that a CUDA autocast region calls.

    Lightning's mixed precision runs the steps of its modules in such a region.
    """
    outline = script.outline
    for name, methods in outline.classes.items() if "ightning" in script.source.text else ():
        loop = loop_class(script, name)
        if loop is None or loop.base == "trainer" or loop.precision not in {"fp16", "bf16"} or _on_cpu(script):
            continue
        for method in (m for n, m in methods.items() if n == "forward" or n.endswith(("step", "loss"))):
            yield from _bce_of(script, method)
    if any(a.device not in {"cuda", None} for a in script.autocasts):
        return
    for name in script.classes_under_autocast:
        forward = outline.classes.get(name, {}).get("forward")
        yield from _bce_of(script, forward) if forward is not None else ()


def _bce_of(script: Script, function: Function, depth: int = 3) -> Iterator[ast.Call]:
    """The binary cross-entropies of a function and of those that it calls, except where autocast is off."""
    for call in (n for n in ast.walk(function.node) if isinstance(n, ast.Call)):
        target = script.outline.call_target(call, function) if depth else None
        is_bce = _is_bce(script, call, function)
        if (is_bce or target is not None) and not _is_disabled(script, call, function):
            if is_bce:
                yield call
            if target is not None and not isinstance(target.node, ast.Module) and not _asks_for_autocast(target):
                yield from _bce_of(script, target, depth - 1)


def _asks_for_autocast(function: Function) -> bool:
    """Whether a function knows whether autocast is on, or has a decorator that may switch it off."""
    decorated = [text_of(d) for d in getattr(function.node, "decorator_list", ())]
    asked = (n.attr for n in ast.walk(function.node) if isinstance(n, ast.Attribute))
    return any(map(_SWITCHES.search, decorated)) or any(map(_ASKED.search, asked))


def _on_cpu(script: Script) -> bool:
    """Whether a Trainer is created for another device than CUDA."""
    calls = (call for call, _ in script.outline.calls.get("Trainer", ()))
    return any(constant(argument(call, None, "accelerator")) in {"cpu", "mps", "tpu"} for call in calls)


def _is_bce(script: Script, call: ast.Call, function: Function | None) -> bool:
    assert function is not None
    names = script.outline.names
    if names.full(call.func) in BCE:
        return True
    key = key_of(call.func)
    made = [call.func] if isinstance(call.func, ast.Call) else []
    if key.startswith("self."):
        methods = script.outline.classes.get(function.cls, {}).values()
        assigns = [n for m in methods for n in ast.walk(m.node) if isinstance(n, ast.Assign)]
        values = [a.value for a in assigns if any(key_of(t) == key for t in a.targets)]
        made = [v for v in values if isinstance(v, ast.Call)]
        if len(made) != len(values):
            return False
    return bool(made) and all(names.full(m.func) in _LOSSES for m in made)


def _is_disabled(script: Script, node: ast.AST, function: Function | None) -> bool:
    """Whether a region around a node turns autocast off."""
    assert function is not None
    blocks = (w for w in ast.walk(function.node) if isinstance(w, (ast.With, ast.AsyncWith)))
    regions = [
        a
        for w in blocks
        if any(n is node for n in ast.walk(w))
        for i in w.items
        for a in autocasts_of(script.outline, i.context_expr, function)
    ]
    return any(a.enabled == "no" for a in regions)


def off_by_default(script: Script, region: Autocast) -> bool:
    """Whether a region is enabled by a parameter whose default is False and that no call in this file sets."""
    for call, function in script.outline.library_calls.get(region.api, ()):
        if call is region.node and region.enabled in function.params and not isinstance(function.node, ast.Module):
            return constant(default_of(function, region.enabled)) is False and not any(
                k.arg == region.enabled for calls in script.outline.calls.values() for c, _ in calls for k in c.keywords
            )
    return False


def idle_regions(script: Script) -> tuple[Autocast, ...]:
    """The regions of a script if none is around a computation with gradients: entered without gradients, or not at all."""
    entered = list(script.events("enter_autocast"))
    if any(not e.inside("no_grad") for e in entered) or script.has("enter_function"):
        return ()
    blocks = [e.node for e in entered if isinstance(e.node, (ast.With, ast.AsyncWith))]
    contexts = {item.context_expr for block in blocks for item in block.items}
    uses = Counter(_last_name(c.func if isinstance(c, ast.Call) else c) for c in contexts)
    uses.update(
        _last_name(a.node.func) for a in script.autocasts if a.node not in contexts
    )  # `autocast = torch.autocast(...)`
    for region in script.autocasts:
        statement = script.statement(region.node)
        if region.node in contexts:
            continue
        # `ctx = torch.autocast(...)` or `def ctx(): return torch.autocast(...)`, of which every use is known.
        names = {_last_name(target) for target in statement.targets} if isinstance(statement, ast.Assign) else set()
        if isinstance(statement, ast.Return):
            names = {n.name for n in script.above(statement) if isinstance(n, ast.FunctionDef)}
        if not names or any(not name or script.outline.loads[name] != uses[name] for name in names):
            return ()
    return script.autocasts


def _last_name(node: ast.AST) -> str:
    return key_of(node).rsplit(".", 1)[-1]


def is_configured(script: Script, key: str, function: Function, depth: int = 3) -> bool:
    """Whether a model may know of mixed precision: it receives settings or a flag for it, or its creation is not in this file.

    DataParallel counts too: its replicas run in threads, where only a region in the model's own forward has an effect.
    """
    calls = [value for value in script.outline.values(key, function) if _created(value) is not None]
    if not calls or depth == 0:
        return True
    return any(_is_told(script, call, key, function, depth) for value in calls if (call := _created(value)))


def _is_told(script: Script, call: ast.Call, key: str, function: Function, depth: int) -> bool:
    """Whether the call that creates a model passes settings or a precision, or wraps a model that is created with them."""
    name = _last_name(call.func)
    models = [key_of(a) for a in call.args[:1]] if name in _WRAPS else []
    if name == "DataParallel" or any(isinstance(a, ast.Starred) for a in call.args):
        return True
    if models and models != [key]:
        return not models[0] or is_configured(script, models[0], function, depth - 1)
    values = [*call.args, *(k.value for k in call.keywords)]
    texts = [*map(text_of, values), *(k.arg or "**" for k in call.keywords)]
    return not models and any(_SETTINGS.search(text) or _PRECISION.search(text) for text in texts)


def _created(value: ast.expr) -> ast.Call | None:
    """The call that creates a model, before `.to(device)` and the like; None for one that only returns the model itself."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _MOVES:
        value = value.func.value
    return value if isinstance(value, ast.Call) else None


def is_created_plain(script: Script, key: str, function: Function, depth: int = 3) -> bool:
    """Whether everything that a variable may be is a model of this file or of such a library."""
    values = script.outline.values(key, function)
    created = [v for v in values if isinstance(v, ast.Call) and not _is_wrapped(script, v, key)]
    if not created or any(not isinstance(v, ast.Call) for v in values):
        return False
    return all(_creates_plain(script, call, function, depth) for call in created)


def _is_wrapped(script: Script, call: ast.Call, key: str) -> bool:
    """Whether a call returns the model `key` itself, or a wrapper around it: `model.cuda()`, `DistributedDataParallel(model)`."""
    node: ast.expr | None = call
    while isinstance(node, ast.Call):
        if script.outline.names.full(node.func).startswith(_WRAPPERS):
            node = node.args[0] if node.args else None
        else:
            is_moved = isinstance(node.func, ast.Attribute) and node.func.attr in _MOVES
            node = node.func.value if is_moved and isinstance(node.func, ast.Attribute) else None
    return node is not None and key_of(node) == key


def _creates_plain(script: Script, call: ast.expr | None, function: Function, depth: int) -> bool:
    """Whether a call creates a model of this file or of such a library, perhaps inside DataParallel."""
    while isinstance(call, ast.Call):
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):
            call = call.func.value  # Net().cuda()
            continue
        full = script.outline.names.full(call.func)
        if not full.startswith(_WRAPPERS):
            if isinstance(call.func, ast.Attribute) and call.func.attr in _MOVES:
                call = call.func.value
                break
            return key_of(call.func) in script.outline.classes or full.startswith(_LIBRARIES)
        call = call.args[0] if call.args else None
    key = key_of(call) if call is not None else ""
    return bool(key) and depth > 0 and is_created_plain(script, key, function, depth - 1)


def was_forgotten(script: Script) -> bool:
    """Whether `autocast` is imported, or written in a comment as a region, and used nowhere."""
    imports = [i for i in script.outline.names.imported if i.full.endswith(".autocast") and i.full.startswith("torch.")]
    names = {i.alias.asname or i.alias.name for i in imports}
    unused = bool(names) and not any(script.outline.loads[name] for name in names)
    return unused or bool(_COMMENTED.search(script.lines.text))


def is_null_context(script: Script, node: ast.AST, function: Function) -> bool:
    """Whether a context is `nullcontext()` in every run: a variable of the file that has no other value."""
    key = key_of(node)
    values = script.outline.values(key, function) if key and key not in function.params else []
    return bool(values) and all(isinstance(v, ast.Call) and last_name(key_of(v.func)) == "nullcontext" for v in values)


def loads_in_dtype(script: Script) -> bool:
    """Whether the script loads a model in a dtype of its own choice: `from_pretrained(path, torch_dtype=...)`."""
    loads = (call for call, _ in script.outline.calls.get("from_pretrained", ()))
    return any(k.arg in {"dtype", "torch_dtype", None} for call in loads for k in call.keywords)


def calls_losses_only(script: Script, block: ast.With) -> bool:
    """Whether all that a block calls are loss functions, and functions and methods of tensors."""
    calls = [n for statement in block.body for n in ast.walk(statement) if isinstance(n, ast.Call)]
    names = [text_of(call.func).rsplit(".", 1)[-1] for call in calls]
    is_loss = [bool(_LOSS.search(name)) and not _NETWORK.search(name) for name in names]
    is_tensor = [
        name in _OF_TENSORS or script.outline.names.full(c.func).startswith("torch.")
        for c, name in zip(calls, names, strict=True)
    ]
    return any(is_loss) and all(a or b for a, b in zip(is_loss, is_tensor, strict=True))


def calls_steps_only(block: ast.With) -> bool:
    """Whether all that a block calls are steps of the loop after the loss, which autocast does not change."""
    calls = [n for statement in block.body for n in ast.walk(statement) if isinstance(n, ast.Call)]
    return all(getattr(call.func, "attr", key_of(call.func)) in _STEPS for call in calls)


@lru_cache(maxsize=1)  # the same for every event of a script
def mentions_16_bits(script: Script) -> bool:
    """Whether anything may compute in 16 bits; comments and imports from torch do not: `autocast` may be imported and never used."""
    lines = [_COMMENT.sub("", line) for line in script.lines.text.splitlines()]
    for node in ast.walk(script.tree):
        if isinstance(node, ast.keyword) and node.arg == "help" and node.lineno == node.end_lineno:
            lines[node.lineno - 1] = ""  # of an option, in words
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = "" if number < len(lines) else lines[number]
    return bool(_SIXTEEN.search("\n".join(lines)))
