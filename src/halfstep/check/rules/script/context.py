"""HS136, HS145, HS148 and HS616: contexts that are not the ones a line asks for.

An autocast region that an option for bfloat16 enables computes in float16 unless its dtype is passed as well.

`with a() and b():` is valid Python and looks like a list of two contexts, but it is one expression with one value: a
context manager is truthy, so `and` evaluates to the last one and `or` to the first, and the others are discarded.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.choices import is_float32_on_cpu
from halfstep.check.script.objects.engines import engine_at, loop_class
from halfstep.check.script.objects.outputs import in_no_grad
from halfstep.check.script.objects.values import AUTOCASTS, Autocast, argument, constant, text_of
from halfstep.check.script.regions.reentered import reentered
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = ["RULES"]

_EVAL = """\
import torch
model.eval()
with {contexts}:
    out = model(x)
"""
_AUTOCAST = 'torch.autocast("cuda", dtype=torch.float16)'
# Contexts without effect until they are entered; set_grad_enabled acts immediately.
_CONTEXTS = AUTOCASTS | {
    f"{module}.{mode}" for module in ("torch", "torch.autograd") for mode in ("no_grad", "inference_mode")
}


_TRAIN = """\
import torch
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda"{dtype}, enabled=args.bf16):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
"""
_SCALED = """\
import torch
scaler = torch.amp.GradScaler("cuda", enabled=args.dtype in ['float16', 'bfloat16'])
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda"{dtype}):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
_REENTERED = """\
import torch
ctx = torch.autocast("cuda", dtype=torch.bfloat16)
def validate(x):
    with {inner}:
        return model(x)
for x, y in loader:
    with ctx:
        loss = loss_fn(model(x), y)
        log(validate(x))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# The name of an option for bfloat16, and a comparison with its name.
_BF16 = regex(r"(^|[._\[]|['\"])(use_|enable_|with_|is_)?(bf16|bfloat16)(_mixed|_amp|['\"\]]|$)", re.IGNORECASE)
_COMPARED = regex(r"^[^=<>]+ (==|in) [^=]*['\"](bf16|bfloat16|bf16-mixed|bf16_mixed)['\"]", re.IGNORECASE)
_ON_DEVICE = regex(r"[\w.]+ == ['\"](cuda|cpu)['\"]$|[\w.]+\.is_cuda$")
_UNLESS_OFF = regex(r"([\w.\[\]'\"]+) != ['\"](no|none|off|fp32|float32|32)['\"]", re.IGNORECASE)
_NAME = regex(r"\w+")
_NAMES_BF16 = {"bf16", "bfloat16", "bf16-mixed", "bf16_mixed"}
_ONLY_FLOAT16 = regex(r"\(?([\w.]+) == ['\"](?:float16|fp16)['\"]\)?")
_FLOAT16 = {"torch.float16", "torch.half"}
_SETS = {"set_autocast_gpu_dtype", "set_autocast_dtype"}


class Bf16OptionRunsFloat16(ScriptRule):
    """An option for bfloat16 enables an autocast region that computes in float16."""

    code = "HS136"
    name = "bf16-option-runs-float16"
    severity = "warning"
    reason = (
        "On CUDA autocast defaults to float16. A region without `dtype` that `--bf16` enables, or a setting that allows both formats, "
        "computes in float16 all the same: values above 65504 become inf and gradients below 6e-8 become zero, although bfloat16 was "
        "chosen to avoid that, and a scaler that is off for bfloat16 is missing."
    )
    bad = (
        _TRAIN.format(dtype=""),
        _TRAIN.format(dtype="")
        .replace("for x", 'use_amp = args.precision in ("fp16", "bf16")\nfor x')
        .replace("args.bf16", "use_amp"),
        _SCALED.format(dtype=""),
        _TRAIN.format(dtype=", dtype=torch.float16"),
    )
    good = (
        _TRAIN.format(dtype=", dtype=torch.bfloat16"),
        _TRAIN.format(dtype=", dtype=torch.bfloat16 if args.precision == 'bf16' else torch.float32"),
        _SCALED.format(dtype=", dtype=torch.float16, enabled=args.dtype == 'float16'").replace(
            "in ['float16', 'bfloat16']", "== 'float16'"
        ),
    )
    references = ("https://docs.pytorch.org/docs/stable/amp.html#torch.autocast",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Regions in float16, by default or as written, that are enabled by an option for bfloat16."""
        if not script.has("enter_autocast") or _SETS & script.outline.calls.keys():
            return
        text = script.source.text.lower()
        if not any(word in text for word in ("bf16", "bfloat16", ".mixed_precision")):
            return
        reported: set[ast.AST] = set()
        for event in script.events("enter_autocast"):
            region = event.regions[-1]
            autocast = region.autocasts[0]
            if len(region.autocasts) != 1 or autocast.node in reported or not _is_float16(autocast):
                continue
            if _is_around_prepared(script, event):
                continue
            option = _bf16_option(script, event, autocast)
            if option:
                reported.add(autocast.node)
                cause = "has no dtype, so on CUDA it " if autocast.dtype_node is None else ""
                yield self.finding(
                    script.where(autocast.node),
                    f"this region {cause}computes in float16 also when `{option}` asks for bfloat16",
                    instead="dtype=torch.bfloat16, chosen by the same option",
                )


