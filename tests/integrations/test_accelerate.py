"""halfstep.integrations.accelerate in a loop of Accelerate's own kind."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import halfstep
from halfstep.errors import SettingError

accelerate = pytest.importorskip("accelerate", reason="Requires: [accelerate]")
transformers = pytest.importorskip("transformers", reason="Requires: [transformers]")
integration = pytest.importorskip("halfstep.integrations.accelerate")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the library's own warnings


@pytest.fixture(autouse=True)
def _fresh_state():
    """The library keeps its settings for the whole process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def train(
    precision, *, overflows_at=None, accumulate=2, scaler=None, attached=True, optimizer=halfstep.optim.AdamW, cpu=True
):
    """A loop as Accelerate documents it; the fault is in the second micro-batch of a step."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    accelerator = accelerate.Accelerator(cpu=cpu, mixed_precision=precision, gradient_accumulation_steps=accumulate)
    if cpu:
        accelerator.scaler = scaler  # what it makes on a GPU in fp16
    tokens = torch.randint(0, 64, (48, 16), generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = accelerator.prepare(
        model, optimizer(model.parameters(), lr=1e-3), DataLoader(list(tokens), 4)
    )
    session = integration.attach(accelerator) if attached else None
    # By what is in the batch, not by time: on a GPU a replay comes a step later.
    size = 4 * accumulate
    bad = tokens[:0] if overflows_at is None else tokens[size * overflows_at :][:size]
    bad, fault = bad.to(accelerator.device), torch.zeros((), device=accelerator.device)

    def look(module, args):
        fault.fill_((args[0].unsqueeze(1) == bad).all(-1).any())

    model.transformer.wte.register_forward_pre_hook(look)
    model.transformer.h[1].mlp.c_fc.register_forward_hook(lambda m, a, out: out * 1e30 * 1e30 if fault else None)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if session is not None:
        session.close()
    return accelerator, model, session


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_an_overflow_is_named_and_does_not_reach_the_weights(precision):
    """Without a scaler, by a Guard; the loss of the step is reported, too."""
    _, model, session = train(precision, overflows_at=2)
    (autopsy,) = session.watch.autopsies
    assert (autopsy.step, autopsy.cause, autopsy.module) == (3, "forward", "transformer.h.1.mlp.c_fc")
    assert {(e.kind, e.step) for e in session.watch.events} == {("nan-loss", 3), ("skip", 3), ("autopsy", 3)}
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("optimizer", [halfstep.optim.AdamW, torch.optim.AdamW])
def test_the_scaler_is_replaced_with_its_settings_and_state(optimizer):
    """What torch's scaler was set to goes on; the overflow is skipped, counted and named."""
    theirs = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=3)
    accelerator, model, session = train("no", overflows_at=2, scaler=theirs, optimizer=optimizer)
    ours = accelerator.scaler
    assert isinstance(ours, halfstep.GradScaler)
    assert accelerator._optimizers[0].scaler is ours
    assert ours.get_growth_interval() == 3
    assert ours.get_scale() == 512.0  # lowered at step 3, raised at step 6
    assert ours.counts().skips == 1
    assert [(a.step, a.module) for a in session.watch.autopsies] == [(3, "transformer.h.1.mlp.c_fc")]
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [halfstep.optim.AdamW, torch.optim.AdamW])
def test_in_fp16_on_a_gpu_scale_changes_and_skips_are_reported(optimizer):
    """Where Accelerate makes the scaler itself."""
    accelerator, model, session = train("fp16", overflows_at=2, optimizer=optimizer, cpu=False)
    assert isinstance(accelerator.scaler, halfstep.GradScaler)
    assert accelerator.scaler.get_scale() == 2.0**15
    assert [(a.step, a.module) for a in session.watch.autopsies] == [(3, "transformer.h.1.mlp.c_fc")]
    assert {e.kind for e in session.watch.events} >= {"skip", "scale", "nan-loss"}
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_healthy_loop_is_bit_identical():
    """Weights after training, attached or not."""
    states = [train("no", attached=attached)[1].state_dict() for attached in (True, False)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_close_gives_the_accelerator_back():
    """Its own backward, and the optimizer's own step."""
    accelerator, model, _ = train("no")
    assert "backward" not in vars(accelerator)
    assert "step" not in vars(accelerator._optimizers[0].optimizer)
    assert not model._forward_pre_hooks


def test_attach_before_prepare_is_rejected():
    """There is nothing to watch yet."""
    with pytest.raises(SettingError, match="prepare"):
        integration.attach(accelerate.Accelerator(cpu=True))


def test_several_models_are_watched_as_one():
    """A GAN has two models and two optimizers; a NaN in one is skipped, and named with the model's number."""
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    first, second, *optimizers = accelerator.prepare(first, second, *optimizers)
    session = integration.attach(accelerator)
    x = torch.randn(2, 4)
    accelerator.backward(second(first(x)).sum() * float("nan"))
    for optimizer in optimizers:
        optimizer.step()
    session.close()
    (skip,) = [
        event for event in session.watch.events if event.kind == "skip" and "0.weight" in event.data["parameters"]
    ]
    assert set(skip.data["parameters"]) == {"0.weight", "0.bias"}
    assert all(p.isfinite().all() for m in (first, second) for p in m.parameters())


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_of_two_optimizers_is_one_step(scaled):
    """As in a GAN: loss and skip have the same number, parameters the number of their model, and the truth the states of both."""
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    fault = torch.zeros(())
    models[1].register_forward_hook(lambda m, a, out: out * 1e30 * 1e30 if fault else None)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    *models, one, two, loader = accelerator.prepare(*models, *optimizers, DataLoader(torch.randn(16, 4), 2))
    session = integration.attach(accelerator, start=10)
    for index, batch in enumerate(loader):
        with accelerator.accumulate(*models):
            for model, optimizer in zip(models, (one, two), strict=True):
                fault.fill_(index == 3)
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    session.close()
    reported = {(e.kind, e.step) for e in session.watch.events if e.kind != "scale"}
    assert reported == {("nan-loss", 12), ("skip", 12)}
    assert all("1.weight" in str(e) for e in session.watch.events if e.kind == "skip")
    session.truth.expect(master="fp32", states="fp32")
    assert "step" not in vars(one)
