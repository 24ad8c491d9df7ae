"""HS139: precision options, parameters and dtypes that are chosen and never used."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.script.precision_options import PRECISION_OPTION
from halfstep.check.script.idle.idle_choices import idle_choices
from halfstep.check.script.idle.idle_commands import idle_commands
from halfstep.check.script.idle.idle_constants import idle_constants
from halfstep.check.script.idle.idle_formats import idle_formats
from halfstep.check.script.idle.idle_limits import idle_attributes, idle_limits
from halfstep.check.script.idle.stored_flags import idle_flags, powerless_flags, shadowed_flags
from halfstep.check.script.idle.unanswered import unanswered_formats
from halfstep.check.script.idle.unread_keys import unread_keys
from halfstep.check.script.objects.command_line import Options, dataclass_fields, is_amplitude, names_format, stays_here
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.formats import passed_for
from halfstep.check.script.objects.outputs import in_no_grad
from halfstep.check.script.objects.values import argument, constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.syntax.shown import only_reaches_messages
from halfstep.check.script.syntax.unread import (
    fixed_dtypes,
    inherits,
    is_setting,
    is_unread,
    key_strings,
    loads,
    mentions,
    read_names,
    training_functions,
    unread_argument,
    unread_parameters,
)
from halfstep.check.script.syntax.unread_settings import Settings, unread_settings

__all__ = ["RULES"]

_FLAG = regex(r"(use_|enable_)?(amp|b?fp?16|b?float16|mixed_?precision|half_precision)")
# A flag may be for one phase or model: `amp_rollout`, `eval_fp16`.
_PART = (
    r"train(ing)?|eval(uation)?|val(idation)?|test|infer(ence)?|rollout|actor|critic|teacher|student|policy|sampling"
)
_FIELD = regex(
    rf"{_FLAG.pattern}|({_PART})_{_FLAG.pattern}|{_FLAG.pattern}_(in_|for_)?({_PART})|apex|(\w+_)?(to|in|use)_[48]_?bit"
)
_FEW = 5  # statements; with fewer, a function may as well only pass its parameters on
_STORED = regex(r"^(use_|enable_)?(amp|fp16|f16|float16|mixed_?precision)(_enabled|_on)?$", re.IGNORECASE)
_SCALE = regex(r"^(init(ial)?_|static_|fp16_)?(loss|grad)_?scale(_value)?$|^(fp16_|apex_|amp_)?opt_level$")
_CHOICE = regex(r"^((torch|model|compute|train|training|amp)_)?(precision|dtype)$")  # options that name a format
_PARAMETER = regex(r"precision|mixed_precision|(torch_|amp_|model_)?dtype|fp16|bf16|use_amp|amp")
_PASSED = regex(_FLAG.pattern + r"|precision|(torch_|model_)?dtype|(use_|load_(in_)?)?[48]_?bit")
_SETS_UP = regex(r"load|build|create|make|setup|get_|init|train|fit|main|run", re.IGNORECASE)
_ASIDE = regex(r"eval|valid|test|infer|sampl|generat|export|save|log_|predict|bench", re.IGNORECASE)
# Functions that may read a variable by its name, and what may compute in 16 bits.
_BY_NAME = {"locals", "globals", "exec"}
_AMP = regex(r"[\w.]*\b(use_|enable_)?(amp|mixed_precision)|scaler")
_TRAINED = (
    "import argparse\nimport torch\nparser = argparse.ArgumentParser()\nparser.add_argument('--amp', action='store_true')\n"
    "args = parser.parse_args()\nscaler = torch.amp.GradScaler('cuda'{flag})\nfor x, y in loader:\n    optimizer.zero_grad()\n"
    "    with torch.autocast('cuda', dtype=torch.float16{flag}):\n        loss = loss_fn(model(x), y)\n"
    "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
)
_ARGPARSE = "https://docs.python.org/3/library/argparse.html"
_DATACLASS = """\
from dataclasses import dataclass
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
@dataclass
class Options:
    name: str = "gpt2"
    torch_dtype: str = "float32"
