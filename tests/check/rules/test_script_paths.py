"""HS110, HS117, HS123, HS125, HS132, HS134, HS145, HS149 and HS171: paths of a script that lack what the others have."""

import pytest

from check_scripts import findings


def lines(text, code):
    """The lines at which a rule reports."""
    return [f.line for f in findings(text, code)]


CREATED = """\
import torch
def main(args, use_amp=False):
    {before}
    if {condition}:
        scaler = torch.amp.GradScaler('cuda')
    {between}
    for x in loader:
        with torch.autocast('cuda', dtype=torch.float16):
            loss = model(x)
        {use}
"""
USE = "scaler.scale(loss).backward()"


@pytest.mark.parametrize(
    ("condition", "before", "between", "use", "expected"),
    [
        ("args.amp", "", "", USE, [10]),
        ("use_amp", "", "", USE, [10]),
        ("not args.fp32", "", "", USE, [10]),
        ("args.precision == 'fp16'", "", "", USE, [10]),
        ("args.amp", "", "if args.evaluate: return", USE, [10]),
        ("args.amp", "args = parse()", "", USE, [10]),
        ("args.amp", "scaler = None", "", USE, []),
        ("args.amp", "", "", "(scaler.scale(loss) if args.amp else loss).backward()", []),
        ("args.amp", "", "if not args.amp: return", USE, []),
        ("args.amp", "", "if not args.amp: scaler = torch.amp.GradScaler('cuda', enabled=False)", USE, []),
        ("torch.cuda.is_available()", "", "", USE, []),
        ("not args.eval", "", "if args.mode != 'train': return", USE, []),
    ],
)
def test_scaler_created_under_a_condition(condition, before, between, use, expected):
    """A use without the condition of the only assignment is on a path without a scaler."""
    text = CREATED.format(condition=condition, before=before or "pass", between=between or "pass", use=use)
    assert lines(text, "HS132") == expected


TRAINER = """\
import torch
class Trainer({base}):
    def __init__(self, amp):
        self.amp = amp
        if amp:
            self.scaler = torch.amp.GradScaler('cuda')
    def {name}(self, x):
        loss = self.net(x)
        {test}
            self.scaler.scale(loss).backward()
"""


@pytest.mark.parametrize(
    ("base", "name", "test", "expected"),
    [
        ("", "step", "if True:", [10]),
        ("torch.nn.Module", "step", "with torch.enable_grad():", [10]),
        ("", "step", "if self.amp:", []),
        ("", "step", "if hasattr(self, 'scaler'):", []),
        ("", "step_amp", "if True:", []),
        ("Base", "step", "if True:", []),
    ],
)
def test_attribute_created_under_a_condition(base, name, test, expected):
    """A method that uses `self.scaler` without the condition of __init__ raises AttributeError."""
    text = TRAINER.format(base=base, name=name, test=test)
    assert lines(text, "HS132") == expected
    assert all("AttributeError" in f.message for f in findings(text, "HS132"))


def test_condition_of_a_caller_is_no_condition_of_the_scaler():
    """A function that is also spawned creates its scaler on both paths."""
    text = """\
import torch
import torch.multiprocessing as mp
def run(rank, args):
    scaler = torch.amp.GradScaler('cuda')
    for x in loader:
        train(x, scaler)
def train(x, scaler):
    scaler.scale(model(x)).backward()
def main(args):
    if args.multi:
        mp.spawn(run, args=(args,))
    else:
        run(0, args)
main(parse())
"""
    assert lines(text, "HS132") == []


def test_condition_of_two_functions_with_their_own_scaler():
    """Each function has its own variable, and only one of them lacks the assignment on a path."""
    text = """\
import torch
class Trainer:
    def find_lr(self):
        scaler = torch.amp.GradScaler('cuda')
        scaler.scale(self.loss()).backward()
    def fit(self):
        if Config.amp:
            scaler = torch.amp.GradScaler('cuda')
        for x in loader:
            scaler.scale(self.loss(x)).backward()
"""
    assert lines(text, "HS132") == [10]


FINDER = """\
import torch
class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler('cuda')
    def fit(self):
        for x in self.loader:
            with torch.autocast('cuda'):
                loss = self.model(x)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
    def find_lr(self, ax):
        ax.set_xscale('log')
        for x in self.loader:
            {region}
                loss = self.model(x)
            {backward}
            self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("region", "backward", "expected"),
    [
        ("with torch.autocast('cuda'):", "loss.backward()", [17]),
        ("with torch.autocast('cuda', enabled=self.amp):", "loss.backward()", [17]),
        ("with torch.autocast('cuda', dtype=torch.bfloat16):", "loss.backward()", []),
        ("with torch.autocast('cuda', dtype=self.dtype):", "loss.backward()", []),
        ("with torch.autocast('cuda'):", "self.scaled(loss).backward()", []),
        ("if True:", "loss.backward()", []),
    ],
)
def test_method_without_the_scaler_of_its_class(region, backward, expected):
    """A learning-rate finder under float16 autocast needs the scaler that the training loop uses."""
    assert lines(FINDER.format(region=region, backward=backward), "HS123") == expected


NAMED = """\
import torch
for i, x in enumerate(loader):
    with torch.autocast('cuda'):
        loss = model(x)
    scaled_loss = {value}
    scaled_loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("loss / accum", [6]),
        ("loss.mean() / accum_steps", [6]),
        ("weight * loss", [6]),
        ("loss * loss_scale", []),
        ("wrap(loss)", []),
        ("loss / accum * self.scale", []),
    ],
)
def test_loss_that_is_only_called_scaled(value, expected):
    """A division by the accumulation steps is no loss scale, whatever the result is called."""
    assert lines(NAMED.format(value=value), "HS123") == expected


