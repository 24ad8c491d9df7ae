"""The errors for steps that cannot run on fake tensors."""

import pytest
import torch
import torch.nn.functional as F

from halfstep.planning.answers import plan
from halfstep.planning.untraceable import PlanError
from planning_jobs import small_job


@torch.library.custom_op("halfstep_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    """An operation without a fake kernel."""
    return x.clone()


def reads_a_value(model, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return loss * 2 if loss.item() > 3 else loss


def picks_rows(model, batch):
    return model(batch[0][batch[0].sum(1) > 1]).sum()


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (reads_a_value, "reads a value out of a tensor"),
        (picks_rows, "shape depends on tensor values"),
        (lambda model, batch: opaque(model(batch[0])).sum(), "without a fake kernel"),
    ],
)
def test_error_names_reason_and_estimate(loss, reason):
    """The error names the reason, what could be estimated and what could not."""
    with pytest.raises(PlanError) as caught:
        plan(small_job(loss=loss), 8, precision=("bf16",))
    message = str(caught.value)
    assert reason in message
    assert "1,348 parameters" in message
    assert "Not estimated: activations" in message


def test_stochastic_depth_runs_every_layer():
    """A layer that is skipped at random, `if torch.rand([]) < rate`, is planned as one that runs."""

    def at_random(model, batch):
        return reads_nothing(model, batch) if torch.rand([]) < 0.2 else F.cross_entropy(model(batch[0]), batch[1])

    def reads_nothing(model, batch):
        return model(batch[0][:1]).sum()

    usual = plan(small_job(), 4096, precision=("bf16",)).entries[0].peak_bytes
    assert plan(small_job(loss=at_random), 4096, precision=("bf16",)).entries[0].peak_bytes == usual


def test_frozen_parameters_count_as_weights_only():
    """The estimate has gradients and states only for trainable parameters."""

    def half_frozen():
        model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 4, bias=False))
        model[0].requires_grad_(False)
        return model

    with pytest.raises(PlanError) as caught:
        plan(small_job(model=half_frozen, loss=reads_a_value), 8, precision=("bf16",))
    message = str(caught.value)
    assert "320 parameters need 2 KiB" in message
    assert "(16 bytes each; the 256 frozen ones have only weights, 4)" in message
