"""HS102, HS112, HS115, HS123: a scaler that is passed around and does nothing, and paths that leave an iteration."""

import pytest

from check_scripts import findings

PASSED = """\
import torch
from torch.amp import GradScaler
from files import save_checkpoint, {imported}

def train_epoch(loader, net, opt, criterion, scaler):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(net(x), y)
{backward}

def main(net, loader, opt, criterion):
    scaler = {created}
    for epoch in range(9):
        train_epoch(loader, net, opt, criterion, scaler)
        save_checkpoint(net, opt, scaler, epoch)
"""
PLAIN = "        loss.backward()\n        opt.step()"


@pytest.mark.parametrize("created", ['GradScaler("cuda")', "None", "make_scaler()"])
def test_a_scaler_that_is_passed_on_and_saved_scales_nothing(created):
    """HS123 does not take the parameter `scaler` of a loop for a use of the scaler."""
    script = PASSED.format(imported="make_scaler", created=created, backward=PLAIN)
    assert len(findings(script, "HS123")) == 1


@pytest.mark.parametrize(
    "backward",
    [
        "        scaler.scale(loss).backward()\n        scaler.step(opt)\n        scaler.update()",
        "        scale_loss(loss, scaler)\n        loss.backward()\n        opt.step()",
        "        loss = scale_loss(loss)\n        loss.backward()\n        opt.step()",
        "        scaler.prepare(loss)\n        loss.backward()\n        opt.step()",
    ],
    ids=["scale", "passed", "by name", "method"],
)
def test_a_scaler_that_may_act_on_the_loss_is_one(backward):
    """HS123 is silent where the scaler, or a function named after one, may scale the loss."""
    script = PASSED.format(imported="scale_loss", created='GradScaler("cuda")', backward=backward)
    assert not findings(script, "HS123")


ANCHORS = """\
import torch
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = model(x)
        loss = criterion(out[0], y, {passed}) + criterion(out[1], y, {passed})
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("passed", "is_reported"), [("scaled_anchors", True), ("loss_scale", False)])
def test_only_a_scale_of_the_loss_scales_it(passed, is_reported):
    """HS123: what a loss function receives may be scaled inputs, which leave the loss as it is."""
    assert bool(findings(ANCHORS.format(passed=passed), "HS123")) == is_reported


LEAVING = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    {scaled}.backward()
    try:
        check(loss)
        if is_bad(model):
            optimizer.zero_grad()
            continue
    except RuntimeError:
        {handler}
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def test_a_branch_that_leaves_a_try_is_not_on_the_path_after_it():
    """HS102: gradients cleared before a `continue` inside `try` are not those of the step after it."""
    assert findings(LEAVING.format(scaled="loss", handler="continue"), "HS102")


@pytest.mark.parametrize(("scaled", "handler"), [("scaler.scale(loss)", "continue"), ("loss", "optimizer.zero_grad()")])
def test_the_path_after_a_try_with_a_scaled_or_cleared_gradient_is_right(scaled, handler):
    """HS102 is silent for a scaled loss, and where the handler continues with the step."""
    assert not findings(LEAVING.format(scaled=scaled, handler=handler), "HS102")


SKIPPING = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    if {test}:
        {before}continue
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize("test", ["not is_good(model)", "dropped", "len(x) < 2"])
def test_any_test_may_skip_the_update(test):
    """HS112: whatever a `continue` after `unscale_` depends on, the next `unscale_` raises."""
    assert findings(SKIPPING.format(test=test, before=""), "HS112")


@pytest.mark.parametrize(
    ("test", "before"),
    [("dropped", "scaler.update()\n        "), ("not use_amp", ""), ("(i + 1) % 4", "")],
    ids=["updated", "without mixed precision", "a window, of HS106"],
)
def test_a_skip_that_updates_or_is_about_something_else_is_silent(test, before):
    """HS112 is silent for an update before the `continue`, without mixed precision, and for micro-batches."""
    assert not findings(SKIPPING.format(test=test, before=before), "HS112")


UPDATING = """\
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    scheduler = CosineAnnealingLR(optimizer, 100)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        {step}
        scaler.update()
        scheduler.step()
        log(optimizer.param_groups[0]["lr"])
