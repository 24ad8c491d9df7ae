"""Which module classes of a script run their forward under autocast, and in which dtypes.

A training loop enters autocast and calls `model(x)`; the operation that autocast affects is written far away, in the
forward of a class. The variables that are called inside a region are followed to the classes that create them, and from
a class to the classes of its submodules.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.values import Autocast, argument, autocasts_of, constant, text_of
from halfstep.check.script.syntax.children import statements_in
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = [
    "OWN_LOSS",
    "WRAPS",
    "attribute_values",
    "classes_under_autocast",
    "created_classes",
    "is_on",
    "is_on_by_default",
    "is_part",
    "models_by_use",
    "owners_of_models",
    "region_left_open",
    "regions_in_forward",
    "run_by_call",
]

_ITERATES = {"enumerate", "tqdm", "trange", "iter", "islice", "track", "zip"}
WRAPS = {
    "torch.nn.DataParallel": "dp",
    "torch.nn.parallel.DataParallel": "dp",
    "torch.nn.parallel.DistributedDataParallel": "ddp",
    "torch.nn.parallel.distributed.DistributedDataParallel": "ddp",
    "apex.parallel.DistributedDataParallel": "ddp",
    "torch.distributed.fsdp.FullyShardedDataParallel": "fsdp",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "fsdp",
}

OWN_LOSS = regex(r"^(train|training|val|validation)_loss$")  # a method of a model that runs it
# Functions of other files that run the model they are passed, with its position and its name: those of MONAI, `forward_in_tiles(model, x)`.
_WINDOW = "sliding_window_inference"
_INFERER = regex(r"(^|_)inferer(_\w+)?$|Inferer$")
_RUNS = (
    (regex(f"^{_WINDOW}$"), 3, "predictor"),
    (_INFERER, 1, "network"),
    (regex(r"(^|_)forward(_\w+)?$"), 0, "model"),
)
# The model inside a wrapper, and the part of one that computes its output.
_PARTS = {"module", "ema", "transformer", "backbone", "encoder", "decoder", "unet"}
MAX_DEPTH = 4  # functions of the file followed from a region to the call of a model
Classes = dict[str, set[str]]
_Called = dict[int, tuple[set[str], list[Function]]]  # what each function calls, by its identity


def classes_under_autocast(outline: Outline, regions: Iterable[Event]) -> dict[str, frozenset[str]]:
    """The classes of the file whose forward is called in an enabled region, each with the dtypes of these regions."""
    classes: Classes = {}
    called: _Called = {}
    for event in regions:
        autocasts = event.regions[-1].autocasts
        if isinstance(event.node, (ast.With, ast.AsyncWith)) and not any(a.enabled == "no" for a in autocasts):
            dtypes = {dtype for a in autocasts for dtype in a.dtypes}
            _collect(outline, event.node.body, event.function, dtypes, classes, called)
    for name, methods in outline.classes.items():
        forward = methods.get("forward")
        regions_of_forward = _decorators(outline, forward) if forward is not None else []
        if regions_of_forward and not any(a.enabled == "no" for a in regions_of_forward):
            classes.setdefault(name, set()).update(d for a in regions_of_forward for d in a.dtypes)
    _add_submodules(outline, classes)
    return {name: frozenset(dtypes) for name, dtypes in classes.items()}


def models_by_use(outline: Outline) -> set[str]:
    """The last names of the variables that are wrapped, switched to evaluation, or whose parameters are read: models, whatever their name."""
    used = {
        key_of(call.func.value).rsplit(".", 1)[-1]
        for name in ("eval", "train", "parameters", "named_parameters")
        for call, _ in outline.calls.get(name, ())
        if isinstance(call.func, ast.Attribute) and (name != "train" or len(call.args) < 2)
    }
    return _wrapped_variables(outline) | used - {"", "self"}


def owners_of_models(outline: Outline) -> set[str]:
    """The last names of the variables with a model that is switched to evaluation: `diffusion` of `diffusion.model.eval()`."""
    used = {
        key_of(call.func.value).rpartition(".")
        for name in ("eval", "train")
        for call, _ in outline.calls.get(name, ())
        if isinstance(call.func, ast.Attribute) and not call.args
    }
    return {owner.rpartition(".")[2] for owner, _, last in used if last in {"model", "net", "network"}} - {"", "self"}


def _wrapped_variables(outline: Outline) -> set[str]:
    """The last names of the variables that contain a wrapped model: `parallel` of `self.parallel = DDP(model)`."""
    calls = [call for name in WRAPS for call, _ in outline.library_calls.get(name, ())]
    assigns = [a for call in calls if isinstance(a := outline.parents.get(call), ast.Assign)]
    return {key_of(target).rsplit(".", 1)[-1] for assign in assigns for target in assign.targets} - {""}


def run_by_call(outline: Outline, call: ast.Call, last: str) -> str:
    """The model that a call runs on its inputs, `sliding_window_inference(x, size, n, model)`; "" if it runs none."""
    if isinstance(call.func, ast.Call):  # `SlidingWindowInferer(size)(x, model)`
        last = key_of(call.func.func).rsplit(".", 1)[-1]
    elif last.endswith("Inferer"):
        return ""  # the inferer is created
    elif outline.defines(last):
        return ""  # its own calls show what it runs
    for name, position, keyword in _RUNS:
        if name.search(last) and (model := argument(call, position, keyword)) is not None:
            return _run_inside(outline, model)
    if not _INFERER.search(last) or len(call.args) != 1:
        return ""
    # `model_inferer = partial(sliding_window_inference, predictor=model)`, often passed to the function that calls it.
    partials = [c for c, _ in outline.calls.get("partial", ()) if key_of(argument(c, 0, "")).endswith(_WINDOW)]
    models = {key_of(argument(c, 4, "predictor")) for c in partials}
    return models.pop() if len(models) == 1 else ""


def is_part(key: str) -> bool:
    """Whether a variable is a model in a wrapper or a part of one: `model.module`, `model_ema.ema`, `model.transformer`."""
    owner, _, name = key.rpartition(".")
    return name in _PARTS and "model" in owner.rsplit(".", 1)[-1].lower()


def _run_inside(outline: Outline, predictor: ast.expr) -> str:
    """The model itself, or the one that `lambda x: model(x)["out"]` or a function defined for the purpose calls."""
    body: list[ast.AST] = [predictor.body] if isinstance(predictor, ast.Lambda) else []
    function = next((f for f in outline.functions if f.name == key_of(predictor) and f.parent is not None), None)
    if function is not None and not function.cls:
        body = [statement for statement in function.body if not isinstance(statement, ast.With)]
    elif not body:
        return key_of(predictor)
    own = [a.arg for a in predictor.args.args] if isinstance(predictor, ast.Lambda) else []
    params = function.params if function is not None else own
    calls = [n for part in body for n in ast.walk(part) if isinstance(n, ast.Call) and n.args]
    return next((key_of(c.func) for c in calls if any(key_of(a) in params for a in c.args) and key_of(c.func)), "")


def regions_in_forward(outline: Outline, model: str, function: Function) -> list[Autocast]:
    """The regions of the forward of a model of the file: a decorator, or blocks that call its layers."""
    regions: list[Autocast] = []
    for value in outline.values(model, function) or attribute_values(outline, model, function):
        for name in created_classes(outline, value):
            forward = outline.classes[name].get("forward")
            if forward is None:
                continue
            regions += _decorators(outline, forward)
            for block in _blocks(forward.body):
                items = (item.context_expr for item in block.items)
                entered = [a for item in items for a in autocasts_of(outline, item, forward)]
                if entered and any(_calls_layer(node) for statement in block.body for node in ast.walk(statement)):
                    regions += entered
    return regions


def region_left_open(outline: Outline, node: ast.AST, function: Function) -> Autocast | None:
    """The region that a generator of the file leaves open in the loop around a node.

    A generator that yields inside `with autocast():` does not leave the region, which is a state of the thread: the body of
    `for batch in generator():` runs in it.
    """
    parent = outline.parents.get(node)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        if isinstance(parent, ast.For) and any(node is statement for statement in parent.body):
            regions = [
                _region_at_yield(outline, value, function) for value in _iterated(outline, parent.iter, function)
            ]
            if regions and all(regions):
                return regions[0]
        node, parent = parent, outline.parents.get(parent)
    return None


def _iterated(outline: Outline, source: ast.expr, function: Function) -> list[ast.expr]:
    """What a loop goes through: `batches()` of `enumerate(batches())`, also by the name of a variable."""
    while isinstance(source, ast.Call) and key_of(source.func).rpartition(".")[2] in _ITERATES and source.args:
        source = source.args[0]
    return outline.values(key_of(source), function) if key_of(source) else [source]


def _region_at_yield(outline: Outline, call: ast.expr, function: Function) -> Autocast | None:
    """The innermost region around every `yield` of the generator that a call runs, unless it is disabled."""
    target = outline.call_target(call, function) if isinstance(call, ast.Call) else None
    inner = list(ast.walk(target.node)) if target is not None else []
    yields = [n for n in inner if isinstance(n, (ast.Yield, ast.YieldFrom))]
    regions = [_region_around(outline, n, target) for n in yields] if target is not None else []
    return regions[0] if regions and all(r is not None and r.enabled != "no" for r in regions) else None


def _region_around(outline: Outline, node: ast.AST, function: Function) -> Autocast | None:
    parent = outline.parents.get(node)
    while parent is not None and parent is not function.node:
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return None  # a generator inside this function
        for item in reversed(parent.items) if isinstance(parent, ast.With) else ():
            if entered := autocasts_of(outline, item.context_expr, function):
                return entered[0] if len(entered) == 1 else None
        parent = outline.parents.get(parent)
    return None


def _blocks(body: Iterable[ast.AST]) -> Iterator[ast.With]:
    """The `with` blocks of a forward through which gradients go: none in `no_grad` and in nested functions."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, ast.With):
            if any("no_grad" in text_of(i.context_expr) or "inference" in text_of(i.context_expr) for i in node.items):
                continue
            yield node
        if isinstance(node, (ast.stmt, ast.ExceptHandler)):
            yield from _blocks(ast.iter_child_nodes(node))


