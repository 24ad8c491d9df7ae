"""What an Engine saves and restores, so that a resumed run is the run that was never stopped.

Model, optimizers, schedulers, loss scaler, moving average and counters; `save` adds the random number generators. A
state is taken only between windows: gradients of a half-filled window are not saved, and dropping them silently would
break the promise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.checkpoint.directory import Checkpoint, check_weights, clean_name, replaced
from halfstep.checkpoint.rng import restore_rng, rng_state
from halfstep.errors import SettingError
from halfstep.events import say
from halfstep.optim.convert import master_in, plain
from halfstep.optim.lean import LeanOptimizer
from halfstep.precision.policy import Policy
from halfstep.scaling.readback import Readback

if TYPE_CHECKING:
    from halfstep.engine.engine import Engine

__all__ = ["checkpoint_parts", "load_engine", "load_engine_checkpoint", "state_of"]

STATE_VERSION = 1
_ALL_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def state_of(engine: Engine) -> dict[str, Any]:
    """The state as a tree of plain values and tensors."""
    if engine.in_window:
        raise SettingError(
            f"The engine is inside a window ({engine.window.num_micro_batches} of {engine.accumulate} micro-batches stepped); its gradients "
            "would be lost. Save after a step whose result.boundary is True, or close the window with step(last=True)."
        )
    engine._deliver(wait=True)  # noqa: SLF001 - this file is the engine's own second half
    return {
        "version": STATE_VERSION,
        "policy": str(engine.policy),
        "truth": engine.truth().as_dict(),
        "model": {clean_name(n): t.detach() for n, t in engine._module.state_dict().items()},  # noqa: SLF001
        "optimizers": [o.state_dict() for o in engine.optimizers],
        "names": [engine.names_of(o) for o in engine.optimizers],  # in the order of the optimizer's own numbering
        "schedulers": [s.state_dict() for s in engine.schedulers],
        "scaler": engine.scaler.state_dict(),
        "ema": None if engine.ema is None else engine.ema.state_dict(),
        "counters": {
            "attempts": engine.attempts,
            "micro_batches": engine.micro_batches,
            "applied": engine.applied,
            "largest_weight": float(engine.window.largest),
        },
    }


def load_engine(engine: Engine, state: dict[str, Any]) -> None:
    """Put a state back; everything is checked before the first change."""
    _check(engine, state)
    engine._readback = Readback()  # noqa: SLF001 - outcomes of the run that is being left
    module = engine._module  # noqa: SLF001
    own = {clean_name(name): name for name in module.state_dict()}
    if Policy.parse(state["policy"]).scaling.mode == engine.policy.scaling.mode:
        engine.scaler.load_state_dict(state["scaler"])
    else:
        say(f"The loss scale of the saved run does not apply under {engine.policy}; it starts anew.")
    weights = {clean_name(n): t for n, t in state["model"].items()}
    if _same_layout(Policy.parse(state["policy"]), engine.policy):
        module.load_state_dict({own[n]: t for n, t in weights.items()})
        for optimizer, saved in zip(engine.optimizers, state["optimizers"], strict=True):
            _load_optimizer(optimizer, saved)
    else:
        _load_converted(engine, own, weights, state)
    for scheduler, saved in zip(engine.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    if engine.ema is not None:
        engine.ema.load_state_dict(state["ema"] | {"averages": _averages(engine, state["ema"])})
    counters = state["counters"]
    for name in ("attempts", "micro_batches", "applied"):
        setattr(engine, name, counters[name])
    engine.window.largest = counters["largest_weight"]
    engine._buffers.forget()  # noqa: SLF001
    engine.reset_window()


def _averages(engine: Engine, saved: dict[str, Any]) -> dict[str, Tensor]:
    """Saved averages under this model's names, whatever wrappers either model has."""
    own = {clean_name(name): name for name in engine._params}  # noqa: SLF001
    return {own.get(clean_name(name), name): average for name, average in saved["averages"].items()}


