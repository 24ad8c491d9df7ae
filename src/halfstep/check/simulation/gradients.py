"""What torch's scaler and optimizers do with the gradients of a simulated run, and the mistakes that this shows.

A GradScaler stores for each optimizer whether its gradients were unscaled and whether it stepped, until `update` clears both;
an optimizer without either makes `update` raise. Gradients are a list of backward passes: which models each reached, with which scale.
An optimizer's are those since it was cleared. Where code of another file may have cleared or scaled something, nothing is
reported until the next call of the script that settles it.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from halfstep.check.simulation.frozen import Frozen, overlap
from halfstep.check.simulation.values import UNKNOWN_TENSOR, Optimizer, Scaler, Tensor

__all__ = ["Gradients", "Mishap", "Raised"]


NOTHING = Tensor(frozenset())


class Raised(Exception):
    """The script raises."""


@dataclass(frozen=True)
class Mishap:
    """A mistake in a run: the rule, the place and what happens."""

    code: str
    node: ast.AST
    message: str
    instead: str = ""


@dataclass(frozen=True)
class _Backward:
    loss: Tensor
    node: ast.AST
    number: int


def _shares_all(other: Optimizer, optimizer: Optimizer) -> bool:
    """Whether two optimizers have the same parameters: each was created from all those of one model."""
    is_same = other is not optimizer and bool(other.models) and other.models == optimizer.models
    return is_same and all(_takes_all(each.node) for each in (other, optimizer))


def _are_two(other: Scaler, scaler: Scaler) -> bool:
    """Whether the script creates two scalers, and does not only have two names for one."""
    return other is not scaler and other.node is not None and scaler.node is not None


def _takes_all(node: ast.AST | None) -> bool:
    """Whether an optimizer is created with `model.parameters()`."""
    params = node.args[0] if isinstance(node, ast.Call) and node.args else None
    func = params.func if isinstance(params, ast.Call) else None
    return isinstance(func, ast.Attribute) and func.attr == "parameters"


class Gradients:
    """The gradients of one run."""

    def __init__(self, *, are_cleared: bool = True, reads_gradients: bool = False) -> None:
        self.reads_gradients = reads_gradients  # the script itself uses them, before it clears them
        self.are_cleared = are_cleared  # somewhere in the script; in a fragment, after each step
        self.mishaps: list[Mishap] = []
        self.backwards: list[_Backward] = []
        self.optimizers: list[Optimizer] = []
        self.scalers: list[Scaler] = []
        self.is_sure = True  # no code of another file may have run a backward pass or a step so far
        self.may_lack_scaler = False  # a caller passes none, for reasons that the script does not show
        self.frozen = Frozen()
        self.computed = NOTHING  # what models have computed since the last backward pass
        self.skips = 0  # how often the run left an iteration or function early
        self._failed: set[ast.AST] = set()  # steps without gradients
        self._skips_at: dict[tuple[Scaler, Optimizer], int] = {}

    # --- what a script calls --------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, node: ast.AST) -> None:
        """A backward pass."""
        if loss.divided_twice and loss.models != frozenset():
            name = loss.divided_twice.rpartition(".")[2]
            self._add("HS182", node, f"this loss was divided by `{name}` twice: gradients are too small by that factor", f"divide the loss by {name} once")  # fmt: skip
        self.computed = NOTHING
        loss = dataclasses.replace(loss, models=self.frozen.reached(loss.models))
        self.backwards.append(_Backward(loss, node, len(self.backwards) + 1))

    def lost_loss(self) -> Tensor:
        """A loss that the run has lost sight of: it was computed from what models computed since the last backward pass."""
        return dataclasses.replace(self.computed, models=None) if self.computed.formats else UNKNOWN_TENSOR

    def clear(
        self, models: frozenset[str] | None, optimizer: Optimizer | None = None, node: ast.AST | None = None
    ) -> None:
        """Gradients of an optimizer, of models, or of unknown parameters are cleared."""
        same = [optimizer, *(o for o in self.optimizers if _shares_all(o, optimizer))] if optimizer is not None else []
        for each in same or self.optimizers:
            if each in same or self._is_alone(each) or self._has(each, models):
                self._note_waste(each, node)
                each.cleared, each.is_sure, each.clipped = len(self.backwards), True, None
            elif each.models is None or models is None:
                each.is_sure = False
            else:  # models of other names, which may be the same ones
                each.cleared_perhaps = len(self.backwards)

    def _note_waste(self, optimizer: Optimizer, node: ast.AST | None) -> None:
        """Gradients that no step has used are cleared, for the second time with a step between the two."""
        wasted = [p for p in self._parts(optimizer) or () if p.number > optimizer.stepped]
        if node is None or not wasted or self.reads_gradients or not self._is_alone(optimizer):
            return
        if optimizer.wasted < optimizer.stepped and optimizer.wasted and self.skips == optimizer.skips_at_waste:
            self._add("HS181", node, f"gradients of `{optimizer.key}` are cleared before a step has used them: those of the other micro-batches of a window are lost", f"call {optimizer.key}.zero_grad() after the step")  # fmt: skip
        optimizer.wasted, optimizer.skips_at_waste = len(self.backwards), self.skips

    def scale(self, scaler: Scaler, loss: Tensor) -> None:
        """`scaler.scale(loss)` of an enabled scaler."""
        if loss.formats == {"bfloat16"} and scaler.node is not None and scaler.enabled is True:
            self._add("HS120", scaler.node, "the scaler is enabled in a run whose autocast computes in bfloat16: it only costs time and can skip steps", "create it with enabled=dtype == torch.float16")  # fmt: skip

    def unscale(self, scaler: Scaler, optimizer: Optimizer, node: ast.AST) -> None:
        """`scaler.unscale_(optimizer)` of an enabled scaler."""
        self._meet(optimizer)
        if (optimizer in scaler.unscaled or optimizer in scaler.stepped) and scaler.is_sure and optimizer.is_sure:
            self._unscaled_twice(scaler, optimizer, node)
        divided = [p for p in self._parts(optimizer) or () if optimizer.stepped < p.number <= optimizer.unscaled]
        if divided and scaler.is_sure:
            self._add("HS105", node, f"gradients of `{optimizer.key}` that were divided by the scale before `{scaler.key}.update()` are divided again", "clear gradients after each step")  # fmt: skip
        waiting = [
            p
            for p in self._parts(optimizer) or ()
            if p.number > max(optimizer.unscaled, optimizer.stepped, optimizer.created)
        ]
        if scaler.is_sure and any(p.loss.scaler is scaler and p.loss.version != scaler.version for p in waiting):
            self._other_scale(scaler, node)
        self._divide(scaler, optimizer, node)
        self._skips_at[scaler, optimizer] = self.skips

    def _divide(self, scaler: Scaler, optimizer: Optimizer, node: ast.AST) -> None:
        """An optimizer's gradients, if it has any, are checked for inf and divided by the scale."""
        if self._parts(optimizer) != []:
            scaler.checked.add(optimizer)
        scaler.unscaled[optimizer] = node
        optimizer.unscaled = len(self.backwards)

    def _unscaled_twice(self, scaler: Scaler, optimizer: Optimizer, node: ast.AST) -> None:
        name = scaler.key
        if optimizer in scaler.stepped:
            self._add("HS105", node, f"`unscale_` is called after `{name}.step` and before `{name}.update()`, which raises RuntimeError", f"unscale before {name}.step")  # fmt: skip
        elif scaler.unscaled[optimizer] in self._failed:
            self._add("HS115", scaler.unscaled[optimizer], f"`{name}.step` can run without gradients of `{optimizer.key}`, which raises AssertionError, and the next `unscale_` raises RuntimeError", "step only after a backward")  # fmt: skip
        elif self.skips > self._skips_at.get((scaler, optimizer), 0):
            self._add("HS112", scaler.unscaled[optimizer], f"an iteration can end between this `unscale_` and `{name}.update()`: the next `unscale_` raises RuntimeError", f"call {name}.update() before leaving the iteration")  # fmt: skip
        elif len(self.backwards) > optimizer.unscaled:
            self._add("HS106", node, f"gradients are unscaled again before `{name}.update()`: the second `unscale_` of a window raises RuntimeError", "unscale once, on the micro-batch that steps")  # fmt: skip
        else:
            self._add("HS105", node, f"the gradients of `{optimizer.key}` are unscaled twice, which raises RuntimeError", "call unscale_ once")  # fmt: skip

    def scaler_step(self, scaler: Scaler, optimizer: Optimizer, node: ast.AST) -> None:
        """`scaler.step(optimizer)` of an enabled scaler."""
        self._meet(optimizer)
        name, parts = scaler.key, self._parts(optimizer)
        if optimizer in scaler.stepped and scaler.is_sure:
            self._add("HS114", node, f"`{name}.step` is called again before `{name}.update()`, which raises RuntimeError", f"call {name}.update() after each step")  # fmt: skip
        self._confirm_clip(optimizer)
        self._confirm_void_clip(optimizer, node)
        if not self._has_leftovers(optimizer, parts, node) and scaler.is_sure:
            if parts:
                self._judge_parts(scaler, optimizer, parts, node)
            elif parts is None and self._agree(optimizer, lambda p: (p.loss.scaler, p.loss.version == scaler.version)):
                self._judge_parts(scaler, optimizer, self._recent(optimizer), node)
        if optimizer not in scaler.unscaled:
            self._divide(scaler, optimizer, node)
        if scaler.is_sure and self.is_sure and optimizer not in scaler.checked:
            if not self.backwards:  # perhaps not the loop that trains
                self._failed.add(node)
                raise Raised
            self._add("HS115", node, f"`{name}.step` can run without gradients of `{optimizer.key}`: it raises AssertionError, because no gradients were checked for inf", "step only after a backward")  # fmt: skip
        scaler.stepped[optimizer] = node
        optimizer.stepped = len(self.backwards)

    def _confirm_clip(self, optimizer: Optimizer) -> None:
        """A step uses gradients that were clipped while scaled."""
        if optimizer.clipped is not None:
            self.mishaps.append(optimizer.clipped)
            optimizer.clipped = None

    def _has_leftovers(self, optimizer: Optimizer, parts: list[_Backward] | None, node: ast.AST) -> bool:
        """Whether gradients that an earlier step has used are still there, which is reported."""
        used = [p for p in parts or () if p.number <= optimizer.stepped and self.is_sure]
        leftovers = [p for p in used if p.number > optimizer.cleared_perhaps]
        if leftovers:
            self._add("HS156", node, f"`{optimizer.key}` steps again on gradients of the step before, which nothing has cleared: they add up over all batches", f"call {optimizer.key}.zero_grad() after each step")  # fmt: skip
        return bool(leftovers)

    def _judge_parts(self, scaler: Scaler, optimizer: Optimizer, parts: list[_Backward], node: ast.AST) -> None:
        name = scaler.key
        own = [p for p in parts if p.loss.scaler is scaler]
        if bare := [p for p in parts if p.loss.scaler is None]:
            if self.is_sure and all(p.loss.models is not None for p in bare):
                self._add("HS102", bare[0].node, f"this loss is not scaled, but `{name}.step` divides its gradients by the scale", f"write {name}.scale(loss).backward()")  # fmt: skip
        elif parts and all(p.loss.scaler is not None and _are_two(p.loss.scaler, scaler) for p in parts):
            other = parts[0].loss.scaler.key if parts[0].loss.scaler else ""
            self._add("HS102", parts[0].node, f"this loss is multiplied by the scale of `{other}`, but `{name}.step` divides its gradients by its own scale", f"write {name}.scale(loss).backward()")  # fmt: skip
        elif any(p.loss.version != scaler.version for p in own) and optimizer not in scaler.unscaled:
            self._other_scale(scaler, node)
        elif late := [p for p in own if optimizer in scaler.unscaled and p.number > optimizer.unscaled]:
            self._add("HS108", late[0].node, f"this backward adds scaled gradients to those that `unscale_` has divided; `{name}.step` does not divide them", "unscale after the last backward")  # fmt: skip

    def _other_scale(self, scaler: Scaler, node: ast.AST) -> None:
        name, what = (
            scaler.key,
            "division" if getattr(getattr(node, "func", None), "attr", "") == "unscale_" else "step",
        )
        self._add("HS108", node, f"`{name}.update()` runs between a backward and this {what}: some of these gradients have another scale than the one they are divided by", f"call {name}.update() once, after the last step; clear gradients before")  # fmt: skip

    def update(self, scaler: Scaler, node: ast.AST) -> None:
        """`scaler.update()` of an enabled scaler."""
        name = scaler.key
        if not scaler.checked and scaler.is_sure and self.is_sure and self.backwards:
            waiting = any(self._parts(o) for o in self.optimizers) or (self.backwards and not self.optimizers)
            self._add("HS107" if waiting else "HS115", node, f"`{name}.update()` can run without a `step` before it: it raises AssertionError, because no gradients were checked for inf", f"call {name}.update() only after {name}.step")  # fmt: skip
        scaler.version += 1
        scaler.unscaled.clear()
        scaler.stepped.clear()
        scaler.checked.clear()
        scaler.is_sure = True

    def step(self, optimizer: Optimizer, node: ast.AST) -> None:
        """`optimizer.step()`, or a step of a disabled scaler."""
        self._meet(optimizer)
        parts = self._parts(optimizer)
        if parts is None and self._agree(optimizer, lambda p: (p.loss.scaler, p.loss.half)):
            parts = self._recent(optimizer)
        self._confirm_clip(optimizer)
        self._confirm_void_clip(optimizer, node)
        has_leftovers = self._has_leftovers(optimizer, parts, node)
        optimizer.stepped = len(self.backwards)
        if has_leftovers or parts is None:
            return
        scaled = [p for p in parts if p.loss.scaler is not None and p.number > optimizer.unscaled]
        halves = [
            p for p in parts if p.loss.half and p.loss.scaler is None and self._computes(p.loss.halved, optimizer)
        ]
        if scaled and not self._is_unscaled(optimizer):
            key = scaled[0].loss.scaler.key if scaled[0].loss.scaler else ""
            self._add("HS103", node, f"`{optimizer.key}` steps on gradients that are multiplied by the scale of `{key}`", f"call {key}.step({optimizer.key})")  # fmt: skip
        elif halves and len(halves) == len(parts) and not self.may_lack_scaler:
            place = halves[0].loss.region or halves[0].node
            self._add("HS123", place, "float16 autocast computes the loss, and a run steps on its gradients without a GradScaler: small gradients become 0", "scale the loss, or use bfloat16")  # fmt: skip

    def clip(self, models: frozenset[str] | None, node: ast.AST) -> None:
        """Gradients of models, or of unknown parameters, are clipped."""
        for each in self.optimizers:
            if not self._is_alone(each) and not self._has(each, models):
                continue
            parts = self._parts(each)
            self._note_void_clip(each, parts, node)
            recent = [p for p in parts or () if p.number > each.unscaled]
            scaled = [p for p in recent if p.loss.scaler is not None and p.loss.scaler.is_sure]
            if scaled and not self._is_unscaled(each):
                key = scaled[0].loss.scaler.key if scaled[0].loss.scaler else ""
                each.void_clip = None
                each.clipped = Mishap("HS104", node, f"gradients of `{each.key}` are clipped while they are multiplied by the scale of `{key}`", f"call {key}.unscale_({each.key}) before clipping")  # fmt: skip

    def _note_void_clip(self, optimizer: Optimizer, parts: list[_Backward] | None, node: ast.AST) -> None:
        """Gradients are clipped of which there are none, or that a step has used."""
        optimizer.void_clip = None
        if parts is None or not self.backwards or not self.is_sure or any(p.number > optimizer.stepped for p in parts):
            return
        if optimizer.stepped == len(self.backwards) and optimizer.step_line < getattr(node, "lineno", 0):
            optimizer.void_clip = Mishap("HS109", node, f"gradients of `{optimizer.key}` are clipped after the step that used them: nothing is clipped", "clip between backward and step")  # fmt: skip
        elif not parts:
            optimizer.void_clip = Mishap("HS118", node, f"gradients of `{optimizer.key}` are clipped before backward has computed them: nothing is clipped", "clip between backward and step")  # fmt: skip

    def _confirm_void_clip(self, optimizer: Optimizer, node: ast.AST) -> None:
        """A step whose gradients nothing has clipped since backward, although a clip ran before it."""
        if optimizer.void_clip is not None:
            parts = self._parts(optimizer)
            if parts is None or any(p.number > optimizer.stepped for p in parts):  # a step without gradients clips none
                self.mishaps.append(optimizer.void_clip)
            optimizer.void_clip = None
        optimizer.step_line = getattr(node, "lineno", 0)

    def is_none(self, name: str, node: ast.AST) -> None:
        """A scaler that is None in this run is used."""
        self._add("HS176", node, f"`{name}` can be None here, which raises AttributeError", "create it always, with `enabled=`")  # fmt: skip

    def note_float32(self, scaler: Scaler, node: ast.AST) -> None:
        """A scaler multiplies a loss that nothing computes in 16 bits."""
        self._add("HS134", node, f"`{scaler.key}` scales this loss, but its model runs outside every autocast region: everything is computed in float32", "compute the model and the loss inside torch.autocast, or call backward on the loss itself")  # fmt: skip

    def missing(self, name: str, node: ast.AST, place: ast.AST) -> None:
        """A scaler is used in a run that has not created it."""
        line = getattr(place, "lineno", 0)
        self._add("HS176", node, f"`{name}` is created under a condition (line {line}), and this line can run without it, which raises AttributeError", "create it always, with `enabled=`")  # fmt: skip

    # --- what code of another file may have done -----------------------------------------------------------------------

    def lose(self, optimizer: Optimizer | None = None, scaler: Scaler | None = None) -> None:
        """Code of another file has an optimizer or a scaler, or all of them."""
        everything = optimizer is None and scaler is None
        for each in self.optimizers if everything else [optimizer] if optimizer is not None else []:
            each.is_sure = False
        for one in self.scalers if everything else [scaler] if scaler is not None else []:
            one.is_sure = False
        if everything:
            self.is_sure = False

    def forget(self) -> None:
        """Other code may run now, between two calls of a method; it clears no gradients where the method clears others itself."""
        clears = any(optimizer.cleared for optimizer in self.optimizers)
        for optimizer in self.optimizers:
            optimizer.is_sure = clears and optimizer.stepped > 0
        for scaler in self.scalers:
            scaler.is_sure = scaler.is_sure and not scaler.unscaled and not scaler.stepped

    # --- queries --------------------------------------------------------------------------------------------------------

    def _parts(self, optimizer: Optimizer) -> list[_Backward] | None:
        """The backward passes whose sum an optimizer's gradients are; None: not known."""
        if not optimizer.is_sure:
            return None
        recent = self._recent(optimizer)
        if self._is_alone(optimizer):
            return recent
        if optimizer.models is None or any(b.loss.models is None for b in recent):
            return None
        if self.frozen.may_leave(optimizer.models):
            return None
        own = [b for b in recent if b.loss.models and overlap(b.loss.models, optimizer.models)]
        return own if own or not recent else None  # a link between a model and a loss may be missing

    def _recent(self, optimizer: Optimizer) -> list[_Backward]:
        """The backward passes since an optimizer's gradients were cleared."""
        start = optimizer.cleared if self.are_cleared else max(optimizer.cleared, optimizer.stepped)
        return [b for b in self.backwards if b.number > start]

    def _agree(self, optimizer: Optimizer, kind: Callable[[_Backward], object]) -> bool:
        """Whether it does not matter which of the recent backward passes reached an optimizer: all are of one kind."""
        recent = self._recent(optimizer)
        return optimizer.is_sure and self.is_sure and bool(recent) and len(set(map(kind, recent))) == 1

    def _computes(self, halved: frozenset[str], optimizer: Optimizer) -> bool:
        """Whether one of these models may be the optimizer's."""
        is_open = not optimizer.is_of_all and self._is_alone(optimizer)
        return optimizer.models is None or is_open or overlap(halved, optimizer.models)

    def _is_alone(self, optimizer: Optimizer) -> bool:
        return all(other is optimizer for other in self.optimizers)

    def _has(self, optimizer: Optimizer, models: frozenset[str] | None) -> bool:
        return bool(optimizer.models and models and overlap(optimizer.models, models))

    def _is_unscaled(self, optimizer: Optimizer) -> bool:
        return any(optimizer in scaler.unscaled for scaler in self.scalers)

    def _meet(self, optimizer: Optimizer) -> None:
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)

    def _add(self, code: str, node: ast.AST, message: str, instead: str) -> None:
        self.mishaps.append(Mishap(code, node, message, instead))
        if "raises" in message:
            raise Raised
