"""HS104, HS112 and HS119: an adversarial backward, a step in one branch of a method, and gradients that stay inf."""

import pytest

from check_scripts import findings


def reported(text, code):
    """The lines at which a rule is reported."""
    return [f.line for f in findings(text, code)]


ATTACK = """\
import torch
scaler = torch.amp.GradScaler('cuda')
for x in loader:
    with torch.autocast('cuda'):
        loss = model(x)
    scaler.scale(loss).backward()
    {attack}
    {unscale}
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("attack", "unscale", "expected"),
    [
        ("if cfg.fgm: fgm.attack(); model(x).backward()", "pass", [9]),
        ("if cfg.fgm: fgm.attack(); model(x).backward()", "if cfg.unscale: scaler.unscale_(optimizer)", [9]),
        ("if cfg.fgm and epoch > 2: model(x).backward()", "pass", [9]),
        ("if cfg.fgm: scaler.scale(model(x)).backward()", "pass", [9]),
        ("if cfg.fgm: fgm.attack(); model(x).backward()", "scaler.unscale_(optimizer)", []),
        ("model(x).backward()", "pass", []),  # HS102: not every gradient is scaled
    ],
)
def test_the_path_without_an_adversarial_loss_has_scaled_gradients(attack, unscale, expected):
    """A backward without the scale under a condition of its own says nothing about the runs without it."""
    assert reported(ATTACK.format(attack=attack, unscale=unscale), "HS104") == expected


METHOD = """\
import math
import torch
class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler('cuda')
    def {name}(self, x):
        with torch.autocast('cuda'):
            loss = self.model(x)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if {test}:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            return True
        else:
            {other}
"""


@pytest.mark.parametrize(
    ("name", "test", "other", "expected"),
    [
        ("train_step", "math.isfinite(norm)", "return False", [10]),
        ("train_one_batch", "math.isfinite(norm)", "self.reporter.log('skipped'); return False", [10]),
        ("train_step", "not torch.isnan(norm)", "return None", [10]),
        ("train_step", "norm < 1e4", "return False", [10]),
        ("train_step", "math.isfinite(norm)", "raise FloatingPointError", []),
        ("train_step", "math.isfinite(norm)", "self.scaler.update(); return False", []),
        ("train_step", "self.last", "return False", []),
        ("run", "math.isfinite(norm)", "return False", []),  # may be the end of training
    ],
)
def test_a_return_from_the_other_branch_skips_the_update(name, test, other, expected):
    """In a method for one batch `return` in the branch without update means the next batch, whose unscale_ raises."""
    assert reported(METHOD.format(name=name, test=test, other=other), "HS112") == expected


PLAIN = """\
import math
import torch
optimizer.zero_grad()
for x in loader:
    with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = model(x)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    {flag}
    if {test}:
        optimizer.step()
        optimizer.zero_grad()
    {other}
"""


@pytest.mark.parametrize(
    ("flag", "test", "other", "expected"),
    [
        ("pass", "math.isfinite(norm)", "pass", [10]),
        ("pass", "torch.isfinite(norm)", "else: print('skipped')", [13]),
        ("pass", "not torch.isnan(norm)", "pass", [10]),
        ("good = torch.isfinite(norm)", "good", "else: num_skipped += 1", [13]),
        ("pass", "torch.isfinite(norm).all()", "pass", [10]),
        ("pass", "math.isfinite(norm)", "else: optimizer.zero_grad()", []),
        ("pass", "math.isfinite(norm)", "else: model.zero_grad(set_to_none=True)", []),
        ("pass", "math.isfinite(norm)", "else: raise FloatingPointError", []),
        ("pass", "math.isfinite(norm)", "else: recover(model, optimizer)", []),
        ("pass", "(i + 1) % accum == 0", "pass", []),
        ("optimizer.zero_grad()", "math.isfinite(norm)", "pass", []),
    ],
)
def test_gradients_are_cleared_after_a_skipped_step_too(flag, test, other, expected):
    """inf plus anything is not finite, so gradients that stay inf stop every later step."""
    assert reported(PLAIN.format(flag=flag, test=test, other=other), "HS119") == expected


def test_gradients_in_float32_are_not_a_matter_of_precision():
    """Without autocast, Apex or a scaler nothing overflows by design."""
    text = PLAIN.format(flag="pass", test="math.isfinite(norm)", other="pass")
    assert reported(text.replace("with torch.autocast('cuda', dtype=torch.bfloat16)", "if True"), "HS119") == []
