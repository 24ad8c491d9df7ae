"""One process, one device: hooks that do nothing, and the way to the user's own module."""

import contextlib

import pytest
import torch
from torch import nn

from halfstep.backends import SingleDevice
from halfstep.errors import SettingError
from halfstep.precision.policy import Policy


def as_ddp(module):
    """A DistributedDataParallel around `module`, without a process group."""
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = module
    return wrapper


def test_a_plain_module_is_itself():
    """Nothing to unwrap; a submodule called `module` is the user's own affair."""
    backend, model = SingleDevice(), nn.Module()
    model.module = nn.Linear(2, 2)
    assert backend.unwrap(model) is model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch by its own compiler, in some versions
def test_wrappers_are_taken_off_in_any_order():
    """torch.compile's, DistributedDataParallel's, and both around each other."""
    backend, model = SingleDevice(), nn.Linear(2, 2)
    assert backend.unwrap(torch.compile(model, backend="eager")) is model
    assert backend.unwrap(as_ddp(model)) is model
    assert backend.unwrap(torch.compile(as_ddp(model), backend="eager")) is model
    assert backend.unwrap(as_ddp(torch.compile(model, backend="eager"))) is model


def test_no_sync_is_the_models_own_if_it_has_one():
    """A wrapper that reduces gradients is asked to wait; any other model gets an empty block."""
    backend, entered = SingleDevice(), []

    class Reducing(nn.Module):
        @contextlib.contextmanager
        def no_sync(self):
            entered.append("in")
            yield
            entered.append("out")

    with backend.no_sync(nn.Linear(2, 2)):
        assert entered == []
    with backend.no_sync(Reducing()):
        assert entered == ["in"]
    assert entered == ["in", "out"]


def test_one_rank_agrees_with_itself():
    """The flag is the flag, nothing is reduced, and closing twice is fine."""
    backend, flag = SingleDevice(), torch.ones(())
    assert backend.agree(flag) is flag
    assert backend.reduce_dtype() is None
    assert (backend.name, backend.rank, backend.world_size) == ("single", 0, 1)
    backend.close()
    backend.close()


def test_a_reducing_wrapper_is_known_and_lean_weights_in_it_are_refused():
    """DistributedDataParallel sums in fp32; casting its weights, or another format for the sums, is an error."""
    backend = SingleDevice()
    backend.check(Policy.parse("bf16-lean,reduce=bf16"))
    backend.unwrap(as_ddp(nn.Linear(2, 2)))
    assert backend.reduce_dtype() == "fp32"
    for fine in ("fp32", "tf32", "bf16", "fp16"):
        backend.check(Policy.parse(fine))
    for bad, why in (
        ("bf16-lean", "drift apart"),
        ("fp16-lean", "drift apart"),
        ("bf16,reduce=bf16", "would do nothing"),
    ):
        with pytest.raises(SettingError, match=why):
            backend.check(Policy.parse(bad))
