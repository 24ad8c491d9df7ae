"""HS139 and HS136: precision settings that are chosen and not used, and options that ask for bfloat16 among others."""

import pytest

from check_scripts import codes, findings

LOOP = """\
import torch
{setup}
for x, y in loader:
    optimizer.zero_grad()
    with {region}:
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
"""
CHOICE = 'ptdtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]'
CLASS = """\
import torch
class Policy:
    def __init__(self, model, dtype=None):
        self.dtype = dtype or (torch.bfloat16 if newer() else torch.float16)
        self.model = model.to({used})
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, x):
        loss = self.model(x).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
"""
BRANCH = """\
import torch
def epoch(model, optimizer, scaler):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16{region}):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

def main(amp=True):
    scaler = torch.amp.GradScaler("cuda") if amp else None
    if amp and scaler:
        epoch(model, optimizer, scaler)
    else:
        epoch(model, optimizer, torch.amp.GradScaler("cuda"{enabled}))
"""


def test_a_dtype_that_nothing_reads():
    """The dtype is chosen, and the region does not use it."""
    text = LOOP.format(setup=CHOICE, region="nullcontext()")
    assert [f.line for f in findings(text, "HS139")] == [2]
    assert findings(text.replace("nullcontext()", 'torch.autocast("cuda", dtype=ptdtype)'), "HS139") == []
    assert findings(text.replace("[dtype]", "['bf16']").replace("nullcontext()", "context(ptdtype)"), "HS139") == []


def test_the_parameter_is_used_in_place_of_what_was_chosen():
    """`self.dtype` has the default, and the model is cast to the parameter, which may be None."""
    assert [f.line for f in findings(CLASS.format(used="dtype"), "HS139")] == [4]
    assert findings(CLASS.format(used="self.dtype"), "HS139") == []
    assert findings(CLASS.format(used="device"), "HS139") == []  # another file may read the attribute


@pytest.mark.parametrize(
    ("statement", "lines"),
    [
        ('precision = "16-mixed"', [3]),
        ('precision = "bf16-mixed" if cfg.dtype == "bfloat16" else "16-mixed"', [3]),
        ("precision = precision or default()", []),
        ("if precision is None:\n        precision = default()", []),
        ("print(precision)\n    precision = default()", []),
    ],
)
def test_a_parameter_that_is_overwritten_before_it_is_read(statement, lines):
    """What a caller passes has no effect."""
    text = f"from lightning import Fabric\ndef setup(cfg, precision=None):\n    {statement}\n    return Fabric(precision=precision)\n"
    assert [f.line for f in findings(text, "HS139")] == lines


def test_a_scaler_in_the_branch_without_mixed_precision():
    """Without the flag a new scaler is passed and autocast is on: nothing is switched off."""
    assert [f.line for f in findings(BRANCH.format(region="", enabled=""), "HS139")] == [16]
    assert findings(BRANCH.format(region="", enabled=", enabled=False"), "HS139") == []
    assert findings(BRANCH.format(region=", enabled=amp", enabled=""), "HS139") == []


def test_an_option_of_a_script_whose_namespace_deepspeed_gets():
    """DeepSpeed reads its own options of the namespace: `--amp` stays unread."""
    text = (
        "import argparse\nimport deepspeed\nimport torch\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--amp', action='store_true')\nparser = deepspeed.add_config_arguments(parser)\n"
        "args = parser.parse_args()\nengine, *_ = deepspeed.initialize(args=args, model=model)\nfor x, y in loader:\n"
        "    loss = loss_fn(engine(x), y)\n    engine.backward(loss)\n    engine.step()\n"
    )
    assert [f.line for f in findings(text, "HS139")] == [5]
    assert findings(text.replace("deepspeed.initialize(args=args", "build(args, x"), "HS139") == []


@pytest.mark.parametrize(
    ("setup", "enabled", "is_reported"),
    [
        ("", "args.bf16 or args.fp16", True),
        ("", "args.fp16 or args.bf16", True),
        ("", "args.amp and args.bf16", True),
        ("use = cfg.precision == 'fp16' or cfg.precision == 'bf16'", "use", True),
        ("", "args.fp16 or args.half", False),
    ],
)
def test_an_option_for_either_format_runs_float16(setup, enabled, is_reported):
    """A region without a dtype computes in float16 for each of the options that enable it."""
    text = LOOP.format(setup=setup, region=f"torch.autocast('cuda', enabled={enabled})")
    assert ("HS136" in {code.partition(":")[0] for code in codes(text)}) is is_reported


