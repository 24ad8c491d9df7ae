"""HS133, HS138 and HS139: precision options that cannot be switched off, flags that are tuples, options that nobody reads."""

import pytest

from check_scripts import codes, findings

HEAD = "import argparse\nparser = argparse.ArgumentParser()\n"
TRAIN = """\
import argparse, torch
from other import fit
parser = argparse.ArgumentParser()
parser.add_argument('--amp', action='store_true')
def train(model, opt):
    scaler = torch.amp.GradScaler('cuda')
    for x in loader:
        with torch.autocast('cuda', dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize("name", ["--fp16", "--use-amp", "--mixed_precision", "--bf16", "--fp16_run", "--half"])
def test_bool_option_of_a_precision(name):
    """An option for a precision with type=bool is found, in a function as well."""
    text = f"import argparse\ndef parse(parser):\n    parser.add_argument('{name}', type=bool, default=True)\n"
    assert codes(text) == ["HS133:3"]


@pytest.mark.parametrize(
    "arguments", ["'--sample', type=bool", "'--fp16', type=str2bool", "'--fp16', type=int", "'--ramp', type=bool"]
)
def test_other_options_are_silent(arguments):
    """Other options and other types give no finding."""
    assert codes(f"import argparse\n# type=bool\nparser.add_argument({arguments})\n") == []


@pytest.mark.parametrize("name", ["--bf16", "--fp16", "--use_amp", "--mixed-precision"])
@pytest.mark.parametrize(
    "default", ["default=True, action='store_true'", "action='store_const', const=True, default=True"]
)
def test_an_option_that_stores_its_default_is_always_on(name, default):
    """store_true with a default of True is True in every run."""
    text = f"{HEAD}parser.add_argument('{name}', {default})\ntrain(parser.parse_args())\nscaler.update()\n"
    assert [(f.line, f.severity) for f in findings(text, "HS133")] == [(3, "warning")]


@pytest.mark.parametrize(
    "rest",
    [
        "parser.add_argument('--no_bf16', action='store_false', dest='bf16')\n",
        "parser.add_argument('--disable-bf16', action='store_true')\n",
        "args = parser.parse_args()\nargs.bf16 = args.bf16 and not args.fp16\n",
        "parser.set_defaults(bf16=False)\n",
        "args = parser.parse_args()\nvars(args).update(read(args.config))\n",
        "args = parser.parse_args()\nfor key in file:\n    setattr(args, key, file[key])\n",
    ],
)
def test_an_option_that_something_else_switches_is_silent(rest):
    """A second option, an assignment or another default decides."""
    assert findings(f"{HEAD}parser.add_argument('--bf16', action='store_true', default=True)\n{rest}", "HS133") == []


def test_an_option_that_stores_false_by_default_never_acts():
    """`--no-amp` with store_false is False in every run, so that nothing disables autocast."""
    text = f"{HEAD}parser.add_argument('--no-amp', action='store_false', default={{}})\ntrain(parser)  # default=True\n"
    assert [f.line for f in findings(text.format(False), "HS133")] == [3]
    assert findings(text.format(True), "HS133") == []


def test_an_inference_option_that_is_always_on_is_advice():
    """Without training the format costs nothing that is lost; TF32 never does."""
    text = f"{HEAD}parser.add_argument('{{}}', action='store_true', default=True)\n"
    assert [f.severity for f in findings(text.format("--fp16"), "HS133")] == ["advice"]
    assert [f.severity for f in findings(text.format("--allow_tf32") + "train(x)\n", "HS133")] == ["advice"]


@pytest.mark.parametrize(
    "line",
    [
        "bf16 = torch.cuda.is_bf16_supported(),",
        "use_amp = args.fp16 and torch.cuda.is_available(),",
        "self.fp16 = True,",
        "amp_dtype = torch.float16,",
        "scaler = torch.amp.GradScaler('cuda'),",
        "bf16: bool = False,",
        "fp16 = not is_bfloat16_supported(),  # GPUs before Ampere",
    ],
)
def test_a_trailing_comma_makes_a_flag_a_tuple(line):
    """Plain, annotated and attribute assignments of one value and a comma."""
    assert [(f.code, f.line) for f in findings(f"import torch  # float16\n{line}\n", "HS138")] == [("HS138", 2)]
    assert findings(f"import torch  # float16\n{line.split(',  ')[0].rstrip(',')}\n", "HS138") == []


@pytest.mark.parametrize(
    "line",
    [
        "dtypes = torch.float16,",
        "amp_dtype = (torch.float16,)",
        "fp16, bf16 = flags",
        "fp16 = a, b",
        "shape = 3,",
        "fp16 = *flags,",
    ],
)
def test_a_tuple_that_is_meant_is_silent(line):
    """Plural names, parentheses, several values and other variables."""
    assert findings(f"import torch  # float16\n{line}\n", "HS138") == []


@pytest.mark.parametrize(
    "rest",
    [
        "args = parser.parse_args()\ntrain(model, args)\n",
        "def options():\n    return parser.parse_args()\nargs = options()\nprint(args)\ntrain(model, args)\n",
        "def options():\n    args = parser.parse_args()\n    return args\nopt = options()\ntorch.multiprocessing.spawn(train, args=(opt,))\n",
    ],
)
def test_an_option_that_nobody_reads_is_reported(rest):
    """The namespace stays in the file and its `amp` is not read; `torch.amp` is no reading."""
    assert [f.line for f in findings(TRAIN + rest, "HS139")] == [4]


@pytest.mark.parametrize(
    "rest",
    [
        "args = parser.parse_args()\ntrain(model, args.amp)\n",
        "args = parser.parse_args()\nfit(model, args)\n",
        "args = parser.parse_args()\nfit(model, **vars(args))\n",
        "args = parser.parse_args()\nself.args = args\n",
        "args = parser.parse_args()\nfor name in names:\n    print(getattr(args, name))\n",
        "args = parser.parse_args()\nprint(getattr(args, 'amp'))\n",
        "def options():\n    return parser.parse_args()\n",
        "",
    ],
)
def test_an_option_that_may_be_read_is_silent(rest):
    """Read by name, passed to another file, kept in an object, or parsed elsewhere."""
    assert findings(TRAIN + rest, "HS139") == []


@pytest.mark.parametrize(
    "line",
    [
        "dtype = torch.bfloat16 if torch.cuda.is_bf16_supported else torch.float16",
        "dtype = torch.bfloat16 if torch.cuda.is_available() and torch.cuda.is_bf16_supported else torch.float16",
        "if not torch.cuda.is_bf16_supported: raise SystemExit",
        "args = TrainingArguments('out', bf16=torch.cuda.is_bf16_supported)",
        "args = TrainingArguments('out', fp16=torch.cuda.is_available)",
        "use_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported",
        "dtype = torch.bfloat16 if get_accelerator().is_bf16_supported else torch.float32",
        "dtype = torch.bfloat16 if is_bfloat16_supported else torch.float16",
        "dtype = torch.bfloat16 if is_torch_bf16_gpu_available else torch.float16",
    ],
)
def test_a_query_that_is_not_called_is_always_true(line):
    """A function that reports support for a format is a true value by itself."""
    head = (
        "import torch\nfrom deepspeed.accelerator import get_accelerator\nfrom unsloth import is_bfloat16_supported\n"
        "from transformers import TrainingArguments\nfrom transformers.utils import is_torch_bf16_gpu_available\n"
    )
    assert [f.line for f in findings(head + line + "\n", "HS269")] == [6]
    called = line.replace("_supported", "_supported()").replace("gpu_available", "gpu_available()")
    called = called.replace("is_available)", "is_available())")
    assert findings(head + called + "\n", "HS269") == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ncheck = torch.cuda.is_bf16_supported\nprint(check())\n",
        "import torch\ndevice = 'cuda' if torch.cuda.is_available else 'cpu'\n",
        "import torch\ntorch.cuda.is_bf16_supported = lambda: False\nif torch.cuda.is_bf16_supported:\n    print(1)\n",
        "import torch\nclass Run:\n    def go(self):\n        return torch.bfloat16 if self.is_bf16_supported else torch.float16\n",
        "import torch\nis_bf16_supported = probe()\ndtype = torch.bfloat16 if is_bf16_supported else torch.float16\n",
        "import torch\nbf16_query = torch.cuda.is_bf16_supported\n",
    ],
)
def test_a_query_that_is_passed_on_or_replaced_is_silent(text):
    """Functions as values, devices, variables of the same name and replaced functions give no finding."""
    assert findings(text, "HS269") == []


@pytest.mark.parametrize(
    "wrapper", ["dict(type=OptimWrapper, optimizer=o)", "dict(type='mmengine.OptimWrapper', optimizer=o)"]
)
def test_an_old_fp16_setting_next_to_a_plain_wrapper(wrapper):
    """MMEngine reads `optim_wrapper` and not `fp16`, however the wrapper's class is named."""
    assert codes(f"o = dict(type='SGD', lr=0.1)\noptim_wrapper = {wrapper}\nfp16 = dict(loss_scale=512.)\n") == [
        "HS287:3"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "optim_wrapper = dict(type=AmpOptimWrapper, optimizer=o)\nfp16 = dict(loss_scale=512.)\n",
        "optim_wrapper = dict(**base)\nfp16 = dict(loss_scale=512.)\n",
        "optim_wrapper = dict(type='OptimWrapper')\nfp16 = dict(enabled=True)\n",
        "optim_wrapper = dict(type='OptimWrapper')\nstrategy = dict(type='DeepSpeedStrategy', fp16=dict(loss_scale=0))\n",
        "with read_base():\n    from .base import *\noptim_wrapper = dict(optimizer=o)\nfp16 = dict(loss_scale=512.)\n",
    ],
)
def test_other_fp16_settings_are_silent(text):
    """Mixed-precision wrappers, inherited ones and blocks of other engines give no finding."""
    assert findings(text, "HS287") == []


