"""What functions of torch and Python give in a simulated run, as far as mixed precision depends on it."""

from __future__ import annotations

import ast
from typing import Any

from halfstep.check.regex import regex
from halfstep.check.simulation.decisions import Decisions
from halfstep.check.simulation.relevance import ENDS
from halfstep.check.simulation.values import (
    Autocast,
    Defaults,
    Instance,
    Library,
    NoGrad,
    Params,
    Partial,
    Scaler,
    Tensor,
    Unknown,
    combined,
    has_tensor,
    is_plain,
    unknown,
)

__all__ = ["Libraries", "Stopped"]

_HALF = {"torch.float16", "torch.half"}
_BFLOAT = {"torch.bfloat16"}
_FP32 = {"torch.float32", "torch.float", "torch.float64", "torch.double"}
_CASTS = regex(r"autocast|amp|cast_ctx|mixed|precision|(^|[._])ctx|context")
_WRAPPERS = (
    "DataParallel",
    "DistributedDataParallel",
    "torch.compile",
    "convert_sync_batchnorm",
    "FullyShardedDataParallel",
    "tqdm",
    "trange",
    "torch.jit.script",
)
_NO_GRAPH = {"torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad"}
_ASKED = {"isnan", "isinf", "isfinite"}
# What computes in 16 bits without a region.
_OWNS = regex(
    r"FullyShardedDataParallel$|fully_shard$|MixedPrecision|(^|\.)deepspeed\.|Accelerator$|Fabric$|(^|\.)apex\.|set_default_dtype$"
)
_QUERIES = regex(r"(^|\.)(is_\w+|has_\w+|get_device_capability|device_count|get_rank|get_world_size|getenv|cpu_count)$")


class Stopped(Exception):
    """The script ends the process."""


