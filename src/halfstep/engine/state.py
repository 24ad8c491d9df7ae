"""What a run saves and restores, so that a resumed run equals one that was never interrupted.

Model, optimizers, schedulers, loss scaler, EMA and counters; a checkpoint adds the random-number state. A state is taken
only between windows: the gradients of a partly filled window are not saved, and dropping them silently would break
bit-exact resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.backends.base import Backend
from halfstep.checkpoint.directory import Checkpoint, check_weights, clean_name, replaced
from halfstep.checkpoint.rng import restore_rng, rng_state
from halfstep.engine.delivery import Progress
from halfstep.engine.ema import Ema
from halfstep.engine.setup import PreparedRun
from halfstep.engine.window import Window
from halfstep.errors import SettingError
from halfstep.events import log_info
from halfstep.optim.convert import master_in, plain
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.masters import WithMasters
from halfstep.precision.policy import Policy
from halfstep.scaling.scaler import Scaler

__all__ = ["RunParts", "checkpoint_parts", "engine_state", "load_state", "names_of", "restore_extra", "state_of"]

STATE_VERSION = 1


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


def names_of(params: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> list[str]:
    """The model's names of an optimizer's parameters, in its own order."""
    names = {id(p): name for name, p in params.items()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def state_of(parts: RunParts, truth: dict[str, Any]) -> dict[str, Any]:
    """The state as a tree of plain values and tensors."""
    if parts.window.has_gradients:
        raise SettingError(
            f"The engine is inside a window ({parts.window.num_micro_batches} of {parts.run.accumulate} micro-batches stepped) and its "
            "gradients would be lost. Save after a step whose result.boundary is True, or close the window with step(last=True)."
        )
    progress = parts.progress
    state = {
        "version": STATE_VERSION,
        "policy": str(parts.policy),
        "truth": truth,
        "model": {clean_name(n): t.detach() for n, t in parts.run.module.state_dict().items()},
        "optimizers": [o.state_dict() for o in parts.optimizers],
        "names": [names_of(parts.run.params, o) for o in parts.optimizers],  # in the order of the optimizer's numbering
        "schedulers": [s.state_dict() for s in parts.schedulers],
        "scaler": parts.scaler.state_dict(),
        "ema": None if parts.ema is None else parts.ema.state_dict(),
        "counters": {
            "attempts": progress.attempts,
            "micro_batches": progress.micro_batches,
            "applied": progress.applied,
            "largest_weight": float(parts.window.largest),
        },
    }
    return parts.backend.gather(state)


def load_state(parts: RunParts, state: dict[str, Any]) -> None:
    """Restore a state; everything is checked before the first change."""
    state = parts.backend.scatter(state)
    _check(parts, state)
    module = parts.run.module
    own = {clean_name(name): name for name in module.state_dict()}
    policy = Policy.parse(state["policy"])
    if policy.scaling.mode == parts.policy.scaling.mode:
        parts.scaler.load_state_dict(state["scaler"])
    else:
        log_info(
            f"The loss scale of the saved run does not apply under {parts.policy}; it restarts at its initial value."
        )
    weights = {clean_name(n): t for n, t in state["model"].items()}
    if _same_layout(policy, parts.policy):
        module.load_state_dict({own[n]: t for n, t in weights.items()})
        for optimizer, saved in zip(parts.optimizers, state["optimizers"], strict=True):
            _load_optimizer(optimizer, saved)
    else:
        _load_converted(parts, own, weights, state)
    for scheduler, saved in zip(parts.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    if parts.ema is not None:
        parts.ema.load_state_dict(state["ema"] | {"averages": _averages(parts, state["ema"])})
    counters = state["counters"]
    for name in ("attempts", "micro_batches", "applied"):
        setattr(parts.progress, name, counters[name])
    parts.window.largest = counters["largest_weight"]


def _averages(parts: RunParts, saved: dict[str, Any]) -> dict[str, Tensor]:
    """Saved averages under this model's names, whatever wrappers either model has."""
    own = {clean_name(name): name for name in parts.run.params}
    return {own.get(clean_name(name), name): average for name, average in saved["averages"].items()}


