"""HS158, HS159, HS163 and HS164: values and operations that 16-bit formats do not have."""

import pytest

from check_scripts import codes, findings

NET = """\
import torch
import torchvision
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.LayerNorm(8)
        self.head = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(8, 2))
    def forward(self, x):
        return {out}
{model}
for x in loader:
    with torch.autocast("cuda", dtype={dtype}):
        logits = model(x)
    probs = {probs}
    array = probs.cpu().numpy()
"""


def net(out="self.head(self.body(x))", model="model = Net()", dtype="torch.bfloat16", probs="torch.sigmoid(logits)"):
    return NET.format(out=out, model=model, dtype=dtype, probs=probs)


@pytest.mark.parametrize(
    ("text", "severities"),
    [
        (net(), ["error"]),
        (net(probs="torch.softmax(logits, -1)[:, 1]"), ["error"]),
        (net(out="self.head(x).squeeze(1)", probs="logits / 2"), ["error"]),
        (net(model="model = torchvision.models.resnet18().cuda()"), ["error"]),
        (net(dtype="torch.bfloat16 if new else torch.float16"), ["warning"]),
        (net(dtype="torch.float16"), []),
        (net(probs="logits.float()"), []),
        (net(probs="logits.argmax(-1)"), []),
        (net(out="self.body(x)"), []),
        (net(out="self.head(x).float()"), []),
        (net(model="from models import Other\nmodel = Other()"), []),
    ],
)
def test_a_bf16_output_cannot_become_a_numpy_array(text, severities):
    """The output of a last linear layer is bfloat16 after the region, unless something casts it or autocast raises it."""
    assert [f.severity for f in findings(text, "HS158")] == severities


@pytest.mark.parametrize(
    ("out", "read", "count"),
    [
        ('{"score": self.head(x), "body": x}', 'logits["score"].sigmoid()', 1),
        ("dict(score=self.head(x))", 'logits["score"]', 1),
        ("(self.head(x), x)", "logits[0]", 1),
        ("(x, self.head(x))", "logits[-1].flatten()", 1),
        ("self.head(x)", "logits[0]", 1),
        ('{"score": self.head(x), "body": x}', 'logits["body"]', 0),
        ('{"score": self.head(x)}', 'logits["score"].float()', 0),
        ("(self.head(x), x)", "logits[1]", 0),
        ('{"score": self.head(x).float()}', 'logits["score"]', 0),
    ],
)
def test_an_output_under_a_key_has_the_format_of_its_layer(out, read, count):
    """A model may return several tensors in a dictionary or a tuple."""
    assert len(findings(net(out=out, probs=read), "HS158")) == count


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("y = torch.inverse(a @ b)", 1),
        ("y = (a @ b).inverse()", 1),
        ("y = torch.linalg.svd(torch.bmm(a, b) / 8)", 1),
        ("y = torch.linalg.inv((a @ b).float())", 0),
        ("y = torch.linalg.inv(a)", 0),
        ("y = scipy.linalg.inv(a @ b)", 0),
        ("y = torch.linalg.svd((a @ b).sum(0))", 0),
    ],
)
def test_decompositions_of_a_product_under_autocast(line, count):
    """A product is 16-bit in the region; a float32 input and operations that autocast runs in float32 are right."""
    text = f"import scipy\nimport torch\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    {line}\n"
    assert len(findings(text, "HS158")) == count
    assert findings(text.replace("dtype=torch.bfloat16", "enabled=False"), "HS158") == []


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("s = s.masked_fill(mask, -torch.finfo(torch.float32).max)", 1),
        ("s = torch.masked_fill(s, mask, torch.finfo(torch.float32).min)", 1),
        ("s = s.masked_fill(mask, NEGATIVE)", 1),
        ("m = torch.full((4, 4), -1e9, dtype=torch.float16)", 1),
        ("m = torch.full_like(s.half(), NEGATIVE)", 1),
        ("m = s.half().new_full((4,), fill_value=-1e9)", 1),
        ("m = torch.full((4, 4), -1e9)", 0),
        ("m = torch.full((4, 4), -1e9, dtype=s.dtype)", 0),
        ("s = s.masked_fill(mask, torch.finfo(s.dtype).min)", 0),
        ("s = s.float().masked_fill(mask, -1e9)", 0),
        ("m = numpy.full((4, 4), -1e9, dtype=torch.float16)", 0),
    ],
)
def test_fill_values_beyond_float16(line, count):
    """Fills of a product under float16 autocast and of tensors cast to float16 are reported, in every spelling of the value."""
    text = (
        "import numpy\nimport torch\nNEGATIVE = -1e9\ndef attend(q, k, mask):\n    s = q @ k\n"
        f"    {line}\n    return mask\nwith torch.autocast('cuda', dtype=torch.float16):\n    y = attend(q, k, mask)\n"
    )
    assert len(findings(text, "HS163")) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("x = x.half()\ny = x / (x.norm() + 1e-8)\n", 1),
        ("h = x.to(torch.float16)\ny = h.clamp(min=1e-10)\n", 1),
        ("x = x.half()\nx = x.float()\ny = x / (x.norm() + 1e-8)\n", 0),
        ("x = x.half()\ny = x / (x.norm() + 1e-6)\n", 0),
        ("if small:\n    x = x.half()\ny = x / (x.norm() + 1e-8)\n", 0),
        ("x = x.half()\nwith torch.autocast('cuda'):\n    y = x / (x.norm() + 1e-8)\n", 0),
    ],
)
def test_an_eps_added_to_a_variable_in_float16(text, count):
    """A variable that is cast to float16 is followed to later lines."""
    assert len(findings("import torch\n" + text, "HS164")) == count


