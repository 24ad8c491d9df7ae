"""Mistakes that simulated runs of whole scripts show, and scripts that stay silent."""

import pytest

from check_scripts import reported
from halfstep.check.simulation.candidates import trains
from simulated_scripts import START, codes

LOOP = """\
scaler = torch.amp.GradScaler("cuda")
for epoch in range(epochs):
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""
WINDOW = """\
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y) / args.accumulate
    scaler.scale(loss).backward()
    {every}
    if (i + 1) % args.accumulate == 0 or i + 1 == len(loader):
        {last}
        scaler.step(optimizer)
        {update}
        optimizer.zero_grad()
    {end}
"""


def window(every="pass", last="scaler.unscale_(optimizer)", update="scaler.update()", end="pass"):
    """An accumulating loop."""
    return WINDOW.format(every=every, last=last, update=update, end=end)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LOOP, []),
        (LOOP.replace("        scaler.unscale_(optimizer)\n", ""), ["HS104"]),
        (LOOP.replace("scaler.scale(loss).backward()", "loss.backward()"), ["HS102"]),
        (LOOP.replace("        scaler.update()\n", ""), ["HS105"]),
        (LOOP.replace("scaler.step(optimizer)", "if norm > 100: continue\n        scaler.step(optimizer)"), ["HS112"]),
        (LOOP.replace("        scaler.unscale_(optimizer)\n", "").replace("scaler.step(optimizer)", "optimizer.step()"), ["HS103", "HS104", "HS107"]),
        (LOOP.replace("        optimizer.zero_grad()\n", "        if i == 0: optimizer.zero_grad()\n"), ["HS156"]),
        (LOOP.replace("        optimizer.zero_grad()\n", ""), []),
        (LOOP.replace("float16", "bfloat16"), ["HS120"]),
        (LOOP.replace("float16", "bfloat16").replace('"cuda")\nfor', '"cuda", enabled=False)\nfor'), []),
        (LOOP.replace("optimizer.zero_grad()", "for p in model.parameters(): p.grad = None"), []),
        (LOOP.replace("        scaler.step(", "        for n, p in model.named_parameters():\n            if 'head' in n: p.grad = None\n        scaler.step("), []),
        (window(), []),
        (window(every="scaler.unscale_(optimizer)", last="pass"), ["HS106"]),
        (window(update="pass", end="scaler.update()"), ["HS107"]),
    ],
    ids=["right", "unscale", "scale", "update", "skip", "bypass", "clear", "fragment", "bf16", "bf16-disabled", "clear-by-hand", "clear-some", "window", "unscale-every", "update-every"],
)  # fmt: skip
def test_a_loop_of_one_script(text, expected):
    """A right loop is silent, and each wrong one has its rule."""
    assert codes(text) == expected


METHODS = """\
class Trainer:
    def __init__(self, model, config):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.context = torch.autocast("cuda") if config.amp else contextlib.nullcontext()
        {scaler}

    def _update(self, loss):
        self.optimizer.zero_grad()
        {backward}
        {step}

    def train(self):
        for batch in self.loader:
            with self.context:
                output = self.model(batch)
            self._update(output.loss)
