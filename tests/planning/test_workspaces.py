"""The rules for scratch memory, compared with single operations measured on an H200 (benchmarks/bench_plan_parts.py)."""

import pytest
import torch

from halfstep.planning.fakes import new_mode
from halfstep.planning.workspaces import scratch_bytes

MIB = 1 << 20
aten = torch.ops.aten


def convolution(dtype, shape, weight, stride=1, padding=1):
    """Scratch memory of a convolution, forward and backward."""
    with new_mode():
        x, w = torch.empty(shape, dtype=dtype), torch.empty(weight, dtype=dtype)
        common = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
        args = (x, w, None, *common)
        out = aten.convolution.default(*args)
        back = (out, x, w, None, *common, [True, True, False])
        grads = aten.convolution_backward.default(*back)
        return scratch_bytes(aten.convolution.default, args, {}, out), scratch_bytes(
            aten.convolution_backward.default, back, {}, grads
        )


# Dtype, input, filter, stride; measured bytes of the output, at the peak of the forward pass and of the backward pass.
BF16, FP32 = torch.bfloat16, torch.float32
CASES = {
    "bf16 3x3 unet 16": (BF16, (16, 64, 256, 256), (64, 64, 3, 3), 1, 134217728, 402727059, 404718247),
    "bf16 3x3 unet128 16": (BF16, (16, 128, 256, 256), (64, 128, 3, 3), 1, 134217728, 537018515, 675218087),
    "bf16 3x3s2 128": (BF16, (64, 128, 56, 56), (128, 128, 3, 3), 2, 12845056, 77365395, 118555015),
    "bf16 3x3 512": (BF16, (64, 512, 7, 7), (512, 512, 3, 3), 1, 3211264, 14352400, 19071123),
    "fp32 3x3 unet 16": (FP32, (16, 64, 256, 256), (64, 64, 3, 3), 1, 268435456, 268435456, 1477132288),
    "fp32 3x3 unet128 4": (FP32, (4, 128, 256, 256), (64, 128, 3, 3), 1, 67108864, 67108864, 588677120),
    "fp32 3x3 256": (FP32, (64, 256, 14, 14), (256, 256, 3, 3), 1, 12845056, 203948032, 100139008),
    "fp32 3x3 512": (FP32, (64, 512, 7, 7), (512, 512, 3, 3), 1, 6422528, 6422528, 91357184),
}


@pytest.mark.parametrize(
    ("dtype", "shape", "weight", "stride", "out", "forward_peak", "backward_peak"), CASES.values(), ids=CASES
)
def test_convolution_scratch_is_as_measured(dtype, shape, weight, stride, out, forward_peak, backward_peak):
    """The scratch memory of a convolution is within 5 MiB or 8 % of the measurement, forward and backward."""
    forward, backward = convolution(dtype, shape, weight, stride)
    size = torch.finfo(dtype).bits // 8
    results = size * (torch.Size(shape).numel() + torch.Size(weight).numel())
    assert forward == pytest.approx(forward_peak - out, rel=0.08, abs=5 * MIB)
    assert backward == pytest.approx(backward_peak - results, rel=0.08, abs=5 * MIB)


def test_bias_gradient_needs_132_mib():
    """The sum for the bias gradient of a wide linear layer needs 132 MiB of partial sums, as measured."""
    with new_mode():
        grad = torch.empty(64 * 197, 4096, dtype=torch.bfloat16)
        args = (grad, [0], True)
        scratch = scratch_bytes(aten.sum.dim_IntList, args, {}, aten.sum.dim_IntList(*args))
    results = 2 * 64 * 197 * 1024 + 2 * (1024 * 4096 + 4096)  # gradients of the input and of the weights
    assert scratch == 132 * MIB
    assert 172630144 - results == pytest.approx(scratch, abs=MIB // 2)


@pytest.mark.parametrize(("dtype", "backward_peak"), [(BF16, 31654144), (FP32, 50724864)])
def test_attention_backward_is_as_measured(dtype, backward_peak):
    """The backward pass of attention needs an fp32 copy of q's gradient and one or two values per row."""
    with new_mode():
        q = torch.empty(4, 12, 1024, 64, dtype=dtype)
    size = 4 * 12 * 1024 * 64 * (torch.finfo(dtype).bits // 8)
    operation = aten._scaled_dot_product_flash_attention_backward.default
    scratch = scratch_bytes(operation, (q, q), {}, None)
    assert scratch == pytest.approx(backward_peak - 3 * size, rel=0.03)


@pytest.mark.parametrize(("grad", "result", "element"), [(BF16, BF16, 2), (FP32, FP32, 4), (BF16, FP32, 4)])
def test_softmax_backward_needs_a_product_of_its_size(grad, result, element):
    """CUDA multiplies the gradient with the result before its kernel: 150 MiB in the attention of timm's NesT, batch 64."""
    with new_mode():
        args = (torch.empty(3, 5, dtype=grad), torch.empty(3, 5, dtype=result), -1, result)
    assert scratch_bytes(aten._softmax_backward_data.default, args, {}, None) == 3 * 5 * element


def test_operations_without_a_rule_have_no_scratch():
    """No scratch memory is invented for an operation that no rule covers."""
    assert scratch_bytes(aten.add.Tensor, (), {}, None) is None
