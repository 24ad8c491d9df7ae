"""HS168: adapters whose gradients pass through a float16 model without a loss scale."""

import pytest

from check_scripts import codes, findings
from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings
from halfstep.check.runner import check_document
from halfstep.check.select import Selection

HEAD = """\
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModel, Trainer, TrainingArguments
"""
LOOP = """\
optimizer = torch.optim.AdamW({params}, lr=1e-4)
for x in loader:
    loss = model(x).loss
    {backward}
    optimizer.step()
    optimizer.zero_grad()
"""
HALF = "base = AutoModel.from_pretrained(name, torch_dtype=torch.float16)\n"
ATTACH = "model = get_peft_model(base, LoraConfig())\n"
TRAINABLE = "[p for p in model.parameters() if p.requires_grad]"
CLASS = """\
class Runner:
    def __init__(self, path=None):
        self.model = AutoModel.from_pretrained(name, trust_remote_code=True).half().cuda()
        if path is not None:
            self.model = PeftModel.from_pretrained(self.model, path)
        else:
            self.model = get_peft_model(self.model, LoraConfig())

    def train(self):
        optimizer = torch.optim.Adam(self.model.parameters())
        for x in loader:
            loss = self.model(x).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def loop(setup, params="model.parameters()", backward="loss.backward()"):
    return HEAD + setup + LOOP.format(params=params, backward=backward)


@pytest.mark.parametrize(
    "text",
    [
        loop(HALF + ATTACH),
        loop("model = get_peft_model(base.half(), LoraConfig())\n"),
        loop(HALF + ATTACH, TRAINABLE),
        loop(HALF + "model = PeftModel.from_pretrained(base, path, is_trainable=True)\n"),
        loop("base = Net()\nif torch.cuda.is_available():\n    base = base.half().cuda()\n" + ATTACH),
        HEAD + CLASS,
    ],
)
def test_a_loop_without_a_loss_scale(text):
    """The finding is on the backward pass, and the float32 adapters are no finding of HS161."""
    assert [c.partition(":")[0] for c in codes(text)] == ["HS168"]
    (finding,) = findings(text, "HS168")
    assert "backward" in text.splitlines()[finding.line - 1]


def test_adapters_of_add_adapter_have_float16_weights_too():
    """`add_adapter` leaves them in the dtype of their layers, which HS161 reports as well."""
    text = loop(HALF.replace("base =", "model =") + "model.add_adapter(LoraConfig())\n")
    assert [c.partition(":")[0] for c in codes(text)] == ["HS161", "HS168"]


@pytest.mark.parametrize(
    "text",
    [
        loop(HALF.replace("float16", "bfloat16") + ATTACH),
        loop(HALF.replace("float16", "float32") + ATTACH),
        loop(HALF + "base.float()\n" + ATTACH),
        loop(HALF + ATTACH, backward="(loss * 1024).backward()"),
        loop(HALF + ATTACH, backward="accelerator.backward(loss)"),
        loop(
            HALF + ATTACH,
            backward="with torch.autocast('cuda', dtype=torch.bfloat16):\n        loss = model(x).loss\n    loss.backward()",
        ),
        loop(HALF + ATTACH, params="prompt.parameters()"),
        loop(HALF + "base = prepare_model_for_kbit_training(base)\n" + ATTACH),
        loop(HALF.replace("name,", "name, load_in_8bit=True,") + ATTACH),
        loop("base = Net()\nif args.half:\n    base = base.half()\n" + ATTACH),
        loop("teacher.half()\n" + ATTACH),
    ],
)
def test_a_loss_scale_or_another_dtype_is_silent(text):
    """bfloat16 and float32 need no scale; an option or an engine may decide; 4-bit and 8-bit layers have a dtype of their own."""
    assert findings(text, "HS168") == []


@pytest.mark.parametrize(
    ("arguments", "trainer", "count"),
    [
        ("TrainingArguments('out')", "Trainer(model=model, args=args)", 1),
        ("TrainingArguments('out', fp16=False, bf16=False)", "Trainer(model, args)", 1),
        ("TrainingArguments('out')", "SFTTrainer(model=base, args=args, peft_config=LoraConfig())", 1),
        ("TrainingArguments('out', fp16=True)", "Trainer(model=model, args=args)", 0),
        ("TrainingArguments('out', bf16=use_bf16)", "Trainer(model=model, args=args)", 0),
        ("TrainingArguments('out', **options)", "Trainer(model=model, args=args)", 0),
        ("TrainingArguments('out', deepspeed='ds.json')", "Trainer(model=model, args=args)", 0),
        ("SFTConfig('out')", "SFTTrainer(model=model, args=args)", 0),
    ],
)
def test_a_trainer_without_fp16(arguments, trainer, count):
    """TrainingArguments leave both formats off; the configurations of TRL turn bf16 on by themselves."""
    text = HEAD + HALF + ATTACH + f"args = {arguments}\ntrainer = {trainer}\ntrainer.train()\n"
    assert len(findings(text, "HS168")) == count


CHOICE = (
    HEAD.replace("TrainingArguments", "TrainingArguments, BitsAndBytesConfig")
    + """\
