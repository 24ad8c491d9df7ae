"""Forms in which public scripts have HS110, HS120, HS133 and HS180, and the right code that looks like them."""

import pytest

from check_scripts import findings


def lines(text, code):
    """The lines at which a rule is reported."""
    return [f.line for f in findings(text, code)]


MEASURED = """\
import torch
scaler = torch.amp.GradScaler('cuda')
for i, x in enumerate(loader):
    optimizer.zero_grad()
    with torch.autocast('cuda'):
        loss = model(x)
    scaler.scale(loss).backward()
    if i % 10 == 0:
        scale = scaler.get_scale()
        total = sum(p.grad.norm(2).item() ** 2 for p in model.parameters())
        {norm}
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        ("norm = total ** 0.5 / scale", []),
        ("norm = total ** 0.5 / max(scale, 1e-12)", []),
        ("norm = total ** 0.5; log(scale)", [10]),
        ("norm = max(total, 0); log(max(scale, 1))", [10]),
    ],
)
def test_a_norm_divided_by_the_scale_is_unscaled(norm, expected):
    """HS110: what is measured before `unscale_` is right where the scale divides it."""
    assert lines(MEASURED.format(norm=norm), "HS110") == expected


DEVICE = """\
import torch
def train(model, loader, optimizer, scaler, device):
    amp = scaler.is_enabled()
    dtype = {dtype}
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype, enabled=amp):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
def main(use, device):
    amp = {amp}
    scaler = torch.amp.GradScaler({name}, enabled=amp)
    train(model, loader, optimizer, scaler, device)
"""
ON_CUDA = "torch.float16 if device.type == 'cuda' else torch.bfloat16"


@pytest.mark.parametrize(
    ("dtype", "amp", "name", "expected"),
    [
        (ON_CUDA, "use and device.type == 'cuda'", "device.type", []),
        (ON_CUDA, "use", "'cuda'", []),
        (ON_CUDA, "use", "device.type", [14]),
        ("torch.bfloat16 if device.type == 'cuda' else torch.float16", "use", "'cuda'", [14]),
        ("torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16", "use", "'cuda'", [14]),
    ],
)
def test_bfloat16_of_the_cpu_meets_no_scaler(dtype, amp, name, expected):
    """HS120: where bfloat16 is for machines without CUDA, a scaler for CUDA is off."""
    assert lines(DEVICE.format(dtype=dtype, amp=amp, name=name), "HS120") == expected


BRANCHES = """\
import torch
for i, x in enumerate(loader):
    {before}
    if scaler is not None:
        with torch.autocast('cuda'):
            {first}
        scaler.scale(loss).backward()
        if (i + 1) % accum_steps == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    else:
        {second}
        loss.backward()
        if (i + 1) % accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("before", "first", "second", "expected"),
    [
        ("pass", "loss = model(x)", "loss = model(x).float()", [7, 14]),
        ("loss = model(x)", "pass", "pass", [7]),
        ("pass", "loss = model(x) / accum_steps", "loss = model(x) / accum_steps", []),
    ],
)
def test_each_branch_that_computes_its_loss_divides_it(before, first, second, expected):
    """HS180: a loss computed once is reported once, and two losses twice."""
    assert lines(BRANCHES.format(before=before, first=first, second=second), "HS180") == expected


PARSED = """\
import sys, torch
options = {{}}
for arg in sys.argv[1:]:
    if arg == '--mixed_precision':
        options['mixed_precision'] = {value}
    {more}
amp = options.get('mixed_precision', {default})
with torch.autocast('cuda', enabled=amp):
    model(x)
"""


@pytest.mark.parametrize(
    ("value", "default", "more", "expected"),
    [
        ("True", "True", "pass", [7]),
        ("True", "False", "pass", []),
        ("not amp", "True", "pass", []),
        ("True", "True", "options[arg] = False", []),
        ("True", "True", "options.update(read(arg))", []),
        ("True", "True", "read(arg, options)", []),
        ("True", "True", "if arg == '--fp32': options['mixed_precision'] = False", []),
    ],
)
def test_an_option_read_by_hand_that_only_sets_its_default(value, default, more, expected):
    """HS133: a flag that is True by default, and that its option sets to True."""
    assert lines(PARSED.format(value=value, default=default, more=more), "HS133") == expected


TESTED = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    {use}
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("num_overflows += int(torch.isnan(norm))", []),
        ("report_nonfinite(epoch, norm=float(norm))", []),
        ("log(float(norm))", [8]),
        ("log(norm) if torch.isfinite(norm) else None", [8]),
    ],
)
def test_a_norm_that_is_only_tested_for_inf(use, expected):
    """The scale changes the number, but not whether it is finite."""
    assert [f.line for f in findings(TESTED.format(use=use), "HS110")] == expected
