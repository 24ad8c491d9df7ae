"""HS267, HS268, HS289: names of dtypes that torch does not have, 4-bit layers in another format, unused configurations."""

import pytest

from check_scripts import findings

HEAD = "import torch\nfrom transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments\nfrom trl import SFTConfig\n"
LOAD = "model = AutoModelForCausalLM.from_pretrained('x', {})\n"
BNB = "quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype={})\n"


@pytest.mark.parametrize(
    "line",
    [
        BNB.format("'torch.bfloat16'"),
        BNB.format("'bf16'"),
        BNB.format("name").replace("quantized", "name = 'torch.float16'\nquantized", 1),
        "from transformers import BitsAndBytesConfig as Quantized\nQuantized(bnb_4bit_compute_dtype='torch.float16')\n",
        "from transformers import pipeline\npipeline('text-generation', torch_dtype='bf16')\n",
        LOAD.format("torch_dtype='fp16'"),
        LOAD.format("dtype='torch.float16'"),
        LOAD.format("**options").replace("model", "options = dict(torch_dtype='bf16')\nmodel", 1),
        "model = AutoModelForCausalLM.from_config(config, dtype='fp16')\n",
    ],
)
def test_a_name_that_torch_does_not_have(line):
    """By keyword, by a variable and by a dictionary of options."""
    assert [f.code for f in findings(HEAD + line, "HS267")] == ["HS267"]


@pytest.mark.parametrize(
    "line",
    [
        BNB.format("'bfloat16'"),
        BNB.format("torch.bfloat16"),
        BNB.format("args.dtype"),
        LOAD.format("torch_dtype='auto'"),
        LOAD.format("torch_dtype='float16'"),
        LOAD.format("torch_dtype='half'"),
        "from diffusers import Pipe\nPipe.from_pretrained('x', torch_dtype='fp16')\n",  # its own reading of strings
        "mine.from_pretrained('x', torch_dtype='bf16')\n",
    ],
)
def test_a_name_that_torch_has_is_silent(line):
    """Attributes of torch, "auto", unknown values and classes of other packages."""
    assert findings(HEAD + line, "HS267") == []


@pytest.mark.parametrize(
    "rest",
    [
        "args = TrainingArguments('out', bf16=True)\n",
        "args = SFTConfig(output_dir='out', bf16=True)\n",
        "flag = True\nargs = SFTConfig(output_dir='out', bf16=flag, fp16=False)\n",
        "options = {'bf16': True}\nargs = TrainingArguments('out', **options)\n",
        LOAD.format("quantization_config=quantized, torch_dtype=torch.bfloat16") + "Trainer(model).train()\n",
    ],
)
@pytest.mark.parametrize("dtype", ["torch.float16", "'float16'", "torch.half"])
def test_four_bit_layers_in_float16_in_a_bf16_run(dtype, rest):
    """The flag of the arguments, or the dtype of the model that is trained."""
    assert [f.line for f in findings(HEAD + BNB.format(dtype) + rest, "HS268")] == [4]
    assert findings(HEAD + BNB.format("torch.bfloat16") + rest, "HS268") == []


@pytest.mark.parametrize(
    "rest",
    [
        "args = TrainingArguments('out', fp16=True)\n",
        "args = TrainingArguments('out', bf16=ok, fp16=not ok)\n",
        "args = TrainingArguments('out', bf16=False)\n",
        LOAD.format("quantization_config=quantized, torch_dtype=torch.bfloat16") + "model.generate(x)\n",
        "",
    ],
)
def test_other_runs_are_silent(rest):
    """fp16, a flag that only a run decides, and inference."""
    assert findings(HEAD + BNB.format("torch.float16") + rest, "HS268") == []


OPTION = """\
import argparse, torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments
from accelerate import Accelerator
parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()
quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype={dtype})
model = AutoModelForCausalLM.from_pretrained(name, quantization_config=quantized)
{train}
"""


