"""HS612: targets that were rounded before the loss; HS165: sums of probabilities after their region."""

import pytest

from check_scripts import reported

FIT = """\
import torch
import torch.nn.functional as F

def aux(decoder, z, frames, keep):
    target = frames[keep].float()
    return F.smooth_l1_loss(decoder(z).float(), target)

optimizer = torch.optim.AdamW(decoder.parameters())
for batch in loader:
    {cast}
    with torch.no_grad():
        z = encoder(low)
    loss = {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LOW = "frames = low = batch['frames'].to('cuda', dtype=torch.bfloat16)"
ROUNDED = "frames = batch['frames'].to('cuda', dtype=torch.bfloat16); low = frames"


@pytest.mark.parametrize(
    "loss",
    [
        "F.l1_loss(decoder(z).float(), frames.float())",
        "F.mse_loss(decoder(z).float(), frames.float().clamp(0, 1).permute(0, 2, 3, 1))",
        "F.mse_loss(decoder(z), frames[:, :3].to(torch.float32))",
        "aux(decoder, z, frames, batch['keep'])",
    ],
)
def test_a_cast_back_does_not_restore_a_target(loss):
    """The target had 16 bits before it has float32 at the loss."""
    assert "HS612" in reported(FIT.format(cast=ROUNDED, loss=loss))


@pytest.mark.parametrize(
    ("cast", "loss"),
    [
        ("frames = batch['frames']; low = frames.bfloat16()", "F.l1_loss(decoder(z), frames.float().clamp(0, 1))"),
        (ROUNDED, "F.l1_loss(decoder(z).float(), teacher(frames).float())"),
        (ROUNDED, "F.cross_entropy(decoder(z).float(), frames.float())"),
        (ROUNDED, "F.l1_loss(decoder(z).float(), (frames - batch['frames']).float())"),
    ],
)
def test_nothing_where_the_target_is_exact_or_computed(cast, loss):
    """The copy for the model is cast alone, another model computes the target, or the loss is no regression."""
    assert "HS612" not in reported(FIT.format(cast=cast, loss=loss))


DICE = """\
import torch

@torch.no_grad()
def validate(model, loader, amp):
    total = 0.0
    for x, y in loader:
        with {region}:
            logits = model(x)
        {prob}
        total += (2 * (p * y).sum((1, 2)) / ({summed} + y.sum((1, 2)))).mean().item()
    return total
"""
REGION = "torch.autocast('cuda', dtype=torch.float16, enabled=amp)"


@pytest.mark.parametrize("region", [REGION, "torch.cuda.amp.autocast(amp)"])
@pytest.mark.parametrize("prob", ["p = torch.sigmoid(logits).squeeze(1)", "p = logits.squeeze(1).sigmoid()"])
@pytest.mark.parametrize("summed", ["p.sum((1, 2))", "torch.sum(p, dim=(1, 2))", "p.sum()"])
def test_a_sum_over_pixels_after_the_region(region, prob, summed):
    """Probabilities have the format of the logits outside a region, and a mask has more pixels than float16 can count."""
    assert "HS165" in reported(DICE.format(region=region, prob=prob, summed=summed))


@pytest.mark.parametrize(
    ("region", "prob", "summed"),
    [
        (REGION, "p = torch.sigmoid(logits.float())", "p.sum((1, 2))"),
        (REGION, "p = torch.sigmoid(logits)", "p.float().sum((1, 2))"),
        (REGION, "p = torch.sigmoid(logits)", "p.sum(dim=1)"),
        (REGION.replace("float16", "bfloat16"), "p = torch.sigmoid(logits)", "p.sum((1, 2))"),
    ],
)
def test_nothing_in_float32_or_over_few_values(region, prob, summed):
    """The logits or the probabilities are cast, a sum over classes is at most 1, and bfloat16 has no such limit."""
    assert "HS165" not in reported(DICE.format(region=region, prob=prob, summed=summed))
