"""HS170 and HS171: every form in which a checkpoint stores an optimizer, with and without the scaler."""

import pytest

from check_scripts import codes, findings

HEAD = 'import torch\nscaler = torch.amp.GradScaler("cuda")\n'
LOAD = 'state = torch.load("x")\noptimizer.load_state_dict(state["optimizer"])\n'
LOOP = """\
for epoch in range(9):
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
    {save}
"""
DATACLASS = "from dataclasses import dataclass\n@dataclass\nclass TrainState:\n    model: dict\n    optimizer: dict\n"
OBJECTS = (
    "def save(path, **objects):\n    torch.save({k: v.state_dict() for k, v in objects.items()}, path)\n"
    "def load(path, **objects):\n    for k, v in objects.items():\n        v.load_state_dict(torch.load(path)[k])\n"
)
# (before the loop, the save; "+SCALER" is where the right form adds the scaler)
FORMS = {
    "dictionary": (LOAD, 'torch.save({"m": model.state_dict(), "o": optimizer.state_dict()+SCALER}, "x")', ', "s": {}'),
    "dict call": (LOAD, 'torch.save(dict(m=model.state_dict(), o=optimizer.state_dict()+SCALER), "x")', ", s={}"),
    "tuple": (LOAD, 'torch.save((model.state_dict(), optimizer.state_dict()+SCALER), "x")', ", {}"),
    "objects": (LOAD, 'torch.save({"m": model, "o": optimizer+SCALER}, "x")', ', "s": scaler'),
    "items": (LOAD, 'c = {}\n    c["o"] = optimizer.state_dict()+SCALER\n    torch.save(c, "x")', '\n    c["s"] = {}'),
    "update": (LOAD, 'c = {}\n    c.update({"o": optimizer.state_dict()+SCALER})\n    torch.save(c, "x")', ', "s": {}'),
    "merged": (LOAD, 'b = {"m": model.state_dict()}\n    torch.save({**b, "o": optimizer.state_dict()+SCALER}, "x")', ', "s": {}'),
    "variable": (LOAD, 'o = optimizer.state_dict()\n    torch.save({"m": 1, "o": o+SCALER}, "x")', ', "s": {}'),
    "dataclass": (DATACLASS + LOAD, "torch.save(TrainState(model=1, optimizer=optimizer.state_dict()+SCALER), 'x')", ", amp={}"),
    "list": ("optims = [optimizer]\n" + LOAD, 'torch.save({"o": [o.state_dict() for o in optims]+SCALER}, "x")', ', "s": {}'),
    "helper": ('load_checkpoint("x", model, optimizer)\n', 'save_checkpoint("x", model, optimizer+SCALER)', ", scaler"),
    "helper's dictionary": ('u.load_checkpoint("x", model, optimizer)\n', 'u.save_checkpoint("x", dict(m=model, o=optimizer+SCALER))', ", s=scaler"),
    "any objects": (OBJECTS + 'load("x", m=model, o=optimizer)\n', 'save("x", m=model, o=optimizer+SCALER)', ", s=scaler"),
    "loop": (
        'parts = {"m": model, "o": optimizer+SCALER}\nfor k, v in parts.items():\n    v.load_state_dict(torch.load("x")[k])\n',
        'torch.save({k: v.state_dict() for k, v in parts.items()}, "x")',
        ', "s": scaler',
    ),
    "copied": (LOAD, 'torch.save({"m": 1, "o": optimizer.state_dict().copy()+SCALER}, "x")', ', "s": {}'),
    "sharded": (LOAD, 'torch.save({"m": 1, "o": FSDP.optim_state_dict(model, optimizer)+SCALER}, "x")', ', "s": {}'),
    "framework": (LOAD, 'accelerator.save({"o": optimizer.state_dict()+SCALER}, "x")', ', "s": {}'),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_optimizer_without_scaler_in_every_form(form):
    """A checkpoint with the optimizer and without the scaler is found in every form, and is silent with the scaler."""
    before, save, added = FORMS[form]
    text = HEAD + before + LOOP.format(save=save)
    wrong = findings(text.replace("+SCALER", ""), "HS170")
    assert [(f.code, f.severity) for f in wrong] == [("HS170", "warning")]
    right = text.replace("+SCALER", added.replace("{}", "scaler.state_dict()"))
    assert findings(right, "HS170") == []


@pytest.mark.parametrize(
    "scaler",
    [
        "from lib import get_grad_scaler\nscaler = get_grad_scaler(cfg)",
        "class T:\n    pass\nscaler = build_scaler(cfg)",
        "from lib import MyGradScaler\nscaler = MyGradScaler()",
        "from torch.amp import GradScaler\ndef make_scaler():\n    return GradScaler()\nscaler = make_scaler()",
    ],
)
def test_scaler_of_an_unknown_factory_is_a_scaler(scaler):
    """What scales a loss, steps and updates is a scaler, whoever creates it: its order and its state are checked."""
    save = 'torch.save({"o": optimizer.state_dict()}, "x")'
    text = f"import torch\n{scaler}\n" + LOAD + LOOP.format(save=save)
    assert [f.code for f in findings(text, "HS170")] == ["HS170"]
    assert [f.code for f in findings(text.replace("        scaler.update()\n", ""), "HS101")] == ["HS101"]


def test_scaler_that_another_file_steps():
    """A scaler passed to a training function of another file is used there."""
    text = (
        "import torch\nfrom engine import train_one_epoch\nscaler = torch.amp.GradScaler('cuda')\n" + LOAD
        + "for epoch in range(9):\n    train_one_epoch(model, optimizer, scaler)\n    torch.save({'o': optimizer.state_dict()}, 'x')\n"
    )  # fmt: skip
    assert codes(text) == ["HS170:8"]
    assert codes(text.replace("'cuda')", "'cuda', enabled=False)")) == []


def test_native_scaler():
    """A scaler that steps by itself when called has a state to save as well."""
    text = (
        "import torch\nfrom timm.utils import NativeScaler\nloss_scaler = NativeScaler()\n" + LOAD
        + "for x in loader:\n    with torch.autocast('cuda'):\n        loss = model(x)\n    loss_scaler(loss, optimizer)\n"
        "torch.save({'o': optimizer.state_dict()}, 'x')\n"
    )  # fmt: skip
    assert codes(text) == ["HS170:10"]
    saved = text.replace("}, 'x')", ", 'a': loss_scaler.state_dict()}, 'x')")
    assert codes(saved) == ["HS171:10"]
    assert codes(saved.replace(LOAD, LOAD + "loss_scaler.load_state_dict(state['a'])\n")) == []


def test_a_logged_scale_is_not_a_saved_one():
    """A log entry named after the scaler does not count as its state."""
    log = 'wandb.log({"scaler": scaler.get_scale()})\n    torch.save({"o": optimizer.state_dict()}, "x")'
    assert codes(HEAD + LOAD + LOOP.format(save=log)) == ["HS170:11"]


@pytest.mark.parametrize(
    ("loop", "after", "severity"),
    [
        ('torch.save({"o": optimizer.state_dict()}, "x")', "print(args.resume)\n", ["advice"]),
        ('torch.save({"o": optimizer.state_dict()}, "x")', "", ["advice"]),
        ('torch.save({"o": optimizer.state_dict()}, "x")', 'model.load_state_dict(torch.load("x")["m"])\n', ["advice"]),
        ('if loss < best_loss:\n        torch.save({"o": optimizer.state_dict()}, "x")', "", ["advice"]),
        ('save_checkpoint({"m": model, "o": optimizer}, "x")', "", ["advice"]),
        ('torch.save({"m": model.state_dict()}, "x")', "", []),
        ("pass", 'torch.save({"o": optimizer.state_dict()}, "x")\n', []),
    ],
)
def test_checkpoint_that_nothing_restores(loop, after, severity):
    """A checkpoint that another file may restore gets advice, also the best one: only resuming needs an optimizer. What is saved after training gets nothing."""
    text = HEAD + LOOP.format(save=loop) + after
    assert [f.severity for f in findings(text, "HS170")] == severity


def test_a_helper_that_nothing_calls_counts_for_the_loop():
    """A function `save_checkpoint` that another file calls saves what the loop of this file trains."""
    save = "def save_checkpoint(model, optimizer, scaler):\n    torch.save({'o': optimizer.state_dict(), 's': scaler.state_dict()}, 'x')\n"
    assert [f.code for f in findings(HEAD + save + LOAD + LOOP.format(save="pass"), "HS171")] == ["HS171"]


def test_asking_for_a_scaler_is_no_checkpoint_key():
    """`getattr(self, "scaler", None)` and `hasattr` save nothing."""
    text = (
        "import torch\nclass Trainer:\n    def __init__(self):\n        self.scaler = torch.amp.GradScaler('cuda')\n"
        "    def save(self):\n        torch.save({'optim': self.optimizer.state_dict()}, 'x')\n"
        "    def load(self):\n        self.optimizer.load_state_dict(torch.load('x')['optim'])\n"
        "    def validate(self):\n        return getattr(self, 'scaler', None) is not None and hasattr(self, 'scaler')\n"
        "    def fit(self):\n        for x in self.data:\n            self.scaler.scale(self.net(x)).backward()\n"
        "            self.scaler.step(self.optimizer)\n            self.scaler.update()\n            self.optimizer.zero_grad()\n"
    )
    assert "HS170:6" in codes(text)


@pytest.mark.parametrize(("guard", "line"), [("step > 0", 9), ("loss < best", 11), ("loss < lowest", 11)])
def test_advice_is_at_the_checkpoint_that_is_written_regularly(guard, line):
    """`step > 0` saves regularly, so that checkpoint is the one to resume from; a comparison of losses saves the best weights."""
    save = f'if {guard} and start_epoch:\n        torch.save({{"o": optimizer.state_dict()}}, "x")\n'
    regular = '    if start_epoch % 5 == 0:\n        torch.save({"o": optimizer.state_dict()}, "y")'
    assert codes(HEAD + LOOP.format(save=save + regular)) == [f"HS170:{line}"]


def test_a_printed_name_is_no_checkpoint_key():
    """`print("scaler", ...)` saves nothing."""
    log = 'print("scaler", scaler.get_scale())\n    torch.save({"o": optimizer.state_dict()}, "x")'
    assert codes(HEAD + LOAD + LOOP.format(save=log)) == ["HS170:11"]


def test_a_base_class_that_saves_what_a_derived_one_trains():
    """The checkpoint of a base class contains the optimizer that the loop of a derived class steps."""
    text = (
        "import torch\nclass Base:\n    def save(self):\n        torch.save({'optim': self.optimizer.state_dict()}, 'x')\n"
        "    def load(self):\n        self.optimizer.load_state_dict(torch.load('x')['optim'])\n"
        "class Trainer(Base):\n    def __init__(self):\n        self.scaler = torch.amp.GradScaler('cuda')\n"
        "    def fit(self):\n        for x in self.data:\n            self.optimizer.zero_grad()\n"
        "            with torch.autocast('cuda', dtype=torch.float16):\n                loss = self.net(x).mean()\n"
        "            self.scaler.scale(loss).backward()\n            self.scaler.step(self.optimizer)\n            self.scaler.update()\n"
    )
    assert codes(text) == ["HS170:4"]


KEPT = (
    "import torch\nclass Base:\n    def __init__(self, amp):\n        self.scaler = torch.amp.GradScaler('cuda'{enabled}) if amp else None\n"
    "    def _save_checkpoint(self, epoch):\n        torch.save({{'epoch': epoch, 'optim': self.optimizer.state_dict(){more}}}, 'x')\n"
    "    def _resume(self):\n        self.optimizer.load_state_dict(torch.load('x')['optim'])\n{rest}"
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["HS170:6"]),
        ({"more": ", 'scale': self.scaler.state_dict()"}, []),
        ({"enabled": ", enabled=False"}, []),
        ({"rest": "    def fit(self):\n        for x in self.data:\n            self.optimizer.step()\n"}, []),
    ],
    ids=["kept", "saved", "disabled", "steps without it"],
)
def test_a_base_class_that_keeps_the_scaler_of_classes_elsewhere(changes, expected):
    """A class that creates the scaler and saves the optimizer leaves the steps to a class of another file."""
    text = KEPT.format(**{"enabled": "", "more": "", "rest": "", **changes})
    assert [code for code in codes(text) if code.startswith("HS170")] == expected


