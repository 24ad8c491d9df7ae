"""Several processes started where one is supported."""

import pytest

from halfstep.backends import reject_distributed_launch
from halfstep.errors import SettingError


@pytest.mark.parametrize("world_size", [None, "", "1"])
def test_one_process_passes(monkeypatch, world_size):
    """No launcher, or one with a single process."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    reject_distributed_launch("halfstep train")


def test_several_processes_are_rejected_with_what_to_do(monkeypatch):
    """torchrun's environment, and the way that exists."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SettingError, match=r"WORLD_SIZE=4.*DistributedDataParallel"):
        reject_distributed_launch("halfstep train")
