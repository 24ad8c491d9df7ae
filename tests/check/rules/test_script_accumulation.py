"""Accumulation in the forms that scripts write it: divided losses, clearing, clipping and the step of an engine."""

import pytest

from check_scripts import findings

OWN = ("HS104", "HS106", "HS110", "HS113", "HS180", "HS181", "HS182", "HS188", "HS189")
HEAD = "import torch\nscaler = torch.amp.GradScaler('cuda')\n"
FORWARD = "with torch.autocast('cuda', dtype=torch.bfloat16): loss = model(x){}\n"


def reported(text):
    """The codes that these rules report for a script, each once."""
    return sorted({f.code for f in findings(text, *OWN)})


def plain(body, divided="", head="import torch\n"):
    """A loop over batches with a bfloat16 forward and a plain backward."""
    text = f"{head}for i, x in enumerate(loader):\n    {FORWARD.format(divided)}    loss.backward()\n"
    return text + "".join(f"    {line}\n" for line in body.splitlines())


STEP = "optimizer.step(); optimizer.zero_grad()"
BRANCHES = """\
import torch
for i, x in enumerate(loader):
    if (i + 1) % accum != 0:
        with model.no_sync(), torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(x){divided}
            loss.backward()
    else:
        loss = model(x){divided}
        loss.backward()
        optimizer.step(); optimizer.zero_grad()
"""
FLAGGED = """\
import torch
class Training:
    def is_last(self, i):
        return (i + 1) % self.accum == 0
    def run(self):
        for i, x in enumerate(self.loader):
            with torch.autocast('cuda', dtype=torch.bfloat16):
                loss = self.model(x)
            loss.backward()
            if self.is_last(i):
                self.optimizer.step(); self.optimizer.zero_grad()
"""
NESTED = """\
import torch
for x, y in loader:
    optimizer.zero_grad()
    for {target} in {source}:
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = loss_fn(model(part)){divided}
        loss.backward()
    optimizer.step()
"""
PROMPTS = """\
import torch
for i, prompt in enumerate(prompts):
    for answer in answers(prompt):
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(answer)
        loss.backward()
    if (i + 1) % cfg['accum'] == 0:
        optimizer.step(); optimizer.zero_grad()
"""
MANUAL = """\
import lightning as L
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
    def training_step(self, batch, i):
        {optimizers} = self.optimizers()
        self.manual_backward(self.compute(batch){divided})
        {clip}
        if (i + 1) % self.accum == 0:
            {step}
"""
TURNS = """\
import lightning as L
class Gan(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
    def training_step(self, batch, i):
        g, d = self.optimizers()
        if i % 2 == 0:
            self.manual_backward(self.loss_d(batch))
            self.clip_gradients(d, gradient_clip_val=1.0)
            d.step(); d.zero_grad()
        else:
            self.manual_backward(self.loss_g(batch))
            self.clip_gradients(g, gradient_clip_val=1.0)
            g.step(); g.zero_grad()
"""
RUNNERS = """\
import deepspeed
import torch
class Plain:
    def __init__(self):
        self.optimizer, self.accum = torch.optim.AdamW(model.parameters()), args.accum
    def backward(self, loss):
        loss.backward()
    def step(self):
        self.optimizer.step(); self.optimizer.zero_grad()
class Sharded:
    def __init__(self):
        self.engine, *_ = deepspeed.initialize(model=model, config=args.config)
        self.accum = self.engine.gradient_accumulation_steps()
    def backward(self, loss):
        self.engine.backward(loss)
    def step(self):
        self.engine.step()
runner = Sharded() if args.deepspeed else Plain()
for step in range(args.steps):
    for micro in range(runner.accum):
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(next(batches))
        runner.backward(loss)
        total += loss.item() / runner.accum
{indent}    runner.step()
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (plain(f"if not (i + 1) % accum:\n    {STEP}"), ["HS180"]),
        (plain("count += 1\nif count < args.accum: continue\n" + STEP), ["HS180"]),
        (plain(f"total += loss.item() / accum\nif (i + 1) % accum == 0: {STEP}"), ["HS180"]),
        (plain(f"if (i + 1) % accum == 0: {STEP}\nloss = total / len(loader)"), ["HS180"]),
        (plain("if (i + 1) % accum == 0:\n    for o in optimizers:\n        o.step(); o.zero_grad()"), ["HS180"]),
        (plain(f"if (i + 1) % accum == 0: {STEP}", " / accum"), []),
        (BRANCHES.format(divided=""), ["HS180"]),
        (BRANCHES.format(divided=" / accum"), []),
        (FLAGGED, ["HS180"]),
        (PROMPTS, ["HS180"]),
        (PROMPTS.replace("model(answer)", "model(answer) / cfg['accum']"), []),
        (NESTED.format(target="part", source="micro_batches", divided=""), ["HS180"]),
        (NESTED.format(target="part", source="x.chunk(parts)", divided=""), ["HS180"]),
        (NESTED.format(target="part, t", source="zip(torch.chunk(x, parts), y)", divided=""), ["HS180"]),
        (NESTED.format(target="part, t", source="zip(torch.chunk(x, parts), y)", divided=" / parts"), []),
        (NESTED.format(target="part", source="views", divided=""), []),  # a sum over views may be meant
        (MANUAL.format(optimizers="opt", divided="", clip="pass", step="opt.step(); opt.zero_grad()"), ["HS180"]),
        (MANUAL.format(optimizers="g, d", divided="", clip="pass", step="g.step(); g.zero_grad()"), ["HS180"]),
        (MANUAL.format(optimizers="g, d", divided=" / self.accum", clip="pass", step="g.step(); g.zero_grad()"), []),
    ],
)
def test_the_loss_of_every_micro_batch_is_divided(text, expected):
    """Loops over optimizers, prompts and chunks, two branches, counters and helper methods are windows as well."""
    assert reported(text) == expected


def test_every_class_that_a_runner_may_have_is_followed():
    """A runner of two classes is one of them at a time: the plain one sums losses, the engine is not stepped often enough."""
    wrong = findings(RUNNERS.format(indent=""), *OWN)
    assert [(f.code, f.line, f.severity) for f in wrong] == [("HS180", 7, "warning"), ("HS188", 25, "error")]
    assert [f.code for f in findings(RUNNERS.format(indent="    "), "HS188")] == []


ACCELERATE = """\
from accelerate import Accelerator
accelerator = Accelerator({options})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for i, x in enumerate(loader):
    loss = model(x)
    accelerator.backward(loss)
    {step}
