"""The lean rule on CUDA, where it replaces kernels of torch's own list, and what that leaves alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from halfstep.engine.region import compute_region
from halfstep.engine.region.tables import recognise_tables
from halfstep.precision.formats import COMPUTE_DTYPES

pytestmark = pytest.mark.gpu
every_compute = pytest.mark.parametrize("compute", ["bf16", "fp16"])

# Operations on a 16-bit matrix h of 4 x 8 and a vector v of 8, and the bits of their results in bf16-lean and fp16-lean.
# torch's own autocast gives fp32 for all of them.
LISTED = {
    "layer_norm": ("F.layer_norm(h, (8,), v, v)", 16, 16),
    "layer_norm by keywords": ("F.layer_norm(h, (8,), weight=v, bias=None, eps=1e-3)", 16, 16),
    "group_norm": ("F.group_norm(h, 2, v, v)", 16, 16),
    "softmax": ("h.softmax(-1)", 16, 16),
    "pow": ("h**2", 16, 32),
    "cube": ("h**3", 16, 16),
    "square of a ReLU": ("F.relu(h) ** 2", 16, 16),
    "exp": ("h.exp()", 16, 32),
    "rsqrt": ("h.abs().rsqrt()", 16, 16),
    "softplus": ("F.softplus(h, beta=2.0)", 16, 16),
    "interpolate": ("F.interpolate(h[None], scale_factor=2.0)", 16, 16),
    "norm with its dimension": ("h.norm(dim=-1, keepdim=True)", 16, 16),
    "sum with its dimension": ("h.sum(-1, keepdim=True)", 16, 32),
    "sum": ("h.sum()", 32, 32),
    "sum over a dimension": ("h.sum(dim=0)", 32, 32),
    "division by a sum": ("h / h.abs().sum(-1).unsqueeze(-1)", 16, 32),
    "log_softmax": ("F.log_softmax(h, -1)", 32, 32),
    "logsumexp": ("h.logsumexp(-1)", 32, 32),
    "mse_loss": ("F.mse_loss(h, h * 2)", 32, 32),
}


def inputs(compute):
    generator = torch.Generator().manual_seed(0)
    h, v = torch.randn(4, 8, generator=generator), torch.randn(8, generator=generator)
    dtype = COMPUTE_DTYPES[compute]
    return {"h": h.to("cuda", dtype).requires_grad_(), "v": v.to("cuda", dtype), "F": F, "torch": torch}


@every_compute
@pytest.mark.parametrize("case", LISTED.values(), ids=LISTED)
def test_a_lean_region_gives_16_bits_and_other_regions_are_torchs_own(case, compute):
    """Values agree with fp32 everywhere; a plain autocast and the autocast presets give fp32, as without Halfstep."""
    code, *bits = case
    scope = inputs(compute)
    exact = eval(code, scope | {"h": scope["h"].detach().float(), "v": scope["v"].float()})
    with compute_region("cuda", compute, lean=True):
        lean = eval(code, scope)
    lean.float().sum().backward()
    assert torch.finfo(lean.dtype).bits == bits[compute == "fp16"]
    assert scope["h"].grad.isfinite().all()
    for region in (torch.autocast("cuda", COMPUTE_DTYPES[compute]), compute_region("cuda", compute)):
        with region:
            result = eval(code, scope)
        assert result.dtype is torch.float32
        torch.testing.assert_close(result, exact, rtol=1e-5, atol=1e-5)
    scale = exact.abs().max().item()
    torch.testing.assert_close(lean.float(), exact, rtol=4 * torch.finfo(lean.dtype).eps, atol=2**-7 * scale)


@every_compute
def test_rms_norm_of_mixed_dtypes_gives_16_bits(compute):
    """An fp32 stream next to 16-bit weights, whether or not this torch has the operation on its list."""
    scope = inputs(compute)
    with compute_region("cuda", compute, lean=True):
        assert F.rms_norm(scope["h"].float(), (8,), scope["v"]).dtype is COMPUTE_DTYPES[compute]
        assert F.rms_norm(scope["h"], (8,), scope["v"]).dtype is COMPUTE_DTYPES[compute]


@every_compute
def test_a_sum_makes_no_copy_of_its_input(compute):
    """fp32 results of reductions need no fp32 input."""
    x = torch.ones(1 << 22, device="cuda", dtype=COMPUTE_DTYPES[compute])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with compute_region("cuda", compute, lean=True):
        total = x.sum()
        mean = x.mean()
    assert (total.item(), mean.item()) == (1 << 22, 1.0)
    assert torch.cuda.max_memory_allocated() - before < x.nbytes


@every_compute
def test_tables_on_cuda_are_rounded(compute):
    """A product with an fp32 buffer has the activation's dtype."""
    scope = inputs(compute)
    table = torch.rand(1, 8, device="cuda")
    with recognise_tables([table]), compute_region("cuda", compute, lean=True):
        assert torch.equal(scope["h"] * table, scope["h"] * table.to(scope["h"].dtype))
        assert (scope["h"] * 2 + 1).dtype is scope["h"].dtype
