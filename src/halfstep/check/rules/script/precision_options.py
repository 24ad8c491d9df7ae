"""HS133, HS138, HS603: precision options of the command line and flags that do not do what they say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.order import is_amp
from halfstep.check.script.idle.environment import environment_flags
from halfstep.check.script.objects.command_line import Options
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes, all_statements
from halfstep.check.script.syntax.names import chain, key_of

__all__ = ["PRECISION_OPTION", "RULES"]

PRECISION_OPTION = regex(r"(^|_)(use_?|enable_?|with_?|no_?)?(amp|fp16|bf16|fp32|tf32|half(?!_(?!prec))|float16|bfloat16|mixed_?precision|mixed(?!_(?!prec|train|mode|fp|bf|amp))|autocast|(4|8|16)_?bits?|fp8)(_|$)")  # fmt: skip
_HEAD = "import argparse\nparser = argparse.ArgumentParser()\n"
_NAMED = (
    f"import torch\n{_HEAD}parser.add_argument('--mixed_precision', default='no', choices=['no', 'bf16'])\nargs = parser.parse_args()\n"
    "with torch.autocast('cuda', dtype=torch.bfloat16, enabled={test}):\n    loss = model(x).mean()\n"
)
_FORMAT_OPTION = regex(r"^((torch|model|compute|train|training|amp|mixed)_)?(precision|dtype)$")
_QUOTED = ("precision'", 'precision"', "dtype'", 'dtype"')  # the ends of such names in `cfg.get("dtype", "fp16")`
_FORMATS = {"fp16", "float16", "half", "bf16", "bfloat16"}
_FULL = {"no", "none", "off", "fp32", "float32", "32", "full"}
_BOOL = regex(r"bool|lambda (\w+): bool\(\1\)")
_TRAINS = regex(r"backward\(|optimizer|Trainer|TrainingArguments|\btrain\w*\(|\.fit\(")
_QUERIES = {"torch.cuda.is_available", "torch.cuda.is_bf16_supported"}
_ARGPARSE = "https://docs.python.org/3/library/argparse.html"


class BooleanOption(ScriptRule):
    """A precision option of the command line or the environment cannot be switched off."""

    code = "HS133"
    name = "precision-option-bool"
    severity = "warning"
    reason = (
        "argparse calls the type with the text of the option, and `bool` of any non-empty text is True: `--fp16 False` and `--fp16 0` "
        "both turn fp16 on, silently. `action='store_true'` with `default=True` is True with and without the option, and so is one with "
        "`default=torch.cuda.is_available()` on a GPU. A run that is "
        "meant to be in float32 is not, and `--fp16` next to a bf16 that is always on requests both. An option that names a format "
        "cannot be tested like a flag either: 'no' and 'float32' are true. The same is true of a variable of the environment: `USE_AMP=0` is a "
        "text that is not empty."
    )
    bad = (
        f"{_HEAD}parser.add_argument('--fp16', type=bool, default=False)\n",
        f"{_HEAD}parser.add_argument('--bf16', action='store_true', default=True)\n",
        "import os\nimport torch\nscaler = torch.amp.GradScaler('cuda', enabled=bool(os.getenv('USE_AMP', False)))\n",
        f"USE_BF16 = True\n{_HEAD}parser.add_argument('--bf16', action='store_true', default=USE_BF16)\n",
        _NAMED.format(test="args.mixed_precision"),
    )
    good = (
        f"{_HEAD}parser.add_argument('--fp16', action='store_true')\n",
        f"{_HEAD}parser.add_argument('--fp16', action=argparse.BooleanOptionalAction)\n",
        f"{_HEAD}parser.add_argument('--shuffle', type=bool, default=False)\n",
        "import os\nimport torch\nscaler = torch.amp.GradScaler('cuda', enabled=os.getenv('USE_AMP', '0') == '1')\n",
        _NAMED.format(test="args.mixed_precision != 'no'"),
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
    lines = ("type=bool", "default=True", "store_true", "store_false", "set_defaults")

    def check(self, script: Script) -> Iterator[Finding]:
        """Options named after a precision whose type is bool, or which store their default."""
        options = Options(script)
        for call, flag, name in options.declared:
            if not PRECISION_OPTION.search(name.lower()):
                continue
            kind = argument(call, None, "type")
            default = _default(script, call)
            if kind is not None and _BOOL.fullmatch(text_of(kind)):
                yield self.finding(
                    script.where(call),
                    f"`{flag} False` is True: bool of a non-empty string",
                    instead="action=argparse.BooleanOptionalAction, or action='store_true'",
                )
            elif (stored := _only_value(script, options, call, name)) is not ...:
                serious = _TRAINS.search(script.source.text) and "tf32" not in name.lower()
                yield self.finding(
                    script.where(call),
                    f"`{flag}` stores its own default: the value is {stored} with and without the option",
                    instead="action=argparse.BooleanOptionalAction, or no default",
                    severity=None if serious else "advice",
                )
            elif _is_on_with_gpu(script, options, call, name):
                yield self.finding(
                    script.where(call),
                    f"`{flag}` stores what its default is on a GPU: the value is True there with and without the option",
                    instead="action=argparse.BooleanOptionalAction, with the same default",
                )
            elif isinstance(default, bool) and _is_text(script, call, name):
                yield self.finding(
                    script.where(call),
                    f"`{flag} False` is the text 'False', which is true: the option has no type",
                    instead="action=argparse.BooleanOptionalAction, or action='store_true'",
                )
        yield from self._tested_names(script, options)
        for call, name in environment_flags(script, PRECISION_OPTION):
            yield self.finding(
                script.where(call),
                f"`{name}=0` and `{name}=False` are true: a variable of the environment is text, and every text but the empty one is true",
                instead=f"os.getenv({name!r}, '0') == '1'",
            )
        for call, name in _parsed_by_hand(script):
            yield self.finding(
                script.where(call),
                f"`{name}` is True with and without the option: the default is True, and the options that are read set nothing else",
                instead=f"read a `--no-{name}` as well, or let argparse do it with BooleanOptionalAction",
            )

    def _tested_names(self, script: Script, options: Options) -> Iterator[Finding]:
        """Options that name a format and are tested like flags: "no" and "float32" are true as well."""
        # Walking every node is slow, and most files neither declare such an option nor read one by its name.
        is_declared = any(_FORMAT_OPTION.search(name.lower()) for _, _, name in options.declared)
        text = script.source.text.lower()
        if not is_declared and not any(end in text for end in _QUOTED):
            return
        for test, parts in _truth_tests(script):
            name, default = _setting(test)
            if not _FORMAT_OPTION.search(name.lower()):  # nearly all tests; walking what depends on each is slow
                continue
            decided = [n for part in parts for n in ast.walk(part)]
            is_changed = any(key.rpartition(".")[2] == name for key in script.outline.bindings if "." in key)
            # `if args.dtype: model.to(getattr(torch, args.dtype))` asks whether the option is set.
            is_read = any(getattr(n, "attr", None) == name or constant(n) == name for n in decided)
            if is_changed or is_read:
                continue
            call = next((c for c, _, n in options.declared if n == name and isinstance(test, ast.Attribute)), None)
            if call is not None and (full := _full_precision(call)):
                yield self.finding(
                    script.where(test),
                    f"`{text_of(test)}` is the name of a format, and {full!r} is true like every other",
                    instead=f"{text_of(test)} != {full!r}",
                )
            elif default in _FORMATS and (cast := next(filter(_casts_down, decided), None)) is not None:
                yield self.finding(
                    script.where(test),
                    f"`{text_of(test)}` is the name of a format, and every name is true: `{text_of(cast)}` ({script.at(cast)}) runs for all of them",
                    instead=f"{text_of(test)} == {default!r}",
                )


def _full_precision(option: ast.Call) -> str:
    """The choice of an option that stands for float32, if its default is a choice as well; "" if there is none."""
    choices = [constant(c) for c in getattr(argument(option, None, "choices"), "elts", ())]
    is_named = constant(argument(option, None, "default")) in choices and argument(option, None, "type") is None
    return next((c for c in choices if isinstance(c, str) and c.lower() in _FULL), "") if is_named else ""


def _truth_tests(script: Script) -> Iterator[tuple[ast.expr, Sequence[ast.AST]]]:
    """What an `if`, a conditional expression or `enabled=` asks to be true, with the parts of the script that depend on it."""
    for node in all_nodes(script.tree):
        if isinstance(node, (ast.If, ast.IfExp)):
            yield node.test, node.body if isinstance(node, ast.If) else [node.body]
        elif isinstance(node, ast.Call) and key_of(node.func).rpartition(".")[2] in {"autocast", "GradScaler"}:
            others = [k.value for k in node.keywords if k.arg != "enabled"]
            yield from ((k.value, others) for k in node.keywords if k.arg == "enabled")


def _setting(test: ast.expr) -> tuple[str, object]:
    """The name of the setting that an expression reads, `args.dtype` or `cfg.get("dtype", "fp16")`, and its default there."""
    if isinstance(test, ast.Attribute):
        return test.attr, None
    last = key_of(test.func).rpartition(".")[2] if isinstance(test, ast.Call) else ""
    if not isinstance(test, ast.Call) or (last, len(test.args)) not in {("get", 2), ("getattr", 3)}:
        return "", None
    return str(constant(test.args[-2])), constant(test.args[-1])


def _casts_down(node: ast.AST) -> bool:
    """Whether a node casts something to a 16-bit format: `model.half()`, `model.to(torch.bfloat16)`."""
    name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
    dtypes = (
        {text_of(a) for a in (*node.args, *(k.value for k in node.keywords))} if isinstance(node, ast.Call) else set()
    )
    return (name in {"half", "bfloat16"} and not dtypes) or (
        name == "to" and bool(dtypes & {"torch.float16", "torch.half", "torch.bfloat16"})
    )


def _is_text(script: Script, call: ast.Call, name: str) -> bool:
    """Whether an option has no type, so that its value is text, and the script only asks whether it is true."""
    if {k.arg for k in call.keywords} & {"type", "action", "nargs", "const", "choices", "dest", None}:
        return False
    text = re.sub(r"#.*", "", script.source.text)
    # The name, not of `torch.amp`, with what is around it: `str2bool(args.amp)`, `args.amp == "True"`, `args.amp.lower()`
    # and `args.amp = ...` make another value of the text.
    around = rf"(\w+\(\s*)?\b(?!torch\b)[\w.]*\w\.{name}\b(\s*\)|\s*[=!]=|\s+(?:not\s+)?in\b|\s+is\b|\s*\.|\s*=[^=])?"
    uses = re.findall(around, text)
    changed = [before for before, after in uses if after and (before or after.strip() != ")")]
    return bool(uses) and not changed and f"'{name}'" not in text and "vars(" not in text


def _parsed_by_hand(script: Script) -> Iterator[tuple[ast.Call, str]]:
    """The flags of a dictionary filled from sys.argv that is only ever set to True: `options.get("amp", True)`."""
    sites = script.outline.calls.get("get", ()) if "sys.argv" in script.source.text else ()
    for call, function in sites:
        name = constant(call.args[0]) if len(call.args) == 2 else None
        owner = key_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if not isinstance(name, str) or not PRECISION_OPTION.search(name.lower()) or constant(call.args[1]) is not True:
            continue
        created = [b.value for b in script.outline.lookup(owner, function)] if owner.isidentifier() else []
        is_own = bool(created) and all(isinstance(v, ast.Dict) and not v.keys for v in created)
        stored = [b.value for b in script.outline.bindings.get(f"{owner}[{name!r}]", ())]
        others = [n for n in ast.walk(script.tree) if isinstance(n, ast.Name) and n.id == owner]
        # Passed on, updated or filled under a variable name, it may receive anything.
        is_known = all(_reads_or_stores(script.outline.parents.get(n)) for n in others if isinstance(n.ctx, ast.Load))
        if is_own and is_known and stored and all(constant(v) is True for v in stored if v is not None):
            yield call, name


def _reads_or_stores(parent: ast.AST | None) -> bool:
    if isinstance(parent, ast.Subscript):
        return isinstance(constant(parent.slice), str)
    return isinstance(parent, ast.Attribute) and parent.attr in {"get", "items", "keys"}


def _default(script: Script, call: ast.Call) -> object:
    """The default of an option, also written as a constant of the file: `default=USE_BF16`."""
    return constant(_default_node(script, call))


def _default_node(script: Script, call: ast.Call) -> ast.expr | None:
    value = argument(call, None, "default")
    bound = script.outline.bindings.get(value.id, ()) if isinstance(value, ast.Name) else ()
    if len(bound) == 1 and bound[0].index is None and bound[0].function is script.outline.module:
        value = bound[0].value
    return value


def _is_on_with_gpu(script: Script, options: Options, call: ast.Call, name: str) -> bool:
    """Whether the default of an option that stores True asks for a GPU, and nothing else can switch the option off.

    `default=torch.cuda.is_available()`, also with `torch.cuda.is_bf16_supported()`: training runs where this is true.
    """
    value = _default_node(script, call)
    if isinstance(value, ast.IfExp) and (constant(value.body), constant(value.orelse)) == (True, False):
        value = value.test
    parts = value.values if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.And) else [value]
    if not all(isinstance(part, ast.Call) and script.outline.names.full(part.func) in _QUERIES for part in parts):
        return False
    return _stored(call) is True and options.set_default(name) is None and not options.is_switched([call], name)


def _only_value(script: Script, options: Options, call: ast.Call, name: str) -> object:
    """The default of an option that every flag for it stores as well; ... if something can change it, or at the second flag."""
    same = [c for c, _, n in options.declared if n == name]
    stored = {_stored(c) for c in same}
    by_parser = options.set_default(name)
    # A default of the parser replaces those of its options.
    default = by_parser[1] if by_parser is not None else _default(script, call)
    if call is not same[0] or stored == {...} or not all(value is default for value in stored):
        return ...
    if by_parser is None and any(_default(script, c) is not default for c in same):
        return ...  # the default of the first one counts, unless the options are of several parsers
    return ... if options.is_switched(same, name, by_parser[0] if by_parser is not None else None) else default


def _stored(call: ast.Call) -> object:
    """The value that an option without an argument stores, True or False; ... for any other action."""
    action = constant(argument(call, None, "action"))
    if action == "store_const" and isinstance(value := constant(argument(call, None, "const")), bool):
        return value
    return {"store_true": True, "store_false": False}.get(str(action), ...)


_FLAG = regex(r"(^|_)(fp16|bf16|amp|use_amp|half|tf32|fp8|mixed_precision|autocast)(_|$)|dtype|^scaler$|^grad_scaler$", re.IGNORECASE)  # fmt: skip


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
        "import torch\n\nreduced = dtype is not torch.float32,\nwith torch.autocast('cuda', dtype=dtype, enabled=bool(reduced)):\n"
        "    loss = model(x)\n",
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
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(node.value, ast.Tuple):
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names = chain(target)
            value = node.value
            if len(value.elts) != 1 or not names or names[-1].endswith("s"):
                continue
            tested = text_of(value.elts[0]) if isinstance(value.elts[0], (ast.Compare, ast.BoolOp)) else ""
            if not is_amp((tested.replace("float32", "float16"), True)) and not _FLAG.search(names[-1]):
                continue
            is_meant = (value.lineno, value.col_offset) != (value.elts[0].lineno, value.elts[0].col_offset)
            if is_meant or isinstance(value.elts[0], ast.Starred):
                continue  # written `(value,)`
            yield self.finding(
                script.where(node),
                f"the comma makes `{names[-1]}` a tuple with one element, which is always true",
                instead="remove the comma",
            )


_PLAIN_FLAG = regex(
    r"(use_?|enable_?|with_?|allow_?|do_?)?(torch_|native_|cuda_)?(amp|fp16|bf16|half|float16|bfloat16|tf32|fp8|autocast|mixed_?precision|half_?precision)"
    r"(_training)?"
)


class InvertedOption(ScriptRule):
    """An option that is named after a precision feature switches it off."""

    code = "HS603"
    name = "inverted-precision-option"
    severity = "warning"
    reason = (
        "argparse gives an option with `action='store_false'` the default True: mixed precision is on without the option, and a run started "
        "with `--use_amp` is in float32. Nothing says so: the loss looks right, and the run is slower and takes more memory than expected."
    )
    bad = (f"{_HEAD}parser.add_argument('--use_amp', action='store_false', help='use mixed precision')\n",)
    good = (
        f"{_HEAD}parser.add_argument('--no_amp', dest='use_amp', action='store_false')\n",
        f"{_HEAD}parser.add_argument('--use_amp', action=argparse.BooleanOptionalAction, default=True)\n",
        f"{_HEAD}parser.add_argument('--amp', dest='full_precision', action='store_false')\n",
        f"{_HEAD}parser.add_argument('--amp', dest='fp32_only', action='store_false')\n",
    )
    references = (f"{_ARGPARSE}#action",)
    words = BooleanOption.words
    lines = ("store_false",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Options that store False under the name of a feature."""
        for call, flag, name in Options(script).declared:
            flags = [str(constant(a)).lstrip("-").replace("-", "_").lower() for a in call.args]
            if not all(_PLAIN_FLAG.fullmatch(f) for f in (name.lower(), *flags) if len(f) > 2):
                continue
            if _stored(call) is not False or _default(script, call) is False or _is_negated(script, name):
                continue
            yield self.finding(
                script.where(call),
                f"`{flag}` switches `{name}` off: without the option it is on",
                instead=f"--no-{name.replace('_', '-')} with dest='{name}', or action=argparse.BooleanOptionalAction with default=True",
            )


def _is_negated(script: Script, name: str) -> bool:
    """Whether the script uses the opposite of an option as a value: `enabled=not args.amp`."""
    return any(
        isinstance(n, ast.UnaryOp)
        and isinstance(n.op, ast.Not)
        and isinstance(n.operand, ast.Attribute)
        and n.operand.attr == name
        and isinstance(script.outline.parents.get(n), (ast.keyword, ast.Assign, ast.Call))
        for n in all_nodes(script.tree)
    )


RULES: tuple[type[Rule], ...] = (BooleanOption, FlagIsTuple, InvertedOption)
