"""Workspaces of convolutions, compared with single ones measured on an H200 (cuDNN 9.19) or queried from cuDNN there."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.planning.fakes import new_mode
from halfstep.planning.workspaces import scratch_bytes

MIB = 1 << 20
# fp32 rows of benchmarks/ask_cudnn.py, in TF32 or held out when the rules were fitted; -1 bytes: no engine.
QUERIED = dict(np.load(Path(__file__).parent / "records" / "cudnn_h200.npz"))
aten = torch.ops.aten
FP32, BF16 = torch.float32, torch.bfloat16


def queried(column):
    """The rows whose flag `column` is set: batch, channels in and out, image, filter, stride and bytes forward."""
    names = ("n", "c", "k", "image", "side", "stride", "forward")
    return zip(*(QUERIED[name][QUERIED[column]].tolist() for name in names), strict=True)


def workspaces(dtype, shape, weight, **options):
    """Workspaces of a convolution, forward and backward, in bytes."""
    last, stride, groups = options.get("last", False), options.get("stride", 1), options.get("groups", 1)
    flat = len(shape) - 2
    transposed, bias = options.get("transposed", False), options.get("bias", False)
    padding = options.get("padding", weight[-1] // 2)
    form = torch.channels_last if last else torch.contiguous_format
    tf32 = options.get("tf32", False)
    with new_mode():
        x = torch.empty(shape, dtype=dtype).contiguous(memory_format=form)
        w = torch.empty(weight, dtype=dtype).contiguous(memory_format=form)
        common = ([stride] * flat, [padding] * flat, [1] * flat, transposed, [0] * flat, groups)
        args = (x, w, None, *common)
        out = aten.convolution.default(*args)
        grad = out
        if options.get("sliced"):
            grad = torch.empty(out.shape[0], 2 * out.shape[1], *out.shape[2:], dtype=dtype)[:, : out.shape[1]]
        back = (grad, x, w, None, *common, [not options.get("first", False), True, bias])
        return (
            scratch_bytes(aten.convolution.default, args, {}, out, tf32=tf32),
            scratch_bytes(aten.convolution_backward.default, back, {}, None, tf32=tf32),
        )


# Forward in fp32: whole images of 256 channels are transformed at batch 12, not at 8, and not at 128 either.
WHOLE = [
    ((8, 256, 64, 64), (256, 256, 3, 3), 0),
    ((12, 256, 64, 64), (256, 256, 3, 3), 8712.25),
    ((16, 256, 64, 64), (256, 256, 3, 3), 8842.25),
    ((16, 256, 56, 56), (256, 256, 3, 3), 2246.25),
    ((32, 512, 32, 32), (512, 512, 3, 3), 8985),
    ((16, 512, 32, 32), (512, 512, 3, 3), 0),
    ((12, 192, 128, 128), (192, 192, 3, 3), 19738.266),
    ((64, 256, 14, 14), (256, 256, 3, 3), 182.25),
    ((128, 512, 7, 7), (512, 512, 3, 3), 729),
    ((64, 512, 28, 28), (512, 512, 3, 3), 2457),
    ((8, 384, 64, 64), (384, 384, 3, 3), 0),
    ((16, 64, 256, 256), (64, 64, 3, 3), 0),
    ((128, 256, 64, 64), (256, 256, 3, 3), 0),
    ((1, 768, 32, 32), (768, 768, 3, 3), 19053),
    ((2, 768, 32, 32), (768, 768, 3, 3), 0),
    ((1, 384, 32, 32), (768, 384, 3, 3), 9526.5),
    ((8, 64, 64, 64), (128, 64, 3, 3), 1105.281),
    ((4, 64, 64, 64), (128, 64, 3, 3), 0),
    ((16, 160, 7, 7), (320, 160, 3, 3), 119.883),
    ((64, 256, 28, 28), (256, 256, 3, 3), 682.25),
    ((40, 160, 64, 64), (160, 160, 3, 3), 4063.379),
    ((128, 512, 28, 28), (512, 512, 5, 5), 2745),
]


@pytest.mark.parametrize(("shape", "weight", "mib"), WHOLE)
def test_spectra_of_whole_images_are_as_measured(shape, weight, mib):
    """The forward workspace in fp32 is the measured one: spectra of input, filter and output, or nothing."""
    assert workspaces(FP32, shape, weight)[0] == pytest.approx(mib * MIB, abs=1024)


# Backward in fp32: Winograd tiles (also of 13 x 13), the tiled transform, copies, and nothing.
BACKWARD = [
    ((16, 64, 256, 256), (64, 64, 3, 3), {}, 1152.562),
    ((128, 128, 112, 112), (128, 128, 3, 3), {}, 3530.25),
    ((64, 64, 27, 27), (192, 64, 5, 5), {}, 102.984),
    ((8, 512, 32, 32), (512, 512, 3, 3), {}, 1147),
    ((2, 512, 64, 64), (256, 512, 3, 3), {}, 552.25),
    ((64, 256, 28, 28), (256, 256, 3, 3), {}, 405.75),
    ((64, 512, 28, 28), (512, 512, 3, 3), {"stride": 2}, 131.5),
    ((64, 128, 56, 56), (128, 128, 3, 3), {"stride": 2}, 0),
    ((64, 256, 56, 56), (64, 256, 1, 1), {}, 0),
    ((16, 128, 28, 28), (128, 128, 3, 3), {}, 84.4375),
    ((128, 448, 8, 8), (384, 448, 3, 3), {}, 1150.094),
    ((4, 192, 256, 256), (96, 192, 3, 3), {}, 0),
    ((64, 256, 28, 28), (256, 256, 3, 3), {"stride": 2}, 63.5),
]


@pytest.mark.parametrize(("shape", "weight", "options", "mib"), BACKWARD)
def test_fp32_gradients_are_as_measured(shape, weight, options, mib):
    """The backward workspace in fp32 is the measured one."""
    assert workspaces(FP32, shape, weight, **options)[1] == pytest.approx(mib * MIB, abs=1024)


SIXTEEN = [
    ((16, 64, 256, 256), (64, 64, 3, 3), {}, 256.07, 256.07),
    ((256, 3, 224, 224), (64, 3, 7, 7), {"stride": 2, "first": True}, 588.05, 588.05),
    ((64, 3, 224, 224), (64, 3, 3, 3), {"first": True}, 0, 441.01),
    ((64, 320, 7, 7), (1280, 320, 1, 1), {}, 9.57, 100),
    ((128, 320, 7, 7), (1280, 320, 1, 1), {}, 19.14, 19.14),
    ((64, 512, 28, 28), (128, 512, 1, 1), {}, 0, 16),
    ((32, 256, 56, 56), (512, 256, 1, 1), {"stride": 2, "padding": 0}, 73.5, 73.5),
    ((64, 888, 7, 7), (888, 24, 3, 3), {"groups": 37}, 14.814, 14.814),
    ((64, 64, 56, 56), (64, 64, 3, 3), {"last": True}, 0, 0),
    ((128, 3, 224, 224), (64, 3, 7, 7), {"stride": 2, "last": True, "first": True}, 98, 98),
    ((64, 1152, 7, 7), (1152, 1, 3, 3), {"groups": 1152}, 0, 0),
]


@pytest.mark.parametrize(("shape", "weight", "options", "forward", "backward"), SIXTEEN)
def test_16_bit_convolutions_are_as_measured(shape, weight, options, forward, backward):
    """In 16 bits the workspace is copies, sums per image or nothing, within 1 % or 0.1 MiB of the measurement."""
    predicted_forward, predicted_backward = workspaces(BF16, shape, weight, **options)
    assert predicted_forward == pytest.approx(forward * MIB, rel=0.01, abs=MIB // 10)
    assert predicted_backward == pytest.approx(backward * MIB, rel=0.01, abs=MIB // 10)


@pytest.mark.parametrize(("dtype", "forward", "backward"), [(FP32, 0, 0), (BF16, 32.375, 32.375)])
def test_one_dimension_is_as_measured(dtype, forward, backward):
    """A convolution over sequences has no workspace in fp32 and copies in 16 bits."""
    predicted = workspaces(dtype, (16, 256, 2048), (256, 256, 3))
    assert predicted == (pytest.approx(forward * MIB), pytest.approx(backward * MIB))


@pytest.mark.parametrize(("dtype", "forward", "backward"), [(FP32, 0, 64), (BF16, 32.05, 32.05)])
def test_three_dimensions_are_as_measured(dtype, forward, backward):
    """A convolution over volumes makes copies, in fp32 only backward."""
    predicted = workspaces(dtype, (8, 32, 32, 32, 32), (32, 32, 3, 3, 3))
    assert predicted == (pytest.approx(forward * MIB, rel=0.01), pytest.approx(backward * MIB, rel=0.01))


def test_channels_last_fp32_is_copied():
    """fp32 tensors that are channels-last are made contiguous first, then treated like any other."""
    plain = workspaces(FP32, (4, 64, 256, 256), (64, 64, 3, 3))
    last = workspaces(FP32, (4, 64, 256, 256), (64, 64, 3, 3), last=True)
    assert last[0] - plain[0] == pytest.approx(128.14 * MIB, abs=1024 * 64)
    assert last[1] - plain[1] == pytest.approx(128.14 * MIB, abs=1024 * 64)


def test_slice_of_a_concatenation_is_copied():
    """A gradient that is a slice of another one is made contiguous: its size is added, as in DenseNet."""
    shape, weight = (128, 128, 56, 56), (32, 128, 3, 3)
    whole, sliced = workspaces(FP32, shape, weight)[1], workspaces(FP32, shape, weight, sliced=True)[1]
    assert sliced - whole == 49 * MIB
    assert sliced == pytest.approx(600.812 * MIB, abs=1024)


def test_transposed_convolution_uses_no_transform():
    """The transposed convolutions of a U-Net have no workspace in fp32 and copies in 16 bits."""
    shape, weight = (16, 128, 128, 128), (128, 64, 2, 2)
    options = {"stride": 2, "padding": 0, "transposed": True}
    assert workspaces(FP32, shape, weight, **options) == (0, 0)
    assert workspaces(BF16, shape, weight, **options)[0] == pytest.approx(192.06 * MIB, rel=0.001)


def test_few_channels_of_large_images_use_no_winograd():
    """The gradient of a filter of 32 channels needs next to nothing, where tiles would need 864 MiB."""
    assert workspaces(FP32, (16, 32, 256, 256), (32, 32, 3, 3))[1] < 16 * MIB


def test_large_batch_is_transformed_in_parts():
    """Of tensors with more than 2^31 elements, only as many images are transformed at once as stay below."""
    assert workspaces(FP32, (256, 960, 112, 112), (960, 960, 3, 3))[0] == 145464115200


def test_workspace_larger_than_any_gpu_is_not_counted():
    """cuDNN's first choice of 153 GiB is not counted, because torch cannot allocate it either."""
    assert workspaces(FP32, (96, 512, 128, 128), (512, 512, 3, 3))[0] == 0