STORED = """\
import torch
def setup(dtype='bfloat16'):
    ptdtype = {{'float16': torch.float16, 'bfloat16': torch.bfloat16}}[dtype]
    ctx = torch.autocast('cuda', dtype={dtype})
    return {stored}
def loss_of(model, x, env):
    with {entered}:
        out = model(x)
    return out.sum()
def train(model, env, optimizer):
    for x in loader:
        loss = loss_of(model, x, env)
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("dtype", "stored", "entered", "expected"),
    [
        ("ptdtype", "{'device': 'cuda', 'ctx': ctx}", "env['ctx']", [4]),
        ("ptdtype", "dict(device='cuda', ctx=ctx)", "env['ctx']", [4]),
        ("ptdtype", "Env(device='cuda', ctx=ctx)", "env.ctx", [4]),
        ("torch.bfloat16", "{'device': 'cuda', 'ctx': ctx}", "env['ctx']", []),
        ("ptdtype", "{'device': 'cuda', 'other': ctx}", "env['ctx']", []),
    ],
)
def test_region_in_a_dictionary(dtype, stored, entered, expected):
    """A context that a setup function returns in a dictionary or an object is the region of the loss."""
    assert lines(STORED.format(dtype=dtype, stored=stored, entered=entered), "HS123") == expected


METRIC = """\
import torch
from pytorch_metric_learning import trainers
class Trainer(trainers.MetricLossOnly):
    def calculate_loss(self, batch):
        with torch.autocast('cuda'{dtype}):
            self.losses['metric_loss'] = self.maybe_get_metric_loss(batch)
"""


@pytest.mark.parametrize(("dtype", "expected"), [("", [5]), (", dtype=torch.bfloat16", []), (", enabled=False", [])])
def test_region_in_a_trainer_that_does_not_scale(dtype, expected):
    """A subclass of a library's trainer inherits its plain backward and step."""
    assert lines(METRIC.format(dtype=dtype), "HS123") == expected


DISABLED = """\
import torch
from models import Net
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler('cuda')
for x, y in loader:
    {first}
    with torch.autocast('cuda', enabled={enabled}):
        {second}
        loss = criterion(out, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("enabled", "first", "second", "expected"),
    [
        ("False", "pass", "out = model(x)", [11]),
        ("True", "pass", "out = model(x)", []),
        ("args.amp", "pass", "out = model(x)", [5]),  # the scaler that the option does not switch
        ("False", "with torch.autocast('cuda'): out = model(x)", "out = out.float()", []),
        ("False", "out = model(x)", "out = out.float()", []),
    ],
)
def test_scaler_where_autocast_is_disabled(enabled, first, second, expected):
    """A region that disables autocast around model and loss leaves nothing to scale; around the loss alone it is right."""
    assert lines(DISABLED.format(enabled=enabled, first=first, second=second), "HS134") == expected


FORGOTTEN = """\
import torch
from torch.amp import GradScaler{imported}
from models import Net
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = GradScaler('cuda')
for x, y in loader:
{comment}    loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("imported", "comment", "expected"),
    [
        (", autocast", "", [9]),
        ("", "    # with torch.autocast('cuda'):\n", [10]),
        ("", "", []),
    ],
)
def test_region_that_was_forgotten(imported, comment, expected):
    """`autocast` imported and unused, or commented out, shows that the region is missing, unless the model opens one."""
    text = FORGOTTEN.format(imported=imported, comment=comment)
    assert lines(text, "HS134") == expected
    assert all("unless `model` opens one itself" in f.message for f in findings(text, "HS134"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dtype = torch.bfloat16 if device == 'cuda' else torch.float32\n", [3]),
        ("dtype = torch.float32 if device == 'cpu' else torch.float16\n", [3]),
        ("dtype = torch.float16 if torch.cuda.is_available() else torch.float32\n", [3]),
        ("dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32\n", []),
        ("dtype = torch.bfloat16 if device == 'cuda' else torch.bfloat16\n", []),
        ("dtype = torch.bfloat16 if args.amp else torch.float32\n", []),
    ],
)
def test_float32_on_the_cpu(text, expected):
    """A dtype that is float32 without CUDA disables the region there, with a warning of torch."""
    text = f"import torch\n{text}with torch.autocast(device, dtype=dtype):\n    y = model(x)\n"
    assert lines(text, "HS145") == expected
    assert lines(text.replace("(device, ", "('cuda', "), "HS145") == []
    assert lines(text.replace("dtype=dtype", "dtype=dtype, enabled=amp"), "HS145") == []
    tested = text.replace("dtype=dtype)", "dtype=dtype) if dtype != torch.float32 else nullcontext()")
    assert lines(tested, "HS145") == []


