"""HS120, HS123, HS125, HS134: losses that leave a region in any form, and dtypes that the text leaves open."""

import pytest

from check_scripts import codes, findings

LOOP = """\
import torch
losses = {{}}
for batch in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.{dtype}):
        {forward}
    {backward}
    optimizer.step()
"""
LOSSES = [
    ("out = model(**batch)", 'out["loss"].backward()'),
    ("out = model(**batch)", "out.loss.backward()"),
    ("out = model(**batch)", "out[0].mean().backward()"),
    ("model_out = model(**batch)", 'model_out["loss"].backward()'),
    ("self.out = model(**batch)", "self.out.loss.backward()"),
    ("out = model(**batch)", '(out["loss"] / 4).backward()'),
    ("out = model(**batch)", "criterion(out, batch).backward()"),
    ("out = model(**batch)", 'torch.autograd.backward(out["loss"])'),
    ("losses = model(**batch)", "sum(losses.values()).backward()"),
    ('losses["total"] = model(**batch)', 'losses["total"].backward()'),
    ('losses["ce"] = model(**batch)', "sum(losses.values()).backward()"),
]


@pytest.mark.parametrize(("forward", "backward"), LOSSES)
def test_loss_is_traced_into_the_region(forward, backward):
    """A loss is traced to the float16 region however it is extracted from the output; bfloat16 needs no scaler."""
    text = LOOP.format(dtype="float16", forward=forward, backward=backward)
    assert codes(text) == ["HS123:7"]
    assert codes(text.replace("torch.float16", "torch.bfloat16")) == []


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("out = model(**batch)", 'other["loss"].backward()'),
        ("out = model(**batch)", '(out["loss"] * loss_scale).backward()'),
        ("out = model(**batch)", "out.loss.backward(scaler)"),
        ("out = teacher(**batch)", "student_loss.backward(retain_graph=out)"),
    ],
)
def test_other_losses_are_silent(forward, backward):
    """A loss that is scaled, or not computed in the region, gives no finding."""
    assert codes(LOOP.format(dtype="float16", forward=forward, backward=backward)) == []


def test_a_scaled_variable_has_the_name_of_its_scaler():
    """`scaled = scaler.scale(loss)` and a later backward: the message names `scaler`, also if it steps as well."""
    loop = (
        "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n    optimizer.zero_grad()\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n        loss = model(x)\n"
        "    scaled = scaler.scale(loss)\n    scaled.backward()\n{}    optimizer.step()\n"
    )
    (finding,) = findings(loop.format(""), "HS103")
    assert "by the scale of `scaler`" in finding.message
    (finding,) = findings(loop.format("    scaler.step(optimizer)\n    scaler.update()\n"), "HS103")
    assert "repeats the step of `scaler.step`" in finding.message


CHOICE = """\
import argparse
import torch
from contextlib import nullcontext
{before}
for x, y in loader:
    optimizer.zero_grad()
    with {context}:
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
"""
TABLE = '{"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}'
PARSER = 'parser = argparse.ArgumentParser()\nparser.add_argument("--dtype", {option})\nargs = parser.parse_args()'
FLOAT16_ARMS = [
    ("dtype = torch.bfloat16 if ok else torch.float16", 'torch.autocast("cuda", dtype=dtype)', "`dtype` is float16"),
    ("if ok:\n    dtype = torch.bfloat16\nelse:\n    dtype = torch.half", 'torch.autocast("cuda", dtype=dtype)', "`dtype`"),
    (f"ptdtype = {TABLE}[dtype]", "torch.autocast('cuda', dtype=ptdtype)", "`ptdtype` is float16"),
    (f"ctx = nullcontext() if cpu else torch.autocast('cuda', dtype={TABLE}[args.dtype])", "ctx", "is float16"),
    (f"TABLE = {TABLE}", "torch.autocast('cuda', dtype=TABLE.get(name, torch.float32))", "is float16"),
    (PARSER.format(option='default="float16"'), "torch.autocast('cuda', dtype=getattr(torch, args.dtype))", "is float16"),
    ("def pick(n):\n    if n:\n        return torch.bfloat16\n    return torch.float16", "torch.autocast('cuda', dtype=pick(n))", "`pick(n)`"),
    ("", "torch.autocast(device_type=x.device.type)", "on CUDA"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "context", "condition"), FLOAT16_ARMS)
def test_float16_arm_without_scaler(before, context, condition):
    """A dtype that may be float16 needs a scaler for that case; the message states when, and the severity is milder."""
    (finding,) = findings(CHOICE.format(before=before, context=context), "HS123")
    assert condition in finding.message
    assert finding.severity == "warning"


