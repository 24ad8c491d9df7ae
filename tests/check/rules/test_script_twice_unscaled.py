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


LOOPED = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision={precision})
{made}
model, other, optimizer, loader = accelerator.prepare(model, other, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(loss_fn(model(other(x)), y))
    {loop}
        {clip}
    optimizer.step()
"""
GROUPS = "for group in optimizer.param_groups:"
CLIP_GROUP = "accelerator.clip_grad_norm_(group['params'], group['clip'])"
CLIP_PART = "accelerator.clip_grad_norm_(part.parameters(), 1.0)"
TWO_GROUPS = "optimizer = torch.optim.AdamW([{'params': model.parameters()}, {'params': other.parameters()}])"


@pytest.mark.parametrize(
    ("made", "loop", "clip", "expected"),
    [
        (TWO_GROUPS, GROUPS, CLIP_GROUP, "error"),
        ("optimizer = torch.optim.AdamW(make_groups(model))", GROUPS, CLIP_GROUP, "warning"),
        ("groups = [{'params': a}, {'params': b}]\noptimizer = torch.optim.AdamW(groups)", GROUPS, CLIP_GROUP, "error"),
        (
            "optimizer = make_optimizer(model)",
            "for i, group in enumerate(optimizer.param_groups):",
            CLIP_GROUP,
            "warning",
        ),
        (TWO_GROUPS, "for part in (model, other):", CLIP_PART, "error"),
        (TWO_GROUPS, "for part in parts:", CLIP_PART, "warning"),
        (TWO_GROUPS, "for part in (model, other):", "accelerator.unscale_gradients(); clip(part)", "error"),
        (TWO_GROUPS, "for p in model.parameters():", "accelerator.clip_grad_value_(p, 1.0)", "error"),
        (TWO_GROUPS, "for part in (model, other):", "if accelerator.sync_gradients: " + CLIP_PART, "error"),
    ],
)
def test_each_pass_of_a_loop_unscales(made, loop, clip, expected):
    """Clipping in parts calls the Accelerator once per part, and each call unscales all optimizers."""
    text = LOOPED.format(precision='"fp16"', made=made, loop=loop, clip=clip)
    assert [f.severity for f in findings(text, "HS105")] == [expected]
    assert findings(text.replace('"fp16"', '"bf16"'), "HS105") == []
    assert [f.severity for f in findings(text.replace('"fp16"', "args.fp"), "HS105")] == ["warning"]


@pytest.mark.parametrize(
    ("made", "loop", "clip"),
    [
        ("optimizer = torch.optim.AdamW(model.parameters())", GROUPS, CLIP_GROUP),
        ("optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])", GROUPS, CLIP_GROUP),
        (TWO_GROUPS, "for part in (model,):", CLIP_PART),
        (TWO_GROUPS, GROUPS, "torch.nn.utils.clip_grad_norm_(group['params'], 1.0)"),
        (TWO_GROUPS, "if ready:", "accelerator.clip_grad_norm_(model.parameters(), 1.0)"),
        (TWO_GROUPS, "for part in parts:", "if part is model: " + CLIP_PART),
        (TWO_GROUPS, "for part in (one, two):", "accelerator.unscale_gradients(part)"),
        (TWO_GROUPS, "for part in parts:", CLIP_PART + "\n        break"),
        (
            TWO_GROUPS,
            "for part in parts:",
            "accelerator.backward(part(x))\n        " + CLIP_PART + "\n        optimizer.step()",
        ),
    ],
)
def test_one_clipping_per_step_is_right(made, loop, clip):
    """One pass, torch's own function, or a step in each pass unscales once."""
    assert findings(LOOPED.format(precision='"fp16"', made=made, loop=loop, clip=clip), "HS105") == []
