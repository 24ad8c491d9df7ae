"""The rules for scratch memory against single operations measured on an H200."""

import json
from pathlib import Path

import pytest
import torch

from halfstep.planning.fakes import new_mode
from halfstep.planning.workspaces import scratch_bytes

PARTS = json.loads(
    (Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "plan_parts_h200_2026-11-15.json").read_text()
)
MIB = 1 << 20
aten = torch.ops.aten


def convolution(dtype, shape, weight, stride=1, padding=1):
    """Scratch of a convolution, forwards and backwards."""
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


CASES = [
    ("bf16 3x3 unet 16", (16, 64, 256, 256), (64, 64, 3, 3), 1),
    ("bf16 3x3 unet128 16", (16, 128, 256, 256), (64, 128, 3, 3), 1),
    ("bf16 3x3s2 128", (64, 128, 56, 56), (128, 128, 3, 3), 2),
    ("bf16 3x3 512", (64, 512, 7, 7), (512, 512, 3, 3), 1),
    ("fp32 3x3 unet 16", (16, 64, 256, 256), (64, 64, 3, 3), 1),
    ("fp32 3x3 unet128 4", (4, 128, 256, 256), (64, 128, 3, 3), 1),
    ("fp32 3x3 256", (64, 256, 14, 14), (256, 256, 3, 3), 1),
    ("fp32 3x3 512", (64, 512, 7, 7), (512, 512, 3, 3), 1),
]


@pytest.mark.parametrize(("name", "shape", "weight", "stride"), CASES, ids=[c[0] for c in CASES])
def test_convolution_scratch_is_as_measured(name, shape, weight, stride):
    """What a convolution takes beyond its results is within 5 MiB or 8 % of the measurement, both ways."""
    seen = PARTS[f"conv {name}"]
    dtype = torch.bfloat16 if name.startswith("bf16") else torch.float32
    forward, backward = convolution(dtype, shape, weight, stride)
    size = torch.finfo(dtype).bits // 8
    results = size * (torch.Size(shape).numel() + torch.Size(weight).numel())
    assert forward == pytest.approx(seen["forward_peak"] - seen["out"], rel=0.08, abs=5 * MIB)
    assert backward == pytest.approx(seen["backward_peak"] - results, rel=0.08, abs=5 * MIB)


def test_bias_gradient_takes_132_mib():
    """The sum behind the bias gradient of a wide linear layer takes 132 MiB of partial sums, as measured."""
    seen = PARTS["linear bf16"]
    with new_mode():
        grad = torch.empty(64 * 197, 4096, dtype=torch.bfloat16)
        args = (grad, [0], True)
        found = scratch_bytes(aten.sum.dim_IntList, args, {}, aten.sum.dim_IntList(*args))
    results = 2 * 64 * 197 * 1024 + seen["note"]["weights"]
    assert found == 132 * MIB
    assert seen["backward_peak"] - results == pytest.approx(found, abs=MIB // 2)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_attention_backward_is_as_measured(dtype):
    """Attention's backward pass takes an fp32 copy of q's gradient and a number or two per row."""
    seen = PARTS[f"attention {dtype} 4,12,1024,64 plain"]
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    with new_mode():
        q = torch.empty(4, 12, 1024, 64, dtype=kind)
    size = 4 * 12 * 1024 * 64 * (torch.finfo(kind).bits // 8)
    operation = aten._scaled_dot_product_flash_attention_backward.default
    found = scratch_bytes(operation, (q, q), {}, None)
    assert found == pytest.approx(seen["backward_peak"] - 3 * size, rel=0.03)


def test_operations_without_a_rule_take_nothing():
    """Where nothing is known, nothing is invented."""
    assert scratch_bytes(aten.add.Tensor, (), {}, None) is None