def _calls_layer(node: ast.AST) -> bool:
    """Whether a node calls a submodule or a method: `self.encoder(x)`, and does not detach the result."""
    return isinstance(node, ast.Call) and key_of(node.func).startswith("self.")


def _decorators(outline: Outline, function: Function) -> list[Autocast]:
    decorators = getattr(function.node, "decorator_list", ())
    return [a for decorator in decorators for a in autocasts_of(outline, decorator, outline.module)]


def _collect(
    outline: Outline, body: list[ast.stmt], function: Function, dtypes: set[str], classes: Classes, called: _Called
) -> None:
    """Add the classes whose objects are called in `body`, also by functions of the file that it calls."""
    reached: set[int] = set()
    calls = [_calls_of(outline, body, function)]
    for depth in range(MAX_DEPTH + 1):
        for name in {name for names, _ in calls for name in names}:
            classes.setdefault(name, set()).update(dtypes)
        if depth == MAX_DEPTH:
            return
        callees = {id(f): f for _, functions in calls for f in functions if id(f) not in reached}
        reached |= callees.keys()
        for key, callee in callees.items():
            if key not in called:
                called[key] = _calls_of(outline, callee.body, callee)
        calls = [called[key] for key in callees]


def _calls_of(outline: Outline, body: list[ast.stmt], function: Function) -> tuple[set[str], list[Function]]:
    """The classes whose objects statements call, and the functions of the file."""
    names: set[str] = set()
    functions = []
    for call in _enabled_calls(outline, body, function):
        names |= _classes_of(outline, call.func, function)
        target = outline.call_target(call, function)
        if target is not None and target.name != "__init__":
            functions.append(target)
    return names, functions


