"""Files made to be slow: whatever repeats, the time grows with the length and not with its square."""

import time

import pytest

from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings
from halfstep.check.runner import MAX_CONFIGS, check_document
from halfstep.check.select import Selection

HEAD = "import torch\nfrom contextlib import nullcontext\nfrom torch.cuda.amp import GradScaler, autocast\ns = GradScaler()\n"
REPEATED = {
    "contexts": "ctx = autocast() if a else nullcontext()\nwith ctx:\n    pass\n",
    "scalers": "s = GradScaler()\ns.scale(l).backward()\ns.step(o)\n",
    "functions": "def f():\n    s = GradScaler()\n    s.scale(l).backward()\n    s.step(o)\n",
    "conditions": "if torch.isnan(x): raise ValueError\ns.unscale_(o)\n",
    "casts": "m.half()\no = torch.optim.SGD(m.parameters())\nl.backward()\no.step()\n",
    "one line": "autocast();",
    "one line with letters of two bytes": "autocast('\u00e9');",
}


def check(text):
    """The findings in a script, and the processor time they took."""
    document = read_document("a.py", text.encode(), "python")
    start = time.process_time()
    found = check_document(document, Settings(), Selection())
    return found, time.process_time() - start


@pytest.mark.parametrize("name", REPEATED)
def test_time_grows_with_the_length(name):
    """Eight times the text takes far less than the 64 times that every pair compared with every other would."""
    few, many = HEAD + REPEATED[name] * 250, HEAD + REPEATED[name] * 2000
    check(few)
    short = min(check(few)[1] for _ in range(3))
    assert check(many)[1] < 24 * short + 0.2


def test_a_script_of_nothing_but_configurations_is_left_half_way():
    """The first are checked, and HS005 says that the rest were not."""
    one = "c = {'train_batch_size': 8, 'fp16': {'enabled': True}, 'zero_optimization': {'stage': 2}}\n"
    found, _ = check("import deepspeed\n" + one * (MAX_CONFIGS + 1))
    assert [f.code for f in found] == ["HS005"]
    assert str(MAX_CONFIGS) in found[0].message
    assert check("import deepspeed\n" + one * 3)[0] == ()
