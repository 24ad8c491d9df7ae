"""Fuzz `halfstep check` for as long as one likes: python benchmarks/fuzz_check.py --minutes 10.

Each file comes from one number, so a failure is that number and the file, which is kept. The property and the
mutations are those of tests/check/test_fuzz.py. Ends with 1 at the first failure.
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
        help="where a file that fails is put",
    )
    args = parser.parse_args()
    warnings.simplefilter("error")
    pool = seeds()
    begin = time.monotonic()
    number, found, slowest = args.first, Counter(), (0.0, args.first)
    while time.monotonic() - begin < args.minutes * 60:
        language, data = mutant(number, pool)
        start = time.process_time()
        try:
            found["findings"] += survive(language, data, gpu=number % 4 == 0)
        except BaseException:
            args.keep.mkdir(exist_ok=True)
            kept = args.keep / f"{number}-{ENDINGS[language]}"
            kept.write_bytes(data)
            traceback.print_exc()
            print(f"number {number} failed; the file is {kept}")
            return 1
        slowest = max(slowest, (time.process_time() - start, number))
        found[language] += 1
        number += 1
    count = number - args.first
    kinds = ", ".join(f"{found[language]:,} {language}" for language in ENDINGS)
    print(
        f"{args.minutes:g} minutes, {len(pool)} seeds, {count:,} files ({kinds}), {found['findings']:,} findings, no failure; "
        f"slowest {slowest[0]:.2f} s (number {slowest[1]})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
