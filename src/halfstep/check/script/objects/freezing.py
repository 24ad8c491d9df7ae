"""What freezes a model, or a part of it: loops over its parameters, and the parts that are trained again after that."""

from __future__ import annotations

import ast
import re

from halfstep.check.regex import regex
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.formats import cast_formats
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.objects.weights import Lineage
from halfstep.check.script.syntax.children import nodes_in
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline, last_name_of
from halfstep.check.script.trained.enabling import ADDED, ITERATED, LIFTS, enabled_parts, full_path
from halfstep.check.script.trained.getters import path_of

__all__ = [
    "freezes",
    "freezing_loops",
    "keeps_low",
    "leaves_trained",
    "lifted_parts",
    "may_be_frozen",
    "restored_layers",
    "restoring_loop",
    "trains_lifted_part",
    "trains_part_of",
]


_ATTACHES = regex(
    r"^_*(initialize|init|attach|add|insert|inject|replace|build|create|wrap|patch)_(?!\w*(ids|mask|inputs|labels|batch|hooks?|optimizer|scheduler)$)"
)
_CREATES = regex(r"\bnn\.|Linear|Module|Parameter|Embedding|lora|adapter|setattr|register", re.IGNORECASE)
# Parts that no checkpoint contains: the file that attaches them to a loaded model may be another one.
_ATTACHED = regex(r"lora|adapter|prompt|connector|resampler|memory|new|extra|custom", re.IGNORECASE)
_ADAPTERS = regex(r"lora|adapter", re.IGNORECASE)
_OF_TRANSFORMERS = regex(r"transformers\.|AutoModel\w*\.")  # the second by `from utils import *`
# Layers that recipes keep in float32 next to 16-bit weights, as a condition names them; matrices are another matter.
_SMALL = regex(r"[Nn]orm|RMS|\bln_?|\bbn\b|[Rr]outer|\bgate\b|\bbias\b|ndim == 1|dim\(\) == 1|ndim < 2|dim\(\) < 2")
_CHANGES = regex(
    r"requires_grad(_\(|\s*=[^=])|\.float\(|float32|\.to\(|\.data\b|kbit|lora|adapter|peft|quant|freez|\bsetattr\(",
    re.IGNORECASE,
)
_CHOOSES = regex(
    r"requires_grad(_\(|\s*=\s*)(?!(True|False|requires_grad=)\b)[\w(]"
)  # `p.requires_grad_(name in trained)`
_FREEZES = regex(r"requires_grad(_\((requires_grad=)?|\s*=\s*)False")
_WORDS = regex(r"\w+")
_OF_GRADIENT = regex(r"\.grad(\.\w+(\(\))?)*\.float\(\)")  # measured in float32; the parameter stays as it is


# An option, by the form of its test: `args.pad`, `cfg["pad"]`, `getattr(config, "PAD", False)`.
_OPTION = regex(
    r"^(getattr\(\w*(args|cfg|config|opts?), '\w+', False\)|(\w+\.)*(args|cfg|config|opts?)(\.\w+|\['\w+'\]))$"
)


def freezing_loops(outline: Outline) -> tuple[tuple[ast.For, Function], ...]:
    """Loops over parameters that freeze them or replace their data."""
    loops = {}
    for name in sorted(ITERATED):
        for call, function in outline.calls.get(name, ()):
            node: ast.AST | None = call
            while node is not None and not isinstance(node, ast.stmt):
                node = outline.parents.get(node)
            if isinstance(node, ast.For):
                body = _OF_GRADIENT.sub("", " ".join(ast.unparse(statement) for statement in node.body))
                if re.search(r"requires_grad(_\(| = )(?!True)|\.float\(\)|float32", body):
                    loops[node] = function
    return tuple(loops.items())


def keeps_low(lineage: Lineage, function: Function) -> bool:
    """Whether a function of this file leaves trained weights of a model in their dtype: it changes none, or chooses which to train."""
    text = " ".join(ast.unparse(statement) for statement in function.body)
    if not _CHANGES.search(text):
        return True
    if not LIFTS.search(text) and _freezes_on_request(lineage.outline, function):
        return True
    parts = tuple(part for part in enabled_parts(lineage.outline) if part[1] is function)
    received = {part for part, _ in parts if "." in part and part.partition(".")[0] in function.params}
    added = _names_added(lineage, function)
    received |= {p for p, _ in parts if not added.search(p) and _is_looked_up(lineage.outline, p, function)}
    chooses = bool(_CHOOSES.search(text) or received) or trains_part_of(lineage, parts)
    return chooses and not LIFTS.search(text) and not _has_new_layers(lineage)


