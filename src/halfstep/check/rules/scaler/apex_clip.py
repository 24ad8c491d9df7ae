"""HS197: gradients that are used before Apex unscales them, or clipped where Apex's optimizer does not read them."""

from __future__ import annotations

import ast

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.check.rules.script.apex import ADVANCED, LOOP, SCALED, is_apex, level_of
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import TraceRule, earlier
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.command_line import Options
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = ["RULES"]

_CLIP = "torch.nn.utils.clip_grad_norm_({}, 1.0)"


class ApexScaledGradients(TraceRule):
    """Gradients are clipped or used before Apex has unscaled them, or are not those that it unscales."""

    code = "HS197"
    name = "apex-scaled-gradients"
    severity = "error"
    reason = (
        "Apex unscales the gradients when the `with amp.scale_loss(...)` block ends: a clip or a step inside it uses gradients that "
        "are still multiplied by the scale, 65536 at first. With O2 it unscales into the gradients of the float32 master weights, "
        "which the optimizer steps; to clip `model.parameters()` then changes nothing."
    )
    bad = (
        LOOP.format(
            level="O1",
            backward=SCALED.format(loss="scaled_loss") + f"\n        {_CLIP.format('amp.master_params(optimizer)')}",
        ),
        LOOP.format(
            level="O2", backward=SCALED.format(loss="scaled_loss") + f"\n    {_CLIP.format('model.parameters()')}"
        ),
    )
    good = (
        LOOP.format(
            level="O1",
            backward=SCALED.format(loss="scaled_loss") + f"\n    {_CLIP.format('amp.master_params(optimizer)')}",
        ),
        LOOP.format(
            level="O2",
            backward=SCALED.format(loss="scaled_loss") + f"\n    {_CLIP.format('amp.master_params(optimizer)')}",
        ),
        LOOP.format(
            level="O1", backward=SCALED.format(loss="scaled_loss") + f"\n    {_CLIP.format('model.parameters()')}"
        ),
    )
    references = (f"{ADVANCED}#gradient-clipping",)
    kinds = ("clip", "opt_step")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A clip or step after a backward in the same scale_loss block, or a clip of model weights with O2."""
        event = trace[index]
        before = _last_backward(trace, index)
        region = trace[before].inside("scaled_loss") if before is not None else None
        if before is None or region is None or not is_apex(script, region.node) or self._is_unscaled(script):
            return None
        is_clip = event.kind == "clip"
        what = f"`{text_of(event.node.func)}`" if isinstance(event.node, ast.Call) else "this call"
        inside = event.inside("scaled_loss")
        if inside is not None and inside.node is region.node:
            verb = "clips" if is_clip else "uses"
            return self.finding(
                script.where(event.node),
                f"{what} {verb} gradients that are still multiplied by Apex's loss scale; the block of line "
                f"{script.where(region.node).line} unscales them when it ends",
                instead=f"move {'the clip' if is_clip else 'the step'} after the `with` block",
            )
        if not is_clip or trace[before].loops != event.loops or not _clips_weights(script, event):
            return None
        levels = {_is_o2(script, call) for call in _initializes(script)}
        if not levels or None in levels:
            return None
        optimizer = argument(region.node, 1, "optimizers") if isinstance(region.node, ast.Call) else None
        return self.finding(
            script.where(event.node),
            f"{what} clips the float16 gradients of the model; with opt_level O2 the optimizer steps float32 master weights",
            instead=f"clip amp.master_params({text_of(optimizer) or 'optimizer'})",
            severity=None if levels == {True} else "warning",
        )

    @staticmethod
    def _is_unscaled(script: Script) -> bool:
        """Whether every amp.initialize sets a loss scale of 1, or a level that has none."""
        calls = _initializes(script)
        scales = [argument(call, 8, "loss_scale") for call in calls]
        return bool(calls) and all(
            level_of(script, call) in {"O0", "O3"} if scale is None else constant(scale) in {1, "1", "1.0"}
            for call, scale in zip(calls, scales, strict=True)
        )


def _last_backward(trace: Trace, index: int) -> int | None:
    """The last backward before an event: of two in branches that exclude each other the one that Apex scales."""
    before = list(earlier(trace, index, "backward"))
    others = (i for i in before if trace[i].inside("scaled_loss") and not compatible(trace[i], trace[before[0]]))
    if before and trace[before[0]].inside("scaled_loss") is None:
        return next(others, before[0])
    return before[0] if before else None


def _initializes(script: Script) -> list[ast.Call]:
    """The calls of amp.initialize."""
    return [site.call for site in script.outline.library_calls.get("apex.amp.initialize", ())]


def _clips_weights(script: Script, event: Event) -> bool:
    """Whether a clip is of `model.parameters()` of a model that amp.initialize was passed."""
    call = event.node
    clipped = call.args[0] if isinstance(call, ast.Call) and call.args else None
    func = clipped.func if isinstance(clipped, ast.Call) else None
    if not isinstance(func, ast.Attribute) or func.attr != "parameters":
        return False
    models = {last_name(key_of(argument(c, 0, "models"))) for c in _initializes(script)}
    return last_name(key_of(func.value)) in models


def _is_o2(script: Script, call: ast.Call) -> bool | None:
    """Whether amp.initialize has the level O2: False where an option of the script offers it, None where nothing says so."""
    if level := level_of(script, call):
        return True if level == "O2" else None
    option = argument(call, 3, "opt_level")
    name = option.attr if isinstance(option, ast.Attribute) else ""
    declared = [call for call, _, dest in Options(script).declared if dest == name]
    if not declared:
        return None
    default = argument(declared[0], None, "default")
    # Apex accepts no None: without a default each run chooses a level.
    return False if default is None or constant(default) is None or "O2" in text_of(declared[0]) else None


RULES: tuple[type[Rule], ...] = (ApexScaledGradients,)
