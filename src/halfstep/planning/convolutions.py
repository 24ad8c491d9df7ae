"""What cuDNN takes on the side for a convolution, forwards and backwards.

How it works. cuDNN has a dozen ways to compute a convolution and chooses one from the shapes, by rules it does not
publish. What each way takes is exact arithmetic; which one is taken was read off 8,898 convolutions of well-known
networks on an H200 (cuDNN 9.19, torch 2.11, TF32 off; benchmarks/bench_plan_convs.py). With N images of C channels and
H x W positions, K channels of result, and a filter of R x S:

    way               bytes taken                                            where it was seen
    direct            none                                                   fp32 forwards nearly always; depthwise
    layout copies     input + result + filter, channels last                 16 bits forwards and backwards, unless the
                                                                             tensors are so already; fp32 backwards where
                                                                             the filter is large against the image
    sums per image    4 N C K                                                16-bit one-pixel filters backwards
    Winograd          tiles of 6 x 6 for 4 x 4 results (13 x 13 for 9 x 9    fp32 3 x 3 (5 x 5) of stride 1, the filter's
                      if the filter is 5 x 5) of input, result and filter    gradient
    tiled transform   (C K + m N (C + K)) spectra of 32 x 32; m is 1 if an   fp32 3 x 3 of stride 1, the input's gradient
                      image fits in one tile and 2 if not
    whole transform   2 max(C (K + N), N K) spectra of whole images, padded  fp32 3 x 3 of stride 1, forwards, where C = K
                      to a power of two, and a filter                        and the batch is large

A spectrum of F x F has F (F / 2 + 1) complex numbers of 8 bytes. The last way is why true fp32 can take gigabytes for one
layer: 256 channels of 64 x 64 are 8.6 GiB at batch 16 and nothing at batch 8. 16-bit formats were never seen to take it.

One operation of torch runs the input's gradient, then the filter's, then the sum for the bias, and what counts is the
fullest moment less all results:

    max(taken for the input's gradient - filter's gradient, taken for the filter's gradient) - the bias's gradient

Besides, torch copies what does not have the layout it calls cuDNN with: a gradient that is a slice of a concatenation, or
an image whose filter is channels-last.

The formulas agree with what was measured to the byte or nearly so; a few MiB of partial sums are left out. The conditions
are simpler than cuDNN's own, chosen so that the peaks of whole steps come out right. Known misses: it also transforms whole
images for some filters with C != K, and for a single image of 768 channels (18.6 GiB). Other versions and cards choose
otherwise. If the memory for a way is not there, torch takes the next in cuDNN's list, so such a peak is what a large GPU
will show, not what a small one needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

__all__ = ["backward_bytes", "forward_bytes"]

_LEAST_BYTES = 16  # of channels that kernels take at once; fewer are filled up: to 8 in 16 bits, to 4 in fp32
_SUMS_PER_IMAGE = 400  # numbers of a one-pixel filter per position: up to here 16-bit gradients are summed by image
_WIDE = 1000  # numbers of a filter per position: above, fp32 gradients are computed channels-last
_SMALL_IMAGE = 64  # positions; 7 x 7 and 8 x 8 are below, 13 x 13 is not
_FIRST_LAYER = 4  # the largest filter that has kernels for an image of few channels


@dataclass(frozen=True)
class _Range:
    """Where one of the transforms was seen, for images of some size."""

    channels: range  # of the filter's shorter side
    least: int  # numbers of the input for whole images, positions of the batch for tiles


_ANY = 1 << 30
# The side to which images are padded -> where whole images are transformed.
_WHOLE = {
    16: _Range(range(128, _ANY), 2_500_000),
    32: _Range(range(128, _ANY), 8_000_000),
    64: _Range(range(192, _ANY), 10_000_000),
    128: _Range(range(192, 257), 10_000_000),
    256: _Range(range(192, 257), 30_000_000),
}
# The largest side of an image -> where it is transformed in tiles; larger ones were not, nor were those below 8.
_TILE = 32
_TILED = {
    16: _Range(range(384, _ANY), 8192),
    100: _Range(range(128, _ANY), 8192),
}


@dataclass(frozen=True)
class _Conv:
    """The shapes of one convolution."""

    batch: int
    inside: int  # channels of the image, and of the result
    outside: int
    image: tuple[int, ...]
    result: tuple[int, ...]
    window: tuple[int, ...]
    groups: int
    unit: bool  # moves by single steps, and is not transposed
    element: int  # bytes

    @property
    def x_bytes(self) -> int:
        return self.batch * self.inside * prod(self.image) * self.element

    @property
    def y_bytes(self) -> int:
        return self.batch * self.outside * prod(self.result) * self.element

    @property
    def w_bytes(self) -> int:
        return self.inside // self.groups * self.outside * prod(self.window) * self.element

    @property
    def positions(self) -> int:
        """Of the smaller image."""
        return min(prod(self.image), prod(self.result))

    @property
    def one_pixel(self) -> bool:
        return prod(self.window) == 1

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == min(self.inside, self.outside)

    @property
    def square(self) -> int:
        """The side of a dense filter that moves by single steps over flat images; 0 for all others."""
        plain = self.unit and self.groups == 1 and len(self.window) == 2
        return self.window[0] if plain and len(set(self.window)) == 1 else 0


def forward_bytes(args: Any, out: Tensor) -> int:
    """Taken by `aten.convolution` beside its result."""
    x, weight = args[0], args[1]
    if x.dim() < 3 or not x.numel():
        return 0
    conv = _described(x, weight, out, stride=args[3], transposed=args[6], groups=args[8])
    last = _channels_last(x, weight)
    copies = _copies(last, x, weight)
    if conv.depthwise:
        return copies
    if conv.element == 2:
        return copies + _forward_16(conv, last=last)
    if last:
        return copies + conv.x_bytes + conv.y_bytes + conv.w_bytes
    return copies + _whole_transform(conv)


def backward_bytes(args: Any, bias_bytes: int) -> int:
    """Taken by `aten.convolution_backward` beside its results; `bias_bytes` by the sum for the bias."""
    grad, x, weight, mask = args[0], args[1], args[2], args[10]
    if x.dim() < 3 or not x.numel():
        return 0
    conv = _described(x, weight, grad, stride=args[4], transposed=args[7], groups=args[9])
    last = _channels_last(x, weight)
    copied = _copies(last, grad)  # at the start, and there until the end
    bias = conv.outside * conv.element if mask[2] else 0
    if conv.depthwise:
        return max(copied, bias_bytes)
    rule = _backward_16 if conv.element == 2 else _backward_32
    for_input, for_filter = rule(conv, last=last)
    parts = [0]
    if mask[0]:
        parts.append(for_input + _copies(last, weight) - conv.w_bytes * mask[1] - bias)
    if mask[1]:
        parts.append(for_filter + _copies(last, x) - bias)
    return max(copied + max(parts), bias_bytes)


# --- 16 bits --------------------------------------------------------------------------------------------------------


def _forward_16(conv: _Conv, *, last: bool) -> int:
    few = conv.inside * conv.element < _LEAST_BYTES
    if last:
        return _filled(conv, conv.x_bytes, conv.inside) if few else 0
    if conv.one_pixel:
        small = 1 < conv.positions <= _SMALL_IMAGE and min(conv.inside, conv.outside) >= 64
        return conv.x_bytes + conv.y_bytes if small or not conv.unit else 0
    return 0 if few and max(conv.window) <= _FIRST_LAYER else _layout_copies(conv)


def _backward_16(conv: _Conv, *, last: bool) -> tuple[int, int]:
    if last:
        few = conv.inside * conv.element < _LEAST_BYTES
        return 0, _filled(conv, conv.x_bytes, conv.inside) if few else 0
    if not conv.one_pixel:
        return _layout_copies(conv), _layout_copies(conv)
    if conv.positions == 1:
        return 0, 0
    thin = conv.inside * conv.outside <= _SUMS_PER_IMAGE * conv.positions
    # The last layers of EfficientNet and MobileNet; wider ones of that size are copied, and so are larger batches.
    thin = thin or (conv.positions <= _SMALL_IMAGE and conv.inside <= 8 * conv.positions and conv.batch <= 64)
    return 0, 4 * conv.batch * conv.inside * conv.outside if thin and conv.unit else conv.x_bytes + conv.y_bytes


def _layout_copies(conv: _Conv) -> int:
    """Input, result and filter once more, channels last."""
    x, y = _filled(conv, conv.x_bytes, conv.inside), _filled(conv, conv.y_bytes, conv.outside)
    return x + y + conv.w_bytes * x // conv.x_bytes * y // conv.y_bytes


def _filled(conv: _Conv, num_bytes: int, channels: int) -> int:
    """Bytes with the channels filled up: to a least number, and those of a group to a power of two."""
    each = channels // conv.groups
    full = max(_LEAST_BYTES // conv.element, each) if conv.groups == 1 else _power_of_two(each)
    return num_bytes // each * full


# --- fp32 -----------------------------------------------------------------------------------------------------------


def _whole_transform(conv: _Conv) -> int:
    """Forwards: spectra of whole images, where they are taken."""
    side = _power_of_two(max(conv.image) + max(conv.window) - 1)
    seen = _WHOLE.get(side)
    if conv.square != 3 or conv.inside != conv.outside or seen is None:
        return 0
    if conv.inside not in seen.channels or conv.x_bytes < seen.least * conv.element:
        return 0
    pairs = max(conv.inside * (conv.outside + conv.batch), conv.outside * conv.batch)
    return 2 * pairs * _spectrum(side) + conv.w_bytes


def _backward_32(conv: _Conv, *, last: bool) -> tuple[int, int]:
    copies = _layout_copies(conv)
    base = copies if last else 0
    if conv.square in _WINOGRAD and min(conv.inside, conv.outside) >= 8:
        return base + _tiled_transform(conv), base + _winograd(conv)
    wide = prod(conv.window) * conv.inside * conv.outside > _WIDE * conv.positions
    deep = len(conv.window) == 3
    return (copies, copies) if last or (conv.groups == 1 and conv.positions > 1 and (wide or deep)) else (0, 0)


def _tiled_transform(conv: _Conv) -> int:
    """Backwards, for the gradient of the input: spectra of tiles, where they are taken."""
    side = max(conv.image)
    seen = next((_TILED[most] for most in _TILED if 8 <= side <= most), None)
    if conv.square != 3 or seen is None or conv.inside < conv.outside or conv.outside not in seen.channels:
        return 0
    # The widest layers of a large U-Net, 768 channels, took tiles only from three times as many positions on.
    if conv.batch * conv.positions < seen.least * (3 if conv.inside >= 768 else 1):
        return 0
    tiles = 1 if side + 2 <= _TILE else 2
    pairs = conv.inside * conv.outside + tiles * conv.batch * (conv.inside + conv.outside)
    return pairs * _spectrum(_TILE)


_WINOGRAD = {
    3: (4, 6),
    5: (9, 13),
}  # side of the filter -> sides of a tile of results and of the tile it is computed from


def _winograd(conv: _Conv) -> int:
    """Backwards, for the gradient of the filter: transformed tiles of input, result and filter."""
    step, side = _WINOGRAD[conv.square]
    tiles = prod(-(-size // step) for size in conv.result)
    pairs = conv.batch * (conv.inside + conv.outside) * tiles + conv.inside * conv.outside
    return pairs * side * side * conv.element


def _spectrum(side: int) -> int:
    return 8 * side * (side // 2 + 1)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


# --- shapes and layouts ---------------------------------------------------------------------------------------------


def _described(x: Tensor, weight: Tensor, y: Tensor, *, stride: Any, transposed: bool, groups: int) -> _Conv:
    return _Conv(
        batch=x.shape[0],
        inside=x.shape[1],
        outside=y.shape[1],
        image=tuple(x.shape[2:]),
        result=tuple(y.shape[2:]),
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
    """Whether torch calls cuDNN with channels last: one of the two is so, and not also in the usual order."""
    return any(
        t.dim() in {4, 5} and not t.is_contiguous() and t.is_contiguous(memory_format=_format(last=True, dim=t.dim()))
        for t in tensors
    )


def _copies(last: bool, *tensors: Tensor) -> int:
    """Bytes of those that have to be copied into the layout."""
    return sum(
        t.numel() * t.element_size()
        for t in tensors
        if not t.is_contiguous(memory_format=_format(last=last, dim=t.dim()))
    )
