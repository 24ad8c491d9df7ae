"""Weights whose dtype is chosen: by an option, a table, a function, or the device."""

import pytest

from check_scripts import codes, findings

HEAD = "import argparse\nimport torch\np = argparse.ArgumentParser()\np.add_argument('--dtype', default='{default}')\nargs = p.parse_args()\n"
SCALED = """\
model = Net().cuda().to(DTYPE)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda"{enabled})
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda"):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
TRAINER = """\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=DTYPE)
Trainer(model=model, args=TrainingArguments("out", fp16=True), train_dataset=data).train()
"""
ACCELERATE = """\
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="fp16")
model = Net().to(dtype=DTYPE)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    loss = loss_fn(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
ADAPTED = """\
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=DTYPE)
model = get_peft_model(model, LoraConfig())
optimizer = torch.optim.AdamW(model.parameters())
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TABLE = "dtype = {'fp16': torch.float16, 'fp32': torch.float32}[args.dtype]\n"
FUNCTION = (
    "def pick(name):\n    match name:\n        case 'fp16':\n            return torch.float16\n    return torch.float32\n"
    "dtype = pick(args.dtype)\n"
)
ON_GPU = "dtype = torch.float16 if torch.cuda.is_available() else torch.float32\n"


@pytest.mark.parametrize(
    ("use", "code"),
    [
        (SCALED.format(enabled=""), "HS160"),
        (SCALED.format(enabled=", enabled=args.dtype == 'fp16'"), "HS160"),
        (TRAINER, "HS166"),
        (ACCELERATE, "HS199"),
    ],
)
@pytest.mark.parametrize("choice", [TABLE, FUNCTION])
def test_float16_by_an_option_is_reported_with_its_condition(choice, use, code):
    """The run with this option has float16 weights, and a scaler that rejects their gradients."""
    (finding,) = findings(HEAD.format(default="fp16") + choice + use.replace("DTYPE", "dtype"), code)
    assert "when `args.dtype == 'fp16'`" in finding.message


@pytest.mark.parametrize(
    ("use", "code"),
    [(SCALED.format(enabled=""), "HS160"), (TRAINER, "HS166"), (ACCELERATE, "HS199"), (ADAPTED, "HS168")],
)
def test_float16_on_every_gpu_is_reported(use, code):
    """A dtype that is float32 only without a GPU is float16 where it matters."""
    assert len(findings(HEAD.format(default="x") + ON_GPU + use.replace("DTYPE", "dtype"), code)) == 1


@pytest.mark.parametrize("enabled", ["", ", enabled=args.dtype == 'fp32'"])
def test_a_table_without_float16_is_silent(enabled):
    """bfloat16 or float32 weights are no business of this rule, and neither is a scaler that the option excludes."""
    table = TABLE if enabled else TABLE.replace("float16", "bfloat16", 1)
    text = HEAD.format(default="fp16") + table + SCALED.format(enabled=enabled).replace("DTYPE", "dtype")
    assert findings(text, "HS160") == []


LOOP = """\
import torch
{before}
for x, y in loader:
    optimizer.zero_grad()
    with {region}:
        loss = loss_fn(model(x), y)
    {backward}
    {step}
"""
SCALES = {"backward": "scaler.scale(loss).backward()", "step": "scaler.step(optimizer); scaler.update()"}
PLAIN = {"backward": "loss.backward()", "step": "optimizer.step()"}
REGIONS = "{'fp16': torch.autocast('cuda', dtype=torch.float16), 'bf16': torch.autocast('cuda', dtype=torch.bfloat16)}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LOOP.format(before="", region=REGIONS + "[args.mode]", **PLAIN), ["HS123"]),
        (LOOP.format(before=f"regions = {REGIONS}", region="regions['fp16']", **PLAIN), ["HS123"]),
        (LOOP.format(before=f"regions = {REGIONS}", region="regions['bf16']", **PLAIN), []),
        (
            LOOP.format(
                before="dtype = torch.bfloat16 if newer else torch.float16\nscaler = torch.amp.GradScaler('cuda', enabled=False)",
                region="torch.autocast('cuda', dtype=dtype)",
                **SCALES,
            ),
            ["HS123"],
        ),
        (
            LOOP.format(
                before="scaler = torch.amp.GradScaler('cuda', enabled=hps.bf16_run)",
                region="torch.autocast('cuda', dtype=torch.bfloat16, enabled=hps.bf16_run)",
                **SCALES,
            ),
            ["HS120"],
        ),
        (
            LOOP.format(
                before="dtype = torch.bfloat16 if args.half else torch.float32\nscaler = torch.amp.GradScaler('cuda')",
                region="torch.autocast('cuda', dtype=dtype)",
                **SCALES,
            ),
            ["HS120"],
        ),
        (
            LOOP.format(
                before="scaler = torch.amp.GradScaler('cuda', enabled=hps.fp16_run)",
                region="torch.autocast('cuda', dtype=torch.float16, enabled=hps.fp16_run)",
                **SCALES,
            ),
            [],
        ),
    ],
)
def test_regions_of_a_table_and_scalers_by_flags(text, expected):
    """A region under a key, a scaler that is off, and a flag of bfloat16 that enables a scaler."""
    assert [c.partition(":")[0] for c in codes(text) if c.startswith(("HS120", "HS123"))] == expected


NOT_FLOAT32 = """\
import torch
class Base:
    def __init__(self, name):
        if name == "half":
            self.dtype = torch.float16
        elif name == "brain":
            self.dtype = torch.{low}
        else:
            self.dtype = torch.float32
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.dtype {test})
{other}"""


@pytest.mark.parametrize(
    ("low", "test", "other", "num"),
    [
        ("bfloat16", "is not torch.float32", "", 1),
        ("bfloat16", "!= torch.float32", "", 1),
        ("float16", "is not torch.float32", "", 0),
        ("bfloat16", "== torch.float16", "", 0),
        ("bfloat16", "is not torch.float32", "        if name == 'brain':\n            self.scaler = None\n", 0),
    ],
)
def test_a_scaler_that_only_float32_switches_off(low, test, other, num):
    """HS120 in a base class whose regions are in another file: enabled for each 16-bit dtype that the file chooses."""
    assert len(findings(NOT_FLOAT32.format(low=low, test=test, other=other), "HS120")) == num


MODES = """\
import torch
def train_step(mode, model, loader, scaler=None):
    if mode == "pretrain":
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.{first}):
                loss = loss_fn(model(x), y)
            if scaler:
                scaler.scale(loss).backward()
            else:
                loss.backward()
    elif mode == "reward":
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = loss_fn(model(x), y)
            loss.backward()

def main(args):
    scaler = torch.amp.GradScaler("cuda") if args.mode == "pretrain" else None
    for step in range(args.steps):
        optimizer.zero_grad()
        train_step(args.mode, model, loader, scaler=scaler)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
"""


def test_the_region_of_a_step_is_that_of_the_loss_its_scaler_scaled():
    """A later branch in bfloat16 has no scaler; where the scaled loss itself is in bfloat16, the scaler is idle."""
    assert findings(MODES.format(first="float16"), "HS120") == []
    assert [f.line for f in findings(MODES.format(first="bfloat16"), "HS120")] == [18]
