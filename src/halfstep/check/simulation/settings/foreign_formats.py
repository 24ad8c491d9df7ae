"""Formats by their names, as tables and functions of other files give them.

TORCH_DTYPES[cfg.amp_dtype]          what a table of dtypes has under "bf16"
get_dtype(args.precision)            what a function named after dtypes gives for "float16"

Only what is named after dtypes is read so, and only under the name of a format.
"""

from __future__ import annotations

import ast
from typing import Any

from halfstep.check.regex import regex
from halfstep.check.simulation.simulation import Simulation
from halfstep.check.simulation.values import Library, Unknown

__all__ = ["ForeignFormats"]

_DTYPES = regex(r"dtype")
_FORMATS = {
    **dict.fromkeys(("fp16", "float16", "half", "16-mixed", "fp16-mixed", "f16", "torch.float16"), "torch.float16"),
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed", "torch.bfloat16"), "torch.bfloat16"),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "torch.float32"),
}


def _named(owner: str, name: Any) -> Library | None:
    """The format that something with this name has under the name of a format."""
    is_table = isinstance(name, str) and name.lower() in _FORMATS and _DTYPES.search(owner.rpartition(".")[2].lower())
    return Library(_FORMATS[name.lower()]) if is_table else None


class ForeignFormats(Simulation):
    """Reads tables and functions of other files that are named after dtypes."""

    def foreign_element(self, base: Unknown | Library, index: Any) -> Any:
        """An element of a container of another file."""
        made = _named(base.full if isinstance(base, Library) else base.key, index)
        return made if made is not None else super().foreign_element(base, index)

    def call_unknown(self, key: str, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """What a function of another file gives."""
        made = _named(key, args[0]) if len(args) == 1 else None
        return made if made is not None else super().call_unknown(key, args, kwargs, node)

    def _unknown_library(self, full: str, last: str, every: list[Any], node: ast.AST) -> Any:
        made = _named(full, every[0]) if len(every) == 1 and not full.startswith("torch.") else None
        return made if made is not None else super()._unknown_library(full, last, every, node)