def _freezes_on_request(outline: Outline, function: Function) -> bool:
    """Whether a function freezes each part of a model only if another parameter asks for it: `if "visual" in towers:`."""
    frozen = [
        n for n in nodes_in(function.node) if isinstance(n, (ast.Call, ast.Assign)) and _FREEZES.search(ast.unparse(n))
    ]
    asked = set(function.params) - {"self"}
    tests = [" ".join(guard.text for guard in conditions_of(outline, node)) for node in frozen]
    return bool(frozen) and all(asked.intersection(_WORDS.findall(text)) for text in tests)


def _is_looked_up(outline: Outline, part: str, function: Function) -> bool:
    """Whether a variable is a module that a function finds in what it received: an attribute of that, or an item of a loop."""
    root, separator, _ = part.partition(".")
    bound = [b for b in outline.bindings.get(root, ()) if b.function is function]
    values = [b.value for b in bound if b.value is not None and constant(b.value) is not None]
    is_module = all(isinstance(value, (ast.Attribute, ast.Name, ast.Subscript)) for value in values)
    return bool(values if not separator else bound) and is_module  # a loop that chooses modules tests them itself


def freezes(lineage: Lineage, loop: ast.For, function: Function) -> bool:
    """Whether such a loop leaves nothing of a model to be trained in 16 bits."""
    owners = [p.value for p in ast.walk(loop.iter) if isinstance(p, ast.Attribute)]
    if not any(lineage.has(key_of(owner), function) for owner in owners):
        return False
    iterated = [p.value for p in ast.walk(loop.iter) if isinstance(p, ast.Attribute) and p.attr in ITERATED]
    if (
        iterated
        and not any(lineage.has(key_of(owner), function) for owner in iterated)
        and not _has_new_layers(lineage, loop)
    ):
        return False  # a part of the model: the rest is trained
    if restored_layers(loop) and not _has_new_layers(lineage, loop):
        return False  # the other layers are trained in 16 bits
    if _freezes_named(loop) and not _has_new_layers(lineage, loop):
        return False  # the layers of other names are trained
    chooses = any(isinstance(n, ast.Assign) and constant(n.value) is True for n in ast.walk(loop))
    chooses |= "requires_grad_(True)" in ast.unparse(loop) or bool(_CHOOSES.search(ast.unparse(loop)))
    return not chooses or not _keeps_dtype(lineage, loop, function)


def _keeps_dtype(lineage: Lineage, loop: ast.For, function: Function) -> bool:
    """Whether the layers that a loop chooses to train have 16 bits too: the model is cast after it, or has no layers of its own."""
    text = ast.unparse(loop)
    later = any(c.may_be_low and c.function is function and c.node.lineno > loop.lineno for c in lineage.casts)
    whole = not _names_added(lineage, function).search(text) and not _has_new_layers(lineage, loop)
    names = [part.rpartition(".")[2] for part in lifted_parts(lineage)]
    return (later or whole) and not any(name in text for name in names)


def leaves_trained(
    lineage: Lineage, call: ast.Call, function: Function, parts: tuple[tuple[str, Function], ...]
) -> bool:
    """Whether `model.requires_grad_(...)` leaves 16-bit weights to train: it enables them, or some of them are enabled again."""
    if constant(argument(call, 0, "requires_grad")) is True:
        return True
    return _trains_chosen(lineage, function, call.lineno) or trains_part_of(lineage, parts)


def _trains_chosen(lineage: Lineage, function: Function, line: int) -> bool:
    """Whether a loop below a line that freezes a model trains some of its parameters again, by their names: `if name in chosen:`."""
    outline = lineage.outline
    for call, scope in outline.calls.get("named_parameters", ()):
        loop = outline.parents.get(call)
        is_below = scope is function and isinstance(loop, ast.For) and loop.iter is call and loop.lineno > line
        owner = key_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if not is_below or not isinstance(loop, ast.For) or not lineage.has(owner, function):
            continue
        if re.search(r"requires_grad( = |_\()True", ast.unparse(loop)) and _keeps_dtype(lineage, loop, function):
            return True
    return False


def _names_added(lineage: Lineage, function: Function) -> re.Pattern[str]:
    """Names of parts that may be attached in float32, to a model that a loop in this function freezes."""
    casts = [c for c in lineage.casts if c.may_be_low]
    made = max((c.node.lineno for c in lineage.creations if c.function is function), default=0)
    if casts and all(c.form == "cast" and c.function is function and c.node.lineno > made for c in casts):
        return _ADAPTERS  # the cast includes whatever was attached before
    # What transformers loads in 16 bits has no other layers: new ones have the same dtype.
    loads = [lineage.outline.names.full(c.node.func) or text_of(c.node.func) for c in casts if c.form == "load"]
    is_whole = not lineage.creations and bool(loads) and all(map(_OF_TRANSFORMERS.match, loads))
    return _ATTACHED if is_whole else ADDED


