"""HS132, HS170 and HS172: scalers that other functions create, pass on, save and restore."""

import pytest

from check_scripts import findings

SETUP = """\
import torch
def setup(cfg):
    scaler = torch.amp.GradScaler("cuda")
    {result}
def main(cfg):
    parts = setup(cfg)
    scaler, optimizer = parts["scaler"], parts["optimizer"]
    state = torch.load("x")
    optimizer.load_state_dict(state["optimizer"])
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
        {save}
"""
SAVE = 'torch.save({"optimizer": optimizer.state_dict()}, "x")'


@pytest.mark.parametrize(
    ("result", "save", "expected"),
    [
        ('return {"scaler": scaler, "optimizer": make(cfg)}', SAVE, True),
        ('return {"scaler": scaler.state_dict(), "optimizer": make(cfg)}', SAVE, False),
        ('return {"scaler": scaler, "optimizer": make(cfg)}', "save_sft_checkpoint(model, optimizer)", True),
        ('return {"scaler": scaler, "optimizer": make(cfg)}', "save_sft_checkpoint(model, optimizer, scaler)", False),
    ],
)
def test_objects_that_a_function_returns_are_no_checkpoint(result, save, expected):
    """A dictionary with the scaler itself is what the loop trains with; one with its state may be saved."""
    assert bool(findings(SETUP.format(result=result, save=save), "HS170")) == expected


ANNOTATED = """\
import torch
from torch.amp import GradScaler
from typing import Optional
from engine import train_one_epoch
def fit(model, optimizer, loader, scaler: {annotation} = None):
    for epoch in range(9):
        train_one_epoch(model, optimizer, loader, scaler=scaler)
        save_checkpoint("last.pt", model_state=model.state_dict(), optimizer_state=optimizer.state_dict(){more})
"""


@pytest.mark.parametrize("annotation", ["Optional[GradScaler]", "GradScaler | None", "torch.amp.GradScaler"])
@pytest.mark.parametrize(("more", "expected"), [("", ["advice"]), (", scaler_state=scaler.state_dict()", [])])
def test_a_parameter_that_is_annotated_as_a_scaler(annotation, more, expected):
    """The scaler and the steps are in other files; the annotation and the name of the call show both."""
    text = ANNOTATED.format(annotation=annotation, more=more)
    assert [f.severity for f in findings(text, "HS170")] == expected


MODEL = """\
import torch
class Trainer:
    def __init__(self, factory):
        self.scaler = torch.amp.GradScaler("cuda")
        self.model = factory.{call}(self.base)
        self.optimizer = factory.create_optimizer(self.model)
    def fit(self):
        for x in self.loader:
            self.scaler.scale(self.model(x)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.store.save_model(self.{saved})
"""


@pytest.mark.parametrize("call", ["configure_model_optimizations", "optimize_model", "optimise"])
@pytest.mark.parametrize(("saved", "expected"), [("model", 0), ("optimizer", 1)])
def test_an_optimized_model_is_no_optimizer(call, saved, expected):
    """A function that optimizes, or applies optimizations, returns a model."""
    assert len(findings(MODEL.format(call=call, saved=saved), "HS170")) == expected


RESTORED = """\
import torch
scaler = torch.amp.GradScaler("cuda")
state = torch.load("x")
optimizer.load_state_dict(state["optimizer"])
scaler.load_state_dict(state["scaler"])
bar = tqdm(loader)
for x in bar:
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
    scaler.update()
    {update}
    checkpoint = {{"optimizer": optimizer.state_dict()}}
    {more}
    torch.save(checkpoint, "x")
"""


@pytest.mark.parametrize(
    "update", ["bar.update(1)", "meter.update(loss, 8)", 'metrics.update({"loss": 1.0})', "bar.update(n)"]
)
@pytest.mark.parametrize(("more", "expected"), [("pass", True), ("checkpoint.update(extra)", False)])
def test_only_an_update_of_a_checkpoint_may_add_the_scaler(update, more, expected):
    """A progress bar, a meter and entries of known names add no state of the scaler."""
    assert bool(findings(RESTORED.format(update=update, more=more), "HS172")) == expected


CONDITION = """\
import torch
def train(model, optimizer, scaler, use_amp):
    for x in loader:
        if use_amp:
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            model(x).backward()
            optimizer.step()
def main(args, device):
    {first}if {condition}:
        scaler = torch.amp.GradScaler("cuda")
    train(model, optimizer, {passed}, args.amp)
"""


@pytest.mark.parametrize(
    ("first", "condition", "passed", "expected"),
    [
        ("", "not args.resume", "scaler", True),
        ("", "args.amp and device.type == 'cuda'", "scaler", True),
        ("", "device.type == 'cuda'", "scaler", False),
        ("scaler = None\n    ", "not args.resume", "scaler", False),
        ("", "not args.resume", "scaler if not args.resume else None", False),
    ],
)
def test_a_call_reads_the_scaler_that_it_passes(first, condition, passed, expected):
    """The variable is read by the call, whatever the function tests; one missing part of `a and b` is enough."""
    text = CONDITION.format(first=first, condition=condition, passed=passed)
    assert bool(findings(text, "HS132")) == expected


def test_a_function_that_ended_before_the_creation_passes_nothing():
    """What excludes the creation, `if args.only_folds: return`, excludes the call as well."""
    text = CONDITION.format(first="", condition="True", passed="scaler")
    text = text.replace("    if True:\n        scaler", "    if args.only_folds:\n        return\n    scaler")
    text = text.replace("if use_amp:", "if scaler.is_enabled():")
    assert findings(text, "HS132") == []
