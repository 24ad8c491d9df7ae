"""HS196 where skipped steps are only counted, and where a flag that is set before the loop advances the schedule per batch."""

import pytest

from check_scripts import findings

LOOP = """\
import torch
def train(model, loader, optimizer, scaler, config):
    scheduler, step_per_batch = build_scheduler(optimizer, config)
    skipped = 0
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast('cuda', dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        {test}
        {advance}
"""


def reported(text):
    """The lines of HS196."""
    return [f.line for f in findings(text, "HS196")]


@pytest.mark.parametrize(
    ("test", "advance", "expected"),
    [
        ("if scaler.get_scale() < before: skipped += 1", "scheduler.step()", [14]),
        ("if scaler.get_scale() < before: print('skipped')", "scheduler.step()", [14]),
        ("skipped += scaler.get_scale() < before", "scheduler.step()", [14]),
        ("if scaler.get_scale() < before: continue", "scheduler.step()", []),
        ("scaler.update(min(scaler._scale.item(), 2.0**16))", "scheduler.step()", [14]),
        ("if scaler._scale.item() < before: continue", "scheduler.step()", []),
        ("is_skipped = scaler.get_scale() < before", "scheduler.step()", [14]),
        ("is_skipped = scaler.get_scale() < before", "if not is_skipped: scheduler.step()", []),
        ("is_skipped = scaler.get_scale() < before", "advance(scheduler, is_skipped); scheduler.step()", []),
        ("if changed(scaler.get_scale(), before): skipped += 1", "scheduler.step()", []),
    ],
)
def test_counting_skipped_steps_does_not_keep_the_schedule(test, advance, expected):
    """A comparison of the scale matters only if more than a counter or a message depends on it."""
    assert reported(LOOP.format(test=test, advance=advance)) == expected


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("pass", [14]),
        ("step_per_batch = loss < 3", []),
    ],
)
def test_a_flag_that_precedes_the_loop_is_a_setting(test, expected):
    """`step_per_batch`, unpacked before the loop, is the same for each batch unless the loop assigns it."""
    assert reported(LOOP.format(test=test, advance="if step_per_batch: scheduler.step()")) == expected


ACCELERATED = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision={precision})
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
{prepare}
for x in loader:
    accelerator.backward(model(x).loss)
    optimizer.step()
    {advance}
    optimizer.zero_grad()
"""
PREPARE = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"


@pytest.mark.parametrize(
    ("precision", "prepare", "advance", "expected"),
    [
        ('"fp16"', PREPARE, "scheduler.step()", [10]),
        ('None if args.precision == "no" else args.precision', PREPARE, "scheduler.step()", [10]),
        ('"bf16"', PREPARE, "scheduler.step()", []),
        ('"fp16"', PREPARE, "if not accelerator.optimizer_step_was_skipped: scheduler.step()", []),
        ('"fp16"', f"{PREPARE}\nscheduler = accelerator.prepare(scheduler)", "scheduler.step()", []),
        ('"fp16"', "model, optimizer, scheduler = accelerator.prepare(*parts)", "scheduler.step()", []),
        ('"fp16"', f"{PREPARE}\nscheduler = accelerator.prepare_scheduler(scheduler)", "scheduler.step()", []),
        ('"fp16"', PREPARE, "schedule(optimizer)", []),
    ],
)
def test_a_schedule_that_the_accelerator_does_not_know(precision, prepare, advance, expected):
    """A scheduler that is prepared waits for the steps that are not skipped; another one does not."""
    assert reported(ACCELERATED.format(precision=precision, prepare=prepare, advance=advance)) == expected


OWNED = """\
import torch
class Trainer:
    def __init__(self, model, optimizer, scheduler):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        {create}
    def train(self, loader):
        for x in loader:
            self.optimizer.zero_grad()
            with torch.autocast('cuda', dtype=torch.float16):
                loss = self.model(x)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
