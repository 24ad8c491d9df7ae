"""HS105 and HS156: two optimizers that were made from the same parameters, stepped with one scaler."""

import pytest

from check_scripts import findings

LOOP = """\
import torch
{made}
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    {clear}
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    {first}
    {second}
    scaler.update()
"""
TWO = "first, second = torch.optim.AdamW({}), torch.optim.SGD({}, lr=0.1)"
WHOLE = "model.parameters()"
METHOD = """\
import torch
class Trainer:
    def __init__(self, net):
        self.net = net
        self.adam = torch.optim.AdamW(self.net.parameters())
        self.sgd = torch.optim.SGD(params=[p for p in self.net.parameters() if p.requires_grad], lr=0.1)
        self.scaler = torch.amp.GradScaler("cuda")
    def train(self, loader):
        for x in loader:
            self.adam.zero_grad()
            with torch.autocast("cuda"):
                loss = self.net(x).mean()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.adam)
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.scaler.step(self.adam)
            self.scaler.step(self.sgd)
            self.scaler.update()
"""


def lines(made, first="scaler.step(first)", second="scaler.step(second)", clear="first.zero_grad()"):
    """What HS105 and HS156 report."""
    text = LOOP.format(made=made, first=first, second=second, clear=clear)
    return [(f.code, f.line) for f in findings(text, "HS105", "HS156")]


@pytest.mark.parametrize("clear", ["first.zero_grad()", "second.zero_grad()", "model.zero_grad()"])
def test_the_second_step_divides_the_same_gradients_again(clear):
    """The scaler divides once per optimizer, and both optimizers have the gradients of the model."""
    made = TWO.format(WHOLE, WHOLE)
    assert lines(made, clear=clear) == [("HS105", 10)]
    assert lines(made, first="scaler.unscale_(first)", clear=clear) == [("HS105", 10)]
    assert [f.line for f in findings(METHOD, "HS105", "HS156")] == [17]


@pytest.mark.parametrize(
    ("made", "changes"),
    [
        (TWO.format("model.encoder.parameters()", "model.head.parameters()"), {}),
        (TWO.format("[p for n, p in model.named_parameters() if 'bias' in n]", WHOLE), {}),
        (TWO.format("matrices(model)", "vectors(model)"), {}),
        (TWO.format(WHOLE, "other.parameters()"), {}),
        (
            TWO.format(WHOLE, WHOLE),
            {"first": "if i < 9: scaler.step(first)", "second": "if i >= 9: scaler.step(second)"},
        ),
        (TWO.format(WHOLE, WHOLE), {"first": "chosen = first if early else second", "second": "scaler.step(chosen)"}),
        (
            "first = torch.optim.AdamW(model.parameters())\nmodel = Net()\nsecond = torch.optim.AdamW(model.parameters())",
            {},
        ),
        (
            TWO.format(WHOLE, WHOLE),
            {
                "second": "scaler.update()\n    first.zero_grad()\n    scaler.scale(model(x)).backward()\n    scaler.step(second)"
            },
        ),
    ],
)
def test_other_parameters_or_other_gradients(made, changes):
    """Each step has gradients of its own, or only one of the two runs."""
    assert [code for code, _ in lines(made, clear="model.zero_grad()", **changes) if code == "HS105"] == []
