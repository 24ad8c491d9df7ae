"""Regions: what computes in 16 bits inside them, what stays in fp32, and that nothing changes outside."""

import functools
import importlib
import itertools
import json
import shutil
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.engine.engine import Engine
from halfstep.engine.region import compute_region, operations_of, recomputing, upcast
from halfstep.engine.region.kernels import _kernels
from halfstep.precision.formats import COMPUTE_DTYPES

FP32 = torch.float32
every_compute = pytest.mark.parametrize("compute", ["bf16", "fp16"])

# Operations on a 16-bit matrix h of 4 x 8; F and torch are in scope. Evaluated here and in a process without Halfstep.
IN_FP32 = {
    "softmax": "h.softmax(-1)",
    "softmin": "F.softmin(h, -1)",
    "log_softmax": "F.log_softmax(h, -1)",
    "sum": "h.sum()",
    "sum over a dimension": "h.sum(dim=1, keepdim=True)",
    "cumsum": "h.cumsum(0)",
    "prod": "h.prod()",
    "norm": "h.norm()",
    "norm over a dimension": "h.norm(dim=-1)",
    "norm of order 1": "torch.norm(h, p=1)",
    "vector_norm": "torch.linalg.vector_norm(h)",
    "matrix_norm": "torch.linalg.matrix_norm(h)",
    "linalg.norm": "torch.linalg.norm(h)",
    "normalize": "F.normalize(h)",
    "cosine_similarity": "F.cosine_similarity(h, h)",
    "dist": "torch.dist(h, h)",
    "logsumexp": "h.logsumexp(-1)",
    "exp": "h.exp()",
    "expm1": "h.expm1()",
    "log": "h.abs().log()",
    "log1p": "h.abs().log1p()",
    "pow": "h**2",
    "pow of a number": "2**h",
    "rsqrt": "h.abs().rsqrt()",
    "reciprocal": "h.reciprocal()",
    "softplus": "F.softplus(h)",
}
LOSSES = {
    "cross_entropy": "F.cross_entropy(h, torch.zeros(4, dtype=torch.long))",
    "nll_loss": "F.nll_loss(h, torch.zeros(4, dtype=torch.long))",
    "mse_loss": "F.mse_loss(h, torch.zeros_like(h))",
    "l1_loss": "F.l1_loss(h, torch.zeros_like(h))",
    "smooth_l1_loss": "F.smooth_l1_loss(h, torch.zeros_like(h))",
    "huber_loss": "F.huber_loss(h, torch.zeros_like(h))",
    "kl_div": "F.kl_div(h, torch.ones_like(h), reduction='batchmean')",
    "binary_cross_entropy_with_logits": "F.binary_cross_entropy_with_logits(h, torch.ones_like(h))",
    "cosine_embedding_loss": "F.cosine_embedding_loss(h, h, torch.ones(4))",
    "triplet_margin_loss": "F.triplet_margin_loss(h, h.flip(0), -h)",
    "gaussian_nll_loss": "F.gaussian_nll_loss(h, torch.zeros_like(h), h.abs())",
    "poisson_nll_loss": "F.poisson_nll_loss(h, h.abs())",
}
IN_16_BITS = {
    "linear": "F.linear(x, w)",
    "matmul": "x @ w",
    "conv": "F.conv1d(x[None], w[:4, :4, None])",
    "gelu": "F.gelu(h)",
    "layer_norm": "F.layer_norm(h, (8,), torch.ones(8), torch.zeros(8))",
    "layer_norm without weights": "F.layer_norm(h, (8,))",
    "group_norm": "F.group_norm(h[..., None], 2, torch.ones(8), torch.zeros(8))",
    "rms_norm": "F.rms_norm(h, (8,))",
    "batch_norm": "F.batch_norm(h, torch.zeros(8), torch.ones(8), torch.ones(8), torch.zeros(8), True)",
    "attention": "F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None])",
}
# The same, with a 16-bit matrix p of 8 x 8 and a vector v of 8, as a lean model's weights; x is fp32, 4 x 8.
I4 = "torch.arange(4)"
ROW0 = "torch.zeros(4, 8, dtype=torch.long)"
MIXED_IN_FP32 = {
    "dot": "torch.dot(v, x[0])",
    "vdot": "torch.vdot(v, x[0])",
    "inner": "torch.inner(x, p)",
    "tensordot": "torch.tensordot(x, p, 1)",
    "bilinear": "F.bilinear(x, x, p[None], v[:1])",
    "cross": "torch.cross(x[:, :3], p[:4, :3], -1)",
    "linalg.cross": "torch.linalg.cross(x[:, :3], p[:4, :3])",
    "addcmul": "torch.addcmul(x, x, v)",
    "addcdiv": "torch.addcdiv(x, x, v.abs() + 1)",
    "atan2": "torch.atan2(x, v)",
    "lerp": "torch.lerp(x, p[:4], 0.25)",
    "lerp by a tensor": "torch.lerp(p[:4], p[4:], x)",
    "index_put": f"x.index_put(({I4},), v)",
    "index_put into a weight": f"p.index_put(({I4},), x)",
    "index_add": f"x.index_add(0, {I4}, p[:4])",
    "index_copy": f"x.index_copy(0, {I4}, p[:4])",
    "scatter": f"x.scatter(0, {ROW0}[:1], p[:4])",
    "scatter_add": f"x.scatter_add(0, {ROW0}, p[:4])",
    "scatter_reduce": f"p.scatter_reduce(0, {ROW0}, x, 'amax')",
    "masked_scatter": "x.masked_scatter(x > 0, p)",
    "put": f"x.put({I4}, v[:4])",
    "meshgrid": "torch.meshgrid(v, x[0], indexing='ij')[0]",
    "layer_norm of an fp32 input": "F.layer_norm(x, (8,), v, v)",
    "group_norm of an fp32 input": "F.group_norm(x, 2, v, v)",
    "batch_norm of an fp32 input": "F.batch_norm(x, torch.zeros(8), torch.ones(8), v, v, True)",
    "instance_norm of an fp32 input": "F.instance_norm(x[None], weight=v[:4], bias=v[:4])",
}
WITHOUT_16_BIT_KERNELS = {
    "slogdet": "torch.slogdet(p)[1]",
    "linalg.slogdet": "torch.linalg.slogdet(p)[1]",
    "det": "torch.det(p)",
    "logdet": "torch.logdet(p @ p.t() + torch.eye(8))",
    "matrix_exp": "torch.matrix_exp(p)",
    "inverse": "torch.inverse(p)",
    "pinv": "torch.linalg.pinv(p)",
    "solve": "torch.linalg.solve(p, x.t())",
    "solve_ex": "torch.linalg.solve_ex(p, x.t())[0]",
    "solve_triangular": "torch.linalg.solve_triangular(p + 8 * torch.eye(8), x.t(), upper=True)",
    "cholesky": "torch.linalg.cholesky(p @ p.t() + torch.eye(8))",
    "cholesky_solve": "torch.cholesky_solve(x.t(), p.tril() + 8 * torch.eye(8))",
    "svd": "torch.linalg.svd(p)[1]",
    "svdvals": "torch.linalg.svdvals(p)",
    "eigvalsh": "torch.linalg.eigvalsh(p)",
    "qr": "torch.linalg.qr(p)[1].abs()",
    "lu": "torch.linalg.lu(p)[2]",
    "lu_factor": "torch.linalg.lu_factor(p)[0]",
    "householder_product": "torch.linalg.householder_product(p, v)",
    "rfft": "torch.fft.rfft(p).abs()",
    "complex": "torch.complex(v, x[0]).abs()",
    "log_ndtr": "torch.special.log_ndtr(v)",
    "lgamma": "torch.lgamma(v)",
    "bessel_j0": "torch.special.bessel_j0(v)",
}
MIXED_IN_16_BITS = {
    "mv": "torch.mv(p, x[0])",
    "mv by a weight": "torch.mv(x, v)",
    "addmv": "torch.addmv(v, p, x[0])",
    "addr": "torch.addr(p, v, x[0])",
    "multi_dot": "torch.linalg.multi_dot([x, p, p])",
    "convolution": "torch.convolution(x[None], p[:4, :4, None], None, [1], [0], [1], False, [0], 1)",
    "embedding_bag": f"F.embedding_bag({I4}[None], p, per_sample_weights=x[:1, :4], mode='sum')",
    "layer_norm of mixed weights": "F.layer_norm(h, (8,), v, torch.zeros(8))",
    "batch_norm with 16-bit weights": "F.batch_norm(h, torch.zeros(8), torch.ones(8), v, v, True)",
}
IN_PLACE = {
    "index_put_": f"y.index_put_(({I4},), v)",
    "item assignment": "y.__setitem__(y[:, 0] > 0, v)",
    "index_add_": f"y.index_add_(0, {I4}, p[:4])",
    "index_copy_": f"y.index_copy_(0, {I4}, p[:4])",
    "scatter_": f"y.scatter_(0, {ROW0}[:1], p[:4])",
    "scatter_add_": f"y.scatter_add_(0, {ROW0}, p[:4])",
    "scatter_reduce_": f"y.scatter_reduce_(0, {ROW0}, p[:4], 'sum')",
    "masked_scatter_": "y.masked_scatter_(y > 0, p)",
    "put_": f"y.put_({I4}, v[:4])",
    "lerp_": "y.lerp_(p[:4], 0.25)",
    "addmm_": "y.addmm_(y, p)",
    "addr_": "y.addr_(v[:4], v)",
}
BEYOND_THE_LISTS = MIXED_IN_FP32 | WITHOUT_16_BIT_KERNELS | MIXED_IN_16_BITS


