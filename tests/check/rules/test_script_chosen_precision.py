"""Precisions that a file chooses, rejects or resumes with: HS136, HS171 and HS186."""

import pytest

from check_scripts import findings


def lines(text, code):
    """The lines at which a rule is reported."""
    return [f.line for f in findings(text, code)]


SAMPLE = """\
import torch
from accelerate import Accelerator
class Sampler:
    def sample(self, x):
        {before}
        with torch.no_grad(), torch.autocast("cuda", enabled={enabled}{dtype}):
            return self.model(x)
"""
OWN = "self.accelerator = Accelerator(mixed_precision={})"


@pytest.mark.parametrize(
    ("before", "enabled", "dtype", "expected"),
    [
        ("pass", "self.accelerator.mixed_precision != 'no'", ", dtype=torch.float16", [6]),
        ("pass", "self.accelerator.mixed_precision != 'no'", "", [6]),
        ("on = self.ready and self.accelerator.mixed_precision != 'no'", "on", ", dtype=torch.half", [6]),
        ("pass", "self.accelerator.mixed_precision == 'fp16'", ", dtype=torch.float16", []),
        ("pass", "self.accelerator.mixed_precision != 'no'", ", dtype=self.dtype", []),
        ("pass", "self.accelerator.mixed_precision != 'no'", ", dtype=torch.bfloat16", []),
        (OWN.format("'fp16'"), "self.accelerator.mixed_precision != 'no'", ", dtype=torch.float16", []),
        (OWN.format("'fp16' if amp else 'no'"), "self.accelerator.mixed_precision != 'no'", ", dtype=torch.half", []),
        (OWN.format("'bf16'"), "self.accelerator.mixed_precision != 'no'", ", dtype=torch.float16", [6]),
        ("pass", "args.precision in ('fp16', 'bf16')", ", dtype=torch.float16", [6]),
        ("pass", "args.bf16", ", dtype=torch.float16", [6]),
        ("pass", "not args.bf16", ", dtype=torch.float16", []),
        ("pass", "args.fp16", ", dtype=torch.float16", []),
    ],
)
def test_a_region_in_float16_that_bfloat16_enables(before, enabled, dtype, expected):
    """HS136: float16 as written is as wrong as the default where the condition also allows bfloat16."""
    assert lines(SAMPLE.format(before=before, enabled=enabled, dtype=dtype), "HS136") == expected


def test_a_scaler_for_both_formats_may_belong_to_a_float16_region():
    """HS136: a region that is always float16, as written, is what a scaler with another condition is for."""
    text = (
        "import torch\nscaler = torch.amp.GradScaler('cuda', enabled=args.dtype in ['float16', 'bfloat16'])\nfor x in loader:\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n        loss = model(x)\n    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n    optimizer.zero_grad()\n"
    )
    assert lines(text, "HS136") == []


RESUMED = """\
import torch
def train(model, loader, optimizer, {parameters}):
    {create}
    for epoch in {epochs}:
        for x in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        torch.save({{"optimizer": optimizer.state_dict(), "amp": scaler.state_dict()}}, "x.pt")
"""
CREATE = 'scaler = torch.amp.GradScaler("cuda")'


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [12]),
        ({"epochs": "tqdm(range(start_epoch, epochs))"}, [12]),
        ({"parameters": "epochs, resume_step", "epochs": "range(resume_step, epochs)"}, [12]),
        ({"epochs": "range(epochs)"}, []),
        ({"parameters": "low, epochs", "epochs": "range(low, epochs)"}, []),
        # The caller creates the scaler, and may restore it.
        ({"parameters": "epochs, scaler, start_epoch", "create": "pass"}, []),
        ({"create": f"{CREATE}; scaler.load_state_dict(amp)", "parameters": "epochs, amp, start_epoch=0"}, []),
        ({"create": f"{CREATE}; resume_checkpoint(optimizer, scaler)"}, []),
    ],
)
def test_a_function_that_starts_at_a_later_epoch_restores_its_own_scaler(changes, expected):
    """HS171: nobody but the function that creates the scaler can restore it."""
    parts = {"parameters": "epochs, start_epoch=0", "create": CREATE, "epochs": "range(start_epoch, epochs)"}
    assert lines(RESUMED.format(**(parts | changes)), "HS171") == expected


FABRIC = """\
import argparse
import sys
import torch
from lightning.fabric import Fabric
parser = argparse.ArgumentParser()
parser.add_argument("--precision"{choices})
args = parser.parse_args()
{test}
fabric = Fabric(precision=args.precision)
model, optimizer = fabric.setup(model, optimizer)
for x in loader:
    optimizer.zero_grad()
    fabric.backward(model(x))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("choices", "test", "expected"),
    [
        ("", "pass", [14]),
        ("", "if args.precision == '16-mixed': raise SystemExit('no')", []),
        ("", "if args.precision in ('16', '16-mixed'): sys.exit(1)", []),
        ("", "if args.precision not in ('32-true', 'bf16-mixed'): parser.error('no')", []),
        ("", "if args.precision == '16-mixed': print('slow')", [14]),
        ("", "if args.precision == 'bf16-mixed': raise SystemExit('no')", [14]),
        ("", "if args.precision not in ('32-true', '16-mixed'): parser.error('no')", [14]),
        ("", "if args.strategy == '16-mixed': raise SystemExit('no')", [14]),
        (", choices=['32-true', 'bf16-mixed']", "pass", []),
        (", choices=['32-true', '16-mixed']", "pass", [14]),
        (", choices=PRECISIONS", "pass", [14]),
    ],
)
def test_a_precision_that_the_file_rejects_is_not_used(choices, test, expected):
    """HS186: no gradients are scaled where the file raises for fp16, or does not offer it."""
    assert lines(FABRIC.format(choices=choices, test=test), "HS186") == expected
