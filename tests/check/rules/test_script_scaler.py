"""HS123: a loss that leaves a float16 region as an item, an attribute or a part of something else."""

import pytest

from check_scripts import codes

LOOP = """\
import torch
losses = {{}}
for batch in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.{dtype}):
        {forward}
    {backward}
    optimizer.step()
"""
LOSSES = [
    ("out = model(**batch)", 'out["loss"].backward()'),
    ("out = model(**batch)", "out.loss.backward()"),
    ("out = model(**batch)", "out[0].mean().backward()"),
    ("model_out = model(**batch)", 'model_out["loss"].backward()'),
    ("self.out = model(**batch)", "self.out.loss.backward()"),
    ("out = model(**batch)", '(out["loss"] / 4).backward()'),
    ("out = model(**batch)", "criterion(out, batch).backward()"),
    ("out = model(**batch)", 'torch.autograd.backward(out["loss"])'),
    ("losses = model(**batch)", "sum(losses.values()).backward()"),
    ('losses["total"] = model(**batch)', 'losses["total"].backward()'),
    ('losses["ce"] = model(**batch)', "sum(losses.values()).backward()"),
]


@pytest.mark.parametrize(("forward", "backward"), LOSSES)
def test_a_part_of_what_the_region_made_is_its_loss(forward, backward):
    """A loss is followed into the float16 region however it is taken out of the model's output; bfloat16 needs no scaler."""
    text = LOOP.format(dtype="float16", forward=forward, backward=backward)
    assert codes(text) == ["HS123:7"]
    assert codes(text.replace("torch.float16", "torch.bfloat16")) == []


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("out = model(**batch)", 'other["loss"].backward()'),
        ("out = model(**batch)", '(out["loss"] * loss_scale).backward()'),
        ("out = model(**batch)", "out.loss.backward(scaler)"),
        ("out = teacher(**batch)", "student_loss.backward(retain_graph=out)"),
    ],
)
def test_another_loss_is_left_alone(forward, backward):
    """Nothing is said of a loss that the region has not made, or that something scales."""
    assert codes(LOOP.format(dtype="float16", forward=forward, backward=backward)) == []