def inputs():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 8, generator=generator), torch.randn(8, 8, generator=generator)
    return {"x": x, "w": w, "F": F, "torch": torch}


def with_weights(dtype):
    """The inputs, a 16-bit matrix and a 16-bit vector; both are exact in fp16 and bf16."""
    symmetric = (
        2 * torch.eye(8) + (torch.arange(64).view(8, 8) * 5 % 7 + torch.arange(8) * torch.arange(8)[:, None] % 3) / 8
    )
    vector = torch.arange(8) / 8 + 0.5
    return inputs() | {"p": (symmetric + symmetric.t()).to(dtype), "v": vector.to(dtype)}


def run(code, compute):
    names = inputs()
    with compute_region("cpu", compute):
        names["h"] = F.linear(names["x"], names["w"])
        return eval(code, names), names


@every_compute
@pytest.mark.parametrize("code", [*IN_FP32.values(), *LOSSES.values()], ids=[*IN_FP32, *LOSSES])
def test_sensitive_operations_compute_in_fp32(compute, code):
    """Softmax, sums, norms, exponentials and losses of 16-bit inputs give what fp32 gives on the same inputs."""
    result, names = run(code, compute)
    assert names["h"].dtype is COMPUTE_DTYPES[compute]
    assert result.dtype is FP32
    exact = eval(code, names | {"h": names["h"].float()})
    assert torch.allclose(result, exact, rtol=1e-5, atol=1e-6)


