"""Batches of a step: identified when somebody asks, and stored no longer than that takes."""

import gc
import weakref

import torch

from halfstep.train.batches import BatchId, WindowBatches
from halfstep.train.stream import fingerprint


class Data:
    """A position in some data."""

    epoch, batch, order = 2, 1, None


def filled(num_steps, per_step=1):
    """Steps of a window, and the batches they have."""
    windows, batches, steps, data = WindowBatches(), [], [], Data()
    for _ in range(num_steps):
        for _ in range(per_step):
            batches.append([torch.full((3,), float(data.batch))])
            windows.add(data, batches[-1])
            data.batch += 1
        steps.append(windows.end_window())
    return steps, batches


def test_a_step_has_its_batches_in_order():
    """Epoch, index from 0 and hash of each micro-batch; as text and as plain values."""
    steps, batches = filled(2, per_step=2)
    ids = steps[1].identify()
    assert ids.batches == tuple(BatchId(2, i, fingerprint(batches[i])[:12], None) for i in (2, 3))
    assert ids.as_data()[0] == {"epoch": 2, "index": 2, "hash": fingerprint(batches[2])[:12]}
    assert str(ids).startswith("batch 2 of epoch 2, hash ")
    assert BatchId(0, 1, None, (4, 5)).as_data()["samples"] == [4, 5]


def test_batches_of_the_last_three_steps_are_stored():
    """On a GPU a loss arrives during the next step, or the one after it; of older steps the position remains."""
    steps, batches = filled(4)
    references = [weakref.ref(batch[0]) for batch in batches]
    del batches
    gc.collect()
    assert [reference() is None for reference in references] == [True, False, False, False]
    assert [step.identify().batches[0].hash is None for step in steps] == [True, False, False, False]
    assert steps[0].identify().batches[0].index == 0


def test_a_run_that_nobody_watches_stores_no_batch():
    """Without a Watch there is nobody to ask."""
    windows = WindowBatches(active=False)
    batch = [torch.ones(3)]
    reference = weakref.ref(batch[0])
    windows.add(Data(), batch)
    step = windows.end_window()
    del batch
    gc.collect()
    assert reference() is None
    assert step.identify().batches == ()


def test_nothing_is_hashed_until_somebody_asks(monkeypatch):
    """Normal steps pay for references only."""
    calls = []
    monkeypatch.setattr("halfstep.train.batches.fingerprint", lambda batch: calls.append(1) or "0" * 64)
    steps, _ = filled(5)
    assert not calls
    steps[-1].identify()
    assert len(calls) == 1
