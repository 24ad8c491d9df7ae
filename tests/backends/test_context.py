"""RunContext: one source of rank, world size, seed and device."""

import pytest
import torch

from halfstep.backends.context import RunContext
from halfstep.errors import SettingError
from halfstep.jobs.job import FIELDS


def test_the_defaults_are_one_process_on_the_cpu():
    """A context without arguments is rank 0 of 1 on the CPU."""
    context = RunContext()
    assert (context.rank, context.world_size, context.device, context.process_group) == (
        0,
        1,
        torch.device("cpu"),
        None,
    )


def test_job_arguments_are_the_names_every_field_of_a_job_may_take():
    """The model is built from nothing else, so its names are exactly these."""
    assert set(RunContext(seed=3, batch_size=8).job_arguments()) == set(FIELDS["model"])
    assert RunContext(seed=3, batch_size=8).job_arguments()["batch_size"] == 8


def test_a_single_run_takes_a_device_or_its_name():
    """A torch.device is used as it is, a name is checked."""
    assert RunContext.single(torch.device("cpu"), seed=2).seed == 2
    assert RunContext.single("cpu").device == torch.device("cpu")
    with pytest.raises(SettingError, match="unknown device"):
        RunContext.single("gpu")
