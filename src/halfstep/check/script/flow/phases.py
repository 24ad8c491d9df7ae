"""The phases of a run: regions that validation is left out of, forwards that validate nothing, schedules that start too early."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import takewhile

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.guard import Guard, possible
from halfstep.check.script.flow.order import loops_around
from halfstep.check.script.flow.validations import is_loaded_low, trains_in_region
from halfstep.check.script.objects.engines import lightning_methods
from halfstep.check.script.objects.expressions import arguments_of, conditions_of
from halfstep.check.script.objects.formats import formats_of
from halfstep.check.script.objects.values import Autocast, argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.syntax.scope import default_of

__all__ = [
    "hooked_schedules", "is_diagnostic", "is_drawn", "is_preview", "is_validation", "needs_no_region", "only_in_training", "partial_regions", "reads_data",
    "without_reason",
]  # fmt: skip

# A flag that is true only in training: `train`, `self.is_training`, `phase == 'train'`, `not is_eval`.
_TRAINS = regex(
    r"([\w.]+\.)?(is_)?train(ing)?(_mode)?|[\w.]+ == '[Tt]rain(ing)?'|not ([\w.]+\.)?(is_)?(val|valid|validation|eval|test)(_mode)?"
)

_VALIDATION = regex(r"val|test|eval|dev_?(loader|set|data)", re.IGNORECASE)
_LOADER = regex(r"loader|_dl\b|iterator", re.IGNORECASE)
_PARAMETER = regex(r"\(?(?:bool\()?(\w+)\)?(?: is not None)?\)?")  # `scaler is not None`, `use_amp`
_START_HOOKS = {"on_train_epoch_start", "on_train_batch_start"}
_COUNTED = regex(r"epoch|step|batch|iter|sanity", re.IGNORECASE)
_PREDICTS = regex(r"^_*(generate|predict|infer|sample|encode)")
_GRADIENTS_OFF = regex(r"(no_grad|inference_mode)\(\)$")
_DUMMY = regex(r"dummy", re.IGNORECASE)  # inputs that only show a shape
_MADE_UP = regex(r"^(zeros|ones|rand|randn|randint|empty|full)(_like)?$")
# Comments on forwards; one about metrics or a loss, `compute the score in float32`, is about something else.
_IN_FULL = regex(
    r"#.*(\b(sampl|run|evaluat|validat|infer|forward|predict|generat|test)\w*\b[^.,;:]*\bin (float32|fp32|full precision)\b|"
    r"\b(without|no) (autocast|amp)\b)",
    re.IGNORECASE,
)
# A reason for a region that is switched off, whatever it says: in float32, without AMP, stable, exact.
_REASON = regex(
    r"fp32|float32|full[- ]precision|\bamp\b|autocast|stab(le|ility)|precis|exact|\bnan\b|overflow|determinis",
    re.IGNORECASE,
)
_SIZES = {"shape", "size", "ndim", "dim", "numel", "dtype", "device", "is_cuda"}
_MOVES = {"to", "cuda", "half", "float", "type"}
# What validation does with its results; pictures are none.
_MEASURES = regex(r"(^|[._])(append|item|update)$|loss|criterion|metric|accuracy|score", re.IGNORECASE)
_BATCHES = regex(r"batches|steps|iters|iterations", re.IGNORECASE)
_DRAWS = regex(r"(^|[._])(imshow|add_subplot|add_images?|make_grid|save_image|grad_?cam\w*|heatmap)$", re.IGNORECASE)


def only_in_training(script: Script, event: Event) -> tuple[ast.AST | None, str]:
    """What turns the region of a forward off for validation, `enabled=use_amp and train`, and the flag that decides it."""
    region = event.autocast()
    for autocast in region.autocasts if region is not None else ():
        flags = [autocast.enabled]
        if autocast.enabled.isidentifier():
            flags += map(text_of, script.outline.values(autocast.enabled, event.function))
        for flag in (part.strip("()") for text in flags for part in text.split(" and ")):
            if _TRAINS.fullmatch(flag) and not any(g.text == flag for g in event.guards):
                return autocast.node, flag
        place, flag = _off_for_argument(script, autocast, event.function)
        if place is not None:
            return place, flag
        place, flag = _off_in_validation(script, autocast, event)
        if place is not None:
            return place, flag
        if autocast.dtype_node is not None:
            place, flag = _full_in_validation(script, autocast.dtype_node, event)
            if place is not None:
                return place, flag
    return _entered_in_training(script, event)


def partial_regions(script: Script) -> Iterator[tuple[ast.AST, str, str]]:
    """Where a function that trains in a region is called for validation without it, the flag, and what is in float32 there, in words."""
    for autocast in script.autocasts:
        functions = {f.node: f for f in script.outline.functions}
        function = next((functions[n] for n in script.above(autocast.node) if n in functions), None)
        if function is not None and trains_in_region(function):
            place, flag = _off_for_argument(script, autocast, function)
            if place is not None:
                yield place, flag, f"what `{function.name}` computes"


def _off_for_argument(script: Script, autocast: Autocast, function: Function) -> tuple[ast.AST | None, str]:
    """The call for validation that leaves out what enables a region, `run_epoch(val_loader, scaler=None)`, and the flag."""
    outline = script.outline
    flag = _PARAMETER.fullmatch(autocast.enabled)
    if flag is None or flag[1] not in function.params or outline.by_function(flag[1]).get(function.node):
        return None, ""
    calls = [c for c, f in outline.calls.get(function.name, ()) if outline.call_target(c, f) is function]
    position = function.params.index(flag[1]) - bool(function.method and function.params[:1] == ("self",))
    is_open = any(k.arg is None for c in calls for k in c.keywords) or any(
        isinstance(a, ast.Starred) for c in calls for a in c.args
    )
    if is_open:
        return None, ""
    values = {call: argument(call, position, flag[1]) or default_of(function, flag[1]) for call in calls}
    off = [c for c, value in values.items() if isinstance(value, ast.Constant) and value.value in {None, False}]
    validates = [c for c in off if any(_VALIDATION.search(key_of(value)) for value in arguments_of(c))]
    return (validates[0], autocast.enabled) if validates and len(off) < len(calls) else (None, "")


def _off_in_validation(script: Script, autocast: Autocast, event: Event) -> tuple[ast.AST | None, str]:
    """The False that a region's flag is unless the model trains: `enabled = use_amp if train else False`, or by two assignments."""
    outline, node = script.outline, autocast.node
    enabled = argument(node, None, "enabled") if isinstance(node, ast.Call) else None
    bound = [b for b in outline.lookup(key_of(enabled), event.function) if b.function is event.function]
    values = [b.value for b in bound] if bound else [enabled]
    options: list[tuple[ast.expr, tuple[Guard, ...]]] = []
    for value in values:
        if value is None:
            return None, ""
        tests = conditions_of(outline, value) if bound else ()
        if isinstance(value, ast.IfExp):
            options += [
                (part, (*tests, *conditions_of(outline, part)[len(tests) :])) for part in (value.body, value.orelse)
            ]
        else:
            options.append((value, tests))
    off = [value for value, _ in options if isinstance(value, ast.Constant) and value.value is False]
    flags = [set(_flags_of(tests)) for value, tests in options if value not in off]
    common = set.intersection(*flags) if flags and off else set()
    flag = min(filter(_TRAINS.fullmatch, common), default="")
    is_decided = any(g.text == flag.removeprefix("not ") for g in event.guards)
    return (off[-1], flag) if flag and not is_decided else (None, "")


