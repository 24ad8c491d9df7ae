"""Adapters and quantization: whether a script always trains through them, or only where an option asks for it.

`if args.lora: model = get_peft_model(model, config)` trains all weights in the other case. An import or a configuration
alone attaches nothing; what counts is the call that wraps, quantizes or loads, and `peft_config=` of a Trainer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from halfstep.check.regex import regex
from halfstep.check.script.flow.guard import Guard, possible
from halfstep.check.script.objects.expressions import (
    ADAPTER_FLAG,
    asks_for_adapters,
    conditions_of,
    makes_configuration,
    may_be_none,
    spared_branches,
)  # fmt: skip
from halfstep.check.script.objects.formats import SIXTEEN_BIT, keyword_of, passed_for
from halfstep.check.script.objects.loading import loads_with_unsloth, loads_without_unsloth, unsloth_adapters
from halfstep.check.script.objects.parameters import is_model_name
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.objects.weights import Cast, Lineage, VariableCast, cast_formats
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline, last_name_of

__all__ = [
    "Attachment",
    "adapted_casts",
    "adapter_use",
    "attachments",
    "is_attached_elsewhere",
    "may_attach",
    "saved_layers",
    "upcasts_parameters",
]

_ADAPTERS = regex(r"peft|lora|unsloth|add_adapter|inject_adapter|BitsAndBytesConfig|load_in_[48]bit", re.IGNORECASE)
_KEYWORDS = {"peft_config", "quantization_config", "load_in_4bit", "load_in_8bit"}
# Names that ask about adapters, configure or store them.
_ATTACHES_NOTHING = regex(
    r"^_*(is|has|print|save|export|merge|unmerge|count|log|parse|get_peft_model_state|get_lora)_|Config$|available|"
    r"_(args|arguments|options|parser|flags|settings|paths?|dirs?|names|state_dict)$|"
    r"^_*(make|create|build|get|load|read|default)_\w*config$"
)
_ENUMS = {"TaskType", "PeftType"}  # arguments of a configuration
_SHOWS = {"len", "print", "isinstance", "hasattr", "str", "bool"}  # change nothing
# Options such as `use_lora` and queries such as `disable_adapter()`: they attach nothing by themselves.
_FLAG = regex(r"^_*(use|using|is|has|with|enable|enabled|disable|no)_", re.IGNORECASE)


class Attachment(NamedTuple):
    """A call of PEFT that attaches adapters to a model."""

    call: ast.Call
    function: Function
    base: ast.expr  # the model
    targets: tuple[str, ...]  # the variables that the result is assigned to


def attachments(outline: Outline) -> Iterator[Attachment]:
    """`get_peft_model(base, config)`, `PeftModel.from_pretrained(base, path)` and `base.add_adapter(config)`."""
    for call, function in outline.calls.get("get_peft_model", ()):
        if (base := argument(call, 0, "model")) is not None:
            yield Attachment(call, function, base, _targets(outline, call))
    for call, function in outline.calls.get("from_pretrained", ()):
        owner = text_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        base = argument(call, 0, "model")
        if owner.rsplit(".", 1)[-1].startswith("PeftModel") and base is not None:
            yield Attachment(call, function, base, _targets(outline, call))
    for call, function in outline.calls.get("add_adapter", ()):
        if isinstance(call.func, ast.Attribute):
            yield Attachment(call, function, call.func.value, _targets(outline, call))


def saved_layers(outline: Outline) -> Iterator[tuple[Attachment, str]]:
    """The adapters whose configuration trains whole layers too, `modules_to_save=["lm_head"]`, each with that text.

    PEFT casts its adapters to float32, but leaves copies of layers in the dtype of their model (`cast_adapter_dtype`);
    `prepare_model_for_kbit_training` casts all that is not quantized.
    """
    if any("kbit" in name for name in outline.calls) or outline.names.uses("unsloth") or upcasts_parameters(outline):
        return
    for attached in attachments(outline):
        if (name := last_name_of(attached.call.func)) != "from_pretrained":
            config = argument(attached.call, 0 if name == "add_adapter" else 1, "peft_config")
            yield from ((attached, text) for text in _saved_by(outline, config, attached.function))
    for name, sites in outline.calls.items():
        for call, function in sites if name.endswith("Trainer") else ():
            model = argument(call, 0, "model")
            if model is not None:
                attached = Attachment(call, function, model, (key_of(model),))
                config = argument(call, None, "peft_config")
                yield from ((attached, text) for text in _saved_by(outline, config, function))


def _saved_by(outline: Outline, config: ast.expr | None, function: Function) -> Iterator[str]:
    sources = outline.sources(key_of(config), function) if key_of(config) else [(config, function)]
    call, scope = sources[0] if len(sources) == 1 else (None, function)
    layers = keyword_of(outline, call, scope, "modules_to_save") if isinstance(call, ast.Call) else None
    options = outline.values(key_of(layers), scope) if layers is not None and key_of(layers) else [layers]
    names = options[0].elts if len(options) == 1 and isinstance(options[0], ast.List) else []
    if names and all(isinstance(constant(name), str) for name in names):
        yield f"modules_to_save={[constant(name) for name in names]}"


def adapter_use(outline: Outline) -> str:
    """no, optional (every call that attaches one is conditional) or yes."""
    table = outline.names.table
    mentions = [name for name in (*outline.loads, *table.values(), *table) if _is_adapter(name)]
    if not mentions:
        return "no"
    if outline.names.uses("unsloth") and not loads_without_unsloth(outline):
        return unsloth_adapters(outline)
    names = [name for name in mentions if not _FLAG.search(name.rsplit(".", 1)[-1])]
    every = [site for name, calls in outline.calls.items() for site in calls if _attaches(name, site.call)]
    others = (_is_merged, _runs_script, makes_configuration, loads_with_unsloth)
    sites = [site for site in every if not any(is_other(outline, *site) for is_other in others)]
    guards = [conditions_of(outline, call) for call, _ in sites]
    models = frozenset(target for call, _ in sites for target in _targets(outline, call))
    closed = guards + spared_branches(outline, (function for _, function in sites), models)
    conditional = [
        asks_for_adapters(_decisive(own, closed))
        or _on_request(outline, function)
        or _may_return_early(outline, call, function)
        for own, (call, function) in zip(guards, sites, strict=True)
    ]
    conditional += [
        _is_conditional(outline, call)
        or (may_be_none(outline, value, function) and not _is_loaded_instead(outline, value, guards))
        for call, function, value in _configured(outline)
    ]
    # `options["quantization_config"] = ...` of a dictionary that `from_pretrained` receives
    conditional += [
        _is_conditional(outline, binding.node)
        for option in sorted(_KEYWORDS)
        for key, bindings in outline.bindings.items()
        if key.endswith(f"[{option!r}]")
        for binding in bindings
    ]
    if not conditional and not names:
        return "optional"  # flags that this file only reads
    if not conditional and not any(_is_used(outline, name) for name in outline.loads):
        return "no"  # imported, or configured and never passed on
    return "optional" if conditional and all(conditional) else "yes"


def _configured(outline: Outline) -> Iterator[tuple[ast.Call, Function, ast.expr]]:
    """The loads and Trainers that receive a configuration of adapters or quantization, each with that argument."""
    for name, calls in outline.calls.items():
        if name == "from_pretrained" or name.endswith("Trainer"):
            for call, function in calls:
                values = [k.value for k in call.keywords if k.arg in _KEYWORDS]
                yield from ((call, function, value) for value in values if constant(value) not in {None, False})


def is_attached_elsewhere(outline: Outline, lineage: Lineage, trainer: ast.Call) -> bool:
    """Whether every adapter and quantization of a file is certainly that of another model than this one."""
    if outline.names.uses("unsloth") and not loads_without_unsloth(outline):
        return False
    sites = [site for name, calls in outline.calls.items() for site in calls if _attaches(name, site.call)]
    for call, function in sites:
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        arguments = [key_of(node) for node in (*call.args, *(k.value for k in call.keywords))]
        keys = {*arguments, key_of(owner), *_targets(outline, call)} - {""}
        params = keys & set(function.params)
        received = [site for param in sorted(params) for site in passed_for(outline, param, function)]
        if any(key.startswith("self.") for key in keys):
            return False  # a part of some model
        if not any(arguments) or any(lineage.has(key, function) for key in keys):
            return False
        if (params and not received) or any(lineage.has(key_of(value), caller) for value, caller in received):
            return False
    passed = [(call, function) for call, function, _ in _configured(outline)]
    own = {trainer, *(cast.node for cast in lineage.casts)}
    for call, function in passed:
        # Another Trainer that attaches adapters to this model changes it in place.
        model = key_of(argument(call, 0, "model"))
        if call in own or (model and lineage.has(model, function)):
            return False
    return bool(sites or passed)


def adapted_casts(outline: Outline, casts: Iterable[VariableCast]) -> tuple[Cast, ...]:
    """The casts of a model that has adapters already: they cast the float32 adapters, which are trained, too."""
    sites = [(site, name) for name, calls in outline.calls.items() for site in calls if _attaches(name, site.call)]
    wrapped = (
        [] if upcasts_parameters(outline) else [site for site, name in sites if not re.search(r"kbit|quantize", name)]
    )
    adapted = []
    for call, function, key, formats in casts:
        for wrap, scope in wrapped:
            is_same = key in _targets(outline, wrap) and (scope is function or _is_of_object(key, scope, function))
            is_later = is_same and _runs_before(outline, (wrap, scope), (call, function))
            if is_later and formats & SIXTEEN_BIT:
                adapted.append(Cast(call, function, key, formats, "cast"))
    for wrap, scope in wrapped:
        node: ast.AST = wrap
        while isinstance(parent := outline.parents.get(node), (ast.Attribute, ast.Call)) and node is not None:
            node = parent
            formats = cast_formats(outline, node, scope) if isinstance(node, ast.Call) else frozenset()
            if formats and formats <= SIXTEEN_BIT and isinstance(node, ast.Call):
                targets = _targets(outline, node)
                adapted.append(Cast(node, scope, targets[0] if targets else "", formats, "cast"))
                break
    return tuple(adapted)


def _is_of_object(key: str, function: Function, other: Function) -> bool:
    """Whether two methods of one class use the same attribute."""
    return key.startswith("self.") and function.cls == other.cls != ""


def _runs_before(outline: Outline, first: tuple[ast.Call, Function], second: tuple[ast.Call, Function]) -> bool:
    """Whether one call runs before another: further up in a function, or in one that is called further up."""
    if not possible(conditions_of(outline, first[0]), conditions_of(outline, second[0])):
        return False  # in the other branch
    lines, others = _lines_of(outline, *first), _lines_of(outline, *second)
    return any(lines[function] < others[function] for function in lines.keys() & others.keys())


def _lines_of(outline: Outline, call: ast.Call, function: Function, depth: int = 3) -> dict[Function, int]:
    """The line of a call in its function, and in every method of the same class that leads to it."""
    lines = {function: call.lineno}
    for outer, caller in outline.calls.get(function.name, ()) if depth and function.cls else ():
        if caller not in lines and outline.call_target(outer, caller) is function:
            lines = _lines_of(outline, outer, caller, depth - 1) | lines
    return lines


def _attaches(name: str, call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute) and name == "from_pretrained":
        return _is_adapter(owner := text_of(call.func.value)) and not owner.endswith("Config")
    return may_attach(name)


@lru_cache(maxsize=4096)  # the files of a project share most of their names
def may_attach(name: str) -> bool:
    """Whether a function attaches adapters or quantizes, by its name."""
    return not _ATTACHES_NOTHING.search(name) and (_is_adapter(name) or re.search(r"kbit|quantize", name) is not None)


@lru_cache(maxsize=4096)
def _is_adapter(name: str) -> bool:
    return _ADAPTERS.search(name) is not None


def _is_merged(outline: Outline, call: ast.Call, function: Function) -> bool:
    """Whether an adapter is loaded after the training, and merged into its model: it is not trained."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "from_pretrained":
        return False
    if not any(site.function is function and site.call.lineno < call.lineno for site in outline.calls.get("train", ())):
        return False
    names = _targets(outline, call) if isinstance(outline.parents.get(call), ast.Assign) else ()
    owners = [
        site.call.func.value
        for site in outline.calls.get("merge_and_unload", ())
        if site.function is function and isinstance(site.call.func, ast.Attribute)
    ]
    return any(owner is call or (key_of(owner) in names and owner.lineno > call.lineno) for owner in owners)


