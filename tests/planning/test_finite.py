"""Checks for inf and NaN on tensors without data."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException

from halfstep.planning.answers import plan
from halfstep.planning.fakes import new_mode
from halfstep.planning.tracer import Tracer
from planning_jobs import small_job


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (lambda x: torch.isfinite(x).all(), True),
        (lambda x: torch.isnan(x).any(), False),
        (lambda x: torch.isinf(x).any() or torch.isnan(x).any(), False),
        (lambda x: (torch.isinf(x) | torch.isnan(x)).any(), False),
        (lambda x: (~torch.isfinite(x)).any(), False),
        (lambda x: torch.isfinite(x.sum()), True),
        (lambda x: (x != x).any(), False),  # noqa: PLR0124
    ],
)
def test_values_are_finite(check, expected):
    """Every usual check for inf and NaN has the result of a step without overflow."""
    with new_mode(), Tracer(lambda *_: {}):
        assert bool(check(torch.randn(4, 5))) is expected


@pytest.mark.parametrize("check", [lambda x: (x > 0).all(), lambda x: (x == 2.0).any(), lambda x: (x * x).any()])
def test_other_comparisons_raise(check):
    """A comparison whose result depends on data raises."""
    with new_mode(), Tracer(lambda *_: {}), pytest.raises(DataDependentOutputException):
        bool(check(torch.randn(4, 5)))


def test_guarded_loss_is_planned():
    """A loss that raises at NaN is planned like the same loss without the check."""

    def guarded(model, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if not torch.isfinite(loss):
            raise FloatingPointError
        return loss

    usual = plan(small_job(), 4096, precision=("bf16",)).entries[0].peak_bytes
    assert abs(plan(small_job(loss=guarded), 4096, precision=("bf16",)).entries[0].peak_bytes - usual) <= 2048
