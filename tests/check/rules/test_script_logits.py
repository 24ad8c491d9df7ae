"""HS154, HS155 and HS163: logits in 16 bits, fp8 everywhere, and masks beyond float16."""

import pytest

from check_scripts import codes, findings

MODEL = (
    "import torch\nimport torch.nn.functional as F\nfrom transformers import AutoModelForCausalLM\n"
    "model = AutoModelForCausalLM.from_pretrained('x', dtype=torch.bfloat16)\n"
)


@pytest.mark.parametrize(
    "text",
    [
        "loss = F.cross_entropy(model(ids).logits.view(-1, n), y)\n",
        "out = model(ids)\nlogits = out.logits[:, :-1, :].contiguous()\nloss = F.cross_entropy(logits.view(-1, n), y)\n",
        "def loss_of(logits, y):\n    return F.cross_entropy(logits.reshape(-1, n), y)\nloss = loss_of(model(ids).logits, y)\n",
        "out = model(ids)\nloss = F.cross_entropy(out['logits'][:, :-1].flatten(0, 1), y)\n",
        "loss = F.cross_entropy(scores.bfloat16(), y)\n",
        "criterion = torch.nn.CrossEntropyLoss()\nloss = criterion(scores.to(torch.bfloat16), y)\n",
    ],
)
def test_cross_entropy_on_16_bit_logits_is_reported(text):
    """The output of a bfloat16 model and logits that are cast explicitly, followed through variables and functions."""
    assert [f.code for f in findings(MODEL + text, "HS154")] == ["HS154"]


@pytest.mark.parametrize(
    "text",
    [
        "loss = F.cross_entropy(model(ids).logits.float().view(-1, n), y)\n",
        "logits = model(ids).logits.float()\nloss = F.cross_entropy(logits, y)\n",
        "with torch.autocast('cuda', dtype=torch.bfloat16):\n    loss = F.cross_entropy(model(ids).logits, y)\n",
        "import accelerate\nloss = F.cross_entropy(model(ids).logits, y)\n",
        "loss = F.cross_entropy(other(ids).logits, y)\n",
        "loss = model(ids, labels=y).loss\n",
    ],
)
def test_float32_logits_and_autocast_are_silent(text):
    """Logits cast to float32, autocast, frameworks that convert outputs, and other models."""
    assert findings(MODEL + text, "HS154") == []


def test_a_converter_with_a_filter_is_silent():
    """torchao's converter is reported only without a filter, and only torchao's."""
    text = "from torchao.float8 import convert_to_float8_training\nconvert_to_float8_training(model{})\n"
    assert codes(text.format("")) == ["HS155:2"]
    assert codes(text.format(", config=c")) == ["HS155:2"]
    assert codes(text.format(", module_filter_fn=keep")) == []
    assert codes(text.format("").replace("torchao.float8", "mine")) == []


@pytest.mark.parametrize(
    ("dtype", "severity"), [("torch.float16", "warning"), ("torch.float16 if old else torch.bfloat16", "advice")]
)
def test_a_mask_beyond_float16_is_reported_where_float16_is_possible(dtype, severity):
    """The scores are a product when they are masked, whatever is assigned to the variable later."""
    text = (
        "import torch\nclass Attention(torch.nn.Module):\n    def forward(self, q, k, mask):\n        w = q @ k\n"
        "        w = w.masked_fill(mask, float('-1e20'))\n        w = torch.softmax(w, -1)\n        return w\n"
        f"model = Attention()\nwith torch.autocast('cuda', dtype={dtype}):\n    y = model(q, k, mask)\n"
    )
    assert [(f.line, f.severity) for f in findings(text, "HS163")] == [(5, severity)]
    assert findings(text.replace("q @ k", "(q @ k).float()"), "HS163") == []
    assert findings(text.replace("-1e20", "-1e4"), "HS163") == []


