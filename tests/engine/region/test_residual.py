"""residual=fp32: the stream between repeated blocks of a lean model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import SettingError

PRECISIONS = ["bf16-lean", "fp16-lean"]


class Block(nn.Module):
    """A pre-norm residual block that records what it adds to."""

    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, scale=1.0):
        self.stream, self.normed = x.dtype, self.norm(x).dtype
        return x + scale * self.second(torch.relu(self.first(self.norm(x))))


class Net(nn.Module):
    """A stack of blocks, called with keywords as transformers do."""

    def __init__(self, depth=3):
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Linear(8, 8),
            nn.ModuleList(Block() for _ in range(depth)),
            nn.Linear(8, 2),
        )

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x=x, scale=0.5)
        return self.head(x)


def stepped(precision, model=None):
    torch.manual_seed(0)
    model = model or Net()
    engine = halfstep.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision=precision)
    with engine.forward():
        loss = model(torch.randn(4, 8)).float().square().mean()
    engine.backward(loss)
    engine.step()
    return model, engine


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_stream_is_fp32_and_norms_give_16_bits(precision):
    """Blocks add to fp32, their layers compute in 16 bits, and the truth table has a row for it."""
    model, engine = stepped(f"{precision},residual=fp32")
    half = torch.bfloat16 if precision.startswith("bf16") else torch.float16
    assert [block.stream for block in model.blocks] == [torch.float32] * 3
    assert [block.normed for block in model.blocks] == [half] * 3
    assert dict(engine.truth().rows)["residual stream"] == "fp32 in 3 blocks"
    with engine.evaluate():
        model(torch.randn(4, 8))
    assert model.blocks[0].stream is torch.float32
    engine.close()
    assert not any(block._forward_pre_hooks for block in model.blocks)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_without_the_key_the_stream_has_16_bits(precision):
    """The default of lean presets, which the table does not mention."""
    model, engine = stepped(precision)
    assert all(block.stream.itemsize == 2 for block in model.blocks)
    assert "residual stream" not in dict(engine.truth().rows)
    engine.close()


def test_an_fp32_stream_is_more_accurate_with_depth():
    """The error of the output of forty blocks against fp64 is smaller than with a 16-bit stream."""
    errors = {}
    for key in ("", ",residual=fp32"):
        torch.manual_seed(0)
        model = Net(depth=40)
        engine = halfstep.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision=f"bf16-lean{key}")
        exact = Net(depth=40).double()
        exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
        with engine.evaluate():
            result = model(x).double()
        errors[key] = (result - exact(x.double())).norm().item()
        engine.close()
    assert errors[",residual=fp32"] < 0.8 * errors[""]


def test_a_model_without_repeated_blocks_is_rejected():
    """The key would have no effect there; nothing of the model is changed."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(SettingError, match="residual=fp32 applies to repeated blocks, and Sequential has none"):
        halfstep.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16-lean,residual=fp32")
    assert model[0].weight.dtype is torch.float32
