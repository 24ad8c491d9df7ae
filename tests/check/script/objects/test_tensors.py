"""Gradients under other names, and the functions that read them."""

import pytest

from check_scripts import findings

LOOP = """\
import torch
scaler = torch.amp.GradScaler("cuda")

def statistics(model):
    total = 0.0
    for p in model.parameters():
        if p.grad is not None:
            {read}
    return total

for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    {early}
    scaler.unscale_(optimizer)
    {late}
    scaler.step(optimizer)
    scaler.update()
"""
MEASURE = "log(statistics(model))"


def num_reads(read, early=MEASURE, late="pass"):
    return len(findings(LOOP.format(read=read, early=early, late=late), "HS110"))


@pytest.mark.parametrize(
    "read",
    [
        "g = p.grad.data; total += g.norm().item() ** 2",
        "g = p.grad.detach(); total += torch.norm(g, 2).item()",
        "g = p.grad if p.requires_grad else None; total += g.float().norm()",
    ],
)
def test_a_variable_that_is_a_gradient_is_read_as_one(read):
    """Statistics of gradients mostly give `p.grad` a name first."""
    assert num_reads(read) == 1
    assert num_reads(read, early="pass", late=MEASURE) == 0


@pytest.mark.parametrize(
    "read", ["g = p.grad / scaler.get_scale(); total += g.norm()", "g = p.data; total += g.norm()"]
)
def test_a_variable_that_is_something_else_is_no_gradient(read):
    """A gradient that is divided by the scale is unscaled, and a weight has no scale."""
    assert num_reads(read) == 0


@pytest.mark.parametrize(
    "early",
    [
        "grads = [p.grad for p in model.parameters()]; log(sum(g.norm() for g in grads))",
        "grads = [p.grad.detach() for p in params]; log(torch.stack([torch.norm(g) for g in grads]))",
        "log(sum(g.norm() for g in [p.grad for p in params]))",
    ],
)
def test_gradients_of_a_list_are_read_in_a_comprehension(early):
    """`g` of `for g in grads` is a gradient where `grads` is a list of them."""
    assert num_reads("pass", early=early) == 1
    assert num_reads("pass", early=early.replace(".grad", ".data")) == 0


def test_the_gradients_of_a_list_are_read_in_a_loop():
    """The same with a statement."""
    loop = "grads = [p.grad for p in params]\n    for g in grads:\n        log(g.norm())"
    assert num_reads("pass", early=loop) == 1


def test_a_norm_that_divides_the_gradient_of_the_same_name_is_accepted():
    """The scale cancels in `g / g.norm()`, under any name."""
    assert num_reads("pass", early="g = x.grad.detach(); x = x + eps * g / (g.norm() + 1e-8)") == 0
