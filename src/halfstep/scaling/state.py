"""The state of a loss scaler as a plain dictionary, and its conversion from and to other systems.

Three layouts are supported, all of them plain values without pickled objects:

    halfstep    torch's five keys plus ours, so that torch.amp.GradScaler can load it unchanged
    torch       scale, growth_factor, backoff_factor, growth_interval, _growth_tracker
    deepspeed   the attributes of DeepSpeed's scaler: cur_scale, cur_iter, last_overflow_iter, ...

Counters in the middle of a growth interval are converted too. DeepSpeed counts from the last overflow and grows after
N + 1 clean steps, then every N; the others count from the last overflow or growth and grow after N. After n clean
steps, the counter of the others is therefore n in the first interval and (n - 1) % N later.
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
    """A state in any of the three layouts under Halfstep's names; values that the layout lacks are left out."""
    if not isinstance(state, Mapping):
        raise SettingError(
            f"A scaler state must be a dictionary, not {type(state).__name__}; pass the result of state_dict()."
        )
    if not state:
        raise SettingError(
            "The scaler state is empty: it was saved by a disabled GradScaler. Start with a new scaler, "
            "or do not load a state for it."
        )
    nested = state.get("loss_scaler")
    if nested is not None:  # DeepSpeed's ZeRO checkpoints contain the scaler object itself
        state = nested if isinstance(nested, Mapping) else vars(nested)
    if "cur_scale" in state:
        return _read_deepspeed(state)
    missing = [key for key in _TORCH_KEYS if key not in state]
    if missing:
        raise SettingError(
            f"The scaler state has no {', '.join(missing)}; it has {', '.join(map(str, state))}. Expected a state_dict() of "
            "halfstep or torch, or DeepSpeed's with cur_scale and cur_iter."
        )
    version = state.get("version", STATE_VERSION)
    if not isinstance(version, int) or version > STATE_VERSION:
        raise SettingError(
            f"The scaler state has version {version!r}; this Halfstep reads at most {STATE_VERSION}. Upgrade halfstep."
        )
    values = dict(state)
    values["growth_tracker"] = _count(values.pop("_growth_tracker"), "_growth_tracker")
    values["scale"] = _finite(values["scale"], "scale")
    values.setdefault("mode", "dynamic")
    values.setdefault("updates", values["growth_tracker"])
    # torch does not save it; with this value DeepSpeed's rule has counted the same clean steps as torch.
    values.setdefault("last_overflow", values["updates"] - 1 - values["growth_tracker"])
    return values


def _read_deepspeed(state: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"scale": _finite(state["cur_scale"], "cur_scale")}
    if not state.get("dynamic", state.get("dynamic_loss_scale", True)):
        return values | {"mode": "static"}
    updates = _count(state.get("cur_iter", 0), "cur_iter")
    last = int(_finite(state.get("last_overflow_iter", -1), "last_overflow_iter"))
    window = max(1, _count(state.get("scale_window", 1000), "scale_window"))
    values |= {"mode": "dynamic", "updates": updates, "last_overflow": last}
    values["growth_tracker"] = clean_tracker(updates, last, window)
    if "scale_window" in state:
        values["growth_interval"] = window
    if "scale_factor" in state:
        factor = _finite(state["scale_factor"], "scale_factor")
        values |= {"growth_factor": factor, "backoff_factor": 1 / factor if factor else math.inf}
    renamed = {"min_scale": "min_scale", "delayed_shift": "hysteresis", "cur_hysteresis": "hysteresis_left"}
    values |= {ours: state[theirs] for theirs, ours in renamed.items() if theirs in state}
    if "min_scale" in values:
        values["min_scale"] = float(values["min_scale"])
    if "consecutive_hysteresis" in state:
        values["semantics"] = "deepspeed-consecutive" if state["consecutive_hysteresis"] else "deepspeed"
    return values


def clean_tracker(updates: int, last_overflow: int, interval: int) -> int:
    """Torch's growth counter for DeepSpeed's two counters."""
    clean = updates - last_overflow - 1
    if clean <= interval:
        return max(0, min(clean, interval - 1))
    return (clean - 1) % interval


def write_state(state: dict[str, Any], layout: str) -> dict[str, Any]:
    """Convert a state in Halfstep's layout to `layout`."""
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
            f"{state['backoff_factor']!r} are not each other's inverse, so this state has no DeepSpeed form; use another layout."
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
        "cur_hysteresis": max(
            1, state["hysteresis_left"]
        ),  # DeepSpeed's counter stops at 1, and every overflow from then on lowers the scale
        "consecutive_hysteresis": state["semantics"] in {"deepspeed-consecutive", "apex"},
        "raise_error_at_min_scale": state["max_skips"] is not None,
    }


def _finite(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SettingError(
            f"The scaler state has {key}={value!r}, which is not a finite number; the file is damaged or not the state of a scaler."
        )
    return float(value)


def _count(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SettingError(
            f"The scaler state has {key}={value!r}, which is not a count; the file is damaged or not the state of a scaler."
        )
    return value
