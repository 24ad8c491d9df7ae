"""Hand-written loops in less usual forms: skipped batches, early clips, adversarial losses, several optimizers, resuming."""

import pytest

from check_scripts import findings

START = "import torch\nfrom torch.cuda.amp import autocast, GradScaler\n"
LOOP = """\
scaler = GradScaler()
for step, x in enumerate(loader):
    optimizer.zero_grad()
    with autocast():
        loss = model(x).mean()
{body}"""
GAN = """\
opt_g = torch.optim.Adam(G.parameters())
opt_d = torch.optim.Adam(D.parameters()){optional}
scaler = GradScaler()
for step, x in enumerate(loader):
    opt_g.zero_grad()
    opt_d.zero_grad()
    with autocast():
        fake = G(x)
        loss = fake.mean()
{generator}    scaler.scale(loss).backward()
    if step > warmup:
        with autocast():
            real = D(x).mean()
        scaler.scale(real).backward()
    scaler.step(opt_g)
{step}    scaler.update()
"""
ADVERSARIAL = """\
scaler = GradScaler()
for x in loader:
    with autocast():
        loss = model(x).mean()
    scaler.scale(loss).backward()
{unscale}    if cfg.adversarial:
        attack.perturb()
        with autocast():
            hard = model(x).mean()
        {backward}
        attack.restore()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
EPOCHS = """\
scaler = GradScaler()
scheduler = {scheduler}
for epoch in range(9):
    {step}
    for x in loader:
        with autocast():
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
SCALED = "    scaler.scale(loss).backward()\n"
STEP = "    scaler.step(optimizer)\n    scaler.update()\n"
CLIP = "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"


def reported(text, code):
    return [f"{f.code}:{f.line}" for f in findings(START + text, code)]


def indented(text):
    return "".join(f"    {line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    "body",
    [
        "    if torch.isfinite(loss):\n" + indented(SCALED + "    scaler.step(optimizer)\n") + "    scaler.update()\n",
        "    if torch.isnan(loss):\n        scaler.update()\n        continue\n" + SCALED + STEP,
        "    if len(x) > 1:\n" + indented(SCALED) + STEP,
        SCALED + "    ok = check(model)\n    if ok:\n        scaler.step(optimizer)\n    scaler.update()\n",
        SCALED + "    if norm_of(model) < 10:\n        scaler.step(optimizer)\n    scaler.update()\n",
    ],
)
def test_skipped_batch_without_checks(body):
    """A test of the batch skips the step or the backward, and update() or step() then finds no checked gradients."""
    assert len(reported(LOOP.format(body=body), "HS115")) == 1


@pytest.mark.parametrize(
    "body",
    [
        "    if torch.isfinite(loss):\n" + indented(SCALED + STEP),
        "    if torch.isnan(loss):\n        continue\n" + SCALED + STEP,
        SCALED
        + "    scaler.unscale_(optimizer)\n    if norm_of(model) < 10:\n        scaler.step(optimizer)\n    scaler.update()\n",
        SCALED + "    if args.train:\n        scaler.step(optimizer)\n    scaler.update()\n",
        SCALED
        + "    if step > 3:\n        scaler.step(optimizer)\n    else:\n        scaler.step(other)\n    scaler.update()\n",
        "    if len(x) > 1:\n" + indented(SCALED) + "    else:\n        scaler.scale(0 * loss).backward()\n" + STEP,
        SCALED + "    if bad(model):\n        scaler.update(2.0**10)\n        continue\n" + STEP,
    ],
)
def test_checked_batches_are_silent(body):
    """Whatever the batch, a check comes before each update and a backward before each step, or a setting decides."""
    assert reported(LOOP.format(body=body), "HS115") == []


def test_cleared_to_zero_is_silent():
    """Gradients that are set to zero instead of None are checked by the step."""
    text = LOOP.format(body="    if len(x) > 1:\n" + indented(SCALED) + STEP)
    assert reported(text.replace("zero_grad()", "zero_grad(set_to_none=False)"), "HS115") == []


@pytest.mark.parametrize("optional", ["", " if gan else None"])
@pytest.mark.parametrize("generator", ["", "        if step > warmup:\n            loss = loss - D(fake).mean()\n"])
def test_discriminator_stepped_before_it_runs(generator, optional):
    """Until the discriminator is used its optimizer has no gradients, and the scaler's step of it raises."""
    text = GAN.format(generator=generator, optional=optional, step="    scaler.step(opt_d)\n")
    assert reported(text, "HS115") == [f"HS115:{18 + generator.count(chr(10))}"]


@pytest.mark.parametrize(
    ("generator", "step"),
    [
        ("", "    if step > warmup:\n        scaler.step(opt_d)\n"),
        ("        loss = loss - D(fake).mean()\n", "    scaler.step(opt_d)\n"),
        ("        loss = loss - score(D, fake)\n", "    scaler.step(opt_d)\n"),
    ],
)
def test_discriminator_with_gradients_is_silent(generator, step):
    """The step waits as well, or the generator's loss gives the discriminator gradients from the start."""
    assert reported(GAN.format(generator=generator, optional="", step=step), "HS115") == []


