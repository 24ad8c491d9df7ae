"""HS168, HS268: 4-bit layers and adapters in the runs that options, engines and training loops of a script choose."""

import pytest

from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings
from halfstep.check.runner import check_document
from halfstep.check.select import Selection

HEAD = """\
import argparse, torch
import lightning as L
from dataclasses import dataclass
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser, Trainer, TrainingArguments

"""
OPTION = (
    HEAD
    + """\
parser = argparse.ArgumentParser()
parser.add_argument("--quant", choices=["nf4", "int8", "fp16"], default="nf4")
args = parser.parse_args()

def quantization(name):
    if name == "nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)
    {other}

quantized = {chosen}
base = AutoModelForCausalLM.from_pretrained("x", dtype=torch.{dtype}, quantization_config=quantized)
if args.quant != "fp16":
    base = prepare_model_for_kbit_training(base)
model = get_peft_model(base, LoraConfig())
Trainer(model=model, args=TrainingArguments("out", {flag}), train_dataset=data).train()
"""
)
CHOSEN = "quantization(args.quant)"
TABLE = '{"nf4": quantization("nf4"), "int8": BitsAndBytesConfig(load_in_8bit=True), "fp16": None}[args.quant]'


def findings(text, code):
    """The findings of one rule, by the runner, which checks each value of a setting."""
    document = read_document("train.py", text.encode(), "python")
    return [f for f in check_document(document, Settings(), Selection()) if f.code == code]


@pytest.mark.parametrize(
    ("other", "chosen"),
    [
        ("return None", CHOSEN),
        ("if name == 'int8':\n        return BitsAndBytesConfig(load_in_8bit=True)", CHOSEN),
        ("return None", TABLE),
        ("return None", TABLE.replace("[args.quant]", ".get(args.quant)").replace(', "fp16": None', "")),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "flag", "expected"),
    [
        ("float16", 'fp16=args.quant != "fp16"', True),
        ("float16", 'fp16=args.quant in ("nf4", "int8")', True),
        ("float16", "fp16=True", False),
        ("bfloat16", 'fp16=args.quant != "fp16"', False),
    ],
)
def test_adapters_of_a_float16_model_where_an_option_leaves_the_quantization_out(other, chosen, dtype, flag, expected):
    """The configuration is None for the value "fp16": by a function without a last `return`, or by a table."""
    found = findings(OPTION.format(other=other, chosen=chosen, dtype=dtype, flag=flag), "HS168")
    assert [f.message.partition(",")[0] for f in found if "`model`" in f.message or "`base`" in f.message] == (
        ["with quant='fp16'"] if expected else []
    )


LOADED = (
    HEAD
    + """\
quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.{dtype})
model = AutoModelForCausalLM.from_pretrained("x", quantization_config=quantized)
"""
)
ATTACH = "model = get_peft_model(model, LoraConfig())\n"
LIGHTNING = "L.Trainer(max_epochs=1, precision={}).fit(Net(model), loader)\n"
ACCELERATE = """\
accelerator = Accelerator(mixed_precision={})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
"""
LOOP = """\
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda", enabled={scaled})
for batch in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.{dtype}):
        loss = model(**batch).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("dtype", "train", "severity"),
    [
        ("bfloat16", ATTACH + LIGHTNING.format("'16-mixed'"), "advice"),
        ("bfloat16", ATTACH + LIGHTNING.format("16"), "advice"),
        ("float16", ATTACH + LIGHTNING.format("'bf16-mixed'"), "warning"),
        ("bfloat16", ATTACH + ACCELERATE.format("'fp16'"), "advice"),
        ("bfloat16", ATTACH + LOOP.format(dtype="float16", scaled=True), "advice"),
        ("float16", ATTACH + LOOP.format(dtype="bfloat16", scaled=False), "warning"),
        ("bfloat16", ATTACH + LIGHTNING.format("'bf16-mixed'"), ""),
        ("bfloat16", ATTACH + LIGHTNING.format("'32-true'"), ""),
        ("bfloat16", ATTACH + LIGHTNING.format("cfg.precision"), ""),
        ("bfloat16", LIGHTNING.format("'16-mixed'"), ""),  # a frozen judge, next to the model that is trained
        ("bfloat16", ATTACH.replace("model,", "other,") + LIGHTNING.format("'16-mixed'"), ""),
        ("bfloat16", ATTACH + LOOP.format(dtype="bfloat16", scaled=False), ""),
    ],
)
def test_four_bit_layers_in_another_format_than_an_engine_or_a_loop(dtype, train, severity):
    """Lightning, Accelerate and autocast regions decide the format as the arguments of transformers' Trainer do."""
    found = findings(LOADED.format(dtype=dtype) + train, "HS268")
    assert [f.severity for f in found] == ([severity] if severity else [])


FIELD = (
    HEAD
    + """\
@dataclass
class Config:
    name: str = "x"
    lr: float = 1e-4
    bf16: bool = False

def main(args):
    config = {made}
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)
    model = AutoModelForCausalLM.from_pretrained(config.name, quantization_config=quantized)
    Trainer(get_peft_model(model, LoraConfig()), TrainingArguments("out", bf16=config.bf16)).train()
"""
)


@pytest.mark.parametrize(
    ("made", "count"),
    [
        ("Config(lr=args.lr)", 0),
        ("Config(lr=args.lr, bf16=args.bf16)", 1),
        ("Config()", 0),
        ("Config(**vars(args))", 1),
        ("Config(bf16=True)", 1),
        ("HfArgumentParser(Config).parse_args_into_dataclasses()[0]", 1),
    ],
)
def test_a_field_that_no_option_of_the_file_sets(made, count):
    """A field that is False stays so where the file creates its class from other options."""
    assert len(findings(FIELD.format(made=made), "HS268")) == count


ASDICT = (
    HEAD.replace("import dataclass", "import asdict, dataclass")
    + """\
@dataclass
class Config:
    output_dir: str = "out"
    seed: int = pick()
    bf16: bool = {default}

QUANTIZED = dict(load_in_4bit=True, bnb_4bit_compute_dtype="float16")
config = Config({passed})
model = AutoModelForCausalLM.from_pretrained("x", quantization_config=BitsAndBytesConfig(**QUANTIZED))
Trainer(get_peft_model(model, LoraConfig()), TrainingArguments(**asdict(config))).train()
"""
)


@pytest.mark.parametrize(
    ("default", "passed", "count"),
    [("True", "", 1), ("False", "bf16=True", 1), ("True", "bf16=False", 0), ("False", "", 0), ("pick()", "", 0)],
)
def test_the_fields_of_a_dataclass_as_arguments(default, passed, count):
    """`**asdict(config)` passes the defaults of the fields, or what the object is created with."""
    assert len(findings(ASDICT.format(default=default, passed=passed), "HS268")) == count
