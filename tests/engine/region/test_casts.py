"""The rule of lean regions: 16 bits in and out where the result is as large as the input, fp32 where it reduces."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.engine.region import compute_region, recomputing
from halfstep.precision.formats import COMPUTE_DTYPES

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
every_compute = pytest.mark.parametrize("compute", ["bf16", "fp16"])

# Operations on a 16-bit matrix h of 4 x 8 and a 16-bit vector v of 8.
AS_LARGE = {
    "layer_norm": "F.layer_norm(h, (8,), v, v)",
    "layer_norm without weights": "F.layer_norm(h, (8,))",
    "native_layer_norm": "torch.native_layer_norm(h, (8,), v, v, 1e-5)[0]",
    "group_norm": "F.group_norm(h, 2, v, v)",
    "rms_norm": "F.rms_norm(h, (8,), v)",
    "softmax": "h.softmax(-1)",
    "softmin": "F.softmin(h, -1)",
    "log": "h.abs().log()",
    "log1p": "h.abs().log1p()",
    "rsqrt": "(h.abs() + 1).rsqrt()",
    "softplus": "F.softplus(h)",
    "gelu": "F.gelu(h)",
    "silu": "F.silu(h)",
    "upsampling": "F.interpolate(h[None], scale_factor=2.0)",
    "cube": "h**3",
    "mean over a dimension": "h.mean(-1)",
}
BEYOND_FP16 = {
    "exp": "h.exp()",
    "expm1": "h.expm1()",
    "square": "h**2",
    "power of a number": "2**h",
    "fourth power": "h**4",
    "reciprocal": "h.reciprocal()",
    "sinh": "h.sinh()",
}
REDUCED = {
    "sum": "h.sum()",
    "sum over a dimension": "h.sum(dim=1)",
    "norm": "h.norm()",
    "norm over a dimension": "h.norm(dim=-1)",
    "vector_norm": "torch.linalg.vector_norm(h)",
    "prod": "h.prod()",
    "mean": "h.mean()",
    "mean of squares": "(h - 1).square().mean()",
    "logsumexp": "h.logsumexp(-1, keepdim=True)",
    "cosine_similarity": "F.cosine_similarity(h, h)",
    "log_softmax": "F.log_softmax(h, -1)",
    "cumsum": "h.cumsum(0)",
    "cross_entropy": "F.cross_entropy(h, torch.zeros(4, dtype=torch.long))",
    "mse_loss": "F.mse_loss(h, torch.zeros_like(h))",
    "binary_cross_entropy_with_logits": "F.binary_cross_entropy_with_logits(h, torch.ones_like(h))",
}
FACTORS = {
    "sum": "h.abs().sum(-1, keepdim=True)",
    "sum by position": "h.abs().sum(-1, True)",
    "norm": "h.norm(dim=-1, keepdim=True)",
    "vector_norm": "torch.linalg.vector_norm(h, dim=-1, keepdim=True)",
    "normalize": "F.normalize(h, dim=-1)",
    "quotient": "h / h.abs().sum(-1, keepdim=True)",
    "quotient of a sum that got its dimension back": "h / h.abs().sum(-1).unsqueeze(-1)",
    "the same by indexing": "h / h.abs().sum(dim=-1)[:, None]",
}


def names(compute):
    generator = torch.Generator().manual_seed(0)
    dtype = COMPUTE_DTYPES[compute]
    h, v = torch.randn(4, 8, generator=generator).to(dtype), torch.randn(8, generator=generator).to(dtype)
    return {"h": h, "v": v, "F": F, "torch": torch}


def run_lean(code, compute):
    scope = names(compute)
    with compute_region("cpu", compute, lean=True):
        result = eval(code, scope)
    wide = scope | {"h": scope["h"].float(), "v": scope["v"].float()}
    return result, eval(code, wide)


def rounded_once(result, exact):
    """Whether a 16-bit result is the exact one after a single rounding, or next to it."""
    return torch.allclose(result.float(), exact, rtol=1.01 * torch.finfo(result.dtype).eps, atol=1e-7)


@every_compute
@pytest.mark.parametrize("code", AS_LARGE.values(), ids=AS_LARGE)
def test_what_is_as_large_as_its_input_gives_16_bits_with_fp32_inside(compute, code):
    """The result has the input's dtype, and is the fp32 result rounded once."""
    result, exact = run_lean(code, compute)
    assert result.dtype is COMPUTE_DTYPES[compute]
    if code != AS_LARGE["cube"]:  # torch's own kernel multiplies twice
        assert rounded_once(result, exact)


