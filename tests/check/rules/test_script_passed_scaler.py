"""HS101, HS104, HS108, HS109, HS114, HS115, HS118, HS125, HS156: a scaler that is passed in, a function per batch, the micro-batches left over."""

import pytest

from check_scripts import findings, reported

EPOCH = """\
import torch

def train_epoch(net, loader, opt, criterion, grad_scaler):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(net(x), y)
        if not torch.isfinite(loss):
{skip}            continue
        grad_scaler.scale(loss).backward()
        grad_scaler.step(opt)
        grad_scaler.update()
"""
NORMS = """\
import torch

def train_epoch(net, loader, opt, criterion, scaler):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(net(x), y)
        if torch.isnan(loss):
            {skip}
            continue
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if torch.isinf(norm) or torch.isnan(norm):
            scaler.update()
            continue
        scaler.step(opt)
        scaler.update()
"""
COPIED = """\
import torch

def run(net, loader, criterion, scaler{optimizer}):
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(net(x), y)
        scaler.scale(loss).backward()
{step}        scaler.update()

scaler = torch.amp.GradScaler("cuda")
"""
SINGLE = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    opt.zero_grad()
    loss = criterion(net(x), y)
    {backward}
    {step}
    scaler.update()
"""
PER_BATCH = """\
import torch

