"""Buffers that a skipped forward changed are put back; all others are left alone."""

import logging

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.engine.buffers import BufferGuard
from halfstep.engine.engine import Engine

FLAG, CLEAR = torch.ones(()), torch.zeros(())


class Counters(nn.Module):
    """Buffers of several kinds that can be changed by hand."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("narrow", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("constant", torch.arange(5.0))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("missing", None)

    def forward(self):
        self.mean.add_(1)
        self.narrow.mul_(2).add_(1)
        self.count.add_(1)
        self.seen.fill_(True)
        self.empty.add_(1)


def values(model):
    return {name: b.clone() for name, b in model.named_buffers()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def window(guard, forward, flag):
    guard.save()
    forward()
    guard.restore_if(flag)


def test_a_flagged_step_puts_buffers_of_every_dtype_back():
    """Floats, 16-bit floats, integers and booleans come back; objects and dtypes stay."""
    model = Counters()
    guard, before, objects = BufferGuard(model), values(model), dict(model.named_buffers())
    for _ in range(3):
        window(guard, model, FLAG)
        assert equal(values(model), before)
        assert all(b is objects[name] for name, b in model.named_buffers())


def test_a_clear_step_leaves_the_changes():
    """Nothing is put back when the step happened."""
    model = Counters()
    guard = BufferGuard(model)
    for i in range(3):
        window(guard, model, CLEAR)
        assert model.count == i + 1
        assert model.mean.tolist() == [i + 1.0] * 3


def test_skips_and_steps_can_alternate():
    """Only the forwards of steps that happened are counted."""
    model = Counters()
    guard = BufferGuard(model)
    for flag in (CLEAR, FLAG, FLAG, CLEAR, FLAG, CLEAR):
        window(guard, model, flag)
    assert model.count == 3


@pytest.mark.parametrize("first", [FLAG, CLEAR], ids=["after a skip", "after a step"])
def test_nan_in_batch_norm_statistics_is_undone(first):
    """An overflowing forward leaves NaN in running averages and a count too high; a flagged step takes all of it back."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None))
    guard = BufferGuard(model)
    window(guard, lambda: model(torch.randn(4, 3)), first)
    before = values(model)

    def overflow():
        model(torch.full((4, 3), torch.inf))
        assert not model[0].running_mean.isfinite().any()
        assert model[0].num_batches_tracked == before["0.num_batches_tracked"] + 1

    window(guard, overflow, FLAG)
    assert equal(values(model), before)


def test_all_forwards_of_a_window_are_undone_together():
    """Saving again inside a window does nothing: the copy is from before its first forward."""
    model = Counters()
    guard, before = BufferGuard(model), values(model)
    for _ in range(4):
        guard.save()
        model()
    guard.restore_if(FLAG)
    assert equal(values(model), before)


def test_buffers_that_begin_to_change_late_are_put_back():
    """Every buffer is guarded in every window, so one that changes for the first time at step 3 is put back too."""
    model = Counters()
    guard = BufferGuard(model)
    window(guard, model, CLEAR)
    window(guard, model, CLEAR)
    window(guard, lambda: model.constant.add_(1), FLAG)
    assert model.constant.tolist() == [0, 1, 2, 3, 4]


def test_changes_that_torch_does_not_count_are_put_back():
    """Batch norm's kernels write without counting a new version of the tensor; so does .data."""
    model = Counters()
    guard = BufferGuard(model)
    for _ in range(2):
        window(guard, lambda: model.mean.data.fill_(torch.nan), FLAG)
        assert model.mean.tolist() == [0.0] * 3


@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_replaced_buffer_objects_are_put_back(times):
    """`self.mean = self.mean + 1` makes a new tensor each time; its values go back, however often it was replaced."""
    for _ in range(10):  # a freed tensor's address may be used again, so one try proves little
        model = Counters()
        guard = BufferGuard(model)

        def forward(model=model):
            for _ in range(times):
                model.mean = model.mean + 1

        window(guard, forward, FLAG)
        assert model.mean.tolist() == [0.0] * 3
        window(guard, forward, CLEAR)
        assert model.mean.tolist() == [float(times)] * 3
        window(guard, forward, FLAG)
        assert model.mean.tolist() == [float(times)] * 3


@pytest.mark.parametrize(
    "change",
    [lambda b: torch.cat([b, torch.ones(1)]), lambda b: (b + 1).half()],
    ids=["shape", "dtype"],
)
def test_a_buffer_of_another_shape_or_dtype_is_put_back_or_said(change, caplog):
    """A cache that grew cannot take its old values in place; it must not stay changed in silence."""
    model = Counters()
    guard = BufferGuard(model)

    def forward():
        model.mean = change(model.mean)

    with caplog.at_level(logging.WARNING, logger="halfstep"):
        window(guard, forward, FLAG)
    assert model.mean.tolist() == [0.0] * 3 or "mean" in caplog.text


@pytest.mark.parametrize("contiguous", [True, False])
def test_values_changed_between_steps_are_what_a_skip_goes_back_to(contiguous):
    """Buffers are found once and copied at every step: as they are then, also if they are the same tensors as before."""
    model = nn.Module()
    model.register_buffer("table", torch.zeros(3, 4) if contiguous else torch.zeros(4, 3).t())
    guard = BufferGuard(model)
    for step in range(3):
        model.table.fill_(step)
        window(guard, lambda: model.table.fill_(torch.nan), FLAG)
        assert model.table.tolist() == [[float(step)] * 4] * 3


