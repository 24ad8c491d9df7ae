"""HS123: a loss that leaves a float16 region as an item, an attribute or part of an expression."""

import pytest

from check_scripts import codes, findings

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
def test_loss_is_traced_into_the_region(forward, backward):
    """A loss is traced to the float16 region however it is extracted from the output; bfloat16 needs no scaler."""
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
def test_other_losses_are_silent(forward, backward):
    """A loss that is scaled, or not computed in the region, gives no finding."""
    assert codes(LOOP.format(dtype="float16", forward=forward, backward=backward)) == []


def test_a_scaled_variable_has_the_name_of_its_scaler():
    """`scaled = scaler.scale(loss)` and a later backward: the message names `scaler`, also if it steps as well."""
    loop = (
        "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n    optimizer.zero_grad()\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n        loss = model(x)\n"
        "    scaled = scaler.scale(loss)\n    scaled.backward()\n{}    optimizer.step()\n"
    )
    (finding,) = findings(loop.format(""), "HS103")
    assert "by the scale of `scaler`" in finding.message
    (finding,) = findings(loop.format("    scaler.step(optimizer)\n    scaler.update()\n"), "HS103")
    assert "repeats the step of `scaler.step`" in finding.message