def _same_layout(saved: Policy, own: Policy) -> bool:
    names = ("params", "master", "states") if own.params == "fp32" else ("params", "master", "states", "keep_fp32")
    return all(getattr(saved, name) == getattr(own, name) for name in names)


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a state, but keep this run's choice of fused or foreach, which changes how a step is computed, not what."""
    groups = zip(saved["param_groups"], optimizer.param_groups, strict=True)
    own = [theirs | {k: mine[k] for k in ("fused", "foreach") if k in mine} for theirs, mine in groups]
    optimizer.load_state_dict(saved | {"param_groups": own})


def _load_converted(parts: RunParts, own: dict[str, str], weights: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Weights and optimizer states from another layout, through what every layout represents: fp32 masters and moments."""
    separate: dict[str, Tensor] = {}  # masters that are not the weights themselves
    plain_states = []
    for optimizer, names, saved in zip(parts.optimizers, state["names"], state["optimizers"], strict=True):
        moments = optimizer.moments if isinstance(optimizer, LeanOptimizer) else None
        order = [index for group in saved["param_groups"] for index in group["params"]]
        entries = {}
        for name, index in zip(map(clean_name, names), order, strict=True):
            entry = saved["state"].get(index)
            if entry is not None:
                master = master_in(entry, weights[name])
                separate |= {} if master is None else {name: master}
                entries[index] = plain(entry, moments)
        plain_states.append(saved | {"state": entries})
    masters = replaced(weights, separate)
    parts.run.module.load_state_dict({own[n]: t for n, t in masters.items()})
    for optimizer, saved in zip(parts.optimizers, plain_states, strict=True):
        _load_optimizer(optimizer, saved)
        if isinstance(optimizer, WithMasters):
            names = {id(p): clean_name(name) for name, p in parts.run.params.items()}
            for param in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
                optimizer.set_master(param, masters[names[id(param)]].to(param.device, torch.float32))


def _check(parts: RunParts, state: dict[str, Any]) -> None:
    version = state.get("version")
    if not isinstance(version, int) or version > STATE_VERSION:
        raise SettingError(
            f"The state has version {version!r}; this Halfstep reads up to {STATE_VERSION}. Upgrade Halfstep."
        )
    saved, own = Policy.parse(state["policy"]), parts.policy
    if saved != own:
        lossy = own.states not in {"fp32", saved.states}
        log_info(
            f"The state was saved under {saved}; continuing under {own}."
            + (f" Moments are rounded to {own.states} once." if lossy else "")
        )
    weights = {clean_name(n): t for n, t in parts.run.module.state_dict().items()}
    check_weights(state["model"], weights, any_float=not _same_layout(saved, own))
    for field, objects in (("optimizers", parts.optimizers), ("schedulers", parts.schedulers)):
        if len(state[field]) != len(objects):
            raise SettingError(
                f"The state has {len(state[field])} {field} and this engine {len(objects)}; build it as it was when it was saved."
            )
    for index, (optimizer, stored) in enumerate(zip(parts.optimizers, state["optimizers"], strict=True)):
        saved_sizes = [len(group["params"]) for group in stored["param_groups"]]
        own_sizes = [len(group["params"]) for group in optimizer.param_groups]
        if saved_sizes != own_sizes:
            raise SettingError(
                f"Optimizer {index} was saved with parameter groups of {saved_sizes} tensors and has {own_sizes} now."
            )
    if (state["ema"] is None) != (parts.ema is None):
        averages = "an EMA" if state["ema"] is not None else "no EMA"
        raise SettingError(f"The state has {averages}; build the Engine with the same ema=.")


def checkpoint_parts(
    state: dict[str, Any], extra: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Weights, state tree and meta values of a checkpoint, from `state_of` and what the caller adds."""
    state = dict(state)
    weights = state.pop("model")
    meta = {"policy": state["policy"], "truth": state["truth"], "counters": state["counters"]}
    return weights, {"engine": state, "rng": rng_state(), "extra": extra}, meta


def engine_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """The state that `load_state` takes, from a checkpoint that an Engine saved."""
    if not isinstance(checkpoint.state, dict) or "engine" not in checkpoint.state:
        raise SettingError(f"{checkpoint.path} is a checkpoint, but not one that an Engine saved.")
    state: dict[str, Any] = checkpoint.state["engine"] | {"model": checkpoint.weights}
    return state


def restore_extra(checkpoint: Checkpoint) -> dict[str, Any]:
    """Restore the random-number state of a checkpoint; returns the extra values that were saved with it."""
    restore_rng(checkpoint.state["rng"])
    extra: dict[str, Any] = checkpoint.state["extra"]
    return extra