def _enabled_calls(outline: Outline, body: Iterable[ast.AST], function: Function) -> Iterator[ast.Call]:
    """The calls in statements, without those in regions that disable autocast and in nested functions."""
    stack = list(body)
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, (ast.With, ast.AsyncWith)):
            regions = [a for item in node.items for a in autocasts_of(outline, item.context_expr, function)]
            if any(a.enabled == "no" for a in regions):
                continue
        if isinstance(node, ast.Call):
            yield node
        stack.extend(ast.iter_child_nodes(node))


def _classes_of(outline: Outline, func: ast.expr, function: Function) -> set[str]:
    """The classes of the file that a called variable may be an object of."""
    if isinstance(func, ast.Attribute) and func.attr in {"forward", "module"} and key_of(func.value) != "self":
        func = func.value
    if isinstance(func, ast.Call):  # Net()(x)
        return created_classes(outline, func)
    key = key_of(func)
    if not key or key in outline.classes:
        return set()
    values = outline.values(key, function) or attribute_values(outline, key, function)
    return {name for value in values for name in created_classes(outline, value) or _built(outline, value, function)}


def _built(outline: Outline, value: ast.expr, function: Function) -> set[str]:
    """The classes that a function of the file creates and returns: `criterion = make_loss(config)`."""
    maker = outline.call_target(value, function) if isinstance(value, ast.Call) else None
    returns = [n.value for n in statements_in(maker.node) if isinstance(n, ast.Return)] if maker is not None else []
    return {name for result in returns if result is not None for name in created_classes(outline, result)}


