"""HS178: the counter of Accelerate's `accumulate` context."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.objects.engines import ACCELERATE, engine_at
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]

_TWO_MODELS = """\
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
unet, text_encoder, optimizer, loader = accelerator.prepare(unet, text_encoder, optimizer, loader)
for x, y in loader:
    with {contexts}:
        accelerator.backward(loss_fn(unet(x, text_encoder(y))))
        optimizer.step()
        optimizer.zero_grad()
"""
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)


class AccumulateEnteredTwice(ScriptRule):
    """accelerator.accumulate is entered twice in one iteration."""

    code = "HS178"
    name = "accumulate-entered-twice"
    severity = "warning"
    reason = (
        "Each entry of `accelerator.accumulate` counts one micro-batch, whatever model it receives. Entered twice per iteration, "
        "with n accumulation steps the window ends after n/2 iterations, although the loss is divided by n. With two blocks one "
        "after the other and an even n, the first never reaches the end of a window. Pass all models to one call."
    )
    bad = (_TWO_MODELS.format(contexts="accelerator.accumulate(unet), accelerator.accumulate(text_encoder)"),)
    good = (_TWO_MODELS.format(contexts="accelerator.accumulate(unet, text_encoder)"),)
    references = (
        "https://huggingface.co/docs/accelerate/package_reference/accelerator#accelerate.Accelerator.accumulate",
        "measured: source code of accelerate 1.15.0, accumulate and _do_sync",
    )
    words = ("Accelerator",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Two `with accelerator.accumulate(...)` in one loop, neither under a condition of its own."""
        first: dict[tuple[str, tuple[ast.AST, ...]], ast.Call] = {}
        sites = sorted(script.outline.calls.get("accumulate", ()), key=lambda s: (s.call.lineno, s.call.col_offset))
        for call, function in sites:
            if not isinstance(call.func, ast.Attribute) or not isinstance(
                script.outline.parents.get(call), ast.withitem
            ):
                continue
            owner = key_of(call.func.value)
            engine = engine_at(script, owner, function) if owner else None
            around = _around(script, call)
            if engine is None or engine.library != ACCELERATE or engine.steps is None or not around:
                continue
            steps = constant(engine.steps)
            if steps in {1, None}:
                continue
            other = first.setdefault((owner, around), call)
            if other is call:
                continue
            condition = "" if isinstance(steps, int) else f"if `{text_of(engine.steps)}` is above 1, "
            yield self.finding(
                script.where(call),
                f"{condition}`{owner}.accumulate` counts this iteration a second time (first on {script.at(other)}): windows have half "
                "the micro-batches by which the loss is divided",
                instead=f"{owner}.accumulate(...) once, with all the models",
            )


def _around(script: Script, call: ast.Call) -> tuple[ast.AST, ...]:
    """The innermost loop around a call and the branches between them; () outside loops."""
    branches: list[ast.AST] = []
    node: ast.AST = call
    while (parent := script.outline.parents.get(node)) is not None and not isinstance(parent, _FUNCTIONS):
        if isinstance(parent, _LOOPS):
            return (parent, *branches)
        if isinstance(parent, ast.If):
            branch = parent.body if any(node is s for s in parent.body) else parent.orelse
            branches.append(branch[0] if branch else parent)
        elif isinstance(parent, (ast.Try, ast.Match, ast.ExceptHandler)):
            branches.append(node)
        node = parent
    return ()


RULES: tuple[type[Rule], ...] = (AccumulateEnteredTwice,)