@pytest.mark.parametrize(
    ("module", "decorator", "count"),
    [
        ("torch.amp", "custom_fwd", 1),
        ("torch.amp", "custom_fwd('cuda')", 1),
        ("torch.amp", "custom_fwd(device_type='cuda', cast_inputs=torch.float32)", 0),
        ("torch.amp", "custom_fwd(**options)", 0),
        ("torch.cuda.amp", "custom_fwd", 0),
        ("torch.cuda.amp", "custom_fwd(device_type='cuda')", 1),
        ("mine.amp", "custom_fwd", 0),
    ],
)
def test_the_device_type_of_custom_decorators(module, decorator, count):
    """torch.amp's decorators need `device_type`, those of torch.cuda.amp reject it, and others are not torch's."""
    text = (
        f"import torch\nfrom {module} import custom_fwd\nclass F(torch.autograd.Function):\n"
        f"    @staticmethod\n    @{decorator}\n    def forward(ctx, x):\n        return x\n"
    )
    assert len(findings(text, "HS159")) == count


def test_a_decorator_with_a_fallback_is_silent():
    """A name that is imported from either module may be the old one."""
    text = (
        "try:\n    from torch.amp import custom_fwd\nexcept ImportError:\n    from torch.cuda.amp import custom_fwd\n"
        "@custom_fwd\ndef forward(ctx, x):\n    return x\n"
    )
    assert [code for code in codes(text) if code.startswith("HS159")] == []


LIGHTNING = """\
import torch
import pytorch_lightning as pl
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.loss = torch.nn.{loss}()
    def training_step(self, batch, index):
        x, y = batch
        return self.loss(self.net(x).sigmoid(), y)
trainer = pl.Trainer({options})
trainer.fit(Net(), loader)
"""


@pytest.mark.parametrize(
    ("loss", "options", "count"),
    [
        ("BCELoss", "precision='16-mixed'", 1),
        ("BCELoss", "precision=16, accelerator='gpu'", 1),
        ("BCELoss", "precision='bf16-mixed'", 1),
        ("BCELoss", "precision='bf16-mixed', accelerator='cpu'", 0),
        ("BCELoss", "precision='32-true'", 0),
        ("BCELoss", "precision='16-true'", 0),
        ("BCELoss", "", 0),
        ("MSELoss", "precision='16-mixed'", 0),
    ],
)
def test_bce_in_a_step_of_lightning(loss, options, count):
    """Mixed precision of Lightning runs the steps under autocast, which forbids BCELoss on a GPU."""
    assert len(findings(LIGHTNING.format(loss=loss, options=options), "HS146")) == count


