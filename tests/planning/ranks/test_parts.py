"""The parts of a model that sharding divides."""

import torch
from torch import nn

from halfstep.planning.ranks.parts import Units, find_units, model_parts
from halfstep.planning.ranks.shards import count_parts, whole_bytes
from halfstep.precision.policy import Policy


def blocks():
    """Two units and a head, of which one parameter is frozen."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8), nn.LayerNorm(8))
    model[2].bias.requires_grad_(False)
    return model


def test_units_are_what_the_job_names():
    """By class or by pattern; everything else is gathered by the root."""
    assert find_units(blocks(), (nn.Linear,)) == find_units(blocks(), ("0", "1")) == Units(largest=40, root=16)
    assert find_units(blocks(), ()) == Units(largest=0, root=76)


def test_gradients_are_those_of_trainable_parameters():
    """In the dtype of the policy: 16-bit weights accumulate in fp32, and fp32 weights have fp32 gradients."""
    model, policy = blocks().to(torch.bfloat16), Policy.parse("bf16-lean")
    once, summed = (whole_bytes(count_parts(model_parts(model, (), policy, k))) for k in (1, 2))
    assert once == {"weights": 76 * 2, "gradients": 68 * 2}
    assert summed == {"weights": 76 * 2, "gradients": 68 * 4}
    model[2].float()
    assert whole_bytes(count_parts(model_parts(model, (), policy, 1)))["gradients"] == 60 * 2 + 8 * 4


def test_parameters_outside_the_units_are_marked():
    """The root gathers them once per micro-batch instead of twice."""
    parts = model_parts(blocks(), (nn.Linear,), Policy(), 1)
    assert {part.shape for part in parts if part.at_root} == {(8,)}
    assert sum(part.at_root for part in parts if part.category == "weights") == 2
