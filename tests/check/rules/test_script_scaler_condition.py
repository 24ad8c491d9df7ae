"""HS123: scalers whose condition leaves out float16, and models whose forward opens the region."""

import pytest

from check_scripts import findings

REVERSED = """\
import torch
DTYPES = {{"float16": torch.float16, "bfloat16": torch.bfloat16}}
class Runner:
    def __init__(self, model, optimizer, cfg):
        self.model, self.optimizer, self.cfg = model, optimizer, cfg
        self.dtype = DTYPES[cfg.dtype]
        {scaler}

    def step(self, x, y):
        with torch.autocast("cuda", dtype=self.dtype):
            loss = loss_fn(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
"""
DEVICES = """\
import torch
class Runner:
    def __init__(self, model, optimizer, device, dtype=torch.float16):
        self.model, self.optimizer, self.device = model, optimizer, device
        self.dtype = {dtype}
        wanted = self.dtype == torch.float16{test}
        self.scaler = torch.amp.GradScaler({where}, enabled=wanted)

    def step(self, x, y):
        with torch.autocast(device_type={region}, dtype=self.dtype):
            loss = loss_fn(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
"""
FORWARD = """\
import torch
class Pyramid(torch.nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.encoder = Encoder()

    def forward(self, x):
        x = x / 255
        {guard}with torch.autocast("cuda", enabled={enabled}{dtype}):
            features = {call}
        return features.float()

NETS = {{"pyramid": Pyramid}}
class Method:
    def __init__(self, args):
        self.args = args
        self.net = NETS[args.arch](args)
        self.optimizer = torch.optim.Adam(self.net.parameters())

    def forward(self):
        self.out = self.net(self.image)

    def backward(self):
        self.loss = criterion(self.out, self.target)
        self.loss.backward()

    def update(self):
        self.forward()
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()
"""


@pytest.mark.parametrize(
    "scaler",
    [
        'self.scaler = torch.amp.GradScaler("cuda", enabled=cfg.dtype == "bfloat16")',
        'self.scaler = torch.amp.GradScaler("cuda", enabled=cfg.dtype != "float16")',
        'self.scaler = torch.amp.GradScaler("cuda", enabled=self.dtype is torch.bfloat16)',
        'self.scaler = torch.amp.GradScaler("cuda", enabled=not cfg.fp16)',
        'self.scaler = torch.amp.GradScaler("cuda") if cfg.dtype == "bfloat16" else None',
    ],
)
def test_a_reversed_condition_leaves_float16_unscaled(scaler):
    """A scaler for bfloat16 alone is missing where the region computes in float16."""
    assert [f.line for f in findings(REVERSED.format(scaler=scaler), "HS123")] == [7]


@pytest.mark.parametrize(
    "scaler",
    [
        'self.scaler = torch.amp.GradScaler("cuda", enabled=cfg.dtype == "float16")',
        'self.scaler = torch.amp.GradScaler("cuda", enabled=cfg.dtype != "bfloat16")',
        'self.scaler = torch.amp.GradScaler("cuda", enabled=not cfg.bf16)',
    ],
)
def test_a_condition_for_float16_is_right(scaler):
    """The usual conditions enable the scaler where the region is float16."""
    assert findings(REVERSED.format(scaler=scaler), "HS123") == []


def devices(test=' and device.type == "cuda"', dtype="dtype", region="device.type", where='"cuda"'):
    return DEVICES.format(test=test, dtype=dtype, region=f"self.{region}" if region[0] != '"' else region, where=where)


def test_a_scaler_for_cuda_alone_leaves_other_devices_unscaled():
    """A region for whatever device there is computes in float16 on MPS too, without a scale."""
    assert [(f.line, f.severity) for f in findings(devices(), "HS123")] == [(7, "warning")]


@pytest.mark.parametrize(
    "options",
    [
        {"test": ""},
        {"region": '"cuda"'},
        {"dtype": 'torch.float16 if device.type == "cuda" else torch.bfloat16'},
    ],
)
def test_a_region_that_is_float16_on_cuda_alone_needs_no_other_scaler(options):
    """Without the test of the device, with a region for CUDA, or with bfloat16 elsewhere, nothing is left out."""
    assert findings(devices(**options), "HS123") == []