def _is_float16(autocast: Autocast) -> bool:
    """Whether a region that may be on CUDA is written without a dtype, or with float16 itself."""
    is_written = autocast.dtype_node is None or text_of(autocast.dtype_node) in _FLOAT16
    return is_written and "float16" in autocast.dtypes and autocast.enabled != "no"


_HOOKS = {"compute_loss", "prediction_step", "training_step"}  # of a Trainer, which passes them its prepared model


def _is_around_prepared(script: Script, event: Event) -> bool:
    """Whether a region of a Trainer only calls its prepared model, whose forward has a region in the Trainer's own format.

    `generate` runs the forward of the model inside, which has none.
    """
    function, statement = event.function, script.statement(event.node)
    owner = loop_class(script, function.cls) if function.name in _HOOKS else None
    called = (n.func for n in ast.walk(statement) if isinstance(n, ast.Call)) if statement is not None else ()
    generates = any(isinstance(func, ast.Attribute) and func.attr == "generate" for func in called)
    return owner is not None and owner.base == "trainer" and not generates


def _bf16_option(script: Script, event: Event, autocast: Autocast) -> str:
    """The condition for bfloat16 that enables a region: its flag, or one around it; "" if there is none."""
    flag = autocast.enabled if autocast.enabled != "yes" else ""
    flag = flag.removeprefix("not ") if _is_otherwise(script, flag) else flag
    texts = [flag, *(text_of(v) for v in script.outline.values(flag, event.function))] if flag else []
    texts += [guard.text for guard in event.guards if guard.is_true]
    is_open = autocast.dtype_node is None and (not flag or _ON_DEVICE.match(flag))
    if is_open and event.inside("no_grad") is None:  # the scaler is on for bfloat16, and the region for everything
        texts += [scaler.enabled for scaler in script.scalers if " in " in scaler.enabled or " or " in scaler.enabled]
        texts += _excluded_formats(script)
    excluded = {guard.text for guard in event.guards if not guard.is_true}
    # `args.bf16 or args.fp16`: each part enables the region.
    for text in (part.strip("()") for joined in texts for part in re.split(r" (?:or|and) ", joined)):
        if text in excluded:
            continue
        plain = text.removeprefix("bool(").removesuffix(")")
        if _BF16.search(plain) and re.fullmatch(r"[\w.\[\]'\"]+", plain):
            return plain
        if _COMPARED.match(text):
            return text
        if (match := _UNLESS_OFF.fullmatch(text)) and not any(map(_COMPARED.match, excluded)):
            setting = match[1]
            named = _NAMES_BF16 & _values_of(script, setting)
            if named or _is_of_accelerator(script, setting, event):
                return f"{setting} == '{named.pop() if named else 'bf16'}'"
    return ""


def _is_otherwise(script: Script, flag: str) -> bool:
    """Whether a region is the second arm of a choice: `nullcontext if not bf16 else autocast`."""
    choices = [n for n in ast.walk(script.tree) if isinstance(n, ast.IfExp)] if flag.startswith("not ") else []
    arms = {
        tuple("autocast" in text_of(arm).lower() for arm in (n.body, n.orelse))
        for n in choices
        if text_of(n.test) == flag
    }
    return arms == {(False, True)}


def _values_of(script: Script, setting: str) -> set[object]:
    """The strings that a file compares a setting with, and the choices of its option on the command line."""
    name = _NAME.findall(setting)[-1]
    compared = [n for n in ast.walk(script.tree) if isinstance(n, ast.Compare)]
    parts: list[ast.AST] = [n for n in compared if _NAME.findall(key_of(n.left))[-1:] == [name]]
    for call, _ in script.outline.calls.get("add_argument", ()):
        if any(str(constant(flag)).lstrip("-").replace("-", "_") == name for flag in call.args):
            parts += [k.value for k in call.keywords if k.arg == "choices"]
    return {c.value for part in parts for c in ast.walk(part) if isinstance(c, ast.Constant)}


