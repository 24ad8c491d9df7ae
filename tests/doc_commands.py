"""The commands in the fenced blocks of README.md and docs/, and how they are run: as a reader does who copies them.

A block ```bash has one command per line; a block ```console has commands after `$ ` and what they print to stdout. A page is run
from top to bottom in one directory with links to examples/ and benchmarks/, `job.py`, a
copy of examples/job.py, and the files of tests/doc_files/PAGE. Comments in front of a block:

    <!-- not run: REASON -->                the block is skipped, but its options must exist
    <!-- first: COMMAND -->                 a command that a reader has run before, such as the training of a run that is watched
    <!-- exit 3 -->, <!-- exit 3 0 -->      the exit code of every command, or of each; there is no terminal
    <!-- file: NAME -->                     the block, of any language, is the content of this file
    <!-- output not compared: REASON -->    it depends on the machine

In shown output numbers stand for any number, a line `...` for any lines, and `...` at the end of a line for any rest.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"((?:^<!-- .*? -->\n)*)^```(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!-- (not run|first|file|output not compared|exit)(?::)? (.*?) -->")


@dataclass(frozen=True)
class Command:
    """One command, the output shown below it (None: nothing is shown) and its exit code."""

    text: str
    output: str | None
    code: int


@dataclass(frozen=True)
class Block:
    """A fenced block and the comments in front of it."""

    page: str
    line: int
    language: str
    body: str
    notes: tuple[tuple[str, str], ...]

    def note(self, name):
        """The value of a comment, or None."""
        return dict(self.notes).get(name)

    @property
    def is_commands(self):
        return self.language in {"bash", "console", "sh"}

    def commands(self):
        """The commands in order."""
        lines = self.body.replace("\\\n", "").splitlines()
        if self.language == "console":
            shown = [(part.partition("\n")[0], part.partition("\n")[2]) for part in self.body.split("$ ")[1:]]
            texts, outputs = zip(*shown, strict=True)
        else:
            texts = [line for line in lines if line.strip() and not line.startswith("#")]
            outputs = [None] * len(texts)
        codes = [int(code) for code in (self.note("exit") or "0").split()]
        codes *= len(texts) if len(codes) == 1 else 1
        return [Command(*each) for each in zip(texts, outputs, codes, strict=True)]


def blocks_of(page):
    """Every fenced block of a page that stands at the start of a line."""
    text = page.read_text()
    return [
        Block(
            page.relative_to(ROOT).as_posix(),
            text[: match.start(2)].count("\n") + 1,
            match[2],
            match[3],
            tuple(_COMMENT.findall(match[1])),
        )
        for match in _BLOCK.finditer(text)
    ]


def as_pattern(shown):
    """A regular expression for what a command printed, from what a page shows of it."""
    parts = []
    for line in shown.strip("\n").split("\n"):
        if line.strip() == "...":
            parts.append(r"(?:.*\n)*?")
            continue
        cut = line.endswith("...")
        parts.append(re.escape(masked(line.removesuffix("..."))) + (".*" if cut else "") + r"\n")
    return "".join(parts)


def masked(text):
    """The text with every number, and the width of columns and rules, replaced."""
    text = re.sub(r"\d[\d.,]*(?:e[+-]?\d+)?", "#", text)
    return "\n".join(re.sub(r"[ -]{2,}|\s+", " ", line).strip() for line in text.splitlines())


def prints(shown, printed):
    """Whether a command printed what the page shows."""
    return re.fullmatch(as_pattern(shown), masked(printed).strip("\n") + "\n") is not None


def prepare(folder, page="README.md", *programs):
    """Make the directory that the commands of a page run in; return their environment, with folders of `programs` first."""
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "examples/job.py", folder / "job.py")
    for path in (ROOT / "tests/doc_files" / Path(page).stem).glob("*.*"):
        shutil.copy(path, folder / path.name)
    places = [*map(str, programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    return os.environ | {
        "PATH": os.pathsep.join(places),
        "HALFSTEP_STATE": str(folder / "state"),
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "COLUMNS": "100",
    }


def run(command, folder, environment):
    """Run one command line by bash, as typed."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
