"""The forms in which people write the same mistake: through closures, helpers, engines, variables and arguments."""

import pytest

from check_scripts import codes

HEAD = "import torch\nfrom contextlib import nullcontext\nfrom torch.amp import GradScaler, autocast\n"
STEP = "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
TRAIN = HEAD + "scaler = GradScaler('cuda')\nfor x in loader:\n    with {region}:\n        loss = {forward}\n" + STEP
EPOCH = "def train_epoch(model, loader, optimizer, scaler):\n    for x in loader:\n        loss = model(x)\n"
EPOCH += STEP.replace("    ", "        ")
SAVE = HEAD + EPOCH + "def save(path):\n    {save}\ndef load(path):\n    checkpoint = torch.load(path)\n    {load}\n"
ACCELERATE = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator({precision})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
checkpoint = torch.load(path)
optimizer.load_state_dict(checkpoint['optimizer'])
for x in loader:
    accelerator.backward(model(x))
    optimizer.step()
    optimizer.zero_grad()
torch.save({{'optimizer': optimizer.state_dict(){more}}}, path)
"""


def reported(text, code):
    """The findings of one rule, each with its line."""
    return [c for c in codes(text) if c.startswith(code)]


@pytest.mark.parametrize(
    ("region", "forward", "validation", "count"),
    [
        ("autocast('cuda')", "model.training_step(x)", "with torch.no_grad():\n    model.validation_step(x)\n", 1),
        ("autocast('cuda')", "model(x)", "def validate(m):\n    m.eval()\n    for x in valid:\n        out = m(x)\nvalidate(model)\n", 1),
        ("autocast('cuda')", "model(x)", "def validate(m):\n    m.train()\n    for x in valid:\n        out = m(x)\nvalidate(model)\n", 0),
        ("autocast('cuda')", "model(x)", "@torch.no_grad()\ndef evaluate(model):\n    out = model(x)\nevaluate(runner.module)\n", 1),
        ("autocast('cuda')", "model(x)", "with torch.no_grad():\n    if flash_attention:\n        with autocast('cuda'):\n            out = model(x)\n    else:\n        out = model(x)\n", 1),
        ("autocast('cuda')", "model(x)", "@torch.no_grad()\ndef generate(model, x):\n    for _ in range(9):\n        x = model(x)\n", 0),
        ("autocast('cuda')", "criterion(x)", "criterion.eval()\nwith torch.no_grad():\n    for x in valid_loader:\n        out = criterion(x)\n", 0),
        ("accel.autocast()", "model(x)", "with torch.no_grad():\n    out = model(x)\n", 1),
        ("accelerator.autocast()", "model(x)", "with torch.no_grad():\n    out = model(x)\n", 0),
        ("(autocast if amp else nullcontext)('cuda')", "model(x)", "with torch.no_grad():\n    out = model(x)\n", 0),
    ],
)  # fmt: skip
def test_validation_without_autocast(region, forward, validation, count):
    """Validation in float32 is found in steps, helpers and engines; samples, losses and what an engine wraps are not."""
    assert len(reported(TRAIN.format(region=region, forward=forward) + validation, "HS149")) == count


@pytest.mark.parametrize(
    "context",
    ["autocast if amp else nullcontext", "(lambda name: autocast('cuda')) if amp else nullcontext", "lambda name: autocast('cuda')"],
)  # fmt: skip
@pytest.mark.parametrize(("inside", "count"), [("nullcontext()", 1), ("region('cuda')", 0)])
def test_autocast_through_a_variable(context, inside, count):
    """A class, a lambda or a choice between them in a variable is an autocast region where it is called."""
    text = TRAIN.format(region="region('cuda')", forward="model(x)").replace(
        "scaler =", f"region = {context}\nscaler ="
    )
    text += f"with torch.no_grad():\n    for x in valid:\n        with {inside}:\n            out = model(x)\n"
    assert len(reported(text, "HS149")) == count


@pytest.mark.parametrize(
    ("before", "loop", "count"),
    [
        ("", "    for o in optimizers:\n        scaler.step(o)\n    for s in schedulers:\n        s.step()\n", 1),
        ("", "    for o, s in zip(optimizers, schedulers):\n        scaler.step(o)\n        s.step()\n", 1),
        ("", "    scaler.step(optimizer)\n    if step_mode == 'batch':\n        scheduler.step()\n", 1),
        ("", "    scaler.step(optimizer)\n    if i % 100 == 0:\n        scheduler.step()\n", 0),
        ("", "    scaler.step(optimizer)\n    if self.scheduler_update_every_step:\n        scheduler.step()\n", 1),
        ("", "    scaler.step(optimizer)\n    scheduler.step(global_step)\n", 1),
        ("", "    scaler.step(optimizer)\n    scheduler.step(loss)\n", 0),
        ("", "    scaler.step(optimizer)\n    scheduler.step(epoch)\n", 0),
        ("scaler = None\n", "    if scaler is not None:\n        scaler.step(optimizer)\n    scheduler.step()\n", 0),
        ("scaler = kwargs.get('scaler', None)\n", "    scaler.step(optimizer)\n    scheduler.step()\n", 1),
        ("def amp():\n    scaler.step(optimizer)\ndef plain():\n    optimizer.step()\nrun = amp if use_amp else plain\n", "    run()\n    scheduler.step()\n", 1),
        ("def main():\n  def run():\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n  for x in loader:\n    measure(run)\n    scheduler.step()\n", "", 1),
        ("def main():\n  def run():\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n  for x in loader:\n    atexit.register(run)\n    scheduler.step()\n", "", 0),
        ("", "    if (i + 1) % n == 0 or i + 1 == len(loader):\n        scaler.step(optimizer)\n    is_last = (i + 1) % n == 0 or i + 1 == total\n"
         "    if is_last:\n        scheduler.step()\n", 1),
    ],
)  # fmt: skip
def test_schedule_that_counts_skipped_steps(before, loop, count):
    """The schedule and the step are paired through loops over them, modes, chosen functions, closures and windows."""
    body = "    scaler.scale(model(x)).backward()\n" + loop + "    scaler.update()\n"
    text = "import torch\n" + before + ("for i, x in enumerate(loader):\n" + body if loop else "")
    assert len(reported(text, "HS196")) == count


def test_the_schedule_of_weight_averaging_may_step_first():
    """swa_scheduler.step() before the optimizer step skips no learning rate: it starts after many steps."""
    text = "import torch\nfor x in loader:\n    with torch.autocast('cuda'):\n        loss = model(x)\n    loss.backward()\n"
    text += "    if epoch > swa_start:\n        {name}.step()\n    optimizer.step()\n"
    assert reported(text.format(name="swa_scheduler"), "HS195") == []
    assert reported(text.format(name="scheduler"), "HS195") == ["HS195:7"]


@pytest.mark.parametrize(
    ("save", "load", "count"),
    [
        ("torch.save((model.state_dict(), optimizer.state_dict()), path)", "optimizer.load_state_dict(checkpoint[1])", 1),
        ("torch.save(optimizer.state_dict(), path + '/optimizer.pt')", "optimizer.load_state_dict(checkpoint)", 1),
        ("torch.save({'g': opt_g.state_dict(), 'd': opt_d.state_dict()}, path)", "opt_g.load_state_dict(checkpoint['g'])", 1),
        ("torch.save({'o': optimizer.state_dict(), 's': scaler.state_dict()}, path)", "optimizer.load_state_dict(checkpoint['o'])", 0),
    ],
)  # fmt: skip
def test_a_function_called_save_is_not_torch_save(save, load, count):
    """A helper that no function of the file calls saves the states of the training in the same file."""
    assert bool(reported(SAVE.format(save=save, load=load), "HS170")) == count


@pytest.mark.parametrize(
    ("precision", "more", "count"),
    [
        ("mixed_precision='fp16'", "", 1),
        ("mixed_precision=args.mixed_precision", "", 1),
        ("mixed_precision='bf16'", "", 0),
        ("", "", 0),
        ("mixed_precision='fp16'", ", 'scaler': accelerator.scaler.state_dict()", 0),
        ("mixed_precision=args.mixed_precision or 'bf16'", "", 0),
    ],
)
def test_checkpoint_without_the_scaler_of_accelerate(precision, more, count):
    """Accelerate's own scaler belongs into a checkpoint that a script writes itself, if it may run in fp16."""
    assert len(reported(ACCELERATE.format(precision=precision, more=more), "HS170")) == count


