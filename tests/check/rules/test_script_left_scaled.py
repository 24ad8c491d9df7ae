"""HS104 where several optimizers share a model that is clipped as a whole, and only some are unscaled."""

import pytest

from check_scripts import findings

SPLIT = """\
import torch
from muon import Muon
{split}
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    first.zero_grad()
    second.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    {unscale}
    {clip}
    {between}
    scaler.step(first)
    scaler.step(second)
    scaler.update()
"""
LOOP = """\
matrices, others = [], []
for name, p in model.named_parameters():
    if p.requires_grad:
        if p.ndim == 2:
            matrices.append(p)
        else:
            {other}.append(p)
"""
LISTS = LOOP.format(other="others") + "first = Muon(matrices, lr=0.1)\nsecond = torch.optim.AdamW(others)\n"
CHOSEN = """\
matrices, others = [], []
for p in model.parameters():
    (matrices if p.ndim == 2 else others).append(p)
first = Muon([{"params": matrices, "lr": 0.1}])
second = torch.optim.AdamW(others)
"""
FILTERED = """\
first = Muon([p for p in model.parameters() if p.ndim == 2])
second = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2])
"""
PARTS = "first = Muon(model.body.parameters())\nsecond = torch.optim.AdamW(model.head.parameters())\n"
SPLITTER = """\
def split(model):
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim == 2]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim != 2]
    return matrices, others
matrices, others = split(model)
first = Muon(matrices)
second = torch.optim.AdamW(others)
"""
SAME = "first = Muon(model.parameters())\nsecond = torch.optim.AdamW(model.parameters())\n"
TWICE = LOOP.format(other="others") + "first = Muon(matrices)\nsecond = torch.optim.AdamW(matrices)\n"
TWO_MODELS = "first = Muon(model.parameters())\nsecond = torch.optim.AdamW(critic.parameters())\n"
UNKNOWN = "first, second = build_optimizers(model)\n"
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
FIRST, SECOND = "scaler.unscale_(first)", "scaler.unscale_(second)"


def reported(**parts):
    """The messages of HS104."""
    text = SPLIT.format(**{"split": LISTS, "unscale": SECOND, "clip": CLIP, "between": "pass", **parts})
    return [f.message for f in findings(text, "HS104")]


@pytest.mark.parametrize("split", [LISTS, CHOSEN, FILTERED, PARTS, SPLITTER])
@pytest.mark.parametrize(("unscale", "left"), [(FIRST, "second"), (SECOND, "first")])
def test_the_gradients_of_the_other_optimizer_are_clipped_as_well(split, unscale, left):
    """Unscaling one of two optimizers leaves the gradients of the other parameters of the model scaled."""
    (message,) = reported(split=split, unscale=unscale)
    assert f"`{left}`" in message
    assert not reported(split=split, unscale=f"{FIRST}; {SECOND}")


@pytest.mark.parametrize("split", [SAME, TWICE, TWO_MODELS, UNKNOWN])
def test_optimizers_that_may_share_parameters_or_have_another_model_are_accepted(split):
    """Only parameters that are certainly those of the clipped model and not of the unscaled optimizer are still scaled."""
    assert not reported(split=split, unscale=FIRST)


@pytest.mark.parametrize(
    "parts",
    [
        {"clip": "torch.nn.utils.clip_grad_norm_(others, 1.0)"},
        {"clip": "torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.ndim != 2], 1.0)"},
        {"unscale": f"{SECOND}; scaler.step(first)"},
        {"between": "first.zero_grad(); scaler.scale(model(x)).backward()"},
        {"unscale": f"{SECOND}; unscale(scaler, optimizers)"},
    ],
)
def test_a_clip_of_unscaled_gradients_alone_is_accepted(parts):
    """A clip of the unscaled part, a step before it, gradients that a later backward computes, and a helper that gets the scaler."""
    assert not reported(**parts)