AMP_WRAPPER = "optim_wrapper = dict(type='AmpOptimWrapper', optimizer=o{dtype})\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AMP_WRAPPER.format(dtype="") + "val_cfg = dict(type='ValLoop')\ntest_cfg = dict(type='TestLoop')\n", [2]),
        ("optim_wrapper = {'type': AmpOptimWrapper, 'optimizer': o}\nval_cfg = {'type': 'mmengine.ValLoop'}\n", [2]),
        (AMP_WRAPPER.format(dtype=", dtype='float16'") + "val_cfg = dict(type=ValLoop)\n", [2]),
        (AMP_WRAPPER.format(dtype="") + "val_cfg = dict(type='ValLoop', fp16=True)\n", []),
        (AMP_WRAPPER.format(dtype="") + "val_cfg = dict(type='ValLoop', **options)\n", []),
        (AMP_WRAPPER.format(dtype=", dtype='bfloat16'") + "val_cfg = dict(type='ValLoop')\n", []),
        (AMP_WRAPPER.format(dtype="") + "val_cfg = dict(type='HalfValLoop')\n", []),
        (AMP_WRAPPER.format(dtype="") + "val_cfg = None\n", []),
        (AMP_WRAPPER.format(dtype=""), []),  # inherited
        ("optim_wrapper = dict(type='OptimWrapper', optimizer=o)\nval_cfg = dict(type='ValLoop')\n", []),
        ("_base_ = ['a.py']\noptim_wrapper = dict(optimizer=o)\nval_cfg = dict(type='ValLoop')\n", []),
    ],
)
def test_validation_of_mmengine_is_in_float32_by_default(text, expected):
    """HS149 reports `val_cfg` where the file sets both, training in float16 and a loop that does not ask for fp16."""
    assert [f.line for f in findings(text, "HS149")] == expected


