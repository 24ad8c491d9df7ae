"""HS121-HS123: whether a scaler is present where one is needed, and where it is created."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding, Severity
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.script.bf16_scaler import ScalerWithBf16
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import TraceRule, earlier, later, without_amp
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.values import Autocast, Scaler, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]

_DOCS = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
_AMP = "https://docs.pytorch.org/docs/stable/amp.html"
_LOOP = """\
import torch
{scaler}
for epoch in range(epochs):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.{dtype}):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
_RIGHT = _LOOP.format(scaler='scaler = torch.amp.GradScaler("cuda")', dtype="float16")
_PLAIN = """\
import torch
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.{dtype}):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
"""
_ITEM = """\
import torch
for batch in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.{dtype}):
        out = model(**batch)
    out["loss"].backward()
    optimizer.step()
"""
# Scripts that import these have their loss scaled by the library.
_OWNERS = ("accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "deepspeed", "apex", "fairscale", "composer", "mmcv", "mmengine", "ignite", "catalyst", "fairseq", "colossalai", "torch_xla", "megatron", "habana_frameworks")  # fmt: skip
_SCALE = 'use torch.amp.GradScaler("cuda"), or autocast with dtype=torch.bfloat16'
_FORMAT = re.compile(r"16|dtype|bf|half|float", re.IGNORECASE)


def _initial_scale(scaler: Scaler) -> str:
    """The scale that a new scaler starts with: torch's default, unless an argument may set it."""
    call = scaler.node
    is_default = all(isinstance(constant(a), str) for a in call.args) and not any(
        k.arg in {"init_scale", None} for k in call.keywords
    )
    return "65536" if is_default else "its initial value"


class ScalerInLoop(TraceRule):
    """A new GradScaler is created inside the training loop."""

    code = "HS121"
    name = "scaler-in-loop"
    severity = "warning"
    reason = (
        "A scaler adapts its scale over the run: it starts at 65536 and grows after 2000 steps without overflow. Recreated every "
        "epoch, it restarts at 65536 and skips the first steps of each epoch on overflow; recreated every batch, it never "
        "adapts, and a model that overflows at 65536 never takes a step."
    )
    bad = (
        _LOOP.replace("{scaler}\n", "")
        .replace("    for x, y in loader:", '    scaler = torch.amp.GradScaler("cuda")\n    for x, y in loader:')
        .format(dtype="float16"),
        "import torch\nfrom torch.cuda.amp import GradScaler\ndef train(model, loader, optimizer):\n    scaler = GradScaler()\n"
        "    for x in loader:\n        scaler.scale(model(x)).backward()\n        scaler.step(optimizer)\n        scaler.update()\n"
        "model = Net()\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\nfor epoch in range(10):\n    train(model, loader, optimizer)\n",
    )
    good = (
        _RIGHT,
        "import torch\nfor fold in range(5):\n    model = Net()\n    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "    scaler = torch.amp.GradScaler('cuda')\n    for x in loader:\n        scaler.scale(model(x)).backward()\n"
        "        scaler.step(optimizer)\n        scaler.update()\n",
    )
    references = (
        "https://github.com/conservationtechlab/animl-py/issues/298",
        f"{_AMP}#torch.amp.GradScaler",
    )
    kinds = ("make_scaler",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A scaler created in a loop that steps with it but does not recreate the optimizer."""
        event = trace[index]
        scaler = script.scaler_of.get(event.node)
        if scaler is None or not scaler.key or scaler.enabled == "no":
            return None
        function = event.function
        if event.loops:
            inside = [e for e in trace if e.loops[: len(event.loops)] == event.loops]
            steps = [e for e in inside if e.kind == "scaler_step" and compatible(e, event)]
            fresh = [e for e in inside if e.kind in {"set_model", "set_optimizer", "make_optimizer"}]
            if not steps or fresh or self._first_time(event, scaler.key, steps):
                return None
            severity: Severity = "error" if all(len(e.loops) == len(event.loops) for e in steps) else "warning"
            frequency = f"on every iteration of the loop at line {event.loops[-1][1]}"
        else:
            # A scaled backward, where a project's optimizer is stepped with the scaler.
            steps = [e for e in trace if len(e.loops) == 1 and (e.kind == "scaler_step" or e.scaled == "yes")]
            per_epoch = "epoch" in function.params or "epoch" in function.name
            passed = any(e.optimizer.partition(".")[0] in function.params for e in trace if e.optimizer)
            fresh = [e for e in trace if e.kind in {"set_optimizer", "make_optimizer"}]
            if not (steps and per_epoch and passed) or fresh or event.roots or "epochs" in function.name:
                return None
            if self._first_time(event, scaler.key, steps):
                return None
            severity, frequency = "warning", f"on every call of `{function.name}`, once per epoch"
        if any(idle.node is scaler.node for idle in ScalerWithBf16.idle(script)):
            return None
        return self.finding(
            script.where(event.node),
            f"`{scaler.key}` is recreated {frequency}; the scale restarts at {_initial_scale(scaler)}",
            instead="create the scaler once, next to the optimizer, and pass it in",
            severity=severity,
        )

    @staticmethod
    def _first_time(event: Event, key: str, steps: list[Event]) -> bool:
        last = key.rsplit(".", 1)[-1]
        # Conditions on every step as well are around the entire training.
        guards = [g for g in event.guards if not all(g in step.guards for step in steps)]
        # A guard that is true in one iteration only; `device == 'cpu'` is the same in all of them.
        once = ("first", "init", last)
        counts = (text for text, is_true in guards if is_true and " == " in text)
        return any(word in text for word in once for text, _ in guards) or any(
            not re.search(r"device|== ['\"]", text) for text in counts
        )


class ScalerUnused(ScriptRule):
    """A GradScaler is created and never used."""

    code = "HS122"
    name = "scaler-unused"
    severity = "warning"
    reason = (
        "A GradScaler has no effect by itself: float16 gradients below 6e-8 still underflow to zero. It has to scale the loss, step "
        "the optimizer and be updated."
    )
    bad = (
        _PLAIN.format(dtype="bfloat16").replace(
            "import torch\n", 'import torch\nscaler = torch.amp.GradScaler("cuda")\n'
        ),
        "import torch\nfrom torch.cuda.amp import GradScaler, autocast\nscaler = GradScaler()\nfor x in loader:\n"
        "    with autocast(dtype=torch.bfloat16):\n        loss = model(x)\n    loss.backward()\n    optimizer.step()\n",
    )
    good = (_PLAIN.format(dtype="bfloat16"), _RIGHT)
    references = (f"{_AMP}#gradient-scaling",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Scalers whose variable is never read, in scripts that train."""
        if not script.has("backward"):
            return
        for scaler in script.scalers:
            last = scaler.key.rsplit(".", 1)[-1]
            unread = not script.outline.loads[last] and last not in script.outline.strings
            if scaler.key and "[" not in last and scaler.enabled != "no" and unread:
                yield self.finding(
                    script.where(scaler.node),
                    f"`{scaler.key}` is never used, so the loss is not scaled",
                    instead=f"{scaler.key}.scale(loss).backward(); {scaler.key}.step(optimizer); {scaler.key}.update(); "
                    "or remove it if autocast runs in bfloat16",
                )


class Fp16WithoutScaler(TraceRule):
    """float16 autocast is used for training without a GradScaler."""

    code = "HS123"
    name = "fp16-without-scaler"
    severity = "error"
    reason = (
        "The smallest positive float16 value is 6e-8, and many gradients are smaller: without a loss scale they become zero and "
        "their weights stop learning; the loss stalls or becomes NaN. bfloat16 has the range of float32 and needs no scaler."
    )
    bad = (
        _PLAIN.format(dtype="float16"),
        "import torch\nfrom torch.cuda.amp import autocast\nfor x, y in loader:\n    optimizer.zero_grad()\n    with autocast():\n"
        "        out = model(x)\n        loss = criterion(out, y)\n    loss.backward()\n    optimizer.step()\n",
        _ITEM.format(dtype="float16"),
    )
    good = (_PLAIN.format(dtype="bfloat16"), _RIGHT, _ITEM.format(dtype="bfloat16"))
    references = (f"{_AMP}#gradient-scaling", "https://arxiv.org/abs/1710.03740")
    kinds = ("backward",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A backward of an unscaled loss computed under float16 autocast, in a script without any scaler."""
        event = trace[index]
        used = any(script.outline.loads[s.key.rsplit(".", 1)[-1]] or not s.key for s in script.scalers)
        if event.scaled != "no" or used or without_amp(event) or script.outline.names.uses(*_OWNERS):
            return None
        if any("scaler" in name.lower() and name != "GradScaler" for name in script.outline.loads) or script.has(
            "owned_backward", "owned_step"
        ):
            return None
        if not any(True for _ in later(trace, index, "opt_step")):
            return None
        for i in earlier(trace, index, "enter_autocast"):
            opened = trace[i]
            autocasts = opened.regions[-1].autocasts
            if any("float16" not in a.dtypes or a.enabled == "no" for a in autocasts) or opened.inside("no_grad"):
                return None
            if opened.loops != event.loops or opened.function is not event.function:
                return None
            if not _comes_from(opened.node, event, script):
                continue
            loss = f"`{event.subject or 'the loss'}`"
            if all(a.dtype == "float16" for a in autocasts):
                return self.finding(
                    script.where(event.node),
                    f"{loss} is computed under float16 autocast (line {opened.node.lineno}) and not "  # type: ignore[attr-defined]
                    "scaled: gradients below 6e-8 become zero",
                    instead=_SCALE,
                )
            region = next(a for a in autocasts if a.dtype != "float16")
            if _tests_format(region, opened, event):
                return None
            # At the region, where the dtype is chosen.
            return self.finding(
                script.where(region.node),
                f"{_condition(region)} {loss} is not scaled: gradients below 6e-8 become zero",
                instead=_SCALE,
                severity="error" if region.dtype_node is None and "cuda" in region.devices else "warning",
            )
        return None


def _condition(region: Autocast) -> str:
    """When a region computes in float16."""
    if region.dtype_node is not None:
        return f"when `{text_of(region.dtype_node)}` is float16,"
    return "on CUDA, where autocast defaults to float16,"


def _tests_format(region: Autocast, *events: Event) -> bool:
    """Whether a condition around the region or the events may exclude one of its dtypes."""
    flags = [region.enabled, *(text for event in events for text, _ in event.guards)]
    return any(_FORMAT.search(flag) for flag in flags)


def _comes_from(opened: ast.AST, event: Event, script: Script) -> bool:
    """Whether the loss of a backward is computed in a `with` block, or from values that are."""
    if not isinstance(event.node, ast.Call) or event.node in set(ast.walk(opened)):
        return False
    inside = {key for node in ast.walk(opened) for key in _stored(node)} - {"self", ""}
    # Any part of `losses["total"]`, `out.loss` or `sum(losses.values())` that the block assigns.
    loss = [part for node in (event.node.func, *event.node.args) for part in ast.walk(node)]
    if inside & {key_of(part) for part in loss}:
        return True
    for name in {part.id for part in loss if isinstance(part, ast.Name)}:
        for binding in script.outline.lookup(name, event.function):
            if binding.value is not None and binding.function is event.function:
                names = {n.id for n in ast.walk(binding.value) if isinstance(n, ast.Name)}
                if names & inside:
                    return True
    return False


def _stored(node: ast.AST) -> tuple[str, ...]:
    """The variables that a node assigns: for `losses["ce"] = ...` both the item and the dictionary."""
    if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) or not isinstance(node.ctx, ast.Store):
        return ()
    return (key_of(node), key_of(node.value)) if isinstance(node, ast.Subscript) else (key_of(node),)


RULES: tuple[type[Rule], ...] = (ScalerInLoop, ScalerUnused, Fp16WithoutScaler)