def _flags_of(tests: tuple[Guard, ...]) -> Iterator[str]:
    """The conditions as flags that are true: `train` and `use_amp` of `if train and use_amp:`, `not is_eval` of its other branch."""
    for test in tests:
        yield from test.text.split(" and ") if test.is_true else [f"not {test.text}"]


def _entered_in_training(script: Script, event: Event) -> tuple[ast.AST | None, str]:
    """The condition of a region, `if use_amp and train:`, without which the same model runs in float32, and the flag."""
    region = event.autocast()
    around = script.above(region.node) if region is not None else ()
    entered = next((n for n in around if isinstance(n, (ast.With, ast.AsyncWith))), None)
    block = script.outline.parents.get(entered) if entered is not None else None
    if not isinstance(block, ast.If) or entered not in block.body or not isinstance(event.node, ast.Call):
        return None, ""
    tests = script.outline.values(block.test.id, event.function) if isinstance(block.test, ast.Name) else [block.test]
    test = tests[0] if len(tests) == 1 else None
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else []
    flag = next((text for text in map(text_of, parts) if _TRAINS.fullmatch(text)), "")
    rest = block.orelse
    while len(rest) == 1 and isinstance(rest[0], ast.If) and text_of(rest[0].test) == flag:
        rest = rest[0].orelse  # training without mixed precision
    other = [n for statement in rest for n in ast.walk(statement)]
    is_run = any(isinstance(n, ast.Call) and text_of(n.func) == text_of(event.node.func) for n in other)
    contexts = [text_of(n.context_expr) for n in other if isinstance(n, ast.withitem)]
    is_plain = all(_GRADIENTS_OFF.search(text) for text in contexts)
    return (test, flag) if flag and is_run and is_plain else (None, "")


