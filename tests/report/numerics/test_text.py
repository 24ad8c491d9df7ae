"""The terminal's view: curves in characters, narrow and wide terminals, with and without UTF-8."""

import io
import math

import pytest
from rich.console import Console

from halfstep.report.numerics.text import exponent_bar, render_view, sparkline
from halfstep.report.numerics.view import EventLine, RunView, StepPoint, TensorRow

MARKS = "01234567"
ROW = TensorRow(
    "blocks.11.attention.projection.weight", "gradient", 100, 0, 0.0, 0.5, 0.1, 2.0, bins={-3: 10, 0: 80, 2: 40}
)


def view(**changes):
    points = tuple(StepPoint(i, 3.0 - i, 2.0**16, skipped=i == 2, rate=100.0) for i in range(1, 4))
    values = {
        "run": "r", "policy": "fp16", "format": "fp16", "command": "halfstep train", "points": points, "events": (),
        "rows": (ROW,), "sampled_at": 2, "total_steps": 9, "ended": False,
    }  # fmt: skip
    return RunView(**values | changes)


def shown(value, width=80, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, highlight=False)
    console.print(render_view(value, console))
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def test_a_sparkline_follows_its_values():
    """The lowest value has the first mark and the highest the last; a stretch without a finite value is an x."""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], MARKS, 8) == "01234567"
    assert sparkline([0.0, math.nan, 7.0], MARKS, 3) == "0x7"
    assert sparkline([math.inf, math.nan], MARKS, 2) == "xx"
    assert sparkline([5.0], MARKS, 8) == "0"


def test_a_long_series_is_averaged_over_stretches():
    """As many characters as there is room, each the mean of as many values."""
    assert sparkline([0] * 50 + [7] * 50, MARKS, 4) == "0077"


def test_the_exponents_are_drawn_in_their_places():
    """A blank where there is no element, the last mark where most are."""
    assert exponent_bar(ROW, -3, 2, MARKS) == "1  7 4"


@pytest.mark.parametrize("width", [80, 140])
def test_every_line_fits_the_terminal(width):
    """Nothing wraps or is cut, in narrow and in wide terminals."""
    text = shown(view(), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "\u2026" not in text
    assert "projection.weight" in text
    assert "50.0%" in text


def test_a_terminal_without_utf_8_gets_plain_characters():
    """The view can be encoded in ASCII."""
    assert "step 3 of 9" in shown(view(), encoding="ascii")


def test_skips_and_advice_are_shown():
    """An event with its step, text and advice; the count of skipped steps."""
    text = shown(view(events=(EventLine(2, "skip", "w overflowed", "wait"),)))
    assert "skipped 1" in text
    assert "step 2: skip: w overflowed" in text
    assert "wait" in text


def test_a_run_without_samples_names_the_option():
    """The reader learns how to get them."""
    assert "watch=100" in shown(view(rows=()))
    assert "no step recorded yet" in shown(view(rows=(), points=()))


MANY = tuple(
    TensorRow(f"layer.{i}.weight", kind, 100, 0, 0.0, 0.5, 0.1, 2.0, bins={-30: 10, 0: 80})
    for kind in ("gradient", "weight", "activation")
    for i in range(6)
)
EVENTS = tuple(EventLine(step, "skip", "gradients not finite in " + "w, " * 40, "wait " * 30) for step in range(1, 6))


@pytest.mark.parametrize("height", [23, 30, 44, 70])
def test_the_last_event_is_on_the_screen(height):
    """A live view has as many lines as the terminal, and less of the rest where that is few."""
    console = Console(file=io.StringIO(), width=80, highlight=False)
    screen = render_view(view(rows=MANY, events=EVENTS), console, height=height)
    lines = console.render_lines(screen, pad=False)
    text = "\n".join("".join(segment.text for segment in line) for line in lines)
    assert len(lines) <= height
    assert "step 3 of 9" in text
    assert "layer." in text
    assert "step 5: skip" in text


def test_exponents_are_in_the_table_where_they_fit_and_name_their_kind_where_not():
    """A gradient and a weight have the same name."""
    wide, narrow = shown(view(rows=MANY), 120), shown(view(rows=MANY), 80)
    assert "exponents" not in wide
    assert "2^-30 to 2^0" in wide
    below = narrow.partition("exponents")[2]
    assert below.count("gradient") == below.count("weight  weight") == below.count("activation") == 4


def test_what_wraps_is_indented():
    """Only the first line of an event begins at the margin."""
    text = shown(view(rows=(), events=EVENTS[:1]))
    lines = text.partition("step 1: skip")[2].splitlines()[1:]
    assert len(lines) > 2
    assert all(line.startswith("    ") for line in lines)
