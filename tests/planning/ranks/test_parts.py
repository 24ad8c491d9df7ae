"""The parts of a model that sharding divides."""

import pytest
import torch
from torch import nn

from halfstep.errors import SettingError
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
    by_class, by_name = (find_units(blocks(), shard, Policy()) for shard in ((nn.Linear,), ("0", "1")))
    assert by_class == by_name == Units(largest=40, root=16)
    assert find_units(blocks(), (), Policy()) == Units(largest=0, root=76)


def test_units_are_repeated_blocks_by_default():
    """As the FSDP backend chooses them; a module that stays in fp32 among 16-bit ones is a unit too."""
    block = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3)]
    model = nn.ModuleDict({"stem": nn.Linear(2, 4), "blocks": nn.Sequential(*block), "head": nn.Linear(4, 1)})
    assert find_units(model, (), Policy.parse("bf16-lean")) == Units(largest=28, root=12 + 5)
    assert find_units(model, (), Policy.parse("bf16-lean,keep_fp32=head")) == Units(largest=28, root=12)


def test_names_of_no_module_are_rejected():
    """As by the FSDP backend: a unit that does not exist would be planned as part of the root."""
    with pytest.raises(SettingError, match=r"blocks\.\*"):
        find_units(blocks(), ("blocks.*",), Policy())


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
