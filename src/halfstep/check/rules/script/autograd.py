"""HS130, HS150, HS159: torch.autograd.grad and custom autograd functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.order import TraceRule, earlier
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.values import argument, constant
from halfstep.check.script.script import Script

__all__ = ["RULES"]

_DOCS = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
_OPS = {"mm", "matmul", "bmm", "addmm", "conv1d", "conv2d", "conv3d", "linear", "einsum"}


class PenaltyNotUnscaled(TraceRule):
    """A gradient penalty is computed from scaled gradients."""

    code = "HS130"
    name = "penalty-not-unscaled"
    severity = "error"
    reason = (
        "`torch.autograd.grad` of a scaled loss returns scaled gradients, which `unscale_` does not unscale. A penalty on their norm "
        "is too large by the scale or its square, up to 65536**2. Divide them by `scaler.get_scale()` first."
    )
    bad = (
        "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor x, y in loader:\n    loss = loss_fn(model(x), y)\n"
        "    grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)\n"
        "    loss = loss + sum(g.pow(2).sum() for g in grads).sqrt()\n    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n",
    )
    good = (
        "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor x, y in loader:\n    loss = loss_fn(model(x), y)\n"
        "    grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)\n"
        "    grads = [g / scaler.get_scale() for g in grads]\n"
        "    loss = loss + sum(g.pow(2).sum() for g in grads).sqrt()\n    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n",
    )
    references = (f"{_DOCS}#gradient-penalty",)
    kinds = ("autograd_grad",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """autograd.grad of a scaled loss with create_graph=True, in a script that never reads the scale."""
        call = trace[index].node
        assert isinstance(call, ast.Call)
        scales = [i for i in earlier(trace, index, "scale") if trace[i].node in set(ast.walk(call))]
        if (
            not scales
            or constant(argument(call, None, "create_graph")) is not True
            or script.has("get_scale", "unscale")
        ):
            return None
        return self.finding(
            script.where(call),
            f"these gradients are multiplied by the scale of `{trace[scales[0]].scaler}` and never divided by it",
            instead="grads = [g / scaler.get_scale() for g in grads]",
        )


class CustomFunctionUncast(ScriptRule):
    """A custom autograd function with matrix products does not define its behaviour under autocast."""

    code = "HS150"
    name = "custom-function-uncast"
    severity = "advice"
    reason = (
        "Autocast applies to `forward` but not to `backward`, which runs outside the region: products there mix float16 with float32 "
        "and raise, or run in a different dtype than in forward. `custom_fwd` and `custom_bwd` give both the same autocast state."
    )
    bad = (
        "import torch\nclass Product(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, a, b):\n"
        "        ctx.save_for_backward(a, b)\n        return a.mm(b)\n    @staticmethod\n    def backward(ctx, g):\n"
        "        a, b = ctx.saved_tensors\n        return g.mm(b.t()), a.t().mm(g)\nwith torch.autocast('cuda'):\n    y = Product.apply(a, b)\n",
    )
    good = (
        "import torch\nclass Product(torch.autograd.Function):\n    @staticmethod\n    @torch.amp.custom_fwd(device_type='cuda')\n"
        "    def forward(ctx, a, b):\n        ctx.save_for_backward(a, b)\n        return a.mm(b)\n    @staticmethod\n"
        "    @torch.amp.custom_bwd(device_type='cuda')\n    def backward(ctx, g):\n        a, b = ctx.saved_tensors\n"
        "        return g.mm(b.t()), a.t().mm(g)\nwith torch.autocast('cuda'):\n    y = Product.apply(a, b)\n",
    )
    references = (f"{_DOCS}#autocast-and-custom-autograd-functions",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Custom functions with products in forward and no decorator, in scripts that use autocast."""
        outline = script.outline
        if not script.autocasts:
            return
        products = {f for name in _OPS for _, f in outline.calls.get(name, ())}
        for name, methods in outline.classes.items():
            bases = {outline.names.full(base) for base in outline.bases.get(name, ())}
            forward = methods.get("forward")
            if forward is None or not bases & {"torch.autograd.Function", "torch.autograd.function.Function"}:
                continue
            decorators = " ".join(ast.unparse(d) for d in getattr(forward.node, "decorator_list", ()))
            if forward in products and "custom_fwd" not in decorators:
                yield self.finding(
                    script.where(forward.node),
                    f"`{name}.forward` has matrix products but no custom_fwd: under autocast backward runs in a different dtype",
                    instead='@torch.amp.custom_fwd(device_type="cuda") on forward, @torch.amp.custom_bwd(device_type="cuda") on backward',
                )


_CUSTOM = """\
import torch
from torch{module}.amp import custom_bwd, custom_fwd
class Identity(torch.autograd.Function):
    @staticmethod
    @custom_fwd{device}
    def forward(ctx, x):
        return x
    @staticmethod
    @custom_bwd{device}
    def backward(ctx, g):
        return g
"""


class CustomDecoratorArguments(ScriptRule):
    """A custom_fwd or custom_bwd is called with arguments that it does not accept."""

    code = "HS159"
    name = "custom-decorator-arguments"
    severity = "error"
    reason = (
        "`torch.amp.custom_fwd` and `custom_bwd` require `device_type`, as a keyword: a bare `@custom_fwd`, the form of torch.cuda.amp, "
        "raises TypeError when the file is imported. The old ones in torch.cuda.amp do not accept `device_type` and raise it too."
    )
    bad = (
        _CUSTOM.format(module="", device=""),
        _CUSTOM.format(module="", device="").replace("@custom_fwd", "@custom_fwd(cast_inputs=torch.float32)"),
    )
    good = (
        _CUSTOM.format(module="", device="(device_type='cuda')"),
        _CUSTOM.format(module="", device="(device_type='cuda')").replace(
            "@custom_fwd(", "@custom_fwd(cast_inputs=torch.float32, "
        ),
    )
    references = ("https://docs.pytorch.org/docs/stable/amp.html#torch.amp.custom_fwd",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Decorators of functions: one finding per script and decorator."""
        names = script.outline.names
        for function in script.outline.functions:
            for decorator in getattr(function.node, "decorator_list", ()):
                called = decorator.func if isinstance(decorator, ast.Call) else decorator
                full = names.full(called)
                if not full.endswith((".amp.custom_fwd", ".amp.custom_bwd")) or names.ambiguous(called):
                    continue
                keywords = {k.arg for k in decorator.keywords} if isinstance(decorator, ast.Call) else set()
                is_new, last = full.startswith("torch.amp."), full.rsplit(".", 1)[-1]
                if None not in keywords and ("device_type" in keywords) != is_new and full.startswith("torch."):
                    fault = "requires the keyword `device_type`" if is_new else "does not accept `device_type`"
                    yield self.finding(
                        script.where(decorator),
                        f"{full} {fault}: this raises TypeError when the file is imported",
                        instead=f'@torch.amp.{last}(device_type="cuda")',
                    )


RULES: tuple[type[Rule], ...] = (PenaltyNotUnscaled, CustomFunctionUncast, CustomDecoratorArguments)
