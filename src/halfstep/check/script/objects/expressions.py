"""What an expression contains (a loss scale, a variable), and the conditions around it, such as those that select adapters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from halfstep.check.regex import regex
from halfstep.check.script.flow.guard import Guard
from halfstep.check.script.objects.choices import constant, text_of
from halfstep.check.script.objects.formats import entries_named
from halfstep.check.script.syntax.children import statements_in
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = [
    "ADAPTER_FLAG",
    "OTHER_USE",
    "arguments_of",
    "arms_of",
    "asks_for_adapters",
    "conditions_of",
    "decides_adapters",
    "ends_run",
    "entries_of",
    "first_key",
    "hand_scaled",
    "has_other_option",
    "is_adapter_branch",
    "is_after_training",
    "is_aside",
    "is_below_calls",
    "is_quantized_branch",
    "is_quantized_with",
    "is_unread",
    "makes_configuration",
    "may_be_none",
    "models_in",
    "numerator",
    "options_of",
    "scale_names",
    "spared_branches",
    "unwrap",
]

_IN_FULL = r"full_?(fine_?tun|ft\b|param|train)"
ADAPTER_FLAG = regex(rf"lora|dora|hqq|low_rank|peft|adapter|quant|4bit|8bit|[48]_bit|bnb|{_IN_FULL}", re.IGNORECASE)
# What a function or an option does other than train, by its name.
OTHER_USE = regex(r"eval|infer|test|sampl|generat|export|deploy|save(?!d)|onnx|valid|serve|predict|bench|profil|debug")
_QUANTIZES = regex(r"quant|hqq|[48]_?bit|bnb|\bbits (in [\[(]|== )[48]\b", re.IGNORECASE)
_OF_ADAPTERS = regex(r"lora|adapter|quant")
_CASTS = {"torch.float16": "float16", "torch.half": "float16", "torch.bfloat16": "bfloat16"}


# What a function that computes a loss is passed: `loss_fn(x, guidance_scale)` is no loss scale, `loss_fn(x, loss_scale)` may be.
_LOSS_SCALE = regex(r"scaler|scaled_?(loss|grad|out)|(loss|grad|gradient|amp)_?scale", re.IGNORECASE)
# Scales of sizes, images and initial weights, which no loss carries, and the weight of one term of a loss.
_OTHER_SCALE = regex(
    r"(value|vf|entropy|policy|actor|critic|kl|aux|perceptual|feature|recon)_loss_scale$|(logits?|multi|gray|grey|up|down|guidance|cfg|full|large|single|img|image|lr|weight_init)_?scaled?|scale_?factors?|scaled_(init|dot)|scales$"
)


def is_aside(outline: Outline, function: Function, names: re.Pattern[str], *, is_whole: bool) -> bool:
    """Whether a function is for something else than training, by its name; with `is_whole`, not if it runs the training itself."""
    name = function.name.lower()
    if not names.search(name) or "train" in name:
        return False
    trained = [site for site in outline.calls.get("train", ()) if key_of(site.call.func) == "trainer.train"]
    runs = any(site.function is function for site in (*trained, *outline.calls.get("backward", ())))
    return not (is_whole and runs) or bool(_OF_ADAPTERS.search(name))  # `run_timing_test` loads, trains and measures


def hand_scaled(node: ast.AST) -> bool:
    """Whether an expression may carry a loss scale; a sum only if each term does: `loss + scaled_kl` is a weighting."""
    terms = [node]
    while terms:
        part = terms.pop()
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add):
            terms += [part.left, part.right]
        elif not any("scale" in _OTHER_SCALE.sub("", name) for name in scale_names(part)):
            return False
    return True


def scale_names(node: ast.AST) -> list[str]:
    """The names in an expression that may be a loss scale, without the other arguments of the functions it calls."""
    names = []
    stack = [node]
    while stack:
        part = stack.pop()
        names.append(_name(part).lower())
        if isinstance(part, ast.Call) and isinstance(part.func, (ast.Name, ast.Attribute)):
            stack.append(part.func)
            passed = [_name(inner) for value in arguments_of(part) for inner in ast.walk(value)]
            is_product = _name(part.func) in {"mul", "multiply", "mul_", "div", "sum", "mean"}
            names += [name.lower() for name in passed if is_product or _LOSS_SCALE.search(name)]
        else:
            stack += ast.iter_child_nodes(part)
    return names


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def first_key(node: ast.AST) -> str:
    """The first variable of an expression that is not called: `losses` of `sum(losses.values())`."""
    parts = list(ast.walk(node))
    called = [part.func for part in parts if isinstance(part, ast.Call)]
    return next((part.id for part in parts if isinstance(part, ast.Name) and part not in called), "")


def arms_of(node: ast.expr) -> list[ast.expr]:
    """Every value that `a if x else b` may be; the expression itself if it is no choice."""
    return [*arms_of(node.body), *arms_of(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def entries_of(value: ast.expr, outline: Outline, function: Function) -> list[ast.expr]:
    """The entry of a dictionary of the file that `table["key"]` or `table.get("key")` reads; any other value as it is."""
    table, index = value, None
    if isinstance(value, ast.Subscript):
        table, index = value.value, value.slice
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "get":
        table, index = value.func.value, value.args[0] if value.args else None
    if not isinstance(index, ast.Constant):
        return [value]
    options = outline.values(key_of(table), function) if key_of(table) else [table]
    tables = [option for option in options if isinstance(option, ast.Dict)]
    pairs = [(k, v) for t in tables for k, v in zip(t.keys, t.values, strict=True)]
    entries = [v for k, v in pairs if isinstance(k, ast.Constant) and k.value == index.value]
    return entries if tables and len(entries) == len(options) else [value]


def arguments_of(call: ast.Call) -> list[ast.expr]:
    """What a call passes, by position and by name."""
    return [*call.args, *(k.value for k in call.keywords)]


def options_of(value: ast.expr) -> list[ast.expr]:
    """Every value that `a if x else b` or `a or b` may be."""
    if isinstance(value, ast.IfExp):
        return [*options_of(value.body), *options_of(value.orelse)]
    return [o for v in value.values for o in options_of(v)] if isinstance(value, ast.BoolOp) else [value]


def models_in(outline: Outline, params: ast.expr | None, function: Function) -> str:
    """The models whose parameters an expression contains, with `|` between them."""
    options = outline.values(key_of(params), function) if params is not None and key_of(params) else [params]
    models = {
        key_of(part.func.value)
        for option in options
        if option is not None
        for part in ast.walk(option)
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute)
        if part.func.attr in {"parameters", "named_parameters"}
    }
    return "|".join(sorted(models - {""}))


def numerator(value: ast.expr) -> ast.expr:
    """`loss` of `loss / accumulation_steps`: a division by anything but a scale leaves the scale in place."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div) and "scal" not in text_of(value.right).lower():
        return value.left
    return value