def test_the_other_branch_of_the_bf16_option_is_right():
    """`elif args.bf16 or args.fp16` after `if args.bf16` is for float16."""
    text = LOOP.format(setup="", region="torch.autocast('cuda', enabled=args.bf16 or args.fp16)")
    inside = text.replace("    with", "    if args.bf16: continue\n    with")
    assert findings(inside, "HS136") == []


LOADER = """\
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

def load_model(name, bf16=True):
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(name{dtype})
    model.gradient_checkpointing_enable()
    # torch.bfloat16 if bf16 else torch.float32
    return model, tokenizer

model, tokenizer = load_model("gpt2"{passed})
loss = model(ids, labels=ids).loss
loss.backward()
"""
CHOSEN = ", dtype=torch.bfloat16 if bf16 else torch.float32"


@pytest.mark.parametrize(
    ("dtype", "passed", "count"),
    [("", ", bf16=args.bf16", 1), (CHOSEN, ", bf16=args.bf16", 0), ("", "", 0), ("", ", bf16=None", 0)],
)
def test_a_parameter_that_is_passed_and_never_read(dtype, passed, count):
    """A loader that ignores what a call in the file asks for; one that nothing passes is a signature only."""
    assert len(findings(LOADER.format(dtype=dtype, passed=passed), "HS139")) == count


def test_a_parameter_whose_value_is_known_is_read():
    """A constant that the only call passes is still a use of the parameter."""
    text = LOADER.format(dtype=", dtype=dtype", passed=", torch.bfloat16").replace("bf16=True", "dtype")
    assert findings(text, "HS139") == []


@pytest.mark.parametrize(("model", "count"), [("", 1), (", dtype=torch_dtype", 0)])
def test_a_format_that_a_script_with_a_trainer_chooses_and_does_not_use(model, count):
    """The Trainer runs the loop, so the file has no backward."""
    text = (
        "import torch\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        "torch_dtype = torch.float16 if args.fp16 else torch.float32\n"
        f"model = AutoModelForCausalLM.from_pretrained('gpt2'{model})\n"
        "Trainer(model, args=TrainingArguments('out', fp16=args.fp16), train_dataset=data).train()\n"
    )
    assert len(findings(text, "HS139")) == count


@pytest.mark.parametrize(("option", "use", "count"), [("precision", "", 1), ("dtype", "", 1), ("precision", "p", 0)])
def test_an_option_that_names_a_format(option, use, count):
    """`--precision` and `--dtype` are precision options too; a dictionary for the trackers reads none of them."""
    text = (
        "import argparse\nfrom accelerate import Accelerator\nparser = argparse.ArgumentParser()\n"
        f"parser.add_argument('--{option}', default='bf16')\nargs = parser.parse_args()\n"
        f"accelerator = Accelerator(mixed_precision={'args.precision' if use else repr('bf16')})\n"
        "accelerator.init_trackers('run', config=vars(args))\naccelerator.backward(loss)\n"
    )
    assert len(findings(text, "HS139")) == count


REGION = """\
import torch

class Runner:
    def __init__(self, model, optimizer, use_amp=True):
        self.model, self.optimizer = model, optimizer
        self.use_amp = use_amp

    def step(self, x, y):
        with torch.autocast("cuda", dtype=torch.bfloat16{enabled}):
            loss = loss_fn(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(("enabled", "count"), [("", 1), (", enabled=self.use_amp", 0), (", enabled=on", 0)])
def test_a_flag_that_is_stored_next_to_a_region_that_is_always_on(enabled, count):
    """A bfloat16 loop has no scaler, and the flag still switches nothing."""
    assert len(findings(REGION.format(enabled=enabled), "HS139")) == count


SCALED = """\
import torch
dtype = args.dtype
{chosen}
scaler = torch.amp.GradScaler('cuda', enabled={enabled})
for x in loader:
    with torch.autocast('cuda'{dtype}):
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("chosen", "enabled", "dtype", "lines"),
    [
        ("if dtype == 'bfloat16': print(dtype)", "dtype == 'float16'", "", [6]),
        ("dtype = 'bf16' if supports_bfloat16() else 'float16'", "(dtype == 'float16')", "", [6]),
        ("if dtype == 'bfloat16': print(dtype)", "dtype == 'float16'", ", dtype=getattr(torch, dtype)", []),
        ("if dtype == 'float32': print(dtype)", "dtype == 'float16'", "", []),
        ("if dtype == 'bfloat16': print(dtype)", "args.amp", "", []),
    ],
)
def test_a_scaler_for_float16_alone_shows_that_the_region_needs_a_dtype(chosen, enabled, dtype, lines):
    """With `dtype == 'bfloat16'` the scaler is off, but a region without a dtype still computes in float16."""
    text = SCALED.format(chosen=chosen, enabled=enabled, dtype=dtype)
    assert [f.line for f in findings(text, "HS136")] == lines


