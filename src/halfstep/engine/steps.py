"""The step: finite check, unscale, clip, skip and update, in the cheapest way each optimizer allows.

Gradients arrive multiplied by the loss scale and by the weight of their window, together the divisor D. One read
of them gives the norm of the scaled gradients, and from it everything is decided:

    norm      = scaled norm / D                      the true norm, which is reported
    found_inf = not finite(norm)                     an inf or NaN anywhere
    D'        = D max(1, (norm + 1e-6) / max_norm)   clipping is one more factor in the divisor

Optimizers that follow torch's fused protocol (torch's fused Adam, AdamW, SGD and Adagrad; halfstep.optim) get D' and
the flag as tensors and do the rest in their own kernel: 36 bytes per parameter instead of the 48 of unscale, clip and
step, and nothing waits. Any other optimizer needs the decision on the host: one read, then unscale and clip in place, or
into fp32 copies where it runs over fp32 masters.

Several optimizers share one decision: a non-finite gradient anywhere skips them all.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.backends.base import Backend
from halfstep.errors import SettingError
from halfstep.events import log_once
from halfstep.kernels.gradstats import dense_values, sums_of_squares, total_norm
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.masters import Fp32Masters
from halfstep.optim.shards import gradient_of, is_sharded, local
from halfstep.precision.formats import DTYPES_16_BIT

__all__ = [
    "Decision",
    "StepPath",
    "choose_path",
    "create_momentum",
    "decide",
    "gradients_of",
    "is_stepped_by_engine",
    "reject_foreign_steps",
    "skips_on_device",
    "take_step",
    "unscale_in_place",
    "widen",
]

_SWITCHED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_FUSED = (*_SWITCHED, torch.optim.Adagrad)
# MPS accepts grad_scale and found_inf in its fused kernels and ignores them.
_FUSED_DEVICES = {"cuda", "cpu", "xpu"}
# torch 2.13 on Arm: the last elements of each vector of 16-bit weights and momentum are computed from stray memory.
_WRONG_KERNEL = "torch's fused SGD is wrong for 16-bit weights on some CPUs"
_is_sparse = operator.attrgetter("is_sparse")
_MARK = "_halfstep_steps"  # on an optimizer while the Engine steps it


@dataclass(frozen=True)
class StepPath:
    """How one optimizer is stepped: `kind` is "halfstep", "fused", "masters" or "plain"."""

    optimizer: torch.optim.Optimizer
    kind: str
    reason: str


@dataclass(frozen=True)
class Decision:
    """What one read of the gradients decided, still on the device."""

    found_inf: Tensor  # 0 or 1
    norm: Tensor  # of the true gradients
    divisor: Tensor  # of the gradients, clipping included
    sums: Tensor | None = None  # of squares of each gradient, where one launch has computed them all


def choose_path(optimizer: torch.optim.Optimizer, model: nn.Module) -> StepPath:
    """Decide once how this optimizer will be stepped; a stock one is switched to fused where that is exact."""
    name = type(optimizer).__name__
    if isinstance(optimizer, LeanOptimizer):
        return StepPath(optimizer, "halfstep", f"halfstep.optim.{name}")
    if isinstance(optimizer, Fp32Masters):
        reason = f"{type(optimizer.inner).__name__} over fp32 masters, decided on the host"
        return StepPath(optimizer, "masters", reason)
    obstacle = _why_not_fused(optimizer, model)
    if obstacle is not None:
        if obstacle == _WRONG_KERNEL and any(group["fused"] for group in optimizer.param_groups):
            for group in optimizer.param_groups:
                group["fused"] = False
            log_once(f"{name} was switched to fused=False: {obstacle}.")
        return StepPath(optimizer, "plain", f"{name}, decided on the host: {obstacle}")
    if not all(group.get("fused") for group in optimizer.param_groups):
        _switch_to_fused(optimizer)
        log_once(
            f"{name} was switched to fused=True: the same update, with unscaling, clipping and skipping in its kernel."
        )
    return StepPath(optimizer, "fused", f"torch's fused {name}: unscale, clip and skip in its kernel")


def _why_not_fused(optimizer: torch.optim.Optimizer, model: nn.Module) -> str | None:
    if type(optimizer) not in _FUSED:
        return f"torch has no fused {type(optimizer).__name__}"
    params = [p for group in optimizer.param_groups for p in group["params"]]
    devices = {p.device.type for p in params}
    if not devices <= _FUSED_DEVICES:
        return f"fused kernels do not take a loss scale on {', '.join(sorted(devices - _FUSED_DEVICES))}"
    if any(map(is_sharded, params)):
        return "sharded parameters"
    if not all(p.is_floating_point() for p in params):
        return "complex parameters"
    if isinstance(optimizer, torch.optim.SGD) and any(p.device.type == "cpu" and p.element_size() == 2 for p in params):
        return _WRONG_KERNEL
    if any(isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse for m in model.modules()):
        return "sparse gradients"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "differentiable=True"
        if group.get("momentum") and group.get("dampening"):
            # The fused kernel leaves the momentum buffer uninitialised if the first step is skipped. A zero buffer
            # fixes that, but with dampening the first step is not the step from a zero buffer.
            return "dampening with momentum"
        if not group.get("fused") and (group.get("fused") is False or group.get("foreach") is not None):
            return "fused or foreach was set by hand"
        if not group.get("fused") and type(optimizer) not in _SWITCHED:
            return f"{type(optimizer).__name__} was not built with fused=True"
    return None


def _switch_to_fused(optimizer: torch.optim.Optimizer) -> None:
    for group in (*optimizer.param_groups, optimizer.defaults):
        group["fused"], group["foreach"] = True, False
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # noqa: SLF001 - as its constructor does
    optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]  # noqa: SLF001
    for param, state in optimizer.state.items():
        if "step" in state:
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(param.device)


def reject_foreign_steps(optimizers: Iterable[torch.optim.Optimizer], undo: contextlib.ExitStack) -> None:
    """Until `undo`, raise for an `optimizer.step()` that was left in the loop: it would use scaled gradients."""
    for optimizer in optimizers:
        undo.callback(optimizer.register_step_pre_hook(_reject_foreign_step).remove)


def _reject_foreign_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not getattr(optimizer, _MARK, False):
        name = type(optimizer).__name__
        raise SettingError(
            f"{name}.step() was called in addition to engine.step(), with gradients that are neither unscaled nor checked nor clipped. "
            "Remove it from the loop: engine.step() calls it. After engine.close() the optimizer is yours again."
        )


def is_stepped_by_engine(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an Engine that is not closed steps this optimizer."""
    return _reject_foreign_step in optimizer._optimizer_step_pre_hooks.values()  # noqa: SLF001 - torch has no other way


