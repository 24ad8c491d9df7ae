"""Numbers as people read them."""

import pytest

from halfstep.hardware.units import bytes_text, count_text, few, gib_text, seconds_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (2**30, "1 GiB"),
        (2048 * 2**30, "2,048 GiB"),
    ],
)
def test_a_size_has_the_largest_unit_that_fits(size, text):
    """Each unit starts at one of it."""
    assert bytes_text(size) == text


@pytest.mark.parametrize(("size", "text"), [(0, "0.00"), (2**30, "1.00"), (2**25, "0.0312"), (-(2**30), "-1.0000")])
def test_small_sizes_in_gib_have_more_digits(size, text):
    """Two digits would show 0.03 for 32 MiB."""
    assert gib_text(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(2, "2 s"), (0.5, "500 ms"), (4e-5, "40 us")])
def test_a_time_has_a_unit_that_keeps_its_digits(seconds, text):
    """Seconds, milliseconds or microseconds."""
    assert seconds_text(seconds) == text


def test_a_count_has_its_noun_in_the_right_number():
    """One file, 1,024 files, 2 entries."""
    assert [count_text(1, "file"), count_text(1024, "file"), count_text(2, "entry", "entries")] == [
        "1 file",
        "1,024 files",
        "2 entries",
    ]


def test_a_long_list_of_names_is_cut():
    """Three names and the number of the others."""
    assert few(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert few(["a", "b"]) == "a, b"