@pytest.mark.parametrize(
    ("train", "count"),
    [
        ("TrainingArguments('out', fp16=args.fp16, bf16=args.bf16)", 1),
        ("TrainingArguments('out', bf16=args.bf16)", 1),
        ("Accelerator(mixed_precision='fp16' if args.fp16 else 'bf16' if args.bf16 else None)", 1),
        ("Accelerator(mixed_precision='bf16' if args.bf16 else 'no')", 1),
        ("Accelerator(mixed_precision='fp16' if args.fp16 else 'no')", 0),
        ("TrainingArguments('out', fp16=args.fp16)", 0),
        ("TrainingArguments('out', bf16=config.mixed)", 0),
    ],
)
def test_an_option_that_trains_in_bf16(train, count):
    """The compute dtype is float16 whatever the option says; an attribute of something else decides nothing."""
    assert len(findings(OPTION.format(dtype="torch.float16", train=train), "HS268")) == count
    chosen = "torch.bfloat16 if args.bf16 else torch.float16"
    assert findings(OPTION.format(dtype=chosen, train=train), "HS268") == []


UNUSED = """\
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
def main(args):
    {setup}
    return {load}
"""
MAKE = "quantized = BitsAndBytesConfig(load_in_4bit=True)"
PLAIN = "AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)"


@pytest.mark.parametrize(
    ("setup", "load", "count"),
    [
        (MAKE, PLAIN, 1),
        ("quantized = None\n    if args.qlora:\n        " + MAKE, PLAIN, 1),
        (MAKE, "AutoModelForCausalLM.from_pretrained(name, quantization_config=quantized)", 0),
        (
            MAKE + "\n    options = dict(quantization_config=quantized)",
            "AutoModelForCausalLM.from_pretrained(name, **options)",
            0,
        ),
        (MAKE + "\n    options = dict(quantization_config=quantized)", PLAIN, 1),
        (MAKE + "\n    options = {'dtype': dtype, 'quantization_config': quantized}", PLAIN, 1),
        (MAKE + "\n    options = wrap(quantization_config=quantized)", PLAIN, 0),
        ("options['quantization_config'] = BitsAndBytesConfig(load_in_4bit=True)", PLAIN, 0),
        ("self.quantized = BitsAndBytesConfig(load_in_4bit=True)", PLAIN, 0),
        (MAKE + "\n    build = lambda: load(quantized)", PLAIN, 0),
        (MAKE, "locals()", 0),
        (MAKE, "AutoTokenizer.from_pretrained(name)", 0),
        ("", PLAIN, 0),
    ],
)
def test_a_configuration_that_no_model_gets(setup, load, count):
    """A local variable that nothing reads, next to a model that is loaded without it."""
    assert len(findings(UNUSED.format(setup=setup, load=load), "HS289")) == count


@pytest.mark.parametrize(
    ("read", "count"),
    [
        ("with open(args.path) as f:\n        rows = eval(f.read())", 1),
        ("with open(args.path) as f:\n        for line in f:\n            rows.append(eval(line))", 1),
        ("with open(args.path) as f:\n        rows = [eval(line.strip()) for line in f]", 1),
        ("rows = [eval(line) for line in open(args.path).readlines()]", 1),
        ("with open(args.path) as f:\n        text = f.read()\n    rows = eval(text)", 1),
        ("model.eval()", 1),
        ("settings = vars(args)", 1),
        ("settings = eval(args.config)", 0),
        ("chosen = [eval(name) for name in ('quantized', 'plain')]", 0),
        ("with open(args.path) as f:\n        for name in names:\n            rows.append(eval(name))", 0),
        ("exec(open('configurator.py').read())", 0),
        ("settings = vars()", 0),
    ],
)
def test_text_of_a_file_names_no_variable(read, count):
    """`eval` may read the configuration by its name, but not where it reads data; `exec` may in any case."""
    text = UNUSED.format(setup=f"{MAKE}\n    rows = []\n    {read}", load=PLAIN)
    assert len(findings(text, "HS289")) == count