"""
SAMPLES = HEAD + (
    "for batch in loader:\n    for sample in batch:\n        {clear}\n        loss = model(sample)\n"
    "        scaler.scale(loss).backward()\n        {rest}\n    scaler.step(optimizer)\n    scaler.update()\n"
)
CLEARED = plain(f"if (i + 1) % accum == 0: {STEP}", " / accum").replace(
    "    loss.backward", "    trainer.model.zero_grad()\n    loss.backward"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CLEARED, ["HS181"]),
        (CLEARED.replace("trainer.model", "other"), []),
        (SAMPLES.format(clear="optimizer.zero_grad()", rest="pass"), ["HS181"]),
        (SAMPLES.format(clear="model.zero_grad()", rest="losses.append(loss.item())"), ["HS181"]),
        (SAMPLES.format(clear="optimizer.zero_grad()", rest="kept.append(model.weight.grad.clone())"), []),
        (SAMPLES.format(clear="optimizer.zero_grad()", rest="store_grads(model)"), []),
        (SAMPLES.format(clear="optimizer.zero_grad()", rest="if loss < best: break"), []),
        (plain(STEP, " / args.accum_steps"), ["HS181"]),
        (plain(STEP, " / num_tokens"), []),
        (ACCELERATE.format(options="gradient_accumulation_steps=4", step=STEP), ["HS181"]),
        (ACCELERATE.format(options="gradient_accumulation_steps=args.accum", step=STEP), ["HS181"]),
        (ACCELERATE.format(options="gradient_accumulation_steps=1", step=STEP), []),
        (ACCELERATE.format(options="", step=STEP), []),
        (ACCELERATE.format(options="gradient_accumulation_steps=n", step=f"if (i + 1) % n == 0: {STEP}"), []),
        (ACCELERATE.format(options="gradient_accumulation_steps=n, deepspeed_plugin=plugin", step=STEP), []),
        (
            ACCELERATE.format(options="gradient_accumulation_steps=n", step=STEP).replace(
                "    loss = model(x)\n", "    with accelerator.accumulate(model): loss = model(x)\n"
            ),
            [],
        ),
    ],
)
def test_gradients_accumulate_until_the_step(text, expected):
    """Clearing before each sample, and stepping although the loss is divided for a window, leave nothing accumulated."""
    assert reported(text) == expected


CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
WINDOW = f"if (i + 1) % accum == 0: {STEP}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (plain(f"{CLIP}\n{WINDOW}", " / accum"), ["HS189"]),
        (plain(f"if args.clip: {CLIP}\n{WINDOW}", " / accum"), ["HS189"]),
        (plain(f"if (i + 1) % accum == 0: {CLIP}\n{WINDOW}", " / accum"), []),
        (plain(f"if due: {CLIP}\n{WINDOW}", " / accum", head="import torch\n").replace("if due", "if is_last"), []),
        (plain(f"{CLIP.replace('1.0', 'float(`inf`)').replace('`', chr(39))}\n{WINDOW}", " / accum"), []),
        (plain(f"{CLIP}\n{STEP}"), []),
        (
            plain(f"{CLIP}\n{WINDOW}", " / accum").replace("loss.backward", "scaler.scale(loss).backward"),
            ["HS104", "HS189"],
        ),
        (
            MANUAL.format(
                optimizers="opt",
                divided=" / self.accum",
                clip="self.clip_gradients(opt, gradient_clip_val=1.0)",
                step="opt.step(); opt.zero_grad()",
            ),
            ["HS189"],
        ),
        (TURNS, []),
    ],
)
def test_complete_sums_are_clipped(text, expected):
    """A clip on every micro-batch is reported, also where the gradients are still scaled: these are two mistakes."""
    assert reported(text) == expected


ENGINE = """\
import deepspeed
{config}engine, _, _, _ = deepspeed.initialize(model=model, config=ds)
{head}for step in range(steps):
    for micro in range({count}):
        loss = engine(next(batches))
        engine.backward(loss)
{step}
"""
FOUR = "ds = {'train_micro_batch_size_per_gpu': 1, 'gradient_accumulation_steps': 4}\n"
ASKED = "engine.gradient_accumulation_steps()"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ENGINE.format(config="", head="", count=ASKED, step="    engine.step()"), ["HS188"]),
        (ENGINE.format(config="", head="", count=ASKED, step="        engine.step()"), []),
        (ENGINE.format(config="", head=f"n = {ASKED}\n", count="n", step="    engine.step()"), ["HS188"]),
        (ENGINE.format(config=FOUR, head="", count="4", step="    engine.step()"), ["HS188"]),
        (ENGINE.format(config=FOUR, head="", count="8", step="    engine.step()"), []),
        (ENGINE.format(config=FOUR.replace("4", "1"), head="", count="1", step="    engine.step()"), []),
        (ENGINE.format(config="", head="", count="args.accum", step="    engine.step()"), []),  # set to 1, perhaps
        (
            ENGINE.format(config="", head="", count="ds['gradient_accumulation_steps']", step="    engine.step()"),
            ["HS188"],
        ),
        (
            ENGINE.format(
                config="ds['gradient_accumulation_steps'] = args.n\n", head="", count="args.n", step="    engine.step()"
            ),
            ["HS188"],
        ),
        (
            ENGINE.format(
                config=FOUR,
                head="",
                count="9",
                step="        if engine.is_gradient_accumulation_boundary(): engine.step()",
            ),
            ["HS188"],
        ),
        (
            ENGINE.format(config="", head="", count="9", step="        engine.step()").replace(
                "backward(loss)", f"backward(loss / {ASKED})"
            ),
            ["HS188"],
        ),
    ],
)
def test_an_engine_is_stepped_after_every_backward(text, expected):
    """engine.step counts micro-batches, whatever names the number: the engine, its configuration or a copy of either."""
    assert reported(text) == expected


OWNED = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator({options})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    accelerator.backward(model(x))
    {before}
    norm = sum(p.grad.norm() ** 2 for p in model.parameters())
    optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("options", "before", "expected"),
    [
        ("mixed_precision='fp16'", "pass", ["HS110"]),
        ("mixed_precision=args.precision", "pass", ["HS110"]),
        ("mixed_precision='bf16'", "pass", []),
        ("mixed_precision='fp16'", "accelerator.clip_grad_norm_(model.parameters(), 1.0)", []),
        ("mixed_precision='fp16'", "accelerator.unscale_gradients()", []),
    ],
)
def test_gradients_that_a_framework_scaled_are_read_after_it_unscales(options, before, expected):
    """A norm between accelerator.backward and the step is multiplied by the loss scale in fp16."""
    assert reported(OWNED.format(options=options, before=before)) == expected


def test_an_unscale_for_a_clip_that_never_comes_is_the_place():
    """Where only the branch without a scaler clips, the finding is at the unscale_ that the clip should follow."""
    text = HEAD + (
        "for x in loader:\n    if amp:\n        scaler.scale(model(x)).backward()\n        scaler.unscale_(optimizer)\n"
        "        scaler.step(optimizer)\n        scaler.update()\n    else:\n        model(x).backward()\n"
        f"        {CLIP}\n        optimizer.step()\n    optimizer.zero_grad()\n"
    )
    assert [(f.code, f.line) for f in findings(text, "HS113")] == [("HS113", 6)]


def test_a_setting_is_one_whatever_its_name():
    """`config.unscale` does not vary: the unscale_ under it runs on every micro-batch, as the clip does, which is scaled without it."""
    body = f"if config.unscale: scaler.unscale_(optimizer)\n{CLIP}\nif (i + 1) % accum == 0: scaler.step(optimizer); scaler.update()"
    text = plain(body, " / accum", HEAD).replace("loss.backward", "scaler.scale(loss).backward")
    assert reported(text) == ["HS104", "HS106", "HS189"]


def test_a_scaler_that_is_always_none_scales_nothing():
    """A branch for a scaler that the script sets to None only is not taken."""
    text = f"import torch\nscaler = None\ndef step(loss):\n    if scaler: scaler.scale(loss).backward()\n    {CLIP}\n"
    text += "    if scaler: scaler.step(optimizer)\nfor x in loader:\n    step(model(x))\n"
    assert reported(text) == []
    assert reported(text.replace("= None", "= torch.amp.GradScaler('cuda')")) == ["HS104"]


def test_the_step_of_an_optimizer_class_in_the_file_is_a_step():
    """A class derived from torch's Optimizer is not followed into its arithmetic."""
    text = HEAD + (
        "class Muon(torch.optim.Optimizer):\n    def step(self):\n        update(self)\n"
        "optimizer = Muon(model.parameters())\nfor x in loader:\n    scaler.scale(model(x)).backward()\n    optimizer.step()\n"
    )
    assert [f.code for f in findings(text, "HS103")] == ["HS103"]


