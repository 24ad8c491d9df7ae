"""HS196 where something else than a plain iteration decides when a schedule advances: a warm-up, an engine, a handler, the script's own test."""

import pytest

from check_scripts import findings


def reported(text):
    """The lines of HS196."""
    return [f.line for f in findings(text, "HS196")]


LOOP = """\
import math, torch
def train(model, loader, optimizer, epoch, warmup):
    scaler = torch.amp.GradScaler("cuda")
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=warmup)
    for i, x in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        {step}
        scaler.update()
        {advance}
"""
STEP, ADVANCE = "scaler.step(optimizer)", "schedule.step()"
FINITE = "if torch.isfinite(norm): "


@pytest.mark.parametrize(
    ("step", "advance", "is_reported"),
    [
        (STEP, "if i < warmup: schedule.step()", True),
        (STEP, "if i <= warmup: schedule.step()", True),
        (STEP, "if i < warmup and epoch == 0: schedule.step()", True),
        (STEP, "if norm < warmup: schedule.step()", False),  # an infinite norm is not less
        (FINITE + STEP, ADVANCE, True),
        (FINITE + STEP, FINITE + ADVANCE, False),
        (STEP, "norm /= scaler.get_scale(); schedule.step()", True),
        (STEP, "count += scaler.get_scale() >= before\n        if count > last: schedule.step()", False),
    ],
)
def test_schedules_that_advance_with_a_skipped_step(step, advance, is_reported):
    """A warm-up is in the iterations that skip most; a test that only the step waits for, or a norm that is unscaled, changes nothing."""
    text = LOOP.format(step=step, advance=advance)
    assert bool(reported(text)) is is_reported


RATES = """\
import torch
class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")
        self.step = 0
    def _set_lr(self, lr):
        for g in self.opt.param_groups:
            g["lr"] = lr
    def run_epoch(self, loader, train):
        for x in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x)
            if train:
                self._set_lr(self.rate(self.step))
                self.opt.zero_grad()
                self.scaler.scale(loss).backward()
                self.scaler.unscale_(self.opt)
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                if check_finite(norm):
                    self.scaler.step(self.opt)
                    {inside}
                self.scaler.update()
                {after}
    def fit(self, loader):
        for epoch in range(9):
            self.run_epoch(loader, True)
            self.run_epoch(loader, False)
"""


def test_a_counter_in_a_method_with_a_phase():
    """A counter of a branch that a caller's True chooses counts skipped steps, unless it waits for finite gradients as the step does."""
    assert reported(RATES.format(inside="pass", after="self.step += 1")) == [14]
    assert not reported(RATES.format(inside="self.step += 1", after="pass"))


ACCELERATE = """\
from accelerate import Accelerator
accelerator = Accelerator({options})
scheduler = get_scheduler(optimizer)
if accelerator.mixed_precision == {precision}:
    weights = weights.half()
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
for x, y in loader:
    loss = loss_fn(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    {advance}
    optimizer.zero_grad()
"""
APART = "step_scheduler_with_optimizer=False"


@pytest.mark.parametrize(
    ("options", "precision", "advance", "is_reported"),
    [
        (APART, "'fp16'", "scheduler.step()", True),
        ("mixed_precision='fp16', " + APART, "'x'", "scheduler.step()", True),
        ("", "'fp16'", "scheduler.step()", False),  # it waits with the optimizer
        ("step_scheduler_with_optimizer=True", "'fp16'", "scheduler.step()", False),
        (APART, "'bf16'", "scheduler.step()", False),
        (APART, "'fp16'", "if not accelerator.optimizer_step_was_skipped: scheduler.step()", False),
    ],
)
def test_prepared_schedules_apart_from_the_optimizer(options, precision, advance, is_reported):
    """With step_scheduler_with_optimizer=False a prepared schedule advances whether or not the optimizer did."""
    text = ACCELERATE.format(options=options, precision=precision, advance=advance)
    assert bool(reported(text)) is is_reported


FABRIC = """\
import torch
from lightning import Fabric
class Trainer:
    def __init__(self, model, optimizer, fp16, options):
        if fp16:
            options.update(precision={precision})
        fabric = Fabric(**options)
        self.fabric = fabric
        self.model, self.optimizer = fabric.setup(model, optimizer)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    def train(self, loader):
        for x in loader:
            self.fabric.backward(self.model(x))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
"""


def test_fabric_knows_of_no_schedule():
    """In 16-mixed a Fabric skips steps, and nothing keeps the schedule from advancing; in bf16-mixed it skips none."""
    assert reported(FABRIC.format(precision="'16-mixed'")) == [15]
    assert not reported(FABRIC.format(precision="'bf16-mixed'"))


IGNITE = """\
import torch
from ignite.engine import Engine, Events
from ignite.contrib.engines import common
def create(model, optimizer, config):
    scaler = torch.amp.GradScaler("cuda", enabled=config["amp"])
    def train_step(engine, x):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=config["amp"]):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    trainer = Engine({process})
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
{attach}
    return trainer
"""


@pytest.mark.parametrize(
    ("attach", "is_reported"),
    [
        ("    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: schedule.step())", True),
        ("    trainer.add_event_handler(Events.ITERATION_STARTED, schedule)", True),
        ("    @trainer.on(Events.ITERATION_COMPLETED)\n    def _():\n        schedule.step()", True),
        ("    common.setup_common_training_handlers(trainer, lr_scheduler=schedule)", True),
        ("    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: schedule.step())", False),
        ("    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())", False),
    ],
)
def test_handlers_of_ignite_that_advance_a_schedule(attach, is_reported):
    """A schedule that an engine advances in each iteration counts those in which the scaler of its function skips."""
    assert bool(reported(IGNITE.format(attach=attach, process="train_step"))) is is_reported
    assert not reported(IGNITE.format(attach=attach, process="other_step"))
