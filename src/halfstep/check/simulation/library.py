"""What functions of torch and Python give in a simulated run, as far as mixed precision depends on it."""

from __future__ import annotations

import ast
from typing import Any

from halfstep.check.regex import regex
from halfstep.check.simulation.expressions import Expressions, combined, unknown
from halfstep.check.simulation.values import (
    Autocast,
    Instance,
    Library,
    Negated,
    NoGrad,
    Optimizer,
    Params,
    Partial,
    Scaler,
    Tensor,
    Test,
    Unknown,
    is_plain,
)

__all__ = ["Libraries", "Stopped"]

_HALF = {"torch.float16", "torch.half"}
_BFLOAT = {"torch.bfloat16"}
_FP32 = {"torch.float32", "torch.float", "torch.float64", "torch.double"}
_CASTS = regex(r"autocast|amp|cast_ctx|mixed|precision|(^|[._])ctx|context")
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "torch.compile", "convert_sync_batchnorm", "FullyShardedDataParallel", "tqdm", "trange", "torch.jit.script")
_ENDS = {"exit", "quit", "sys.exit", "os._exit"}
_NO_GRAPH = {"torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad"}
_QUERIES = regex(r"(^|\.)(is_\w+|has_\w+|get_device_capability|device_count|get_rank|get_world_size|getenv|cpu_count)$")
_LEN = 4  # of what a loop runs through, if the text does not decide it


class Stopped(Exception):  # noqa: N818 - the script's end, not an error
    """The script ends the process."""