def restored_layers(loop: ast.For) -> str:
    """Which layers a loop returns to float32: `norm` of `if isinstance(m, nn.LayerNorm): m.float()`; "" if all, or not clear.

    "matrices" if the condition names another class, whose siblings keep their 16 bits.
    """
    if "requires_grad" in ast.unparse(loop):
        return ""
    tests: list[str] = []
    stack: list[tuple[ast.AST, str]] = [(statement, "") for statement in loop.body]
    while stack:
        node, test = stack.pop()
        if isinstance(node, ast.If):
            own = "" if any(isinstance(n, (ast.Not, ast.NotIn)) for n in ast.walk(node.test)) else text_of(node.test)
            stack += [(n, own) for n in node.body] + [(n, "") for n in node.orelse]
        elif isinstance(node, ast.stmt) and hasattr(node, "body"):
            return ""
        elif re.search(r"\.float\(\)|float32", ast.unparse(node)):
            tests.append(test)
    if not tests or any(re.search("lora|adapter|peft|bit", test, re.IGNORECASE) for test in tests):
        return ""
    if all(_SMALL.search(test) for test in tests):
        return "norms"
    classes = all(test.startswith("isinstance(") for test in tests)
    every = "Embedding" in " ".join(tests) and "Linear" in " ".join(tests)
    return "matrices" if classes and not every else ""


def restoring_loop(lineage: Lineage) -> tuple[ast.For, str] | None:
    """The loop that returns some layers of a model to float32, and which: norms or matrices."""
    for loop, function in freezing_loops(lineage.outline):
        owners = [p.value for p in ast.walk(loop.iter) if isinstance(p, ast.Attribute)]
        if (layers := restored_layers(loop)) and any(lineage.has(key_of(owner), function) for owner in owners):
            return loop, layers
    return None


def _freezes_named(loop: ast.For) -> bool:
    """Whether a loop freezes only parameters with certain names: `if "visual" in name: p.requires_grad = False`."""
    ifs = [n for n in loop.body if isinstance(n, ast.If) and "requires_grad" in ast.unparse(n)]
    others = " ".join(ast.unparse(n) for n in loop.body if n not in ifs)
    if len(ifs) != 1 or "requires_grad = " in others or "requires_grad_(" in others:
        return False
    body = " ".join(map(ast.unparse, ifs[0].body))
    rest = " ".join(map(ast.unparse, ifs[0].orelse))
    return "requires_grad" in body and not _FREEZES.search(rest) and _is_of_some_names(ifs[0].test)


def _is_of_some_names(test: ast.expr) -> bool:
    """Whether a condition is true only for parameters whose names contain or begin with certain words."""
    if isinstance(test, ast.BoolOp):
        return (any if isinstance(test.op, ast.And) else all)(map(_is_of_some_names, test.values))
    words: list[ast.expr] = []
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.In):
        words = [test.left]
    elif isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and test.func.attr == "startswith":
        words = test.args[:1]
    elif isinstance(test, ast.Call) and key_of(test.func) == "any" and isinstance(test.args[0], ast.GeneratorExp):
        every = test.args[0]
        is_plain = len(every.generators) == 1 and key_of(every.generators[0].target) in ast.unparse(every.elt)
        negated = any(isinstance(n, (ast.Not, ast.NotIn, ast.NotEq)) for n in ast.walk(every.elt))
        words = [every.generators[0].iter] if is_plain and not negated else []
    known = [
        part for word in words for part in (word.elts if isinstance(word, (ast.Tuple, ast.List, ast.Set)) else [word])
    ]
    texts = [constant(word) for word in known]
    every_text = bool(texts) and all(isinstance(text, str) for text in texts)
    return every_text and not {"", "model", "weight", "layer", "layers"} & {str(text).strip(".") for text in texts}


def trains_part_of(lineage: Lineage, parts: tuple[tuple[str, Function], ...]) -> bool:
    """Whether one of these modules is a part of a model that has the model's own dtype: no layer of it is replaced."""
    for text, function in parts:
        if not _is_part(lineage, text, function) or _has_new_layers(lineage):
            continue
        if not any(f"{text}.".startswith(f"{part}.") for part in lifted_parts(lineage)):
            return True
    return False


def lifted_parts(lineage: Lineage) -> list[str]:
    """The modules of a model that are cast to float32 in place: `model.projector.float()`, also under a name of their own."""
    outline, parts = lineage.outline, []
    for call, function in (site for name in ("float", "to") for site in outline.calls.get(name, ())):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        key, parent = path_of(owner), outline.parents.get(call)
        assigned = key_of(parent.targets[0]) if isinstance(parent, ast.Assign) else ""
        if not key or not (isinstance(parent, ast.Expr) or assigned == key) or lineage.has(key, function):
            continue
        if cast_formats(outline, call, function) != {"float32"}:
            continue
        path = full_path(outline, key, function)
        if _is_part(lineage, path, function) or _is_taken_from(lineage, key, function):
            parts.append(path)
    return parts


