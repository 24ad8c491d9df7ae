"""HS121, HS132, HS142, HS172 and HS173: where scalers and states come from."""

import pytest

from check_scripts import codes, findings

LOOP = """\
for x in loader:
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
    scaler.update()
"""
CREATE = "scaler = torch.amp.GradScaler('cuda')\n"


def inside(function, text):
    return f"def {function}:\n" + "".join(f"    {line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import torch\n" + LOOP + CREATE, 3),
        ("import torch\n" + inside("main()", "scaler.load_state_dict(torch.load(p))\n" + CREATE + LOOP), 3),
        ("import torch\n" + inside("train()", LOOP) + "train()\n" + CREATE, 4),
    ],
)
def test_use_before_creation(text, line):
    """A module, a function and a function that is called too early use a scaler that does not exist yet."""
    assert [(f.code, f.line) for f in findings(text, "HS132")] == [("HS132", line)]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\n" + inside("train()", LOOP) + CREATE + "train()\n",
        "import torch\n" + inside("train(scaler)", LOOP + CREATE),
        "import torch\n" + inside("train()", LOOP) + inside("main()", CREATE + "train()\n"),
        "import torch\nscaler = None\n" + LOOP + CREATE,
        "import torch\nfor epoch in range(9):\n    if epoch:\n        scaler.update()\n    " + CREATE,
        "import torch\nclass T(Base):\n    def __init__(self):\n        self.load()\n        self.scaler = torch.amp.GradScaler('cuda')\n"
        "    def load(self):\n        self.scaler.load_state_dict(s)\n",
        "import torch\ntry:\n    pass\nexcept E:\n    scaler.update()\n" + CREATE + LOOP,
    ],
)
def test_scaler_that_may_exist_is_silent(text):
    """No finding if a caller, a parameter, an earlier iteration or a base class may have created the scaler."""
    assert findings(text, "HS132") == []


SAVED = "import torch\n" + CREATE + "{load}" + LOOP + "torch.save({{'o': optimizer.state_dict(){more}}}, 'x')\n"


@pytest.mark.parametrize(
    ("load", "severity"),
    [
        ("s = torch.load('x')\nscaler.load_state_dict(s['scaler'])\n", "error"),
        ("s = torch.load('x')\nif 'scaler' in s:\n    scaler.load_state_dict(s['scaler'])\n", "warning"),
        ("s = torch.load('x')\nscaler.load_state_dict(s.get('scaler', {}))\n", "warning"),
    ],
)
def test_state_that_no_checkpoint_has(load, severity):
    """Restoring a scaler from a key that is never written raises, or is silently skipped if the key is tested for."""
    (finding,) = findings(SAVED.format(load=load, more=""), "HS172")
    assert finding.severity == severity
    assert findings(SAVED.format(load=load, more=", 'scaler': scaler.state_dict()"), "HS172") == []
    assert findings(SAVED.format(load=load, more=", **extra"), "HS172") == []


@pytest.mark.parametrize("level", ["opt_level='O0'", "opt_level='O2', loss_scale=128.0"])
def test_apex_without_a_dynamic_scale_has_no_state(level):
    """O0 and a fixed loss scale have nothing to restore."""
    text = (
        "import torch\nfrom apex import amp\nmodel, optimizer = amp.initialize(model, optimizer, {})\n"
        "optimizer.load_state_dict(torch.load('x')['o'])\nfor x in loader:\n"
        "    with amp.scale_loss(model(x), optimizer) as loss:\n        loss.backward()\n    optimizer.step()\n"
        "torch.save({{'o': optimizer.state_dict()}}, 'x')\n"
    )
    assert findings(text.format(level), "HS173") == []
    assert [f.line for f in findings(text.format("opt_level='O2'"), "HS173")] == [9]


@pytest.mark.parametrize("guard", ["device != 'cpu'", "device == 'cuda'", "torch.cuda.is_available()"])
def test_scaler_recreated_under_a_device_guard(guard):
    """A guard that is the same in every epoch does not make the creation happen once."""
    text = (
        f"import torch\ndef train(loader, model, optimizer, epoch, device):\n    if {guard}:\n        {CREATE}"
        + inside("x", LOOP)[7:]
    )
    assert [f.code for f in findings(text, "HS121")] == ["HS121"]
    assert findings(text.replace(guard, "epoch == 0"), "HS121") == []