APEX = """\
import argparse, torch
from apex import amp
from tools import {reader}
parser = argparse.ArgumentParser()
parser.add_argument('--loss_scale', type=float, default=0)
args = parser.parse_args()
model, optimizer = amp.initialize(model, optimizer, opt_level='O2'{used})
loader = {reader}(args)
"""


@pytest.mark.parametrize(
    ("reader", "used", "expected"),
    [
        ("get_loader", "", [5]),
        ("build_dataset", "", [5]),
        ("get_loader", ", loss_scale=args.loss_scale", []),
        ("build_trainer", "", []),
    ],
)
def test_loss_scale_that_nobody_reads(reader, used, expected):
    """A loss scale of the command line counts like a precision, and a function that builds data reads none."""
    assert [f.line for f in findings(APEX.format(reader=reader, used=used), "HS139")] == expected


SHOWN = """\
import argparse, json, wandb
from transformers import Trainer, TrainingArguments
from other import Base, build
parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--rate", type=float)
class Run:
    def __init__(self, options):
        self.args = options
def main(opts):
    trainer = Trainer(model, TrainingArguments("out", learning_rate=opts.rate, bf16=True))
args = parser.parse_args()
main(args)
{rest}
"""


@pytest.mark.parametrize(
    ("rest", "count"),
    [
        ("print(vars(args))", 1),
        ("wandb.init(config=vars(args))", 1),
        ("for key, value in sorted(vars(args).items()):\n    print(f'{key}: {value}')", 1),
        ("everything = vars(args)\njson.dump(everything, file)", 1),
        ("Run(args)", 1),
        ("config = args\nprint(config.rate)", 1),
        ("everything = vars(args)\nbuild(everything)", 0),
        ("for key, value in vars(args).items():\n    setattr(config, key, value)", 0),
        ("build(**vars(args))", 0),
        ("class Derived(Base):\n    def __init__(self, options):\n        self.args = options\nDerived(args)", 0),
        ("config = args\nbuild(config)", 0),
        ("def other(settings):\n    build(settings)\nother(args)", 0),
        ("print(args.bf16)", 1),
        ("build(args.bf16)", 0),
    ],
)
def test_an_option_of_a_namespace_that_is_only_shown(rest, count):
    """Printing, logging and saving all options reads none; a class of the file reads what the file shows."""
    assert [f.line for f in findings(SHOWN.replace("{rest}", rest), "HS139")] == [5] * count


