"""HS177, HS178: the length and the counter of Accelerate's `accumulate` context."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.objects.command_line import Options
from halfstep.check.script.objects.engines import ACCELERATE, engine_at
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

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
_BOTH = "accelerator.accumulate(unet, text_encoder)"
_SETTING = """\
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="bf16"{steps})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accum_steps = cfg["accum_steps"]
print(f"effective batch size {{batch_size * accum_steps}}")
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(loss_fn(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
"""
_STEPS = regex(
    r"^(n_|num_)?(grad(ient)?s?_?)?accum(ulate|ulation)?(_grad(ient)?s?)?_?(steps?|iters?|batches|every|freq)$|"
    r"^grad(ient)?_acc(um|umulation)?(_steps?)?$",
    re.IGNORECASE,
)
_PLUGINS = {
    "gradient_accumulation_steps",
    "gradient_accumulation_plugin",
    "deepspeed_plugins",
    None,
}
# What a DeepSpeedPlugin takes the number of steps from.
_COUNTED = {"gradient_accumulation_steps", "hf_ds_config", None}
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)


class AccumulationNotPassed(ScriptRule):
    """The number of accumulation steps is not passed to the Accelerator whose `accumulate` is used."""

    code = "HS177"
    name = "accumulation-not-passed"
    severity = "warning"
    reason = (
        "`accelerator.accumulate` counts to the number that `Accelerator(gradient_accumulation_steps=...)` was created with, which is 1. "
        "A setting of the script that is not passed there has no effect: the optimizer steps on every micro-batch, with a batch smaller "
        "than the one that the learning rate was chosen for. Only the launcher could still set it, and "
        "with a DeepSpeedPlugin that has no number of its own, the DeepSpeed configuration."
    )
    bad = (_SETTING.format(steps=""),)
    good = (
        _SETTING.format(steps=', gradient_accumulation_steps=cfg["accum_steps"]'),
        _SETTING.format(steps="").replace(
            "accum_steps = cfg", "accelerator.gradient_accumulation_steps = accum_steps = cfg"
        ),
    )
    references = ("https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation",)
    words = ("Accelerator",)

    def check(self, script: Script) -> Iterator[Finding]:
        """An Accelerator without the setting, in a script that reads one and leaves the counting to `accumulate`."""
        outline = script.outline
        entered = [(call, f) for call, f in outline.calls.get("accumulate", ()) if isinstance(call.func, ast.Attribute)]
        engines = [engine_at(script, key_of(call.func.value), f) for call, f in entered]  # type: ignore[attr-defined]
        created = outline.library_calls.get("accelerate.Accelerator", ())
        if len(created) != 1 or not any(e is not None and e.is_created for e in engines):
            return
        call = created[0].call
        if call.args or _PLUGINS & {k.arg for k in call.keywords} or not _is_plain_plugin(script, *created[0]):
            return
        if any(key.endswith(".gradient_accumulation_steps") for key in _stored(script)):
            return
        setting = _own_setting(script)
        if setting:
            has_plugin = argument(call, None, "deepspeed_plugin") is not None
            launcher = "launcher or its DeepSpeed configuration" if has_plugin else "launcher"
            yield self.finding(
                script.where(call),
                f"`accumulate` uses the Accelerator's number of steps, 1 unless the {launcher} sets it: `{setting}` has no effect on it",
                instead=f"Accelerator(..., gradient_accumulation_steps={setting})",
            )


def _is_plain_plugin(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether an Accelerator has no DeepSpeed plugin, or one that this file creates and gives neither steps nor a configuration."""
    plugin = argument(call, None, "deepspeed_plugin")
    if plugin is None:
        return True
    values = script.outline.values(key_of(plugin), function) if key_of(plugin) else [plugin]
    made = values[0] if len(values) == 1 else None
    if not isinstance(made, ast.Call) or made.args or _COUNTED & {k.arg for k in made.keywords}:
        return False
    name = script.outline.names.full(made.func)
    return (
        name.startswith("accelerate.")
        and name.endswith(".DeepSpeedPlugin")
        and "deepspeed_config" not in script.source.text
    )


def _stored(script: Script) -> Iterator[str]:
    """The attributes that a script assigns: `accelerator.gradient_accumulation_steps`."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield text_of(node)


def _is_window(script: Script, count: ast.AST) -> bool:
    """Whether what waits for a count may be a step: anything but the batches that a resumed run skips."""
    test = next((n for n in script.above(count) if isinstance(n, ast.stmt)), None)
    is_test = isinstance(test, ast.If) and any(n is count for n in ast.walk(test.test))
    calls = [n for s in test.body for n in ast.walk(s) if isinstance(n, ast.Call)] if isinstance(test, ast.If) else []
    return not is_test or any("bar" not in text_of(call.func) for call in calls)


def _own_setting(script: Script) -> str:
    """A number of accumulation steps that a script has and does not count; "" if there is none."""
    settings: list[str] = []
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Name | ast.Attribute):
            last = node.id if isinstance(node, ast.Name) else node.attr
            owner = text_of(node.value) if isinstance(node, ast.Attribute) else ""
            if _STEPS.match(last) and "accelerator" not in owner:
                settings.append(text_of(node))
                parent = script.outline.parents.get(node)
                is_operand = isinstance(parent, ast.BinOp) and parent.right is node
                is_count = is_operand and isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Mod)
                if parent is not None and is_count and _is_window(script, parent):
                    return ""  # counted by the script itself
                if isinstance(parent, ast.keyword) and parent.arg in {"gradient_accumulation_steps", "num_steps"}:
                    return ""
    # An option that the script declares, and reads nowhere.
    settings += [f"args.{name}" for _, _, name in Options(script).declared if _STEPS.match(name)]
    return settings[0] if settings else ""


_INHERITED = """\
from base import BaseTrainer

class Trainer(BaseTrainer):
  def fit(self, loader):
    for batch in loader:
        with self.accelerator.accumulate(self.net):
            loss = self.loss(batch)
        {second}self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
"""


_BY_KIND = """\
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for x in loader:
    if kind == "vq":
        with accelerator.accumulate(net):
            loss = loss_fn(net(x)){step}
    else:
        with accelerator.accumulate(net):
            loss = net(x){step}
"""
_UPDATE = "accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()"


class AccumulateEnteredTwice(ScriptRule):
    """accelerator.accumulate is entered twice in one iteration, or its counter is reset in each."""

    code = "HS178"
    name = "accumulate-entered-twice"
    severity = "warning"
    reason = (
        "Each entry of `accelerator.accumulate` counts one micro-batch, whatever model it receives. Entered twice per iteration, "
        "with n accumulation steps the window ends after n/2 iterations, although the loss is divided by n. With two blocks one "
        "after the other and an even n, the first never reaches the end of a window. Pass all models to one call. "
        "`accelerator.free_memory()` sets the counter back to 0: called in each iteration, no window ends before the data does."
    )
    bad = (
        _TWO_MODELS.format(contexts="accelerator.accumulate(unet), accelerator.accumulate(text_encoder)"),
        _INHERITED.format(second="with self.accelerator.accumulate(self.net):\n            "),
        _TWO_MODELS.format(contexts=_BOTH).replace("    with", "    accelerator.free_memory()\n    with"),
        _BY_KIND.format(step="") + f"    with accelerator.accumulate(net):\n        {_UPDATE}\n",
    )
    good = (
        _TWO_MODELS.format(contexts=_BOTH) + "accelerator.free_memory()\n",
        _INHERITED.format(second=""),
        _BY_KIND.format(step=f"; {_UPDATE}"),
    )
    references = (
        "https://huggingface.co/docs/accelerate/package_reference/accelerator#accelerate.Accelerator.accumulate",
        "measured: source code of accelerate 1.15.0, accumulate, _do_sync and free_memory",
    )
    words = ("Accelerator", "accelerator.accumulate")

    def check(self, script: Script) -> Iterator[Finding]:
        """Two `with accelerator.accumulate(...)` in one iteration of a loop."""
        entered: list[tuple[str, tuple[ast.AST, ...], ast.Call]] = []
        sites = sorted(script.outline.calls.get("accumulate", ()), key=lambda s: (s.call.lineno, s.call.col_offset))
        for call, function in sites:
            if not isinstance(call.func, ast.Attribute) or not isinstance(
                script.outline.parents.get(call), ast.withitem
            ):
                continue
            owner = key_of(call.func.value)
            around = _around(script, call)
            steps = _steps(script, owner, function) if around else ""
            if not steps:
                continue
            if (reset := _reset(script, owner, around[0])) is not None:
                yield self.finding(
                    script.where(reset),
                    f"{_above_one(steps)}`{text_of(reset.func)}` sets the counter of `{owner}.accumulate` ({script.at(call)}) back to 0 in "
                    "every iteration: the optimizer steps at most once per epoch, at the end of the data",
                    instead="call it after the training",
                    severity="error",
                )
                return
            other = next((c for o, path, c in entered if o == owner and _run_together(path, around)), None)
            entered.append((owner, around, call))
            if other is None:
                continue
            yield self.finding(
                script.where(call),
                f"{_above_one(steps)}`{owner}.accumulate` counts this iteration a second time (first on {script.at(other)}): windows have fewer "
                "micro-batches than the loss is divided by",
                instead=f"{owner}.accumulate(...) once, with all the models",
            )


def _steps(script: Script, owner: str, function: Function) -> str:
    """The number of steps that an Accelerator accumulates over, as the script writes it; "" if it is 1, or no Accelerator is known."""
    engine = engine_at(script, owner, function) if owner else None
    if engine is None or engine.library != ACCELERATE:
        return ""
    if engine.steps is None:
        return "" if engine.is_created else "gradient_accumulation_steps"
    return "" if constant(engine.steps) in {1, None} else text_of(engine.steps)


def _above_one(steps: str) -> str:
    return "" if steps.isdigit() else f"if `{steps}` is above 1, "


def _reset(script: Script, owner: str, loop: ast.AST) -> ast.Call | None:
    """A call in every iteration of a loop that resets an Accelerator."""
    sites = [site for name in ("free_memory", "clear") for site in script.outline.calls.get(name, ())]
    for call, _ in sites:
        is_own = isinstance(call.func, ast.Attribute) and key_of(call.func.value) == owner
        if is_own and _around(script, call) == (loop,):
            return call
    return None


def _run_together(first: tuple[ast.AST, ...], second: tuple[ast.AST, ...]) -> bool:
    """Whether one iteration runs two calls: in the same branches of one loop, or one of them around the branch of the other.

    A branch that goes to the next iteration, before the second call, is not one of them.
    """
    (loop, *a), (other, *b) = first, second
    shared = min(len(a), len(b))
    inner = a[: len(a) - shared]
    leaves = (ast.Continue, ast.Break, ast.Return, ast.Raise)
    if loop is not other or a[len(a) - shared :] != b[len(b) - shared :]:
        return False
    return not any(isinstance(n, leaves) for branch in inner for s in _block_of(loop, branch) for n in ast.walk(s))


def _block_of(loop: ast.AST, branch: ast.AST) -> list[ast.stmt]:
    """The statements of a branch, by one of them."""
    for node in ast.walk(loop):
        for block in (getattr(node, name, ()) for name in ("body", "orelse", "handlers", "finalbody")):
            if isinstance(block, list) and any(s is branch for s in block):
                return block
    return []


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


RULES: tuple[type[Rule], ...] = (AccumulationNotPassed, AccumulateEnteredTwice)