def forward(enabled="self.args.mixed_precision", dtype="", call="self.encoder(x)", guard=""):
    return FORWARD.format(enabled=enabled, dtype=dtype, call=call, guard=guard)


@pytest.mark.parametrize("enabled", ["self.args.mixed_precision", "True"])
def test_a_region_inside_the_forward_of_a_model_from_a_table(enabled):
    """The class is chosen from a table, and another method runs the backward: the loss has no scale all the same."""
    assert [f.line for f in findings(forward(enabled), "HS123")] == [26]


@pytest.mark.parametrize(
    "text",
    [
        forward(dtype=", dtype=torch.bfloat16"),
        forward(call="x + 1"),
        forward(guard="with torch.no_grad():\n            pass\n        ").replace(
            "with torch.autocast", "with torch.no_grad(), torch.autocast"
        ),
        forward(enabled="self.unknown"),
        forward(enabled="False"),
    ],
)
def test_a_region_without_float16_gradients_needs_no_scale(text):
    """bfloat16, a region without layers or gradients, and one that nothing in the file enables."""
    assert findings(text, "HS123") == []


APPLE = """\
import torch
from contextlib import nullcontext
class Runner:
    def __init__(self, model, optimizer, device, amp):
        self.model, self.optimizer, self.device, self.amp = model, optimizer, device, amp
        self.scaler = {scaler}

    def context(self):
        if not self.amp:
            return nullcontext()
        if self.device.type == "cuda":
            return torch.autocast("cuda", dtype=torch.float16)
        {branch}
        return nullcontext()

    def step(self, x, y):
        with self.context():
            loss = loss_fn(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
"""
MPS = 'if self.device.type == "mps":\n            return torch.autocast({}, dtype=torch.{})'
ANY = "torch.amp.GradScaler(device.type, enabled={})"


@pytest.mark.parametrize(
    ("scaler", "branch", "num"),
    [
        ('torch.amp.GradScaler("cuda", enabled=amp)', MPS.format("'mps'", "float16"), 1),
        ("torch.cuda.amp.GradScaler()", MPS.format("self.device.type", "float16"), 1),
        (ANY.format("amp and device.type == 'cuda'"), MPS.format("'mps'", "float16"), 1),
        (
            'torch.amp.GradScaler("cuda")',
            MPS.format("self.device.type", "float16").replace("== ", "in ('xla', ").replace('mps":', 'mps"):'),
            1,
        ),
        (ANY.format("amp"), MPS.format("'mps'", "float16"), 0),
        ('torch.amp.GradScaler("cuda", enabled=amp)', MPS.format("'mps'", "bfloat16"), 0),
        ('torch.amp.GradScaler("cuda", enabled=amp)', MPS.format("'mps'", "float16").replace("==", "!="), 1),
        ('torch.amp.GradScaler("cuda")', MPS.format("self.device.type", "float16").replace("==", "!="), 0),
        ('torch.amp.GradScaler("cuda", enabled=amp)', MPS.format("'cuda'", "float16"), 0),
    ],
)
def test_a_region_for_mps_with_a_scaler_for_cuda(scaler, branch, num):
    """A scaler for CUDA disables itself where there is none, and the float16 loss on MPS is not scaled."""
    assert len(findings(APPLE.format(scaler=scaler, branch=branch), "HS123")) == num


CHOSEN = """\
import torch
from contextlib import nullcontext
class Runner:
    def __init__(self, args, device):
        self.context = nullcontext() if {test} else torch.cuda.amp.autocast()
        self.scaler = torch.cuda.amp.GradScaler(enabled=args.amp)

    def step(self, x):
        with self.context:
            loss = self.model(x)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(("test", "num"), [("device == 'cpu'", 1), ("not args.amp", 0)])
def test_a_null_context_excuses_the_flag_that_chooses_it(test, num):
    """Without the flag the scaler is disabled; the region is too only where the same flag decides it."""
    assert len(findings(CHOSEN.format(test=test), "HS123")) == num
