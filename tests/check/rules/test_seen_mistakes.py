"""Mistakes as real code makes them: behind methods, helpers, flags and other names than the usual."""

import pytest

from check_scripts import codes, findings

WRONG = {
    "HS106 unscale on every batch, through methods": """\
import torch

class Model(torch.nn.Module):
    def setup(self):
        self._scaler = torch.amp.GradScaler("cuda", enabled=self.amp)

    def _unscale(self):
        if self.amp:
            self._scaler.unscale_(self._optimizer)

    def optimize_parameters(self):
        with torch.autocast("cuda", enabled=self.amp):
            self.forward()
        self.loss = self._scaler.scale(self.loss)
        make_optimizer_step = self._count()
        self.loss.backward()
        self._unscale()
        torch.nn.utils.clip_grad_value_(self.parameters(), 1.0)
        if make_optimizer_step:
            self._scaler.step(self._optimizer)
        self._scaler.update()
""",
    "HS112 an iteration given up after unscale": """\
import torch
scaler = torch.amp.GradScaler("cuda")

def train(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            optimizer.zero_grad()
            continue
        scaler.step(optimizer)
        scaler.update()
""",
    "HS120 bfloat16 through the options a helper returns": """\
import torch
from torch.amp import GradScaler, autocast

def options(args):
    return {"device_type": "cuda", "enabled": args.amp, "dtype": torch.bfloat16}

def train(model, loader, optimizer, args):
    scaler = GradScaler("cuda", enabled=args.amp)
    for x, y in loader:
        optimizer.zero_grad()
        with autocast(**options(args)):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    "HS120 a scaler beside Accelerate in bfloat16": """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="bf16")
scaler = torch.amp.GradScaler("cuda")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.autocast():
        loss = model(**batch).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "HS131 a scaler beside Fabric in float16": """\
import torch
from lightning.fabric import Fabric
fabric = Fabric(devices=1, precision="16-mixed")
scaler = torch.amp.GradScaler("cuda")
model, optimizer = fabric.setup(model, optimizer)
for batch in loader:
    scaler.scale(model(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    "HS160 float16 weights out of a loader": """\
import torch
from transformers import AutoModelForCausalLM

class Tuner:
    def __init__(self, name):
        self.model = self._load(name)

    def _load(self, name):
        model = AutoModelForCausalLM.from_pretrained(name)
        model.half()
        return model

    def train(self, data):
        scaler = torch.amp.GradScaler("cuda")
        for batch in data:
            self.train_step(batch, scaler)

    def train_step(self, batch, scaler):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(self.optimizer)
        scaler.update()
""",
    "HS170 an optimizer restored by another file's helper": """\
import torch
from project.checkpoints import smart_resume

def train(model, optimizer, loader, weights, epochs):
    kept = torch.load(weights)
    start = smart_resume(kept, optimizer, epochs)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(start, epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
""",
    "HS180 a window whose end is handed on as a flag": """\
import torch
scaler = torch.amp.GradScaler("cuda")

def step(model, optimizer, batch, accumulate=False):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(batch)
    scaler.scale(loss).backward()
    if not accumulate:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

def train(model, optimizer, loader, every):
    for i, batch in enumerate(loader):
        accumulate = i % every != 0
        step(model, optimizer, batch, accumulate=accumulate)
""",
    "HS121 a scaler an epoch, beside a checkpoint named after the model": """\
import torch

class Trainer:
    def _train_epoch(self, data):
        scaler = torch.amp.GradScaler("cuda", enabled=self.amp)
        for batch in data:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", enabled=self.amp):
                loss = self.model(batch)
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()

    def _save(self, **kwargs):
        saved_model_file = kwargs.pop("saved_model_file", self.path)
        torch.save(self.model.state_dict(), saved_model_file)

    def fit(self, data):
        for epoch in range(self.epochs):
            self._train_epoch(data)
            self._save()
""",
    "HS170 a store that is given the optimizer and never the scaler": """\
import torch

class Store:
    def save(self, model, optimizer):
        torch.save(optimizer.state_dict(), self.path)

    def load(self, model, optimizer):
        optimizer.load_state_dict(torch.load(self.path))

class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")
        self.store = Store()

    def train(self, loader):
        self.store.load(self.model, self.optimizer)
        for x, y in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x, y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.store.save(self.model, self.optimizer)
""",
    "HS180 steps counted by the window, and the loss not divided": """\
import torch

def train(model, loader, optimizer, args):
    total = len(loader) // args.accumulation_steps * args.epochs
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x, y)
        loss.backward()
        if (i + 1) % args.accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    return total
""",
    "HS106 a window's end under a name, and every micro-batch unscaled": """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    is_last = (i + 1) % accum == 0 or (i + 1) == len(loader)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y) / accum
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if is_last:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    "HS107 a window's end under a name, and every micro-batch updated": """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    is_last = (i + 1) % accum == 0 or (i + 1) == len(loader)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y) / accum
    scaler.scale(loss).backward()
    if is_last:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()
""",
    "HS180 a window's end under a name, and the loss not divided": """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    is_last = (i + 1) % accum == 0 or (i + 1) == len(loader)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y)
    scaler.scale(loss).backward()
    if is_last:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    "HS181 a window's end under a name, and every micro-batch cleared": """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    is_last = (i + 1) % accum == 0 or (i + 1) == len(loader)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y) / accum
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if is_last:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
""",
    "HS102 a batch that is given up when memory runs out": """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad(set_to_none=True)
    try:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x, y)
        loss.backward()
    except torch.cuda.OutOfMemoryError:
        optimizer.zero_grad(set_to_none=True)
        continue
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    "HS104 a batch that is given up when memory runs out": """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad(set_to_none=True)
    try:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
    except torch.cuda.OutOfMemoryError:
        optimizer.zero_grad(set_to_none=True)
        continue
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    "HS104 a scaler that may be None, handed on": """\
import torch

class Trainer:
    def train(self):
        scaler = torch.amp.GradScaler("cuda") if self.amp else None
        for i, batch in enumerate(self.loader):
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.amp):
                loss = self.model(batch)
            if scaler is not None:
                scaler.scale(loss).backward()
                self._optim_step(scaler)
            else:
                loss.backward()
                self._optim_step(None)

    def _optim_step(self, scaler):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if scaler is not None:
            scaler.step(self.optim)
            scaler.update()
        else:
            self.optim.step()
        self.optim.zero_grad()
""",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_found_however_it_is_wrapped(name):
    """The rule named in the case speaks, and no other."""
    assert {code.partition(":")[0] for code in codes(WRONG[name])} == {name.split()[0]}


def test_a_scaler_to_be_dropped_is_one_finding():
    """Where bfloat16 makes the scaler useless, that it is not saved, or made in a loop, is not said as well."""
    script = """\
import torch
for epoch in range(epochs):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
optimizer.load_state_dict(torch.load("last.pt")["optimizer"])
"""
    assert [finding.code for finding in findings(script)] == ["HS120"]
    assert {"HS121", "HS170"} <= {finding.code for finding in findings(script.replace("bfloat16", "float16"))}
