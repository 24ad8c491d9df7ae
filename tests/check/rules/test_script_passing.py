"""Scalers that are stored, logged or received as a parameter, and steps under conditions that do not test gradients."""

import pytest

from check_scripts import findings

LOOP = """\
import torch
scaler = torch.amp.GradScaler("cuda")
{before}
for i, x in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
{body}
"""
SCALED = ["scaler.scale(loss).backward()", "scaler.unscale_(optimizer)", "norm = clip_grad_norm_(params, 1.0)"]
STEP = ["scaler.step(optimizer)", "scaler.update()", "optimizer.zero_grad()"]
TRAIN = """\
import torch
def {name}(model, loss, optimizer, scaler):
    scaler.scale(loss).backward()
    scaler.step(optimizer)
{more}    optimizer.zero_grad()
"""
DISABLED = """\
import torch
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        outputs = model(x)
    with torch.autocast("cuda", enabled=False):
        loss = criterion({read}, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
NESTED = """\
import torch
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        outputs = model(x)
        with torch.autocast("cuda", enabled=False):
            loss = criterion(outputs.float(), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def loop(*lines, before=""):
    """A training loop with these lines after the loss."""
    return LOOP.format(before=before, body="\n".join(f"    {line}" for line in lines))


def codes(text, *wanted):
    """The findings in a script that are of the wanted rules."""
    return [f.code for f in findings(text) if f.code in wanted]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("save_checkpoint(path, model, optimizer, scaler)", ["HS101"]),
        ("utils.save_checkpoint_with_batch_idx(model, scaler=scaler)", ["HS101"]),
        ("state = create_checkpoint(model, optimizer, scaler)", ["HS101"]),
        ("load_state(path, scaler)", ["HS101"]),
        ("attack = AWP(model, optimizer, scaler)", []),
        ("train_step(model, scaler)", []),
        ("trainer.optimize(scaler)", []),
    ],
)
def test_a_stored_scaler_is_not_updated_elsewhere(call, expected):
    """A function that saves or restores a scaler does not update it; any other function may."""
    text = loop("scaler.scale(loss).backward()", "scaler.step(optimizer)", "optimizer.zero_grad()", call)
    assert codes(text, "HS101") == expected


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        ("scaler.update(1.0)", ["HS101"]),
        ("scaler.update()", []),
    ],
)
def test_an_update_that_forces_a_scale_under_a_condition_is_not_the_regular_one(update, expected):
    """`if scaler.get_scale() < 1: scaler.update(1.0)` is no update of every step."""
    lines = ["scaler.scale(loss).backward()", "scaler.step(optimizer)", "optimizer.zero_grad()"]
    text = loop(*lines, "if scaler.get_scale() < 1:", f"    {update}")
    assert codes(text, "HS101") == expected


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("train_step", "", [("HS101", "warning")]),
        ("train_step", "    scaler.update()\n", []),
        ("train_step", "    finish(scaler)\n", []),
    ],
)
def test_a_function_that_scales_and_steps_with_its_parameter_has_to_update(name, more, expected):
    """A function that receives the scaler and steps with it is reported under a condition, if nothing can update it."""
    text = TRAIN.format(name=name, more=more)
    assert [(f.code, f.severity) for f in findings(text) if f.code == "HS101"] == expected


def test_a_function_whose_backward_is_optional_leaves_the_update_to_its_caller():
    """With `if not already_backward:` the caller does a part of the iteration itself, and may also update."""
    text = TRAIN.format(name="train_step", more="").replace(
        "    scaler.scale", "    if not done:\n        scaler.scale"
    )
    assert codes(text.replace("scaler):", "scaler, done=False):"), "HS101") == []


METHOD = """\
import torch
class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")
    def step(self, x):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
"""


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", []),
        ("    def train(self, loader):\n        for x in loader:\n            self.step(x)\n", ["HS101"]),
        ("trainer = Trainer(model, optimizer)\nfor x in loader:\n    trainer.step(x)\n", ["HS101"]),
    ],
)
def test_the_caller_of_a_method_for_one_batch_may_update_its_scaler(more, expected):
    """Another file can call `trainer.scaler.update()` after `trainer.step(x)`; a loop of this file shows that nothing does."""
    assert codes(METHOD + more, "HS101") == expected


