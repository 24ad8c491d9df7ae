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
        ({"before": SET + "rate(epoch + i / len(loader))"}, 13),
        ({"before": "where = (epoch + float(i) / len(loader)) / args.epochs; " + SET + "schedule(where)"}, 13),
        ({"before": "scheduler(num_steps)"}, 13),
        ({"before": "args.lr_scheduler(optimizer, i, epoch)"}, 13),
        ({"before": "wrapped.step_schedulers(epoch + i / len(loader))"}, 13),
        ({"before": "utils.adjust_learning_rate(optimizer, epoch + i / len(loader), args)"}, 13),
        ({"before": "lr = adjust_learning_rate(optimizer, num_steps)"}, 13),
        ({"before": "lr = rate(num_steps); set_lr(optimizer, lr)"}, 13),
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
        {"before": SET + "rate(num_steps // len(loader))"},
        {"before": "scheduler(epoch)"},
        {"before": "value = scheduler(num_steps)"},
        {"before": "temperature_scheduler(num_steps)"},
        {"before": "scheduler = Weights(start=0.0, end=1.0); scheduler(num_steps)"},
        {"before": "utils.adjust_learning_rate(optimizer, epoch, args)"},
        {"before": "adjust_learning_rate(optimizer, scaler, num_steps)"},
        {"before": "lr = adjust_learning_rate(num_steps)"},
        {"before": "log(optimizer.param_groups[0]['lr'], num_steps)"},
        {"before": "batch['lr'] = rate(num_steps)"},
        {"count": "pass"},
    ],
)
def test_a_rate_that_counts_steps_or_epochs(options):
    """The counter is that of applied steps or of epochs, or the scaler skips nothing."""
    assert reported(filled(**options)) == []


IN_STEP = """\
import torch
class Trainer:
    def __init__(self, model, optimizers):
        self.model, self.optimizers = model, optimizers
        self.scaler = torch.amp.GradScaler("cuda")
    def set_rates(self, step):
        for wrapped in self.optimizers:
            for group in wrapped.optimizer.param_groups:
                group["lr"] = self.rates[step]
    def train_step(self, x, step, epoch=0):
        self.set_rates({passed})
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x)
        self.scaler.scale(loss).backward()
        for wrapped in self.optimizers:
            self.scaler.step(wrapped.optimizer)
        self.scaler.update()
    def train(self, loader):
        for epoch in range(10):
            for i, x in enumerate(loader):
                self.train_step(x, {step})
"""


@pytest.mark.parametrize(
    ("passed", "step", "expected"),
    [
        ("step", "i", [11]),
        ("step=step", "step=epoch * len(loader) + i", [11]),
        ("step", "epoch", []),
        ("epoch", "i, epoch", []),
        ("step", "i // len(loader)", []),
    ],
)
def test_a_function_of_one_iteration_that_sets_the_rate(passed, step, expected):
    """The loop passes its counter to the step, and the step to the method that sets the rates of each wrapped optimizer."""
    assert reported(IN_STEP.format(passed=passed, step=step)) == expected


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


RECORDED = """\
import torch
def train(model, loader, optimizer, scheduler, args):
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    for i, x in enumerate(loader):
        stepped = False
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x) / args.accumulate
        scaler.scale(loss).backward()
        if (i + 1) % args.accumulate == 0:
            {before}
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            {after}
        if stepped:
            scheduler.step()
"""


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("pass", "stepped = True", [16]),
        ("stepped = True", "pass", []),
        ("pass", "stepped = bool(applied(optimizer))", []),
        ("norm = clip(model)", "if norm < 1e4: stepped = True", []),
        ("pass", "stepped = True; stepped, rest = look(optimizer)", []),
    ],
)
def test_a_flag_that_records_a_step(before, after, expected):
    """A flag that is set next to every call of `scaler.step` is true for a skipped step as well."""
    assert reported(RECORDED.format(before=before, after=after)) == expected


RETURNED = """\
import torch
def one_step(model, x, i, optimizer, scaler):
    stepped = False
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x) / 4
    scaler.scale(loss).backward()
    if (i + 1) % 4 == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        stepped = True
    return loss, stepped
def train(model, loader, optimizer, scheduler):
    scaler = torch.amp.GradScaler("cuda")
    for i, x in enumerate(loader):
        loss, stepped = {call}
        {after}
        if stepped:
            scheduler.step()
"""


@pytest.mark.parametrize(
    ("after", "expected"), [("pass", [19]), ("stepped = ready(i)", []), ("loss, stepped = look(loss)", [])]
)
def test_a_flag_that_the_function_of_one_step_returns(after, expected):
    """The caller's flag is the one that is set next to `scaler.step`, and nothing else assigns it."""
    text = RETURNED.format(call="one_step(model, x, i, optimizer, scaler)", after=after)
    assert reported(text) == expected