def _is_of_accelerator(script: Script, setting: str, event: Event) -> bool:
    """Whether a setting is the precision of an Accelerator, which another file or the launcher may set to bf16."""
    owner, _, name = setting.rpartition(".")
    if name != "mixed_precision" or not owner:
        return False
    engine = engine_at(script, owner, event.function)
    if engine is None:
        return last_name(owner) == "accelerator"
    # One that this file creates, `Accelerator(mixed_precision="fp16" if args.amp else "no")`, may never be bf16.
    return engine.precision == "bf16" or (engine.precision == "?" and not engine.is_created)


def _excluded_formats(script: Script) -> Iterator[str]:
    """The tests for bfloat16 of a setting whose float16 alone enables the scaler: `dtype == 'bfloat16'`."""
    for scaler in script.scalers:
        if match := _ONLY_FLOAT16.fullmatch(scaler.enabled):
            setting = match[1]
            assigned = rf"(?<![\w.]){re.escape(setting)}\s*(?::\s*str\s*)?==?\s*['\"](bfloat16|bf16)['\"]"
            if format_ := re.search(assigned, script.source.text):
                yield f"{setting} == '{format_[1]}'"


class ContextNotEntered(ScriptRule):
    """Contexts are joined by `and` or `or`, so only one of them is entered."""

    code = "HS148"
    name = "context-not-entered"
    severity = "warning"
    reason = (
        "`with autocast() and no_grad():` enters only no_grad: both objects are truthy, so `and` evaluates to the last one and `or` to "
        "the first. Without autocast the block runs in float32, without tensor cores and with activations twice as large; without "
        "no_grad every validation batch builds a graph. No error is raised. Separate contexts with a comma."
    )
    bad = (
        _EVAL.format(contexts=f"{_AUTOCAST} and torch.no_grad()"),
        _EVAL.format(contexts=f"torch.inference_mode() and {_AUTOCAST}"),
        _EVAL.format(contexts=f"{_AUTOCAST} or torch.no_grad()"),
    )
    good = (
        _EVAL.format(contexts=f"torch.no_grad(), {_AUTOCAST}"),
        _EVAL.format(contexts=f"torch.no_grad(), (use_amp and {_AUTOCAST} or nullcontext())"),
        _EVAL.format(contexts="torch.no_grad(), (autocast_context or nullcontext())"),
    )
    references = (
        "https://docs.python.org/3/reference/compound_stmts.html#the-with-statement",
        "https://docs.python.org/3/reference/expressions.html#boolean-operations",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """Contexts that a `with` statement creates but does not enter."""
        calls = script.outline.library_calls
        contexts = {call for api in _CONTEXTS & calls.keys() for call, _ in calls[api]}
        for joined in dict.fromkeys(script.outline.parents.get(call) for call in contexts):
            if not isinstance(joined, ast.BoolOp) or not _opens_block(script, joined):
                continue
            dropped = _dropped(joined, contexts)
            if dropped is not None and not _is_implied(script, joined):
                word, entered = (
                    ("and", joined.values[-1]) if isinstance(joined.op, ast.And) else ("or", joined.values[0])
                )
                yield self.finding(
                    script.where(joined),
                    f"`{word}` evaluates to one operand: `{text_of(entered)}` is entered, `{text_of(dropped)}` is not",
                    instead=f"with {', '.join(map(text_of, joined.values))}:",
                )


def _opens_block(script: Script, node: ast.AST) -> bool:
    """Whether a `with` statement enters an expression, or chooses between it and others."""
    parent = script.outline.parents.get(node)
    while isinstance(parent, (ast.BoolOp, ast.IfExp)):
        parent = script.outline.parents.get(parent)
    return isinstance(parent, ast.withitem)


def _dropped(joined: ast.BoolOp, contexts: set[ast.Call]) -> ast.expr | None:
    """The first context that is certainly not the value of the expression."""
    if isinstance(joined.op, ast.And):
        return next((value for value in joined.values[:-1] if value in contexts), None)
    return next((value for value in joined.values[1:] if value in contexts and joined.values[0] in contexts), None)


def _is_implied(script: Script, joined: ast.BoolOp) -> bool:
    """Whether the context that is entered includes the others: inference_mode turns gradients off as well."""
    names = [script.outline.names.full(v.func) if isinstance(v, ast.Call) else "" for v in joined.values]
    entered = names.pop() if isinstance(joined.op, ast.And) else names.pop(0)
    return entered.endswith(".inference_mode") and all(name.endswith((".no_grad", ".inference_mode")) for name in names)


class AutocastDtype(ScriptRule):
    """Autocast is set to a dtype that it does not support."""

    code = "HS145"
    name = "autocast-dtype"
    severity = "warning"
    reason = (
        "Outside CUDA, autocast supports float16 and bfloat16 only. With float32 or float64 it warns and disables itself, so the "
        "region has no effect. (On CUDA the same line forces float32.) No device supports float8: on CUDA autocast casts the inputs of "
        "linear layers and convolutions to it, and these raise, because float8 products need scales."
    )
    bad = (
        "import torch\nwith torch.autocast('cpu', dtype=torch.float32):\n    y = model(x)\n",
        "import torch\ndtype = torch.bfloat16 if device == 'cuda' else torch.float32\nwith torch.autocast(device, dtype=dtype):\n"
        "    y = model(x)\n",
        "import torch\nwith torch.autocast('cuda', dtype=torch.float8_e4m3fn):\n    y = model(x)\n",
    )
    good = (
        "import torch\nwith torch.autocast('cpu', enabled=False):\n    y = model(x)\n",
        "import torch\nwith torch.autocast('cuda', dtype=torch.float32):\n    y = router(x)\n",
        "import torch\ndtype = torch.bfloat16 if device == 'cuda' else torch.float32\n"
        "with torch.autocast(device, dtype=dtype, enabled=device == 'cuda'):\n    y = model(x)\n",
    )
    references = ("https://docs.pytorch.org/docs/stable/amp.html#torch.autocast",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Regions on devices other than CUDA whose dtype is float32 or float64."""
        for region in script.autocasts:
            dtype = argument(region.node, 1, "dtype")
            if "float8" in region.dtypes and region.enabled != "no":
                condition = "" if region.dtype == "float8" else f"when `{text_of(region.dtype_node)}` is float8, "
                yield self.finding(
                    script.where(region.node),
                    f"{condition}autocast does not support float8: linear layers raise on CUDA, and elsewhere it disables itself",
                    instead="dtype=torch.bfloat16; float8 training needs scales, as in torchao.float8 or transformer_engine",
                    severity="error",
                )
                continue
            wrong = region.dtype in {"float32", "float64"} and region.device not in {None, "cuda"}
            if wrong and region.enabled == "yes" and script.outline.names.full(dtype or region.node):
                yield self.finding(
                    script.where(region.node),
                    f"autocast on {region.device} does not support {region.dtype}: it warns and disables itself",
                    instead="enabled=False, or remove the region",
                )
            elif self._without_cuda(script, region) and (script.has("backward") or not in_no_grad(script, region.node)):
                yield self.finding(
                    script.where(region.node),
                    f"without CUDA `{text_of(dtype)}` is float32, which autocast does not support there: it warns and disables itself",
                    instead="pass enabled= with the test of the device",
                    severity="advice",
                )

    @staticmethod
    def _without_cuda(script: Script, region: Autocast) -> bool:
        """Whether a region is entered on the CPU too, where its dtype is float32."""
        if region.enabled != "yes" or "float32" not in region.dtypes or region.devices == {"cuda"}:
            return False
        around = [text_of(n.test) for n in script.above(region.node) if isinstance(n, ast.If | ast.IfExp)]
        function = next((f for c, f in script.outline.calls.get("autocast", ()) if c is region.node), None)
        dtype = text_of(region.dtype_node)  # `autocast(device, dtype) if dtype != torch.float32 else nullcontext()`
        tested = any(word in test for test in around for word in ("cuda", "cpu", "device", dtype))
        return function is not None and not tested and is_float32_on_cpu(script.outline, region.dtype_node, function)


class AutocastReentered(ScriptRule):
    """An autocast object is entered again while it is active, which leaves autocast on afterwards."""

    code = "HS616"
    name = "autocast-reentered"
    severity = "warning"
    reason = (
        'An autocast object stores one previous state. Entered a second time before its first block ends, it stores "on" over the state '
        'from before that block, and the end of the block restores "on": backward, the optimizer\'s step and all float32 code after '
        "it run under autocast, for the rest of the process. A decorator is one object too, so a function under `@torch.autocast(...)` that "
        "calls itself does the same. Using one object in blocks that follow each other is fine."
    )
    bad = (
        _REENTERED.format(inner="ctx"),
        "import torch\n@torch.autocast('cuda', dtype=torch.bfloat16)\ndef walk(node, x):\n    for child in node.children:\n"
        "        x = walk(child, x)\n    return node.layer(x)\n",
    )
    good = (_REENTERED.format(inner="torch.autocast('cuda', dtype=torch.bfloat16)"),)
    references = ("measured: torch.autocast.__enter__ and __exit__ of torch 2.13",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Objects of a variable or a decorator that are active where they are entered."""
        for node, name, outer, through in reentered(script):
            again = f"`{through}` enters" if through else "this enters"
            yield self.finding(
                script.where(node),
                f"{again} `{name}` again inside its own block ({script.at(outer)}), which overwrites the state that the block restores: autocast "
                "stays on after it",
                instead="create the region in each `with`: torch.autocast(...), or a function that returns it",
            )


RULES: tuple[type[Rule], ...] = (Bf16OptionRunsFloat16, AutocastDtype, ContextNotEntered, AutocastReentered)
