"""HS148: which of two contexts that are joined by `and` or `or` is entered."""

import contextlib

import pytest
import torch

from check_scripts import findings

AUTOCAST = 'torch.autocast("cpu", dtype=torch.bfloat16)'
JOINED = [
    (f"{AUTOCAST} and torch.no_grad()", "no_grad"),
    (f"torch.no_grad() and {AUTOCAST}", "autocast"),
    (f"torch.no_grad() or {AUTOCAST}", "no_grad"),
    (f"torch.inference_mode() and torch.no_grad() and {AUTOCAST}", "autocast"),
    (f"(torch.no_grad() and {AUTOCAST} if torch else torch.no_grad())", "autocast"),
]


def said(contexts):
    return [f.message for f in findings(f"import torch\nwith {contexts}:\n    y = model(x)\n", "HS148")]


@pytest.mark.parametrize(("contexts", "entered"), JOINED)
def test_the_context_that_is_named_is_the_one_that_is_entered(contexts, entered):
    """The message names as entered what Python enters, and as not entered something that it does not."""
    (message,) = said(contexts)
    first, _, second = message.partition(" is entered, ")
    assert entered in first
    assert second.endswith("is not")
    with eval(contexts):
        assert torch.is_autocast_enabled("cpu") == (entered == "autocast")
        assert torch.is_grad_enabled() == (entered == "autocast")


@pytest.mark.parametrize(
    "contexts",
    [
        f"torch.no_grad(), {AUTOCAST}",
        f"use_amp and {AUTOCAST} or contextlib.nullcontext()",
        f"{AUTOCAST} or contextlib.nullcontext()",
        f"({AUTOCAST} if use_amp else contextlib.nullcontext())",
        f"context or {AUTOCAST}",
        "torch.set_grad_enabled(train and torch.is_grad_enabled()), torch.no_grad()",
        f"run(torch.no_grad() and {AUTOCAST})",
    ],
)
def test_a_choice_between_contexts_is_left_alone(contexts):
    """A flag, a default or a choice decides which context is entered, and none is lost by it."""
    assert said(contexts) == []


def test_a_context_manager_is_true():
    """Contexts have no truth of their own, so `and` gives the last and `or` the first."""
    assert all(map(bool, (torch.no_grad(), torch.autocast("cpu"), torch.inference_mode(), contextlib.nullcontext())))
