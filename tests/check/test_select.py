"""Selecting findings by code, prefix, name or severity."""

from pathlib import PurePosixPath

import pytest

from check_toys import use_toys
from halfstep.check.finding import Finding
from halfstep.check.select import Selection, matches, parse_selectors, path_matches
from halfstep.errors import SettingError

FINDING = Finding("HS104", "clip-before-unscale", "error", "a.py", 1, 1, "message")


@pytest.mark.parametrize("selector", ["HS104", "HS10", "HS1", "HS", "clip-before-unscale", "error"])
def test_selectors_that_match(selector):
    """A code, any prefix of it, the name and the severity all match."""
    assert matches(selector, FINDING)
    assert Selection((selector,)).wants(FINDING)
    assert not Selection((), (selector,)).wants(FINDING)


@pytest.mark.parametrize("selector", ["HS105", "HS2", "warning", "clip"])
def test_selectors_that_do_not_match(selector):
    """Other codes, severities and parts of names do not match."""
    assert not Selection((selector,)).wants(FINDING)
    assert Selection((), (selector,)).wants(FINDING)


def test_ignoring_overrides_selecting():
    """Ignored findings are removed from the selected ones."""
    assert not Selection(("HS1",), ("HS104",)).wants(FINDING)
    assert not Selection(("HS1",)).without(["HS104"]).wants(FINDING)


def test_selectors_are_split_and_normalised(monkeypatch):
    """Commas, spaces and case do not matter."""
    use_toys(monkeypatch)
    assert parse_selectors(["hs901,Bad-Word", "HS9  advice"], "here") == ("HS901", "bad-word", "HS9", "advice")


@pytest.mark.parametrize(("word", "guess"), [("HS999", "HS90"), ("bad-wrod", "bad-word")])
def test_an_unknown_selector_is_rejected_with_a_guess(monkeypatch, word, guess):
    """The error names the place, the word and the nearest rule."""
    use_toys(monkeypatch)
    with pytest.raises(SettingError, match=f"--select: no rule is called '{word}'. Did you mean '{guess}"):
        parse_selectors([word], "--select")


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("train.py", "/p/sub/train.py", True),
        ("sub", "/p/sub/train.py", True),
        ("sub/*", "/p/sub/deep/train.py", True),
        ("*_generated.py", "/p/x_generated.py", True),
        ("./sub/", "/p/sub/train.py", True),
        ("p", "/p/sub/train.py", False),
        ("sub", "/p/subway/train.py", False),
        ("tests/*", "/p/src/train.py", False),
    ],
)
def test_patterns_match_names_folders_and_paths(pattern, path, fits):
    """A pattern matches the file's name, its path below the project, or a parent folder."""
    assert path_matches(pattern, PurePosixPath(path), PurePosixPath("/p")) is fits
