"""Gates: read by a small parser, never evaluated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.comparison.gate import check_gate, parse_gate
from halfstep.comparison.rows import METRICS
from halfstep.errors import SettingError

LABELS = ["fp32", "bf16", "bf16-lean", "bf16-lean,states=8bit,compile=on", "torch-amp:fp16"]
FIGURES = {
    label: dict.fromkeys(METRICS, 1.0) | {"loss_gap": 0.01 * i, "samples_per_second": 100.0 + i}
    for i, label in enumerate(LABELS)
}


def holds(text, figures=FIGURES):
    return check_gate(parse_gate(text, LABELS), figures).failed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16.loss_gap > 0.02", False),
        ("bf16.loss_gap > 0.005", True),
        ("bf16-lean.loss_gap>=.02", True),
        ("bf16-lean,states=8bit,compile=on.loss_gap == 0.03", True),
        ("torch-amp:fp16.loss_gap != 4e-2", False),
        ("bf16-lean.samples_per_second < 1.1 * torch-amp:fp16.samples_per_second", True),
        ("fp32.loss-bf16.loss < -1", False),
        ("-(fp32.loss + 1) * 2 < -3.9", True),
        ("fp32.loss < 0 or bf16.loss > 0", True),
        ("fp32.loss > 0 and bf16.loss < 0", False),
        ("fp32.loss > 0 and bf16.loss < 0 or fp32.loss == 1", True),
        ("(fp32.loss > 2) or ((bf16.loss) > .5)", True),
        ("2 - 1 - 1 > fp32.loss", False),
        ("8 / 2 / 2 == 2 * fp32.loss", True),
    ],
)
def test_gates_mean_what_they_say(text, expected):
    """Arithmetic, comparison, and, or, with the usual precedence; the longest label wins."""
    assert holds(text) is expected


@given(st.floats(-100, 100, allow_subnormal=False), st.floats(-100, 100, allow_subnormal=False))
def test_a_comparison_is_pythons(one, other):
    """Any two numbers compare as they do in Python."""
    figures = {"fp32": {"loss": one}, "bf16": {"loss": other}}
    assert holds("fp32.loss > bf16.loss", figures) is (one > other)


@given(st.text(max_size=30))
def test_no_text_is_evaluated_or_crashes(text):
    """Whatever is typed is either a gate or a SettingError."""
    try:
        gate = parse_gate(text, LABELS)
    except SettingError:
        return
    check_gate(gate, FIGURES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf61.loss_gap > 0", "Did you mean 'bf16'.*Known: fp32"),
        ("bf16.los_gap > 0", "Did you mean 'loss_gap'"),
        ("bf16.loss_gap", "compares nothing"),
        ("bf16 > 0", "ROW.METRIC"),
        ("bf16.loss_gap > ", "lacks a figure"),
        ("(bf16.loss_gap > 0", "open parenthesis"),
        ("bf16.loss_gap > 0 0", "more follows"),
        ("", "lacks a figure"),
        ("__import__('os').x > 0", "Unknown row|ROW.METRIC|lacks"),
        ("(" * 50 + "1" + ")" * 50 + " > 0", "nested deeper"),
    ],
)
def test_mistakes_are_named(text, message):
    """Each says what is known."""
    with pytest.raises(SettingError, match=message):
        parse_gate(text, LABELS)


def test_what_was_not_measured_fails():
    """A check that could not be made has not passed."""
    result = check_gate(parse_gate("bf16.loss_gap > 0.02", LABELS), {"bf16": {"loss_gap": None}})
    assert result.failed
    assert "not measured" in str(result)
    assert check_gate(parse_gate("bf16.loss > 0", LABELS), {"bf16": {"loss": float("nan")}}).failed
    assert check_gate(parse_gate("1 / bf16.loss > 0", LABELS), {"bf16": {"loss": 0.0}}).failed
    for text in ("fp32.loss > 9 and bf16.loss > 0", "bf16.loss > 0 and fp32.loss > 9"):
        assert check_gate(parse_gate(text, LABELS), {"fp32": {"loss": 1.0}}).failed


def test_a_result_shows_the_values_it_saw():
    """Row, metric and number."""
    assert (
        str(check_gate(parse_gate("bf16.loss_gap > 1", LABELS), FIGURES))
        == "passed: fail if bf16.loss_gap > 1  (bf16.loss_gap = 0.01)"
    )