options, training = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses()
Trainer(AutoModelForCausalLM.from_pretrained(options.name{dtype}), args=training, train_dataset=data).train()
"""
_TRAINER = """\
import torch
class Trainer:
    def __init__(self, model, optimizer, use_amp=False):
        self.model, self.optimizer = model, optimizer
        self.use_amp = use_amp
        self.scaler = torch.amp.GradScaler("cuda"{flag})
    def step(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16{flag}):
            loss = loss_fn(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""
_CLIPPED = (
    "import torch\nconfig = {'name': 's', 'lr': 1e-4, 'epochs': 3, 'warmup': 9, 'seed': 0, 'max_grad_norm': 5.0}\n"
    "model, optimizer, data = create(config['name'], config['lr'], config['epochs'], config['warmup'], config['seed'])\n"
    "for x, y in data:\n    optimizer.zero_grad()\n    with torch.autocast('cuda', dtype=torch.bfloat16):\n        loss = loss_fn(model(x), y)\n    loss.backward()\n"
    "    torch.nn.utils.clip_grad_norm_(model.parameters(), {limit})\n    optimizer.step()\n"
)
_FABRIC = """\
from lightning import Fabric
def setup(config, precision=None):
    precision = "bf16-mixed"{test}
    return Fabric(devices=config.devices, precision=precision)
"""


def _num_statements(function: Function) -> int:
    return sum(1 for statement in function.body for n in ast.walk(statement) if isinstance(n, ast.stmt))


def _is_shown(script: Script, node: ast.expr) -> bool:
    """Whether a value reaches nothing but messages of its function."""
    scope = next((n for n in script.above(node) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)), script.tree)
    return only_reaches_messages(script.outline.parents, scope, node)


def _settings_of(script: Script) -> Settings:
    # With `accumulate`, HS177 reports the number that is not passed on.
    is_loop = "backward" in script.outline.calls and "accumulate" not in script.outline.calls
    has_formats = bool(script.autocasts) and "backward" in script.outline.calls
    has_steps = is_loop and script.has("opt_step", "scaler_step", "owned_step")
    return Settings(_FIELD, _FLAG, has_steps, has_formats, any(s.enabled != "no" for s in script.scalers))


