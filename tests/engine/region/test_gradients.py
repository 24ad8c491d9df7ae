"""Gradients of lean regions: in fp16's range where torch's formulas leave it, and without fp32 tensors of the input's size."""

from __future__ import annotations

import pytest
import torch

from halfstep.engine.region import compute_region

FP16 = torch.float16


def matrix():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(FP16)


@pytest.mark.parametrize("divided", ["tensor", "view"])
def test_a_quotient_in_place_in_fp16_has_the_gradients_of_fp32(divided):
    """Both gradients of `x /= x.sum(-1).unsqueeze(-1)` are those of fp64 up to fp16's rounding."""
    h = matrix() * 3

    def gradient_of(h, region, scale=1.0):
        h = h.detach().clone().requires_grad_()
        with region:
            whole = h.abs() * 1.0
            x = whole if divided == "tensor" else whole.view(2, 2, 8)[1]
            x /= x.sum(-1).unsqueeze(-1)
            loss = (whole.double() ** 2).sum()
        (loss * scale).backward()
        return h.grad.double() / scale, whole.detach().double()

    exact, quotient = gradient_of(h.double(), compute_region("cpu", "fp32"))
    lean, result = gradient_of(h, compute_region("cpu", "fp16", lean=True), scale=1024.0)
    assert torch.allclose(result, quotient, rtol=2**-10)
    assert torch.allclose(lean, exact, rtol=2**-7, atol=2**-9 * exact.abs().max().item())


def test_a_quotient_in_place_in_fp16_keeps_divisors_beyond_its_range():
    """A sum of 200000 divides to what fp32 gives, and its gradient is finite."""
    h = torch.full((4, 4), 50000.0, dtype=FP16, requires_grad=True)
    with compute_region("cpu", "fp16", lean=True):
        x = h * 1.0
        x /= x.sum(-1).unsqueeze(-1)
    x.float().pow(2).sum().backward()
    assert x.eq(0.25).all()
    assert h.grad.isfinite().all()


def test_a_quotient_in_place_in_fp16_can_be_differentiated_twice():
    """A gradient penalty through the division has the gradient of fp64."""

    def penalty_gradient(h, region):
        h = h.detach().clone().requires_grad_()
        with region:
            x = h.abs() * 1.0
            x /= x.sum(-1).unsqueeze(-1)
        (first,) = torch.autograd.grad((x.double() ** 2).sum(), h, create_graph=True)
        return torch.autograd.grad((first.double() ** 2).sum(), h)[0].double()

    h = matrix()
    exact = penalty_gradient(h.double(), compute_region("cpu", "fp32"))
    lean = penalty_gradient(h, compute_region("cpu", "fp16", lean=True))
    assert torch.allclose(lean, exact, rtol=0.05, atol=0.02 * exact.abs().max().item())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_quotient_in_place_has_the_same_gradient(backend):
    """torch.compile traces the division with its gradient."""

    def loss_of(h):
        x = h.abs() * 1.0
        x /= x.sum(-1).unsqueeze(-1)
        return x.float().pow(2).sum()

    gradients = []
    for function in (loss_of, torch.compile(loss_of, backend=backend)):
        h = matrix().requires_grad_()
        with compute_region("cpu", "fp16", lean=True):
            loss = function(h)
        loss.backward()
        gradients.append(h.grad)
    assert torch.equal(*gradients)
