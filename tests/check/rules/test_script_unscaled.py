"""HS123: float16 regions in helpers, forwards and around backward, disabled scalers, and one of two optimizers."""

import pytest

from check_scripts import findings

HELPER = """\
import torch
class Trainer:
    def compute_loss(self, batch):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(batch)
        return {returned}
    def train(self):
        for batch in self.loader:
            loss = self.compute_loss(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
"""
INSIDE = """\
import torch
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.{dtype}):
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
"""
FORWARD = """\
import torch
class Net(torch.nn.Module):
{decorator}    def forward(self, x):
        return self.layer(x)
model = Net()
for x, y in loader:
    loss = loss_fn(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
TWO = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        d_loss = critic(x)
    opt_d.zero_grad()
    scaler.scale(d_loss).backward()
    scaler.step(opt_d)
    scaler.update()
    with torch.autocast("cuda", dtype=torch.float16):
        g_loss = generator(x)
    opt_g.zero_grad()
    {step}
"""
DISABLED = """\
import torch
scaler = torch.amp.GradScaler("cuda", enabled={scaler})
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16, enabled={region}):
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param(HELPER.format(returned="loss"), 4, id="helper"),
        pytest.param(INSIDE.format(dtype="float16"), 6, id="backward in the region"),
        pytest.param(FORWARD.format(decorator='    @torch.autocast("cuda")\n'), 10, id="decorated forward"),
        pytest.param(TWO.format(step="g_loss.backward(); opt_g.step()"), 13, id="one of two optimizers"),
        pytest.param(DISABLED.format(scaler="False", region="True"), 2, id="disabled scaler"),
    ],
)
def test_reports_a_loss_that_no_scaler_scales(text, line):
    """Wherever the float16 region is opened, a plain backward of its loss is one error."""
    assert [(f.line, f.severity) for f in findings(text, "HS123")] == [(line, "error")]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(HELPER.format(returned="self.penalty"), id="another value is returned"),
        pytest.param(INSIDE.format(dtype="bfloat16"), id="bfloat16 region"),
        pytest.param(FORWARD.format(decorator=""), id="plain forward"),
        pytest.param(
            FORWARD.format(decorator='    @torch.autocast("cuda", dtype=torch.bfloat16)\n'), id="bfloat16 forward"
        ),
        pytest.param(
            TWO.format(step="scaler.scale(g_loss).backward(); scaler.step(opt_g); scaler.update()"), id="both scaled"
        ),
        pytest.param(TWO.format(step="g_loss.backward(); opt_d.step()"), id="the optimizer that the scaler steps"),
        pytest.param(DISABLED.format(scaler="False", region="False"), id="both disabled"),
        pytest.param(DISABLED.format(scaler="use_amp", region="use_amp"), id="one switch"),
        pytest.param(
            "import torch\nfor x in loader:\n    with torch.autocast(torch.bfloat16):\n        loss = model(x)\n"
            "    loss.backward()\n    optimizer.step()\n",
            id="a dtype in the place of the device, which HS142 reports",
        ),
        pytest.param(
            "import torch\nfor x in loader:\n    with torch.cuda.amp.autocast(device_type='cuda'):\n        loss = model(x)\n"
            "    loss.backward()\n    optimizer.step()\n",
            id="an argument that HS143 reports",
        ),
    ],
)
def test_is_silent_where_the_loss_is_scaled_or_not_float16(text):
    """A scaled loss, a bfloat16 or disabled region, and a loss from elsewhere are no finding."""
    assert findings(text, "HS123") == []


LOOP = """\
import torch
{before}for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
"""
PARTS = """\
import torch
class Trainer:
    def forward(self):
        with torch.cuda.amp.autocast():
            self.loss = self.criterion(self.model(self.x), self.y)
    def optimize(self):
        self.forward()
        self.optimizer.zero_grad()
        {backward}
        self.optimizer.step()
