"""HS175: runs that end at an overflow, and tests that have another purpose."""

import pytest

from check_scripts import findings, reported

LOOP = """\
import torch
scaler = torch.amp.GradScaler("cuda"{options})
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.{dtype}):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    {test}
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    "test",
    [
        "if not torch.isfinite(norm): raise RuntimeError('overflow')",
        "bad = first_nonfinite_gradient(model)\n    if bad is not None: raise RuntimeError(bad)",
        "if any(torch.isnan(p.grad).any() for p in model.parameters()): raise FloatingPointError",
        "bad = not torch.isfinite(norm)\n    flag = torch.tensor(int(bad))\n    dist.all_reduce(flag)\n    if flag.item(): raise RuntimeError",
        "bad = False\n    for p in model.parameters():\n        if torch.isnan(p.grad).any(): bad = True\n    if bad: raise RuntimeError",
        "bad = []\n    for p in model.parameters():\n        if torch.isnan(p.grad).any(): bad.append(p)\n    if bad: raise RuntimeError",
        "if not torch.isfinite(norm):\n        print('overflow')\n        sys.exit(1)",
        "try:\n        check_finite(norm)\n        assert torch.isfinite(norm)\n    except KeyboardInterrupt:\n        print('stopped')",
    ],
)
def test_a_raise_for_gradients_that_overflow_is_reported(test):
    """Directly, through variables that other ranks may set, over all parameters, and by an exit of the program."""
    assert "HS175" in reported(LOOP.format(options="", dtype="float16", test=test))


@pytest.mark.parametrize(
    "test",
    [
        "if not torch.isfinite(loss): raise RuntimeError('loss')",
        "if not torch.isfinite(norm) and num_skipped > 100: raise RuntimeError('overflows')",
        "if norm > 1e9: raise RuntimeError('diverged')",
        "if scaler.get_scale() < 1: raise RuntimeError('scale')",
        "bad = not torch.isfinite(loss)\n    flag = torch.tensor(int(bad))\n    dist.all_reduce(flag)\n    if flag.item(): raise RuntimeError",
        "bad = []\n    for p in model.parameters():\n        if torch.isnan(p).any(): bad.append(p)\n    if bad: raise RuntimeError",
        "skips = []\n    if torch.isnan(norm): skips.append(norm)\n    if len(skips) > max_skips: raise RuntimeError",
        "try:\n        assert torch.isfinite(norm)\n    except AssertionError:\n        print('overflow')",
    ],
)
def test_other_raises_are_accepted(test):
    """For the loss or weights, after many skipped steps, for a norm that is too large or a scale that collapsed, and what the loop catches."""
    assert "HS175" not in reported(LOOP.format(options="", dtype="float16", test=test))


@pytest.mark.parametrize(
    "test",
    [
        "if not scaler.is_enabled() and not torch.isfinite(norm): raise RuntimeError('diverged')",
        "if not torch.isfinite(norm) and not scaler.is_enabled(): raise RuntimeError('diverged')",
        "if not scaler.is_enabled():\n        if torch.isnan(norm): raise RuntimeError('diverged')",
        "if scaler.is_enabled():\n        log(norm)\n    elif torch.isnan(norm):\n        raise RuntimeError('diverged')",
        "if not use_amp and torch.isnan(norm): raise RuntimeError('diverged')",
    ],
)
def test_a_raise_without_the_scaler_is_accepted(test):
    """Where the scaler is disabled no overflow is normal; with it, the same test ends the run."""
    assert "HS175" not in reported(LOOP.format(options=", enabled=use_amp", dtype="float16", test=test))
    turned = test.replace("not scaler.is_enabled()", "scaler.is_enabled()").replace("not use_amp", "use_amp")
    turned = turned.replace("if scaler.is_enabled():\n        log", "if not scaler.is_enabled():\n        log")
    assert "HS175" in reported(LOOP.format(options=", enabled=use_amp", dtype="float16", test=turned))


def test_bfloat16_is_left_to_the_rule_on_its_scaler():
    """In bfloat16 gradients do not overflow, and the scaler is what is wrong."""
    test = "if not torch.isfinite(norm): raise RuntimeError('overflow')"
    assert "HS175" not in reported(LOOP.format(options="", dtype="bfloat16", test=test))


def test_a_scale_that_the_script_chooses_is_a_warning():
    """An error needs the initial scale of 65536."""
    test = "if not torch.isfinite(norm): raise RuntimeError('overflow')"
    found = findings(LOOP.format(options=", init_scale=256.0", dtype="float16", test=test))
    assert [f.severity for f in found if f.code == "HS175"] == ["warning"]


@pytest.mark.parametrize(
    ("test", "count"),
    [("if not overflows(model.parameters()):", 0), ("if all_finite(model.parameters()):", 0), ("if args.clip > 0:", 1), ("if enough(model):", 1)],
)  # fmt: skip
def test_a_strict_clip_behind_a_test_of_the_gradients(test, count):
    """`error_if_nonfinite` raises for nothing where the gradients were tested, also by a function of the file."""
    clip = f"{test}\n        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)"
    text = LOOP.format(options="", dtype="float16", test=clip).replace(
        "scaler = ",
        "def overflows(weights):\n    return any(not w.grad.isfinite().all() for w in weights)\n"
        "def enough(model):\n    return len(list(model.parameters())) > 3\nscaler = ",
        1,
    )
    assert len(findings(text, "HS175")) == count


@pytest.mark.parametrize(("precision", "expected"), [("'fp16'", ["error"]), ("precision", ["warning"]), ("'bf16'", [])])
def test_a_raise_after_accelerate_has_unscaled(precision, expected):
    """`unscale_gradients` makes an overflow visible to torch's clip, as the clip of Accelerate does."""
    text = f"""\
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision={precision})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    optimizer.zero_grad()
    accelerator.backward(model(x))
    accelerator.unscale_gradients(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
"""
    assert [f.severity for f in findings(text) if f.code == "HS175"] == expected


