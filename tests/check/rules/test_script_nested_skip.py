"""Skips inside another test, and snapshots of weights next to a scaler that every epoch recreates."""

import pytest

from check_scripts import reported

SKIP = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
{skip}
    scaler.step(optimizer)
    scaler.update()
"""
INSIDE = """\
    if step > args.warmup:
        if norm > args.max_norm:
            print("skipped", step)
            {act}"""
OTHERWISE = """\
    if step < args.warmup:
        print(norm)
    elif norm > args.max_norm:
        {act}"""
FIRST = """\
    if step > args.warmup:
        {act}
        if not torch.isfinite(norm):
            continue"""
METHOD = """\
import torch

class Trainer:
    def __init__(self, model, optimizer, limit):
        self.model, self.optimizer, self.limit = model, optimizer, limit
        self.scaler = torch.amp.GradScaler("cuda")

    def fit(self, loader):
        for i, x in enumerate(loader):
            self.train_step(x, i)

    def train_step(self, x, i):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if i > 100 and self.limit is not None:
            if grad_norm > self.limit:
                {act}
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""
EPOCHS = """\
import copy
import torch

def train_epoch(model, optimizer, loader{parameter}):
{inside}    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item()

model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
{outside}best = 1e9
for epoch in range(10):
    loss = train_epoch(model, optimizer, loader{argument})
    if loss < best:
        best, {snapshot}
"""
CLIENTS = """\
import copy
import torch

for client in clients:
    model = copy.deepcopy(server)
    scaler = torch.amp.GradScaler("cuda")
    for x in client:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
"""
MAKE = 'scaler = torch.amp.GradScaler("cuda")\n'


def _epochs(snapshot: str, *, once: bool) -> str:
    parts = {"parameter": ", scaler", "inside": "", "outside": MAKE, "argument": ", scaler"}
    parts = parts if once else {"parameter": "", "inside": f"    {MAKE}", "outside": "", "argument": ""}
    return EPOCHS.format(**parts, snapshot="").replace("        best, \n", f"        best = loss\n        {snapshot}\n")


SNAPSHOTS = [
    "best_model_weights = copy.deepcopy(model.state_dict())",
    "best_model = copy.deepcopy(model)",
    "model_copy = model.state_dict()",
]
CASES = [
    pytest.param("HS112", SKIP.format(skip=INSIDE.format(act="continue")), SKIP.format(skip=INSIDE.format(act="num_skipped += 1")), id="inside"),
    pytest.param("HS112", SKIP.format(skip=OTHERWISE.format(act="continue")), SKIP.format(skip=OTHERWISE.format(act="num_skipped += 1")), id="elif"),
    pytest.param("HS112", SKIP.format(skip=FIRST.format(act="print(norm)")), SKIP.format(skip=FIRST.format(act="scaler.update()")), id="updated-first"),
    pytest.param("HS112", METHOD.format(act="return"), METHOD.format(act="print(grad_norm)"), id="method"),
    *(pytest.param("HS121", _epochs(s, once=False), _epochs(s, once=True), id=s) for s in SNAPSHOTS),
]  # fmt: skip


@pytest.mark.parametrize(("code", "wrong", "right"), CASES)
def test_only_the_wrong_form_is_reported(code, wrong, right):
    """A skip or a recreated scaler is found next to other tests and copies, and the right form is accepted."""
    assert code in reported(wrong)
    assert code not in reported(right)


def test_a_copy_before_the_steps_is_a_new_model():
    """Each client of a federated run trains a copy with a scaler of its own."""
    assert "HS121" not in reported(CLIENTS)
