"""The settings of a run."""

import dataclasses

import pytest

from halfstep.errors import HalfstepError
from halfstep.train.config import TrainConfig, changed_fields, parse_settings


def test_set_reaches_exactly_the_fields_in_their_types():
    """key=value gives ints, floats, booleans, texts and None as the field wants them."""
    pairs = ["batch=8", "max_norm=0.5", "ema=none", "compile=on", "deterministic=false", "device=cpu", "steps=3"]
    assert parse_settings(pairs) == {
        "batch": 8, "max_norm": 0.5, "ema": None, "compile": True, "deterministic": False, "device": "cpu", "steps": 3,
    }  # fmt: skip
    assert set(parse_settings([f"{f.name}=1" for f in dataclasses.fields(TrainConfig)])) == {
        f.name for f in dataclasses.fields(TrainConfig)
    }


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["bach=8"], "Did you mean 'batch'"),
        (["batch"], "has no value"),
        (["batch=many"], "not a value of type int"),
        (["compile=maybe"], "compile='maybe' is neither on nor off, nor a mode"),
        (["deterministic=maybe"], "not a value of type bool"),
        (["max_norm=big"], "float or none"),
        (["batch=1", "batch=2"], "given twice"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(pairs, message):
    """Unknown keys, missing values, wrong types and repeats say what is wrong."""
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
def test_impossible_numbers_are_refused(bad):
    """Counts are whole and large enough."""
    name, value = next(iter(bad.items()))
    with pytest.raises(HalfstepError, match=f"{name}={value}"):
        TrainConfig(**bad)


def test_only_what_shapes_the_trajectory_must_stay_on_resume():
    """Longer training and other keeping is fine; another batch or seed is not the same run."""
    saved = dataclasses.asdict(TrainConfig(batch=8, steps=5))
    assert changed_fields(saved, TrainConfig(batch=8, steps=50, keep_last=7)) == []
    assert changed_fields(saved, TrainConfig(batch=16, seed=1)) == ["batch: 8 then, 16 now", "seed: 0 then, 1 now"]
