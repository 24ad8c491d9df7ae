"""HS191-HS193: Apex and the order of its calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.order import TraceRule, earlier
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.script import Script

__all__ = ["RULES"]

_APEX = "https://nvidia.github.io/apex/amp.html"


class ApexAmp(ScriptRule):
    """The script uses apex.amp, which is no longer maintained."""

    code = "HS191"
    name = "apex-amp"
    severity = "advice"
    reason = (
        "NVIDIA deprecated apex.amp in favour of torch.amp in 2020 and has since removed it from Apex. O1 corresponds to autocast "
        "with a GradScaler, O2 to DeepSpeed's fp16 mode."
    )
    bad = (
        "from apex import amp\nmodel, optimizer = amp.initialize(model, optimizer, opt_level='O1')\n",
        "from apex import amp\ndef step(self, loss):\n    with amp.scale_loss(loss, self.optimizer) as scaled_loss:\n        scaled_loss.backward()\n",
    )
    good = ("import torch\nscaler = torch.amp.GradScaler('cuda')\nprint(scaler)\n",)
    references = ("https://github.com/NVIDIA/apex/issues/818", "https://github.com/NVIDIA/apex/pull/1896")

    def check(self, script: Script) -> Iterator[Finding]:
        """The first amp.initialize of the script, or else the first scale_loss."""
        calls = script.outline.library_calls
        sites = [site.call for name in ("initialize", "init") for site in calls.get(f"apex.amp.{name}", ())]
        others = [site.call for site in calls.get("apex.amp.scale_loss", ())]
        sites += [call for call in others if not _is_optional(script, call)]
        if sites:
            yield self.finding(
                script.where(sites[0]),
                "apex.amp is no longer maintained and has been removed from Apex",
                instead="torch.autocast with torch.amp.GradScaler",
            )


def _is_optional(script: Script, call: ast.Call) -> bool:
    """Whether code supports Apex as one of several backends: it is in a class or branch named after Apex."""
    node: ast.AST | None = call
    while node is not None:
        name = text_of(node.test) if isinstance(node, (ast.If, ast.IfExp)) else getattr(node, "name", "") or ""
        if "apex" in name.lower():
            return True
        node = script.outline.parents.get(node)
    return False


class ApexAndTorchAmp(TraceRule):
    """apex.amp is combined with torch.autocast or GradScaler."""

    code = "HS192"
    name = "apex-and-torch-amp"
    severity = "error"
    reason = (
        "Both intercept the same operations and both scale the loss: tensors are cast twice, and gradients carry two scales, only "
        "one of which is removed before the step."
    )
    bad = (
        "import torch\nfrom apex import amp\nmodel, optimizer = amp.initialize(model, optimizer, opt_level='O1')\n"
        "scaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n    loss = model(x)\n    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n",
    )
    good = (
        "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n    loss = model(x)\n    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n",
    )
    references = (_APEX,)
    kinds = ("scaler_step",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A scaler's step after an unconditional amp.initialize."""
        event = trace[index]
        if event.guards or not any(not trace[i].guards for i in earlier(trace, index, "apex_initialize")):
            return None
        return self.finding(
            script.where(event.node),
            f"`{event.scaler}` steps an optimizer that apex.amp already manages",
            instead="remove apex.amp and keep torch.autocast with torch.amp.GradScaler",
        )


class ApexAfterParallel(TraceRule):
    """amp.initialize is called after the model was wrapped for parallel training."""

    code = "HS193"
    name = "apex-after-parallel"
    severity = "error"
    reason = (
        "apex.amp.initialize rejects a wrapped model with RuntimeError: Incoming model is an instance of DistributedDataParallel. Parallel "
        "wrappers should only be applied to the model(s) AFTER the model(s) have been returned from amp.initialize."
    )
    bad = (
        "import torch\nfrom apex import amp\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(model)\n"
        "model, optimizer = amp.initialize(model, optimizer, opt_level='O1')\n",
    )
    good = (
        "import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(model)\n"
        "scaler = torch.amp.GradScaler('cuda')\nprint(scaler)\n",
    )
    references = (_APEX,)
    kinds = ("apex_initialize",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """amp.initialize of a model that was wrapped before."""
        event = trace[index]
        for i in earlier(trace, index, "wrap_ddp", "wrap_dp", "set_model"):
            if trace[i].kind == "set_model":
                if trace[i].subject == event.subject:
                    return None
            elif trace[i].subject == event.subject and event.subject:
                return self.finding(
                    script.where(event.node),
                    f"`{event.subject}` is wrapped for parallel training before amp.initialize, which raises RuntimeError",
                    instead="call amp.initialize first, then wrap the model",
                )
        return None


RULES: tuple[type[Rule], ...] = (ApexAmp, ApexAndTorchAmp, ApexAfterParallel)
