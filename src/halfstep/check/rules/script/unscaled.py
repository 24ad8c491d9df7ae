"""HS123: float16 autocast without a scaler, wherever the region is opened."""

from __future__ import annotations

import ast
import itertools
import re

from halfstep.check.examples import PLAIN_LOOP, SCALED_LOOP
from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import STEPS, TraceRule, earlier, later, scalers_at, switched_off, without_amp
from halfstep.check.script.flow.origin import comes_from, comes_from_call
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.modules import regions_in_forward
from halfstep.check.script.objects.values import DTYPES, Autocast, constant, text_of
from halfstep.check.script.script import Script

__all__ = ["RULES"]

MAX_REGIONS = 8  # before one backward that its loss is traced to

_AMP = "https://docs.pytorch.org/docs/stable/amp.html"
_SCALED = SCALED_LOOP.format(scaler='scaler = torch.amp.GradScaler("cuda")', dtype="float16")
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
# What these provide does not touch the loss: seeds, loaders, kernels, offloading.
_HELPERS = re.compile(
    r"^accelerate\.(utils\.)?(set_seed|init_empty_weights|infer_auto_device_map|dispatch_model|load_checkpoint\w*|"
    r"find_executable_batch_size|logging|get_logger|init_on_device|cpu_offload)(\.|$)|^accelerate\.logging\.|"
    r"lightning(\.pytorch)?(\.utilities(\.seed)?)?\.(seed_everything|LightningDataModule)$|lightning\.(pytorch\.)?loggers|"
    r"^deepspeed\.ops\.|^apex\.(parallel|normalization|optimizers|contrib)(\.|$)"
)
_DATA_SCALER = re.compile(r"(Standard|MinMax|Robust|MaxAbs|Data|Feature|Target)Scaler$")
_SCALE = 'use torch.amp.GradScaler("cuda"), or autocast with dtype=torch.bfloat16'
_FORMAT = re.compile(r"16|dtype|bf|half|float", re.IGNORECASE)


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
        PLAIN_LOOP.format(dtype="float16"),
        "import torch\nfrom torch.cuda.amp import autocast\nfor x, y in loader:\n    optimizer.zero_grad()\n    with autocast():\n"
        "        out = model(x)\n        loss = criterion(out, y)\n    loss.backward()\n    optimizer.step()\n",
        _ITEM.format(dtype="float16"),
    )
    good = (PLAIN_LOOP.format(dtype="bfloat16"), _SCALED, _ITEM.format(dtype="bfloat16"))
    references = (f"{_AMP}#gradient-scaling", "https://arxiv.org/abs/1710.03740")
    kinds = ("backward",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A backward under float16 autocast that no scaler scales, in a script that leaves the scaling to no library."""
        event = trace[index]
        if without_amp(event) or _is_owned(script, trace, event):
            return None
        if event.scaled == "yes" and switched_off(script, event):
            return self._switched_off(script, trace, index)
        if event.scaled != "no" or not any(True for _ in later(trace, index, "opt_step")):
            return None
        if _has_scaler(script) and not _is_forgotten(script, trace, index) and not _is_elsewhere(script, trace):
            return None
        for i in itertools.islice(earlier(trace, index, "enter_autocast"), MAX_REGIONS):
            opened = trace[i]
            autocasts = opened.regions[-1].autocasts
            if opened.inside("no_grad"):
                continue  # of a reference or teacher
            if any("float16" not in a.dtypes or a.enabled == "no" for a in autocasts):
                return None
            if any(_is_misplaced(script, a) for a in autocasts):
                return None  # HS142 and HS143 report the arguments, which raise
            around = any(region.node is opened.regions[-1].node for region in event.regions)
            if not around and opened.function is event.function and opened.loops != event.loops:
                return None
            if not around and not comes_from(opened, event, script.outline):
                continue
            return self._report(script, event, opened)
        return self._decorated(script, trace, index) or self._in_forward(script, trace, index)

    def _report(self, script: Script, event: Event, opened: Event) -> Finding | None:
        """The finding for a loss from a region that is or may be float16."""
        autocasts = opened.regions[-1].autocasts
        loss = f"`{event.local.subject or 'the loss'}`"
        if all(a.dtype == "float16" for a in autocasts):
            if opened.function is not event.function:
                line = event.node.lineno  # type: ignore[attr-defined]
                return self.finding(
                    script.where(autocasts[0].node),
                    f"{loss} (line {line}) is computed under float16 autocast and not scaled: gradients below 6e-8 become zero",
                    instead=_SCALE,
                )
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

    def _switched_off(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a scaler with enabled=False whose loss is computed under float16 autocast."""
        event = trace[index]
        before = next(earlier(trace, index, "enter_autocast"), None)
        opened = trace[before] if before is not None else None
        if opened is None or opened.loops != event.loops or opened.inside("no_grad"):
            return None
        if not all(a.dtype == "float16" and a.enabled == "yes" for a in opened.regions[-1].autocasts):
            return None
        return self.finding(
            script.where(scalers_at(script, event)[0].node),
            f"the scaler is disabled, so the loss under float16 autocast (line {opened.node.lineno}) is not scaled: "  # type: ignore[attr-defined]
            "gradients below 6e-8 become zero",
            instead="enabled=True, or autocast with dtype=torch.bfloat16",
        )

    def _decorated(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a loss of a function that a decorator runs under float16 autocast."""
        event = trace[index]
        for called in (event, *(trace[i] for i in earlier(trace, index, "forward"))):
            region = called.autocast()
            if region is None or called.inside("no_grad") or not _is_decorator(region.node, called):
                continue
            if called is not event and not comes_from_call(called, event, script.outline):
                continue
            if all(a.dtype == "float16" and a.enabled == "yes" for a in region.autocasts):
                return self.finding(
                    script.where(event.node),
                    f"`{event.local.subject or 'the loss'}` is computed under float16 autocast (the decorator at line "
                    f"{region.autocasts[0].node.lineno}) and not scaled: gradients below 6e-8 become zero",
                    instead=_SCALE,
                )
        return None

    def _in_forward(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a loss of a model of this file whose forward opens a float16 region."""
        event = trace[index]
        for i in earlier(trace, index, "forward"):
            call = trace[i]
            if call.loops != event.loops or call.function is not event.function or call.inside("no_grad"):
                continue
            regions = regions_in_forward(script.outline, call.subject, call.function)
            if regions and all(a.dtype == "float16" and a.enabled == "yes" for a in regions):
                line = regions[0].node.lineno
                return self.finding(
                    script.where(event.node),
                    f"`{event.local.subject or 'the loss'}` is not scaled, but `{call.local.subject}` computes under float16 "
                    f"autocast (line {line}): gradients below 6e-8 become zero",
                    instead=_SCALE,
                )
        return None


def _is_owned(script: Script, trace: Trace, event: Event) -> bool:
    """Whether a library scales the loss of a backward."""
    # `if use_engine: engine.backward(loss)`, `else: loss.backward()`: the second path has no owner.
    if any(e.kind == "owned_backward" and not compatible(e, event) for e in trace):
        return False
    return _imports_owner(script) or script.has("owned_backward", "owned_step")


def _imports_owner(script: Script) -> bool:
    """Whether a library that scales losses is imported, for more than its helpers."""
    outline = script.outline
    for local, full in outline.names.table.items():
        if full.split(".")[0] not in _OWNERS or _HELPERS.search(full):
            continue
        # `import pytorch_lightning as pl`: what is used of it decides.
        uses = [full_use for full_use in outline.library_calls if full_use.startswith(f"{full}.")]
        bases = [names for bases in outline.bases.values() for names in map(outline.names.full, bases)]
        uses += [base for base in bases if base.startswith(f"{full}.")]
        if not uses or outline.loads[local] > len(uses) or not all(map(_HELPERS.search, uses)):
            return True
    return False


def _is_elsewhere(script: Script, trace: Trace) -> bool:
    """Whether the scalers of a script belong to other functions: none is in reach of this loop."""
    functions = {e.function for e in trace}
    if not all(s.key for s in script.scalers) or not script.scalers:
        return False
    scopes = {s.function for s in script.scalers}
    classes = {f.cls for f in functions} - {""}
    if scopes & functions or any(s.function.parent is None or s.function.cls in classes for s in script.scalers):
        return False
    names = (n for f in functions for n in ast.walk(f.node) if f.parent is not None)
    inside = any("scale" in _identifier(n).lower() for n in names)
    return not inside and all(f.parent is not None for f in functions)


def _identifier(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "") or getattr(node, "arg", "") or ""


def _has_scaler(script: Script) -> bool:
    """Whether the script uses a scaler, or anything called one."""
    if any(script.outline.loads[s.key.rsplit(".", 1)[-1]] or not s.key for s in script.scalers):
        return True
    return any("scaler" in name.lower() and not _is_other_scaler(script, name) for name in script.outline.loads)


def _is_other_scaler(script: Script, name: str) -> bool:
    """Whether a name is the class itself, or a scaler of data: `StandardScaler`, or a variable that only is one."""
    if name == "GradScaler" or _DATA_SCALER.search(name):
        return True
    values = [b.value for b in script.outline.bindings.get(name, ())]
    calls = [text_of(v.func) for v in values if isinstance(v, ast.Call)]
    return bool(calls) and len(calls) == len(values) and all(_DATA_SCALER.search(call) for call in calls)


def _is_forgotten(script: Script, trace: Trace, index: int) -> bool:
    """Whether a scaler serves the other optimizers of the same iteration, but not the one that steps next."""
    event = trace[index]
    following = next(later(trace, index, *STEPS), None)
    if following is None or trace[following].kind != "opt_step" or not trace[following].optimizer:
        return False
    if any(e.kind in {"unscale", "handed", "get_scale", "autograd_grad"} for e in trace):
        return False
    scaled = [e for e in trace if e.kind == "backward" and e.scaled != "no"]
    served = {e.optimizer.rsplit(".", 1)[-1] for e in script.events("scaler_step")}
    mine = trace[following].optimizer.rsplit(".", 1)[-1]
    # Both always run: another branch of a condition may be the one without mixed precision.
    together = scaled and all(e.guards == event.guards and e.loops == event.loops for e in scaled)
    return bool(together) and bool(served) and "" not in served and mine not in served


def _is_misplaced(script: Script, region: Autocast) -> bool:
    """Whether a dtype or a device type stands where the function does not expect one, so that it raises."""
    first = region.node.args[0] if region.node.args else None
    if first is not None and script.outline.names.full(first) in DTYPES:
        return True
    device = isinstance(constant(first), str) or any(k.arg == "device_type" for k in region.node.keywords)
    return region.api == "torch.cuda.amp.autocast" and device


def _is_decorator(node: ast.AST, event: Event) -> bool:
    return any(node is decorator for decorator in getattr(event.function.node, "decorator_list", ()))


def _condition(region: Autocast) -> str:
    """When a region computes in float16."""
    if region.dtype_node is not None:
        return f"when `{text_of(region.dtype_node)}` is float16,"
    return "on CUDA, where autocast defaults to float16,"


def _tests_format(region: Autocast, *events: Event) -> bool:
    """Whether a condition around the region or the events may exclude one of its dtypes."""
    flags = [region.enabled, *(text for event in events for text, _ in event.guards)]
    return any(_FORMAT.search(flag) for flag in flags)


RULES: tuple[type[Rule], ...] = (Fp16WithoutScaler,)