def _runs_script(outline: Outline, call: ast.Call, function: Function) -> bool:
    """Whether a call runs a function of this file without a model, and ignores its result: `train_qlora(args)`.

    What that function does is counted where it does it.
    """
    target = outline.call_target(call, function)
    if target is None or target.method or not isinstance(outline.parents.get(call), ast.Expr):
        return False
    inside = any(
        site.function is target for name, calls in outline.calls.items() for site in calls if _attaches(name, site.call)
    )
    return not inside and not any(is_model_name(key_of(v)) for v in (*call.args, *(k.value for k in call.keywords)))


def _is_used(outline: Outline, name: str) -> bool:
    """Whether a name that is read is about adapters, other than a configuration that nothing reads."""
    if not _ADAPTERS.search(name) and not _ADAPTERS.search(outline.names.table.get(name, "")):
        return False
    if name in _ENUMS or (name in outline.bindings and not _is_passed_on(outline, name)):
        return False
    sites = outline.calls.get(name, ()) if name.endswith("Config") else ()
    if not sites or len(sites) < outline.loads[name]:
        return True
    statements = [outline.parents.get(site.call) for site in sites]
    targets = [key_of(t) for s in statements for t in (s.targets if isinstance(s, ast.Assign) else ())]
    return len(targets) < len(sites) or any(not t or t.rsplit(".", 1)[-1] in outline.loads for t in targets)


