"""HS604 and HS181: clipping in the branch with mixed precision only, and steps on every micro-batch of several losses."""

import pytest

from check_scripts import findings


def lines(text, code):
    """The lines at which a rule reports something."""
    return [f.line for f in findings(text, code)]


BRANCHES = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", enabled={test}):
        loss = model(x)
    if {test}:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        {clip}
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        {plain}
        optimizer.step()
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


@pytest.mark.parametrize(
    ("test", "clip", "plain", "expected"),
    [
        ("device.type == 'cuda'", CLIP, "pass", [16]),
        ("use_amp", CLIP, "pass", [16]),
        ("use_amp", f"if args.clip > 0: {CLIP}", "pass", [16]),
        ("use_amp", CLIP, CLIP, []),
        ("use_amp", "pass", "pass", []),
        ("use_amp", CLIP, "clip_gradients(model)", []),
        ("use_amp", "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float('inf'))", "pass", []),
        ("is_generator", CLIP, "pass", []),
    ],
)
def test_clipping_in_one_branch(test, clip, plain, expected):
    """The plain step needs the same limit, unless the condition is about something else than precision."""
    assert lines(BRANCHES.format(test=test, clip=clip, plain=plain), "HS604") == expected


LOSSES = """\
import torch
def discriminator_step(self, loader):
    for _ in range(self.accumulation_steps):
        x = next(loader)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            fake_loss = self.criterion(self.gan(x), 0){divide}
        fake_loss.backward()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            real_loss = self.criterion(self.gan(x), 1){second}
        real_loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
"""
DIVIDE = " / self.accumulation_steps"


@pytest.mark.parametrize(
    ("divide", "second", "expected"), [(DIVIDE, DIVIDE, [12]), ("", "", []), (" / 2", " / 2", []), (DIVIDE, "", [])]
)
def test_two_losses_of_one_micro_batch(divide, second, expected):
    """Both losses are divided by the number of micro-batches, and the step follows each."""
    assert lines(LOSSES.format(divide=divide, second=second), "HS181") == expected
