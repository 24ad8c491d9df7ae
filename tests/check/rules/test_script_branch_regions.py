"""HS134 where an option chooses between a branch with autocast and one without, and the scaler stays enabled."""

import pytest

from check_scripts import findings, reported

LOOP = """\
import torch

def train(model, loader, optimizer, loss_fn, args):
    scaler = torch.amp.GradScaler("cuda"{enabled})
    for x, y in loader:
        optimizer.zero_grad()
        if {test}:
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(x)
        else:
            {plain}
        loss = loss_fn(out.float(), y)
        {backward}
"""
SCALED = "scaler.scale(loss).backward()\n        scaler.step(optimizer)\n        scaler.update()"
EITHER = """\
if args.amp:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()"""
HALF = "with torch.autocast('cuda', dtype=torch.float16):\n                out = model(x)"


def test_scaler_of_both_branches():
    """HS134 as advice at the backward: the branch without autocast needs no scale."""
    text = LOOP.format(enabled="", test="args.amp", plain="out = model(x)", backward=SCALED)
    assert [(f.code, f.line, f.severity) for f in findings(text)] == [("HS134", 13, "advice")]


@pytest.mark.parametrize(
    ("enabled", "test", "plain", "backward"),
    [
        (", enabled=args.amp", "args.amp", "out = model(x)", SCALED),
        ("", "args.amp", "out = model(x)", EITHER),
        ("", "args.amp", HALF, SCALED),
        ("", "args.amp", "raise ValueError('mixed precision only')", SCALED),
    ],
)
def test_scalers_that_follow_the_branch(enabled, test, plain, backward):
    """No finding where the option also switches the scaler, or every branch computes in 16 bits."""
    assert "HS134" not in reported(LOOP.format(enabled=enabled, test=test, plain=plain, backward=backward))


OPPOSITE = """\
import torch

def train(model, loader, optimizer, loss_fn, args):
    use_bf16 = args.bf16 and torch.cuda.is_bf16_supported()
    scaler = torch.amp.GradScaler("cuda", enabled={enabled})
    for x, y in loader:
        optimizer.zero_grad()
        if {test}:
            with torch.autocast("cuda", dtype=torch.{dtype}):
                out = model.losses(x)
        {plain}
        loss = out.mean()
        if {scaled}:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
"""
ELSE = "else:\n            out = model.losses(x)"


def advised(**parts):
    """The lines of HS134, which is advice here."""
    defaults = {
        "enabled": "not use_bf16",
        "test": "use_bf16",
        "plain": ELSE,
        "scaled": "not use_bf16",
        "dtype": "bfloat16",
    }
    return [f.line for f in findings(OPPOSITE.format(**defaults | parts), "HS134") if f.severity == "advice"]


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({}, 15),
        ({"enabled": "True"}, 15),
        ({"test": "args.precision == 'bf16'", "scaled": "args.precision != 'bf16'"}, 15),
        ({"plain": "if not use_bf16:\n            out = model.losses(x)"}, 15),
    ],
)
def test_a_loss_that_is_scaled_in_the_branch_without_a_region(parts, line):
    """Without bfloat16 everything is float32, whose gradients need no scale."""
    assert advised(**parts) == [line]


@pytest.mark.parametrize(
    "parts",
    [
        {"scaled": "use_bf16", "enabled": "use_bf16"},
        {
            "plain": "else:\n            with torch.autocast('cuda', dtype=torch.float16):\n                out = model.losses(x)"
        },
        {"plain": "else:\n            out = model.losses(x.half())"},
        {"plain": "else:\n            with context():\n                out = model.losses(x)"},
        {"test": "warm", "scaled": "not warm"},
        {"plain": "else:\n            raise SystemExit"},
    ],
)
def test_other_branches_that_may_compute_in_float16(parts):
    """A region or a cast of their own, an unknown context, a condition that is about something else, and no computation."""
    assert advised(**parts) == []