def test_an_optimizer_with_the_name_of_a_setting():
    """`save_ckpt(model, opt)` saves the optimizer `opt` that the scaler steps, and not one that only a setting names."""
    text = HEAD + LOOP.replace("optimizer", "opt").format(save="save_ckpt(model, {}, step)")
    text += "opt.load_state_dict(torch.load(path))\n"
    reported = [codes(text.format(name)) for name in ("opt", "args.opt")]
    assert [["HS170" in code for code in lines] for lines in reported] == [[True], []]


def test_a_long_checkpoint_is_reported_at_the_entry_of_its_optimizer():
    """The finding is where the scaler's entry belongs, not at `torch.save(` far above."""
    entries = "".join(f'        "{name}": {name},\n' for name in "abcdef")
    save = f'torch.save({{\n{entries}        "o": optimizer.state_dict(),\n    }}, "x")'
    text = HEAD + LOAD + LOOP.format(save=save)
    (finding,) = findings(text, "HS170")
    assert text.splitlines()[finding.line - 1].strip() == '"o": optimizer.state_dict(),'


def test_a_checkpoint_with_several_optimizers_lacks_one_scaler():
    """One finding per checkpoint, at the first of its optimizers, names them all."""
    step = "scaler.scale(model(x)).backward()\n        scaler.step(critic_opt)\n        scaler.update()"
    save = 'torch.save({"o": optimizer.state_dict(), "c": critic_opt.state_dict()}, "x")'
    text = HEAD + LOAD + LOOP.format(save=save).replace("scaler.update()", step)
    (finding,) = findings(text, "HS170")
    assert "the state of `optimizer` and `critic_opt` but not" in finding.message