MODEL_CONFIG = """\
from trl import GRPOConfig, GRPOTrainer, ModelConfig
config = ModelConfig(model_name_or_path="x", {option})
trainer = GRPOTrainer(model={model}, args=GRPOConfig("out", bf16=True), reward_funcs=[reward])
trainer.train()
"""


@pytest.mark.parametrize(
    ("option", "model", "num"),
    [
        ("load_in_4bit=True", "config.model_name_or_path", 1),
        ("load_in_8bit=True", "config.model_name_or_path", 1),
        ("load_in_4bit=False", "config.model_name_or_path", 0),
        ("load_in_4bit=True", "load(config)", 0),
        ("load_in_4bit=True", "load(config.model_name_or_path, config.load_in_4bit)", 0),
    ],
)
def test_a_model_config_of_which_only_the_name_is_read(option, model, num):
    """TRL's trainers load a model by its name without quantization; the ModelConfig must be passed on or read."""
    assert len(findings(MODEL_CONFIG.format(option=option, model=model), "HS289")) == num


CHOSEN = """\
import argparse, torch
from dataclasses import dataclass
from transformers import BitsAndBytesConfig, TrainingArguments
from accelerate import Accelerator
parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--precision", choices=["fp16", "bf16"])
args = parser.parse_args()
@dataclass
class Settings:
    bf16: bool = True
    other: bool = False
settings = Settings()
def train(config, bf16=False, fast=True):
    on_gpu = torch.cuda.is_available()
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype={dtype})
    {train}
"""


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (
            "TrainingArguments('out', bf16=torch.cuda.is_bf16_supported(), fp16=not torch.cuda.is_bf16_supported())",
            "GPU",
        ),
        ("TrainingArguments('out', bf16=torch.cuda.get_device_capability()[0] >= 8)", "GPU"),
        ("TrainingArguments('out', bf16=True if on_gpu else False)", "GPU"),
        ("TrainingArguments('out', bf16=config.get('bf16', True), fp16=config.get('fp16', False))", "default"),
        ("TrainingArguments('out', bf16=getattr(config, 'bf16', True))", "default"),
        ("TrainingArguments('out', bf16=settings.bf16)", "trains in bf16"),
        ("TrainingArguments('out', bf16=config.get('bf16', False))", "turned on"),
        ("TrainingArguments('out', bf16=bool(bf16 and on_gpu), fp16=not bf16)", "turned on"),
        ("TrainingArguments('out', bf16=args.precision == 'bf16')", "turned on"),
        ("Accelerator(mixed_precision='bf16')", "trains in bf16"),
    ],
)
def test_a_flag_that_is_on_in_some_run(train, words):
    """By the GPU, by a default or by an option: the compute dtype is float16 in every run, and so in that one."""
    (finding,) = findings(CHOSEN.format(dtype="torch.float16", train=train), "HS268")
    assert (finding.line, words in finding.message) == (16, True)
    assert findings(CHOSEN.format(dtype="torch.bfloat16", train=train), "HS268") == []


@pytest.mark.parametrize(
    "train",
    [
        "TrainingArguments('out', bf16=config['bf16'])",
        "TrainingArguments('out', bf16=config.get('fast', False))",
        "TrainingArguments('out', bf16=fast and config.mixed)",
        "TrainingArguments('out', bf16=config.format == 'bf16')",
        "TrainingArguments('out', bf16=False and bf16)",
        "TrainingArguments('out', bf16=bf16, fp16=True)",
        "quantized.bnb_4bit_compute_dtype = torch.bfloat16\n    TrainingArguments('out', bf16=bf16)",
        "Accelerator(mixed_precision=config.precision)",
    ],
)
def test_a_flag_that_the_file_does_not_explain(train):
    """Values from elsewhere, flags of something else, and a dtype that is changed later."""
    assert findings(CHOSEN.format(dtype="torch.float16", train=train), "HS268") == []


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (["fp16=True"], [5]),
        (["fp16=True", "fp16=True"], [5]),
        (["fp16=True", "fp16=True, bf16=False"], [5]),
        (["fp16=True", "fp16=config.fp16"], []),
        (["fp16=True", "fp16=False"], []),
        (["fp16=True", "bf16=True"], []),
    ],
)
def test_every_run_of_a_notebook_is_in_fp16(flags, lines):
    """A short run and the long one have arguments of their own: they agree, or one of them may be right."""
    runs = "".join(f"args = TrainingArguments('out', {flag})\n" for flag in flags)
    assert [f.line for f in findings(HEAD + BNB.format("torch.bfloat16") + runs, "HS268")] == lines


