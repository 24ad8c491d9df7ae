"""Loops in expressions train, fill tables and compute losses as statements do."""

import pytest

from simulated_scripts import codes

STEPPING = """
import collections
model, optimizer, scaler = Net(), None, torch.amp.GradScaler("cuda")
optimizer = torch.optim.AdamW(model.parameters())

def step(x):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
{clear}    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()

def other(opt):
    opt.zero_grad()

def run():
    for epoch in range(args.epochs):
        {loop}

run()
"""
LOOPS = {
    "list": "losses = [step(x) for x in loader]",
    "sum": "total = sum(step(x) for x in loader) / len(loader)",
    "enumerated": "means = {i: step(x) for i, x in enumerate(loader)}",
    "nested": "losses = [step(x) for shard in shards for x in shard]",
    "tested": "losses = [step(x) for x in loader if x is not None]",
    "map": "losses = list(map(step, loader))",
    "consumed": "collections.deque(map(step, loader), maxlen=0)",
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_comprehension_trains(loop):
    """A step in a comprehension runs again and again."""
    assert codes(STEPPING.format(loop=loop, clear="")) == ["HS156"]
    assert codes(STEPPING.format(loop=loop, clear="    optimizer.zero_grad()\n")) == []


GROUPS = """
class Group:
    def __init__(self, modules, scaler):
        self.params = {params}
        self.opt = torch.optim.Adam(self.params)
        self.scaler = scaler
    def backward(self, loss):
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()
    def apply(self):
        self.scaler.unscale_(self.opt)
        self.scaler.step(self.opt)
        self.scaler.update()

def mlp(width):
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU())

scaler = torch.amp.GradScaler("cuda")
actor, critic = mlp(8), mlp(8)
groups = {groups}
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        a = torch.stack([actor(part).mean() for part in x.chunk(2)]).mean()
        c = critic(x).mean()
    {order}
"""
RIGHT = """
    groups["actor"].backward(a)
    groups["actor"].apply()
    groups["critic"].backward(c)
    groups["critic"].apply()
"""
WRONG = """
    groups["actor"].backward(a)
    groups["critic"].backward(c)
    groups["actor"].apply()
    groups["critic"].apply()
"""


@pytest.mark.parametrize(
    "params", ["[p for m in modules for p in m.parameters()]", "[p for m in modules for _, p in m.named_parameters()]"]
)
@pytest.mark.parametrize(
    "groups",
    [
        "{'actor': Group([actor], scaler), 'critic': Group([critic], scaler)}",
        "{name: Group([net], scaler) for name, net in {'actor': actor, 'critic': critic}.items()}",
        "{f'{name}': Group([net], scaler) for name, net in [('actor', actor), ('critic', critic)]}",
    ],
)
def test_models_that_one_function_creates_are_two(params, groups):
    """One group's update between another's backward and step changes the scale of the gradients that wait."""
    assert codes(GROUPS.format(params=params, groups=groups, order=WRONG)) == ["HS108"]
    assert codes(GROUPS.format(params=params, groups=groups, order=RIGHT)) == []


def test_inputs_of_a_backward_are_what_it_reaches():
    """A backward pass with `inputs=` gives gradients to these parameters only."""
    text = GROUPS.replace("loss).backward()", "loss).backward(inputs=self.params)").replace(
        "c = critic(x)", "c = critic(actor(x))"
    )
    groups = "{'actor': Group([actor], scaler), 'critic': Group([critic], scaler)}"
    params = "[p for m in modules for p in m.parameters()]"
    assert codes(text.format(params=params, groups=groups, order=WRONG)) == ["HS108"]
    assert codes(text.format(params=params, groups=groups, order=RIGHT)) == []
