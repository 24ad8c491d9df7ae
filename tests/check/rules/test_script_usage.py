"""Models, scalers, schedules and settings are recognised by how they are used, whatever they are called."""

import pytest

from check_scripts import codes, findings

TRAIN = """\
import torch
scaler = torch.amp.GradScaler('cuda')
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast('cuda', dtype=torch.float16):
        loss = loss_fn({name}(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
{name}.eval()
"""


def reported(text, *wanted):
    """The findings of these rules, each with its line."""
    return [c for c in codes(text) if c.startswith(wanted)]


@pytest.mark.parametrize(
    ("name", "validation", "count"),
    [
        ("hubert", "for x in valid_loader:\n    with torch.no_grad():\n        out = hubert(x)\n", 1),
        ("seg_net", "with torch.no_grad():\n    for x in test_set:\n        out = seg_net(x)\n", 1),
        ("generator", "with torch.no_grad():\n    sample = generator(noise)\n", 0),
        ("student", "with torch.no_grad():\n    for x in valid_loader:\n        out = teacher(x)\nteacher.eval()\n", 0),
        ("model", "with tqdm(total=3) as bar, torch.no_grad():\n    out = model(x)\n", 1),
        ("model", "with precision_context(), torch.no_grad():\n    out = model(x)\n", 0),
    ],
)
def test_validation_of_a_model_with_any_name(name, validation, count):
    """A validation loop without autocast is found for any model; samples, other models and unknown contexts are not."""
    assert len(reported(TRAIN.format(name=name) + validation, "HS149")) == count


LATER = """\
import torch
def save(state, path):
    optimizer_filename = make_path(path)
    torch.save(state, optimizer_filename)
def train_one_epoch(model, loader, optimizer, use_amp):
    scaler = torch.amp.GradScaler('cuda', enabled=use_amp)
    for x in loader:
        with torch.autocast('cuda', dtype=torch.float16, enabled=use_amp):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
if set(names) == set(train_set.names):
    for epoch in range(9):
        train_one_epoch(model, loader, optimizer, True)
        save(model, epoch)
"""


def test_scaler_of_each_epoch_is_found_behind_other_conditions():
    """A file name with "optimizer" in it is no new optimizer, and a condition around all training is no first time."""
    assert reported(LATER, "HS121") == ["HS121:6"]
    recreated = LATER.replace(
        "        train_one_epoch", "        optimizer = torch.optim.SGD(params)\n        train_one_epoch"
    )
    assert reported(recreated, "HS121") == []
    first = LATER.replace("    scaler = ", "    if epoch == 0:\n        scaler = ")
    assert reported(first, "HS121") == []


METHOD = """\
import torch
class Trainer:
    def _train_epoch(self):
        scaler = torch.cuda.amp.GradScaler() if self.fp16 else None
        for x in self.loader:
            self.optimizer.zero_grad()
            with torch.cuda.amp.autocast():
                loss = self.model(x)
            scaler.scale(loss).backward()
            self.optimizer.step('generator', scaler=scaler)
    def save(self):
        torch.save({'optimizer': self.optimizer.state_dict()}, 'a.pt')
    def load(self):
        self.optimizer.load_state_dict(torch.load('a.pt')['optimizer'])
"""


def test_optimizer_that_is_stepped_with_a_scaler():
    """An optimizer whose step receives the scaler steps through it: the scaler's mistakes are found, and no other."""
    assert reported(METHOD, "HS10", "HS121", "HS170") == ["HS121:4", "HS170:12"]


WINDOW = """\
import torch
scaler = torch.amp.GradScaler('cuda')
for i, x in enumerate(loader):
    with torch.autocast('cuda', dtype=torch.float16):
        loss = model(x){divided}
    scaler.scale(loss).backward()
    count += 1
    if count == cfg.gradient_acc:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        count = 0
    {schedule}
"""


def test_windows_that_a_counter_ends():
    """A counter that reaches the number of micro-batches ends a window, over which the loss has to be divided."""
    assert reported(WINDOW.format(divided="", schedule="pass"), "HS180") == ["HS180:6"]
    assert reported(WINDOW.format(divided=" / cfg.gradient_acc", schedule="pass"), "HS180") == []
    other = WINDOW.format(divided="", schedule="pass").replace("cfg.gradient_acc", "limit")
    assert reported(other, "HS180") == ["HS180:6"]  # it starts again, so `limit` is the length of a window
    assert reported(other.replace("        count = 0\n", ""), "HS180") == []


