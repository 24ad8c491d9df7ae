"""The answers of a plan: what fits, on how many GPUs, and which category decides."""

import dataclasses

import pytest
import torch

from halfstep.errors import SettingError
from halfstep.jobs.models.vit import ViT
from halfstep.jobs.targets import load_target
from halfstep.planning.answers import STATE_CATEGORIES, plan
from halfstep.planning.capacity import CONTEXT_BYTES, FRAGMENTATION
from halfstep.report.plan import as_text
from halfstep.report.plan_page import render_plan_page
from planning_jobs import residual, small_job

MIB = 1 << 20
MODEL_STATE = (*STATE_CATEGORIES, "gradients")

BATCH = 3072


def shallow():
    """The job of ViT-S/16 with 3 of its 12 blocks: a quarter of the operations to trace."""
    return dataclasses.replace(
        load_target("vit_s_16").job,
        model=lambda: ViT(image_size=224, patch=16, dim=384, depth=3, heads=6, num_classes=1000),
    )


@pytest.fixture(scope="module")
def vit():
    """A ViT in three precisions where activations decide."""
    return plan(shallow(), BATCH, precision=("fp32", "bf16", "bf16-lean"), memory="10GiB")


def test_state_is_the_same_in_fp32_and_autocast(vit):
    """Autocast has the model state of fp32, and a note explains that only the rest can lower the number of GPUs."""
    full, mixed, lean = vit.entries
    assert full.state_bytes == pytest.approx(mixed.state_bytes, rel=0.001)
    assert lean.state_bytes < mixed.state_bytes
    notes = " ".join(vit.notes)
    assert "only where that part decides" in notes
    rest = [sum(b for c, b in e.estimate.peak.breakdown.items() if c not in MODEL_STATE) / 2**30 for e in (full, mixed)]
    assert f"{rest[0]:.2f} GiB in fp32 and {rest[1]:.2f} in bf16" in notes


def test_a_plan_is_a_table_in_a_notebook(vit):
    """The HTML has a row for each precision and the notes."""
    page = vit._repr_html_()
    assert page.count("<tr>") == 4
    assert "bf16-lean" in page
    assert page.count("<p>") == 1 + len(vit.notes)


