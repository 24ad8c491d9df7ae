"""Copies of tensors in host memory that is allocated once."""

import pytest
import torch

from halfstep.checkpoint.contents import Contents
from halfstep.checkpoint.snapshot import Snapshot

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int16,
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


def contents(*tensors):
    """Contents of one file."""
    return Contents({"file": {str(i): tensor for i, tensor in enumerate(tensors)}}, {"a.json": b"{}"})


def odd(device="cpu"):
    """Tensors of every dtype and of odd sizes, empty, with one number, transposed and conjugated."""
    g = torch.Generator().manual_seed(0)
    values = [torch.randint(0, 2, (3, 5), generator=g).to(dtype) for dtype in DTYPES]
    values += [torch.ones(()), torch.zeros(0, 3), torch.randn(4, 6, generator=g).t(), torch.tensor([1 + 2j]).conj()]
    return [value.to(device) for value in values]


def same(copy, tensor):
    """Whether a copy has the dtype, shape and bits of a tensor."""
    copied, original = copy.resolve_conj().float().cpu() if not copy.is_complex() else copy.cpu(), tensor.cpu()
    original = original.resolve_conj() if original.is_complex() else original.float()
    return copy.dtype == tensor.dtype and copy.shape == tensor.shape and bool((copied == original).all())


def test_copies_are_equal_and_do_not_change():
    """For every dtype and layout, in the order of the original."""
    tensors, snapshot = odd(), Snapshot()
    copies, ready = snapshot.copy(contents(*tensors))
    ready()
    assert list(copies.tensors["file"]) == [str(i) for i in range(len(tensors))]
    assert copies.documents == {"a.json": b"{}"}
    for copy, tensor in zip(copies.tensors["file"].values(), odd(), strict=True):
        assert same(copy, tensor), tensor.dtype
        assert copy.is_contiguous()
    for tensor in tensors[:8]:
        tensor.fill_(0)
    assert same(copies.tensors["file"]["0"], odd()[0])


def test_memory_is_allocated_once(monkeypatch):
    """Later copies of the same tensors use it again; tensors larger than a chunk have one of their own."""
    monkeypatch.setattr("halfstep.checkpoint.snapshot._CHUNK_BYTES", 256)
    tensors = [torch.arange(float(n)) for n in (10, 100, 20, 30, 5, 70)]
    snapshot = Snapshot()
    first, _ = snapshot.copy(contents(*tensors))
    places, num_bytes = [t.data_ptr() for t in first.tensors["file"].values()], snapshot.num_bytes
    assert num_bytes >= sum(4 * t.numel() for t in tensors)
    again, _ = snapshot.copy(contents(*[t + 1 for t in tensors]))
    assert [t.data_ptr() for t in again.tensors["file"].values()] == places
    assert snapshot.num_bytes == num_bytes
    assert [t.tolist() for t in again.tensors["file"].values()] == [(t + 1).tolist() for t in tensors]


@pytest.mark.gpu
def test_a_device_may_change_its_tensors_right_after_the_call():
    """What is launched later on the training stream waits for the copy; the memory is pinned."""
    large, small = torch.ones(2**24, device="cuda"), odd("cuda")
    copies, ready = Snapshot().copy(contents(large, *small))
    large.zero_()
    del small
    torch.cuda.empty_cache()
    ready()
    first, *rest = copies.tensors["file"].values()
    assert first.is_pinned()
    assert bool((first == 1).all())
    assert all(same(copy, tensor) for copy, tensor in zip(rest, odd(), strict=True))
