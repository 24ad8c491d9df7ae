"""The verdict: what a person can act on."""

import re

import pytest

from comparison_cases import write_case
from halfstep.comparison.result import read_comparison
from halfstep.comparison.verdict import worse

GPU = {"device": "cuda", "machine": "NVIDIA H200", "side_by_side": False}
FAST = ("bf16", 0.005, {})
FP32 = ("fp32", 0.010, {})


def verdict(tmp_path, *rows, **more):
    comparison = read_comparison([write_case(tmp_path / "c", rows, **more)])
    return comparison.verdict, comparison


def test_faster_and_as_good_is_recommended_with_its_figures(tmp_path):
    """Speed with its interval, memory, loss, metric, confidence."""
    found, _ = verdict(tmp_path, FP32, ("bf16", 0.005, {"peak": 200 * 2**20}), **GPU)
    assert (found.use, found.kind) == ("bf16", "faster")
    assert found.text.startswith("Use bf16 here: it is 2")
    assert "50% less memory" in found.text
    assert "95 % intervals over 3 repeats" in found.text
    assert "within fp32's own from seed to seed" in found.text


def test_a_faster_row_that_learns_worse_is_not_recommended(tmp_path):
    """Speed does not pay for a loss beyond noise."""
    found, comparison = verdict(tmp_path, FP32, ("bf16", 0.005, {"gap": 0.5}), ("fp16", 0.008, {}), **GPU)
    assert worse(comparison.row("bf16"))
    assert found.use == "fp16"
    alone, _ = verdict(tmp_path / "alone", FP32, ("bf16", 0.005, {"gap": 0.5}), **GPU)
    assert (alone.use, alone.kind) == ("fp32", "unfit")
    assert "bf16 is 2" in alone.text
    assert "but learns worse: its final loss is higher by +0.46" in alone.text
    assert "No difference" not in alone.text


def test_one_repeat_is_enough_to_see_a_loss_that_is_far_off(tmp_path):
    """Held against what fp32's loss does from step to step, where there is no second seed to hold it against."""
    found, comparison = verdict(tmp_path, FP32, ("bf16", 0.005, {"gap": 0.5}), repeats=1, **GPU)
    assert worse(comparison.row("bf16"))
    assert (found.use, found.kind) == ("fp32", "unfit")
    near, _ = verdict(tmp_path / "near", FP32, ("bf16", 0.005, {"gap": 0.01}), repeats=1, **GPU)
    assert near.use == "bf16"


def same_seeds(folder):
    """Make a comparison look like that of a job which seeds itself: every repeat is the first again."""
    for path in (folder / "runs").glob("*-0.jsonl"):
        for repeat in (1, 2):
            text = path.read_text().replace('"repeat":0', f'"repeat":{repeat}')
            path.with_name(f"{path.name[:-8]}-{repeat}.jsonl").write_text(text)
    return read_comparison([folder])


def test_a_job_that_makes_one_run_of_all_seeds_has_no_noise_to_be_beyond(tmp_path):
    """fp32 repeats itself to the bit, which must not make every rounding error a loss beyond noise."""
    comparison = same_seeds(write_case(tmp_path / "c", (FP32, ("bf16", 0.005, {"gap": 0.001})), **GPU))
    row = comparison.row("bf16")
    assert (row.num_runs, row.beyond_noise, row.loss_noise, comparison.noise) == (3, None, None, None)
    assert comparison.verdict.use == "bf16"
    assert "all seeds give the same run" in comparison.verdict.text
    assert any("Every seed gives the same weights" in note for note in comparison.notes)
    bad = same_seeds(write_case(tmp_path / "bad", (FP32, ("bf16", 0.005, {"gap": 0.5})), **GPU))
    assert bad.verdict.kind == "unfit"
    assert "from step to step" in bad.verdict.text


def nan_at(folder, label, *steps):
    """Make the losses of these steps of a row's runs NaN."""
    for path in (folder / "runs").glob(f"{label}-*.jsonl"):
        lines = path.read_text().splitlines()
        for step in steps:
            lines[step] = re.sub(r'"loss":[0-9.e-]+', '"loss":"nan"', lines[step])
        path.write_text("\n".join(lines) + "\n")
    return read_comparison([folder])


def test_losses_that_are_not_finite_are_no_recommendation(tmp_path):
    """At the end they make a row unfit; before it they are named."""
    late = nan_at(write_case(tmp_path / "late", (FP32, FAST), **GPU), "bf16", 38)
    assert (late.verdict.use, late.verdict.kind) == ("fp32", "unfit")
    assert "but 3 of its losses are not finite" in late.verdict.text
    early = nan_at(write_case(tmp_path / "early", (FP32, FAST), **GPU), "bf16", 5)
    assert early.verdict.use == "bf16"
    assert "its curve is not told, because 3 losses are not finite" in early.verdict.text


def test_a_better_loss_is_not_worse(tmp_path):
    """Far from fp32 on the good side is no reason against a row."""
    _, comparison = verdict(tmp_path, FP32, ("bf16", 0.005, {"gap": -0.5}), **GPU)
    assert not worse(comparison.row("bf16"))


def test_a_row_without_master_is_not_recommended(tmp_path):
    """However fast it is."""
    found, _ = verdict(tmp_path, FP32, FAST, ("bf16-lean,master=none", 0.002, {}), **GPU)
    assert found.use == "bf16"
    alone, _ = verdict(tmp_path / "alone", FP32, ("bf16-lean,master=none", 0.002, {}), **GPU)
    assert (alone.use, alone.kind) == ("fp32", "unfit")
    assert "keeps no fp32 master" in alone.text


