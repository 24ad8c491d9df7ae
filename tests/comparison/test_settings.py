"""The settings of a comparison."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.comparison.settings import CompareSettings, parse_settings
from halfstep.errors import SettingError


@given(st.integers(2, 5000))
def test_slices_cover_the_timed_steps(steps):
    """Warm-up and slices add up to all steps, and no slice is too short."""
    settings = CompareSettings(steps=steps)
    slices = settings.slices()
    assert settings.num_warmup + sum(slices) == steps
    assert min(slices) >= min(5, steps - settings.num_warmup)
    assert len(slices) <= 13


def test_settings_survive_a_file():
    """The same settings are read back, and fields of a later version are ignored."""
    settings = CompareSettings(steps=7, max_norm=None, device="cpu")
    assert CompareSettings.from_dict({**settings.as_dict(), "later": 1}) == settings


def test_settings_of_the_command_line_have_their_types():
    """Numbers, none and strings are converted to the type of their field."""
    settings = parse_settings(["seed=3", "max_norm=none", "device=cpu", "warmup=2"])
    assert settings == {"seed": 3, "max_norm": None, "device": "cpu", "warmup": 2}
    assert parse_settings(["max_norm=0.5"]) == {"max_norm": 0.5}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CompareSettings(steps=1), "steps=1"),
        (lambda: CompareSettings(repeats=0), "repeats=0"),
        (lambda: CompareSettings(batch=True), "batch=True"),
        (lambda: CompareSettings(steps=10, warmup=10), "leaves none"),
        (lambda: CompareSettings(max_norm=0.0), "max_norm=0.0 must be a number above 0"),
        (lambda: CompareSettings(max_norm=float("nan")), "max_norm=nan must be"),
        (lambda: CompareSettings(max_norm="1"), "max_norm='1' must be"),
        (lambda: CompareSettings(gpu="H20O"), "Unknown GPU"),
        (lambda: CompareSettings(gpu="sm90"), "several sizes"),
        (lambda: CompareSettings(seed=2**70), "below 2\\*\\*62"),
        (lambda: parse_settings(["sed=1"]), "Did you mean 'seed'"),
        (lambda: parse_settings(["seed"]), "has no value"),
        (lambda: parse_settings(["seed=1", "seed=2"]), "given twice"),
        (lambda: parse_settings(["seed=x"]), "an integer"),
        (lambda: parse_settings(["max_norm=x"]), "a number or none"),
    ],
)
def test_mistakes_are_named(make, message):
    """Each error has the wrong value and what to write instead."""
    with pytest.raises(SettingError, match=message):
        make()
