"""Files made to be slow: whatever repeats, the work grows with the length and not with its square."""

import pytest

from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings
from halfstep.check.runner import MAX_CONFIGS, check_document
from halfstep.check.select import Selection
from work_counter import num_lines

HEAD = "import torch\nfrom contextlib import nullcontext\nfrom torch.cuda.amp import GradScaler, autocast\ns = GradScaler()\n"
# Each with how much its work may grow when there is 8 times as much of it: less than 8 times where it is linear. Events of
# one trace are compared in pairs up to `trace.MAX_EVENTS`, so the work of the others grows faster until then.
REPEATED = {
    "contexts": ("ctx = autocast() if a else nullcontext()\nwith ctx:\n    pass\n", 8),
    "scalers": ("s = GradScaler()\ns.scale(l).backward()\ns.step(o)\n", 24),
    "functions": ("def f():\n    s = GradScaler()\n    s.scale(l).backward()\n    s.step(o)\n", 8),
    "methods": ("class C:\n    def f(self, x):\n        return x.f(x.half()) + 1e-12\n", 24),
    "conditions": ("if torch.isnan(x): raise ValueError\ns.unscale_(o)\n", 24),
    "casts": ("m.half()\no = torch.optim.SGD(m.parameters())\nl.backward()\no.step()\n", 24),
    "one line": ("autocast();", 8),
    "one line with letters of two bytes": ("autocast('\u00e9');", 8),
}


def check(text):
    """The findings in a script."""
    return check_document(read_document("a.py", text.encode(), "python"), Settings(), Selection())


LONG = "functions"  # their calls are compared in pairs as well, up to a number that fewer functions do not reach


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == LONG else ()) for n in REPEATED])
def test_work_grows_with_the_length(name):
    """Eight times the text takes far less than the 64 times that every pair compared with every other would."""
    text, growth = REPEATED[name]
    few, many = (HEAD + text * count for count in ((40, 320) if name == LONG else (20, 160)))
    check(few)  # what is loaded or cached on first use is not counted
    assert num_lines(check, many) < growth * num_lines(check, few)


def test_calls_between_functions_are_followed_once():
    """Twelve functions that all call each other in a region are read once each, not once for every way to reach them."""

    def script(number):
        calls = " + ".join(f"f{i}(x)" for i in range(number))
        functions = "".join(f"def f{i}(x):\n    return net(x) + {calls}\n" for i in range(number))
        return f"{HEAD}class Net(torch.nn.Module):\n    def forward(self, x):\n        return x\nnet = Net()\n{functions}with autocast():\n    l = f0(x)\n"

    check(script(3))
    assert num_lines(check, script(12)) < 24 * num_lines(check, script(3))


def test_a_script_of_nothing_but_configurations_is_left_half_way():
    """The first are checked, and HS005 reports that the rest were not."""
    one = "c = {'train_batch_size': 8, 'fp16': {'enabled': True}, 'zero_optimization': {'stage': 2}}\n"
    findings = check("import deepspeed\n" + one * (MAX_CONFIGS + 1))
    assert [f.code for f in findings] == ["HS005"]
    assert str(MAX_CONFIGS) in findings[0].message
    assert check("import deepspeed\n" + one * 3) == ()
