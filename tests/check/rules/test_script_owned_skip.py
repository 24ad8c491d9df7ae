"""Frameworks with their own scaler: runs that end at an overflow, skipped steps, and clips on scaled gradients."""

import pytest

from check_scripts import findings

ACCELERATE = """\
import argparse
import torch
from accelerate import Accelerator
parser = argparse.ArgumentParser()
parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"])
args = parser.parse_args()
accelerator = Accelerator(mixed_precision={precision})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(loss_fn(model(x), y))
    norm = {clip}
    {step}
"""
OWN = "accelerator.clip_grad_norm_(model.parameters(), 1.0)"
STOP = "if not torch.isfinite(norm): raise RuntimeError('overflow')\n    optimizer.step()"
BRANCH = "if torch.isfinite(norm):\n        optimizer.step()\n    else:\n        print('overflow')"
OTHER_BRANCH = "if not torch.isfinite(norm):\n        num_skipped += 1\n    else:\n        optimizer.step()"


def lines(code, precision='"fp16"', clip=OWN, step="optimizer.step()"):
    """The lines and severities of one rule's findings."""
    text = ACCELERATE.format(precision=precision, clip=clip, step=step)
    return [(f.line, f.severity) for f in findings(text, code)]


def test_accelerate_ends_at_an_overflow():
    """An error in fp16, a warning where an option may choose it, nothing in bf16 or for the loss."""
    assert lines("HS175", step=STOP) == [(13, "error")]
    assert lines("HS175", "args.mixed_precision", step=STOP) == [(13, "warning")]
    assert lines("HS175", '"bf16"', step=STOP) == []
    assert lines("HS175", step=STOP.replace("isfinite(norm)", "isfinite(loss)")) == []


@pytest.mark.parametrize("step", [BRANCH, OTHER_BRANCH])
def test_the_step_of_a_prepared_optimizer_in_one_branch(step):
    """After Accelerate's clip the next one raises; after another clip the scale never shrinks."""
    assert lines("HS112", step=step) == [(12, "error")]
    assert lines("HS157", step=step) == []
    plain = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    assert lines("HS112", clip=plain, step=step.replace("norm)", "grad_norm)")) == []
    named = step.replace("isfinite(norm)", "isfinite(model.grad_norm)")
    assert lines("HS157", clip=plain, step=named) == [(13, "warning")]


def test_a_branch_about_something_else_is_accepted():
    """A test of the window, and a step in both branches."""
    assert lines("HS112", step="if accelerator.sync_gradients:\n        optimizer.step()") == []
    assert lines("HS112", step=BRANCH.replace("print('overflow')", "optimizer.step()")) == []


def test_a_model_that_clips_itself():
    """FSDP's method unscales nothing: wrong in fp16, right after `unscale_gradients` and in bf16."""
    own = "model.clip_grad_norm_(1.0)"
    assert lines("HS186", clip=own) == [(12, "error")]
    assert lines("HS186", "args.mixed_precision", clip=own) == [(12, "warning")]
    assert lines("HS186", '"bf16"', clip=own) == []
    assert lines("HS186", clip=f"accelerator.unscale_gradients()\n    {own}") == []
    assert lines("HS186", clip="probe.clip_grad_norm_(1.0)") == []


CALLBACK = """\
import torch
from lightning import Callback, LightningModule, Trainer

def is_broken(weight):
    if torch.isnan(weight.grad).any():
        raise RuntimeError("gradient")

class Guard({base}):
    def {hook}(self, *args):
        for weight in self.module.parameters():
            {test}

Trainer(precision="{precision}", callbacks=[Guard()]).fit(module)
"""
RAISE = "if not torch.isfinite(weight.grad).all(): raise RuntimeError('gradient')"


@pytest.mark.parametrize(
    ("base", "hook", "test", "precision", "expected"),
    [
        ("Callback", "on_train_batch_end", RAISE, "16-mixed", [11]),
        ("LightningModule", "on_before_optimizer_step", RAISE, "16-mixed", [11]),
        ("Callback", "on_after_backward", "is_broken(weight)", "16-mixed", [6]),
        ("Callback", "on_train_batch_end", RAISE, "bf16-mixed", []),
        ("Callback", "on_train_batch_end", RAISE.replace("weight.grad", "weight"), "16-mixed", []),
        ("Callback", "on_fit_start", RAISE, "16-mixed", []),
        ("Callback", "on_train_batch_end", "if weight.grad.norm() > 1e4: raise RuntimeError", "16-mixed", []),
    ],
)
def test_hooks_of_lightning(base, hook, test, precision, expected):
    """Gradients that overflow reach the hooks around a step, though the step is skipped."""
    text = CALLBACK.format(base=base, hook=hook, test=test, precision=precision)
    assert [f.line for f in findings(text, "HS175")] == expected


TRAINER = """\
import argparse
import torch
from transformers import Trainer, TrainingArguments
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default={default})
args = parser.parse_args()

class Clipping(Trainer):
    def {method}(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        {test}
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss.detach()

options = TrainingArguments("out", bf16=True, gradient_accumulation_steps={steps})
Clipping(model=model, args=options, train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("steps", "default", "test", "method", "expected"),
    [
        ("4", 1, "if self.args.clips:", "training_step", [13]),
        ("args.steps", 2, "if self.args.clips:", "training_step", [13]),
        ("args.steps", 1, "if self.args.clips:", "training_step", []),
        ("1", 2, "if self.args.clips:", "training_step", []),
        ("settings.steps", 2, "if self.args.clips:", "training_step", [13]),
        ("settings.number", 2, "if self.args.clips:", "training_step", [13]),  # advice: the number is not known
        ("4", 1, "if self.accelerator.sync_gradients:", "training_step", []),
        ("4", 1, "if self.args.clips:", "last_step", []),
    ],
)
def test_a_clip_in_training_step_of_a_trainer(steps, default, test, method, expected):
    """It runs once per micro-batch; an option counts as its default, and a number that the file does not show as any."""
    text = TRAINER.format(steps=steps, default=default, test=test, method=method)
    assert [f.line for f in findings(text, "HS189")] == expected


SHOWN = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    if any(not torch.isfinite(p.grad).all() for p in model.parameters()):
        {skip}
        continue
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("skip", "is_reported"),
    [
        ("bar.update(1)", True),
        ("meter.update(loss.item(), n)", True),
        ("bar.update()", False),  # may be another name of the scaler
        ("self.scaler.update(1024.0)", False),
        ("update_scale()", False),
    ],
)
def test_a_bar_that_is_updated_in_a_skipped_iteration(skip, is_reported):
    """The update of a progress bar or a meter does not lower the scale."""
    assert bool(findings(SHOWN.format(skip=skip), "HS157")) == is_reported