SETTINGS = """\
from dataclasses import asdict, dataclass
from trl import PPOTrainer
@dataclass
class Settings:
    name: str = "gpt2"
    rate: float = 1e-5
    batch: int = 4
    steps: int = 10
    clip: float = 1.0
    bf16: bool = False
class Run:
    def __init__(self, settings: Settings):
        self.s = settings
    def train(self):
        trainer = PPOTrainer(self.s.name, self.s.rate, self.s.batch, self.s.steps{rest})
"""


@pytest.mark.parametrize(
    ("rest", "count"),
    [(", self.s.clip", 1), (", self.s.clip, self.s.bf16", 0), (", asdict(self.s), self.s.clip", 0), ("", 0)],
)
def test_a_field_that_the_file_which_trains_never_reads(rest, count):
    """Reported where the file reads nearly all other fields, and not where the object may be read as a whole."""
    assert [f.line for f in findings(SETTINGS.replace("{rest}", rest), "HS139")] == [10] * count


def test_a_field_read_by_a_global_object_is_read():
    """`config = Settings()` gives the field's default a name: `config.bf16` reads it."""
    text = SETTINGS.replace("{rest}", ", self.s.clip") + "config = Settings()\nuse(config.bf16)\n"
    assert findings(text, "HS139") == []


UNTYPED = """\
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--amp", default=True{more})
args = parser.parse_args()
scaler = torch.amp.GradScaler("cuda", enabled={value})
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled={value}):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("more", "value", "lines"),
    [
        ("", "args.amp", [4]),
        (", type=str2bool", "args.amp", []),
        ("", "str2bool(args.amp)", []),
        ("", 'args.amp == "True"', []),
        ("", "args.amp.lower() in ('1', 'true')", []),
    ],
)
def test_an_option_without_a_type_is_text(more, value, lines):
    """`--amp False` stores the text, which is true, unless the script converts or compares it."""
    assert [f.line for f in findings(UNTYPED.format(more=more, value=value), "HS133")] == lines


PARSED = """\
import sys
from dataclasses import dataclass, field
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
from transformers.utils import send_example_telemetry

@dataclass
class Options:
    name: str = "gpt2"
    torch_dtype: str = field(default="auto")

parser = HfArgumentParser((Options, TrainingArguments))
if sys.argv[1].endswith(".json"):
    {first}, training = parser.parse_json_file(sys.argv[1])
else:
    options, training = parser.parse_args_into_dataclasses()
{use}
model = AutoModelForCausalLM.from_pretrained(options.name, dtype={dtype})
Trainer(model, args=training, train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("first", "use", "dtype", "expected"),
    [
        ("options", "", "torch.float32", [9]),
        ("options", "send_example_telemetry('run', options)", "torch.float32", [9]),
        ("options", "prepare(options)", "torch.float32", []),
        ("options", "", "options.torch_dtype", []),
        ("others", "", "torch.float32", []),
    ],
)
def test_a_field_that_is_parsed_from_a_file_or_the_command_line(first, use, dtype, expected):
    """HS139: both ways fill the same variables, of which nothing reads the dtype."""
    text = PARSED.format(first=first, use=use, dtype=dtype)
    assert [f.line for f in findings(text, "HS139")] == expected


NAMED = """\
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--precision", {option})
args = parser.parse_args()
{code}
loss.backward()
"""
CHOICES = 'choices=["fp32", "bf16"], default="fp32"'


