"""HS133, HS138, HS139, HS269: precision options of the command line and flags that do not do what they say."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.objects.command_line import Options, dataclass_fields, stays_here
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes, all_statements
from halfstep.check.script.syntax.names import chain

__all__ = ["RULES"]

_PRECISION = re.compile(r"(^|_)(use_?|enable_?|with_?|no_?)?(amp|fp16|bf16|fp32|tf32|half|float16|bfloat16|mixed_?precision|mixed|autocast|(4|8|16)_?bits?|fp8)(_|$)")  # fmt: skip
_STORED = re.compile(r"^(use_|enable_)?(amp|fp16|f16|float16|mixed_?precision)$", re.IGNORECASE)
_SCALE = re.compile(r"^(init(ial)?_|static_|fp16_)?(loss|grad)_?scale(_value)?$|^(fp16_|apex_|amp_)?opt_level$")
_HEAD = "import argparse\nparser = argparse.ArgumentParser()\n"
_TRAINED = (
    "import argparse\nimport torch\nparser = argparse.ArgumentParser()\nparser.add_argument('--amp', action='store_true')\n"
    "args = parser.parse_args()\nscaler = torch.amp.GradScaler('cuda'{flag})\nfor x, y in loader:\n    optimizer.zero_grad()\n"
    "    with torch.autocast('cuda', dtype=torch.float16{flag}):\n        loss = loss_fn(model(x), y)\n"
    "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
)
_BOOL = re.compile(r"bool|lambda (\w+): bool\(\1\)")
_TRAINS = re.compile(r"backward\(|optimizer|Trainer|TrainingArguments|\btrain\w*\(|\.fit\(")
_ARGPARSE = "https://docs.python.org/3/library/argparse.html"


class BooleanOption(ScriptRule):
    """A precision option of the command line cannot be switched off."""

    code = "HS133"
    name = "precision-option-bool"
    severity = "warning"
    reason = (
        "argparse calls the type with the text of the option, and `bool` of any non-empty text is True: `--fp16 False` and `--fp16 0` "
        "both turn fp16 on, silently. `action='store_true'` with `default=True` is True with and without the option. A run that is "
        "meant to be in float32 is not, and `--fp16` next to a bf16 that is always on requests both."
    )
    bad = (
        f"{_HEAD}parser.add_argument('--fp16', type=bool, default=False)\n",
        f"{_HEAD}parser.add_argument('--bf16', action='store_true', default=True)\n",
        f"USE_BF16 = True\n{_HEAD}parser.add_argument('--bf16', action='store_true', default=USE_BF16)\n",
    )
    good = (
        f"{_HEAD}parser.add_argument('--fp16', action='store_true')\n",
        f"{_HEAD}parser.add_argument('--fp16', action=argparse.BooleanOptionalAction)\n",
        f"{_HEAD}parser.add_argument('--shuffle', type=bool, default=False)\n",
        f"{_HEAD}parser.add_argument('--bf16', action='store_true', default=True)\n"
        "parser.add_argument('--no-bf16', dest='bf16', action='store_false')\n",
        f"{_HEAD}parser.add_argument('--bf16', action='store_true', default=True)\n"
        "parser.add_argument('--no-bf16', action='store_true')\n",
        f"{_HEAD}parser.add_argument('--bf16', action='store_true', default=True)\nargs = parser.parse_args()\n"
        "if args.device == 'cpu':\n    args.bf16 = False\n",
    )
    references = (f"{_ARGPARSE}#type", "https://github.com/python/cpython/issues/65407")
    words = (
        "--half",
        "-4bit",
        "_4bit",
        "-8bit",
        "_8bit",
        "--amp",
        '_amp"',
        "_amp'",
        "-amp",
        "mixed-precision",
        "--mixed_precision",
        "_tf32",
        "--tf32",
    )
    lines = ("type=bool", "default=True", "store_true")

    def check(self, script: Script) -> Iterator[Finding]:
        """Options named after a precision whose type is bool, or which store their default."""
        options = Options(script)
        for call, flag, name in options.declared:
            if not _PRECISION.search(name.lower()):
                continue
            kind, action = argument(call, None, "type"), constant(argument(call, None, "action"))
            default = _default(script, call)
            if kind is not None and _BOOL.fullmatch(text_of(kind)):
                yield self.finding(
                    script.where(call),
                    f"`{flag} False` is True: bool of a non-empty string",
                    instead="action=argparse.BooleanOptionalAction, or action='store_true'",
                )
            elif (
                (stored := _stored(call, action)) is not ...
                and default is stored
                and not options.is_switched(call, name)
            ):
                serious = _TRAINS.search(script.source.text) and "tf32" not in name.lower()
                yield self.finding(
                    script.where(call),
                    f"`{flag}` stores its own default: the value is {stored} with and without the option",
                    instead="action=argparse.BooleanOptionalAction, or no default",
                    severity=None if serious else "advice",
                )


def _default(script: Script, call: ast.Call) -> object:
    """The default of an option, also written as a constant of the file: `default=USE_BF16`."""
    value = argument(call, None, "default")
    bound = script.outline.bindings.get(value.id, ()) if isinstance(value, ast.Name) else ()
    if len(bound) == 1 and bound[0].index is None and bound[0].function is script.outline.module:
        value = bound[0].value
    return constant(value)


def _stored(call: ast.Call, action: object) -> object:
    """The value that an option without an argument stores, True or False; ... for any other action."""
    if action == "store_const" and isinstance(value := constant(argument(call, None, "const")), bool):
        return value
    return {"store_true": True, "store_false": False}.get(str(action), ...)


_DATACLASS = """\
from dataclasses import dataclass
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

