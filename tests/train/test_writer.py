"""Writers of a run: where they are opened, and what TensorBoard's gets."""

import random
from pathlib import Path

import pytest
import torch

from halfstep.backends.ranks import Ranks
from halfstep.errors import SettingError
from halfstep.train.writer import Histogram, RunInfo, TensorBoardWriter, open_writers

INFO = RunInfo("id", Path("runs/a"), "fp16", {"steps": 3})


class OtherRank(Ranks):
    """Rank 1 of 2, whose rank 0 has no trouble."""

    rank, num_ranks = 1, 2

    def gather(self, value):
        return [(None, None, False), value]


def test_only_rank_0_opens_writers():
    """Other ranks open none, and the opener is not called there."""
    opened = []

    def opener(info):
        opened.append(info)
        return object()

    assert open_writers([opener], INFO, OtherRank()) == []
    assert not opened
    assert len(open_writers([opener, opener], INFO, Ranks())) == 2
    assert opened == [INFO, INFO]


def test_opening_a_writer_does_not_change_the_run():
    """Libraries draw random names; the generators are put back."""
    state = random.getstate(), torch.get_rng_state()

    def opener(info):
        return random.random(), torch.rand(3)

    open_writers([opener], INFO, Ranks())
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])


def test_a_writer_that_cannot_be_opened_ends_the_run():
    """Its error is that of the run."""

    def opener(info):
        raise SettingError("no account")

    with pytest.raises(SettingError, match="no account"):
        open_writers([opener], INFO, Ranks())


def test_texts_keep_their_columns():
    """TensorBoard renders Markdown, where an indented block is shown as it is."""

    class Summary:
        def add_text(self, tag, text, step):
            self.call = tag, text, step

    summary = Summary()
    TensorBoardWriter(summary).text("truth", "weights  fp32\ncompute  fp16", 1)
    assert summary.call == ("truth", "    weights  fp32\n    compute  fp16", 1)


def test_a_histogram_has_the_sums_that_tensorboard_needs():
    """Each value counts as the middle of its bin."""

    class Summary:
        def add_histogram_raw(self, tag, **values):
            self.values = values

    summary = Summary()
    TensorBoardWriter(summary).histogram("a", Histogram((0.0, 1.0, 2.0), (3, 1)), 1)
    assert summary.values["num"] == 4
    assert summary.values["sum"] == 3 * 0.5 + 1.5
    assert summary.values["sum_squares"] == 3 * 0.25 + 2.25
    assert summary.values["bucket_counts"] == [0, 3, 1]
