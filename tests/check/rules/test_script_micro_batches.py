"""Windows of micro-batches: steps and schedules inside of them, and the mean over their slices."""

import pytest

from check_scripts import findings

EIGHTH = """\
import torch
{before}
for i, x in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).mean() / {divisor}
    loss.backward()
    optimizer.step()
    if (i + 1) % 8 == 0:
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("before", "divisor", "expected"),
    [
        ("n = 8", "n", [7]),
        ("", "8", [7]),
        ("n = 4", "n", []),
        ("", "x.shape[0]", []),
    ],
)
def test_a_number_is_a_window_if_the_loss_is_divided_by_it(before, divisor, expected):
    """HS183 reports a step on every micro-batch of a window that is written as a number."""
    assert [f.line for f in findings(EIGHTH.format(before=before, divisor=divisor), "HS183")] == expected


SCHEDULED = """\
import torch
def train_step(model, optimizer, scheduler, scaler, config, batch):
    optimizer.zero_grad()
    for {index} in range({length}):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch[{index}]).mean() / {length}
        scaler.scale(loss).backward()
        {inside}
    scaler.step(optimizer)
    scaler.update()
    {after}
"""
ADVANCE = "scheduler.step()"


@pytest.mark.parametrize(
    ("index", "length", "inside", "after", "expected"),
    [
        ("i", "config.accumulation_steps", ADVANCE, "pass", [8]),
        ("micro", "4", ADVANCE, "pass", [8]),
        ("i", "config.accumulation_steps", "pass", ADVANCE, []),
        ("i", "config.accumulation_steps", "scheduler.step(i)", "pass", []),
        ("i", "config.accumulation_steps", f"scaler.step(optimizer); {ADVANCE}", "pass", []),
    ],
)
def test_a_schedule_that_counts_micro_batches(index, length, inside, after, expected):
    """HS195 reports a schedule in the loop over the micro-batches of one step."""
    text = SCHEDULED.format(index=index, length=length, inside=inside, after=after)
    assert [f.line for f in findings(text, "HS195")] == expected


SLICED = """\
import torch
optimizer = torch.optim.AdamW(model.parameters())
for batch in loader:
    optimizer.zero_grad()
    for i in range(0, len(batch), micro_batch_size):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(batch[i : i + micro_batch_size])
            loss = {loss}
        loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("-torch.min(out, bound).mean()", [9]),
        ("-out.mean() + beta * divergence(out).mean()", [9]),
        ("0.5 * out.mean()", [9]),
        ("out.mean() * share", []),
        ("-out.sum()", []),
        ("out.mean() + penalty(out).sum()", []),
    ],
)
def test_the_mean_of_a_slice(loss, expected):
    """HS180 reports the mean over each slice of a batch, also with a sign or a coefficient, but not a sum or a share."""
    assert [f.line for f in findings(SLICED.format(loss=loss), "HS180")] == expected