def test_bce_in_the_forward_of_a_module_under_autocast_is_reported():
    """A module that autocast calls computes BCELoss or binary_cross_entropy; regions that disable autocast are right."""
    text = (
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n        self.criterion = torch.nn.BCELoss()\n"
        "    def forward(self, x, y):\n        return self.criterion(x.sigmoid(), y)\nmodel = Net()\n"
        "with torch.autocast('cuda', dtype=torch.float16):\n    loss = model(x, y)\n"
    )
    assert codes(text) == ["HS146:6"]
    assert codes(text.replace("BCELoss", "BCEWithLogitsLoss")) == []
    assert codes(text.replace("with torch.autocast('cuda', dtype=torch.float16):\n    ", "")) == []


REGION = """\
import torch
from torch import nn
import torch.nn.functional as F
class Net(nn.Module):
    def forward(self, x):
        return self.head(x){cast}
net = Net().cuda()
criterion = nn.CrossEntropyLoss().cuda()
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16{enabled}):
        logits = net(x)
    loss = {loss}
    loss.backward()
"""


@pytest.mark.parametrize("loss", ["F.cross_entropy(logits.view(-1, 9), y)", "criterion(logits, y)"])
def test_logits_that_leave_autocast_are_reported(loss):
    """A loss after the region computes in the dtype of the model's last layer."""
    text = REGION.format(cast="", enabled="", loss=loss)
    assert [(f.line, f.severity) for f in findings(text, "HS154")] == [(12, "warning")]
    unknown = text.replace("net = Net().cuda()", "net = build(config)")
    assert [f.severity for f in findings(unknown, "HS154")] == ["advice"]


@pytest.mark.parametrize(
    ("cast", "enabled", "loss"),
    [
        (".float()", "", "criterion(logits, y)"),
        ("", "", "criterion(logits.float(), y)"),
        ("", ", enabled=False", "criterion(logits, y)"),
        ("", "", "F.mse_loss(logits, y)"),
    ],
)
def test_logits_in_float32_after_autocast_are_silent(cast, enabled, loss):
    """A cast in the model or in the loss, a disabled region, and another loss."""
    assert findings(REGION.format(cast=cast, enabled=enabled, loss=loss), "HS154") == []


@pytest.mark.parametrize(("cast", "severities"), [("", ["advice"]), (".float()", [])])
def test_a_validation_loss_after_autocast_is_advice(cast, severities):
    """Without gradients only the reported number is rounded."""
    text = REGION.format(cast=cast, enabled="", loss="criterion(logits, y)").replace("    loss.backward()\n", "")
    body = text[text.index("for x") :].replace("\n", "\n    ")
    text = f"{text[: text.index('for x')]}with torch.no_grad():\n    {body}\n"
    assert [f.severity for f in findings(text, "HS154")] == severities


@pytest.mark.parametrize(("name", "count"), [("Qwen2ForCausalLM", 1), ("Embedder", 0)])
def test_a_copy_of_a_language_model_class_returns_16_bit_logits(name, count):
    """A class of another package that is named as in transformers behaves like it."""
    text = MODEL.replace("from transformers import AutoModelForCausalLM", f"from models.qwen import {name}")
    text = text.replace("AutoModelForCausalLM", name) + "loss = F.cross_entropy(model(ids).logits.view(-1, 9), y)\n"
    assert len(findings(text, "HS154")) == count


