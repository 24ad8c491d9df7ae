"""HS616: an autocast object that is entered again while it is active."""

import pytest

from check_scripts import checked

CREATE = "torch.autocast('cuda', dtype=torch.bfloat16)"
SHARED = """\
import contextlib, functools
import torch
{create}
def validate(model, x{param}):
    with {inner}:
        return model(x)
def train(model, loader, optimizer{param}):
    for x in loader:
        with {outer}:
            loss = model(x).mean()
            {inside}
        {after}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
{main}
"""


def reported(**parts):
    """The lines of HS616."""
    defaults = {
        "create": f"ctx = {CREATE}", "param": "", "inner": "ctx", "outer": "ctx", "inside": "validate(model, x)", "after": "pass",
        "main": "",
    }  # fmt: skip
    return checked(SHARED.format(**defaults | parts), "HS616")


PASSED = {
    "create": "",
    "param": ", ctx",
    "inside": "validate(model, x, ctx)",
    "main": f"amp = {CREATE}\ntrain(model, loader, optimizer, amp)",
}


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({}, 5),
        ({"create": f"ctx = {CREATE} if torch.cuda.is_available() else contextlib.nullcontext()"}, 5),
        ({"create": f"amp = {CREATE}\nctx = amp"}, 6),
        ({"outer": "torch.no_grad(), ctx"}, 5),
        ({"inside": "if steps % 10 == 0: validate(model, x)"}, 5),
        ({"inside": "evaluate(model, validate, 10)"}, 5),
        ({"inside": "evaluate(model, score=validate)"}, 5),
        ({"inside": "with ctx: model(x)"}, 11),
        (PASSED, 5),
    ],
)
def test_one_object_entered_twice(parts, line):
    """Through a call, a copy, a parameter, a function that another file runs, and in one function."""
    assert reported(**parts) == [line]


@pytest.mark.parametrize(
    "parts",
    [
        {"inside": "pass", "after": "validate(model, x)"},
        {"inner": CREATE},
        {"create": f"ctx = lambda: {CREATE}", "inner": "ctx()", "outer": "ctx()"},
        {"create": "ctx = functools.partial(torch.autocast, 'cuda')", "inner": "ctx()", "outer": "ctx()"},
        {"create": f"ctx = {CREATE}\nother = {CREATE}", "inner": "other"},
        {"create": "ctx = contextlib.nullcontext()"},
        {
            "create": f"ctx = {CREATE}\noff = torch.autocast('cuda', enabled=False)",
            "inside": "with off: validate(model, x)",
        },
        {"inside": "model.register_forward_hook(validate)"},
        {"inside": "jobs.append(functools.partial(validate, model))"},
        {
            "param": ", ctx=None",
            "inside": f"validate(model, x, {CREATE})",
            "main": "train(model, loader, optimizer, ctx)",
        },
    ],
)
def test_objects_that_are_not_active(parts):
    """Blocks that follow each other, an object for each block, and a region between that has switched autocast off."""
    assert reported(**parts) == []


CLASS = """\
import torch
class Trainer:
    def __init__(self, model, other):
        self.model, self.other = model, other
        self.amp = torch.autocast("cuda", dtype=torch.bfloat16)
    def score(self, x{param}):
        {test}with self.amp: out = self.model(x)
        return out
    def train(self, loader):
        for x in loader:
            with self.amp:
                loss = self.model(x).mean()
                {call}
            loss.backward()
            self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"call": "self.score(x)"}, [7]),
        ({"call": "self.other.score(x)"}, []),
        ({"call": "self.score(x, True)", "param": ", amp=False", "test": "if amp:\n            "}, [8]),
        ({"call": "self.score(x)", "param": ", amp=False", "test": "if amp:\n            "}, []),
        ({"call": "self.score(x, x.amp)", "param": ", amp=False", "test": "if amp:\n            "}, []),
        ({"call": "self.score(x)", "test": "if not torch.is_autocast_enabled('cuda'):\n            "}, []),
    ],
)
def test_the_object_of_a_class(parts, expected):
    """The attribute of `self` in the methods of one object; an inner region under a condition may not run."""
    assert checked(CLASS.format(**{"param": "", "test": ""} | parts), "HS616") == expected


DECORATED = """\
import torch
amp = torch.autocast("cuda", dtype=torch.bfloat16)
{decorator}
def encode(tree, x):
    {recursion}
    return tree.layer(x)
def train(tree, loader):
    for x in loader:
        {block}
            loss = encode(tree, x).mean()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("decorator", "recursion", "block", "expected"),
    [
        ("@torch.autocast('cuda')", "x = encode(tree.left, x)", "if x is not None:", [5]),
        ("@torch.autocast('cuda')", "pass", "with amp:", []),
        ("@torch.autocast('cuda', enabled=False)", "x = encode(tree.left, x)", "if x is not None:", []),
        ("@amp", "pass", "with amp:", [3]),
        ("@amp", "pass", "if x is not None:", []),
        ("@torch.no_grad()", "x = encode(tree.left, x)", "with amp:", []),
    ],
)
def test_a_decorator_is_one_object(decorator, recursion, block, expected):
    """For the calls of a function in itself, and for a block with the same object."""
    assert checked(DECORATED.format(decorator=decorator, recursion=recursion, block=block), "HS616") == expected