CHUNKS = """\
import torch
for batch in loader:
    optimizer.zero_grad()
    for i, part in enumerate({source}):
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(part){divided}
        loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("source", "divided", "expected"),
    [
        ("deep_chunk(batch, self.iter_size)", "", ["HS180"]),
        ("split_batch(batch, accumulation_steps)", "", ["HS180"]),
        ("deep_chunk(batch, self.iter_size)", " / self.iter_size", []),
        ("split_batch(batch, micro_batch_size)", "", []),
    ],
)
def test_a_helper_that_splits_a_batch_makes_a_window(source, divided, expected):
    """A loop over the chunks of a batch is a window if the helper is passed their number, not their size."""
    assert reported(CHUNKS.format(source=source, divided=divided)) == expected


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("divisible_by(i + 1, accumulate)", ["HS180"]),
        ("is_divisible(i, 4)", ["HS180"]),
        ("self.every_n_iters(runner, self.update_interval)", ["HS180"]),
        ("divisible_by(i, 1)", []),
    ],
)
def test_a_predicate_ends_a_window(test, expected):
    """`divisible_by(i, n)` and mmcv's `every_n_iters(runner, n)` mean the same as `i % n == 0`."""
    assert reported(plain(f"if {test}: {STEP}")) == expected
    assert reported(plain(f"if {test}: {STEP}", f" / {test.rpartition(' ')[2][:-1]}")) == []


