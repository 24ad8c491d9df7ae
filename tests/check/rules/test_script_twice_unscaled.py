"""HS105 and HS188 with Accelerate: gradients that are unscaled twice, and the line that divides the loss a second time."""

import pytest

from check_scripts import findings

LOOP = """\
from accelerate import Accelerator

def main(args, model, optimizer, loader):
    accelerator = Accelerator({options}, gradient_accumulation_steps=args.accumulation_steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = loss_fn(model(x), y)
            {divide}
            check(loss)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                {first}
                {second}
            optimizer.step()
            optimizer.zero_grad()
"""
FP16 = 'mixed_precision="fp16"'
OPTION = "mixed_precision=args.mixed_precision"
UNSCALE = "accelerator.unscale_gradients()"
BY_HAND = "accelerator.scaler.unscale_(optimizer)"
GUARDED = f"if accelerator.scaler is not None: {BY_HAND}"
CLIP = "accelerator.clip_grad_norm_(model.parameters(), 1.0)"
TORCH = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


def reported(text, code):
    """The lines at which a rule reports something, with the severity."""
    return [(f.line, f.severity) for f in findings(text, code)]


@pytest.mark.parametrize(
    ("options", "first", "second", "expected"),
    [
        (FP16, BY_HAND, CLIP, [(14, "error")]),
        (OPTION, GUARDED, CLIP, [(14, "error")]),
        (FP16, UNSCALE, CLIP, [(14, "error")]),
        (OPTION, UNSCALE, CLIP, [(14, "warning")]),
        (FP16, "accelerator.unscale_gradients(optimizer=optimizer)", CLIP, [(14, "error")]),
        (FP16, CLIP, UNSCALE, [(14, "error")]),
        (FP16, CLIP, BY_HAND, [(14, "error")]),
        ('mixed_precision="bf16"', UNSCALE, CLIP, []),
        (FP16, UNSCALE, TORCH, []),
        (FP16, "pass", CLIP, []),
        (FP16, "accelerator.unscale_gradients(first)", "accelerator.unscale_gradients(second)", []),
        (FP16, "scaler.unscale_(optimizer)", CLIP, []),  # of another object
    ],
)
def test_clipping_unscales_what_was_unscaled_before(options, first, second, expected):
    """`accelerator.clip_grad_norm_` unscales every prepared optimizer: in fp16 no other call may do it in the same step."""
    text = LOOP.format(options=options, divide="pass", first=first, second=second)
    assert reported(text, "HS105") == expected


@pytest.mark.parametrize(
    ("divide", "expected"),
    [
        ("loss = loss / args.accumulation_steps", [(9, "warning")]),
        ("loss /= args.accumulation_steps", [(9, "warning")]),
        ("loss = scaled(loss, args)", [(11, "warning")]),
        ("pass", []),
    ],
)
def test_the_second_division_is_reported_where_it_is_written(divide, expected):
    """HS188 is at the line that divides, unless a function does; then it is at the backward."""
    helper = "\ndef scaled(loss, args):\n    return loss / args.accumulation_steps\n"
    text = LOOP.format(options=FP16, divide=divide, first="pass", second="pass") + helper
    assert reported(text, "HS188") == expected


PASSED = """\
class Trainer:
    def __init__(self, model, optimizer, accelerator=None):
        self.model, self.optimizer, self.accelerator = model, optimizer, accelerator
    def train_step(self, x, y):
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(self.model(x), y)
        self.accelerator.backward(loss)
        if self.accelerator.scaler is not None:
            {unscale}
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("unscale", "expected"),
    [
        ("self.accelerator.scaler.unscale_(self.optimizer)", [(10, "error")]),
        ("self.other.scaler.unscale_(self.optimizer)", []),
        ("log(self.accelerator.scaler.get_scale())", []),
    ],
)
def test_the_accelerator_may_be_created_in_another_file(unscale, expected):
    """A script that unscales with the scaler of an Accelerator has one, whichever file creates it."""
    assert reported(PASSED.format(unscale=unscale), "HS105") == expected


TWO = """\
from accelerate import Accelerator

def main(args, a, b, opt_a, opt_b, loader):
    accelerator = Accelerator({options})
    a, b, {prepared}, loader = accelerator.prepare(a, b, {prepared}, loader)
    for x in loader:
        with accelerator.accumulate(a, b):
            accelerator.backward(loss_fn(a(x), b(x)))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(a.parameters(), 1.0)
            opt_a.step()
            opt_a.zero_grad()
            {between}
            opt_b.step()
            opt_b.zero_grad()
"""
SECOND = "accelerator.clip_grad_norm_(b.parameters(), 1.0)"
BOTH = "opt_a, opt_b"


@pytest.mark.parametrize(
    ("options", "prepared", "between", "expected"),
    [
        (FP16, BOTH, "pass", [(14, "error")]),
        (OPTION, BOTH, "pass", [(14, "warning")]),
        (FP16, BOTH, "schedule.step()", [(14, "error")]),
        (FP16, BOTH, SECOND, [(13, "error")]),  # the step after it does not unscale again
        (FP16, BOTH, f"if accelerator.sync_gradients: {SECOND}", [(13, "error")]),
        ('mixed_precision="bf16"', BOTH, SECOND, []),
        (FP16, BOTH, "accelerator.backward(b(x).mean())", []),
        (FP16, BOTH, "opt_b.zero_grad()", []),
        (FP16, "opt_a", "pass", []),  # the scaler knows nothing of the other one
    ],
)
def test_the_step_of_one_optimizer_forgets_that_the_other_is_unscaled(options, prepared, between, expected):
    """`accelerator.clip_grad_norm_` unscales both, the first step updates the scaler, and the second one unscales again."""
    assert reported(TWO.format(options=options, prepared=prepared, between=between), "HS105") == expected