PRINTED = """\
import torch

class Trainer:
    def __init__(self, model, config):
        self.model = model
        self.use_amp = {value}
        {shown}

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = loss_fn(self.model(x), y)
        loss.backward()
        self.optimizer.step()
"""


@pytest.mark.parametrize(
    "shown",
    [
        "print(f'amp: {self.use_amp}')",
        "log.info('mixed precision %s', 'on' if self.use_amp else 'off')",
        "if self.use_amp and self.device.type == 'mps':\n            print('no amp')\n            self.use_amp = False\n"
        "        elif self.use_amp:\n            print('amp')",
    ],
)
@pytest.mark.parametrize("value", ["config.get('use_amp', False)", "config.use_amp"])
def test_a_flag_that_only_messages_depend_on(shown, value):
    """Whatever is printed, the run is in float32."""
    assert [f.line for f in findings(PRINTED.format(value=value, shown=shown), "HS139")] == [6]


@pytest.mark.parametrize(
    "shown",
    [
        "self.region = make_region(self.use_amp)",
        "if self.use_amp:\n            self.model = prepare(self.model)",
        "print('amp', self.use_amp)\n        self.region = torch.autocast('cuda', enabled=self.use_amp)",
        "print('amp', self.use_amp)\n        torch.set_default_dtype(torch.float16)",
    ],
)
def test_a_flag_that_something_else_depends_on(shown):
    """A call that receives it, or anything in 16 bits, may be what the flag is for."""
    assert findings(PRINTED.format(value="config.use_amp", shown=shown), "HS139") == []


OPTION = """\
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="bfloat16")
args = parser.parse_args()
{use}
model = build(torch.bfloat16)
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "use",
    [
        "for key, value in vars(args).items():\n    print(f'{key}{\"-\" * max(0, 40 - len(key))}{value}')",
        "print('\\n'.join(f'{k}: {v}' for k, v in vars(args).items()))",
        "if args.dtype == 'float16':\n    print('float16')",
        "print(f'training in {args.dtype}')",
    ],
)
def test_an_option_that_is_only_printed(use):
    """Messages read it, and nothing else does."""
    assert [f.line for f in findings(OPTION.format(use=use), "HS139")] == [4]


@pytest.mark.parametrize(
    "use",
    [
        "for key, value in vars(args).items():\n    settings[key] = value",
        "for key, value in vars(args).items():\n    apply(key, value)",
        "configure('\\n'.join(f'{k}: {v}' for k, v in vars(args).items()))",
        "if args.dtype == 'float16':\n    torch.set_default_dtype(torch.float16)",
        "dtype = getattr(torch, args.dtype)",
    ],
)
def test_an_option_that_is_used(use):
    """What leaves the message may decide the run."""
    assert findings(OPTION.format(use=use), "HS139") == []


NAMED = """\
import argparse, torch
from accelerate import Accelerator
parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--mixed_precision", default={default}, choices=["no", "fp16", "bf16"])
args = parser.parse_args()
accelerator = Accelerator(mixed_precision=args.mixed_precision)
{use}
"""


@pytest.mark.parametrize("default", ["None", "'fp16'"])
@pytest.mark.parametrize(
    ("use", "is_reported"),
    [
        ("pass", True),
        ("is_half = accelerator.mixed_precision == 'fp16'", True),
        ("is_half = accelerator.mixed_precision in ('fp16', 'bf16')", True),
        ("other = Accelerator(mixed_precision='fp16' if half else 'no')", True),
        ("is_half = getattr(args, 'fp16')", False),
        ("is_half = vars(args)['fp16']", False),
        ("is_half = 'fp16' in args", False),
    ],
)
def test_an_option_whose_name_is_also_a_value(use, default, is_reported):
    """`precision == "fp16"` does not read the option `--fp16`; `getattr(args, "fp16")` does."""
    assert [f.line for f in findings(NAMED.format(use=use, default=default), "HS139")] == [4] * is_reported


CHOSEN = """import argparse, torch
{head}
parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
args = parser.parse_args()
def train(args, loader):
    dtype = getattr(torch, args.dtype)
    model = build(args{part})
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
train(args, load())
"""


@pytest.mark.parametrize(
    ("head", "part", "lines"), [("", ".width", [4]), ("", "", []), ("from models import build", "", [])]
)
def test_a_format_that_another_file_may_choose_by_the_same_option(head, part, lines):
    """A dtype that nothing reads is harmless where the function that creates the model gets the options."""
    assert [f.line for f in findings(CHOSEN.format(head=head, part=part), "HS139")] == lines


SHARDED = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, {name}

def build(model, args):
    if args.mixed:
        policy = {name}(param_dtype=torch.bfloat16)
    else:
        policy = None
    return {wrapped}
"""


