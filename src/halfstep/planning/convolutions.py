"""What cuDNN takes on the side for a convolution, forwards and backwards.

How it works. cuDNN has a dozen ways to compute a convolution and chooses one from the shapes, by rules it does not
publish. What each way takes is exact arithmetic; which one is taken was read off two records of an H200 (cuDNN 9.19, torch
2.11): 8,898 convolutions of well-known networks, run and measured (benchmarks/bench_plan_convs.py), and 8,270 shapes
of which cuDNN was asked, without running them, what it would take (benchmarks/ask_cudnn.py). The two agree to the byte
where both speak, 93 times. With N images of C channels and H x W positions, K channels of result, and a filter of R x S:

    way               bytes taken                                            where it was seen
    direct            none                                                   fp32 forwards mostly; depthwise
    layout copies     input + result + filter, channels last                 16 bits and TF32, both passes, unless the
                                                                             tensors are so already; fp32 backwards where
                                                                             the filter is large
    sums per image    4 N C K                                                16-bit one-pixel filters backwards
    Winograd          tiles of 6 x 6 for 4 x 4 results (13 x 13 for 9 x 9    fp32 3 x 3 (5 x 5) of stride 1, the filter's
                      if the filter is 5 x 5) of input, result and filter    gradient, unless the channels are few
    tiled transform   (C K + m N (C + K)) spectra of 32 x 32; m is 1 if an   fp32 3 x 3 of stride 1, the input's gradient:
                      image fits in one tile and 2 if not                    the table `_TILED` below
    whole transform   2 max(C (K + N), N K) spectra of whole images, padded  fp32 3 x 3 of stride 1, forwards: the table
                      to a power of two, and a filter                        `_WHOLE` below

A spectrum of F x F has F (F / 2 + 1) complex numbers of 8 bytes. The last way is why true fp32 can take gigabytes for one
layer: 256 channels of 64 x 64 are 8.6 GiB at batch 12 and nothing at batch 8. Neither 16-bit formats nor TF32 were seen
to take it. Both transforms divide a batch whose tensors have more than 2^31 numbers.

One operation of torch runs the input's gradient, then the filter's, then the sum for the bias, and what counts is the
fullest moment less all results:

    max(taken for the input's gradient - filter's gradient, taken for the filter's gradient) - the bias's gradient

Besides, torch copies what does not have the layout it calls cuDNN with: a gradient that is a slice of a concatenation, or
an image whose filter is channels-last.

How sure this is. The formulas agree with what was recorded to the byte or nearly so; a few MiB of partial sums are left
out. The choice among them is less sure. cuDNN compares expected times, and a way can come and go as the batch grows: 256
channels of 64 x 64 take the whole transform from 12 images to 32, and not at 8 or 128. The tables below hold the ranges
that matter, with limits set on 60 % of the asked 3 x 3 filters. On the other 40 %, with 32 to 1,024 channels, 3.9 % of the
choices forwards are wrong and 2.7 % of the gigabytes; backwards 6 % of the gigabytes, for tensors below 1 GiB. (All shapes
had been looked at before the limits were set, so these figures are a little kind.) The peaks of 71 fp32 steps of the
measured networks come out within 1.5 %. Known misses: channels that are rare (224, 480, 160 made 80, 320 made 160), wide
layers of 60 x 60, filters of 1 x 7, 5 x 5 filters backwards, and one-pixel filters of 320 channels and more, which take
copies or even transforms backwards. Tensors of gigabytes have ways of their own.

Other versions and cards choose otherwise. If the memory for a way is not there, torch takes the next in cuDNN's list. So
the whole transform is a cause of its own, which a plan counts where there is room and never needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

__all__ = ["backward_bytes", "forward_bytes", "transform_bytes"]

_LEAST_BYTES = 16  # of channels that kernels take at once; fewer are filled up: to 8 in 16 bits, to 4 in fp32
_SUMS_PER_IMAGE = 400  # numbers of a one-pixel filter per position: up to here 16-bit gradients are summed by image
# fp32 gradients are computed channels-last where the filter has many numbers: of one pixel, per position; else in all.
_WIDE, _MANY = 1000, 400_000
_SMALL_IMAGE = 64  # positions; 7 x 7 and 8 x 8 are below, 13 x 13 is not
_FIRST_LAYER = 4  # the largest filter that has kernels for an image of few channels


_ANY = 1 << 40
_LARGEST = 140 << 30  # bytes that no way takes: about all that an H200 has
_DIVIDED = 1 << 31  # numbers of a tensor: above, the batch is transformed in parts


@dataclass(frozen=True)
class _Range:
    """Shapes that take a transform; every pair is the least and the most."""

    inside: tuple[int, int]  # channels
    outside: tuple[int, int]
    side: tuple[int, int]  # of the image; 14, 30 and 254 are the largest that are padded to 16, 32 and 256
    positions: tuple[int, int]  # of all results of the batch
    batch: int = 1  # the least


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
_WIDE_5 = 512  # channels from which 5 x 5 filters take the whole transform where 3 x 3 ones do

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
    def side(self) -> int:
        return max(self.image)

    @property
    def at_once(self) -> int:
        """Images that the transforms take at once."""
        largest = max(self.inside * prod(self.image), self.outside * prod(self.result))
        return min(self.batch, _DIVIDED // largest) or 1

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


def forward_bytes(args: Any, out: Tensor, *, tf32: bool = False) -> int:
    """Taken by `aten.convolution` beside its result; `tf32` where fp32 tensors may be multiplied in TF32."""
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
    """The part of `forward_bytes` that is taken only where there is room; None for formats that have no such part."""
    x, weight = args[0], args[1]
    if x.element_size() != 4 or x.dim() < 3 or not x.numel():
        return None
    conv = _described(x, weight, out, stride=args[3], transposed=args[6], groups=args[8])
    return 0 if conv.depthwise or _channels_last(x, weight) else _whole_transform(conv)


def backward_bytes(args: Any, bias_bytes: int, *, tf32: bool = False) -> int:
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
    if conv.square not in {3, 5} or (conv.square == 5 and min(conv.inside, conv.outside) < _WIDE_5):
        return 0
    if not any(_within(seen, conv) for seen in _WHOLE):
        return 0
    pairs = max(conv.inside * (conv.outside + conv.at_once), conv.outside * conv.at_once)
    taken = 2 * pairs * _spectrum(_power_of_two(conv.side + conv.square - 1)) + conv.w_bytes
    return taken if taken <= _LARGEST else 0


def _within(seen: _Range, conv: _Conv) -> bool:
    limits = (seen.inside, seen.outside, seen.side, seen.positions, (seen.batch, _ANY))
    found = (conv.inside, conv.outside, conv.side, conv.batch * prod(conv.result), conv.batch)
    return all(least <= number <= most for (least, most), number in zip(limits, found, strict=True))


def _backward_32(conv: _Conv, *, last: bool) -> tuple[int, int]:
    copies = _layout_copies(conv)
    base = copies if last else 0
    if conv.square in _WINOGRAD and min(conv.inside, conv.outside) >= 8:
        return base + _tiled_transform(conv), base + _winograd(conv)
    numbers = conv.w_bytes // conv.element
    wide = numbers > (_WIDE * conv.positions if conv.one_pixel else _MANY)
    deep = len(conv.window) == 3
    return (copies, copies) if last or (conv.groups == 1 and conv.positions > 1 and (wide or deep)) else (0, 0)


def _tiled_transform(conv: _Conv) -> int:
    """Backwards, for the gradient of the input: spectra of tiles, where they are taken.

    Fewer channels take it as well, but then the filter's gradient takes more.
    """
    odd = conv.outside > 128 and conv.outside % 64
    if conv.square != 3 or odd or not any(_within(seen, conv) for seen in _TILED):
        return 0
    tiles = 1 if conv.side + 2 <= _TILE else 2
    pairs = conv.inside * conv.outside + tiles * conv.at_once * (conv.inside + conv.outside)
    return pairs * _spectrum(_TILE)


_WINOGRAD = {
    3: (4, 6),
    5: (9, 13),
}  # side of the filter -> sides of a tile of results and of the tile it is computed from


def _winograd(conv: _Conv) -> int:
    """Backwards, for the gradient of the filter: transformed tiles of input, result and filter, where they are taken."""
    few, many = sorted((conv.inside, conv.outside))
    narrow = many <= 96 and (conv.inside < 64 or conv.outside < 48)
    # 192 channels made 96 or 384 have a kernel of their own, as in a U-Net of width 96.
    own = conv.inside == 192 and conv.outside in {96, 384}
    if (few < 32 and many < 64) or (narrow and conv.side >= 56) or (own and conv.side >= 32):
        return 0
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
