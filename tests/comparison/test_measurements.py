"""The values measured once per run."""

import dataclasses
import json

from halfstep.comparison.measurements import (
    GradientDifference,
    Measurements,
    Numerics,
    PredictedPeak,
    SkipCause,
    Validation,
)

COMPLETE = Measurements(
    base_bytes=0,
    weights_digest="w",
    batch_digest="b",
    warmup_seconds=0.5,
    warmup_steps=10,
    warmup_peak_bytes=3,
    gradients=GradientDifference(0.99, 0.1, 7),
    eager_gradients=GradientDifference(0.999, 0.01, 0),
    allocated={"weights": 4},
    peak_bytes=5,
    rank_peaks=(5, 4),
    samples=64,
    validation=Validation(1.5),
    validation_cut=9,
    stopped_after=8,
    unsurveyed=True,
    split={"data": 0.1},
    split_failed="no",
    census={"rows": []},
    census_failed="no",
    predicted=PredictedPeak(6, {"weights": 6}),
    numerics=Numerics(17, 65536.0, 0.25, "fc", 0.5),
    numerics_failed="no",
    skip_causes=(
        SkipCause(1, "forward", "", "it overflowed.", 65536.0),
        SkipCause(2, "backward", None, "too high.", 2.0, True),
    ),
    truth={"rows": {}},
)


def test_every_measurement_survives_json():
    """What is written is read back; the truth table travels separately, in the header of the run file."""
    values = json.loads(json.dumps(COMPLETE.as_dict()))
    assert Measurements.from_dict(values, COMPLETE.truth) == COMPLETE
    assert None not in (getattr(COMPLETE, field.name) for field in dataclasses.fields(COMPLETE))
    assert "truth" not in values


def test_stored_keys_do_not_change():
    """Files of earlier comparisons stay readable: these keys are a file format."""
    assert set(COMPLETE.as_dict()) == {
        "base_bytes", "weights", "batch", "warmup_seconds", "warmup_steps", "warmup_peak_bytes", "gradients", "held", "peak_bytes",
        "samples", "validation", "validation_cut", "stopped_after", "unsurveyed", "split", "split_failed", "census", "census_failed",
        "predicted", "eager_gradients", "numerics", "numerics_failed", "skip_causes", "rank_peaks",
    }  # fmt: skip


def test_what_was_not_measured_is_not_written():
    """An empty value has no keys, and unknown keys are ignored."""
    assert Measurements().as_dict() == {}
    assert Measurements.from_dict({"later": 1}) == Measurements()
    assert Validation(1.0, None) == Measurements.from_dict({"validation": {"loss": 1.0}}).validation
