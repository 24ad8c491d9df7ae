"""How models are loaded: in which dtype a checkpoint is stored, by a Trainer itself or by Unsloth, and loads that a later cast replaces.

The name of a checkpoint shows its dtype. A Trainer loads with `model_init=load` and TRL's `model_init_kwargs`.
"""

from __future__ import annotations

import ast
import re

from halfstep.check.regex import regex
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.objects.choices import field_defaults
from halfstep.check.script.objects.formats import AUTO, formats_of, keyword_of, passed_for, returned_by
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.objects.weights import Cast, Lineage, conditions_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline, last_name_of

__all__ = [
    "initial_options",
    "initialized",
    "is_language_model",
    "is_rebound",
    "lasting_casts",
    "loading_options",
    "loads_bfloat16",
    "loads_with_unsloth",
    "loads_without_unsloth",
    "stored_float16",
    "stored_low",
    "unsloth_adapters",
]

# Checkpoints that are stored in 16 bits; others, such as gpt2, OLMo and gemma-2-2b, are stored in float32.
_LOW_CHECKPOINTS = regex(
    r"llama-?[234]|qwen|mi[sx]tral|ministral|gemma-?3|gemma-\d+b|gemma-2-\d+b-it|phi-?[1-4]|deepseek|smollm[23]|internlm[23]|glm-?4|"
    r"granite-[34]|falcon-\d+b|codellama|zephyr|vicuna|gpt-oss|yi-1\.5|nemotron|minicpm|lfm2|command-r|"
    r"(^|/)opt-\d|whisper-large-v3",
    re.IGNORECASE,
)
_FLOAT16_CHECKPOINTS = regex(r"^facebook/opt-\d|^openai/whisper-large-v3")  # the only format of these
# Those in float32, and small ones that may be; what no list has is most likely stored in 16 bits.
_FULL_CHECKPOINTS = regex(
    r"gpt-?2|gpt-?neo|gpt-?j|gpt-?3|\w*gpt\b|rugpt|bert|(^|[/-])m?t5|bart|olmo|bloom|pythia|codegen|cerebras|mamba|rwkv|xglm|biogpt|"
    r"gemma-?2|smol_?l|tiny|stories|random|test|\d+m(-|$)",
    re.IGNORECASE,
)
# A directory whose name says nothing about the checkpoint in it.
_ANY_MODEL = regex(
    r"^(.*[\\/])?(\w*model|checkpoints?|ckpt|weights|out|output|merged|final|pretrained)[\\/]*$", re.IGNORECASE
)
_HUB_NAME = regex(r"[\w-]+/[\w.-]+$")
_ADAPTED = regex(r"peft|lora|adapter|bnb|4bit$", re.IGNORECASE)
_NAMES_MODEL = regex(r"(path|name|dir|model_id)$")  # a variable or a function that names a checkpoint
_LANGUAGE_MODEL = regex(r"ForCausalLM|ForImageTextToText|ForVision2Seq|ForMultimodalLM|ForConditionalGeneration")


def _fully_trained(outline: Outline) -> bool:
    """Whether Unsloth loads each model to train all its weights in their own dtype: `full_finetuning=True`.

    So it does with `load_in_4bit=False`, where the script attaches no adapter. `float32_mixed_precision=True` has it train
    float32 weights, and those that it loads in float16 are cast to float32 as well.
    """
    loads = [call for call, _ in outline.calls.get("from_pretrained", ()) if _is_unsloth(outline, call)]
    return bool(loads) and all(
        (constant(argument(call, None, "full_finetuning")) is True or _is_plain(outline, call))
        and ((upcast := argument(call, None, "float32_mixed_precision")) is None or constant(upcast) in {None, False})
        and _is_bfloat16(outline, argument(call, None, "dtype"))
        for call in loads
    )


def unsloth_adapters(outline: Outline) -> str:
    """Whether a script with Unsloth trains adapters: no, optional or yes.

    They are optional if the branch that attaches none loads a model that is neither quantized nor trained in float32.
    """
    attached = [conditions_of(outline, call) for call, _ in outline.calls.get("get_peft_model", ())]
    if not attached:
        return "no" if _fully_trained(outline) else "yes"
    loads = [call for call, _ in outline.calls.get("from_pretrained", ()) if _is_unsloth(outline, call)]
    whole = [conditions_of(outline, call) for call in loads if _is_whole(call)]
    is_apart = any(not any(possible(own, guards) for guards in attached) for own in whole)
    return "optional" if is_apart else "yes"


def loads_without_unsloth(outline: Outline) -> bool:
    """Whether a file that can use Unsloth also loads language models with transformers, in a run without it."""
    fulls = (outline.names.full(site.call.func) for site in outline.calls.get("from_pretrained", ()))
    return any(full.startswith("transformers.") and "For" in full for full in fulls)


