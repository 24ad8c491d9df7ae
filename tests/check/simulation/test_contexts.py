"""Code around a `yield`, in `__enter__` and in decorators of the script runs where Python runs it."""

import textwrap

import pytest

from simulated_scripts import codes

SETUP = """
import functools
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
UNSCALE = "scaler.unscale_(optimizer)"
AROUND = {
    "context": """
@contextlib.contextmanager
def stepping():
    optimizer.zero_grad()
    yield
    {unscale}
    {clip}
    scaler.step(optimizer)
    scaler.update()

for x in loader:
    with stepping(), torch.autocast("cuda", dtype=torch.float16):
        scaler.scale(model(x)).backward()
""",
    "finally": """
@contextlib.contextmanager
def stepping(opt):
    opt.zero_grad()
    try:
        yield opt
    finally:
        {unscale}
        {clip}
        scaler.step(opt)
        scaler.update()

for x in loader:
    with stepping(optimizer) as opt:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
""",
    "class": """
class Stepping:
    def __init__(self, opt):
        self.opt = opt
    def __enter__(self):
        self.opt.zero_grad()
        return self
    def loss(self, value):
        scaler.scale(value).backward()
    def __exit__(self, kind, error, trace):
        {unscale}
        {clip}
        scaler.step(self.opt)
        scaler.update()

for x in loader:
    with Stepping(optimizer) as window:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        window.loss(loss)
""",
    "generator": """
def batches(loader):
    for x in loader:
        optimizer.zero_grad()
        yield x
        {unscale}
        {clip}
        scaler.step(optimizer)
        scaler.update()

for i, x in enumerate(batches(loader)):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
""",
    "consumed": """
def epoch(loader):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        {unscale}
        {clip}
        scaler.step(optimizer)
        scaler.update()
        yield loss.item()

def epochs():
    for _ in range(args.epochs):
        yield from epoch(loader)

mean = sum(epochs()) / 10
""",
    "decorator": """
def stepping(opt):
    def wrap(function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            opt.zero_grad()
            loss = function(*args, **kwargs)
            scaler.scale(loss).backward()
            {unscale}
            {clip}
            scaler.step(opt)
            scaler.update()
            return loss.detach()
        return inner
    return wrap

@stepping(optimizer)
def compute(x):
    with torch.autocast("cuda", dtype=torch.float16):
        return model(x)

for x in loader:
    compute(x)
""",
    "method": """
def stepping(method):
    def inner(self, *args):
        self.optimizer.zero_grad()
        method(self, *args)
        {unscale}
        {clip}
        scaler.step(self.optimizer)
        scaler.update()
    return inner

class Trainer:
    def __init__(self, optimizer):
        self.optimizer = optimizer
    @stepping
    def train(self, x):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()

trainer = Trainer(optimizer)
for x in loader:
    trainer.train(x)
""",
    "registry": """
STEPS = {{}}

def register(name):
    def add(function):
        STEPS[name] = function
        return function
    return add

@register("amp")
def amp_step(x):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    {unscale}
    {clip}
    scaler.step(optimizer)
    scaler.update()

@register("plain")
def plain_step(x):
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()

for x in loader:
    STEPS[args.mode](x)
""",
    "events": """
from collections import defaultdict

class Bus:
    def __init__(self):
        self.handlers = defaultdict(list)
    def on(self, event):
        def add(function):
            self.handlers[event].append(function)
            return function
        return add
    def emit(self, event, *args):
        for function in self.handlers[event]:
            function(*args)

bus = Bus()

@bus.on("backward")
def limit(opt):
    {unscale}
    {clip}

for x in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    bus.emit("backward", optimizer)
    scaler.step(optimizer)
    scaler.update()
""",
    "dataclass": """
from dataclasses import dataclass

@dataclass
class Stepper:
    model: torch.nn.Module
    lr: float = 1e-3

    def __post_init__(self):
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=self.lr)
        self.step_fn = self._amp

    def _amp(self, x):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x)
        scaler.scale(loss).backward()
        {unscale}
        {clip}
        scaler.step(self.opt)
        scaler.update()

stepper = Stepper(model)
for x in loader:
    stepper.step_fn(x)
""",
}


@pytest.mark.parametrize("text", AROUND.values(), ids=AROUND)
def test_what_runs_around_a_step(text):
    """A clip without `unscale_` is found, and the correct order is silent, wherever the statements are."""
    unscale = UNSCALE
    for name in ("self.optimizer", "self.opt", "scaler.step(opt)"):
        if name in text:
            unscale = f"scaler.unscale_({name.removeprefix('scaler.step(').rstrip(')')})"
            break
    assert codes(SETUP + text.format(unscale=unscale, clip=CLIP)) == []
    assert codes(SETUP + text.format(unscale="pass", clip=CLIP)) == ["HS104"]


REGIONS = {
    "stack": "    with contextlib.ExitStack() as stack:\n        {enter}\n        loss = model(x)\n",
    "entered": "    region = torch.autocast('cuda', dtype=torch.float16)\n    {open}\n    loss = model(x)\n    {close}\n",
}


@pytest.mark.parametrize("device", ["float16", "bfloat16"])
def test_a_region_of_a_stack_is_open(device):
    """A run steps on the gradients of a float16 region without a scaler, which a stack or a call has entered."""
    loop = SETUP + "for x in loader:\n    optimizer.zero_grad()\n{region}    loss.backward()\n    optimizer.step()\n"
    expected = ["HS123"] if device == "float16" else []
    stack = REGIONS["stack"].format(enter="stack.enter_context(torch.autocast('cuda', dtype=torch.float16))")
    entered = REGIONS["entered"].format(open="region.__enter__()", close="region.__exit__(None, None, None)")
    for region in (stack, entered):
        assert codes(loop.format(region=region.replace("float16", device))) == expected
    closed = entered.replace(
        "    loss = model(x)\n    region.__exit__(None, None, None)",
        "    region.__exit__(None, None, None)\n    loss = model(x)",
    )
    assert codes(loop.format(region=closed)) == []


def test_a_loop_that_leaves_a_generator_closes_it():
    """`break` in the loop ends the generator there: nothing after its `yield` runs."""
    text = """
    def windows():
        while True:
            optimizer.zero_grad()
            yield next(batches)
            scaler.step(optimizer)
            scaler.update()

    for x in windows():
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        if args.dry:
            break
        scaler.scale(loss).backward()
    """

    assert codes(SETUP + textwrap.dedent(text)) == []
