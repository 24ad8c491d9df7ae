"""Accumulation windows in the forms that scripts write them: which lines run on every micro-batch."""

import pytest

from check_scripts import codes

HEAD = "import torch\nscaler = torch.amp.GradScaler('cuda')\n"


def loop(*lines, head="", count="accum", loss="loss_fn(model(x), y) / accum"):
    """A loop over batches whose step runs once per window; `lines` are between backward and step."""
    text = HEAD + head + "for i, (x, y) in enumerate(loader):\n    with torch.autocast('cuda', dtype=torch.float16):\n"
    text += f"        loss = {loss}\n    scaler.scale(loss).backward()\n" + "".join(f"    {line}\n" for line in lines)
    text += f"    if (i + 1) % {count} == 0:\n        scaler.step(optimizer)\n        scaler.update()\n"
    return text + "        optimizer.zero_grad()\n"


def nested(inner="", after="", loss="loss_fn(model(x), y) / accum", count="accum"):
    """A loop over the micro-batches of one step, and the step after it."""
    text = HEAD + "for step in range(steps):\n    optimizer.zero_grad()\n" + f"    for micro in range({count}):\n"
    text += f"        with torch.autocast('cuda', dtype=torch.float16):\n            loss = {loss}\n"
    text += "        scaler.scale(loss).backward()\n" + inner
    return text + "    scaler.unscale_(optimizer)\n" * (not inner) + "    scaler.step(optimizer)\n" + after


UPDATE = "    scaler.update()\n"
CLIP = "scaler.unscale_(optimizer); torch.nn.utils.clip_grad_norm_(model.parameters(), clip)"
SWIN = """\
import torch

class NativeScaler:
    def __init__(self):
        self._scaler = torch.cuda.amp.GradScaler()

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, update_grad=True):
        self._scaler.scale(loss).backward()
        if clip_grad is not None:
            self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
        if update_grad:
            self._scaler.step(optimizer)
            self._scaler.update()
"""


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (loop(f"if clip: {CLIP}"), "HS106"),
        (loop(f"if args.clip is not None: {CLIP}"), "HS106"),
        (loop(f"if args.clip > 0: {CLIP}"), "HS106"),
        (loop(CLIP, head="if accum < 1: raise ValueError(accum)\n"), "HS106"),
        (loop(CLIP, head="if batch_size % accum != 0: raise ValueError(accum)\n"), "HS106"),
        (loop("clip = args.clip", f"if clip: {CLIP}"), "HS106"),
        (nested(f"        {CLIP}\n", UPDATE), "HS106"),
        (nested(f"        if clip: {CLIP}\n", UPDATE), "HS106"),
        (SWIN, "HS106"),
        (loop("scaler.update()").replace("        scaler.update()\n", ""), "HS107"),
        (
            loop("scaler.update()", head="if accum < 1: raise ValueError(accum)\n").replace(
                "        scaler.update()\n", ""
            ),
            "HS107",
        ),
        (nested("        scaler.update()\n"), "HS107"),
        (loop(loss="loss_fn(model(x), y)"), "HS180"),
        (loop(loss="loss_fn(model(x), y)", head="if accum < 1: raise ValueError(accum)\n"), "HS180"),
        (loop(loss="loss_fn(model(x), y)", head="count = sum(sizes); frame = table.agg('sum')\n"), "HS180"),
        (loop(loss="loss_fn(model(x), y)", head="steps = len(loader) / accum\n"), "HS180"),
        (loop(loss="loss_fn(model(x), y)", head="def test(a, b):\n    return total(a, b, reduction='sum')\n"), "HS180"),
        (nested(loss="loss_fn(model(x), y)", after=UPDATE), "HS180"),
        (nested("        optimizer.zero_grad()\n", UPDATE), ""),  # cleared after the last backward as well: no gradient
        (
            nested(after=UPDATE).replace("        with", "        optimizer.zero_grad()\n        with"),
            "HS181",
        ),
    ],
)
def test_lines_that_run_on_every_micro_batch_are_reported(text, code):
    """A flag around the line, a check of the settings far above and an inner loop do not hide the mistake."""
    reported = {c.partition(":")[0] for c in codes(text)} & {"HS106", "HS107", "HS180", "HS181"}
    assert reported == ({code} if code else set())


@pytest.mark.parametrize(
    "text",
    [
        loop(),
        loop(f"if (i + 1) % accum == 0: {CLIP}"),
        loop(f"if sync: {CLIP}"),  # perhaps the end of the window
        loop("due = i in ends", f"if due: {CLIP}"),
        loop(head="if accum < 1: raise ValueError(accum)\n"),
        nested(after=UPDATE),
        nested(f"        if micro == accum - 1: {CLIP}\n", UPDATE),
        loop(loss="loss_fn(model(x), y, reduction='sum')"),
        HEAD + "criterion = torch.nn.CrossEntropyLoss(reduction='sum')\n" + loop(loss="criterion(model(x), y)"),
        SWIN.replace("clip_grad is not None", "update_grad and clip_grad is not None"),
        HEAD
        + "for x, y in loader:\n    scaler.scale(loss_fn(model(x), y)).backward()\n    for opt in optimizers:\n"
        + "        scaler.unscale_(opt)\n    for opt in optimizers:\n        scaler.step(opt)\n    scaler.update()\n"
        + "    model.zero_grad()\n",
    ],
)
def test_correct_windows_are_silent(text):
    """What runs once per window, under the window's own condition or another that may be it, is correct."""
    assert not {c.partition(":")[0] for c in codes(text)} & {"HS105", "HS106", "HS107", "HS180", "HS181"}