class UnusedPrecisionOption(ScriptRule):
    """A precision option is declared and never read."""

    code = "HS139"
    name = "precision-option-unused"
    severity = "warning"
    reason = (
        "The option is parsed and the script never asks for its value, so the run has the precision that the code fixes: with `--amp` "
        "unread and autocast always on, a run without `--amp`, meant as the float32 baseline, is in mixed precision too. The same is true of a "
        'parameter that a function ignores, overwrites or only stores, of a dtype that is chosen and not used (`"bf16"` where only `"fp16"` enters '
        "autocast), of a region that is created and never entered, and of a limit of the gradient norm or a number of micro-batches that nothing "
        "but messages and logs read: clipping and accumulation stay what the code fixes."
    )
    bad = (
        _TRAINED.format(flag=""),
        _TRAINED.format(flag="") + "epochs = args.epochs if hasattr(args, 'epochs') else 1\n",
        _DATACLASS.format(dtype=""),
        _TRAINER.format(flag=""),
        _FABRIC.format(test=""),
        _CLIPPED.replace("{limit}", "1.0"),
    )
    good = (
        _TRAINED.format(flag=", enabled=args.amp"),
        _TRAINED.format(flag="") + "evaluate(model, args)\n",
        _TRAINED.format(flag="") + "options = vars(args)\nuse(options['amp'])\n",
        _DATACLASS.format(dtype=", dtype=options.torch_dtype"),
        _TRAINER.format(flag=", enabled=self.use_amp"),
        _FABRIC.format(test=" if precision is None else precision"),
        _CLIPPED.replace("{limit}", "config['max_grad_norm']"),
    )
    references = (f"{_ARGPARSE}#the-namespace-object",)
    words = (
        "HfArgumentParser",
        "self.use_amp",
        "self.use_mixed_precision",
        "self.use_fp16",
        "self.fp16",
        *(f"{mark}--{n}{mark}" for n in ("fp16", "bf16", "mixed_precision") for mark in "'\""),
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """Options of a script that has autocast or a scaler, if its namespace goes to no other file; fields of its dataclasses."""
        lines: set[int] = set()
        for part in (
            self._fields, self._settings, self._stored, self._choices, self._overwritten, self._ignored, self._dropped, self._unread,
            self._still_scaled, self._powerless, self._fixed, self._idle, self._unanswered, self._limits,
        ):  # fmt: skip
            reported = [f for f in part(script) if f.line not in lines]  # a field may be a variable too
            lines.update(finding.line for finding in reported)
            yield from reported
        calls = script.outline.calls.keys()
        trains = calls & {"backward", "Accelerator", "Fabric"} or any(c.endswith("TrainingArguments") for c in calls)
        if not (script.autocasts or script.scalers or trains or "apex.amp.initialize" in script.outline.library_calls):
            return
        options = Options(script)
        named = (PRECISION_OPTION, _SCALE, _CHOICE)
        use = _settings_of(script).use_of_number
        precise = [o for o in options.declared if any(p.search(o[2].lower()) for p in named) or names_format(o[0])]
        precise = [o for o in precise if not is_amplitude(o[0], o[2])]
        precise += [o for o in options.declared if o not in precise and use(o[2])]
        if not precise or not stays_here(options):
            return
        full = script.outline.names.full  # `torch.amp` reads no option
        values = {name for _, _, name in precise}
        loads = [n for n in options.nodes if isinstance(n, ast.Attribute) and not full(n) and n.attr in values]
        called = {n.func for n in options.nodes if isinstance(n, ast.Call)}
        loads = [n for n in loads if n not in called]  # `self.amp()` is a method
        read = {n.attr for n in loads if not isinstance(n.ctx, ast.Load) or not _is_shown(script, n)}
        read |= key_strings(script.outline, options.nodes)
        for call, flag, name in precise:
            if name not in read and argument(call, None, "dest") is None:
                yield self.finding(
                    script.where(call),
                    f"`{flag}` is never read: the run is the same with and without it",
                    instead=f"pass args.{name} on, or remove the option",
                )

    def _stored(self, script: Script) -> Iterator[Finding]:
        """Flags that a class stores and never reads, next to an autocast region or a scaler of its own that is always on."""
        read = read_names(all_nodes(script.tree)) if script.scalers or script.autocasts else set()
        for parameter, function, other in shadowed_flags(script, _STORED, read):
            yield self.finding(
                script.where(parameter),
                f"`{function.name}` only stores `{parameter.arg}`, and nothing reads it: `{other.name}` uses a parameter of its own",
                instead=f"use self.{parameter.arg} in {other.name}, or remove the parameter here",
            )
        for node, key, effect in idle_flags(script, _STORED, read):
            yield self.finding(
                script.where(node),
                f"`{key}` is stored and never read in this file: {effect}",
                instead=f"GradScaler(..., enabled={key}), and the same for autocast, or remove the parameter",
            )

    def _settings(self, script: Script) -> Iterator[Finding]:
        """Precision flags, limits of the gradients and numbers of micro-batches in the settings of a file that trains, which nothing in it reads."""
        calls = script.outline.calls.keys()
        if not any(name == "backward" or name.endswith("Trainer") for name in calls) or calls & _BY_NAME:
            return
        named = _settings_of(script)
        fields = unread_settings(script.outline, script.tree, script.source.text, named)
        for node, what, use in itertools.chain(
            fields, unread_keys(script, named), idle_commands(script, named), idle_constants(script, named)
        ):
            text = f"{what}: the run is the same with and without it"
            yield self.finding(script.where(node), text, instead=f"{use}, or remove it")

    def _choices(self, script: Script) -> Iterator[Finding]:
        """Formats that an expression or a literal chooses for a variable which nothing but messages read, in a file that trains."""
        for place, what, key in idle_formats(script):
            text = f"{what}: the format that it chooses is not the one of the run"
            instead = f"use `{key}` for autocast, the model or the trainer, or remove it"
            yield self.finding(script.where(place), text, instead=instead)

    def _unanswered(self, script: Script) -> Iterator[Finding]:
        """Settings that ask for one 16-bit format in a file that trains and only knows the other."""
        for node, name, asked, computed in unanswered_formats(script) if "backward" in script.outline.calls else ():
            text = (
                f"`{name}` asks for {asked}, and nothing in this file computes in it: only {computed} enters autocast"
            )
            scaler = ", without the scaler" if asked == "bfloat16" else ", with a scaler"
            yield self.finding(
                script.where(node), text, instead=f"enter autocast with dtype=torch.{asked} as well{scaler}"
            )

    def _unread(self, script: Script) -> Iterator[Finding]:
        """Precision flags that a training function reads from its settings into a variable, and uses nowhere."""
        outline = script.outline
        if "backward" not in outline.calls or _BY_NAME & outline.calls.keys():
            return
        flags = [key for key in outline.bindings if _FLAG.fullmatch(key)]
        nodes = all_nodes(script.tree) if flags else ()
        read = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        for name in (key for key in flags if key not in read):
            for binding in outline.bindings[name]:
                is_inside = not isinstance(binding.function.node, ast.Module) and binding.index is None
                if is_inside and is_setting(binding.value):
                    yield self.finding(
                        script.where(binding.node),
                        f"`{name}` is read from the settings and used nowhere in `{binding.function.name}`: the run is the same with and without it",
                        instead=f"use {name} for autocast and the scaler, or remove it",
                    )

    def _limits(self, script: Script) -> Iterator[Finding]:
        """Limits of the gradients and numbers of micro-batches that a training function takes or its class stores, and nothing reads."""
        settings = _settings_of(script)
        for node, function, effect, use in idle_limits(script, settings) if settings.has_steps else ():
            text = f"`{function.name}` {effect} its parameter `{getattr(node, 'arg', '')}`: the run is the same with every value"
            yield self.finding(script.where(node), text, instead=f"{use}, or remove the parameter")
        for node, key, use in idle_attributes(script, settings) if settings.has_steps else ():
            text = f"`{key}` is stored, and nothing but messages depend on it: the run is the same with every value"
            yield self.finding(script.where(node), text, instead=f"{use}, or remove it")

    def _powerless(self, script: Script) -> Iterator[Finding]:
        """Precision flags of a class that trains, which nothing but messages depend on, in a file where nothing computes in 16 bits."""
        for node, key, effect in powerless_flags(script, _FLAG):
            text = f"`{key}` {effect}: nothing in this file computes in 16 bits, whatever its value"
            instead = f"torch.autocast(..., enabled={key}), or remove the flag"
            yield self.finding(script.where(node), text, instead=instead)

    def _fixed(self, script: Script) -> Iterator[Finding]:
        """Parameters for a dtype that a function never reads, while it loads a model in a dtype of its own."""
        for parameter, function, dtype in fixed_dtypes(script.outline, script.source.text):
            text = f"`{function.name}` never reads its parameter `{parameter.arg}`: it loads {dtype} with every value"
            instead = f"pass {parameter.arg} to from_pretrained, or remove the parameter"
            yield self.finding(script.where(parameter), text, instead=instead)

    def _idle(self, script: Script) -> Iterator[Finding]:
        """Policies of FSDP, Accelerators, regions and dtypes to load with a precision that nothing trains with."""
        for node, text, instead in idle_choices(script):
            yield self.finding(script.where(node), text, instead=instead)

    def _overwritten(self, script: Script) -> Iterator[Finding]:
        """Precision parameters that the first statement with their name overwrites."""
        for function in script.outline.functions:
            for name in function.params:
                if not _PARAMETER.fullmatch(name):
                    continue
                first = next((s for s in function.body if mentions(s, name)), None)
                if not isinstance(first, ast.Assign) or len(first.targets) != 1 or loads(first, name):
                    continue
                if isinstance(first.targets[0], ast.Name) and first.targets[0].id == name:
                    yield self.finding(
                        script.where(first),
                        f"the parameter `{name}` of `{function.name}` is overwritten before it is read: what a caller passes has no effect",
                        instead=f"assign only if `{name}` is None, or remove the parameter",
                    )

    def _ignored(self, script: Script) -> Iterator[Finding]:
        """Precision parameters that a function never reads, of one that sets up a run or trains, and a call in this file passes.

        Calls of other files pass the flag of a training function that this file does not call.
        """
        outline, text, calls = script.outline, script.source.text, script.outline.calls.keys()
        if not ("backward" in calls or any(name.endswith("Trainer") for name in calls)) or "locals" in calls:
            return
        training = training_functions(outline)
        for function in outline.functions:
            names = [name for name in function.params if _PASSED.fullmatch(name)]
            named = _SETS_UP.search(function.name) and not _ASIDE.search(function.name)
            is_setup = names and named and _num_statements(function) >= _FEW
            # A method, or a function with a decorator, may have the signature that another class or library asks for.
            if not is_setup or function.method or getattr(function.node, "decorator_list", None):
                continue
            for name in (n for n in names if is_unread(text, function, n)):
                passed = [v for v, _ in passed_for(outline, name, function) if constant(v) is not None]
                effect = f", which {script.at(passed[0])} passes" if passed else ""
                place = function.node if passed else unread_argument(outline, text, function, name, training)
                if place is not None and (passed or _FLAG.fullmatch(name)):
                    yield self.finding(
                        script.where(place),
                        f"`{function.name}` never reads its parameter `{name}`{effect}: the run is the same with every value",
                        instead=f"use {name} in {function.name}, or remove the parameter",
                    )

    def _dropped(self, script: Script) -> Iterator[Finding]:
        """Precision flags that the constructor of a class which trains takes and never reads; with a base class, that one may ask for them."""
        outline = script.outline
        trained = {function.cls for _, function in outline.calls.get("backward", ())} - {""}
        for cls in sorted(trained) if "locals" not in outline.calls else ():
            function = outline.classes.get(cls, {}).get("__init__")
            if function is None or inherits(outline, cls):
                continue
            for parameter in unread_parameters(function, script.source.text, _FLAG):
                yield self.finding(
                    script.where(parameter),
                    f"`{cls}` never reads its parameter `{parameter.arg}`: the run is the same with every value",
                    instead=f"use {parameter.arg} for autocast and the scaler, or remove the parameter",
                )

    def _still_scaled(self, script: Script) -> Iterator[Finding]:
        """Scalers that are created enabled in the branch without mixed precision, where autocast is always on."""
        regions = [a for a in script.autocasts if not in_no_grad(script, a.node)]
        if not regions or any(a.enabled != "yes" for a in regions):
            return
        for scaler in script.scalers:
            guards = conditions_of(script.outline, scaler.node) if scaler.enabled == "yes" else ()
            without = [g.text for g in guards if not g.is_true]
            off = next((text for text in without if all(map(_AMP.fullmatch, text.split(" and ")))), "")
            inside = [g for a in regions for g in conditions_of(script.outline, a.node) if _AMP.fullmatch(g.text)]
            if off and not inside:
                yield self.finding(
                    script.where(scaler.node),
                    f"without `{off}` an enabled scaler is used all the same, and autocast is always on: the option does not switch mixed precision off",
                    instead="pass enabled= to GradScaler and autocast, with the option",
                )

    def _fields(self, script: Script) -> Iterator[Finding]:
        """The fields for a dtype of dataclasses that HfArgumentParser fills, which nothing reads."""
        nodes = all_nodes(script.tree) if "HfArgumentParser" in script.source.text else ()
        read = read_names(nodes)
        for field in dataclass_fields(nodes):
            name = field.target.id if isinstance(field.target, ast.Name) else ""
            if re.fullmatch(r"(torch_|model_|compute_)?dtype", name) and name not in read:
                yield self.finding(
                    script.where(field),
                    f"the option `--{name}` is never read: the run is the same with and without it",
                    instead=f"pass {name} to from_pretrained, or remove the option",
                )


RULES: tuple[type[Rule], ...] = (UnusedPrecisionOption,)