@pytest.mark.parametrize(
    "body",
    [
        CLIP + SCALED + STEP,
        "    if args.clip:\n" + indented(CLIP) + SCALED + STEP,
        CLIP + SCALED + "    scaler.step(other)\n" + STEP,
        "    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)\n    loss.backward()\n    optimizer.step()\n",
    ],
)
def test_clip_before_backward(body):
    """A clip between zero_grad() and backward() has no gradients to clip."""
    assert len(reported(LOOP.format(body=body), "HS118")) == 1
    after = body.replace(SCALED + STEP, STEP + SCALED) if SCALED in body else body
    assert reported(LOOP.format(body=after).replace("    optimizer.zero_grad()\n", ""), "HS118") == []


@pytest.mark.parametrize(
    "body",
    [
        SCALED + "    scaler.unscale_(optimizer)\n" + CLIP + STEP,
        SCALED + "    for p in extra:\n        p.grad = None\n" + CLIP + STEP,
        "    first.backward()\n" + CLIP + SCALED + STEP,
    ],
)
def test_clip_with_gradients_is_silent(body):
    """After any backward there are gradients; with two optimizers they may be those of the other one."""
    assert reported(LOOP.format(body=body), "HS118") == []


def test_adversarial_loss_under_a_flag():
    """An adversarial loss that is not scaled is added to scaled gradients, also where a setting switches it on."""
    plain = ADVERSARIAL.format(unscale="", backward="hard.backward()")
    assert reported(plain, "HS102") == ["HS102:12"]
    assert reported(ADVERSARIAL.format(unscale="", backward="scaler.scale(hard).backward()"), "HS102") == []
    assert (
        reported(ADVERSARIAL.format(unscale="    scaler.unscale_(optimizer)\n", backward="hard.backward()"), "HS102")
        == []
    )


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        ("norm = torch.norm(p.grad)\n            p.data.add_(eps * p.grad / norm)", 0),
        (
            "norm = p.grad.norm()\n            if norm != 0 and not torch.isnan(norm):\n                p.data.add_(p.grad / (norm + 1e-6))",
            0,
        ),
        ("p.data.add_(eps * p.grad / p.grad.norm())", 0),
        ("norm = torch.norm(p.grad)\n            print(norm)", 1),
        ("norm = torch.norm(p.grad)\n            p.data.add_(eps * norm)", 1),
    ],
)
def test_normalized_gradient_is_not_a_scaled_read(lines, count):
    """The scale cancels where a norm only divides the gradient that it is the norm of."""
    attack = (
        "def attack(model):\n    for p in model.parameters():\n        if p.grad is not None:\n            "
        + lines
        + "\n"
    )
    assert len(reported(attack + LOOP.format(body=SCALED + "    attack(model)\n" + STEP), "HS110")) == count


def test_update_for_each_optimizer_of_a_class():
    """A method that steps all optimizers updates after each one, while another method computes the gradients."""
    text = """\
class Step:
    def __init__(self):
        self.scaler = GradScaler()
    def accumulate(self, loss):
        self.scaler.scale(loss).backward()
    def apply(self):
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
{update}"""
    assert reported(text.format(update="            self.scaler.update()\n"), "HS108") == ["HS108:11"]
    assert reported(text.format(update="        self.scaler.update()\n"), "HS108") == []


@pytest.mark.parametrize(
    ("scheduler", "step", "count"),
    [
        ("torch.optim.lr_scheduler.StepLR(optimizer, 3)", "scheduler.step()", 1),
        ("torch.optim.lr_scheduler.StepLR(optimizer, 3)", "scheduler.step(epoch)", 0),
        ("torch.optim.lr_scheduler.StepLR(optimizer, 3)", "if epoch > 0: scheduler.step()", 0),
        ("WarmupScheduler(optimizer, 3)", "scheduler.step()", 0),
    ],
)
def test_scheduler_at_the_start_of_the_epoch(scheduler, step, count):
    """One of torch's schedulers that advances before the first epoch skips its first learning rate."""
    assert len(reported(EPOCHS.format(scheduler=scheduler, step=step), "HS195")) == count


@pytest.mark.parametrize(
    ("schedule", "count"),
    [
        ("LinearScheduler(start=0.0, end=cfg.weight)", 0),
        ("LinearScheduler(optimizer, 100)", 1),
        ("LinearScheduler(base_lr=1e-3, steps=100)", 1),
        ("LinearScheduler(cfg)", 1),
    ],
)
def test_schedule_of_another_number(schedule, count):
    """A schedule that receives nothing of an optimizer is not one of the learning rate."""
    text = f"from project import LinearScheduler\nweight_scheduler = {schedule}\n"
    assert len(reported(text + LOOP.format(body=SCALED + STEP + "    weight_scheduler.step()\n"), "HS196")) == count


