"""Lost updates: a run whose weights stall in 16 bits is reported, and a healthy one never is."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.engine.engine import Engine


def tiny(kind, dtype, seed):
    """A small model and a batch for it."""
    torch.manual_seed(seed)
    if kind == "mlp":
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))
        shape = (8, 16)
    elif kind == "conv":
        model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 4))
        shape = (8, 1, 8, 8)
    else:
        model = nn.Sequential(nn.Embedding(12, 16), nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4))
        shape = (8, 4)
    return model.to(dtype), shape


def inputs(kind, shape, dtype, step):
    """One batch."""
    g = torch.Generator().manual_seed(step)
    x = torch.randint(0, 12, shape, generator=g) if kind == "embedding" else torch.randn(shape, generator=g).to(dtype)
    return x, torch.randint(0, 4, (shape[0],), generator=g)


HEALTHY = [
    (kind, precision, optimizer, lr)
    for kind in ("mlp", "conv", "embedding")
    for precision, optimizer, lr in (
        ("fp32", "AdamW", 1e-3),
        ("fp32", "SGD", 1e-6),  # hardly moves, in fp32
        ("bf16", "Adam", 1e-4),
        ("fp16", "SGD", 1e-2),
        ("bf16-lean", "AdamW", 1e-6),  # below half an ulp of bf16, into the master
        ("fp16-lean", "AdamW", 1e-5),
        ("bf16-lean,master=none", "AdamW", 3e-2),  # no master, and updates that bf16 can represent
    )
]


@pytest.mark.parametrize(("kind", "precision", "optimizer", "lr"), HEALTHY)
def test_a_healthy_run_is_never_reported(kind, precision, optimizer, lr):
    """21 runs over models, precisions and optimizers: no event but those of a loss scale."""
    model, shape = tiny(kind, torch.float32, seed=len(precision))
    watch = halfstep.Watch(every=5)
    engine = Engine(model, getattr(torch.optim, optimizer)(model.parameters(), lr=lr), precision, watch=watch)
    for step in range(34):
        x, y = inputs(kind, shape, torch.float32, step)
        with engine.forward():
            loss = F.cross_entropy(model(x), y)
        engine.backward(loss)
        engine.step()
        watch.observe_loss(step, loss.item())
    engine.close()
    assert not [str(e) for e in watch.events if e.kind not in {"skip", "scale"}]


@pytest.mark.parametrize(
    ("kind", "optimizer", "every"),
    [("mlp", "AdamW", 1), ("mlp", "SGD", 10), ("conv", "AdamW", 100), ("conv", "SGD", 100), ("embedding", "AdamW", 20)],
)
def test_bf16_weights_without_a_master_that_stall_are_reported_within_50_steps(kind, optimizer, every):
    """With a learning rate below half an ulp of the weights, the event names the tensors and the way out."""
    model, shape = tiny(kind, torch.float32, seed=0)
    watch = halfstep.Watch(every=every)
    engine = Engine(
        model, getattr(torch.optim, optimizer)(model.parameters(), lr=1e-7), "bf16-lean,master=none", watch=watch
    )
    for step in range(50):
        x, y = inputs(kind, shape, torch.float32, step)
        with engine.forward():
            loss = F.cross_entropy(model(x), y)
        engine.backward(loss)
        engine.step()
    engine.close()
    (event,) = [e for e in watch.events if e.kind == "lost-updates"]
    matrices = {n for n, p in engine.params.items() if p.dim() > 1 and p.numel() >= 32}
    if kind != "embedding":
        assert matrices <= event.data["parameters"].keys()
    assert event.data["parameters"]
    assert "precision bf16-lean" in event.advice


def test_stochastic_rounding_is_no_stall():
    """An optimizer that rounds stochastically loses most updates of a step, but its weights move over several."""
    torch.manual_seed(0)

    class Stochastic(torch.optim.Optimizer):
        """SGD that rounds to bf16 up or down by chance."""

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    wide = p.float() - group["lr"] * p.grad.float().sign()
                    bits = wide.view(torch.int32) + torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32)
                    p.copy_((bits & -65536).view(torch.float32))

    model = nn.Linear(32, 32, bias=False).bfloat16()
    optimizer = Stochastic(model.parameters(), {"lr": 1e-4})
    watch = halfstep.Watch(model, every=8).attach(optimizer)
    for step in range(48):
        optimizer.zero_grad()
        model(torch.randn(4, 32, generator=torch.Generator().manual_seed(step)).bfloat16()).square().mean().backward()
        optimizer.step()
    watch.close()
    assert max(u.lost for s in watch.samples for u in s.updates.values()) > 0.5
    assert not watch.events


def test_kahan_summation_is_no_stall():
    """A compensation next to the weight collects what rounding removes, so nothing is lost while the weight stands still."""

    class Kahan(torch.optim.Optimizer):
        """SGD with a compensation."""

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    comp = self.state[p].setdefault("kahan_comp", torch.zeros_like(p))
                    comp.sub_(group["lr"] * p.grad)
                    before = p.clone()
                    p.add_(comp)
                    comp.add_(before - p)

    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False).bfloat16()
    optimizer = Kahan(model.parameters(), {"lr": 1e-6})
    watch = halfstep.Watch(model, every=8).attach(optimizer)
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.ones(2, 16).bfloat16()).square().mean().backward()
        optimizer.step()
    watch.close()
    assert watch.samples[-1].updates["weight"].lost > 0.5
    assert not watch.events


@pytest.mark.parametrize("reason", ["lr 0", "skipped"])
def test_steps_that_change_nothing_for_another_reason_are_no_stall(reason):
    """A learning rate of 0, and steps that are skipped, are no lost updates."""
    model, shape = tiny("mlp", torch.float32, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if reason == "lr 0" else 1e-2)
    watch = halfstep.Watch(every=4)
    engine = Engine(model, optimizer, "bf16-lean,master=none", watch=watch)
    for step in range(40):
        x, y = inputs("mlp", shape, torch.float32, step)
        with engine.forward():
            loss = F.cross_entropy(model(x), y)
        engine.backward(loss * math.nan if reason == "skipped" else loss)
        engine.step()
    engine.close()
    assert "lost-updates" not in {e.kind for e in watch.events}