def test_a_predicate_ends_the_window_of_unscale():
    """unscale_ on every micro-batch is reported whatever the condition of the step is written as."""
    body = "scaler.unscale_(optimizer)\nif divisible_by(i, accum): scaler.step(optimizer); scaler.update(); optimizer.zero_grad()"
    text = plain(body, " / accum", HEAD).replace("loss.backward", "scaler.scale(loss).backward")
    assert reported(text) == ["HS106"]


SWITCH = """\
import torch
scaler = torch.amp.GradScaler('cuda')
for i, x in enumerate(loader):
    {clear}
    if args.amp:
        with torch.autocast('cuda', dtype=torch.float16): loss = model(x)
        scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
    elif args.accum > 1:
        loss = model(x) / args.accum
        if (i + 1) % args.accum == 0:
            loss.backward(); optimizer.step(); optimizer.zero_grad()
        else:
            with model.no_sync(): loss.backward()
    else:
        model(x).backward(); optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize(("clear", "expected"), [("optimizer.zero_grad()", ["HS181"]), ("pass", [])])
def test_gradients_are_cleared_in_every_branch(clear, expected):
    """A zero_grad above several branches discards what the one with a window accumulates."""
    assert reported(SWITCH.format(clear=clear)) == expected


HELPER = """\
import deepspeed, json
class Trainer:
    def __init__(self, model, path):
        config = json.load(open(path))
        self.accumulation = config.get('gradient_accumulation_steps')
        self.engine, self.optimizer = self.prepare(model, config)
    def prepare(self, model, config):
        engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
        return engine, optimizer
    def train(self, loader):
        for x in loader:
            loss = self.engine(x){divided}
            self.engine.backward(loss)
            self.engine.step()
