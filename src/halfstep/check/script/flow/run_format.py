"""Which 16-bit format a script trains in, by the arguments of its trainer, its autocast regions or its model.

A flag such as `bf16=` is rarely a literal. It is on where the GPU supports bfloat16, on unless a configuration turns it
off, or off unless an option turns it on. In all of these some run is in bf16, and what the script fixes for every run has
to fit that run. A flag that the file does not explain decides nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.objects.choices import field_defaults, strings_of
from halfstep.check.script.objects.formats import SIXTEEN_BIT, formats_of, keyword_of, returned_by
from halfstep.check.script.objects.values import DTYPES, MAX_VALUES, UNKNOWN, argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import CallSite, default_of

__all__ = [
    "COMPUTES",
    "FORMAT_NAMES",
    "OLDER",
    "ON",
    "OPTION",
    "bf16_run",
    "bf16_weights",
    "computed_formats",
    "engine_run",
    "flag_states",
    "fp16_training",
    "is_in_own_run",
    "names_other_format",
    "without_bf16",
]

_ARGUMENTS = ("TrainingArguments", "Config")
_TRAINERS = frozenset({"trl", "transformers", "unsloth", "optimum", "sentence_transformers"})
# The states of a flag, from certain to unlikely.
ON, DEFAULT, GPU, OPTION, OFF = "on", "on by default", "on where the GPU supports it", "on by an option", "off"
OLDER = "on where the GPU has no bfloat16"
_ORDER = (ON, DEFAULT, GPU, OPTION)
_WHEN = {
    ON: "trains in bf16",
    DEFAULT: "trains in bf16 by default",
    GPU: "trains in bf16 where the GPU supports it",
    OPTION: "trains in bf16 if it is turned on",
}
_LIGHTNING = {"lightning", "pytorch_lightning"}
_MODES = {
    "fp16": "float16", "16-mixed": "float16", "16": "float16",
    "bf16": "bfloat16", "bf16-mixed": "bfloat16",
}  # fmt: skip
_SHORT = {"float16": "fp16", "bfloat16": "bf16"}
_BF16 = regex(r"bf16|bfloat16", re.IGNORECASE)
_SUPPORT = regex(r"is_b(?:f|float)16_supported$|is_torch_bf16|bf16_(?:gpu_)?available$|cuda\.is_available$")
_CAPABILITY = regex(r"get_device_capability\(|^\(?(?:major|capability|cc)\b")
# What a run computes in, by the name of a variable and by that of a format; `dtype` may be that of the weights.
COMPUTES = regex(r"(amp|train|compute|autocast)_?dtype|((train|training|trainer|mixed)_)?precision")
FORMAT_NAMES = {
    "fp16": "float16", "16": "float16", "float16": "float16", "half": "float16", "bf16": "bfloat16", "bfloat16": "bfloat16",
    "fp32": "float32", "32": "float32", "float32": "float32",
}  # fmt: skip
States = frozenset[str]


def flag_states(outline: Outline, node: ast.expr | None, function: Function, depth: int = 6) -> States:
    """When a flag is on, one state for each value the file shows; "?" for a value that it does not show."""
    if node is None:
        return frozenset({OFF})
    value = constant(node)
    if value is not ... or depth == 0:
        return frozenset({(ON if value else OFF) if value in (True, False, None) else UNKNOWN})

    def of(part: ast.expr, scope: Function = function) -> States:
        return flag_states(outline, part, scope, depth - 1)

    if isinstance(node, ast.BoolOp):
        join = _all_of if isinstance(node.op, ast.And) else _any_of
        return join([of(part) for part in node.values])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _inverted(of(node.operand))
    if isinstance(node, ast.IfExp):
        arms = (constant(node.body), constant(node.orelse))
        test = of(node.test)
        if arms in ((True, False), (False, True)):
            return test if arms[0] else _inverted(test)
        return of(node.body) | of(node.orelse)
    if isinstance(node, ast.Compare):
        return _compared(outline, node, function)
    if isinstance(node, ast.Call):
        return _called(outline, node, function, depth)
    return _named(outline, node, function, depth)


def _all_of(parts: list[States]) -> States:
    """`a and b`: on as rarely as its rarest part; an option may be on whatever the other parts are."""
    if frozenset({OFF}) in parts:
        return frozenset({OFF})
    states = frozenset().union(*parts)
    rarest = next((s for s in (OPTION, UNKNOWN, OLDER, GPU, DEFAULT) if s in states), ON)
    return frozenset({rarest})


def _any_of(parts: list[States]) -> States:
    states = frozenset().union(*parts)
    return frozenset({next((s for s in (*_ORDER, UNKNOWN, OLDER) if s in states), OFF)})


def _inverted(states: States) -> States:
    opposite = {ON: OFF, OFF: ON, DEFAULT: OPTION, OPTION: DEFAULT, GPU: OLDER, OLDER: GPU}
    return frozenset(opposite.get(state, UNKNOWN) for state in states)


def _compared(outline: Outline, node: ast.Compare, function: Function) -> States:
    """A test of the GPU's compute capability, or of an option with a list of choices."""
    if _CAPABILITY.search(text_of(node)) and isinstance(node.ops[0], (ast.GtE, ast.Gt)):
        return frozenset({GPU})
    if _CAPABILITY.search(text_of(node)) and isinstance(node.ops[0], (ast.Lt, ast.LtE)):
        return frozenset({OLDER})
    wanted = constant(node.comparators[0])
    if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq) or not isinstance(wanted, str):
        return frozenset({UNKNOWN})
    strings = strings_of(outline, node.left, function)
    if strings == {wanted}:
        return frozenset({ON})
    return frozenset({OPTION if wanted in strings and UNKNOWN not in strings else UNKNOWN})


