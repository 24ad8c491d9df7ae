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
