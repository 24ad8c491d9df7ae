"""The process group of a launch, and the device of each rank."""

import pytest
import torch
import torch.distributed as dist

from halfstep.backends import group
from halfstep.backends.group import open_group, pick_rank_device
from halfstep.backends.launch import Launch
from halfstep.errors import HalfstepError, SettingError

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that torch sees this many GPUs; the list collects the devices that are made current."""
    current = []

    def pretend(count):
        monkeypatch.setattr(group, "pick_device", torch.device)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
        return current

    return pretend


def test_each_rank_uses_the_gpu_of_its_local_rank(gpus):
    """And makes it the current device."""
    current = gpus(4)
    assert pick_rank_device(Launch("torchrun", 6, 8, 2, 4), "cuda") == torch.device("cuda:2")
    assert current == [2]


def test_fewer_gpus_than_local_ranks_are_rejected(gpus):
    """With both counts and what is visible."""
    gpus(2)
    with pytest.raises(SettingError, match=r"4 ranks on this machine, and torch sees 2 cuda devices"):
        pick_rank_device(Launch("torchrun", 0, 4, 0, 4), "cuda")


def test_a_task_that_sees_only_its_own_gpu_uses_it(gpus, monkeypatch):
    """As with srun --gpus-per-task=1; without such a binding the same count is an error."""
    gpus(1)
    launch = Launch("slurm", 3, 4, 3, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert pick_rank_device(launch, "cuda") == torch.device("cuda:0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(SettingError, match="sees 1 cuda"):
        pick_rank_device(launch, "cuda")


def test_one_device_for_all_ranks_is_rejected(gpus):
    """A device with an index names the same GPU on every rank."""
    gpus(4)
    with pytest.raises(SettingError, match=r"'cuda:1' would put all 2 ranks on one device"):
        pick_rank_device(Launch("torchrun", 0, 2, 0, 2), "cuda:1")


def test_one_process_needs_no_group_unless_it_is_asked_for():
    """A group of one needs no address, and is closed at the end, also by an error."""
    with open_group(Launch(), CPU, timeout_seconds=5) as context:
        assert context.process_group is None
        assert not dist.is_initialized()

    def fail():
        with open_group(Launch(), CPU, timeout_seconds=5, always=True) as context:
            assert dist.is_initialized()
            assert context.process_group is not None
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert not dist.is_initialized()


def test_ranks_that_never_come_are_reported():
    """With the address, the timeout and what to check."""
    launch = Launch("slurm", 1, 2, 1, 2, "127.0.0.1", 9)
    with (
        pytest.raises(HalfstepError, match=r"Rank 1 of 2 did not reach the others at 127.0.0.1:9 within 1 s"),
        open_group(launch, CPU, timeout_seconds=1),
    ):
        pass


def test_devices_without_messages_between_ranks_are_rejected():
    """By name, before anything waits."""
    with (
        pytest.raises(SettingError, match="cannot exchange tensors on mps"),
        open_group(Launch("torchrun", 0, 2, 0, 2), torch.device("mps"), timeout_seconds=1),
    ):
        pass
