"""Models whose layers are cast to float16 one after another, all but the norms, and trained so."""

import pytest

from check_scripts import reported

NET = """\
import torch
from torch import nn
import torch.nn.functional as F

class Norm(nn.BatchNorm2d):
    pass

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 64, 3), Norm(64))
        self.head = nn.Linear(64, 10)
{own}
    def forward(self, x):
        return self.head(self.body(x).flatten(1)) / 8

class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])
{functions}
def main(model):
    filters = [p for p in model.parameters() if p.ndim == 4]
    first = torch.optim.SGD([dict(params=[model.head.weight], lr=0.5)], momentum=0.9)
    for x, y in loader:
        logits = model(x)
        F.cross_entropy(logits, y, label_smoothing=0.2, reduction="sum").backward()
        for optimizer in (first, Muon(filters, lr=0.1)):
            optimizer.step()
        model.zero_grad(set_to_none=True)

model = Net().cuda()
{cast}
main(model)
"""
OWN = {
    "branches": "        for part in self.modules():\n            if isinstance(part, Norm):\n                part.float()\n            else:\n                part.half()\n",
    "children": "        for part in self.children():\n            if type(part) is not Norm:\n                part.to(torch.float16)\n",
    "named": "        for name, part in self.named_modules():\n            if 'norm' not in name:\n                part.half()\n",
}
LOWER = "def lower(m):\n    if not isinstance(m, (Norm, nn.LayerNorm)):\n        m.half()\n"
SWEEP = "def lower(net):\n    for layer in net.modules():\n        if not isinstance(layer, Norm):\n            layer.half()\n    return net\n"


def of_weights(own="", functions="", cast=""):
    """The codes about 16-bit weights and losses of the script."""
    return reported(NET.format(own=own, functions=functions, cast=cast)) & {"HS161", "HS154"}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_a_constructor_casts_its_layers(own):
    """The loop over its own layers is a cast of the model, whatever keeps its norms in float32."""
    assert of_weights(own) == {"HS161", "HS154"}


@pytest.mark.parametrize(
    ("functions", "cast"),
    [(LOWER, "model.apply(lower)"), (SWEEP, "model = lower(model)"), ("", "model.half()")],
)
def test_a_function_casts_the_layers_of_a_model(functions, cast):
    """Applied to each of them, or in a loop of its own."""
    assert of_weights(functions=functions, cast=cast) == {"HS161", "HS154"}


@pytest.mark.parametrize(
    ("own", "functions", "cast"),
    [
        ("        for m in self.modules():\n            if isinstance(m, Norm):\n                m.half()\n", "", ""),
        ("", SWEEP, "fast = lower(Net())"),
        ("", LOWER, "Net().apply(lower)"),
        ("", LOWER, "model.apply(lower)\nmodel.float()"),
    ],
)
def test_nothing_where_the_trained_layers_keep_float32(own, functions, cast):
    """Only norms are cast, another model is, or the weights return to float32."""
    assert of_weights(own, functions, cast) == set()
