"""What a job builds for one run."""

from halfstep.backends.context import RunContext
from halfstep.comparison.training_loop import build_parts
from halfstep.jobs.builtin import digits_job


def test_a_job_builds_its_parts_on_the_device():
    """The model is on the run's device, the optimizer has its parameters and the scheduler that optimizer."""
    parts = build_parts(digits_job(), RunContext(batch_size=16))
    assert {p.device.type for p in parts.model.parameters()} == {"cpu"}
    assert parts.scheduler.optimizer is parts.optimizer
    assert {id(p) for group in parts.optimizer.param_groups for p in group["params"]} == set(
        map(id, parts.model.parameters())
    )
