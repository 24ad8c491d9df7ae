"""What a run saves and restores, so that a resumed run equals one that was never interrupted.

Model, optimizers, schedulers, loss scaler, EMA and counters; a checkpoint adds the random-number state. A state is taken
only between windows: the gradients of a partly filled window are not saved, and dropping them silently would break
bit-exact resume. It always has the trained weights, also inside `evaluate(ema=True)`.

Loading checks everything first and changes nothing unless all of it fits. Where foreign code fails after that, what
was changed is restored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.backends.base import Backend
from halfstep.checkpoint.directory import check_weights, replaced
from halfstep.checkpoint.names import clean_names, match_names
from halfstep.engine.casting import check_range
from halfstep.engine.delivery import Progress
from halfstep.engine.ema import Ema
from halfstep.engine.ownership import keep_step_path
from halfstep.engine.saved.entries import check_entries, load_entries, optimizer_state
from halfstep.engine.saved.matching import (
    MatchedState,
    ModelNames,
    by_number,
    class_name,
    group_names,
    match_optimizers,
)
from halfstep.engine.saved.placing import master_part, read_state
from halfstep.engine.saved.rollback import restored_on_error
from halfstep.engine.saved.schedulers import match_schedulers, optimizer_of, scheduler_states
from halfstep.engine.setup import PreparedRun
from halfstep.engine.window import Window
from halfstep.errors import HalfstepError, SettingError
from halfstep.events import log_info
from halfstep.hardware.units import few
from halfstep.kernels.split import split
from halfstep.optim.adopt import users_optimizer
from halfstep.optim.convert import plain
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.masters import WithMasters
from halfstep.optim.shards import local, placed
from halfstep.precision.formats import DTYPES_16_BIT
from halfstep.precision.policy import Policy
from halfstep.scaling.scaler import Scaler

__all__ = ["RunParts", "load_state", "state_of"]

STATE_VERSION = 1
_EXTRA = "_extra_state"  # torch's name for what a module's get_extra_state() returns
_COUNTERS = ("attempts", "micro_batches", "applied")


@dataclass(frozen=True)
class RunParts:
    """The objects of a run that have state."""

    run: PreparedRun
    schedulers: list[Any]
    scaler: Scaler
    ema: Ema | None
    window: Window
    progress: Progress
    backend: Backend

    @property
    def policy(self) -> Policy:
        """The policy of the run."""
        return self.run.policy

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers as they are stepped."""
        return self.run.optimizers

    def masters(self) -> dict[str, Tensor]:
        """The fp32 value of every trainable parameter, by name; of the trained weights, also inside `evaluate(ema=True)`."""
        run = self.run
        if self.ema is None or self.ema.trained is None:
            with self.backend.whole_weights():  # frozen ones have no master
                return {name: run.master_of(p) for name, p in run.params.items()}
        with self.ema.swapped_back():
            return {name: run.master_of(p).clone() for name, p in run.params.items()}


def state_of(parts: RunParts, truth: dict[str, Any]) -> dict[str, Any]:
    """The state as a tree of plain values and tensors."""
    if parts.window.has_gradients:
        raise SettingError(
            f"The engine is inside a window ({parts.window.num_micro_batches} of {parts.run.accumulate} micro-batches stepped) and its "
            "gradients would be lost. Save after a step whose result.boundary is True, or close the window with step(last=True)."
        )
    parts.backend.drop_copies()  # a forward without a backward leaves them in the module, in place of the weights
    with parts.backend.whole_weights():
        return parts.backend.gather(_state_of(parts, truth))


def _state_of(parts: RunParts, truth: dict[str, Any]) -> dict[str, Any]:
    module, progress = parts.run.module, parts.progress
    names = ModelNames.of(module)
    model, extra = _module_state(parts)
    return {
        "version": STATE_VERSION,
        "policy": str(parts.policy),
        "truth": truth,
        "model": model,
        "extra_state": extra,
        "params": sorted(set(names.every) & model.keys()),  # which of them are parameters; the others are buffers
        "optimizers": [optimizer_state(o) for o in parts.optimizers],
        "optimizer_classes": [class_name(o) for o in parts.optimizers],
        "names": [
            [n for g in group_names(names, o) for n in g] for o in parts.optimizers
        ],  # as the optimizer counts them
        "schedulers": scheduler_states(parts.schedulers),
        "scheduler_classes": [type(s).__name__ for s in parts.schedulers],
        "scheduler_optimizers": [optimizer_of(s, parts.optimizers) for s in parts.schedulers],
        "scaler": parts.scaler.state_dict(),
        "ema": None if parts.ema is None else _ema_state(parts.ema, parts.run, names),
        "counters": {
            "attempts": progress.attempts,
            "micro_batches": progress.micro_batches,
            "applied": progress.applied,
            "largest_weight": float(parts.window.largest),
        },
    }


