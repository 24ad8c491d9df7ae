"""Puts one mistake into public training scripts that have none of its kind, and counts how many the checker finds.

    python benchmarks/mutate_check.py FILES [--files 200] [--seed 0] [--only missing-unscale] [--misses FOLDER]

FILES is a folder with public scripts, which are not part of this project. Labelled files (`score_check.py`) show which
mistakes people make; they are few. Here every script that does something right is a test: without its `scaler.update()`
it is wrong, in a structure that nobody here chose. A transformation is crude, and some of its results are no mistakes
(a scaler that is disabled, a loss that the framework divides), so the shares are lower bounds.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from check_mutations import KINDS, Kind, mutants

from halfstep.check import check_path


def score(paths: list[Path], kinds: dict[str, Kind], num_files: int, misses: Path | None) -> dict[str, Counter[str]]:
    """Per kind, how many mutants there were and how many were found."""
    table = {name: Counter[str]() for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "train.py"

        def codes(text: str) -> set[str]:
            copy.write_text(text)
            return {finding.code for finding in check_path(copy)}

        used = 0
        for path in paths:
            try:
                text = path.read_text()
                made = list(mutants(text, kinds))
            except (SyntaxError, UnicodeDecodeError, RecursionError, ValueError):
                continue
            if not made:
                continue
            before = codes(text)
            used += 1
            for name, changed in made:
                if before & kinds[name].rules:
                    continue
                hit = bool(codes(changed) & kinds[name].rules)
                table[name].update(mutants=1, found=int(hit))
                if misses is not None and not hit:
                    target = misses / name / f"{path.parts[-2]}-{path.name}"
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(changed)
            if used == num_files:
                break
    return table


def main(arguments: list[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Score the scripts of a folder and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", type=Path)
    parser.add_argument("--files", dest="num_files", type=int, default=200, help="scripts to change")
    parser.add_argument("--seed", type=int, default=0, help="of their order")
    parser.add_argument("--only", choices=KINDS, help="one kind of mistake")
    parser.add_argument("--misses", type=Path, help="a folder for the changed scripts in which nothing was found")
    options = parser.parse_args(arguments)
    paths = sorted(options.files.rglob("*.py"))
    if not paths:
        parser.error(f"{options.files} has no Python files.")
    random.Random(options.seed).shuffle(paths)
    kinds = {options.only: KINDS[options.only]} if options.only else KINDS
    write("| mistake | rule | found |\n|---|---|---|")
    for name, counts in score(paths, kinds, options.num_files, options.misses).items():
        share = f" ({counts['found'] / counts['mutants']:.2f})" if counts["mutants"] else ""
        write(f"| {name} | {', '.join(sorted(KINDS[name].rules))} | {counts['found']} of {counts['mutants']}{share} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
