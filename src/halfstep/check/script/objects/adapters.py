"""Adapters and quantization: whether a script always trains through them, or only where an option asks for it.

`if args.lora: model = get_peft_model(model, config)` trains all weights in the other case. An import or a configuration
alone attaches nothing; what counts is the call that wraps, quantizes or loads, and `peft_config=` of a Trainer.
"""

from __future__ import annotations

import ast
import re

from halfstep.check.script.objects.formats import may_be_none
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.objects.weights import ADAPTER_FLAG, asks_for_adapters, conditions_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["adapter_use"]

_ADAPTERS = re.compile(
    r"peft|lora|unsloth|add_adapter|inject_adapter|BitsAndBytesConfig|load_in_[48]bit", re.IGNORECASE
)
_KEYWORDS = {"peft_config", "quantization_config", "load_in_4bit", "load_in_8bit"}
# Names that ask about adapters, configure or store them.
_ATTACHES_NOTHING = re.compile(
    r"^_*(is|has|print|save|export|merge|unmerge|count|log|parse|get_peft_model_state|get_lora)_|Config$|available"
)


def adapter_use(outline: Outline) -> str:
    """no, optional (every call that attaches one is conditional) or yes."""
    if not any(map(_ADAPTERS.search, (*outline.loads, *outline.names.table.values(), *outline.names.table))):
        return "no"
    if outline.names.uses("unsloth"):
        return "yes"
    sites = [site for name, calls in outline.calls.items() for site in calls if _attaches(name, site.call)]
    conditional = [_is_conditional(outline, call) or _in_helper(function) for call, function in sites]
    conditional += [
        _is_conditional(outline, call) or may_be_none(outline, keyword.value, function)
        for name, calls in outline.calls.items()
        if name == "from_pretrained" or name.endswith("Trainer")
        for call, function in calls
        for keyword in call.keywords
        if keyword.arg in _KEYWORDS and constant(keyword.value) not in {None, False}
    ]
    return "optional" if conditional and all(conditional) else "yes"


def _attaches(name: str, call: ast.Call) -> bool:
    if _ATTACHES_NOTHING.search(name):
        return False
    owner = text_of(call.func.value) if isinstance(call.func, ast.Attribute) and name == "from_pretrained" else ""
    return bool(_ADAPTERS.search(name) or re.search(r"kbit|quantize", name) or _ADAPTERS.search(owner))


def _is_conditional(outline: Outline, call: ast.Call) -> bool:
    return asks_for_adapters(conditions_of(outline, call))


def _in_helper(function: Function) -> bool:
    """Whether a function's own name is about adapters: the conditions of its calls decide."""
    return bool(ADAPTER_FLAG.search(function.name))
