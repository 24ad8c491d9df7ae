"""HS140-HS144, HS146, HS147: what belongs inside an autocast region, and how to construct one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.event import Event, compatible, may_meet
from halfstep.check.script.flow.order import STEPS, TraceRule, implied, later
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.modules import region_left_open
from halfstep.check.script.objects.values import DTYPES, UNKNOWN, Autocast, argument, constant, dtypes_of, text_of
from halfstep.check.script.regions.devices import is_device, is_dtype, is_number, untyped_device
from halfstep.check.script.regions.forwards import bce_in_forward, off_by_default
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.handlers import catches_type_error

__all__ = ["RULES"]

_AMP = "https://docs.pytorch.org/docs/stable/amp.html"
_DOCS = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
_ASKS = regex(r"attr\(|version", re.IGNORECASE)
_MISNAMED = {f"torch.{device}.autocast" for device in ("cuda", "cpu", "xpu", "mps")}
_RIGHT = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
_BF16 = """\
import torch
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
"""


class BackwardInsideAutocast(TraceRule):
    """Backward runs inside the autocast region."""

    code = "HS140"
    name = "backward-inside-autocast"
    severity = "warning"
    reason = (
        "Backward already runs each operation in the dtype that autocast chose for its forward. Inside the region autocast applies "
        "to backward as well: custom functions and gradient hooks compute in 16 bits instead of 32, and the cached weight casts "
        "stay in memory longer. PyTorch's documentation advises against it."
    )
    bad = (
        _BF16.replace("    loss.backward()", "        loss.backward()"),
        "import torch\nfrom torch.cuda.amp import autocast\nscaler = torch.cuda.amp.GradScaler()\nfor x in loader:\n"
        "    with autocast(enabled=args.amp):\n        loss = model(x).mean()\n        scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n",
    )
    good = (_BF16, _RIGHT)
    references = (f"{_AMP}#torch.autocast", "https://github.com/pytorch/pytorch/pull/175241")
    kinds = ("backward", "owned_backward")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A backward inside an autocast region."""
        event = trace[index]
        region = event.autocast()
        opened = script.at(region.node) if region is not None else _opened_by_generator(script, event)
        if not opened or self._discards_gradients(script, trace, index):
            return None
        return self.finding(
            script.where(event.node),
            f"backward runs inside the autocast region opened at {opened}",
            instead="yield outside the `with` block"
            if region is None
            else "end the `with` block after the loss and call backward outside it",
        )

    @staticmethod
    def _discards_gradients(script: Script, trace: Trace, index: int) -> bool:
        """Whether the gradients are cleared on every path without a step, as in a warm-up or a batch-size search."""
        events = later(trace, index, "zero_grad", "handed", *STEPS)
        following = next((i for i in events if trace[i].kind != "zero_grad" or implied(trace[i], trace[index])), None)
        if following is None or trace[following].kind != "zero_grad":
            return False
        between = range(*(getattr(trace[i].node, "lineno", 0) for i in (index, following)))
        hidden = (call for name, calls in script.outline.calls.items() if "step" in name for call, _ in calls)
        return not any(call.lineno in between for call in hidden)