@pytest.mark.parametrize(
    ("schedule", "count"),
    [
        ("scheduler.step()", 1),
        ("if conf.get('per_batch', True): scheduler.step()", 1),
        ("if conf.reload('per_batch'): scheduler.step()", 0),
        ("if i == last: scheduler.step()", 0),
    ],
)
def test_schedules_next_to_a_window(schedule, count):
    """A schedule that advances on every micro-batch ignores skipped steps, too, if only settings decide about it."""
    text = WINDOW.format(divided=" / cfg.gradient_acc", schedule=schedule)
    assert len(reported(text, "HS196")) == count


SWITCH = """\
import torch
class Trainer:
    def __init__(self, schedule_each_step=False):
        self.schedule_each_step = schedule_each_step
        self.scaler = torch.amp.GradScaler('cuda')
    def fit(self):
        for x in self.loader:
            with torch.autocast('cuda', dtype=torch.float16):
                loss = self.model(x)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            if self.schedule_each_step:
                self.scheduler.step()
"""


def test_an_attribute_of_init_is_a_setting():
    """An attribute that only `__init__` assigns is the same in every iteration, even if "step" is in its name."""
    assert reported(SWITCH, "HS196") == ["HS196:15"]
    assert (
        reported(
            SWITCH.replace("            if self", "            self.schedule_each_step = x\n            if self"),
            "HS196",
        )
        == []
    )


@pytest.mark.parametrize(
    ("head", "region", "count"),
    [
        ("", "dtype=torch.bfloat16", 1),
        ("", "dtype=torch.bfloat16, enabled=use_bfloat16", 1),
        ("", "dtype=torch.bfloat16, enabled=config.fp16", 1),
        ("", "dtype=torch.float16", 0),
        ("", "dtype=dtype", 0),
        ("if scaler is None: return\n    ", "dtype=torch.bfloat16", 0),
    ],
)
def test_a_scaler_of_another_file_with_bf16(head, region, count):
    """A scaler that is passed in scales a loss computed in bfloat16; a test of the scaler leaves both ways open."""
    text = (
        "import torch\ndef train(model, loader, optimizer, scaler, config, dtype, use_bfloat16):\n"
        f"    {head}for x in loader:\n        with torch.autocast('cuda', {region}):\n            loss = model(x)\n"
        "        scaler.scale(loss).backward()\n        scaler.step(optimizer)\n        scaler.update()\n"
    )
    assert len(reported(text, "HS120")) == count
    if count:
        (finding,) = findings(text, "HS120")
        assert "unless `scaler` is created with enabled=False" in finding.message


def test_a_flag_and_the_condition_it_stands_for():
    """`use_amp = args.precision is not None` switches the scaler with the region, also when the dtype is bfloat16."""
    text = (
        "import torch, argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--precision', choices=['float16', 'bfloat16'])\nargs = parser.parse_args()\n"
        "on = args.precision is not None\n"
        "scaler = torch.amp.GradScaler('cuda', enabled=on) if new else torch.cuda.amp.GradScaler(enabled=on)\n"
        "dtype = {'float16': torch.float16, 'bfloat16': torch.bfloat16}[args.precision]\nfor x in loader:\n"
        "    with torch.autocast('cuda', enabled=args.precision is not None, dtype=dtype):\n        loss = model(x)\n"
        "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
    )
    assert reported(text, "HS120") == ["HS120:6"]
    assert reported(text.replace("on = args.precision is not None", "on = args.precision == 'float16'"), "HS120") == []


def test_a_wrapped_model_of_another_file_may_open_a_region():
    """DataParallel is a class of torch, but the model inside it comes from another file."""
    text = (
        "import torch\nfrom models import Net\nfrom torchvision.models import resnet50\n"
        "model = torch.nn.DataParallel({}()).cuda()\nscaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n"
        "    loss = model(x)\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
    )
    assert reported(text.format("Net"), "HS134") == []
    assert reported(text.format("resnet50"), "HS134") == ["HS134:8"]


