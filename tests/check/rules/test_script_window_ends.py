"""The end of an accumulation window: counters that do not advance, gradients that are cleared there, steps before it."""

import pytest

from check_scripts import findings

COUNTED = """\
import torch
class Training:
    def __init__(self, model, optimizer, accum):
        self.model, self.optimizer, self.accum = model, optimizer, accum
        self.count = 0
    def micro(self, x):
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = self.model(x) / self.accum
        loss.backward()
{during}
    def fit(self, loader):
        count = 0
        for epoch in range(9):
            for i, x in enumerate(loader):
                self.micro(x)
                if {test}:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    {inside}
                {outside}
"""


def lines(text, *codes):
    """The lines of the findings of some rules."""
    return [f.line for f in findings(text, *codes)]


@pytest.mark.parametrize(
    ("test", "inside", "outside", "during", "expected"),
    [
        ("(count + 1) % self.accum == 0", "count += 1", "pass", "", [16]),
        ("count % self.accum == 0", "count = count + 1", "pass", "", [16]),
        ("(self.count + 1) % self.accum == 0", "self.count += 1", "pass", "", [16]),
        ("(count + 1) % self.accum == 0", "pass", "count += 1", "", []),
        ("(i + 1) % self.accum == 0", "count += 1", "pass", "", []),
        ("(count + 1) % self.accum == 0 or i == last", "count += 1", "pass", "", []),
        ("(self.count + 1) % self.accum == 0", "self.count += 1", "pass", "        self.count += 1", []),
        ("(count + 1) % 1 == 0", "count += 1", "pass", "", []),
    ],
)
def test_a_window_whose_counter_only_the_step_advances_never_ends(test, inside, outside, during, expected):
    """HS156 reports the test of a step that stays false, because nothing else changes what it reads."""
    assert lines(COUNTED.format(test=test, inside=inside, outside=outside, during=during), "HS156") == expected


CONTINUED = """\
import torch
updates = 0
while updates < total:
    for x in loader:
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(x) / accum
        loss.backward()
        {first}
        if (updates + 1) % accum != 0:
            continue
        optimizer.step()
        optimizer.zero_grad()
        {last}
"""


def test_a_counter_behind_continue_never_advances():
    """HS156 also reads a test that skips the rest of the iteration."""
    assert lines(CONTINUED.format(first="pass", last="updates += 1"), "HS156") == [9]
    assert not findings(CONTINUED.format(first="updates += 1", last="pass"), "HS156")


AT_END = """\
import torch
scaler = torch.amp.GradScaler('cuda')
for i, x in enumerate(loader):
    if {first}:
        {owner}.zero_grad()
    with torch.autocast('cuda', dtype=torch.float16):
        loss = model(x) / accum
    scaler.scale(loss).backward()
    {between}
    if (i + 1) % accum == 0:
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("first", "owner", "between", "expected"),
    [
        ("(i + 1) % accum == 0", "optimizer", "pass", [5]),
        ("(i + 1) % accum == 0", "model", "pass", [5]),
        ("i % accum == 0", "optimizer", "pass", []),
        ("(i + 1) % accum == 0", "discriminator_optimizer", "pass", []),
        ("(i + 1) % accum == 0", "optimizer", "i += 1", []),
    ],
)
def test_gradients_cleared_in_the_iteration_of_the_step_are_lost(first, owner, between, expected):
    """HS181 reports a zero_grad under the condition of the step, before the backward; at the start of a window it is right."""
    assert lines(AT_END.format(first=first, owner=owner, between=between), "HS181") == expected


def test_a_window_cleared_after_each_branch_is_right():
    """HS181 accepts a zero_grad after the step of one branch, with the backward of the other branch below."""
    step = "if (i + 1) % accum == 0:\n            {}\n            optimizer.zero_grad()\n"
    text = (
        "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor i, x in enumerate(loader):\n"
        "    with torch.autocast('cuda', dtype=torch.float16): loss = model(x) / accum\n"
        f"    if amp and ready:\n        scaler.scale(loss).backward()\n        {step.format('scaler.step(optimizer); scaler.update()')}"
        f"    else:\n        loss.backward()\n        {step.format('optimizer.step()')}"
    )
    assert not findings(text, "HS181")


EACH = """\
import torch
for epoch in range(9):
    optimizer.zero_grad()
    for micro in range(accumulation_steps):
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(next(data))
        if {test}:
            loss.backward()
        {step}
