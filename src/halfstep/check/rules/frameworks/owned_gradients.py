"""HS186: gradients that a framework scales, clipped by the script."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.examples import MANUAL_LOOP
from halfstep.check.finding import Finding, Severity
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import TraceRule, earlier
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.engines import (
    ACCELERATE,
    ACCELERATORS,
    Engine,
    callback_precision,
    engine_at,
    loop_class,
    scaling_accelerator,
)
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.scaling.prepared import prepared_for
from halfstep.check.script.scaling.trainer_loops import clips_after_steps
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = ["RULES"]

_ACCELERATE = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator({options})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    accelerator.backward(loss)
{clip}    optimizer.step()
"""
_FABRIC = """\
import torch
from lightning import Fabric

fabric = Fabric(precision="16-mixed")
model, optimizer = fabric.setup(model, optimizer)
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    fabric.backward(loss)
    {clip}
    optimizer.step()
"""
_MANUAL = MANUAL_LOOP.replace("{imports}", "import torch\n").replace("{change}", "{clip}")
_CLIP = "torch.nn.utils.clip_grad_norm_({}.parameters(), 1.0)"
_HOOK = f"\n    def on_before_optimizer_step(self, optimizer):\n        {_CLIP.format('self')}\n"
_OWN_CLIP = "accelerator.clip_grad_norm_(model.parameters(), 1.0)"
_PLUGIN = _ACCELERATE.replace("import Accelerator", "import Accelerator, DeepSpeedPlugin").format(
    options="deepspeed_plugin=DeepSpeedPlugin(zero_stage=2{limit})",
    clip="    accelerator.clip_grad_norm_(model.parameters(), 0.5)\n",
)
_DOCS = "https://huggingface.co/docs/accelerate/package_reference/accelerator#accelerate.Accelerator.clip_grad_norm_"


def _backward_engine(script: Script, trace: Trace, index: int) -> Engine | None:
    """The Accelerator or Fabric whose backward wrote the gradients at this point."""
    before = next(earlier(trace, index, "owned_backward"), None)
    if before is None:
        return None
    back = trace[before]
    engine = engine_at(script, back.subject, back.function)
    owner = loop_class(script, back.function.cls) if back.function.cls else None
    if engine is None and owner is not None and owner.base == "trainer" and back.local.subject == "self.accelerator":
        return Engine(ACCELERATE, "self.accelerator", owner.precision, is_created=False)  # the Trainer creates it
    return engine


_NORMS = {"clip_grad_norm_", "clip_grad_norm"}
_SHARDED = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision

def wrap(model):
    return FSDP(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))

model = wrap(Net())
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    loss = loss_fn(model(x).float(), y)
    loss.backward()
    {clip}
    optimizer.step()
    optimizer.zero_grad()