def test_checkpoint_without_the_scaler_of_another_engine():
    """`accel.scaler.unscale_` shows that an engine has a scaler, whatever steps the optimizer."""
    text = "import torch\ndef train():\n    state.optimizer.load_state_dict(torch.load(path))\n    for x in loader:\n"
    text += "        accel.backward(model(x))\n        accel.scaler.unscale_(state.optimizer)\n        accel.step(state.optimizer)\n"
    assert reported(text + "    torch.save({'o': state.optimizer.state_dict()}, path)\n", "HS170") == ["HS170:8"]


@pytest.mark.parametrize(
    ("head", "body", "count"),
    [
        (EPOCH, "    train_epoch(model, loader, optimizer, GradScaler('cuda'))\n", 1),
        ("from engine import train_epoch\n", "    train_epoch(model, loader, optimizer=optimizer, scaler=GradScaler('cuda'))\n", 1),
        ("from engine import train_epoch\n", "    optimizer = torch.optim.SGD(w, 0.1)\n    train_epoch(model, optimizer, GradScaler('cuda'))\n", 0),
        ("from engine import Trainer\n", "    runs.append(Trainer(model, optimizer, GradScaler('cuda')))\n", 0),
        (EPOCH, "    optimizer_type = options.get('optimizer')\n    scaler = GradScaler('cuda')\n    train_epoch(model, loader, optimizer, scaler)\n", 1),
        (EPOCH, "    if shared:\n        optimizer = shared\n    else:\n        optimizer = torch.optim.SGD(w, 0.1)\n    scaler = GradScaler('cuda')\n"
         "    train_epoch(model, loader, optimizer, scaler)\n", 1),
        (EPOCH, "    optimizer = torch.optim.SGD(w, 0.1)\n    scaler = GradScaler('cuda')\n    train_epoch(model, loader, optimizer, scaler)\n", 0),
    ],
)  # fmt: skip
def test_scaler_recreated_in_a_loop(head, body, count):
    """A scaler in the arguments of a call is recreated as well; one for a new optimizer is right."""
    assert len(reported(HEAD + head + "for epoch in range(9):\n" + body, "HS121")) == count