"""


@pytest.mark.parametrize("test", ["loss is not None", "torch.isfinite(loss)"])
def test_a_step_on_every_micro_batch_with_a_backward_on_some(test):
    """HS183 reports the step of each micro-batch, also where some of them have no backward."""
    assert lines(EACH.format(test=test, step="optimizer.step()"), "HS183") == [9]
    last = "if micro == accumulation_steps - 1: optimizer.step()"
    assert not findings(EACH.format(test=test, step=last), "HS183")


RESET = """\
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps={steps}, mixed_precision='bf16')
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(9):
    for x in loader:
        {first}
        with accelerator.accumulate(model):
            accelerator.backward(model(x))
            optimizer.step()
            optimizer.zero_grad()
    {last}
"""


@pytest.mark.parametrize(
    ("steps", "first", "last", "expected"),
    [
        ("4", "accelerator.free_memory()", "pass", [6]),
        ("cfg.steps", "accelerator.clear()", "pass", [6]),
        ("1", "accelerator.free_memory()", "pass", []),
        ("4", "if broken: accelerator.free_memory()", "pass", []),
        ("4", "cache.clear()", "pass", []),
        ("4", "pass", "accelerator.free_memory()", []),
    ],
)
def test_the_counter_of_accumulate_is_reset_in_each_iteration(steps, first, last, expected):
    """HS178 reports free_memory in the loop of `accumulate`, which counts from 0 again."""
    assert lines(RESET.format(steps=steps, first=first, last=last), "HS178") == expected


LOGGED = """\
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision='fp16')
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
def step(x):
    accelerator.backward(model(x))
    {first}
    optimizer.step()
    optimizer.zero_grad()
for i, x in enumerate(loader):
    step(x)
    if i % 10 == 0:
        {last}
"""
CLIP = "norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)"


def test_a_norm_after_the_gradients_were_cleared_is_zero():
    """HS109 reports a clip after step and zero_grad, also one for the log."""
    assert lines(LOGGED.format(first="pass", last=CLIP), "HS109") == [12]
    assert not findings(LOGGED.format(first=CLIP, last="print(norm)"), "HS109")


TWO = """\
import torch
scaler = torch.amp.GradScaler('cuda')
optimizer = build_optimizer(model, lr)
for x in loader:
    with torch.autocast('cuda', dtype=torch.float16):
        loss = critic(model(x))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    {also}
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.step(critic.optim)
    scaler.update()
    optimizer.zero_grad()
    critic.optim.zero_grad()
"""


def test_the_gradients_of_another_optimizer_stay_scaled():
    """HS104 knows the optimizer of a function that receives the model, and one that is the model's attribute."""
    assert lines(TWO.format(also="pass"), "HS104") == [11]
    assert not findings(TWO.format(also="scaler.unscale_(critic.optim)"), "HS104")


STARTED_AGAIN = """\
import torch
scaler = torch.amp.GradScaler('cuda')
count = 0
for x in loader:
    with torch.autocast('cuda', dtype=torch.float16):
        loss = model(x){divided}
    {count}
    scaler.scale(loss).backward()
    if count {test} cfg.per_update:
        {again}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("divided", "count", "test", "again", "expected"),
    [
        ("", "count += 1", "==", "count = 0", [8]),
        ("", "count += 1", ">=", "count = 0", [8]),
        (" / cfg.per_update", "count += 1", "==", "count = 0", []),
        ("", "count += 1", "==", "pass", []),  # true once
        ("", "count = len(x)", "==", "count = 0", []),
        ("", "count += 1", ">", "count = 0", []),
    ],
)
def test_a_counter_that_starts_again_ends_a_window(divided, count, test, again, expected):
    """HS180 knows the window by what the counter does, whatever its length is called."""
    text = STARTED_AGAIN.format(divided=divided, count=count, test=test, again=again)
    assert lines(text, "HS180") == expected


STUCK = """\
import torch
count = 0
for epoch in range(9):
    for i, x in enumerate(loader):
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(x)
        {window}
        (loss / window).backward()
        if (count + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()
            {inside}
        {outside}
"""


@pytest.mark.parametrize(
    ("window", "inside", "outside", "expected"),
    [
        ("window = args.accumulation_steps", "count += 1", "pass", [9]),
        ("window = args.accumulation_steps", "pass", "count += 1", []),
        ("window = windows[i]", "count += 1", "pass", []),
        ("window = x.window", "count += 1", "pass", []),
        ("window = args.accumulation_steps; count = i", "count += 1", "pass", []),
        ("window = args.accumulation_steps; count = args.start", "count += 1", "pass", []),
    ],
)
def test_a_window_whose_length_is_read_in_the_loop_never_ends(window, inside, outside, expected):
    """HS156: the length is the same in each pass if it copies a setting, so that only the counter could end the window."""
    assert lines(STUCK.format(window=window, inside=inside, outside=outside), "HS156") == expected