"""


@pytest.mark.parametrize(
    ("step", "is_reported"), [("pass", True), ("scaler.step(optimizer)", False), ("advance(optimizer)", False)]
)
def test_a_schedule_is_no_step_of_the_optimizer(step, is_reported):
    """HS115: creating and advancing a schedule, and logging the learning rate, check no gradients."""
    assert bool(findings(UPDATING.format(step=step), "HS115")) == is_reported


SWITCHED = """\
import torch
USE_AMP = True
def train(model, loader, optimizer, args, use_amp, cfg):
    {create}
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled={enabled}):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("create", "enabled", "expected"),
    [
        ('scaler = torch.amp.GradScaler("cuda")', "args.use_amp", [4]),
        ('scaler = torch.amp.GradScaler("cuda", enabled=True)', "bool(args.use_amp)", [4]),
        ('scaler = torch.amp.GradScaler("cuda")', "use_amp", [4]),
        ('scaler = torch.amp.GradScaler("cuda")', "cfg['train']['amp']", [4]),
        ('scaler = torch.amp.GradScaler("cuda")', "cfg.get('amp', True)", [4]),
        ('amp = bool(cfg.amp)\n    scaler = torch.amp.GradScaler("cuda")', "amp", [5]),
        ('amp = torch.cuda.is_available()\n    scaler = torch.amp.GradScaler("cuda")', "amp", []),
        ('args.amp = True\n    scaler = torch.amp.GradScaler("cuda")', "args.amp", []),
        ('scaler = torch.amp.GradScaler("cuda")', "USE_AMP", []),
        ('scaler = torch.amp.GradScaler("cuda", enabled=use_amp)', "cfg.amp", []),
        ('scaler = torch.amp.GradScaler("cuda", enabled=args.use_amp)', "args.use_amp", []),
        ('scaler = torch.amp.GradScaler("cuda")', "args.device == 'cuda'", []),
        ('scaler = torch.amp.GradScaler("cuda")', "args.on_gpu", []),
        ('scaler = torch.amp.GradScaler("cuda")', "True", []),
    ],
)
def test_an_option_switches_the_region_and_not_the_scaler(create, enabled, expected):
    """HS134 reports the scaler that stays enabled where everything runs in float32."""
    assert [f.line for f in findings(SWITCHED.format(create=create, enabled=enabled), "HS134")] == expected


PLANNED = """\
import torch
from plans import Plan, make_plan
FORMATS = {{"fp16": torch.float16, "bf16": torch.bfloat16}}
def plan_for(gpu, name="bf16"):
    return {plan}
class Trainer:
    def __init__(self, model, gpu):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters())
        self.plan = plan_for(gpu)
        if self.plan.{flag}:
            if self.device.type in ("cuda", "cpu"):
                self.scaler = torch.amp.GradScaler("cuda")
            else:
                self.scaler = None
        else:
            self.scaler = None
    def step(self, x):
        with torch.autocast("cuda", dtype=self.plan.{name}):
            loss = self.model(x)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""


@pytest.mark.parametrize(
    ("plan", "flag", "name", "expected"),
    [
        ("Plan(gpu, amp_dtype=FORMATS[name])", "mixed_precision", "amp_dtype", [12]),
        ("Plan(gpu, amp_dtype=torch.float16)", "mixed_precision", "amp_dtype", []),
        (
            "make_plan(gpu, amp_dtype=FORMATS[name])",
            "mixed_precision",
            "amp_dtype",
            [],
        ),  # what it makes of it is not shown
        ("Plan(gpu, amp_dtype=FORMATS[name])", "fp16", "amp_dtype", []),
        ("Plan(gpu, amp_dtype=FORMATS[name])", "use_scaler", "amp_dtype", []),
        ("Plan(gpu, dtype=FORMATS[name])", "mixed_precision", "dtype", []),  # of the weights, or of anything
    ],
)
def test_a_dtype_that_the_file_gives_to_an_object_of_another(plan, flag, name, expected):
    """HS120 reads the keyword with which a file creates the object whose attribute the region uses; the scaler may be None without it."""
    text = PLANNED.format(plan=plan, flag=flag, name=name)
    assert [f.line for f in findings(text, "HS120")] == expected