@every_compute
@pytest.mark.parametrize("code", BEYOND_FP16.values(), ids=BEYOND_FP16)
def test_fp16_keeps_fp32_results_where_its_range_needs_them(compute, code):
    """Exponentials and powers pass 65504 where their input did not; bf16 has fp32's range."""
    result, exact = run_lean(code, compute)
    if compute == "fp16":
        assert result.dtype is FP32
        assert torch.allclose(result, exact, rtol=1e-6)
    else:
        assert result.dtype is BF16
        assert rounded_once(result, exact)


@every_compute
@pytest.mark.parametrize("code", REDUCED.values(), ids=REDUCED)
def test_reductions_and_losses_give_fp32(compute, code):
    """What reduces gives what fp32 gives on the same inputs, in fp32."""
    result, exact = run_lean(code, compute)
    assert result.dtype is FP32
    rounded = torch.finfo(COMPUTE_DTYPES[compute]).eps if "square" in code else 1e-5  # before the reduction
    assert torch.allclose(result, exact, rtol=rounded, atol=1e-6)


@every_compute
@pytest.mark.parametrize("code", FACTORS.values(), ids=FACTORS)
def test_a_reduction_that_keeps_its_dimension_does_not_leak_fp32(compute, code):
    """Such a result scales its input: it follows the input's dtype, except for sums in fp16, whose range needs fp32."""
    result, exact = run_lean(code, compute)
    assert result.dtype is (FP32 if compute == "fp16" and "sum" in code else COMPUTE_DTYPES[compute])
    assert torch.allclose(result.float(), exact, rtol=2**-7, atol=1e-6)


def test_a_quotient_in_place_has_a_16_bit_gradient_path():
    """`x /= x.sum(-1).unsqueeze(-1)` is the division of a pure model: autograd sees no fp32 tensor of the size of x."""
    h = names("bf16")["h"].requires_grad_()
    sizes = []
    with compute_region("cpu", "bf16", lean=True):
        x = h.abs()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append((t.dtype, t.numel())) or t, lambda t: t):
            x /= x.sum(-1).unsqueeze(-1)
    x.sum().backward()
    assert x.dtype is BF16
    assert (FP32, h.numel()) not in sizes
    assert h.grad.isfinite().all()


def test_a_quotient_of_two_tensors_of_one_size_is_promoted():
    """An fp32 divisor of the size of the dividend, one number, and an fp32 dividend are torch's own."""
    h = names("bf16")["h"]
    with compute_region("cpu", "bf16", lean=True):
        assert (h / h.float()).dtype is FP32
        assert (h / torch.tensor(3.0)).dtype is BF16
        assert (h / 3).dtype is BF16
        assert (h.float() / h.abs().sum(-1)[:, None]).dtype is FP32
    with compute_region("cpu", "bf16"):
        assert (h / torch.ones(4, 1)).dtype is FP32


@every_compute
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("layer", [nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)], ids=repr)
def test_a_norm_of_mixed_dtypes_gives_16_bits(compute, layer, dtype):
    """fp32 inputs of 16-bit weights and 16-bit inputs of fp32 weights compute in fp32 and give 16 bits."""
    half = COMPUTE_DTYPES[compute]
    scope = names(compute)
    for x, weights in ((scope["h"].float(), half), (scope["h"], dtype)):
        norm = type(layer)(*((2, 8) if isinstance(layer, nn.GroupNorm) else (8,))).to(weights)
        with compute_region("cpu", compute, lean=True):
            result = norm(x)
        assert result.dtype is half
        assert torch.allclose(result.float(), norm.float()(x.float()), rtol=2 * torch.finfo(half).eps, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_a_cube_in_fp16_has_the_gradient_of_tanh_gelu_at_any_size(scale):
    """x ** 3 overflows at 40, where the tanh of it is 1; value and gradient of GELU stay right, and finite."""
    x = (scale * torch.linspace(-1, 1, 41)).to(FP16).requires_grad_()
    with compute_region("cpu", "fp16", lean=True):
        y = 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))
    assert y.dtype is FP16
    y.sum().backward()
    wide = x.detach().double().requires_grad_()
    exact = F.gelu(wide, approximate="tanh")
    exact.sum().backward()
    assert torch.allclose(y.double(), exact, rtol=4e-3, atol=4e-3)
    assert torch.allclose(x.grad.double(), wide.grad, rtol=1e-2, atol=1e-2)


