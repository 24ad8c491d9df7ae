"""What an Accelerator prepares from a list or dictionary: HS196 and HS108 know the schedules and optimizers in it."""

import pytest

from check_scripts import checked, findings

STEPS = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="fp16", step_scheduler_with_optimizer={waits})
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
{listed}
for x in loader:
    accelerator.backward(model(x))
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
"""
LISTS = (
    "parts = [model, optimizer]; parts.append(schedule); parts.extend(loaders); done = accelerator.prepare(*parts)",
    "parts = [model]; parts += [optimizer, schedule]; parts.extend(loaders); done = accelerator.prepare(*parts)",
    "parts = (model,) + (optimizer, schedule) + (loader,); done = accelerator.prepare(*parts)",
    "parts = {'m': model, 'o': optimizer, 's': schedule}; done = accelerator.prepare(*parts.values())",
    "parts = [model]; parts.extend([optimizer, schedule] if schedule else [optimizer]); done = accelerator.prepare(*parts)",
    "model, optimizer, schedule = accelerator.prepare(*[model, optimizer, schedule])",
)


@pytest.mark.parametrize("listed", LISTS)
def test_a_schedule_in_a_list_is_prepared(listed):
    """It advances whatever the optimizer does only with step_scheduler_with_optimizer=False."""
    reported = [
        [f.message.rpartition(": ")[2] for f in findings(STEPS.format(listed=listed, waits=waits), "HS196")]
        for waits in (False, True)
    ]
    assert reported == [["step_scheduler_with_optimizer=False"], []]


def test_a_schedule_that_the_list_leaves_out():
    """It is not prepared if the whole list is known, and may be if it is not."""
    known = "parts = [model]; parts.append(optimizer); model, optimizer = accelerator.prepare(*parts)"
    unknown = "parts = [model, optimizer]; parts.extend(others); done = accelerator.prepare(*parts)"
    lines = [len(findings(STEPS.format(listed=listed, waits=True), "HS196")) for listed in (known, unknown)]
    assert lines == [1, 0]


TWO = """\
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="fp16")
{listed}
for x in loader:
    opt_a.zero_grad()
    opt_b.zero_grad()
    accelerator.backward(model(x))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    opt_a.step()
    opt_b.step()
"""


def test_two_optimizers_of_a_list():
    """The step of the first updates the scaler, so that of the second divides by another scale."""
    listed = "parts = [model]\nparts.extend([opt_a, opt_b])\nmodel, opt_a, opt_b = accelerator.prepare(*parts)"
    plain = "model, opt_a, opt_b = accelerator.prepare(model, opt_a, opt_b)"
    assert [checked(TWO.format(listed=text), "HS108") for text in (listed, plain)] == [[12], [10]]