LOSSES = """\
import torch
import torch.nn.functional as F
ALIAS = F.{bce}
LOSSES = {{"bce": torch.nn.{loss}(), "mse": torch.nn.MSELoss()}}
def get_loss(name):
    if name == "mse":
        return torch.nn.MSELoss()
    return torch.nn.{loss}()
criterion = get_loss("bce")
alias_loss = ALIAS
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        a = criterion(model(x), y)
        b = LOSSES["bce"](model(x), y)
        c = alias_loss(model(x), y)
        d = LOSSES["mse"](model(x), y)
"""


def test_bce_by_another_name():
    """A factory of the file, a table and another name of the function lead to the loss that autocast forbids."""
    wrong = LOSSES.format(bce="binary_cross_entropy", loss="BCELoss")
    assert [f.line for f in findings(wrong, "HS146")] == [13, 14, 15]
    assert findings(LOSSES.format(bce="binary_cross_entropy_with_logits", loss="BCEWithLogitsLoss"), "HS146") == []


ZEROED = """\
import torch
for x in loader:
    with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = model(x)
    if {test}:
        {zeroed}
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("test", "zeroed", "expected"),
    [
        ("torch.isnan(loss)", "loss = loss * 0.0", [6]),
        ("torch.isnan(loss) or torch.isinf(loss)", "loss = 0 * loss", [6]),
        ("not torch.isfinite(loss)", "loss *= 0", [6]),
        ("math.isnan(loss.item())", "loss *= 0.0", [6]),
        ("~torch.isfinite(loss).all()", "loss = loss * 0", [6]),
        ("loss.isnan().any()", "loss = loss * 0.", [6]),
        ("torch.isnan(loss)", "loss = torch.zeros_like(loss)", []),
        ("torch.isnan(loss)", "loss = torch.nan_to_num(loss) * 0.0", []),
        ("torch.isnan(loss)", "loss = sum(p.sum() for p in model.parameters()) * 0.0", []),
        ("torch.isfinite(loss)", "loss = loss * 0.0", []),
        ("torch.isnan(norm)", "loss = loss * 0.0", []),
        ("torch.isnan(loss)", "loss = loss * 0.5", []),
    ],
)
def test_zero_times_a_loss_that_is_not_finite_is_not_zero(test, zeroed, expected):
    """NaN and inf times zero are NaN, so only a zero that does not depend on the loss is one."""
    assert [f.line for f in findings(ZEROED.format(test=test, zeroed=zeroed), "HS179")] == expected


NORMALIZED = """\
import torch
def normalize(x):
    if x.ndim > 2:
        x = x.reshape(x.shape[0], -1)
    {cast}
    low = x.min(dim=-1, keepdim=True)[0]
    high = x.max(dim=-1, keepdim=True)[0]
    {value}
    return x
image = normalize({passed})
"""


@pytest.mark.parametrize(
    ("value", "passed", "cast", "expected"),
    [
        ("x = (x - low) / (high - low + 1e-9)", "data.to(torch.float16)[None]", "", [8]),
        ("x = (x - low) / (high - low).clamp(min=1e-9)", "data.half()", "", [8]),
        ("x = (x - low) / torch.clamp(high - low, min=1e-9)", "x=data.half()", "", [8]),
        ("y = x / (x.norm(dim=-1) + 1e-12)", "data.half().cuda()", "", [8]),
        ("x = (x - low) / (high - low + 1e-6)", "data.half()", "", []),
        ("x = (x - low) / (high - low + 1e-9)", "data.half().float()", "", []),
        ("x = (x - low) / (high - low + 1e-9)", "data", "", []),
        ("x = (x - low) / (high - low + 1e-9)", "data.half()", "x = x.float()", []),
        ("x = (x - low) / (high - low + 1e-9)", "data.half()", "x = scale * x", []),
        ("x = (x - low) / (high - mean + 1e-9)", "data.half()", "", []),
        ("x = (x - low) / (high - low).float().clamp(min=1e-9)", "data.half()", "", []),
    ],
)
def test_a_function_that_gets_float16_guards_with_a_constant_that_is_zero(value, passed, cast, expected):
    """HS164 follows a cast to the parameter of a function, and what that makes of it without changing the dtype."""
    text = NORMALIZED.format(value=value, passed=passed, cast=cast)
    assert [f.line for f in findings(text, "HS164")] == expected
