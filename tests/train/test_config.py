"""The settings of a run."""

import dataclasses

import pytest

from halfstep.errors import HalfstepError
from halfstep.train.config import TrainConfig, changed_fields, parse_settings


def test_set_reaches_exactly_the_fields_in_their_types():
    """key=value gives ints, floats, booleans, strings and None, as the type of the field requires."""
    pairs = [
        "batch=8",
        "max_norm=0.5",
        "ema=none",
        "compile=on",
        "deterministic=false",
        "device=cpu",
        "steps=3",
        "recompute=cheap",
    ]
    assert parse_settings(pairs) == {
        "batch": 8, "max_norm": 0.5, "ema": None, "compile": True, "deterministic": False, "device": "cpu", "steps": 3, "recompute": "cheap",
    }  # fmt: skip
    names = {f.name for f in dataclasses.fields(TrainConfig)}
    assert set(parse_settings([f"{name}={0.5 if name == 'recompute' else 1}" for name in names])) == names


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["bach=8"], "Did you mean 'batch'"),
        (["batch"], "has no value"),
        (["batch=many"], "not a value of type int"),
        (["compile=maybe"], "compile='maybe' is neither on nor off, nor 'blocks', nor a mode"),
        (["deterministic=maybe"], "not a value of type bool"),
        (["max_norm=big"], "float or none"),
        (["recompute=all"], "recompute='all' must be None, 'cheap' or a share"),
        (["batch=1", "batch=2"], "given twice"),
    ],
)
def test_invalid_settings_raise(pairs, message):
    """Unknown keys, missing values, wrong types and duplicates are each named."""
    with pytest.raises(HalfstepError, match=message):
        parse_settings(pairs)


@pytest.mark.parametrize(
    "bad",
    [
        {"batch": 0},
        {"epochs": 0},
        {"steps": -1},
        {"keep_last": 0},
        {"seed": -1},
        {"seed": 2**64},
        {"eval_every": 1.5},
        {"save_every": 0},
    ],
)
def test_invalid_numbers_raise(bad):
    """Counts must be integers in their range."""
    name, value = next(iter(bad.items()))
    with pytest.raises(HalfstepError, match=f"{name}={value}"):
        TrainConfig(**bad)


def test_only_settings_of_the_trajectory_are_fixed_on_resume():
    """Training length and retention may change, batch and seed may not."""
    saved = dataclasses.asdict(TrainConfig(batch=8, steps=5))
    assert changed_fields(saved, TrainConfig(batch=8, steps=50, keep_last=7)) == []
    assert changed_fields(saved, TrainConfig(batch=16, seed=1)) == ["batch: was 8, is 16", "seed: was 0, is 1"]
