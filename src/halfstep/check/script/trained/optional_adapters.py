"""The runs of a script that attach no adapters, although others of it do.

peft_config=LoraConfig(...) if args.lora else None          not `args.lora`
if args.lora: model = get_peft_model(model, config)         not `args.lora`
def attach(model, kind):                                    `args.adapter == 'none'`
if kind == "none": return model
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.flow.guard import Guard
from halfstep.check.script.objects.adapters import attachments
from halfstep.check.script.objects.expressions import arms_of, conditions_of
from halfstep.check.script.objects.formats import keyword_of, passed_for, returned_by
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.syntax.children import nodes_in
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["left_out_when"]

# An option that decides whether adapters are trained, by its name or its values.
_OPTION = regex(r"lora|dora|peft|adapter|full|tun(e|ing)|(?<!local_)(?<!global_)\brank|\br\b", re.IGNORECASE)
# Whether there are some already, or a file of trained ones.
_STATE = regex(
    r"isinstance|hasattr|path|checkpoint|resum|load|exist|is (not )?None|\bmodel\.|world|local|main_process|quant|bit",
    re.IGNORECASE,
)


def left_out_when(outline: Outline, trainer: ast.Call, function: Function) -> Guard | None:
    """The option with which a Trainer gets a model without adapters; None if the text shows none."""
    config = keyword_of(outline, trainer, function, "peft_config")
    attached = list(attachments(outline))
    if config is not None and constant(config) is not None:
        guards = list(_empty_when(outline, config, function)) if not attached else []
    elif len(attached) == 1:
        guards = list(_skipped_when(outline, attached[0].call, attached[0].function))
    else:
        guards = []
    return next((g for g in guards if _is_option(outline, g, trainer, function)), None)


def _empty_when(outline: Outline, config: ast.expr, function: Function) -> Iterator[Guard]:
    """When a configuration of adapters is None: an arm of a choice, an assignment, or what a function returns."""
    sources = outline.sources(key_of(config), function) if key_of(config) else [(config, function)]
    for value, scope in sources:
        target = outline.call_target(value, scope) if isinstance(value, ast.Call) else None
        results = [(v, target) for v in returned_by(target)] if target is not None else [(value, scope)]
        for result, inner in results:
            for arm in arms_of(result):
                guards = conditions_of(outline, arm)
                if constant(arm) is None and guards:
                    yield _renamed(outline, guards[-1], inner)
                elif constant(arm) is not None and guards and any(constant(v) is None for v, _ in sources):
                    yield _renamed(outline, Guard(guards[-1].text, not guards[-1].is_true), inner)


def _skipped_when(outline: Outline, call: ast.Call, function: Function, depth: int = 2) -> Iterator[Guard]:
    """When the call that attaches adapters is left out: by a condition around it, by an early return, or around the one call of its function."""
    if guards := conditions_of(outline, call):
        yield _renamed(outline, Guard(guards[-1].text, not guards[-1].is_true), function)
        return
    for statement in function.body if function is not outline.module else ():
        last = statement.body[-1] if isinstance(statement, ast.If) and statement.lineno < call.lineno else None
        if isinstance(last, ast.Return) and key_of(last.value) in function.params:
            yield _renamed(outline, conditions_of(outline, last)[-1], function)
            return
    sites = [s for s in outline.calls.get(function.name, ()) if outline.call_target(s.call, s.function) is function]
    if len(sites) == 1 and depth:
        yield from _skipped_when(outline, sites[0].call, sites[0].function, depth - 1)


def _renamed(outline: Outline, guard: Guard, function: Function) -> Guard:
    """A condition on a parameter as one on what the one call of its function passes."""
    name = re.match(r"\w+", guard.text)
    if name is None or name[0] not in function.params:
        return guard
    passed = [text_of(value) for value, _ in passed_for(outline, name[0], function)]
    is_known = (
        len(passed) == 1 and (key_of_text := passed[0]) and re.fullmatch(r"[\w.]+(\[['\"]\w+['\"]\])?", key_of_text)
    )
    return Guard(passed[0] + guard.text[name.end() :], guard.is_true) if is_known else guard


def _is_option(outline: Outline, guard: Guard, trainer: ast.Call, function: Function) -> bool:
    """Whether a condition asks for an option that the file neither fixes nor rejects, and under which the Trainer is created."""
    if not _OPTION.search(guard.text) or _STATE.search(guard.text):
        return False
    if any(Guard(guard.text, not guard.is_true) == own for own in conditions_of(outline, trainer)):
        return False
    root = re.match(r"\w+", guard.text)
    values = outline.values(root[0], function) if root is not None and root[0] in outline.bindings else []
    is_fixed = bool(values) and all(isinstance(value, ast.Constant) for value in values)
    names = {name for name in re.findall(r"\w+", guard.text) if _OPTION.search(name)}
    return not is_fixed and not any(names & set(re.findall(r"\w+", text)) for text in _rejected(outline))


def _rejected(outline: Outline) -> Iterator[str]:
    """The conditions under which a file raises or exits."""
    for node in nodes_in(outline.module.node):
        is_exit = isinstance(node, ast.Call) and text_of(node.func) in {"sys.exit", "exit", "parser.error", "quit"}
        if isinstance(node, ast.Raise) or is_exit:
            yield from (guard.text for guard in conditions_of(outline, node))
        elif isinstance(node, ast.Assert):
            yield ast.unparse(node.test)