def test_an_optimal_value_is_no_optimizer():
    """The result of `find_optimal_threshold` in a checkpoint has no state that belongs to a scaler."""
    text = HEAD + LOOP.format(save="torch.save({'m': model.state_dict(), 't': found}, 'x')")
    reported = [codes(f"{text}found = {name}(x)\n") for name in ("find_optimal_threshold", "make_optim")]
    assert [any("HS170" in code for code in found) for found in reported] == [False, True]


def test_a_deleted_attribute_is_no_checkpoint_key():
    """`delattr(self, "scaler")` names the scaler without saving it."""
    save = 'torch.save({"o": optimizer.state_dict()}, "x"); {}(trainer, "scaler")'
    reported = [findings(HEAD + LOAD + LOOP.format(save=save.replace("{}", f)), "HS170") for f in ("delattr", "keep")]
    assert [len(found) for found in reported] == [1, 0]


STATES = """\
import torch
from accelerate import Accelerator
class Trainer:
    def start(self, precision):
        self.driver = Accelerator(mixed_precision=precision)
        self.model, self.optimizer = self.driver.prepare(self.model, self.optimizer)
    def step(self, x):
        self.driver.backward(self.model(x))
        self.optimizer.step()
        if 'fp16' in x: pass
    def save(self, path):
        state = self.optimizer.state_dict() if self.optimizer is not None else None
        checkpoint = {{}}
        {entry}
        {scaler}
        torch.save(checkpoint, path)
    def load(self, path):
        self.optimizer.load_state_dict(torch.load(path)['optimizer'])
"""


