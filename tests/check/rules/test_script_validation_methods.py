"""HS149: validations by a method that subclasses define, and validations that draw some of their results."""

import pytest

from check_scripts import findings

TRAINER = """\
import torch
class BaseTrainer:
    def autocast(self):
        return torch.autocast("cuda", dtype=torch.float16)
    def compute_loss(self, batch):
        raise NotImplementedError
    def step(self, batch):
        with self.autocast():
            loss = self.compute_loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
    @torch.no_grad()
    def {name}(self, loader):
        self.model.eval()
        {body}
class Trainer(BaseTrainer):
    def __init__(self, model):
        self.model, self.scaler = model, torch.amp.GradScaler("cuda")
        self.optimizer = torch.optim.AdamW(model.parameters())
    def compute_loss(self, batch):
        return {loss}
"""


@pytest.mark.parametrize(
    ("name", "body", "loss", "is_reported"),
    [
        ("validate", "return sum(self.compute_loss(b).item() for b in loader)", "self.model(batch).mean()", True),
        ("eval_epoch", "for b in loader:\n            log(self.compute_loss(b))", "self.model(batch).mean()", True),
        (
            "validate",
            "with self.autocast():\n            return self.compute_loss(loader)",
            "self.model(batch).mean()",
            False,
        ),
        ("validate", "return self.compute_loss(loader)", "self.in_mixed_precision(batch)", False),
        ("predict", "return self.compute_loss(loader)", "self.model(batch).mean()", False),
    ],
)
def test_methods_left_to_subclasses(name, body, loss, is_reported):
    """A method that raises NotImplementedError in the class that trains runs without autocast where validation calls it outside."""
    text = TRAINER.replace("{name}", name).replace("{body}", body).replace("{loss}", loss)
    assert bool(findings(text, "HS149")) is is_reported


DRAWING = """\
import torch
scaler = torch.amp.GradScaler("cuda")
def train():
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
def {name}():
    total = 0.0
    with torch.no_grad():
        for i, (x, y) in enumerate(loader):
            if i >= {limit}:
                break
            out = model(x)
            total += loss_fn(out, y).item()
            if i % 10 == 0:
                save_image(out, f"{i}.png")
    return total
"""


@pytest.mark.parametrize(
    ("name", "limit", "is_reported"),
    [("validate", "num_valid_batches", True), ("validate", "4", False), ("draw_samples", "num_batches", False)],
)
def test_validations_that_draw(name, limit, is_reported):
    """A validation of as many batches as a setting says is one, although it draws some of them; a few examples are a picture."""
    assert bool(findings(DRAWING.replace("{name}", name).replace("{limit}", limit), "HS149")) is is_reported