@pytest.mark.parametrize(
    "device",
    [
        "torch.device('cuda')",
        "torch.device('cuda' if gpu else 'cpu')",
        "torch.device('cuda') if gpu else torch.device('cpu')",
    ],
)
def test_torch_device_of_the_object_is_not_a_device_type(device):
    """`self.device` that is always a torch.device raises in autocast; its type does not."""
    text = (
        f"import torch\nclass T:\n    def __init__(self):\n        self.device = {device}\n        self.scaler = None\n"
        "    def run(self, x):\n        with torch.autocast(device_type=self.device):\n            return self.model(x)\n"
    )
    assert codes(text) == ["HS142:7"]
    assert codes(text.replace("=self.device)", "=self.device.type)")) == []


def test_a_helper_of_another_file_may_save_apex_by_itself():
    """apex.amp is global: a function that gets only the optimizer can still write its state."""
    text = (
        "from apex import amp\nfrom utils import load_checkpoint, save_checkpoint\nload_checkpoint(model, optimizer)\n"
        "for x in loader:\n    loss = model(x)\n    with amp.scale_loss(loss, optimizer) as scaled:\n        scaled.backward()\n"
        "    optimizer.step()\n{save}\n"
    )
    assert findings(text.format(save="save_checkpoint(config, epoch, model, optimizer)"), "HS173") == []
    state = "torch.save({'optimizer': optimizer.state_dict()}, path)"
    assert [f.line for f in findings("import torch\n" + text.format(save=state), "HS173")] == [10]


def test_a_signature_that_no_version_of_torch_has():
    """A handled TypeError of the constructor is advice: the handler always runs, and its deprecated name is no fallback."""
    text = (
        "import torch\ntry:\n    scaler = torch.amp.GradScaler({device}='cuda')\nexcept {error}:\n"
        "    scaler = torch.cuda.amp.GradScaler()\n"
    )
    for error in ("TypeError", "(AttributeError, TypeError)"):
        wrong = text.format(device="device_type", error=error)
        assert [(f.line, f.severity) for f in findings(wrong, "HS124", "HS190")] == [(3, "advice"), (5, "advice")]
        assert findings(text.format(device="device", error=error), "HS124", "HS190") == []
    other = findings(text.format(device="device_type", error="ImportError"), "HS124")
    assert [(f.line, f.severity) for f in other] == [(3, "error")]


@pytest.mark.parametrize(
    "reset",
    ["except RuntimeError:\n        {}", "finally:\n        overflows = count()\n    if overflows > 9:\n        {}"],
)
def test_a_scaler_that_is_reset_after_an_overflow_is_not_recreated_every_time(reset):
    """A new scaler in a handler or after many overflows is not one per iteration; outside of it, it is."""
    body = "    try:\n        scaler.scale(model(x)).backward()\n        scaler.step(optimizer)\n        scaler.update()\n    "
    text = "import torch\n" + CREATE + "for x in loader:\n{start}" + body
    made = "scaler = torch.amp.GradScaler('cuda', init_scale=256.0)\n"
    assert findings(text.format(start="") + reset.format(made), "HS121") == []
    assert [f.line for f in findings(text.format(start=f"    {made}") + reset.format("pass\n"), "HS121")] == [4]


@pytest.mark.parametrize(("region", "expected"), [("with torch.no_grad():", [3]), ("if True:", [])])
def test_model_of_the_validation_is_no_new_run(region, expected):
    """A wrapper around the model that validation creates every epoch does not make each epoch a run of its own."""
    text = f"""\
import torch
def train(loader, optimizer):
    scaler = torch.amp.GradScaler('cuda')
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
def validate(loader):
    {region}
        tta_model = Wrapper(net, scales=[1, 2])
        for x in loader:
            tta_model(x)
for epoch in range(9):
    train(loader, optimizer)
    validate(loader)
"""
    assert [f.line for f in findings(text, "HS121")] == expected


