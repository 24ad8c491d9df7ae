"""benchmarks/bench_training.py: the test it applies to final losses, and the program on a few steps of tiny models."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "bench_training.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_training", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_training"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_training"]


def test_a_difference_is_judged_by_the_spread_over_seeds(bench):
    """Three seeds with a standard deviation of 0.1 allow a difference of 2.776 * 0.1 * sqrt(2 / 3)."""
    base = [1.0, 1.1, 0.9]
    limit = 2.776 * 0.1 * (2 / 3) ** 0.5
    difference = bench.compare_losses([value + 0.2 for value in base], base)
    assert (difference.mean, difference.noise) == (pytest.approx(0.2), pytest.approx(limit))
    assert difference.paired == pytest.approx(0, abs=1e-12)  # every seed moved by the same
    verdicts = [bench.compare_losses([v + gap for v in base], base).verdict for gap in (0.2, -0.2, 0.24, -0.24)]
    assert verdicts == ["within", "within", "worse", "better"]


def test_rows_are_compared_with_torch_amp_of_their_format(bench):
    """fp16's rows with fp16, the others with bf16, and torch AMP with nothing."""
    bases = {row: bench.baseline_of(row) for row in bench.ROWS}
    assert {row for row, base in bases.items() if base == "torch AMP fp16"} == {"fp16", "fp16-lean"}
    assert {row for row, base in bases.items() if base is None} == {"torch AMP bf16", "torch AMP fp16"}


def test_a_summary_shows_failures_and_losses_that_are_not_finite(bench):
    """Neither is averaged away: the row has the reason, or the verdict "not finite"."""
    done = {"task": "digits", "train_loss": 1.0, "skipped": 0, "seconds": 1.0}
    runs = [done | {"row": "torch AMP bf16", "seed": seed, "loss": 1.0 + 0.1 * seed} for seed in range(2)]
    runs += [done | {"row": "bf16", "seed": seed, "loss": loss} for seed, loss in enumerate((1.0, float("nan")))]
    runs += [{"task": "digits", "row": "bf16-lean", "seed": seed, "failed": "why"} for seed in range(2)]
    summary = {case["row"]: case for case in bench.summarize(runs)}
    assert summary["bf16"]["verdict"] == "not finite"
    assert summary["bf16-lean"]["failed"] == "2 of 2 runs: why"
    lines = [bench.show(case) for case in summary.values()]
    assert len({line.count("|") for line in lines}) == 1


def test_text_for_validation_is_not_trained_on(bench):
    """The text is ASCII, and the validation part is every sixteenth block of it."""
    training, validation, digest = bench.read_corpus()
    assert max(training.max(), validation.max()) < bench.NUM_SYMBOLS
    assert len(training) // len(validation) in (15, 16)
    assert bench.read_corpus()[2] == digest
    block = validation[: bench.BLOCK]
    assert not (training.view(-1, bench.BLOCK) == block).all(1).any()


def test_batches_depend_on_the_seed_alone(bench):
    """The same seed gives the same batches, another seed others; targets are the next characters."""
    task = bench.make_task("chars", bench.QUICK)
    one, again, other = (task.batches(2, seed, "cpu") for seed in (0, 0, 1))
    for (x, y), (x2, y2), (x3, _) in zip(one, again, other, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)
        assert not torch.equal(x, x3)
        assert torch.equal(x[:, 1:], y[:, :-1])


@pytest.mark.parametrize("rows", [["8bit"], pytest.param([], marks=pytest.mark.slow)], ids=["one row", "all rows"])
def test_quick_trains_the_rows_and_writes_both_records(bench, tmp_path, capsys, rows):
    """From the same weights per seed in every row; markdown has what is printed, and JSON the losses of each run."""
    out = tmp_path / "record.md"
    only = ["--rows", *rows] if rows else []
    assert bench.main(["--quick", "--tasks", "chars", "--seeds", "2", "--jobs", "1", "--out", str(out), *only]) == 0
    assert capsys.readouterr().out.strip() == out.read_text().strip()
    data = json.loads(out.with_suffix(".json").read_text())
    expected = [row for row in bench.ROWS if not rows or row in bench.AMP or "8bit" in row]
    assert [case["row"] for case in data["summary"]] == expected
    assert len({run["weights"] for run in data["runs"]}) == 2
    assert all(len(case["losses"]) == 2 for case in data["summary"])
    assert {case["row"] for case in data["summary"] if "gap" not in case} == set(bench.AMP)


@pytest.mark.parametrize(
    ("name", "row"), [("digits", "fp32"), pytest.param("gpt2", "bf16-lean", marks=pytest.mark.slow)]
)
def test_quick_trains_the_other_tasks(bench, name, row):
    """One row of each, with a finite loss."""
    if name == "gpt2":
        pytest.importorskip("transformers", reason="Requires: [transformers]")
    run = bench.run_one((name, row, 0, bench.QUICK, "cpu"))
    assert 0 < run["loss"] < 10
    assert run["skipped"] == 0


@pytest.mark.slow  # starts processes
def test_several_processes_share_the_runs(tmp_path):
    """The program with two processes completes, with the runs in their order."""
    out = tmp_path / "record.md"
    words = ["--quick", "--tasks", "digits", "--rows", "fp32", "--seeds", "2", "--jobs", "2", "--out", str(out)]
    done = subprocess.run([sys.executable, str(BENCHMARK), *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs = json.loads(out.with_suffix(".json").read_text())["runs"]
    rows = ("fp32", "torch AMP bf16", "torch AMP fp16")
    assert [(run["row"], run["seed"]) for run in runs] == [(row, seed) for row in rows for seed in range(2)]