def test_a_caller_that_updates_completes_the_step():
    """Two functions that step with the same scaler parameter leave the update to their caller."""
    text = TRAIN.format(name="step_d", more="") + TRAIN.format(name="step_g", more="").replace("import torch\n", "")
    assert codes(text, "HS101") == []


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("if (i + 1) % args.accum == 0:", ["HS103"]),
        ("if args.train_backbone:", ["HS103"]),
        ("if not is_tpu_available():", ["HS103"]),
        ("if torch.isfinite(norm):", []),
        ("if not skip:", []),
        ("ok = norm < 100\n    if ok:", []),
    ],
)
def test_a_step_after_unscale_bypasses_the_scaler_unless_gradients_are_tested(condition, expected):
    """The end of a window or a setting replaces no test for inf; a condition on the gradients does."""
    text = loop(*SCALED, condition, "    optimizer.step()", "    scaler.update()", "    optimizer.zero_grad()")
    assert codes(text, "HS103") == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["before = scaler.get_scale()"], ["HS103"]),
        (["logger.info(f'scale {scaler.get_scale()}')"], ["HS103"]),
        (["logs['scale'] = scaler.get_scale()"], ["HS103"]),
        (["tracker.log({'scale': scaler.get_scale()})"], ["HS103"]),
        (["factor = 1.0 / scaler.get_scale()", "for p in params:", "    p.grad.mul_(factor)"], []),
        (["factor = scaler.get_scale()", "for p in params:", "    p.grad = p.grad / factor"], []),
        (["unscale_by(model, scaler.get_scale())"], []),
        (["factor = scaler.get_scale()", "unscale_by(model, factor)"], []),
    ],
)
def test_a_scale_that_is_logged_or_compared_unscales_nothing(lines, expected):
    """Only a scale that multiplies or divides, or is passed on, may unscale gradients by hand."""
    text = loop("scaler.scale(loss).backward()", *lines, "optimizer.step()", "scaler.update()", "optimizer.zero_grad()")
    assert codes(text, "HS103") == expected


@pytest.mark.parametrize(
    "lines",
    [
        ["before = scaler.get_scale()"],
        ["if not torch.isfinite(loss):", "    optimizer.zero_grad()", "    continue"],
    ],
)
def test_an_unscaled_backward_is_reported_across_reads_and_skips(lines):
    """A scale that is read, or gradients cleared in a branch that leaves, do not hide an unscaled backward."""
    assert codes(loop("loss.backward()", *lines, *STEP), "HS102") == ["HS102"]


def test_an_unscaled_backward_is_reported_in_each_branch_of_a_setting():
    """Both branches of a setting that is not about precision are wrong if neither scales its loss."""
    steps = [f"    {line}" for line in ("loss.backward()", *STEP)]
    text = loop("if args.folds:", *steps, "else:", *steps)
    assert codes(text, "HS102") == ["HS102", "HS102"]


@pytest.mark.parametrize(
    ("flag", "expected"),
    [("cfg.amp_type == 'none'", ["HS102"]), ("cfg.amp_type == 'native'", [])],
)
def test_the_other_branch_of_no_mixed_precision_is_mixed(flag, expected):
    """`amp_type == 'none'` is the path without mixed precision, so its `else` is the one with it."""
    text = loop(
        f"if {flag}:",
        "    loss.backward()",
        "    optimizer.step()",
        "else:",
        "    loss.backward()",
        *(f"    {x}" for x in STEP),
    )
    assert codes(text, "HS102") == expected


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("scaled_loss = loss / 4", ["HS102"]),
        ("scaled_loss = loss / float(args.accum)", ["HS102"]),
        ("scaled_loss = loss", ["HS102"]),
        ("features = multi_scale(x); loss = criterion(features); scaled_loss = loss / 4", ["HS102"]),
        ("scaled_loss = loss * factor_of_scale", []),
        ("scaled_loss = convert(loss)", []),
    ],
)
def test_a_loss_is_not_scaled_by_its_name_alone(before, expected):
    """`scaled_loss` that only divides or copies the loss is not scaled."""
    assert codes(loop(before, "scaled_loss.backward()", *STEP), "HS102") == expected


def test_the_scaler_of_a_method_of_this_file_is_torchs():
    """`config.get_scaler()` of a class in the file that returns a GradScaler or None is a scaler."""
    text = (
        "import torch\nclass Config:\n    def get_scaler(self):\n        if self.amp:\n            return torch.amp.GradScaler('cuda')\n"
        "        return None\ndef train(config):\n    scaler = config.get_scaler()\n    for x in loader:\n        loss = model(x)\n"
        "        loss.backward()\n        scaler.step(optimizer)\n        scaler.update()\n        optimizer.zero_grad()\n"
    )
    assert codes(text, "HS102") == ["HS102"]


def test_an_optimizer_that_a_scheduler_returns_is_an_optimizer():
    """`optimizer = schedule.step(i, optimizer)` leaves a variable that steps."""
    text = loop(
        "scaler.scale(loss).backward()",
        "optimizer.step()",
        "scaler.update()",
        "optimizer.zero_grad()",
        "optimizer = lr_scheduler.step(i, optimizer)",
    )
    assert codes(text, "HS103") == ["HS103"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (DISABLED.format(read="outputs.float()"), ["HS123"]),
        (NESTED, ["HS123"]),
        (DISABLED.format(read="head(outputs.detach())"), []),
        (DISABLED.format(read="x"), []),
    ],
)
def test_a_loss_in_a_disabled_region_still_has_float16_gradients(text, expected):
    """A loss computed in float32 from outputs of a float16 region sends its gradients through that region."""
    assert codes(text, "HS123") == expected
