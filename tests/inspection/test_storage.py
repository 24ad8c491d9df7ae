"""States of any optimizer: their formats and bytes."""

import torch
from torch import nn

import halfstep
from halfstep.inspection.storage import bytes_of, state_format, states_in


def test_states_of_bitsandbytes_are_8_bit():
    """Codes with a scale next to them are 8-bit states; scales and code tables are none by themselves."""
    entries = {
        "step": 1,
        "state1": torch.zeros(4096, dtype=torch.uint8),
        "absmax1": torch.zeros(16),
        "qmap1": torch.zeros(256),
        "state2": torch.zeros(4096),
    }
    states = dict(states_in(entries))
    assert list(states) == ["state1", "state2"]
    assert state_format("state1", states["state1"], entries) == "8bit"
    assert state_format("state2", states["state2"], entries) == "fp32"


class OptimState8bit(torch.Tensor):
    """As torchao's: shows fp32 and stores codes and scales."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_states_of_torchao_are_8_bit():
    """The format is that of the class, and the bytes those of the tensors inside."""
    state = OptimState8bit(torch.zeros(512, dtype=torch.uint8), torch.zeros(2))
    assert state_format("exp_avg", state, {"exp_avg": state}) == "8bit"
    assert bytes_of(state) == 520


def test_states_of_halfstep_count_their_scales_in_bytes():
    """8-bit moments are 8-bit states, and their bytes include one scale per block."""
    model = nn.Linear(64, 64, bias=False).bfloat16()
    optimizer = halfstep.optim.AdamW(model.parameters(), states="8bit")
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    inspection = halfstep.inspect(model, optimizer)
    inspection.expect(states="8bit", master="fp32")
    assert inspection.as_dict()["facts"]["states"]["bytes"] == 2 * (4096 + 4 * 16)


def test_nested_states_are_found():
    """Shampoo-like optimizers keep lists of tensors per parameter."""
    entries = {"factors": [torch.zeros(2, 2), torch.zeros(3, 3, dtype=torch.bfloat16)], "count": torch.zeros(())}
    assert [(name, tensor.shape[0]) for name, tensor in states_in(entries)] == [("factors", 2), ("factors", 3)]