def test_a_branch_that_knows_the_format_creates_the_configuration():
    """`if torch.cuda.is_bf16_supported(): ... else: BitsAndBytesConfig(float16)` is right in both branches."""
    text = (
        "import torch\nfrom transformers import BitsAndBytesConfig, TrainingArguments\n"
        "if torch.cuda.is_bf16_supported():\n    q = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.bfloat16)\n"
        "{other}    q = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float16)\n"
        "args = TrainingArguments('out', bf16=torch.cuda.is_bf16_supported())\n"
    )
    assert findings(text.format(other="else:\n"), "HS268") == []
    assert [f.line for f in findings(text.format(other="if quantize:\n"), "HS268")] == [6]


@pytest.mark.parametrize(
    ("before", "name", "expected"),
    [
        (
            "class F:\n    def __init__(self):\n        self.name = 'bf16' if new else 'float16'\nf = F()\n",
            "f.name",
            True,
        ),
        ("class F:\n    @property\n    def name(self):\n        return 'bf16'\n", "F().name", True),
        ("class F:\n    @property\n    def name(self):\n        return 'bf16'\nf = F()\n", "f.name", True),
        ("NAMES = {'brain': 'bf16', 'half': 'float16'}\n", "NAMES[kind]", True),
        ("def name_of(kind):\n    return 'fp16' if kind else 'float32'\n", "name_of(kind)", True),
        ("if a.dtype in ('auto', None):\n    d = a.dtype\nelse:\n    d = getattr(torch, a.dtype)\n", "d", True),
        ("d = a.dtype\nif d == 'bf16':\n    d = torch.bfloat16\n", "d", False),
        ("d = 'bf16'\nd = {'bf16': torch.bfloat16}[d]\n", "d", False),
        ("d = torch.float16 if a.dtype == 'auto' else a.dtype\n", "d", False),
        (
            "class A:\n    dtype: str = field(default='float16', metadata={'choices': ['auto', 'float16']})\n",
            "a.dtype",
            True,
        ),
    ],
)
def test_a_name_that_some_run_has(before, name, expected):
    """A string of an attribute, a property, a table or a function; not one that is replaced, or that a test excludes."""
    assert bool(findings(HEAD + before + BNB.format(name), "HS267")) == expected


@pytest.mark.parametrize(
    ("chosen", "compute", "expected"),
    [
        ("dtype = torch.bfloat16 if bf16 else torch.float32", "torch.float16", True),
        ("if bf16:\n        dtype = torch.bfloat16\n    else:\n        dtype = torch.float16", "'float16'", True),
        ("dtype = torch.bfloat16 if bf16 else torch.float16", "dtype", False),
        ("dtype = torch.bfloat16 if bf16 else torch.float16", "torch.bfloat16", False),
        ("dtype = torch.float16", "torch.float16", False),
    ],
)
def test_weights_in_bf16_by_a_flag(chosen, compute, expected):
    """Where a flag loads the model in bfloat16, 4-bit layers that always compute in float16 differ from it."""
    body = f"def load(bf16=False):\n    {chosen}\n    {BNB.format(compute)}    return " + LOAD[8:].format(
        "torch_dtype=dtype, quantization_config=quantized"
    )
    assert bool(findings(HEAD + body + "Trainer(model=load(args.bf16), args=args).train()\n", "HS268")) == expected