def loads_with_unsloth(outline: Outline, call: ast.Call, function: Function) -> bool:
    """Whether a call runs a function of the file whose name shows only that it uses Unsloth; what it attaches is written in it."""
    name = last_name_of(call.func)
    return "unsloth" in name and "lora" not in name and outline.call_target(call, function) is not None


def _is_whole(load: ast.Call) -> bool:
    """Whether Unsloth loads a model that is not quantized, without float32 copies."""
    switches = {k.arg: constant(k.value) for k in load.keywords}
    is_named = constant(argument(load, 0, "model_name"))
    is_other = isinstance(is_named, str) and bool(_ADAPTED.search(is_named))
    quantized = {switches.get(name, False) for name in ("load_in_4bit", "load_in_8bit", "float32_mixed_precision")}
    return "load_in_4bit" in switches and quantized == {False} and None not in switches and not is_other


def loads_bfloat16(outline: Outline) -> bool | None:
    """Whether Unsloth loads every model of a file in bfloat16, or (None) does on GPUs that support it: its choice without a dtype."""
    loads = [site for site in outline.calls.get("from_pretrained", ()) if _is_unsloth(outline, site.call)]
    named = set()
    for call, function in loads:
        dtype, trains_all = argument(call, None, "dtype"), argument(call, None, "full_finetuning")
        values = outline.values(key_of(dtype), function) if key_of(dtype) else [dtype]
        if constant(trains_all) is True or any(k.arg is None for k in call.keywords) or not values:
            return False
        for value in values:
            named.add(None if value is None or constant(value) is None else outline.names.full(value))
    return (True if named == {"torch.bfloat16"} else None) if named and named <= {None, "torch.bfloat16"} else False


def _is_unsloth(outline: Outline, call: ast.Call) -> bool:
    return outline.names.full(call.func).startswith("unsloth.")


def _is_plain(outline: Outline, load: ast.Call) -> bool:
    """Whether Unsloth loads a checkpoint by its name on the hub, not quantized, in a file without the word for an adapter."""
    name = constant(argument(load, 0, "model_name"))
    if not isinstance(name, str) or not _HUB_NAME.match(name) or _ADAPTED.search(name):
        return False
    if any(_ADAPTED.search(word) for word in (*outline.loads, *outline.names.table, *outline.strings)):
        return False
    switches = {k.arg: constant(k.value) for k in load.keywords}
    return (
        switches.get("load_in_4bit") is False and switches.get("load_in_8bit", False) is False and None not in switches
    )


def _is_bfloat16(outline: Outline, dtype: ast.expr | None) -> bool:
    """Whether Unsloth loads in bfloat16: named, or chosen by it for `None`."""
    return dtype is None or constant(dtype) is None or outline.names.full(dtype) == "torch.bfloat16"


def initialized(trainer: ast.Call) -> ast.expr | None:
    """The model of `Trainer(model_init=load)`: what that function returns."""
    load = argument(trainer, None, "model_init")
    return ast.copy_location(ast.Call(load, [], []), load) if load is not None and key_of(load) else None


def loading_options(outline: Outline, model: ast.expr, arguments: ast.Call, function: Function) -> list[Cast]:
    """The dtype in `model_init_kwargs`, with which TRL loads a model from its name."""
    names = outline.values(key_of(model), function) if key_of(model) else [model]
    options = initial_options(outline, arguments, function)
    if options is None or not all(_is_name(outline, name, function) for name in names):
        return []
    spread = ast.Call(arguments.func, [], [ast.keyword(None, options)])
    dtype = keyword_of(outline, spread, function, "torch_dtype", "dtype")
    if dtype is None or constant(dtype) is None or keyword_of(outline, spread, function, "quantization_config"):
        return []
    load = ast.copy_location(ast.Call(ast.Name("dict", ast.Load()), [], [ast.keyword("dtype", dtype)]), dtype)
    return [Cast(load, function, "", formats_of(outline, dtype, function), "load")]


def initial_options(outline: Outline, arguments: ast.Call, function: Function) -> ast.expr | None:
    """The `model_init_kwargs` of arguments: passed, or assigned to the attribute below."""
    options = keyword_of(outline, arguments, function, "model_init_kwargs")
    assign = outline.parents.get(arguments)
    key = key_of(assign.targets[0]) if isinstance(assign, ast.Assign) else ""
    bound = outline.bindings.get(f"{key}.model_init_kwargs", ()) if key and options is None else ()
    return bound[0].value if len(bound) == 1 and bound[0].index is None else options


def _is_name(outline: Outline, model: ast.expr, function: Function) -> bool:
    """Whether what a Trainer gets as its model is the name of a checkpoint: no call, or one that returns a text."""
    if not isinstance(model, ast.Call):
        return True
    target = outline.call_target(model, function)
    if target is not None:
        returned = list(returned_by(target))
        return bool(returned) and all(_NAMES_MODEL.search(_last_key(value)) or _is_text(value) for value in returned)
    return _is_text(model) or bool(_NAMES_MODEL.search(last_name_of(model.func)))


