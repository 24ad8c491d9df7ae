"""Classes and functions that wrap mixed precision for other files: names for several versions, calls by verb, documented dtypes."""

import pytest

from check_scripts import findings


def lines(text, code):
    """The lines at which a rule is reported."""
    return [f.line for f in findings(text, code)]


SAVES = """\
import torch
class Trainer:
    def _write(self, folder, model, optimizer, scaler):
        torch.save(model.state_dict(), folder)
        torch.save(optimizer.state_dict(), folder)
        self.{name}(folder, scaler)
    def _read(self, optimizer, folder):
        optimizer.load_state_dict(torch.load(folder))
"""


@pytest.mark.parametrize("name", ["_save_scaler", "store_scaler", "_dump_grad_scaler"])
def test_a_method_that_saves_the_scaler_is_no_scaler(name):
    """HS170: `self._save_scaler(folder, scaler)` of another file saves the scaler, and steps nothing."""
    assert lines(SAVES.format(name=name), "HS170") == []


PROBED = """\
import torch
_amp = getattr(torch, "amp", None)
if _amp is not None and hasattr(_amp, "autocast"):
    autocast = {modern}
else:
    from torch.cuda.amp import autocast
def region(device, enabled):
    {region}
"""
TRIED = """\
try:
        return autocast(device_type=device, enabled=enabled)
    except {caught}:
        return autocast(enabled=enabled)
"""


@pytest.mark.parametrize("modern", ["_amp.autocast", "getattr(_amp, 'autocast')"])
@pytest.mark.parametrize("code", ["HS190", "HS143"])
def test_an_import_for_old_versions_is_a_choice(modern, code):
    """A name that is imported from torch.cuda.amp only where torch.amp has none is neither deprecated nor called wrongly."""
    assert (
        lines(PROBED.format(modern=modern, region="return autocast(device_type=device, enabled=enabled)"), code) == []
    )


def test_a_fallback_that_computes_nothing_is_no_choice():
    """HS190: a null context in the place of the import leaves torch.cuda.amp as the only autocast."""
    text = PROBED.format(modern="None", region="return autocast(enabled=enabled)")
    assert lines(text, "HS190") == [6]


@pytest.mark.parametrize(("caught", "expected"), [("TypeError", []), ("Exception", []), ("ValueError", [4])])
def test_a_handled_type_error_is_a_question(caught, expected):
    """HS143: `device_type=` in a `try` asks whether the installed version accepts it, if the TypeError is handled."""
    text = "from torch.cuda.amp import autocast\ndef region(device, enabled):\n    " + TRIED.format(caught=caught)
    assert lines(text, "HS143") == expected


MEASURED = """\
import torch
from contextlib import nullcontext
def measure(model, loader, loss_fn):
    def run(use_amp):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
        {region}
        for x, y in loader:
            optimizer.zero_grad()
            with ctx:
                loss = loss_fn(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    run(use_amp=False)
    run(use_amp=True)
"""
CHOSEN = "if use_amp:\n            ctx = {cast}\n        else:\n            ctx = nullcontext()"
CAST = "torch.autocast('cuda', dtype=torch.float16)"


@pytest.mark.parametrize(
    ("region", "expected"),
    [
        (CHOSEN.format(cast=CAST), []),
        (f"ctx = {CAST} if use_amp else nullcontext()", []),
        (f"ctx = {CAST}", [6]),
    ],
)
def test_a_region_that_the_flag_creates_is_off_without_it(region, expected):
    """HS123: where the flag of the scaler decides whether the region exists, nothing is in float16 without it."""
    assert lines(MEASURED.format(region=region), "HS123") == expected


HELPER = '''\
import torch
class Helper:
    """{title}"""
    def __init__(self, model, optimizer, amp_dtype=torch.float16, enabled=True, use_scaler=True):
        """Set up.

        Args:
            amp_dtype: {text}
        """
        {test}
        self.model, self.optimizer = model, optimizer
        self.amp_dtype = amp_dtype
        self.enabled = enabled and torch.cuda.is_available()
        {scaler}

    def region(self):
        return torch.autocast("cuda", dtype=self.amp_dtype, enabled=self.enabled)

    def step(self, loss):
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
'''
EITHER = "torch.float16 or torch.bfloat16"
CREATED = 'self.scaler = torch.amp.GradScaler("cuda")'
SWITCHED = f"if self.enabled:\n            {CREATED}\n        else:\n            self.scaler = None"
REJECTED = "if amp_dtype not in (torch.float16, torch.bfloat16):\n            raise ValueError(amp_dtype)"


@pytest.mark.parametrize(
    "parts",
    [
        {"text": EITHER},
        {"text": EITHER, "scaler": f"{CREATED} if self.enabled else None"},
        {"text": EITHER, "scaler": 'self.scaler = torch.amp.GradScaler("cuda", enabled=self.enabled)'},
        {"title": "FP16/BF16 training with a loss scale."},
        {"test": REJECTED},
    ],
)
def test_a_scaler_for_a_dtype_that_may_be_either_is_idle_in_bfloat16(parts):
    """HS120: a helper that takes both formats, by its own words or its own test, and scales the loss in both."""
    defaults = {"title": "Mixed precision.", "text": "The dtype.", "test": "pass", "scaler": SWITCHED}
    assert len(lines(HELPER.format(**defaults | parts), "HS120")) == 1


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"text": EITHER, "scaler": f"{CREATED} if self.enabled and amp_dtype == torch.float16 else None"},
        {"text": EITHER, "scaler": f"{CREATED} if use_scaler else None"},
        {"text": EITHER, "scaler": f"needs = amp_dtype is torch.float16\n        {CREATED} if needs else None"},
        {"test": "if amp_dtype not in (torch.float16, torch.float32):\n            raise ValueError(amp_dtype)"},
    ],
)
def test_a_scaler_that_follows_the_dtype_is_right(parts):
    """HS120: silent where the helper says nothing of bfloat16, or something else than mixed precision switches the scaler."""
    defaults = {"title": "Mixed precision.", "text": "The dtype.", "test": "pass", "scaler": SWITCHED}
    assert lines(HELPER.format(**defaults | parts), "HS120") == []