BRANCHED = """\
import torch
{checkpoint}
def main(args):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if {test}:
        scaler = torch.amp.GradScaler('cuda')
    else:
        {other}
    train(
        model,
        optimizer,
        {passed},
    )
def train(model, optimizer, scaler):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast('cuda', dtype=torch.float16): loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
main(args)
"""


@pytest.mark.parametrize(
    ("test", "other", "passed", "expected"),
    [
        ("checkpoint is None", "checkpoint = torch.load(checkpoint)", "scaler", [13]),
        ("args.resume is None", "state = torch.load(args.resume)", "scaler=scaler", [13]),
        ("args.resume is None", "scaler = load(args.resume)", "scaler", []),
        ("args.resume is None", "raise SystemExit", "scaler", []),
    ],
)
def test_a_scaler_of_one_branch_that_is_passed_on_is_unbound_in_the_other(test, other, passed, expected):
    """HS132 reports the argument that reads the variable; what the other branch assigns later does not matter."""
    text = BRANCHED.format(checkpoint="checkpoint = None", test=test, other=other, passed=passed)
    assert [f.line for f in findings(text, "HS132")] == expected


def test_an_attribute_that_copies_a_parameter_is_the_same_setting():
    """HS132 knows that `self.args.deepspeed` is `args.deepspeed`, so that only the other condition is missing."""
    text = (
        "import torch\nclass Trainer:\n    def __init__(self, args, model):\n        self.args = args\n        self.model = model\n"
        "        if args.deepspeed: self.engine = start(model)\n        elif args.parallel: self.model = wrap(model)\n"
        "        else: self.scaler = torch.amp.GradScaler('cuda')\n"
        "    def step(self, loss):\n        if self.args.deepspeed: self.engine.backward(loss)\n        else:\n"
        "            self.scaler.scale(loss).backward()\n            self.scaler.step(self.optimizer)\n            self.scaler.update()\n"
    )
    assert [f.line for f in findings(text, "HS132")] == [12]
    assert not findings(text.replace("        else:\n", "        elif not self.args.parallel:\n"), "HS132")


@pytest.mark.parametrize(("off", "count"), [("elif args.model == 'x':\n    args.amp = False\n", 0), ("elif args.model == 'x':\n    print('x')\n", 1)])  # fmt: skip
def test_a_setting_that_switches_the_use_off_where_there_is_no_scaler(off, count):
    """The branch without a scaler sets the flag of its uses to False."""
    text = "import torch\nif args.amp and args.model != 'x':\n    " + CREATE + off
    text += "for x in loader:\n    if args.amp:\n" + "".join(f"    {line}\n" for line in LOOP.splitlines()[1:])
    assert len(findings(text, "HS132")) == count


UNASSIGNED = """\
import torch
from dataclasses import dataclass

@dataclass
class Options:
    amp: bool = True

class Trainer({base}):
    def __init__(self, options):
        {assign}self.optimizer = torch.optim.SGD(net.parameters(), 0.1)
    def validate(self, x):
        with torch.autocast("cuda"):
            return net(x)
    def save(self):
        {save}
"""
SAVE = "torch.save({'scaler': self.scaler.state_dict()}, 'x.pt')"


@pytest.mark.parametrize(
    ("base", "assign", "save", "expected"),
    [
        ("object", "", SAVE, 1),
        ("torch.nn.Module", "", SAVE, 1),
        ("Loader", "", SAVE, 0),
        ("object", "self.scaler = make(); ", SAVE, 0),
        ("object", "setattr(self, name, make()); ", SAVE, 0),
        ("object", "setattr(options, name, make()); ", SAVE, 1),
        ("object", "", f"if hasattr(self, 'scaler'):\n            {SAVE}", 0),
        ("object", "", f"try:\n            {SAVE}\n        except AttributeError:\n            pass", 0),
    ],
)
def test_a_state_of_a_scaler_that_no_line_assigns(base, assign, save, expected):
    """A checkpoint reads `self.scaler`, which a class with nothing to inherit it from never assigns; other classes do not matter."""
    text = UNASSIGNED.format(base=base, assign=assign, save=save)
    assert len(findings(text, "HS132")) == expected