def _module_state(parts: RunParts) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of the model under its own names, and what its modules' get_extra_state() returned."""
    module, ema = parts.run.module, parts.ema
    tensors, extra = _divided(module.state_dict())
    if ema is not None and ema.trained is not None:
        own = {id(p): name for name, p in parts.run.params.items()}
        every = {name: own[id(p)] for name, p in module.named_parameters(remove_duplicate=False) if id(p) in own}
        clean, fulls = clean_names(module, every), clean_names(module, tensors)
        trained = {clean[name]: ema.trained[first] for name, first in every.items()}
        tensors = {name: trained.get(fulls[name], tensor) for name, tensor in tensors.items()}
    clean = clean_names(module, [*tensors, *extra])
    return {clean[n]: t.detach() for n, t in tensors.items()}, {clean[n]: value for n, value in extra.items()}


def _divided(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the extra states of a module's `state_dict()`."""
    extra = {name: value for name, value in state.items() if name.split(".")[-1] == _EXTRA}
    return {name: value for name, value in state.items() if name not in extra}, extra


def _ema_state(ema: Ema, run: PreparedRun, names: ModelNames) -> dict[str, Any]:
    averages = {names.own[id(run.params[name])]: average for name, average in ema.averages.items()}
    return ema.state_dict() | {"averages": averages}


@dataclass(frozen=True)
class _Fit:
    """A state that fits this run, in the order and under the names of this run."""

    policy: Policy
    weights: dict[str, Tensor]  # under the names without wrappers
    full: dict[str, str]  # those names -> the module's
    extra: dict[str, Any]  # under the module's names
    optimizers: list[MatchedState]
    schedulers: list[Any]
    averages: dict[str, Tensor]


def load_state(parts: RunParts, state: dict[str, Any]) -> None:
    """Restore a state; everything is checked before the first change, and a failure after that is reverted."""
    with parts.backend.whole_weights(write=True):
        _load_whole(parts, state)


def _load_whole(parts: RunParts, state: dict[str, Any]) -> None:
    parts.backend.drop_copies()
    state = read_state(parts.backend.scatter(state), parts.run.module)
    fit = _fit(parts, state)
    others = [*parts.schedulers, parts.scaler, parts.progress, parts.window]
    optimizers = [*parts.optimizers, *map(users_optimizer, parts.optimizers)]
    trained = contextlib.nullcontext() if parts.ema is None else parts.ema.swapped_back()
    with trained, restored_on_error(parts.run.module, optimizers, others):
        _load(parts, fit, state)
    parts.backend.drop_copies()


def _load(parts: RunParts, fit: _Fit, state: dict[str, Any]) -> None:
    if fit.policy.scaling.mode == parts.policy.scaling.mode:
        with _reported("the loss scaler"):
            parts.scaler.load_state_dict(state["scaler"])
    else:
        log_info(
            f"The loss scale of the saved run does not apply under {parts.policy}; it restarts at its initial value."
        )
    if _same_layout(fit.policy, parts.policy):
        _load_module(parts, fit, fit.weights)
        for optimizer, matched in zip(parts.optimizers, fit.optimizers, strict=True):
            _load_optimizer(optimizer, matched, exact=True)
    else:
        _load_converted(parts, fit)
    for scheduler, saved in zip(parts.schedulers, fit.schedulers, strict=True):
        with _reported(f"the scheduler {type(scheduler).__name__}"):
            scheduler.load_state_dict(saved)
    counters = state["counters"]
    for name in _COUNTERS:
        setattr(parts.progress, name, counters[name])
    parts.window.largest = counters["largest_weight"]
    if parts.ema is not None:
        parts.ema.load_state_dict({"averages": fit.averages})


@contextlib.contextmanager
def _reported(part: str) -> Iterator[None]:
    """Errors of foreign code name the part that failed."""
    try:
        yield
    except HalfstepError:
        raise
    except Exception as error:
        raise SettingError(
            f"The state could not be loaded: {part} raised {type(error).__name__}: {error}. The engine is as it was before."
        ) from error


def _load_module(parts: RunParts, fit: _Fit, weights: dict[str, Tensor]) -> None:
    with _reported("the model"):
        module = parts.run.module
        own, _ = _divided(module.state_dict())
        module.load_state_dict({fit.full[n]: placed(t, own[fit.full[n]]) for n, t in weights.items()} | fit.extra)


def _same_layout(saved: Policy, own: Policy) -> bool:
    names = ("params", "master", "states") if own.params == "fp32" else ("params", "master", "states", "keep_fp32")
    return all(getattr(saved, name) == getattr(own, name) for name in names)


def _load_optimizer(optimizer: torch.optim.Optimizer, matched: MatchedState, *, exact: bool) -> None:
    """Load a state, but keep this run's choice of fused or foreach, which changes how a step is computed, not what."""
    numbered = by_number(matched)
    groups = keep_step_path(matched.saved["param_groups"], optimizer) if numbered else None
    with _reported(f"the optimizer {class_name(optimizer)}"):
        load_entries(optimizer, matched, groups, exact=exact and bool(numbered))


def _load_converted(parts: RunParts, fit: _Fit) -> None:
    """Weights and optimizer states from another layout, through what every layout represents: fp32 masters and moments."""
    separate: dict[str, Tensor] = {}  # masters that are not the weights themselves
    plain_states = []
    for optimizer, matched in zip(parts.optimizers, fit.optimizers, strict=True):
        moments = optimizer.moments if isinstance(optimizer, LeanOptimizer) else None
        entries = dict(matched.saved["state"])
        for number, name in by_number(matched).items():
            entry = entries.get(number)
            if entry is not None:
                master = master_part(entry, fit.weights[name])
                separate |= {} if master is None else {name: master}
                entries[number] = plain(entry, moments)
        saved = {**matched.saved, "state": entries}
        plain_states.append(MatchedState(matched.index, matched.groups, matched.names, saved))
    masters = replaced(fit.weights, separate)
    _check_ranges(parts, masters)
    _load_module(parts, fit, masters)
    for optimizer, matched in zip(parts.optimizers, plain_states, strict=True):
        _load_optimizer(optimizer, matched, exact=False)
        if isinstance(optimizer, WithMasters):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            for name, param in zip(matched.names, params, strict=True):
                if param.requires_grad:
                    optimizer.set_master(param, masters[name].to(param.device, torch.float32))


def _check_ranges(parts: RunParts, masters: dict[str, Tensor]) -> None:
    """Raise where a master is beyond the range of the 16-bit weight that it would be rounded to."""
    names = ModelNames.of(parts.run.module)
    for param in (p for p in parts.run.params.values() if p.dtype in DTYPES_16_BIT):
        name = names.own[id(param)]
        master = local(masters[name]).float()
        check_range(name, split(master, param.dtype)[0], master, parts.policy)


def _fit(parts: RunParts, state: dict[str, Any]) -> _Fit:
    """Check all of a state against this run; nothing is changed."""
    _check_keys(state)
    saved, own = Policy.parse(state["policy"]), parts.policy
    module, names = parts.run.module, ModelNames.of(parts.run.module)
    tensors, extra = _divided(module.state_dict())
    clean = clean_names(module, [*tensors, *extra])
    expected = {clean[name]: tensor for name, tensor in tensors.items()}
    weights = check_weights(state["model"], expected, any_float=not _same_layout(saved, own))
    saved_extra = state.get("extra_state", {})
    own_extra = match_names(saved_extra, [clean[name] for name in extra])
    if len(own_extra) != len(saved_extra) or len(own_extra) != len(extra):
        theirs, ours = sorted(saved_extra), sorted(clean[name] for name in extra)
        raise SettingError(f"The state has the extra states {few(theirs)} of modules, and this model {few(ours)}.")
    full = {clean[name]: name for name in (*tensors, *extra)}
    matched = match_optimizers(names, parts.optimizers, state)
    params = {names.own[id(p)]: p for p in parts.run.params.values()}
    for optimizer, one in zip(parts.optimizers, matched, strict=True):
        check_entries(optimizer, one, params, known_class=bool(state.get("optimizer_classes")))
        if not by_number(one) and not _same_layout(saved, own):
            raise SettingError(
                f"The state of {class_name(optimizer)} has a layout of its own, which cannot be converted from {saved} to {own}. Continue "
                f"under {saved}."
            )
    schedulers = match_schedulers(parts.schedulers, parts.optimizers, matched, state)
    if (state["ema"] is None) != (parts.ema is None):
        average = "an EMA" if state["ema"] is not None else "no EMA"
        raise SettingError(f"The state has {average}; build the Engine with the same ema=.")
    averages = {} if parts.ema is None else _averages(parts, names, state["ema"]["averages"])
    if parts.ema is not None:
        parts.ema.check_state(averages)
    if saved != own:
        lossy = own.states not in {"fp32", saved.states}
        log_info(
            f"The state was saved under {saved}; continuing under {own}."
            + (f" Moments are rounded to {own.states} once." if lossy else "")
        )
    extra = {full[own_extra[name]]: value for name, value in saved_extra.items()}
    return _Fit(saved, weights, full, extra, matched, schedulers, averages)


def _averages(parts: RunParts, names: ModelNames, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Saved averages under the names that the EMA has here."""
    own = {names.own[id(p)]: name for name, p in parts.run.params.items()}
    resolved = names.resolve(list(saved))
    return {own.get(name, name): average for name, average in zip(resolved, saved.values(), strict=True)}


def _check_keys(state: dict[str, Any]) -> None:
    version = state.get("version")
    if not isinstance(version, int) or version > STATE_VERSION:
        raise SettingError(
            f"The state has version {version!r}; this Halfstep reads up to {STATE_VERSION}. Upgrade Halfstep."
        )
    needed = ("policy", "model", "optimizers", "names", "schedulers", "scaler", "ema", "counters")
    missing = [key for key in needed if key not in state]
    counters = state.get("counters")
    if not missing and isinstance(counters, dict):
        missing = [
            f"counters.{key}"
            for key in (*_COUNTERS, "largest_weight")
            if not isinstance(counters.get(key), int | float)
        ]
    if missing:
        raise SettingError(f"The state has no {', '.join(missing)}; pass what Engine.state_dict() returned.")
