"""HS132 and HS170 on runs that resume: a scaler that this run did not create, a path that only a decorator sets; HS120 by the name of the flag."""

import pytest

from check_scripts import findings

RESUMED = """\
import torch
def main(args):
    {flag} = bool(args.{option})
    if {flag}:
        scaler = torch.amp.GradScaler("cuda")
    if args.resume:
        checkpoint = torch.load(args.resume)
        optimizer.load_state_dict(checkpoint["optimizer"])
        if {test}:
            scaler.load_state_dict({state})
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", enabled={flag}, dtype=torch.{dtype}):
            loss = model(x)
        if {flag}:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
"""
STATE = 'checkpoint["scaler"]'


@pytest.mark.parametrize("flag", ["use_amp", "low_precision"])
@pytest.mark.parametrize(
    ("test", "state", "expected"),
    [
        ('"scaler" in checkpoint', STATE, [(10, "warning")]),
        ('"scaler" in checkpoint.keys()', STATE, [(10, "warning")]),
        ('checkpoint.get("scaler")', STATE, [(10, "warning")]),
        ('"scaler" in checkpoint', 'checkpoint.get("scaler")', [(10, "warning")]),
        ('{flag} and "scaler" in checkpoint', STATE, []),
        ('"scaler" in checkpoint and {flag}', STATE, []),
        ('"scaler" in locals()', STATE, []),
        ("args.amp_state", STATE, []),
    ],
)
def test_a_checkpoint_may_be_of_a_run_with_another_setting(flag, test, state, expected):
    """What the checkpoint contains says nothing about the scaler of this run; a test of the setting does."""
    text = RESUMED.format(flag=flag, option="amp", test=test.format(flag=flag), state=state, dtype="float16")
    found = [(f.line, f.severity) for f in findings(text, "HS132")]
    assert found == expected


@pytest.mark.parametrize(
    ("flag", "dtype", "expected"),
    [
        ("bfloat_enabled", "bfloat16", [5]),
        ("use_bfloat", "bfloat16", [5]),
        ("use_float16", "bfloat16", [5]),
        ("use_half", "float16", []),
    ],
)
def test_a_flag_that_enables_bfloat16_is_for_bfloat16(flag, dtype, expected):
    """HS120 where the flag of the scaler switches a bfloat16 region on, whatever it is called."""
    text = RESUMED.format(flag=flag, option="low", test=flag, state=STATE, dtype=dtype)
    assert [f.line for f in findings(text, "HS120")] == expected


MISNAMED = "import torch\ndef train(x):\n    {code}\n"


@pytest.mark.parametrize(
    ("code", "rule", "expected"),
    [
        ("with torch.cuda.autocast(): model(x)", "HS142", 1),
        ("with torch.cpu.autocast(dtype=torch.bfloat16): model(x)", "HS142", 1),
        ("with torch.cuda.amp.autocast(): model(x)", "HS142", 0),
        ("with torch.cuda.autocast() if hasattr(torch.cuda, 'autocast') else other(): model(x)", "HS142", 0),
        (
            "try:\n        with torch.cuda.autocast(): model(x)\n    except AttributeError:\n        model(x)",
            "HS142",
            0,
        ),
        ("scaler = torch.cuda.GradScaler()", "HS124", 1),
        ("scaler = torch.GradScaler('cuda')", "HS124", 0),
        ("scaler = torch.cuda.GradScaler() if x.amp else None", "HS124", 1),
        ("scaler = torch.cuda.GradScaler() if hasattr(torch.cuda, 'GradScaler') else None", "HS124", 0),
    ],
)
def test_names_that_torch_does_not_have(code, rule, expected):
    """`torch.cuda.autocast` and `torch.cuda.GradScaler` raise AttributeError, unless the script asks first or catches it."""
    assert len(findings(MISNAMED.format(code=code), rule)) == expected


CONFIGURED = """\
import torch
from accelerate import Accelerator
{decorator}
def train(amp=False, precision="fp16", path=None, steps=100):
    accelerator = Accelerator(mixed_precision=precision if amp else "no")
    model, optimizer = build()
    if path is not None:
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, load())
    for step, x in zip(range(steps), loader):
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = model(x).mean()
        accelerator.backward(loss)
        optimizer.step()
        if step % 10 == 0:
            torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, "x.pt")
{call}
"""


@pytest.mark.parametrize(
    ("decorator", "call", "lines"),
    [
        ("@gin.configurable", "train()", [19]),
        ("@gin.configurable('run', denylist=['steps'])", "train()", [19]),
        ("@experiment.automain", "", [19]),
        ("@experiment.capture", "train()", [19]),
        ("@app.command()", "train()", [19]),
        ("@record", "train()", []),  # no run has a path
        ("@timed", "train()", []),
        ("", "train()", []),
        ("", "train(path=options.path)", [19]),
        ("@gin.configurable", "train(path=None)", []),  # what the call passes, no configuration changes
    ],
)
def test_a_decorator_that_sets_what_the_call_leaves_out(decorator, call, lines):
    """A default is what the only call gets, unless a configuration or the command line may replace it."""
    text = CONFIGURED.format(decorator=decorator, call=call)
    assert [f.line for f in findings(text, "HS170")] == lines
