"""HS121-HS122: where a scaler is created, and whether it is used."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfstep.check.examples import PLAIN_LOOP, SCALED_LOOP
from halfstep.check.finding import Finding, Severity
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.script.bf16_scaler import ScalerWithBf16
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import TraceRule
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.values import Scaler, constant
from halfstep.check.script.script import Script

__all__ = ["RULES"]

_DOCS = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
_AMP = "https://docs.pytorch.org/docs/stable/amp.html"
_RIGHT = SCALED_LOOP.format(scaler='scaler = torch.amp.GradScaler("cuda")', dtype="float16")
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
        SCALED_LOOP.replace("{scaler}\n", "")
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
        PLAIN_LOOP.format(dtype="bfloat16").replace(
            "import torch\n", 'import torch\nscaler = torch.amp.GradScaler("cuda")\n'
        ),
        "import torch\nfrom torch.cuda.amp import GradScaler, autocast\nscaler = GradScaler()\nfor x in loader:\n"
        "    with autocast(dtype=torch.bfloat16):\n        loss = model(x)\n    loss.backward()\n    optimizer.step()\n",
    )
    good = (PLAIN_LOOP.format(dtype="bfloat16"), _RIGHT)
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


RULES: tuple[type[Rule], ...] = (ScalerInLoop, ScalerUnused)
