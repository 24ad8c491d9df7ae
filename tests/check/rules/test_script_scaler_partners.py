"""HS104, HS123, HS131, HS134, HS142: scalers, regions, devices and windows that are decided in different places."""

import pytest

from check_scripts import findings

CHOSEN = """\
import torch
from contextlib import nullcontext

{made}
{context}
for x, y in loader:
    optimizer.zero_grad()
    with ctx:
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
ALWAYS = "scaler = torch.amp.GradScaler('cuda')"
CAST = "torch.autocast('cuda', dtype=torch.float16)"


@pytest.mark.parametrize(
    "context",
    [
        f"ctx = {CAST} if args.amp else nullcontext()",
        f"ctx = nullcontext() if not args.amp else {CAST}",
        f"ctx = {CAST} if args.amp and torch.cuda.is_available() else nullcontext()",
        f"if args.amp:\n    ctx = {CAST}\nelse:\n    ctx = nullcontext()",
        f"ctx = nullcontext()\nif args.amp:\n    ctx = {CAST}",
    ],
)
def test_a_scaler_is_always_enabled_beside_a_null_context(context):
    """HS134: an option that replaces the region by `nullcontext()` leaves the scaler enabled, however the choice is written."""
    (finding,) = findings(CHOSEN.format(made=ALWAYS, context=context), "HS134")
    assert "when `args.amp` is false" in finding.message
    assert finding.severity == "advice"


def test_a_null_context_is_returned():
    """HS134: the same of a method that returns the region or `nullcontext()`."""
    made = f"{ALWAYS}\ndef region():\n    if args.amp:\n        return {CAST}\n    return nullcontext()"
    text = CHOSEN.format(made=made, context="").replace("with ctx:", "with region():")
    assert [f.line for f in findings(text, "HS134")] == [4]


@pytest.mark.parametrize(
    "context",
    [
        f"ctx = nullcontext() if args.dtype == 'float32' else {CAST}",
        "ctx = torch.autocast('cuda', dtype=torch.float16, enabled=args.dtype != 'float32')",
    ],
)
@pytest.mark.parametrize("made", [ALWAYS, "scaler = torch.amp.GradScaler('cuda', enabled=True)"])
def test_a_region_that_one_format_switches_off(made, context):
    """HS134: a region that the name of a format switches off, next to a scaler that is always enabled."""
    (finding,) = findings(CHOSEN.format(made=made, context=context), "HS134")
    assert "when `dtype` is 'float32'" in finding.message
    assert finding.severity == "advice"


@pytest.mark.parametrize(
    ("made", "context"),
    [
        ("scaler = torch.amp.GradScaler('cuda', enabled=args.amp)", f"ctx = {CAST} if args.amp else nullcontext()"),
        # without CUDA the scaler does nothing
        (ALWAYS, f"ctx = {CAST} if torch.cuda.is_available() else nullcontext()"),
        (ALWAYS, f"ctx = nullcontext() if args.device == 'cpu' else {CAST}"),
        # the other arm is a region as well
        (ALWAYS, f"ctx = {CAST} if args.amp else torch.autocast('cuda', dtype=torch.half)"),
        # a variable that the file sets
        (ALWAYS, f"amp = True\nctx = {CAST} if amp else nullcontext()"),
    ],
)
def test_a_scaler_and_a_null_context_that_agree(made, context):
    """HS134 is silent where the scaler is off with the region, or nothing switches the region off."""
    assert not findings(CHOSEN.format(made=made, context=context), "HS134")


ON_CPU = """\
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
{before}
scaler = torch.amp.GradScaler(enabled={flag})
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast(device_type={region}, dtype={dtype}{enabled}):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
PLAIN = {"before": "", "flag": "device != 'cpu'", "region": "device", "dtype": "torch.float16", "enabled": ""}


@pytest.mark.parametrize("change", [{}, {"flag": "device == 'cuda'"}, {"enabled": ", enabled=args.amp"}])
def test_float16_on_the_cpu(change):
    """HS123: a scaler that its own condition disables on the CPU, with a region that is float16 on every device."""
    (finding,) = findings(ON_CPU.format(**PLAIN | change), "HS123")
    assert finding.message.startswith("on the CPU the scaler is disabled")
    assert finding.severity == "warning"


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "torch.float16 if device == 'cuda' else torch.bfloat16"},
        {"enabled": ", enabled=device == 'cuda'"},
        {"enabled": ", enabled=device != 'cpu'"},
        {"region": "'cuda'"},
        {"before": "if device == 'cpu':\n    raise SystemExit('needs a GPU')"},
        {"before": "assert torch.cuda.is_available()"},
        {"flag": "True"},
    ],
)
def test_float16_on_cuda_alone(change):
    """HS123 is silent where the region is off or bfloat16 on the CPU, or the script ends without CUDA."""
    assert not [f for f in findings(ON_CPU.format(**PLAIN | change), "HS123") if "on the CPU" in f.message]


BRANCHES = """\
import torch

def train(model, optimizer, loader, device="cuda", precision="bf16"):
    if precision == "bf16":
        dtype, on = torch.bfloat16, True
        scaler = torch.amp.GradScaler(enabled=False)
    elif precision == "fp16":
        dtype = torch.float16
        on = {on}
        scaler = torch.amp.GradScaler(enabled=device != "cpu")
    else:
        dtype = torch.float32
        on = False
        scaler = torch.amp.GradScaler(enabled=False)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type=device, dtype=dtype, enabled=on):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


def test_float16_on_the_cpu_in_one_branch():
    """HS123: of several scalers the one whose branch sets the region to float16 is judged, with the flag of that branch."""
    assert [f.line for f in findings(BRANCHES.format(on="True"), "HS123")] == [10]
    assert not findings(BRANCHES.format(on="device != 'cpu'"), "HS123")


PAIR = """\
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--amp", action="store_true")
args = parser.parse_args()
{check}
scaler = torch.amp.GradScaler("cuda", enabled=args.fp16)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", {region}):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
REST = "dtype=torch.bfloat16 if args.bf16 else torch.float16"


