"""HS123 on one path: a dtype chosen at run time, a scaler that a flag disables, an engine that does not scale."""

import pytest

from check_scripts import findings
from halfstep.check import check_path

CHOSEN = """\
import torch
{before}
for x, y in loader:
    optimizer.zero_grad()
    with {region}:
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
"""
MANAGER = """\
from contextlib import contextmanager
@contextmanager
def amp(on):
    if not on:
        yield
        return
    with torch.autocast("cuda", dtype=torch.{dtype}):
        yield
"""
FACTORY = """\
def region(name):
    if name == "fp16":
        return torch.autocast("cuda", dtype=torch.{dtype})
    return torch.autocast("cuda", dtype=torch.bfloat16)
"""
TABLE = "dtype = {table}[cfg.dtype]"
TERNARY = "dtype = torch.bfloat16 if supported() else torch.float16"
ENGINE = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator({precision})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
dtype = torch.bfloat16 if supported() else torch.float16
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype={dtype}):
        loss = loss_fn(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
"""
FLAG = """\
import torch
scaler = torch.amp.GradScaler("cuda", enabled={scaler})
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.{dtype}{region}):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
BRANCH = """\
import torch
scaler = torch.amp.GradScaler("cuda") if {scaler} else None
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16{region}):
        loss = loss_fn(model(x), y)
    if scaler is not None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
"""
SAVED = """\
import torch
scaler = torch.amp.GradScaler("cuda")
if checkpoint is not None:
    scaler.load_state_dict(checkpoint["scaler"])
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    {backward}
    torch.save({{"scaler": scaler.state_dict()}}, "last.pt")
"""
HALF, BOTH = "torch.float16", '{"fp16": torch.float16, "bf16": torch.bfloat16}'


@pytest.mark.parametrize(
    ("text", "line", "severity"),
    [
        pytest.param(
            CHOSEN.format(before=MANAGER.format(dtype="float16"), region="amp(args.amp)"), 15, "error", id="manager"
        ),
        pytest.param(
            CHOSEN.format(before=FACTORY.format(dtype="float16"), region="region(args.amp)"), 4, "warning", id="factory"
        ),
        pytest.param(
            CHOSEN.format(before=TABLE.format(table=BOTH), region='torch.autocast("cuda", dtype=dtype)'),
            5,
            "warning",
            id="table",
        ),
        pytest.param(
            CHOSEN.format(
                before=TABLE.format(table="dict(fp16=torch.float16, fp32=torch.float32)"),
                region='torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32)',
            ),
            5,
            "warning",
            id="dict call",
        ),
        pytest.param(
            CHOSEN.format(
                before=f"assert precision in {{'fp32', 'fp16'}}\nif precision not in ('fp32', 'fp16'):\n    raise ValueError\n{TERNARY}",
                region='torch.autocast("cuda", dtype=dtype)',
            ),
            8,
            "warning",
            id="checked option",
        ),
        pytest.param(
            CHOSEN.format(before="kl_scale = 0.5", region='torch.autocast("cuda", dtype=torch.float16)').replace(
                "loss_fn(model(x), y)", "loss_fn(model(x), y, kl_scale)"
            ),
            7,
            "error",
            id="a weight called scale",
        ),
        pytest.param(
            CHOSEN.format(
                before="from functools import partial\nctx = partial(torch.autocast, 'cuda')",
                region="ctx(dtype=torch.float16)",
            ),
            8,
            "error",
            id="partial",
        ),
        pytest.param(ENGINE.format(precision="", dtype="dtype"), 8, "warning", id="launcher"),
        pytest.param(ENGINE.format(precision="mixed_precision='no'", dtype=HALF), 8, "error", id="engine in float32"),
        pytest.param(FLAG.format(scaler="args.amp", dtype="float16", region=""), 2, "warning", id="flag"),
        pytest.param(BRANCH.format(scaler="args.amp", region=""), 12, "warning", id="branch"),
        pytest.param(
            BRANCH.format(scaler="args.fsdp and args.amp", region=", enabled=args.amp"), 12, "warning", id="narrower"
        ),
        pytest.param(SAVED.format(backward="loss.backward(); optimizer.step()"), 9, "error", id="only saved"),
    ],
)
def test_reports_the_path_on_which_nothing_scales_a_float16_loss(text, line, severity):
    """A mistake on one path is a finding, milder where a setting or the launcher decides."""
    assert [(f.line, f.severity) for f in findings(text, "HS123")] == [(line, severity)]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(CHOSEN.format(before=MANAGER.format(dtype="bfloat16"), region="amp(args.amp)"), id="manager"),
        pytest.param(CHOSEN.format(before=FACTORY.format(dtype="bfloat16"), region="region(args.amp)"), id="factory"),
        pytest.param(
            CHOSEN.format(
                before="from functools import partial\nctx = partial(torch.autocast, 'cuda')",
                region="ctx(dtype=torch.bfloat16)",
            ),
            id="partial",
        ),
        pytest.param(
            CHOSEN.format(before="loss_scale = 1024.0", region='torch.autocast("cuda", dtype=torch.float16)').replace(
                "loss_fn(model(x), y)", "loss_fn(model(x), y) * loss_scale"
            ),
            id="scaled by hand",
        ),
        pytest.param(ENGINE.format(precision="mixed_precision='fp16'", dtype="dtype"), id="engine in fp16"),
        pytest.param(ENGINE.format(precision="", dtype="torch.bfloat16"), id="bfloat16"),
        pytest.param(ENGINE.format(precision="mixed_precision=args.precision", dtype="dtype"), id="option"),
        pytest.param(FLAG.format(scaler="args.amp", dtype="float16", region=", enabled=args.amp"), id="same flag"),
        pytest.param(FLAG.format(scaler="torch.cuda.is_available()", dtype="float16", region=""), id="device"),
        pytest.param(BRANCH.format(scaler="args.amp", region=", enabled=args.amp"), id="branch"),
        pytest.param(BRANCH.format(scaler="torch.cuda.is_available()", region=""), id="branch on the device"),
        pytest.param(
            BRANCH.format(scaler="args.amp and torch.cuda.is_available()", region=", enabled=args.amp"), id="not wider"
        ),
        pytest.param(
            SAVED.format(backward="scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()"), id="used"
        ),
    ],
)
def test_is_silent_where_every_float16_path_is_scaled(text):
    """One switch for both, a device without autocast, an engine that scales, or a scale by hand is no finding."""
    assert findings(text, "HS123") == []


