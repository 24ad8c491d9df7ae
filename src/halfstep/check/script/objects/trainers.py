"""The Trainers of transformers and TRL: the model each one updates, and the arguments that decide how; plugins of Accelerate."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.flow.guard import Guard
from halfstep.check.script.objects.choices import field_defaults
from halfstep.check.script.objects.expressions import arms_of, conditions_of
from halfstep.check.script.objects.formats import entries_named, keyword_of, keywords_of, passed_for
from halfstep.check.script.objects.loading import initialized
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import default_of

__all__ = [
    "PARSES",
    "arguments_of",
    "has_plain_trainer",
    "has_plugin",
    "is_library_trainer",
    "is_sharded",
    "is_trainer",
    "is_without_bf16",
    "losses_without_count",
    "model_of",
    "names_engine",
    "places_without_engine",
    "replaces_training",
    "unsharded_when",
]

_ARGUMENTS = regex(
    r"TrainingArguments$|(SFT|DPO|GRPO|ORPO|KTO|CPO|Reward|RLOO|OnlineDPO|GKD|BCO|PRM|PPO|PPOv2|XPO|NashMD)Config$"
)
# Optimizers of TrainingArguments that compensate for 16-bit weights, or never store an update.
_COMPENSATES = regex(r"anyprecision|lomo|apollo|stable|kahan")
_OPTIONS = {"per_device_train_batch_size", "gradient_checkpointing", "num_train_epochs"}
_ENGINES = regex(r"deepspeed|fsdp", re.IGNORECASE)
_ASKS_FOR_ENGINE = regex(
    r"deepspeed|fsdp|\b(use_|enable_|with_)?(ds|zero)(_\w+)?\b", re.IGNORECASE
)  # `if args.use_ds:`
_PLUGINS = {"DeepSpeedPlugin", "FullyShardedDataParallelPlugin"}  # of Accelerate, which then trains float32 copies
_SEVERAL = regex(r"^\(?[\w.]*(world_size|num_processes|n_gpus?|num_gpus?|device_count\(\)) > 1\)?$", re.IGNORECASE)
_TRAINER_PACKAGES = {"transformers", "trl", "sentence_transformers"}
_TRAINER = regex(r"^transformers\.(\w+\.)*(Seq2Seq)?Trainer$")
# Their causal language models take `**kwargs`.
_LIBRARIES = {"transformers", "peft", "trl", "unsloth", "liger_kernel", "optimum", "modelscope", "auto_gptq", "awq"}
_PLAIN_BASES = {"", "object", "ABC", "abc.ABC"}  # "": Generic[T]
# What tells the Trainer that it has to divide the loss, or divides it.
_SCALES = regex(
    r"loss_is_scaled_for_ga|model_accepts_loss_kwargs|accepts_loss_kwargs|current_gradient_accumulation_steps"
)
_FORWARDED = regex(r"\bfsdp\s*=\s*\w+\.fsdp\b|\b\w+\.fsdp\b(?!\s*=[^=])")
_SPREADS = {"auto", "balanced", "balanced_low_0", "sequential"}
_PARSERS = {"HfArgumentParser", "TrlParser"}  # the second extends the first
PARSES = regex(r"parse_(args|json|yaml|dict)\w*$")  # of transformers.HfArgumentParser


def is_trainer(outline: Outline, name: str) -> bool:
    """Whether a class is a Trainer, by its name or by that of its base class; also a variable that chooses one of several."""
    bases = outline.bases.get(name, ()) if name not in outline.names.table else ()
    if name in outline.classes and name not in outline.names.table and {key_of(b) for b in bases} <= _PLAIN_BASES:
        return False  # a class of this file with its own loop
    values = [b.value for b in outline.bindings.get(name, ()) if b.index is None]
    arms = [key_of(arm) for value in values if value is not None for arm in arms_of(value)]
    is_variable = bool(arms) and None not in values and all(arm.endswith("Trainer") for arm in arms)
    imported = outline.names.table.get(name, "")  # `from trl import PPOTrainer as PPO`
    return (
        name.endswith("Trainer")
        or imported.endswith("Trainer")
        or is_variable
        or any(text_of(base).endswith("Trainer") for base in bases)
    )


def is_without_bf16(flag: ast.expr) -> bool:
    """Whether a flag is true on GPUs without bfloat16 and on no other: `cuda and not torch.cuda.is_bf16_supported()`."""
    parts = flag.values if isinstance(flag, ast.BoolOp) and isinstance(flag.op, ast.And) else [flag]
    texts = [text_of(part) for part in parts]
    asked = [t for t in texts if re.fullmatch(r"not [\w.]*is_(bf16|bfloat16)_supported\(.*\)", t)]
    return len(asked) == 1 and all(t in asked or t.endswith("cuda.is_available()") for t in texts)


def has_plain_trainer(outline: Outline) -> bool:
    """Whether a Trainer trains in this file, and nothing in it is about DeepSpeed or FSDP, which keep float32 copies."""
    if "train" not in outline.calls or not any(name.endswith("Trainer") for name in outline.calls):
        return False
    return not any(_ENGINES.search(name) for name in (*outline.loads, *outline.bindings, *outline.strings))


def names_engine(outline: Outline, text: str) -> bool:
    """Whether a file mentions that its command line names DeepSpeed or FSDP; a field `deepspeed` of its own is None by default."""
    defaults = field_defaults(outline, "deepspeed")
    is_off = bool(defaults) and all(constant(default) is None for default in defaults)
    words = ("fsdp",) if is_off else ("fsdp", "deepspeed", "zero3")
    text = _FORWARDED.sub("", text) if is_off else text  # the Trainer's own option, as empty as `deepspeed`
    return any(word in text.lower() for word in words)


def places_without_engine(outline: Outline, load: ast.Call, function: Function) -> bool:
    """Whether `device_map` spreads a model over the GPUs, which DeepSpeed excludes, in every run or where DeepSpeed is off: such runs are meant."""
    values = [arm for v in keywords_of(outline, load, function, "device_map") for arm in arms_of(v)]
    if values and all(constant(v) in _SPREADS and not conditions_of(outline, v) for v in values):
        return True
    values = [v for v in values if constant(v) is not None]
    return any(_is_without_engine(guard) for value in values for guard in conditions_of(outline, value))


def _is_without_engine(guard: Guard) -> bool:
    """Whether a condition is, or contains, that DeepSpeed is off: `device_map and not using_deepspeed`."""
    if not guard.is_true:
        return re.fullmatch(r"[\w.]*deepspeed\w*", guard.text) is not None
    parts = [part.strip("()") for part in guard.text.split(" and ")]
    return any(re.fullmatch(r"not [\w.]*deepspeed\w*|[\w.]*deepspeed\w* is None", part) for part in parts)


def has_plugin(outline: Outline) -> bool:
    """Whether Accelerate trains float32 copies in every run: it gets a plugin, and no option leaves it out."""
    sites = [site for name in _PLUGINS for site in outline.calls.get(name, ())]
    optional = [
        any(is_true and _ASKS_FOR_ENGINE.search(text) for text, is_true in conditions_of(outline, call))
        for call, _ in sites
    ]
    if not all(optional):
        return True
    return not sites and bool(outline.names.table.keys() & _PLUGINS)


def model_of(outline: Outline, trainer: ast.Call, function: Function) -> ast.expr | None:
    """The model that a Trainer updates; TRL's PPOTrainer(config, model, ...) expects it second."""
    position = 1 if _class_name(outline, trainer) == "PPOTrainer" else 0
    node = argument(trainer, position, "model") or argument(trainer, None, "policy") or initialized(trainer)
    return node or keyword_of(outline, trainer, function, "model", "policy")  # `Trainer(**options)`


