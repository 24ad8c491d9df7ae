"""The Engine on a GPU: the same results as on the CPU, and no wait in a step."""

import math

import pytest
import torch
import torch.nn.functional as F

from engine_models import Net, batches, same, snapshot
from gpu_sync import no_synchronisation
from halfstep.engine.engine import Engine

# Compiling, torch uses deprecated parts of itself in some versions, and says of fp32 that TF32 would be faster.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # said of the one that holds its memory pool
]


def build(precision, **options):
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    return model, Engine(model, optimizer, precision, scheduler=scheduler, max_norm=1.0, **options)


def step(model, engine, batch, *, poison=False):
    x, y = (t.cuda() for t in batch)
    if poison:
        x[0, 0] = math.inf
    with engine.forward():
        loss = F.cross_entropy(model(x), y)
    engine.backward(loss)
    return engine.step()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "bf16-lean", "fp16-lean"])
def test_training_learns_and_a_skip_changes_nothing(precision):
    """Every preset trains on the GPU, and an overflowing step leaves everything bit-identical."""
    model, engine = build(precision, ema=0.9)
    data = batches(30)
    for batch in data:
        step(model, engine, batch)
    engine._delivery.drain()
    before = snapshot(model, engine)
    assert step(model, engine, data[0], poison=True).skipped
    assert same(before, snapshot(model, engine)) == []
    with engine.evaluate():
        losses = [F.cross_entropy(model(x.cuda()), y.cuda()).item() for x, y in data]
    assert sum(losses) / len(losses) < 1.0
    assert engine.progress.applied == 30


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_step_of_a_fused_optimizer_synchronises(precision):
    """torch reports no synchronising call in backward and step once the engine runs."""
    model, engine = build(precision, ema=0.9)
    data = [(x.cuda(), y.cuda()) for x, y in batches(6)]
    for batch in data[:3]:
        step(model, engine, batch)
    torch.cuda.synchronize()
    with no_synchronisation():
        for x, y in data[3:]:
            with engine.forward():
                loss = F.cross_entropy(model(x), y)
            engine.backward(loss)
            engine.step()
    assert engine.progress.attempts == 6


def test_the_host_runs_ahead_of_the_device():
    """step() returns while the device is still busy with it, and its outcome is read later."""
    model, engine = build("bf16")
    big = torch.randn(4096, 4096, device="cuda")
    for batch in batches(3):
        step(model, engine, batch)
    here = tuple(t.cuda() for t in batches(1)[0])  # a copy from the host would wait by itself
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    for _ in range(60):
        big = (big @ big).clamp(-1, 1)
    result = step(model, engine, here)
    done.record()
    assert not done.query()
    assert math.isfinite(result.grad_norm)
    assert result.skipped is False


def test_the_scheduler_moves_only_for_steps_that_happened():
    """Delivered one step late, the schedule still counts applied steps only."""
    model, engine = build("fp16")
    for i, batch in enumerate(batches(8)):
        step(model, engine, batch, poison=i in {2, 5})
    engine._delivery.drain()
    assert engine.progress.applied == 6
    assert engine.schedulers[0].last_epoch == 6
    assert engine.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * 0.99**6)


@pytest.mark.parametrize("precision", ["bf16-lean", "bf16-lean,states=8bit", "fp16-lean"])
def test_a_compiled_model_is_stepped_by_the_same_kernels(precision):
    """With torch.compile the losses follow the eager run, and the fused step still does the work."""
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)).cuda()
        engine = Engine(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), precision, max_norm=1.0, compile=compiled
        )
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(256, 32, generator=generator).cuda(), torch.randint(0, 4, (256,), generator=generator).cuda()
        losses = []
        for _ in range(12):
            with engine.forward():
                loss = F.cross_entropy(model(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert engine.optimizers[0].__dict__.get("_fused") is not None
        runs.append(losses)
    assert runs[1] == pytest.approx(runs[0], rel=0.02)
    assert runs[1][-1] < 0.7 * runs[1][0]


class WithLoss(torch.nn.Module):
    """A model that computes its own loss, so that the loss too is a result of the graph."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))

    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y)


def train_in_graphs(precision, compiled, *, accumulate=1, peek=False):
    torch.manual_seed(0)
    model = WithLoss().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = Engine(model, optimizer, precision, max_norm=1.0, compile=compiled, accumulate=accumulate)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(256, 32, generator=generator).cuda(), torch.randint(0, 4, (256,), generator=generator).cuda()
    losses, norms = [], []
    for number in range(12):
        for part in range(accumulate):
            inputs = x[part::accumulate] * (math.inf if number == 7 and part == 0 else 1)
            with engine.forward():
                loss = model(inputs, y[part::accumulate])
            engine.backward(loss)
            seen = loss.detach().clone()  # the next replay writes over the loss itself
            if peek:
                with engine.evaluate():
                    model(x[part::accumulate], y[part::accumulate])
            result = engine.step()
        losses.append(seen.item())
        norms.append(result.grad_norm)
    return losses[:7] + losses[8:], norms[:7] + norms[8:], engine


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-lean", "bf16-lean,states=8bit"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_model_in_cuda_graphs_trains_as_compiled(precision, accumulate):
    """With graphs the losses and norms are those without, over skips and accumulation, and torch did record graphs."""
    from torch._inductor.cudagraph_trees import get_manager

    plain_losses, plain_norms, plain = train_in_graphs(precision, True, accumulate=accumulate)
    torch._dynamo.reset()
    losses, norms, engine = train_in_graphs(precision, "reduce-overhead", accumulate=accumulate)
    manager = get_manager(0, create_if_none_exists=False)
    assert manager is not None
    assert manager.new_graph_id().id >= 2  # forward and backward
    assert engine.progress.applied == plain.progress.applied == 11
    assert losses == pytest.approx(plain_losses, rel=1e-3)
    assert norms == pytest.approx(plain_norms, rel=1e-2)


def test_gradients_in_a_graph_survive_a_forward_before_the_step():
    """Validation between backward and step replays graphs; the step still has its own gradients."""
    torch._dynamo.reset()
    calm_losses, calm_norms, _ = train_in_graphs("bf16", "reduce-overhead", accumulate=2)
    losses, norms, _ = train_in_graphs("bf16", "reduce-overhead", accumulate=2, peek=True)
    assert losses == pytest.approx(calm_losses, rel=1e-3)
    assert norms == pytest.approx(calm_norms, rel=1e-3)
