"""HS156, HS183: gradients that are cleared before their step, or never, and steps on every micro-batch of a window."""

import pytest

from check_scripts import findings

LOOP = """\
import torch
optimizer = torch.optim.{optimizer}(model.parameters())
scaler = torch.amp.GradScaler('cuda')
for x in loader:
    {first}
    with torch.autocast('cuda', dtype=torch.float16):
        loss = model(x)
    {backward}
    {between}
    {step}
    scaler.update()
"""
PARTS = {
    "optimizer": "AdamW",
    "first": "pass",
    "backward": "scaler.scale(loss).backward()",
    "between": "pass",
    "step": "scaler.step(optimizer)",
}


def lines(text, code):
    """The lines at which a rule reports something, with the severity."""
    return [(f.line, f.severity) for f in findings(text, code)]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"between": "optimizer.zero_grad()"}, [(9, "error")]),
        ({"between": "optimizer.zero_grad(set_to_none=True)"}, [(9, "error")]),
        ({"first": "optimizer.zero_grad()", "between": "optimizer.zero_grad()"}, [(9, "error")]),
        ({"between": "other.zero_grad()", "first": "optimizer.zero_grad()"}, []),
        ({"between": "if i % 4 == 0: optimizer.zero_grad()"}, []),
        ({"between": "norm = p.grad.norm(); optimizer.zero_grad()"}, []),
        ({"between": "optimizer.zero_grad()\n    put_gradients_back(model)"}, []),
        ({"between": "saved = flat_grads(model)\n    optimizer.zero_grad()"}, []),
        ({"between": "clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.zero_grad()"}, [(10, "error")]),
        ({"between": "optimizer.zero_grad(); loss2.backward()"}, []),
        ({"step": "scaler.step(optimizer); optimizer.zero_grad()"}, []),
        ({}, [(10, "warning")]),
        ({"first": "optimizer.zero_grad()"}, []),
        ({"first": "model.zero_grad()"}, []),
        ({"first": "for p in model.parameters(): p.grad = None"}, []),
        ({"first": "clear_gradients(model)"}, []),
        ({"step": "optimizer_step(scaler, optimizer)"}, []),
        ({"step": "scaler.step(own)"}, []),
        ({"step": "if torch.isfinite(loss): scaler.step(optimizer)"}, []),
    ],
)
def test_gradients_are_cleared_before_their_step_or_never(parts, expected):
    """HS156 reports a zero_grad between backward and step, and a library's optimizer in a script that never clears."""
    assert lines(LOOP.format(**(PARTS | parts)), "HS156") == expected


WINDOW = """\
import torch
for i, x in enumerate(loader):
    with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = model(x) / args.accumulation_steps
    loss.backward()
    {always}
    if (i + 1) % {length} == 0:
        {last}
        {clear}
"""


@pytest.mark.parametrize(
    ("always", "last", "length", "clear", "expected"),
    [
        ("optimizer.step()", "pass", "args.accumulation_steps", "optimizer.zero_grad()", [(6, "warning")]),
        ("optimizer.step()", "pass", "args.accumulation_steps", "model.zero_grad()", [(6, "warning")]),
        ("pass", "optimizer.step()", "args.accumulation_steps", "optimizer.zero_grad()", []),
        ("optimizer.step()", "pass", "args.log_every", "optimizer.zero_grad()", []),
        ("optimizer.step(); optimizer.zero_grad()", "pass", "args.accumulation_steps", "optimizer.zero_grad()", []),
        ("disc.step()", "optimizer.step()", "args.accumulation_steps", "optimizer.zero_grad()", []),
        ("if ready(i): optimizer.step()", "pass", "args.accumulation_steps", "optimizer.zero_grad()", []),
    ],
)
def test_a_step_on_every_micro_batch_of_a_window_is_reported(always, last, length, clear, expected):
    """HS183 reports a step that does not wait for the end of the window at which the gradients are cleared."""
    assert lines(WINDOW.format(always=always, last=last, length=length, clear=clear), "HS183") == expected


INNER = """\
import torch
for step in range(args.steps):
    optimizer.zero_grad()
    for micro in range({length}):
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(next(batches)) / {length}
        loss.backward()
{indent}    optimizer.step()
"""


@pytest.mark.parametrize(
    ("length", "indent", "expected"),
    [("grad_accum", "    ", [(8, "warning")]), ("grad_accum", "", []), ("epochs", "    ", [])],
)
def test_a_step_inside_the_loop_over_micro_batches_is_reported(length, indent, expected):
    """HS183 reports a step in the body of `for micro in range(n)` if the gradients are cleared before that loop."""
    assert lines(INNER.format(length=length, indent=indent), "HS183") == expected


