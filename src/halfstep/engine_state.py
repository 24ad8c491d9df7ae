"""What an Engine saves and restores, so that a resumed run is the run that was never stopped.

Model, optimizers, schedulers, loss scaler, moving average and counters; `save` adds the random number generators. A
state is taken only between windows: gradients of a half-filled window are not saved, and dropping them silently would
break the promise.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from halfstep.checkpoint import Checkpoint, check_weights, clean_name
from halfstep.errors import SettingError
from halfstep.events import say
from halfstep.policy import Policy
from halfstep.readback import Readback

if TYPE_CHECKING:
    from halfstep.engine import Engine

__all__ = ["checkpoint_parts", "load_engine", "load_engine_checkpoint", "restore_rng", "rng_state", "state_of"]

STATE_VERSION = 1


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
    engine.scaler.load_state_dict(state["scaler"])
    module.load_state_dict({own[clean_name(n)]: t for n, t in state["model"].items()})
    for optimizer, saved in zip(engine.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for scheduler, saved in zip(engine.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    if engine.ema is not None:
        engine.ema.load_state_dict(state["ema"])
    counters = state["counters"]
    for name in ("attempts", "micro_batches", "applied"):
        setattr(engine, name, counters[name])
    engine.window.largest = counters["largest_weight"]
    engine._buffers.forget()  # noqa: SLF001
    engine.reset_window()


def _check(engine: Engine, state: dict[str, Any]) -> None:
    version = state.get("version")
    if not isinstance(version, int) or version > STATE_VERSION:
        raise SettingError(
            f"The state has version {version!r}; this Halfstep reads up to {STATE_VERSION}. Upgrade Halfstep."
        )
    saved, here = Policy.parse(state["policy"]), engine.policy
    layout = ("params", "master", "states")
    if any(getattr(saved, name) != getattr(here, name) for name in layout):
        raise SettingError(
            f"The state was saved under {saved} and this engine runs {here}; they hold weights, masters or states "
            f"differently. Resume with precision={str(saved)!r}, or start from exported fp32 weights."
        )
    if saved != here:
        say(f"The state was saved under {saved}; going on under {here}.")
    own = {clean_name(n): t for n, t in engine._module.state_dict().items()}  # noqa: SLF001
    check_weights(state["model"], own)
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


def rng_state() -> dict[str, Any]:
    """The random number generators of Python, NumPy and torch, as plain values."""
    import numpy as np

    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 - the global one that loaders use
    return {
        "python": random.getstate(),
        "numpy": (
            str(kind),
            torch.from_numpy(np.asarray(keys).astype("int64")),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Put the generators back."""
    import numpy as np

    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        if len(state["cuda"]) != torch.cuda.device_count():
            say(
                f"The checkpoint has generators of {len(state['cuda'])} GPUs, here are {torch.cuda.device_count()}; theirs start anew."
            )
        else:
            torch.cuda.set_rng_state_all(state["cuda"])
