"""HS151: layers that a loop over the modules of a model casts to 16 bits."""

import pytest

from check_scripts import findings

LOOP = """\
import torch
from torch import nn
{head}
model = GPT().cuda()
{cast}
optimizer = {optimizer}(model.parameters(), lr=1e-3)
for x, y in loader:
    loss = model(x, y)
    loss.backward()
    optimizer.step()
"""
OWN = "class Muon(torch.optim.Optimizer):\n    def step(self):\n        for p in self.params:\n            p.add_({update})\n"
EACH = "for m in model.modules():\n    if isinstance(m, {layers}):\n        {cast}"


def text(cast, optimizer="torch.optim.AdamW", head=""):
    return LOOP.format(cast=cast, optimizer=optimizer, head=head)


@pytest.mark.parametrize(
    ("layers", "cast"),
    [
        ("nn.Linear", "m.bfloat16()"),
        ("(nn.Embedding, nn.Linear)", "m.weight.data = m.weight.data.bfloat16()"),
        ("(nn.Linear, nn.Conv2d)", "m.to(torch.bfloat16)"),
        ("nn.Linear", "m.weight.data = m.weight.to(dtype=torch.bfloat16)"),
    ],
)
def test_layers_that_a_plain_optimizer_updates(layers, cast):
    """The weights of these layers are 16-bit, and the optimizer has no other copy."""
    body = EACH.format(layers=layers, cast=cast)
    assert [f.line for f in findings(text(body), "HS151")] == [7]
    own = OWN.format(update="p.grad")
    assert len(findings(text(body, "Muon", own), "HS151")) == 1


@pytest.mark.parametrize(
    ("body", "head", "optimizer"),
    [
        (EACH.format(layers="nn.Embedding", cast="m.bfloat16()"), "", "torch.optim.AdamW"),
        (EACH.format(layers="nn.Linear", cast="m.float()"), "", "torch.optim.AdamW"),
        (EACH.format(layers="nn.Linear", cast="m.bias.data = m.bias.data.float()"), "", "torch.optim.AdamW"),
        (EACH.format(layers="nn.Linear", cast="m.bfloat16()").replace("model.", "teacher."), "", "torch.optim.AdamW"),
        (EACH.format(layers="nn.Linear", cast="m.bfloat16()") + "\nfreeze_backbone(model)", "", "torch.optim.AdamW"),
        (EACH.format(layers="nn.Linear", cast="m.bfloat16()"), OWN.format(update="self.mantissa[p]"), "Muon"),
        (EACH.format(layers="nn.Linear", cast="m.bfloat16()"), "from halfstep.optim import AdamW", "AdamW"),
    ],
)
def test_other_layers_models_and_optimizers_are_silent(body, head, optimizer):
    """Embeddings alone are a choice; frozen layers are not trained; an optimizer may keep the low bits."""
    assert findings(text(body, optimizer, head), "HS151") == []