def attribute_values(outline: Outline, key: str, function: Function) -> list[ast.expr]:
    """What the methods of the same class assign to `self.x`; the outline does not walk every method."""
    methods = outline.classes.get(function.cls, {}).values() if key.startswith("self.") else ()
    assigns = (node for method in methods for node in statements_in(method.node) if isinstance(node, ast.Assign))
    return [assign.value for assign in assigns if any(key_of(target) == key for target in assign.targets)]


def created_classes(outline: Outline, value: ast.expr) -> set[str]:
    """The classes of the file with a forward that an expression creates, also inside DDP(...) or .to(device)."""
    calls = [part for part in ast.walk(value) if isinstance(part, ast.Call)]
    names = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    for call in calls:  # `MODELS[args.arch](args)`: any class of the table
        table = call.func.value if isinstance(call.func, ast.Subscript) else None
        for entries in outline.bindings.get(key_of(table), ()) if isinstance(table, ast.Name) else ():
            if isinstance(entries.value, ast.Dict):
                names |= {key_of(entry) for entry in entries.value.values}
    return {name for name in names if name in outline.classes and _has_forward(outline, name)}


def _has_forward(outline: Outline, name: str, depth: int = 4) -> bool:
    if "forward" in outline.classes.get(name, {}):
        return True
    bases = [base.id for base in outline.bases.get(name, ()) if isinstance(base, ast.Name)]
    return depth > 0 and any(_has_forward(outline, base, depth - 1) for base in bases)


def _add_submodules(outline: Outline, classes: Classes) -> None:
    """Add the classes of submodules and bases, transitively."""
    pending = list(classes)
    while pending:
        name = pending.pop()
        for inner in _parts(outline, name):
            known = classes.setdefault(inner, set())
            if not classes[name] <= known:
                known.update(classes[name])
                pending.append(inner)


def _parts(outline: Outline, name: str) -> set[str]:
    """The classes of the file that a module creates and does not only call with autocast disabled, and its bases."""
    parts = {
        base.id for base in outline.bases.get(name, ()) if isinstance(base, ast.Name) and base.id in outline.classes
    }
    methods = outline.classes.get(name, {}).values()
    enabled = {key_of(c.func) for m in methods for c in _enabled_calls(outline, m.body, m)}
    calls = {key_of(n.func) for m in methods for n in ast.walk(m.node) if isinstance(n, ast.Call)}
    for method in methods:
        for node in ast.walk(method.node):
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                keys = {key_of(target) for target in targets}
                if not keys & calls or keys & enabled:  # a list of modules is called through another variable
                    parts |= created_classes(outline, node.value)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
                parts |= {inner for value in node.args for inner in created_classes(outline, value)}
    return parts - {name}


def is_on(region: Autocast) -> bool:
    """Whether a region is enabled on a GPU: always, or by a test of the device (`nullcontext() if device == "cpu" else ...`)."""
    return region.enabled == "yes" or bool(
        re.fullmatch(r"[\w.]+\.is_cuda|[\w.]+ == ['\"](cuda|cpu)['\"]", region.enabled)
    )


def is_on_by_default(outline: Outline, region: Autocast) -> bool:
    """Whether an attribute of a model enables its region, and is true unless a caller changes it: `use_fp16=True`."""
    bindings = outline.bindings.get(region.enabled, ()) if region.enabled.startswith("self.") else ()
    for binding in bindings:
        a = getattr(binding.function.node, "args", ast.arguments([], [], None, [], [], None, []))
        plain = [*a.posonlyargs, *a.args]
        defaults = dict(zip((p.arg for p in plain[len(plain) - len(a.defaults) :]), a.defaults, strict=True))
        value = binding.value
        if constant(defaults.get(value.id, value) if isinstance(value, ast.Name) else value) is not True:
            return False
    return bool(bindings)