def test_a_base_class_of_the_file_is_read():
    """What a class inherits from a class of the same file is known; a class for others to extend may get its scaler there."""
    text = UNASSIGNED.format(base="object", assign="", save="pass")
    child = f"class Own(Trainer):\n    def store(self):\n        {SAVE}\n"
    assert len(findings(text + child, "HS132")) == 1
    assert findings(text + child.replace("Own", "OwnBase"), "HS132") == []


EARLY_LOAD = """\
import torch

class Loop:
    {body}

class Trainer(Loop):
    def __init__(self, path):
        if path:
            self.load(path)
        self.scaler = torch.amp.GradScaler("cuda")

    def load(self, path):
        self.scaler.load_state_dict(torch.load(path)["scaler"])

def measure(model, x):
    scaler = torch.amp.GradScaler("cuda")
    return scaler.scale(model(x))
"""


@pytest.mark.parametrize(("body", "expected"), [("pass", 1), ("scaler = None", 0), ("def scaler(self): ...", 0)])
def test_a_local_variable_of_the_same_name_is_no_attribute(body, expected):
    """Only the class and its bases decide whether `self.scaler` exists before `__init__` assigns it."""
    assert len(findings(EARLY_LOAD.format(body=body), "HS132")) == expected


BACKENDS = """\
import torch
import torch_xla.core.xla_model as xm
from apex import amp
if {test}:
    model, optimizer = amp.initialize(model, optimizer)
optimizer.load_state_dict(torch.load(path))
for x in loader:
    with amp.scale_loss(model(x), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
{save}(optimizer.state_dict(), path)
"""


@pytest.mark.parametrize(
    ("test", "save", "expected"),
    [
        ("backend != 'amp'", "torch.save", [11]),
        ("backend != 'amp'", "xm.save", []),
        ("options['amp']", "torch.save", []),
    ],
)
def test_the_name_of_a_backend_is_no_key_of_a_checkpoint(test, save, expected):
    """HS173 is silent where "amp" may be a key of the checkpoint, and for a checkpoint that a TPU writes."""
    assert [f.line for f in findings(BACKENDS.format(test=test, save=save), "HS173")] == expected


REPLACED = """\
import torch
def train(loader, model, optimizer):
    scaler = torch.amp.GradScaler('cuda')
    pass
def train(loader, model, optimizer):
    {first}
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
    {last}
for epoch in range(9):
    train(loader, model, optimizer)
"""


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (CREATE.strip(), "pass", [6]),
        (CREATE.strip(), "best = find_optimal_threshold(model)", [6]),
        (CREATE.strip(), "optimizer = make_optimizer(model)", []),
        ("pass", "pass", []),
    ],
)
def test_the_last_of_several_definitions_is_the_one_that_trains(first, last, expected):
    """A function that is defined again replaces the first, and an optimal value is no new optimizer."""
    assert [f.line for f in findings(REPLACED.format(first=first, last=last), "HS121")] == expected


FALLBACK = """\
import torch
class Agent:
    def __init__(self, net, args):
        self.net, self.optimizer = net, torch.optim.AdamW(net.parameters())
        {before}
        if args.amp:
            try:
                from torch.amp import GradScaler as NewScaler
                self.scaler = NewScaler("cuda")
            except ImportError:
                self.scaler = torch.cuda.amp.GradScaler()
        {after}
    def update(self, x):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.net(x)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("pass", "pass", [17]),
        ("self.scaler = None", "pass", []),  # HS176
        ("pass", "else: self.scaler = torch.amp.GradScaler(enabled=False)", []),
        ("assert args.amp", "self.scaler = self.scaler or make_scaler()", []),
    ],
)
def test_a_scaler_for_two_versions_of_torch_is_created_once(before, after, expected):
    """HS132: what a handler assigns instead does not change the setting without which there is no scaler."""
    assert [f.line for f in findings(FALLBACK.format(before=before, after=after), "HS132")] == expected
