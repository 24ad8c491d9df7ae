"""The benchmark of saving: that it runs on a small model on a CPU, and what it reports."""

import importlib
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_every_part_runs_on_a_cpu(monkeypatch, tmp_path, capsys):
    """All rows are there, nothing is left on disk, and a CPU is not compared with the aim for a GPU."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module("bench_save")
    arguments = ["--tiny", "--steps", "2", "--saves", "2", "--dir", str(tmp_path), "--out", str(tmp_path / "out.md")]
    monkeypatch.setattr(sys, "argv", ["bench_save.py", *arguments])
    bench.main()
    text = (tmp_path / "out.md").read_text()
    assert text == capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out.md"]
    for row in ("step", "checkpoint", "first save in the background", "later saves", "steps while writing"):
        assert f"| {row} |" in text
    assert "median of 2)" in text
    assert "Aim" not in text


def test_the_aim_is_judged_by_the_slowest_save_and_the_median_step():
    """A stall or a slowdown beyond the limit is reported."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        bench = importlib.import_module("bench_save")
    finally:
        sys.path.remove(str(BENCHMARKS))
    args = bench.argparse.Namespace(tiny=False, model="vit_l_16", batch=128, precision="bf16-lean")
    times = {"plain": [0.1] * 3, "calls": [2.0, 0.1], "stalls": [2.0, 0.1], "during": [0.101] * 3, "written": [4.0] * 2}
    times |= {"blocking": 4.0, "bytes": 2**30}
    assert bench.report(args, times)[-1].endswith(": reached.")
    for worse in ({"stalls": [2.0, 0.1, 0.2]}, {"during": [0.103] * 3}):
        assert bench.report(args, times | worse)[-1].endswith("not reached.")
