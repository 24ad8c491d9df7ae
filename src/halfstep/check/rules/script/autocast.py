"""HS140-HS147: what belongs inside an autocast region, and how one is made."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.event import Event, compatible
from halfstep.check.script.names import key_of
from halfstep.check.script.order import STEPS, TraceRule, later
from halfstep.check.script.script import Script
from halfstep.check.script.trace import Trace
from halfstep.check.script.values import DTYPES, Autocast, argument, constant, text_of

__all__ = ["RULES"]

_AMP = "https://docs.pytorch.org/docs/stable/amp.html"
_DOCS = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
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
        "Backward already runs each operation in the type its forward chose. Inside the region the casts of autocast are applied "
        "a second time: custom functions and gradient hooks compute in 16 bits what they computed in 32, and the region's cached "
        "weight casts stay in memory longer. PyTorch's documentation advises against it."
    )
    bad = (
        _BF16.replace("    loss.backward()", "        loss.backward()"),
        "import torch\nfrom torch.cuda.amp import autocast\nscaler = torch.cuda.amp.GradScaler()\nfor x in loader:\n"
        "    with autocast(enabled=args.amp):\n        loss = model(x).mean()\n        scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n",
    )
    good = (_RIGHT, _BF16)
    references = (f"{_AMP}#torch.autocast", "https://github.com/pytorch/pytorch/pull/175241")
    kinds = ("backward",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A backward with an autocast region around it."""
        event = trace[index]
        region = event.autocast()
        if region is None or self._thrown_away(script, trace, index):
            return None
        return self.finding(
            script.where(event.node),
            f"backward runs inside the autocast region of line {region.node.lineno}",  # type: ignore[attr-defined]
            instead="end the `with` block after the loss; call backward outside it",
        )

    @staticmethod
    def _thrown_away(script: Script, trace: Trace, index: int) -> bool:
        """Whether the gradients are cleared without a step, as a warm-up or a search for the batch size does."""
        following = next(later(trace, index, "zero_grad", "handed", *STEPS), None)
        if following is None or trace[following].kind != "zero_grad":
            return False
        first, last = trace[index].node, trace[following].node
        between = range(getattr(first, "lineno", 0), getattr(last, "lineno", 0) + 1)
        hidden = (call for name, calls in script.outline.calls.items() if "step" in name for call, _ in calls)
        return not any(call.lineno in between for call in hidden)


class StepInsideAutocast(TraceRule):
    """The optimizer steps inside the autocast region."""

    code = "HS141"
    name = "step-inside-autocast"
    severity = "warning"
    reason = (
        "Autocast keeps the 16-bit copies of the weights until its region ends. A step inside changes the weights and not the "
        "copies: when the region goes on with another forward, it computes with the old weights and training stands still "
        "(measured: loss 0.2741, 0.2741, 0.2741 with the whole loop in one region). Optimizers that multiply matrices, such as "
        "Muon, also do it in 16 bits there."
    )
    bad = (
        _BF16.replace("    loss.backward()", "        loss.backward()").replace(
            "    optimizer.step()", "        optimizer.step()"
        ),
        "import torch\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    for x in loader:\n        loss = model(x)\n"
        "        loss.backward()\n        optimizer.step()\n        optimizer.zero_grad()\n",
    )
    good = (_RIGHT, _BF16)
    references = ("https://github.com/X-GenGroup/Flow-Factory/pull/186", f"{_AMP}#torch.autocast")
    kinds = ("scaler_step", "opt_step")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A step with an autocast region around it."""
        event = trace[index]
        region = event.autocast()
        if region is None:
            return None
        line = region.node.lineno  # type: ignore[attr-defined]
        if len(event.loops) > region.num_loops:
            return self.finding(
                script.where(event.node),
                f"the autocast region of line {line} spans the loop: its cached 16-bit weights are not refreshed after this step",
                instead="open the region inside the loop, around the forward and the loss only",
                severity="error",
            )
        return self.finding(
            script.where(event.node),
            f"`{event.optimizer or 'the optimizer'}` steps inside the autocast region of line {line}",
            instead="end the `with` block after the loss",
        )


class AutocastDevice(ScriptRule):
    """Autocast is made without a device type, or with something that is not one."""

    code = "HS142"
    name = "autocast-device"
    severity = "error"
    reason = (
        '`torch.amp.autocast` and `torch.autocast` need the device type as a string, "cuda" or "cpu": without it they raise '
        "TypeError, with a torch.device, a bool or a dtype ValueError. Only the deprecated torch.cuda.amp.autocast had none."
    )
    bad = (
        "import torch\nfrom torch.amp import autocast\nwith autocast():\n    y = model(x)\n",
        "import torch\ndevice = torch.device('cuda')\nwith torch.autocast(device, dtype=torch.float16):\n    y = model(x)\n",
        "import torch\nwith torch.amp.autocast(enabled=True):\n    y = model(x)\n",
    )
    good = (
        "import torch\ndevice = torch.device('cuda')\nwith torch.autocast(device.type, dtype=torch.float16):\n    y = model(x)\n",
        "import torch\nwith torch.autocast(device_type=device, dtype=torch.float16):\n    y = model(x)\n",
    )
    references = (f"{_AMP}#torch.autocast",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Calls whose device argument is missing or surely wrong."""
        for region in script.autocasts:
            call = region.node
            if region.api != "torch.amp.autocast" or script.outline.names.ambiguous(call.func):
                continue
            if any(k.arg is None for k in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args):
                continue
            device = argument(call, 0, "device_type")
            said = ""
            if device is None:
                said = "has no device type: TypeError"
            elif isinstance(constant(device), bool) or script.outline.names.full(device) in DTYPES:
                said = f"takes the device type first, and `{text_of(device)}` is not one"
            elif self._is_device(script, device, region):
                said = f"wants a string, and `{text_of(device)}` is a torch.device"
            if said:
                yield self.finding(
                    script.where(call), f"`{text_of(call.func)}` {said}", instead='torch.autocast("cuda", ...)'
                )

    @staticmethod
    def _is_device(script: Script, device: ast.expr, region: Autocast) -> bool:
        key = key_of(device)
        function = next((f for c, f in script.outline.library_calls.get(region.api, ()) if c is region.node), None)
        if not key or "." in key or function is None or key in function.params:
            return isinstance(device, ast.Call) and script.outline.names.full(device.func) == "torch.device"
        values = script.outline.values(key, function)
        return bool(values) and all(
            isinstance(v, ast.Call) and script.outline.names.full(v.func) == "torch.device" for v in values
        )