class Libraries(Decisions):
    """Calls libraries."""

    def has_no_graph(self) -> bool:
        """Whether this runs without a graph."""
        return any(isinstance(region, NoGrad) for region in (*self.opened, *self.regions))

    def format_here(self) -> tuple[frozenset[str], ast.AST | None]:
        """The format of the autocast region that this computes in, "" if it is not known, and the region."""
        casts = [region for region in (*self.opened, *self.regions) if isinstance(region, Autocast)]
        if not casts or not self.truth(casts[-1].enabled):
            return frozenset(), None
        return frozenset({casts[-1].dtype}), casts[-1].node

    def may_cast(self, context: Any, node: ast.expr) -> bool:
        """Whether an unknown context may be an autocast region."""
        if context is None or is_plain(context) or isinstance(context, Tensor):
            return False
        text = context.key if isinstance(context, Unknown) else ""
        return bool(_CASTS.search(text.lower()) or _CASTS.search(ast.unparse(node).lower()))

    def _autocast(self, full: str, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Autocast:
        is_general = full in {"torch.amp.autocast", "torch.autocast", "torch.amp.autocast_mode.autocast"}
        names = ("device_type", "dtype", "enabled") if is_general else ("enabled", "dtype")
        passed = dict(zip(names, args, strict=False)) | kwargs
        device = passed.get("device_type", "?") if is_general else ("cpu" if ".cpu." in full else "cuda")
        dtype = passed.get("dtype")
        if "" in kwargs:
            return Autocast("", passed.get("enabled", True), node)
        if dtype is None:
            name = self._default_format(device)
        else:
            full_name = dtype.full if isinstance(dtype, Library) else ""
            name = (
                "float16"
                if full_name in _HALF
                else "bfloat16"
                if full_name in _BFLOAT
                else "float32"
                if full_name in _FP32
                else ""
            )
        return Autocast(name, passed.get("enabled", True), node)

    def _default_format(self, device: Any) -> str:
        """The dtype of a region without one; a device that is not known is CUDA, on which people train in mixed precision."""
        if isinstance(device, str):
            return {"cuda": "float16", "cpu": "bfloat16 of a CPU"}.get(device.partition(":")[0], "")
        key = device.key.removesuffix(".type") if isinstance(device, Unknown) else ""
        is_other = any(
            key in question and "cuda" in question and option for question, option in self.path.answers.items()
        )
        return "float16" if key and not is_other else ""

    def call_library(self, full: str, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """What a function or class of a library gives."""
        last = full.rpartition(".")[2]
        every = [*args, *kwargs.values()]
        if full == "dict" and not args and "" not in kwargs:
            return dict(kwargs)
        if ("." not in full or full == "itertools.cycle") and hasattr(self, f"_builtin_{last}"):
            return getattr(self, f"_builtin_{last}")(args, node)
        if full == "collections.defaultdict":
            return Defaults(args[0] if args else None)
        if full in ENDS:
            raise Stopped
        if _OWNS.search(full):
            self.has_lowered = True
        if last in {"GradScaler", "ShardedGradScaler"}:
            return self._scaler(full, args, kwargs, node)
        if last == "autocast" and full.startswith("torch"):
            return self._autocast(full, args, kwargs, node)
        if full in _NO_GRAPH or (last == "set_grad_enabled" and args == [False]):
            return NoGrad()
        if full == "torch.device" and args and isinstance(args[0], str | Unknown):
            return args[0]
        if last == "nullcontext":
            return args[0] if args else None
        if last == "partial" and args:
            return Partial(args[0], args[1:], kwargs)
        if last in {"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"} and full.startswith("torch"):
            models = self.models_in(args[0]) if args else None
            self.gradients.clip(models, node)
            return Unknown(self.path.fresh("norm"))
        if full.startswith("torch.optim.") and "lr_scheduler" not in full and "swa_utils" not in full:
            return self.optimizer(last, every, node)
        if last == "backward" and full.startswith("torch.autograd") and args:
            loss = args[0] if isinstance(args[0], Tensor) else self.gradients.lost_loss()
            self.gradients.backward(loss, node)
            return None
        if full.endswith(_WRAPPERS) and args:
            return args[0]
        if _QUERIES.search(full) and all(map(is_plain, every)):
            return unknown(f"{full}({', '.join(map(repr, args))})")
        return self._unknown_library(full, last, every, node)

    def _unknown_library(self, full: str, last: str, every: list[Any], node: ast.AST) -> Any:
        is_own = not full.startswith(("torch", "numpy", "math", "os", "random", "time", "json", "wandb", "copy"))
        if is_own:
            self.hand_over(last, every)
            if any(isinstance(a, Scaler) for a in every):  # what it gives may use it
                return Unknown(self.path.fresh("object"))
            if any(isinstance(a, Params) for a in every) and last[:1].isupper() and "ema" not in last.lower():
                return self.optimizer(last, every, node)
            if (made := self.optimizer_from(last, every, node)) is not None:
                return made
            if self.names_object(target := self.target_of(node)):
                return Unknown(target)
        if last in _ASKED:
            return Unknown(self.path.fresh(last))
        if has_tensor(every):
            return self.forward(full, every) if is_own else combined(*every)
        if full.startswith("torch.nn.") or last[:1].isupper():
            return unknown(self._name_of(node, full))
        if any(isinstance(a, Unknown | Instance) for a in every) and is_own:
            return (
                self.forward(full, every)
                if last[:1].islower() and "loss" in last
                else unknown(self.target_of(node) or self.path.fresh(last))
            )
        return unknown(self.target_of(node) or self.path.fresh(last))

    def _name_of(self, node: ast.AST, full: str) -> str:
        """The key of a new object; each call of a function that creates a model gives its own."""
        target = self.target_of(node)
        if target and (target.startswith("self.") or not self.sites or not full.startswith("torch.nn.")):
            return target
        return f"{target or full.rpartition('.')[2]}@{self.place_of(node, is_own=full.startswith('torch.nn.'))}"

    def _scaler(self, full: str, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Scaler:
        is_general = full in {"torch.amp.GradScaler", "torch.GradScaler", "torch.amp.grad_scaler.GradScaler"}
        position = 5 if is_general else 4
        enabled = kwargs.get("enabled", args[position] if len(args) > position else True)
        if "" in kwargs:
            enabled = Unknown(self.path.fresh("enabled"))
        device = kwargs.get("device", args[0] if args else "cuda") if is_general else "cuda"
        scaler = Scaler(self.target_of(node), enabled, node, device == "cuda")
        self.gradients.scalers.append(scaler)
        return scaler