def test_tf32_uses_copies_and_no_transforms():
    """In TF32 a convolution copies its tensors where fp32 needs gigabytes, within 3 % of the sum that cuDNN reports."""
    shape, weight = (16, 256, 64, 64), (256, 256, 3, 3)
    own = 4 * (2 * 16 * 256 * 64 * 64 + 256 * 256 * 9)
    assert workspaces(FP32, shape, weight, tf32=True) == (own, own)
    predicted = reported = count = 0
    for n, c, k, image, side, stride, forward in queried("tf32"):
        if side == 3 and stride == 1 and n * max(c, k) * image**2 < 1 << 30:
            predicted += workspaces(FP32, (n, c, image, image), (k, c, 3, 3), tf32=True)[0]
            reported += forward
            count += 1
    assert count == 608
    assert predicted == pytest.approx(reported, rel=0.03)


def test_choice_is_right_for_held_out_shapes():
    """For shapes that no rule was fitted to, 95 % of the choices and 95 % of the bytes agree with cuDNN."""
    right = wrong_bytes = all_bytes = count = 0
    for n, c, k, image, side, _, forward in queried("held_out"):
        realistic = min(c, k) >= 32 and max(c, k) <= 1024 and image <= 256 and n <= 128
        if not realistic or forward < 0 or forward > 140 << 30:
            continue
        predicted = workspaces(FP32, (n, c, image, image), (k, c, side, side))[0]
        right += (predicted > 0) == (forward > 0)
        wrong_bytes += abs(predicted - forward)
        all_bytes += forward
        count += 1
    assert count == 1238
    assert right >= 0.95 * count
    assert wrong_bytes <= 0.05 * all_bytes