def _full_in_validation(script: Script, dtype: ast.expr, event: Event) -> tuple[ast.AST | None, str]:
    """Where the dtype of a region is float32 unless the model trains: `dtype = low if train else torch.float32`."""
    outline = script.outline
    for binding in outline.lookup(key_of(dtype), event.function) if key_of(dtype) else ():
        value = binding.value
        if value is None or binding.function is not event.function:
            continue
        options = [(value, "")]
        if isinstance(value, ast.IfExp):
            options = [(value.orelse, text_of(value.test))]
        elif guards := conditions_of(outline, value):
            options = [(value, guards[-1].text if not guards[-1].is_true else f"not {guards[-1].text}")]
        for option, flag in options:
            is_full = formats_of(outline, option, event.function) == {"float32"}
            if is_full and _TRAINS.fullmatch(flag) and not any(g.text == flag for g in event.guards):
                return option, flag
    return None, ""


def is_drawn(script: Script, event: Event, trained: set[ast.AST]) -> bool:
    """Whether each result of a forward is drawn: a picture of some examples, in its loop or, in training, in its block."""
    loops = loops_around(script, event)
    around: ast.AST | None = loops[-1] if loops else None
    inner = list(script.above(event.node))
    if around not in inner and not isinstance(event.function.node, ast.Module):
        # One batch, in a function that draws it. In a loop over all of them `wandb.Image` shows the first.
        if any(key_of(n.func) == "wandb.Image" for n in ast.walk(event.function.node) if isinstance(n, ast.Call)):
            return True
        around = event.function.node
    if around is not None and trained & set(ast.walk(around)):
        blocks = (n for n in script.above(event.node) if isinstance(n, (ast.If, ast.For, ast.While)))
        around = next((block for block in blocks if block is not around), None)
    places = [around] if around is not None else _cell_around(script, event) if not loops else []
    calls = [n for place in places for n in ast.walk(place) if isinstance(n, ast.Call)]
    drawn = [call for call in calls if _DRAWS.search(key_of(call.func))]
    # In a loop that measures all batches `if i == 0:` draws one of them.
    own = _tests_around(script, event.node, around)
    is_measured = any(_MEASURES.search(key_of(c.func)) for c in calls if _tests_around(script, c, around) <= own)
    is_whole = around is not None and not _ends_early(script, event, around)
    return any(_tests_around(script, call, around) <= own or not (is_measured and is_whole) for call in drawn)


def _ends_early(script: Script, event: Event, around: ast.AST) -> bool:
    """Whether a loop is left after some examples, not a validation after as many batches as a variable says: `if i >= num_batches:`."""
    for leave in (n for n in ast.walk(around) if isinstance(n, ast.Break)):
        test = next((n.test for n in script.above(leave) if isinstance(n, ast.If)), None)
        compared = [n for n in ast.walk(test) if isinstance(n, ast.Compare)] if test is not None else []
        limits = [n.comparators[0] for n in compared if isinstance(n.ops[0], (ast.GtE, ast.Gt, ast.Eq))]
        if not any(_BATCHES.search(key_of(limit)) for limit in limits) or not is_validation(script, event):
            return True
    return False


def _tests_around(script: Script, node: ast.AST, loop: ast.AST | None) -> set[ast.AST]:
    """The tests around a node, inside a loop."""
    inner = takewhile(lambda n: n is not loop, script.above(node)) if isinstance(loop, (ast.For, ast.While)) else ()
    return {n for n in inner if isinstance(n, ast.If)}


