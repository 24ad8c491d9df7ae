"""What the cross-entropy kernels launch and allocate: tiles and grids from the strides of the logits, and the tensors.

With `launch=False` the same tensors are allocated and nothing is launched: the planner's fake tensors have no memory.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "MEAN",
    "NONE",
    "SUM",
    "Launch",
    "Layout",
    "Settings",
    "class_dim",
    "launch_shape",
    "layouts",
    "run_backward",
    "run_forward",
]

NONE, MEAN, SUM = range(3)  # at::Reduction

# Launch shapes. One program per position from LONG_ROW classes on if they are contiguous; else tiles.
LONG_ROW = 1024
ROW_BLOCK = 4096  # classes at a time
ROW_WARPS = 8
TILE = 4096  # elements of a tile with contiguous classes
ELEMENTS_PER_WARP = 512
# Where positions are contiguous and classes are not, a thread has a vector of positions and all classes of the tile, so
# that no reduction crosses threads.
STRIDED_CLASSES = 4
STRIDED_WARPS = 4
VECTOR_BYTES = 16
REDUCE_BLOCK = 2048
REDUCE_WARPS = 8
ENOUGH_PROGRAMS = 512  # fewer than that get smaller tiles, to occupy all multiprocessors


@dataclass(frozen=True)
class Settings:
    """The arguments of a cross-entropy that are not tensors."""

    reduction: int = MEAN
    ignore_index: int = -100
    label_smoothing: float = 0.0


class Layout(NamedTuple):
    """Positions as three nested dimensions, the last one fastest, and the strides of one tensor over them."""

    sizes: tuple[int, int, int]
    strides: tuple[int, int, int]
    class_stride: int


class Launch(NamedTuple):
    """Tile and grid of a launch; `rows`: one program per position, with the classes contiguous."""

    rows: bool
    positions: int  # of a tile
    classes: int  # of a tile
    num_warps: int
    num_programs: int


def class_dim(logits: Tensor) -> int:
    """The dimension of the classes."""
    return 0 if logits.dim() == 1 else 1


def layouts(*tensors: Tensor) -> tuple[Layout, ...] | None:
    """The positions of tensors of one shape (N, C, ...), with dimensions merged where all allow it; None if too many remain."""
    dim = class_dim(tensors[0])
    merged: list[tuple[int, list[int]]] = []
    for at, size in enumerate(tensors[0].shape):
        if at == dim or size == 1:
            continue
        strides = [t.stride(at) for t in tensors]
        if merged and all(outer == size * own for outer, own in zip(merged[-1][1], strides, strict=True)):
            merged[-1] = (merged[-1][0] * size, strides)
        else:
            merged.append((size, strides))
    if len(merged) > 3:
        return None
    none = [(1, [0] * len(tensors))]
    (a, outer), (b, middle), (c, inner) = none * (3 - len(merged)) + merged
    return tuple(Layout((a, b, c), (outer[i], middle[i], inner[i]), t.stride(dim)) for i, t in enumerate(tensors))


def launch_shape(layouts: tuple[Layout, ...], logits: Tensor) -> Launch:
    """The tile for logits, and their gradient, with these layouts."""
    outer, middle, inner = layouts[0].sizes
    classes = _power_of_two(logits.shape[class_dim(logits)])
    if all(layout.class_stride == 1 for layout in layouts):
        if classes > LONG_ROW:
            return Launch(True, 1, min(classes, ROW_BLOCK), ROW_WARPS, outer * middle * inner)
        elements_per_warp, most, least = ELEMENTS_PER_WARP, TILE // classes, 1
    else:
        classes = min(classes, STRIDED_CLASSES)
        positions_per_warp = 32 * VECTOR_BYTES // logits.element_size()
        elements_per_warp = positions_per_warp * classes
        most, least = positions_per_warp * STRIDED_WARPS, positions_per_warp // 4  # 128 bytes: a cache line
    positions = min(_power_of_two(inner), most)
    while positions > least and outer * middle * _ceil_div(inner, positions) < ENOUGH_PROGRAMS:
        positions //= 2
    warps = max(1, positions * classes // elements_per_warp)
    return Launch(False, positions, classes, warps, outer * middle * _ceil_div(inner, positions))


def _power_of_two(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def run_forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings, *, launch: bool
) -> tuple[Tensor, Tensor]:
    """The loss, and what backward needs: each position's largest logit and sum of exponentials, and the sum of target weights.

    One tensor has all of that: with small batches the step waits for the host, and each allocation is work for it.
    """
    positions = layouts(logits)
    assert positions is not None
    shape = launch_shape(positions, logits)
    summed = settings.reduction != NONE
    # The total, and each program's sums of losses and of target weights.
    sums = 1 + 2 * shape.num_programs if summed else 0
    scratch = _new(logits, 2 * target.numel() + sums)
    loss = _new(logits, *(() if summed else target.shape))
    classes = _class_weights(weight, settings)
    if launch:
        _launch_forward(logits, target, classes, None if summed else loss, scratch, positions[0], shape, settings)
        if summed:
            _launch_reduce(scratch, loss, target.numel(), shape.num_programs, settings)
    return loss, scratch


def run_backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    scratch: Tensor,
    settings: Settings,
    *,
    launch: bool,
) -> Tensor | None:
    """The gradient of the logits; None if no kernel can write it in the strides that it gets."""
    result = torch.empty_like(logits)
    both = layouts(logits, result)
    if both is None:  # a slice in four or more dimensions, some of which only the dense gradient can merge
        return None
    if any(grad.stride()) and not grad.is_contiguous():
        grad = grad.contiguous()
    classes = _class_weights(weight, settings)
    if launch:
        shape = launch_shape(both, logits)
        _launch_backward(grad, logits, result, target, classes, scratch, both, shape, settings)
    return result


def _new(logits: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=logits.device)


def _class_weights(weight: Tensor | None, settings: Settings) -> tuple[Tensor, Tensor | None] | None:
    """The class weights, contiguous, and for label smoothing their sum."""
    if weight is None:
        return None
    weight = weight.contiguous()
    return weight, weight.sum(dtype=torch.float32) if settings.label_smoothing else None


def _launch_forward(
    logits: Tensor,
    target: Tensor,
    classes: tuple[Tensor, Tensor | None] | None,
    losses: Tensor | None,
    scratch: Tensor,
    layout: Layout,
    launch: Launch,
    settings: Settings,
) -> None:
    """Fill `scratch`, and `losses` if there are any."""
    from halfstep.kernels import cross_entropy_triton as kernels

    weight, weight_sum = classes or (None, None)
    num_classes = logits.shape[class_dim(logits)]
    places = (target.numel(), *layout.sizes[1:], *layout.strides[:2])
    numbers = (settings.ignore_index, 1 - settings.label_smoothing, settings.label_smoothing / num_classes)
    options = {
        "INNER_STRIDE": layout.strides[2],
        "C": num_classes,
        "BLOCK": launch.classes,
        "WEIGHTED": classes is not None,
        "SMOOTHS": settings.label_smoothing > 0,
        "PARTIAL": losses is None,
        "num_warps": launch.num_warps,
    }
    tensors = (logits, target, weight, weight_sum, losses, scratch)
    with _on(logits.device):
        if launch.rows:
            options |= _alignment(logits, layout)
            kernels.rows_forward_kernel[(launch.num_programs,)](*tensors, *places, *numbers, **options)
        else:
            options["POSITIONS"] = launch.positions
            kernels.tiles_forward_kernel[(launch.num_programs,)](
                *tensors, *places, layout.class_stride, *numbers, **options
            )


def _launch_reduce(scratch: Tensor, loss: Tensor, num_positions: int, num_programs: int, settings: Settings) -> None:
    """Fill `loss`, and the total in `scratch`, from the sums of the programs."""
    from halfstep.kernels import cross_entropy_triton as kernels

    mean = settings.reduction == MEAN
    with _on(scratch.device):
        kernels.reduce_kernel[(1,)](
            scratch, loss, num_positions, num_programs, MEAN=mean, BLOCK=REDUCE_BLOCK, num_warps=REDUCE_WARPS
        )


def _launch_backward(
    grad: Tensor,
    logits: Tensor,
    result: Tensor,
    target: Tensor,
    classes: tuple[Tensor, Tensor | None] | None,
    scratch: Tensor,
    layouts: tuple[Layout, ...],
    launch: Launch,
    settings: Settings,
) -> None:
    """Fill `result`."""
    from halfstep.kernels import cross_entropy_triton as kernels

    weight, weight_sum = classes or (None, None)
    own, out = layouts
    num_classes = logits.shape[class_dim(logits)]
    one_for_all = settings.reduction != NONE or not any(grad.stride())
    places = (0 if one_for_all else 1, target.numel(), *own.sizes[1:])
    numbers = (settings.ignore_index, 1 - settings.label_smoothing, settings.label_smoothing / num_classes)
    options = {
        "INNER_STRIDE": own.strides[2],
        "RESULT_INNER_STRIDE": out.strides[2],
        "C": num_classes,
        "BLOCK": launch.classes,
        "WEIGHTED": classes is not None,
        "SMOOTHS": settings.label_smoothing > 0,
        "MEAN": settings.reduction == MEAN,
        "num_warps": launch.num_warps,
    }
    tensors = (grad, logits, result, target, weight, weight_sum, scratch)
    with _on(logits.device):
        if launch.rows:
            options |= _alignment(result, out) | {"SAME": own == out}
            strides: tuple[int, ...] = (*own.strides[:2], *out.strides[:2])
            kernels.rows_backward_kernel[(launch.num_programs,)](*tensors, *places, *strides, *numbers, **options)
        else:
            options["POSITIONS"] = launch.positions
            strides = (*own.strides[:2], own.class_stride, *out.strides[:2], out.class_stride)
            kernels.tiles_backward_kernel[(launch.num_programs,)](*tensors, *places, *strides, *numbers, **options)


def _alignment(tensor: Tensor, layout: Layout) -> dict[str, Any]:
    vector = VECTOR_BYTES // tensor.element_size()
    return {"VECTOR": vector, "ALIGNED": not any(stride % vector for stride in layout.strides)}


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