def _is_passed_on(outline: Outline, name: str) -> bool:
    """Whether a variable is used as a whole; `lora.A.values()` only looks into a part that a model has already."""
    for node in ast.walk(outline.module.node):
        is_read = isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load)
        if not is_read or name not in {getattr(node, "id", ""), getattr(node, "attr", "")}:
            continue
        parent = outline.parents.get(node)
        is_shown = isinstance(parent, ast.Call) and key_of(parent.func) in _SHOWS
        if not is_shown and not isinstance(parent, (ast.Attribute, ast.Compare, ast.FormattedValue)):
            return True
    return False


def _is_loaded_instead(outline: Outline, value: ast.expr, attached: list[tuple[Guard, ...]]) -> bool:
    """Whether a configuration is None only in branches that attach an adapter themselves: a trained one that is loaded."""
    empty = [b for b in outline.bindings.get(key_of(value), ()) if b.value is not None and constant(b.value) is None]
    own = [conditions_of(outline, b.node) for b in empty]
    return bool(own) and all(guards and guards in attached for guards in own)


def _is_conditional(outline: Outline, call: ast.AST) -> bool:
    return asks_for_adapters(conditions_of(outline, call))


def _decisive(own: tuple[Guard, ...], others: list[tuple[Guard, ...]]) -> tuple[Guard, ...]:
    """The conditions of a call without those whose other branch attaches an adapter too, whatever happens in it.

    `if adapter_path: model = PeftModel.from_pretrained(...)`, `else: model = get_peft_model(...)` attaches one in any case;
    `if kind == "qlora": ...`, `elif kind == "lora": ...` does not.
    """
    return tuple(
        guard
        for index, guard in enumerate(own)
        if not _always_attaches((*own[:index], Guard(guard.text, not guard.is_true)), others)
    )