@pytest.mark.parametrize(
    ("entry", "scaler", "expected"),
    [
        ("checkpoint['optimizer'] = state", "pass", [14]),
        ("checkpoint['train']['optimizer'] = state", "pass", [14]),
        ("checkpoint = {'optimizer': state}", "pass", [12]),
        ("checkpoint['optimizer'] = state", "checkpoint['scaler'] = self.driver.scaler.state_dict()", []),
        ("print(state)", "pass", []),
    ],
)
def test_a_state_is_followed_into_the_checkpoint(entry, scaler, expected):
    """`checkpoint["optimizer"] = state` saves a state that an earlier line reads, and is where the scaler is missing."""
    text = STATES.format(entry=entry, scaler=scaler)
    assert [f.line for f in findings(text, "HS170")] == expected


SPREAD = """\
import torch
from library import load_checkpoint, save_checkpoint
precision = config.precision
scaler = torch.amp.GradScaler("cuda") if precision == "float16" else None
if precision == "float8" and not AVAILABLE:
    raise ImportError
parts = {parts}
best = dict(parts)
best["path"] = "best"
start = load_checkpoint(**parts)
for epoch in range(start, 9):
    for x in loader:
        if precision == "float16" and scaler is not None:
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()
    save_checkpoint(**parts, epoch=epoch)
    if improved:
        save_checkpoint(**best, epoch=epoch)
"""


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ('{"models": model, "optimizer": optimizer, "path": "x"}', [7]),
        ('{"models": model, "optimizer": optimizer, "scaler": scaler}', []),
        ('{"models": model, "path": "x"}', []),
    ],
)
def test_the_dictionary_of_a_checkpoint_is_reported_once(parts, expected):
    """A checkpoint passed as **parts lacks the scaler where the dictionary is written, however often it is saved."""
    assert [f.line for f in findings(SPREAD.format(parts=parts), "HS170")] == expected