DIVIDED_FOR_NOTHING = """\
import torch

scaler = torch.amp.GradScaler("cuda")

def train_step(model, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        losses = model(x, y)
    loss = sum(losses.values())
    scaler.scale(loss{division}).backward()
    return {{k: v.item() for k, v in losses.items()}}

def run(model, optimizer, loader, accumulation):
    for i, (x, y) in enumerate(loader):
        losses = train_step(model, x, y)
        total_loss = sum(losses.values()) / accumulation
        {reads}
        if (i + 1) % accumulation == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("division", "reads", "expected"),
    [
        ("", "scaler.scale(torch.tensor(total_loss)).backward() if False else None", [9]),
        (" / accumulation", "scaler.scale(torch.tensor(total_loss)).backward() if False else None", []),
        ("", "losses['loss'] = total_loss", []),
    ],
)
def test_division_that_only_unreachable_code_reads(division, reads, expected):
    """A quotient that only code under `if False` reads does not divide the loss of the micro-batches."""
    text = DIVIDED_FOR_NOTHING.format(division=division, reads=reads)
    assert [f.line for f in findings(text, "HS180")] == expected


PREPARED = """\
import torch
from accelerate import Accelerator
{created}
def main(cfg, model, loader):
    accelerator = Accelerator(mixed_precision="bf16"{steps})
    {scaler}
    {prepare}
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(scaler.scale(loss_fn(model(x), y)))
            {guard}
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
"""
OWN = 'scaler = torch.amp.GradScaler("cuda")'
PREPARE = "model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)"
SCALED = {
    "created": "",
    "steps": ", gradient_accumulation_steps=4",
    "scaler": OWN,
    "prepare": PREPARE,
    "guard": "if True:",
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["error"]),
        ({"steps": ", gradient_accumulation_steps=cfg.accum"}, ["warning"]),
        ({"prepare": "optimizer, schedule = make_optimizer(cfg, model, accelerator)"}, ["error"]),
        (
            {
                "created": "from utils import GradScaler",
                "scaler": "scaler = GradScaler('cuda') if cfg.fp16 else None",
                "guard": "if scaler is not None:",
            },
            ["error"],
        ),
        ({"guard": "if accelerator.sync_gradients:"}, []),
        ({"steps": ""}, []),
        ({"steps": ", gradient_accumulation_steps=1"}, []),
        ({"scaler": "scaler = torch.amp.GradScaler('cuda', enabled=False)"}, []),
        ({"prepare": "optimizer = torch.optim.SGD(model.parameters(), lr=1.0)"}, []),  # steps every micro-batch
    ],
)
def test_a_scaler_waits_for_the_window_of_accumulate(options, expected):
    """HS107: `scaler.step` of a scaler that Accelerate does not own unscales on every micro-batch of a prepared optimizer."""
    reported = findings(PREPARED.format(**{**SCALED, **options}), "HS107")
    assert [f.severity for f in reported] == expected


HANDED = """\
import torch
from accelerate import Accelerator
{created}
accelerator = Accelerator({options})
scaler = GradScaler("cuda")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    loss = loss_fn(model(x), y)
    accelerator.backward({loss})
    {unscale}
    norms.append(sum(p.grad.norm() for p in model.parameters()))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
SCALER = "from torch.amp import GradScaler"


@pytest.mark.parametrize(
    ("created", "options", "loss", "unscale", "expected"),
    [
        (SCALER, "", "scaler.scale(loss)", "pass", [11]),
        ("from utils import GradScaler", "mixed_precision='bf16'", "scaler.scale(loss)", "pass", [11]),
        (SCALER, "", "scaler.scale(loss)", "if clip: scaler.unscale_(optimizer)", [11]),
        (SCALER, "", "scaler.scale(loss)", "scaler.unscale_(optimizer)", []),
        ("from utils import GradScaler", "mixed_precision='bf16'", "loss", "pass", []),
        (SCALER, "mixed_precision='bf16'", "weights.scale(loss)", "pass", []),  # something else than the scaler
    ],
)
def test_an_accelerator_is_passed_a_scaled_loss(created, options, loss, unscale, expected):
    """HS110: `accelerator.backward(scaler.scale(loss))` leaves scaled gradients like `scaler.scale(loss).backward()`."""
    text = HANDED.format(created=created, options=options, loss=loss, unscale=unscale)
    assert [f.line for f in findings(text, "HS110")] == expected


EVERY = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for step, (x, y) in enumerate(loader):
    is_last = {last}
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y) / n
    scaler.scale(loss).backward()
    if {end}:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if {log}:
        print([p.grad.norm() for p in model.parameters() if p.grad is not None])
"""
LAST = "(step + 1) % n == 0"


@pytest.mark.parametrize(
    ("last", "end", "log", "expected"),
    [
        (f"{LAST} or step + 1 == len(loader)", "is_last", "step % 50 == 0", [14]),
        (LAST, LAST, "step % log_every == 0 and is_main_process()", [14]),
        (LAST, "is_last", "step % args.log_every == 0 and rank == 0", [14]),
        (LAST, LAST, "(step + 1) % 50 == 0", []),  # may be a multiple of n
        ("step % n == 0", "is_last", "step % 50 == 0", []),
        (LAST, LAST, "step % 50 == 0 and is_last", []),
        (LAST, LAST, "step % 50 == 0 and not is_main_process()", []),
        (LAST, LAST, "i % 50 == 0", []),  # another counter
        ("True", "is_last", "step % 50 == 0", []),
    ],
)
def test_norms_of_every_so_many_micro_batches(last, end, log, expected):
    """HS110: `step % 50 == 0` is the first micro-batch of a window that `(step + 1) % n == 0` ends."""
    assert [f.line for f in findings(EVERY.format(last=last, end=end, log=log), "HS110")] == expected