@every_compute
@pytest.mark.parametrize("code", IN_16_BITS.values(), ids=IN_16_BITS)
def test_matmuls_and_normalisation_layers_give_16_bits(compute, code):
    """Linear algebra runs in 16 bits, and normalisation layers take and give 16 bits."""
    assert run(code, compute)[0].dtype is COMPUTE_DTYPES[compute]


def run_with_weights(code, compute, **more):
    names = with_weights(COMPUTE_DTYPES[compute]) | more
    with compute_region("cpu", compute):
        names["h"] = F.linear(names["x"], names["w"])
        return eval(code, names), names


def in_fp32(names):
    return {k: upcast(v) for k, v in names.items()}


@every_compute
@pytest.mark.parametrize("code", MIXED_IN_FP32.values(), ids=MIXED_IN_FP32)
def test_mixed_dtypes_compute_in_the_widest(compute, code):
    """Where torch raises for a 16-bit weight and an fp32 input, the region computes in fp32, as CUDA's autocast does."""
    result, names = run_with_weights(code, compute)
    assert result.dtype is FP32
    assert torch.allclose(result, eval(code, in_fp32(names)), rtol=1e-5, atol=1e-5)


@every_compute
@pytest.mark.parametrize("code", WITHOUT_16_BIT_KERNELS.values(), ids=WITHOUT_16_BIT_KERNELS)
def test_operations_without_16_bit_kernels_compute_in_fp32(compute, code):
    """Decompositions, determinants, Fourier transforms and special functions of 16-bit weights give fp32's results."""
    result, names = run_with_weights(code, compute)
    assert result.dtype is FP32
    exact = eval(code, in_fp32(names))
    tolerance = 0.05 if "@" in code else 1e-3  # the product in the expression is in 16 bits
    assert torch.allclose(result, exact, rtol=tolerance, atol=tolerance * exact.abs().max().item())


