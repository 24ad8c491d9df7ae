"""Gradients that nothing uses, clips of nothing, and scalers that are None, in simulated runs."""

import pytest

from simulated_scripts import codes

LOOP = """
model = create(args)
optimizer = torch.optim.AdamW(model.parameters())
scaler = {scaler}
for step, (x, y) in enumerate(loader):
    {start}
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y)
    {before}
    scaler.scale(loss).backward()
    {after}
    if (step + 1) % {window} == 0:
        {unscale}
        scaler.step(optimizer)
        scaler.update()
        {end}
    {last}
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
GRAD_SCALER = 'torch.amp.GradScaler("cuda")'


def loop(**parts):
    """A training loop with these lines."""
    parts.setdefault("scaler", GRAD_SCALER)
    parts.setdefault("window", "args.accumulate")
    names = ("start", "before", "after", "unscale", "end", "last")
    return LOOP.format(**dict.fromkeys(names, "pass") | parts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (loop(end="optimizer.zero_grad()"), []),
        (loop(start="optimizer.zero_grad()"), ["HS181"]),
        (loop(start="model.zero_grad()"), ["HS181"]),
        (loop(start="optimizer.zero_grad()", window="1"), []),
        (loop(start="if step % args.accumulate == 0: optimizer.zero_grad()"), []),
        (loop(start="if (step + 1) % args.accumulate == 0: optimizer.zero_grad()"), ["HS181"]),
        (loop(start="optimizer.zero_grad()", after="saved = [p.grad for p in model.parameters()]"), []),
        (loop(end="optimizer.zero_grad()", after="if not torch.isfinite(loss):\n        optimizer.zero_grad()\n        continue"), []),
    ],
    ids=["right", "every-batch", "model", "no-window", "after-the-step", "before-the-step", "read", "bad-loss"],
)  # fmt: skip
def test_gradients_of_a_window_are_not_cleared_before_its_step(text, expected):
    """What a step would have used is lost, unless the script reads it, or leaves out a bad batch."""
    assert codes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (loop(unscale=f"scaler.unscale_(optimizer); {CLIP}", end="optimizer.zero_grad()", window="1"), []),
        (loop(before=CLIP, end="optimizer.zero_grad()", window="1"), ["HS118"]),
        (loop(end=f"optimizer.zero_grad(); {CLIP}", window="1"), ["HS109"]),
        (loop(before=CLIP, unscale=f"scaler.unscale_(optimizer); {CLIP}", end="optimizer.zero_grad()", window="1"), []),
    ],
    ids=["right", "before-backward", "after-the-step", "twice"],
)
def test_a_clip_of_no_gradients_is_reported_if_a_step_uses_unclipped_ones(text, expected):
    """A clip that another one follows in time does no harm."""
    assert codes(text) == expected


@pytest.mark.parametrize(
    ("scaler", "guard", "expected"),
    [
        (f"{GRAD_SCALER} if args.fp16 else None", "", ["HS176"]),
        (GRAD_SCALER, "", []),
        (f"{GRAD_SCALER} if args.fp16 else None", "if scaler is None: continue", []),
        (f"{GRAD_SCALER} if args.fp16 else None", "if not args.fp16: continue", []),
        (f"{GRAD_SCALER} if args.fp16 else None", "if not self.use_amp: continue", []),
        (f"{GRAD_SCALER} if use_amp is True else None", "if not use_amp: continue", []),
    ],
    ids=["none", "always", "tested", "same-setting", "another-setting", "is-true"],
)
def test_a_scaler_that_is_none_is_reported_where_nothing_keeps_the_run_out(scaler, guard, expected):
    """A test that the scaler, or any setting of precision, decides may keep it out."""
    assert codes(loop(scaler=scaler, before=guard or "pass", end="optimizer.zero_grad()")) == expected


def test_a_helper_that_is_called_for_each_of_two_models_creates_two_optimizers():
    """The second does not replace the first: a clip of one model's gradients leaves the other's."""
    text = """
        def optimizer_for(model):
            optimizer = torch.optim.AdamW(model.parameters())
            return optimizer
        first, second = First(), Second()
        a, b = optimizer_for(first), optimizer_for(second)
        scaler = torch.amp.GradScaler("cuda")
        for x, y in loader:
            a.zero_grad()
            b.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss, other = first(x, y).mean(), second(x, y).mean()
            scaler.scale(loss).backward()
            scaler.scale(other).backward()
            scaler.unscale_(a)
            torch.nn.utils.clip_grad_norm_(first.parameters(), 1.0)
            {line}
            scaler.step(a)
            scaler.step(b)
            scaler.update()
        """
    assert codes(text.replace("{line}", "pass")) == []
    assert codes(text.replace("{line}", "torch.nn.utils.clip_grad_norm_(second.parameters(), 1.0)")) == ["HS104"]