from trl import GRPOConfig, GRPOTrainer
dtype = torch.bfloat16 if args.bf16 else torch.float16
base = AutoModel.from_pretrained(name, torch_dtype=dtype)
model = get_peft_model(base, LoraConfig())
config = GRPOConfig(output_dir="out", bf16=args.bf16{fp16})
GRPOTrainer(model=model, args=config).train()
"""
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CHOICE.format(fp16=""), [5]),
        (CHOICE.format(fp16=", fp16=False"), [5]),
        (CHOICE.format(fp16="").replace("GRPOConfig(output_dir=", "TrainingArguments("), [5]),
        (CHOICE.format(fp16=", fp16=not args.bf16"), []),
        (CHOICE.format(fp16="").replace("torch.float16", "torch.float32"), []),
        (CHOICE.format(fp16="").replace("bf16=args.bf16", "bf16=True"), []),
        (CHOICE.format(fp16="").replace("if args.bf16", "if not args.bf16"), []),
    ],
)
def test_the_other_arm_of_a_dtype_is_unscaled(text, expected):
    """`bfloat16 if flag else float16` with bf16=flag leaves the float16 arm without a loss scale, unless fp16 is set for it."""
    assert [f.line for f in findings(text, "HS168")] == expected


OPTIONAL = "base = AutoModel.from_pretrained(name, torch_dtype=torch.float16)\n{freeze}model = base\nif args.lora:\n    model = get_peft_model(base, LoraConfig())\n"


def test_adapters_that_an_option_attaches_to_a_frozen_model():
    """Without them nothing is trained; with them the gradients are float16."""
    text = loop(OPTIONAL.format(freeze="base.requires_grad_(False)\n"))
    assert [f.code for f in findings(text, "HS161", "HS168")] == ["HS168"]


def test_one_finding_for_a_model_that_is_trained_without_adapters_too():
    """HS161 reports the same load."""
    text = loop(OPTIONAL.format(freeze=""))
    assert [f.code for f in findings(text, "HS161", "HS168")] == ["HS161"]


CHOSEN = """\
import argparse, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
parser = argparse.ArgumentParser()
parser.add_argument("--precision", default="fp16", choices=["no", "fp16", "bf16"])
args = parser.parse_args()
dtype = {dtype}
model = get_peft_model(AutoModelForCausalLM.from_pretrained("x", dtype=dtype), LoraConfig()).cuda()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda", enabled={enabled})
for batch in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled={enabled}):
        loss = model(**batch).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
EITHER = "torch.bfloat16 if args.precision == 'bf16' else torch.float16"


@pytest.mark.parametrize(
    ("dtype", "enabled", "value"),
    [
        (EITHER, "args.precision == 'fp16'", "precision='no'"),
        (EITHER, "args.precision != 'bf16'", None),
        ("torch.float32", "args.precision == 'fp16'", None),
        ("torch.float16", "False", ""),
        (EITHER, "flag", None),
    ],
)
def test_a_scaler_that_is_off_for_a_value_that_loads_float16(dtype, enabled, value):
    """A disabled scaler scales nothing, so the adapters' gradients pass through float16 without a loss scale."""
    text = CHOSEN.format(dtype=dtype, enabled=enabled)
    document = read_document("train.py", text.encode(), "python")
    every = check_document(document, Settings(), Selection())
    messages = [f.message for f in every if f.code == "HS168"]
    assert len(messages) == (value is not None)
    assert all(message.startswith(f"with {value}, " if value else "the model") for message in messages)
