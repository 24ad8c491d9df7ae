"""Asynchronous copies of values from device to host."""

import copy

import pytest
import torch

from halfstep.scaling.readback import Readback


def test_values_arrive_in_order_with_their_payload():
    """Everything pushed is delivered once, oldest first."""
    queue = Readback()
    queue.push(torch.tensor([1.0, 2.0]), "a")
    queue.push(torch.tensor([3.0]), "b")
    assert len(queue) == 2
    assert queue.deliver(wait=False) == [("a", [1.0, 2.0]), ("b", [3.0])]
    assert queue.deliver(wait=True) == []


def test_later_changes_do_not_reach_a_pushed_value():
    """The delivered value is the one at the time of the push."""
    queue, value = Readback(), torch.tensor([1.0])
    queue.push(value)
    value.fill_(9.0)
    assert queue.deliver(wait=True) == [(None, [1.0])]


def test_a_copy_starts_empty():
    """Pending copies belong to the queue that started them."""
    queue = Readback()
    queue.push(torch.tensor([1.0]))
    assert len(copy.deepcopy(queue)) == 0


@pytest.mark.gpu
def test_push_does_not_wait_and_buffers_are_reused():
    """On a GPU a push after long work returns immediately, and the correct value arrives later."""
    queue = Readback()
    a = torch.randn(4096, 4096, device="cuda")
    for i in range(5):
        b = a
        for _ in range(10):
            b = b @ a * 0.01
        queue.push(torch.full((2,), float(i), device="cuda"), i)
    assert len(queue.deliver(wait=False)) < 5
    rest = queue.deliver(wait=True)
    assert rest[-1] == (4, [4.0, 4.0])
    assert queue._free
    num_buffers = len(queue._free)
    queue.push(torch.zeros(2, device="cuda"))
    queue.deliver(wait=True)
    assert len(queue._free) == num_buffers


@pytest.mark.gpu
def test_what_is_pending_waits_for_the_end_of_a_capture():
    """An event that has not been read before a CUDA graph is captured does not end the capture."""
    queue, value = Readback(), torch.ones(1, device="cuda")
    torch.cuda._sleep(100_000_000)
    queue.push(value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.add_(1)
        assert queue.deliver(wait=False) == []
    assert queue.deliver(wait=True) == [(None, [1.0])]
