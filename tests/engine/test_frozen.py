"""Frozen parameters that change under a lean preset: one warning, and none where nothing is lost."""

import pytest
import torch
from torch import nn

from halfstep import Engine


class Pair(nn.Module):
    """A trained encoder and a frozen one, which may follow it."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))
        self.key[0].load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", torch.zeros(8))

    def forward(self, x):
        return self.query(x) + self.key(x)


def in_place(key, query):
    with torch.no_grad():
        key.mul_(0.999).add_(query, alpha=0.001)


def through_data(key, query):
    key.data.mul_(0.9).add_(query.data, alpha=0.1)


def new_storage(key, query):
    key.data = key.data * 0.999 + query.data * 0.001


def follow(edit, model):
    for key, query in zip(model.key.parameters(), model.query.parameters(), strict=True):
        edit(key, query)


def train(engine, model, steps, after=lambda step: None):
    torch.manual_seed(1)
    for step in range(steps):
        with engine.forward():
            loss = (model(torch.randn(4, 8)).float() - 1).square().mean()
        engine.backward(loss)
        engine.step()
        after(step)


def build(precision, **options):
    torch.manual_seed(0)
    model = Pair()
    return model, Engine(model, torch.optim.SGD(model.parameters(), lr=0.5), precision=precision, **options)


def warnings_in(caplog):
    return [r.message for r in caplog.records if r.levelname == "WARNING" and "Frozen parameters" in r.message]


@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean,master=fp32"])
@pytest.mark.parametrize("edit", [in_place, through_data, new_storage])
def test_a_momentum_encoder_in_16_bits_is_named_once_with_the_way_out(edit, precision, caplog):
    """Whatever way it is written: in place, through .data, or as new storage."""
    model, engine = build(precision)
    train(engine, model, 12, lambda _: follow(edit, model))
    (warning,) = warnings_in(caplog)
    assert "key.0.weight" in warning
    assert "query" not in warning
    assert "keep_fp32=key in the precision" in warning


def test_an_encoder_that_follows_every_other_step_is_named(caplog):
    """Target networks are often updated with an interval of two."""
    model, engine = build("bf16-lean")
    train(engine, model, 12, lambda step: follow(in_place, model) if step % 2 else None)
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-lean,keep_fp32=key"])
def test_a_momentum_encoder_in_fp32_gives_no_warning(precision, caplog):
    """Nothing is lost there, and it follows."""
    model, engine = build(precision)
    before = model.key[0].weight.clone()
    train(engine, model, 4, lambda _: follow(in_place, model))
    assert not warnings_in(caplog)
    assert (model.key[0].weight != before).float().mean() > 0.9


def test_a_base_that_does_not_change_gives_no_warning(caplog):
    """LoRA: also with validation on the EMA after every step, which the Engine itself writes, and one load_state_dict."""
    model, engine = build("bf16-lean", ema=0.9)

    def validate(step):
        if step == 3:
            model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})
        with engine.evaluate(ema=True):
            model(torch.randn(2, 8))

    train(engine, model, 12, validate)
    assert not warnings_in(caplog)


def test_a_module_that_is_frozen_now_and_then_gives_no_warning(caplog):
    """As in a GAN, or with gradual unfreezing: its changes are those of the optimizer, and it has masters."""
    model, engine = build("bf16-lean")
    train(engine, model, 12, lambda step: model.key.requires_grad_(step % 2 == 0))
    assert not warnings_in(caplog)


def test_unfreezing_a_16_bit_base_where_weights_are_fp32_is_reported_once(caplog):
    """It has no master there; the same model stays silent while the base is frozen."""
    torch.manual_seed(0)
    model = Pair()
    model.key.bfloat16()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.5), precision="bf16")
    train(engine, model, 2)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    model.key.requires_grad_(True)
    train(engine, model, 3)
    (warning,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert "key.0.weight" in warning
    assert "without a master" in warning


def test_buffers_are_not_rounded():
    """A queue or running statistics stay fp32 under lean presets."""
    model, _ = build("bf16-lean")
    assert model.queue.dtype is torch.float32
