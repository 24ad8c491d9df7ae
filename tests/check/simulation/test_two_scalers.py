"""Two scalers in simulated runs: a loss that one has scaled and the other one steps on."""

import pytest

from simulated_scripts import codes

GAN = """
def train(netG, netD, loader):
    optG, optD = torch.optim.Adam(netG.parameters()), torch.optim.Adam(netD.parameters())
    scaler_g = torch.amp.GradScaler("cuda")
    scaler_d = {second}
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss_d = -netD(x).mean()
        optD.zero_grad()
        scaler_d.scale(loss_d).backward()
        scaler_d.step(optD)
        scaler_d.update()
        with torch.autocast("cuda", dtype=torch.float16):
            loss_g = netG(x).mean()
        optG.zero_grad()
        {used}.scale(loss_g).backward()
        scaler_g.step(optG)
        scaler_g.update()
"""


@pytest.mark.parametrize(
    ("second", "used", "expected"),
    [
        ('torch.amp.GradScaler("cuda")', "scaler_g", []),
        ('torch.amp.GradScaler("cuda")', "scaler_d", ["HS102"]),
        ("scaler_g", "scaler_d", []),
        ("make_scaler()", "scaler_d", []),
    ],
    ids=["right", "other", "same", "unknown"],
)
def test_a_loss_that_the_other_scaler_has_scaled(second, used, expected):
    """A scaler divides by its own scale; two names may be one scaler."""
    assert codes(GAN.format(second=second, used=used)) == expected