@every_compute
@pytest.mark.parametrize("code", MIXED_IN_16_BITS.values(), ids=MIXED_IN_16_BITS)
def test_products_of_mixed_dtypes_give_16_bits(compute, code):
    """Products of matrices and vectors that the CPU's list lacks run in 16 bits, and norms give their input's dtype."""
    result, names = run_with_weights(code, compute)
    assert result.dtype is COMPUTE_DTYPES[compute]
    exact = eval(code, in_fp32(names))
    assert torch.allclose(result.float(), exact, rtol=0.05, atol=0.02 * exact.abs().max().item())


@every_compute
@pytest.mark.parametrize("code", IN_PLACE.values(), ids=IN_PLACE)
def test_in_place_operations_keep_their_tensors_dtype(compute, code):
    """A 16-bit weight written into an fp32 tensor is cast to fp32, which is exact."""
    y = inputs()["x"].clone()
    _, names = run_with_weights(code, compute, y=y)
    exact = inputs()["x"].clone()
    eval(code, in_fp32(names) | {"y": exact})
    assert y.dtype is FP32
    assert torch.allclose(y, exact, rtol=1e-5, atol=1e-5)


@every_compute
def test_fp64_is_left_alone_by_every_kind_of_cast(compute):
    """Products, promotions and decompositions of fp64 tensors stay fp64 inside a region."""
    x, v = torch.eye(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    with compute_region("cpu", compute):
        results = torch.mv(x, v), torch.dot(v, v), torch.slogdet(x)[1], v.clone().index_put_((torch.arange(4),), v)
        assert {r.dtype for r in results} == {torch.float64}


class LogDeterminant(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8) + 0.1 * torch.rand(8, 8))

    def forward(self, x):
        return (x @ self.weight).float() - torch.slogdet(self.weight)[1]


class MaskToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.rand(8))

    def forward(self, x):
        x = x.clone()
        x[x[:, 0] > 0] = self.token
        return x


class OwnLayerNorm(nn.LayerNorm):
    """A subclass, as in timm: the Engine knows only torch's own classes."""


parametrizations = nn.utils.parametrizations
MODELS = {
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "spectral_norm by hooks": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    "orthogonal by matrix_exp": lambda: parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="matrix_exp"),
    "orthogonal by cayley": lambda: parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley"),
    "orthogonal by householder": lambda: parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="householder"),
    "log-determinant": LogDeterminant,
    "mask token": MaskToken,
    "own layer norm": lambda: OwnLayerNorm(8),
    "instance norm": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, affine=True)),
    "Transformer layer": lambda: nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True, norm_first=True),
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean,loss_scale=8"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_models_that_torch_amp_trains_are_trained_by_lean_presets(make, precision):
    """Forward, backward, step and evaluation of models whose weights meet such operations; losses are near fp32's."""
    losses = []
    for name in ("fp32", precision):
        torch.manual_seed(0)
        model, x = make(), inputs()["x"]
        x = x[None] if isinstance(model, nn.TransformerEncoderLayer) else x
        with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), name) as engine:
            with engine.forward():
                loss = model(x).float().square().mean()
            engine.backward(loss)
            engine.step()
            with engine.evaluate():
                losses += [loss.item(), model(x).float().square().mean().item()]
    assert losses[2:] == pytest.approx(losses[:2], rel=0.05)


@every_compute
def test_normalisation_layers_have_fp32_inside(compute):
    """A layer norm of numbers with a large common part is as good as fp32's, rounded once."""
    x = (torch.randn(4, 256, generator=torch.Generator().manual_seed(0)) + 100).to(COMPUTE_DTYPES[compute])
    with compute_region("cpu", compute):
        y = F.layer_norm(x, (256,))
    exact = F.layer_norm(x.double(), (256,))
    assert (y.double() - exact).abs().max() <= 2 * torch.finfo(y.dtype).eps * exact.abs().max()