@pytest.mark.parametrize(
    "text",
    [
        "logp = F.log_softmax(scores.to(torch.bfloat16), -1)\nloss = F.nll_loss(logp, y)\n",
        "loss = F.cross_entropy(scores.bfloat16() / 0.7, y)\n",
        "from einops import rearrange\nloss = F.cross_entropy(rearrange(scores.bfloat16(), 'b n c -> b c n'), y)\n",
        "net = torch.nn.Linear(4, 2).bfloat16()\nloss = F.cross_entropy(net(x), y)\n",
    ],
)
def test_16_bit_logits_are_followed_through_operations(text):
    """log_softmax, a temperature, einops and the output of a module that is cast."""
    assert [f.code for f in findings(MODEL + text, "HS154")] == ["HS154"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("p = scores.half().softmax(-1)\n", 1),
        ("p = torch.softmax(x, -1, torch.float16)\n", 1),
        ("h = x.to(torch.float16)\nn = torch.norm(h)\n", 1),
        ("def f(mask):\n    mask = mask.cuda()\n    mask = mask.half()\n    return mask.sum()\n", 1),
        ("def f(mask):\n    mask = mask.half()\n    mask = mask.float()\n    return mask.sum()\n", 0),
        ("def f(mask, low):\n    if low:\n        mask = mask.half()\n    return mask.sum()\n", 0),
        ("n = x.half().float().norm()\n", 0),
        ("with torch.autocast('cuda'):\n    p = scores.half().softmax(-1)\n", 0),
        ("n = x.half().sum(dtype=torch.float32)\n", 0),
    ],
)
def test_reductions_of_float16_values(text, count):
    """A reduction right after a cast to float16 computes in it, except under autocast or with a dtype."""
    assert len(findings("import torch\n" + text, "HS165")) == count


ENGINE = """\
import deepspeed, torch
import torch.nn.functional as F
class Net(torch.nn.Module):
    def forward(self, x):
        return self.head(x){forward}
model = Net()
engine, optimizer, loader, _ = deepspeed.initialize(model=model, config=config)
criterion = torch.nn.CrossEntropyLoss()
{dtype}for x, y in loader:
    {cast}
    out = engine(x)
    loss = {loss}
    engine.backward(loss)
    engine.step()
"""
ASKED = "dtype = torch.float32\nif engine.fp16_enabled():\n    dtype = torch.half\n"


@pytest.mark.parametrize(
    ("cast", "dtype", "severity"),
    [
        ("x, y = x.to(engine.device).half(), y.to(engine.device)", "", "warning"),
        ("x = x.cuda().bfloat16()", "", "warning"),
        ("x = x.to(dtype)", ASKED, "advice"),
        ("x = x.half() if fp16 else x", ASKED, "advice"),
    ],
)
def test_the_loss_of_a_16_bit_engine_is_reported(cast, dtype, severity):
    """A DeepSpeed engine whose inputs are cast to 16 bits has 16-bit weights and returns 16-bit logits."""
    text = ENGINE.format(cast=cast, dtype=dtype, loss="criterion(out, y)", forward="")
    assert [(f.code, f.severity) for f in findings(text, "HS154")] == [("HS154", severity)]


def test_the_loss_of_an_engine_that_a_function_receives_is_reported():
    """`train(engine, loader)`: the parameter is the engine that the caller passes."""
    text = ENGINE.format(cast="x = x.half()", dtype="", loss="F.cross_entropy(out, y)", forward="")
    head, _, loop = text.partition("for x, y")
    loop = ("for x, y" + loop).replace("engine", "model").replace("\n", "\n    ").rstrip()
    text = head + "def train(model, loader):\n    " + loop + "\ntrain(engine, loader)\n"
    assert [f.code for f in findings(text, "HS154")] == ["HS154"]


@pytest.mark.parametrize(
    ("cast", "loss", "forward"),
    [
        ("x = x.half()", "criterion(out.float(), y)", ""),
        ("x = x.half()", "criterion(out, y)", ".float()"),
        ("x = x.to(engine.device)", "criterion(out, y)", ""),
        ("x = x.float()", "criterion(out, y)", ""),
        ("y = y.half()", "criterion(out, y)", ""),
    ],
)
def test_float32_logits_of_an_engine_are_silent(cast, loss, forward):
    """Logits that are cast, a model that casts its output, and inputs that stay in float32."""
    assert [f.code for f in findings(ENGINE.format(cast=cast, dtype="", loss=loss, forward=forward), "HS154")] == []


