"""Scalers that do not exist, or are not used, on one of the paths of a script: the wrong form is reported, the right one is not."""

import pytest

from check_scripts import reported

FACTORY = """\
import torch

def make_scaler(enabled):
    if not enabled:
        return None
    return torch.amp.GradScaler("cuda")

def save(path, optimizer, scaler):
    torch.save({"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, path)

def main(args, model, optimizer, loader):
    scaler = make_scaler(args.fp16)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.fp16):
            loss = model(x)
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
    save(args.out, optimizer, scaler)
"""
TUPLE = """\
import torch

def setup(cfg, model):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = None
    if cfg.precision == "fp16":
        scaler = torch.amp.GradScaler("cuda")
    return optimizer, scaler

def run(cfg, model, loader):
    optimizer, grad_scaler = setup(cfg, model)
    mixed = cfg.precision in ("fp16", "bf16")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", enabled=mixed):
            loss = model(x)
        if mixed:
            grad_scaler.scale(loss).backward()
            grad_scaler.step(optimizer)
            grad_scaler.update()
        else:
            loss.backward()
            optimizer.step()
"""
PASSED = """\
import torch

def train_epoch(model, loader, optimizer, scaler):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=scaler is not None):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

scaler = torch.amp.GradScaler("cuda") if device == "cuda" else None
train_epoch(model, loader, optimizer, scaler)
"""
CLASS_BODY = """\
import torch

class Trainer:
    scaler = None

    def __init__(self, cfg, model):
        self.cfg, self.model = cfg, model
        self.optimizer = torch.optim.AdamW(model.parameters())
        if cfg.amp:
            self.scaler = torch.amp.GradScaler("cuda")

    def train_step(self, x):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.cfg.amp):
            loss = self.model(x)
        if self.cfg.amp:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""
SETUP = """\
import torch

class Learner:
    def __init__(self, args, net):
        self.args, self.net = args, net
        self.prepare()

    def prepare(self):
        self.optimizer = torch.optim.Adam(self.net.parameters())
        if self.args.precision == "fp16":
            self.scaler = torch.amp.GradScaler("cuda")

    def step(self, x):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", enabled=self.args.precision == "fp16"):
            loss = self.net(x)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""
CHAIN = """\
import torch

def main(args, model, optimizer, loader):
    if args.precision == "fp16":
        scaler = torch.amp.GradScaler("cuda")
        dtype = torch.float16
    elif args.precision == "bf16":
        dtype = torch.bfloat16
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype, enabled=args.precision != "fp32"):
            loss = model(x)
        if args.precision != "fp32":
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
"""
NEVER = """\
import torch

class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters())
        # self.scaler = torch.amp.GradScaler("cuda")

    def train(self, loader):
        for x in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
"""
MISNAMED = """\
import torch

def train(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        amp_scaler.scale(loss).backward()
        amp_scaler.step(optimizer)
        amp_scaler.update()

scaler = torch.amp.GradScaler("cuda")
train(model, loader, optimizer)
"""
ALWAYS_NONE = """\
import torch

class Engine:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = None

    def step(self, x):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x)
        self.optimizer.zero_grad()
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
"""
DECORATED = """\
import torch

@torch.autocast("cuda", dtype=torch.float16)
def policy_loss(policy, batch):
    return policy.log_prob(batch).mean()

def update(policy, optimizer, batches):
    for batch in batches:
        loss = policy_loss(policy, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
NOT_STEPPED = """\
import torch

def train(model, optimizer, loader, cfg):
    scaler = torch.amp.GradScaler("cuda") if cfg.amp else None
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=cfg.amp):
            loss = model(x)
        if scaler is not None:
            scaler.scale(loss).backward()
        else:
            loss.backward()
            optimizer.step()
"""
CALLABLE = """\
import torch

class Clipper:
    def __init__(self, max_norm):
        self.max_norm = max_norm

    def __call__(self, parameters):
        torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)