def _always_attaches(branch: tuple[Guard, ...], sites: list[tuple[Guard, ...]]) -> bool:
    """Whether every path through a branch attaches an adapter."""
    if branch in sites:
        return True
    inner = {site[len(branch)].text for site in sites if len(site) > len(branch) and site[: len(branch)] == branch}
    return any(
        _always_attaches((*branch, Guard(text, True)), sites) and _always_attaches((*branch, Guard(text, False)), sites)
        for text in sorted(inner)
    )


def _may_return_early(outline: Outline, call: ast.Call, function: Function) -> bool:
    """Whether a function of this file returns the model as it is: `if not args.lora: return model`."""
    target = outline.call_target(call, function)
    for statement in target.body if target is not None else ():
        if isinstance(statement, ast.If) and ADAPTER_FLAG.search(ast.unparse(statement.test)):
            last = statement.body[-1]
            if isinstance(last, ast.Return) and target is not None and key_of(last.value) in target.params:
                return True
    return False


def _on_request(outline: Outline, function: Function) -> bool:
    """Whether a function that attaches adapters runs only where an option asks for it: every call of it in this file is conditional.

    Without such a call, its own name decides: another file may call `attach_lora` or not.
    """
    asked = _is_requested(outline, function, 3)
    return bool(ADAPTER_FLAG.search(function.name)) if asked is None else asked


def _is_requested(outline: Outline, function: Function, depth: int) -> bool | None:
    """Whether every call of a function, or of one around it, asks for adapters; None if this file has no call of it."""
    sites = [s for s in outline.calls.get(function.name, ()) if outline.call_target(s.call, s.function) is function]
    if function is outline.module or not sites:
        return None
    return all(
        asks_for_adapters(conditions_of(outline, call))
        or _may_return_early(outline, call, caller)
        or (depth > 0 and _is_requested(outline, caller, depth - 1))
        for call, caller in sites
        if caller is not function
    )


def _targets(outline: Outline, node: ast.AST) -> tuple[str, ...]:
    """The variables that the statement of an expression assigns; for `model.add_adapter(config)`, the model."""
    call = node
    while not isinstance(node, ast.stmt):
        node = outline.parents[node]
    if isinstance(node, ast.Assign):
        return tuple(key_of(t) for x in node.targets for t in (x.elts if isinstance(x, ast.Tuple) else [x]))
    receiver = call.func.value if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
    arguments = call.args[:1] if isinstance(call, ast.Call) else []
    return tuple(key for key in (key_of(receiver), *map(key_of, arguments)) if key)


def upcasts_parameters(outline: Outline) -> bool:
    """Whether parameters are cast back one by one: `p.data = p.data.float()`."""
    for name in ("float", "to"):
        for call, function in outline.calls.get(name, ()):
            parent = outline.parents.get(call)
            target = parent.targets[0] if isinstance(parent, ast.Assign) else None
            is_data = isinstance(target, ast.Attribute) and target.attr == "data"
            if is_data and "float32" in cast_formats(outline, call, function):
                return True
    return False