@pytest.mark.parametrize(
    "loss",
    [
        "F.log_softmax(student['logits'] / temperature, dim=-1)",
        "F.log_softmax(student.logits.view(-1, n) / self.temperature, dim=-1)",
        "F.cross_entropy(30 * student.logits, y)",
    ],
)
def test_logits_with_a_temperature_after_autocast_are_reported(loss):
    """A temperature and a constant factor do not change the dtype of logits that leave an autocast region."""
    text = (
        "import torch\nimport torch.nn.functional as F\n"
        f"def step(self, student_model, x, y, temperature):\n    with torch.autocast('cuda', dtype=torch.bfloat16):\n"
        f"        student = student_model(x)\n    loss = {loss}\n    loss.backward()\n"
    )
    assert [f.code for f in findings(text, "HS154")] == ["HS154"]


def test_logits_of_an_unpacked_pair_after_autocast_are_reported():
    """`logits, hidden = out['logits'], out['hidden']` names the logits; a table of dtypes may choose 16 bits."""
    text = (
        "import torch\nimport torch.nn.functional as F\n"
        "dtype = {'fp32': torch.float32, 'bf16': torch.bfloat16}[name]\n"
        "def step(student_model, x, y):\n    with torch.autocast('cuda', dtype=dtype):\n"
        "        out = student_model(x)\n    logits, hidden = out['logits'], out['hidden']\n"
        "    loss = F.cross_entropy({}, y)\n    loss.backward()\n"
    )
    assert [f.severity for f in findings(text.replace("{}", "logits"), "HS154")] == ["advice"]
    assert [f.code for f in findings(text.replace("{}", "hidden.float()"), "HS154")] == []


HELPER = """\
import torch
import torch.nn.functional as F
def score(tokens, logits):
    shifted = logits[..., :-1, :].contiguous()
    flat = shifted.view(-1, shifted.size(-1))
    return F.cross_entropy(flat, tokens.view(-1), reduction="none")
def run(model, loader):
    for tokens in loader:
        {body}
"""


@pytest.mark.parametrize(
    ("body", "severities"),
    [
        (
            "with torch.autocast('cuda', dtype=torch.bfloat16):\n            logits, _ = model(tokens)\n        loss = score(tokens, logits)",
            ["advice"],
        ),
        (
            "with torch.autocast('cuda', dtype=torch.bfloat16):\n            out = model(tokens)\n        loss = score(tokens, out.logits)",
            ["advice"],
        ),
        (
            "with torch.no_grad():\n            with torch.autocast('cuda', dtype=torch.bfloat16):\n                logits = model(tokens)\n"
            "            loss = score(tokens, logits)",
            ["advice"],
        ),
        (
            "with torch.autocast('cuda', dtype=torch.bfloat16):\n            logits = model(tokens)\n            loss = score(tokens, logits)",
            [],
        ),
        (
            "with torch.autocast('cuda', dtype=torch.bfloat16):\n            logits = model(tokens)\n        loss = score(tokens, logits.float())",
            [],
        ),
        (
            "with torch.autocast('cuda', dtype=torch.bfloat16):\n            logits = model(tokens).float()\n        loss = score(tokens, logits)",
            [],
        ),
        ("logits = model(tokens)\n        loss = score(tokens, logits)", []),
    ],
)
def test_logits_that_a_helper_gets_after_autocast(body, severities):
    """The region ends in the caller, and the function that computes the loss has none of its own."""
    reported = findings(HELPER.format(body=body), "HS154")
    assert [f.severity for f in reported] == severities
    assert all("validation" in f.message for f in reported) is ("no_grad" in body or not reported)


