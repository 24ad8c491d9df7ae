"""HS102 and HS104 around a second backward of an adversarial attack, which a method of another class runs."""

from check_scripts import reported

ATTACK = """\
import torch

class Attack:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def backward(self, x, y{scaler}):
        loss = self.model(x, y)
        self.optimizer.zero_grad()
        {backward}

def train(model, optimizer, loader, attacked):
    scaler = torch.amp.GradScaler("cuda")
    attack = Attack(model, optimizer)
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        if attacked:
            attack.backward(x, y{passed})
{before}        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
UNSCALE = "        scaler.unscale_(optimizer)\n"


def test_an_attack_that_does_not_scale_is_reported():
    """An unscaled backward in a method is HS102, although the first loss of the iteration is scaled and used up."""
    text = ATTACK.format(scaler="", passed="", backward="loss.backward()", before=UNSCALE)
    assert reported(text) == {"HS102"}


def test_a_clip_after_an_optional_attack_is_reported():
    """Without the attack the gradients are still scaled where they are clipped."""
    text = ATTACK.format(scaler=", scaler", passed=", scaler", backward="scaler.scale(loss).backward()", before="")
    assert "HS104" in reported(text)


def test_an_attack_that_scales_is_accepted():
    """Both backwards scaled, and unscaled before the clip."""
    text = ATTACK.format(scaler=", scaler", passed=", scaler", backward="scaler.scale(loss).backward()", before=UNSCALE)
    assert reported(text) == set()
