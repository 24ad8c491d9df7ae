"""Forms of mistakes, and of right code next to them, that public scripts have: one pair for each."""

import json

import pytest

from check_scripts import findings
from halfstep import check_path

HEAD = 'import torch\nscaler = torch.amp.GradScaler("cuda")\n'
STEP = "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
EPOCHS = (
    HEAD
    + "{before}for epoch in range(9):\n    for x in loader:\n        loss = model(x)\n    "
    + STEP.replace("\n    ", "\n        ")
    + "\n{save}"
)
CHECKPOINT = (
    "    torch.save({{'epoch': epoch, 'model': model.state_dict(), 'optimizer': optimizer.state_dict(){more}}}, path)\n"
)
SAVED = CHECKPOINT.format(more="")
SCALED = CHECKPOINT.format(more=", 'scaler': scaler.state_dict()")
WINDOW = (
    HEAD
    + "for i, x in enumerate(loader):\n    loss = model(x)\n{skip}    scaler.scale(loss).backward()\n"
    + "    if (i + 1) % steps == 0:\n        scaler.step(optimizer)\n        scaler.update()\n        optimizer.zero_grad()\n"
)
ACCELERATED = (
    "import torch\nfrom accelerate import Accelerator\nfrom torch.cuda.amp import GradScaler\naccelerator = Accelerator()\n"
    "scaler = GradScaler()\n{prepare}for x in loader:\n    loss = model(x)\n    {backward}\n    optimizer.step()\n    optimizer.zero_grad()\n"
)
PER_EPOCH = (
    "import torch\ndef train_fn(loader, model, optimizer):\n{inside}    optional_meter = Meter()\n    for x in loader:\n"
    "        optimizer.zero_grad()\n        scaler.scale(model(x)).backward()\n        scaler.step(optimizer)\n        scaler.update()\n"
    "model = Net()\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n{outside}for epoch in range(9):\n    train_fn(loader, model, optimizer)\n"
)
CREATE = "scaler = torch.amp.GradScaler('cuda')\n"
CHOSEN = (
    "import torch\nfrom transformers import AutoModelForCausalLM\ndef train(name, dtype=None):\n    if dtype is None:\n"
    "        dtype = torch.{default} if torch.cuda.is_available() else torch.float32\n"
    "    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)\n    params = []\n    for n, p in model.named_parameters():\n"
    "        params.append(p)\n    optimizer = torch.optim.AdamW(params, lr=1e-5)\n    for x in loader:\n        loss = model(x).loss\n"
    "        loss.backward()\n        norm = 0.0\n        for p in model.parameters():\n            norm += p.grad.detach().float().pow(2).sum()\n"
    "        optimizer.step()\n        optimizer.zero_grad()\n"
)
ADAPTED = (
    "import torch\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n"
    "base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)\nmodel = PeftModel.from_pretrained(base, path, is_trainable=True)\n"
    "logits = model(ids).logits[:, :-1]\nlogp = torch.log_softmax(logits{cast}, dim=-1)\n"
)
SELECTED = (
    "import torch\nimport torch.nn as nn\nclass Model(nn.Module):\n    def forward(self, x):\n        return self.head(x)\n"
    "def active(raw, mask):\n    flat = raw.view(-1, 5)\n    chosen = torch.masked_select(flat, mask)\n    return chosen.view(-1, 5)\n"
    "model = Model()\ncriterion = nn.CrossEntropyLoss()\nfor x, y, mask in loader:\n    with torch.autocast('cuda', dtype=torch.float16):\n"
    "        raw = model(x)\n    logits = active(raw{cast}, mask)\n    loss = criterion(logits, y)\n    loss.backward()\n"
)
LORA = (
    "import torch\nfrom peft import get_peft_model\nfrom trl import SFTTrainer\nmodel = get_peft_model(model, config)\n"
    "for p in model.parameters():\n    if p.requires_grad:\n        p.data = p.data.to(torch.{dtype})\n"
    "trainer = SFTTrainer(model=model, args=args)\ntrainer.train()\n"
)
SWITCHED = (
    "import torch\nuse_amp = torch.cuda.is_available()\nscaler = torch.amp.GradScaler('cuda', enabled=use_amp)\n"
    "dtype = torch.{low} if use_amp else torch.float32\nfor x in loader:\n    optimizer.zero_grad()\n"
    "    with torch.autocast('cuda', dtype=dtype):\n        loss = model(x)\n" + STEP
)
STATE = (
    HEAD
    + "class Trainer:\n    def save(self, scaler, path):\n{default}        if self.amp:\n            state = scaler.state_dict()\n"
    "        torch.save({{'optimizer': self.optimizer.state_dict(), 'amp': state}}, path)\n"
    "    def fit(self):\n        for x in loader:\n            scaler.scale(model(x)).backward()\n            scaler.step(self.optimizer)\n"
    "            scaler.update()\n        self.save(scaler, 'x')\n"
)
APEX = "from apex import amp\nmodel, optimizer = amp.initialize(model, optimizer, opt_level='{level}')\n"
UNSLOTH = (
    "import torch\nfrom transformers import BitsAndBytesConfig\nfrom unsloth import FastLanguageModel\n"
    "config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)\n"
    "model, tokenizer = FastLanguageModel.from_pretrained(name, load_in_4bit=True{passed})\n"
)
# rule: the mistake, and the same script without it
PAIRS = {
    "a checkpoint with its epoch, in a file that restores nothing": (
        "HS170", EPOCHS.format(before="", save=SAVED), EPOCHS.format(before="", save=SCALED),
    ),
    "an update for a skipped batch, with two conditions": (
        "HS115",
        WINDOW.format(skip="    if torch.isnan(loss) or torch.isinf(loss):\n        scaler.update()\n        continue\n"),
        WINDOW.format(skip="    if torch.isnan(loss) or torch.isinf(loss):\n        continue\n"),
    ),
    "a scaler next to Accelerate": (
        "HS122",
        ACCELERATED.format(prepare="model, scaler = accelerator.prepare(model, scaler)\n", backward="accelerator.backward(loss)"),
        ACCELERATED.format(prepare="", backward="scaler.scale(loss).backward()"),
    ),
    "a scaler per epoch, with variables that are called optional": (
        "HS121", PER_EPOCH.format(inside="    " + CREATE, outside=""), PER_EPOCH.format(inside="", outside=CREATE),
    ),
    "a dtype that is chosen where none is passed": ("HS151", CHOSEN.format(default="bfloat16"), CHOSEN.format(default="float32")),
    "logits of an adapted model": ("HS154", ADAPTED.format(cast=""), ADAPTED.format(cast=".float()")),
    "logits that a function selects": ("HS154", SELECTED.format(cast=""), SELECTED.format(cast=".float()")),
    "adapters that are cast for a Trainer": ("HS151", LORA.format(dtype="float16"), LORA.format(dtype="float32")),
    "one flag for bfloat16 and the scaler": ("HS120", SWITCHED.format(low="bfloat16"), SWITCHED.format(low="float16")),
    "the state of a scaler that there may not be": ("HS132", STATE.format(default=""), STATE.format(default="        state = None\n")),
    "all weights in float16 with apex": ("HS161", APEX.format(level="O3"), APEX.format(level="O1")),
    "a configuration next to Unsloth's own option": (
        "HS289", UNSLOTH.format(passed=""), UNSLOTH.format(passed=", quantization_config=config"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "wrong", "right"), PAIRS.values(), ids=PAIRS.keys())
def test_form_is_reported_and_its_repair_is_not(rule, wrong, right):
    """The mistake has one finding of the rule, and the repaired script has none."""
    assert [f.code for f in findings(wrong, rule)] == [rule]
    assert not list(findings(right, rule))


LOADED = (
    "import torch\nfrom transformers import AutoModelForCausalLM\ndtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32\n"
    "model = AutoModelForCausalLM.from_pretrained(name{dtype})\nscaler = torch.amp.GradScaler('cuda', enabled=dtype == torch.float16)\n"
    "for x in loader:\n    model.eval()\n    with torch.no_grad():\n        out = model(x)\n    model.train()\n"
    "    with torch.autocast('cuda', dtype=torch.float16):\n        loss = model(x).loss\n"
    "    if dtype == torch.float16:\n        scaler.scale(loss).backward()\n        scaler.step(optimizer)\n        scaler.update()\n"
    "        scheduler.step()\n    else:\n        loss.backward()\n        optimizer.step()\n        scheduler.step()\n"
)
DIVIDED = (
    "import torch\nfrom mine import train_step\nfor batch in loader:\n    parts = split(batch, n)\n    for part in parts:\n"
    "        with torch.autocast('cuda', dtype=torch.bfloat16):\n            out = model(part)\n"
    "        {loss}\n        loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
)
RESUMED = (
    "import torch\nfrom peft import LoraConfig, PeftModel\nfrom transformers import AutoModelForCausalLM\nfrom trl import SFTConfig, SFTTrainer\n"
    "model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)\nif resume:\n{load}    config = None\nelse:\n    config = LoraConfig(r=8)\n"
    "trainer = SFTTrainer(model=model, args=SFTConfig('out', bf16=True), peft_config=config)\ntrainer.train()\n"
)
LOADED_ADAPTER = "    model = PeftModel.from_pretrained(model, path, is_trainable=True)\n"
OLD = (
    "from transformers import {old}AutoModelForCausalLM, Trainer, TrainingArguments\n"
    "model = AutoModelForCausalLM.from_pretrained('meta-llama/Llama-2-7b-hf')\n"
    "trainer = Trainer(model=model, args=TrainingArguments('out', bf16=True), train_dataset=data)\ntrainer.train()\n"
)
DEVICE = (
    "import torch\nfrom contextlib import nullcontext\ndef region():\n    if device.type == 'cuda':\n"
    "        return torch.autocast('cuda', dtype=torch.float16)\n    return nullcontext()\n"
    "scaler = torch.amp.GradScaler('cuda', enabled={enabled})\nfor x in loader:\n    optimizer.zero_grad()\n    with region():\n        loss = model(x)\n"
    "    if scaler.is_enabled():\n        scaler.scale(loss).backward()\n        scaler.step(optimizer)\n        scaler.update()\n"
    "    else:\n        loss.backward()\n        optimizer.step()\n"
)
SILENT = {
    "the window goes to a function of another file": (
        "HS180",
        DIVIDED.format(loss="loss, info = train_step(out, accumulation_steps=len(parts))"),
        DIVIDED.format(loss="loss = torch.nn.functional.mse_loss(out, part)"),
    ),
    "a trained adapter is loaded instead": ("HS277", RESUMED.format(load=LOADED_ADAPTER), RESUMED.format(load="")),
    "transformers before 5": ("HS152", OLD.format(old="AdamW, "), OLD.format(old="")),
    "autocast and scaler for one device": ("HS123", DEVICE.format(enabled="device.type == 'cuda'"), DEVICE.format(enabled="args.scale")),
    "a model in bfloat16 without autocast": ("HS149", LOADED.format(dtype=", dtype=dtype"), LOADED.format(dtype=", dtype=torch.float32")),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "right", "wrong"), SILENT.values(), ids=SILENT.keys())
def test_right_form_is_silent(rule, right, wrong):
    """What looks like a mistake has no finding; without the part that makes it right, it has one."""
    assert not list(findings(right, rule))
    assert list(findings(wrong, rule))


def test_schedule_of_a_branch_that_never_runs():
    """A dtype that is bfloat16 or float32 never takes the branch for float16."""
    text = LOADED.format(dtype=", dtype=dtype")
    assert not list(findings(text, "HS196"))
    assert list(findings(text.replace("torch.bfloat16 if", "torch.float16 if"), "HS196"))


def test_scaler_that_a_notebook_never_uses(tmp_path):
    """No other file reads the variables of a notebook; those of a module may be imported."""
    lines = "import torch\nscaler = torch.cuda.amp.GradScaler()\nfrom mine import run_fold\nrun_fold(model)\n"
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": lines}
    notebook, module = tmp_path / "train.ipynb", tmp_path / "train.py"
    notebook.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    module.write_text(lines)
    assert [f.code for f in check_path(notebook) if f.code == "HS122"] == ["HS122"]
    assert not [f for f in check_path(module) if f.code == "HS122"]