def _is_text(value: ast.expr) -> bool:
    """Whether an expression is a string: a literal, `str(path)`, `os.environ["MODEL"]`, `cfg.get("model")`."""
    if isinstance(value, ast.Call):
        is_read = last_name_of(value.func) in {"get", "getenv"} and isinstance(constant(argument(value, 0, "key")), str)
        return is_read or text_of(value.func) in {"str", "os.path.join", "os.fspath"}
    return isinstance(value, ast.JoinedStr) or isinstance(constant(value), str)


def _last_key(value: ast.expr) -> str:
    """The last name of a variable, or the key of an entry: `model_path` of `cfg["model_path"]`."""
    index = constant(value.slice) if isinstance(value, ast.Subscript) else key_of(value).rpartition(".")[2]
    return index if isinstance(index, str) else ""


def lasting_casts(lineage: Lineage) -> list[Cast]:
    """The casts of a model, without loads that a cast further down always replaces: `model.to(device, dtype=dtype)`."""
    return [c for c in lineage.casts if c.form != "load" or not any(_replaces(lineage, o, c) for o in lineage.casts)]


def _replaces(lineage: Lineage, later: Cast, load: Cast) -> bool:
    is_after = later.function is load.function and later.node.lineno > load.node.lineno
    if later.form != "cast" or not is_after or not later.formats or AUTO in later.formats:
        return False
    return set(conditions_of(lineage.outline, later.node)) <= set(conditions_of(lineage.outline, load.node))


def is_rebound(lineage: Lineage, load: Cast, owner: ast.expr) -> bool:
    """Whether another load is always assigned to the same variable before the parameters of `owner` are read."""
    if load.form != "load":
        return False
    here = conditions_of(lineage.outline, load.node)
    later = [c for c in lineage.casts if c.form == "load" and c.function is load.function]
    lines = range(load.node.lineno + 1, getattr(owner, "lineno", 0))
    return any(
        c.key == load.key and c.node.lineno in lines and set(conditions_of(lineage.outline, c.node)) <= set(here)
        for c in later
    )


def is_language_model(cast: Cast) -> bool:
    """Whether a checkpoint is loaded as a language model, by the name of the class."""
    return bool(_LANGUAGE_MODEL.search(text_of(cast.node.func)))


def stored_low(outline: Outline, cast: Cast) -> bool | None:
    """Whether a checkpoint whose own dtype is loaded has 16 bits, from its name; None if the text does not decide it."""
    words = _checkpoints(outline, cast)
    if not words or any(_ANY_MODEL.search(word) for word in words):
        return None
    low = [bool(_LOW_CHECKPOINTS.search(word)) for word in words]
    is_asked = cast.form == "load"  # dtype="auto"
    if is_asked and not any(low) and not any(map(_FULL_CHECKPOINTS.search, words)) and all("/" in w for w in words):
        return None
    return all(low)


def stored_float16(outline: Outline, cast: Cast) -> bool:
    """Whether a checkpoint whose own dtype is loaded is stored in float16, whichever it may be by its name."""
    words = _checkpoints(outline, cast)
    return bool(words) and all(map(_FLOAT16_CHECKPOINTS.search, words))


def _checkpoints(outline: Outline, cast: Cast) -> list[str]:
    """The names of the checkpoint whose own dtype a model gets; none if the text does not have all of them."""
    name = argument(cast.node, 0, "pretrained_model_name_or_path") if AUTO in cast.formats else None
    texts = _texts(outline, name, cast.function) if name is not None else set()
    words = [t for t in texts if isinstance(t, str)]
    return words if len(words) == len(texts) else []


def _texts(outline: Outline, node: ast.expr, function: Function, depth: int = 3) -> set[object]:
    """The strings that a name may be: literals, also passed by the callers, or the default of an option."""
    key = key_of(node)
    if isinstance(constant(node), str) or not key or not depth:
        return {constant(node)} if isinstance(constant(node), str) else set()
    texts = {constant(v) for v in outline.values(key, function)}
    if key in function.params and not texts:
        passed = list(passed_for(outline, key, function))
        parts = [_texts(outline, value, caller, depth - 1) for value, caller in passed]
        return set().union(*(part or {...} for part in parts))
    return texts or _option_default(outline, key.rsplit(".", 1)[-1])


def _option_default(outline: Outline, option: str) -> set[object]:
    """The default of a command-line option, or of the field that HfArgumentParser makes one of."""
    for call, _ in outline.calls.get("add_argument", ()):
        if any(str(constant(a)).lstrip("-").replace("-", "_") == option for a in call.args):
            default = argument(call, None, "default")
            return {constant(default)} if default is not None else set()
    return {constant(default) for default in field_defaults(outline, option)}