PLAIN = "for x in loader:\n    with autocast('cuda', dtype=torch.bfloat16):\n        loss = model(x)\n    loss.backward()\n    optimizer.step()\n"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("scaler = GradScaler('cuda')\n" + PLAIN + "torch.save({'scaler': scaler.state_dict()}, path)\n", 1),
        ("scaler = GradScaler('cuda')\nif scaler is not None:\n    scaler.load_state_dict(checkpoint['scaler'])\n" + PLAIN, 1),
        ("scaler = GradScaler('cuda')\n" + PLAIN + "    scaler.update()\n", 1),
        ("def make():\n    scaler = GradScaler('cuda')\n    return model, scaler\nmodel, scaler = make()\n", 1),
        ("def make():\n    scaler = GradScaler('cuda')\n    return model, scaler\nmodel, scaler = make()\ntrain(model, scaler)\n", 0),
        ("def make():\n    scaler = GradScaler('cuda')\n    return model, scaler\nparts = make()\n", 0),
        ("scaler = GradScaler('cuda')\ndef train(model, scaler):\n    " + PLAIN.replace("\n    ", "\n        ") + "train(model, scaler)\n", 1),
        ("scaler = GradScaler('cuda')\n" + PLAIN.replace("loss.backward()", "(loss * scaler.get_scale()).backward()"), 0),
        ("class Base:\n    def __init__(self):\n        self.scaler = GradScaler('cuda')\n    def state(self):\n        return self.scaler.state_dict()\n" + PLAIN, 0),
    ],
)  # fmt: skip
def test_scaler_that_is_never_used(text, count):
    """Saving, restoring, updating, returning or passing on a scaler that nothing reads does not use it."""
    assert len(reported(HEAD + text, "HS122")) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("with amp.scale_loss(loss, optimizer) as scaled_loss:\n    scaled_loss.backward()\n", 1),
        ("if use_apex:\n    with amp.scale_loss(loss, optimizer) as scaled_loss:\n        scaled_loss.backward()\n", 0),
        ("class ApexScaler:\n    def __call__(self, loss, optimizer):\n        with amp.scale_loss(loss, optimizer) as scaled_loss:\n            scaled_loss.backward()\n", 0),
    ],
)  # fmt: skip
def test_apex_without_initialize(text, count):
    """A file that only scales with Apex uses it too, unless it supports Apex as one of several backends."""
    assert len(reported("from apex import amp\n" + text, "HS191")) == count