def is_library_trainer(full: str) -> bool:
    """Whether a full name is that of a Trainer of transformers or of a library that extends it."""
    return full.partition(".")[0] in _TRAINER_PACKAGES and full.endswith("Trainer")


def replaces_training(outline: Outline, name: str) -> bool:
    """Whether a Trainer has a `train` of its own that leaves nothing of a step to the library: neither a method nor its accelerator."""
    bases = (base.id for base in outline.bases.get(name, ()) if isinstance(base, ast.Name))
    methods = {m: f for cls in (*bases, name) for m, f in outline.classes.get(cls, {}).items()}
    nodes = list(ast.walk(methods["train"].node)) if "train" in methods else []
    used = {n.attr if isinstance(n, ast.Attribute) else n.id for n in nodes if isinstance(n, (ast.Attribute, ast.Name))}
    library = {"super", "accelerator", "_inner_training_loop", *({"training_step"} - methods.keys())}
    return "train" in methods and not used & library


def arguments_of(outline: Outline, trainer: ast.Call, function: Function) -> ast.Call | None:
    """The call that creates a Trainer's arguments, if there is one in this file."""
    is_ppo = _class_name(outline, trainer) == "PPOTrainer"
    node = argument(trainer, 0 if is_ppo else 1, "args") or keyword_of(outline, trainer, function, "args", "config")
    pending = [(node, function)]
    visited: set[tuple[str, Function]] = set()
    while pending:
        value, scope = pending.pop()
        if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Call):
            value = value.value  # `parser.parse_args_into_dataclasses()[0]`
        key = key_of(value)
        if key and (key, scope) not in visited:
            visited.add((key, scope))
            pending += [(v, scope) for v in outline.values(key, scope)] or list(entries_named(outline, key, scope))
            parsed = [b.value for b in outline.lookup(key, scope) if b.index is not None]
            pending += [(v, scope) for v in parsed if isinstance(v, ast.Call) and PARSES.search(_last_name(v.func))]
        elif isinstance(value, ast.Call):
            name = text_of(value.func).rsplit(".", 1)[-1]
            if (
                _ARGUMENTS.search(name)
                or _extends(value, name)
                or (PARSES.search(name) and not outline.calls.keys().isdisjoint(_PARSERS))
            ):
                return value
            target = outline.call_target(value, scope)
            if target is not None:
                returns = [n.value for n in ast.walk(target.node) if isinstance(n, ast.Return) and n.value]
                pending += [(r, target) for r in returns]
    return None