ATTRIBUTE = """\
import torch
from torch.cuda.amp import GradScaler, autocast
class Model:
    def __init__(self, options):
        self.amp = options.amp
        self.cast = autocast
        {otherwise}
        self.scaler = GradScaler()
    def update(self, x):
        self.optimizer.zero_grad()
        with self.cast():
            loss = self.net(x)
        if self.amp:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
"""


def test_a_context_chosen_by_the_same_flag_is_no_region_without_it():
    """`self.cast` may be a null context where the loss is not scaled; with one value it is autocast on both paths."""
    assert [f.line for f in findings(ATTRIBUTE.format(otherwise=""), "HS123")] == [18]
    assert findings(ATTRIBUTE.format(otherwise="if not self.amp: self.cast = nullcast"), "HS123") == []


@pytest.mark.parametrize("enabled", ["x.is_cuda", "x.device.type == 'cuda'"])
def test_a_forward_that_enables_float16_by_the_device_of_its_input(enabled):
    """On a GPU the region of the forward is enabled, and the loss needs a scale."""
    text = (
        "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
        f"        with torch.autocast('cuda', enabled={enabled}):\n            return self.body(x)\n"
        "model = Net().cuda()\nfor x, y in loader:\n    optimizer.zero_grad()\n    loss = loss_fn(model(x), y)\n"
        "    loss.backward()\n    optimizer.step()\n"
    )
    assert [f.line for f in findings(text, "HS123")] == [10]
    assert findings(text.replace(f"enabled={enabled}", "enabled=self.amp"), "HS123") == []
    assert findings(text.replace("'cuda', enabled", "'cuda', torch.bfloat16, enabled"), "HS123") == []


