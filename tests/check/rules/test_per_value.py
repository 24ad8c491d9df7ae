"""Mistakes that a script makes for one value of a precision setting only."""

import pytest

from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings
from halfstep.check.runner import check_document
from halfstep.check.select import Selection

LOADED = """\
import argparse
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--mixed_precision", default="bf16", choices={choices})
args = parser.parse_args()

def dtype_of(name):
    if not torch.cuda.is_available():
        return torch.float32
    return {{"fp16": torch.float16, "bf16": torch.bfloat16}}.get(name, torch.float32)

accelerator = Accelerator(mixed_precision=args.mixed_precision)
model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=dtype_of(args.mixed_precision))
{lift}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
"""
SCALED = """\
import torch

class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg

    def step(self, x, y):
        dtype = {{"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}}[self.cfg.dtype]
        scaler = torch.GradScaler("cuda", enabled=(self.cfg.dtype == "{name}"))
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            loss = self.loss(self.model(x), y)
        scaler.scale(loss).backward()
        scaler.step(self.optimizer)
        scaler.update()
"""


def findings(text, code):
    """The findings of one rule, by the runner, which checks each value."""
    document = read_document("train.py", text.encode(), "python")
    return [f for f in check_document(document, Settings(), Selection()) if f.code == code]


def reported(text, code):
    """The first words of what a rule reports, with the severity."""
    return [(f.severity, f.message.partition(",")[0]) for f in findings(text, code)]


def test_weights_in_the_format_of_the_option_that_a_scaler_rejects():
    """Only "fp16" gives float16 weights and a loss scale."""
    text = LOADED.format(choices=["no", "fp16", "bf16"], lift="")
    assert reported(text, "HS199") == [("error", "with mixed_precision='fp16'")]


@pytest.mark.parametrize(
    "parts",
    [
        {"choices": ["no", "bf16"], "lift": ""},
        {"choices": ["no", "fp16", "bf16"], "lift": "model.float()"},
        {"choices": ["no", "fp16", "bf16"], "lift": "if args.mixed_precision == 'fp16':\n    model.float()"},
        {
            "choices": ["no", "fp16", "bf16"],
            "lift": "if args.mixed_precision == 'fp16':\n    raise ValueError('bf16 only')",
        },
    ],
)
def test_values_that_are_rejected_or_cast_back_are_right(parts):
    """The option does not accept it, the weights are cast to float32 again, or the script raises."""
    assert reported(LOADED.format(**parts), "HS199") == []


def test_a_scaler_that_is_enabled_by_another_name_of_the_format():
    """The table knows "fp16", the test "float16": the one float16 run has no loss scale."""
    assert reported(SCALED.format(name="float16"), "HS123") == [("error", "with dtype='fp16'")]
    assert reported(SCALED.format(name="fp16"), "HS123") == []


def test_a_finding_for_one_value_has_no_fix():
    """What is right for this value would be wrong for the others."""
    found = findings(LOADED.format(choices=["fp16", "bf16"], lift=""), "HS199")
    assert [f.fix for f in found] == [None]


EVALUATED = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 32)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 4))

    def forward(self, x):
        hidden = torch.relu(self.body(x))
        logits = {logits}
        return logits

class LogLoss(nn.Module):
    def __init__(self, eps={eps}):
        super().__init__()
        self.eps = eps

    def forward(self, logits, target):
        p = torch.sigmoid(logits)
        return -(target * torch.log(p.clamp(min=self.eps))).mean()

def make_loss(cfg):
    if cfg.loss == "log":
        return LogLoss()
    return nn.BCEWithLogitsLoss()

def formats(precision):
    return precision in ("fp16", "bf16"), torch.float16 if precision == "fp16" else torch.bfloat16

def train(model, loader, optimizer, criterion, scaler, precision):
    use_amp, dtype = formats(precision)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype, enabled=use_amp):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

@torch.no_grad()
def evaluate(model, loader, precision):
    use_amp, dtype = formats(precision)
    scores = []
    for x, _ in loader:
        if use_amp:
            with torch.autocast("cuda", dtype=dtype):
                logits = model(x)
        else:
            logits = model(x)
        scores.append(torch.sigmoid(logits).cpu().numpy())
    return scores

def main(cfg):
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=cfg.precision == "fp16")
    train(model, cfg.loader, optimizer, make_loss(cfg), scaler, precision=cfg.precision)
    return evaluate(model, cfg.loader, precision=cfg.precision)
