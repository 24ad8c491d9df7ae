"""Settings of a file that trains which nothing in it reads: fields, class attributes and constants.

Another file may read some of them. This one is where settings are used if it reads most of the others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from halfstep.check.regex import regex
from halfstep.check.script.syntax.children import all_nodes, all_statements
from halfstep.check.script.syntax.outline import Outline
from halfstep.check.script.syntax.unread import last_of, read_names

__all__ = ["FEW", "PRECISION_USE", "SETTINGS", "Settings", "for_this_file", "unread_settings"]

PRECISION_USE = "use it for autocast, the scaler or the arguments of the trainer"
FEW = 5  # fields; with fewer, a file may as well only create the object
SETTINGS = regex(
    r"^(cfg|conf|config|args|hparams?|hyper_?param\w*|params|settings?|opts?|options)$|(config|cfg|_settings|_args)$",
    re.IGNORECASE,
)
_STEPS = regex(r"clip_|accum|(train|optim\w*)_(step|batch|epoch|one|loop)|^(train|fit)$", re.IGNORECASE)
_WHOLE = {"asdict", "astuple", "vars", "__dict__", "model_dump"}
_MODELS = {"BaseModel", "BaseSettings", "NamedTuple"}  # of pydantic and typing: they declare fields as a dataclass does
_FORMAT = regex(r"((torch|amp|train|training|compute|mixed|autocast)_)?(dtype|precision)")
_NAMED = regex(r"(b?fp?|b?float)(16|32)|half|no|none|(16|32)(-mixed|-true)?|b?f(p?)16-mixed")
_USES = {
    "print",
    "pprint",
    "str",
    "repr",
    "info",
    "debug",
    "log",
    "isinstance",
    "save",
    "deepcopy",
    "replace",
    "len",
    "cli",
    "store",
    "structured",
    "HfArgumentParser",
}  # what shows settings or fills them
# The limit of the gradient norm, and the number of micro-batches of a step.
_CLIP = regex(
    r"(use_|enable_)?((max_)?grad(ient)?s?_?(norm_)?(clip|clipping|max)(_(max_)?(norm|val|value|threshold))?"
    r"|(clip|max)_?grad(ient)?s?(_(norm|val|value))?|clip_norm)"
)
_ACCUMULATION = regex(
    r"(num_|n_)?(grad(ient)?s?_?acc(um|umulation|umulate)?(_(steps?|iters?|batches))?"
    r"|accum(ulation|ulate)?_(steps?|iters?|grad(s|_batches)?))"
)
# What a GradScaler, or a scale of the loss, is set up with; a bare scale may be that of an image.
_LOSS_SCALE = regex(
    r"((init(ial)?|static|dynamic|min|max|fp16)_)?(loss|grad)_scal(e|ing)(_(value|window|factor|init))?|init(ial)?_scale"
    r"|scaler?_(growth|backoff)_(factor|interval)|growth_(factor|interval)|backoff_factor"
)
_LIMIT = regex(r"(min|max)_scale")

Unread = Iterator[tuple[ast.AST, str, str]]


@dataclass(frozen=True)
class Settings:
    """The names of settings that decide the precision, and whether the file steps an optimizer, so that it clips and accumulates."""

    field: re.Pattern[str]
    flag: re.Pattern[str]
    has_steps: bool
    has_formats: bool = (
        False  # whether it computes in 16 bits itself, so that a format that is not read is not the one of the run
    )
    has_scaler: bool = False  # whether it creates a scaler, so that settings of the scale are for it

    def use_for_scale(self, name: str, others: Collection[str]) -> str:
        """What should use a setting of the loss scale among those of a scaler; empty for any other."""
        name, kin = name.lower(), [other for other in others if other != name and _LOSS_SCALE.fullmatch(other.lower())]
        is_scale = _LOSS_SCALE.fullmatch(name) or _LIMIT.fullmatch(name)
        return "pass it to GradScaler, or follow it after update()" if self.has_scaler and is_scale and kin else ""

    def use_of_field(self, name: str, value: ast.expr | None) -> str:
        """What should use a field or a key of this name; empty for one of something else."""
        if self.field.fullmatch(name.lower()) or (self.has_formats and _is_format(name, value)):
            return PRECISION_USE
        return self.use_in_step(name, value)

    def use_in_step(self, name: str, value: ast.expr | None) -> str:
        """What should use a limit of the gradients, or a number of micro-batches; empty where its value asks for neither."""
        number = value.value if isinstance(value, ast.Constant) else None
        return self.use_of_number(name) if isinstance(number, bool | int | float) and number else ""

    def use_of_number(self, name: str) -> str:
        """The same of an option or a parameter, which gets its value from elsewhere."""
        if self.has_steps and _CLIP.fullmatch(name.lower()):
            return "use it for clip_grad_norm_"
        is_accumulation = self.has_steps and _ACCUMULATION.fullmatch(name.lower())
        return "step the optimizer once in this many micro-batches" if is_accumulation else ""


def unread_settings(outline: Outline, tree: ast.Module, text: str, settings: Settings) -> Unread:
    """The settings that are never read, each with what is wrong with it and what should use it."""
    nodes = all_nodes(tree)
    named = [n for n in nodes if isinstance(n, ast.ClassDef | ast.Assign)]
    if named:
        settings = for_this_file(outline, nodes, settings)
        yield from _fields(outline, tree, text, settings, read_names(nodes))
    yield from _constants(outline, tree, text, settings)


def for_this_file(outline: Outline, nodes: Collection[ast.AST], settings: Settings) -> Settings:
    """What settings decide here, where functions of other files get them as a whole and may clip, step or compute by them."""
    if settings.has_steps and _passes_on(outline, _STEPS):
        settings = replace(settings, has_steps=False)
    if settings.has_formats and _shares(outline, nodes):
        settings = replace(settings, has_formats=False)
    return settings


def _fields(outline: Outline, tree: ast.Module, text: str, settings: Settings, read: set[str]) -> Unread:
    """Fields of a dataclass, and attributes of a class of settings, `class CFG:`, in the file that reads nearly all of the others."""
    if outline.calls.keys() & _WHOLE or ".__dict__" in text or _reads_any(outline):
        return
    for node in all_statements(tree):
        bases = set(map(last_of, node.bases)) - {"object"} if isinstance(node, ast.ClassDef) else set()
        if not isinstance(node, ast.ClassDef) or not bases <= _MODELS:
            continue
        is_dataclass = bool(bases) or "dataclass" in map(last_of, node.decorator_list)
        body = _constructed(node) or node.body
        if not is_dataclass and not (SETTINGS.search(node.name) and all(map(_is_setting, body))):
            continue
        fields = {name: s for s in body for name in _assigned(s)}
        num_read = len(fields.keys() & read)
        if num_read < max(FEW, len(fields) * 2 / 3):
            continue
        for name, statement in fields.items():
            # By the text as well: the tree has the default of a field in the place of `config.bf16`.
            written = len(re.findall(rf"[.\"']{name}\b", text)) - (body is not node.body)
            use = settings.use_of_field(name, getattr(statement, "value", None))
            use = use or settings.use_for_scale(name, fields.keys() & read)
            if name not in read and not written and use:
                what = f"`{name}` is never read in this file, which reads {num_read} other fields of `{node.name}`"
                yield statement, what, use


def _is_format(name: str, value: ast.expr | None) -> bool:
    """Whether a field names a number format: `dtype: str = "bfloat16"`, `precision: str = Field("fp16")`."""
    if isinstance(value, ast.Call):
        value = next((v for v in (*value.args[:1], *(k.value for k in value.keywords if k.arg == "default"))), None)
    text = value.value if isinstance(value, ast.Constant) else None
    return bool(_FORMAT.fullmatch(name.lower()) and isinstance(text, str) and _NAMED.fullmatch(text.lower()))


def _passes_on(outline: Outline, names: re.Pattern[str]) -> bool:
    """Whether a function of another file, one that clips or steps, gets the settings as a whole: `clip_gradients(model, config)`."""
    for name, sites in outline.calls.items():
        for call, function in sites if names.search(name) else ():
            values = [*call.args, *(k.value for k in call.keywords)]
            is_passed = any(isinstance(v, ast.Name | ast.Attribute) and SETTINGS.search(last_of(v)) for v in values)
            if is_passed and outline.call_target(call, function) is None:
                return True
    return False


def _shares(outline: Outline, nodes: Collection[ast.AST]) -> bool:
    """Whether a function or class of another file gets the settings as a whole: `Transformer(config)`."""
    calls = [n for n in nodes if isinstance(n, ast.Call)]
    # `scaler.step(opt)` and `clip_grad_norm_(params, 1.0)` are about the optimizer and its weights.
    others = {"params"} | {
        last_of(c.func.value) for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "zero_grad"
    }
    own = {function.name for function in outline.functions} | outline.classes.keys() | _USES
    for call in calls:
        values = [] if last_of(call.func) in own else [*call.args, *(k.value for k in call.keywords)]
        named = {last_of(v) for v in values if isinstance(v, ast.Name | ast.Attribute)} - others
        if any(map(SETTINGS.search, named)):
            return True
    return False


def _reads_any(outline: Outline) -> bool:
    """Whether `getattr(config, name)` may read every field; those of modules, `getattr(torch, config.dtype)`, read none."""
    for call, _ in outline.calls.get("getattr", ()):
        is_computed = len(call.args) > 1 and not isinstance(call.args[1], ast.Constant)
        if is_computed and not outline.names.full(call.args[0]):
            return True
    return False


def _is_setting(statement: ast.stmt) -> bool:
    """Whether a statement in a class is a constant, or a docstring; methods may read what the class has."""
    return isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Pass)


def _constructed(node: ast.ClassDef) -> list[ast.stmt]:
    """The assignments of a class that is nothing but a constructor without parameters, `self.amp = False`; empty for any other."""
    methods = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    first = methods[0] if len(methods) == 1 else None
    if not isinstance(first, ast.FunctionDef) or first.name != "__init__" or len(_parameters(first)) != 1:
        return []
    return first.body


def _assigned(statement: ast.stmt) -> list[str]:
    """The names that a statement gives a value: of variables, and of attributes of `self`."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    own = [t.attr for t in targets if isinstance(t, ast.Attribute) and getattr(t.value, "id", "") == "self"]
    return [*(t.id for t in targets if isinstance(t, ast.Name)), *own]


def _constants(outline: Outline, tree: ast.Module, text: str, settings: Settings) -> Unread:
    """Switches and numbers at the top of a file that trains when it runs: `USE_AMP = True`, `MAX_GRAD_NORM = 1.0`."""
    if "backward" not in outline.calls or not re.search(r"__main__|^(for|with|while) |^main\(", text, re.MULTILINE):
        return
    for statement in tree.body:
        value = statement.value if isinstance(statement, ast.Assign) else None
        if not isinstance(value, ast.Constant):
            continue
        for name in _assigned(statement):
            is_switch = isinstance(value.value, bool) and settings.flag.fullmatch(name.lower())
            # `MAX_NORM` is the limit of the gradients in a script; a field or an option may be that of an embedding.
            step_name = "max_grad_norm" if name.lower() == "max_norm" else name
            use = PRECISION_USE if is_switch else settings.use_in_step(step_name, value)
            if use and len(re.findall(rf"\b{name}\b", text)) == 1:
                yield statement, f"`{name}` is assigned and never read", use


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
