"""HS108 where the loss of one model leaves gradients in another one, whose step comes after an update of the scale."""

import pytest

from check_scripts import findings

GAN = """\
import torch
scaler = torch.amp.GradScaler("cuda")
opt_g = torch.optim.Adam(net_g.parameters())
opt_d = torch.optim.Adam(net_d.parameters())
for real, z in loader:
{body}"""
GENERATOR = """\
    with torch.autocast("cuda", dtype=torch.float16):
        fake = net_g(z)
        score = {score}
        loss_g = bce(score, ones) + l1(fake, real)
    scaler.scale(loss_g).backward()
    scaler.step(opt_g)
{after}"""
DISCRIMINATOR = """\
    with torch.autocast("cuda", dtype=torch.float16):
        score = net_d(net_g(z).detach())
        loss_d = bce(net_d(real), ones) + bce(score, zeros)
    scaler.scale(loss_d).backward()
    scaler.step(opt_d)
"""
UPDATE = "    scaler.update()\n"
CLEAR_G, CLEAR_D = "    opt_g.zero_grad()\n", "    opt_d.zero_grad()\n"


def lines(body: str) -> list[int]:
    """The lines that HS108 reports in the loop with a body."""
    return [f.line for f in findings(GAN.format(body=body), "HS108")]


def generator(after: str, score: str = "net_d(fake)") -> str:
    """The half of the loop that trains the generator."""
    return GENERATOR.format(score=score, after=after)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (generator(UPDATE + CLEAR_G) + DISCRIMINATOR + UPDATE + CLEAR_D, [12]),
        (generator(UPDATE + CLEAR_G, "net_d.forward(fake)") + DISCRIMINATOR + UPDATE + CLEAR_D, [12]),
        # In the next iteration.
        (DISCRIMINATOR + UPDATE + CLEAR_D + generator(UPDATE + CLEAR_G), [19]),
        (DISCRIMINATOR + CLEAR_D + generator(UPDATE + CLEAR_G), [18]),
    ],
)
def test_gradients_of_another_loss_have_the_scale_before_the_update(body, expected):
    """Both orders of the two models, and both places of the update."""
    assert lines(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        generator(UPDATE + CLEAR_G + CLEAR_D) + DISCRIMINATOR + UPDATE,
        generator(UPDATE + CLEAR_G + "    net_d.zero_grad()\n") + DISCRIMINATOR + UPDATE,
        generator(CLEAR_G) + DISCRIMINATOR + UPDATE + CLEAR_D,
        generator(UPDATE + CLEAR_G, "net_d(fake).detach()") + DISCRIMINATOR + UPDATE + CLEAR_D,
        generator(UPDATE + CLEAR_G, "frozen_d(fake)") + DISCRIMINATOR + UPDATE + CLEAR_D,
        "    net_d.requires_grad_(False)\n"
        + generator(UPDATE + CLEAR_G + "    net_d.requires_grad_(True)\n")
        + DISCRIMINATOR
        + UPDATE
        + CLEAR_D,
        CLEAR_D + DISCRIMINATOR + UPDATE + generator(UPDATE + CLEAR_G),
        CLEAR_D + DISCRIMINATOR + CLEAR_G + generator(UPDATE),
    ],
)
def test_gradients_that_are_cleared_or_never_reach_the_other_model(body):
    """A zero_grad of the other optimizer or model, one update, a detached output, and a model without gradients."""
    assert lines(body) == []