def _called(outline: Outline, call: ast.Call, function: Function, depth: int) -> States:
    """A query of the hardware, a lookup with a default, or a function of this file."""
    name = text_of(call.func)
    last = name.rpartition(".")[2]
    if _SUPPORT.search(name):
        return frozenset({GPU})
    if last == "bool" and len(call.args) == 1:
        return flag_states(outline, call.args[0], function, depth - 1)
    lookup = {"get": 2, "getattr": 3}.get(last, 0)
    if lookup and len(call.args) >= lookup - 1:
        default = call.args[lookup - 1] if len(call.args) == lookup else ast.Constant(None)
        key = str(constant(call.args[lookup - 2]))
        return _declared(flag_states(outline, default, function, depth - 1), key)
    target = outline.call_target(call, function)
    values = list(returned_by(target)) if target is not None and target.name != "__init__" else []
    if target is None or not 0 < len(values) <= MAX_VALUES:
        return frozenset({UNKNOWN})
    return frozenset().union(*(flag_states(outline, v, target, depth - 1) for v in values))


def _declared(default: States, name: str) -> States:
    """The states of a setting that a user may change, by its default and its name."""
    if default & {ON, DEFAULT}:
        return frozenset({DEFAULT})
    if default == {OFF}:
        return frozenset({OPTION if _BF16.search(name) else UNKNOWN})
    return default


def _named(outline: Outline, node: ast.expr, function: Function, depth: int) -> States:
    """A variable, a parameter, an option of the command line or a field."""
    key = key_of(node)
    if not key:
        return frozenset({UNKNOWN})
    states: set[str] = set()
    for value, scope in outline.sources(key, function)[:MAX_VALUES]:
        copied = key_of(value)
        if value is not node and not (copied == key and scope is function):
            states |= flag_states(outline, value, scope, depth - 1)
    if key in function.params:
        default = default_of(function, key)
        states |= _declared(flag_states(outline, default, function, depth - 1), key) if default is not None else set()
    if states or not isinstance(node, ast.Attribute):
        return frozenset(states or {UNKNOWN})
    return _option_states(outline, node, function)


def _option_states(outline: Outline, node: ast.Attribute, function: Function) -> States:
    """An option by the call of argparse or the field that declares it."""
    for call, _ in outline.calls.get("add_argument", ()):
        flags = [str(constant(a)).lstrip("-").replace("-", "_") for a in call.args]
        if node.attr not in (*flags, constant(argument(call, None, "dest"))):
            continue
        default = argument(call, None, "default")
        action = constant(argument(call, None, "action"))
        if default is None and action in {"store_true", "store_false"}:
            return frozenset({OPTION if action == "store_true" else DEFAULT})
        return _declared(flag_states(outline, default, function, 1), node.attr)
    defaults = field_defaults(outline, node.attr)
    if not 0 < len(defaults) <= MAX_VALUES:
        return frozenset({UNKNOWN})
    if _keeps_default(outline, node.attr):
        return frozenset().union(*(flag_states(outline, d, function, 1) for d in defaults))
    return frozenset().union(*(_declared(flag_states(outline, d, function, 1), node.attr) for d in defaults))


