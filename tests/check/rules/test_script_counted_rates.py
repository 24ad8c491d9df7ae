"""HS196 where a loop computes the learning rate itself, from a counter of its iterations."""

import pytest

from check_scripts import findings


def reported(text):
    """The lines of HS196."""
    return [f.line for f in findings(text, "HS196")]


LOOP = """\
import torch, math
from tqdm import tqdm
def rate(step):
    return 1e-3 * min(1.0, step / 100)
def warm_up(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * min(1.0, step / 100)
def train(model, loader, optimizer, args):
    scaler = torch.amp.GradScaler("cuda", enabled={enabled})
    num_steps = 0
    for epoch in range(args.epochs):
        for i, x in {batches}:
            {before}
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.{dtype}):
                loss = model(x)
            scaler.scale(loss).backward()
            {clip}
            scaler.step(optimizer)
            scaler.update()
            {count}
"""
SET = "optimizer.param_groups[0]['lr'] = "
EACH = "\n            for group in optimizer.param_groups:\n                group['lr'] = lr"


def filled(**options):
    defaults = {
        "enabled": "args.fp16", "batches": "enumerate(loader)", "before": SET + "rate(num_steps)", "dtype": "float16",
        "clip": "pass", "count": "num_steps += 1",
    }  # fmt: skip
    return LOOP.format(**defaults | options)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, 13),
        ({"count": "num_steps = num_steps + 1"}, 13),
        ({"before": "i = len(loader) * epoch + i; " + SET + "schedule[i]"}, 13),
        ({"before": SET + "schedule[num_steps]"}, 13),
        ({"before": "lr = rate(num_steps)" + EACH}, 15),
        ({"before": "lr = 1e-3 * min(1, num_steps / args.warmup)" + EACH}, 15),
        ({"before": "if num_steps < args.warmup: " + SET + "1e-3 * (num_steps + 1) / args.warmup"}, 13),
        (
            {
                "before": "progress = num_steps / args.total; factor = 1 + math.cos(progress); "
                + SET
                + "args.lr * factor"
            },
            13,
        ),
        ({"before": "warm_up(optimizer, num_steps)"}, 13),
        ({"before": SET + "rate(epoch * len(loader) + i)", "count": "pass"}, 13),
        ({"before": "step = epoch * len(loader) + i; " + SET + "rate(step)", "batches": "tqdm(enumerate(loader))"}, 13),
        ({"before": "warm_up(optimizer, step=num_steps)"}, 13),
        ({"enabled": "True"}, 13),
        ({"count": "if i % args.log == args.log - 1: print(loss)\n            num_steps += 1"}, 13),
    ],
)
def test_a_rate_that_counts_iterations(options, line):
    """The counter advances whether the scaler stepped the optimizer or not."""
    assert reported(filled(**options)) == [line]


@pytest.mark.parametrize(
    "options",
    [
        {"clip": "before = scaler.get_scale()", "count": "if scaler.get_scale() >= before: num_steps += 1"},
        {"clip": "before = scaler.get_scale()", "count": "num_steps += int(scaler.get_scale() >= before)"},
        {"clip": "norm = clip(model)", "count": "if math.isfinite(norm): num_steps += 1"},
        {"clip": "norm = clip(model)", "count": "applied = bool(norm < 1e4)\n            if applied: num_steps += 1"},
        {"enabled": "False"},
        {"dtype": "bfloat16"},
        {"before": SET + "rate(epoch)"},
        {"before": SET + "args.lr"},
        {"before": SET + "rate(epoch + i / len(loader))"},
        {"before": SET + "rate(num_steps // len(loader))"},
        {"before": "log(optimizer.param_groups[0]['lr'], num_steps)"},
        {"before": "batch['lr'] = rate(num_steps)"},
        {"count": "pass"},
    ],
)
def test_a_rate_that_counts_steps_or_epochs(options):
    """The counter is that of applied steps or of epochs, or the scaler skips nothing."""
    assert reported(filled(**options)) == []


@pytest.mark.parametrize(("dtype", "expected"), [("'bfloat16'", []), ("args.dtype", [14]), ("choose()", [14])])
def test_a_flag_that_compares_a_constant(dtype, expected):
    """A scaler for a dtype that the script never has is disabled."""
    text = filled(enabled="dtype == 'float16'", dtype="half if dtype == 'float16' else torch.bfloat16")
    assert reported(text.replace("import torch, math", f"import torch, math\ndtype = {dtype}")) == expected


def test_a_loop_with_a_schedule_is_reported_once():
    """Where a schedule advances in the loop, that is the finding."""
    text = filled(count="num_steps += 1; scheduler.step()")
    assert reported(text) == [21]


def test_a_search_for_a_learning_rate_raises_it_in_each_iteration():
    """Such a test sets the rate until the loss diverges; a skipped step does not matter."""
    assert reported(filled().replace("def train", "def find_lr")) == []


AVERAGED = """\
import torch
def train(model, loader, optimizer, scheduler, ema):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if {test}:
            {body}
        scheduler.step()
"""


@pytest.mark.parametrize(
    ("test", "body", "expected"),
    [
        ("scaler.get_scale() >= before", "ema.update(model)", [14]),
        ("ema is not None and scaler.get_scale() >= before", "ema.update_parameters(model)", [14]),
        ("scaler.get_scale() < before", "continue", []),
        ("scaler.get_scale() >= before", "scheduler.step()", []),
    ],
)
def test_averaged_weights_that_wait_for_a_step(test, body, expected):
    """A test that only averaged weights depend on shows that the schedule does not wait."""
    text = AVERAGED.format(test=test, body=body)
    assert reported(text) == expected