def _extends(call: ast.Call, name: str) -> bool:
    """Whether a class of another file extends TrainingArguments: it is configured with its options."""
    options = {k.arg for k in call.keywords}
    return name.endswith(("Config", "Arguments", "Args")) and bool(options & _OPTIONS) and "output_dir" in options


def losses_without_count(outline: Outline) -> Iterator[tuple[ast.AST, str]]:
    """Each `compute_loss` of a transformers.Trainer that ignores the number of tokens, with the accumulation steps of the file.

    For a model whose forward takes `**kwargs`, as causal language models do, the Trainer passes `num_items_in_batch` and
    divides nothing itself.
    """
    values = [k.value for name, sites in outline.calls.items() if _ARGUMENTS.search(name) for c, _ in sites for k in c.keywords
              if k.arg == "gradient_accumulation_steps"]  # fmt: skip
    steps = next((text_of(value) for value in values if constant(value) != 1), "")
    if not steps or _SCALES.search(" ".join((*outline.loads, *outline.bindings))):
        return
    is_language_model = _loads_language_model(outline)
    for cls, methods in outline.classes.items():
        is_own = any(_TRAINER.search(outline.names.full(base)) for base in outline.bases.get(cls, ()))
        method = methods.get("compute_loss") if is_own and "training_step" not in methods else None
        arguments = getattr(method.node, "args", None) if method is not None else None
        if method is None or arguments is None or not (is_language_model or _trains_own_model(outline, cls)):
            continue
        extra = arguments.kwarg.arg if arguments.kwarg is not None else ""
        loaded = {n.id for n in ast.walk(method.node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        if ("num_items_in_batch" in method.params or extra) and not loaded & {"num_items_in_batch", "super", extra}:
            yield method.node, steps


def _loads_language_model(outline: Outline) -> bool:
    """Whether a library loads a causal language model; a class that the project registers may have a forward without `**kwargs`."""
    imported = [i.full for i in outline.names.imported if i.full.endswith("ForCausalLM")]
    registers = [c for c, _ in outline.calls.get("register", ()) if text_of(c.func).endswith("ForCausalLM.register")]
    forwards = [outline.classes.get(key_of(argument(c, 1, "model_class")), {}).get("forward") for c in registers]
    is_library = any(full.split(".")[0] in _LIBRARIES for full in imported) and "from_pretrained" in outline.calls
    return is_library and all(
        f is not None and isinstance(f.node, ast.FunctionDef) and f.node.args.kwarg for f in forwards
    )


def _trains_own_model(outline: Outline, trainer: str) -> bool:
    """Whether each model of a Trainer is of a class of the file whose forward takes `**kwargs`, and the file has `labels` to count."""
    sites = outline.calls.get(trainer, ())
    if not sites or "labels" not in outline.strings:
        return False
    for call, function in sites:
        key = key_of(model_of(outline, call, function))
        values = outline.values(key, function) if key else []
        names = {key_of(value.func) for value in values if isinstance(value, ast.Call)}
        forwards = [outline.classes.get(name, {}).get("forward") for name in names]
        if len(values) != 1 or not forwards:
            return False
        for forward in forwards:
            if forward is None or not isinstance(forward.node, ast.FunctionDef) or forward.node.args.kwarg is None:
                return False
    return True


def is_sharded(outline: Outline, arguments: ast.Call, function: Function) -> bool:
    """Whether DeepSpeed or FSDP trains float32 copies, or the chosen optimizer compensates."""
    for name in ("deepspeed", "fsdp", "fsdp_config", "optim_target_modules"):
        value = keyword_of(outline, arguments, function, name)
        optional = _is_off_by_default(outline, value, function) or isinstance(value, ast.IfExp)
        if value is not None and not _is_empty(value) and not optional:
            return True
    optim = constant(keyword_of(outline, arguments, function, "optim"))
    return isinstance(optim, str) and bool(_COMPENSATES.search(optim))


def _is_empty(value: ast.expr) -> bool:
    """Whether an argument turns sharding off: None, `""`, False, `[]` or `{}`."""
    parts = (
        value.keys if isinstance(value, ast.Dict) else value.elts if isinstance(value, (ast.List, ast.Tuple)) else None
    )
    return parts == [] or constant(value) in {None, "", False}


def unsharded_when(outline: Outline, arguments: ast.Call, function: Function) -> Guard | None:
    """The condition under which `deepspeed=path if path else None` shards nothing; None if there is no such choice."""
    for name in ("deepspeed", "fsdp"):
        value = keyword_of(outline, arguments, function, name)
        if isinstance(value, ast.IfExp):
            if constant(value.orelse) in {None, ""} and _counts_processes(outline, value.test, function):
                return None  # `fsdp=... if world_size > 1 else ""`: every run on one GPU
            return Guard(text_of(value.test), constant(value.orelse) not in {None, ""})
    return None


def _counts_processes(outline: Outline, test: ast.expr, function: Function) -> bool:
    """Whether a condition is that there is more than one process or GPU, also through a variable."""
    values = outline.values(key_of(test), function) if key_of(test) else [test]
    return len(values) == 1 and bool(_SEVERAL.search(text_of(values[0])))


def _is_off_by_default(outline: Outline, value: ast.expr | None, function: Function) -> bool:
    """Whether a value is an option, a field or a parameter whose default is None."""
    if isinstance(value, ast.Name) and value.id in function.params:
        default = default_of(function, value.id)
        passed = any(True for _ in passed_for(outline, value.id, function))
        return default is not None and constant(default) is None and not passed
    if not isinstance(value, ast.Attribute):
        return False
    for call, _ in outline.calls.get("add_argument", ()):
        if any(str(constant(a)).lstrip("-").replace("-", "_") == value.attr for a in call.args):
            default = argument(call, None, "default")
            return default is None or constant(default) is None
    return bool(fields := field_defaults(outline, value.attr)) and all(constant(f) is None for f in fields)


def _class_name(outline: Outline, trainer: ast.Call) -> str:
    """The name of a Trainer in its library, whatever it is imported as."""
    return (outline.names.full(trainer.func) or text_of(trainer.func)).rsplit(".", 1)[-1]


def _last_name(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