@pytest.mark.parametrize(
    ("before", "context"),
    [
        ('device = "cuda" if torch.cuda.is_available() else "cpu"', "torch.autocast(device)"),
        ('device = torch.device("cuda" if torch.cuda.is_available() else "cpu")', "torch.autocast(device_type=device.type)"),
        ('device = torch.device(f"cuda:{rank}" if gpu else "cpu")', "torch.amp.autocast(device.type)"),
    ],
)  # fmt: skip
def test_default_dtype_on_the_device_that_is_available(before, context):
    """Without a dtype the region is float16 on CUDA: training there without a scaler is an error."""
    (finding,) = findings(CHOICE.format(before=before, context=context), "HS123")
    assert (finding.severity, "on CUDA" in finding.message) == ("error", True)


@pytest.mark.parametrize(
    ("before", "context"),
    [
        (f'dtype = "bfloat16"\nptdtype = {TABLE}[dtype]', "torch.autocast('cuda', dtype=ptdtype)"),
        (PARSER.format(option='choices=["bfloat16", "float32"]'), f"torch.autocast('cuda', dtype={TABLE}[args.dtype])"),
        ("dtype = torch.bfloat16 if ok else torch.float32", "torch.autocast('cuda', dtype=dtype)"),
        ("dtype = torch.bfloat16 if ok else torch.float16", "torch.autocast('cuda', dtype=dtype, enabled=dtype == torch.bfloat16)"),
        ('device = "cpu"', "torch.autocast(device)"),
        ("def run(dtype):\n    pass", "torch.autocast('cuda', dtype=dtype)"),
    ],
)  # fmt: skip
def test_arms_without_float16_are_silent(before, context):
    """No finding where the text leaves no float16, or a condition excludes it."""
    assert findings(CHOICE.format(before=before, context=context), "HS123") == []


BOTH = """\
import torch
dtype = torch.bfloat16 if ok else torch.float16
{scaler}
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=dtype{enabled}):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("scaler", "enabled"),
    [
        ('scaler = torch.amp.GradScaler("cuda")', ""),
        ('scaler = torch.amp.GradScaler("cuda", enabled=args.fp16_run)', ", enabled=args.fp16_run"),
        ('scaler = torch.amp.GradScaler("cuda", enabled=args.amp)', ""),
    ],
)
def test_scaler_that_stays_enabled_in_the_bfloat16_arm(scaler, enabled):
    """A scaler that does not depend on the dtype is also enabled for bfloat16."""
    (finding,) = findings(BOTH.format(scaler=scaler, enabled=enabled), "HS120")
    assert "when `dtype` (line 6) is bfloat16" in finding.message


@pytest.mark.parametrize(
    "scaler",
    [
        'scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)',
        'use_amp = dtype == torch.float16\nscaler = torch.amp.GradScaler("cuda", enabled=use_amp)',
        'scaler = torch.amp.GradScaler("cuda", enabled=use_scaler)',
        'scaler = torch.amp.GradScaler("cuda") if dtype == torch.float16 else None',
        'use = dtype == torch.float16\nif use:\n    scaler = torch.amp.GradScaler("cuda")\nelse:\n    scaler = Null()',
    ],
)
def test_scaler_that_follows_the_dtype_is_silent(scaler):
    """A scaler that is enabled for float16 only, or by a flag that may mean so, gives no finding."""
    assert findings(BOTH.format(scaler=scaler, enabled=""), "HS120") == []


HELPER = """\
import torch
def log_probs(model, ids):
    with torch.autocast("cuda", dtype=torch.{dtype}):
        logits = model(ids).logits
    return logits.float().log_softmax(-1)
def train(model, reference, optimizer, loader):
    for ids in loader:
        optimizer.zero_grad()
        with torch.no_grad():
            before = log_probs(reference, ids)
        now = {now}
        loss = (now - before).mean()
        loss.backward()
        optimizer.step()
"""


def test_loss_of_a_helper_is_traced_into_its_region():
    """A helper that computes in float16 and returns the result is found where its region is, in spite of a reference under no_grad."""
    text = HELPER.format(dtype="float16", now="log_probs(model, ids)")
    assert codes(text) == ["HS123:3"]
    assert codes(text.replace("float16", "bfloat16")) == []


def test_helper_of_another_model_is_silent():
    """A float16 region that only the reference uses, without gradients, needs no scaler."""
    assert codes(HELPER.format(dtype="float16", now="model(ids).logits")) == []


def test_region_of_a_reference_does_not_hide_the_trained_one():
    """A region without gradients between the forward and the backward is of another model."""
    text = LOOP.format(
        dtype="float16",
        forward="loss = model(**batch)\n    with torch.no_grad(), torch.autocast('cuda', dtype=torch.float16):\n        old = teacher(**batch)",
        backward="loss.backward()",
    )
    assert "HS123:9" in codes(text)


def test_backward_inside_the_region_needs_a_scaler_too():
    """With the backward inside the float16 region both its place and the missing scaler are reported."""
    text = LOOP.format(dtype="float16", forward="loss = model(**batch)\n        loss.backward()", backward="pass")
    assert codes(text) == ["HS123:7", "HS140:7"]


OPTIONAL = """\
import torch
import deepspeed
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    if args.deepspeed:
        model.backward(loss)
        model.step()
    {other}
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("other", "expected"), [("else:", ["HS123"]), ("if True:", [])])
def test_the_path_without_an_engine_needs_a_scaler(other, expected):
    """An engine that only another branch uses does not scale the loss of this one."""
    assert [f.code for f in findings(OPTIONAL.format(other=other), "HS123")] == expected