class StepInsideAutocast(TraceRule):
    """The optimizer steps inside the autocast region."""

    code = "HS141"
    name = "step-inside-autocast"
    severity = "warning"
    reason = (
        "Autocast caches the 16-bit copies of the weights until its region ends. A step inside the region updates the weights but "
        "not the copies: another forward in the same region uses the old weights, and the loss stops changing (measured: 0.2741, "
        "0.2741, 0.2741 with the whole loop in one region). Optimizers with matrix products, such as Muon, also run them in "
        "16 bits there."
    )
    bad = (
        _BF16.replace("    loss.backward()", "        loss.backward()").replace(
            "    optimizer.step()", "        optimizer.step()"
        ),
        "import torch\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    for x in loader:\n        loss = model(x)\n"
        "        loss.backward()\n        optimizer.step()\n        optimizer.zero_grad()\n",
    )
    good = (_BF16, _RIGHT)
    references = ("https://github.com/X-GenGroup/Flow-Factory/pull/186", f"{_AMP}#torch.autocast")
    kinds = ("scaler_step", "opt_step")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A step inside an autocast region."""
        event = trace[index]
        region = event.autocast()
        opened = script.at(region.node) if region is not None else _opened_by_generator(script, event)
        if not opened:
            return None
        if region is None or len(event.loops) > region.num_loops:
            return self.finding(
                script.where(event.node),
                f"the autocast region opened at {opened} spans the loop: its cached 16-bit weights are stale after this step",
                instead="open the region inside the loop, around the forward and the loss",
                severity="error" if region is not None else None,
            )
        return self.finding(
            script.where(event.node),
            f"`{event.optimizer or 'the optimizer'}` steps inside the autocast region opened at {opened}",
            instead="end the `with` block after the loss and step outside it",
        )


def _opened_by_generator(script: Script, event: Event) -> str:
    """Where a generator opens the region that is still open in the loop over it; "" if there is none."""
    region = region_left_open(script.outline, event.node, event.function) if not event.inside("autocast") else None
    return f"{script.at(region.node)} (and still open where that generator yields)" if region is not None else ""


class AutocastDevice(ScriptRule):
    """The device type of autocast is missing or not a device type."""

    code = "HS142"
    name = "autocast-device"
    severity = "error"
    reason = (
        '`torch.amp.autocast` and `torch.autocast` require the device type as a string such as "cuda" or "cpu". '
        "Without it they raise TypeError; a torch.device, the number of a GPU, a bool or a dtype raises ValueError, and a string has no `.type`. Only the deprecated "
        "torch.cuda.amp.autocast has no device type. No version of torch has `torch.cuda.autocast`: AttributeError."
    )
    bad = (
        "import torch\nfrom torch.amp import autocast\nwith autocast():\n    y = model(x)\n",
        "import torch\ndevice = torch.device('cuda')\nwith torch.autocast(device, dtype=torch.float16):\n    y = model(x)\n",
        "import torch\nwith torch.amp.autocast(enabled=True):\n    y = model(x)\n",
        "import torch\ndef step(x):\n    with torch.cuda.autocast():\n        return model(x)\n",
    )
    good = (
        "import torch\nfrom torch.amp import autocast\nwith autocast('cuda'):\n    y = model(x)\n",
        "import torch\ndevice = torch.device('cuda')\nwith torch.autocast(device.type, dtype=torch.float16):\n    y = model(x)\n",
    )
    references = (f"{_AMP}#torch.autocast",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Calls whose device argument is missing or certainly wrong, or part of the name."""
        for call, _ in script.outline.calls.get("autocast", ()):
            names = script.outline.names
            if (full := names.full(call.func)) not in _MISNAMED or names.ambiguous(call.func):
                continue
            above = [n for n in script.above(call) if isinstance(n, (ast.If, ast.IfExp, ast.Try))]
            if not any(isinstance(n, ast.Try) or _ASKS.search(text_of(n.test)) for n in above):
                yield self.finding(
                    script.where(call),
                    f"torch has no `{full}`: AttributeError",
                    instead=f'torch.autocast("{full.split(".")[1]}", ...)',
                )
        for region in script.autocasts:
            call = region.node
            if region.api != "torch.amp.autocast" or script.outline.names.ambiguous(call.func):
                continue
            if any(k.arg is None for k in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args):
                continue
            device = argument(call, 0, "device_type")
            fault = ""
            if device is None:
                fault = "has no device type and raises TypeError"
            elif isinstance(constant(device), bool) or is_dtype(script, device, region):
                fault = f"expects the device type first, not `{text_of(device)}`"
            elif is_device(script, device, region):
                fault = f"expects the device type as a string, but `{text_of(device)}` is a torch.device"
            elif is_number(script, device, region):
                fault = f"expects the device type as a string, but `{text_of(device)}` is the number of a GPU"
            elif untyped := untyped_device(script, device, region.function):
                kind, text, value = untyped
                yield self.finding(
                    script.where(device),
                    f"`{text}` raises AttributeError where the device is the {kind} `{text_of(value)}` ({script.at(value)})",
                    instead='torch.device("cuda", number)' if kind == "number" else text.removesuffix(".type"),
                )
            if fault:
                yield self.finding(
                    script.where(call), f"`{text_of(call.func)}` {fault}", instead='torch.autocast("cuda", ...)'
                )