def trains_lifted_part(lineage: Lineage) -> bool:
    """Whether what an optimizer is given is a module that is cast to float32, perhaps in the function that calls this one."""
    trained = next(iter(lineage.places), ("", ""))[0].rpartition(".")[2]
    return bool(trained) and any(part.rpartition(".")[2] == trained for part in lifted_parts(lineage))


def _is_part(lineage: Lineage, path: str, function: Function) -> bool:
    """Whether a path leads to a module of a model: `model.visual.merger`."""
    names = path.split(".")
    return any(lineage.has(".".join(names[:count]), function) for count in range(1, len(names)))


def _is_taken_from(lineage: Lineage, key: str, function: Function) -> bool:
    """Whether a variable is what a function returns for a model: `projector = find_projector(model)`."""
    values = [b.value for b in lineage.outline.bindings.get(key, ()) if b.function is function]
    calls = [value for value in values if isinstance(value, ast.Call)]
    return any(lineage.has(key_of(a), function) for call in calls for a in call.args)


def may_be_frozen(lineage: Lineage) -> bool:
    """Whether a function of another file attaches parts to a model whose embeddings are frozen: only those need gradients of their inputs."""
    outline = lineage.outline
    asked = [(c.func, f) for c, f in outline.calls.get("enable_input_require_grads", ())]
    if not any(isinstance(func, ast.Attribute) and lineage.has(key_of(func.value), f) for func, f in asked):
        return False
    sites = [site for name, calls in outline.calls.items() if _ATTACHES.search(name) for site in calls]
    foreign = [site for site in sites if outline.call_target(site.call, site.function) is None]
    return any(lineage.has(key_of(a), function) for call, function in foreign for a in call.args)


def _is_aside(lineage: Lineage, call: ast.Call, function: Function, where: ast.AST | None) -> bool:
    """Whether `setattr` sets no layer in some run: of an object that is no module, or in a function that only an option calls."""
    outline = lineage.outline
    is_plain = function.cls in outline.classes and not outline.bases.get(function.cls)
    if is_plain and key_of(call.args[0]) == "self" and all(scope != function.cls for _, scope in lineage.places):
        return True
    sites = (
        [site for site in outline.calls.get(function.name, ()) if site.call is not call] if where is not None else []
    )
    here = conditions_of(outline, where) if where is not None else ()
    own = [set(conditions_of(outline, site.call)) - set(here) for site in sites]
    return bool(own) and all(any(_OPTION.search(guard.text) for guard in guards) for guards in own)


def _has_new_layers(lineage: Lineage, where: ast.AST | None = None) -> bool:
    """Whether a layer of the model is assigned: `model.head = nn.Linear(...)` is created in float32.

    A call in a branch that excludes `where`, `if args.lora: model = inject_layers(model)`, attaches none there.
    """
    outline = lineage.outline
    for key, _ in lineage.places:
        for name, bindings in outline.bindings.items():
            made = [b.value for b in bindings if isinstance(b.value, ast.Call)] if name.startswith(f"{key}.") else []
            if any(last_name_of(call.func) != "get_peft_model" for call in made):  # whose adapters alone are float32
                return True
    if any(name in outline.calls for name in ("add_module", "register_module", "set_submodule")):
        return True
    calls = [
        (c, f) for c, f in outline.calls.get("setattr", ()) if len(c.args) == 3 and not _is_aside(lineage, c, f, where)
    ]
    # `setattr(loader, "epoch", n)`: a name that is written sets an attribute of that object, which is no part of the model.
    values = [c.args[2] for c, f in calls if constant(c.args[1]) is ... or lineage.has(key_of(c.args[0]), f)]
    if not all(
        isinstance(value, ast.Constant) or text_of(value).startswith(("int(", "float(", "str(")) for value in values
    ):
        return True  # `setattr(model, "is_parallelizable", True)` is no layer
    # `model.initialize_vision_modules(args)`, `attach_head(model)`: layers that another file creates
    sites = [site for name, calls in outline.calls.items() if _ATTACHES.search(name) for site in calls]
    here = conditions_of(outline, where) if where is not None else ()
    for call, function in sites:
        target = outline.call_target(call, function)
        if not possible(conditions_of(outline, call), here):
            continue
        if target is not None and not _CREATES.search(ast.unparse(target.node)):
            continue  # `add_position_ids(batch, model)` of this file
        owner = text_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        parts = [owner.partition(".")[0], *(key_of(a) for a in call.args), owner]
        if any(lineage.has(part, function) for part in parts):
            return True
    return False