@pytest.mark.parametrize(
    ("region", "case"),
    [
        (REST, "without `args.fp16` and `args.bf16`"),
        ("dtype=torch.float16, enabled=args.amp", "with `args.amp` and without `args.fp16`"),
    ],
)
def test_two_options_for_one_decision(region, case):
    """HS123: a region that is float16 for one option, or without it, and a scaler that another option enables."""
    (finding,) = findings(PAIR.format(check="", region=region), "HS123")
    assert finding.message.startswith(case)


@pytest.mark.parametrize(
    ("check", "region"),
    [
        ("if not args.fp16 and not args.bf16:\n    raise SystemExit('one of them')", REST),
        ("args.fp16 = not args.bf16", REST),
        ("", REST + ", enabled=args.fp16 or args.bf16"),
        ("", "dtype=torch.float16, enabled=args.fp16"),
    ],
)
def test_two_options_that_exclude_the_case(check, region):
    """HS123 is silent where a line relates the two options, or one of them decides both."""
    assert not findings(PAIR.format(check=check, region=region), "HS123")


METHODS = """\
import torch

class Trainer:
    def __init__(self, model, optimizer, amp=True):
        self.model, self.optimizer = model, optimizer
        self.amp = amp
        self.scaler = torch.amp.GradScaler("cuda", enabled=amp)

    def loss(self, x, y):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.amp):
            return loss_fn(self.model(x), y)

    def backward(self, loss):
        if self.amp:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()

    def step(self):
        if self.amp:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def fit(self, loader):
        for x, y in loader:
            loss = self.loss(x, y)
            self.backward(loss)
            self.step()

Trainer(model, optimizer).fit(loader)
"""


def test_a_flag_of_the_constructor_is_the_attribute():
    """HS123 is silent for a branch without the scaler in which the attribute also disables the region."""
    assert not findings(METHODS, "HS123")


CLOSURE = """\
import torch
optimizer = torch.optim.LBFGS(model.parameters())
for x, y in loader:
    def closure():
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.{dtype}):
            loss = loss_fn(model(x), y)
        loss.backward()
        return loss
    optimizer.step(closure)
"""


def test_a_closure_runs_in_the_step():
    """HS123: the backward of a closure belongs to the step that receives it."""
    assert [f.line for f in findings(CLOSURE.format(dtype="float16"), "HS123")] == [8]
    assert not findings(CLOSURE.format(dtype="bfloat16"))


TAIL = """\
import torch
scaler = torch.amp.GradScaler("cuda")
pending = 0
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y) / 4
    scaler.scale(loss).backward()
    pending += 1
    if pending == 4:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        pending = 0
if pending > 0:
    {unscale}torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""


def test_micro_batches_left_over_by_a_counter():
    """HS104: after windows that a counter ends, the gradients of the last micro-batches are still scaled."""
    assert [f.line for f in findings(TAIL.format(unscale=""), "HS104")] == [17]
    assert not findings(TAIL.format(unscale="scaler.unscale_(optimizer); "), "HS104")
    # Without the reset the condition is not the end of a window.
    assert not findings(TAIL.format(unscale="").replace("        pending = 0\n", ""), "HS104")


LIGHTNING = """\
import torch
import lightning as L

class Module(L.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.automatic_optimization = False
        self.net = net
        self.scaler = torch.amp.GradScaler("cuda")

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        {step}

L.Trainer(precision="{precision}").fit(Module(net), loader)
"""
OWN = (
    "self.manual_backward(self.scaler.scale(self.net(batch).mean())); self.scaler.step(optimizer); self.scaler.update()"
)


def test_a_scaler_beside_that_of_a_trainer():
    """HS131: an optimizer of Lightning in 16-mixed steps through the Trainer's scaler, so that one of the module is a second one."""
    assert [f.line for f in findings(LIGHTNING.format(step=OWN, precision="16-mixed"), "HS131")] == [9]
    assert not findings(LIGHTNING.format(step=OWN, precision="32-true"), "HS131")
    plain = "self.manual_backward(self.net(batch).mean()); optimizer.step()"
    assert not findings(LIGHTNING.format(step=plain, precision="16-mixed"), "HS131")


DEVICE = """\
import os
import torch
{device}
with torch.autocast({first}, dtype=torch.bfloat16):
    y = model(x)
"""


@pytest.mark.parametrize(
    ("device", "first", "words"),
    [
        ("rank = int(os.environ['LOCAL_RANK'])", "rank", "is the number of a GPU"),
        ("gpu = torch.cuda.current_device()", "gpu", "is the number of a GPU"),
        ("device = 'cuda' if torch.cuda.is_available() else 'cpu'", "device.type", "the device is the string"),
    ],
)
def test_devices_that_autocast_rejects(device, first, words):
    """HS142: the number of a GPU is no device type, and a string has no `.type`."""
    (finding,) = findings(DEVICE.format(device=device, first=first), "HS142")
    assert words in finding.message


@pytest.mark.parametrize(
    ("device", "first"),
    [
        ("device = 'cuda' if torch.cuda.is_available() else 'cpu'", "device"),
        ("device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')", "device.type"),
        ("device = 'cuda'\ndevice = torch.device(device)", "device.type"),
        ("device = 'cuda'", "device if isinstance(device, str) else device.type"),
    ],
)
def test_devices_that_autocast_accepts(device, first):
    """HS142 is silent for strings, and for the type of a torch.device."""
    assert not findings(DEVICE.format(device=device, first=first), "HS142")
