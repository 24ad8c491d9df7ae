"""HS112 with an iteration split over several methods, and iterations that are skipped correctly."""

import pytest

from check_scripts import codes, findings

TRAINER = """\
import math
import torch

class Trainer({base}):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def clip(self):
        self.scaler.unscale_(self.optimizer)
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def skip(self):
        self.optimizer.zero_grad()

    def reset(self):
        self.scaler.update()

    def train_step(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x, y)
        self.scaler.scale(loss).backward()
        norm = self.clip()
        {test}
        {step}
        return loss
"""
FIT = """\

    def fit(self, loader):
        for x, y in loader:
            {call}
"""
STEP = "self.scaler.step(self.optimizer); self.scaler.update()"


def trainer(test, *, step=STEP, call="self.train_step(x, y)", base="object"):
    fit = FIT.format(call=call) if call else ""
    return TRAINER.format(base=base, test=test.replace("\n", "\n        "), step=step) + fit


@pytest.mark.parametrize(
    "text",
    [
        trainer("if not math.isfinite(norm):\n    return None"),
        trainer("if not math.isfinite(norm):\n    self.optimizer.zero_grad()\n    return None"),
        trainer("if not math.isfinite(norm):\n    return self.skip()"),
        trainer(
            "if not math.isfinite(norm):\n    return None", call="loss = self.train_step(x, y)\n            log(loss)"
        ),
        trainer("if not math.isfinite(norm):\n    return None", call=""),
        trainer("bad = not math.isfinite(norm)\nif bad:\n    return None"),
        trainer("if not math.isfinite(norm):\n    print('no update')\n    return None"),
        trainer("if self.stats['has_inf']:\n    return None"),
        trainer(f"if not math.isfinite(norm):\n    return None\nelse:\n    {STEP}", step="pass"),
        trainer("if not math.isfinite(norm):\n    self.log('skipped')\n    return None", base="Base"),
    ],
)
def test_skip_in_a_method_is_reported(text):
    """A method that returns between `unscale_` in another method and the update is reported at the `unscale_`."""
    assert codes(text) == ["HS112:10"]


@pytest.mark.parametrize(
    "text",
    [
        # the scaler is updated
        trainer("if not math.isfinite(norm):\n    self.scaler.update()\n    return None"),
        trainer("if not math.isfinite(norm):\n    return self.reset()"),
        trainer(
            "if not math.isfinite(norm):\n    return None",
            step="self.scaler.step(self.optimizer)",
            call="self.train_step(x, y)\n            self.scaler.update()",
        ),
        trainer(
            "try:\n    if not math.isfinite(norm):\n        return None\n    self.scaler.step(self.optimizer)\n"
            "finally:\n    self.scaler.update()",
            step="pass",
        ),
        # or may be, in code outside this file
        trainer("if not math.isfinite(norm):\n    return self.skip_batch()", base="Base"),
        trainer("if not math.isfinite(norm):\n    reset(self.scaler)\n    return None"),
        # the run ends
        trainer(
            "if not math.isfinite(norm):\n    return None",
            call="if self.train_step(x, y) is None:\n                break",
        ),
        trainer(
            "if not math.isfinite(norm):\n    return None",
            call="loss = self.train_step(x, y)\n            if loss is None:\n                raise ArithmeticError",
        ),
        trainer("if not math.isfinite(norm):\n    return None", call="").replace("def train_step", "def fit_one"),
        # the scaler is disabled
        trainer("if not self.use_amp and not math.isfinite(norm):\n    return None"),
    ],
)
def test_correct_skip_is_silent(text):
    """A skip gives no finding if update() runs or may run, if the run ends, or if the scaler is disabled."""
    assert codes(text) == []


def test_a_run_that_ends_is_no_skip():
    """Where the test of the norm raises, only HS175 reports it: the scaler would have skipped the step."""
    text = trainer("if not math.isfinite(norm):\n    raise ArithmeticError(norm)")
    assert [code.partition(":")[0] for code in codes(text)] == ["HS175"]


LOOP = """\
import math
import torch
scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
        loss = model(x, y)
    scaler.scale(loss).backward()
    if use_amp:
        scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    bad = not math.isfinite(norm)
    if bad:
        {leave}
    scaler.step(optimizer)
    scaler.update()
"""


def test_unscale_under_a_flag_is_reported():
    """The test may follow the `if` that contains the `unscale_`; `break` ends the loop and is not a skip."""
    assert codes(LOOP.format(leave="continue")) == ["HS112:10"]
    assert codes(LOOP.format(leave="break")) == []


SCALED = """\
import torch
scaler = torch.amp.GradScaler("cuda")
def has_inf_grad(model):
    return any(torch.isinf(p.grad).any() for p in model.parameters())
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    {test}
        {skip}
    scaler.step(optimizer)
    scaler.update()
"""
FLAG = """bad = False
    for p in model.parameters():
        if p.grad is not None and not torch.isfinite(p.grad).all():
            bad = True
    if bad:"""


