"""Which rank counts which gradient, on 8 to 64 simulated ranks."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist

from halfstep.backends.fsdp.norms import counts_here, partial_norms

local_tensor = pytest.importorskip("torch.distributed._local_tensor", reason="this torch simulates no ranks")


@pytest.fixture(params=[8, 64])
def num_ranks(request):
    """A process group of simulated ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def placements(num_ranks):
    """Meshes of one to three dimensions, with several placements on each."""
    from torch.distributed.tensor import Replicate, Shard

    kinds = (Replicate(), Shard(0), Shard(1))
    if num_ranks > 8:  # each takes seconds
        yield (num_ranks // 4, 2, 2), kinds
        yield (2, num_ranks // 2), kinds[:2]
        return
    yield from (((num_ranks,), (kind,)) for kind in kinds)
    yield from (((2, num_ranks // 2), pair) for pair in itertools.permutations(kinds, 2))
    yield from (((num_ranks // 4, 2, 2), triple) for triple in itertools.permutations(kinds))


def parts_of(tensor, num_ranks):
    """Each rank's part of a DTensor under LocalTensorMode."""
    parts = getattr(
        tensor._local_tensor, "_local_tensors", None
    )  # equal parts, of a replicated tensor, are stored once
    return [tensor._local_tensor if parts is None else parts[rank] for rank in range(num_ranks)]


@pytest.mark.slow
def test_every_value_counts_on_one_rank(num_ranks):
    """Whatever the mesh and placements, uneven and empty parts included: the squares add up to those of the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    whole = torch.randn(11, 7, generator=torch.Generator().manual_seed(0))
    checked = 0
    for shape, places in placements(num_ranks):
        with local_tensor.LocalTensorMode(num_ranks):
            mesh = init_device_mesh("cpu", shape)
            tensor = distribute_tensor(whole, mesh, list(places), src_data_rank=None)
            parts = parts_of(tensor, num_ranks)
        total = 0.0
        for rank, part in enumerate(parts):
            names = frozenset({"w"} if counts_here(tensor, rank) else ())
            mine, copies = partial_norms({"w": part}, names, torch.device("cpu"), {})
            total += float(mine) ** 2
            assert float(copies) == 0 or not names
        assert math.sqrt(total) == pytest.approx(float(whole.norm()), rel=1e-6), (shape, places)
        checked += 1
    assert checked == (15 if num_ranks == 8 else 2)


def test_meshes_that_are_parts_of_the_run_count_once(num_ranks):
    """Data parallelism next to tensor parallelism: the weights that are not split are on as many meshes as it has ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    whole = torch.randn(num_ranks, 3, generator=torch.Generator().manual_seed(1))
    grid = torch.arange(num_ranks).view(-1, 2)
    total = 0.0
    for column in grid.T:
        mesh = DeviceMesh("cpu", column, _init_backend=False, _rank=int(column[0]))
        for part, rank in zip(whole.chunk(len(column)), column.tolist(), strict=True):
            tensor = DTensor.from_local(
                part, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            total += float(part.square().sum()) * counts_here(tensor, rank)
    assert math.sqrt(total) == pytest.approx(float(whole.norm()), rel=1e-6)
