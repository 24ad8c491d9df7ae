"""Divisions of a loss are counted through the script's own objects and functions."""

import pytest

from simulated_scripts import codes

LOOP = """
args = parser.parse_args()
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")

class Criterion:
    def __init__(self, window):
        self.window = window
    def __call__(self, output, target):
        return torch.nn.functional.mse_loss(output, target){inside}

class Settings:
    def __init__(self, args):
        self.args = args
    @property
    def micro(self):
        return self.args.accumulate

def shrink(value, number):
    return value / number

settings = Settings(args)
criterion = Criterion(args.accumulate)
factor = 1 / args.accumulate
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    log(loss.item() / args.accumulate)
    {divide}
    scaler.scale(loss).backward()
    if (i + 1) % args.accumulate == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
DIVISIONS = (
    "loss = loss / args.accumulate",
    "loss /= settings.micro",
    "loss = loss.div(args.accumulate)",
    "loss = loss * factor",
    "loss = shrink(loss, settings.micro)",
    "loss = sum(part / args.accumulate for part in [loss, loss])",
)


@pytest.mark.parametrize("divide", DIVISIONS)
@pytest.mark.parametrize("inside", [" / self.window", " * (1 / self.window)"])
def test_a_loss_that_is_divided_in_an_object_too(divide, inside):
    """The criterion divides by the number of micro-batches, and the loop divides again."""
    assert codes(LOOP.format(inside=inside, divide=divide)) == ["HS182"]
    assert codes(LOOP.format(inside="", divide=divide)) == []
    assert codes(LOOP.format(inside=inside, divide="pass")) == []


def test_divisions_by_two_numbers_are_two_averages():
    """Micro-batches of several ranks, or of a sequence, are another number."""
    assert codes(LOOP.format(inside=" / self.window", divide="loss = loss / args.world_size")) == []
    assert codes(LOOP.format(inside=" / self.window", divide="loss = loss / args.micro_steps")) == []
