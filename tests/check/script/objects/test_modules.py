"""The classes whose forward runs under autocast."""

import pytest

from check_scripts import script

_CLASSES = """\
import torch
from torch import nn
class Attention(nn.Module):
    def forward(self, x):
        return x.masked_fill(m, -1e9)
class Head(nn.Module):
    def forward(self, x):
        return x
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.head = Head()
    def forward(self, x):
        with torch.autocast("cuda", enabled=False):
            y = self.head(x)
        return self.attention(x)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
class Other(nn.Module):
    def forward(self, x):
        return x
"""


@pytest.mark.parametrize(
    "training",
    [
        "model = Net().cuda()\nwith torch.autocast('cuda'):\n    y = model(x)\n",
        "model = Net()\nmodel = torch.compile(model)\nwith torch.autocast('cuda'):\n    y = model(x)\n",
        "model = nn.parallel.DistributedDataParallel(Net().cuda())\nother = Other()\nz = other(x)\n"
        "with torch.autocast('cuda'):\n    y = model(x)\n",
        "def losses(model, x):\n    return model(x)\ndef train(x):\n    model = Net()\n"
        "    with torch.autocast('cuda'):\n        y = losses(model, x)\n",
        "class T:\n    def __init__(self):\n        self.net = Net()\n    def fit(self, x):\n"
        "        with torch.autocast('cuda'):\n            self.net(x)\n",
    ],
)
def test_a_model_called_in_a_region_brings_the_classes_of_its_submodules(training):
    """The dtype of a region reaches the classes of a called model, but not those it calls with autocast disabled."""
    classes = script(_CLASSES + training).classes_under_autocast
    assert classes == dict.fromkeys(("Net", "Block", "Attention"), frozenset({"float16"}))


@pytest.mark.parametrize(
    "training",
    [
        "model = Net()\ny = model(x)\nwith torch.autocast('cuda'):\n    y = y.mean()\n",
        "model = Net()\nwith torch.autocast('cuda', enabled=False):\n    y = model(x)\n",
    ],
)
def test_a_model_outside_the_region_does_not_run_under_autocast(training):
    """A region that does not call the model, or is disabled, says nothing about its classes."""
    assert script(_CLASSES + training).classes_under_autocast == {}


def test_a_decorated_forward_runs_under_autocast():
    """`@autocast` on forward is a region around it."""
    text = "import torch\nclass A(torch.nn.Module):\n    @torch.autocast('cuda', dtype=torch.bfloat16)\n    def forward(self, x):\n        return x\n"
    assert script(text).classes_under_autocast == {"A": frozenset({"bfloat16"})}
