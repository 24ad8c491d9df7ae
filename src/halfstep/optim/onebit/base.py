"""The base of the compressed optimizers: who takes part in a step, what is reduced how, and what is saved.

A step of all parameters:

    members     every parameter that has a gradient, or had one before (then a missing one counts as zero, because other ranks
                may have one, and all ranks must send the same tensors)
    flag        an overflow on one rank skips the step on all of them; nothing changes then, errors and schedule included
    step_all    the subclass: reduces, densely or compressed, and updates
    schedule    advances once it is known on the host that the step was applied, which is at the next step

With `local_gradients=True` gradients are those of this rank alone, as after `backward()` without DDP, or under
`model.no_sync()`: the optimizer averages them in its dense steps, and agrees with the other ranks on the flag. With False the
caller does both: gradients must be averaged whenever `needs_dense_gradients` is true before a backward.

`deepspeed_compat=True` reproduces the trajectories of DeepSpeed 0.19.6, two defects included: the first call drops its gradient and
counts as a step, and padding is compressed like elements. It is for comparisons.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from halfstep.errors import RankError, SettingError
from halfstep.events import log_warning
from halfstep.kernels.lean import lean_step
from halfstep.kernels.table import copied_to
from halfstep.optim.onebit.feedback import ERRORS, reduce_with_feedback
from halfstep.optim.onebit.joined import JoinedOptimizer
from halfstep.optim.onebit.precision import check_compute, unverified_precision
from halfstep.optim.onebit.schedule import schedule_from
from halfstep.optim.onebit.wire import Wire
from halfstep.scaling.readback import Readback

__all__ = ["Member", "OneBitOptimizer", "Rule"]

Member: TypeAlias = tuple[dict[str, Any], Tensor]  # a group and one of its parameters
Rule: TypeAlias = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]  # (states, master, gradient) -> new master

_REASON = "error feedback corrects the rounding of what is sent, and would not see that of the stored moments. Use states=fp32."
_SAVED = "onebit"  # in a saved group: the schedule, and whose errors these are


class OneBitOptimizer(JoinedOptimizer):
    """Base of the three compressed optimizers; a subclass gives `step_all` and its schedule."""

    elementwise: ClassVar[bool] = False
    unstorable: ClassVar[Mapping[str, str]] = MappingProxyType({"bf16": _REASON, "8bit": _REASON})
    rank_states: ClassVar[tuple[str, ...]] = ERRORS  # state entries that differ from rank to rank

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        master: str,
        states: str,
        process_group: Any,
        local_gradients: bool,
        compute: str | None,
        allow_unverified: bool,
        deepspeed_compat: bool,
    ) -> None:
        check_compute(compute)
        self.deepspeed_compat = deepspeed_compat
        self.process_group, self.local_gradients = process_group, local_gradients
        self.compute, self.allow_unverified = compute, allow_unverified
        self.unverified: str | None = None  # known at the first step: what is unverified, "" if nothing
        self._wire: Wire | None = None
        self._readback = Readback()
        super().__init__(params, defaults, master=master, states=states)

    # --- what a subclass gives ------------------------------------------------------------------------------------------

    @abstractmethod
    def step_all(self, members: Sequence[Member], grads: Sequence[Tensor], skip: Tensor | None) -> None:
        """Reduce and update; gradients are fp32 and unscaled, and `skip` is the flag that all ranks agree on."""

    @abstractmethod
    def advanced(self, norm: float | None) -> Any:
        """The schedule after one more applied step."""

    def wanted_norm(self) -> bool:
        """Whether `advanced` needs the norm of the variance after the next step."""
        return False

    def on_freeze(self) -> None:
        """Called once, after the last step before the freeze."""
        self._warn_of_zero_variance()

    # --- ranks ----------------------------------------------------------------------------------------------------------

    @property
    def needs_dense_gradients(self) -> bool:
        """Whether gradients of the next step must be the mean over all ranks; this optimizer does it if `local_gradients`."""
        self.settle()
        return self.schedule.dense

    @property
    def synchronized(self) -> bool:
        """Whether all ranks have the same weights now; 0/1 Adam's differ between two synchronizations."""
        return True

    # --- the step -------------------------------------------------------------------------------------------------------

    def step_together(self, *, ready: bool) -> bool:
        """Step all parameters: the collectives need them together."""
        self.settle()
        members = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None or self.state.get(p)]
        if not members:
            return True
        if members[0][1].is_cuda and torch.cuda.is_current_stream_capturing():
            raise SettingError(
                f"{type(self).__name__} cannot step inside a CUDA graph: its schedule decides on the host what each step sends. Capture "
                "forward and backward only."
            )
        if self.unverified is None:
            self._start(members)
        for group, param in members:
            if param.grad is not None:
                self._check_supported(param)
            self._check_variance(group, param)
        self.fill_states(members)
        if self.deepspeed_compat and self.schedule.step == 0:
            self.schedule = replace(self.schedule, step=1)
            return True
        skip = self._agreed_flag()
        if skip is not None and skip.device.type == "cpu":
            if skip.item():  # known here, and the same on all ranks: a skipped step sends nothing
                return True
            skip = None
        self.step_all(members, self._gradients(members), skip)
        self._count_step(skip, members)
        return True

    def step_some(
        self, members: Sequence[tuple[dict[str, Any], Tensor]], found_inf: Tensor, tables: dict[Any, Any]
    ) -> None:
        """Rejected: an update inside backward has some of the gradients, and the collectives need all."""
        raise SettingError(
            f"{type(self).__name__} exchanges all gradients together and cannot update parameters inside backward; leave out "
            "gradient_release."
        )

    def settle(self) -> None:
        """Bring the schedule up to date with the steps whose flag has been computed."""
        for _, values in self._readback.deliver(wait=True):
            skipped, norm = values
            if not skipped:
                self._advance(norm)

    def _advance(self, norm: float | None) -> None:
        was_frozen = self.schedule.frozen
        self.schedule = self.advanced(norm)
        if self.schedule.frozen and not was_frozen:
            self.on_freeze()

    def _count_step(self, skip: Tensor | None, members: Sequence[Member]) -> None:
        if skip is None and not self.wanted_norm():
            self._advance(None)
            return
        device = members[0][1].device
        flag = torch.zeros((), device=device) if skip is None else skip
        norm = self._variance_norm(members) if self.wanted_norm() else torch.zeros((), device=device)
        self._readback.push(torch.stack([flag.to(torch.float32), norm]))

    def _variance_norm(self, members: Sequence[Member]) -> Tensor:
        """The sum of the variances of all elements, without the bias of a young average."""
        sums = [
            self.state[p]["exp_avg_sq"].sum() / (1 - g["betas"][1] ** self.state[p]["step"].double()).float()
            for g, p in members
        ]
        return torch.stack(sums).sum()

    def _start(self, members: Sequence[Member]) -> None:
        """Checks of the first step, before anything is changed."""
        params = [param for _, param in members]
        if len({p.device for p in params}) > 1:
            raise SettingError(
                f"{type(self).__name__} exchanges all parameters in one message, and they are on several devices: "
                f"{', '.join(sorted({str(p.device) for p in params}))}. Put the model on one device per rank."
            )
        unverified = unverified_precision(params, self.compute, type(self).__name__, allowed=self.allow_unverified)
        shapes = str([tuple(p.shape) for p in params]).encode()
        if not self.wire.same([len(params), sum(p.numel() for p in params), zlib.crc32(shapes)]):
            raise RankError(
                f"Rank {self.wire.rank} has gradients for {len(params)} parameters with {sum(p.numel() for p in params):,} elements, and "
                "another rank has others. All ranks must train the same parameters, and each must get its first gradient in the "
                "same step on every rank."
            )
        self.unverified = unverified
        if unverified and self.wire.rank == 0:
            log_warning(f"The {unverified}: it is verified in fp16 only (allow_unverified=True).")

    def _check_variance(self, group: dict[str, Any], param: Tensor) -> None:
        if not self.state.get(param) and not self.schedule.dense and not group.get("non_freeze"):
            raise SettingError(
                f"A parameter of shape {tuple(param.shape)} has its first gradient at step {self.schedule.step + 1}, which is "
                "compressed: it has no variance to divide by. Train it from the start, or put it into a group of OneBitAdam with "
                "non_freeze=True."
            )

    def _agreed_flag(self) -> Tensor | None:
        flag: Tensor | None = getattr(self, "found_inf", None)
        return flag if flag is None or not self.local_gradients else self.wire.any_set(flag)

    def _gradients(self, members: Sequence[Member]) -> list[Tensor]:
        """Gradients in fp32, divided by the loss scale; zero where there is none."""
        divisor: Tensor | None = getattr(self, "grad_scale", None)
        factor = None if divisor is None else 1 / divisor.detach().to(torch.float32)  # as the kernels do
        grads = []
        for _, param in members:
            if param.grad is None:
                grads.append(torch.zeros_like(param, dtype=torch.float32))
                continue
            wide = param.grad.float()
            grads.append(wide if factor is None else wide * copied_to(factor, wide.device))
        return grads

    def apply_rule(self, param: Tensor, rule: Rule, grad: Tensor, skip: Tensor | None) -> None:
        """Update one parameter, its master and its states by a rule, unless the flag is set."""
        lean_step(param, grad, self.state[param], self.layout, rule, None, skip)

    def update_densely(self, members: Sequence[Member], grads: Sequence[Tensor], skip: Tensor | None) -> None:
        """A step of the parent optimizer on the mean of the gradients."""
        # After the freeze nobody else averages gradients, not even with local_gradients=False.
        means = self.wire.average(grads) if self.local_gradients or self.schedule.frozen else grads
        for (group, param), grad in zip(members, means, strict=True):
            self.apply_rule(param, partial(self.update, group), grad, skip)

    # --- compression ----------------------------------------------------------------------------------------------------

    def reduce_compressed(
        self, members: Sequence[Member], values: Sequence[Tensor], skip: Tensor | None, *, fused: bool = False
    ) -> list[tuple[Tensor, Tensor | None]]:
        """The mean over ranks and the new worker error of each value; one scale for all of them if `fused`."""
        states = [self.state[param] for _, param in members]
        return reduce_with_feedback(values, states, self.wire, skip, fused=fused, padded=self.deepspeed_compat)

    def masked(self, group: dict[str, Any], value: Tensor) -> Tensor:
        """A reduced value with zeros where the group's `exp_avg_mask` has them."""
        mask: Tensor | None = group.get("exp_avg_mask")
        if mask is None:
            return value
        if mask.device != value.device:
            mask = group["exp_avg_mask"] = mask.to(value.device)
        return value * mask

    def zero_errors(self) -> None:
        """Forget what compression lost: for a schedule that compresses another quantity from now on."""
        for state in self.state.values():
            for name in ERRORS:
                if name in state:
                    state[name].zero_()

    def _warn_of_zero_variance(self) -> None:
        """Log how many elements never had a gradient: a compressed momentum is not zero there, and is divided by eps."""
        count = 0
        for group in self.param_groups:
            for param in group["params"]:
                if "exp_avg_sq" in self.state.get(param, {}) and not group.get("non_freeze"):
                    count += int((self.masked(group, (self.state[param]["exp_avg_sq"] == 0).float())).sum())
        if count and self.wire.num_ranks > 1 and self.wire.rank == 0:
            log_warning(
                f"{type(self).__name__} freezes its variance, which is 0 for {count:,} elements that never had a gradient. One bit cannot "
                "represent a momentum of 0, so they would move by lr * scale / eps at each compressed step. Pass exp_avg_mask with "
                "zeros for them in their parameter group."
            )

    # --- groups, saving and loading -------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while steps are dense; a mask must fit each of its parameters."""
        schedule = getattr(self, "schedule", None)  # not yet, while the constructor adds the first groups
        if schedule is not None and schedule.frozen:
            raise SettingError(
                f"{type(self).__name__} has frozen its variance at step {schedule.frozen_at}, and new parameters have none. Add groups before."
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.check_group(group)
        except SettingError:
            self.param_groups.pop()
            raise

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise for settings of a group that have no meaning here."""
        mask = group.get("exp_avg_mask")
        if mask is None:
            return
        for param in group["params"]:
            try:
                fits = bool(mask.expand(param.shape).shape == param.shape)
            except RuntimeError:
                fits = False
            if not fits:
                raise SettingError(
                    f"exp_avg_mask has the shape {tuple(mask.shape)} and a parameter of its group {tuple(param.shape)}; put each masked "
                    "parameter into a group of its own."
                )

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank: errors and, between two synchronizations of 0/1 Adam, more of it differ from rank to rank.

        Masks are not saved: those of the program count, as in DeepSpeed.
        """
        self.settle()
        saved = super().state_dict()
        own = asdict(self.schedule) | {"rank": self.wire.rank, "num_ranks": self.wire.num_ranks}
        groups = [{k: v for k, v in group.items() if k != "exp_avg_mask"} for group in saved["param_groups"]]
        return saved | {"param_groups": [group | {_SAVED: own} for group in groups]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of Adam's moments; errors of another rank or number of ranks start at zero."""
        groups = [dict(group) for group in state_dict["param_groups"]]
        own = [group.pop(_SAVED, None) for group in groups]
        masks = [group.get("exp_avg_mask") for group in self.param_groups]
        entries = dict(state_dict["state"])
        saved = next((each for each in own if each is not None), None)
        place = {"rank": self.wire.rank, "num_ranks": self.wire.num_ranks}
        if saved is None or {name: saved[name] for name in place} != place:
            entries = {key: {n: v for n, v in e.items() if n not in ERRORS} for key, e in entries.items()}
            if saved is not None and saved["frozen_at"] >= 0:
                log_warning(
                    f"The state is that of rank {saved['rank']} of {saved['num_ranks']}, and this is rank {place['rank']} of "
                    f"{place['num_ranks']}: its compression errors are not used, and start at zero."
                )
        self._readback = Readback()
        super().load_state_dict(state_dict | {"param_groups": groups, "state": entries})
        for group, mask in zip(self.param_groups, masks, strict=True):
            group.pop("exp_avg_mask", None)
            if mask is not None:
                group["exp_avg_mask"] = mask
        kind = type(self.schedule)
        steps = [int(state["step"]) for state in self.state.values() if "step" in state]
        self.schedule = schedule_from(kind, saved or {"step": max(steps, default=0)})  # type: ignore[type-var]

    def __getstate__(self) -> dict[str, Any]:
        raise SettingError(
            f"{type(self).__name__} cannot be pickled, because its process group cannot; save state_dict()."
        )