def test_scalers_assigned_together():
    """Each of two scalers that one statement creates needs its own update."""
    text = """\
first, second = GradScaler(), GradScaler()
for x in loader:
    with autocast():
        loss, other = model(x)
    first.scale(loss).backward()
    first.step(optimizer)
    second.scale(other).backward()
    second.step(optimizer_b)
    second.update()
"""
    assert reported(text, "HS101") == ["HS101:8"]
    assert reported(text + "    first.update()\n", "HS101") == []


@pytest.mark.parametrize(
    ("name", "count"), [("train_step", 1), ("training_step", 1), ("train_batch", 1), ("run", 0), ("train", 0)]
)
def test_scaler_of_one_step(name, count):
    """A function that is named for one step creates a scaler on every step."""
    body = "scaler = GradScaler()\nwith autocast():\n    loss = model(x).mean()\nscaler.scale(loss).backward()\n"
    text = f"def {name}(model, optimizer, x):\n" + indented(body + "scaler.step(optimizer)\nscaler.update()\n")
    assert len(reported(text, "HS121")) == count


@pytest.mark.parametrize(("variable", "count"), [("fold", 0), ("seed", 0), ("epoch", 1)])
def test_scaler_of_each_fold(variable, count):
    """The folds of a cross-validation are separate runs, each with its own scaler."""
    text = "def train(model, optimizer):\n" + indented(LOOP.format(body=SCALED + STEP))
    text += f"for {variable} in range(5):\n    train(make(), optimizer_for(model))\n"
    assert len(reported(text, "HS121")) == count


@pytest.mark.parametrize(
    ("made", "count"),
    [
        ("model_input = torch.cat([x, noise], dim=1)", 1),
        ("model_view = torch.stack(views)", 1),
        ("model_mask = torch.nn.functional.pad(mask, (1, 1))", 1),
        ("model_pred = unet(noisy, steps)", 1),
        ("model = Net()", 0),
        ("model = torch.compile(Net())", 0),
        ("model = torch.load(path)", 0),
        ("model_b = torch.nn.Linear(4, 4)", 0),
        ("model = torch.nn.Sequential(Net(), head)", 0),
    ],
)
def test_scaler_of_each_model(made, count):
    """A scaler for each new model is right; tensors and outputs whose names begin with `model` are no models."""
    text = "import torch\nfor epoch in range(5):\n" + indented(made + "\n")
    text += indented(LOOP.format(body=SCALED + STEP))
    assert len(reported(text, "HS121")) == count


RESUME = """\
from copy import deepcopy
scaler = GradScaler()
if path:
    state = torch.load(path)
    model.load_state_dict(state["{read}"])
    optimizer.load_state_dict(state["optimizer"])
    scaler.load_state_dict(state["scaler"])
for x in loader:
    with autocast():
        loss = model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
{before}torch.save({{"model": {weights}, "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}}, path)
"""


@pytest.mark.parametrize(
    ("weights", "before"),
    [
        ("deepcopy(model).half()", ""),
        ("deepcopy(model).half().state_dict()", ""),
        ("{k: v.to(torch.float16) for k, v in model.state_dict().items()}", ""),
        ("{k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()}", ""),
        ("weights", "weights = {k: v.bfloat16().cpu() for k, v in model.state_dict().items()}\n"),
    ],
)
def test_resumed_from_16_bit_weights(weights, before):
    """Weights are cast to 16 bits in the checkpoint from which training resumes, in several forms."""
    text = RESUME.format(read="model", weights=weights, before=before)
    assert len(reported(text, "HS174")) == 1
    assert reported(text.replace('    optimizer.load_state_dict(state["optimizer"])\n', ""), "HS174") == []
    assert reported(RESUME.format(read="weights", weights=weights, before=before), "HS174") == []
    copied = text.replace("optimizer.state_dict()", "lowered(deepcopy(optimizer.state_dict()))")
    assert len(reported(copied, "HS174")) == 1  # the copy of the optimizer state is an entry as well


@pytest.mark.parametrize("weights", ["model.state_dict()", "deepcopy(model).float()", "deepcopy(model.half().float())"])
def test_resumed_from_float32_weights_is_silent(weights):
    """Weights in float32 are what the optimizer state belongs to."""
    assert reported(RESUME.format(read="model", weights=weights, before=""), "HS174") == []


FLAGGED = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for batches in loader:
    optimizer.zero_grad()
    broken = False
    for x in batches:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        if not torch.isfinite(loss):
            {skip}
        scaler.scale(loss).backward()
    if {test}:
        continue
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("skip", "test", "count"),
    [
        ("broken = True; break", "broken", 0),
        ("broken = True; continue", "broken", 0),
        ("print('skipped'); break", "paused", 1),
    ],
)
def test_a_flag_that_is_set_where_the_backward_is_skipped_skips_the_step(skip, test, count):
    """HS115: the step has a condition that the branch without the backward sets."""
    assert len(reported(FLAGGED.format(skip=skip, test=test), "HS115")) == count
