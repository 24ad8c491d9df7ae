"""Optimizers that only the branch without the scaler steps, and their gradients in a clip."""

from __future__ import annotations

import pytest

from check_scripts import codes

LISTED = """\
import torch

model = torch.nn.Linear(8, 2).cuda()
scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
wide, narrow = [], []
for name, p in model.named_parameters():
    if p.ndim == 2:
        wide.append(p)
    else:
        narrow.append(p)
first, second = torch.optim.SGD(wide, lr=0.1), torch.optim.AdamW(narrow)
opts = [(first, 0.1), (second, 0.001)]
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
        loss = loss_fn(model(x), y)
    for opt, _ in opts:
        opt.zero_grad()
    if scaler.is_enabled():
        scaler.scale(loss).backward()
        {unscale}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        {step}
        scaler.update()
    else:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt, _ in opts:
            opt.step()
"""
NAMED = """\
import torch

scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
opt_a, opt_b = torch.optim.SGD(a.parameters(), lr=0.1), torch.optim.AdamW(b.parameters())
for x, y in loader:
    opt_a.zero_grad()
    opt_b.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
        loss = loss_fn(b(a(x)), y)
    if use_amp:
        scaler.scale(loss).backward()
        scaler.step(opt_a)
        {step}
        scaler.update()
    else:
        loss.backward()
        opt_a.step()
        opt_b.step()
"""


@pytest.mark.parametrize(
    ("unscale", "step", "expected"),
    [
        ("scaler.unscale_(opts[0][0])", "scaler.step(opts[0][0])", ["HS104:21", "HS156:22"]),
        ("[scaler.unscale_(o) for o, _ in opts]", "[scaler.step(o) for o, _ in opts]", []),
        (
            "scaler.unscale_(opts[0][0]); scaler.unscale_(opts[1][0])",
            "scaler.step(opts[0][0]); scaler.step(opts[1][0])",
            [],
        ),
    ],
)
def test_first_optimizer_of_a_list(unscale, step, expected):
    """A scaler that unscales and steps the first optimizer of a list leaves the others scaled, and untrained."""
    text = LISTED.format(unscale=unscale, step=step)
    assert [c for c in codes(text) if c[:5] in {"HS104", "HS156"}] == expected


@pytest.mark.parametrize(("step", "expected"), [("pass", ["HS156:12"]), ("scaler.step(opt_b)", [])])
def test_second_optimizer_without_the_scaler(step, expected):
    """An optimizer that only the branch without the scaler steps is not trained in mixed precision."""
    assert [c for c in codes(NAMED.format(step=step)) if c.startswith("HS156")] == expected


NESTED = """\
import torch

scaler = torch.amp.GradScaler("cuda") if use_amp else None
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
        loss = loss_fn(model(x), y)
    if scaler is not None:
        scaler.scale(loss).backward()
    else:
        loss.backward()
{indent}    if scaler is not None:
{indent}        scaler.step(optimizer)
{indent}        scaler.update()
{indent}    else:
{indent}        optimizer.step()
"""


@pytest.mark.parametrize(("indent", "expected"), [("    ", ["HS156:9"]), ("", [])])
def test_step_of_the_scaler_where_it_is_none(indent, expected):
    """A step of the scaler in the branch where the scaler is None runs never, so the scaled backward trains nothing."""
    assert [c for c in codes(NESTED.format(indent=indent)) if c.startswith("HS156")] == expected
