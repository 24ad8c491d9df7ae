"""HS181 where the last micro-batch of a window has a branch of its own, which clears before its backward."""

import pytest

from check_scripts import findings

TRAINER = """\
import torch
class Trainer(Base):
    def build(self):
        self.scaler = torch.amp.GradScaler("cuda")
    def forward_backward(self, batch):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(batch) / self.cfg.accumulation_steps
        if (self.batch_idx + 1) % self.cfg.accumulation_steps == 0:
            {first}
            self.scaler.scale(loss).backward()
            {step}
            self.scaler.update()
            {last}
        else:
            {other}
"""
STEP = "self.scaler.step(self.optim)"
OTHER = "self.scaler.scale(loss).backward()"
CLEAR = "self.optim.zero_grad()"


def lines(**parts):
    """The lines of HS181."""
    text = TRAINER.format(**{"first": CLEAR, "step": STEP, "last": "pass", "other": OTHER} | parts)
    return [f.line for f in findings(text, "HS181")]


@pytest.mark.parametrize(
    "parts",
    [{}, {"first": "self.optim.zero_grad(set_to_none=True)"}, {"step": f"self.scaler.unscale_(self.optim); {STEP}"}],
)
def test_the_last_branch_clears_first(parts):
    """The gradients of all earlier micro-batches of the window are lost, also in a method that another file calls."""
    assert lines(**parts) == [9]


@pytest.mark.parametrize(
    "parts",
    [
        {"first": "pass", "last": CLEAR},
        {"first": f"{STEP}; {CLEAR}"},
        {"other": f"{OTHER}; self.optim.step()"},
        {"other": f"{CLEAR}; {OTHER}; self.optim.step()"},
        {"other": "self.skip(loss)"},
    ],
)
def test_other_branches(parts):
    """It clears after its step, steps before it clears, or the other branch trains as well or not at all."""
    assert lines(**parts) == []


def test_a_loop():
    """The same in a loop over the micro-batches, with a plain backward."""
    text = (
        "import torch\ndef train(model, loader, optimizer, scaler, n):\n    for i, x in enumerate(loader):\n        loss = model(x) / n\n"
        "        if (i + 1) % n == 0:\n            optimizer.zero_grad()\n            scaler.scale(loss).backward()\n"
        "            scaler.step(optimizer)\n            scaler.update()\n        else:\n            scaler.scale(loss).backward()\n"
    )
    assert [f.line for f in findings(text, "HS181")] == [6]
