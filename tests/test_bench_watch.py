"""The watch benchmark: its rows, costs and limits, and that every part runs on a small model on a CPU."""

import importlib
import json
import logging
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from halfstep.jobs.job import Job

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def quiet_log():
    """The program lowers the log level of its process."""
    logger = logging.getLogger("halfstep")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def bench(monkeypatch):
    """The program, with one small model of no library."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = importlib.import_module("bench_watch")
    batch = torch.randn(4, 8), torch.randint(3, (4,))
    job = Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3)),
        data=lambda batch_size: iter([batch]),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=torch.optim.AdamW,
    )
    monkeypatch.setitem(program.CASES, "small", program.Case("small", "torch", 4, lambda tiny: job))
    yield program
    for name in ("bench_watch", "zoo_gradients", "zoo_models", "zoo_results", "zoo_rows"):
        sys.modules.pop(name, None)


def test_every_row_trains_and_is_recorded(bench, tmp_path, capsys):
    """Watch, Guard and the tools without a library of their own; the table shows each with its cost and limit."""
    names = [row.name for row in bench.ROWS if row.name != "DebugUnderflowOverflow"]
    options = [option for name in names for option in ("--row", name)]
    out = tmp_path / "watch.jsonl"
    sizes = ["--tiny", "--rounds", "1", "--steps", "1", "--device", "cpu"]
    bench.main(["--models", "small", *sizes, "--json", str(out), *options])
    (record,) = map(json.loads, out.read_text().splitlines())
    assert [entry["name"] for entry in record["rows"]] == names
    assert not [entry["error"] for entry in record["rows"] if "error" in entry]
    text = capsys.readouterr().out
    assert all(f"| {name} |" in text for name in [*names, "Watch every=100 (computed)"])


def test_the_kernel_trial_times_both_dtypes(bench, tmp_path):
    """A plain read and the kernel's default shape, for usual contents and the worst ones."""
    out = tmp_path / "kernel.jsonl"
    bench.main(["--kernel", "--models", "small", "--tiny", "--device", "cpu", "--json", str(out)])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(r["dtype"], r["contents"]) for r in records} == {
        (dtype, contents)
        for dtype in ("torch.bfloat16", "torch.float32")
        for contents in ("normal", "half zeros", "random bits")
    }
    assert {"plain read", "default"} <= {r["shape"] for r in records}
    assert {r["elements"] for r in records} == {8 * 16 + 16 + 16 * 3 + 3}


def test_costs_are_relative_to_the_baseline_of_the_same_round(bench):
    """The cost is the median over rounds of the slowdown, and every=100 is computed from two rows."""
    rates = {"Engine": [10.0, 20.0, 30.0], "Watch every=1": [5.0, 16.0, 15.0], "Watch between samples": [10.0, 20.0, 30.0]}  # fmt: skip
    record = {"rows": [{"name": name, "rates": values} for name, values in rates.items()]}
    costs = {name: cost for name, cost, *_ in bench.costs(record, bench.ROWS)}
    assert costs["Watch every=1"] == pytest.approx(1.0)
    assert costs["Watch every=100 (computed)"] == pytest.approx(0.01)
    assert "Engine" not in costs


def test_rows_bring_their_baselines(bench):
    """A row that is asked for is measured next to what it is compared with; an unknown one is an error with the names."""
    assert [row.name for row in bench.chosen_rows(["Guard"])] == ["torch AMP", "Guard"]
    assert [row.name for row in bench.chosen_rows(["Watch every=100"])] == ["Engine", "Watch every=100"]
    with pytest.raises(SystemExit, match="Known: Engine"):
        bench.chosen_rows(["watch"])
