"""HS120-HS122: whether a scaler is needed and used, and where it is created."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfstep.check.finding import Finding, Severity
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.script.scaler_calls import framework_precisions
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import TraceRule, earlier
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.values import Autocast, Scaler, constant, text_of
from halfstep.check.script.script import Script

__all__ = ["RULES", "ScalerWithBf16"]

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
_FULL_PRECISION = re.compile(r"== (torch\.)?['\"]?(float32|fp32|float)['\"]?$")
_SWITCH = re.compile(r"(^|[._])(use_|with_)?(amp|mixed_precision)$")
_ONLY_BF16 = re.compile(
    r"^[\w.\[\]'\"]+ (== (torch\.)?['\"]?(bfloat16|bf16)|!= (torch\.)?['\"]?(float16|fp16|half))['\"]?$"
)
_FORMAT = re.compile(r"16|dtype|bf|half|float", re.IGNORECASE)


def _initial_scale(scaler: Scaler) -> str:
    """The scale that a new scaler starts with: torch's default, unless an argument may set it."""
    call = scaler.node
    is_default = all(isinstance(constant(a), str) for a in call.args) and not any(
        k.arg in {"init_scale", None} for k in call.keywords
    )
    return "65536" if is_default else "its initial value"


def _creation(script: Script, scaler: Scaler) -> Event | None:
    return next((e for e in script.events("make_scaler") if e.node is scaler.node), None)


