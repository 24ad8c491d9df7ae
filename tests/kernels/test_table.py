"""The tables that describe many tensors to one launch."""

import pytest
import torch

from halfstep.kernels.adamw import AdamColumn, AdamSettings
from halfstep.kernels.lion import LionColumn, LionSettings
from halfstep.kernels.sgd import SGDColumn, SGDSettings
from halfstep.kernels.table import (
    LAUNCH_SHAPES,
    NUM_RECENT,
    NUM_SETTINGS,
    ChunkTable,
    Pointer,
    PointerTable,
    RecentTables,
    copied_to,
    table_bytes,
)

CPU = torch.device("cpu")


def test_chunks_cover_every_element_once_and_full_ones_come_first():
    """Rows are (tensor index, chunk index); aligned full chunks lead, tails and unaligned tensors follow."""
    table = ChunkTable([10, 0, 8, 3], [True, True, False, True], 4, CPU)
    assert table.rows[: table.num_full].tolist() == [[0, 0], [0, 1]]
    assert table.rows[table.num_full :].tolist() == [[0, 2], [2, 0], [2, 1], [3, 0]]
    assert table.num_chunks == 6
    assert table.numels.tolist() == [10, 0, 8, 3]
    assert table.bounds.tolist() == [[0, 2, 2, 2, 2], [2, 3, 3, 5, 6]]


def test_pointers_are_copied_only_when_an_address_changes():
    """The same tensors give the same table; another tensor gives a new one."""
    tensors = [torch.zeros(4) for _ in range(2)]
    table = PointerTable()
    first = table.refresh(tensors)
    assert first[:, 0].tolist() == [t.data_ptr() for t in tensors]
    assert table.refresh(tensors) is first
    assert table.refresh([tensors[0], torch.zeros(4)]) is not first


def test_recent_tables_forget_the_one_that_was_not_used_for_longest():
    """A key that is asked for stays, one that is not makes room."""
    tables = RecentTables()
    for i in range(NUM_RECENT):
        tables.add((i,), f"table {i}")
    assert tables.get((0,)) == "table 0"
    tables.add((NUM_RECENT,), "new")
    assert tables.get((0,)) == "table 0"
    assert tables.get((1,)) is None
    assert [tables.get((i,)) for i in (2, NUM_RECENT)] == ["table 2", "new"]


@pytest.mark.gpu
def test_recent_tables_remember_nothing_of_a_captured_graph():
    """What is made during a capture lies in the graph's memory."""
    tables, graph = RecentTables(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tables.add((1,), torch.zeros(1, device="cuda"))
    assert tables.get((1,)) is None
    tables.add((1,), "eager")
    assert tables.get((1,)) == "eager"


@pytest.mark.parametrize("dtype", list(LAUNCH_SHAPES), ids=str)
def test_table_bytes_are_those_of_the_tables(dtype):
    """Pointers, chunks, step counts and group numbers are counted to the byte."""
    sizes = [1, 511, 512, 513, 5000]
    chunks = ChunkTable(sizes, [True] * 5, LAUNCH_SHAPES[dtype][0], CPU)
    tables = [chunks.rows, chunks.numels, chunks.bounds, torch.zeros(5, len(Pointer), dtype=torch.int64)]
    tables += [torch.zeros(5), torch.zeros(5, dtype=torch.int32)]
    assert table_bytes(sizes, dtype) == sum(t.numel() * t.element_size() for t in tables)


def test_enumerations_count_from_zero():
    """Column numbers are positions in a row, so they have no gaps, and rows fit the table."""
    for columns in (Pointer, AdamColumn, SGDColumn, LionColumn):
        assert [int(c) for c in columns] == list(range(len(columns)))
    assert all(len(columns) <= NUM_SETTINGS for columns in (AdamColumn, SGDColumn, LionColumn))


def test_settings_are_in_their_columns():
    """A row has each setting in the column that is named after it."""
    adam = AdamSettings(torch.tensor(0.5), (0.25, 0.75), 2.0, 3.0, decoupled=True).row()
    assert adam[AdamColumn.LR] == 0.5
    assert (adam[AdamColumn.BETA1], adam[AdamColumn.BETA2]) == (0.25, 0.75)
    assert (adam[AdamColumn.EPS], adam[AdamColumn.WEIGHT_DECAY]) == (2.0, 3.0)
    assert (adam[AdamColumn.DECOUPLED], adam[AdamColumn.MAXIMIZE]) == (1.0, 0.0)
    sgd = SGDSettings(0.5, 0.9, 0.1, 3.0, nesterov=False, maximize=True).row()
    assert (sgd[SGDColumn.LR], sgd[SGDColumn.MOMENTUM], sgd[SGDColumn.DAMPENING]) == (0.5, 0.9, 0.1)
    assert (sgd[SGDColumn.WEIGHT_DECAY], sgd[SGDColumn.NESTEROV], sgd[SGDColumn.MAXIMIZE]) == (3.0, 0.0, 1.0)
    assert (sgd[SGDColumn.HAS_MOMENTUM], SGDSettings(1, 0.0, 0, 0, nesterov=False).row()[SGDColumn.HAS_MOMENTUM]) == (
        1,
        0,
    )
    lion = LionSettings(0.5, (0.25, 0.75), 3.0, maximize=True).row()
    assert lion == (0.5, 0.25, 0.75, 3.0, 1.0)
    assert lion[LionColumn.WEIGHT_DECAY] == 3.0


class _Recorded(torch.Tensor):
    """A tensor that only notes how it is to be copied."""

    def to(self, *args, **kwargs):
        return args, kwargs


def test_only_copies_to_the_host_are_waited_for():
    """The host must not compute with a flag that has not arrived; devices keep the order of their streams."""
    flag = torch.ones(()).as_subclass(_Recorded)
    assert copied_to(flag, CPU) == ((CPU, torch.float32), {"non_blocking": False})
    assert copied_to(flag, torch.device("cuda"), torch.bool)[1] == {"non_blocking": True}


@pytest.mark.gpu
def test_the_host_reads_what_a_busy_gpu_computes():
    """A flag that is computed behind other work has its value when it is used on the host."""
    flag = torch.zeros((), device="cuda")
    torch.cuda._sleep(100_000_000)
    flag += 1
    assert copied_to(flag, CPU).item() == 1