def test_fewest_gpus_fit_and_one_less_does_not(vit):
    """Each answer is within the usable memory, and needs fewer GPUs in a leaner precision."""
    counts = []
    for entry in vit.entries:
        answer = entry.answers[0]
        assert answer.strategy == "ddp"
        assert answer.need_bytes <= vit.capacity.usable_bytes
        assert answer.micro_batch == -(-BATCH // answer.num_gpus)
        counts.append(answer.num_gpus)
    assert counts[0] > counts[1] >= counts[2]
    assert vit.entries[0].answers[0].decides == "activations"


def test_accumulation_reaches_the_whole_batch(vit):
    """The largest micro-batch times its count covers the global batch."""
    for entry in vit.entries:
        assert entry.largest.batch * entry.accumulate >= BATCH
        assert entry.largest.peak_bytes <= vit.capacity.usable_bytes


def test_fits_agrees_with_the_peak(vit):
    """`fits` compares the peak with the usable memory."""
    for entry in vit.entries:
        assert entry.fits == (entry.peak_bytes <= vit.capacity.usable_bytes)


def test_fixed_number_of_gpus_is_not_exceeded():
    """With --gpus the answer is that number or none."""
    limited = plan(shallow(), BATCH, precision=("fp32",), memory="6GiB", gpus=1)
    assert {a.num_gpus for a in limited.entries[0].answers} == {None}


def test_peaks_need_no_memory_size(monkeypatch):
    """Without a GPU, a plan has peaks, and a note names the options that the rest needs."""
    monkeypatch.setattr("halfstep.planning.answers.capacity_of", lambda *_: None)
    without = plan(small_job(), 8, precision=("bf16",))
    assert (without.entries[0].fits, without.entries[0].min_gpus) == (None, None)
    assert without.entries[0].peak_bytes > 0
    assert "--memory" in without.notes[-1]


@pytest.mark.parametrize("bad", [{"batch": 0}, {"batch": 8, "gpus": 0}, {"batch": 8, "accumulate": 0}, {"batch": True}])
def test_invalid_counts_are_rejected(bad):
    """Counts are integers of 1 or more."""
    with pytest.raises(SettingError, match="1 or more"):
        plan(small_job(), **bad)


def test_fp8_is_rejected():
    """What the Engine cannot run is not planned."""
    with pytest.raises(SettingError, match="not implemented"):
        plan(small_job(), 8, precision=("fp8",))


def test_model_state_decides_when_weights_do_not_fit():
    """If the weights alone are too large, model state decides, and only sharding has an answer."""
    from torch import nn

    wide = small_job(
        model=lambda: nn.Sequential(
            *(nn.Linear(16, 1 << 24) if i == 0 else nn.Linear(1 << 24, 16) for i in range(2)), nn.Linear(16, 4)
        )
    )
    answers = {a.strategy: a for a in plan(wide, 64, precision=("fp32",), memory="6GiB").entries[0].answers}
    assert answers["ddp"].num_gpus is None
    assert answers["ddp"].decides == "model state"


def test_default_precisions_that_cannot_be_planned_are_omitted():
    """An optimizer without 8-bit states is planned in the other default precisions; requested explicitly, that one raises."""
    job = small_job(optimizer=torch.optim.Adafactor)
    result = plan(job, 8, memory="8GiB")
    assert [e.precision for e in result.entries] == ["fp32", "bf16", "fp16", "bf16-lean"]
    (omitted,) = [note for note in result.notes if "Omitted" in note]
    assert "bf16-lean,states=8bit" in omitted
    assert "Adafactor" in omitted
    with pytest.raises(SettingError, match="Adafactor"):
        plan(job, 8, precision=("bf16", "bf16-lean,states=8bit"), memory="8GiB")


def test_data_with_a_fixed_batch_size_is_planned_at_that_size():
    """The plan is for the batches that the data really yields, without answers that would need other sizes."""
    fixed = [(torch.randn(12, 16), torch.randint(4, (12,)))]
    result = plan(small_job(data=lambda: fixed), 1_000_000, precision=("fp32",), memory="1GiB")
    (entry,) = result.entries
    assert (result.batch, entry.batch, entry.fits) == (12, 12, True)
    assert (entry.answers, entry.largest, entry.min_gpus) == ((), None, None)
    assert "batches of 12" in result.notes[0]
    shown = as_text(result)
    assert "batch 12" in shown
    assert "By strategy" not in shown
    assert "By strategy" in as_text(plan(small_job(), 12, precision=("fp32",), memory="1GiB"))
    assert "without accumulation" not in render_plan_page(result)


def test_batch_is_divided_into_the_requested_micro_batches():
    """With accumulation the peak is that of one micro-batch, and the GPUs share micro-batches, not the whole batch."""
    whole = plan(small_job(), 16, precision=("fp32",), memory="8GiB").entries[0]
    parts = plan(small_job(), 64, precision=("fp32",), memory="8GiB", accumulate=4)
    (entry,) = parts.entries
    assert (entry.batch, entry.estimate.batch, parts.accumulate) == (64, 16, 4)
    assert entry.estimate.peak.breakdown["batch"] == whole.estimate.peak.breakdown["batch"]
    assert entry.answers[0].micro_batch == 16
    assert "batch 64 in 4 micro-batches" in as_text(parts)
    assert "in each of 4 micro-batches" in as_text(parts)
    with pytest.raises(SettingError, match="cannot be divided into accumulate=8"):
        plan(small_job(), 4, precision=("fp32",), accumulate=8)


def test_largest_micro_batch_leaves_memory_for_accumulated_gradients():
    """If one GPU needs several micro-batches, 16-bit weights have fp32 gradients, and the largest micro-batch leaves memory for them."""
    from torch import nn

    wide = small_job(model=lambda: nn.Sequential(nn.Linear(16, 1 << 20), nn.Linear(1 << 20, 4)))
    policy = "bf16-lean,states=8bit"
    once = plan(wide, 200, precision=(policy,), memory="1.2GiB").entries[0]
    summed = plan(wide, 400, precision=(policy,), memory="1.2GiB", accumulate=2).entries[0]
    assert once.largest.batch < 200
    assert once.largest.batch == summed.largest.batch


def test_recompute_is_reported_where_only_that_fits():
    """A step that does not fit is tried with recompute="cheap"; one that fits, or whose recompute is set, is not."""
    size = 1 << 18
    fixed = [(torch.randn(size, 16), torch.randint(4, (size,)))]
    job, one = small_job(model=lambda: residual(2, 32), data=lambda: fixed), {"precision": ["bf16-lean"]}
    without, cheap = (plan(job, size, recompute=value, **one).entries[0].peak_bytes for value in (None, "cheap"))
    assert cheap < without
    memory = (
        int((without + cheap) / 2 * (1 + FRAGMENTATION)) + CONTEXT_BYTES
    )  # enough for one, too little for the other
    between = plan(job, size, memory=memory, **one)
    assert between.entries[0].fits is False
    assert between.entries[0].recomputed.peak_bytes == cheap
    assert "fits with recompute" in as_text(between)
    assert any("recompute='cheap'" in note for note in between.notes)
    assert plan(job, size, memory=memory, recompute="cheap", **one).entries[0].fits
    assert plan(job, size, memory=2 * memory, **one).entries[0].recomputed is None
