"""The settings that a script offers, as a run meets them: each with the value that it has here, and the others of precision.

    parser.add_argument("--amp-dtype", choices=["fp16", "bf16"], default="fp16")     fp16; a further run has bf16
    SCALE = os.environ.get("SCALE", "0") == "1"                                      "0"
    @dataclass class Config: precision: Literal["fp16", "bf16"] = "bf16"             bf16; a further run has fp16

A setting without choices is tried with the formats that the script names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from halfstep.check.regex import regex
from halfstep.check.simulation.values import Instance

__all__ = ["FORMATS", "Offers", "in_words", "may_offer", "strings_of_formats"]

_PRECISION = regex(
    r"(?<![a-z])amp(?![a-z])|fp_?16|bf_?16|half|precision|dtype|autocast|scaler|scaling|loss_scale|mixed|float16"
)
# Mixed precision as a whole, in whatever format.
_SWITCH = regex(r"^(use_?|enable_?|with_?|is_?|do_?)?(amp|mixed_precision|autocast)(_enabled|_on|_training)?$")
_HALF = ("fp16", "float16", "16-mixed", "torch.float16", "half", "fp16-mixed", "f16", "16")
_BFLOAT = ("bf16", "bfloat16", "bf16-mixed", "torch.bfloat16")  # in the same order
_TWINS = {**dict(zip(_HALF, _BFLOAT, strict=False)), **dict(zip(_BFLOAT, _HALF, strict=False))}
_OF_REGIONS = regex(r"(amp|autocast|mixed_precision)_?(d?type|format)")  # a setting that exists because there are two
FORMATS = {*_HALF, *_BFLOAT}
MAX_VALUES = 3  # of one setting, other than its default
_SOURCES = (
    "argparse", "dataclass", "os", "click", "typer", "fire", "tyro", "enum", "simple_parsing", "pyrallis", "draccus", "transformers",
    "jsonargparse", "configargparse", "attr", "pydantic",
)  # fmt: skip
_Names = tuple[str, ...]


def strings_of_formats(tree: ast.Module) -> _Names:
    """The names of 16-bit formats that a script has as strings: one of each format is tried for a setting without choices."""
    strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    firsts = ([name for name in names if name in strings][:1] for names in (_HALF, _BFLOAT))
    return tuple(name for names in firsts for name in names)


def may_offer(table: Mapping[str, str]) -> bool:
    """Whether a script imports something that settings come from; `table` maps local names to what they import."""
    return any(full.startswith(_SOURCES) for full in table.values())


def in_words(chosen: Mapping[str, Any]) -> str:
    """The settings of a run that differ from the defaults."""
    return "with " + " and ".join(f"`{name}` {value!r}" for name, value in chosen.items())


class Offers:
    """The settings of one run."""

    def __init__(self, chosen: Mapping[str, Any], formats: _Names) -> None:
        self.chosen = dict(chosen)
        self.formats = formats
        self.others: dict[str, tuple[Any, ...]] = {}  # the values of precision settings that further runs may have
        self.is_read = False  # the run has met a setting at all

    def add(self, other: Offers) -> None:
        """Add the settings that another run has met."""
        self.others |= other.others
        self.is_read = self.is_read or other.is_read

    def variants(self) -> Iterator[dict[str, Any]]:
        """The settings of further runs: one of precision changed, and where one turns mixed precision on, each format with it."""
        yield from ({name: value} for name, values in self.others.items() for value in values)
        switches = [name for name, values in self.others.items() if values == (True,) and _SWITCH.search(name.lower())]
        formats = [(name, value) for name, values in self.others.items() for value in values if isinstance(value, str)]
        yield from ({switch: True, name: value} for switch in switches for name, value in formats)

    def value(self, name: str, default: Any, choices: Iterable[Any] = ()) -> Any:
        """The value of a setting in this run."""
        self.is_read = True
        values = tuple(choices)
        if name not in self.others:
            self.others[name] = self._others(name, default, values)
        if name not in self.chosen:
            return default
        wanted = self.chosen[name]
        return next((value for value in values if isinstance(wanted, str) and _text(value) == wanted), wanted)

    def _others(self, name: str, default: Any, choices: tuple[Any, ...]) -> tuple[Any, ...]:
        named = {_text(choice) for choice in choices} & FORMATS
        if not named and not _PRECISION.search(name.lower()):
            return ()
        if isinstance(default, bool):
            return (not default,)
        if not choices and (default is None or isinstance(default, str)):
            choices = (
                self.formats if default is None or default in FORMATS or "16" in default or "32" in default else ()
            )
            if isinstance(default, str) and _OF_REGIONS.search(name.lower()):
                choices = (*choices, *(twin for twin in (_TWINS.get(default),) if twin is not None))
        texts = [text for choice in choices if (text := _text(choice)) in FORMATS and text != _text(default)]
        return tuple(dict.fromkeys(texts))[:MAX_VALUES]


def _text(value: Any) -> str:
    """A value as it is written: the string of a member of an enum."""
    own = value.attributes.get("value", "") if isinstance(value, Instance) else value
    return own if isinstance(own, str) else ""