"""


def methods(scaler="pass", backward="loss.backward()", step="self.optimizer.step()"):
    """A trainer whose region, backward pass and step are in different places."""
    return METHODS.format(scaler=scaler, backward=backward, step=step)


SCALED = {
    "backward": "self.scaler.scale(loss).backward()",
    "step": "self.scaler.step(self.optimizer); self.scaler.update()",
}


def test_a_region_in_an_attribute_and_a_backward_in_another_method():
    """float16 reaches a step without a scaler."""
    assert codes(methods()) == ["HS123"]
    assert codes(methods(scaler="self.scaler = torch.amp.GradScaler('cuda')", **SCALED)) == []


def test_an_attribute_that_only_one_setting_creates():
    """A run with the other setting has no scaler."""
    created = "if config.amp: self.scaler = torch.amp.GradScaler('cuda')"
    assert codes(methods(scaler=created, **SCALED)) == ["HS176"]
    always = "self.scaler = torch.amp.GradScaler('cuda', enabled=config.amp)"
    assert codes(methods(scaler=always, **SCALED)) == []


def test_an_attribute_of_an_unknown_base_class():
    """It may create the scaler."""
    text = methods(scaler="if config.amp: self.scaler = torch.amp.GradScaler('cuda')", **SCALED)
    assert codes(text.replace("class Trainer:", "class Trainer(Base):")) == []


def test_a_method_that_subclasses_define():
    """What it gives is not known; the loop around it is."""
    text = methods().replace("output = self.model(batch)", "output = self.model(self.prepare(batch))")
    assert codes(
        text.replace(
            "    def train", "    def prepare(self, batch):\n        raise NotImplementedError\n\n    def train"
        )
    ) == ["HS123"]


TWO = """\
scaler = torch.cuda.amp.GradScaler()
wide, narrow = [], []
for name, p in model.named_parameters():
    if p.ndim > 1:
        wide.append(p)
    else:
        narrow.append(p)
first, second = Muon(wide, lr=0.1), torch.optim.AdamW(narrow)
for x, y in loader:
    first.zero_grad()
    second.zero_grad()
    with torch.autocast("cuda"):
        logits, loss = model(x, y)
    scaler.scale(loss).backward()
    {unscale}
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
"""


def test_two_optimizers_of_one_model():
    """Each has to be unscaled before all of the model is clipped."""
    assert codes(TWO.format(unscale="scaler.unscale_(second)")) == ["HS104"]
    assert codes(TWO.format(unscale="scaler.unscale_(first); scaler.unscale_(second)")) == []
    assert codes(TWO.format(unscale="for o in (first, second): scaler.unscale_(o)")) == []


GAN = """\
scaler = torch.amp.GradScaler("cuda")
of_d, of_g = torch.optim.Adam(D.parameters()), torch.optim.Adam(G.parameters())
for x in loader:
    {before_d}
    with torch.autocast("cuda"):
        fake = G(noise)
        loss_d = criterion(D(x)) + criterion(D(fake.detach()))
    scaler.scale(loss_d).backward()
    scaler.step(of_d)
    {before_g}
    with torch.autocast("cuda"):
        loss_g = criterion(D(fake))
    scaler.scale(loss_g).backward()
    scaler.step(of_g)
    {after}
    scaler.update()
"""


def test_gradients_that_the_generators_loss_leaves_in_the_discriminator():
    """They have the scale of the iteration before, unless they are cleared."""
    assert codes(GAN.format(before_d="of_d.zero_grad()", before_g="of_g.zero_grad()", after="pass")) == []
    assert codes(GAN.format(before_d="pass", before_g="of_d.zero_grad()", after="of_g.zero_grad()")) == ["HS108"]


def test_gradients_that_are_cleared_in_every_micro_batch_are_one_mistake():
    """A run reports them under the code of the rule that reads them in the text, so that there is a single finding."""
    text = window(end="pass").replace("    with torch", "    optimizer.zero_grad()\n    with torch")
    assert codes(text) == ["HS181"]
    assert "HS156" not in reported(START + text)


OPTIONAL = """\
def train(cfg, loader, use_gan, scaled):
    d = Discriminator({arguments}).cuda() if use_gan else None
    scaler = torch.amp.GradScaler("cuda") if (cfg.amp and {part}) else None
    optimizer = torch.optim.Adam(d.parameters()) if d is not None else None
    for x in loader:
        if d is not None:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled=cfg.amp):
                loss = criterion(d(x))
            if scaler:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
