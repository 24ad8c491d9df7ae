"""The colours of the terminal: which, when, and in one place."""

import io
import re
from pathlib import Path

import pytest

import halfstep
from halfstep.report import theme

SOURCES = Path(halfstep.__file__).parent


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "variables", "expected"),
    [
        (Terminal(), {}, True),
        (io.StringIO(), {}, False),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "dumb"}, False),
    ],
)
def test_colour_is_for_terminals_that_want_it(monkeypatch, stream, variables, expected):
    """Not for pipes, with NO_COLOR (which counts unless empty), or in a terminal without escape codes."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert theme.uses_colour(stream) is expected
    assert (theme.console_options(stream)["color_system"] is None) is not expected


def test_every_style_is_readable_on_white_and_on_black():
    """Red, green, magenta and bold; rich knows each of them, and has none of its own left in the bar."""
    from rich.style import Style

    for style in (theme.BAD, theme.CAUTION, theme.GOOD, theme.STRONG, *theme.BAR.values()):
        colour = Style.parse(style).color
        assert colour is None or colour.name in {"red", "green", "magenta", "default"}
    assert theme.paint("x", theme.CAUTION, colour=True) == "\033[1;35mx\033[0m"
    assert theme.paint("x", theme.CAUTION, colour=False) == "x"


def test_no_other_file_has_colours():
    """Escape codes and the names of colours are in the theme only."""
    style = re.compile(r"""\\033\[|\\x1b\[|["'](?:bold )?(?:red|green|yellow|magenta|cyan|white|blue|dim|bold)["']""")
    files = [*(SOURCES / "report").rglob("*.py"), *(SOURCES / "cli").glob("*.py")]
    found = [
        f"{file.name}: {line.strip()}"
        for file in files
        if file.name != "theme.py"
        for line in file.read_text().splitlines()
        if style.search(line) and "<" not in line
    ]
    assert not found
