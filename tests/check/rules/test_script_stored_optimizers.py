"""A cast is tied to a step through the class hierarchy, and through the list or dictionary that the optimizer is stored in."""

import pytest

from check_scripts import codes, findings, reported

STEP = """
    def step(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(self.net(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self, loader):
        for x, y in loader:
            self.step(x.cuda(), y.cuda())
"""
HEAD = "import torch\nimport torch.nn.functional as F\n"
BASE_CASTS = f"""{HEAD}
class Base:
    def __init__(self, net):
        self.net = net.cuda().half()
        self.optimizer = self.make_optimizer()

    def make_optimizer(self):
        raise NotImplementedError

class Seg(Base):
    def __init__(self, net):
        super().__init__(net)
        self.scaler = torch.amp.GradScaler("cuda")

    def make_optimizer(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-4)
{STEP}
Seg(build()).run(loader)
"""
BASE_STEPS = f"""{HEAD}
class Trainer:
    def setup(self):
        self.build()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cuda")
{STEP}
class MyTrainer(Trainer):
    def build(self):
        self.net = Unet(3, 10)
        self.net.to("cuda", torch.half)

trainer = MyTrainer()
trainer.setup()
trainer.run(loader)
"""
BETWEEN = f"""{HEAD}
class Root:
    def __init__(self):
        self.net = Unet(3, 10).cuda()

class Mid(Root):
    def cast(self):
        self.net.half()

class Leaf(Mid):
    def __init__(self):
        super().__init__()
        self.cast()
        decay, rest = [], []
        for n, p in self.net.named_parameters():
            (decay if p.ndim > 1 else rest).append(p)
        self.optimizer = torch.optim.AdamW([{{"params": decay}}, {{"params": rest, "weight_decay": 0.0}}], lr=1e-3)
        self.scaler = torch.amp.GradScaler("cuda")
{STEP}
Leaf().run(loader)
"""
SIBLINGS = f"""{HEAD}
class Base:
    def run(self, loader):
        for x, y in loader:
            self.step(x.cuda(), y.cuda())

class Infer(Base):
    def __init__(self):
        self.net = Unet(3, 10).cuda().half()

    def step(self, x, y):
        with torch.no_grad():
            print(self.net(x.half()))

class Train(Base):
    def __init__(self):
        self.net = Unet(3, 10).cuda()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cuda")
{STEP}
Train().run(loader)
"""


@pytest.mark.parametrize("text", [BASE_CASTS, BASE_STEPS, BETWEEN], ids=["cast in base", "step in base", "between"])
def test_a_model_belongs_to_its_class_hierarchy(text):
    """A base class casts what a class that extends it trains, and the reverse."""
    assert reported(text) == {"HS160"}


def test_classes_that_extend_the_same_one_have_their_own_models():
    """What one of them casts, the other does not train."""
    assert codes(SIBLINGS) == []


ADAM_G, ADAM_D = "torch.optim.Adam(G.parameters(), lr=1e-4)", "torch.optim.Adam(D.parameters(), lr=1e-4)"
DICTIONARY = f'opts = {{"g": {ADAM_G}, "d": {ADAM_D}}}\n'
LOSSES = """\
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss_g, loss_d = losses(D, G(x), y)
"""
BY_NAME = """\
scalers = {k: torch.amp.GradScaler("cuda") for k in opts}

def update(name, loss):
    opts[name].zero_grad()
    scalers[name].scale(loss).backward()
    scalers[name].step(opts[name])
    scalers[name].update()
"""
CALLS = f'{LOSSES}    update("g", loss_g)\n    update("d", loss_d)\n'
ONE = 'scaler = torch.amp.GradScaler("cuda")\n'
BY_KEY = f"""{ONE}{LOSSES}
    opts["g"].zero_grad()
    scaler.scale(loss_g).backward()
    scaler.step(opts["g"])
    scaler.update()
"""
BY_LOOP = f"""{ONE}{LOSSES}
    for o in opts:
        o.zero_grad()
    scaler.scale(loss_g + loss_d).backward()
    for o in opts:
        scaler.step(o)
    scaler.update()
"""
COPIED = BY_NAME.replace("def update(name, loss):\n", "def update(name, loss):\n    opt = opts[name]\n").replace(
    "step(opts[name])", "step(opt)"
)
HALF = "import torch\nG, D = Gen().cuda(), Disc().cuda()\nG.half()\n"


@pytest.mark.parametrize(
    "text",
    [
        HALF + DICTIONARY + BY_NAME + CALLS,
        HALF.replace("G.half()", "if args.half_g:\n    G.half()") + DICTIONARY + BY_NAME + CALLS,
        HALF + f"opts = dict(g={ADAM_G}, d={ADAM_D})\n" + BY_KEY,
        HALF + DICTIONARY + COPIED + CALLS,
        HALF + f"opts = [{ADAM_G}, {ADAM_D}]\n" + BY_LOOP,
        HALF + DICTIONARY + BY_LOOP.replace("in opts:", "in opts.values():"),
    ],
    ids=["name", "option", "key", "copied", "list", "values"],
)
def test_optimizers_in_containers(text):
    """The scaler steps an entry of a dictionary or a list."""
    assert [f.code for f in findings(text) if f.severity == "error"] == ["HS160"]


@pytest.mark.parametrize(
    "text",
    [
        HALF.replace("G.half()", "teacher = Gen().cuda().half().eval()") + DICTIONARY + BY_NAME + CALLS,
        HALF.replace("G.half()", "D.half()") + DICTIONARY + BY_KEY,
    ],
    ids=["other model", "other key"],
)
def test_other_entries_are_others(text):
    """A model that no optimizer gets, and an optimizer that the scaler never steps."""
    assert "HS160" not in reported(text)
