"""What ranks compare, in words, and the comparison; test_ddp.py has it on ranks."""

import pytest
import torch
from torch import nn

from halfstep.backends.consistency import check_experts, compare_ranks, describe_model, describe_optimizers, is_plain
from halfstep.backends.ranks import Ranks
from halfstep.errors import SettingError


def test_parameters_and_buffers_are_described_by_dtype_and_shape():
    """A frozen parameter is another one than a trainable one."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(requires_grad=False)
    described = describe_model(model)
    assert described["parameter 0.weight"] == "float32 (3, 2)"
    assert described["parameter 0.bias"] == "float32 (3,), frozen"
    assert described["buffer 1.num_batches_tracked"] == "int64 ()"


def test_optimizers_are_described_by_class_settings_and_state():
    """Numbers of a group are part of it, objects without a text are not; a state is described by its hash."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    optimizer.param_groups[0]["callback"] = print
    described = describe_optimizers([optimizer], model)
    assert described["optimizer 0"] == "AdamW"
    assert "weight, bias; " in described["optimizer 0, group 0"]
    assert "betas=(0.9, 0.999)" in described["optimizer 0, group 0"]
    assert "lr=0.5" in described["optimizer 0, group 0"]
    assert "callback" not in described["optimizer 0, group 0"]
    assert len(described) == 2
    hashes = []
    for value in (1.0, 2.0):
        optimizer.state[model.weight] = {"exp_avg": torch.full((2, 2), value)}
        hashes.append(describe_optimizers([optimizer], model)["optimizer 0, state of weight"])
    assert hashes[0] != hashes[1]
    assert "exp_avg float32 (2, 2) with hash" in hashes[0]


def test_expanded_sparse_and_meta_tensors_are_not_broadcast():
    """torch cannot write into them."""
    assert is_plain(torch.ones(3))
    assert not is_plain(torch.ones(1).expand(3))
    assert not is_plain(torch.ones(3).to_sparse())
    assert not is_plain(torch.ones(3, device="meta"))


class OfThree(Ranks):
    """Ranks whose facts differ from this one's in the last."""

    def __init__(self, **changed):
        self._changed = changed

    def gather(self, value):
        return [
            value,
            value,
            value | self._changed if isinstance(value, dict) else (str(self._changed) if self._changed else value),
        ]


def test_experts_of_one_rank_are_rejected_by_name():
    """The mark of an expert layer is allreduce=False; a parameter without it, or with True, is trained."""
    model = nn.Linear(2, 2)
    check_experts(model, "ddp")
    model.weight.allreduce = True
    check_experts(model, "ddp")
    model.weight.allreduce = False
    with pytest.raises(SettingError, match=r'weight are marked as experts of this rank.*backend="ddp"'):
        check_experts(model, "ddp")


def test_equal_ranks_pass():
    """Nothing is raised."""
    compare_ranks({"torch": "2.13"}, OfThree())


def test_a_difference_names_the_values_and_their_ranks():
    """The same text on every rank."""
    with pytest.raises(SettingError, match=r"torch: 2.13 on rank 0, 1, 2.11 on rank 2"):
        compare_ranks({"torch": "2.13"}, OfThree(torch="2.11"))
    with pytest.raises(SettingError, match=r"file job.py: missing on rank 0, 1, abc on rank 2"):
        compare_ranks({"torch": "2.13"}, OfThree(**{"file job.py": "abc"}))
