"""Steps, updates and tests of the gradients that another function, a handler or another branch contains."""

import pytest

from check_scripts import reported

FINALLY = """\
import torch

class Runner:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def train_batch(self, x):
        try:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
{inside}        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
{finally_}"""
LIMIT = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, x in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x) / args.accum
    scaler.scale(loss).backward()
    if (i + 1) % args.accum == 0:
        if loss.item() < args.max_loss:
            scaler.step(optimizer)
{update}
        optimizer.zero_grad()
"""
RAISING = """\
import torch

def check(model):
    for name, p in model.named_parameters():
        if p.grad is not None and not torch.isfinite(p.grad).all():
            {act}

scaler = torch.amp.GradScaler("cuda")
for x in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    check(model)
    scaler.step(optimizer)
    scaler.update()
"""
CALLER = """\
import torch

class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda")

    def clip(self):
        self.scaler.unscale_(self.optimizer)
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def train(self, loader):
        for x in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x)
            self.scaler.scale(loss).backward()
            norm = self.clip()
            if not torch.isfinite(norm):
                {act}
            self.scaler.step(self.optimizer)
            self.scaler.update()
"""
BRANCH = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    total_norm = total_norm_of(model)
{test}
    {indent}scaler.step(optimizer)
    {indent}scaler.update()
"""
WINDOW = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, x in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x) / accum
    scaler.scale(loss).backward()
    if (i + 1) % accum == 0:
{before}        scaler.step(optimizer)
        scaler.update()
{after}"""
TWICE = """\
import torch
scaler = torch.amp.GradScaler("cuda")

def clip(optimizer):
    scaler.unscale_(optimizer)

for x in loader:
    opts["g"].zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.unscale_(opts["g"])
    {again}
    scaler.step(opts["g"])
    scaler.update()
"""
KEPT = """\
import torch
import math
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if math.isnan(norm) or math.isinf(norm):
        scaler.update()
        {clear}
        continue
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
NAMED_TEST = """\
import torch

class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def is_sound(self):
        return all(torch.isfinite(p.grad).all() for p in self.model.parameters())

    def train_step(self, x):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        if self.is_sound():
            self.scaler.step(self.optimizer)
{update}
"""
FINAL = "        finally:\n            self.scaler.update()\n"
INSIDE = "            self.scaler.update()\n"
CLEAR = "        optimizer.zero_grad()\n"
TEST = "    if torch.isfinite(total_norm):"
CASES = [
    pytest.param(
        "HS119", KEPT.format(clear="pass"), KEPT.format(clear="optimizer.zero_grad()"), id="kept-with-a-scaler"
    ),
    pytest.param(
        "HS112",
        NAMED_TEST.format(update="            self.scaler.update()"),
        NAMED_TEST.format(update="        self.scaler.update()"),
        id="test-in-a-method",
    ),
    pytest.param(
        "HS115",
        FINALLY.format(inside="", finally_=FINAL),
        FINALLY.format(inside=INSIDE, finally_=""),
        id="update-in-finally",
    ),
    pytest.param(
        "HS115",
        LIMIT.format(update="        scaler.update()"),
        LIMIT.format(update="            scaler.update()"),
        id="two-settings-of-one-object",
    ),
    pytest.param(
        "HS175", RAISING.format(act="raise FloatingPointError(name)"), RAISING.format(act="log(name)"), id="helper"
    ),
    pytest.param("HS175", CALLER.format(act="raise RuntimeError('norm')"), CALLER.format(act="log(norm)"), id="caller"),
    pytest.param("HS157", BRANCH.format(test=TEST, indent="    "), BRANCH.format(test="", indent=""), id="branch"),
    pytest.param(
        "HS156",
        WINDOW.format(before=CLEAR, after=""),
        WINDOW.format(before="", after=CLEAR),
        id="cleared-in-the-window",
    ),
    pytest.param("HS105", TWICE.format(again='clip(opts["g"])'), TWICE.format(again='clip(opts["d"])'), id="entry"),
]


@pytest.mark.parametrize(("code", "wrong", "right"), CASES)
def test_only_the_wrong_form_is_reported(code, wrong, right):
    """A mistake is found across functions and branches, and the script without it is accepted."""
    assert code in reported(wrong)
    assert code not in reported(right)