def test_a_backward_before_the_loop():
    """A backward that only tries a model out is not the one whose gradients the loop steps with."""
    text = (
        "import torch\ny = model(x)\ny.sum().backward()\nscaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n        loss = model(x)\n    {}.backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n"
    )
    assert reported(text.format("scaler.scale(loss)"), "HS102") == []
    assert reported(text.format("loss"), "HS102")[-1] == "HS102:8"


LOOP = """\
import torch, utils
scaler = torch.amp.GradScaler('cuda')
for x in loader:
    optimizer.zero_grad()
    with torch.autocast('cuda', dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    {first}
    {second}
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("clip", "count"),
    [
        ("utils.clip_gradients(model, 3.0)", 1),
        ("utils.clip_grads(model.parameters(), 3.0)", 1),
        ("utils.clip_gradients(model, scaler)", 0),
        ("utils.clip_gradients(optimizer, 3.0)", 0),
        ("self.clip_gradients(optimizer, 3.0)", 0),
    ],
)
def test_clipping_by_a_function_of_another_file(clip, count):
    """A function that clips a model's gradients needs them unscaled; one that receives the scaler may unscale."""
    assert len(reported(LOOP.format(first=clip, second="pass"), "HS104")) == count
    assert reported(LOOP.format(first="scaler.unscale_(optimizer)", second=clip), "HS104") == []


@pytest.mark.parametrize(
    "change", ["w.grad[torch.isnan(w.grad)] = 0", "w.grad.nan_to_num_()", "torch.nan_to_num(w.grad)"]
)
def test_gradients_that_are_replaced_before_they_are_unscaled(change):
    """Replacing NaN in scaled gradients hides the overflow from the scaler; after unscale_ it has been recorded."""
    assert reported(LOOP.format(first=change, second="pass"), "HS110") == ["HS110:8"]
    assert reported(LOOP.format(first="scaler.unscale_(optimizer)", second=change), "HS110") == []


@pytest.mark.parametrize(
    ("validation", "count"),
    [
        ("@torch.no_grad()\ndef evaluate(model):\n    for batch in valid:\n        out = model(**batch)\n", 1),
        ("@torch.no_grad()\ndef evaluate(model):\n    for x in valid:\n        out = model.module(x)\n", 1),
        ("@torch.no_grad()\ndef evaluate(model_ema):\n    for x in valid:\n        out = model_ema.ema(x)\n", 1),
        ("def evaluate(model):\n    torch.set_grad_enabled(False)\n    for x in valid:\n        out = model(x)\n", 1),
        (
            "def evaluate(model):\n    torch.set_grad_enabled(False)\n    torch.set_grad_enabled(True)\n"
            "    for x in valid:\n        out = model(x)\n",
            0,
        ),
        ("with torch.set_grad_enabled(train):\n    if not train:\n        out = model(x)\n", 1),
        ("with torch.set_grad_enabled(train):\n    if not debug:\n        out = model(x)\n", 0),
        ("import pytest\ndef test_a(model):\n    with torch.no_grad():\n        out = model(x)\n", 0),
        ("with torch.no_grad():\n    other = self._create_model(x)\n", 0),
    ],
)
def test_validation_in_every_form(validation, count):
    """Validation is recognised by its contexts, switches and wrappers; training, test cases and factories are not validation."""
    assert len(reported(TRAIN.format(name="model") + validation, "HS149")) == count


ITERATION = TRAIN.format(name="model").replace("model.eval()\n", "")


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("if epoch < args.warmup_epochs: scheduler.step()", 1),
        ("if (epoch + 1) % 2 == 0: scheduler.step()", 0),
        ("for s in schedulers: s.step()", 1),
        ("for s in samplers: s.step()", 0),
        ("sch.step()", 1),
        ("lr_scheduler.step_update(num_updates)", 1),
        ("scheduler.step(); print(scaler.get_scale())", 1),
        ("if scaler.get_scale() >= before: scheduler.step()", 0),
        ("skipped = scaler.get_scale()\n    if skipped >= before: scheduler.step()", 0),
    ],
)
def test_schedule_in_every_form(line, count):
    """A schedule that advances with the loop is found in any form, unless the scale is compared."""
    assert len(reported(ITERATION + f"    {line}\n", "HS196")) == count


def test_schedule_of_a_factory():
    """The result of `get_linear_schedule_with_warmup` is a schedule, whatever its name."""
    text = ITERATION.replace("for x, y", "lr = get_linear_schedule_with_warmup(optimizer, 10, 100)\nfor x, y")
    assert reported(text + "    lr.step()\n", "HS196") == ["HS196:11"]