WRAPPER = """\
import torch
class Wrapper:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler("cuda")
    def step(self, {parameter}):
        self.scaler.step(self.optimizer, {argument})
        self.scaler.update()
"""


@pytest.mark.parametrize(
    ("parameter", "argument", "expected"),
    [("closure=None", "closure", []), ("x", "lambda: closure(x)", ["HS125"])],
)
def test_a_wrapper_may_pass_its_closure_on(parameter, argument, expected):
    """`step(self, closure=None)` passes None on; only a closure of its own is wrong."""
    text = WRAPPER.format(parameter=parameter, argument=argument)
    assert [f.code for f in findings(text, "HS125")] == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("torch.nn.DataParallel(Stereo(args)).cuda()", []),
        ("torch.nn.DataParallel(torch.nn.Linear(8, 2)).cuda()", ["HS134"]),
        ("torch.nn.parallel.DistributedDataParallel(net)", []),
    ],
)
def test_a_wrapped_model_of_another_file_may_open_a_region(model, expected):
    """DataParallel is torch's, the model inside it need not be."""
    text = f"""\
import torch
from core.stereo import Stereo
model = {model}
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
    assert [f.code for f in findings(text, "HS134")] == expected


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("save_checkpoint(path, model, scaler=scaler)", ["HS122"]),
        ("load_checkpoint(path, scaler)", ["HS122"]),
        ("train_epoch(model, scaler)", []),
    ],
)
def test_a_scaler_that_is_only_saved_is_unused(use, expected):
    """A function of another file that saves the scaler does not train with it; one that trains may."""
    text = (
        "import torch\nfrom library import save_checkpoint, load_checkpoint, train_epoch\nscaler = torch.amp.GradScaler('cuda')\n"
        "for x in loader:\n    with torch.autocast('cuda', dtype=torch.float16):\n        loss = model(x)\n    loss.backward()\n"
        f"    optimizer.step()\n    optimizer.zero_grad()\n    {use}\n"
    )
    assert [f.code for f in findings(text, "HS122")] == expected


GUARDED_REGION = """\
import torch

class Amp:
    def __init__(self, config):
        self.config = config
        self.scaler = None
        if config.active:
            self.scaler = torch.amp.GradScaler("cuda", enabled=self.config.active)
        self.dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float16

    def step(self, model, optimizer, x):
        optimizer.zero_grad()
        if self.config.{switch}:
            with torch.autocast("cuda", dtype=self.dtype):
                loss = model(x)
        else:
            loss = model(x)
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
"""


@pytest.mark.parametrize(("switch", "expected"), [("active", 1), ("other", 0)])
def test_the_condition_around_a_region_switches_it_like_its_flag(switch, expected):
    """A scaler with the flag of the branch that enters autocast is on for either dtype."""
    assert len(findings(GUARDED_REGION.format(switch=switch), "HS120")) == expected


TESTED = """\
import torch
scaler = torch.amp.GradScaler("cuda") if args.amp else None
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
{use}
"""


@pytest.mark.parametrize(
    "use",
    [
        "if scaler:\n    state['scaler'] = scaler.state_dict()",
        "if scaler and 'scaler' in state:\n    scaler.load_state_dict(state['scaler'])",
        "state['scaler'] = scaler.state_dict() if scaler else None",
        "if not scaler:\n    print('float32')",
    ],
)
def test_a_test_whether_there_is_a_scaler_is_no_use(use):
    """Its state is saved and restored under the test, and no loss is scaled."""
    assert [f.line for f in findings(TESTED.format(use=use), "HS122")] == [2]


@pytest.mark.parametrize(
    "use", ["finish(scaler or make())", "if scaler:\n    finish(scaler)", "chosen = scaler or other"]
)
def test_a_scaler_that_is_passed_on_may_be_used(use):
    """What receives it is not known."""
    assert findings(TESTED.format(use=use), "HS122") == []