"""


def test_numbers_of_one_format():
    """NumPy has no bfloat16, and a small constant is zero in float16: each fails with one value of the option."""
    text = EVALUATED.format(logits="self.head(hidden)", eps="1e-8")
    assert reported(text, "HS158") == [("error", "with precision='bf16'")]
    assert reported(text, "HS164") == [("warning", "with precision='fp16'")]


@pytest.mark.parametrize("logits", ["self.head(hidden).float()", "torch.softmax(self.head(hidden), dim=-1)"])
def test_numbers_that_leave_the_model_in_float32(logits):
    """A cast or a softmax of the logits gives NumPy float32."""
    assert reported(EVALUATED.format(logits=logits, eps="1e-6"), "HS158") == []


def test_a_constant_that_float16_has():
    """1e-6 is a float16 number."""
    assert reported(EVALUATED.format(logits="self.head(hidden)", eps="1e-6"), "HS164") == []


ENGINE = """\
{library}

def main(cfg):
    engine = {engine}
    model, opt_g, opt_d = engine.{prepare}(cfg.model, cfg.opt_g, cfg.opt_d)
    for x in cfg.loader:
        opt_g.zero_grad()
        opt_d.zero_grad()
        loss_g, loss_d = model(x)
        engine.backward(loss_g)
{between}        engine.backward(loss_d)
{after}        opt_d.step()
"""
FABRIC = {"library": "import lightning as L", "prepare": "setup"}
ACCELERATE = {"library": "from accelerate import Accelerator", "prepare": "prepare"}
STEP = "        opt_g.step()\n"


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({**FABRIC, "engine": "L.Fabric(precision=cfg.precision)"}, "precision='16-mixed'"),
        ({**ACCELERATE, "engine": "Accelerator(mixed_precision=cfg.amp)"}, "amp='fp16'"),
    ],
)
def test_two_optimizers_share_the_scale_of_an_engine(parts, name):
    """The step of the first updates the scale before the second divides by it; not if its backward comes after that step."""
    assert reported(ENGINE.format(**parts, between="", after=STEP), "HS108") == [("error", f"with {name}")]
    assert reported(ENGINE.format(**parts, between=STEP, after=""), "HS108") == []


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_an_engine_without_a_scale(precision):
    """Only 16-mixed scales the loss."""
    text = ENGINE.format(**FABRIC, engine=f'L.Fabric(precision="{precision}")', between="", after=STEP)
    assert reported(text, "HS108") == []


PROJECTOR = """\
import torch
from mine import Projector

def dtype_of(raw, *, default):
    name = str(raw or "").strip().lower()
    if not name:
        return default
    return {{"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}}.get(name, default)

def main(cfg, loader, loss_fn):
    in_8bit = {in_8bit}
    model = Projector.from_pretrained(cfg.path, load_in_8bit=in_8bit)
    compute = dtype_of(cfg.get("compute_dtype", "bf16"), default=torch.bfloat16)
    weights = dtype_of(cfg.get("weights_dtype", {default}), default=compute)
    if in_8bit:
        model.move_to("cuda", dtype=weights)
    else:
        model.to(device="cuda", dtype=weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scales = compute == torch.float16{test}
    scaler = torch.amp.GradScaler("cuda", enabled=scales)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=compute):
            loss = loss_fn(model(x), y)
        if scales:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
"""
OPTION = 'bool(cfg.get("load_in_8bit", False))'
SAME = 'cfg.get("compute_dtype", "bf16")'


def test_two_settings_of_which_one_follows_the_other():
    """A table behind a function that two settings are passed to: float16 in both has no loss scale."""
    text = PROJECTOR.format(in_8bit=OPTION, default=SAME, test=" and weights == torch.float32")
    assert reported(text, "HS123") == [("error", "with compute_dtype='fp16'")]
    assert reported(text, "HS161") == [("warning", "with weights_dtype='fp16'")]
    assert [f.line for f in findings(text, "HS151")] == [18]


def test_a_model_that_is_quantized_in_every_run_is_not_trained_in_its_dtype():
    """The branch that casts it does not exist for any value."""
    text = PROJECTOR.format(in_8bit=True, default=SAME, test=" and weights == torch.float32")
    assert reported(text, "HS161") == []


def test_a_loss_scale_for_every_float16_run():
    """Without the second test, float16 is always scaled."""
    assert reported(PROJECTOR.format(in_8bit=OPTION, default='"fp32"', test=""), "HS123") == []


CLASS = """\
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

{decorator}class Config:
    bf16{kind} = {value}

config = Config()

def load(path):
    options = {{"torch_dtype": torch.bfloat16 if config.bf16 else torch.float16}}
    return AutoModelForCausalLM.from_pretrained(path, **options)

model = get_peft_model(load(path), LoraConfig())
args = TrainingArguments("out", fp16=False, bf16=config.bf16)
Trainer(model=model, args=args, train_dataset=data).train()
"""


def test_a_plain_class_has_the_value_that_is_written():
    """Nobody fills it, unlike the fields of a dataclass."""
    plain = [CLASS.format(decorator="", kind="", value=value) for value in (True, False)]
    assert [len(findings(text, "HS168")) for text in plain] == [0, 1]
    field = CLASS.format(decorator="@dataclass\n", kind=": bool", value=True)
    assert reported(field, "HS168") == [("warning", "with bf16=False")]
