"""Which dtype a checkpoint is stored in, as far as its name shows."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from halfstep.check.regex import regex
from halfstep.check.script.objects.formats import AUTO, passed_for
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.objects.weights import Cast
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

if TYPE_CHECKING:
    from halfstep.check.script.script import Script

__all__ = ["is_language_model", "stored_low"]

# Checkpoints that are stored in 16 bits; others, such as gpt2, OLMo and gemma-2-2b, are stored in float32.
_LOW_CHECKPOINTS = regex(
    r"llama-?[234]|qwen|mi[sx]tral|ministral|gemma-?3|gemma-\d+b|gemma-2-\d+b-it|phi-?[1-4]|deepseek|smollm[23]|internlm[23]|glm-?4|"
    r"granite-[34]|falcon-\d+b|codellama|zephyr|vicuna|gpt-oss|yi-1\.5|nemotron|minicpm|lfm2|command-r",
    re.IGNORECASE,
)
# A directory whose name says nothing about the checkpoint in it.
_ANY_MODEL = regex(
    r"^(.*[\\/])?(\w*model|checkpoints?|ckpt|weights|out|output|merged|final|pretrained)[\\/]*$", re.IGNORECASE
)
_LANGUAGE_MODEL = regex(r"ForCausalLM|ForImageTextToText|ForVision2Seq|ForMultimodalLM|ForConditionalGeneration")


def is_language_model(cast: Cast) -> bool:
    """Whether a checkpoint is loaded as a language model, by the name of the class."""
    return bool(_LANGUAGE_MODEL.search(text_of(cast.node.func)))


def stored_low(script: Script, cast: Cast) -> bool | None:
    """Whether a checkpoint whose own dtype is loaded has 16 bits, from its name; None if the text does not decide it."""
    if AUTO not in cast.formats:
        return None
    name = argument(cast.node, 0, "pretrained_model_name_or_path")
    texts = _texts(script, name, cast.function) if name is not None else set()
    words = [t for t in texts if isinstance(t, str)]
    if not words or len(words) != len(texts) or any(_ANY_MODEL.search(word) for word in words):
        return None
    return all(bool(_LOW_CHECKPOINTS.search(word)) for word in words)


def _texts(script: Script, node: ast.expr, function: Function, depth: int = 3) -> set[object]:
    """The strings that a name may be: literals, also passed by the callers, or the default of an option."""
    key = key_of(node)
    if isinstance(constant(node), str) or not key or not depth:
        return {constant(node)} if isinstance(constant(node), str) else set()
    texts = {constant(v) for v in script.outline.values(key, function)}
    if key in function.params and not texts:
        passed = list(passed_for(script.outline, key, function))
        parts = [_texts(script, value, caller, depth - 1) for value, caller in passed]
        return set().union(*(part or {...} for part in parts))
    return texts or _option_default(script, key.rsplit(".", 1)[-1])


def _option_default(script: Script, option: str) -> set[object]:
    """The default of a command-line option."""
    for call, _ in script.outline.calls.get("add_argument", ()):
        if any(str(constant(a)).lstrip("-").replace("-", "_") == option for a in call.args):
            default = argument(call, None, "default")
            return {constant(default)} if default is not None else set()
    return set()