SAVED = 'torch.save({"o": optimizer.state_dict(), "s": scaler.state_dict()}, "x")'


@pytest.mark.parametrize(
    "load",
    [
        "for name, part in optimizers.items():\n    part.load_state_dict(state[name])\n",
        "target = model.module if distributed else model\ntarget.load_state_dict(state['m'])\n",
        "other_optimizer = make() if two else None\nother_optimizer.load_state_dict(state['o2'])\n",
    ],
)
def test_restoring_other_objects_does_not_restore_the_scaler(load):
    """A loop over optimizers or a choice between models restores no scaler."""
    assert [f.code for f in findings(HEAD + LOAD + load + LOOP.format(save=SAVED), "HS171")] == ["HS171"]


@pytest.mark.parametrize(
    "load",
    [
        "for name, part in parts.items():\n    part.load_state_dict(state[name])\n",
        "part = getattr(self, name)\npart.load_state_dict(state[name])\n",
        "scaler.load_state_dict(state['s'])\n",
    ],
)
def test_restoring_an_unknown_object_may_restore_the_scaler(load):
    """A variable that may be the scaler keeps HS171 silent."""
    assert findings(HEAD + LOAD + load + LOOP.format(save=SAVED), "HS171") == []


def test_scaler_saved_but_stepped_in_another_file():
    """A scaler that a training function of another file steps, or a subclass of this class, must be restored too."""
    function = (
        "import torch\nfrom engine import train_one_epoch\nscaler = torch.amp.GradScaler('cuda') if amp else None\n" + LOAD
        + "for epoch in range(9):\n    train_one_epoch(model, optimizer, scaler)\n    " + SAVED + "\n"
    )  # fmt: skip
    assert [f.line for f in findings(function, "HS171")] == [8]
    base = (
        "import torch\nclass Runner:\n    def __init__(self):\n        self.scaler = torch.amp.GradScaler('cuda')\n"
        "    def save(self):\n        torch.save({'o': self.optimizer.state_dict(), 's': self.scaler.state_dict()}, 'x')\n"
        "    def load(self):\n        self.optimizer.load_state_dict(torch.load('x')['o'])\n"
    )
    assert [f.line for f in findings(base, "HS171")] == [6]
    assert findings(base + "        self.scaler.load_state_dict(torch.load('x')['s'])\n", "HS171") == []


def test_scaler_behind_a_property():
    """`self.scaler`, a property that returns `self._scaler`, is the scaler that a training function receives."""
    text = (
        "import torch\nclass Runner:\n    def __init__(self):\n        self._scaler = None\n    @property\n    def scaler(self):\n"
        "        if self._scaler is None:\n            self._scaler = torch.amp.GradScaler('cuda')\n        return self._scaler\n"
        "    def train(self):\n        for epoch in range(9):\n            self.task.train_epoch(self.model, self.optimizer, scaler=self.scaler)\n"
        "            self.save()\n    def save(self):\n        torch.save({'o': self.optimizer.state_dict()}, 'x')\n"
        "    def load(self):\n        self.optimizer.load_state_dict(torch.load('x')['o'])\n"
    )
    assert [f.line for f in findings(text, "HS170")] == [15]
    assert findings(text.replace("dict()}", "dict(), 's': self.scaler.state_dict()}"), "HS170") == []