def _cell_around(script: Script, event: Event) -> list[ast.AST]:
    """The statements of the notebook's cell in which a forward is, or its statement at the top of a script."""
    top = [node for node in (event.node, *script.above(event.node)) if isinstance(node, ast.stmt)]
    if not top or not isinstance(event.function.node, ast.Module):
        return []
    if script.source.language != "notebook":
        return [top[-1]]
    cell = script.source.cell_line(top[-1].lineno).cell
    return [n for n in event.function.node.body if script.source.cell_line(n.lineno).cell == cell]


def is_validation(script: Script, event: Event) -> bool:
    """Whether the function around a forward, or the loop around it, is named for validation."""
    loops = loops_around(script, event)
    data = getattr(loops[-1], "iter", None) if loops else None
    values = script.outline.values(key_of(data), event.function) if data is not None and key_of(data) else []
    if any(isinstance(value, (ast.List, ast.Tuple)) and value.elts for value in (*values, data)):
        return False  # a few prompts of the script itself
    if not loops:
        # An engine, `Engine(evaluate_step)`, has the loop.
        sites = script.outline.calls.get("Engine", ())
        is_run = any(key_of(value) == event.function.name for call, _ in sites for value in arguments_of(call))
        return is_run and bool(_VALIDATION.search(event.function.name))
    return bool(_VALIDATION.search(event.function.name) or _VALIDATION.search(text_of(data)))


def reads_data(script: Script, event: Event) -> bool:
    """Whether the loop around a forward, in its own function, goes through a data loader and trains nothing."""
    loop = next((n for n in script.above(event.node) if isinstance(n, (ast.For, ast.AsyncFor))), None)
    if loop is None:
        return False
    key = key_of(loop.iter)
    created = script.outline.values(key, event.function) if key and not _LOADER.search(key) else []
    if not any(
        _LOADER.search(text)
        for text in (text_of(loop.iter), *(text_of(v.func) for v in created if isinstance(v, ast.Call)))
    ):
        return False
    calls = [n.func for n in ast.walk(loop) if isinstance(n, ast.Call)]
    return not any(isinstance(func, ast.Attribute) and func.attr in {"backward", "step"} for func in calls)


def is_diagnostic(event: Event, trained: list[Event], validated: list[Event]) -> bool:
    """Whether a forward is of one batch per epoch, in the loop that trains, where what measures the model is under autocast."""
    around = {loop for e in trained for loop in e.loops[:-1]}
    return bool(event.loops) and around.issuperset(event.loops) and any(e.loops != event.loops for e in validated)


def is_preview(script: Script, event: Event, validated: list[Event]) -> bool:
    """Whether a function that validates under autocast calls a method for one input, to show what the model predicts."""
    callers = {node for root in event.roots for node in script.above(root)}
    return bool(_PREDICTS.search(event.function.name)) and any(e.function.node in callers for e in validated)


def needs_no_region(script: Script, event: Event) -> bool:
    """Whether a forward is right without autocast: it measures nothing, has weights of 16 bits, or is in float32 by choice."""
    if _is_probe(script, event) or _is_full_by_choice(script, event):
        return True
    return isinstance(event.node, ast.Call) and is_loaded_low(script, event.node, event.local.subject, event.function)


def _is_probe(script: Script, event: Event) -> bool:
    """Whether a forward measures nothing: its result is dropped or only asked for its shape, or its inputs are made up."""
    if not isinstance(event.node, ast.Call) or _DUMMY.search(text_of(event.node)):
        return True
    parent = script.outline.parents.get(event.node)
    is_dropped = isinstance(parent, ast.Assign) and all(key_of(target) == "_" for target in parent.targets)
    if (is_dropped or isinstance(parent, ast.Expr)) and key_of(event.node.func) == event.local.subject:
        return True  # a warm-up, or an update of the model's own state; a method such as `validation_step` logs
    if _is_only_sized(script, event.node, event.function):
        return True
    return bool(event.node.args) and all(_is_made_up(script, value, event.function) for value in event.node.args)


def _is_full_by_choice(script: Script, event: Event) -> bool:
    """Whether a comment above a forward, where gradients are off, says that it runs in float32: `# sample in float32 for stability`."""
    region = event.inside("no_grad")
    last = getattr(event.node, "lineno", 0)
    first = getattr(region.node if region is not None else event.function.node, "lineno", last)
    lines = script.source.text.splitlines()[max(0, first - 3) : last] if first <= last else []
    return any(map(_IN_FULL.search, lines))


