"""HS154: a cross-entropy that is computed in 16 bits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.weights.half_weights import models_kept_half
from halfstep.check.rules.weights.masters import is_exercise
from halfstep.check.script.flow.sources import iterated, keeps_format
from halfstep.check.script.objects.checkpoints import stored_low
from halfstep.check.script.objects.formats import SIXTEEN_BIT, passed_for
from halfstep.check.script.objects.outputs import (
    Exit,
    in_no_grad,
    keeps_dtype,
    leaves_autocast,
    leaves_engine,
)
from halfstep.check.script.objects.values import argument, autocasts_of, constant, text_of
from halfstep.check.script.objects.weights import Cast, base_of, cast_formats, conditions_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import CallSite

__all__ = ["RULES", "in_autocast"]

_SAME_DTYPE = {
    "view", "reshape", "flatten", "transpose", "permute", "contiguous", "squeeze", "unsqueeze", "swapaxes", "cuda", "clone", "mT",
}  # fmt: skip
# These convert the outputs of a prepared model to float32, or run autocast around it.
_FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning", "deepspeed", "lightning_fabric")
MAX_STEPS = 12  # operations, assignments and calls between a model and its loss
_CAST = re.compile(r"float\(|float32")
_HEADS = frozenset({"lm_head", "output_head"})
_LOG_PROBABILITIES = ("log_softmax", "logsumexp")
_FUNCTIONS = {
    "torch.nn.functional.cross_entropy",
    "torch.nn.functional.log_softmax",
    "torch.log_softmax",
    "torch.logsumexp",
}
_LOSS = "import torch\nimport torch.nn.functional as F\nlogits = model(x)\nloss = F.cross_entropy(logits{cast}, y)\n"


class CrossEntropyInSixteenBits(ScriptRule):
    """A cross-entropy is computed on logits in 16 bits."""

    code = "HS154"
    name = "cross-entropy-on-16-bit-logits"
    severity = "warning"
    reason = (
        "Outside autocast, `cross_entropy` computes in the dtype of the logits. bfloat16 values between 8 and 16 are 1/16 apart, so the "
        "log-probability of a rare token is wrong by up to 1/32 and its probability by 3 %, the loss has two to three digits, and the "
        "gradient starts from rounded probabilities. Autocast runs it in float32; without autocast, cast the logits with `.float()`."
    )
    bad = (
        _LOSS.format(cast=".bfloat16()"),
        _LOSS.format(cast=".view(-1, n).to(torch.float16)"),
        "import torch\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2', dtype=torch.bfloat16)\n"
        "logits = model(ids).logits\nloss = torch.nn.functional.cross_entropy(logits.view(-1, n), y)\n",
    )
    good = (
        _LOSS.format(cast=".float()"),
        _LOSS.format(cast=".bfloat16()").replace(
            "loss =", "with torch.autocast('cuda', dtype=torch.bfloat16):\n    loss ="
        ),
    )
    references = (
        "https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-autocast-to-float32",
        "https://github.com/huggingface/trl/issues/4303",
    )
    lines = ("log_softmax", "logsumexp", "CrossEntropyLoss", "lm_head(")

    def check(self, script: Script) -> Iterator[Finding]:
        """Cross-entropies of logits that are 16-bit, outside autocast."""
        if is_exercise(script):
            return
        conditional = False
        for half in models_kept_half(script):
            for call in (n for statement in half.body for n in ast.walk(statement) if isinstance(n, ast.Call)):
                if script.outline.names.full(call.func) in _FUNCTIONS and not _CAST.search(text_of(call)):
                    yield self.finding(
                        script.where(call),
                        f"with 'fp16' `{half.model}` computes in float16 ({script.at(half.cast)} casts it for 'fp32' and 'amp' only), and so do the logits and "
                        "this loss",
                        instead="cast the logits with .float() before the loss",
                        severity="advice",
                    )
        for call, function in sorted(_losses(script), key=lambda site: site.call.lineno):
            logits = _logits_of(script, call)
            if logits is None:
                continue
            is_training = not in_no_grad(script, call)
            formats: frozenset[str] = frozenset()
            if is_training and not in_autocast(script, call, function):
                formats = _logit_formats(script, logits, function, call.lineno)
            if formats & SIXTEEN_BIT:
                if formats <= SIXTEEN_BIT or not conditional:  # one reminder of the condition is enough
                    yield self._report(script, call, logits, formats)
                conditional |= not formats <= SIXTEEN_BIT
            elif not _with_autocast(script, call, function):
                exit_ = leaves_autocast(script, logits, function, call.lineno)
                if exit_ is None and is_training:
                    exit_ = leaves_engine(script, logits, function, call.lineno)
                if exit_ is not None and is_training and exit_.is_training:
                    yield self._report_exit(script, call, logits, exit_)
                elif exit_ is not None:
                    yield self.finding(
                        script.where(call),
                        f"autocast ends before this loss, so it is computed in {' or '.join(sorted(exit_.formats))} unless `{exit_.model}` casts its "
                        "output: the validation loss is rounded to 16 bits",
                        instead="move the loss into the autocast region, or cast the logits with .float()",
                        severity="advice",
                    )

    def _report(self, script: Script, call: ast.Call, logits: ast.expr, formats: frozenset[str]) -> Finding:
        name = " or ".join(sorted(formats & SIXTEEN_BIT))
        is_certain = formats <= SIXTEEN_BIT
        when = "" if is_certain else f"when the model is loaded in {name}, "
        return self.finding(
            script.where(call),
            f"{when}the logits `{_short(logits)}` are {name}, and so are the log-probabilities: values near -10 are rounded to 1/16"
            if "bfloat16" in formats
            else f"{when}the logits `{_short(logits)}` are {name}, and so are the log-probabilities and the loss",
            instead="cast the logits with .float() before the loss",
            severity=None if is_certain else "advice",
        )

    def _report_exit(self, script: Script, call: ast.Call, logits: ast.expr, exit_: Exit) -> Finding:
        unless = "" if exit_.is_certain else f" unless `{exit_.model}` casts its output"
        return self.finding(
            script.where(call),
            f"the logits `{_short(logits)}` are {' or '.join(sorted(exit_.formats))}{unless} ({exit_.cause}): so are the "
            "log-probabilities and the loss",
            instead="move the loss into the autocast region, or cast the logits with .float()",
            severity=None if exit_.is_certain else "advice",
        )


def _losses(script: Script) -> Iterator[CallSite]:
    """The calls that compute a cross-entropy from logits; of nll_loss, the log_softmax before it."""
    outline = script.outline
    for name in ("cross_entropy", *_LOG_PROBABILITIES):
        for site in outline.calls.get(name, ()):
            if outline.names.full(site.call.func) in _FUNCTIONS or _is_method(script, site.call):
                yield site
    for name, sites in outline.calls.items():
        if "crit" in name.lower() or "loss" in name.lower() or name in {"ce", "CrossEntropyLoss"}:
            yield from (site for site in sites if _is_cross_entropy(script, site.call.func, site.function))


def _is_method(script: Script, call: ast.Call) -> bool:
    """Whether log-probabilities are computed by a method of the logits: `outputs.logits.log_softmax(-1)`."""
    func = call.func
    is_tensor = isinstance(func, ast.Attribute) and func.attr in _LOG_PROBABILITIES
    return is_tensor and not script.outline.names.full(func) and argument(call, None, "dtype") is None


def _logits_of(script: Script, call: ast.Call) -> ast.expr | None:
    """What a loss receives as logits."""
    if _is_method(script, call):
        assert isinstance(call.func, ast.Attribute)
        return call.func.value
    return argument(call, 0, "input") if argument(call, None, "dtype") is None else None


def _short(node: ast.expr) -> str:
    text = text_of(node)
    return text if len(text) < 50 else text[:47] + "..."


def _is_cross_entropy(script: Script, func: ast.expr, function: Function) -> bool:
    names = script.outline.names
    options = (
        [func] if isinstance(func, ast.Call) else script.outline.values(key_of(func), function) if key_of(func) else []
    )
    made = [base_of(o).func for o in options if isinstance(base_of(o), ast.Call)]  # type: ignore[attr-defined]
    return bool(made) and len(made) == len(options) and all(names.full(m) == "torch.nn.CrossEntropyLoss" for m in made)


def in_autocast(script: Script, node: ast.AST, function: Function) -> bool:
    """Whether a `with` around a node may enter autocast, or whether a function may be called from inside one."""
    inside = isinstance(function.node, (ast.FunctionDef, ast.AsyncFunctionDef)) and bool(script.autocasts)
    return inside or _with_autocast(script, node, function)


def _with_autocast(script: Script, node: ast.AST, function: Function) -> bool:
    """Whether a `with` or a decorator around a node may enter autocast."""
    contexts: list[ast.expr] = []
    parent = script.outline.parents.get(node)
    while parent is not None:
        if isinstance(parent, (ast.With, ast.AsyncWith)):
            contexts += [item.context_expr for item in parent.items]
        elif isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            contexts += parent.decorator_list
        parent = script.outline.parents.get(parent)
    return any("autocast" in ast.unparse(c) or autocasts_of(script.outline, c, function) for c in contexts)


def _logit_formats(
    script: Script, node: ast.expr, function: Function, line: int, depth: int = MAX_STEPS
) -> frozenset[str]:
    """The formats of logits, if the text decides them: cast explicitly, or the output of a 16-bit model."""
    outline = script.outline
    while depth:
        depth -= 1
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
            node = node.value
        elif isinstance(node, ast.BinOp) and (operand := keeps_format(node)) is not None:
            node = operand
        elif isinstance(node, ast.Call) and outline.names.full(node.func) == "einops.rearrange" and node.args:
            node = node.args[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            formats = cast_formats(outline, node, function)
            if formats:
                return formats
            if node.func.attr in _HEADS:
                return _head_formats(script, node.func.value, function)
            if node.func.attr not in _SAME_DTYPE:
                return _called_formats(script, node, function)
            node = node.func.value
        elif isinstance(node, ast.Call):
            return _called_formats(script, node, function)
        elif isinstance(node, ast.Attribute) and node.attr == "logits":
            return _output_formats(script, node.value, function, line)
        elif isinstance(node, ast.Subscript) and constant(node.slice) == "logits":
            return _output_formats(script, node.value, function, line)  # `outputs["logits"]`
        else:
            break
    name = key_of(node)
    if not name.isidentifier() or not depth:
        return frozenset()
    earlier = [
        b for b in outline.lookup(name, function) if b.function is function and getattr(b.node, "lineno", 0) < line
    ]
    if earlier:
        last = earlier[-1]
        rows = iterated(last)
        if rows is not None:
            return _logit_formats(script, rows, function, getattr(last.node, "lineno", 0), depth)
        if last.value is None or last.index is not None:
            return frozenset()
        return _logit_formats(script, last.value, function, getattr(last.node, "lineno", 0), depth)
    if name in function.params:
        sites = [(v, f) for v, f in passed_for(outline, name, function) if not in_no_grad(script, v)]
        passed = [_logit_formats(script, v, f, v.lineno, depth) for v, f in sites]
        return passed[0] if passed and all(p == passed[0] for p in passed) else frozenset()
    return frozenset()


def _output_formats(script: Script, node: ast.expr, function: Function, line: int) -> frozenset[str]:
    """The format of `model(...).logits`, for a model that transformers loads in 16 bits and that runs without autocast."""
    outline = script.outline
    if (
        script.autocasts
        or outline.names.uses(*_FRAMEWORKS)
        or any(n.endswith(("Trainer", "Accelerator")) for n in outline.calls)
    ):
        return frozenset()
    key = key_of(node)
    if key.isidentifier():
        bindings = [
            b for b in outline.lookup(key, function) if b.function is function and getattr(b.node, "lineno", 0) < line
        ]
        value = bindings[-1].value if bindings and bindings[-1].index is None else None
        node = value if value is not None else node
    if not isinstance(node, ast.Call) or not key_of(node.func):
        return frozenset()
    return _loaded_formats(script, node.func, function)


def _head_formats(script: Script, model: ast.expr, function: Function) -> frozenset[str]:
    """The format of `model.lm_head(hidden)`: a layer that no framework wraps, in the dtype of the loaded model."""
    outline = script.outline
    created = [call for call, _ in outline.calls.get("Accelerator", ())]
    mixed = any(k.arg in {None, "mixed_precision"} and constant(k.value) != "no" for c in created for k in c.keywords)
    wrapped = outline.names.uses(*(name for name in _FRAMEWORKS if name != "accelerate")) or mixed
    if script.autocasts or wrapped or any(name.endswith("Trainer") for name in (*outline.calls, *outline.bases)):
        return frozenset()
    while (
        isinstance(model, ast.Attribute)
        and model.attr in {"module", "model", "base_model"}
        and key_of(model) != "self.model"
    ):
        model = model.value
    return _loaded_formats(script, model, function)


def _loaded_formats(script: Script, model: ast.expr, function: Function) -> frozenset[str]:
    """The dtype of a model that transformers loads, if the text decides it."""
    outline = script.outline
    lineage = script.training.model(model, function)
    # Also a project's own copy of such a class: `from models.qwen import Qwen2ForCausalLM`.
    loads = [c for c in lineage.casts if c.form in {"load", "checkpoint"} and _is_language_model(outline, c)]
    casts = [c for c in lineage.casts if c.form == "cast"]
    # An adapter returns the dtype of the layer it is on; a quantized model may keep its head in float32.
    is_open = lineage.is_adapted and any("kbit" in name or "BitsAndBytes" in name for name in outline.calls)
    if not loads or lineage.is_restored or is_open or len(lineage.casts) != len(loads) + len(casts):
        return frozenset()
    if casts:
        decided = all(c.is_certain and not conditions_of(outline, c.node) for c in casts)
        return frozenset().union(*(c.formats for c in casts)) if decided else frozenset()
    formats = [SIXTEEN_BIT if stored_low(script, c) and c.form == "load" else c.formats for c in loads]
    merged: frozenset[str] = frozenset().union(*formats)
    return merged if merged <= SIXTEEN_BIT | {"float32"} else frozenset()


def _is_language_model(outline: Outline, cast: Cast) -> bool:
    name = text_of(cast.node.func)
    return outline.names.full(cast.node.func).startswith("transformers.") or "ForCausalLM." in name


def _called_formats(script: Script, call: ast.Call, function: Function) -> frozenset[str]:
    """The format of `model(...)`, for a model that is cast to 16 bits and whose class casts nothing back."""
    if script.autocasts or script.outline.names.uses(*_FRAMEWORKS) or not key_of(call.func):
        return frozenset()
    lineage = script.training.model(call.func, function)
    if lineage.is_restored or not lineage.creations or not all(keeps_dtype(script, c) for c in lineage.creations):
        return frozenset()
    if not lineage.casts or not all(c.is_certain and not conditions_of(script.outline, c.node) for c in lineage.casts):
        return frozenset()
    return frozenset().union(*(c.formats for c in lineage.casts))


RULES: tuple[type[Rule], ...] = (CrossEntropyInSixteenBits,)
