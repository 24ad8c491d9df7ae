"""Fuzz `halfstep check` for any length of time: python benchmarks/fuzz_check.py --minutes 10.

Each file is generated from a seed number, so a failure is reproducible from that number; the file is saved as well. The
property and the mutations are those of tests/check/test_fuzz.py. Exits with 1 at the first failure.
"""

import argparse
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from check_mutants import ENDINGS, mutant, seeds, survive


def main():
    """Run until the time is up or a file breaks the checker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first file")
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path(tempfile.gettempdir()) / "halfstep-fuzz",
        help="directory for a file that fails",
    )
    parser.add_argument("--files", type=Path, help="directory of real scripts and configurations to mutate as well")
    args = parser.parse_args()
    warnings.simplefilter("error")
    pool = seeds(args.files)
    begin = time.monotonic()
    number, counts, slowest = args.first, Counter(), (0.0, args.first)
    while time.monotonic() - begin < args.minutes * 60:
        language, data = mutant(number, pool)
        start = time.process_time()
        try:
            counts["findings"] += survive(language, data, gpu=number % 4 == 0)
        except BaseException:
            args.keep.mkdir(exist_ok=True)
            saved = args.keep / f"{number}-{ENDINGS[language]}"
            saved.write_bytes(data)
            traceback.print_exc()
            print(f"File number {number} failed; it is saved as {saved}")
            return 1
        slowest = max(slowest, (time.process_time() - start, number))
        counts[language] += 1
        number += 1
    count = number - args.first
    kinds = ", ".join(f"{counts[language]:,} {language}" for language in ENDINGS)
    print(
        f"{args.minutes:g} minutes, {len(pool)} seeds, {count:,} files ({kinds}), {counts['findings']:,} findings, no failures; "
        f"slowest {slowest[0]:.2f} s (number {slowest[1]})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