def cleared(
    first="",
    last="",
    backward="scaler.scale(loss).backward()",
    step="scaler.step(optimizer)",
    ends="(i + 1) % accum == 0",
):
    """A loop that clears gradients at the start or the end of every iteration, and steps at the end of a window."""
    text = HEAD + "for i, (x, y) in enumerate(loader):\n" + "".join(f"    {line}\n" for line in first.splitlines())
    text += "    with torch.autocast('cuda', dtype=torch.float16):\n        loss = loss_fn(model(x), y) / accum\n"
    text += f"    {backward}\n    if {ends}:\n        {step}\n        scaler.update()\n"
    return text + (f"    {last}\n" if last else "")


@pytest.mark.parametrize(
    "text",
    [
        cleared("optimizer.zero_grad(set_to_none=True)"),
        cleared("model.zero_grad()"),
        cleared("for p in model.parameters():\n    p.grad = None"),
        cleared(last="optimizer.zero_grad()"),
        cleared("optimizer.zero_grad()", ends="(i + 1) % 4 == 0"),
        cleared("optimizer.zero_grad()", backward="if amp: scaler.scale(loss).backward()"),
        cleared("optimizer.zero_grad()", backward="accelerator.backward(loss)", step="optimizer.step()"),
    ],
)
def test_gradients_cleared_on_every_micro_batch(text):
    """However gradients are cleared, and wherever in the iteration, only those of the last micro-batch reach the step."""
    assert "HS181" in {c.partition(":")[0] for c in codes(text)}


OWNED = """\
import torch
from timm.utils import NativeScaler
loss_scaler = NativeScaler()
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y) / accum
    loss_scaler(loss, optimizer, update_grad=(i + 1) % accum == 0)
    {clear}
"""


@pytest.mark.parametrize(
    ("clear", "expected"),
    [("optimizer.zero_grad()", ["HS181:8"]), ("if (i + 1) % accum == 0: optimizer.zero_grad()", [])],
)
def test_gradients_cleared_next_to_a_scaler_with_backward(clear, expected):
    """timm's scaler runs backward on every call and steps at the end of a window."""
    assert [c for c in codes(OWNED.format(clear=clear)) if c.startswith("HS181")] == expected


@pytest.mark.parametrize(
    "text",
    [
        cleared("if i % accum == 0: optimizer.zero_grad()"),
        cleared("other.zero_grad()"),
        cleared("optimizer.zero_grad()", ends="use_step"),
        cleared("for p in other.parameters():\n    p.grad = None"),
        cleared("with accelerator.accumulate(model): optimizer.zero_grad()", backward="accelerator.backward(loss)"),
    ],
)
def test_gradients_cleared_once_per_window(text):
    """Gradients cleared once per window, or of another model, are no finding."""
    assert "HS181" not in {c.partition(":")[0] for c in codes(text)}


@pytest.mark.parametrize(("leave", "expected"), [("continue", []), ("pass", ["HS108"])])
def test_an_update_in_a_handler(leave, expected):
    """A handler that updates and goes to the next iteration leaves no step after the update."""
    text = (
        HEAD
        + "for x in loader:\n    scaler.scale(model(x)).backward()\n    scaler.unscale_(optimizer)\n    try:\n        clip(model)\n"
    )
    text += f"    except RuntimeError:\n        optimizer.zero_grad()\n        scaler.update()\n        {leave}\n"
    text += "    scaler.step(optimizer)\n    scaler.update()\n"
    assert [code[:5] for code in codes(text) if code.startswith("HS108")] == expected


EACH = HEAD + (
    "for i, x in enumerate(loader):\n    scaler.scale(model(x)).backward()\n    for k, optimizer in enumerate(optimizers):\n"
    "        if {test}:\n            scaler.step(optimizer)\n            scaler.update()\n            optimizer.zero_grad()\n"
)


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("i % optimizer.interval == 0", True),
        ("(i + 1) % optimizer.interval == 0", True),
        ("i % len(optimizers) == k", False),  # one of them in each iteration
        ("optimizer is chosen", False),
        ("i % optimizer.interval == k", False),
    ],
)
def test_an_update_after_each_optimizer_whose_own_window_ends(test, expected):
    """Optimizers with an interval each may step in one iteration, unlike those that take turns."""
    assert any(code.startswith("HS108") for code in codes(EACH.format(test=test))) == expected