def test_scaler_saved_by_a_helper_and_not_restored():
    """A helper that saves model, optimizer and scaler does not restore them where the script restores the optimizer itself."""
    save = "lm_checkpoint(config, model=model, optimizer=optimizer, scaler=scaler)"
    text = HEAD + LOAD + LOOP.format(save=save)
    assert [f.line for f in findings(text, "HS171")] == [10]
    assert findings(HEAD + LOAD + "scaler.load_state_dict(state['s'])\n" + LOOP.format(save=save), "HS171") == []
    assert (
        findings(HEAD + "resume_checkpoint(model, optimizer, scaler)\n" + LOAD + LOOP.format(save=save), "HS171") == []
    )


LOOKED_UP = """\
import torch
from library import load_checkpoint, save_checkpoint, restart_from_checkpoint
scaler = torch.amp.GradScaler("cuda")
checkpoint = torch.load("x.pt")
optimizer.load_state_dict(checkpoint["optimizer"])
{use}
for epoch in range(9):
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}}, "x.pt")
"""


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ('has_scale = "scaler" in checkpoint', ["HS170"]),
        ('state = checkpoint.get("scaler")', ["HS170"]),
        ('state = checkpoint["scaler"]', ["HS170"]),
        ("restart_from_checkpoint(path, scaler=scaler)", ["HS170"]),
        ('names = ["model", "scaler"]', []),
        ('parts["scaler"] = scaler', []),
        ("save_checkpoint(path, scaler)", []),
    ],
)
def test_looking_up_a_scaler_in_a_checkpoint_saves_none(use, expected):
    """A key that is read, or a function that restores, puts nothing into the checkpoint; a key or call that may write does."""
    assert [f.code for f in findings(LOOKED_UP.format(use=use), "HS170")] == expected


def test_a_function_that_nothing_runs_passes_objects_on():
    """A function without events of its own that hands its `**objects` to another one is near nothing, and no crash."""
    text = (
        "import torch\nscaler = torch.amp.GradScaler('cuda')\ndef save_checkpoint(path, optimizer, **objects):\n"
        "    state = {'o': optimizer.state_dict()}\n    state.update(objects)\n    torch.save(state, path)\n"
        "def save_best(path, optimizer, **objects):\n    save_checkpoint(path, optimizer, **objects)\n"
    )
    assert [f.code for f in findings(text, "HS006", "HS170")] == []


DATA_SCALER = """\
import torch
saved = torch.load(path) if resume else None
{name} = saved.get("{name}") if saved else None
if {name} is None:
    {name} = {create}
{use}
scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
if saved:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.save({{"optimizer": optimizer.state_dict(), "{name}": {name}{more}}}, path)
"""


@pytest.mark.parametrize(
    ("name", "create", "use"),
    [
        ("price_scaler", "prepare(rows)", "low = price_scaler['mean']"),
        ("x_scaler", "fit_x_scaler(rows)", "rows = x_scaler.transform(rows)"),
        ("feature_scaler", "load_parts(rows)", "spread = feature_scaler.scale_"),
    ],
)
def test_a_scaler_of_data_is_not_the_one_of_the_loss(name, create, use):
    """It is indexed or transforms data: a checkpoint with it still lacks the GradScaler, and nothing of it is to be restored."""
    text = DATA_SCALER.format(name=name, create=create, use=use, more="")
    assert [f.line for f in findings(text, "HS170")] == [18]
    assert findings(text, "HS171") == []
    both = DATA_SCALER.format(name=name, create=create, use=use, more=', "scaler": scaler.state_dict()')
    assert findings(both, "HS170") == []
    assert [f.line for f in findings(both, "HS171")] == [18]


def test_entries_of_a_dictionary_of_scalers_are_scalers():
    """`scalers["g"].step(optimizer)` is a step of a GradScaler."""
    text = DATA_SCALER.format(name="parts", create="{}", use="", more=', "scalers": scalers["g"].state_dict()')
    text = text.replace("scaler = torch", 'scalers = {"g": None}\nscalers["g"] = torch').replace(
        "    scaler.", '    scalers["g"].'
    )
    assert findings(text, "HS170") == []


FINAL = """\
import torch
scaler = torch.amp.GradScaler("cuda")
optimizer.load_state_dict(torch.load("x")["o"])
for epoch in range(9):
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
    {save}
torch.save({{"m": model.state_dict(), "o": optimizer.state_dict()}}, "final")
"""