def unwrap(value: ast.expr) -> tuple[ast.expr, str]:
    """The first expression of `Net().half().cuda()`, and the format it is cast to."""
    dtype = ""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        attr = value.func.attr
        if attr in {"half", "bfloat16"} and not value.args:
            dtype = dtype or {"half": "float16"}.get(attr, attr)
        elif attr == "to":
            texts = [text_of(v) for v in (*value.args, *(k.value for k in value.keywords))]
            dtype = dtype or next((_CASTS[t] for t in texts if t in _CASTS), "")
        elif attr not in {"cuda", "train", "eval", "cpu", "float", "requires_grad_"}:
            break
        value = value.func.value
    return value, dtype


def conditions_of(outline: Outline, node: ast.AST) -> tuple[Guard, ...]:
    """The conditions around a node inside its function, outermost first."""
    guards: list[Guard] = []
    child, parent = node, outline.parents.get(node)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
        if isinstance(parent, ast.If) and child is not parent.test:
            guards.append(_guard(parent.test, child in parent.body))
        elif isinstance(parent, ast.IfExp) and child is not parent.test:
            guards.append(_guard(parent.test, child is parent.body))
        elif isinstance(parent, ast.match_case) and isinstance(match := outline.parents.get(parent), ast.Match):
            value = parent.pattern.value if isinstance(parent.pattern, ast.MatchValue) else None
            pattern = f"== {text_of(value)}" if value is not None else f"matches {ast.unparse(parent.pattern)}"
            guards.append(Guard(f"{text_of(match.subject)} {pattern}", True))
        child, parent = parent, outline.parents.get(parent)
    return tuple(reversed(guards))


def is_unread(outline: Outline, node: ast.AST) -> bool:
    """Whether a line of a function assigns a variable that only code under `if False` reads."""
    above = list(outline.above(node))
    statement = next((n for n in (node, *above) if isinstance(n, ast.stmt)), None)
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if not isinstance(target, ast.Name) or not above or isinstance(above[-1], ast.Module):
        return False
    names = [n for n in ast.walk(above[-1]) if isinstance(n, ast.Name) and n.id == target.id]
    reads = [conditions_of(outline, n) for n in names if isinstance(n.ctx, ast.Load)]
    return bool(reads) and all(Guard("False", True) in guards for guards in reads)


def _guard(test: ast.expr, is_true: bool) -> Guard:
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, is_true = test.operand, not is_true
    return Guard(text_of(test), is_true)