"""


@pytest.mark.parametrize(("divided", "expected"), [(" / self.accumulation", ["HS188"]), ("", [])])
def test_an_engine_that_a_helper_returns_divides_too(divided, expected):
    """The division is the second one if the engine's configuration has the number that the script divides by."""
    assert reported(HELPER.format(divided=divided)) == expected


SUMMED = """\
import torch
def validate(model, loader):
    with torch.no_grad():
        for x, y in loader:
            loss = F.cross_entropy(model(x), y, reduction='sum')
            total += loss.item()
def train(model, loader):
    for i, (x, y) in enumerate(loader):
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y{reduction})
        loss.backward()
        if (i + 1) % accum == 0:
            optimizer.step(); optimizer.zero_grad()
            validate(model, loader)
train(model, loader)
"""


@pytest.mark.parametrize(("reduction", "expected"), [("", ["HS180"]), (", reduction='sum'", [])])
def test_the_sum_of_a_validation_is_not_the_loss(reduction, expected):
    """reduction="sum" under no_grad does not make the training loss a sum."""
    assert reported(SUMMED.format(reduction=reduction)) == expected


GAN = """\
import torch
scaler = torch.amp.GradScaler('cuda')
for i, x in enumerate(loader):
    with torch.autocast('cuda', dtype=torch.float16): loss_g = generator(x){divided}
    scaler.scale(loss_g).backward()
    ends = (i + 1) % accum == 0 or i + 1 == len(loader)
    if ends:
        scaler.step(opt_g); scaler.update(); opt_g.zero_grad()
    if update_discriminator:
        discriminator(x).backward(); opt_d.step(); opt_d.zero_grad()
"""


@pytest.mark.parametrize(("divided", "expected"), [("", ["HS180"]), (" / accum", [])])
def test_the_window_of_a_generator_has_its_own_optimizer(divided, expected):
    """A discriminator that is cleared in every iteration does not end the window of the generator."""
    assert reported(GAN.format(divided=divided)) == expected