class Learner:
    def __init__(self, net, opt):
        self.net, self.opt = net, opt
        self.scaler = torch.amp.GradScaler("cuda")

    def train_batch(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.net(x, y)
{order}
"""
LINES = {
    "backward": "        self.scaler.scale(loss).backward()",
    "unscale": "        self.scaler.unscale_(self.opt)",
    "clip": "        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)",
    "step": "        self.scaler.step(self.opt)",
    "update": "        self.scaler.update()",
}
TAIL = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for epoch in range(3):
    for i, x in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(x) / 8
        scaler.scale(loss).backward()
        if (i + 1) % 8 == 0:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    if (i + 1) % 8:
        {first}
        {second}
        scaler.update()
"""
LEFT_OVER = """\
import torch

def train_epoch(net, loader, opt, scaler, n):
    for i, x in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(x) / n
        scaler.scale(loss).backward()
        if (i + 1) % n == 0:
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    if len(loader) % n != 0:
{unscale}        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
{update}        opt.zero_grad()
"""
EARLY = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(x)
    {first}
    {second}
    scaler.update()
"""
CLOSURE = """\
import torch

def train(net, loader, opt, criterion, scaler, {parameter}):
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(net(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()

        def evaluate():
            return criterion(net(x), y)

        scaler.step(opt{argument})
        scaler.update()
"""


@pytest.mark.parametrize(("skip", "expected"), [("            grad_scaler.update()\n", ["HS115"]), ("", [])])
def test_a_scaler_that_is_passed_in_needs_a_check_before_its_update(skip, expected):
    """The loop calls scale, step and update, so the parameter is a GradScaler whichever file creates it."""
    assert [f.code for f in findings(EPOCH.format(skip=skip), "HS115")] == expected


def test_a_scaler_of_a_project_class_may_be_updated_at_any_time():
    """A scaler that this file creates from a class of its own has other rules."""
    text = EPOCH.format(skip="            grad_scaler.update()\n") + "\ngrad_scaler = SafeScaler(net)\n"
    assert not findings(text, "HS115")


@pytest.mark.parametrize(("skip", "expected"), [("scaler.update()", [9]), ("print(loss)", [])])
def test_two_updates_use_a_check_between_them(skip, expected):
    """`a or b` and its opposite, neither `a` nor `b`, leave no check for the update of a skipped batch."""
    assert [f.line for f in findings(NORMS.format(skip=skip), "HS115")] == expected


@pytest.mark.parametrize(
    ("optimizer", "step", "expected"),
    [
        ("", "", ["HS115"]),
        (", opt", "        scaler.step(opt)\n", []),
        (", opt", "        apply_gradients(opt)\n", []),
    ],
)
def test_an_update_in_a_loop_without_a_step_raises(optimizer, step, expected):
    """A validation loop copied from training scales its loss and updates the scaler, but steps nothing."""
    text = COPIED.format(optimizer=optimizer, step=step)
    assert [f.code for f in findings(text, "HS115")] == expected


@pytest.mark.parametrize(
    ("backward", "step", "expected"),
    [
        ("loss.backward()", "opt.step()", ["HS115"]),
        ("scaler.scale(loss).backward()", "scaler.scale(opt)", ["HS115"]),
        ("scaler.scale(loss).backward()", "finish(opt)", []),
        ("scaler.scale(loss).backward()", "scaler.step(opt)", []),
    ],
)
def test_an_update_needs_a_step_of_the_same_scaler(backward, step, expected):
    """A step of the optimizer alone checks nothing; a function that receives the optimizer may."""
    text = SINGLE.format(backward=backward, step=step)
    assert [f.code for f in findings(text, "HS115")] == expected


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("backward unscale clip step update", set()),
        ("backward update step", {"HS108"}),
        ("backward step step update", {"HS114"}),
        ("backward step update update", {"HS114"}),
        ("backward step clip update", {"HS109"}),
        ("clip backward step update", {"HS118"}),
    ],
)
def test_a_method_for_one_batch_is_checked_like_a_loop(order, expected):
    """The loop over batches may be in another file."""
    text = PER_BATCH.format(order="\n".join(LINES[name] for name in order.split()))
    assert reported(text) & {"HS108", "HS109", "HS114", "HS118"} == expected


@pytest.mark.parametrize("first", ["opt.zero_grad()", "scaler.step(opt)"])
def test_the_last_window_is_cleared_after_its_step(first):
    """A step after zero_grad finds no gradients of the micro-batches left over."""
    second = "scaler.step(opt)" if first == "opt.zero_grad()" else "opt.zero_grad()"
    text = TAIL.format(first=first, second=second)
    assert [f.line for f in findings(text, "HS156")] == ([13] if first == "opt.zero_grad()" else [])


@pytest.mark.parametrize(
    ("unscale", "update", "expected"),
    [
        ("        scaler.unscale_(opt)\n", "        scaler.update()\n", set()),
        ("", "        scaler.update()\n", {"HS104"}),
        ("        scaler.unscale_(opt)\n", "", {"HS101"}),
    ],
)
def test_the_last_window_needs_the_same_calls_as_the_others(unscale, update, expected):
    """What the loop does at the end of its windows is not done for the micro-batches left over."""
    text = LEFT_OVER.format(unscale=unscale, update=update)
    assert reported(text) & {"HS101", "HS104", "HS105"} == expected


@pytest.mark.parametrize("first", ["scaler.step(opt)", "scaler.scale(loss).backward()"])
def test_a_step_before_the_backward_finds_nothing(first):
    """The gradients of the last batch are cleared, those of this one not computed yet."""
    second = "scaler.scale(loss).backward()" if first == "scaler.step(opt)" else "scaler.step(opt)"
    text = EARLY.format(first=first, second=second)
    assert [f.line for f in findings(text, "HS156")] == ([4] if first == "scaler.step(opt)" else [])


@pytest.mark.parametrize(
    ("parameter", "argument", "expected"),
    [
        ("args", ", closure=evaluate", ["HS125"]),
        ("args", ", evaluate", ["HS125"]),
        ("evaluate_later", ", evaluate_later", []),
        ("args", "", []),
    ],
)
def test_a_closure_is_known_by_the_parameter_or_its_definition(parameter, argument, expected):
    """The scaler is passed in, and the closure has any name."""
    text = CLOSURE.format(parameter=parameter, argument=argument)
    assert [f.code for f in findings(text, "HS125")] == expected
