"""Which parameters can be trained, and how the others are rejected."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from halfstep.errors import SettingError
from halfstep.optim import SGD, AdamW, Lion
from halfstep.optim.trainable import check_model, unsupported_kind


@pytest.fixture
def mesh():
    """A device mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def lazy():
    return nn.LazyLinear(3).weight


ODD = {
    "a tensor subclass, TwoTensor": lambda: nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3))),
    "uninitialized": lazy,
    r"not a float \(float8_e4m3fn\)": lambda: nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn)),
    r"layout is sparse_coo": lambda: nn.Parameter(torch.eye(3).to_sparse()),
}


@pytest.mark.parametrize("cls", [AdamW, SGD, Lion])
@pytest.mark.parametrize(("kind", "build"), ODD.items())
def test_parameters_that_cannot_be_trained_are_rejected_by_name(cls, kind, build):
    """In the constructor and in add_param_group, with the parameter's name where the optimizer has names."""
    plain, odd = nn.Parameter(torch.ones(2)), build()
    with pytest.raises(SettingError, match=rf"{cls.__name__} cannot train parameter head: it is .*{kind}"):
        cls([("body", plain), ("head", odd)], lr=0.1)
    optimizer = cls([plain], lr=0.1)
    with pytest.raises(SettingError, match=rf"parameter number 0 of its group: it is .*{kind}"):
        optimizer.add_param_group({"params": [odd]})
    assert len(optimizer.param_groups) == 1


class Whole(AdamW):
    """A rule that needs whole tensors, as Muon's does."""

    elementwise = False


def test_sharded_parameters_are_rejected_where_a_part_is_not_enough(mesh):
    """By the Engine on a backend that does not shard, and by a rule that is not elementwise; the message has the way out."""
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh))
    with pytest.raises(SettingError, match=r"Whole cannot train parameter weight: it is a DTensor.*whole tensors"):
        Whole(model.named_parameters())
    with pytest.raises(
        SettingError, match=r"The Engine cannot train parameter weight: it is a DTensor.*halfstep.optim"
    ):
        check_model(model)
    AdamW(model.parameters())
    model.weight.requires_grad_(False)
    check_model(model)


def test_a_sharded_parameter_is_looked_into(mesh):
    """Parts of quantised weights cannot be trained either."""
    part = DTensor.from_local(torch.ones(3).to(torch.float8_e4m3fn), mesh, [Shard(0)])
    with pytest.raises(SettingError, match=r"not a float \(float8_e4m3fn\)"):
        AdamW([nn.Parameter(part)])


def test_sharding_wrappers_are_rejected():
    """FullyShardedDataParallel may show views that look like plain parameters, so its modules are recognized by class."""

    class FullyShardedDataParallel(nn.Module):
        pass

    with pytest.raises(SettingError, match=r'cannot train 0: it is FullyShardedDataParallel.*backend="fsdp"'):
        check_model(nn.Sequential(FullyShardedDataParallel()))


def test_a_parameter_unfrozen_later_is_rejected_by_the_step():
    """Frozen, it passes the constructor; with a gradient the step rejects it before anything moves."""
    odd = nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)), requires_grad=False)
    optimizer = SGD([odd], lr=0.1)
    odd.requires_grad_(True).grad = torch.ones_like(odd)
    with pytest.raises(SettingError, match="TwoTensor"):
        optimizer.step()


def test_plain_fake_and_meta_parameters_can_be_trained():
    """Also those of the planner, which have no data, and of a user's own subclass of nn.Parameter."""

    class Named(nn.Parameter):
        pass

    with FakeTensorMode():
        fake = nn.Parameter(torch.ones(3))
    for param in (nn.Parameter(torch.ones(3)), Named(torch.ones(3)), fake, nn.Parameter(torch.ones(3, device="meta"))):
        assert unsupported_kind(param) is None
        AdamW([param])
