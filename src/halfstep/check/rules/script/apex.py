"""HS184, HS191-HS194: Apex, its options and the order of its calls."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.order import TraceRule, earlier, exclusive, implied, later, only_settings
from halfstep.check.script.flow.passing import is_left_behind
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = ["ADVANCED", "LOOP", "RULES", "SCALED", "is_apex", "level_of"]

_APEX = "https://nvidia.github.io/apex/amp.html"
ADVANCED = "https://nvidia.github.io/apex/advanced.html"
_CALLED = ("scale_loss", "master_params", "state_dict", "load_state_dict")  # by scripts that another file initializes
_LEVEL = regex(r"^O[0-5]$")  # O4 and O5 are those of the ROCm build
LOOP = """\
import torch
from apex import amp
model, optimizer = amp.initialize(model, optimizer, opt_level="{level}")
for x in loader:
    optimizer.zero_grad()
    loss = model(x)
{backward}
    optimizer.step()
"""
SCALED = """\
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        {loss}.backward()"""


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
        """The first amp.initialize of the script, or else the first call of another function that training needs."""
        calls = script.outline.library_calls
        sites = [site.call for name in ("initialize", "init") for site in calls.get(f"apex.amp.{name}", ())]
        others = [site.call for name in _CALLED for site in calls.get(f"apex.amp.{name}", ())]
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
            elif trace[i].subject == event.subject != "" and not is_left_behind(trace[i], event):
                return self.finding(
                    script.where(event.node),
                    f"`{event.subject}` is wrapped for parallel training before amp.initialize, which raises RuntimeError",
                    instead="call amp.initialize first, then wrap the model",
                )
        return None


class ApexOptions(ScriptRule):
    """amp.initialize is passed an option that its opt_level rejects."""

    code = "HS194"
    name = "apex-options"
    severity = "error"
    reason = (
        "O1 casts the inputs of functions and leaves the weights in float32, so `keep_batchnorm_fp32`, `master_weights` and a "
        "`cast_model_type` other than float32 raise RuntimeError there, whatever their value, unless it is None. "
        "`patch_torch_functions=True` raises with every other level. A level is the letter O and a digit: '01' raises."
    )
    bad = (
        "from apex import amp\nmodel, optimizer = amp.initialize(model, optimizer, opt_level='O1', keep_batchnorm_fp32=True)\n",
        "from apex import amp\nmodel, optimizer = amp.initialize(model, optimizer, opt_level='01')\n",
        "from apex import amp\nmodel, optimizer = amp.initialize(model, optimizer, opt_level='O2', patch_torch_functions=True)\n",
    )
    good = (
        "from apex import amp\nmodel, optimizer = amp.initialize(model, optimizer, opt_level='O1')\n",
        "from apex import amp\nmodel, optimizer = amp.initialize(model, optimizer, opt_level='O1')\n",
        "from apex import amp\nmodel, optimizer = amp.initialize(model, optimizer, opt_level='O2')\n",
        "from apex import amp\nmodel, optimizer = amp.initialize(model, optimizer, opt_level='O2', keep_batchnorm_fp32=True)\n",
    )
    references = (
        f"{_APEX}#opt-levels-and-properties",
        "https://github.com/NVIDIA/apex/issues/320",
        "https://github.com/NVIDIA/apex/issues/339",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """The calls of amp.initialize with a constant level."""
        for call, _ in script.outline.library_calls.get("apex.amp.initialize", ()):
            option = argument(call, 3, "opt_level")
            level = level_of(script, call)
            if constant(argument(call, 2, "enabled")) is False:
                continue
            if level and not _LEVEL.match(level):
                yield self.finding(
                    script.where(option or call),
                    f"amp.initialize raises RuntimeError: unexpected optimization level {level!r}",
                    instead=f"opt_level='O{level[-1]}'" if level[-1] in "0123" else "opt_level='O1'",
                )
                continue
            for name, is_rejected in self._rejected(level):
                value = argument(call, None, name)
                if value is not None and is_rejected(value):
                    yield self.finding(
                        script.where(value),
                        f"amp.initialize raises RuntimeError: `{name}={text_of(value)}` is not allowed with opt_level {level}",
                        instead=f"remove `{name}`",
                    )

    @staticmethod
    def _rejected(level: str) -> tuple[tuple[str, Callable[[ast.expr], bool]], ...]:
        if level == "O1":
            return (
                ("keep_batchnorm_fp32", lambda value: constant(value) not in {None, ...}),
                ("master_weights", lambda value: constant(value) not in {None, ...}),
                ("cast_model_type", lambda value: text_of(value) in {"torch.float16", "torch.half", "torch.bfloat16"}),
            )
        return (("patch_torch_functions", lambda value: constant(value) is True),) if level else ()


class ApexUnscaledBackward(TraceRule):
    """Backward runs on the loss itself, although Apex scales it."""

    code = "HS184"
    name = "apex-unscaled-backward"
    severity = "error"
    reason = (
        "`with amp.scale_loss(loss, optimizer) as scaled_loss` divides the gradients by the scale when the block ends. With "
        "`loss.backward()` inside they were never multiplied by it, so they are 65536 times too small at first. Without the block "
        "float16 gradients underflow in O1, and in O2 the float32 master weights that the optimizer steps receive no gradients."
    )
    bad = (
        LOOP.format(level="O1", backward=SCALED.format(loss="loss")),
        LOOP.format(level="O1", backward="    loss.backward()"),
    )
    good = tuple([LOOP.format(level="O1", backward=SCALED.format(loss="scaled_loss"))] * 2)
    references = (_APEX, ADVANCED)
    kinds = ("backward",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A backward of an unscaled loss in a scale_loss block, or without one after amp.initialize."""
        event = trace[index]
        if event.scaled != "no" or not isinstance(event.node, ast.Call):
            return None
        region, loss = event.inside("scaled_loss"), event.local.subject or "loss"
        if region is not None:
            block = region.node
            scaled = key_of(block.args[0]) if isinstance(block, ast.Call) and block.args else ""
            if not is_apex(script, block) or not scaled or scaled != event.local.subject:
                return None
            return self.finding(
                script.where(event.node),
                f"`{loss}.backward()` inside `{text_of(block)}` is not scaled, but the end of the block divides by the scale",
                instead="call backward on the variable after `as`",
            )
        call = self._initialized(script, trace, index)
        if call is None:
            return None
        effects = {"O1": "small float16 gradients underflow", "O2": "the float32 master weights get no gradients"}
        level = level_of(script, call)
        effect = "; ".join(f"with opt_level {key} {text}" for key, text in effects.items() if level in {key, ""})
        return self.finding(
            script.where(event.node),
            f"`{loss}.backward()` bypasses amp.scale_loss: {effect}",
            instead=f"with amp.scale_loss({loss}, optimizer) as scaled_loss: scaled_loss.backward()",
        )

    @staticmethod
    def _initialized(script: Script, trace: Trace, index: int) -> ast.Call | None:
        """The amp.initialize whose optimizer steps after a backward, where it runs with a scaled loss: always, or for some settings."""
        event = trace[index]
        before = next(earlier(trace, index, "apex_initialize"), None)
        step = next(later(trace, index, "opt_step"), None)
        call = trace[before].node if before is not None else None
        if before is None or step is None or not isinstance(call, ast.Call):
            return None
        # `scale_loss` in another branch (there also timm's ApexScaler), or in a function that no trace reaches, may be the one that runs.
        is_optional = not implied(trace[before], event) or not level_of(script, call)
        is_elsewhere = "scale_loss" in script.outline.calls or exclusive(trace, event, "owned_step")
        if is_optional and (is_elsewhere or not only_settings(script, trace[before], event)):
            return None
        options = {k.arg for k in call.keywords}
        if level_of(script, call) in {"O0", "O3"} or options & {"enabled", "loss_scale", "num_losses", None}:
            return None
        if last_name(trace[step].optimizer) != last_name(key_of(argument(call, 1, "optimizers"))):
            return None
        # A script that scales elsewhere chooses between the two, or accumulates by hand.
        return None if any(e.inside("scaled_loss") for e in trace if e.kind == "backward") else call


def is_apex(script: Script, node: ast.AST) -> bool:
    """Whether a context is `amp.scale_loss` of Apex."""
    return isinstance(node, ast.Call) and script.outline.names.full(node.func) == "apex.amp.scale_loss"


def level_of(script: Script, call: ast.Call) -> str:
    """The opt_level of amp.initialize; "" if the script does not decide it. Apex's default is O1."""
    option = argument(call, 3, "opt_level")
    if option is None:
        hidden = any(k.arg is None for k in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args)
        return "" if hidden else "O1"
    values = {constant(option)}
    if values == {...} and isinstance(option, ast.Name):
        sites = script.outline.library_calls["apex.amp.initialize"]
        function = next(site.function for site in sites if site.call is call)
        bound = script.outline.lookup(option.id, function) if option.id not in function.params else []
        values = {constant(b.value) if b.value is not None and b.index is None else ... for b in bound} or {...}
    level = values.pop() if len(values) == 1 else ...
    return level if isinstance(level, str) else ""


RULES: tuple[type[Rule], ...] = (
    ApexAmp,
    ApexAndTorchAmp,
    ApexAfterParallel,
    ApexOptions,
    ApexUnscaledBackward,
)