def test_a_cube_in_fp16_can_be_differentiated_twice_and_mapped():
    """Gradient penalties and torch.func work as with torch's own power."""
    x = torch.tensor([0.5, -2.0], dtype=FP16, requires_grad=True)
    with compute_region("cpu", "fp16", lean=True):
        y = x**3
        mapped = torch.func.vmap(lambda row: row**3)(x.detach())
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.equal(grad, 3 * x.detach() ** 2)
    assert torch.equal(second, 6 * x.detach())
    assert torch.equal(mapped, y)


@pytest.mark.parametrize("activation", [torch.relu, F.relu, nn.ReLU(inplace=True)], ids=["relu", "F.relu", "in place"])
def test_the_square_of_a_relu_in_fp16_is_fp16_and_other_squares_are_not(activation):
    """An activation as wide as the network is as in a pure fp16 model; a variance stays finite."""
    x = torch.linspace(-3, 300, 9, dtype=FP16).requires_grad_()
    with compute_region("cpu", "fp16", lean=True):
        y = activation(x * 0.5) ** 2
        variance = x.pow(2).mean(-1, keepdim=True)
    assert (y.dtype, variance.dtype) == (FP16, FP32)
    assert variance.isfinite()
    y.sum().backward()
    wide = x.detach().double().requires_grad_()
    (F.relu(wide * 0.5) ** 2).sum().backward()
    assert torch.allclose(x.grad.double(), wide.grad, rtol=4e-3)


@every_compute
def test_an_explicit_dtype_is_respected(compute):
    """A dtype that the model requests is that of the result."""
    h = names(compute)["h"]
    with compute_region("cpu", compute, lean=True):
        assert h.softmax(-1, dtype=FP32).dtype is FP32
        assert h.sum(-1, keepdim=True, dtype=FP32).dtype is FP32
        assert h.float().softmax(-1).dtype is FP32
        assert h.double().exp().dtype is torch.float64


@every_compute
def test_the_two_rules_do_not_mix(compute):
    """A lean region inside an autocast one follows its own rule, and gives way to the outer one at its end."""
    h = names(compute)["h"]
    with compute_region("cpu", compute):
        assert h.softmax(-1).dtype is FP32
        with compute_region("cpu", compute, lean=True):
            assert h.softmax(-1).dtype is h.dtype
        assert h.softmax(-1).dtype is FP32


@every_compute
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_recomputes_by_the_lean_rule(compute, reentrant):
    """The forward that runs again in backward gives the same formats as the first one."""
    dtypes = []

    def layer(x):
        y = F.layer_norm(x, (8,)).softmax(-1)
        dtypes.append(y.dtype)
        return y.sigmoid()  # saved too, so that the recomputation does not stop early

    x = names(compute)["h"].requires_grad_()
    with compute_region("cpu", compute, lean=True):
        loss = checkpoint(layer, x, use_reentrant=reentrant).sum()
    with recomputing(lean=True):
        loss.backward()
    assert dtypes == [x.dtype, x.dtype]


@every_compute
def test_a_region_counts_what_gave_16_bits(compute):
    """Operations that torch.amp runs in fp32 are counted by name, so that the truth table can show them."""
    observed = Counter()
    scope = names(compute)
    with compute_region("cpu", compute, lean=True, observed=observed):
        for _ in range(2):
            F.layer_norm(scope["h"], (8,)).softmax(-1)
        scope["h"].float().softmax(-1)
        scope["h"].sum()
    with compute_region("cpu", compute, lean=True):
        scope["h"].softmax(-1)
    assert observed == {"layer_norm": 2, "softmax": 2}
