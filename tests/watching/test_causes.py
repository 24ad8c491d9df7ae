"""Sentences and advice of each cause."""

import pytest

from halfstep.hardware.probe import probe
from halfstep.watching.autopsy import Autopsy
from halfstep.watching.causes import explained, largest_finite, place_in_words
from halfstep.watching.probes import Range

INPUT = Range("float16", (2, 3), -2.0, 300.0, "x")

MASKED = Range("float16", (2, 3), float("-inf"), 1.0)


@pytest.mark.parametrize(
    ("autopsy", "words", "advice"),
    [
        (
            Autopsy(1, "data", "stem", "convolution", "float32", "nan", (INPUT,)),
            "entered module stem",
            "Neither the precision",
        ),
        (Autopsy(1, "data", None, "weight", value="nan"), "backward(weight=...)", "not to blame"),
        (
            Autopsy(1, "weights", "head", "addmm", "bfloat16", "inf", parameter="head.weight"),
            "head.weight",
            "checkpoint",
        ),
        (Autopsy(1, "forward", "mlp", "addmm", "float16", "inf", (INPUT,)), "largest number is 65504", "Use bf16"),
        (Autopsy(1, "forward", "mlp", "addmm", "float32", "inf", (INPUT,)), "up to 300", "even the range of fp32"),
        (Autopsy(1, "forward", None, "nll_loss_forward", "float32", "nan"), "NaN from finite inputs", "ignore_index"),
        (Autopsy(1, "forward", "a", "log", "float32", "-inf", (INPUT,)), "gave -inf from inputs in [-2, 300]", "clamp"),
        (Autopsy(1, "forward", "a", "fill_", "float16", "nan", (INPUT,)), "put NaN into", "float('nan')"),
        (Autopsy(1, "forward", "a", "_softmax", "float16", "nan", (MASKED,)), "masked with -inf", "padding only"),
        (
            Autopsy(1, "backward", "a", "mm (backward)", "float16", "inf", scale=8.0, at_scale_1=True),
            "loss scale 8",
            "lowered",
        ),
        (
            Autopsy(1, "backward", "a", "mm (backward)", "float16", "inf", scale=8.0, at_scale_1=False),
            "not to blame",
            "sqrt",
        ),
        (Autopsy(1, "backward", "a", "mm (backward)", "bfloat16", "nan"), "no loss scale", "sqrt"),
        (Autopsy(1, "not reproduced"), "finite gradients when they were computed again", "nondeterministic"),
    ],
)
def test_each_cause_has_its_own_sentence_and_advice(autopsy, words, advice):
    """With the values that were measured, and what to do."""
    result = explained(autopsy)
    assert words in result.sentence
    assert advice in result.advice
    assert str(result).startswith(f"Step 1 was skipped ({autopsy.cause}): ")


def test_only_overflow_at_this_scale_advises_about_the_scale():
    """A NaN datum is not reported as a scale problem."""
    for cause in ("data", "weights"):
        assert "growth_interval" not in explained(Autopsy(1, cause, "a", "mul", "float16", "nan", (INPUT,))).advice


def test_places_in_words():
    """The loss, the model itself, a module."""
    assert [place_in_words(p) for p in (None, "", "a.b")] == [
        "the loss function (outside the model)",
        "the model's own forward",
        "module a.b",
    ]


def test_limits_of_formats():
    """From the one table of formats; none for integers."""
    assert largest_finite("float16") == 65504
    assert largest_finite("int64") is None


def test_known_defects_are_listed_only_for_operations_that_meet_them():
    """A plain multiplication meets none."""
    assert explained(Autopsy(1, "forward", "a", "mul", "float16", "inf", (INPUT,)), probe()).defects == ()


def test_known_defects_of_matching_versions_are_listed(monkeypatch):
    """One that affects the installed versions and this operation, with its thread."""
    from halfstep.hardware.advisories import ADVISORIES

    advisory = next(a for a in ADVISORIES if "sdpa" in a.features or "sdpa_mask" in a.features)
    monkeypatch.setattr("halfstep.watching.causes.advisories_for", lambda environment, features: (advisory,))
    op = "_scaled_dot_product_efficient_attention"
    (defect,) = explained(Autopsy(1, "forward", "a", op, "bfloat16", "nan", (INPUT,)), probe()).defects
    assert advisory.threads[0] in defect
