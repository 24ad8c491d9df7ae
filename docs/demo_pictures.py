"""The pictures of the README: what `make demo` prints and the report it writes, on this machine.

    python docs/demo_pictures.py [RUN]

Runs `halfstep compare digits` as `make demo` does, in a terminal of 100 columns, and writes docs/images/demo_terminal.svg
and docs/images/demo_report.png. With RUN, the folder of an earlier comparison, only its report is made again. Needs Chromium.
"""

from __future__ import annotations

import io
import os
import pty
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).parent / "images"
COLUMNS = 100
LINES = 46  # of the picture: a page, not the whole log


def terminal_output(command: list[str]) -> str:
    """What a command writes to a terminal, with its colors."""
    parts: list[bytes] = []

    def read(descriptor: int) -> bytes:
        parts.append(os.read(descriptor, 4096))
        return parts[-1]

    os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    if pty.spawn(command, read):
        raise SystemExit(f"{' '.join(command)} failed.")
    return b"".join(parts).decode().replace("\r\n", "\n")


def last_states(output: str) -> str:
    """The output without the states of lines that were overwritten, such as progress bars."""
    lines = [line.rpartition("\r")[2].rpartition("\x1b[2K")[2] for line in output.splitlines()]
    return "\n".join(line for line in lines if "\u2501" not in line and "\u2578" not in line)


def main() -> None:
    """Run, then draw."""
    program, folder = str(Path(sys.executable).parent / "halfstep"), Path(tempfile.mkdtemp())
    source = ["--from", sys.argv[1]] if len(sys.argv) > 1 else ["digits"]
    output = terminal_output([program, "compare", *source, "--out", str(folder / "demo")])
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    shown = last_states(output).strip("\n").splitlines()
    console.print(Text("$ halfstep compare digits", style="bold"))
    console.print(Text.from_ansi("\n".join(shown[-LINES:]).replace(str(folder / "demo"), "runs/demo")))
    console.save_svg(str(IMAGES / "demo_terminal.svg"), title="make demo")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    page, picture = next((folder / "demo").glob("*.html")), IMAGES / "demo_report.png"
    subprocess.run(  # noqa: S603 - our own page
        [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1200,1300", "--virtual-time-budget=4000",
         f"--screenshot={picture}", page.resolve().as_uri()],
        check=True, capture_output=True,
    )  # fmt: skip
    print(folder, picture, sep="\n")


if __name__ == "__main__":
    main()