@pytest.mark.parametrize(
    ("save", "lines"),
    [('torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, "last")', [9]), ("print(epoch)", [10])],
)
def test_a_final_checkpoint_counts_only_where_no_other_is_written(save, lines):
    """A script that saves its optimizer during the training and after it is reported at the first."""
    assert [f.line for f in findings(FINAL.format(save=save), "HS170")] == lines


PIPELINE = "from sklearn.pipeline import Pipeline\nfrom sklearn.preprocessing import StandardScaler\n"


@pytest.mark.parametrize(
    ("before", "is_reported"),
    [
        ('columns = Pipeline([("imputer", Imputer()), ("scaler", StandardScaler())])\n', True),
        ('columns = build({"scaler": StandardScaler(), "bins": 3})\n', True),
        ('parts = [("model", model), ("scaler", scaler)]\n', False),
        ('parts = {"scaler": scaler.state_dict}\n', False),
    ],
)
def test_a_scaler_of_data_is_no_state_of_the_scaler(before, is_reported):
    """HS170 is silent for any entry with that name, except one that scales data."""
    text = PIPELINE + HEAD + before + LOAD + LOOP.format(save='torch.save({"o": optimizer.state_dict()}, "x")')
    assert ("HS170" in {f.code for f in findings(text)}) == is_reported


COUNTED = """\
import torch

class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")
        self.epoch = 0

    def fit(self, epochs):
        {loop}
            for x in self.loader:
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = self.model(x)
                self.optimizer.zero_grad()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            torch.save({{"model": self.model.state_dict(), "scaler": self.scaler.state_dict(), "epoch": self.epoch}}, "x")

    def restore(self):
        state = torch.load("x")
        self.model.load_state_dict(state["model"])
        self.epoch = state["epoch"]
"""


@pytest.mark.parametrize(
    ("loop", "is_reported"),
    [
        ("for epoch in range(self.epoch + 1, epochs):", True),
        ("for epoch in range(self.epoch, epochs):", True),
        ("while self.epoch < epochs:", True),
        ("for epoch in range(epochs):", False),  # the counter is only shown
        ("for epoch in range(1, self.epoch):", False),
    ],
)
def test_a_run_that_starts_at_a_restored_counter(loop, is_reported):
    """HS171 where the loop continues from the counter of the checkpoint; the weights alone may be for evaluation."""
    assert bool(findings(COUNTED.format(loop=loop), "HS171")) == is_reported


RESTORED = """\
import torch
def load(path, model):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    return {result}
scaler = torch.amp.GradScaler("cuda")
{start} = load("x", model)
for epoch in range({first}, 9):
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({{"model": model.state_dict(), "scaler": scaler.state_dict(), "epoch": epoch}}, "x")
"""


@pytest.mark.parametrize(
    ("result", "start", "first", "is_reported"),
    [
        ('state["epoch"]', "start", "start", True),
        ('int(state.get("epoch", 0))', "start", "start", True),
        ('state["best"], state["epoch"]', "best, start", "start", True),
        ('state["best"], state["epoch"]', "best, start", "best", False),
        ('cfg["epoch"]', "start", "start", False),
        ("model", "model", "0", False),
    ],
)
def test_a_counter_that_a_function_returns(result, start, first, is_reported):
    """The function that loads the checkpoint returns where the run continues."""
    text = RESTORED.format(result=result, start=start, first=first)
    assert bool(findings(text, "HS171")) == is_reported


CHANGED = """\
import torch
def train(cfg, model, optimizer, loader):
    {device}
    scaler = torch.amp.GradScaler("cuda", enabled=cfg.use_amp)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast(cfg.device, enabled=cfg.use_amp):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
NO_CUDA = 'if not torch.cuda.is_available():\n        cfg.device = "cpu"'


@pytest.mark.parametrize(
    ("device", "is_idle"),
    [
        (NO_CUDA, False),
        (NO_CUDA + '\n    elif cfg.small:\n        cfg.device = "cpu"', False),
        ('cfg.device = "cpu"', True),
        (NO_CUDA + '\n    else:\n        cfg.device = "cpu"', True),
    ],
)
def test_a_device_that_is_changed_under_a_condition(device, is_idle):
    """Where `cfg.device` becomes "cpu" only without CUDA, autocast is not always in bfloat16."""
    assert bool(findings(CHANGED.format(device=device), "HS120")) == is_idle


NEVER_RESTORED = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision={precision})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(9):
    for x in loader:
        accelerator.backward(model(x))
        optimizer.step()
        optimizer.zero_grad()
{save}
"""
STATE = 'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)'