"""


@pytest.mark.parametrize(("create", "expected"), [("self.scaler = torch.amp.GradScaler('cuda')", [14]), ("pass", [])])
def test_a_scaler_that_nothing_creates_skips_no_step(create, expected):
    """HS132 reports that the first use raises; what the schedule does is no second finding."""
    assert reported(OWNED.format(create=create)) == expected
    assert bool(findings(OWNED.format(create=create), "HS132")) is not bool(expected)


NUMBERED = """\
import torch
scaler = torch.amp.GradScaler('cuda')
{bars}
for epoch in range(3):
    for {target} in {batches}:
        optimizer.zero_grad()
        with torch.autocast('cuda', dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step({position})
"""


@pytest.mark.parametrize(
    ("bars", "target", "batches", "position", "expected"),
    [
        ("pass", "b, x", "enumerate(loader)", "b", [12]),
        ("pass", "b, x", "enumerate(loader)", "epoch * len(loader) + b", [12]),
        ("pass", "b, x", "tqdm(enumerate(loader), total=len(loader))", "b", [12]),
        ("bar = tqdm.tqdm(enumerate(loader))", "b, x", "bar", "b", [12]),
        ("pass", "b, x", "enumerate(loader)", "epoch + b / len(loader)", []),
        ("pass", "b, x", "enumerate(loader)", "epoch", []),
        ("pass", "b, x", "enumerate(loader)", "loss", []),
        ("pass", "b, x", "zip(levels, loader)", "b", []),
        ("bar = tqdm.tqdm(pairs)", "b, x", "bar", "b", []),
    ],
)
def test_a_schedule_that_receives_the_number_of_the_batch(bars, target, batches, position, expected):
    """The count of `enumerate` is the number of the iteration, skipped steps included; another loop variable may be anything."""
    text = NUMBERED.format(bars=bars, target=target, batches=batches, position=position)
    assert reported(text) == expected


COMPARED = """\
import torch
class Trainer:
    def fit(self, loader):
        self.scaler = torch.amp.GradScaler('cuda')
        for x in loader:
            self.optimizer.zero_grad()
            with torch.autocast('cuda', dtype=torch.float16):
                loss = self.model(x)
            self.scaler.scale(loss).backward()
            ran = {first}
            {before}
            self.scaler.step(self.optimizer)
            {between}
            {test}
            {update}
            {advance}
    def adapt(self):
        self.scaler.update()
"""
FORMS = {
    "first": "True",
    "before": "before = self.scaler.get_scale()",
    "between": "after = self.scaler.get_scale()",
    "test": "ran = before <= after",
    "update": "self.scaler.update()",
    "advance": "if ran: self.scheduler.step()",
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, [16]),
        ({"between": "pass", "test": "ran = self.scaler.get_scale() >= before"}, [16]),
        ({"test": "if after >= before: self.scheduler.step()", "advance": "pass"}, [14]),
        ({"test": "skipped = before > after", "advance": "if not skipped: self.scheduler.step()"}, [16]),
        ({"test": "skipped = before != after", "advance": "if not skipped: self.scheduler.step()"}, [16]),
        ({"between": "self.scaler.update(); after = self.scaler.get_scale()"}, []),
        ({"between": "self.adapt(); after = self.scaler.get_scale()"}, []),
        ({"between": "adapt(self.scaler); after = self.scaler.get_scale()"}, []),
        ({"update": "self.scaler.update(); after = self.scaler.get_scale(); ran = before <= after"}, []),
        ({"update": "self.scaler.update(); before = after"}, []),
        ({"before": "if first: before = self.scaler.get_scale()"}, []),
        ({"first": "torch.isfinite(norm)"}, []),
        ({"test": "ran = before < after"}, []),  # never true: the schedule does not advance at all
    ],
)
def test_a_scale_that_is_compared_before_it_is_updated(changed, expected):
    """Only `update` changes the scale: two values that are read before it are equal, and say nothing about the step."""
    assert reported(COMPARED.format(**{**FORMS, **changed})) == expected


TRAINED_IN_METHOD = """\
import torch
class Warmup:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")
    def run(self, texts):
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, decay)
        for text in texts:
            self.train_on(text)
            scheduler.step()
    def train_on(self, text):
        tokens = encode(text)
        if {unless}:
            return 0.0
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(tokens)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()
"""


@pytest.mark.parametrize(
    ("unless", "expected"),
    [
        ("len(tokens) < 2", [10]),
        ("tokens.numel() == 0", [10]),
        ("tokens is None", [10]),
        ("grad_norm_is_large(tokens)", []),
    ],
)
def test_batches_that_are_left_out_do_not_excuse_the_schedule(unless, expected):
    """An iteration without data counts too, but so does one that the scaler skips."""
    assert reported(TRAINED_IN_METHOD.format(unless=unless)) == expected


TESTED_NORM = """\
import torch
scaler = torch.amp.GradScaler("cuda")
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=99)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    {flag}
    if {test}:
        optimizer.zero_grad()
        scaler.update()
        continue
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
"""


@pytest.mark.parametrize(
    ("flag", "test", "expected"),
    [
        ("is_finite = bool(torch.isfinite(grad_norm).item())", "not is_finite", []),
        ("is_finite = math.isfinite(float(grad_norm))", "not is_finite", []),
        ("is_bad = torch.isnan(grad_norm) or torch.isinf(grad_norm)", "is_bad", []),
        ("is_bad = not torch.isfinite(grad_norm)", "is_bad", []),
        ("pass", "not math.isfinite(grad_norm.item())", []),
        ("pass", "not torch.isfinite(grad_norm).all()", []),
        ("pass", "not torch.isfinite(torch.tensor(grad_norm))", []),
        ("is_finite = torch.isfinite(torch.as_tensor(grad_norm)).item()", "not is_finite", []),
        ("pass", "not torch.isfinite(torch.tensor(loss))", [18]),
        ("pass", "torch.isnan(grad_norm) or torch.isinf(grad_norm)", []),
        ("is_bad = torch.isnan(grad_norm)", "is_bad", [18]),  # an infinite norm passes
        ("is_finite = bool(torch.isfinite(loss).item())", "not is_finite", [18]),
        ("is_bad = torch.isnan(grad_norm) and torch.isinf(grad_norm)", "is_bad", [18]),
    ],
)
def test_the_schedule_runs_only_for_a_norm_that_is_finite(flag, test, expected):
    """After a test of the norm, also through a variable, the scaler skips nothing; a test of the loss excludes no overflow."""
    assert reported(TESTED_NORM.format(flag=flag, test=test)) == expected