TWICE = """\
import torch
scaler = torch.amp.GradScaler('cuda')
for i, x in enumerate(loader):
    with torch.autocast('cuda', dtype=torch.float16):
        loss = model(x).mean()
        {first}
    {second}
    if (i + 1) % args.accum_steps == 0:
        scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("if args.accum_steps > 1: loss = loss / args.accum_steps", "scaler.scale(loss / args.accum_steps).backward()", ["HS182"]),
        ("if args.accum_steps > 1: loss /= args.accum_steps", "scaler.scale(loss).div(args.accum_steps).backward()", ["HS182"]),
        ("loss = loss.div(args.accum_steps)", "scaler.scale(loss / args.accum_steps).backward()", ["HS182"]),
        ("if args.accum_steps > 1: loss = loss / args.accum_steps", "scaler.scale(loss).backward()", []),
        ("if args.mean: loss = loss / args.accum_steps", "scaler.scale(loss / args.accum_steps).backward()", []),
        ("loss = loss.div(args.accum_steps)", "scaler.scale(loss).backward()", []),
    ],
)  # fmt: skip
def test_a_division_that_waits_for_several_micro_batches_counts(first, second, expected):
    """`if n > 1: loss = loss / n` and `loss.div(n)` are divisions; another condition may exclude one."""
    assert reported(TWICE.format(first=first, second=second)) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("p.grad.add_(torch.randn_like(p.grad) * sigma)", ["HS110"]),
        ("p.grad += args.weight_decay * p", ["HS110"]),
        ("p.grad.data.sub_(noise)", ["HS110"]),
        ("p.grad.add_(p.other.grad)", []),
        ("p.grad += buffers[p]", []),
        ("p.grad.mul_(0.5)", []),
    ],
)
def test_what_is_added_to_a_scaled_gradient_has_its_scale(change, expected):
    """Noise and weight decay that are added before unscale_ are too small by the scale; a factor or a gradient is not."""
    text = HEAD + (
        "for x in loader:\n    scaler.scale(model(x)).backward()\n{unscale}    for p in model.parameters():\n"
        f"        {change}\n    scaler.step(optimizer)\n    scaler.update()\n"
    )
    assert reported(text.format(unscale="")) == expected
    assert reported(text.format(unscale="    scaler.unscale_(optimizer)\n")) == []


SLICES = """\
for batch, y in loader:
    optimizer.zero_grad()
    for i in range(0, {total}, {size}):
        with torch.autocast('cuda', dtype=torch.float16):
            loss = {loss}
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("size", "loss", "expected"),
    [
        ("microbatch", "F.mse_loss(model(batch[i : i + microbatch]), y[i : i + microbatch])", ["HS180"]),
        ("args.chunk_size", "losses(model, batch[i : i + args.chunk_size]).mean()", ["HS180"]),
        ("mini_bs", "(losses(model, batch[i : i + mini_bs]) * weights).mean()", ["HS180"]),
        ("microbatch", "F.mse_loss(model(batch[i : i + microbatch]), y) * share", []),
        ("microbatch", "F.mse_loss(model(batch[i : i + microbatch]), y) / num_slices", []),
        ("microbatch", "losses(model, batch[i : i + microbatch]).sum()", []),
        ("microbatch", "F.mse_loss(model(batch[i : i + microbatch]), y, reduction='sum')", []),
        ("microbatch", "F.mse_loss(model(batch), y)", []),
        ("bptt", "F.mse_loss(model(batch[i : i + bptt]), y)", []),
    ],
)
def test_the_mean_losses_of_slices_of_a_batch_are_divided_by_their_number(size, loss, expected):
    """`range(0, n, size)` over a batch is a window of n / size micro-batches, unless each loss has its share as a factor."""
    text = HEAD + SLICES.format(total="len(batch)", size=size, loss=loss)
    assert reported(text) == expected


WINDOWED = """\
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps={steps}, mixed_precision="bf16"{options})
def train(loader):
    for x in loader:
        with accelerator.accumulate(model):
            {before}
            accelerator.backward(model(x))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            {after}
"""
FIRST = "optimizer.zero_grad()"


@pytest.mark.parametrize(
    ("steps", "options", "before", "after", "expected"),
    [
        ("4", "", FIRST, "pass", ["HS181"]),
        ("args.steps", "", FIRST, "pass", ["HS181"]),
        ("args.steps", ", fsdp_plugin=plugin", FIRST, "pass", ["HS181"]),
        ("4", "", FIRST, FIRST, ["HS181"]),
        ("4", "", f"if accelerator.sync_gradients: {FIRST}", "pass", ["HS181"]),
        ("4", "", "for o in optimizers: o.zero_grad()", "pass", ["HS181"]),
        ("4", "", "pass", FIRST, []),
        ("4", "", f"if i % 4 == 0: {FIRST}", "pass", []),
        ("1", "", FIRST, "pass", []),
        ("4", ", deepspeed_plugin=plugin", FIRST, "pass", []),
        ("4", "", "accelerator.backward(other(x)); other_optimizer.step(); other_optimizer.zero_grad()", FIRST, []),
    ],
)
def test_the_optimizer_of_accelerate_clears_after_its_step(steps, options, before, after, expected):
    """Inside accumulate, zero_grad runs on the last micro-batch only, so before the backward it discards the others."""
    text = WINDOWED.format(steps=steps, options=options, before=before, after=after)
    assert reported(text) == expected