@pytest.mark.parametrize(
    ("handler", "count"),
    [
        ("except RuntimeError:\n        print('skipped')", 0),
        ("except RuntimeError as error:\n        raise SystemExit from error", 1),
        ("except RuntimeError:\n        sys.exit(1)", 1),
        ("finally:\n        print('clipped')", 1),
    ],
)
def test_a_handler_around_a_strict_clip(handler, count):
    """What a handler catches does not end the run, unless the handler does."""
    clip = (
        "try:\n        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)\n    " + handler
    )
    found = findings(LOOP.format(options="", dtype="float16", test=clip), "HS175")
    assert len(found) == count


BELOW = """\
import torch, math
scaler = torch.amp.GradScaler("cuda")
def audit(model, head_norm, first):
    if first and (not math.isfinite(head_norm) or head_norm <= 0.0):
        raise RuntimeError(f"invalid first gradient: {{head_norm}}")
def train(model, loader, optimizer):
    first = True
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        {test}
        first = False
"""


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("if not torch.isfinite(norm): raise RuntimeError('gradient norm')", [18]),
        ("assert math.isfinite(norm), 'gradient norm'", [18]),
        ("if first: audit(model, head_norm=float(norm), first=first)", [5]),
        ("audit(model, norm, first)", [5]),
        ("audit(model, loss, first)", []),
        ("if not torch.isfinite(loss): raise RuntimeError('loss')", []),
        ("if not torch.isfinite(norm): print('skipped')", []),
        ("if scaler.get_scale() < scale: continue\n        audit(model, norm, first)", []),
        ("norm = weight_norm(model)\n        if not torch.isfinite(norm): raise RuntimeError('weights')", []),
        ("norms = [p.norm() for p in model.parameters()]\n        assert all(torch.isfinite(n) for n in norms)", []),
    ],
)
def test_a_raise_below_the_step_for_the_norm_measured_above(test, expected):
    """The step was skipped, and the run ends all the same; weights and losses are finite after it."""
    assert [f.line for f in findings(BELOW.format(test=test), "HS175")] == expected


CHECKED = """\
import torch

def require(value):
    if not torch.isfinite(value):
        raise FloatingPointError

"""


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("if norm == float('inf') or norm != norm: raise RuntimeError('overflow')", True),
        ("if not norm < math.inf: raise RuntimeError('overflow')", True),
        ("total = norm_of_gradients(model)\n    require(total)", True),
        ("if best == float('inf'): raise RuntimeError('no step')", False),
        ("total = total_loss(model)\n    require(total)", False),
        ("if norm != previous_norm: raise RuntimeError('not reproducible')", False),
    ],
)
def test_a_comparison_with_inf_or_a_checked_variable(test, expected):
    """Inf is compared with, NaN differs from itself, and a helper may check a norm under any name."""
    assert ("HS175" in reported(CHECKED + LOOP.format(options="", dtype="float16", test=test))) is expected


@pytest.mark.parametrize(
    ("copy", "expected"),
    [("value = float(norm)", True), ("value = norm.item()", True), ("value = norm_of(model)", False)],
)
def test_a_number_that_is_copied_from_the_norm_below_the_step(copy, expected):
    """The norm between `unscale_` and the step is inf also as a number that is made of it afterwards."""
    text = LOOP.format(options="", dtype="float16", test="pass")
    text += f"    {copy}\n    if not math.isfinite(value): raise RuntimeError('gradients')\n"
    assert ("HS175" in reported(text)) is expected