def is_adapter_branch(guard: Guard) -> bool:
    """Whether a condition selects adapters or quantization: `args.lora`, and `args.full_finetune` where it is false."""
    asked = bool(ADAPTER_FLAG.search(guard.text)) and not has_other_option(guard.text)
    return asked and guard.is_true is not bool(re.search(_IN_FULL, guard.text, re.IGNORECASE))


def is_quantized_branch(guard: Guard) -> bool:
    """Whether a condition selects quantization."""
    return guard.is_true and _QUANTIZES.search(guard.text) is not None


def spared_branches(outline: Outline, functions: Iterable[Function], models: frozenset[str]) -> list[tuple[Guard, ...]]:
    """The conditions of each statement of some functions that raises, or that freezes every parameter of one of these models."""
    nodes = (node for function in dict.fromkeys(functions) for node in ast.walk(function.node))
    ends = (node for node in nodes if isinstance(node, ast.Raise) or _frozen(node) in models)
    return [own for own in (conditions_of(outline, node) for node in ends) if own]


def _frozen(node: ast.AST) -> str | None:
    """The model that a statement freezes: a loop over all parameters with `p.requires_grad = False` alone, or `requires_grad_(False)`."""
    if isinstance(node, ast.For):
        called = node.iter.func if isinstance(node.iter, ast.Call) else None
        is_all = isinstance(called, ast.Attribute) and called.attr in {"parameters", "named_parameters"}
        return (
            key_of(called.value)
            if isinstance(called, ast.Attribute) and is_all and all(map(_switched_off, node.body))
            else None
        )
    return _switched_off(node) if isinstance(node, ast.Expr) else None


def _switched_off(statement: ast.stmt) -> str | None:
    """What `x.requires_grad = False` and `x.requires_grad_(False)` switch off."""
    if isinstance(statement, ast.Assign):
        owner, _, name = key_of(statement.targets[0]).rpartition(".")
        return owner if name == "requires_grad" and constant(statement.value) is False else None
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    is_off = call.func.attr == "requires_grad_" and [constant(value) for value in values] == [False]
    return key_of(call.func.value) if is_off else None


def has_other_option(text: str) -> bool:
    """Whether a test also holds for a choice without adapters: `"full"` of `mode in ["full", "lora"]`."""
    subject, separator, options = text.partition(" in ")
    strings = re.findall(r"'([^']*)'", options) if separator and not ADAPTER_FLAG.search(subject) else []
    return any(not ADAPTER_FLAG.search(string) for string in strings)


def asks_for_adapters(guards: tuple[Guard, ...]) -> bool:
    """Whether one of these conditions is about adapters or quantization."""
    return any(ADAPTER_FLAG.search(text) for text, _ in guards)


def decides_adapters(guards: tuple[Guard, ...]) -> bool:
    """Whether one of these conditions is about adapters: a model that is not quantized may have some."""
    return any(ADAPTER_FLAG.search(_QUANTIZES.sub("", text)) for text, _ in guards)


def is_quantized_with(outline: Outline, call: ast.Call, option: ast.expr, dtype: ast.expr | None) -> bool:
    """Whether every run that loads a model with this dtype also quantizes it.

    Not if `if args.qlora: options["quantization_config"] = ...` asks for it alone, or if the dtype is set in the other branch.
    """
    own = conditions_of(outline, option)
    with_dtype = conditions_of(outline, dtype) if dtype is not None else ()
    if any(Guard(text, not is_true) in with_dtype for text, is_true in own):
        return False
    return not asks_for_adapters(tuple({*own} - {*conditions_of(outline, call), *with_dtype}))


def is_after_training(outline: Outline, node: ast.Call, function: Function) -> bool:
    """Whether a call stands below every `backward` of its function, and in no loop with one: it saves or tests the model."""
    lines = [site.call.lineno for site in outline.calls.get("backward", ()) if site.function is function]
    loops, parent = [], outline.parents.get(node)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
        loops += [parent] if isinstance(parent, (ast.For, ast.While)) else []
        parent = outline.parents.get(parent)
    trains = any(loop.lineno <= line <= (loop.end_lineno or line) for loop in loops for line in lines)
    return bool(lines) and node.lineno > max(lines) and not trains


def is_below_calls(outline: Outline, node: ast.AST, scope: Function, callee: Function) -> bool:
    """Whether a node stands below every call of a function of this file, in the one scope that has any, and in no loop with one."""
    sites = [s for s in outline.calls.get(callee.name, ()) if outline.call_target(s.call, s.function) is callee]
    if not sites or outline.loads[callee.name] > len(sites) or any(site.function is not scope for site in sites):
        return False
    lines = [site.call.lineno for site in sites]
    parent = outline.parents.get(node)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if isinstance(parent, (ast.For, ast.While)) and parent.lineno <= max(lines):
            return False
        parent = outline.parents.get(parent)
    return max(lines) < getattr(node, "lineno", 0)