REPLACED = """\
import torch
class Trainer:
    def __init__(self, model, optimizer, config):
        self.model, self.optimizer = model, optimizer
        if config.use_amp:
            self.scaler = torch.amp.GradScaler("cuda")
        {between}
        {again}
        if config.half:
            self.scaler = torch.amp.GradScaler("cuda")

    def step(self, x):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("between", "again", "expected"),
    [
        ("self.clip = make_clip(config)", "self.scaler = None", [6]),
        ("self.clip = make_clip(config)", "self.scaler: torch.amp.GradScaler | None = None", [6]),
        ("pass", "self.scaler = torch.amp.GradScaler('cuda', init_scale=1024.0)", [6]),
        ("pass", "pass", []),
        ("self.setup()", "self.scaler = None", []),
        ("register(self)", "self.scaler = None", []),
        ("register(self.scaler)", "self.scaler = None", []),
        ("if not config.use_amp: self.scaler = None", "pass", []),
        ("if config.debug: return", "self.scaler = None", []),
    ],
)
def test_a_scaler_that_is_replaced_before_its_use_is_unused(between, again, expected):
    """HS122: the next assignment replaces a scaler, whatever the conditions, and nothing between them may read it."""
    assert lines(REPLACED.format(between=between, again=again), "HS122") == expected


CALLED = """\
import torch
class Trainer:
    def training_step(self, x, {parameter}, last=False):
        {clear}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.model(x)
            {divide}
        loss.backward()
        return loss

    def step(self):
        self.optimizer.step()
        {end}
"""


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, [("advice", 4)]),
        ({"parameter": "accumulation_steps=4"}, [("warning", 4)]),
        ({"parameter": "accumulation_steps"}, [("warning", 4)]),
        ({"divide": "loss /= accumulation_steps"}, [("advice", 4)]),
        ({"clear": "self.model.zero_grad(set_to_none=True)"}, [("advice", 4)]),
        ({"clear": "pass", "end": "self.optimizer.zero_grad()"}, []),
        ({"clear": "if last: self.optimizer.zero_grad()"}, []),
        ({"clear": "if x.i % accumulation_steps == 0: self.optimizer.zero_grad()"}, []),
        ({"divide": "rate = 1.0 / accumulation_steps"}, []),
        ({"divide": "pass"}, []),
    ],
)
def test_a_step_that_clears_on_each_call_accumulates_nothing(parts, expected):
    """HS181: a function that divides the loss by its parameter for the window has to leave the clearing to its end."""
    defaults = {
        "parameter": "accumulation_steps=1",
        "clear": "self.optimizer.zero_grad()",
        "divide": "loss = loss / accumulation_steps",
        "end": "pass",
    }
    reported = findings(CALLED.format(**defaults | parts), "HS181")
    assert [(str(f.severity), f.line) for f in reported] == expected


SETTINGS = """\
from dataclasses import dataclass
import torch
@dataclass
class AmpConfig:
    enabled: bool = True
    init_scale: float = 65536.0
    growth_factor: float = 2.0
    growth_interval: int = 2000
    backoff: float = 0.5
    max_norm: float = 1.0
    {field}
class Trainer:
    def __init__(self, model, optimizer, config: AmpConfig):
        self.model, self.optimizer, self.config = model, optimizer, config
        {create}
    def step(self, x):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.config.enabled):
            loss = self.model(x)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        {read}
"""
CREATE = (
    "c = config\n        self.scaler = torch.amp.GradScaler('cuda', c.init_scale, c.growth_factor, c.backoff, "
    "c.growth_interval, enabled=c.enabled)"
)


@pytest.mark.parametrize(
    ("field", "read", "expected"),
    [
        ("loss_scale: str = 'dynamic'", "pass", [11]),
        ("max_scale: float = 2.0**24", "pass", [11]),
        ("min_loss_scale: float = 1.0", "pass", [11]),
        ("loss_scale: str = 'dynamic'", "print(self.config.loss_scale)", []),
        ("max_scale: float = 2.0**24", "self.limit(self.config.max_scale)", []),
        ("image_scale: float = 2.0", "pass", []),
    ],
)
def test_a_setting_of_the_loss_scale_that_nothing_reads_has_no_effect(field, read, expected):
    """HS139: a field for the loss scale, among those that the scaler is created with."""
    assert lines(SETTINGS.format(field=field, read=read, create=CREATE), "HS139") == expected


def test_a_limit_of_a_scale_without_a_scaler_is_of_something_else():
    """HS139: `max_scale` says nothing of the loss where the file creates no scaler."""
    text = SETTINGS.format(field="max_scale: float = 2.0", read="pass", create="self.scaler = config.scaler")
    assert lines(text, "HS139") == []
