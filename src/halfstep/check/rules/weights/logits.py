"""HS154: a cross-entropy that is computed in 16 bits."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.weights.half_weights import models_kept_half
from halfstep.check.script.exercise import is_exercise
from halfstep.check.script.flow.logit_formats import logit_formats
from halfstep.check.script.flow.sources import sources_of
from halfstep.check.script.objects.expressions import options_of
from halfstep.check.script.objects.formats import SIXTEEN_BIT
from halfstep.check.script.objects.outputs import (
    Exit,
    in_no_grad,
    leaves_autocast,
    leaves_engine,
    runs_in_autocast,
)
from halfstep.check.script.objects.values import UNKNOWN, argument, autocasts_of, constant, text_of
from halfstep.check.script.objects.weights import base_of, conditions_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.syntax.scope import CallSite

__all__ = ["RULES", "in_autocast", "with_autocast"]

_CAST = regex(r"float\(|float32")
_REFERENCE = regex(r"(^|[._])(ref|reference|teacher|old)(_|$)")
_CRITERION = regex(r"^(criterion|loss_fn|loss_func|loss_function)$")
_RANKS = regex(r"(^|[._])(argmax|topk|(calc_|compute_|get_)?acc(uracy)?\d?)$")
_LOG_PROBABILITIES = ("log_softmax", "logsumexp")
_FUNCTIONS = {
    "torch.nn.functional.cross_entropy",
    "torch.nn.functional.log_softmax",
    "torch.log_softmax",
    "torch.logsumexp",
}
_CRITERIA = {
    "torch.nn.CrossEntropyLoss",
    "timm.loss.LabelSmoothingCrossEntropy",
    "timm.loss.SoftTargetCrossEntropy",
    "timm.loss.cross_entropy.LabelSmoothingCrossEntropy",
    "timm.loss.cross_entropy.SoftTargetCrossEntropy",
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
    lines = ("log_softmax", "logsumexp", "CrossEntropyLoss", "lm_head(", "logits[")

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
            if logits is None or _is_never_reached(script, call, function):
                continue
            is_training = not in_no_grad(script, call)
            formats: frozenset[str] = frozenset()
            if (is_training or _is_reference(script, logits, function)) and not in_autocast(script, call, function):
                formats = logit_formats(script, logits, function, call.lineno)
            if formats & SIXTEEN_BIT:
                if formats <= SIXTEEN_BIT or not conditional:  # one reminder of the condition is enough
                    yield self._report(script, call, logits, formats)
                conditional |= not formats <= SIXTEEN_BIT
            elif not with_autocast(script, call, function):
                exit_ = leaves_autocast(script, logits, function, call.lineno)
                if exit_ is None and is_training:
                    exit_ = leaves_engine(script, logits, function, call.lineno)
                if exit_ is not None and is_training and exit_.is_training:
                    yield self._report_exit(script, call, logits, exit_)
                elif exit_ is not None:
                    is_reference = _REFERENCE.search(exit_.model)
                    rounded = "log-probabilities of the reference are" if is_reference else "validation loss is"
                    yield self.finding(
                        script.where(call),
                        f"autocast ends before this loss, so it is computed in {' or '.join(sorted(exit_.formats))} unless `{exit_.model}` casts its "
                        f"output: the {rounded} rounded to 16 bits",
                        instead="move the loss into the autocast region, or cast the logits with .float()",
                        severity="advice",
                    )
        for call, function in _unknown_criteria(script):
            exit_ = None if in_no_grad(script, call) else leaves_autocast(script, call.args[0], function, call.lineno)
            if exit_ is not None and not with_autocast(script, call, function):
                yield self.finding(
                    script.where(call),
                    f"if `{text_of(call.func)}` is a cross-entropy, it computes in {' or '.join(sorted(exit_.formats))} unless `{exit_.model}` casts its "
                    f"output ({exit_.cause})",
                    instead="move the loss into the autocast region, or cast the logits with .float()",
                    severity="advice",
                )

    def _report(self, script: Script, call: ast.Call, logits: ast.expr, formats: frozenset[str]) -> Finding:
        name = " or ".join(sorted(formats & SIXTEEN_BIT))
        is_certain = formats <= SIXTEEN_BIT
        when = f"when the model has {name} weights, " if UNKNOWN in formats else f"when the model is loaded in {name}, "
        when = "" if is_certain else when
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
        cause = "autocast is turned off around this loss" if _is_off(script, call) else exit_.cause
        return self.finding(
            script.where(call),
            f"the logits `{_short(logits)}` are {' or '.join(sorted(exit_.formats))}{unless} ({cause}): so are the "
            "log-probabilities and the loss",
            instead="move the loss into the autocast region, or cast the logits with .float()",
            severity=None if exit_.is_certain else "advice",
        )


def _is_never_reached(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether a function returns before a loss, or does not enter its branch, because every caller passes None for a parameter."""
    absent = set()
    for name in function.params:
        passed = [value for value, _ in script.outline.passed(name, function)]
        if passed and all(constant(value) is None for value in passed):
            absent.add(f"{name} is None")
    if not absent:
        return False
    present = {text.replace(" is ", " is not ") for text in absent}
    for text, is_true in conditions_of(script.outline, call):
        if (text in absent and not is_true) or (text in present and is_true):
            return True
    leaves = [n for n in function.node.body if isinstance(n, ast.If) and (n.end_lineno or 0) < call.lineno]
    return any(text_of(n.test) in absent and isinstance(n.body[-1], ast.Return) for n in leaves)


