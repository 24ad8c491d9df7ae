"""What convolutions take on the side, against single convolutions measured on an H200 (cuDNN 9.19, TF32 off)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.planning.fakes import new_mode
from halfstep.planning.workspaces import scratch_bytes

MIB = 1 << 20
aten = torch.ops.aten
FP32, BF16 = torch.float32, torch.bfloat16


def taken(dtype, shape, weight, **options):
    """Scratch of a convolution, forwards and backwards, in bytes."""
    last, stride, groups = options.get("last", False), options.get("stride", 1), options.get("groups", 1)
    flat = len(shape) - 2
    transposed, bias = options.get("transposed", False), options.get("bias", False)
    padding = options.get("padding", weight[-1] // 2)
    form = torch.channels_last if last else torch.contiguous_format
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
            scratch_bytes(aten.convolution.default, args, {}, out),
            scratch_bytes(aten.convolution_backward.default, back, {}, None),
        )


# Forwards in fp32: whole images of 256 channels are transformed at batch 12 and not at 8.
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
]


@pytest.mark.parametrize(("shape", "weight", "mib"), WHOLE)
def test_spectra_of_whole_images_are_as_measured(shape, weight, mib):
    """A forward pass in fp32 takes the spectra of input, filter and result where cuDNN did, to the byte, and nothing else."""
    assert taken(FP32, shape, weight)[0] == pytest.approx(mib * MIB, abs=1024)


# Backwards in fp32: Winograd's tiles (also 13 x 13 of them), the tiled transform, copies, and nothing.
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
]


@pytest.mark.parametrize(("shape", "weight", "options", "mib"), BACKWARD)
def test_fp32_gradients_are_as_measured(shape, weight, options, mib):
    """The backward pass in fp32 takes what was measured, to the byte."""
    assert taken(FP32, shape, weight, **options)[1] == pytest.approx(mib * MIB, abs=1024)


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
    """In 16 bits a convolution takes copies, sums per image or nothing, within 1 % or 0.1 MiB of the measurement."""
    found = taken(BF16, shape, weight, **options)
    assert found[0] == pytest.approx(forward * MIB, rel=0.01, abs=MIB // 10)
    assert found[1] == pytest.approx(backward * MIB, rel=0.01, abs=MIB // 10)


@pytest.mark.parametrize(("dtype", "forward", "backward"), [(FP32, 0, 0), (BF16, 32.375, 32.375)])
def test_one_dimension_is_as_measured(dtype, forward, backward):
    """A convolution over sequences takes nothing in fp32 and copies in 16 bits."""
    found = taken(dtype, (16, 256, 2048), (256, 256, 3))
    assert found == (pytest.approx(forward * MIB), pytest.approx(backward * MIB))


@pytest.mark.parametrize(("dtype", "forward", "backward"), [(FP32, 0, 64), (BF16, 32.05, 32.05)])
def test_three_dimensions_are_as_measured(dtype, forward, backward):
    """A convolution over volumes copies, in fp32 only backwards."""
    found = taken(dtype, (8, 32, 32, 32, 32), (32, 32, 3, 3, 3))
    assert found == (pytest.approx(forward * MIB, rel=0.01), pytest.approx(backward * MIB, rel=0.01))


def test_channels_last_fp32_is_copied():
    """fp32 tensors that are channels-last are copied to the usual order first, then treated like any."""
    plain = taken(FP32, (4, 64, 256, 256), (64, 64, 3, 3))
    last = taken(FP32, (4, 64, 256, 256), (64, 64, 3, 3), last=True)
    assert last[0] - plain[0] == pytest.approx(128.14 * MIB, abs=1024 * 64)
    assert last[1] - plain[1] == pytest.approx(128.14 * MIB, abs=1024 * 64)


def test_slice_of_a_concatenation_is_copied():
    """A gradient that is a part of another one is made contiguous: its size comes on top, as in DenseNet."""
    shape, weight = (128, 128, 56, 56), (32, 128, 3, 3)
    whole, sliced = taken(FP32, shape, weight)[1], taken(FP32, shape, weight, sliced=True)[1]
    assert sliced - whole == 49 * MIB
    assert sliced == pytest.approx(600.812 * MIB, abs=1024)


def test_transposed_convolution_takes_no_transform():
    """The transposed convolutions of a U-Net take nothing in fp32 and copies in 16 bits."""
    shape, weight = (16, 128, 128, 128), (128, 64, 2, 2)
    options = {"stride": 2, "padding": 0, "transposed": True}
    assert taken(FP32, shape, weight, **options) == (0, 0)
    assert taken(BF16, shape, weight, **options)[0] == pytest.approx(192.06 * MIB, rel=0.001)


@given(
    batch=st.sampled_from((1, 4, 16, 64)),
    channels=st.sampled_from((3, 8, 64, 192, 256, 512)),
    size=st.sampled_from((7, 14, 28, 64, 130)),
    side=st.sampled_from((1, 3, 5)),
    dtype=st.sampled_from((FP32, BF16, torch.float64)),
)
def test_scratch_never_shrinks_with_the_batch(batch, channels, size, side, dtype):
    """Doubling the batch never takes less, except where 16-bit sums per image give way to copies."""
    weight = (channels, channels, side, side)
    small = taken(dtype, (batch, channels, size, size), weight)
    large = taken(dtype, (2 * batch, channels, size, size), weight)
    assert large[0] >= small[0] >= 0
    if not (dtype is BF16 and side == 1 and size == 7):
        assert large[1] >= small[1] >= 0


def test_empty_batch_takes_nothing():
    """A convolution of no examples takes no memory."""
    assert taken(FP32, (0, 64, 8, 8), (64, 64, 3, 3)) == (0, 0)