def _keeps_default(outline: Outline, name: str) -> bool:
    """Whether this file creates the class of a field from its options, and has none for this field: `Config(lr=args.lr)`."""
    owners = [outline.parents.get(b.node) for b in outline.bindings.get(name, ())]
    classes = {owner.name for owner in owners if isinstance(owner, ast.ClassDef)}
    sites = [site.call for cls in classes for site in outline.calls.get(cls, ())]
    is_listed = all(c.keywords and not c.args and {None, name}.isdisjoint({k.arg for k in c.keywords}) for c in sites)
    if not sites or not is_listed or any(key.endswith(f".{name}") for key in outline.bindings):
        return False
    every = (site.call for calls in outline.calls.values() for site in calls)
    return not any(key_of(argument) in classes for call in every for argument in call.args)  # a parser fills it


def without_bf16(outline: Outline, node: ast.expr, function: Function, depth: int = 3) -> ast.expr:
    """What an expression is on a GPU without bfloat16: `"fp16"` of `"bf16" if torch.cuda.is_bf16_supported() else "fp16"`."""
    values = outline.sources(key_of(node), function) if isinstance(node, ast.Name) and depth else []
    if len(values) == 1:
        return without_bf16(outline, *values[0], depth - 1)
    if not isinstance(node, ast.IfExp):
        return node
    states = flag_states(outline, node.test, function)
    chosen = node.orelse if states == {GPU} else node.body if states == {OLDER} else None
    return without_bf16(outline, chosen, function, depth) if chosen is not None else node


def _is_arguments(script: Script, site: CallSite) -> bool:
    """Whether a call creates the arguments of a trainer of Hugging Face."""
    full = script.outline.names.full(site.call.func) or text_of(site.call.func)
    return full.endswith("TrainingArguments") or (full.endswith("Config") and full.split(".")[0] in _TRAINERS)


def bf16_run(script: Script, own: Function | None = None) -> tuple[str, str]:
    """The most certain way in which a script, or one function, trains in bf16: its state and a sentence; "" and "" if there is none."""
    outline = script.outline
    best = ("", "")
    for last, sites in outline.calls.items():
        if not last.endswith(_ARGUMENTS) or last == "BitsAndBytesConfig":
            continue
        for site in sites:
            if own not in (None, site.function):
                continue
            node = keyword_of(outline, *site, "bf16")
            fp16 = keyword_of(outline, *site, "fp16")
            fp16_states = flag_states(outline, fp16, site.function)
            if fp16_states == {ON} and constant(node) is not True:
                return "", ""  # another run of this script is in fp16
            # One option for both formats may be fp16 in every run.
            if node is None or (key_of(fp16) and key_of(fp16) == key_of(node)):
                continue
            states = flag_states(outline, node, site.function)
            state = next((s for s in _ORDER if s in states), "")
            if state == ON and states != {ON}:
                state = OPTION if UNKNOWN not in states else ""
            if state and (state == ON or _is_arguments(script, site)):
                best = _better(best, (state, f"line {node.lineno} {_WHEN[state]}"))
    for node, function in _engine_precisions(script, ("Accelerator", "Fabric")):
        best = _better(best, _by_name(script, node, function))
    return best


def _engine_precisions(script: Script, names: tuple[str, ...]) -> Iterator[tuple[ast.expr, Function]]:
    """The precision of each engine with one of these names; a Trainer is Lightning's."""
    outline = script.outline
    for last in names:
        for call, function in outline.calls.get(last, ()):
            is_own = last != "Trainer" or outline.names.full(call.func).split(".")[0] in _LIGHTNING
            node = keyword_of(outline, call, function, "mixed_precision", "precision") if is_own else None
            if node is not None:
                yield node, function


def engine_run(script: Script) -> tuple[str, str]:
    """The format that an engine or the autocast regions of a training loop certainly compute in, and a sentence; "" and "" if that is open."""
    nodes = list(_engine_precisions(script, ("Accelerator", "Fabric", "Trainer")))
    modes = [
        {str(constant(node))} if constant(node) is not ... else strings_of(script.outline, node, function)
        for node, function in nodes
    ]
    formats = {_MODES.get(mode, UNKNOWN) for each in modes for mode in each}
    if formats:
        name = formats.pop() if len(formats) == 1 else UNKNOWN
        return ("", "") if name == UNKNOWN else (name, f"{script.at(nodes[0][0])} trains in {_SHORT[name]}")
    regions = script.autocasts if "backward" in script.outline.calls else ()
    formats = {name for region in regions for name in region.dtypes}
    is_certain = all(a.enabled == "yes" and a.device in {"cuda", None} for a in regions)
    name = formats.pop() if len(formats) == 1 and is_certain else UNKNOWN
    if name not in _SHORT or (name == "float16" and not script.scalers):
        return "", ""
    return name, f"{script.at(regions[0].node)} trains under {name} autocast"