def test_a_buffer_with_other_memory_is_put_back():
    """A buffer that moves between steps (`model.to()`), or is another row of one table, is found again."""
    model = Counters()
    guard = BufferGuard(model)
    window(guard, model, CLEAR)
    table = torch.arange(12.0).view(4, 3)
    for row in (0, 1, 2, 1):
        model.mean.data = table[row].clone()
        window(guard, lambda: model.mean.fill_(torch.nan), FLAG)
        assert model.mean.tolist() == table[row].tolist()
    for row in (0, 1, 2, 1):
        model.mean = table[row]
        window(guard, lambda: model.mean.fill_(torch.nan), FLAG)
        assert table.tolist() == torch.arange(12.0).view(4, 3).tolist()


def test_buffers_are_found_once():
    """A network has hundreds of buffers: the names are not listed at every step."""
    model = Counters()
    guard = BufferGuard(model)
    window(guard, model, CLEAR)
    guard.named = None
    for flag in (CLEAR, FLAG):
        window(guard, lambda: model.mean.add_(1), flag)
    assert model.mean.tolist() == [2.0] * 3  # one of its own forward, one of the clear step


def test_a_replaced_buffer_is_freed():
    """A forward that replaces a large buffer at every step holds no more than one."""
    model = nn.Module()
    model.register_buffer("mask", torch.zeros(3))
    guard = BufferGuard(model)

    def forward():
        model.mask = model.mask + 1

    window(guard, forward, CLEAR)
    guard.save()
    old = StorageWeakRef(model.mask.untyped_storage())
    forward()
    assert old.expired()


def test_a_buffer_that_appears_does_no_harm():
    """A buffer registered during the forward has no earlier value to go back to, and is guarded from then on."""
    model = Counters()
    guard = BufferGuard(model)
    window(guard, lambda: model.register_buffer("new", torch.ones(1)), FLAG)
    window(guard, lambda: model.new.add_(1), FLAG)
    assert model.new.tolist() == [1.0]


def test_forget_closes_the_window():
    """After forget nothing is put back, and the next window starts from the values as they are."""
    model = Counters()
    guard = BufferGuard(model)
    guard.save()
    model()
    guard.forget()
    guard.restore_if(FLAG)
    assert model.count == 1
    window(guard, model, FLAG)
    assert model.count == 1


def test_without_a_window_nothing_happens():
    """restore_if before any save does nothing, and a model without buffers is fine."""
    model = Counters()
    model()
    BufferGuard(model).restore_if(FLAG)
    assert model.count == 1
    window(BufferGuard(nn.Linear(2, 2)), lambda: None, FLAG)


def test_meta_buffers_are_left_out():
    """A buffer without storage has nothing to save."""
    model = nn.BatchNorm1d(3, device="meta")
    window(BufferGuard(model), lambda: None, FLAG)


def test_non_contiguous_buffers_come_back():
    """The flat select does not depend on the layout in memory."""
    model = nn.Module()
    model.register_buffer("wide", torch.arange(12.0).reshape(3, 4).t())
    model.register_buffer("image", torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last))
    before = values(model)

    def forward():
        model.wide.mul_(3)
        model.image.mul_(3)

    window(BufferGuard(model), forward, FLAG)
    assert equal(values(model), before)
    assert model.image.is_contiguous(memory_format=torch.channels_last)


def test_the_flag_is_not_read_by_the_host():
    """Restoring runs under a mode that forbids reading a value back, flagged or not."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoReading(TorchDispatchMode):
        def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default, "the host read a device value"
            return func(*args, **(kwargs or {}))

    model = Counters()
    guard = BufferGuard(model)
    for flag in (FLAG, CLEAR):
        guard.save()
        model()
        with NoReading():
            guard.restore_if(flag)


def test_buffers_that_cannot_be_written_into_do_not_stop_a_step():
    """A graph's sparse edges and an expanded mask stay as they are; the others are put back."""
    model = Counters()
    model.register_buffer("edges", torch.eye(3).to_sparse())
    model.register_buffer("mask", torch.zeros(1).expand(4))
    guard = BufferGuard(model)
    guard.save()
    model()
    guard.restore_if(FLAG)
    assert not model.mean.any()
    assert torch.equal(model.edges.to_dense(), torch.eye(3))


@pytest.mark.parametrize("abort", ["forward", "loss", "backward", "between"])
@pytest.mark.parametrize("num_before", [0, 1])
def test_a_skip_after_an_aborted_window_reverts_to_its_own_start(abort, num_before):
    """The skipped window's forwards are undone, and not those of a window that was dropped before it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None))
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", accumulate=2)

    def train(num, factor=1.0):
        for _ in range(num):
            with engine.forward():
                loss = model(torch.randn(4, 3)).pow(3).mean() * factor
            engine.backward(loss)
            result = engine.step()
        return result

    train(2)
    if num_before:
        train(num_before)

    def fail(*_):
        raise RuntimeError("aborted")

    with pytest.raises(RuntimeError, match="aborted"):
        with engine.forward():
            out = model(torch.randn(4, 3))
            if abort == "forward":
                fail()
        if abort == "loss":
            fail()
        if abort == "backward":
            out.register_hook(fail)
        engine.backward(out.pow(2).mean())
        fail()
    engine.reset_window()
    before = values(model)
    assert train(2, factor=torch.inf).skipped
    assert equal(values(model), before)
    assert not train(2).skipped
    assert not equal(values(model), before)
