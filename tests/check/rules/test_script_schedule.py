"""HS195 and HS196: schedules before the step, in methods of trainers, and with scalers that a configuration creates."""

import pytest

from check_scripts import findings


def reported(text, code="HS196"):
    """The lines at which a rule is reported."""
    return [f.line for f in findings(text, code)]


BEFORE = """\
import torch
scaler = torch.amp.GradScaler('cuda')
for i, x in enumerate(loader):
    with torch.autocast('cuda'):
        loss = model(x)
    scaler.scale(loss).backward()
    {advance}
    {flag}
    if run_step:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("advance", "flag", "expected"),
    [
        ("lr = scheduler.step()", "run_step = loss < bound", [7]),
        ("scheduler.step()", "run_step = loss < bound", [7]),
        ("scheduler.step()", "run_step = loss.item() < 10", [7]),
        ("if loss < 3: scheduler.step()", "run_step = loss < bound", []),
        ("scheduler.step()", "run_step = torch.isfinite(norm)", []),  # the scaler then skips nothing
        ("scheduler.step()", "run_step = not has_inf(model)", []),
    ],
)
def test_a_schedule_before_the_step_counts_skipped_steps_too(advance, flag, expected):
    """The order of schedule and step in an iteration does not matter, nor does a flag that is not about gradients."""
    assert reported(BEFORE.format(advance=advance, flag=flag)) == expected


def test_a_schedule_whose_result_is_used_sets_the_rate_of_the_coming_step():
    """torch's schedulers return nothing, so `lr = scheduler.step()` is another class, which runs before the step."""
    plain = BEFORE.format(advance="scheduler.step()", flag="run_step = True").replace("    if run_step:\n    ", "")
    plain = plain.replace("        scaler.update", "    scaler.update")
    assert reported(plain, "HS195") == [7]
    assert reported(plain.replace("scheduler.step()", "lr = scheduler.step()"), "HS195") == []


METHODS = """\
import torch
from hydra.utils import instantiate
class Trainer:
    def __init__(self, cfg):
        self.model = instantiate(cfg.model)
        self.optimizer = instantiate(cfg.optimizer, self.model.parameters())
        self.scheduler = instantiate(cfg.lr_scheduler, self.optimizer)
        self.scaler = {scaler}
    def train(self, batch):
        self.optimizer.zero_grad()
        with torch.autocast('cuda'):
            loss = self.model(batch)
        self.backward(loss)
        {advance}
    def backward(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
trainer = Trainer(cfg)
for batch in loader:
    trainer.train(batch)
"""
READ = "if self.scaler.get_scale() >= self.before: self.scheduler.step()"


@pytest.mark.parametrize(
    ("scaler", "advance", "expected"),
    [
        ("instantiate(cfg.amp.scaler)", "self.scheduler.step()", [14]),
        ("instantiate(cfg.grad_scaler)", "self.scheduler.step()", [14]),
        ("hydra.utils.instantiate(cfg.scaler)", "self.scheduler.step()", [14]),
        ("torch.amp.GradScaler('cuda')", "self.scheduler.step()", [14]),
        ("instantiate(cfg.amp.scaler)", READ, []),
        ("instantiate(cfg.amp.wrapped)", "self.scheduler.step()", []),  # another class may count skipped steps
    ],
)
def test_a_scaler_from_a_hydra_configuration_is_a_scaler(scaler, advance, expected):
    """`instantiate(cfg.amp.scaler)` is what its configuration is called."""
    assert reported(METHODS.format(scaler=scaler, advance=advance)) == expected


ATTRIBUTES = """\
import torch
class Trainer:
    def __init__(self):
        self.scheduler, self.scaler = None, torch.amp.GradScaler('cuda')
        self.step_scheduler_metric = None
        self.step_scheduler_after = 'batch'
    def run(self):
        for i, x in enumerate(self.loader):
            with torch.autocast('cuda'):
                loss = self.model(x)
            self.scaler.scale(loss).backward()
            {other}
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if {test}:
                self.scheduler.step()
"""