PLAIN = """\
import torch
from torchvision.models import resnet50
from torch.cuda.amp import (
    autocast,
    GradScaler,
)
scaler = GradScaler()
{create}
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)  # under autocast?
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("create", "count"),
    [
        ("model = resnet50()\nmodel = model.cuda()", 1),
        ("net = resnet50()\nmodel = torch.nn.DataParallel(net.cuda())", 1),
        ("model = resnet50()\nmodel = torch.compile(model)", 1),
        ("model = resnet50()\nif multi:\n    model = torch.nn.parallel.DistributedDataParallel(model.to(rank))", 1),
        ("model = resnet50()\ncontext = autocast()", 1),  # which nothing enters
        ("model = resnet50()\ncontext = autocast()\nuse(context)", 0),
    ],
)
def test_scaler_without_region_with_an_unused_import(create, count):
    """An import of autocast opens no region; a model that is moved or wrapped is still that model."""
    text = PLAIN.format(create=create)
    assert len(reported(text, "HS134")) == count
    assert not any("unless" in f.message for f in findings(text, "HS134"))


@pytest.mark.parametrize(
    "create",
    [
        "model = build()\nmodel = model.cuda()",
        "model = resnet50()\nmodel = wrap(model)",
    ],
)
def test_scaler_without_region_of_an_unknown_model(create):
    """A model of another file may open a region itself: with the import unused that is stated, without it nothing is."""
    text = PLAIN.format(create=create)
    assert ["unless `model` opens one itself" in f.message for f in findings(text, "HS134")] == [True]
    assert findings(text.replace("    autocast,\n", ""), "HS134") == []


BRANCHES = """\
import torch
scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
        loss = loss_fn(model(x), y)
    if {test}:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        {clip}
        optimizer.step()
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (BRANCHES.format(test="use_amp", clip="clip_gradient(optimizer, 0.5)"), 1),
        (BRANCHES.format(test="device.type == 'cuda'", clip=CLIP), 1),
        (BRANCHES.format(test="use_amp", clip=CLIP) + "    clip_gradient(optimizer, 0.5)\n", 0),
        (BRANCHES.format(test="use_amp", clip=CLIP).replace("    scaler.step", f"    {CLIP}\n        scaler.step"), 0),
        (ITERATION.replace("('cuda')", "('cuda', enabled=amp)").replace("    scaler.step", f"    if not amp: {CLIP}\n    scaler.step"), 1),
        (ITERATION.replace("('cuda')", "('cuda', enabled=amp)").replace("    scaler.step", f"    if not warm: {CLIP}\n    scaler.step"), 0),
    ],
)  # fmt: skip
def test_clipping_that_mixed_precision_leaves_out(text, count):
    """Clipping by a function of the project, or only where the scaler is disabled, is found; a clip on both paths is not."""
    assert len(reported(text, "HS113")) == count


def test_clipping_in_one_of_two_functions():
    """A function for float32 clips, the one for mixed precision does not."""
    text = (
        "import torch\nscaler = torch.amp.GradScaler('cuda')\n"
        "def step_amp(loss):\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
        f"def step_plain(loss):\n    loss.backward()\n    {CLIP}\n    optimizer.step()\n"
        "for x in loader:\n    optimizer.zero_grad()\n    if amp:\n        with torch.autocast('cuda', dtype=torch.float16):\n"
        "            loss = model(x).mean()\n        step_amp(loss)\n    else:\n        step_plain(model(x).mean())\n"
    )
    assert reported(text, "HS113") == ["HS113:5"]


def test_schedules_under_the_name_of_a_scaler_are_no_scaler():
    """`[s.step() for s in schedules]` next to `[s.step(o) for s, o in ...]` is not a step of the scaler."""
    text = """\
import torch
scalers = [torch.amp.GradScaler("cuda") for _ in optimizers]
for _ in range(start * len(loader)):
    [s.step() for s in schedules]
    [w.step() for w in wd_schedulers]
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        losses = model(x, y)
    [s.scale(l).backward() for s, l in zip(scalers, losses)]
    [s.step(o) for s, o in zip(scalers, optimizers)]
    [s.update() for s in scalers]
    [o.zero_grad() for o in optimizers]
"""
    assert codes(text) == []