class AutocastArgumentOrder(ScriptRule):
    """Autocast arguments are passed in the wrong order."""

    code = "HS143"
    name = "autocast-argument-order"
    severity = "error"
    reason = (
        "`torch.cuda.amp.autocast(enabled, dtype)` and `torch.autocast(device_type, dtype, enabled)` order their arguments "
        "differently. `torch.cuda.amp.autocast(torch.bfloat16)` means enabled=torch.bfloat16, and `torch.cuda.amp.autocast('cuda')` "
        "means enabled='cuda': current torch raises TypeError, older releases computed in float16. "
        '`torch.autocast("cuda", True)` means dtype=True, which disables autocast with a warning.'
    )
    bad = (
        "import torch\nwith torch.cuda.amp.autocast(torch.bfloat16):\n    y = model(x)\n",
        "import torch\nwith torch.autocast('cuda', True):\n    y = model(x)\n",
        "import torch\nwith torch.cuda.amp.autocast(device_type='cuda'):\n    y = model(x)\n",
        "import torch\nfrom torch.cuda.amp import autocast\nwith autocast('cuda', dtype=torch.float16):\n    y = model(x)\n",
    )
    good = ("import torch\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    y = model(x)\n",)
    references = (f"{_AMP}#torch.autocast",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Calls that pass a dtype as enabled, a bool as dtype, or a device type that the function does not accept."""
        for region in script.autocasts:
            call, args = region.node, region.node.args
            if script.outline.names.ambiguous(call.func):
                continue
            fault = ""
            if region.api == "torch.cuda.amp.autocast":
                if args and (self._is_dtype(script, region) or isinstance(constant(args[0]), str)):
                    fault = f"`{text_of(args[0])}` is passed as `enabled`, which has to be a bool: entering the region raises TypeError"
                elif any(k.arg == "device_type" for k in call.keywords):
                    is_tried = catches_type_error(call, script.above(call))
                    fault = (
                        "" if is_tried else "torch.cuda.amp.autocast does not accept `device_type` and raises TypeError"
                    )
            elif region.api == "torch.amp.autocast" and len(args) > 1 and isinstance(constant(args[1]), bool):
                fault = f"`{text_of(args[1])}` is passed as `dtype`: autocast is disabled"
            if fault:
                yield self.finding(script.where(call), fault, instead='torch.autocast("cuda", dtype=..., enabled=...)')

    @staticmethod
    def _is_dtype(script: Script, region: Autocast) -> bool:
        """Whether the first argument is a dtype wherever the file shows its value."""
        first = region.node.args[0]
        function = next((f for c, f in script.outline.library_calls.get(region.api, ()) if c is region.node), None)
        if function is None or script.outline.names.full(first) in DTYPES:
            return script.outline.names.full(first) in DTYPES
        return bool(dtypes_of(script.outline, first, function) - {UNKNOWN})


class NestedAutocastDtypes(TraceRule):
    """A float16 autocast region is nested in a bfloat16 one, or the reverse."""

    code = "HS144"
    name = "nested-autocast-dtypes"
    severity = "error"
    reason = (
        "Autocast caches weight casts by weight, not by dtype. An inner region with another 16-bit dtype reuses the casts of the "
        "outer one, and the product raises RuntimeError: mat1 and mat2 must have the same dtype."
    )
    bad = (
        "import torch\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    h = encoder(x)\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n        y = encoder(h)\n",
    )
    good = (
        "import torch\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    h = encoder(x)\n    y = encoder(h)\n",
    )
    references = (f"{_AMP}#torch.autocast",)
    kinds = ("enter_autocast",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A region inside another one with a different 16-bit dtype."""
        event = trace[index]
        inner = _certain_dtype(event, -1)
        outer = next((f for i in range(len(event.regions) - 2, -1, -1) if (f := _certain_dtype(event, i))), "")
        if not inner or not outer or inner == outer:
            return None
        return self.finding(
            script.where(event.regions[-1].node),
            f"{inner} autocast region inside a {outer} one: a weight used in both raises a dtype error",
            instead="use the same 16-bit dtype for both, or enabled=False for the inner one",
        )


def _certain_dtype(event: Event, position: int) -> str:
    """The 16-bit dtype of a region, or "" when it is another or cannot be determined."""
    autocasts = event.regions[position].autocasts
    dtypes = {a.dtype if a.enabled == "yes" else "" for a in autocasts}
    dtype = dtypes.pop() if len(dtypes) == 1 else ""
    return dtype if dtype in {"float16", "bfloat16"} else ""


class BceUnderAutocast(TraceRule):
    """Binary cross-entropy on probabilities is computed inside a CUDA autocast region."""

    code = "HS146"
    name = "bce-under-autocast"
    severity = "error"
    reason = (
        "`binary_cross_entropy` and `BCELoss` raise RuntimeError under CUDA autocast: a float16 sigmoid is exactly 1 from 8.32 on "
        "and exactly 0 from -17.35 down, and the gradient would be infinite. On the CPU the code runs, so tests without a GPU pass."
    )
    bad = (
        "import torch\nimport torch.nn as nn\ncriterion = nn.BCELoss()\nwith torch.autocast('cuda'):\n    loss = criterion(model(x), y)\n",
        "import torch\nimport torch.nn.functional as F\nwith torch.cuda.amp.autocast():\n"
        "    loss = F.binary_cross_entropy(torch.sigmoid(model(x)), y)\n",
    )
    good = (
        "import torch\nimport torch.nn as nn\ncriterion = nn.BCEWithLogitsLoss()\nwith torch.autocast('cuda'):\n"
        "    loss = criterion(model(x), y)\n",
        "import torch\nimport torch.nn.functional as F\nwith torch.autocast('cuda'):\n    p = torch.sigmoid(model(x))\n"
        "    with torch.autocast('cuda', enabled=False):\n        loss = F.binary_cross_entropy(p.float(), y)\n",
    )
    references = (
        f"{_AMP}#prefer-binary-cross-entropy-with-logits-over-binary-cross-entropy",
        "https://github.com/pytorch/pytorch/issues/61098",
    )
    kinds = ("bce",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Calls in a region, and calls in the forward of a module that a region calls."""
        findings = [*super().check(script), *(self._report(script, call) for call in bce_in_forward(script))]
        yield from {(f.line, f.column): f for f in findings}.values()

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A call of binary cross-entropy inside a CUDA region."""
        event = trace[index]
        region = event.autocast()
        if region is None or any(a.device not in {"cuda", None} for a in region.autocasts):
            return None
        if any(off_by_default(script, a) for a in region.autocasts):
            return None
        return self._report(script, event.node, event.local.subject if event.scaled == "maybe" else "")

    def _report(self, script: Script, node: ast.AST, one_of: str = "") -> Finding:
        when = f"when `{one_of}` is BCELoss, " if one_of else ""
        return self.finding(
            script.where(node),
            f"{when}binary cross-entropy on probabilities raises RuntimeError under CUDA autocast",
            instead="BCEWithLogitsLoss on the logits, or compute the loss in float32 outside the region",
        )


class DataParallelBf16(ScriptRule):
    """DataParallel replicas run in float16 although the region uses bfloat16."""

    code = "HS147"
    name = "dataparallel-bf16"
    severity = "warning"
    reason = (
        "DataParallel runs its replicas in threads, and the autocast state is thread-local. Each thread inherits whether autocast is "
        "enabled (torch/nn/parallel/parallel_apply.py) but not the dtype, so it computes in CUDA's default, float16, without the "
        "scaler that float16 needs."
    )
    bad = (
        "import torch\nmodel = torch.nn.DataParallel(Net()).cuda()\nfor x in loader:\n"
        "    with torch.autocast('cuda', dtype=torch.bfloat16):\n        loss = model(x).mean()\n    loss.backward()\n    optimizer.step()\n",
    )
    good = (
        "import torch\nmodel = torch.nn.parallel.DistributedDataParallel(Net().cuda())\nfor x in loader:\n"
        "    with torch.autocast('cuda', dtype=torch.bfloat16):\n        loss = model(x).mean()\n    loss.backward()\n    optimizer.step()\n",
    )
    references = (f"{_DOCS}#dataparallel-in-a-single-process",)

    def check(self, script: Script) -> Iterator[Finding]:
        """DataParallel in a script where every region is bfloat16, or may be."""
        regions = [a for a in script.autocasts if a.enabled != "no" and a.device != "cpu"]
        if not regions or any("bfloat16" not in a.dtypes or a.dtype_node is None for a in regions):
            return
        either = next((text_of(a.dtype_node) for a in regions if a.dtype != "bfloat16"), "")
        when = f"when `{either}` is bfloat16, " if either else ""
        opened = list(script.events("enter_autocast"))
        reported = set()
        for event in script.events("wrap_dp"):
            if event.node not in reported and any(compatible(event, o) and may_meet(event, o) for o in opened):
                reported.add(event.node)
                yield self.finding(
                    script.where(event.node),
                    f"{when}DataParallel does not pass the dtype of the region to its replicas: they compute in float16, not bfloat16",
                    instead="DistributedDataParallel with one process per GPU",
                )


RULES: tuple[type[Rule], ...] = (
    BackwardInsideAutocast, StepInsideAutocast, AutocastDevice, AutocastArgumentOrder, NestedAutocastDtypes, BceUnderAutocast,
    DataParallelBf16,
)  # fmt: skip