COLLECTED = """\
import torch
from contextlib import nullcontext

class Policy:
    def __init__(self, cfg):
        self.dtype = torch.float16 if cfg.mixed and torch.cuda.is_available() else {other}
        self.on = self.dtype is not None

    def train(self, batches):
        for batch in batches:
            values = []
            for x in batch:
                with torch.autocast("cuda", dtype=self.dtype) if self.on else nullcontext():
                    logits = self.model(x)
                chosen = torch.log_softmax(logits, dim=-1){end}
                picked = chosen.gather(-1, x)
                values.append(picked.mean())
            stacked = torch.stack(values)
            ratio = torch.exp(stacked - old)
            limited = torch.clamp(ratio, 0.8, 1.2)
            loss = -torch.min(ratio, limited).mean()
            (loss / 4).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("other", "end", "expected"),
    [("None", "", 1), ("None", ".detach()", 0), ("torch.bfloat16", "", 1), ("pick()", "", 1)],
)
def test_a_loss_many_assignments_after_the_region(other, end, expected):
    """Lists and any number of assignments lead from the region to the loss; a detached value does not."""
    assert len(findings(COLLECTED.format(other=other, end=end), "HS123")) == expected


def test_a_dtype_that_is_float16_or_none_is_certain():
    """autocast with dtype=None computes in float16 on CUDA, and the region is off otherwise."""
    severities = {
        other: findings(COLLECTED.format(other=other, end=""), "HS123")[0].severity for other in ("None", "pick()")
    }
    assert severities == {"None": "error", "pick()": "warning"}


DEFAULT = """\
import torch
def run_epoch(model, loader, optimizer, scaler, device, amp={default}):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device, enabled=amp):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

def main(cfg):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    amp = {flag}
    scaler = torch.amp.GradScaler(enabled=amp)
    run_epoch(model, loader, optimizer, scaler, device{passed})
"""


@pytest.mark.parametrize("flag", ["cfg.get('amp', False)", "cfg.amp", "cfg.amp and device == 'cuda'"])
def test_a_flag_that_reaches_the_scaler_but_not_the_region(flag):
    """The parameter keeps its default, so the region is on whatever the setting is."""
    text = DEFAULT.format(default="True", flag=flag, passed="")
    assert [(f.line, f.severity) for f in findings(text, "HS123")] == [(14, "warning")]
    assert findings(DEFAULT.format(default="True", flag=flag, passed=", amp=amp"), "HS123") == []
    assert findings(DEFAULT.format(default="False", flag=flag, passed=""), "HS123") == []


def test_a_flag_for_the_device_switches_autocast_as_well():
    """Without CUDA the region does nothing, so a scaler that is off there misses nothing."""
    assert findings(DEFAULT.format(default="True", flag="device == 'cuda'", passed=""), "HS123") == []


def test_a_local_scaler_is_the_one_of_its_function():
    """A second function with a scaler of the same name and another flag changes nothing."""
    other = DEFAULT.format(default="True", flag="cfg.amp", passed=", amp=amp").replace("import torch\n", "")
    text = (
        "import torch\ndef tune(cfg):\n    amp = cfg['device'] == 'cuda'\n    scaler = torch.amp.GradScaler('cuda', enabled=amp)\n"
        "    for x, y in loader:\n        optimizer.zero_grad()\n        with torch.autocast('cuda', enabled=True):\n"
        "            loss = loss_fn(model(x), y)\n        scaler.scale(loss).backward()\n        scaler.step(optimizer)\n"
        "        scaler.update()\n"
    )
    assert findings(text + other, "HS123") == []
    assert [f.line for f in findings(text.replace("cfg['device'] == 'cuda'", "cfg['amp']") + other, "HS123")] == [4]


OPTIONAL = """\
import torch
def run_epoch(model, loader, optimizer, scaler, amp):
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16, enabled=amp):
            loss = loss_fn(model(x), y)
        if optimizer is not None:
            optimizer.zero_grad()
            if scaler is not None and amp:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
"""
CALLS = """\

def main(args):
    scaler = {scaler}
    amp = args.amp
    run_epoch(model, loader, optimizer, scaler, amp)
    run_epoch(model, test_loader, None, None, amp)