class AutocastArgumentOrder(ScriptRule):
    """An autocast argument stands where another one belongs."""

    code = "HS143"
    name = "autocast-argument-order"
    severity = "error"
    reason = (
        "`torch.cuda.amp.autocast(enabled, dtype)` and `torch.autocast(device_type, dtype, enabled)` take their arguments in "
        "different orders. `torch.cuda.amp.autocast(torch.bfloat16)` means enabled=torch.bfloat16, which is true, and computes in "
        'float16; `torch.autocast("cuda", True)` means dtype=True, which switches autocast off with a warning.'
    )
    bad = (
        "import torch\nwith torch.cuda.amp.autocast(torch.bfloat16):\n    y = model(x)\n",
        "import torch\nwith torch.autocast('cuda', True):\n    y = model(x)\n",
        "import torch\nwith torch.cuda.amp.autocast(device_type='cuda'):\n    y = model(x)\n",
    )
    good = ("import torch\nwith torch.autocast('cuda', torch.bfloat16, True):\n    y = model(x)\n",)
    references = (f"{_AMP}#torch.autocast",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Calls with a dtype for enabled, a bool for dtype, or a device type where there is none."""
        for region in script.autocasts:
            call, args = region.node, region.node.args
            if script.outline.names.ambiguous(call.func):
                continue
            said = ""
            if region.api == "torch.cuda.amp.autocast":
                if args and script.outline.names.full(args[0]) in DTYPES:
                    said = f"`{text_of(args[0])}` is taken for `enabled`, and the region computes in float16"
                elif any(k.arg == "device_type" for k in call.keywords):
                    said = "torch.cuda.amp.autocast has no `device_type`: TypeError"
            elif region.api == "torch.amp.autocast" and len(args) > 1 and isinstance(constant(args[1]), bool):
                said = f"`{text_of(args[1])}` is taken for `dtype`, which switches autocast off"
            if said:
                yield self.finding(script.where(call), said, instead='torch.autocast("cuda", dtype=..., enabled=...)')


class NestedAutocastDtypes(TraceRule):
    """A float16 region stands inside a bfloat16 one, or the reverse."""

    code = "HS144"
    name = "nested-autocast-dtypes"
    severity = "error"
    reason = (
        "Autocast caches the casts of weights by weight alone, not by type. In an inner region of another 16-bit type the outer "
        "region's copies are found and the product raises RuntimeError: mat1 and mat2 must have the same dtype."
    )
    bad = (
        "import torch\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    h = encoder(x)\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n        y = encoder(h)\n",
    )
    good = (
        "import torch\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    h = encoder(x)\n"
        "    with torch.autocast('cuda', enabled=False):\n        y = head(h.float())\n",
    )
    references = (f"{_AMP}#torch.autocast",)
    kinds = ("enter_autocast",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A region with another one of another type around it."""
        event = trace[index]
        inner = _surely(event, -1)
        outer = next((f for i in range(len(event.regions) - 2, -1, -1) if (f := _surely(event, i))), "")
        if not inner or not outer or inner == outer:
            return None
        return self.finding(
            script.where(event.regions[-1].node),
            f"a {inner} region inside a {outer} one: weights used in both raise a dtype error",
            instead="one 16-bit type for both, or enabled=False inside",
        )


def _surely(event: Event, position: int) -> str:
    autocasts = event.regions[position].autocasts
    kinds = {a.dtype if a.enabled == "yes" else "" for a in autocasts}
    found = kinds.pop() if len(kinds) == 1 else ""
    return found if found in {"float16", "bfloat16"} else ""


class AutocastDtype(ScriptRule):
    """Autocast is asked for a type it does not compute in."""

    code = "HS145"
    name = "autocast-dtype"
    severity = "warning"
    reason = (
        "Outside CUDA autocast knows float16 and bfloat16 only. With float32 or float64 it warns, switches itself off, and "
        "everything runs in the types the tensors have: the region does nothing. (On CUDA the same line forces float32.)"
    )
    bad = ("import torch\nwith torch.autocast('cpu', dtype=torch.float32):\n    y = model(x)\n",)
    good = (
        "import torch\nwith torch.autocast('cpu', enabled=False):\n    y = model(x)\n",
        "import torch\nwith torch.autocast('cuda', dtype=torch.float32):\n    y = router(x)\n",
    )
    references = (f"{_AMP}#torch.autocast",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Regions of other devices than CUDA whose dtype is written as float32 or float64."""
        for region in script.autocasts:
            dtype = argument(region.node, 1, "dtype")
            wrong = region.dtype in {"float32", "float64"} and region.device not in {None, "cuda"}
            if wrong and region.enabled == "yes" and script.outline.names.full(dtype or region.node):
                yield self.finding(
                    script.where(region.node),
                    f"autocast on {region.device} does not compute in {region.dtype}: it warns and switches itself off",
                    instead="enabled=False, or no region",
                )


class BceUnderAutocast(TraceRule):
    """Binary cross-entropy on probabilities is computed inside a CUDA autocast region."""

    code = "HS146"
    name = "bce-under-autocast"
    severity = "error"
    reason = (
        "`binary_cross_entropy` and `BCELoss` raise RuntimeError under CUDA autocast: a sigmoid in float16 rounds to exactly 0 or 1 "
        "from about 17 on, and the gradient would be infinite. On the CPU the same code runs, so tests without a GPU pass."
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

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A call of binary cross-entropy with a CUDA region around it."""
        event = trace[index]
        region = event.autocast()
        if region is None or any(a.device not in {"cuda", None} for a in region.autocasts):
            return None
        if any(_off_by_default(script, a) for a in region.autocasts):
            return None
        return self.finding(
            script.where(event.node),
            "binary cross-entropy on probabilities raises RuntimeError under CUDA autocast",
            instead="BCEWithLogitsLoss on the values before the sigmoid, or the loss in float32 outside the region",
        )


def _off_by_default(script: Script, region: Autocast) -> bool:
    """Whether a region is switched by a parameter that is False unless someone outside this file says otherwise."""
    for call, function in script.outline.library_calls.get(region.api, ()):
        if call is region.node and region.enabled in function.params and not isinstance(function.node, ast.Module):
            a = function.node.args
            plain = [*a.posonlyargs, *a.args]
            defaults = dict(zip((p.arg for p in plain[len(plain) - len(a.defaults) :]), a.defaults, strict=True))
            defaults |= {p.arg: d for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None}
            return constant(defaults.get(region.enabled)) is False and not any(
                k.arg == region.enabled for calls in script.outline.calls.values() for c, _ in calls for k in c.keywords
            )
    return False


class DataParallelBf16(ScriptRule):
    """DataParallel replicas run in float16 although the region asks for bfloat16."""

    code = "HS147"
    name = "dataparallel-bf16"
    severity = "warning"
    reason = (
        "DataParallel runs its replicas in threads, and autocast belongs to a thread. Each replica's thread is told only whether "
        "autocast is on (torch/nn/parallel/parallel_apply.py), not its type, so it computes in CUDA's default, float16, without the "
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
        """DataParallel in a script whose every region is surely bfloat16."""
        regions = [a for a in script.autocasts if a.enabled != "no"]
        if not regions or any(a.dtype != "bfloat16" for a in regions):
            return
        opened = list(script.events("enter_autocast"))
        seen = set()
        for event in script.events("wrap_dp"):
            if event.node not in seen and any(compatible(event, o) for o in opened):
                seen.add(event.node)
                yield self.finding(
                    script.where(event.node),
                    "DataParallel does not hand the bfloat16 of the region to its replicas: they compute in float16",
                    instead="DistributedDataParallel, one process per GPU",
                )


RULES: tuple[type[Rule], ...] = (
    BackwardInsideAutocast,
    StepInsideAutocast,
    AutocastDevice,
    AutocastArgumentOrder,
    NestedAutocastDtypes,
    AutocastDtype,
    BceUnderAutocast,
    DataParallelBf16,
)