@pytest.mark.parametrize(
    ("test", "other", "expected"),
    [
        ("self.step_scheduler_after == 'batch'", "pass", [16]),
        ("self.scheduler and self.step_scheduler_metric is None", "pass", [16]),
        ("'warm' in str(self.scheduler).lower()", "pass", [16]),
        ("self.scheduler.update == 'on_batch'", "pass", [16]),
        ("type(self.scheduler) == OneCycle", "pass", [16]),
        ("self.step_scheduler_metric is None", "self.step_scheduler_metric = evaluate(i)", []),
        ("self.steps_done > 10", "self.steps_done += 1", []),
    ],
)
def test_an_attribute_that_only_init_assigns_is_a_setting(test, other, expected):
    """Whatever its name, an attribute that the loop does not assign is the same in every iteration."""
    assert reported(ATTRIBUTES.format(test=test, other=other)) == expected


REMAINDER = """\
import torch
scaler = torch.amp.GradScaler('cuda')
for epoch in range(epochs):
    for i, x in enumerate(loader):
        with torch.autocast('cuda'):
            loss = model(x) / accum
        scaler.scale(loss).backward()
        if (i + 1) % accum == 0:
            scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
            {each}
    if {rest}:
        scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
    {epoch}
"""


@pytest.mark.parametrize("rest", ["len(loader) % accum != 0", "num_batches and num_batches % accum != 0"])
def test_a_schedule_of_epochs_does_not_count_the_last_step_of_each(rest):
    """A step for what remains of the last window is not a reason to call a schedule of epochs one of steps."""
    assert reported(REMAINDER.format(each="pass", rest=rest, epoch="scheduler.step()")) == []
    assert reported(REMAINDER.format(each="scheduler.step()", rest=rest, epoch="pass")) == [10]


@pytest.mark.parametrize(("name", "lines"), [("scheduler", [4]), ("wd_scheduler", []), ("momentum_scheduler", [])])
def test_a_schedule_that_opens_the_iteration_counts_it(name, lines):
    """Before the forward as well, a schedule advances in every iteration; one of the weight decay sets no learning rate."""
    text = f"scaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n    lr = {name}.step()\n"
    text += "    scaler.scale(model(x)).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
    assert reported("import torch\n" + text) == lines


CHOSEN = """\
import torch
scaler = torch.amp.GradScaler('cuda')
for i, x in enumerate(loader):
    with torch.autocast('cuda', dtype={dtype}):
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if {test}:
        {other}
    else:
        scheduler.step()
"""


@pytest.mark.parametrize(
    ("dtype", "test", "other", "expected"),
    [
        ("torch.float16", "averaging(i)", "swa_scheduler.step()", [13]),
        ("torch.float16", "in_warmup(i)", "warmup_scheduler.step()", [11, 13]),
        ("torch.float16", "overflowed(i)", "pass", []),
        ("torch.float16", "has_inf(grads)", "warmup_scheduler.step()", []),
        ("torch.bfloat16", "in_warmup(i)", "warmup_scheduler.step()", []),  # HS120 reports the scaler
    ],
)
def test_one_of_two_schedules_advances_in_every_iteration(dtype, test, other, expected):
    """A condition with a schedule in each branch does not depend on whether the scaler skipped the step."""
    text = CHOSEN.format(dtype=dtype, test=test, other=other)
    assert [f.line for f in findings(text, "HS196")] == expected


def test_an_import_from_accelerate_is_no_accelerator():
    """Its prepared schedules skip with the optimizer; a function of that package, or a scaler next to it, changes nothing."""
    text = CHOSEN.format(dtype="torch.float16", test="averaging(i)", other="swa_scheduler.step()")
    assert reported("from accelerate.utils import set_seed\n" + text) == [14]
    text = "from accelerate import Accelerator\naccelerator = Accelerator()\n" + text
    assert reported(text) == [15]
    assert reported(text.replace("torch.amp.GradScaler('cuda')", "accelerator.scaler")) == []


