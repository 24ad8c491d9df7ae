"""The verdict: a recommendation with its reasons."""

import re

import pytest

from comparison_cases import write_case
from halfstep.comparison.result import read_comparison
from halfstep.comparison.verdict import is_worse

GPU = {"device": "cuda", "machine": "NVIDIA H200", "side_by_side": False}
FAST = ("bf16", 0.005, {})
FP32 = ("fp32", 0.010, {})


def verdict(tmp_path, *rows, **more):
    comparison = read_comparison([write_case(tmp_path / "c", rows, **more)])
    return comparison.verdict, comparison


def test_faster_and_as_good_is_recommended_with_its_figures(tmp_path):
    """The text has speed, memory, loss and confidence."""
    result, _ = verdict(tmp_path, FP32, ("bf16", 0.005, {"peak": 200 * 2**20}), **GPU)
    assert (result.use, result.kind) == ("bf16", "faster")
    assert result.text.startswith("Use bf16 here: it is 2")
    assert "50% less memory" in result.text
    assert "95 % intervals over 3 repeats" in result.text
    assert "within fp32's seed-to-seed noise" in result.text


def test_a_faster_row_that_learns_worse_is_not_recommended(tmp_path):
    """Speed does not make up for a loss that is worse beyond noise."""
    result, comparison = verdict(tmp_path, FP32, ("bf16", 0.005, {"gap": 0.5}), ("fp16", 0.008, {}), **GPU)
    assert is_worse(comparison.row("bf16"))
    assert result.use == "fp16"
    alone, _ = verdict(tmp_path / "alone", FP32, ("bf16", 0.005, {"gap": 0.5}), **GPU)
    assert (alone.use, alone.kind) == ("fp32", "unfit")
    assert "bf16 is 2" in alone.text
    assert "but its final loss is worse: +0.46" in alone.text
    assert "measurably better" not in alone.text


def test_one_repeat_is_enough_to_detect_a_much_worse_loss(tmp_path):
    """Without a second seed the gap is compared with the variation of fp32's loss from step to step."""
    result, comparison = verdict(tmp_path, FP32, ("bf16", 0.005, {"gap": 0.5}), repeats=1, **GPU)
    assert is_worse(comparison.row("bf16"))
    assert (result.use, result.kind) == ("fp32", "unfit")
    near, _ = verdict(tmp_path / "near", FP32, ("bf16", 0.005, {"gap": 0.01}), repeats=1, **GPU)
    assert near.use == "bf16"


def same_seeds(folder):
    """Make a comparison look like that of a job which seeds itself: every repeat is a copy of the first."""
    for path in (folder / "runs").glob("*-0.jsonl"):
        for repeat in (1, 2):
            text = path.read_text().replace('"repeat":0', f'"repeat":{repeat}')
            path.with_name(f"{path.name[:-8]}-{repeat}.jsonl").write_text(text)
    return read_comparison([folder])


def test_a_job_that_ignores_seeds_has_no_noise_estimate(tmp_path):
    """fp32 repeats itself bit for bit, which must not turn every rounding error into a loss beyond noise."""
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


def test_non_finite_losses_are_not_recommended(tmp_path):
    """At the end they make a row unfit; before it they are mentioned."""
    late = nan_at(write_case(tmp_path / "late", (FP32, FAST), **GPU), "bf16", 38)
    assert (late.verdict.use, late.verdict.kind) == ("fp32", "unfit")
    assert "but 3 of its losses are not finite" in late.verdict.text
    early = nan_at(write_case(tmp_path / "early", (FP32, FAST), **GPU), "bf16", 5)
    assert early.verdict.use == "bf16"
    assert "its loss curve could not be compared, because 3 losses are not finite" in early.verdict.text


def test_a_better_loss_is_not_worse(tmp_path):
    """A loss far below that of fp32 does not disqualify a row."""
    _, comparison = verdict(tmp_path, FP32, ("bf16", 0.005, {"gap": -0.5}), **GPU)
    assert not is_worse(comparison.row("bf16"))


def test_a_row_without_master_is_not_recommended(tmp_path):
    """Without fp32 master weights a row is not recommended, however fast it is."""
    result, _ = verdict(tmp_path, FP32, FAST, ("bf16-lean,master=none", 0.002, {}), **GPU)
    assert result.use == "bf16"
    alone, _ = verdict(tmp_path / "alone", FP32, ("bf16-lean,master=none", 0.002, {}), **GPU)
    assert (alone.use, alone.kind) == ("fp32", "unfit")
    assert "no fp32 master weights" in alone.text


def test_no_measurable_difference_keeps_fp32(tmp_path):
    """Within 3 % nothing is recommended over fp32."""
    result, _ = verdict(tmp_path, FP32, ("bf16", 0.0099, {}))
    assert (result.use, result.kind) == ("fp32", "same")
    assert "No precision is measurably better than fp32 here" in result.text


