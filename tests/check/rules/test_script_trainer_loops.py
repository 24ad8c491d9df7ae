"""HS186, HS198: what a Trainer's own loop does with the gradients that the library's `training_step` has scaled."""

import pytest

from check_scripts import reported

LOOP = """\
import torch
from torch import nn
from transformers import Trainer

class OwnTrainer(Trainer):
    {step}
    def _inner_training_loop(self, batch_size=None, args=None, **options):
        model = self._wrap_model(self.model_wrapped)
        self.create_optimizer_and_scheduler(num_training_steps=args.max_steps)
        {prepare}
        for step, inputs in enumerate(self.get_train_dataloader()):
            loss = {training}
            if args.max_grad_norm and not self.deepspeed:
                {clip}
            self.optimizer.step()
            self.lr_scheduler.step()
            model.zero_grad()
        print(args.fp16, loss)
"""
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)"
APEX = "nn.utils.clip_grad_norm_(amp.master_params(self.optimizer) if self.use_apex else model.parameters(), 1.0)"
INHERITED = "self.training_step(model, inputs)"
DELEGATES = "def training_step(self, model, inputs):\n        return super().training_step(model, inputs)\n"
OWN = "def training_step(self, model, inputs):\n        loss = self.compute_loss(model, inputs)\n        loss.backward()\n        return loss\n"
PREPARE = "self.optimizer = self.accelerator.prepare(self.optimizer)"


def codes(step="", prepare="pass", training=INHERITED, clip=CLIP):
    return reported(LOOP.format(step=step, prepare=prepare, training=training, clip=clip))


@pytest.mark.parametrize("step", ["", DELEGATES])
@pytest.mark.parametrize("clip", [CLIP, APEX, f"if args.fp16 and self.tpu:\n                    pass\n                else:\n                    {CLIP}"])  # fmt: skip
def test_a_clip_after_the_step_of_the_library(step, clip):
    """The library scales the loss, and torch's clip does not unscale: inherited, delegated, or next to Apex."""
    assert "HS186" in codes(step=step, clip=clip)


@pytest.mark.parametrize(
    ("step", "training", "clip"),
    [
        (OWN, INHERITED, CLIP),
        ("", "self.compute_loss(model, inputs)", CLIP),
        ("", INHERITED, "self.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)"),
        ("", INHERITED, f"self.scaler.unscale_(self.optimizer)\n                {CLIP}"),
        ("", INHERITED, f"if not args.fp16:\n                    {CLIP}"),
        ("", INHERITED, f"if self.use_apex and args.sharded:\n                    {CLIP}"),
        ("", INHERITED, f"if args.bf16:\n                    {CLIP}"),
        ("", INHERITED, "norm = nn.utils.clip_grad_norm_(model.parameters(), float('inf'))"),
        ("", INHERITED, "nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), 1.0)"),
    ],
)
def test_a_clip_of_true_gradients(step, training, clip):
    """A step that scales nothing, a clip that unscales, one that runs without fp16, or one that only measures."""
    assert "HS186" not in codes(step=step, training=training, clip=clip)


@pytest.mark.parametrize(
    ("step", "prepare", "expected"),
    [
        ("", "pass", True),
        (DELEGATES, "pass", True),
        (OWN, "pass", False),
        ("", PREPARE, False),
        ("", "self.optimizer = build(model)", False),
        ("", "return super()._inner_training_loop(batch_size, args)", False),
    ],
)
def test_an_own_loop_prepares_its_optimizer(step, prepare, expected):
    """The library's loop prepares the optimizer; one that replaces it has to do the same."""
    assert ("HS198" in codes(step=step, prepare=prepare)) == expected