def fit(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    clipper = Clipper(1.0)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        clipper(model.parameters())
        scaler.step(optimizer)
        scaler.update()
"""
COLLECTED = """\
import torch

def save(path, **objects):
    torch.save({name: o.state_dict() for name, o in objects.items()}, path)

def main(args, model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    if args.resume:
        state = torch.load(args.resume)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    save(args.out, model=model, optimizer=optimizer, scaler=scaler)
"""
AND = """\
import torch

def main(args, model, opt, loader):
    scaler = args.amp and torch.amp.GradScaler("cuda")
    for x in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
"""
TWO_FLAGS = """\
import torch

def main(args, model, opt, loader):
    scaler = None
    if args.amp and torch.cuda.is_available():
        scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        opt.zero_grad()
        if args.amp:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        else:
            model(x).backward()
            opt.step()
"""
CHOSEN_LOSS = """\
import torch

def backward(loss, scaler=None):
    (scaler.scale(loss) if scaler else loss).backward()

def train(model, opt, loader, cfg):
    scaler = torch.amp.GradScaler("cuda") if cfg.fp16 else None
    for x in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=cfg.fp16):
            loss = model(x)
        backward(loss, scaler)
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        if scaler:
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()
"""
METHODS = """\
import torch

class AmpOptimizer:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def step(self):
        for group in self.optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""
INNER_LOOP = """\
import torch

def meta_step(model, tasks, optimizer):
    optimizer.zero_grad()
    total = 0.0
    for support, query in tasks:
        with torch.autocast("cuda", dtype=torch.float16):
            total = total + model(support, query)
    total.backward()
    optimizer.step()
"""
IN_FORWARD = """\
import torch

class Net(torch.nn.Module):
    def __init__(self, use_fp16=True):
        super().__init__()
        self.use_fp16 = use_fp16
        self.body = torch.nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.use_fp16):
            return self.body(x)

def train(loader):
    net = Net().cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x in loader:
        loss = net(x).float().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
BY_OPTIMIZER = """\
import torch

def train(model, optimizer, loader, args):
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
            loss = model(x)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if args.kind == "lamb":
            scaler.step(optimizer)
        else:
            optimizer.step()
        scaler.update()
"""
OTHER_VALUES = """\
import torch

def train(model, optimizer, loader, cfg):
    scaler = torch.amp.GradScaler("cuda") if cfg.dtype == "fp16" else None
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=DTYPES[cfg.dtype]):
            loss = model(x)
        if cfg.dtype in ("fp32",):
            loss.backward()
            optimizer.step()
        elif cfg.dtype == "bf16":
            log(loss)
        if cfg.dtype != "fp32":
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
"""
# The rule, the wrong script, and what to replace to make it right.
CASES = [
    pytest.param("HS176", AND, ('args.amp and torch.amp.GradScaler("cuda")', 'torch.amp.GradScaler("cuda")'), id="and"),
    pytest.param("HS176", TWO_FLAGS, (" and torch.cuda.is_available()", ""), id="one-of-two-flags"),
    pytest.param("HS176", OTHER_VALUES, ('cfg.dtype == "bf16"', 'cfg.dtype == "fp16"'), id="another-value"),
    pytest.param(
        "HS104",
        CHOSEN_LOSS,
        ("torch.nn.utils", "if scaler: scaler.unscale_(opt)\n        torch.nn.utils"),
        id="chosen-loss",
    ),
    pytest.param(
        "HS104", METHODS, ("for group", "self.scaler.unscale_(self.optimizer)\n        for group"), id="methods"
    ),
    pytest.param("HS123", INNER_LOOP, ("float16", "bfloat16"), id="region-in-an-inner-loop"),
    pytest.param("HS123", IN_FORWARD, ("float16", "bfloat16"), id="flag-of-the-model"),
    pytest.param("HS103", BY_OPTIMIZER, ('args.kind == "lamb"', "args.amp"), id="step-chosen-by-a-setting"),
    pytest.param("HS176", FACTORY, ("return None", 'return torch.amp.GradScaler("cuda", enabled=False)'), id="factory"),
    pytest.param("HS176", TUPLE, ('in ("fp16", "bf16")', '== "fp16"'), id="tuple-of-a-function"),
    pytest.param("HS176", PASSED, ('"cuda") if device == "cuda" else None', '"cuda")'), id="tested-in-an-argument"),
    pytest.param(
        "HS176",
        CLASS_BODY,
        ("if cfg.amp:\n            self.scaler", "if True:\n            self.scaler"),
        id="class-body",
    ),
    pytest.param(
        "HS132",
        SETUP,
        ('if self.args.precision == "fp16":\n            self', "self"),
        id="setup",
    ),
    pytest.param(
        "HS132",
        CHAIN,
        ('if args.precision != "fp32":\n            s', 'if args.precision == "fp16":\n            s'),
        id="wider-test",
    ),
    pytest.param("HS132", NEVER, ("# self.scaler", "self.scaler"), id="commented-out"),
    pytest.param("HS132", MISNAMED, ("amp_scaler", "scaler"), id="misnamed"),
    pytest.param("HS123", ALWAYS_NONE, ("= None", '= torch.amp.GradScaler("cuda")'), id="always-none"),
    pytest.param("HS123", DECORATED, ("float16", "bfloat16"), id="decorated-loss"),
    pytest.param(
        "HS156",
        NOT_STEPPED,
        (
            "backward()\n        else",
            "backward()\n            scaler.step(optimizer)\n            scaler.update()\n        else",
        ),
        id="no-step-with-the-scaler",
    ),
    pytest.param(
        "HS104", CALLABLE, ("clipper(model", "scaler.unscale_(optimizer); clipper(model"), id="callable-object"
    ),
    pytest.param(
        "HS171",
        COLLECTED,
        ('(state["optimizer"])', '(state["optimizer"])\n        scaler.load_state_dict(state["scaler"])'),
        id="keyword-objects",
    ),
]


@pytest.mark.parametrize(("code", "text", "change"), CASES)
def test_the_wrong_form_is_reported(code, text, change):
    """The mistake is found in a form that real projects use."""
    assert code in reported(text)


@pytest.mark.parametrize(("code", "text", "change"), CASES)
def test_the_right_form_is_accepted(code, text, change):
    """The same script without its mistake has no error or warning of these rules."""
    assert change[0] in text
    assert not {"HS104", "HS123", "HS132", "HS156", "HS171", "HS176", code} & set(reported(text.replace(*change)))