def test_less_memory_decides_between_equals_on_a_gpu_only(tmp_path):
    """On a CPU, where the resident set is mostly the process itself, memory does not decide."""
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
def test_a_cpu_without_16_bit_arithmetic_stays_with_fp32(tmp_path, support, words):
    """The verdict gives the slowdown and the reason of the hardware."""
    table = {f: ["native", ""] for f in ("fp32", "fp16")} | {"bf16": support}
    result, _ = verdict(tmp_path, FP32, ("bf16", 0.030, {}), support=table)
    assert (result.use, result.kind) == ("fp32", "slower")
    assert "mixed precision is slower on this machine" in result.text
    assert words in result.text
    assert "The fastest alternative, bf16, is 3" in result.text
    assert "x slower per step" in result.text or "x (" in result.text


def test_a_native_format_without_benefit_is_explained(tmp_path):
    """The job is too small for the format."""
    result, _ = verdict(tmp_path, FP32, ("bf16", 0.030, {}))
    assert "too small to benefit" in result.text


def test_failures_and_baselines_are_part_of_the_verdict(tmp_path):
    """The text names rows that failed and compares with the fastest baseline."""
    rows = (FP32, FAST, ("fp16", 0.006, {}), ("torch-amp", 0.0055, {}))
    failures = {"fp16": {"kind": "unsupported", "reason": "no fp16 here"}}
    result, _ = verdict(tmp_path, *rows, peers=("torch-amp",), failures=failures, **GPU)
    assert "fp16 failed: unsupported (3 of 3 runs): no fp16 here." in result.text
    assert "Compared with torch-amp, the fastest peer: 1.1" in result.text


def test_a_lighter_row_is_offered(tmp_path):
    """A row with much less memory is mentioned as an alternative."""
    result, _ = verdict(tmp_path, FP32, FAST, ("bf16-lean,states=8bit", 0.006, {"peak": 200 * 2**20}), **GPU)
    assert result.use == "bf16"
    assert "If memory is short, bf16-lean,states=8bit uses 50% less" in result.text


def test_without_a_reference_the_speedup_is_unknown(tmp_path):
    """The verdict tells apart a reference that did not run and one that failed."""
    missing, _ = verdict(tmp_path / "a", FAST, ("fp16", 0.006, {}))
    assert missing.kind == "unknown"
    assert "The fp32 reference did not run" in missing.text
    failed, _ = verdict(tmp_path / "b", FP32, FAST, failures={"fp32": {"kind": "out of memory", "reason": "too large"}})
    assert "The fp32 reference failed (out of memory" in failed.text


def test_nothing_completed_recommends_nothing(tmp_path):
    """The verdict has the reason instead."""
    result, _ = verdict(tmp_path, FP32, failures={"fp32": {"kind": "job", "reason": "The loss failed"}})
    assert result.use is None
    assert "The loss failed" in result.text


def test_only_the_reference_leaves_nothing_to_choose(tmp_path):
    """With one row, or only baselines besides it, there is no recommendation."""
    result, _ = verdict(tmp_path, FP32)
    assert result.text == "Only fp32 completed, so there is nothing to choose from."
    baseline, _ = verdict(tmp_path / "peers", FP32, ("torch-amp", 0.005, {}), peers=("torch-amp",))
    assert baseline.text.startswith("Of Halfstep's precisions only fp32 completed, so there is nothing to choose from.")
    assert "torch-amp is 2" in baseline.text


def test_a_slower_fp32_is_not_called_mixed_precision(tmp_path):
    """If only a compiled fp32 is slower, the verdict does not mention mixed precision."""
    result, _ = verdict(tmp_path, FP32, ("fp32,compile=on", 0.020, {}))
    assert (result.use, result.kind) == ("fp32", "slower")
    assert "mixed precision" not in result.text
    assert "every other row is slower on this machine" in result.text


def test_one_turn_of_one_repeat_cannot_be_distinguished_from_noise(tmp_path):
    """A speed without an interval is not a reason, and the verdict asks for more steps or repeats."""
    folder = write_case(tmp_path / "c", (FP32, FAST), repeats=1, **GPU)
    for path in (folder / "runs").iterdir():
        path.write_text(re.sub(r'"slice":\d+', '"slice":0', path.read_text()))
    result = read_comparison([folder]).verdict
    assert (result.use, result.kind) == ("fp32", "same")
    assert "use more --steps or --repeats" in result.text


def test_one_repeat_is_mentioned(tmp_path):
    """The verdict warns that the intervals do not include variation between runs."""
    result, _ = verdict(tmp_path, FP32, FAST, repeats=1, **GPU)
    assert "One repeat" in result.text
    assert result.use == "bf16"


def test_a_row_with_fewer_repeats_than_the_others_is_named(tmp_path):
    """A slow row is not repeated once it was cut short; the intervals of the others are over all repeats."""
    folder = write_case(tmp_path / "c", (FP32, FAST), repeats=3, **GPU)
    for path in (folder / "runs").glob("bf16*-[12].jsonl"):
        path.unlink()
    text = read_comparison([folder]).verdict.text
    assert "over 3 repeats, " in text
    assert "(bf16 has 1)" in text