def test_no_difference_is_said(tmp_path):
    """Within 3 % nothing is recommended over fp32."""
    found, _ = verdict(tmp_path, FP32, ("bf16", 0.0099, {}))
    assert (found.use, found.kind) == ("fp32", "same")
    assert "No difference beyond noise" in found.text


def test_less_memory_decides_between_equals_on_a_gpu_only(tmp_path):
    """On a CPU the resident set is mostly the process itself."""
    rows = (FP32, ("bf16", 0.0099, {"peak": 200 * 2**20}))
    on_gpu, _ = verdict(tmp_path / "gpu", *rows, **GPU)
    assert (on_gpu.use, on_gpu.kind) == ("bf16", "smaller")
    on_cpu, _ = verdict(tmp_path / "cpu", *rows)
    assert on_cpu.use == "fp32"


@pytest.mark.parametrize(
    ("support", "words"),
    [
        (["emulated", "no bf16 arithmetic"], "emulated here: no bf16 arithmetic"),
        (["slow", "half rate"], "no faster than fp32 here"),
    ],
)
def test_a_cpu_without_16_bit_arithmetic_is_told_that_it_is_slower_and_why(tmp_path, support, words):
    """The reason is the hardware's."""
    table = {f: ["native", ""] for f in ("fp32", "fp16")} | {"bf16": support}
    found, _ = verdict(tmp_path, FP32, ("bf16", 0.030, {}), support=table)
    assert (found.use, found.kind) == ("fp32", "slower")
    assert "mixed precision is slower on this machine" in found.text
    assert words in found.text
    assert "3" in found.text


def test_a_native_format_that_does_not_pay_is_explained(tmp_path):
    """Too small a job, or too many casts."""
    found, _ = verdict(tmp_path, FP32, ("bf16", 0.030, {}))
    assert "too small to use it" in found.text


def test_failures_and_peers_are_part_of_the_verdict(tmp_path):
    """Who did not run through, and how far the best peer is behind."""
    rows = (FP32, FAST, ("fp16", 0.006, {}), ("torch-amp", 0.0055, {}))
    failures = {"fp16": {"kind": "unsupported", "reason": "no fp16 here"}}
    found, _ = verdict(tmp_path, *rows, peers=("torch-amp",), failures=failures, **GPU)
    assert "fp16 did not run through: unsupported (3 of 3 runs): no fp16 here." in found.text
    assert "Against torch-amp, the fastest peer, it is 1.1" in found.text


def test_a_lighter_row_is_offered(tmp_path):
    """Where memory is short, the next best is named."""
    found, _ = verdict(tmp_path, FP32, FAST, ("bf16-lean,states=8bit", 0.006, {"peak": 200 * 2**20}), **GPU)
    assert found.use == "bf16"
    assert "If memory is short, bf16-lean,states=8bit takes 50% less" in found.text


def test_without_a_reference_the_gain_is_not_known(tmp_path):
    """Not run, or failed: both are said."""
    missing, _ = verdict(tmp_path / "a", FAST, ("fp16", 0.006, {}))
    assert missing.kind == "unknown"
    assert "The fp32 reference was not run" in missing.text
    failed, _ = verdict(tmp_path / "b", FP32, FAST, failures={"fp32": {"kind": "out of memory", "reason": "too large"}})
    assert "The fp32 reference failed (out of memory" in failed.text


def test_nothing_completed_recommends_nothing(tmp_path):
    """And says why."""
    found, _ = verdict(tmp_path, FP32, failures={"fp32": {"kind": "job", "reason": "The loss failed"}})
    assert found.use is None
    assert "The loss failed" in found.text


def test_only_the_reference_leaves_nothing_to_choose(tmp_path):
    """One row is no comparison."""
    found, _ = verdict(tmp_path, FP32)
    assert found.text == "Only fp32 was completed, so there is nothing to choose from."
    beside, _ = verdict(tmp_path / "peers", FP32, ("torch-amp", 0.005, {}), peers=("torch-amp",))
    assert beside.text.startswith(
        "Of Halfstep's precisions only fp32 was completed, so there is nothing to choose from."
    )
    assert "torch-amp is 2" in beside.text


def test_slower_rows_are_called_what_they_are(tmp_path):
    """A compiled fp32 that does not pay says nothing about mixed precision."""
    found, _ = verdict(tmp_path, FP32, ("fp32,compile=on", 0.020, {}))
    assert (found.use, found.kind) == ("fp32", "slower")
    assert "mixed precision" not in found.text
    assert "every other row is slower on this machine" in found.text


def test_one_turn_of_one_repeat_tells_nothing_from_noise(tmp_path):
    """A speed without an interval is no reason, and the verdict says what to give."""
    folder = write_case(tmp_path / "c", (FP32, FAST), repeats=1, **GPU)
    for path in (folder / "runs").iterdir():
        path.write_text(re.sub(r'"slice":\d+', '"slice":0', path.read_text()))
    found = read_comparison([folder]).verdict
    assert (found.use, found.kind) == ("fp32", "same")
    assert "give more --steps or --repeats" in found.text


def test_one_repeat_is_said(tmp_path):
    """Its intervals are less than they look."""
    found, _ = verdict(tmp_path, FP32, FAST, repeats=1, **GPU)
    assert "One repeat" in found.text
    assert found.use == "bf16"