@pytest.mark.parametrize("name", ["MixedPrecision", "MixedPrecisionPolicy"])
def test_a_policy_that_nothing_receives(name):
    """The policy of FSDP is created and dropped; passed on, or returned, it is used."""
    assert [f.line for f in findings(SHARDED.format(name=name, wrapped="FSDP(model)"), "HS139")] == [6]
    assert findings(SHARDED.format(name=name, wrapped="FSDP(model, mixed_precision=policy)"), "HS139") == []
    assert findings(SHARDED.format(name=name, wrapped="policy"), "HS139") == []


LIGHTNING = """\
import argparse
from lightning import Trainer
parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true", help="mixed precision")
args = parser.parse_args()
precision = {choice}
{other}
Trainer(max_epochs=9, precision={used}).fit(model, data)
"""


@pytest.mark.parametrize(
    ("choice", "other", "used", "expected"),
    [
        ('"16-mixed" if args.fp16 else "32-true"', "", '"32-true"', [4]),
        ('"16-mixed" if args.fp16 else "32-true"', "print(args.fp16)", '"32-true"', [6]),
        ('"16-mixed" if args.fp16 else "32-true"', "", "precision", []),
        ('"16-mixed" if args.fp16 else "32-true"', 'print(f"{precision}")', '"32-true"', []),
        ('"16-mixed" if args.fp16 else "32-true"', "log(locals())", '"32-true"', []),
        ('"high" if args.fp16 else "highest"', "", '"32-true"', []),
    ],
)
def test_a_precision_of_lightning_that_nothing_reads(choice, other, used, expected):
    """The keyword of the same name reads nothing; the option is reported where the choice is its only use."""
    text = LIGHTNING.format(choice=choice, other=other, used=used)
    assert [f.line for f in findings(text, "HS139")] == expected


FIELD = """\
import torch
from dataclasses import dataclass, field
from transformers import AutoModel, HfArgumentParser, Trainer, TrainingArguments
@dataclass
class Options:
    name: str = field(default="x/y")
    torch_dtype: str = field(default="auto")
def main():
    options, args = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses()
    torch_dtype = options.torch_dtype if options.torch_dtype == "auto" else getattr(torch, options.torch_dtype)
    model = AutoModel.from_pretrained(options.name{dtype})
    Trainer(model, args, train_dataset=data).train()
"""
SETUP = """\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
def setup_model(name, {param}=False):
    path = find(name)
    print(path)
    check(path)
    model = AutoModelForCausalLM.from_pretrained(path{used})
    return model
model = setup_model("x/y", {param}=config.{param})
Trainer(model, TrainingArguments("out"), train_dataset=data).train()
"""


def test_a_variable_with_the_name_of_the_field_it_is_chosen_by():
    """`options.torch_dtype` reads the field, not the variable."""
    assert [f.line for f in findings(FIELD.format(dtype=""), "HS139")] == [10]
    assert findings(FIELD.format(dtype=", dtype=torch_dtype"), "HS139") == []


@pytest.mark.parametrize("param", ["use_4bit", "load_in_8bit", "load_4bit"])
def test_a_quantization_that_a_function_never_reads(param):
    """The model has 16 bits whatever the caller passes."""
    assert [f.line for f in findings(SETUP.format(param=param, used=""), "HS139")] == [2]
    assert findings(SETUP.format(param=param, used=f", load_in_4bit={param}"), "HS139") == []