"""
PASSED = """\
import torch
class Trainer:
    def step(self, x, y):
        with torch.cuda.amp.autocast():
            loss = self.criterion(self.model(x), y)
        self.update({passed})
    def update(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
"""
DECORATED = """\
import torch
{decorator}
def compute(model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y)
def train(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        loss = compute(model, x, y)
        loss.backward()
        optimizer.step()
"""
ELSEWHERE = """\
import torch
def pretrain(model, loader, optimizer):
    scaler = torch.cuda.amp.GradScaler()
    for x in loader:
        optimizer.zero_grad()
        with torch.cuda.amp.autocast():
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
def finetune(model, loader, optimizer{param}):
    for x in loader:
        optimizer.zero_grad()
        with torch.cuda.amp.autocast():
            loss = model(x)
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            LOOP.format(before="from accelerate.utils import set_seed\nset_seed(0)\n"), id="a seed of Accelerate"
        ),
        pytest.param(
            LOOP.format(before="import pytorch_lightning as pl\npl.seed_everything(0)\n"), id="a seed of Lightning"
        ),
        pytest.param(LOOP.format(before="from apex.normalization import FusedLayerNorm\n"), id="a kernel of Apex"),
        pytest.param(
            LOOP.format(
                before="from sklearn.preprocessing import StandardScaler\nscaler = StandardScaler()\nscaler.fit(data)\n"
            ),
            id="a scaler of data",
        ),
        pytest.param(PARTS.format(backward="self.loss.backward()"), id="an attribute that another method computes"),
        pytest.param(PASSED.format(passed="loss"), id="a parameter"),
        pytest.param(DECORATED.format(decorator='@torch.autocast("cuda")'), id="a decorated function"),
        pytest.param(ELSEWHERE.format(param=""), id="a scaler of another function"),
    ],
)
def test_reports_a_loss_that_takes_another_way(text):
    """A loss from a float16 region is followed to its backward, and helpers of a library scale nothing."""
    assert [f.severity for f in findings(text, "HS123")] == ["error"]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(LOOP.format(before="from accelerate import Accelerator\n"), id="Accelerate itself"),
        pytest.param(LOOP.format(before="import pytorch_lightning as pl\npl.Trainer()\n"), id="Lightning itself"),
        pytest.param(LOOP.format(before="from apex import amp\n"), id="Apex itself"),
        pytest.param(PARTS.format(backward="self.penalty.backward()"), id="another attribute"),
        pytest.param(PASSED.format(passed="self.penalty"), id="another value is passed"),
        pytest.param(
            DECORATED.format(decorator='@torch.autocast("cuda", dtype=torch.bfloat16)'), id="bfloat16 decorator"
        ),
        pytest.param(ELSEWHERE.format(param=", scaler=None"), id="a scaler may be passed"),
    ],
)
def test_is_silent_where_the_loss_may_be_scaled_elsewhere(text):
    """A library that scales, a loss from elsewhere and a scaler within reach are no finding."""
    assert findings(text, "HS123") == []


KEPT = """\
import contextlib
import torch
class Trainer:
    def __init__(self, model, config):
        self.model, self.optimizer = model, torch.optim.Adam(model.parameters())
        self.amp_context = torch.autocast("cuda"{dtype}) if config.amp else contextlib.nullcontext()
    def train(self, loader):
        for x in loader:
            with self.amp_context:
                out = self.model(x)
            target = self.reference(x)
            self.advance({passed})
    def advance(self, target, output=None):
        {loss}
        self.optimizer.zero_grad()
        {call}.backward()
        self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("dtype", "passed", "loss", "call", "expected"),
    [
        ("", "target, out", "loss = output.loss", "loss", [6]),
        ("", "target, output=out.loss", "pass", "output", [6]),
        ("", "target, out", "loss = {'sum': (output - target).mean()}", "loss['sum']", [6]),
        (", dtype=torch.bfloat16", "target, out", "loss = output.loss", "loss", []),
        ("", "out, target", "loss = output.loss", "loss", []),
        ("", "target, out", "loss = fit(target, output.detach())", "loss", []),
    ],
)
def test_a_loss_that_another_method_takes_from_what_it_receives(dtype, passed, loss, call, expected):
    """HS123 follows the parameter from which the loss is computed to the region whose result the caller passes for it."""
    text = KEPT.format(dtype=dtype, passed=passed, loss=loss, call=call)
    assert [f.line for f in findings(text, "HS123")] == expected