SHAPES = {
    "batch": st.sampled_from((1, 4, 16, 64)),
    "channels": st.sampled_from((3, 8, 64, 192, 256, 512, 768)),
    "size": st.sampled_from((7, 14, 28, 64, 130)),
    "side": st.sampled_from((1, 3, 5)),
}


@given(**SHAPES, dtype=st.sampled_from((FP32, BF16, torch.float64)))
def test_workspace_never_shrinks_with_the_batch(batch, channels, size, side, dtype):
    """Doubling the batch never needs less, except for forward transforms and 16-bit sums per image, which come and go."""
    weight = (channels, channels, side, side)
    small = workspaces(dtype, (batch, channels, size, size), weight)
    large = workspaces(dtype, (2 * batch, channels, size, size), weight)
    if dtype is BF16:
        assert large[0] >= small[0] >= 0
    if not (dtype is BF16 and side == 1 and size == 7):
        assert large[1] >= small[1] >= 0


@given(**SHAPES)
def test_fp32_forward_needs_nothing_or_whole_spectra(batch, channels, size, side):
    """The forward workspace in fp32 is 0, or larger than input, filter and output together."""
    shape, weight = (batch, channels, size, size), (channels, channels, side, side)
    predicted = workspaces(FP32, shape, weight)[0]
    tensors = 4 * (2 * batch * channels * size * size + channels * channels * side * side)
    assert predicted == 0 or predicted > tensors


def test_empty_batch_needs_nothing():
    """A convolution of no examples has no workspace."""
    assert workspaces(FP32, (0, 64, 8, 8), (64, 64, 3, 3)) == (0, 0)
