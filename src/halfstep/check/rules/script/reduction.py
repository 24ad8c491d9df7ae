"""HS116: gradients that are reduced across ranks after they were unscaled."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.objects.tensors import grad_of, joins_gradients
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS
from halfstep.check.script.syntax.scope import CallSite

__all__ = ["RULES"]

_COLLECTIVES = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor", "allreduce")
_REDUCES = regex(r"^_?(average|avg|sync|synchronize|all_?reduce|reduce|mean)_?(\w+_)?grad(ient)?s?(_\w+)?$", re.IGNORECASE)  # fmt: skip
_LOOP = """\
import torch
import torch.distributed as dist
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
{body}    scaler.step(optimizer)
    scaler.update()
"""
_UNSCALE = "    scaler.unscale_(optimizer)\n"
_REDUCE = "    for p in model.parameters():\n        dist.all_reduce(p.grad)\n        p.grad /= dist.get_world_size()\n"


class UnscaleBeforeReduction(ScriptRule):
    """Gradients are unscaled before they are reduced across ranks."""

    code = "HS116"
    name = "unscale-before-reduction"
    severity = "error"
    reason = (
        "`unscale_` looks for inf and NaN in the gradients of its own rank and stores the result. A reduction afterwards spreads "
        "one rank's inf to all: the rank that had it skips the step, the others apply inf to their weights, and from then on the "
        "ranks have different weights and different scales. The sum is also computed without the scale that protects small "
        "float16 values."
    )
    bad = (_LOOP.format(body=_UNSCALE + _REDUCE),)
    good = (_LOOP.format(body=_REDUCE + _UNSCALE), _LOOP.format(body=_UNSCALE))
    references = ("https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler.unscale_",)

    def check(self, script: Script) -> Iterator[Finding]:
        """A reduction of gradients between `unscale_` and the step of one function."""
        calls = script.outline.calls
        for unscale in calls.get("unscale_", ()):
            steps = [s.call.lineno for s in calls.get("step", ()) if s.function is unscale.function and s.call.args]
            end = min((line for line in steps if line > unscale.call.lineno), default=0)
            inside = [
                site
                for site in _reductions(script)
                if site.function is unscale.function and unscale.call.lineno < site.call.lineno < end
            ]
            if inside and self._same_path(script, unscale.call, inside[0].call):
                scaler = key_of(unscale.call.func.value) if isinstance(unscale.call.func, ast.Attribute) else "scaler"
                yield self.finding(
                    script.where(inside[0].call),
                    f"gradients are reduced across ranks after `{scaler}.unscale_` ({script.at(unscale.call)}) looked for inf on "
                    "this rank alone: ranks may take different decisions",
                    instead=f"reduce the scaled gradients first, then call {scaler}.unscale_",
                )

    @staticmethod
    def _same_path(script: Script, first: ast.Call, last: ast.Call) -> bool:
        """Whether the second call follows the first in the same pass: no loop or branch around the first excludes it."""
        around = set(script.above(last))
        return all(node in around for node in script.above(first) if isinstance(node, (ast.For, ast.While, ast.If)))


def _reductions(script: Script) -> Iterator[CallSite]:
    """The calls that reduce gradients across ranks, also through a function of the file."""
    direct = [
        site for name in _COLLECTIVES for site in script.outline.calls.get(name, ()) if _is_of_gradients(script, site)
    ]
    yield from direct
    reducing = {site.function for site in direct if not isinstance(site.function.node, ast.Module)}
    names = {function.name for function in reducing}
    for name, sites in script.outline.calls.items():
        for site in sites:
            if (_REDUCES.match(name) and site.call.args) or (
                name in names and script.outline.call_target(site.call, site.function) in reducing
            ):
                yield site


def _is_of_gradients(script: Script, site: CallSite) -> bool:
    """Whether a collective is passed gradients, directly or in a variable with all of them: `flat = torch.cat([p.grad, ...])`."""
    values = [v for argument in site.call.args[:2] for v in (argument, *getattr(argument, "elts", ()))]
    if any(map(grad_of, values)):
        return True
    named = [v.id for v in values if isinstance(v, ast.Name)]
    bound = [b for name in named for b in script.outline.bindings.get(name, ())[:MAX_BINDINGS]]
    bound = [b for b in bound if b.function is site.function and b.value is not None and b.index is None]
    return any(joins_gradients(b.value) for b in bound if b.value is not None)


RULES: tuple[type[Rule], ...] = (UnscaleBeforeReduction,)