@dataclass
class Options:
    name: str = "gpt2"
    torch_dtype: str = "bfloat16"

options, training = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained(options.name{dtype})
Trainer(model, args=training, train_dataset=data).train()
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


class UnusedPrecisionOption(ScriptRule):
    """A precision option is declared and never read."""

    code = "HS139"
    name = "precision-option-unused"
    severity = "warning"
    reason = (
        "The option is parsed and the script never asks for its value, so the run has the precision that the code fixes: with `--amp` "
        "unread and autocast always on, a run without `--amp`, meant as the float32 baseline, is in mixed precision too."
    )
    bad = (_TRAINED.format(flag=""), _DATACLASS.format(dtype=""), _TRAINER.format(flag=""))
    good = (
        _TRAINED.format(flag=", enabled=args.amp"),
        _TRAINED.format(flag="") + "evaluate(model, args)\n",
        _TRAINED.format(flag="") + "options = vars(args)\nuse(options['amp'])\n",
        _DATACLASS.format(dtype=", dtype=options.torch_dtype"),
        _TRAINER.format(flag=", enabled=self.use_amp"),
    )
    references = (f"{_ARGPARSE}#the-namespace-object",)
    words = ("HfArgumentParser",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Options of a script that has autocast or a scaler, if its namespace goes to no other file; fields of its dataclasses."""
        yield from self._fields(script)
        yield from self._stored(script)
        if not (script.autocasts or script.scalers or "apex.amp.initialize" in script.outline.library_calls):
            return
        options = Options(script)
        named = ((call, flag, name) for call, flag, name in options.declared)
        precise = [o for o in named if _PRECISION.search(o[2].lower()) or _SCALE.search(o[2].lower())]
        if not precise or not stays_here(options):
            return
        full = script.outline.names.full  # `torch.amp` reads no option
        read = {n.attr for n in options.nodes if isinstance(n, ast.Attribute) and not full(n)}
        read |= {n.value for n in options.nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        for call, flag, name in precise:
            if name not in read and argument(call, None, "dest") is None:
                yield self.finding(
                    script.where(call),
                    f"`{flag}` is never read: the run is the same with and without it",
                    instead=f"pass args.{name} on, or remove the option",
                )

    def _stored(self, script: Script) -> Iterator[Finding]:
        """Flags that a class stores and never reads, next to an autocast region or a scaler of its own that is always on."""
        switches = [(s.node, s.function, s.enabled) for s in script.scalers]
        if not switches:
            return
        outline, read = script.outline, _read_names(all_nodes(script.tree))
        for key, bindings in outline.bindings.items():
            name = key.removeprefix("self.")
            if name == key or name in read or not _STORED.search(name) or len(bindings) != 1:
                continue
            binding = bindings[0]
            function = binding.function
            is_passed = isinstance(binding.value, ast.Name) and binding.value.id in function.params
            own = [enabled for _, scope, enabled in switches if scope.cls == function.cls]
            uses = [n for n in ast.walk(function.node) if isinstance(n, ast.Name) and n.id == name]
            if not is_passed or outline.bases.get(function.cls) or not own or set(own) != {"yes"} or len(uses) != 1:
                continue
            yield self.finding(
                script.where(binding.node),
                f"`{key}` is stored and never read in this file: the scaler is always enabled",
                instead=f"GradScaler(..., enabled={key}), and the same for autocast, or remove the parameter",
            )

    def _fields(self, script: Script) -> Iterator[Finding]:
        """The fields for a dtype of dataclasses that HfArgumentParser fills, which nothing reads."""
        if "HfArgumentParser" not in script.source.text:
            return
        nodes = all_nodes(script.tree)
        read = _read_names(nodes)
        for field in dataclass_fields(nodes):
            name = field.target.id if isinstance(field.target, ast.Name) else ""
            if re.fullmatch(r"(torch_|model_|compute_)?dtype", name) and name not in read:
                yield self.finding(
                    script.where(field),
                    f"the option `--{name}` is never read: the run is the same with and without it",
                    instead=f"pass {name} to from_pretrained, or remove the option",
                )


def _read_names(nodes: Collection[ast.AST]) -> set[str]:
    """The attributes that are read, and every string: `getattr(args, "amp")`."""
    names = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    return names | {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


_FLAG = re.compile(r"(^|_)(fp16|bf16|amp|use_amp|half|tf32|fp8|mixed_precision|autocast)(_|$)|dtype|^scaler$|^grad_scaler$", re.IGNORECASE)  # fmt: skip


class FlagIsTuple(ScriptRule):
    """A trailing comma makes a precision flag a tuple, which is always true."""

    code = "HS138"
    name = "flag-is-tuple"
    severity = "error"
    reason = (
        "`bf16 = is_supported(),` assigns a tuple with one element, and a tuple that is not empty is true whatever it contains: "
        "`(False,)` switches the format on. On a GPU without bf16 the run asks for fp16 and bf16 at once, or for a format it does not "
        "have. A dtype or a scaler in a tuple raises an error where it is used. The comma is what is left of an argument list."
    )
    bad = (
        "import torch\nfrom transformers import TrainingArguments\n\nbf16 = torch.cuda.is_bf16_supported(including_emulation=False),\n"
        "args = TrainingArguments('out', bf16=bf16)\n",
        "from dataclasses import dataclass, field\n\n@dataclass\nclass Options:\n    fp16: bool = field(default=False),\n",
    )
    good = (
        "import torch\nfrom transformers import TrainingArguments\n\nbf16 = torch.cuda.is_bf16_supported(including_emulation=False)\n"
        "args = TrainingArguments('out', bf16=bf16)\n",
        "dtypes = (torch.float16,)\nimport torch\n",
    )
    references = ("https://docs.python.org/3/reference/expressions.html#expression-lists",)
    words = ("fp16: bool", "bf16: bool")

    def check(self, script: Script) -> Iterator[Finding]:
        """Assignments of one value and a comma, without parentheses, to the name of a flag."""
        for node in all_statements(script.tree):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Tuple):
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names = chain(target)
            value = node.value
            if len(value.elts) != 1 or not names or not _FLAG.search(names[-1]) or names[-1].endswith("s"):
                continue
            if (value.lineno, value.col_offset) != (value.elts[0].lineno, value.elts[0].col_offset):
                continue  # written `(value,)`: a tuple is meant
            if isinstance(value.elts[0], ast.Starred):
                continue
            yield self.finding(
                script.where(node),
                f"the comma makes `{names[-1]}` a tuple with one element, which is always true",
                instead="remove the comma",
            )


# Functions that answer whether a format is available, by their full names; `is_available` counts for a precision flag only.
_QUERIES = re.compile(
    r"torch\.(?:cuda|xpu|npu|mlu|musa)\.is_bf16_supported|unsloth\.is_b(?:f|float)16_supported|"
    r"transformers\.(?:utils\.|utils\.import_utils\.)?is_torch_(?:bf16|tf32|fp16)\w*|"
    r"torch\.is_autocast_enabled|torch\.amp\.(?:autocast_mode\.)?is_autocast_available|accelerate\.utils\.is_\w+_available"
)
_EITHER = re.compile(rf"{_QUERIES.pattern}|torch\.(?:cuda|xpu|mps|backends\.mps)\.is_available")
_NAMED = re.compile(
    r"\b(?:is_(?:bf|bfloat|fp)16_supported|is_torch_(?:bf16|tf32|fp16)\w*|is_autocast_(?:enabled|available)|"
    r"is_(?:bf16|fp16|fp8)_available|(?:cuda|xpu|mps)\.is_available)\b(?!\s*\()"
)
# The same without what stands before it: the regex engine searches for the literal prefix first, ten times as fast.
_ASKED = re.compile(
    r"is_(?:(?:bf|bfloat|fp)16_supported|torch_(?:bf16|tf32|fp16)\w*|autocast_(?:enabled|available)|"
    r"(?:bf16|fp16|fp8)_available|available)\b(?!\s*\()"
)
_SWITCH = re.compile(r"(^|_)(fp16|bf16|tf32|fp8|amp|half|enabled|mixed_precision|float16|bfloat16)(_|$)")


class QueryNotCalled(ScriptRule):
    """A function that reports whether a format is supported is used as a value and not called."""

    code = "HS269"
    name = "precision-query-not-called"
    severity = "error"
    reason = (
        "`torch.cuda.is_bf16_supported` without parentheses is the function itself, which is always true: the choice between bf16 and "
        "fp16 picks bf16 on every GPU, and `not torch.cuda.is_bf16_supported` is always False. On a GPU without bf16 the run fails or "
        "emulates the format at a fraction of its speed."
    )
    bad = (
        "import torch\n\ndtype = torch.bfloat16 if torch.cuda.is_bf16_supported else torch.float16\n",
        "import torch\nfrom transformers import TrainingArguments\n\n"
        "args = TrainingArguments('out', fp16=not torch.cuda.is_bf16_supported, bf16=torch.cuda.is_bf16_supported)\n",
        "import torch\n\nscaler = torch.amp.GradScaler('cuda', enabled=torch.cuda.is_available)\nprint(scaler)\n",
    )
    good = (
        "import torch\n\ndtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16\n",
        "import torch\n\nsupported = torch.cuda.is_bf16_supported\ndtype = torch.bfloat16 if supported() else torch.float16\n",
        "import torch\n\nif hasattr(torch.cuda, 'is_bf16_supported') and torch.cuda.is_bf16_supported(including_emulation=False):\n    print('bf16')\n",
    )
    references = ("https://docs.pytorch.org/docs/stable/generated/torch.cuda.is_bf16_supported.html",)
    words = ("is_bf16_supported", "is_bfloat16_supported", "bf16_available")

    def check(self, script: Script) -> Iterator[Finding]:
        """Queries as a condition, as an operand of `and`, `or` and `not`, or as the value of a precision flag."""
        if not _names_query(script.source.text):
            return
        full = script.outline.names.full
        assigned = {text_of(t) for n in all_nodes(script.tree) if isinstance(n, ast.Assign) for t in n.targets}
        for node, flag in _conditions(script.tree):
            name = full(node) if isinstance(node, ast.Attribute | ast.Name) else None
            if text_of(node) in assigned:
                continue  # a test replaces the function
            if _asks_accelerator(node) or (name and (_QUERIES if not flag else _EITHER).fullmatch(name)):
                yield self.finding(
                    script.where(node),
                    f"`{text_of(node)}` is a function, which is always true; it is not called",
                    instead=f"{text_of(node)}()",
                )


def _names_query(text: str) -> bool:
    """Whether a text names a query that it does not call there, imports aside: most files need no closer look."""
    if not _ASKED.search(text):
        return False
    for match in _NAMED.finditer(text):
        before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()].lstrip()
        is_imported = not before and text[match.end() : match.end() + 1] in {",", "\n", ""}
        if not is_imported and not before.startswith(("from ", "import ", "@")):
            return True
    return False


def _asks_accelerator(node: ast.expr) -> bool:
    """Whether an expression is `get_accelerator().is_bf16_supported` of DeepSpeed."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Call):
        return False
    asks = node.attr in {"is_bf16_supported", "is_fp16_supported"}
    return asks and chain(node.value.func)[-1:] == ("get_accelerator",)


def _conditions(tree: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Each expression of which only the truth counts, and whether it is the value of a precision flag."""
    for node in all_nodes(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            yield from ((part, False) for part in _operands(node.test))
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg and _SWITCH.search(keyword.arg.lower()):
                    yield from ((part, True) for part in _operands(keyword.value))
        elif isinstance(node, ast.Assign) and (names := chain(node.targets[0])) and _SWITCH.search(names[-1].lower()):
            yield from ((part, True) for part in _operands(node.value) if part is not node.value)


def _operands(node: ast.expr) -> Iterator[ast.expr]:
    """The operands of `and`, `or` and `not`, or the expression itself."""
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _operands(value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from _operands(node.operand)
    else:
        yield node


RULES: tuple[type[Rule], ...] = (BooleanOption, FlagIsTuple, QueryNotCalled, UnusedPrecisionOption)
