"""What expect() accepts and rejects."""

import pytest

from halfstep.errors import ExpectationError, SettingError
from halfstep.inspection.expectations import KEYS, check_expectations, parse_expectation
from halfstep.inspection.facts import fact_of, unknown_fact

FACTS = {
    "weights": fact_of("weights", [("a", "bf16", 10), ("b", "fp32", 2)]),
    "master": fact_of("master", [("a", "split", 10), ("b", "fp32", 2)]),
    "ema": unknown_fact("ema", "pass it."),
    "states": fact_of("states", ()),
    "compute": fact_of("compute", [("fc", "fp8_e4m3fn", 3)]),
}


@pytest.mark.parametrize(
    "wanted",
    [
        {"weights": "bf16|fp32"},
        {"weights": "torch.bfloat16 | Float32"},
        {"master": "fp32"},
        {"master": "fp32|split"},
        {"states": "none"},
        {"compute": "fp8"},
    ],
)
def test_expectations_that_hold(wanted):
    """Alternatives and torch's spellings are accepted, a split master is an fp32 one, and nothing is "none"."""
    check_expectations(FACTS, wanted)


@pytest.mark.parametrize(
    ("wanted", "row"),
    [
        ({"weights": "fp32"}, r"weights +fp32 +bf16 \(10\), fp32 \(2\) +a$"),
        ({"master": "split"}, r"master +split +split \(10\), fp32 \(2\) +b$"),
        ({"states": "fp32"}, r"states +fp32 +none"),
        ({"ema": "fp32"}, r"ema +fp32 +not observed"),
        ({"ema": "none"}, r"ema: pass it\."),
        ({"compute": "bf16"}, r"compute +bf16 +fp8_e4m3fn +fc"),
    ],
)
def test_expectations_that_fail(wanted, row):
    """The row has what was expected, what there is, and where it differs; what was not observed fails too."""
    with pytest.raises(ExpectationError, match=f"(?m)^{row}"):
        check_expectations(FACTS, wanted)


def test_all_differences_are_in_one_error():
    """Every key that differs has its row."""
    with pytest.raises(ExpectationError) as caught:
        check_expectations(FACTS, {"weights": "fp32", "master": "fp32", "states": "8bit"})
    assert [line.split()[0] for line in str(caught.value).splitlines()[2:]] == ["weights", "states"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({}, "at least one of weights"),
        ({"weight": "fp32"}, "Did you mean 'weights'"),
        ({"master": "fp23"}, "Did you mean 'fp32'"),
        ({"states": "fp32||bf16"}, "Unknown format of states ''"),
        ({"scaler": "fp32"}, "Known: none, off, dynamic, static"),
        ({"step": "done"}, "Known: applied, skipped"),
        ({"weights": 32}, "Unknown format of weights '32'"),
    ],
)
def test_unknown_keys_and_formats_are_rejected(wanted, message):
    """A typing error is not a failed expectation: it lists what there is."""
    with pytest.raises(SettingError, match=message):
        check_expectations(FACTS, wanted)


def test_every_key_takes_a_format_or_a_word():
    """Each row can be asserted."""
    for key in KEYS:
        assert parse_expectation(key, {"scaler": "off", "step": "applied"}.get(key, "fp32"))
