"""TensorBoard: what a run writes, with a writer that remembers, and with the real one where it is installed."""

import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from halfstep.checkpoint.runlog import read_runlog
from halfstep.jobs.job import Job
from halfstep.train import TrainConfig, train
from halfstep.train.board import Board, NoBoard, open_board
from halfstep.train.writer import TensorBoardWriter
from halfstep.watching.events import Event


class Writer:
    """Remembers what a SummaryWriter is called with."""

    def __init__(self, folder):
        self.folder, self.scalars, self.histograms, self.texts, self.is_closed = folder, {}, {}, {}, False

    def add_scalar(self, tag, value, step):
        self.scalars.setdefault(tag, {})[step] = value

    def add_histogram_raw(self, tag, *, bucket_limits, bucket_counts, global_step, **totals):
        assert totals.keys() == {"min", "max", "num", "sum", "sum_squares"}
        assert len(bucket_limits) == len(bucket_counts)
        histogram = totals | {"limits": bucket_limits, "counts": bucket_counts}
        self.histograms.setdefault(tag, {})[global_step] = histogram

    def add_text(self, tag, text, step):
        self.texts.setdefault(tag, {})[step] = text

    def close(self):
        self.is_closed = True


@pytest.fixture
def writers(monkeypatch):
    """`from torch.utils.tensorboard import SummaryWriter` makes a Writer."""
    module, opened = types.ModuleType("torch.utils.tensorboard"), []
    module.SummaryWriter = lambda folder: opened.append(Writer(folder)) or opened[-1]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return opened


def run(out, precision="fp16", bad=None):
    """Six steps, one of them with a NaN."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 6, generator=g), torch.randint(0, 3, (48,), generator=g)
    if bad is not None:
        x[8 * bad, 2] = math.nan
    job = Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)),
        data=lambda batch_size: list(zip(x.split(batch_size), y.split(batch_size), strict=True)),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]) * 1e-6,  # gradients below fp16's range
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    )
    train(job, TrainConfig(batch=8, epochs=1, watch=1, device="cpu"), precision=precision, out=out)
    return read_runlog(out / "run.jsonl")


def test_everything_of_the_run_file_is_shown(writers, tmp_path):
    """Loss, scale and skips at every step; shares, counts, ratios and exponents at every sample; events."""
    log = run(tmp_path, bad=3)
    (writer,) = writers
    assert writer.is_closed
    steps = [r["attempted"] for r in log.records]
    for name in ("loss", "lr", "scale", "skips"):
        assert list(writer.scalars[f"train/{name}"]) == steps
    assert list(writer.scalars["train/skips"].values()) == [0, 0, 0, 1, 1, 1]
    assert writer.scalars["numerics/non-finite gradients"][4] > 0
    assert writer.scalars["numerics/non-finite gradients"][3] == 0
    assert writer.scalars["numerics/non-finite weights"][4] == 0
    assert writer.scalars["numerics/flushed to zero"][1] > 0.5
    assert writer.scalars["updates/weight"][1] > 0
    assert writer.scalars["updates/bias"].keys() == writer.scalars["updates/weight"].keys()
    assert writer.scalars["events/skip"] == {4: 1}
    assert writer.scalars["events/autopsy"] == {4: 1}


def test_histograms_are_the_exponents_of_the_worst_gradients(writers, tmp_path):
    """Each bar is a power of two, and their counts are those of the run file."""
    log = run(tmp_path)
    (writer,) = writers
    samples = {e["step"]: e for e in log.events if e["event"] == "numerics"}
    assert len(writer.histograms) >= 3
    for tag, by_step in writer.histograms.items():
        for step, values in by_step.items():
            expected = {
                int(e): n for e, n in samples[step]["gradients"][tag.removeprefix("exponents/")]["exponents"].items()
            }
            # A bar ends at its limit, so that of exponent e ends at e + 1.
            assert {
                int(limit) - 1: n for limit, n in zip(values["limits"], values["counts"], strict=True) if n
            } == expected
            assert values["limits"] == sorted(values["limits"])
            assert values["num"] == sum(expected.values())
            assert (values["min"], values["max"]) == (min(expected), max(expected) + 1)
            assert values["min"] <= values["sum"] / values["num"] <= values["max"]
            assert values["sum_squares"] >= values["sum"] ** 2 / values["num"]


def test_a_tensor_that_was_once_among_the_worst_keeps_its_curve(writers, tmp_path):
    """Its share is written at every later sample."""
    run(tmp_path)
    (writer,) = writers
    curves = {tag: list(steps) for tag, steps in writer.scalars.items() if tag.startswith("flushed/")}
    assert len(curves) >= 3
    for steps in curves.values():
        assert steps == list(range(steps[0], 7))


def test_events_are_counted_by_kind():
    """A curve that rises where something was reported."""
    writer = Writer("")
    board = Board([TensorBoardWriter(writer)])
    for step, kind in ((1, "skip"), (2, "scale"), (7, "skip")):
        board.event(Event(kind, step, ""))
    assert writer.scalars == {"events/skip": {1: 1, 7: 2}, "events/scale": {2: 1}}


def test_without_tensorboard_nothing_is_written(monkeypatch, tmp_path):
    """The package is optional."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    board = open_board(tmp_path / "board")
    assert type(board) is NoBoard
    assert type(open_board(None)) is NoBoard
    board.scalars("train", {"loss": 1.0}, 1)
    board.close()
    assert not (tmp_path / "board").exists()


def test_the_real_writer_writes_what_the_run_file_has(tmp_path):
    """The event file is read back with TensorBoard's own reader: losses, scales, skips, shares, counts, ratios, exponents."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = run(tmp_path, bad=3)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()

    def scalars(tag):
        return {event.step: event.value for event in events.Scalars(tag)}

    for name in ("loss", "scale", "lr"):
        expected = {r["attempted"]: r[name] for r in log.records}
        assert scalars(f"train/{name}") == pytest.approx(expected, nan_ok=True)
    assert list(scalars("train/skips").values()) == [0, 0, 0, 1, 1, 1]
    assert scalars("numerics/flushed to zero")[1] > 0.5
    bad = scalars("numerics/non-finite gradients")
    assert bad[4] > 0
    assert not any(number for step, number in bad.items() if step != 4)
    assert scalars("updates/weight")[1] > 0
    assert scalars("events/skip") == {4: 1}
    tag = next(tag for tag in events.Tags()["histograms"] if tag.startswith("exponents/"))
    assert sum(events.Histograms(tag)[0].histogram_value.bucket) == events.Histograms(tag)[0].histogram_value.num > 0
