"""The smallest number of GPUs of each strategy, exact numbers, and what is rejected."""

import pytest
from torch import nn

from halfstep.errors import SettingError
from halfstep.planning import find_batch_size
from halfstep.planning.answers import plan
from halfstep.planning.ranks.counts import parse_strategies
from halfstep.planning.sharding import STRATEGIES
from halfstep.report.plan import as_data, as_text
from planning_jobs import small_job

WIDE = {"model": lambda: nn.Sequential(nn.Linear(16, 1 << 20), nn.Linear(1 << 20, 4))}


@pytest.fixture(scope="module")
def eight():
    """A wide model on 8 GPUs, hsdp in groups of 4."""
    return plan(
        small_job(**WIDE), 64, precision=("fp32", "bf16-lean"), memory="1.5GiB", gpus=8,
        strategies=("ddp", "zero1", "fsdp", "hsdp:4"), bandwidth=1e9,
    )  # fmt: skip


def test_exact_numbers_of_gpus_are_reported(eight):
    """With `gpus`, each strategy is also planned on all of them: memory falls and communication grows with sharding."""
    ddp, zero1, fsdp, hsdp = eight.entries[0].exact
    assert {a.num_gpus for a in (ddp, zero1, fsdp, hsdp)} == {8}
    assert ddp.micro_batch == 8
    assert ddp.need_bytes > zero1.need_bytes
    assert (fsdp.traffic.all_reduce, hsdp.traffic.all_reduce > 0) == (0, True)
    assert fsdp.traffic.total > ddp.traffic.total > 0
    text = as_text(eight)
    assert "On all 8 GPUs" in text
    assert "Communication, predicted" in text
    assert "1 GB/s if nothing overlaps" in " ".join(text.split())  # lines are wrapped


def test_rejected_combinations_are_named(eight):
    """ZeRO with split masters has no answer, and a note has the reason."""
    (zero1,) = [a for a in eight.entries[1].answers if a.strategy == "zero1"]
    assert zero1.num_gpus is None
    (note,) = [note for note in eight.notes if note.startswith("Rejected")]
    assert "zero1 with bf16-lean" in note
    assert "bf16-lean,master=fp32" in note
    data = as_data(eight)["entries"][1]["strategies"]
    assert [bool(item["rejected"]) for item in data] == [False, True, False, False]


def test_hsdp_needs_whole_groups():
    """An exact number that does not fill groups is rejected by name; so are GPUs without an example."""
    result = plan(small_job(), 64, precision=("fp32",), memory="2GiB", gpus=10, strategies=("hsdp:4",))
    assert any("10 GPUs are not a multiple of its groups of 4" in note for note in result.notes)
    few = plan(small_job(), 4, precision=("fp32",), memory="2GiB", gpus=8, strategies=("ddp",))
    assert any("no example for some of 8" in note for note in few.notes)


def test_strategies_are_parsed():
    """All by default, and hsdp with the size of its groups."""
    assert parse_strategies([]) == (tuple(STRATEGIES), 8)
    assert parse_strategies(["fsdp", "hsdp:16", "fsdp"]) == (("fsdp", "hsdp"), 16)


@pytest.mark.parametrize("text", ["fsd", "fsdp:8", "hsdp:1", "hsdp:x", "hsdp:"])
def test_unknown_strategies_are_rejected(text):
    """With the known ones or the right form."""
    with pytest.raises(SettingError, match="strategy"):
        parse_strategies([text])


def test_largest_micro_batch_of_several_gpus():
    """Sharding a wide model leaves memory for a larger micro-batch on each GPU, up to the limit exactly."""
    job, memory = small_job(**WIDE), {"memory": "1.5GiB", "gpus": 8}
    ddp, fsdp = (find_batch_size(job, "fp32", strategy=name, **memory) for name in ("ddp", "fsdp"))
    assert fsdp.batch > ddp.batch > 0
    assert not fsdp.confirmed
    answer = plan(job, 8 * (fsdp.batch + 2), precision=("fp32",), strategies=("fsdp",), **memory).entries[0].exact[0]
    assert not answer.fits
    assert plan(job, 8 * fsdp.batch, precision=("fp32",), strategies=("fsdp",), **memory).entries[0].exact[0].fits


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "fsdp", "memory": "8GiB"}, "number of GPUs"),
        ({"gpus": 2, "memory": "8GiB"}, "how they train"),
        ({"gpus": 2, "strategy": "fsdp"}, "not tried"),
        ({"gpus": 0, "strategy": "fsdp", "memory": "8GiB"}, "1 or more"),
        ({"gpus": 2, "strategy": "zero2", "memory": "8GiB", "precision": "bf16-lean"}, "fp32 masters"),
    ],
)
def test_searches_that_cannot_be_done_are_rejected(settings, message):
    """A strategy needs a number of GPUs and a memory size, and a precision that it can train."""
    with pytest.raises(SettingError, match=message):
        find_batch_size(small_job(), **settings)