def _same_layout(saved: Policy, here: Policy) -> bool:
    names = ("params", "master", "states") if here.params == "fp32" else ("params", "master", "states", "keep_fp32")
    return all(getattr(saved, name) == getattr(here, name) for name in names)


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a state, but go on stepping the way this engine chose: fused or foreach is how, not what."""
    groups = zip(saved["param_groups"], optimizer.param_groups, strict=True)
    own = [theirs | {k: mine[k] for k in ("fused", "foreach") if k in mine} for theirs, mine in groups]
    optimizer.load_state_dict(saved | {"param_groups": own})


def _load_converted(engine: Engine, own: dict[str, str], weights: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Weights and optimizer states from another layout, by way of what all layouts stand for: fp32 masters and moments."""
    found: dict[str, Tensor] = {}  # masters that are not the weights themselves
    plain_states = []
    for optimizer, names, saved in zip(engine.optimizers, state["names"], state["optimizers"], strict=True):
        moments = optimizer.moments if isinstance(optimizer, LeanOptimizer) else _ALL_MOMENTS
        order = [index for group in saved["param_groups"] for index in group["params"]]
        entries = {}
        for name, index in zip(map(clean_name, names), order, strict=True):
            entry = saved["state"].get(index)
            if entry is not None:
                full = master_in(entry, weights[name])
                found |= {} if full is None else {name: full}
                entries[index] = plain(entry, moments)
        plain_states.append(saved | {"state": entries})
    masters = replaced(weights, found)
    engine._module.load_state_dict({own[n]: t for n, t in masters.items()})  # noqa: SLF001
    for optimizer, saved in zip(engine.optimizers, plain_states, strict=True):
        _load_optimizer(optimizer, saved)
        if isinstance(optimizer, LeanOptimizer):
            names = {id(p): clean_name(name) for name, p in engine._params.items()}  # noqa: SLF001
            for param in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
                optimizer.take_master(param, masters[names[id(param)]].to(param.device, torch.float32))


def _check(engine: Engine, state: dict[str, Any]) -> None:
    version = state.get("version")
    if not isinstance(version, int) or version > STATE_VERSION:
        raise SettingError(
            f"The state has version {version!r}; this Halfstep reads up to {STATE_VERSION}. Upgrade Halfstep."
        )
    saved, here = Policy.parse(state["policy"]), engine.policy
    if saved != here:
        lossy = here.states not in {"fp32", saved.states}
        say(
            f"The state was saved under {saved}; going on under {here}."
            + (f" Moments are rounded to {here.states} once." if lossy else "")
        )
    own = {clean_name(n): t for n, t in engine._module.state_dict().items()}  # noqa: SLF001
    check_weights(state["model"], own, any_float=not _same_layout(saved, here))
    for what, mine in (("optimizers", engine.optimizers), ("schedulers", engine.schedulers)):
        if len(state[what]) != len(mine):
            raise SettingError(
                f"The state has {len(state[what])} {what} and this engine {len(mine)}; build it as it was when it was saved."
            )
    for index, (optimizer, stored) in enumerate(zip(engine.optimizers, state["optimizers"], strict=True)):
        sizes = [len(group["params"]) for group in stored["param_groups"]]
        here_sizes = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != here_sizes:
            raise SettingError(
                f"Optimizer {index} was saved with parameter groups of {sizes} tensors and has {here_sizes} here."
            )
    if (state["ema"] is None) != (engine.ema is None):
        kept = "an average" if state["ema"] is not None else "no average"
        raise SettingError(f"The state has {kept} (ema); build the Engine the same way.")


def checkpoint_parts(engine: Engine, extra: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The weights, the state tree and the meta values that make a checkpoint of this engine."""
    state = state_of(engine)
    weights = state.pop("model")
    meta = {"policy": state["policy"], "truth": state["truth"], "counters": state["counters"]}
    return weights, {"engine": state, "rng": rng_state(), "extra": extra}, meta


def load_engine_checkpoint(engine: Engine, checkpoint: Checkpoint) -> dict[str, Any]:
    """Put a checkpoint into the engine and the random number generators; gives back its extra values."""
    if not isinstance(checkpoint.state, dict) or "engine" not in checkpoint.state:
        raise SettingError(f"{checkpoint.path} is a checkpoint, but not one that an Engine saved.")
    load_engine(engine, checkpoint.state["engine"] | {"model": checkpoint.weights})
    restore_rng(checkpoint.state["rng"])
    extra: dict[str, Any] = checkpoint.state["extra"]
    return extra
