"""HS176: scalers that may be None, and tests of them under other names."""

import pytest

from check_scripts import reported

LOOP = """\
import torch

def train(args, model, optimizer, loader):
    {create}
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
            loss = model(x, y)
        if {test}:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        {step}
"""
OPTIONAL = 'scaler = torch.amp.GradScaler("cuda") if args.amp else None'
ALWAYS = "scaler.step(optimizer)\n        scaler.update()"
EARLY = "if not args.amp:\n            optimizer.step()\n            continue\n        " + ALWAYS
GUARDED = "if {0}:\n            scaler.step(optimizer)\n            scaler.update()\n        else:\n            optimizer.step()"


@pytest.mark.parametrize("test", ["args.amp", "scaler is not None", "scaler"])
def test_a_step_without_the_test_of_the_backward_is_reported(test):
    """The backward tests the scaler, by its flag or by itself, and the step does not."""
    assert "HS176" in reported(LOOP.format(create=OPTIONAL, test=test, step=ALWAYS))


@pytest.mark.parametrize(
    "step", [GUARDED.format("args.amp"), GUARDED.format("scaler is not None"), GUARDED.format("use_amp"), EARLY]
)
def test_a_step_under_any_test_of_mixed_precision_is_accepted(step):
    """The flag, the scaler, a flag under another name, or a branch that leaves the iteration."""
    assert "HS176" not in reported(LOOP.format(create=OPTIONAL, test="args.amp", step=step))


def test_a_scaler_that_always_exists_is_accepted():
    """A disabled scaler is not None."""
    create = 'scaler = torch.amp.GradScaler("cuda", enabled=args.amp)'
    assert "HS176" not in reported(LOOP.format(create=create, test="args.amp", step=ALWAYS))


SPLIT = """\
import torch

class Trainer:
    def __init__(self, config, device, vocab):
        if vocab is not None and config.vocab != vocab:
            raise ValueError(vocab)
        self.scaler = torch.amp.GradScaler("cuda") if {condition} else None

    def step(self, x, config):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x)
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()
        {test}
        self.optimizer.zero_grad()
"""
STEP = "self.scaler.step(self.optimizer); self.scaler.update()"


@pytest.mark.parametrize(
    "condition",
    [
        "config.precision == 'fp16' and device.type == 'cuda'",
        "config.amp and not config.bf16",
        "not config.fp32",
        "config.amp and (self.scaler or True)",
    ],
)
@pytest.mark.parametrize(("test", "expected"), [(f"if self.scaler is not None: {STEP}", False), (STEP, True)])
def test_a_test_of_the_scaler_implies_every_part_of_its_condition(condition, test, expected):
    """`a and b` is tested by the scaler itself, and a setting that raises before is no setting without a scaler."""
    assert ("HS176" in reported(SPLIT.format(condition=condition, test=test))) == expected


STORED = """\
import torch
scaler = torch.amp.GradScaler("cuda") if args["precision"] == "fp16" else None
scaled = scaler is not None
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    if scaled:
        scaler.scale(loss).backward()
    else:
        loss.backward()
    if {step}:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
"""


@pytest.mark.parametrize(("step", "expected"), [("scaled", False), ("loss.isfinite()", True)])
def test_a_variable_that_stores_the_test_of_the_scaler_is_that_test(step, expected):
    """`scaled = scaler is not None` decides like the comparison itself."""
    assert ("HS176" in reported(STORED.format(step=step))) == expected


COMBINED = """\
import torch

def main(args, model, optimizer, loader):
    use_amp = args.use_amp and torch.cuda.is_available()
    scaler = torch.amp.GradScaler("cuda") if use_amp else None
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", enabled=use_amp):
            loss = model(x, y)
        if {test}:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
"""


def test_a_test_of_one_part_of_the_flag_is_not_enough():
    """`use_amp` is `args.use_amp and torch.cuda.is_available()`: without a GPU, `args.use_amp` is true and the scaler None."""
    assert "HS176" in reported(COMBINED.format(test="args.use_amp"))
    assert "HS176" not in reported(COMBINED.format(test="use_amp"))
    assert "HS176" not in reported(COMBINED.format(test="scaler is not None"))


SECTION = """\
import torch
def main(config, train_cfg, hps):
    use_amp = {flag}
    scaler = torch.amp.GradScaler("cuda") if use_amp else None
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", enabled=use_amp):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("train_cfg.fp16 and device.type == 'cuda'", True),
        ("hps.train.fp16_run", True),
        ("torch.cuda.is_available()", False),
        ("True", False),
    ],
)
def test_a_section_of_the_settings_is_an_option(flag, expected):
    """`train_cfg` and `hps` are settings like `cfg`."""
    assert ("HS176" in reported(SECTION.format(flag=flag))) == expected


DEVICES = """\
import torch
class Trainer:
    def __init__(self, config):
        self.config = config
        self.device = {device}
        if self.config.mixed_precision:
            device_type = self.device.type
            if device_type in ("cuda", "cpu"):
                self.scaler = torch.amp.GradScaler(device=device_type)
            else:
                self.scaler = None
        else:
            self.scaler = None
    def train_step(self, batch, optimizer):
        optimizer.zero_grad()
        if self.config.mixed_precision:
            with torch.autocast(self.device.type, dtype=torch.float16):
                loss = self.model(batch)
            self.scaler.scale(loss).backward()
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            self.model(batch).backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ('torch.device("cuda" if torch.cuda.is_available() else "cpu")', False),
        ('torch.device("cuda:0")', False),
        ('torch.device("mps" if torch.backends.mps.is_available() else "cpu")', True),
        ("torch.device(config.device)", True),
    ],
)
def test_a_test_of_the_device_that_every_device_of_the_file_passes_is_no_condition(device, expected):
    """With a device that is "cuda" or "cpu", `device_type in ("cuda", "cpu")` holds in every run."""
    assert ("HS176" in reported(DEVICES.format(device=device))) == expected


CLASS_DEFAULT = """\
import torch

class Fitter:
    scaler = None

    def __init__(self, cfg, model, optimizer):
        self.cfg, self.model, self.optimizer = cfg, model, optimizer
        if cfg.fp16:
            self.scaler = torch.amp.GradScaler("cuda")

    def step(self, x):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.cfg.fp16):
            loss = self.model(x)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def save(self):
        return self.scaler.state_dict() if self.scaler is not None else None

fitter = Fitter(cfg, model, optimizer)
for x in loader:
    fitter.step(x)
fitter.save()
"""


def test_a_default_in_the_class_is_a_value_of_the_attribute():
    """`scaler = None` in the body of a class is what a test of `self.scaler` asks about."""
    assert "HS176" not in reported(CLASS_DEFAULT)
