"""What torch rejects, by the types of what a script passes: devices, flags, losses.

    device = torch.device("cuda", args.gpu)                          a torch.device as the device type of autocast
    torch.autocast("cuda", self.args.amp)                            a flag as its dtype
    CRITERIA[args.head](w)(out, y)                                   a binary cross-entropy inside a region, through a table and a partial

Only what a run knows is judged: a device of another file may be a string.
"""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

from halfstep.check.script.objects.losses import BCE
from halfstep.check.simulation.gradients import Mishap
from halfstep.check.simulation.simulation import Simulation
from halfstep.check.simulation.values import Autocast, Unknown

__all__ = ["Device", "Typed"]

_GENERAL = {"torch.amp.autocast", "torch.autocast", "torch.amp.autocast_mode.autocast"}
_LOSSES = {"torch.nn.BCELoss", "torch.nn.modules.loss.BCELoss"}


class Device(str):
    """A torch.device, by its name."""

    __slots__ = ()


class Typed(Simulation):
    """Checks the types of what torch gets."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._losses: set[str] = set()  # the keys of BCELoss objects

    def _report(self, code: str, node: ast.AST, message: str, instead: str) -> None:
        self.gradients.mishaps.append(Mishap(code, node, message, instead))

    def _autocast(self, full: str, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Autocast:
        region = super()._autocast(full, args, kwargs, node)
        if full not in _GENERAL:
            return dataclasses.replace(region, device=full.split(".")[1])
        passed = dict(zip(("device_type", "dtype", "enabled"), args, strict=False)) | kwargs
        device, dtype = passed.get("device_type"), passed.get("dtype")
        written = _argument(node, 0, "device_type")
        if isinstance(device, Device):
            self._report("HS142", node, f"autocast expects the device type as a string, but `{written}` is a torch.device: ValueError", 'torch.autocast("cuda", ...)')  # fmt: skip
        elif isinstance(device, int):
            self._report("HS142", node, f"autocast expects the device type as a string, but `{written}` is a {type(device).__name__}: ValueError", 'torch.autocast("cuda", ...)')  # fmt: skip
        if isinstance(dtype, bool):
            self._report("HS143", node, f"`{_argument(node, 1, 'dtype')}` is passed as `dtype`: autocast is disabled", "pass it as enabled=...")  # fmt: skip
        kind = device.partition(":")[0] if isinstance(device, str) else ""
        return dataclasses.replace(region, device=kind)

    def call_library(self, full: str, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """What a function of torch gives, and what it rejects."""
        if full == "torch.device" and args and type(args[0]) is str:
            return Device(args[0])
        if full in BCE:
            self._judge_bce(node)
        made = super().call_library(full, args, kwargs, node)
        if full in _LOSSES and isinstance(made, Unknown):
            self._losses.add(made.key)
        return made

    def call_unknown(self, key: str, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """What a function of another file gives, or a loss."""
        if key in self._losses:
            self._judge_bce(node)
        return super().call_unknown(key, args, kwargs, node)

    def _judge_bce(self, node: ast.AST) -> None:
        casts = [region for region in self.regions if isinstance(region, Autocast)]
        if casts and casts[-1].device == "cuda" and casts[-1].enabled is True and casts[-1].dtype != "float32":
            line = getattr(casts[-1].node, "lineno", 0)
            self._report("HS146", node, f"binary cross-entropy on probabilities is computed inside the autocast region of line {line}, which raises RuntimeError", "binary_cross_entropy_with_logits, or a region with enabled=False around it")  # fmt: skip


def _argument(node: ast.AST, position: int, name: str) -> str:
    """An argument of a call as it is written."""
    if not isinstance(node, ast.Call):
        return name
    passed = next((k.value for k in node.keywords if k.arg == name), None)
    if passed is None and position < len(node.args):
        passed = node.args[position]
    return ast.unparse(passed) if passed is not None else name