@pytest.mark.parametrize(("order", "expected"), [(("scheduler", "optimizer"), [7]), (("optimizer", "scheduler"), [])])
def test_the_backward_of_an_accelerator_precedes_the_step_too(order, expected):
    """HS195 reports a scheduler between `accelerator.backward` and the step."""
    text = f"""\
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision='bf16')
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for x in loader:
    optimizer.zero_grad()
    accelerator.backward(model(x))
    {order[0]}.step()
    {order[1]}.step()
"""
    assert reported(text, "HS195") == expected


PER_BATCH = """\
import torch
def epoch(model, loader, optimizer, scaler, scheduler, step_on_batch):
    for x in loader:
        with torch.autocast('cuda', dtype=torch.float16):
            loss = model(x)
        {decided}
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None and step_on_batch:
            scheduler.step()
        optimizer.zero_grad()
step_on_batch = interval == 'step'
scaler = torch.amp.GradScaler('cuda')
epoch(model, loader, optimizer, scaler, scheduler, step_on_batch=step_on_batch)
"""


@pytest.mark.parametrize(("decided", "expected"), [("pass", [11]), ("step_on_batch = ready(loss)", [])])
def test_a_setting_that_chooses_a_schedule_per_batch(decided, expected):
    """A flag named for stepping per batch is a setting, unless the loop assigns it."""
    assert reported(PER_BATCH.format(decided=decided)) == expected


POSITION = """\
import torch
scaler = torch.amp.GradScaler('cuda')
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
for epoch in range(epochs):
    start = epoch * len(loader)
    for i, x in enumerate({batches}):
        optimizer.zero_grad()
        with torch.autocast('cuda'):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step({position})
"""


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        ("start + i", [13]),
        ("epoch * len(loader) + i + 1", [13]),
        ("epoch + i / len(loader)", []),  # a number of epochs, as CosineAnnealingWarmRestarts expects
        ("epoch + 1", []),
        ("i", [13]),  # as under the name `step`
    ],
)
@pytest.mark.parametrize("batches", ["loader", "tqdm(loader)"])
def test_a_position_in_iterations_counts_skipped_steps(batches, position, expected):
    """A schedule that receives the number of the iteration advances with skipped steps; one in epochs does not count them."""
    assert reported(POSITION.format(batches=batches, position=position)) == expected


OWN = """import torch
class WarmupScheduler:
    def __init__(self, optimizer, warmup):
        self.optimizer, self.warmup, self.num_steps = optimizer, warmup, 0
    def step(self):
        {count}
        for group in self.optimizer.param_groups:
            group['lr'] = self.rate()
        {also}
class Trainer:
    def __init__(self, model, optimizer):
        self.scaler = torch.amp.GradScaler('cuda')
        self.scheduler = WarmupScheduler(optimizer, 100)
    def fit(self):
        for x in self.loader:
            self.optimizer.zero_grad()
            with torch.autocast('cuda'):
                loss = self.model(x)
            self.scaler.scale(loss).backward()
{order}
"""
STEP = "            self.scaler.step(self.optimizer)\n            self.scaler.update()\n"
ADVANCE = "            self.scheduler.step()\n"


@pytest.mark.parametrize(
    ("count", "also", "expected"),
    [
        ("self.num_steps += 1", "pass", [22]),
        ("pass", "pass", []),  # it may read a counter of applied steps
        ("self.num_steps += 1", "self.optimizer.step()", []),  # an optimizer with a schedule
    ],
)
def test_a_schedule_of_this_file_counts_skipped_steps_too(count, also, expected):
    """A schedule that a class of the file defines is one, if it counts its own steps and steps no optimizer."""
    assert reported(OWN.format(count=count, also=also, order=STEP + ADVANCE)) == expected


def test_a_schedule_of_this_file_may_set_the_rate_of_the_coming_step():
    """Before the optimizer step, only a schedule of torch is known to skip its first learning rate."""
    text = OWN.format(count="self.num_steps += 1", also="pass", order=ADVANCE + STEP)
    assert reported(text, "HS195") == []