@every_compute
def test_an_explicit_dtype_is_respected(compute):
    """sum(dtype=...), vector_norm(dtype=...) and softmax(dtype=...) give what was asked for, as on CUDA."""
    h = torch.ones(4, dtype=COMPUTE_DTYPES[compute])
    with compute_region("cpu", compute):
        assert torch.linalg.vector_norm(h, dtype=h.dtype).dtype is h.dtype
        assert h.sum(dtype=torch.bfloat16).dtype is torch.bfloat16
        assert h.softmax(0, dtype=torch.float64).dtype is torch.float64


def test_other_dtypes_are_left_alone():
    """fp64, fp32 and integers compute in their own dtype inside a region."""
    with compute_region("cpu", "fp16"):
        assert torch.ones(3, dtype=torch.float64).sum().dtype is torch.float64
        assert torch.ones(3).exp().dtype is FP32
        assert torch.ones(3, dtype=torch.int32).sum().dtype is torch.int64


def test_a_sum_beyond_fp16s_range_does_not_overflow():
    """A million ones, squares of large values and exponentials stay finite in an fp16 region."""
    with compute_region("cpu", "fp16"):
        ones = torch.ones(1 << 20, dtype=torch.float16)
        assert ones.sum().item() == 1 << 20
        assert torch.full((10,), 60000.0, dtype=torch.float16).norm().item() == pytest.approx(60000 * 10**0.5, rel=1e-3)
        assert torch.tensor([12.0], dtype=torch.float16).exp().isfinite()
        assert torch.full((4,), 300.0, dtype=torch.float16).pow(2).isfinite().all()
        assert F.mse_loss(torch.full((4,), 300.0, dtype=torch.float16), torch.zeros(4)).item() == 90000
        assert torch.full((1 << 12,), 60.0, dtype=torch.float16).mean().item() == 60


@every_compute
def test_gradients_flow_through_the_fp32_operations(compute):
    """fp32 weights get fp32 gradients, near those of an fp32 run; 16-bit inputs get 16-bit gradients."""

    def grads(where):
        layer = nn.Linear(8, 8)
        nn.init.orthogonal_(layer.weight, generator=torch.Generator().manual_seed(0))
        nn.init.zeros_(layer.bias)
        x = inputs()["x"].requires_grad_()
        with compute_region("cpu", where):
            h = layer(x)
            loss = (
                (h.softmax(-1) * h.exp()).sum() + h.norm() + h.logsumexp(-1).sum() + F.cross_entropy(h, torch.arange(4))
            )
        loss.backward()
        return layer.weight.grad, x.grad

    for mine, exact in zip(grads(compute), grads("fp32"), strict=True):
        assert mine.dtype is FP32
        assert torch.allclose(mine, exact, rtol=0.1, atol=0.03 * exact.abs().max().item())
    h = torch.ones(3, dtype=COMPUTE_DTYPES[compute], requires_grad=True)
    with compute_region("cpu", compute):
        h.exp().sum().backward()
    assert h.grad.dtype is COMPUTE_DTYPES[compute]


