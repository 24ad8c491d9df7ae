"""HS139: flags that are copied from settings, fields for one phase, and formats that are chosen for nothing."""

import pytest

from check_scripts import findings

TRAINER = """\
import torch
class Trainer:
    def __init__(self, model, args):
        self.model, self.lr = model, args.lr
        {store}
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        self.scaler = torch.amp.GradScaler("cuda")
    def step(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16{flag}):
            loss = loss_fn(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""


@pytest.mark.parametrize(
    ("store", "flag", "is_reported"),
    [
        ("self.use_amp = args.use_amp", "", True),
        ("self.amp = bool(args['amp'])", "", True),
        ("self.fp16 = args.get('mixed_precision', True)", "", True),
        ("self.use_amp = getattr(args, 'use_amp', True)", "", True),
        ("self.use_amp = args.use_amp", ", enabled=self.use_amp", False),
        ("self.use_amp = args.use_amp", ", enabled=args.use_amp", False),
        ("self.use_amp = args.use_amp and setup(args.use_amp)", "", False),
    ],
)
def test_flags_copied_from_settings(store, flag, is_reported):
    """A flag that a class copies from its settings and never reads is reported where mixed precision is always on."""
    text = TRAINER.replace("{store}", store).replace("{flag}", flag)
    assert any("stored and never read" in f.message for f in findings(text, "HS139")) is is_reported


SETTINGS = """\
from dataclasses import dataclass
import torch
@dataclass
class Args:
    lr: float = 1e-3
    epochs: int = 3
    batch: int = 8
    seed: int = 0
    amp: bool = True
    {field}: bool = False
a = Args()
model, loader, optimizer = build(a.batch, a.seed, a.lr)
scaler = torch.amp.GradScaler("cuda", enabled=a.amp)
for _ in range(a.epochs):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled={test}):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("field", "test", "is_reported"),
    [
        ("amp_rollout", "a.amp", True),
        ("eval_fp16", "a.amp", True),
        ("bf16_for_inference", "a.amp", True),
        ("amp_rollout", "a.amp or a.amp_rollout", False),
        ("amplify_test", "a.amp", False),
    ],
)
def test_flags_for_one_phase(field, test, is_reported):
    """A flag for mixed precision in one phase that nothing reads is reported like one for the whole run."""
    assert bool(findings(SETTINGS.replace("{field}", field).replace("{test}", test), "HS139")) is is_reported


LISTED = """\
import torch
dtype = "float16"
keys = [k for k, v in globals().items() if isinstance(v, (int, str))]
exec(open("configurator.py").read())
ptdtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda"{use}):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
{after}
"""


@pytest.mark.parametrize(
    ("use", "after", "is_reported"),
    [("", "", True), (", dtype=ptdtype", "", False), ("", "save(globals())", False)],
)
def test_names_listed_before(use, after, is_reported):
    """`globals()` and `exec` that run before a format is chosen do not read it."""
    text = LISTED.replace("{use}", use).replace("{after}", after)
    assert bool([f for f in findings(text, "HS139") if "ptdtype" in f.message]) is is_reported