def without_reason(script: Script, event: Event, validated: list[Event]) -> bool:
    """Whether a forward of a validation is in a region with `enabled=False` for which no comment or docstring gives a reason.

    A region inside another that is on, or next to another forward under autocast, is for a part that needs float32.
    """
    regions = [r for r in event.regions if r.kind == "autocast"]
    calls = [r.autocasts[0].node for r in regions if len(r.autocasts) == 1]
    if (
        not regions
        or len(calls) != len(regions)
        or any(constant(argument(c, None, "enabled")) is not False for c in calls)
    ):
        return False
    if any(e.function is event.function for e in validated):
        return False
    first = max(0, getattr(event.function.node, "lineno", 1) - 3)
    lines = script.source.text.splitlines()[first : getattr(event.node, "lineno", 0)]
    comments = [line.partition("#")[2] for line in lines]
    node = event.function.node
    docstring = ast.get_docstring(node) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
    return not any(map(_REASON.search, (*comments, docstring or "")))


def _is_only_sized(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether nothing but the shape of a result is read: `out = model(x)` and `print(out.shape, out["mask"].shape)`."""
    parents = script.outline.parents
    statement = parents.get(call)
    if not isinstance(statement, ast.Assign):
        return _reads_size(parents, call)
    names = {key_of(element) for target in statement.targets for element in getattr(target, "elts", [target])}
    loads = [n for n in ast.walk(function.node) if isinstance(n, ast.Name) and n.id in names and _is_load(n)]
    return "" not in names and bool(loads) and all(_reads_size(parents, load) for load in loads)


def _is_load(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _reads_size(parents: dict[ast.AST, ast.AST], node: ast.AST) -> bool:
    """Whether an expression is only the start of one that reads a shape: `out` of `out.logits.shape` and `out[0].size(1)`."""
    parent = parents.get(node)
    while isinstance(parent, ast.Attribute) or (isinstance(parent, ast.Subscript) and parent.value is node):
        if isinstance(parent, ast.Attribute) and parent.attr in _SIZES:
            return True
        node, parent = parent, parents.get(parent)
    return False


def _is_made_up(script: Script, value: ast.expr, function: Function, depth: int = 2) -> bool:
    """Whether a value is random or constant, also after a transform: `to_mel(torch.randn(1, 16000))`."""
    values = [_moved(v) for v in script.outline.values(key_of(value), function) or [value]]
    for call in values:
        if not isinstance(call, ast.Call):
            return False
        is_new = bool(_MADE_UP.search(key_of(call.func).rsplit(".", 1)[-1]))
        inputs = call.args if depth and isinstance(call.func, ast.Name) else []
        if not is_new and not (inputs and all(_is_made_up(script, v, function, depth - 1) for v in inputs)):
            return False
    return True


def _moved(value: ast.expr) -> ast.expr:
    """What is moved to a device: `torch.zeros(...)` of `torch.zeros(...).to(device)`."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _MOVES:
        value = value.func.value
    return value


def hooked_schedules(script: Script) -> Iterator[tuple[ast.Call, Function]]:
    """The calls that advance a schedule of torch in a hook of Lightning which runs before the first step of the optimizer."""
    hooks = lightning_methods(script) if "ightning" in script.source.text else ()
    for hook in (h for h in hooks if h.name in _START_HOOKS):
        for node in ast.walk(hook.node):
            if isinstance(node, ast.Call) and _is_torch_schedule(script, node, hook):
                yield node, hook


def _is_torch_schedule(script: Script, call: ast.Call, hook: Function) -> bool:
    """Whether a call advances an attribute that is one of torch's schedulers wherever the conditions around the call are true."""
    outline = script.outline
    owner = key_of(call.func.value) if isinstance(call.func, ast.Attribute) and call.func.attr == "step" else ""
    guards = [g for g in conditions_of(outline, call) if g.text != owner]
    parts = [Guard(part, g.is_true) for g in guards for part in (g.text.split(" and ") if g.is_true else [g.text])]
    tests = tuple(g for g in parts if g.text != f"{owner} is not None")
    if not owner.startswith("self.") or arguments_of(call) or any(_COUNTED.search(g.text) for g in tests):
        return False
    values = [v for v in outline.values(owner, hook) if possible(conditions_of(outline, v), tests)]
    names = [outline.names.full(v.func) if isinstance(v, ast.Call) else "" for v in values if text_of(v) != "None"]
    return bool(names) and all(name.startswith("torch.optim.lr_scheduler.") for name in names)
