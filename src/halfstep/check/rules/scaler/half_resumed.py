"""HS174: a checkpoint for resuming that contains 16-bit weights."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.values import DTYPES, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]

_WEIGHTS = """\
import torch
from copy import deepcopy
scaler = torch.amp.GradScaler("cuda")
if resume:
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"]{load})
    optimizer.load_state_dict(checkpoint["optimizer"])
    scaler.load_state_dict(checkpoint["scaler"])
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
{save}
"""
_STATES = '"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, path)'
_HALVES = _WEIGHTS.replace("{load}", "").replace(
    "{save}",
    'weights = {{k: v.cpu(){half} for k, v in model.state_dict().items()}}\ntorch.save({{"model": weights, '
    + _STATES.replace("}", "}}"),
)
_DEEP = _WEIGHTS.replace("{load}", ".float().state_dict()").replace(
    "{save}", 'torch.save({{"model": deepcopy(model){half}, ' + _STATES.replace("}", "}}")
)
_ENGINE = """\
import deepspeed
import torch
if resume:
    model.load_state_dict(torch.load(path)["model"])
config = {{"train_batch_size": 8, "gradient_clipping": 1.0, "{format}": {{"enabled": True}}, "zero_optimization": {{"stage": 2}}}}
engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for x, y in loader:
    loss = loss_fn(engine(x), y)
    engine.backward(loss)
    engine.step()
torch.save({{"model": engine.module.state_dict()}}, path)
{more}"""
_ENABLED = regex(r"""["'](fp16|bf16)["']\s*:\s*\{\s*["']enabled["']\s*:\s*True\b""")
_STATE = regex(r"(^|\.|_)engine\.module\.state_dict\(\)$")


