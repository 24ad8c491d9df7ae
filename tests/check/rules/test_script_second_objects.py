"""What belongs to one object says nothing about another: options and attributes, two optimizers, two classes, two loops."""

import pytest

from check_scripts import findings


def lines(text, code):
    """The lines at which a rule is reported."""
    return [f.line for f in findings(text, code)]


OPTION = """\
import argparse
import torch
class Trainer({base}):
    def __init__(self, amp):
        {store}
    def fit(self, x):
        self.model(x).backward()
parser = argparse.ArgumentParser()
parser.add_argument('--amp', action='store_true', default=True)
args = parser.parse_args()
cfg = {created}
{after}
"""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [9]),
        ({"store": "self.amp = amp and torch.cuda.is_available()"}, [9]),
        ({"after": "cfg.amp = args.amp"}, [9]),
        ({"after": "args.amp = cfg.amp"}, []),
        ({"after": "cfg.amp = args.amp and args.device == 'cuda'"}, []),
        ({"created": "args", "after": "cfg.amp = args.amp"}, []),
        ({"after": "args.amp = False"}, []),
        # The object is the namespace itself.
        ({"store": "self.amp = False", "after": "parser.parse_args(namespace=self)"}, []),
        ({"store": "self.amp = False", "after": "self.add_argument('--lr', type=float)"}, []),
    ],
)
def test_an_attribute_of_another_object_does_not_switch_an_option(changes, expected):
    """HS133: only an assignment to the namespace changes the value of an option."""
    parts = {"base": "object", "store": "self.amp = amp", "created": "Config()", "after": "pass"}
    assert lines(OPTION.format(**(parts | changes)), "HS133") == expected


GAN = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, x in enumerate(loader):
    opt_g.zero_grad()
    for part in x:
        with torch.autocast("cuda", dtype=torch.float16):
            g_loss = adversarial(disc(gen(part)))
        scaler.scale(g_loss).backward()
    scaler.unscale_(opt_g)
    torch.nn.utils.clip_grad_norm_(gen.parameters(), 1.0)
    scaler.step(opt_g)
    scaler.update()
    if {condition}:
        opt_d.zero_grad()
        with torch.autocast("cuda", dtype=torch.{dtype}):
            d_loss = adversarial(disc(x))
        {backward}
"""
PLAIN = "d_loss.backward()\n        opt_d.step()"
SCALED = "scaler.scale(d_loss).backward()\n        scaler.step(opt_d)"


@pytest.mark.parametrize(
    ("condition", "dtype", "backward", "expected"),
    [
        ("i > warmup", "float16", PLAIN, [17]),
        ("disc is not None and i % 2", "float16", PLAIN, [17]),
        ("i > warmup", "bfloat16", PLAIN, []),
        ("i > warmup", "float16", SCALED, []),
        # The scaler serves this optimizer too, or may.
        ("i > warmup", "float16", f"{PLAIN}\n        scaler.unscale_(opt_d)", []),
        ("i > warmup", "float16", f"train(scaler)\n        {PLAIN}", []),
        ("not args.amp", "float16", PLAIN, []),
    ],
)
def test_a_scaler_of_one_optimizer_does_not_serve_the_other(condition, dtype, backward, expected):
    """HS123: the discriminator is trained without the scaler, also if its update waits and the generator accumulates."""
    assert lines(GAN.format(condition=condition, dtype=dtype, backward=backward), "HS123") == expected


def test_a_scaled_backward_of_another_branch_says_nothing():
    """HS123: where the scaled backward does not always run, the plain one may be the one without mixed precision."""
    text = GAN.format(condition="i > warmup", dtype="float16", backward=PLAIN)
    text = text.replace("        scaler.scale(g_loss)", "        if part.fast: scaler.scale(g_loss)")
    assert lines(text, "HS123") == []


CONTEXT = """\
import contextlib
import torch
def context(device, {parameter}):
    if {test}:
        return torch.autocast("cuda", dtype=torch.float16)
    return contextlib.nullcontext()
def train(model, loader, optimizer, args, device):
    scaler = torch.amp.GradScaler("cuda") if use_amp(args) else None
    for x in loader:
        optimizer.zero_grad()
        with context(device, use_amp(args)):
            loss = model(x)
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("parameter", "test", "expected"),
    [
        ("enabled", "enabled", []),
        ("enabled", "enabled and device.type == 'cuda'", []),
        ("_", "device.type == 'cuda'", [18]),
        ("_", "torch.cuda.is_available()", [18]),
    ],
)
def test_a_function_that_tests_a_flag_returns_no_region_without_it(parameter, test, expected):
    """HS123: the branch without the scaler has no float16 region if the function that returns the region tests a flag."""
    assert lines(CONTEXT.format(parameter=parameter, test=test), "HS123") == expected


CLASSES = """\
import torch
class Student:
    def __init__(self, model):
        self.model = model
    def train_step(self, x, optimizer):
        {train}loss = self.model(x)
        {last}
    def evaluate(self, val_loader):
        self.model.eval()
        with torch.no_grad():
            for x in val_loader:
                out = self.model(x)
def train(model, loader, optimizer):
    for x in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x)
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("train", "last", "expected"),
    [
        ("", "loss.backward()", []),
        ('with torch.autocast("cuda", dtype=torch.bfloat16): ', "loss.backward()", [12]),
        ("with context(): ", "loss.backward()", [12]),
        ("", "return loss", [12]),
    ],
)
def test_a_class_that_trains_in_float32_validates_in_float32(train, last, expected):
    """HS149: the function of the file that trains under autocast is another loop than that of the class."""
    assert lines(CLASSES.format(train=train, last=last), "HS149") == expected


CHUNKS = """\
import torch
class Trainer:
    def losses(self, batch, train):
        for frame in batch:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = self.model(frame)
            if train:
                (loss / self.cfg.accumulation_steps).backward()
    def training_step(self, batch):
        {clear}
        self.losses(batch, train=True)
    def fit(self, loader):
        for i, batch in enumerate(loader):
            self.training_step(batch)
            if {end}:
                self.optimizer.step()
                self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("clear", "end", "expected"),
    [
        ("self.optimizer.zero_grad()", "(i + 1) % self.cfg.accumulation_steps == 0", [10]),
        ("self.model.zero_grad()", "(i + 1) % self.cfg.accumulation_steps == 0", [10]),
        ("self.model.train()", "(i + 1) % self.cfg.accumulation_steps == 0", []),
        ("self.optimizer.zero_grad()", "True", []),
    ],
)
def test_an_inner_loop_of_backwards_is_part_of_a_micro_batch(clear, end, expected):
    """HS181: gradients are cleared on every micro-batch also where each has several backwards."""
    assert lines(CHUNKS.format(clear=clear, end=end), "HS181") == expected


def test_a_loop_of_micro_batches_is_cleared_before_it():
    """HS181: where the inner loop is the window, the gradients are cleared once, before it."""
    text = (
        "import torch\nfor batch in loader:\n    optimizer.zero_grad()\n    for micro in batch.chunk(accumulation_steps):\n"
        '        with torch.autocast("cuda", dtype=torch.bfloat16):\n            loss = model(micro) / accumulation_steps\n'
        "        loss.backward()\n    optimizer.step()\n"
    )
    assert lines(text, "HS181") == []