# What a plain autocast computes of fp32 weights, which it must still compute in the same dtypes.
OF_FP32_WEIGHTS = {f"{name} of fp32": f"(lambda p, v: {code})(w, w[0])" for name, code in BEYOND_THE_LISTS.items()}
PROBE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.nn.functional as F
assert not any(name.split(".")[0] == "halfstep" for name in sys.modules)
found = {}
for dtype in (torch.bfloat16, torch.float16):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 8, generator=generator), torch.randn(8, 8, generator=generator)
    with torch.autocast("cpu", dtype=dtype):
        h = F.linear(x, w)
        p, v = w.to(dtype), w[0].to(dtype)
        for name, code in json.loads(sys.argv[1]).items():
            try:
                result = eval(code)
            except RuntimeError as error:
                found[f"{dtype} {name}"] = [type(error).__name__, []]
            else:
                found[f"{dtype} {name}"] = [str(result.dtype), result.double().flatten().tolist()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def without_halfstep():
    """Results of a plain torch.autocast("cpu") in a process that never imports Halfstep."""
    codes = json.dumps(IN_FP32 | LOSSES | IN_16_BITS | BEYOND_THE_LISTS | OF_FP32_WEIGHTS)
    done = subprocess.run([sys.executable, "-c", PROBE, codes], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@every_compute
def test_a_plain_autocast_is_what_it_was(without_halfstep, compute):
    """With the rule installed, torch.autocast("cpu") outside Halfstep gives the same dtypes and the same digits.

    To a rounding: which instructions a kernel uses depends on where its tensors lie in memory, which differs by process.
    """
    with compute_region("cpu", compute):
        pass  # the rule is installed now
    dtype = COMPUTE_DTYPES[compute]
    names = inputs()
    with torch.autocast("cpu", dtype=dtype):
        names["h"] = F.linear(names["x"], names["w"])
        names |= {"p": names["w"].to(dtype), "v": names["w"][0].to(dtype)}
        for name, code in (IN_FP32 | LOSSES | IN_16_BITS | BEYOND_THE_LISTS | OF_FP32_WEIGHTS).items():
            shown, values = without_halfstep[f"{dtype} {name}"]
            if not shown.startswith("torch."):
                with pytest.raises(RuntimeError):
                    eval(code, names)
                continue
            result = eval(code, names)
            assert str(result.dtype) == shown, name
            rounding = torch.finfo(dtype).eps if result.dtype is dtype else 1e-6
            expected = torch.tensor(values, dtype=torch.float64).view(result.shape)
            # The errors of a decomposition grow with its largest value.
            largest = expected.nan_to_num().abs().max().item() if name not in IN_FP32 | LOSSES | IN_16_BITS else 1 / 16
            close = torch.allclose(
                result.double(), expected, rtol=2 * rounding, atol=rounding * max(largest, 1 / 16), equal_nan=True
            )
            assert close, name


def test_outside_any_autocast_nothing_is_cast():
    """Without a region 16-bit operations stay 16-bit."""
    with compute_region("cpu", "bf16"):
        pass
    assert torch.ones(3, dtype=torch.bfloat16).exp().dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("compute", ["fp32", "tf32"])
def test_full_precision_regions_turn_an_outer_autocast_off(compute):
    """An fp32 or tf32 region computes in fp32 even inside somebody's autocast, which continues after it."""
    x, w = torch.randn(2, 3), torch.randn(3, 3)
    for outer in (lambda: torch.autocast("cpu", dtype=torch.bfloat16), lambda: compute_region("cpu", "fp16")):
        with outer():
            assert (x @ w).dtype is not FP32
            with compute_region("cpu", compute):
                assert torch.equal(x @ w, torch.mm(x, w))
                assert (x @ w).dtype is FP32
            assert (x @ w).dtype is not FP32


def test_nested_regions_restore_the_outer_one():
    """Leaving an inner region brings the outer one back, rule included; leaving both brings plain torch back."""
    x, h = torch.randn(2, 3), torch.ones(3, dtype=torch.float16)
    with compute_region("cpu", "bf16"):
        with compute_region("cpu", "fp16"):
            assert (x @ x.t()).dtype is torch.float16
            assert h.exp().dtype is FP32
        assert (x @ x.t()).dtype is torch.bfloat16
        assert h.exp().dtype is FP32
        with compute_region("cpu", "fp32"):
            assert h.exp().dtype is torch.float16
        assert h.exp().dtype is FP32
    with torch.autocast("cpu", dtype=torch.float16):
        assert h.exp().dtype is torch.float16


def test_a_layer_works_in_nested_regions_of_different_formats():
    """A weight that was cast for the outer region is cast again for the inner one, and again after it."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with compute_region("cpu", "bf16"):
        assert layer(x).dtype is torch.bfloat16
        with compute_region("cpu", "fp16"):
            assert layer(x).dtype is torch.float16
        assert layer(x).dtype is torch.bfloat16


@every_compute
def test_an_exception_closes_the_region(compute):
    """After an error inside, neither autocast nor the rule is left on."""
    with pytest.raises(ZeroDivisionError), compute_region("cpu", compute):
        raise ZeroDivisionError
    assert not torch.is_autocast_enabled("cpu")
    h = torch.ones(3, dtype=COMPUTE_DTYPES[compute])
    with torch.autocast("cpu", dtype=COMPUTE_DTYPES[compute]):
        assert h.exp().dtype is COMPUTE_DTYPES[compute]


def test_other_threads_are_not_touched():
    """A region belongs to its thread: another one's plain autocast behaves as torch's, and its own region works."""
    h, found = torch.ones(3, dtype=torch.bfloat16), {}

    def elsewhere():
        found["enabled"] = torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found["plain"] = h.exp().dtype
        with compute_region("cpu", "bf16"):
            found["region"] = h.exp().dtype

    with compute_region("cpu", "bf16"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert h.exp().dtype is FP32
    assert found == {"enabled": False, "plain": torch.bfloat16, "region": FP32}


def test_regions_can_be_first_entered_by_many_threads_at_once():
    """The rule is installed once, however many threads ask for it."""
    h, found, barrier = torch.ones(3, dtype=torch.bfloat16), [], threading.Barrier(8)

    def enter():
        barrier.wait()
        with compute_region("cpu", "bf16"):
            found.append(h.exp().dtype)

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [FP32] * 8


@every_compute
def test_activation_checkpointing_recomputes_in_the_same_formats(compute):
    """The recomputation runs during backward, outside the region; it must save the same tensors as the forward did."""

    def block(module, x):
        return module(module(x).softmax(-1).exp())

    x, grads = torch.randn(3, 4), []
    for run_block in (block, lambda *args: checkpoint(block, *args, use_reentrant=False)):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        precision = "fp16,loss_scale=8" if compute == "fp16" else compute
        with Engine(layer, torch.optim.SGD(layer.parameters(), lr=0.1), precision) as engine:
            with engine.forward():
                loss = run_block(layer, x).sum()
            engine.backward(loss)
            grads.append(layer.weight.grad.clone())
    assert torch.equal(*grads)


def test_a_recomputation_in_autograds_own_thread_follows_the_rule():
    """On a GPU backward runs in another thread than the one that called it; the switch holds there, and only meanwhile."""
    found, h = [], torch.ones(3, dtype=torch.bfloat16)

    def recompute():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(h.softmax(-1).dtype)

    def in_a_thread():
        thread = threading.Thread(target=recompute)
        thread.start()
        thread.join()

    with compute_region("cpu", "bf16"):
        pass
    with recomputing():
        in_a_thread()
    in_a_thread()
    assert found == [FP32, torch.bfloat16]


# The compilers of some versions of torch use deprecated parts of torch.
compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@compiles
@every_compute
def test_compiled_models_follow_the_rule(fresh_compiler, compute):
    """torch.compile, region outside or inside the compiled function, gives the dtypes and digits of eager."""
    layer = nn.Linear(8, 8)
    x = inputs()["x"]

    def forward(x):
        h = layer(x)
        return h, h.softmax(-1), h.sum(), F.layer_norm(h, (8,))

    def forward_inside(x):
        with compute_region("cpu", compute):
            return forward(x)

    with compute_region("cpu", compute):
        expected = forward(x)
        outside = torch.compile(forward, backend="aot_eager", fullgraph=True)(x)
    inside = torch.compile(forward_inside, backend="aot_eager")(x)
    half = COMPUTE_DTYPES[compute]
    assert [t.dtype for t in expected] == [half, FP32, FP32, half]
    for found in (outside, inside):
        assert [t.dtype for t in found] == [t.dtype for t in expected]
        assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-3) for a, b in zip(found, expected, strict=True))
    outside[1].square().sum().backward()
    assert layer.weight.grad.isfinite().all()


@compiles
def test_compiled_code_casts_for_16_bit_weights(fresh_compiler):
    """A compiled function with every kind of cast gives the dtypes of eager, with gradients in the weights' dtype."""
    names = with_weights(torch.bfloat16)
    p, v = names["p"].requires_grad_(), names["v"].requires_grad_()

    def forward(x, p, v):
        y = x.clone()
        y[torch.arange(4)] = v
        return torch.slogdet(p)[1], torch.mv(p, x[0]), torch.dot(v, x[0]), F.layer_norm(x, (8,), v), y

    with compute_region("cpu", "bf16"):
        expected = forward(names["x"], p, v)
        found = torch.compile(forward, backend="aot_eager", fullgraph=True)(names["x"], p, v)
    assert [t.dtype for t in found] == [FP32, torch.bfloat16, FP32, FP32, FP32]
    assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(found, expected, strict=True))
    sum(t.float().sum() for t in found).backward()
    assert {p.grad.dtype, v.grad.dtype} == {torch.bfloat16}


def test_compiled_code_is_kept_apart_by_device_dtype_and_rule():
    """Inside a region the key of torch.compile's cache names the region, after the user's own tag; outside it does not."""
    importlib.import_module("torch._dynamo")
    config = torch.compiler.config
    tags = []
    with config.patch(cache_key_tag="mine"):
        for compute, lean in itertools.product(("bf16", "fp16"), (False, True)):
            with compute_region("cpu", compute, lean=lean):
                tags.append(config.cache_key_tag.rpartition(" ")[0])
        assert tags == [f"mine halfstep cpu {c} {rule}" for c in ("bf16", "fp16") for rule in ("autocast", "lean")]
        with compute_region("cpu", "fp32"):
            assert config.cache_key_tag == "mine"
        assert config.cache_key_tag == "mine"


@pytest.mark.slow
@compiles
@pytest.mark.skipif(shutil.which("g++") is None, reason="Requires: [g++]")
def test_what_was_compiled_elsewhere_is_not_used_in_a_region(fresh_compiler, monkeypatch, tmp_path):
    """A model compiled and kept on disk under plain autocast, or in the other dtype, is compiled again for a region."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, layer = torch.randn(4, 8), nn.Linear(8, 8)

    def forward(x):
        h = layer(x)
        return h, h.softmax(-1)

    found = []
    for region in (torch.autocast("cpu", torch.bfloat16), compute_region("cpu", "bf16"), compute_region("cpu", "fp16")):
        torch._dynamo.reset()
        with region:
            outputs = torch.compile(forward, fullgraph=True)(x)
        outputs[1].sum().backward()  # only then is it written to the disk
        found.append([t.dtype for t in outputs])
    assert found == [[torch.bfloat16] * 2, [torch.bfloat16, FP32], [torch.float16, FP32]]


@compiles
def test_the_list_of_added_operations_can_be_read_while_they_are_installed():
    """operations_of lists what the rule adds, also after a region has been entered."""
    with compute_region("cpu", "bf16"):
        names = set(operations_of("cpu", "fp32"))
    assert {"softmax.int", "log_softmax.int", "sum", "exp", "logsumexp", "linalg_slogdet"} <= names
    assert not any("out" in name or "layer_norm" in name for name in names)


def test_cuda_gets_the_losses_that_its_list_lacks():
    """cross_entropy and ctc_loss are on the CPU's list of fp32 operations and not on CUDA's."""
    with compute_region("cpu", "bf16"):
        names = operations_of("cuda", "fp32")
    assert operations_of("cuda", "loss") == ("cross_entropy_loss",)
    assert names[:2] == ("ctc_loss.IntList", "ctc_loss.Tensor")
    assert operations_of("xpu", "fp32") == ()


@every_compute
def test_the_kernel_for_cuda_computes_in_fp32_inside_a_region_only(compute):
    """Inside, the loss of 16-bit logits is that of their fp32 values; outside, it is torch's own, rounded."""
    registered = dict(_kernels("cuda", lean=False))["cross_entropy_loss"]
    outside_autocast = torch._C._dispatch_keys(torch.ones(1)).remove(torch._C.DispatchKey.AutocastCPU)
    kernel = functools.partial(registered, outside_autocast)
    logits = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(COMPUTE_DTYPES[compute])
    target = torch.arange(64) % 32
    exact = F.cross_entropy(logits.float(), target)
    with recomputing():
        inside = kernel(logits, target)
    outside = kernel(logits, target)
    assert inside.dtype is FP32
    assert torch.equal(inside, exact)
    assert torch.equal(outside, F.cross_entropy(logits, target))
    assert outside.dtype is logits.dtype


def test_upcast_changes_16_bit_tensors_only():
    """Trees keep their shape; other dtypes and other values stay the same objects."""
    full, count, text = torch.ones(2), torch.ones(2, dtype=torch.int64), "text"
    tree = {
        "a": [torch.ones(2, dtype=torch.float16), full],
        "b": (torch.ones(2, dtype=torch.bfloat16), count, text, None),
    }
    found = upcast(tree)
    assert found["a"][0].dtype is found["b"][0].dtype is FP32
    assert found["a"][1] is full
    assert found["b"][1:] == (count, text, None)
