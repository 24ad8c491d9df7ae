"""HS139: options of commands and settings of a program that nothing but messages depends on, and formats that it never computes in."""

import pytest

from check_scripts import findings

STEP = """\
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype={dtype}{more}):
            loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
"""
BF16 = STEP.format(dtype="torch.bfloat16", more="")


def reported(text):
    """The lines at which HS139 is reported."""
    return [f.line for f in findings(text, "HS139")]


CLICK = (
    'import click, torch\n@click.command()\n@click.option("--{flag}", default=4)\ndef main({name}):\n    {use}\n' + BF16
)
TYPER = "import typer, torch\ndef main({name}: int = 4):\n    {use}\n" + BF16 + "typer.run(main)\n"


@pytest.mark.parametrize("command", [CLICK, TYPER, TYPER.replace("typer.run", "fire.Fire").replace("typer", "fire")])
@pytest.mark.parametrize(
    ("name", "use", "is_reported"),
    [
        ("grad_accum", "print(f'{8 * grad_accum} in a step')", True),
        ("grad_accum", "total = 8 * grad_accum\n    print(total)", True),
        ("grad_accum", "total = 8 * grad_accum\n    schedule(total)", False),
        ("grad_accum", "every = grad_accum", False),
        ("max_grad_norm", "pass", True),
        ("use_amp", "print(use_amp)", True),
        ("use_amp", "build(amp=use_amp)", False),
        ("seed", "print(seed)", False),
    ],
)
def test_an_option_of_a_command_that_only_messages_show(command, name, use, is_reported):
    """The parameters of a command are its options: one that reaches nothing but messages has no effect."""
    text = command.format(flag=name.replace("_", "-"), name=name, use=use)
    assert bool(reported(text)) == is_reported


PROGRAM = "import os, torch\n{setting}\ndef main():\n    {use}\n" + BF16 + 'if __name__ == "__main__":\n    main()\n'


@pytest.mark.parametrize(
    ("setting", "use", "is_reported"),
    [
        ('AMP_DTYPE = getattr(torch, os.environ.get("AMP_DTYPE", "float16"))', "log.info('dtype %s', AMP_DTYPE)", True),
        ('AMP_DTYPE = getattr(torch, os.environ.get("AMP_DTYPE", "float16"))', "cast(AMP_DTYPE)", False),
        ('F = {"a": torch.float16, "b": torch.bfloat16}\nPRECISION = F[os.environ["F"]]', "print(PRECISION)", True),
        ('USE_AMP = os.environ.get("USE_AMP", "1") == "1"', "print(USE_AMP)", True),
        ('USE_AMP = os.environ.get("USE_AMP", "1") == "1"', "model.amp(USE_AMP)", False),
        ('GRAD_ACCUM = int(os.environ.get("GRAD_ACCUM", 4))', "pass", True),
        ('GRAD_ACCUM = int(os.environ.get("GRAD_ACCUM", 4))', "n = GRAD_ACCUM", False),
    ],
)
def test_a_setting_of_the_environment_that_only_messages_show(setting, use, is_reported):
    """A variable at the top of a program, read from the environment, has no effect where only messages have it."""
    assert bool(reported(PROGRAM.format(setting=setting, use=use))) == is_reported


CHOICES = 'choices=["fp32", "fp16", "bf16"]'
PARSED = (
    "import argparse, torch\nparser = argparse.ArgumentParser()\nparser.add_argument('--precision', "
    + CHOICES
    + ", default='fp16')\nargs = parser.parse_args()\n"
    "def main():\n    {use}\n{step}main()\n"
)
CLICKED = (
    "import click, torch\n@click.command()\n@click.option('--precision', type=click.Choice(['fp32', 'fp16', 'bf16']))\n"
    "def main(precision):\n    {use}\n{step}main()\n"
)
LITERAL = (
    "import torch\nfrom typing import Literal\nclass Config:\n    precision: Literal['fp32', 'fp16', 'bf16'] = 'fp16'\n"
    "def main(args: Config):\n    {use}\n{step}main(Config())\n"
)


@pytest.mark.parametrize("text", [PARSED, CLICKED, LITERAL])
@pytest.mark.parametrize(
    ("test", "dtype", "use", "is_reported"),
    [
        ("P == 'fp16'", "torch.float16", "print(P)", True),
        ("P == 'bf16'", "torch.bfloat16", "pass", True),
        ("P == 'fp16'", "torch.float16", "model.bfloat16() if P == 'bf16' else model", False),
        ("P == 'fp16'", "torch.float16", "convert(model, P)", False),
        ("P == 'fp16'", "torch.float16", "if P == 'bf16':\n        raise ValueError", False),
    ],
)
def test_a_format_that_an_option_lists_and_nothing_computes_in(text, test, dtype, use, is_reported):
    """Of both 16-bit formats that an option offers, one enters autocast: a run with the other is in float32."""
    name = "precision" if text is CLICKED else "args.precision"
    step = STEP.format(dtype=dtype, more=f", enabled={test}").replace("P ==", f"{name} ==")
    assert bool(reported(text.format(use=use.replace("P", name, 2), step=step))) == is_reported