class HalfWeightsResumed(ScriptRule):
    """A checkpoint for resuming contains the weights in 16 bits."""

    code = "HS174"
    name = "half-weights-resumed"
    severity = "warning"
    reason = (
        "The float32 weights of mixed precision collect updates that are smaller than the 16-bit spacing. A checkpoint that stores "
        "them in float16 rounds each weight to 11 bits, flushes those below 6e-8 to zero and overflows above 65504, so a resumed run "
        "continues from other weights than the optimizer state belongs to. Store 16-bit weights only in files for inference."
    )
    bad = (_HALVES.format(half=".half()"), _DEEP.format(half=".half()"), _ENGINE.format(format="fp16", more=""))
    good = (
        _HALVES.format(half=""),
        _DEEP.format(half=""),
        _ENGINE.format(format="fp16", more="engine.save_checkpoint(folder)\n"),
        _ENGINE.format(format="fp16", more="").replace("True", "False"),
    )
    references = (
        "https://arxiv.org/abs/1710.03740",
        "https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """Weights cast to 16 bits next to an optimizer state, in a file that restores both."""
        yield from self._of_engine(script)
        if not script.has("load_optimizer") or not script.has("backward", "owned_backward"):
            return
        read = set(_read_keys(script))
        reported: set[ast.AST] = set()
        for event in script.events("save_optimizer"):
            entries = _entries_with(script, event.node)
            for key, value in entries:
                call = _halved(script, value, event)
                if call is None or constant(key) not in read:
                    continue
                if entries[0][1] in reported:
                    break  # the same dictionary in another trace
                reported.add(entries[0][1])
                yield self.finding(
                    script.where(call),
                    f"`{text_of(key)}` of the checkpoint is stored in 16 bits, next to the state of `{event.local.optimizer}`: a "
                    "resumed run continues from rounded weights",
                    instead="store float32 weights in the checkpoint for resuming, and a 16-bit copy in another file",
                )
                break

    def _of_engine(self, script: Script) -> Iterator[Finding]:
        """The 16-bit weights of DeepSpeed's engine, saved alone and loaded again when a run resumes."""
        outline = script.outline
        calls = {"load_state_dict", "backward"} & outline.calls.keys()
        if len(calls) < 2 or "deepspeed.initialize" not in outline.library_calls:
            return
        enabled = _ENABLED.search(script.source.text)
        if enabled is None:
            return
        if {"save_checkpoint", "load_checkpoint"} & {text_of(c.func).rpartition(".")[2] for c in _engine_calls(script)}:
            return  # the masters are in DeepSpeed's own checkpoint
        read = set(_read_keys(script))
        for call, function in outline.library_calls.get("torch.save", ()):
            entries = call.args[0] if call.args else None
            for key, value in zip(entries.keys, entries.values, strict=True) if isinstance(entries, ast.Dict) else ():
                values = outline.values(key_of(value), function) if key_of(value) else [value]
                if constant(key) in read and values and all(map(_is_of_engine, values)):
                    yield self.finding(
                        script.where(value),
                        f"`{text_of(key)}` of the checkpoint is the engine's {enabled[1]} weights, and a run that loads them continues from "
                        "rounded weights: the float32 masters are in the engine's optimizer",
                        instead="engine.save_checkpoint(...) and engine.load_checkpoint(...) for resuming",
                    )


def _engine_calls(script: Script) -> Iterator[ast.Call]:
    """The calls of DeepSpeed's own methods for checkpoints, other than of a method of this file."""
    for name in ("save_checkpoint", "load_checkpoint"):
        yield from (c for c, f in script.outline.calls.get(name, ()) if script.outline.call_target(c, f) is None)


def _is_of_engine(value: ast.expr) -> bool:
    """Whether an expression is the state of the module inside an engine: `engine.module.state_dict()`."""
    return bool(_STATE.search(text_of(value)))


def _read_keys(script: Script) -> Iterator[object]:
    """The keys that the file reads from a dictionary: `checkpoint["model"]`, `checkpoint.get("model")`."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(constant(node.slice), str):
            yield constant(node.slice)
    for call, _ in script.outline.calls.get("get", ()):
        if call.args:
            yield constant(call.args[0])


def _entries_with(script: Script, node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """The entries of the dictionary that contains a saved state, also a copy or a conversion of it: `deepcopy(state)`."""
    parent = script.outline.parents.get(node)
    while isinstance(parent, (ast.IfExp, ast.Call)):
        parent = script.outline.parents.get(parent)
    if isinstance(parent, ast.Dict):
        return [(k, v) for k, v in zip(parent.keys, parent.values, strict=True) if k is not None]
    call = script.outline.parents.get(parent) if isinstance(parent, ast.keyword) else None
    if isinstance(call, ast.Call) and key_of(call.func) == "dict":
        return [(ast.Constant(k.arg), k.value) for k in call.keywords if k.arg]
    return []


def _halved(script: Script, value: ast.expr, event: Event) -> ast.expr | None:
    """The call that casts saved weights to 16 bits: `deepcopy(model).half()`, `{k: v.half() for k, v in state.items()}`."""
    key = key_of(value)
    if key.isidentifier():
        bound = [
            b for b in script.outline.bindings.get(key, ()) if b.function is event.function and b.value is not None
        ]
        value = bound[-1].value if bound and bound[-1].index is None and bound[-1].value is not None else value
    if isinstance(value, ast.DictComp):
        casts = [value.value.body, value.value.orelse] if isinstance(value.value, ast.IfExp) else [value.value]
        return next((c for c in casts if _is_cast(script, c)), None)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "state_dict":
        value = value.func.value
    return value if _is_cast(script, value) else None


def _is_cast(script: Script, node: ast.AST) -> bool:
    """Whether an expression ends in a cast to 16 bits: `x.half()`, `x.cpu().to(torch.float16)`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in {"half", "bfloat16"} and not node.args:
            return True
        values = [*node.args, *(k.value for k in node.keywords if k.arg == "dtype")] if node.func.attr == "to" else []
        if any(DTYPES.get(script.outline.names.full(v)) in {"float16", "bfloat16"} for v in values):
            return True
        if node.func.attr not in {"cpu", "clone", "detach", "contiguous", "to", "eval"}:
            return False
        node = node.func.value
    return False


RULES: tuple[type[Rule], ...] = (HalfWeightsResumed,)
