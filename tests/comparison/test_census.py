"""The census of operators."""

import pytest
import torch

from halfstep.comparison.census import DispatchCensus, Entry, why_fp32, write_census


def record(work):
    census = DispatchCensus()
    with census:
        work()
    return census.entries


def test_products_casts_and_other_operators_are_distinguished():
    """A bf16 product, the two casts that made it, and an fp32 sum."""
    a = torch.randn(16, 16)

    def work():
        (a.to(torch.bfloat16) @ a.to(torch.bfloat16)).sum()
        a.sum()

    pairs = [(e.op, e.format) for e in record(work)]
    assert pairs.count(("_to_copy", "casts")) == 2
    assert ("mm", "bf16") in pairs
    assert ("sum", "bf16") in pairs
    assert ("sum", "fp32") in pairs


def test_a_mixed_operator_counts_as_the_wider_format():
    """bf16 + fp32 computes in fp32; a copy within a format is not a cast; integers are "other"."""
    a = torch.randn(4)
    assert [e.format for e in record(lambda: a + a.bfloat16())] == ["casts", "fp32"]
    assert [e.format for e in record(a.clone)] == ["fp32"]
    assert [e.format for e in record(lambda: torch.arange(3) + 1)] == ["other", "other"]


def test_views_and_allocations_are_left_out():
    """They compute nothing."""
    a = torch.randn(4, 4)
    assert record(lambda: (a.view(16), a.t(), torch.empty(3), a.detach())) == []


def test_dimensions_that_are_not_a_multiple_of_eight_are_listed():
    """Only 16-bit products are listed, because fp32 does not use tensor cores."""
    a, b = torch.randn(16, 32), torch.randn(32, 10)

    def work():
        _ = a.half() @ b.half()
        _ = a @ b
        _ = a.half() @ torch.randn(32, 8).half()

    census = write_census([record(work)], "dispatch", requested="fp16")
    assert census["misaligned"] == [{"op": "mm", "shape": [16, 32, 10], "calls": 1}]


def test_shares_add_up_and_the_minimum_time_counts():
    """Of two recorded steps the smaller time of an operator counts, and all shares add up to 1."""
    one = [Entry("mm", "bf16", 1.0), Entry("sum", "fp32", 5.0), Entry("mm", "bf16", 1.0)]
    two = [Entry("mm", "bf16", 3.0), Entry("sum", "fp32", 1.0)]
    census = write_census([one, two], "dispatch", requested="bf16")
    assert {row["op"]: (row["seconds"], row["calls"]) for row in census["rows"]} == {"mm": (2.0, 2), "sum": (1.0, 1)}
    assert census["share"] == {"bf16": pytest.approx(2 / 3), "fp32": pytest.approx(1 / 3)}
    assert census["products"] == {"bf16": 1.0}
    assert [bool(row["why"]) for row in census["rows"]] == [False, True]


def test_fp32_needs_no_reason_where_it_was_requested():
    """Operators of an fp32 row have no reason for running in fp32."""
    census = write_census([[Entry("mm", "fp32", 1.0)]], "dispatch", requested="fp32")
    assert census["rows"][0]["why"] == ""


@pytest.mark.parametrize(
    ("op", "phase", "words"),
    [
        ("_softmax", "", "long sums"),
        ("native_layer_norm", "", "norms"),
        ("mm", "", "outside the 16-bit region"),
        ("add", "", "autocast casts only"),
        ("_fused_adamw_", "", "the update"),
        ("mul", "step", "the update"),
    ],
)
def test_every_fp32_operator_has_a_reason(op, phase, words):
    """The reason depends on the operator and on the phase of the step."""
    assert words in why_fp32(op, phase)
