"""HS154: forms of a cross-entropy, of the logits that reach it, and of the models and engines that they come from."""

import pytest

from check_scripts import findings

INLINE = """\
import torch
from torch import nn
@torch.no_grad()
def evaluate(model, loader):
    total = 0
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(x)["scores"]
{indent}        loss = nn.CrossEntropyLoss(ignore_index=0)(logits{cast}.view(-1, n), y)
        total += loss.item()
    return total
"""
ENGINE = """\
import deepspeed
import torch
from torch import nn
def build(cfg):
    return {{"train_batch_size": 8, "zero_optimization": {{"stage": 2}}, "fp16": {{"enabled": {enabled}}}}}

class Runner:
    def __init__(self, cfg, ds_config=None):
        self.config = ds_config or build(cfg)

    def train(self, model, loader):
        engine, *_ = deepspeed.initialize(model=model, config=self.config)
        criterion = nn.CrossEntropyLoss()
        for x, y in loader:
            logits = engine(x)
            loss = criterion(logits{cast}, y)
            engine.backward(loss)
            engine.step()
"""


@pytest.mark.parametrize(
    ("cast", "indent", "lines"), [("", "", [9]), (".float()", "", []), ("", "    ", [])], ids=["left", "cast", "inside"]
)
def test_a_loss_that_is_created_where_it_is_called(cast, indent, lines):
    """`nn.CrossEntropyLoss()(logits, y)` computes in the dtype of the logits that left the region."""
    assert [f.line for f in findings(INLINE.format(cast=cast, indent=indent), "HS154")] == lines


@pytest.mark.parametrize(
    ("enabled", "cast", "lines"),
    [("True", "", [16]), ("cfg.fp16", "", [16]), ("False", "", []), ("True", ".float()", [])],
)
def test_an_engine_with_the_only_configuration_of_the_file(enabled, cast, lines):
    """The dictionary is what a function of the file returns; an option may enable fp16."""
    assert [f.line for f in findings(ENGINE.format(enabled=enabled, cast=cast), "HS154")] == lines


TWO_MODELS = """\
import deepspeed
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
class Net(torch.nn.Module):
    def forward(self, x):
        return self.head(x)
def train_sharded(loader):
    model = Net()
    config = {{"train_batch_size": 8, "fp16": {{"enabled": True}}}}
    {engine}, *_ = deepspeed.initialize(model=model, config=config)
    return {engine}
def train_plain(loader, engine):
    {created}
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
"""


@pytest.mark.parametrize(
    ("engine", "created", "lines"),
    [
        ("engine", "model = Net().cuda()\n    model = DDP(model)", []),
        ("model", "model = DDP(Net())", []),
        ("model", "model = torch.nn.Linear(4, 4)", []),
        ("model", "model = train_sharded(loader)", [15]),
        ("model", "model = launcher.prepare(loader)", [15]),  # may be the engine
    ],
)
def test_a_model_of_another_function_is_no_engine(engine, created, lines):
    """Two functions have a variable of that name, and one of them creates another object under it."""
    text = TWO_MODELS.format(engine=engine, created=created)
    assert [f.line - created.count("\n") for f in findings(text, "HS154")] == lines


CRITERION = """\
import torch
from functools import partial
import torch.nn.functional as F
from torch import nn
from timm.loss import SoftTargetCrossEntropy

class Focal(nn.Module):
    def forward(self, inputs, targets):
        ce = F.cross_entropy(inputs{cast}, targets, reduction="none")
        return ((1 - torch.exp(-ce)) ** 2 * ce).mean()

class Distance(nn.Module):
    def forward(self, inputs, targets):
        return (inputs - targets).abs().mean()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(10, 5)

    def forward(self, x):
        return self.fc(x)

model = Net().cuda()
scaler = torch.amp.GradScaler("cuda")
criterion = {criterion}
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = model(x)
    {after}
    loss = criterion(out, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("criterion", "cast", "lines"),
    [
        ("Focal().cuda()", "", [32]),
        ("Focal()", ".float()", []),
        ("Distance()", "", []),
        ("SoftTargetCrossEntropy() if mixup else nn.CrossEntropyLoss()", "", [32]),
        ("Distance() if mixup else nn.CrossEntropyLoss()", "", []),
        ("F.cross_entropy", "", [32]),
        ("F.mse_loss", "", []),
        ("partial(F.cross_entropy, label_smoothing=0.1)", "", [32]),
        ("partial(F.l1_loss, reduction='sum')", "", []),
    ],
)
def test_forms_of_a_cross_entropy(criterion, cast, lines):
    """A function, a partial of it, a class of timm, and a class of the file that computes one of what it gets."""
    text = CRITERION.format(criterion=criterion, cast=cast, after="pass")
    assert [f.line for f in findings(text, "HS154")] == lines


@pytest.mark.parametrize(
    ("after", "lines"),
    [
        ("out = F.interpolate(out, size=y.shape[-2:])", [32]),
        ("out = out.masked_fill(mask, -100.0)", [32]),
        ("out = torch.clamp(out, -50, 50)", [32]),
        ("out, rejected = out.chunk(2)", [32]),
        ("rejected, out = out.split(half)", [32]),
        ("rejected, out = out.float().chunk(2)", []),
        ("out = torch.sqrt(out)", []),
    ],
)
def test_what_leaves_the_dtype_of_logits_as_it_is(after, lines):
    """Parts, limits, masks and sizes of logits; of the two parts of a batch, both have their dtype."""
    text = CRITERION.format(criterion="nn.CrossEntropyLoss()", cast="", after=after)
    assert [f.line for f in findings(text, "HS154")] == lines


OWN = """\
import torch
import torch.nn.functional as F
from torch import nn

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.emb = nn.Embedding(100, 10)
        self.lm_head = nn.Linear(10, 100)

    def forward(self, ids, targets):
        logits = self.lm_head(self.emb(ids)){cast}
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