def is_in_own_run(script: Script, function: Function) -> bool:
    """Whether a function starts a run of its own, which is not in bf16, whatever the other functions of the file do."""
    if isinstance(function.node, ast.Module):
        return False
    sites = (s for last, sites in script.outline.calls.items() if last.endswith(_ARGUMENTS) for s in sites)
    names = [script.outline.names.full(s.call.func) for s in sites if s.function is function]
    starts = any(name.endswith("TrainingArguments") or name.startswith("trl.") for name in names)
    return starts and not bf16_run(script, function)[1]


def _better(first: tuple[str, str], second: tuple[str, str]) -> tuple[str, str]:
    ranked = (*_ORDER, "")
    return second if ranked.index(second[0]) < ranked.index(first[0]) else first


def _by_name(script: Script, node: ast.expr, function: Function) -> tuple[str, str]:
    """`mixed_precision="bf16"`, also as an arm of a ternary that a flag decides."""
    strings = strings_of(script.outline, node, function)
    if strings and all(s in {"bf16", "bf16-mixed"} for s in strings):
        return ON, f"line {node.lineno} trains in bf16"
    for arm in ast.walk(node):
        if isinstance(arm, ast.IfExp) and "bf16" in str(constant(arm.body)):
            states = flag_states(script.outline, arm.test, function)
            state = next((s for s in _ORDER if s in states), "")
            if state:
                return state, f"line {arm.test.lineno} {_WHEN[state]}"
    return "", ""


def bf16_weights(script: Script) -> str:
    """The quantized model that a script loads in bfloat16 and trains; "" if the arguments of a trainer decide the format."""
    outline = script.outline
    for last, sites in outline.calls.items():
        for site in sites if last.endswith(_ARGUMENTS) and last != "BitsAndBytesConfig" else ():
            flags = [keyword_of(outline, *site, name) for name in ("fp16", "bf16")]
            if any(flag_states(outline, flag, site.function) != {OFF} for flag in flags):
                return ""
    if not outline.calls.keys() & {"train", "backward"}:
        return ""
    for call, function in outline.calls.get("from_pretrained", ()):
        node = keyword_of(outline, call, function, "torch_dtype", "dtype")
        quantized = keyword_of(outline, call, function, "quantization_config")
        if node is not None and quantized is not None and formats_of(outline, node, function) == {"bfloat16"}:
            return f"{script.at(node)} loads the model in bfloat16"
    return ""


def fp16_training(script: Script) -> ast.expr | None:
    """The first `fp16=True` of the training arguments in a script, if all that choose a format choose this one."""
    sites = [site for last, calls in script.outline.calls.items() if last.endswith(_ARGUMENTS) for site in calls]
    chosen = [node for c, f in sites if (node := keyword_of(script.outline, c, f, "fp16")) is not None]
    if not chosen or any(constant(node) is not True for node in chosen):
        return None
    bf16 = [k.value for call, _ in sites for k in call.keywords if k.arg == "bf16"]
    return chosen[0] if all(constant(value) is False for value in bf16) else None


def names_other_format(script: Script, name: str, value: ast.expr | None) -> bool:
    """Whether a variable for the format to compute in is a literal, and the file certainly computes in 16 bits of another."""
    full = script.outline.names.full(value) if value is not None else ""
    named = DTYPES.get(full) or FORMAT_NAMES.get(
        str(constant(value)).lower().removesuffix("-mixed").removesuffix("-true"), ""
    )
    if value is None or not named or not COMPUTES.fullmatch(name):
        return False
    computed = computed_formats(script)
    return bool(computed & SIXTEEN_BIT) and not computed & {named, UNKNOWN}


def computed_formats(script: Script) -> frozenset[str]:
    """The formats of fp16 or bf16 training, autocast and 4-bit layers; "?" for each that the file leaves open."""
    outline = script.outline
    formats = {name for region in script.autocasts for name in region.dtypes}
    for call, function in outline.calls.get("BitsAndBytesConfig", ()):
        value = keyword_of(outline, call, function, "bnb_4bit_compute_dtype")
        formats |= formats_of(outline, value, function) if value is not None else frozenset()
    for last, sites in outline.calls.items():
        for call, function in sites if last.endswith((*_ARGUMENTS, "Accelerator", "Fabric", "Trainer")) else ():
            for name, full in (("fp16", "float16"), ("bf16", "bfloat16")):
                states = flag_states(outline, keyword_of(outline, call, function, name), function)
                formats |= frozenset() if states == {OFF} else frozenset({full if states == {ON} else UNKNOWN})
            mixed = keyword_of(outline, call, function, "mixed_precision", "precision")
            formats |= (
                frozenset({FORMAT_NAMES.get(str(constant(mixed)), UNKNOWN)}) if mixed is not None else frozenset()
            )
    return frozenset(formats)
