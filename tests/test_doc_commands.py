"""Every command of README.md and docs/ runs as shown; tests/doc_commands.py describes the comments that control it."""

import ast
import re
import shlex

import click
import pytest

from doc_commands import PAGES, ROOT, blocks_of, prepare, prints, run
from forked_python import programs
from halfstep.cli import cli

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
COMMANDS = [block for block in BLOCKS if block.is_commands]
RUN = sorted({block.page for block in COMMANDS if not block.note("not run")})
SKIPPED = [block for block in COMMANDS if block.note("not run")]


def shown(block):
    return f"{block.page}:{block.line}"


def test_every_block_has_a_language():
    """No block is without one, so that no command is overlooked, and commands are in blocks that are run."""
    assert not [shown(block) for block in BLOCKS if not block.language]
    synopsis = re.compile(r"\[|RUN")  # `halfstep train [TARGET] ...` is the grammar of a command
    hidden = [
        f"{shown(block)}: {line}"
        for block in BLOCKS
        if block.language == "text"
        for line in block.body.splitlines()
        if re.match(r"(\$ )?(halfstep|torchrun|pip|make) \w", line) and not synopsis.search(line)
    ]
    assert not hidden


def test_python_is_python():
    """A block that is labelled as Python parses as Python."""
    for block in BLOCKS:
        if block.language in {"python", "py"}:
            compile(block.body, shown(block), "exec", flags=ast.PyCF_ONLY_AST)


def test_every_comment_is_known():
    """A comment in front of commands is one that the runner reads."""
    for page in PAGES:
        comments = re.findall(
            r"^(<!-- .*? -->)\n(?:<!-- .* -->\n)*```(?:bash|console|sh)", page.read_text(), re.MULTILINE
        )
        known = re.compile(r"<!-- (not run: \w|first: \w|output not compared: \w|exit \d)")
        assert not [f"{page.name}: {comment}" for comment in comments if not known.match(comment)]


def halfstep_calls(block):
    """The arguments of each call of `halfstep` in a block."""
    for command in block.commands():
        words = shlex.split(command.text, comments=True)
        for number, word in enumerate(words):
            is_called = number == 0 or words[number - 1] in {"-m", "--"} or "=" in words[number - 1]
            if word == "halfstep" and is_called:
                yield words[number + 1 :]


@pytest.mark.parametrize("block", SKIPPED, ids=shown)
def test_a_command_that_is_not_run_has_known_options(block, tmp_path, monkeypatch):
    """What needs a GPU, a cluster, the network or minutes is at least parsed, by the command that it calls."""
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    for arguments in halfstep_calls(block):
        command = cli.get_command(click.Context(cli), arguments[0])
        command.make_parser(click.Context(command)).parse_args(list(arguments[1:]))


def test_output_is_compared_by_words():
    """Numbers and column widths may differ; words, lines and their order may not."""
    page = "fp16  12.5 ms  1,024\nnote: slow ...\n...\ntotal 3\n"
    assert prints(page, "fp16   9 ms      7\nnote: slow and cold\nx\ny\ntotal 11\n")
    assert prints("a\n...\n", "a\n")
    assert not prints(page, "bf16   9 ms      7\nnote: slow\nx\ntotal 11\n")
    assert not prints(page, "fp16   9 ms      7\nnote: slow\ntotal 11\nmore\n")
    assert not prints("a\n", "a\nb\n")


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run(page, tmp_path):
    """Each command exits as the page promises and prints what it shows, in one directory from top to bottom."""
    forked = () if page == "README.md" else (programs(),)  # one page by real interpreters
    environment = prepare(tmp_path, page, *forked)
    for block in blocks_of(ROOT / page):
        if name := block.note("file"):
            (tmp_path / name).write_text(block.body)
        if not block.is_commands or block.note("not run"):
            continue
        if first := block.note("first"):
            result = run(first, tmp_path, environment)
            assert result.returncode == 0, f"{shown(block)}: {first}\n{result.stderr[-1500:]}"
        for command in block.commands():
            result = run(command.text, tmp_path, environment)
            where = f"{shown(block)}: {command.text}\n{result.stdout[-3000:]}\n{result.stderr[-1500:]}"
            assert result.returncode == command.code, f"exit code {result.returncode}: {where}"
            if command.output is not None and not block.note("output not compared"):
                assert prints(command.output, result.stdout), f"the page shows other output: {where}"