def _is_reference(script: Script, logits: ast.expr, function: Function) -> bool:
    """Whether logits are those of a frozen model whose log-probabilities a training loss compares with, as in PPO or DPO."""
    sources = sources_of(script.outline, logits, function, logits.end_lineno or logits.lineno)
    return any(isinstance(s.node, ast.Call) and _REFERENCE.search(key_of(s.node.func)) for s in sources)


def _unknown_criteria(script: Script) -> Iterator[CallSite]:
    """Losses that another file passes, `criterion(output, y)`, of an output whose classes are ranked: `accuracy(output, y)`."""
    outline = script.outline
    for name, sites in outline.calls.items():
        for call, function in sites if _CRITERION.search(name) else ():
            is_param = isinstance(call.func, ast.Name) and name in function.params and call.args
            if not is_param or outline.values(name, function) or outline.bindings.get(name):
                continue
            output = key_of(call.args[0])
            ranked = (n for n in ast.walk(function.node) if isinstance(n, ast.Call) and _RANKS.search(text_of(n.func)))
            if output.isidentifier() and any(output in {key_of(a) for a in (*n.args, _owner(n))} for n in ranked):
                yield CallSite(call, function)


def _owner(call: ast.Call) -> ast.AST:
    return call.func.value if isinstance(call.func, ast.Attribute) else call.func


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
    for call, function in outline.library_calls.get("torch.nn.CrossEntropyLoss", ()):
        used = outline.parents.get(call)
        if isinstance(used, ast.Call) and used.func is call:  # `nn.CrossEntropyLoss()(logits, y)`
            yield CallSite(used, function)


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
    """Whether a variable is one of the cross-entropies that are known, in every run."""
    outline = script.outline
    options = [func] if isinstance(func, ast.Call) else outline.values(key_of(func), function) if key_of(func) else []
    arms = [base_of(arm) for option in options for arm in options_of(option)]
    return bool(arms) and all(_computes_cross_entropy(script, arm) for arm in arms)


def _computes_cross_entropy(script: Script, value: ast.expr) -> bool:
    """Whether a value is a cross-entropy: a function, `partial(F.cross_entropy, ...)`, or an object of such a class."""
    full = script.outline.names.full
    if not isinstance(value, ast.Call):
        return full(value) == "torch.nn.functional.cross_entropy"
    name = full(value.func)
    if name == "functools.partial":
        return bool(value.args) and full(value.args[0]) == "torch.nn.functional.cross_entropy"
    return name in _CRITERIA or (isinstance(value.func, ast.Name) and _is_own_criterion(script, value.func.id))


def _is_own_criterion(script: Script, cls: str) -> bool:
    """Whether the forward of a class computes a cross-entropy of its first argument, and casts nothing: a focal loss."""
    forward = script.outline.classes.get(cls, {}).get("forward")
    if forward is None or len(forward.params) < 3 or _CAST.search(ast.unparse(forward.node)):
        return False
    calls = [n for n in ast.walk(forward.node) if isinstance(n, ast.Call)]
    losses = [c for c in calls if script.outline.names.full(c.func) in _FUNCTIONS or _is_method(script, c)]
    sources = [
        source.node
        for loss in losses
        if (logits := _logits_of(script, loss)) is not None and not with_autocast(script, loss, forward)
        for source in sources_of(script.outline, logits, forward, loss.lineno)
    ]
    return any(isinstance(node, ast.Name) and node.id == forward.params[1] for node in sources)


def in_autocast(script: Script, node: ast.AST, function: Function) -> bool:
    """Whether a `with` around a node may enter autocast, or whether a function may be called from inside one."""
    return runs_in_autocast(script, node, function) or with_autocast(script, node, function)


def with_autocast(script: Script, node: ast.AST, function: Function) -> bool:
    """Whether a `with` or a decorator around a node may enter autocast; the innermost one decides, which may turn it off."""
    parent = script.outline.parents.get(node)
    while parent is not None:
        contexts: list[ast.expr] = []
        if isinstance(parent, (ast.With, ast.AsyncWith)):
            contexts = [item.context_expr for item in parent.items]
        elif isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            contexts = parent.decorator_list
        regions = [a for context in contexts for a in autocasts_of(script.outline, context, function)]
        if regions or any("autocast" in ast.unparse(context) for context in contexts):
            return not regions or any(a.enabled != "no" for a in regions)
        parent = script.outline.parents.get(parent)
    return False


def _is_off(script: Script, node: ast.AST) -> bool:
    """Whether a node is inside of a region that turns autocast off."""
    withs = [parent for parent in script.above(node) if isinstance(parent, ast.With)]
    return any("autocast" in text_of(item.context_expr) for parent in withs for item in parent.items)


RULES: tuple[type[Rule], ...] = (CrossEntropyInSixteenBits,)