"""


_OF_FSDP = regex(r"fsdp|fullysharded")


class ClipBehindFramework(TraceRule):
    """Gradients that a framework scaled or sharded are clipped before it has unscaled them."""

    code = "HS186"
    name = "clip-behind-framework"
    severity = "warning"
    reason = (
        "After `accelerator.backward` or `fabric.backward` in fp16 the gradients are multiplied by the loss scale (65536 at first), and "
        "only the framework's own call unscales them before it clips: torch's `clip_grad_norm_` at 1.0 clips the true gradient at "
        "1/65536, so nearly every step has the same tiny norm. With FSDP each rank sees the norm of its own shard. In a Lightning "
        "module with manual optimization the gradients are unscaled inside `optimizer.step()`, right before the hook "
        "`on_before_optimizer_step`; both torch's call and `self.clip_gradients` come too early in `training_step`. With DeepSpeed "
        "`accelerator.clip_grad_norm_` only returns the norm: the engine clips at `gradient_clipping` of its plugin, which is 1.0 if "
        "nothing sets it, and does not clip if its own configuration has no such key."
    )
    bad = (
        _ACCELERATE.format(options='mixed_precision="fp16"', clip=f"    {_CLIP.format('model')}\n"),
        _ACCELERATE.format(options="", clip=f"    {_CLIP.format('model')}\n"),
        _FABRIC.format(clip=_CLIP.format("model")),
        _MANUAL.format(clip=f"        {_CLIP.format('self')}\n", hook=""),
        _MANUAL.format(clip="        self.clip_gradients(optimizer, gradient_clip_val=1.0)\n", hook=""),
        _SHARDED.format(clip=_CLIP.format("model")),
        _ACCELERATE.format(options='mixed_precision="fp16"', clip="    model.clip_grad_norm_(1.0)\n"),
        _PLUGIN.format(limit=""),
    )
    good = (
        _ACCELERATE.format(options='mixed_precision="fp16"', clip=f"    {_OWN_CLIP}\n"),
        _ACCELERATE.format(options="", clip=f"    {_OWN_CLIP}\n"),
        _FABRIC.format(clip="fabric.clip_gradients(model, optimizer, max_norm=1.0)"),
        _MANUAL.format(clip="", hook=_HOOK),
        _SHARDED.format(clip="model.clip_grad_norm_(1.0)"),
        _ACCELERATE.format(options='mixed_precision="bf16"', clip="    model.clip_grad_norm_(1.0)\n"),
        _PLUGIN.format(limit=", gradient_clipping=0.5"),
    )
    references = (
        _DOCS,
        "https://lightning.ai/docs/fabric/stable/api/fabric_methods.html#clip-gradients",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/18089",
        "measured: source code of accelerate 1.15.0 (the plugin's limit and its default included) and lightning 2.6.6",
    )
    words = ("Accelerator", "Fabric(", "automatic_optimization", "on_after_backward")
    kinds = ("clip", "owned_clip")

    def check(self, script: Script) -> Iterator[Finding]:
        """Every event of the traces, and torch's clipping in the hook that Lightning runs before it unscales."""
        yield from super().check(script)
        yield from self._by_plugin(script)
        for call, trainer in clips_after_steps(script):
            state = "" if trainer.precision == "fp16" else "in fp16 "
            yield self.finding(
                script.where(call),
                f"{state}these gradients are still multiplied by the Trainer's loss scale; torch's `{last_name(text_of(call.func))}` clips them as they are",
                instead="self.accelerator.clip_grad_norm_(...)",
                severity="error" if trainer.precision == "fp16" else None,
            )
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            for call, function in script.outline.calls.get(name, ()):
                if function.name != "on_after_backward" or not function.cls:
                    continue
                owner = loop_class(script, function.cls)
                precision = owner.precision if owner is not None else callback_precision(script, function.cls)
                if (owner is not None and owner.base == "trainer") or precision not in {"fp16", "?"}:
                    continue
                state = "" if precision == "fp16" else "with precision='16-mixed' "
                yield self.finding(
                    script.where(call),
                    f"{state}the gradients are still multiplied by the loss scale in `on_after_backward`; Lightning unscales after it",
                    instead="clip in `on_before_optimizer_step`, or set gradient_clip_val of the Trainer",
                    severity="error" if precision == "fp16" else None,
                )

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """torch's clipping after a framework's backward, before the framework has unscaled."""
        event = trace[index]
        call = event.node
        if not isinstance(call, ast.Call) or constant(argument(call, 1, "max_norm")) is None:
            return None
        is_torch = script.outline.names.full(call.func).startswith("torch.nn.utils.")
        owner = loop_class(script, event.function.cls) if event.function.cls else None
        if script.outline.calls.keys() & {"unscale_gradients", "unscale_"}:
            return self._on_shards(script, trace, index) if is_torch and owner is None else None
        if owner is not None and owner.base == "manual":
            return self._in_manual(script, trace, index, owner.precision, is_torch=is_torch)
        is_own = owner is None or (
            owner.base == "trainer" and "master_params" not in text_of(call)
        )  # Apex unscales those
        if not is_torch:
            return self._by_model(script, trace, index) if owner is None else None
        engine = _backward_engine(script, trace, index) if is_own else None
        if engine is None:
            return self._on_shards(script, trace, index) if is_own else None
        plugin = {"fsdp": "sharded by FSDP", "deepspeed": "sharded by DeepSpeed"}.get(engine.plugin, "")
        severity: Severity = "error" if engine.precision == "fp16" else "warning"
        if engine.precision == "fp16":
            state = f"still multiplied by the loss scale of `{engine.key}`"
        elif engine.precision == "?":
            state = plugin or "still multiplied by the loss scale in fp16, and sharded with FSDP"
        elif plugin:
            state = plugin
        elif engine.library == ACCELERATE:
            state, severity = "sharded if `accelerate launch` uses FSDP or DeepSpeed", "advice"
        else:
            return None
        own = (
            "clip_grad_norm_(...)" if engine.library == ACCELERATE else "clip_gradients(model, optimizer, max_norm=...)"
        )
        return self.finding(
            script.where(call),
            f"these gradients are {state}; torch's `{last_name(text_of(call.func))}` clips them as they are",
            instead=f"{engine.key}.{own}",
            severity=severity,
        )

    def _by_plugin(self, script: Script) -> Iterator[Finding]:
        """Limits that an Accelerator with DeepSpeed gets and does not use, next to a plugin that has another one."""
        yield from self._by_launcher(script)
        plugin = _deepspeed_plugin(script)
        own = _limit_of(script, plugin) if plugin is not None else None
        used = _number(script, own) if own is not None else None
        for call, function in script.outline.calls.get("clip_grad_norm_", ()):
            engine = (
                engine_at(script, key_of(call.func.value), function) if isinstance(call.func, ast.Attribute) else None
            )
            limit = argument(call, 1, "max_norm")
            if engine is None or engine.plugin != "deepspeed" or limit is None or used is None:
                continue
            wanted = _number(script, limit)
            is_default = getattr(own, "lineno", 0) == 0
            if wanted == used or (wanted is None and not is_default):
                continue
            cause = "the default, unless the launcher sets another" if own is None or is_default else script.at(own)
            does = f"clips at {used:g}" if used else "does not clip either"
            yield self.finding(
                script.where(call),
                f"with DeepSpeed this call clips nothing and the engine {does} ({cause}): `{text_of(limit)}` has no effect",
                instead=f"set gradient_clipping of DeepSpeedPlugin, or of its configuration, to {text_of(limit)}",
                severity=None if wanted is not None else "advice",
            )

    def _by_launcher(self, script: Script) -> Iterator[Finding]:
        """Limits that an Accelerator gets whose DeepSpeed the launcher configures: `DeepSpeedPlugin()`."""
        for call, function in script.outline.calls.get("clip_grad_norm_", ()):
            owner = key_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            engine, limit = engine_at(script, owner, function), argument(call, 1, "max_norm")
            made = engine.call if engine is not None and engine.plugin == "deepspeed" else None
            if engine is None or made is None or engine.function is None or limit is None:
                continue
            plugin = argument(made, None, "deepspeed_plugin")
            values = script.outline.values(key_of(plugin), engine.function) if key_of(plugin) else [plugin]
            is_plain = [isinstance(v, ast.Call) and last_name(key_of(v.func)) == "DeepSpeedPlugin" for v in values]
            if not values or not all(is_plain) or any(isinstance(v, ast.Call) and arguments_of(v) for v in values):
                continue
            if any("gradient_clipping" in key and "deepspeed" in key for key in script.outline.bindings):
                continue
            yield self.finding(
                script.where(call),
                f"with DeepSpeed this call clips nothing, and the engine clips at gradient_clipping of the launcher's configuration: `{text_of(limit)}` has no effect",
                instead=f"DeepSpeedPlugin(gradient_clipping={text_of(limit)})",
                severity="advice",
            )

    def _by_model(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for `model.clip_grad_norm_(1.0)` of a prepared model that FSDP has wrapped: it unscales nothing."""
        event = trace[index]
        func = event.node.func if isinstance(event.node, ast.Call) else None
        engine, scaling = _backward_engine(script, trace, index), scaling_accelerator(script)
        if not isinstance(func, ast.Attribute) or func.attr not in _NORMS or engine is None or scaling is None:
            return None
        names = prepared_for(script, ACCELERATE, event).names
        if engine.library != ACCELERATE or last_name(key_of(func.value)) not in names:
            return None
        condition = "" if engine.precision == "fp16" else "in fp16 "
        return self.finding(
            script.where(event.node),
            f"{condition}these gradients are still multiplied by the loss scale of `{engine.key}`; `{text_of(func)}` of FSDP clips them as they are",
            instead=f"call {engine.key}.unscale_gradients() first, or {engine.key}.clip_grad_norm_({key_of(func.value)}.parameters(), ...)",
            severity=None if condition else "error",
        )

    def _on_shards(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for torch's norm of a model that FSDP has sharded, without a framework."""
        event = trace[index]
        call = event.node
        assert isinstance(call, ast.Call)
        source = argument(call, 0, "parameters")
        func = source.func if isinstance(source, ast.Call) else None
        if (
            not isinstance(func, ast.Attribute)
            or func.attr != "parameters"
            or last_name(text_of(call.func)) not in _NORMS
        ):
            return None
        sites = script.outline.calls.get("clip_grad_norm_", ())
        if any(not script.outline.names.full(site.call.func) for site in sites):
            return None  # of the wrapped model, in another branch
        wraps = [e for e in trace[:index] if e.kind == "wrap_fsdp" and compatible(e, event)]
        if key_of(func.value).startswith("self."):  # wrapped by another method, such as __init__
            own = (e for e in script.events("wrap_fsdp") if e.function.cls == event.function.cls)
            wraps += [e for e in own if compatible(e, event) and not _is_unsharded(event)]
        wraps = [e for e in wraps if "NO_SHARD" not in text_of(e.node)]
        makers = {e.function for e in wraps}
        for value in script.outline.values(key_of(func.value), event.function):
            target = script.outline.call_target(value, event.function) if isinstance(value, ast.Call) else None
            if any(e.node is value for e in wraps) or (target is not None and target in makers):
                return self.finding(
                    script.where(call),
                    "these gradients are sharded by FSDP: torch's `clip_grad_norm_` uses the norm of the shard of each rank",
                    instead=f"{text_of(func.value)}.clip_grad_norm_(...)",
                )
        return None

    def _in_manual(self, script: Script, trace: Trace, index: int, precision: str, *, is_torch: bool) -> Finding | None:
        event = trace[index]
        before = next(earlier(trace, index, "owned_backward"), None)
        if before is None or trace[before].subject != "self" or precision not in {"fp16", "?"}:
            return None
        if not is_torch and precision != "fp16":
            return None
        if event.function.name in {"on_before_optimizer_step", "configure_gradient_clipping"}:
            return None
        state = "" if precision == "fp16" else "with precision='16-mixed' "
        return self.finding(
            script.where(event.node),
            f"{state}the gradients are still multiplied by the loss scale here; Lightning unscales inside `step()`",
            instead="clip in `on_before_optimizer_step`",
            severity="error" if precision == "fp16" else None,
        )


def _is_unsharded(event: Event) -> bool:
    """Whether an event is in the branch for a model that FSDP has not wrapped: `if not isinstance(self.model, FSDP):`."""
    texts = [g.text if g.is_true else f"not {g.text}" for g in event.guards]
    return any(_OF_FSDP.search(text.lower()) and text.startswith("not ") for text in texts)


def _deepspeed_plugin(script: Script) -> ast.Call | None:
    """The plugin of the only Accelerator of a script, if its arguments decide the limit or leave it at the default."""
    created = [site for name in ACCELERATORS for site in script.outline.library_calls.get(name, ())]
    if len(created) != 1:
        return None
    call, function = created[0]
    value = argument(call, None, "deepspeed_plugin")
    values = [value] if value is not None else []
    if value is not None and key_of(value):
        values = list(script.outline.values(key_of(value), function))
    plugin = values[0] if len(values) == 1 and isinstance(values[0], ast.Call) else None
    if plugin is None or last_name(key_of(plugin.func)) != "DeepSpeedPlugin" or plugin.args or not plugin.keywords:
        return None  # without arguments the launcher configures it
    is_changed = any("gradient_clipping" in key for key in script.outline.bindings)
    return None if is_changed or any(keyword.arg is None for keyword in plugin.keywords) else plugin


def _limit_of(script: Script, plugin: ast.Call) -> ast.expr | None:
    """The limit at which the engine of a plugin clips: a node without a line for a default, None if another file has it."""
    own = argument(plugin, None, "gradient_clipping") or ast.Constant(1.0)
    config = argument(plugin, None, "hf_ds_config")
    if config is None or constant(config) is None:
        return own
    bound = script.outline.bindings.get(key_of(config), []) if key_of(config) else []
    table = bound[0].value if len(bound) == 1 else config
    if not isinstance(table, ast.Dict) or not all(isinstance(key, ast.Constant) for key in table.keys):
        return None
    pairs = zip(table.keys, table.values, strict=True)
    limits = [value for key, value in pairs if key is not None and constant(key) == "gradient_clipping"]
    if not limits:  # Accelerate fills in what is "auto" and adds nothing
        return None if "gradient_clipping" in script.source.text else ast.copy_location(ast.Constant(0.0), table)
    return own if constant(limits[0]) == "auto" else limits[0]


def _number(script: Script, node: ast.expr) -> float | None:
    """The number of a literal, or of a constant at the top of the file."""
    bound = script.outline.bindings.get(key_of(node), []) if key_of(node) else []
    value = constant(bound[0].value if len(bound) == 1 and bound[0].value is not None else node)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


RULES: tuple[type[Rule], ...] = (ClipBehindFramework,)