CONSTANT = """\
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
{name} = {value}
table = {{"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}}
quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype={used})
model = AutoModelForCausalLM.from_pretrained("x/y", quantization_config=quantized)
Trainer(model, args=TrainingArguments("out", {flags}), train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("name", "value", "used", "flags", "lines"),
    [
        ("compute_dtype", "'fp32'", "table['bf16']", "bf16=True", [3]),
        ("compute_dtype", "torch.float16", "torch.bfloat16", "bf16=True", [3]),
        ("mixed_precision", "'fp16'", "torch.bfloat16", "bf16=True", [3]),
        ("compute_dtype", "'bf16'", "table['bf16']", "bf16=True", []),  # the format of the run
        ("compute_dtype", "'fp32'", "table[compute_dtype]", "bf16=True", []),
        ("compute_dtype", "'fp16'", "table['bf16']", "bf16=cfg.bf16", []),  # the run may be in fp16
        ("torch_dtype", "'float32'", "torch.bfloat16", "bf16=True", []),  # that of the weights
        ("compute_dtype", "'auto'", "torch.bfloat16", "bf16=True", []),
        ("weight_format", "'fp32'", "torch.bfloat16", "bf16=True", []),
    ],
)
def test_a_format_that_is_written_down_and_not_the_one_of_the_run(name, value, used, flags, lines):
    """A literal chooses a format as well, where all that computes in 16 bits is certainly in another."""
    text = CONSTANT.format(name=name, value=value, used=used, flags=flags)
    assert [f.line for f in findings(text, "HS139")] == lines


@pytest.mark.parametrize(("region", "count"), [("bfloat16", 1), ("float16", 0), ("float32", 0)])
def test_a_literal_next_to_a_region(region, count):
    """Autocast shows the format of a loop; one in float32 computes in no 16 bits."""
    text = LOOP.format(setup="amp_dtype = 'fp16'", region=f"torch.autocast('cuda', dtype=torch.{region})")
    assert len(findings(text, "HS139")) == count


BOTH = """\
import argparse
import torch
{declared}
def fit(model, optimizer, loader, precision="{default}"):
    scaler = torch.amp.GradScaler("cuda") if precision == "fp16" else None
    for x, y in loader:
        optimizer.zero_grad()
        if {test}:
            with torch.autocast("cuda", dtype={dtype}):
                loss = model(x, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss = model(x, y)
            loss.backward()
            optimizer.step()
{call}
"""


@pytest.mark.parametrize(
    ("declared", "default", "test", "dtype", "call", "expected"),
    [
        ("", "bf16", "scaler is not None", "torch.float16", "", [4]),
        ("", "bfloat16", "precision == 'fp16'", "torch.float16", "", [4]),
        ("", "bf16", "scaler", "torch.float16", "fit(m, o, data, precision='bf16')", [4]),
        ("", "bf16", "scaler", "torch.float16", "fit(m, o, data, precision='fp16')", []),
        ("", "bf16", "scaler", "torch.float16", "fit(m, o, data, precision=choice)", []),
        ("", "fp16", "scaler", "torch.float16", "", []),
        ("", "bf16", "scaler", "torch.bfloat16", "", []),
        ("", "bf16", "scaler or precision == 'bf16'", "torch.float16", "", []),
        ("half = torch.bfloat16", "bf16", "scaler", "torch.float16", "", []),
        ("def prepare(model, precision): return convert(model, precision)", "bf16", "scaler", "torch.float16", "", []),
    ],
)
def test_a_default_of_bfloat16_where_only_float16_enters_autocast(declared, default, test, dtype, call, expected):
    """A setting that is bfloat16 by default, and that the file only compares with float16, computes in float32."""
    text = BOTH.format(declared=declared, default=default, test=test, dtype=dtype, call=call)
    assert [f.line for f in findings(text, "HS139")] == expected


def test_an_option_for_bfloat16_where_only_float16_enters_autocast():
    """The same as an option of the command line, with a test that only rejects other values."""
    text = """\
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--mixed_precision", default="bf16")
args = parser.parse_args()
if args.mixed_precision not in ("no", "fp16", "bf16"):
    raise ValueError(args.mixed_precision)
use_amp = args.mixed_precision == "fp16"
scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
        loss = model(x, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
    assert [f.line for f in findings(text, "HS139")] == [3]
    assert findings(text.replace('default="bf16"', 'default="no"'), "HS139") == []
    assert findings(text.replace("dtype=torch.float16, ", "dtype=dtypes[args.mixed_precision], "), "HS139") == []