EPOCH = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision='bf16')
def train(model, loader, optimizer):
    for i, x in enumerate(loader):
        {first}
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(x) / accum
        {backward}
        if (i + 1) % accum == 0:
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("first", "backward", "expected"),
    [
        ("pass", "loss.backward()", [(11, "warning")]),
        ("pass", "accelerator.backward(loss)", [(11, "warning")]),
        ("if i % accum == 0: optimizer.zero_grad()", "loss.backward()", []),
        ("optimizer = Own(model)", "loss.backward()", []),  # its step may clear them
        ("callbacks.before_batch()", "loss.backward()", []),
    ],
)
def test_an_optimizer_that_is_a_parameter_is_never_cleared(first, backward, expected):
    """HS156 reports a loop that gets its optimizer from a caller, also with a window or an Accelerator."""
    assert lines(EPOCH.format(first=first, backward=backward), "HS156") == expected


BUILT = """\
import torch
optimizer = None
optimizer = {build}
for x in loader:
    with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = model(x)
    loss.backward()
    optimizer.step()
    {end}
"""


@pytest.mark.parametrize(
    ("build", "end", "expected"),
    [
        ("model.configure_optimizers(1e-4)", "pass", [(8, "warning")]),
        ("create_optimizer(model)", "pass", [(8, "warning")]),
        ("create_optimizer(model)", "optimizer.zero_grad()", []),
        ("ClearingOptimizer(model)", "pass", []),  # of another file
        ("wrap(model)", "pass", []),
    ],
)
def test_an_optimizer_that_a_function_builds_is_never_cleared(build, end, expected):
    """A function named for an optimizer returns one whose step leaves the gradients; of an unknown object nothing is known."""
    assert lines(BUILT.format(build=build, end=end), "HS156") == expected


COUNTER = """\
import torch
last = -1
for i, x in enumerate(loader):
    with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = model(x) / accumulate
    loss.backward()
    {always}
    if i - last >= accumulate:
        {ends}
        optimizer.zero_grad()
        last = i
"""


@pytest.mark.parametrize(("always", "ends", "expected"), [("step", "pass", [(7, "warning")]), ("pass", "step", [])])
def test_a_step_on_every_micro_batch_of_a_window_by_a_counter(always, ends, expected):
    """The window that clears may end when a counter has reached its length."""
    parts = {"step": "optimizer.step()", "pass": "pass"}
    assert lines(COUNTER.format(always=parts[always], ends=parts[ends]), "HS183") == expected


SKIPPED = """\
import torch
scaler = torch.amp.GradScaler('cuda')
for i, x in enumerate(loader):
    {first}
    with torch.autocast('cuda', dtype=torch.float16):
        loss = model(x) / accumulate
    if torch.isnan(loss):
        continue
    scaler.scale(loss).backward()
    if (i + 1) % accumulate == 0:
        scaler.step(optimizer)
        scaler.update()
        {last}
"""


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        ("optimizer.zero_grad()", "pass", [(4, "warning")]),
        ("pass", "optimizer.zero_grad()", []),
        ("if i % accumulate == 0: optimizer.zero_grad()", "pass", []),
    ],
)
def test_a_batch_that_is_skipped_after_the_gradients_were_cleared(first, last, expected):
    """What runs at the start of every iteration clears before each backward, whatever that depends on."""
    assert lines(SKIPPED.format(first=first, last=last), "HS181") == expected


CALLED = """\
import torch
class Trainer:
    def train(self):
        for step, x in enumerate(self.loader):
            loss = self.run(x, {arguments})
            if (step + 1) % self.accumulate == 0:
                self.optimizer.step()
                {after}
    def run(self, x, accumulate=False, is_last=True):
        {clear}
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = self.model(x) / self.accumulate
        loss.backward()
        return loss
"""
LAST = "is_last=(step + 1) % self.accumulate == 0"
CLEAR = "if not accumulate or is_last:\n            self.optimizer.zero_grad()"


@pytest.mark.parametrize(
    ("arguments", "clear", "after", "expected"),
    [
        (f"accumulate=True, {LAST}", CLEAR, "self.optimizer.zero_grad()", [11]),
        (LAST, "if is_last:\n            self.optimizer.zero_grad()", "pass", [11]),
        (f"accumulate=True, {LAST.replace('(step + 1)', 'step')}", CLEAR, "pass", []),  # at the start of a window
        (f"accumulate=self.several, {LAST}", CLEAR, "self.optimizer.zero_grad()", []),
        (f"accumulate=True, {LAST}", "pass", "self.optimizer.zero_grad()", []),
    ],
)
def test_gradients_that_a_called_function_clears_at_the_end_of_a_window(arguments, clear, after, expected):
    """A condition is reduced by the literals of the call, and the line of the call decides what comes between."""
    text = CALLED.format(arguments=arguments, clear=clear, after=after)
    assert [f.line for f in findings(text, "HS181")] == expected


