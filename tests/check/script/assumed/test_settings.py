"""The precision settings that a file reads, and the values to check it with."""

import pytest

from halfstep.check.files.source import Source
from halfstep.check.script.assumed.settings import assumptions
from halfstep.check.script.script import read_script
from halfstep.check.settings import Settings

START = "import torch\nimport argparse\nfrom accelerate import Accelerator\nparser = argparse.ArgumentParser()\n"


END = "\nwith torch.autocast('cuda'): loss.backward(); optimizer.step()\n"


def read(text):
    """The assumptions of a file, as messages have them."""
    script = read_script(Source("train.py", START + text + END, "python"), Settings())
    return [str(assumption) for assumption in assumptions(script.outline, script.tree)]


STRINGS = ["dtype='fp16'", "dtype='bf16'"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if args.dtype == 'fp16' or args.dtype == 'bf16': pass", STRINGS),
        ("if cfg['train']['dtype'] in ('fp16', 'bf16'): pass", STRINGS),
        ("if config.get('dtype', 'bf16').lower() in {'fp16', 'bf16'}: pass", STRINGS),
        ("if 'fp16' == getattr(args, 'dtype', None) or 'bf16' in args.dtype: pass", STRINGS),
        ("TABLE = {'fp16': torch.half, 'bf16': torch.bfloat16}\nx = TABLE[args.dtype]", STRINGS),
        ("x = {'fp16': torch.half, 'bf16': torch.bfloat16}.get(self.cfg.dtype)", STRINGS),
        ("mode = args.dtype\nif mode == 'fp16': pass\nelif mode == 'bf16': pass", STRINGS),
        ("match args.dtype:\n    case 'fp16' | 'bf16': pass", STRINGS),
        ("def train(dtype):\n    if dtype == 'fp16' or dtype == 'bf16': pass", STRINGS),
        ("def train(dtype):\n    if dtype in ['fp16', 'bf16']: pass\ntrain(args.dtype)", STRINGS),
        ("def f(name):\n    if name in ['fp16', 'bf16']: pass\nf(args.dtype)", STRINGS),
        (
            "def f(name):\n    name = str(name or '').strip()\n    if name in ['fp16', 'bf16']: pass\nf(args.dtype)",
            STRINGS,
        ),
        (
            "def f(raw):\n    name = str(raw or '').strip()\n    if name in ['fp16', 'bf16']: pass\nf(args.dtype)",
            STRINGS,
        ),
        (
            "def f(name):\n    return {'fp16': torch.half}[name]\nf(args.dtype)\nf(args.precision)",
            ["dtype='fp16'", "precision='fp16'"],
        ),
        ("x = getattr(torch, args.dtype)", ["dtype='float16'", "dtype='bfloat16'", "dtype='float32'"]),
        (
            "parser.add_argument('--dtype', choices=['no', 'bf16'])\nx = args.dtype == 'fp16'",
            ["dtype='bf16'", "dtype='no'"],
        ),
        ("class Config:\n    dtype: Literal['fp16', 'bf16'] = 'bf16'", STRINGS),
        ("if args.fp16: pass", ["fp16=True", "fp16=False"]),
        ("if args.use_torch_amp: pass", ["use_torch_amp=True", "use_torch_amp=False"]),
        ("use_amp = cfg.get('use_amp', False)", ["use_amp=True", "use_amp=False"]),
    ],
)
def test_a_setting_has_the_values_that_the_file_names(text, expected):
    """Compared strings, keys of tables, choices and types; a flag is on or off."""
    assert read(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "dtype = 'fp16'\nif dtype == 'bf16': pass",
        "args.dtype = 'fp16'\nif args.dtype == 'bf16': pass",
        "if x.dtype == 'fp16': pass",
        "if model.config.dtype == 'fp16': pass",
        "if args.optimizer == 'adam': pass",
        "def train(dtype):\n    if dtype == 'fp16': pass\ntrain('bf16')",
        "def train(dtype='bf16'):\n    if dtype == 'fp16': pass\ntrain()",
        "if args.shuffle: pass",
        "half = n // 2\nif half: pass",
    ],
)
def test_what_the_file_decides_is_no_setting(text):
    """Variables and parameters that it assigns, attributes of tensors and models, options of other subjects."""
    assert read(text) == []


def test_an_accelerator_without_a_precision_has_one_from_its_own_configuration():
    """`accelerate launch` decides it; an Accelerator that is given a constant has that."""
    own = [f"engine.mixed_precision={value!r}" for value in ("fp16", "bf16", "no")]
    assert read("engine = Accelerator()\nx = 'fp16'") == own
    assert read("engine = Accelerator(mixed_precision='fp16')\nif engine.mixed_precision == 'bf16': pass") == []
    assert read("engine = Accelerator(mixed_precision=args.mode)\nx = 'fp16'") == [
        "mode='fp16'",
        "mode='bf16'",
        "mode='no'",
    ]


def test_flags_of_the_two_formats_exclude_each_other():
    """Nobody trains with --fp16 and --bf16; what is switched off says nothing about the other."""
    text = START + "if args.fp16: pass\nelif args.bf16: pass\n" + END
    script = read_script(Source("train.py", text, "python"), Settings())
    assert [a.values for a in assumptions(script.outline, script.tree)] == [
        (("fp16", True), ("bf16", False)),
        (("fp16", False),),
        (("bf16", True), ("fp16", False)),
        (("bf16", False),),
    ]
