"""HS101 and HS104: a branch that an `elif` above it has taken never runs; one after a call may."""

import pytest

from check_scripts import findings

TWICE = """\
import argparse
import torch
def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        {update}
def main(args):
    if {first}:
        train(small, loader)
    elif args.cmd == "show":
        show()
    elif {second}:
        train(big, loader)
    else:
        help()
main(parse())
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('args.cmd == "train"', 'args.cmd == "train"'),
        ('args.cmd in ("train", "tune")', 'args.cmd == "tune"'),
        ("args.train", "args.train"),
        ('args.cmd == "train"', 'args.cmd == "tune"'),
    ],
)
def test_a_command_that_is_listed_twice(first, second):
    """The update stands behind the step, in the branch that runs and in the one that never does."""
    right = TWICE.format(update="scaler.update()", first=first, second=second)
    assert findings(right, "HS101") == []
    assert [f.line for f in findings(TWICE.format(update="pass", first=first, second=second), "HS101")] == [11]


def test_a_branch_that_never_runs_is_not_judged():
    """A mistake in the second branch of the same command has no effect; that of a call that may differ has."""
    text = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    with torch.autocast("cuda"):
        loss = model(x)
    scaler.scale(loss).backward()
    if {test}:
        scaler.unscale_(optimizer)
    elif {test}:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
    assert findings(text.format(test="mode == 1"), "HS104") == []
    assert [f.line for f in findings(text.format(test="next(modes)"), "HS104")] == [10]
