"""The compressed all-reduce against the float64 simulation, its bytes, and what padding and zeros do."""

import numpy as np
import pytest
import torch

from halfstep.optim.onebit import allreduce
from halfstep.optim.onebit.allreduce import ChunkPlan, compressed_allreduce, compressed_bytes
from halfstep.optim.onebit.wire import dense_bytes
from onebit_simulation import AllReduce
from thread_ranks import on_threads

SHAPES = [(1,), (3, 5), (16,), (64, 2), (7, 11), (300,), (129,)]


def tensors(shapes, step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank + 17)
    return [torch.randn(shape, generator=generator) * 10 ** (i - 3) for i, shape in enumerate(shapes)]


def repeated(wire, shapes, steps, units=None):
    """Results and errors of several calls with error feedback; by default each tensor is a unit."""
    units = units or [[i] for i in range(len(shapes))]
    worker = [torch.zeros(shape) for shape in shapes]
    server, history = [None] * len(units), []
    for step in range(steps):
        values = tensors(shapes, step, wire.rank)
        results = compressed_allreduce(
            [[values[i] for i in unit] for unit in units], [[worker[i] for i in unit] for unit in units], server, wire
        )
        means = [None] * len(shapes)
        for unit, reduced in zip(units, results, strict=True):
            for i, mean, error in zip(unit, reduced.means, reduced.worker_errors, strict=True):
                means[i], worker[i] = mean, error
        server = [reduced.server_error for reduced in results]
        history.append(means)
    return history, worker, server


def assert_close(actual, expected):
    expected = torch.from_numpy(expected).reshape(actual.shape)
    size = expected.abs().max().item() if expected.numel() else 1.0
    assert torch.allclose(actual.double(), expected, rtol=1e-5, atol=1e-5 * size)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_results_and_errors_are_those_of_the_paper(num_ranks):
    """Six calls in a row, any sizes: means and both errors equal the float64 simulation."""
    ranks = on_threads(num_ranks, lambda wire: repeated(wire, SHAPES, 6))
    for i, shape in enumerate(SHAPES):
        simulation = AllReduce(int(np.prod(shape)), num_ranks)
        for step in range(6):
            values = [tensors(SHAPES, step, rank)[i].double().numpy().reshape(-1) for rank in range(num_ranks)]
            expected = simulation(values)
            for history, _, _ in ranks:
                assert_close(history[step][i], expected)
        assert simulation.closest > 1e-6  # no sign was a matter of rounding
        for rank, (_, worker, server) in enumerate(ranks):
            assert_close(worker[i], simulation.worker[rank])
            assert_close(server[i], simulation.server[rank])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_tensors_of_a_unit_are_one_tensor(num_ranks):
    """A unit has one scale and chunks over the concatenation of its tensors."""
    shapes = [(5,), (40, 3), (17,)]
    ranks = on_threads(num_ranks, lambda wire: repeated(wire, shapes, 4, units=[[0, 1, 2]]))
    simulation = AllReduce(5 + 120 + 17, num_ranks)
    for step in range(4):
        flat = [torch.cat([t.reshape(-1) for t in tensors(shapes, step, r)]) for r in range(num_ranks)]
        expected = simulation([x.double().numpy() for x in flat])
        for history, _, _ in ranks:
            assert_close(torch.cat([m.reshape(-1) for m in history[step]]), expected)


def test_every_rank_has_the_same_bits():
    """Means are bit-identical on all ranks."""
    ranks = on_threads(3, lambda wire: repeated(wire, [(100,), (33,)], 3))
    for history, _, _ in ranks[1:]:
        for step, means in enumerate(history):
            assert all(torch.equal(a, b) for a, b in zip(means, ranks[0][0][step], strict=True))


def test_buckets_change_nothing(monkeypatch):
    """Results are bit-identical when every tensor is a bucket of its own."""
    shapes = [(100,), (33, 2), (8,), (3,)]
    whole = on_threads(2, lambda wire: repeated(wire, shapes, 3))
    monkeypatch.setattr(allreduce, "_BUCKET", 50)
    divided = on_threads(2, lambda wire: repeated(wire, shapes, 3))
    for a, b in zip(whole, divided, strict=True):
        assert all(torch.equal(x, y) for s, t in zip(a[0], b[0], strict=True) for x, y in zip(s, t, strict=True))


def test_zero_tensors_stay_zero():
    """A tensor that is zero on all ranks has scale 0; a zero in another tensor comes back as plus or minus the scale."""

    def run(wire):
        values = [torch.zeros(20), torch.tensor([0.0, 3.0, -3.0, 1.0])]
        return compressed_allreduce([[v] for v in values], [[torch.zeros_like(v)] for v in values], [None] * 2, wire)

    for zero, mixed in on_threads(2, run):
        assert not zero.means[0].any()
        assert not zero.worker_errors[0].any()
        assert mixed.means[0][0] > 0


def test_the_mean_is_exact_in_the_long_run():
    """Error feedback: the sum of many results approaches the sum of what was reduced."""
    steps = 120
    ranks = on_threads(2, lambda wire: repeated(wire, [(8,)] * 4, steps)[0])
    total = sum(step[3] for step in ranks[0])
    expected = sum(tensors([(8,)] * 4, s, r)[3] for s in range(steps) for r in range(2)) / 2
    assert (
        total - expected
    ).abs().max() < 12  # the errors that remain, about one scale each: not sqrt(steps) = 11 times more
    assert (total - expected).abs().mean() < 4


def test_chunks_cover_every_element_once():
    """Served elements add up to the sizes, also where some ranks serve nothing."""
    for num_ranks in range(1, 10):
        plan = ChunkPlan((1, 7, 8, 9, 100, 1000), num_ranks)
        served = [plan.served(rank) for rank in range(num_ranks)]
        assert tuple(map(sum, zip(*served, strict=True))) == plan.sizes


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_bytes_are_counted_as_predicted(num_ranks):
    """The wire's count equals the closed form."""
    shapes = [(100,), (33, 2), (3,)]

    def run(wire):
        repeated(wire, shapes, 2)
        return wire.sent_bytes

    assert set(on_threads(num_ranks, run)) == {2 * compressed_bytes([100, 66, 3], num_ranks)}


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 64])
def test_wire_volume_on_vit_s(num_ranks):
    """At most 1/30 of an fp32 all-reduce and 1/15 of an fp16 one, scales included."""
    from halfstep.models import vit_s_16

    with torch.device("meta"):
        sizes = [p.numel() for p in vit_s_16().parameters()]
    assert sum(sizes) > 21e6
    sent = compressed_bytes(sizes, num_ranks)
    assert sent * 30 <= dense_bytes(4 * sum(sizes), num_ranks)
    assert sent * 15 <= dense_bytes(2 * sum(sizes), num_ranks)
