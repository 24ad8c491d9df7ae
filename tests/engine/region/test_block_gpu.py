"""Regions on a GPU: the losses that CUDA's autocast leaves in 16 bits compute in fp32, eager and compiled."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.engine.region import compute_region, recomputing
from halfstep.precision.formats import COMPUTE_DTYPES

pytestmark = pytest.mark.gpu
every_compute = pytest.mark.parametrize("compute", ["bf16", "fp16"])

WEIGHTS = 0.5 + torch.arange(32) / 32  # exact in 16 bits
LOSSES = {
    "classes": F.cross_entropy,
    "label smoothing": lambda h, y: F.cross_entropy(h, y, label_smoothing=0.1),
    "weights and an ignored class": lambda h, y: F.cross_entropy(h, y, WEIGHTS.to(h), ignore_index=3),
    "probabilities": lambda h, y: F.cross_entropy(h, h.detach().float().flip(0).softmax(-1)),
    "pixels": lambda h, y: F.cross_entropy(h.reshape(4, 16, -1).transpose(1, 2), y.reshape(4, 16) % 16),
    "summed": lambda h, y: F.cross_entropy(h, y, reduction="sum"),
}


def logits_of(compute):
    generator = torch.Generator().manual_seed(0)
    h = 4 * torch.randn(64, 32, generator=generator)
    return h.to("cuda", COMPUTE_DTYPES[compute]).requires_grad_(), torch.arange(64, device="cuda") % 32


@every_compute
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_cross_entropy_computes_in_fp32(compute, loss):
    """Loss and gradient of 16-bit logits are those of the same logits in fp32; the gradient is rounded once."""
    h, y = logits_of(compute)
    torch.manual_seed(1)
    with compute_region("cuda", compute):
        found = loss(h, y)
    found.backward()
    wide = h.detach().float().requires_grad_()
    torch.manual_seed(1)
    exact = loss(wide, y)
    exact.backward()
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(h.grad, wide.grad.to(h.dtype), rtol=0, atol=0)


@every_compute
def test_a_plain_autocast_beside_it_rounds_as_before(compute):
    """Once the rule is installed, torch.autocast without a region still gives torch's own 16-bit log-softmax."""
    h, y = logits_of(compute)
    with compute_region("cuda", compute):
        F.cross_entropy(h, y)
    with torch.autocast("cuda", COMPUTE_DTYPES[compute]):
        plain = F.cross_entropy(h, y)
        parts = F.nll_loss(F.log_softmax(h, 1, dtype=h.dtype), y)
    assert plain.dtype is torch.float32
    assert torch.equal(plain, parts)


@every_compute
def test_connectionist_loss_takes_16_bits(compute):
    """ctc_loss, which has no 16-bit kernel on CUDA, computes in fp32 inside a region."""
    steps = torch.randn(12, 2, 6, device="cuda", dtype=COMPUTE_DTYPES[compute])
    arguments = (torch.ones(2, 3, dtype=torch.long, device="cuda"), torch.tensor([12, 12]), torch.tensor([3, 2]))
    with compute_region("cuda", compute):
        found = F.ctc_loss(steps.log_softmax(-1).to(steps.dtype), *arguments)
    exact = F.ctc_loss(steps.float().log_softmax(-1).to(steps.dtype).float(), *arguments)
    torch.testing.assert_close(found, exact)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@every_compute
def test_compiled_losses_follow_the_rule(compute):
    """A compiled forward with the loss inside it gives eager's loss and gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = nn.Linear(64, 32, device="cuda")
    x, y = torch.randn(64, 64, device="cuda"), torch.arange(64, device="cuda") % 32

    def forward(x, y):
        return F.cross_entropy(8 * layer(x), y)

    found = []
    for function in (forward, torch.compile(forward, fullgraph=True)):
        layer.zero_grad()
        with compute_region("cuda", compute):
            loss = function(x, y)
        loss.backward()
        found.append((loss.detach(), layer.weight.grad.clone()))
    eager, compiled = found
    eps = torch.finfo(COMPUTE_DTYPES[compute]).eps
    assert compiled[0].dtype is torch.float32
    torch.testing.assert_close(compiled[0], eager[0], rtol=eps, atol=0)
    torch.testing.assert_close(compiled[1], eager[1], rtol=0, atol=2 * eps * eager[1].abs().max().item())


@every_compute
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_cross_entropy_follows_the_rule(compute, reentrant):
    """Checkpointed or not, loss and gradient are the same, although autograd recomputes in a thread of its own."""
    found = []
    for run in (F.cross_entropy, lambda h, y: checkpoint(F.cross_entropy, h, y, use_reentrant=reentrant)):
        h, y = logits_of(compute)
        with compute_region("cuda", compute):
            loss = run(h, y)
        with recomputing():
            loss.backward()
        found.append((loss.detach(), h.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