ENTERED = """\
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps={steps}, mixed_precision="bf16")
for x in loader:
{body}
"""
G = "with accelerator.accumulate(g): accelerator.backward(g(x)); opt_g.step(); opt_g.zero_grad()"
D = G.replace("g)", "d)").replace("g(x)", "d(x)").replace("opt_g", "opt_d")
BOTH = "    with accelerator.accumulate(g), accelerator.accumulate(d):\n        accelerator.backward(g(x)); opt_g.step(); opt_g.zero_grad()"
NESTED = BOTH.replace("(g), ", "(g):\n        with ").replace("\n        acc", "\n            acc")


@pytest.mark.parametrize(
    ("steps", "body", "expected"),
    [
        ("4", BOTH, ["HS178"]),
        ("n", BOTH, ["HS178"]),
        ("4", NESTED, ["HS178"]),
        ("4", f"    {G}\n    {D}", ["HS178"]),
        ("4", f"    if train:\n        {G}\n        {D}", ["HS178"]),
        ("1", BOTH, []),
        ("4", f"    if x:\n        {G}\n    else:\n        {D}", []),
        ("4", f"    if x:\n        {G}\n    if y:\n        {D}", []),
        ("4", f"    {G}\nfor x in other:\n    {D}", []),
        ("4", f"    {G.replace('(g):', '(g, d):')}", []),
    ],
)
def test_accumulate_counts_each_iteration_once(steps, body, expected):
    """Every entry of accumulate counts a micro-batch, so two of them in one iteration halve the window."""
    assert [f.code for f in findings(ENTERED.format(steps=steps, body=body), "HS178")] == expected


MEASURED = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, x in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x) / accum
    scaler.scale(loss).backward()
    if (i + 1) % accum == 0:
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
    {otherwise}
"""


@pytest.mark.parametrize(
    ("otherwise", "expected"),
    [
        ("else: norm = compute_grad_norm(model.parameters())", [11]),
        ("else: norm = sum(p.grad.norm() for p in model.parameters())", [11]),
        ("else: norm = None", []),
        ("log(norm)", []),
    ],
)
def test_a_norm_between_two_steps_has_the_scale(otherwise, expected):
    """Micro-batches without a step never unscale, so a norm that is measured there is too large by the scale."""
    reports = findings(MEASURED.format(otherwise=otherwise), "HS110")
    assert [f.line for f in reports] == expected
    assert all("where the optimizer steps" in f.instead for f in reports)


def test_the_call_of_a_helper_that_measures_is_the_place():
    """A function that computes a norm is right wherever it is; the call before unscale_ is reported, with its name."""
    helper = "def total(ps):\n    return sum(p.grad.norm() ** 2 for p in ps) ** 0.5\n"
    early = MEASURED.replace("    if (i", "    before = total(model.parameters())\n    if (i").format(
        otherwise="log(before)"
    )
    (finding,) = findings(helper + early, "HS110")
    assert finding.line == 9
    assert "`total` reads `.grad`" in finding.message
    late = MEASURED.replace("        norm =", "        before = total(model.parameters())\n        norm =")
    assert not findings(helper + late.format(otherwise="log(before)"), "HS110")


@pytest.mark.parametrize(("steps", "expected"), [("8", ["HS188"]), ("4", []), ("load()", [])])
def test_a_divisor_with_the_value_of_the_accelerator_divides_again(steps, expected):
    """A variable that is set to the number which the Accelerator also receives is the same number."""
    text = WINDOWED.format(steps="8", options="", before="pass", after=FIRST)
    text = text.replace("backward(model(x))", "backward(model(x) / num)").replace(
        "def train", f"num = {steps}\ndef train"
    )
    assert reported(text) == expected


TWO_BACKWARDS = """\
import torch
scaler = torch.amp.GradScaler('cuda')
for i, x in enumerate(loader):
    with torch.autocast('cuda', dtype=torch.float16, enabled=args.amp):
        loss = model(x) / args.accum
    if args.amp:
        scaler.scale(loss).backward()
    else:
        loss.backward()
    {test}
        if args.amp:
            scaler.step(optimizer); scaler.update()
        else:
            optimizer.step()
{indent}    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("test", "indent", "expected"),
    [
        ("if (i + 1) % args.accum == 0:", "", [15]),
        ("if (i + 1) % args.accum == 0:", "    ", []),
        ("if True:", "", [15]),
    ],
)
def test_branches_with_and_without_amp_are_one_backward(test, indent, expected):
    """HS181 reports gradients that are cleared on every micro-batch also where backward has a branch for AMP."""
    assert [f.line for f in findings(TWO_BACKWARDS.format(test=test, indent=indent), "HS181")] == expected


