"""HS113: what else is called a clip does not hide that one branch clips no gradients."""

import pytest

from check_scripts import reported

LOOP = """\
import numpy as np
import torch
from helpers import {helper}
from transformers import CLIPModel
class Clips(torch.utils.data.Dataset):
    pass
scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
for x, y in loader:
    {before}
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
        loss = loss_fn(model(x), y)
    if use_amp:
        scaler.scale(loss).backward()
        {amp}
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
"""


@pytest.mark.parametrize(
    "before",
    [
        "data = Clips(x)",
        "x = np.clip(x, 0, 1)",
        "x = x.clip(0, 1)",
        "x = torch.clip(x, min=-1)",
        "m = CLIPModel(config)",
    ],
)
def test_other_clips_are_not_of_gradients(before):
    """Video clips, CLIP models and limits on values are no clip of the branch with the scaler."""
    assert "HS113" in reported(LOOP.format(helper="seed", before=before, amp="pass"))


@pytest.mark.parametrize(
    ("helper", "amp"),
    [
        ("clip_all", "clip_all(model, scaler)"),
        ("GradientClipper", "GradientClipper(model).clip(scaler, optimizer)"),
        ("seed", "scaler.unscale_(optimizer)\n        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
    ],
)
def test_what_may_clip_gradients_is_left_alone(helper, amp):
    """A function of another file, an object with a method for it, and torch's own."""
    assert "HS113" not in reported(LOOP.format(helper=helper, before="pass", amp=amp))
