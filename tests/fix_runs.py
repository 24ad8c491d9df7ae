"""Running a wrong script and its fixed form on the CPU, in this process, with an active scaler.

A right mixed-precision loop gives the same weights whether its scaler scales or is disabled: scales are powers of two. So
`weights(text)` and `weights(text, scaling=False)` are compared, which needs no second implementation of any script.
"""

import contextlib
import io
import re
import warnings
from dataclasses import dataclass
from unittest import mock

import torch

from halfstep.check.files.document import read_document
from halfstep.check.fixing import fix_document
from halfstep.check.runner import check_document
from halfstep.check.select import Selection
from halfstep.check.settings import Settings

# Names that the examples of the rules use without defining them. A batch unpacks into inputs and targets, or is one input.
PRELUDE = """\
import torch as _torch
class _Net(_torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = _torch.nn.Linear(4, 3)
    def forward(self, x):
        return self.layer(x).float().square().mean()
def loss_fn(output, target):
    return (output - target.float().mean()) ** 2
criterion = loss_fn
model, net, netD, netG, teacher = _Net(), _Net(), _Net(), _Net(), _Net()
optimizer = opt = _torch.optim.SGD([*model.parameters(), *net.parameters()], 0.1)
optD, optG = _torch.optim.SGD(netD.parameters(), 0.1), _torch.optim.SGD(netG.parameters(), 0.1)
loader = data = [_torch.randn(2, 8, 4) for _ in range(4)]
x = loader[0]
use_amp = amp = True
resume, start, epochs, clip, steps, accumulate = False, 0, 2, 0.01, 4, 2
path = f = __import__("io").BytesIO()
"""


@dataclass(frozen=True)
class Outcome:
    """A text after `--fix`."""

    text: str
    before: tuple[str, ...]  # the codes of the findings
    after: tuple[str, ...]
    applied: tuple[str, ...]


def fix_text(text, *, unsafe=False, path="train.py", language="python"):
    """What `halfstep check --fix` makes of a text."""

    def check(document):
        return check_document(document, Settings(), Selection())

    document = read_document(path, text.encode(), language)
    findings = check(document)
    fixed = fix_document(document, findings, check, unsafe=unsafe)
    codes = [tuple(f.code for f in group) for group in (findings, fixed.findings, fixed.applied)]
    return Outcome(fixed.after.data.decode(), *codes)


def on_cpu(text):
    """The text for a machine without a GPU: CPU devices and bfloat16, in which no scale overflows."""
    text = re.sub(r"(?<=[\"'])cuda(:0)?(?=[\"'])", "cpu", text)
    text = text.replace("torch.cuda.amp", "torch.cpu.amp").replace("from torch.cuda import", "from torch.cpu import")
    return (
        text.replace("torch.float16", "torch.bfloat16").replace(".cuda()", "").replace("torch.half", "torch.bfloat16")
    )


def run(text, *, scaling=True, names=None):
    """Run a text as a script; returns its variables. With `scaling` false every GradScaler is disabled."""

    def scaler_like(base):
        class Scaler(base):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                self._enabled = self._enabled and scaling

        return Scaler

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        with (
            mock.patch.object(torch.amp, "GradScaler", scaler_like(torch.amp.GradScaler)),
            mock.patch.object(torch.cpu.amp, "GradScaler", scaler_like(torch.cpu.amp.GradScaler)),
        ):
            torch.manual_seed(0)
            variables = {"__name__": "__main__", **(names or {})}
            exec(compile(on_cpu(text), "script.py", "exec"), variables)
    return variables


def weights(text, *, scaling=True, names=None):
    """All parameters that a script creates, after it ran."""
    parameters = []
    hook = torch.nn.modules.module.register_module_parameter_registration_hook(
        lambda module, name, parameter: parameters.append(parameter)
    )
    try:
        run(text, scaling=scaling, names=names)
    finally:
        hook.remove()
    return [p.detach().clone() for p in parameters if p is not None]


def same_with_and_without_scaling(text):
    """Whether a script trains the same weights with an active and with a disabled scaler."""
    scaled, plain = weights(text), weights(text, scaling=False)
    assert len(scaled) == len(plain) > 0
    return all(torch.allclose(a, b, rtol=2e-2, atol=1e-4) for a, b in zip(scaled, plain, strict=True))
