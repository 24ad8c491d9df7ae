"""The workspace that cuDNN allocates for a convolution, forward and backward.

How it works. cuDNN has a dozen algorithms for a convolution and chooses one from the shapes, by rules it does not publish.
The workspace of each algorithm is exact arithmetic; the choice comes from two data sets of an H200 (cuDNN 9.19, torch
2.11): 8,898 convolutions of well-known networks, run and measured (benchmarks/bench_plan_convs.py), and 8,270 shapes
for which cuDNN was queried, without running them (benchmarks/ask_cudnn.py). The two agree to the byte on the 93 shapes
they share. With N images of C channels and H x W positions, K output channels, and a filter of R x S:

    algorithm         workspace                                              where it was observed
    direct            none                                                   fp32 forward mostly; depthwise
    layout copies     input + output + filter, channels last                 16 bits and TF32, both passes, unless the
                                                                             tensors are channels-last already; fp32
                                                                             backward where the filter is large
    sums per image    4 N C K                                                16-bit 1 x 1 filters, backward
    Winograd          tiles of 6 x 6 for 4 x 4 outputs (13 x 13 for 9 x 9    fp32 3 x 3 (5 x 5) of stride 1, the filter's
                      if the filter is 5 x 5) of input, output and filter    gradient, unless there are few channels
    tiled transform   (C K + m N (C + K)) spectra of 32 x 32; m is 1 if an   fp32 3 x 3 of stride 1, the input's gradient:
                      image fits in one tile and 2 if not                    the table `_TILED` below
    whole transform   2 max(C (K + N), N K) spectra of whole images, padded  fp32 3 x 3 of stride 1, forward: the table
                      to a power of two, and a filter                        `_WHOLE` below

A spectrum of F x F has F (F / 2 + 1) complex values of 8 bytes. The whole transform is why true fp32 can allocate
gigabytes for one layer: 256 channels of 64 x 64 are 8.6 GiB at batch 12 and nothing at batch 8. It was never observed in
16-bit formats or TF32. Both transforms divide a batch whose tensors have more than 2^31 elements.

One operation of torch computes the input's gradient, then the filter's, then the sum for the bias, and what counts is the
peak less all results:

    max(workspace for the input's gradient - filter's gradient, workspace for the filter's gradient) - the bias's gradient

In addition, torch copies tensors that are not in the layout it calls cuDNN with: a gradient that is a slice of a
concatenation, or an image whose filter is channels-last.

Accuracy. The formulas agree with the data to the byte or nearly so; a few MiB of partial sums are omitted. The choice of
the algorithm is less certain. cuDNN compares expected times, and an algorithm can come and go as the batch grows: 256
channels of 64 x 64 use the whole transform from 12 images to 32, and not at 8 or 128. The tables below contain the ranges
that matter, with limits fitted to 60 % of the queried 3 x 3 filters. On the other 40 %, with 32 to 1,024 channels, 3.9 % of
the forward choices are wrong and 2.7 % of the gigabytes; backward 6 % of the gigabytes, for tensors below 1 GiB. (All
shapes had been inspected before the limits were set, so these figures are slightly optimistic.) The peaks of 71 fp32 steps
of the measured networks are within 1.5 %. Known misses: rare channel counts (224, 480, 160 to 80, 320 to 160), wide layers
of 60 x 60, filters of 1 x 7, 5 x 5 filters backward, and 1 x 1 filters of 320 channels and more, which use copies or even
transforms backward. Tensors of several gigabytes have special algorithms.

Other versions and GPUs choose differently. If the memory for an algorithm is not available, torch uses the next one in
cuDNN's list. So the whole transform has its own category, which a plan counts if it fits but never requires.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

__all__ = ["backward_bytes", "forward_bytes", "transform_bytes"]

_MIN_BYTES = 16  # of channels that kernels read at once; fewer are padded: to 8 in 16 bits, to 4 in fp32
_SUMS_PER_IMAGE = 400  # elements of a 1 x 1 filter per position: up to here 16-bit gradients are summed per image
# fp32 gradients are computed channels-last where the filter has many elements: of a 1 x 1 filter, per position; else in all.
_WIDE, _MANY = 1000, 400_000
_SMALL_IMAGE = 64  # positions; 7 x 7 and 8 x 8 are below, 13 x 13 is not
_FIRST_LAYER = 4  # the largest filter that has kernels for an image of few channels


_ANY = 1 << 40
_LARGEST = 140 << 30  # bytes: larger workspaces are not used, as this is about all that an H200 has
_DIVIDED = 1 << 31  # elements of a tensor: above, the batch is transformed in parts


@dataclass(frozen=True)
class _Range:
    """Shapes for which cuDNN uses a transform; every pair is the minimum and the maximum."""

    in_channels: tuple[int, int]
    out_channels: tuple[int, int]
    side: tuple[int, int]  # of the image; 14, 30 and 254 are the largest that are padded to 16, 32 and 256
    positions: tuple[int, int]  # output positions of the whole batch
    batch: int = 1  # the minimum


_WHOLE = (
    _Range((192, _ANY), (896, _ANY), (7, 254), (2800, _ANY)),
    _Range((512, _ANY), (512, 895), (15, 30), (16000, _ANY)),
    _Range((512, _ANY), (512, 895), (31, 254), (0, _ANY), batch=28),
    _Range((512, 639), (512, 639), (7, 20), (4500, _ANY)),
    _Range((512, 639), (512, 639), (31, 32), (0, _ANY), batch=24),
    _Range((384, 768), (640, 768), (7, 40), (700, 1600)),  # 18.7 GiB for a single image of 768 channels, 32 x 32
    _Range((320, 511), (448, 895), (15, 64), (32000, _ANY), batch=28),
    _Range((320, 511), (320, 511), (7, 14), (1900, 14000)),
    _Range((256, 256), (128, 128), (7, 32), (6000, _ANY)),
    _Range((256, 256), (256, 256), (7, 16), (8000, _ANY)),
    _Range((256, 256), (256, 256), (25, 40), (45000, _ANY)),
    _Range((256, 256), (256, 256), (41, 254), (45000, 160000)),
    _Range((160, 192), (160, 640), (33, 254), (160000, _ANY)),
    _Range((128, 192), (96, 384), (15, 32), (24000, _ANY)),
    _Range((96, 160), (96, 640), (7, 8), (0, 800)),
    _Range((64, 64), (128, 128), (33, 72), (20000, _ANY)),
)
_WIDE_5 = 512  # channels from which 5 x 5 filters use the whole transform where 3 x 3 ones do

_TILE = 32
_TILED = (
    _Range((96, 128), (96, 192), (24, 254), (12000, _ANY)),
    _Range((256, 256), (128, 256), (24, 64), (8000, _ANY)),
    _Range((257, 639), (128, _ANY), (24, 64), (8000, _ANY)),
    _Range((320, 511), (320, _ANY), (8, 23), (8000, _ANY)),
    _Range((512, 639), (320, _ANY), (13, 23), (8000, _ANY)),
    _Range((640, 899), (128, _ANY), (24, 64), (21000, _ANY)),
    _Range((640, 899), (320, _ANY), (13, 23), (21000, _ANY)),
    _Range((900, _ANY), (128, _ANY), (24, 64), (10500, _ANY)),
    _Range((900, _ANY), (320, _ANY), (13, 23), (10500, _ANY)),
)


@dataclass(frozen=True)
class _Conv:
    """The shapes of one convolution."""

    batch: int
    in_channels: int
    out_channels: int
    image: tuple[int, ...]
    output: tuple[int, ...]
    window: tuple[int, ...]
    groups: int
    unit: bool  # stride 1, and not transposed
    element: int  # bytes

    @property
    def x_bytes(self) -> int:
        return self.batch * self.in_channels * prod(self.image) * self.element

    @property
    def y_bytes(self) -> int:
        return self.batch * self.out_channels * prod(self.output) * self.element

    @property
    def w_bytes(self) -> int:
        return self.in_channels // self.groups * self.out_channels * prod(self.window) * self.element

    @property
    def positions(self) -> int:
        """Of the smaller of image and output."""
        return min(prod(self.image), prod(self.output))

    @property
    def side(self) -> int:
        return max(self.image)

    @property
    def at_once(self) -> int:
        """Images that are transformed at once."""
        largest = max(self.in_channels * prod(self.image), self.out_channels * prod(self.output))
        return min(self.batch, _DIVIDED // largest) or 1

    @property
    def pointwise(self) -> bool:
        return prod(self.window) == 1

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == min(self.in_channels, self.out_channels)

    @property
    def square(self) -> int:
        """The side of a dense square filter of stride 1 over 2-D images; 0 for all others."""
        plain = self.unit and self.groups == 1 and len(self.window) == 2
        return self.window[0] if plain and len(set(self.window)) == 1 else 0


def forward_bytes(args: Any, out: Tensor, *, tf32: bool = False) -> int:
    """Workspace of `aten.convolution`; `tf32` if fp32 products may use TF32."""
    x, weight = args[0], args[1]
    if x.dim() < 3 or not x.numel():
        return 0
    conv = _described(x, weight, out, stride=args[3], transposed=args[6], groups=args[8])
    last = _channels_last(x, weight)
    copies = _copies(last, x, weight)
    if conv.depthwise:
        return copies
    if conv.element == 2 or tf32:
        return copies + _forward_16(conv, last=last)
    if last:
        return copies + conv.x_bytes + conv.y_bytes + conv.w_bytes
    return copies + _whole_transform(conv)


def transform_bytes(args: Any, out: Tensor) -> int | None:
    """The part of `forward_bytes` that is allocated only if it fits; None for dtypes without such a part."""
    x, weight = args[0], args[1]
    if x.element_size() != 4 or x.dim() < 3 or not x.numel():
        return None
    conv = _described(x, weight, out, stride=args[3], transposed=args[6], groups=args[8])
    return 0 if conv.depthwise or _channels_last(x, weight) else _whole_transform(conv)


def backward_bytes(args: Any, bias_bytes: int, *, tf32: bool = False) -> int:
    """Workspace of `aten.convolution_backward`; `bias_bytes` is that of the sum for the bias."""
    grad, x, weight, mask = args[0], args[1], args[2], args[10]
    if x.dim() < 3 or not x.numel():
        return 0
    conv = _described(x, weight, grad, stride=args[4], transposed=args[7], groups=args[9])
    last = _channels_last(x, weight)
    copied = _copies(last, grad)  # from the start until the end
    bias = conv.out_channels * conv.element if mask[2] else 0
    if conv.depthwise:
        return max(copied, bias_bytes)
    rule = _backward_16 if conv.element == 2 or tf32 else _backward_32
    for_input, for_filter = rule(conv, last=last)
    parts = [0]
    if mask[0]:
        parts.append(for_input + _copies(last, weight) - conv.w_bytes * mask[1] - bias)
    if mask[1]:
        parts.append(for_filter + _copies(last, x) - bias)
    return max(copied + max(parts), bias_bytes)


# --- 16 bits --------------------------------------------------------------------------------------------------------


def _forward_16(conv: _Conv, *, last: bool) -> int:
    few = conv.in_channels * conv.element < _MIN_BYTES
    if last:
        return _padded(conv, conv.x_bytes, conv.in_channels) if few else 0
    if conv.pointwise:
        small = 1 < conv.positions <= _SMALL_IMAGE and min(conv.in_channels, conv.out_channels) >= 64
        return conv.x_bytes + conv.y_bytes if small or not conv.unit else 0
    return 0 if few and max(conv.window) <= _FIRST_LAYER else _layout_copies(conv)


def _backward_16(conv: _Conv, *, last: bool) -> tuple[int, int]:
    if last:
        few = conv.in_channels * conv.element < _MIN_BYTES
        return 0, _padded(conv, conv.x_bytes, conv.in_channels) if few else 0
    if not conv.pointwise:
        return _layout_copies(conv), _layout_copies(conv)
    if conv.positions == 1:
        return 0, 0
    thin = conv.in_channels * conv.out_channels <= _SUMS_PER_IMAGE * conv.positions
    # The last layers of EfficientNet and MobileNet; wider layers of that size are copied, and so are larger batches.
    thin = thin or (conv.positions <= _SMALL_IMAGE and conv.in_channels <= 8 * conv.positions and conv.batch <= 64)
    return (
        0,
        4 * conv.batch * conv.in_channels * conv.out_channels if thin and conv.unit else conv.x_bytes + conv.y_bytes,
    )


def _layout_copies(conv: _Conv) -> int:
    """Copies of input, output and filter, channels last."""
    x, y = _padded(conv, conv.x_bytes, conv.in_channels), _padded(conv, conv.y_bytes, conv.out_channels)
    return x + y + conv.w_bytes * x // conv.x_bytes * y // conv.y_bytes


def _padded(conv: _Conv, num_bytes: int, channels: int) -> int:
    """Bytes with the channels padded: to a minimum, and those of a group to a power of two."""
    each = channels // conv.groups
    padded = max(_MIN_BYTES // conv.element, each) if conv.groups == 1 else _power_of_two(each)
    return num_bytes // each * padded


# --- fp32 -----------------------------------------------------------------------------------------------------------


def _whole_transform(conv: _Conv) -> int:
    """Forward: spectra of whole images, where cuDNN uses them."""
    if conv.square not in {3, 5} or (conv.square == 5 and min(conv.in_channels, conv.out_channels) < _WIDE_5):
        return 0
    if not any(_within(shapes, conv) for shapes in _WHOLE):
        return 0
    pairs = max(conv.in_channels * (conv.out_channels + conv.at_once), conv.out_channels * conv.at_once)
    workspace = 2 * pairs * _spectrum(_power_of_two(conv.side + conv.square - 1)) + conv.w_bytes
    return workspace if workspace <= _LARGEST else 0


def _within(shapes: _Range, conv: _Conv) -> bool:
    limits = (shapes.in_channels, shapes.out_channels, shapes.side, shapes.positions, (shapes.batch, _ANY))
    values = (conv.in_channels, conv.out_channels, conv.side, conv.batch * prod(conv.output), conv.batch)
    return all(low <= value <= high for (low, high), value in zip(limits, values, strict=True))


def _backward_32(conv: _Conv, *, last: bool) -> tuple[int, int]:
    copies = _layout_copies(conv)
    base = copies if last else 0
    if conv.square in _WINOGRAD and min(conv.in_channels, conv.out_channels) >= 8:
        return base + _tiled_transform(conv), base + _winograd(conv)
    filter_size = conv.w_bytes // conv.element
    wide = filter_size > (_WIDE * conv.positions if conv.pointwise else _MANY)
    deep = len(conv.window) == 3
    return (copies, copies) if last or (conv.groups == 1 and conv.positions > 1 and (wide or deep)) else (0, 0)


def _tiled_transform(conv: _Conv) -> int:
    """Backward, for the gradient of the input: spectra of tiles, where cuDNN uses them.

    Fewer channels use it as well, but then the filter's gradient needs more.
    """
    odd = conv.out_channels > 128 and conv.out_channels % 64
    if conv.square != 3 or odd or not any(_within(shapes, conv) for shapes in _TILED):
        return 0
    tiles = 1 if conv.side + 2 <= _TILE else 2
    pairs = conv.in_channels * conv.out_channels + tiles * conv.at_once * (conv.in_channels + conv.out_channels)
    return pairs * _spectrum(_TILE)


_WINOGRAD = {
    3: (4, 6),
    5: (9, 13),
}  # side of the filter -> sides of an output tile and of the input tile it is computed from


def _winograd(conv: _Conv) -> int:
    """Backward, for the gradient of the filter: transformed tiles of input, output and filter, where cuDNN uses them."""
    few, many = sorted((conv.in_channels, conv.out_channels))
    narrow = many <= 96 and (conv.in_channels < 64 or conv.out_channels < 48)
    # 192 channels to 96 or 384 have a special kernel, as in a U-Net of width 96.
    special = conv.in_channels == 192 and conv.out_channels in {96, 384}
    if (few < 32 and many < 64) or (narrow and conv.side >= 56) or (special and conv.side >= 32):
        return 0
    step, side = _WINOGRAD[conv.square]
    tiles = prod(-(-size // step) for size in conv.output)
    pairs = conv.batch * (conv.in_channels + conv.out_channels) * tiles + conv.in_channels * conv.out_channels
    return pairs * side * side * conv.element


def _spectrum(side: int) -> int:
    return 8 * side * (side // 2 + 1)


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


# --- shapes and layouts ---------------------------------------------------------------------------------------------


def _described(x: Tensor, weight: Tensor, y: Tensor, *, stride: Any, transposed: bool, groups: int) -> _Conv:
    return _Conv(
        batch=x.shape[0],
        in_channels=x.shape[1],
        out_channels=y.shape[1],
        image=tuple(x.shape[2:]),
        output=tuple(y.shape[2:]),
        window=tuple(weight.shape[2:]),
        groups=groups,
        unit=set(stride) == {1} and not transposed,
        element=x.element_size(),
    )


def _format(*, last: bool, dim: int) -> torch.memory_format:
    if not last:
        return torch.contiguous_format
    return torch.channels_last if dim == 4 else torch.channels_last_3d


def _channels_last(*tensors: Tensor) -> bool:
    """Whether torch calls cuDNN with channels last: one of the two is channels-last and not also contiguous."""
    return any(
        t.dim() in {4, 5} and not t.is_contiguous() and t.is_contiguous(memory_format=_format(last=True, dim=t.dim()))
        for t in tensors
    )


def _copies(last: bool, *tensors: Tensor) -> int:
    """Bytes of the tensors that must be copied into the layout."""
    return sum(
        t.numel() * t.element_size()
        for t in tensors
        if not t.is_contiguous(memory_format=_format(last=last, dim=t.dim()))
    )