@pytest.mark.parametrize(
    "maker", ["return WarmupScheduler(o, 100)", "schedule = WarmupScheduler(o, 100); return schedule"]
)
def test_a_schedule_of_this_file_that_a_function_creates(maker):
    """The class decides wherever the schedule is created."""
    text = OWN.format(count="self.num_steps += 1", also="pass", order=ADVANCE + STEP)
    text = text.replace("WarmupScheduler(optimizer, 100)\n", "make(optimizer)\n") + f"def make(o):\n    {maker}\n"
    assert reported(text, "HS195") == []
    text = text.replace("class WarmupScheduler", "class Other").replace(
        "WarmupScheduler(o", "torch.optim.lr_scheduler.StepLR(o"
    )
    assert reported(text, "HS195") == [20]


OPENING = """\
import torch
from torch.optim import lr_scheduler
def rate(step):
    return {rate}
def main(model, loader, start):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    {before}
    scheduler = lr_scheduler.{schedule}
    {advance}
    for x in loader:
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [9]),
        ({"schedule": "LinearLR(optimizer, total_iters=10)"}, [9]),
        ({"schedule": "LambdaLR(optimizer, lambda step: 0.9 ** step)"}, [9]),
        ({"schedule": "LambdaLR(optimizer, rate)"}, [9]),
        ({"schedule": "LambdaLR(optimizer, rate)", "rate": "min(1.0, step / 100)"}, []),  # the first rate is 0
        ({"schedule": "LambdaLR(optimizer, rate)", "rate": "min(1.0, float(step) / 100)"}, []),
        ({"schedule": "LambdaLR(optimizer, warmup)"}, []),  # unknown
        ({"advance": "if start: scheduler.step()"}, []),
        ({"advance": "for _ in range(start): scheduler.step()"}, []),
        ({"advance": "scheduler.step(start)"}, []),
        ({"advance": "optimizer.step(); scheduler.step()"}, []),
        ({"before": "optimizer.load_state_dict(torch.load(path))"}, []),
        ({"schedule": "CosineAnnealingLR(optimizer, 100, last_epoch=start)"}, []),
        ({"advance": "pass"}, []),
    ],
)
def test_a_schedule_that_advances_before_the_loop(options, expected):
    """One step right after the creation skips the first learning rate, unless that is 0 or a run is resumed."""
    filled = {
        "rate": "min(1.0, (step + 1) / 100)", "before": "pass", "schedule": "CosineAnnealingLR(optimizer, 100)",
        "advance": "scheduler.step()",
    }  # fmt: skip
    assert reported(OPENING.format(**filled | options), "HS195") == expected


MICRO = """\
import torch
{length}
for i, x in enumerate(loader):
    with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = model(x) / accumulate
    loss.backward()
    if {end}:
        optimizer.step()
        optimizer.zero_grad()
    {advance}
"""


@pytest.mark.parametrize(
    ("length", "end", "advance", "expected"),
    [
        ("accumulate = 8", "(i + 1) % accumulate == 0", "scheduler.step()", [10]),
        ("accumulate = 8", "(i + 1) % accumulate == 0 or i + 1 == len(loader)", "scheduler.step()", [10]),
        ("def run(accumulate: int = 4): pass", "(i + 1) % accumulate == 0", "scheduler.step()", [10]),
        (
            "p.add_argument('--accumulate', type=int, default=4)",
            "(i + 1) % args.accumulate == 0",
            "scheduler.step()",
            [10],
        ),
        (
            "p.add_argument('--accumulate', type=int, default=1)",
            "(i + 1) % args.accumulate == 0",
            "scheduler.step()",
            [],
        ),
        ("from settings import accumulate", "(i + 1) % accumulate == 0", "scheduler.step()", []),  # perhaps 1
        ("accumulate = 8", "i % accumulate == 0", "scheduler.step()", []),  # the first batch ends a window
        ("accumulate = 8", "(i + 1) % accumulate == 0", "if (i + 1) % accumulate == 0: scheduler.step()", []),
        ("accumulate = 8", "(i + 1) % accumulate == 0", "scheduler.step(epoch)", []),
    ],
)
def test_a_schedule_that_advances_on_every_micro_batch(length, end, advance, expected):
    """Before the first optimizer step it has left its first learning rates, if windows are longer than one batch."""
    assert reported(MICRO.format(length=length, end=end, advance=advance), "HS195") == expected


OTHER = """\
import torch
scaler = torch.amp.GradScaler('cuda')
total = epochs * len(loader)
temp_scheduler = {schedule}
for x in loader:
    with torch.autocast('cuda', dtype=torch.float16):
        loss = model(x)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    temp_scheduler.step()
