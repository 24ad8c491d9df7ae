"""HS112: a method for one step, called from another file, that abandons it after `unscale_`."""

import pytest

from check_scripts import findings

METHOD = """\
import torch

class Strategy({base}):
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def process(self, task, batch):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = task.training_step(batch)
        self.scaler.scale(loss).backward()

    def commit(self):
        self.scaler.unscale_(self.optimizer)
        finite = all(torch.isfinite(p.grad).all() for p in self.parameters)
        if not finite:
            {skip}
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return True

    def abort(self, reason):
        {abort}
        return False
"""
CLEAR = "self.optimizer.zero_grad()"


@pytest.mark.parametrize(
    ("skip", "abort", "base", "expected"),
    [
        ("return self.abort('nonfinite')", CLEAR, "object", [14]),
        ("self.optimizer.zero_grad(); return False", "pass", "object", [14]),
        ("self.optimizer.zero_grad(); return self.abort('inf')", CLEAR, "Base", [14]),
        ("return self.abort('nonfinite')", f"self.scaler.update(); {CLEAR}", "object", []),
        ("return self.abort('nonfinite')", "pass", "object", []),  # nothing shows that the run continues
        ("return False", CLEAR, "object", []),
        ("self.optimizer.zero_grad(); raise FloatingPointError", CLEAR, "object", []),
        ("self.optimizer.zero_grad(); return self.give_up()", CLEAR, "Base", []),  # which may update the scaler
    ],
)
def test_a_step_that_is_abandoned_and_cleared(skip, abort, base, expected):
    """A branch that clears the gradients and returns is followed by the next batch, whatever the method is called."""
    text = METHOD.format(skip=skip, abort=abort, base=base)
    assert [f.line for f in findings(text, "HS112")] == expected


FUNCTION = """\
import torch

def apply_gradients(model, optimizer, {params}):
    {create}
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        scaler.step(optimizer)
        scaler.update()
    else:
        {other}
"""
NEW = "scaler = torch.amp.GradScaler('cuda')"


@pytest.mark.parametrize(
    ("params", "create", "other", "expected"),
    [
        ("scaler", "pass", "optimizer.zero_grad()", [5]),
        ("scaler", "pass", "print('overflow')", []),
        ("scaler", "pass", "optimizer.zero_grad(); raise FloatingPointError", []),
        ("scaler", "pass", "optimizer.zero_grad(); scaler.update()", []),
        ("batch", NEW, "optimizer.zero_grad()", []),  # a new one for each call
    ],
)
def test_a_function_with_the_scaler_of_its_caller(params, create, other, expected):
    """The scaler outlives the call, and the next `unscale_` finds that of this one."""
    text = FUNCTION.format(params=params, create=create, other=other)
    assert [f.line for f in findings(text, "HS112")] == expected


WRAPPED = """\
import torch

class Precision:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def unscale_(self, optimizer):
        self.scaler.unscale_(optimizer)

    def step(self, optimizer):
        self.scaler.step(optimizer)
        self.scaler.update()

class Strategy:
    def __init__(self, optimizer, precision=None):
        self.optimizer = optimizer
        self.precision = {value}

    def commit(self):
        self.precision.unscale_(self.optimizer)
        if not all(torch.isfinite(p.grad).all() for p in self.parameters):
            return self.abort()
        self.precision.step(self.optimizer)

    def abort(self):
        self.optimizer.zero_grad()
        return False
"""


@pytest.mark.parametrize(
    ("value", "call", "expected"),
    [
        ("Precision()", "", [11]),
        ("precision or Precision()", "", [11]),
        ("Precision() if precision is None else precision", "", [11]),
        ("precision or Precision()", "Strategy(optimizer, Precision())", [11]),
        ("precision or Precision()", "Strategy(optimizer, Other())", []),  # of two classes neither is certain
        ("registry.precision or Precision()", "", []),
        ("precision", "", []),
    ],
)
def test_a_scaler_in_an_object_of_its_own(value, call, expected):
    """The methods of the object that has the scaler are followed, also where it is only the default of a parameter."""
    text = WRAPPED.format(value=value) + call + "\n"
    assert [f.line for f in findings(text, "HS112")] == expected