"""
CREATED = 'torch.amp.GradScaler("cuda", enabled=args.amp)'


@pytest.mark.parametrize("calls", ["", CALLS.format(scaler=CREATED)])
def test_a_scaler_that_every_training_call_passes_is_tested_for_the_evaluation(calls):
    """`scaler is not None and amp` is then false only without mixed precision; other files may pass what they like."""
    assert findings(OPTIONAL + calls, "HS123") == []


def test_a_scaler_of_another_option_leaves_float16_unscaled():
    """With the option for mixed precision alone, the file trains in float16 without a scaler."""
    calls = CALLS.format(scaler='torch.amp.GradScaler("cuda") if args.scale else None')
    assert [f.line for f in findings(OPTIONAL + calls, "HS123")] == [13]


CONFIGURED = """\
from dataclasses import dataclass
import torch

@dataclass
class Settings:
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def read(cls, values):
        values["dtype"] = {table}
        return cls(**values)

class Trainer:
    def __init__(self, settings: Settings):
        self.settings = settings

    def step(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=self.settings.dtype):
            loss = loss_fn(self.model(x), y)
        loss.backward()
        self.optimizer.step()
"""


@pytest.mark.parametrize(
    "table",
    [
        '{"half": torch.float16, "bf16": torch.bfloat16}[values["dtype"]]',
        'dict(half=torch.float16, bf16=torch.bfloat16).get(values["dtype"], torch.bfloat16)',
        'torch.float16 if values["dtype"] == "half" else torch.bfloat16',
    ],
)
def test_a_dtype_of_a_configuration_that_is_read_from_a_dictionary(table):
    """The formats that the file converts names to are those a run may have."""
    assert [(f.line, f.severity) for f in findings(CONFIGURED.format(table=table), "HS123")] == [(19, "warning")]
    assert findings(CONFIGURED.format(table=table.replace("float16", "bfloat16")), "HS123") == []
    text = CONFIGURED.format(table=table).replace("return cls(**values)", "return values")
    assert findings(text, "HS123") == []


FORWARDS = """\
import torch
from torch import nn
class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(8, 1)
    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.float16):
            return self.layers(x)
class Agent:
    def __init__(self, options):
        self.critic = Critic().cuda()
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], options.lr)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), options.lr)
        self.critic_scaler = torch.amp.GradScaler("cuda")
    def descend(self, loss, optimizer, scaler):
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    def update(self, x, goal):
        log_alpha = self.log_alpha
        self.descend(self.critic(x).mean(), self.critic_optimizer, self.critic_scaler)
        q = self.critic(x)
        {loss}
        self.alpha_optimizer.zero_grad()
        loss.backward()
        self.alpha_optimizer.step()
agent = Agent(options)
for x in loader:
    agent.update(x, 1.0)
"""


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("loss = (log_alpha * (q.detach() - 1)).mean()", 0),
        ("target = q.detach().mean()\n        loss = log_alpha * target", 0),
        ("loss = -log_alpha.exp() * goal", 0),
        ("loss = (log_alpha * (q - 1)).mean()", 1),
        ("target = q.mean()\n        loss = log_alpha * target", 1),
        ("loss = self.critic(x).mean() * log_alpha", 1),
    ],
)
def test_a_loss_that_no_gradient_of_the_model_reaches(loss, expected):
    """The loss of a temperature is computed in float32 next to a model whose forward opens the region."""
    assert len(findings(FORWARDS.format(loss=loss), "HS123")) == expected


STACK = """\
import torch
from contextlib import ExitStack
def train(model, optimizer, loader, fp16=True):
    scaler = torch.amp.GradScaler("cuda") if fp16 else None
    for x, y in loader:
        optimizer.zero_grad()
        with ExitStack() as stack:
            {enter}
            loss = loss_fn(model(x), y)
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
"""
_ENTER = "stack.enter_context(torch.autocast('cuda', dtype=torch.float16))"


@pytest.mark.parametrize(
    ("enter", "expected"),
    [(_ENTER, 1), (f"if fp16:\n                {_ENTER}", 0), (f"if other:\n                {_ENTER}", 1)],
)
def test_a_stack_enters_the_region_under_a_condition(enter, expected, tmp_path):
    """A region that only the setting of the scaler enters is not open without it; one under another setting may be."""
    path = tmp_path / "train.py"
    path.write_text(STACK.format(enter=enter))
    assert len(check_path(path, select=["HS123"])) == expected