def test_a_test_of_the_settings_is_no_end_of_a_window():
    """HS189 reports a clip inside accumulate() in a script that rejects some settings above."""
    text = """\
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision='fp16', gradient_accumulation_steps=4)
if args.train_text and args.gradient_accumulation_steps > 1 and (accelerator.num_processes > 1):
    raise ValueError('not supported')
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(x))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""
    assert [f.line for f in findings(text, "HS189")] == [9]


@pytest.mark.parametrize(("count", "expected"), [("2", []), ("args.steps", [7])])
def test_a_few_steps_for_a_measurement_are_left_alone(count, expected):
    """HS181 does not report the steps of a trial, such as two iterations for a memory profile."""
    text = f"""\
import torch
for _ in range({count}):
    with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = model(x) / args.accumulation_steps
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert [f.line for f in findings(text, "HS181")] == expected


PER_BATCH = """\
def train_step(model, batch, optimizer, accelerator, accumulation_steps, step):
    loss = model(**batch).loss / accumulation_steps
    accelerator.backward(loss)
    {every}
    if {test}:
        {last}
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()
"""
CLIP_ALL = "accelerator.clip_grad_norm_(model.parameters(), 1.0)"


@pytest.mark.parametrize(
    ("every", "test", "last", "is_reported"),
    [
        (CLIP_ALL, "step % accumulation_steps == 0", "pass", True),
        ("pass", "step % accumulation_steps == 0", CLIP_ALL, False),
        (f"if accelerator.sync_gradients: {CLIP_ALL}", "step % accumulation_steps == 0", "pass", False),
        (f"if step % accumulation_steps == 0: {CLIP_ALL}", "step % accumulation_steps == 0", "pass", False),
        (CLIP_ALL, "ready", "pass", False),
    ],
)
def test_a_clip_in_a_function_for_one_micro_batch(every, test, last, is_reported):
    """HS189 in a function without a loop, which has the backward, the clip and a step that counts."""
    text = PER_BATCH.format(every=every, test=test, last=last)
    assert ("HS189" in reported(text)) == is_reported


PROBED = """\
import torch

def train_batch(model, optimizer, scaler, x, step_now=True, clear=True):
    if clear:
        optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    if step_now:
        scaler.step(optimizer)
        scaler.update()

def largest_batch(model, optimizer, scaler, xs):
    for x in xs:
        train_batch(model, optimizer, scaler, x, step_now={step})
        optimizer.zero_grad()

def fit(model, optimizer, loader, accum):
    scaler = torch.amp.GradScaler("cuda")
    largest_batch(model, optimizer, scaler, loader)
    for i, x in enumerate(loader):
        step_now = (i + 1) % accum == 0
        train_batch(model, optimizer, scaler, x, step_now=step_now, clear=i % accum == 0)
"""


def test_a_literal_decides_the_step_of_one_call():
    """A probe that passes False never steps: its zero_grad discards no window; the flag of another call is not its flag."""
    assert not findings(PROBED.format(step="False"), "HS181")


CLEARED = """\
import torch

def train_batch(model, optimizer, x, step_now):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x)
    loss.backward()
    if step_now:
        optimizer.step()

def fit(model, optimizer, loader, accum):
    for i, x in enumerate(loader):
        step_now = (i + 1) % accum == 0
        train_batch(model, optimizer, x, step_now)
"""


def test_a_flag_that_every_call_counts():
    """The same function still has a window where each call passes a counting flag."""
    assert [f.line for f in findings(CLEARED, "HS181")] == [4]


def test_a_clip_in_the_loop_around_a_backward_in_a_function_is_reported_where_it_is():
    """The backward is two calls deep, the clip in the loop itself."""
    text = (
        "import torch\n"
        "def back(loss):\n    run(loss)\n"
        "def run(loss):\n    (loss / accum).backward()\n"
        "for i, x in enumerate(loader):\n"
        '    with torch.autocast("cuda", dtype=torch.bfloat16):\n        loss = model(x)\n'
        "    back(loss)\n"
        f"    {CLIP}\n"
        "    if (i + 1) % accum == 0:\n        optimizer.step()\n        optimizer.zero_grad()\n"
    )
    assert [f.line for f in findings(text, "HS189")] == [10]
