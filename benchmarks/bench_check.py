"""Times `halfstep check`: one small file from a cold start, and a tree of 2,000 Python files, with and without the cache.

    python benchmarks/bench_check.py [--files 2000] [--tree FOLDER] [--out FILE.md]

`--tree` measures a project of yours instead. The tree is otherwise one third training code, assembled from the rules' own cases, and two thirds modules of the standard
library, because most files of a project are not about precision. Each figure is the median of several runs, with its range.
"""

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from halfstep.check.cases import source_of_case
from halfstep.check.registry import all_rules
from halfstep.hardware.environment import environment

SMALL = """import torch
from torch.amp import GradScaler, autocast

scaler = GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def timed(args, rounds):
    """Wall-clock and CPU seconds of a command, each as (median, minimum, maximum)."""
    wall_seconds, cpu_seconds = [], []
    for _ in range(rounds):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "halfstep", "check", *args], capture_output=True, check=False)
        wall_seconds.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode in {0, 3}, done.stderr.decode()
    return [
        (statistics.median(times), min(times), max(times)) for times in (wall_seconds, cpu_seconds)
    ], done.stdout.decode()


def make_tree(folder, count):
    """Write the files."""
    cases = [t for rule in all_rules() for t in (*rule.bad, *rule.good) if source_of_case(rule, t).language == "python"]
    cases = [text for text in cases if 100 < len(text) < 4000]
    library = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    library = [path for path in library if "site-packages" not in path.parts and "lib2to3" not in path.parts]
    for i in range(count):
        if i % 3 == 0:
            parts = [cases[(i * 7 + j * 13) % len(cases)] for j in range(1 + i % 4)]
            data = "\n\n".join(parts).encode()
        else:
            data = library[(i * 11) % len(library)].read_bytes()
        path = folder / f"package{i % 40}" / f"module{i}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


def row(name, figures, goal):
    """One row of the table."""
    cells = [f"{median:.2f} ({least:.2f} to {most:.2f})" for median, least, most in figures]
    return f"| {name} | {cells[0]} | {cells[1]} | {goal} |"


def main():
    """Measure and print, or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    load = os.getloadavg()[0]  # of other programs: it lengthens the wall-clock times, and CPU times a little
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "small.py").write_text(SMALL)
        (folder / "ds_config.json").write_text(
            '{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}\n'
        )
        (folder / "tree").mkdir()
        tree = args.tree or folder / "tree"
        if args.tree is None:
            make_tree(tree, args.files)
        texts = [path.read_bytes() for path in tree.rglob("*.py")]
        num_lines = sum(text.count(b"\n") for text in texts)
        timed([str(folder / "small.py"), "--no-cache"], 1)  # compiles the byte code
        script, _ = timed([str(folder / "small.py"), "--no-cache"], 9)
        config, _ = timed([str(folder / "ds_config.json"), "--no-cache"], 9)
        cold, output = timed([str(tree), "--no-cache"], 3)
        cache = ["--cache-dir", str(folder / "cache")]
        timed([str(tree), *cache], 1)
        cached, _ = timed([str(tree), *cache], 3)
    versions = environment()
    text = "\n".join(
        [
            "# Run time of halfstep check",
            "",
            f"{datetime.now(UTC):%Y-%m-%d}; {platform.platform()}; {versions}; load average {load:.1f} at the start",
            "",
            "| input | wall s, median (range) | CPU s, median (range) | target |",
            "|---|---|---|---|",
            row("one script of 11 lines, cold start", script, "0.3 s"),
            row("one DeepSpeed JSON, cold start", config, "0.3 s"),
            row(f"tree of {len(texts):,} Python files, {num_lines:,} lines", cold, "15 s on 2 cores"),
            row("the same tree, no file changed", cached, "3 s"),
            "",
            f"The tree: {output.strip().splitlines()[-1]}",
            "",
        ]
    )
    if args.out:
        args.out.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