class ScalerWithBf16(ScriptRule):
    """A GradScaler is used with bfloat16 autocast."""

    code = "HS120"
    name = "scaler-with-bf16"
    severity = "warning"
    reason = (
        "bfloat16 has the range of float32 (3.4e38), so gradients underflow or overflow only where float32 gradients do, and a "
        "scaler does not help. It reads and writes every gradient and synchronizes with the GPU on each step, can still skip "
        "steps, and with bfloat16 parameters `unscale_` raises on CUDA: not implemented for 'BFloat16'."
    )
    bad = (
        _LOOP.format(scaler='scaler = torch.amp.GradScaler("cuda")', dtype="bfloat16"),
        _LOOP.format(scaler="scaler = torch.cuda.amp.GradScaler()", dtype="bfloat16"),
    )
    good = (
        _LOOP.format(scaler='scaler = torch.amp.GradScaler("cuda", enabled=False)', dtype="bfloat16"),
        _RIGHT,
        _PLAIN.format(dtype="bfloat16"),
        _LOOP.format(scaler='scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))', dtype="bfloat16"),
    )
    references = (
        "https://github.com/pytorch/pytorch/issues/127176",
        "https://github.com/huggingface/accelerate/pull/1036",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """Scalers that may be enabled for a loss computed under bfloat16 autocast."""
        certain = list(self.idle(script))
        for scaler in certain:
            yield self.finding(
                script.where(scaler.node),
                "autocast computes in bfloat16, which has the range of float32: the scaler only costs time and skips steps",
                instead="remove the scaler: loss.backward(), optimizer.step()",
            )
        for scaler in script.scalers:
            if scaler not in certain and _ONLY_BF16.search(scaler.enabled) and script.has("scaler_step"):
                yield self.finding(
                    script.where(scaler.node),
                    f"the scaler is enabled when `{scaler.enabled}`: bfloat16 needs no scaler, and float16 trains without one",
                    instead="enable it for float16 only",
                )
        for scaler, region in self._idle_when_bf16(script):
            if scaler not in certain:
                dtype = text_of(region.dtype_node)
                yield self.finding(
                    script.where(scaler.node),
                    f"when `{dtype}` (line {region.node.lineno}) is bfloat16, the scaler is still enabled: it only costs time and skips steps",
                    instead=f"enabled={dtype} == torch.float16",
                )

    @staticmethod
    def _idle_when_bf16(script: Script) -> Iterator[tuple[Scaler, Autocast]]:
        """Scalers that are enabled whichever dtype the regions use, with a region that may use bfloat16."""
        chosen = [a for a in script.autocasts if a.dtype_node is not None and a.enabled != "no"]
        either = [a for a in chosen if {"float16", "bfloat16"} <= a.dtypes]
        stepped = {e.scaler.rsplit(".", 1)[-1] for e in script.events("scaler_step") if not _format_tests(script, e)}
        if not either or len(either) != len([a for a in script.autocasts if a.enabled != "no"]):
            return
        for scaler in script.scalers:
            creation = _creation(script, scaler)
            if scaler.key.rsplit(".", 1)[-1] not in stepped or creation is None or _format_tests(script, creation):
                continue
            values = script.outline.values(scaler.key, scaler.function)
            flags = script.outline.values(scaler.enabled, scaler.function) if scaler.enabled.isidentifier() else []
            # A flag for mixed precision as a whole says nothing about the dtype.
            amp = _SWITCH.search(scaler.enabled) and not any(
                _FORMAT.search(text_of(f)) for f in (*flags, *scaler.node.keywords)
            )
            together = scaler.enabled == "yes" or all(a.enabled == scaler.enabled for a in either)
            if len(values) == 1 and (together or amp):  # else replaced by None, or switched by a flag of its own
                yield scaler, either[0]

    @classmethod
    def idle(cls, script: Script) -> Iterator[Scaler]:
        """The scalers that certainly run in bfloat16; other rules do not report scalers that should be removed."""
        owned = framework_precisions(script) == {"bfloat16"}
        if not owned and not any(a.dtype == "bfloat16" for a in script.autocasts):
            return
        if owned and not script.autocasts:
            stepped = {e.scaler.rsplit(".", 1)[-1] for e in script.events("scaler_step")}
        else:
            stepped = {
                last for trace in script.traces for i in range(len(trace)) if (last := cls._in_bf16(script, trace, i))
            }
        for scaler in script.scalers:
            creation = _creation(script, scaler)
            flags = (
                {scaler.enabled, *(text for text, _ in creation.guards)} if creation is not None else {scaler.enabled}
            )
            # A flag that names a number format may be set for float16 only.
            if scaler.key.rsplit(".", 1)[-1] in stepped and not any(_FORMAT.search(f) or f == "no" for f in flags):
                yield scaler

    @staticmethod
    def _in_bf16(script: Script, trace: Trace, index: int) -> str:
        """The scaler of a scaled backward or step whose loss comes from a bfloat16 region; "" if that is uncertain."""
        event = trace[index]
        if event.kind != "scaler_step" and not (event.kind == "backward" and event.scaled == "yes"):
            return ""
        if any(_FORMAT.search(text) for text, _ in event.guards):
            return ""
        before = next(earlier(trace, index, "enter_autocast"), None)
        if before is not None and not trace[before].inside("no_grad"):
            regions = list(trace[before].regions[-1].autocasts)
        else:
            regions = [a for a in script.autocasts if a.enabled != "no"]
        certain = bool(regions) and all(a.dtype == "bfloat16" and not _FORMAT.search(a.enabled) for a in regions)
        return event.scaler.rsplit(".", 1)[-1] if certain else ""


def _format_tests(script: Script, event: Event) -> bool:
    """Whether a condition on an event, or what a flag in it is assigned, mentions a number format."""
    for text, _ in event.guards:
        if _FULL_PRECISION.search(text):
            continue  # `dtype == torch.float32` leaves both 16-bit formats
        values = script.outline.values(text, event.function) if text.isidentifier() else []
        if any(_FORMAT.search(t) for t in (text, *map(text_of, values))):
            return True
    return False


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
        if scaler is None or not scaler.key or scaler.enabled == "no" or self._first_time(event, scaler.key):
            return None
        function = event.function
        if event.loops:
            inside = [e for e in trace if e.loops[: len(event.loops)] == event.loops]
            steps = [e for e in inside if e.kind == "scaler_step" and compatible(e, event)]
            fresh = [e for e in inside if e.kind in {"set_model", "set_optimizer", "make_optimizer"}]
            if not steps or fresh:
                return None
            severity: Severity = "error" if all(len(e.loops) == len(event.loops) for e in steps) else "warning"
            frequency = f"on every iteration of the loop at line {event.loops[-1][1]}"
        else:
            steps = [e for e in trace if e.kind == "scaler_step" and len(e.loops) == 1]
            per_epoch = "epoch" in function.params or "epoch" in function.name
            passed = any(step.optimizer.partition(".")[0] in function.params for step in steps)
            fresh = [e for e in trace if e.kind in {"set_optimizer", "make_optimizer"}]
            if not (steps and per_epoch and passed) or fresh or event.roots or "epochs" in function.name:
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
    def _first_time(event: Event, key: str) -> bool:
        last = key.rsplit(".", 1)[-1]
        # A guard that is true in one iteration only; `device == 'cpu'` is the same in all of them.
        once = ("first", "init", last)
        counts = (text for text, is_true in event.guards if is_true and " == " in text)
        return any(word in text for word in once for text, _ in event.guards) or any(
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


RULES: tuple[type[Rule], ...] = (ScalerWithBf16, ScalerInLoop, ScalerUnused)