@pytest.mark.parametrize(
    ("precision", "save", "expected"),
    [
        ("'fp16'", f"    {STATE}", [(10, "advice")]),
        ("'fp16'", f"    {STATE}\n    if epoch == 5:\n        {STATE}", [(10, "advice")]),
        ("'bf16'", f"    {STATE}", []),
        ("precision", f"    {STATE}", []),
        ("'fp16'", STATE, []),  # once, after the training
        ("'fp16'", "    accelerator.save_state(path)", []),
    ],
)
def test_an_accelerator_whose_checkpoint_nothing_restores(precision, save, expected):
    """HS170 is one advice for a checkpoint that an Accelerator in fp16 writes regularly without its scaler."""
    text = NEVER_RESTORED.format(precision=precision, save=save)
    assert [(f.line, f.severity) for f in findings(text, "HS170")] == expected


BEST = """\
import torch
scaler = torch.amp.GradScaler("cuda")
state = torch.load("x")
optimizer.load_state_dict(state["optimizer"])
{load}
for epoch in range(9):
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({{"optimizer": optimizer.state_dict(){last}}}, "last.pt")
    if score > best:
        {best}
"""
RESTORE = 'scaler.load_state_dict(state["scaler"])'
ENTRY = ', "scaler": scaler.state_dict()'


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        ('torch.save({"optimizer": optimizer.state_dict()}, "best.pt")', [13]),
        (
            'c = {"optimizer": optimizer.state_dict()}\n        c["epoch"] = epoch\n        torch.save(c, "best.pt")',
            [13],
        ),
        ('torch.save({"optimizer": optimizer.state_dict()' + ENTRY + '}, "best.pt")', []),
        (
            'c = {"optimizer": optimizer.state_dict()}\n        c["scaler"] = scaler.state_dict()\n        torch.save(c, "b")',
            [],
        ),
        ('c = {"optimizer": optimizer.state_dict()}\n        c.update(more)\n        torch.save(c, "b")', []),
        ('c = {"optimizer": optimizer.state_dict()}\n        extend(c)\n        torch.save(c, "b")', []),
        ('torch.save({**state, "optimizer": optimizer.state_dict()}, "best.pt")', []),
        ('snapshot = {"optimizer": optimizer.state_dict()}\n        keep(snapshot)', []),
        ('torch.save({"model": model.state_dict()}, "best.pt")', []),
        ('torch.save(model.state_dict(), "best.pt")', []),
    ],
)
def test_one_of_several_checkpoints_without_the_scaler(best, expected):
    """The best checkpoint has the optimizer and not the scaler, which the last one has and a resumed run restores."""
    assert [f.line for f in findings(BEST.format(load=RESTORE, last=ENTRY, best=best), "HS170")] == expected
    assert findings(BEST.format(load="", last=ENTRY, best=best), "HS170") == []


STATE = """\
import torch
from dataclasses import dataclass
@dataclass
class TrainState:
    optimizer: torch.optim.Optimizer
    scaler: {kind}
    def state_dict(self):
        return {{"optimizer": self.optimizer.state_dict(){saved}}}
    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optimizer"])
def train_step(state, x):
    state.scaler.scale(model(x)).backward()
    state.scaler.step(state.optimizer)
    state.scaler.update()
def fit(loader):
    state = TrainState(make_optimizer(), torch.amp.GradScaler("cuda"))
    for x in loader:
        train_step(state, x)
    torch.save(state.state_dict(), "x")
"""


@pytest.mark.parametrize(
    ("kind", "saved", "lines"),
    [
        ("torch.amp.GradScaler", "", [8]),
        ("torch.amp.GradScaler | None", "", [8]),
        ("torch.amp.GradScaler", ', "scaler": self.scaler.state_dict()', []),
    ],
)
def test_the_state_of_a_training_in_a_dataclass(kind, saved, lines):
    """The steps are those of the scaler that the dataclass has as a field, in whichever function."""
    assert [f.line for f in findings(STATE.format(kind=kind, saved=saved), "HS170")] == lines