"""


@pytest.mark.parametrize("arguments", ["", "3", "cfg.channels"])
def test_an_object_of_another_files_class_is_true(arguments):
    """A run in which `amp and network` is false has no network or no mixed precision."""
    assert codes(OPTIONAL.format(arguments=arguments, part="d")) == []
    assert codes(OPTIONAL.format(arguments=arguments, part="scaled")) == ["HS123"]


@pytest.mark.parametrize(
    "text",
    [
        # The same setting under two names.
        """
        scaler = torch.amp.GradScaler("cuda", enabled=config.use_amp)
        for x in loader:
            with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
        """,
        # The scaler and the region depend on the same argument.
        """
        def train(model, optimizer, loader, scaler=None):
            for x in loader:
                optimizer.zero_grad()
                with torch.autocast("cuda", enabled=scaler is not None):
                    loss = model(x)
                if scaler is not None:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer); scaler.update()
                else:
                    loss.backward(); optimizer.step()
        """,
        # What code of another file does with the optimizer is not known.
        """
        scaler = torch.amp.GradScaler("cuda")
        for x in loader:
            with torch.autocast("cuda"):
                loss = model(x)
            backward_and_clip(loss, optimizer, scaler)
            scaler.step(optimizer)
            scaler.update()
        """,
        # A classifier on features of a float16 model that another optimizer, or none, trains.
        """
        head = torch.nn.Linear(8, 2)
        optimizer = torch.optim.Adam(head.parameters())
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                features = backbone(x)
            loss = criterion(head(features.float()), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        """,
        # bfloat16 needs no scaler.
        """
        for x in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x)
            loss.backward(); optimizer.step(); optimizer.zero_grad()
        """,
        # A partial region, and functions passed on.
        """
        class Trainer:
            def __init__(self, model):
                self.scaler, self.optimizer = torch.amp.GradScaler("cuda"), torch.optim.SGD(model.parameters())
                self.model = model
            def fit(self):
                self._epoch(partial(torch.autocast, "cuda"), self._scaled)
            def _scaled(self, loss):
                self.scaler.scale(loss).backward(); self.scaler.step(self.optimizer); self.scaler.update()
            def _epoch(self, context, backprop):
                for x in self.loader:
                    self.optimizer.zero_grad()
                    with context():
                        loss = self.model(x)
                    backprop(loss)
        """,
        # A script that ends: nothing comes after it.
        """
        import sys
        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda"):
            loss = model(x)
        scaler.scale(loss).backward()
        sys.exit()
        optimizer.step()
        """,
    ],
    ids=["one-setting", "argument", "handed-over", "features", "bf16", "partial", "exit"],
)
def test_right_scripts_are_silent(text):
    """Nothing is reported that the text does not decide."""
    assert codes(text) == []


@pytest.mark.parametrize(
    "text",
    ["def f(): return f()\nf()", "while True: x = 1", "x = [i for i in range(10**9)]", "a = b = c = lambda: a()\na()", "match x:\n    case 1: y = 2", "class A(A): pass\nA()", "x = 3\nfor i in y:\n    x = x * x\nz = 'a' * 10**9\nlist(range(10**9))", "x = 1 / 0\ny = 'a' % 3\nz = (1 << 3) ** 2", "with open(p) as f, g() as (h, i): pass", "del q\nglobal r\nr = 3", "for x in []: pass\nelse: y = 1", "try:\n    raise E\nexcept E:\n    pass\nfinally:\n    x = 2", "async def f():\n    async with a as b:\n        await c\nf()", "x, *y = z\n(u := 3)", "return 3", "break", "x: int = 3\nx @= y", "print(f'{x!r:>{w}}', *a, **b)"],
)  # fmt: skip
def test_any_statement_can_be_run(text):
    """No form of Python makes a run fail, or go on for ever."""
    assert codes(f"{text}\nscaler = torch.amp.GradScaler('cuda')\nloss.backward()") == []


def test_the_checker_reports_what_only_a_run_shows():
    """The finding is that of the rule, with its severity, and a script that does not train is not run."""
    text = START + methods()
    assert "HS123" in reported(text)
    assert trains(text)
    assert not trains("import torch\nwith torch.autocast('cuda'): model(x)")