@pytest.mark.parametrize(
    ("test", "skip", "count"),
    [
        ("if not all(torch.isfinite(p.grad).all() for p in model.parameters()):", "continue", 1),
        ("if has_inf_grad(model):", "optimizer.zero_grad(); continue", 1),
        (FLAG, "continue", 1),
        ("if not torch.isfinite(loss):", "continue", 0),
        ("if any(torch.isnan(p.grad).any() for p in model.parameters()):", "continue", 0),
        ("if has_inf_grad(model):", "break", 0),
        ("if has_inf_grad(model):", "scaler.update(1024.0); continue", 0),
        ("if has_inf_grad(model):", "num_skipped += 1", 0),
        ("scaler.unscale_(optimizer)\n    if has_inf_grad(model):", "continue", 0),
    ],
)
def test_an_overflow_that_keeps_the_scale(test, skip, count):
    """A loop that skips batches with infinite gradients itself never lowers the scale; after `unscale_` it raises instead."""
    assert len(findings(SCALED.format(test=test, skip=skip), "HS157")) == count


HELPER = """\
import math
import torch
scaler = torch.amp.GradScaler("cuda")

def forward_backward(model, optimizers, batch):
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(batch)
    if not math.isfinite(loss.item()):
        {leave}
    scaler.scale(loss).backward()

def train(model, optimizers, loader):
    for batch in loader:
        forward_backward(model, optimizers, batch)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
"""


def test_step_after_a_helper_that_returns_before_backward():
    """The caller steps without gradients where the helper returns early; where it raises, the run ends."""
    assert codes(HELPER.format(leave="return")) == ["HS115:18"]
    assert codes(HELPER.format(leave="raise FloatingPointError(loss)")) == []
    both = "if strict:\n            raise FloatingPointError(loss)\n        else:\n            return"
    assert codes(HELPER.format(leave=both)) == []


COUNTED = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for step in range(steps):
    optimizer.zero_grad()
    count = 0
    for x, y in loader:
        if y.sum() == 0:
            continue
        scaler.scale(model(x)).backward()
        count += 1
    {test}
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("test", "count"), [("if count == 0:\n        continue", 0), ("if bad == 0:\n        continue", 1)]
)
def test_a_step_that_waits_for_a_counted_backward(test, count):
    """A counter next to the backward tells whether there are gradients."""
    assert len(findings(COUNTED.format(test=test), "HS115")) == count


NAMED_CLASS = """\
import torch
from torch.cuda.amp import GradScaler

NewScaler = getattr(torch.amp, "GradScaler", None)

class Loop:
    def __init__(self):
        scaler_cls = {cls}
        self.scaler = scaler_cls()

    def epoch(self, loader):
        def step():
            self.scaler.step(self.optimizer)
            self.scaler.update()

        count = 0
        for x, y in loader:
            loss = self.model(x, y)
            if not torch.isfinite(loss):
                {skip}
                continue
            count += 1
            if x is not None:
                self.scaler.scale(loss).backward()
            if count == self.steps:
                step()
                self.optimizer.zero_grad()
                count = 0
        if count > 0:
            step()
            self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("cls", "skip", "expected"),
    [
        ("NewScaler or GradScaler", "self.scaler.update()", 1),
        ("GradScaler", "self.scaler.update()", 1),
        ("GradScaler", "self.optimizer.zero_grad()", 0),
        ("choose()", "self.scaler.update()", 0),
    ],
)
def test_the_class_of_a_scaler_under_another_name(cls, skip, expected):
    """A variable that is torch's class, by import or by getattr; and a counter further out decides whether anything is left to step."""
    assert len(findings(NAMED_CLASS.format(cls=cls, skip=skip), "HS115")) == expected


TWO_SCALERS = """\
import torch
first = torch.amp.GradScaler("cuda")
second = torch.amp.GradScaler("cuda")
for x, y in loader:
    generator.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y)
    first.scale(loss).backward()
    is_usable = all(torch.isfinite(p.grad).all() for p in model.parameters())
    if is_usable:
        first.step(generator)
        {inside}
    {outside}
    critic_optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = critic(x, y)
    second.scale(loss).backward()
    second.step(critic_optimizer)
    second.update()
"""


@pytest.mark.parametrize(
    ("inside", "outside", "is_reported"), [("first.update()", "pass", True), ("pass", "first.update()", False)]
)
def test_another_scaler_does_not_shrink_the_scale_of_this_one(inside, outside, is_reported):
    """HS157 looks at the uses of the scaler whose gradients are tested, not at those of a second one in the loop."""
    assert bool(findings(TWO_SCALERS.format(inside=inside, outside=outside), "HS157")) == is_reported


TWO_UPDATES = """\
import torch
first = torch.amp.GradScaler("cuda")
second = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y)
    first.scale(loss).backward()
    first.unscale_(optimizer)
    {scaler}.update()
    first.unscale_(optimizer)
    first.step(optimizer)
    first.update()
"""


@pytest.mark.parametrize(("scaler", "is_reported"), [("second", True), ("first", False)])
def test_the_update_of_another_scaler_resets_nothing(scaler, is_reported):
    """HS105: only the update of the own scaler allows another unscale_."""
    assert bool(findings(TWO_UPDATES.format(scaler=scaler), "HS105")) == is_reported