HEAD_OF_MODEL = """\
import torch
from transformers import AutoModelForCausalLM
{setup}
model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.{dtype})
loss_fn = torch.nn.CrossEntropyLoss()
def forward(model, ids):
    hidden = model(ids, output_hidden_states=True).hidden_states[-1]
    logits = {logits}
    return loss_fn(logits.view(-1, logits.size(-1)), ids.view(-1))
for ids in loader:
    loss = forward(model, ids)
"""


@pytest.mark.parametrize(
    ("setup", "dtype", "logits", "count"),
    [
        ("", "bfloat16", "model.lm_head(hidden)", 1),
        ("", "float16", "model.lm_head(hidden)", 1),
        ("from accelerate import Accelerator\naccelerator = Accelerator()", "bfloat16", "model.lm_head(hidden)", 1),
        ("", "float32", "model.lm_head(hidden)", 0),
        ("", "bfloat16", "model.lm_head(hidden).float()", 0),
        (
            "from accelerate import Accelerator\naccelerator = Accelerator(mixed_precision='bf16')",
            "bfloat16",
            "model.lm_head(hidden)",
            0,
        ),
        ("import deepspeed", "bfloat16", "model.lm_head(hidden)", 0),
        ("", "bfloat16", "other.lm_head(hidden)", 0),
    ],
)
def test_logits_of_the_head_of_a_16_bit_model(setup, dtype, logits, count):
    """`lm_head` is a layer of the loaded model and has its dtype."""
    assert len(findings(HEAD_OF_MODEL.format(setup=setup, dtype=dtype, logits=logits), "HS154")) == count


ROWS = """\
def logps(logits, ids):
    rows = []
    for {target} in {source}:
        rows.append(row{cast}.log_softmax(dim=-1).gather(1, y))
    return torch.stack(rows)
"""
GRPO = (
    """\
import torch
import deepspeed
config = {{"train_batch_size": 8, {mode}}}
engine, optimizer, _, _ = deepspeed.initialize(config=config, model=model)
"""
    + ROWS
    + """\
def step(batch):
    logits = engine(batch).logits
    logits = logits[:, :-1, :]
    loss = -logps(logits, batch).mean()
    engine.backward(loss)
    engine.step()
"""
)
BF16_MODE = '"bf16": {"enabled": True}'
ZIPPED = {"target": "row, y", "source": "zip(logits, ids)"}


@pytest.mark.parametrize(
    ("loop", "mode", "cast", "lines"),
    [
        (ZIPPED, BF16_MODE, "", [8]),
        ({"target": "y, row", "source": "zip(ids, logits)"}, BF16_MODE, "", [8]),
        ({"target": "i, row", "source": "enumerate(logits)"}, BF16_MODE, "", [8]),
        ({"target": "row", "source": "logits"}, '"fp16": {"enabled": True}', "", [8]),
        (ZIPPED, BF16_MODE, ".float()", []),
        ({"target": "row, y", "source": "zip(ids, logits)"}, BF16_MODE, "", []),
        (ZIPPED, '"bf16": {"enabled": False}', "", []),
        (ZIPPED, BF16_MODE + ', "torch_autocast": {"enabled": True}', "", []),
        (ZIPPED, "**common", "", []),
    ],
)
def test_rows_of_the_logits_of_an_engine(loop, mode, cast, lines):
    """A configuration in the file decides the format of the engine, and a loop over its logits keeps it."""
    assert [f.line for f in findings(GRPO.format(mode=mode, cast=cast, **loop), "HS154")] == lines


@pytest.mark.parametrize(("before", "lines"), [("", [8]), ("with torch.no_grad():\n    ", [])])
def test_rows_of_the_logits_of_a_16_bit_model(before, lines):
    """The same for a model that was loaded in bfloat16; log-probabilities without gradients are not a loss."""
    call = f"logits = model(ids).logits\n{before}loss = logps(logits, ids)\n"
    assert [f.line for f in findings(MODEL + ROWS.format(cast="", **ZIPPED) + call, "HS154")] == lines