class Libraries(Expressions):
    """Calls of libraries."""

    # Set by the classes that run statements and calls.
    def forward(self, key: str, args: list[Any]) -> Tensor:
        """What a model computes."""
        raise NotImplementedError

    def hand_over(self, name: str, values: list[Any]) -> None:
        """Code of another file gets these values."""
        raise NotImplementedError

    def optimizer(self, name: str, args: list[Any], node: ast.AST) -> Optimizer:
        """A new optimizer."""
        raise NotImplementedError

    def models_in(self, value: Any) -> frozenset[str] | None:
        """The models whose parameters a value has."""
        raise NotImplementedError

    def target_of(self, node: ast.AST) -> str:
        """The variable that a call is assigned to."""
        raise NotImplementedError

    def _names_object(self, target: str) -> bool:
        """Whether a variable is named like a scaler or an optimizer."""
        raise NotImplementedError

    # --- regions ------------------------------------------------------------------------------------------------------

    def has_no_graph(self) -> bool:
        """Whether this runs without a graph."""
        return any(isinstance(region, NoGrad) for region in self.regions)

    def half_here(self) -> tuple[bool | None, ast.AST | None]:
        """Whether this computes in float16 autocast, and in which region; None: not known."""
        casts = [region for region in self.regions if isinstance(region, Autocast)]
        if not casts:
            return False, None
        region = casts[-1]
        if region.dtype and region.dtype != "float16":
            return False, None
        if not self.truth(region.enabled):
            return False, None
        return (True if region.dtype else None), region.node

    def may_cast(self, context: Any, node: ast.expr) -> bool:
        """Whether an unknown context may be an autocast region."""
        if context is None or is_plain(context) or isinstance(context, Tensor):
            return False
        text = context.key if isinstance(context, Unknown) else ""
        return bool(_CASTS.search(text.lower()) or _CASTS.search(ast.unparse(node).lower()))

    def _autocast(self, full: str, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Autocast:
        is_general = full in {"torch.amp.autocast", "torch.autocast", "torch.amp.autocast_mode.autocast"}
        names = ("device_type", "dtype", "enabled") if is_general else ("enabled", "dtype")
        given = dict(zip(names, args, strict=False)) | kwargs
        device = given.get("device_type", "?") if is_general else ("cpu" if ".cpu." in full else "cuda")
        dtype = given.get("dtype")
        if "" in kwargs:
            return Autocast("", given.get("enabled", True), node)
        if dtype is None:
            default = {"cuda": "float16", "cpu": "bfloat16"}
            name = default.get(device.partition(":")[0], "") if isinstance(device, str) else ""
        else:
            full_name = dtype.full if isinstance(dtype, Library) else ""
            name = "float16" if full_name in _HALF else "bfloat16" if full_name in _BFLOAT else "float32" if full_name in _FP32 else ""
        return Autocast(name, given.get("enabled", True), node)

    # --- calls --------------------------------------------------------------------------------------------------------

    def call_library(self, full: str, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """What a function or class of a library gives."""
        last = full.rpartition(".")[2]
        every = [*args, *kwargs.values()]
        if "." not in full and hasattr(self, f"_builtin_{full}"):
            return getattr(self, f"_builtin_{full}")(args, node)
        if full in _ENDS:
            raise Stopped
        if last == "GradScaler" or last == "ShardedGradScaler":
            return self._scaler(full, args, kwargs, node)
        if last == "autocast" and full.startswith("torch"):
            return self._autocast(full, args, kwargs, node)
        if full in _NO_GRAPH or (last == "set_grad_enabled" and args == [False]):
            return NoGrad()
        if last == "nullcontext":
            return args[0] if args else None
        if last == "partial" and args:
            return Partial(args[0], args[1:], kwargs)
        if last in {"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"} and full.startswith("torch"):
            models = self.models_in(args[0]) if args else None
            self.gradients.clip(models, None, node)
            return Unknown(self.path.fresh("norm"))
        if full.startswith("torch.optim.") and "lr_scheduler" not in full and "swa_utils" not in full:
            return self.optimizer(last, every, node)
        if last == "backward" and full.startswith("torch.autograd") and args:
            loss = args[0] if isinstance(args[0], Tensor) else Tensor(None, None)
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
            if any(isinstance(a, Params) for a in every) and last[:1].isupper() and "ema" not in last.lower():
                return self.optimizer(last, every, node)
            if self._names_object(target := self.target_of(node)):
                return Unknown(target)
        if any(isinstance(a, Tensor) for a in every):
            return self.forward(full, every) if is_own else combined(*every)
        if full.startswith("torch.nn.") or last[:1].isupper():
            return unknown(self.target_of(node) or f"{last}@{getattr(node, 'lineno', 0)}")
        if any(isinstance(a, Unknown | Instance) for a in every) and is_own:
            return self.forward(full, every) if last[:1].islower() and "loss" in last else unknown(self.target_of(node) or self.path.fresh(last))
        return unknown(self.target_of(node) or self.path.fresh(last))

    def _scaler(self, full: str, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Scaler:
        is_general = full in {"torch.amp.GradScaler", "torch.GradScaler", "torch.amp.grad_scaler.GradScaler"}
        position = 5 if is_general else 4
        enabled = kwargs.get("enabled", args[position] if len(args) > position else True)
        if "" in kwargs:
            enabled = Unknown(self.path.fresh("enabled"))
        scaler = Scaler(self.target_of(node), enabled, node)
        self.gradients.scalers.append(scaler)
        return scaler

    # --- Python's own ---------------------------------------------------------------------------------------------------

    def _builtin_range(self, args: list[Any], node: ast.AST) -> Any:  # noqa: ARG002
        if args and all(isinstance(a, int) for a in args):
            try:
                return range(*args)
            except (TypeError, ValueError):
                return Unknown(self.path.fresh("range"))
        first = args[0] if len(args) > 1 else 0
        return Partial("range", [first], {})

    def _builtin_enumerate(self, args: list[Any], node: ast.AST) -> Any:  # noqa: ARG002
        start = args[1] if len(args) > 1 else 0
        if args and isinstance(args[0], list | tuple) and isinstance(start, int):
            return [(start + i, each) for i, each in enumerate(args[0])]
        return Partial("enumerate", [args[0] if args else None, start], {})

    def _builtin_len(self, args: list[Any], node: ast.AST) -> Any:  # noqa: ARG002
        value = args[0] if args else None
        if isinstance(value, list | tuple | dict | str):
            return len(value)
        return _LEN if isinstance(value, Unknown) else Unknown(self.path.fresh("len"))

    def _builtin_zip(self, args: list[Any], node: ast.AST) -> Any:  # noqa: ARG002
        if args and all(isinstance(a, list | tuple) for a in args):
            return list(zip(*args, strict=False))
        return Unknown(self.path.fresh("zip"))

    def _builtin_isinstance(self, args: list[Any], node: ast.AST) -> Any:  # noqa: ARG002
        value = args[0] if args else None
        key = value.key if isinstance(value, Unknown) else self.path.fresh("isinstance")
        return Unknown(f"isinstance({key}, {getattr(args[1], 'full', '?') if len(args) > 1 else ''})")

    def _builtin_hasattr(self, args: list[Any], node: ast.AST) -> Any:  # noqa: ARG002
        value, name = (args[0], args[1]) if len(args) > 1 else (None, "")
        if isinstance(value, Instance) and isinstance(name, str):
            if name in value.attributes or value.cls.lookup(name) is not ...:
                return True
            if not value.cls.libraries():
                return False
        return Unknown(f"hasattr({value.key if isinstance(value, Unknown) else self.path.fresh('object')}, {name!r})")

    def _builtin_getattr(self, args: list[Any], node: ast.AST) -> Any:
        if len(args) > 1 and isinstance(args[1], str):
            value, name = args[0], args[1]
            if isinstance(value, Instance) and name not in value.attributes and value.cls.lookup(name) is ...:
                return args[2] if len(args) > 2 and not value.cls.libraries() else Unknown(f"{value.cls.node.name}.{name}")
            return self.attribute(value, name, node)
        return Unknown(self.path.fresh(f"{getattr(args[0], 'full', 'object')}.getattr" if args else "getattr"))

    def _builtin_setattr(self, args: list[Any], node: ast.AST) -> Any:  # noqa: ARG002
        if len(args) == 3 and isinstance(args[0], Instance) and isinstance(args[1], str):
            args[0].attributes[args[1]] = args[2]

    def _number(self, args: list[Any]) -> Any:
        value = args[0] if args else 0
        if isinstance(value, int | float | bool):
            return value
        return value if isinstance(value, Unknown | Test | Negated) else Unknown(self.path.fresh("number"))

    def _builtin_int(self, args: list[Any], node: ast.AST) -> Any:  # noqa: ARG002
        value = self._number(args)
        return int(value) if isinstance(value, float) and abs(value) < 1e9 else value

    def _builtin_float(self, args: list[Any], node: ast.AST) -> Any:  # noqa: ARG002
        return self._number(args)

    def _builtin_bool(self, args: list[Any], node: ast.AST) -> Any:  # noqa: ARG002
        value = args[0] if args else False
        return value if isinstance(value, Unknown | Test | Negated) else self.truth(value)

    def _largest(self, args: list[Any], choose: Any) -> Any:
        values = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        if values and all(isinstance(v, int | float) for v in values):
            return choose(values)
        others = [v for v in values if isinstance(v, Unknown)]
        if choose is max and len(values) == 2 and 1 in values and others:  # max(1, accumulate)
            return others[0]
        return combined(*values) if any(isinstance(v, Tensor) for v in values) else Unknown(self.path.fresh("extreme"))

    def _builtin_max(self, args: list[Any], node: ast.AST) -> Any:  # noqa: ARG002
        return self._largest(args, max)

    def _builtin_min(self, args: list[Any], node: ast.AST) -> Any:  # noqa: ARG002
        return self._largest(args, min)

    def _builtin_sum(self, args: list[Any], node: ast.AST) -> Any:  # noqa: ARG002
        values = args[0] if args else []
        if isinstance(values, list | tuple) and any(isinstance(v, Tensor) for v in values):
            return combined(*values)
        return values if isinstance(values, Params | Tensor) else Unknown(self.path.fresh("sum"))

    def _builtin_list(self, args: list[Any], node: ast.AST) -> Any:  # noqa: ARG002
        if not args:
            return []
        return list(args[0]) if isinstance(args[0], list | tuple | range) else args[0]

    _builtin_tuple = _builtin_list
    _builtin_set = _builtin_list
    _builtin_iter = _builtin_list
    _builtin_sorted = _builtin_list
    _builtin_reversed = _builtin_list

    def _builtin_filter(self, args: list[Any], node: ast.AST) -> Any:  # noqa: ARG002
        return args[1] if len(args) > 1 else Unknown(self.path.fresh("filter"))

    def _builtin_next(self, args: list[Any], node: ast.AST) -> Any:  # noqa: ARG002
        return args[0] if args and isinstance(args[0], Params) else Unknown(self.path.fresh("batch"))

    def _builtin_dict(self, args: list[Any], node: ast.AST) -> Any:  # noqa: ARG002
        return dict(args[0]) if args and isinstance(args[0], dict) else Unknown(self.path.fresh("dict"))

    def _builtin_print(self, args: list[Any], node: ast.AST) -> Any:
        return None