@pytest.mark.parametrize(
    ("option", "code", "expected"),
    [
        (CHOICES, "if args.precision:\n    model.bfloat16()", [6]),
        (CHOICES, "dtype = torch.bfloat16 if args.precision else torch.float32", [6]),
        (CHOICES, "scaler = torch.amp.GradScaler('cuda', enabled=args.precision)", [6]),
        (CHOICES, "if cfg.get('precision', 'bf16'):\n    model.bfloat16()", [6]),
        (CHOICES, "if getattr(cfg, 'precision', 'fp16'):\n    model = model.to(torch.float16)", [6]),
        (CHOICES, "if args.precision == 'bf16':\n    model.bfloat16()", []),
        (CHOICES, "if args.precision:\n    model.to(dtypes[args.precision])", []),
        (CHOICES, "if cfg.get('precision', None):\n    model.bfloat16()", []),
        (CHOICES, "if cfg.get('precision', 'bf16'):\n    print('bf16')", []),
        ('choices=["fp32", "bf16"]', "if args.precision:\n    model.bfloat16()", []),
        ('choices=["fp16", "bf16"], default="bf16"', "if args.precision:\n    model.bfloat16()", []),
        (CHOICES, "args.precision = args.precision == 'bf16'\nif args.precision:\n    model.bfloat16()", []),
    ],
)
def test_the_name_of_a_format_is_no_flag(option, code, expected):
    """HS133: every name is true, that of float32 too; a test of an option without a default asks whether it is set."""
    assert [f.line for f in findings(NAMED.format(option=option, code=code), "HS133")] == expected


FALSE = "parser.add_argument('--amp', action='store_false')\n"
NO_AMP = "parser.add_argument('--no-amp', dest='amp', action='{action}')\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (FALSE + NO_AMP.format(action="store_false") + "parser.set_defaults(amp=False)\n", ["HS133:3"]),
        (FALSE + "parser.set_defaults(amp=False)\n", ["HS133:3"]),
        ("parser.set_defaults(amp=True)\n" + FALSE.replace("false", "true"), ["HS133:4"]),
        (
            FALSE.replace("')", "', default=False)")
            + NO_AMP.format(action="store_false").replace("')", "', default=False)"),
            ["HS133:3"],
        ),
        (FALSE + NO_AMP.format(action="store_false"), []),  # on unless a flag switches it off
        (FALSE + "parser.set_defaults(amp=True)\n", []),
        (FALSE.replace("false", "true") + NO_AMP.format(action="store_false") + "parser.set_defaults(amp=False)\n", []),
        (FALSE + "parser.set_defaults(**settings)\n", []),
        (FALSE + "parser.set_defaults(amp=False)\nargs = parser.parse_args()\nsetattr(args, key, value)\n", []),
        (
            FALSE + "parser.set_defaults(amp=False)\nargs = parser.parse_args()\nsetattr(args, f'{key}_dir', value)\n",
            ["HS133:3"],
        ),
    ],
)
def test_options_that_only_store_the_default_of_the_parser(options, expected):
    """Every flag of an option is read together with `set_defaults`, which replaces the default of each."""
    assert [f"{f.code}:{f.line}" for f in findings(HEAD + options, "HS133")] == expected


ENVIRONMENT = "import os\nimport torch\nfrom torch.amp import autocast\n"


@pytest.mark.parametrize(
    "use",
    [
        "if os.getenv('USE_AMP', False):\n    enable()\n",
        "if not os.environ.get('USE_AMP', '0'):\n    disable()\n",
        "scaler = torch.amp.GradScaler('cuda', enabled=bool(os.environ.get('FP16', True)))\n",
        "amp = os.getenv('USE_AMP', 'false')\nwith autocast('cuda', enabled=amp):\n    step()\n",
    ],
)
def test_a_flag_of_the_environment_that_is_tested_as_text(use):
    """Every text but the empty one is true, "0" and "False" included."""
    assert codes(ENVIRONMENT + use) == ["HS133:4"]


@pytest.mark.parametrize(
    "use",
    [
        "if os.getenv('USE_AMP', '0') == '1':\n    enable()\n",
        "if int(os.getenv('USE_AMP', 0)):\n    enable()\n",
        "if os.getenv('USE_AMP'):\n    enable()\n",  # set or not set
        "if os.environ.get('USE_AMP', ''):\n    enable()\n",
        "if os.getenv('USE_AMP', 'false').lower() == 'true':\n    enable()\n",
        "amp = os.getenv('USE_AMP', 'false')\nif amp == 'true':\n    enable()\n",
        "amp = str2bool(os.getenv('USE_AMP', False))\nif amp:\n    enable()\n",
        "if os.getenv('SHUFFLE', False):\n    enable()\n",
    ],
)
def test_a_flag_of_the_environment_that_is_converted_or_set(use):
    """A comparison and a conversion read the text, and a variable without a default may be meant to be set or not."""
    assert codes(ENVIRONMENT + use) == []
