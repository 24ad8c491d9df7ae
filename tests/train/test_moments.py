"""8-bit moments reach the same loss as fp32 ones, within the noise between seeds.

Weights and arithmetic stay fp32, so that nothing but the moments differs, and a CPU without 16-bit arithmetic is as quick.
"""

import statistics

import pytest
import torch
import torch.nn.functional as F

from halfstep.engine.engine import Engine
from halfstep.jobs.targets import load_target
from halfstep.report.topics import TOPICS
from halfstep.train import TrainConfig, train

pytestmark = pytest.mark.slow
SEEDS = range(5)


def same_within_noise(a, b):
    """The stated test: the means differ by less than three standard errors of their difference (Welch)."""
    error = (statistics.variance(a) / len(a) + statistics.variance(b) / len(b)) ** 0.5
    return abs(statistics.mean(a) - statistics.mean(b)) < 3 * error


def test_digits_with_8_bit_moments_reach_the_accuracy_of_fp32(tmp_path):
    """Validation loss and accuracy over five seeds."""
    validations = {}
    for precision in ("fp32", "fp32,states=8bit"):
        values = []
        for seed in SEEDS:
            config = TrainConfig(batch=64, epochs=8, seed=seed, eval_every=8)
            out = tmp_path / f"{precision.replace(',', '-').replace('=', '-')}-{seed}"
            values.append(train(load_target("digits").job, config, precision=precision, out=out).validation)
        validations[precision] = values
    for key in ("loss", "metric"):
        a, b = ([v[key] for v in values] for values in validations.values())
        assert same_within_noise(a, b), (key, a, b)
    assert all(v["metric"] >= 0.93 for values in validations.values() for v in values)


class CharModel(torch.nn.Module):
    """A small character-level transformer."""

    def __init__(self, num_chars, length=64, dim=48):
        super().__init__()
        self.embed, self.place = torch.nn.Embedding(num_chars, dim), torch.nn.Parameter(torch.zeros(length, dim))
        layer = torch.nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.body = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = torch.nn.Linear(dim, num_chars)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        h = self.embed(x) + self.place
        return self.head(self.body(h, mask=self.mask.to(h.dtype), is_causal=True))


def final_loss(precision, seed, steps=100):
    text = "\n".join(str(make()) for make in TOPICS.values())
    chars = sorted(set(text))
    data = torch.tensor([chars.index(c) for c in text])
    torch.manual_seed(seed)
    model = CharModel(len(chars))
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=3e-3), precision, max_norm=1.0)
    losses = []
    for _ in range(steps):
        at = torch.randint(0, len(data) - 65, (16,))
        batch = torch.stack([data[i : i + 65] for i in at])
        with engine.forward():
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return statistics.mean(losses[-20:])


def test_a_character_transformer_with_8_bit_moments_reaches_the_loss_of_fp32():
    """Mean loss of the last 20 steps over five seeds."""
    a, b = ([final_loss(p, seed) for seed in SEEDS] for p in ("fp32", "fp32,states=8bit"))
    assert same_within_noise(a, b), (a, b)
    assert max(a + b) < 2.6