"""


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("TemperatureScheduler(highest=1.5, power=2.0, total_steps=total)", []),
        ("BetaScheduler(1.0, warmup_epochs=total)", []),
        ("TemperatureScheduler(adam, total_steps=total)", [12]),  # any variable may be the optimizer
        ("WarmupScheduler(optimizer=adam, total_steps=total)", [12]),
    ],
)
def test_a_schedule_of_another_number(schedule, expected):
    """A schedule that receives numbers and counts, and no optimizer, does not set the learning rate."""
    assert reported(OTHER.format(schedule=schedule)) == expected


HOOKED = """\
import torch
from lightning.pytorch import LightningModule
class Net(LightningModule):
    def {hook}(self, *args):
        {test}{call}
    def training_step(self, batch, index):
        return self.net(batch).mean()
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        if self.kind == "own":
            self.scheduler = OwnSchedule(optimizer)
        elif self.kind == "cosine":
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        else:
            self.scheduler = None
        return optimizer
"""
COSINE = "if self.scheduler is not None and self.kind == 'cosine': "


@pytest.mark.parametrize(
    ("hook", "test", "call", "expected"),
    [
        ("on_train_epoch_start", COSINE, "self.scheduler.step()", [5]),
        ("on_train_batch_start", "if self.kind == 'cosine': ", "self.scheduler.step()", [5]),
        ("on_train_epoch_end", COSINE, "self.scheduler.step()", []),
        ("on_train_epoch_start", "", "self.scheduler.step()", []),  # perhaps a class of the project
        ("on_train_epoch_start", f"{COSINE[:-2]} and self.current_epoch: ", "self.scheduler.step()", []),
        ("on_train_epoch_start", COSINE, "self.scheduler.step(self.current_epoch)", []),
    ],
)
def test_a_schedule_in_a_hook_of_lightning(hook, test, call, expected):
    """HS195 reports a schedule of torch that advances where the first epoch or batch starts."""
    assert [f.line for f in findings(HOOKED.format(hook=hook, test=test, call=call), "HS195")] == expected


PASSED = """\
import torch
scaler = torch.amp.GradScaler('cuda')
def train(model, optimizer, scheduler):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast('cuda', dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
{calls}
"""


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("train(model, optimizer, None)", []),
        ("train(model, optimizer, None)\ntrain(model, optimizer, schedule)", [12]),
        ("train(model, optimizer, schedule)", [12]),
        ("", [12]),
    ],
)
def test_a_schedule_that_no_call_passes(calls, expected):
    """A parameter that is None in every call advances nothing."""
    assert reported(PASSED.format(calls=calls)) == expected


PREPARED = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator()
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, 100)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
{scaler}
for x in loader:
    optimizer.zero_grad()
    with torch.autocast('cuda', dtype=torch.float16):
        loss = model(x)
    {train}
    scheduler.step()
"""


@pytest.mark.parametrize(
    ("scaler", "train", "expected"),
    [
        (
            "scaler = torch.amp.GradScaler('cuda')",
            "scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()",
            [14],
        ),
        ("", "accelerator.backward(loss)\n    optimizer.step()", []),
    ],
)
def test_an_accelerator_knows_only_the_steps_that_its_own_scaler_skips(scaler, train, expected):
    """A prepared schedule waits for a step that Accelerate skipped, not for one that the script's scaler skipped."""
    assert reported(PREPARED.format(scaler=scaler, train=train)) == expected