{model}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for x, y in loader:
    {loss}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("model", "cast", "loss", "expected"),
    [
        ("model = GPT(config).to(torch.bfloat16).cuda()", "", "loss = model(x, y)", [(13, "warning")]),
        ("model = GPT(config)\nif args.bf16:\n    model.bfloat16()", "", "loss = model(x, y)", [(13, "advice")]),
        ("model = GPT(config).to(torch.bfloat16)", ".float()", "loss = model(x, y)", []),
        ("model = GPT(config).bfloat16()\nmodel.lm_head.float()", "", "loss = model(x, y)", []),
        ("model = GPT(config)", "", "loss = model(x, y)", []),
        (
            "model = GPT(config).bfloat16()",
            "",
            'with torch.autocast("cuda", dtype=torch.bfloat16):\n        loss = model(x, y)',
            [],
        ),
    ],
)
def test_a_loss_in_the_forward_of_a_model_that_is_cast(model, cast, loss, expected):
    """The head of a class of this file has the dtype of the object, unless it is cast back or runs under autocast."""
    text = OWN.format(model=model, cast=cast, loss=loss)
    assert [(f.line, f.severity) for f in findings(text, "HS154")] == expected


WRAPPED = """\
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

class Recursive(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.backbone = base.model
        self.lm_head = {head}

    def forward(self, ids, targets):
        logits = self.lm_head(self.backbone(ids)[0])
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

base = AutoModelForCausalLM.from_pretrained("gpt2", dtype={dtype})
model = Recursive(base)
loss = model(ids, targets)
{trained}
"""


@pytest.mark.parametrize(
    ("head", "dtype", "trained", "lines"),
    [
        ("base.lm_head", "torch.bfloat16", "loss.backward()", [14]),
        ("base.lm_head", "torch.float32", "loss.backward()", []),
        ("nn.Linear(10, 100)", "torch.bfloat16", "loss.backward()", []),
        ("base.lm_head", "torch.bfloat16", "print(loss)", []),
    ],
)
def test_the_head_of_a_model_that_a_module_receives(head, dtype, trained, lines):
    """A wrapper that takes over the head of a loaded model computes the logits in its dtype; another file may use autocast."""
    text = WRAPPED.format(head=head, dtype=dtype, trained=trained)
    assert [f.line for f in findings(text, "HS154")] == lines


@pytest.mark.parametrize(("logits", "lines"), [("outputs[0]", [5]), ("outputs[1]", [])])
def test_the_first_of_what_a_language_model_returns(logits, lines):
    """Without labels the first output of transformers is the logits."""
    text = (
        "import torch\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2', dtype=torch.bfloat16)\n"
        f"outputs = model(ids)\nloss = torch.nn.functional.cross_entropy({logits}.view(-1, n), y)\nloss.backward()\n"
    )
    assert [f.line for f in findings(text, "HS154")] == lines


def test_an_option_that_chooses_the_format_of_the_weights_is_advice():
    """`model.to(table[args.dtype])` gives 16-bit logits in some runs."""
    text = (
        "import torch\nfrom nets import Net\ndtypes = {'bf16': torch.bfloat16, 'fp32': torch.float32}\n"
        "model = Net().to(dtypes[args.dtype])\ncriterion = torch.nn.CrossEntropyLoss()\nfor x, y in loader:\n"
        "    loss = criterion(model(x), y)\n    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    assert [(f.line, f.severity) for f in findings(text, "HS154")] == [(7, "advice")]
    assert findings(text.replace("torch.bfloat16", "torch.float64"), "HS154") == []


@pytest.mark.parametrize(
    ("enabled", "cast", "lines"), [("False", "", [10]), ("False", ".float()", []), ("flag", "", []), ("True", "", [])]
)
def test_a_region_that_turns_autocast_off_around_the_loss(enabled, cast, lines):
    """The logits of the outer region stay 16-bit where autocast no longer casts them for the loss."""
    text = (
        "import torch\nimport torch.nn.functional as F\nfrom torchvision.models import resnet18\nmodel = resnet18()\n"
        'for x, y in loader:\n    optimizer.zero_grad()\n    with torch.autocast("cuda", dtype=torch.bfloat16):\n'
        f'        out = model(x)\n        with torch.autocast("cuda", enabled={enabled}):\n'
        f"            loss = F.cross_entropy(out{cast}, y)\n    loss.backward()\n    optimizer.step()\n"
    )
    assert [f.line for f in findings(text, "HS154")] == lines


@pytest.mark.parametrize(
    ("loss", "lines"),
    [
        ("sum(F.cross_entropy(o, y) for o in outputs)", [8]),
        ("sum([F.cross_entropy(o, t) for o, t in zip(outputs, y)])", [8]),
        ("sum(F.cross_entropy(t, o) for o, t in zip(outputs, y))", []),
        ("sum(F.cross_entropy(o.float(), y) for o in outputs)", []),
    ],
)
def test_logits_that_a_comprehension_goes_through(loss, lines):
    """Deep supervision: one loss for each of the outputs."""
    text = (
        "import torch\nimport torch.nn.functional as F\nfrom nets import Net\nmodel = Net()\nfor x, y in loader:\n"
        '    with torch.autocast("cuda", dtype=torch.bfloat16):\n        outputs = model(x)\n'
        f"    loss = {loss}\n    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    assert [f.line for f in findings(text, "HS154")] == lines
