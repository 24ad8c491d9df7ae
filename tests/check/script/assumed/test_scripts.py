"""What is left of a script for one value of a setting."""

import ast
import textwrap

import pytest

from halfstep.check.files.source import Source
from halfstep.check.script.assumed.scripts import assumed_scripts
from halfstep.check.script.script import read_script
from halfstep.check.settings import Settings

START = "import torch\nfrom torch.amp import GradScaler\nloss.backward(); optimizer.step()\n"


def settled(text, value):
    """The script for one value of its setting, without the first lines; None if the file rejects it."""
    source = Source("train.py", START + textwrap.dedent(text), "python")
    scripts = {str(a): s for a, s in assumed_scripts(read_script(source, Settings()))}
    script = next((s for name, s in scripts.items() if name.endswith(f"={value!r}")), None)
    return ast.unparse(ast.Module(script.tree.body[4:], [])) if script is not None else None


CHAIN = """\
dtype = torch.float32
if args.precision == "fp16":
    dtype = torch.float16
elif args.precision == "bf16":
    dtype = torch.bfloat16
scaler = GradScaler(enabled=dtype == torch.float16)
"""
FUNCTION = """\
def dtype_of(name):
    if not torch.cuda.is_available():
        return torch.float32
    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name, torch.float32)
model.to(dtype_of(args.precision))
"""


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        (CHAIN, "fp16", "pass\ndtype = torch.float16\nscaler = GradScaler(enabled=True)"),
        (CHAIN, "bf16", "pass\ndtype = torch.bfloat16\nscaler = GradScaler(enabled=False)"),
        ("use = args.precision in ('fp16', 'bf16')\nif use:\n    a()\nelse:\n    b()", "fp16", "use = True\na()"),
        ("if args.fp16 and ready:\n    a()", True, "if ready:\n    a()"),
        ("if args.fp16 and ready:\n    a()\nb()", False, "pass\nb()"),
        ("x = a if args.fp16 or ready else b", False, "x = a if ready else b"),
        ("if args.bf16:\n    a()\nelif args.fp16:\n    b()", True, "a()"),  # of bf16, which the file reads first
        ("match cfg.dtype:\n    case 'fp16':\n        a()\n    case _:\n        b()", "fp16", "a()"),
        ("def f():\n    if args.fp16:\n        return 1\n    return 2", True, "def f():\n    return 1"),
        ("x = {'a': 1}.get(name, args.fp16)", True, "x = {'a': 1}.get(name, True)"),
        ("x = args.fp16 and torch.float16", True, "x = torch.float16"),
        ("x = 0\nif args.fp16:\n    x = x + 1", True, "x = 0\nx = x + 1"),
    ],
)
def test_what_depends_on_the_setting_is_decided(text, value, expected):
    """Branches, conditional expressions, tables and flags that are computed from it."""
    assert settled(text, value) == expected


def test_a_function_returns_the_dtype_of_the_value_on_a_gpu():
    """The call is replaced, and the test for CUDA is true."""
    assert settled(FUNCTION, "fp16").endswith("model.to(torch.float16)")
    assert settled(FUNCTION, "bf16").endswith("model.to(torch.bfloat16)")


def test_methods_read_the_setting_through_the_attribute_it_is_stored_in():
    """`self.fp16` of an object that is created with the option."""
    text = """\
        class Trainer:
            def __init__(self, fp16):
                self.fp16 = fp16
                self.scaler = GradScaler() if self.fp16 else None
        Trainer(args.fp16)
        """
    assert "self.scaler = None" in settled(text, False)
    assert "self.scaler = GradScaler()" in settled(text, True)


def test_a_setting_follows_the_one_that_is_its_default():
    """Where only the first one is set, both have its value."""
    text = """\
        def dtype_of(name, default):
            name = str(name or "").lower()
            if not name:
                return default
            return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name, default)
        compute = dtype_of(cfg.get("compute", "bf16"), torch.bfloat16)
        weights = dtype_of(cfg.get("weights", cfg.get("compute", "bf16")), torch.bfloat16)
        scaler = GradScaler(enabled=compute == torch.float16 and weights == torch.float32)
        """
    script = settled(text, "fp16")
    assert script.endswith("weights = torch.float16\nscaler = GradScaler(enabled=False)")
    assert "compute = torch.float16" in script


def test_constants_of_the_file_stay():
    """Whoever writes `USE_AMP = False` may turn it on."""
    text = "USE_AMP = False\nif USE_AMP:\n    a()\nif args.fp16:\n    b()"
    assert "if USE_AMP:\n    a()" in settled(text, True)


@pytest.mark.parametrize("end", ["raise ValueError(args.dtype)", "sys.exit(1)", "parser.error('no')"])
def test_a_value_that_the_file_rejects_is_left_out(end):
    """It raises, or ends the program."""
    text = f"if args.dtype == 'fp16':\n    {end}\nelif args.dtype == 'bf16':\n    a()"
    assert settled(text, "fp16") is None
    assert settled(text, "bf16") is not None


def test_an_accelerator_gets_the_precision_that_is_assumed():
    """With it, rules know what the launcher's configuration does."""
    text = "from accelerate import Accelerator\nengine = Accelerator()\nif engine.mixed_precision == 'fp16':\n    a()"
    assert settled(text, "fp16").endswith("engine = Accelerator(mixed_precision='fp16')\na()")
    assert settled(text, "no").endswith("engine = Accelerator(mixed_precision='no')\npass")
