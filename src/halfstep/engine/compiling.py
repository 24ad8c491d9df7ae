"""Values of `compile=`, and compiling a model in place.

`True` is torch.compile with its defaults. A string is one of its modes; "reduce-overhead" and "max-autotune" also record the
compiled forward and backward as CUDA graphs, so that the host launches a graph instead of each kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from halfstep.engine.members import Members
from halfstep.errors import SettingError

__all__ = ["MODES", "SWITCH", "check_compile", "compile_model", "parse_compile", "records_graphs"]

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # torch.compile's
_GRAPH_MODES = ("reduce-overhead", "max-autotune")
SWITCH = {
    "on": True,
    "true": True,
    "1": True,
    "off": False,
    "false": False,
    "0": False,
}  # spellings on the command line


def check_compile(compile: Any) -> None:  # noqa: A002 - the option's name
    """Raise for a `compile=` that is neither a switch nor a mode of torch.compile."""
    if isinstance(compile, str):
        if compile not in MODES:
            raise SettingError(
                f"compile={compile!r} is neither on nor off, nor a mode of torch.compile: {', '.join(MODES)}."
            )
    elif not isinstance(compile, bool):
        raise SettingError(f"compile={compile!r} must be True, False or a mode of torch.compile: {', '.join(MODES)}.")


def parse_compile(text: str) -> bool | str:
    """The setting that a string names: a switch or a mode; torch's default mode is `True`."""
    value: bool | str = SWITCH.get(text.casefold(), text)
    check_compile(value)
    return True if value == "default" else value


def records_graphs(compile: bool | str, device: torch.device) -> bool:  # noqa: A002
    """Whether this setting records CUDA graphs on this device."""
    return device.type == "cuda" and compile in _GRAPH_MODES


def compile_model(model: nn.Module, compile: bool | str) -> None:  # noqa: A002
    """Compile the model's call in place, if the setting is on."""
    if not compile:
        return
    if isinstance(model, Members):  # never called itself
        for member in model.children():
            compile_model(member, compile)
        return
    mode = compile if isinstance(compile, str) else None
    if not type(model).forward.__module__.startswith("torch."):
        model.compile(mode=mode)
        return
    # The compiler skips torch's own functions and traces what they call. Of a bare nn.Sequential of torch's layers it
    # would compile nothing, and of one of other modules each by itself; a function of ours around it is one graph.
    call: Callable[..., Any] = model._call_impl  # noqa: SLF001 - what torch's compile() compiles

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    model._compiled_call_impl = torch.compile(forward, mode=mode)  # noqa: SLF001 - where nn.Module.compile() stores it