@contextlib.contextmanager
def _own_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    setattr(optimizer, _MARK, True)
    try:
        yield
    finally:
        delattr(optimizer, _MARK)


@torch.no_grad()
def gradients_of(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients that there are, by name; duplicate rows of sparse ones are summed, so that an overflow is detected.

    Of a sharded parameter it is this rank's part.
    """
    gradients = {name: grad for name, param in params.items() if (grad := param.grad) is not None}
    if {*map(type, gradients.values())} != {Tensor}:
        gradients = {name: gradient_of(params[name]) for name in gradients}
    if any(map(_is_sparse, gradients.values())):
        for name in [name for name, grad in gradients.items() if grad.is_sparse and not grad.is_coalesced()]:
            gradients[name] = params[name].grad = gradients[name].coalesce()
    return gradients


@torch.no_grad()
def decide(
    grads: Sequence[Tensor],
    divisor: Tensor,
    max_norm: float | None,
    backend: Backend,
    tables: dict[Any, Any] | None = None,
    *,
    norm: Tensor | None = None,
) -> Decision:
    """Read all gradients once; the norm and the flag are those of all ranks. `tables` lives from step to step.

    `norm` is that of the gradients before division, over all ranks, where the caller already knows it.
    """
    sums = sums_of_squares(grads, tables) if backend.context().world_size == 1 else None
    if sums is not None and sums.device == divisor.device:
        from halfstep.kernels.gradstats_triton import judge

        found_inf, norm, divisor = judge(sums, divisor, max_norm)
        return Decision(backend.agree(found_inf), norm, divisor, sums)
    norm = (backend.total_norm(total_norm(grads, divisor.device, tables)) if norm is None else norm) / divisor
    found_inf = backend.agree((~(norm.isfinite() & (divisor > 0))).to(torch.float32))
    if max_norm is not None:
        divisor = divisor * ((norm + 1e-6) / max_norm).clamp(min=1)
    return Decision(found_inf, norm, divisor)


@torch.no_grad()
def unscale_in_place(grads: Sequence[Tensor], divisor: Tensor) -> None:
    """Divide every gradient by `divisor`."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        values = dense_values(grad)
        groups.setdefault((values.device, values.dtype), []).append(values)
    for (device, dtype), group in groups.items():
        # In the gradients' own dtype the divisor may be inf (a scale of 65536 in fp16): divide 16-bit ones in fp32.
        if dtype in DTYPES_16_BIT:
            for values in group:
                values.copy_(values.float() / divisor.to(device))
        else:
            torch._foreach_div_(group, divisor.to(device, dtype))


@torch.no_grad()
def widen(params: Iterable[Tensor]) -> None:
    """Store fp16 gradients in fp32 from now on: undivided they fit fp16, divided by a loss scale they would vanish."""
    for param in params:
        grad = param.grad
        if grad is None or grad.dtype is not torch.float16:
            continue
        if not hasattr(param, "grad_dtype"):
            raise SettingError(
                f"unscale() of fp16 gradients needs torch 2.10 or later, which can store them in fp32; this is {torch.__version__}. "
                "Below 6e-08 they would vanish. Upgrade torch, or leave clipping to Engine(max_norm=...)."
            )
        param.grad = None
        param.grad_dtype = torch.float32
        param.grad = grad.float()


@torch.no_grad()
def take_step(paths: Sequence[StepPath], decision: Decision, backend: Backend, *, divides: bool) -> None:
    """Step every optimizer, or none; `divides` is False when the divisor is known to be 1."""
    paths = [path for path in paths if not backend.step(path.optimizer, decision)]
    if any(path.kind in {"plain", "masters"} or _has_sparse(path) for path in paths):
        _step_on_host(paths, decision, divides=divides)
        return
    for path in paths:
        _step_on_device(path, decision, divides=divides)


def _step_on_device(path: StepPath, decision: Decision, *, divides: bool) -> None:
    optimizer = path.optimizer
    if isinstance(optimizer, torch.optim.SGD):
        create_momentum(optimizer)
    optimizer.found_inf = decision.found_inf  # type: ignore[attr-defined]
    optimizer.grad_scale = decision.divisor if divides else None  # type: ignore[attr-defined]
    try:
        with _own_step(optimizer):
            optimizer.step()
    finally:
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step()`, with the settings of now, changes nothing if the tensor `optimizer.found_inf` is 1."""
    if isinstance(optimizer, LeanOptimizer):
        return True
    groups = optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    return (
        type(optimizer) in _FUSED
        and all(group.get("fused") for group in groups)
        and {p.device.type for p in params} <= _FUSED_DEVICES
        and not any(p.grad is not None and p.grad.is_sparse for p in params)
        and not any(group.get("momentum") and group.get("dampening") for group in groups)  # as in _why_not_fused
    )


def create_momentum(optimizer: torch.optim.SGD) -> None:
    """Zero momentum for parameters that have none, which the fused kernel would leave uninitialised on a skip."""
    for group in optimizer.param_groups:
        if group["momentum"]:
            for param in group["params"]:
                if param.grad is not None and optimizer.state[param].get("momentum_buffer") is None:
                    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def _step_on_host(paths: Sequence[StepPath], decision: Decision, *, divides: bool) -> None:
    skip, divisor = torch.stack((decision.found_inf, decision.divisor)).tolist()  # the one wait
    if skip:
        return
    for path in paths:
        params = [p for group in path.optimizer.param_groups for p in group["params"]]
        if path.kind != "plain" and not _has_sparse(path):
            _step_on_device(path, decision, divides=divides)
            continue
        if divides and divisor != 1:
            unscale_in_place([local(p.grad) for p in params if p.grad is not None], decision.divisor)
        with _unfused(path), _own_step(path.optimizer), _explained(path.optimizer, params):
            path.optimizer.step()


@contextlib.contextmanager
def _explained(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> Iterator[None]:
    """An optimizer that works on whole tensors fails inside torch on sharded ones; name it and the way out."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if not any(map(is_sharded, params)):
            raise
        text = str(error).strip().splitlines()
        raise SettingError(
            f"{type(optimizer).__name__}.step() cannot update sharded parameters: {text[0] if text else type(error).__name__} "
            "Use an optimizer of halfstep.optim, or one of torch's that it adopts, such as AdamW or SGD."
        ) from error


def _has_sparse(path: StepPath) -> bool:
    """Whether a functional embedding, which no module declares, left a sparse gradient for a fused optimizer."""
    return path.kind == "fused" and any(
        p.grad is not None and p.grad.is_sparse for g in path.optimizer.param_groups for p in g["params"]
    )


@contextlib.contextmanager
def _unfused(path: StepPath) -> Iterator[None]:
    """Step a fused optimizer by its plain implementation, the only one that takes sparse gradients."""
    groups = path.optimizer.param_groups if path.kind == "fused" else []
    for group in groups:
        group["fused"] = False
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = True