def may_be_none(outline: Outline, value: ast.expr, function: Function) -> bool:
    """Whether a value is None or False in some run: assigned so, by one arm of a ternary, or an option that may be off."""
    values = outline.values(key, function) if (key := key_of(value)) else [value]
    parts = [v for v in (*values, value) if isinstance(v, ast.Subscript)]
    entries = [entry for part in parts for entry in entries_named(outline, key_of(part), function)]
    if any(may_be_none(outline, entry, scope) for entry, scope in entries if entry is not value):
        return True
    arms = [arm for v in values for arm in arms_of(v)]
    return any(_may_be_off(arm) or _may_be_idle(arm) or _may_return_none(outline, arm, function) for arm in arms)


def _may_return_none(outline: Outline, node: ast.expr, function: Function) -> bool:
    """Whether a call returns None in some run, other than after an error.

    A function of this file does with `if cfg.rank == 0: return None`, or a last `if` without `else`; TRL's without --use_peft.
    """
    if not isinstance(node, ast.Call):
        return False
    target = outline.call_target(node, function)
    if target is None or target.name == "__init__":
        return outline.names.full(node.func) in {"trl.get_peft_config", "trl.trainer.utils.get_peft_config"}
    returns = [n for n in statements_in(target.node) if isinstance(n, ast.Return)]
    empty = [n for n in returns if n.value is None or constant(n.value) is None]
    is_error = [any(isinstance(above, ast.ExceptHandler) for above in outline.above(n)) for n in empty]
    last = target.body[-1]
    is_open = isinstance(last, ast.If) and not last.orelse
    if len(empty) == len(returns):  # as in the script for one value of a setting, without the other branches
        return not isinstance(last, (ast.Raise, ast.Expr))
    return is_open or not all(is_error)


def makes_configuration(outline: Outline, call: ast.Call, function: Function) -> bool:
    """Whether a function of this file only creates a configuration, whatever its name: it returns `LoraConfig(...)`."""
    target = outline.call_target(call, function)
    returns = [n for n in statements_in(target.node) if isinstance(n, ast.Return)] if target is not None else []
    made = [n.value.func for n in returns if isinstance(n.value, ast.Call)]
    others = [n for n in returns if n.value is not None and not isinstance(n.value, ast.Call)]
    is_none = all(constant(n.value) is None for n in others)
    return bool(made) and is_none and all(text_of(func).endswith("Config") for func in made)


def _may_be_off(node: ast.expr) -> bool:
    """Whether a flag is False, compares an option, or is one that is off by default: `cfg.get("load_in_8bit", False)`."""
    while isinstance(node, ast.Call) and key_of(node.func) == "bool" and len(node.args) == 1:
        node = node.args[0]
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else key_of(node.func)
        is_read = (name, len(node.args)) in {("getattr", 3), ("get", 2)}
        return is_read and constant(node.args[-1]) in {None, False}
    return isinstance(node, ast.Compare) or constant(node) in {None, False}


def _may_be_idle(node: ast.expr) -> bool:
    """Whether `BitsAndBytesConfig(load_in_4bit=args.bits == 4)` quantizes nothing in some run."""
    if not isinstance(node, ast.Call) or not text_of(node.func).endswith("BitsAndBytesConfig"):
        return False
    switches = [k.value for k in node.keywords if k.arg in {"load_in_4bit", "load_in_8bit"}]
    return bool(switches) and all(isinstance(value, ast.Compare) for value in switches)


def ends_run(outline: Outline, cast: ast.AST, by: ast.AST, key: str) -> bool:
    """Whether the branch that casts a model ends without training it: `if args.export: ...; return`."""
    parents = outline.parents
    node: ast.AST = cast
    while (parent := parents.get(node)) is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
        block = parent.body if isinstance(parent, ast.If) and node in parent.body else []
        if isinstance(parent, ast.If) and node in parent.orelse:
            block = parent.orelse
        last = block[-1] if block else None
        inside = any(by is inner for statement in block for inner in ast.walk(statement))
        if isinstance(last, (ast.Raise, ast.Continue, ast.Break)) and not inside:
            return True
        left = text_of(last.value.func) if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) else ""
        if left in {"exit", "quit", "sys.exit", "os._exit"} and not inside:
            return True
        if isinstance(last, ast.Return) and not inside and last is not node:
            returned = {key_of(n) for n in ast.walk(last)} if last.value is not None else set()
            if key not in returned:
                return True
        node = parent
    return False
