"""HS196 where a schedule is created by a table, a class of the file or in a collection, and its variable has another name."""

import pytest

from check_scripts import findings

TEXT = """\
import torch
from types import SimpleNamespace
from torch.optim import lr_scheduler
{before}
model = torch.nn.Linear(4, 1).cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
{created}
for x in loader:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    {advance}
"""
TABLE = 'TABLE = {"a": lr_scheduler.OneCycleLR, "b": lr_scheduler.LinearLR}'
NUMBERS = 'TABLE = {"a": Mixup, "b": Curriculum}'
OWN = "class Ramp:\n    def __init__(self, o):\n        self.o, self.i = o, 0\n    def step(self):\n        self.i += 1\n        for g in self.o.param_groups:\n            g['lr'] = self.i\n"
MOMENTUM = OWN.replace("'lr'", "'momentum'")
NOAM = OWN + "        self.o.step()\n"


@pytest.mark.parametrize(
    ("before", "created", "advance", "expected"),
    [
        (TABLE, "plan = TABLE[name](opt, 9)", "plan.step()", 1),
        (TABLE, "plan = TABLE.get(name)(opt, 9)", "plan.step()", 1),
        (NUMBERS, "plan = TABLE[name](opt, 9)", "plan.step()", 0),
        ("", "plan = getattr(lr_scheduler, name)(opt, 9)", "plan.step()", 1),
        ("", "plan = getattr(augment, name)(opt, 9)", "plan.step()", 0),
        ("", "plans = [lr_scheduler.StepLR(opt, 9)]", "for p in plans: p.step()", 1),
        ("", "plans = {'a': lr_scheduler.StepLR(opt, 9)}", "for p in plans.values(): p.step()", 1),
        ("", "plans = [Env(), Env()]", "for p in plans: p.step()", 0),
        ("", "s = SimpleNamespace(plan=lr_scheduler.StepLR(opt, 9))", "s.plan.step()", 1),
        ("", "s = SimpleNamespace(plan=Env())", "s.plan.step()", 0),
        (OWN, "plan = Ramp(opt)", "plan.step()", 1),
        (MOMENTUM, "plan = Ramp(opt)", "plan.step()", 0),
        (NOAM, "plan = Ramp(opt)", "plan.step()", 0),
    ],
)
def test_a_schedule_by_what_creates_it(before, created, advance, expected):
    """What creates an object decides that it is a schedule, whatever its variable is called."""
    text = TEXT.format(before=before, created=created, advance=advance)
    assert len(findings(text, "HS196")) == expected