def test_float32_on_the_cpu_from_a_function():
    """The branches of a function that returns the dtype count like those of a ternary."""
    text = """\
import torch
def dtype_of(device):
    if device.startswith('cuda'):
        dtype = torch.float16
    elif device == 'mps':
        dtype = torch.float16
    else:
        dtype = torch.float32
    return dtype
def run(device):
    dtype = dtype_of(device)
    with torch.autocast(device, dtype=dtype):
        return model(x)
"""
    assert lines(text, "HS145") == [12]


WINDOW = """\
import torch
from tools import compute_grad_norm
scaler = torch.amp.GradScaler('cuda')
for i, x in enumerate(loader):
    scaler.scale(model(x)).backward()
    if (i + 1) % 4 == 0:
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    {other}
"""


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("else:\n        norm = compute_grad_norm(model.parameters())", [13]),
        ("else:\n        norm = norm", []),
    ],
)
def test_norm_between_two_steps(other, expected):
    """On micro-batches without a step the gradients are scaled, and so is their norm."""
    assert lines(WINDOW.format(other=other), "HS110") == expected


def test_norm_in_a_helper_is_reported_at_its_call():
    """The helper is right wherever gradients are unscaled; its call is what comes too early."""
    text = """\
import torch
def measure(parameters):
    return sum(p.grad.norm() for p in parameters)
scaler = torch.amp.GradScaler('cuda')
for x in loader:
    scaler.scale(model(x)).backward()
    log(measure(model.parameters()))
    scaler.unscale_(optimizer)
    log(measure(model.parameters()))
    scaler.step(optimizer)
    scaler.update()
"""
    assert lines(text, "HS110") == [7]


def test_closure_next_to_a_scaler_of_data():
    """A StandardScaler under the same name in another function does not make torch's scaler unknown."""
    text = """\
import torch
from sklearn.preprocessing import StandardScaler
def prepare(x):
    scaler = StandardScaler()
    return scaler.fit_transform(x)
def train():
    scaler = torch.amp.GradScaler('cuda')
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer, closure)
        scaler.update()
"""
    assert lines(text, "HS125") == [10]


RESTORED = """\
import torch
from tools import restart_from_checkpoint
scaler = torch.amp.GradScaler('cuda')
restart_from_checkpoint('x.pt', model=model, optimizer=optimizer, scaler={scaler})
for x in loader:
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save({{'optimizer': optimizer.state_dict(), 'scaler': scaler.state_dict()}}, 'x.pt')
"""


@pytest.mark.parametrize(("scaler", "expected"), [("torch.amp.GradScaler('cuda')", [4]), ("scaler", [])])
def test_state_restored_into_a_new_scaler(scaler, expected):
    """A scaler that is created in the call that restores it takes the state with it."""
    assert lines(RESTORED.format(scaler=scaler), "HS171") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\ndef f(args):\n    return GradScaler() if args.fp16 else None\n", [3]),
        ("import torch\nwith autocast('cuda'):\n    y = model(x)\n", [2]),
        ("import torch\nwith amp.autocast():\n    y = model(x)\n", [2]),
        ("import torch\nfrom torch.amp import GradScaler\nscaler = GradScaler('cuda')\n", []),
        ("import torch\nfrom tools import *\nscaler = GradScaler('cuda')\n", []),
        (
            "import torch\ntry:\n    from torch.amp import GradScaler\nexcept ImportError:\n    pass\nscaler = GradScaler()\n",
            [],
        ),
        ("import torch\ndef f(GradScaler):\n    return GradScaler()\n", []),
        ("import torch\nclass GradScaler:\n    pass\nscaler = GradScaler()\n", []),
        ("import torch\nautocast = torch.autocast\nwith autocast('cuda'):\n    y = model(x)\n", []),
        ("scaler = GradScaler()\n", []),
    ],
)
def test_name_of_amp_without_an_import(text, expected):
    """A name that nothing in a file binds raises NameError; fragments and star imports leave it open."""
    assert lines(text, "HS117") == expected


@pytest.mark.parametrize(("train", "expected"), [("loss.backward()", [6]), ("print(loss)", [])])
def test_float32_on_the_cpu_in_the_validation_of_a_training(train, expected):
    """The warning comes with every validation of a run; a script that only runs a model on the CPU is left alone."""
    text = (
        "import torch\ndtype = torch.bfloat16 if device == 'cuda' else torch.float32\ndef evaluate():\n    with torch.no_grad():\n"
        f"        for x in loader:\n            with torch.autocast(device, dtype=dtype):\n                y = model(x)\nloss = model(x)\n{train}\n"
    )
    assert lines(text, "HS145") == expected