def test_a_counter_that_the_called_function_advances():
    """The condition of the step is then that of another iteration."""
    counted = CALLED.replace("(step + 1) %", "self.count %").replace(
        "return loss", "self.count += 1\n        return loss"
    )
    clear = "if self.count % self.accumulate == 0:\n            self.optimizer.zero_grad()"
    assert findings(counted.format(arguments="True", clear=clear, after="pass"), "HS181") == []


SYNCHRONISED = """\
import torch

def train(model, optimizer, other, loader, accumulation_steps):
    for i, x in enumerate(loader):
        if (i + 1) % accumulation_steps != 0:
            with model.no_sync():
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = model(x) / accumulation_steps
                {first}
        else:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x) / accumulation_steps
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if cfg.both:
                other.step()
                other.zero_grad()
"""


def test_the_other_micro_batches_may_have_a_backward_of_their_own():
    """Both branches run a backward, and only the last one synchronises, steps and clears."""
    assert findings(SYNCHRONISED.format(first="loss.backward()"), "HS181") == []


BRANCHES = """\
import torch
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler('cuda')
for x in loader:
    with torch.autocast('cuda', dtype=torch.float16, enabled=args.amp):
        loss = model(x)
    if args.amp:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
        {clear}
"""


@pytest.mark.parametrize(
    ("clear", "start"), [("optimizer.zero_grad()", "only the other branch clears"), ("pass", "no line clears")]
)
def test_the_message_tells_whether_another_branch_clears(clear, start):
    """HS156 names the branch where the line is missing, or the file."""
    first = findings(BRANCHES.format(clear=clear), "HS156")[0]
    assert first.line == 9
    assert first.message.startswith(start)


HELD_BACK = """\
import torch
from accelerate import Accelerator
class Base:
    def __init__(self, config, accumulate=False):
        self.accelerator = Accelerator(mixed_precision="fp16")
        self.{flag} = {value}
        self.scaler = torch.amp.GradScaler("cuda", enabled=False)

class Trainer({base}):
    def fit(self, loader):
        for i, x in enumerate(loader):
            {start}
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = self.model(x)
            {backward}
            if not self.{flag}:
                self.optimizer.step()
            {end}
"""


def held_back(**options):
    defaults = {
        "flag": "accumulate", "value": "accumulate", "base": "Base", "start": "self.optimizer.zero_grad()",
        "backward": "loss.backward()", "end": "pass",
    }  # fmt: skip
    return [f.line for f in findings(HELD_BACK.format(**defaults | options), "HS181")]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"backward": "self.accelerator.backward(loss)"},
        {"value": "False"},
        {"value": "config.accumulate_grads", "flag": "is_accumulating"},
        {
            "base": "trainers.Base",
            "flag": "gradient_accumulation",
            "start": "self.optimizer.zero_grad(set_to_none=True)",
        },
        {"start": "self.model.zero_grad()"},
    ],
)
def test_a_step_that_a_flag_for_accumulation_holds_back(options):
    """What accumulates while the flag is true is cleared in the next iteration, wherever the flag is set."""
    assert held_back(**options) == [12]


@pytest.mark.parametrize(
    "options",
    [
        {"flag": "dry_run", "value": "config.dry_run"},
        {"flag": "accumulation_steps", "value": "4"},
        {"flag": "accumulate", "value": "4"},
        {"start": "if not self.accumulate: self.optimizer.zero_grad()"},
        {"start": "pass", "end": "self.accumulate or self.optimizer.zero_grad()"},
        {"backward": "if not self.accumulate: loss.backward()"},
        {"end": "if self.accumulate and i % 4 == 3: self.optimizer.step()"},
        {"end": "if self.accumulate: self.collect([p.grad for p in self.model.parameters()])"},
    ],
)
def test_a_flag_that_holds_back_more_or_nothing_that_accumulates(options):
    """Another flag, a number, gradients that wait as the step does, or that something else uses."""
    assert held_back(**options) == []


TURNS = """\
import torch
accum_steps, scaler = 4, torch.amp.GradScaler("cuda")
opt_d, opt_g = torch.optim.Adam(discriminator.parameters()), torch.optim.Adam(generator.parameters())
for i, x in enumerate(loader):
    scaler.scale(loss_d(discriminator(x)) / accum_steps).backward()
    if (i + 1) % accum_steps == 0:
        scaler.step(opt_d)
        opt_d.zero_grad()
    {start}
    scaler.scale(loss_g(generator(x)) / accum_steps).backward()
    if (i + 1) % accum_steps == 0:
        scaler.step(opt_g)
        scaler.update()
        {end}
"""


@pytest.mark.parametrize(
    ("start", "end", "lines"), [("opt_g.zero_grad()", "pass", [9]), ("pass", "opt_g.zero_grad()", [])]
)
def test_an_optimizer_that_is_cleared_between_the_step_of_another_and_its_own_backward(start, end, lines):
    """The step of a discriminator does not use what is cleared for the generator."""
    assert [f.line for f in findings(TURNS.format(start=start, end=end), "HS181")] == lines
