"""The settings of a loss scale, as one frozen value that prints and parses.

`LossScale` has the settings; `halfstep.LossScaler` and its siblings apply them. A policy contains
the text form, so that a whole precision setting fits in one string:

    none                                    bf16, fp32: nothing to scale
    128                                     a constant
    dynamic                                 DeepSpeed's tuned setting, the default for fp16
    dynamic(hysteresis=1;init_scale=256)    the same with some settings changed

Five systems update the scale in five ways. Their names are the values of `semantics`; the rules
themselves are in `halfstep.kernels.scale_update`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from halfstep.errors import SettingError, unknown

__all__ = ["FP32_MAX", "SEMANTICS", "LossScale"]

SEMANTICS = ("torch", "apex", "megatron", "deepspeed", "deepspeed-consecutive")
FP32_MAX = 3.4028234663852886e38  # the scale is stored in fp32 everywhere
_MODES = ("none", "static", "dynamic")


@dataclass(frozen=True)
class LossScale:
    """How the loss is scaled: not at all, by a constant, or dynamically under one of five rules."""

    mode: str = "dynamic"
    semantics: str = "deepspeed"
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    max_skips: int | None = 100

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise unknown("loss scale mode", self.mode, _MODES)
        if self.max_skips is not None:
            _require_count("max_skips", self.max_skips, "or None to never stop")
        if self.mode == "none":
            return
        _require_number("init_scale", self.init_scale)
        if not 0 < self.init_scale <= FP32_MAX:
            raise SettingError(f"init_scale={self.init_scale!r} must be above 0 and finite in fp32; 65536 is usual.")
        if self.mode == "dynamic":
            self._check_dynamic()

    def _check_dynamic(self) -> None:
        if self.semantics not in SEMANTICS:
            raise unknown("loss scale semantics", self.semantics, SEMANTICS)
        for name in ("growth_factor", "backoff_factor", "min_scale", "max_scale"):
            _require_number(name, getattr(self, name))
        if self.growth_factor <= 1 or math.isinf(self.growth_factor):
            raise SettingError(
                f"growth_factor={self.growth_factor!r} would never raise the scale; use a number above 1, such as 2."
            )
        if not 0 < self.backoff_factor < 1:
            raise SettingError(
                f"backoff_factor={self.backoff_factor!r} must lie between 0 and 1, both excluded: 0 would make the "
                "scale 0 and every gradient NaN, 1 would never lower it. 0.5 is usual."
            )
        _require_count("growth_interval", self.growth_interval, "clean steps before the scale grows; 1000 is usual")
        _require_count("hysteresis", self.hysteresis, "overflows before the scale is lowered; 1 lowers it at the first")
        if self.semantics == "torch" and self.hysteresis != 1:
            raise SettingError(
                f"hysteresis={self.hysteresis!r} has no effect under semantics='torch', which lowers the scale at every "
                "overflow. Omit it, or use 'apex', 'megatron' or 'deepspeed'."
            )
        if self.min_scale <= 0:
            raise SettingError(
                f"min_scale={self.min_scale!r} must be above 0: at scale 0 every gradient is NaN. 1 is usual."
            )
        if self.min_scale > self.max_scale:
            raise SettingError(
                f"min_scale={self.min_scale!r} is above max_scale={self.max_scale!r}; swap or widen them."
            )
        if self.init_scale < self.min_scale:
            raise SettingError(
                f"init_scale={self.init_scale!r} is below min_scale={self.min_scale!r}: the first overflow would raise "
                "the scale instead of lowering it. Raise init_scale or lower min_scale."
            )
        if self.init_scale > self.max_scale:
            raise SettingError(
                f"init_scale={self.init_scale!r} is above max_scale={self.max_scale!r}; lower it or raise max_scale."
            )

    @classmethod
    def dynamic(cls, **settings: Any) -> LossScale:
        """A dynamic scale; under `semantics="torch"`, which has no hysteresis, that setting defaults to 1."""
        if settings.get("semantics") == "torch":
            settings.setdefault("hysteresis", 1)
        return cls(mode="dynamic", **settings)

    @classmethod
    def parse(cls, text: str) -> LossScale:
        """The value that `str()` printed."""
        text = text.strip()
        if text == "none":
            return cls(mode="none")
        if text == "dynamic":
            return cls()
        if text.startswith("dynamic(") and text.endswith(")"):
            return cls.dynamic(**_parse_settings(text[len("dynamic(") : -1]))
        try:
            scale = float(text)
        except ValueError:
            raise SettingError(
                f"Unknown loss scale {text!r}. Write none, dynamic, a number such as 128, or "
                "dynamic(hysteresis=1;init_scale=256)."
            ) from None
        return cls(mode="static", init_scale=scale)

    def __str__(self) -> str:
        if self.mode == "none":
            return "none"
        if self.mode == "static":
            whole = float(self.init_scale).is_integer() and self.init_scale < 1e16
            return str(int(self.init_scale)) if whole else repr(self.init_scale)
        usual = LossScale.dynamic(semantics=self.semantics)
        changed = [
            f"{name}={_show(getattr(self, name))}"
            for name in _FIELDS
            if getattr(self, name) != getattr(usual if name != "semantics" else LossScale(), name)
        ]
        return f"dynamic({';'.join(changed)})" if changed else "dynamic"


_FIELDS = tuple(f.name for f in dataclasses.fields(LossScale) if f.name != "mode")


def _show(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _parse_settings(text: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        name, equals, value = (s.strip() for s in part.partition("="))
        if name not in _FIELDS:
            raise unknown("loss scale setting", name, _FIELDS)
        if not equals or not value:
            raise SettingError(f"Loss scale setting {part!r} has no value; write {name}=VALUE.")
        if name in settings:
            raise SettingError(f"Loss scale setting {name!r} appears twice in {text!r}; remove one.")
        settings[name] = _parse_value(name, value)
    return settings


def _parse_value(name: str, value: str) -> str | int | float | None:
    if name == "semantics":
        return value
    if name == "max_skips" and value.casefold() == "none":
        return None
    try:
        return int(value) if name in {"growth_interval", "hysteresis", "max_skips"} else float(value)
    except ValueError:
        raise SettingError(f"Loss scale setting {name}={value!r} is not a number.") from None


def _require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise SettingError(f"{name}={value!r} is not a number.")


def _require_count(name: str, value: object, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingError(f"{name}={value!r} must be a whole number of at least 1 ({meaning}).")
