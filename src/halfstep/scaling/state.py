"""The state of a loss scaler as a plain dictionary, and its translation from and to other systems.

Three layouts are understood, all of them plain values without pickled objects:

    halfstep    torch's five keys plus ours, so that torch.amp.GradScaler loads it as it is
    torch       scale, growth_factor, backoff_factor, growth_interval, _growth_tracker
    deepspeed   the attributes of DeepSpeed's scaler: cur_scale, cur_iter, last_overflow_iter, ...

Counters in the middle of a window are carried over. DeepSpeed counts from the last overflow and grows after
N + 1 clean steps, then every N; the others count from the last overflow or growth and grow after N. With n
clean steps behind it, the counter of the others is therefore n in the first window and (n - 1) % N after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from halfstep.errors import SettingError, unknown

__all__ = ["LAYOUTS", "STATE_VERSION", "clean_tracker", "read_state", "write_state"]

STATE_VERSION = 1
LAYOUTS = ("halfstep", "torch", "deepspeed")
_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def read_state(state: Any) -> dict[str, Any]:
    """Any of the three layouts as Halfstep's names; what the source does not know is left out."""
    if not isinstance(state, Mapping):
        raise SettingError(
            f"A scaler state must be a dictionary, not {type(state).__name__}; pass what state_dict() returned."
        )
    if not state:
        raise SettingError(
            "The scaler state is empty: it was saved by a disabled GradScaler. Start with a new scaler, "
            "or do not load a state for it."
        )
    nested = state.get("loss_scaler")
    if nested is not None:  # DeepSpeed's ZeRO checkpoints hold the scaler itself, as an object
        state = nested if isinstance(nested, Mapping) else vars(nested)
    if "cur_scale" in state:
        return _read_deepspeed(state)
    missing = [key for key in _TORCH_KEYS if key not in state]
    if missing:
        raise SettingError(
            f"The scaler state lacks {', '.join(missing)}; it has {', '.join(map(str, state))}. Expected a state_dict() of "
            "halfstep or torch, or DeepSpeed's with cur_scale and cur_iter."
        )
    version = state.get("version", STATE_VERSION)
    if not isinstance(version, int) or version > STATE_VERSION:
        raise SettingError(
            f"The scaler state has version {version!r}; this Halfstep reads up to {STATE_VERSION}. Upgrade Halfstep."
        )
    found = dict(state)
    found["growth_tracker"] = _count(found.pop("_growth_tracker"), "_growth_tracker")
    found["scale"] = _finite(found["scale"], "scale")
    found.setdefault("mode", "dynamic")
    found.setdefault("updates", found["growth_tracker"])
    # torch does not keep it; this value gives DeepSpeed's rule the clean steps that torch has counted.
    found.setdefault("last_overflow", found["updates"] - 1 - found["growth_tracker"])
    return found


def _read_deepspeed(state: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"scale": _finite(state["cur_scale"], "cur_scale")}
    if not state.get("dynamic", state.get("dynamic_loss_scale", True)):
        return found | {"mode": "static"}
    updates = _count(state.get("cur_iter", 0), "cur_iter")
    last = int(_finite(state.get("last_overflow_iter", -1), "last_overflow_iter"))
    window = max(1, _count(state.get("scale_window", 1000), "scale_window"))
    found |= {"mode": "dynamic", "updates": updates, "last_overflow": last}
    found["growth_tracker"] = clean_tracker(updates, last, window)
    if "scale_window" in state:
        found["growth_interval"] = window
    if "scale_factor" in state:
        factor = _finite(state["scale_factor"], "scale_factor")
        found |= {"growth_factor": factor, "backoff_factor": 1 / factor if factor else math.inf}
    renamed = {"min_scale": "min_scale", "delayed_shift": "hysteresis", "cur_hysteresis": "hysteresis_left"}
    found |= {ours: state[theirs] for theirs, ours in renamed.items() if theirs in state}
    if "min_scale" in found:
        found["min_scale"] = float(found["min_scale"])
    if "consecutive_hysteresis" in state:
        found["semantics"] = "deepspeed-consecutive" if state["consecutive_hysteresis"] else "deepspeed"
    return found


def clean_tracker(updates: int, last_overflow: int, interval: int) -> int:
    """Torch's growth counter for DeepSpeed's two counters."""
    clean = updates - last_overflow - 1
    if clean <= interval:
        return max(0, min(clean, interval - 1))
    return (clean - 1) % interval


def write_state(state: dict[str, Any], layout: str) -> dict[str, Any]:
    """Halfstep's own layout turned into `layout`."""
    if layout == "halfstep":
        return state
    if layout == "torch":
        return {key: state[key] for key in _TORCH_KEYS}
    if layout != "deepspeed":
        raise unknown("scaler state layout", layout, LAYOUTS)
    if state["mode"] != "dynamic":
        return {"cur_scale": state["scale"], "dynamic": False}
    if state["growth_factor"] * state["backoff_factor"] != 1:
        raise SettingError(
            f"DeepSpeed has one scale factor, but growth_factor={state['growth_factor']!r} and backoff_factor="
            f"{state['backoff_factor']!r} are not each other's inverse, so this state cannot be written for it."
        )
    last = state["last_overflow"]
    if not state["semantics"].startswith("deepspeed"):
        last = state["updates"] - 1 - state["_growth_tracker"]
    return {
        "cur_scale": state["scale"],
        "dynamic": True,
        "cur_iter": state["updates"],
        "last_overflow_iter": last,
        "scale_factor": state["growth_factor"],
        "scale_window": state["growth_interval"],
        "min_scale": state["min_scale"],
        "delayed_shift": state["hysteresis"],
        "cur_hysteresis": max(1, state["hysteresis_left"]),  # DeepSpeed stops at 1 and lowers from there on
        "consecutive_hysteresis": state["semantics"] in {"deepspeed-consecutive", "apex"},
        "raise_error_at_min_scale": state["max_skips"] is not None,
    }


def _finite(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SettingError(
            f"The scaler state has {key}={value!r}, which is not a finite number; the file is damaged or not a scaler's."
        )
    return float(value)


def _count(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SettingError(
            f"The scaler state has {key}={value!r}, which is not a count; the file is damaged or not a scaler's."
        )
    return value
