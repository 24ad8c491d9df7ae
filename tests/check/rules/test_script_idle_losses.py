"""HS110 in hooks of Lightning, and losses that reach no parameter: HS115 where a new tensor replaces them, HS156 where nothing uses them."""

import pytest

from check_scripts import findings


def lines(text, code):
    """The lines at which a rule is reported."""
    return [f.line for f in findings(text, code)]


HOOK = """\
import torch
import pytorch_lightning as pl
class Norms({base}):
    def {hook}(self, trainer, module, *rest):
        for p in module.parameters():
            {read}
trainer = pl.Trainer({options})
"""
FP16 = "precision='16-mixed'"
NORM = "log(p.grad.norm())"


@pytest.mark.parametrize(
    ("base", "hook", "read", "options", "expected"),
    [
        ("pl.Callback", "on_after_backward", NORM, FP16, [6]),
        ("pl.LightningModule", "on_after_backward", "log(torch.norm(p.grad).item())", FP16, [6]),
        ("pl.Callback", "on_after_backward", NORM, "precision=config.get('precision', '16-mixed')", [6]),
        ("pl.Callback", "on_train_batch_end", NORM, f"{FP16}, accumulate_grad_batches=2", [6]),
        ("pl.Callback", "on_train_batch_end", NORM, FP16, []),
        ("pl.Callback", "on_before_optimizer_step", NORM, FP16, []),
        ("pl.Callback", "on_after_backward", NORM, "precision='bf16-mixed'", []),
        ("pl.Callback", "on_after_backward", NORM, "precision=precision", []),
        ("pl.Callback", "on_after_backward", "log(p.norm())", FP16, []),
        ("pl.Callback", "on_after_backward", "log(p.grad.norm() / trainer.scaler.get_scale())", FP16, []),
        ("Base", "on_after_backward", NORM, FP16, []),
    ],
)
def test_hooks_before_the_step_see_scaled_gradients(base, hook, read, options, expected):
    """Lightning unscales in its step: after a backward, and after a batch without a step, gradients are scaled."""
    assert lines(HOOK.format(base=base, hook=hook, read=read, options=options), "HS110") == expected


CONSTANT = """\
import torch
scaler = torch.amp.GradScaler('cuda')
for x, y in loader:
    optimizer.zero_grad({zero})
    with torch.autocast('cuda'):
        out = model(x)
        if y.any():
            loss = loss_fn(out, y)
        else:
            loss = {other}
        {after}
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
NEW = "torch.tensor(0.0, requires_grad=True)"


@pytest.mark.parametrize(
    ("zero", "other", "after", "expected"),
    [
        ("", NEW, "pass", [13]),
        ("", NEW + ".to(device)", "pass", [13]),
        ("", f"{NEW}.cuda() if gpu else {NEW}", "pass", [13]),
        ("", "torch.zeros(1, device=device).requires_grad_()", "pass", [13]),
        ("", NEW, "loss = loss + penalty(out)", []),
        ("", NEW, "loss += penalty(out)", []),
        ("", "out.sum() * 0", "pass", []),
        ("set_to_none=False", NEW, "pass", []),
    ],
)
def test_a_new_tensor_instead_of_the_loss_has_no_gradients(zero, other, after, expected):
    """Its backward reaches no parameter, so that the step finds no gradients to check."""
    assert lines(CONSTANT.format(zero=zero, other=other, after=after), "HS115") == expected


DROPPED = """\
import torch
for x in loader:
    optimizer.zero_grad()
    with torch.autocast('cuda'):
        loss = model(x)
    {rest}
"""


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("pass", [5]),
        ("print('done')", [5]),
        ("loss.backward(); optimizer.step()", []),
        ("total += loss.item()", []),
        ("engine.train(optimizer)", []),
        ("update(scaler, x)", []),
    ],
)
def test_a_loss_that_nothing_uses_trains_nothing(rest, expected):
    """A loop that clears gradients and drops its loss has forgotten the backward."""
    assert lines(DROPPED.format(rest=rest), "HS156") == expected


def test_a_loop_over_optimizers_is_read():
    """The step of each optimizer is one of a list, and no rule fails on it."""
    loop = CONSTANT.format(zero="", other=NEW, after="pass")
    loop = loop.replace("    scaler.step(optimizer)", "    for o in optimizers:\n        scaler.step(o)")
    loop = loop.replace("for x, y in loader:", "def train_step(x, y):")
    assert not [f for f in findings(loop) if f.code in {"HS006", "HS115"}]


SILENT = """\
import torch
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = {loss}
    {use}
    {step}
    print(loss.item())
"""
STEP = "optimizer.step()"
LOSS = "loss_fn(model(x), y)"


@pytest.mark.parametrize(
    ("loss", "use", "step", "expected"),
    [
        (LOSS, "pass", STEP, [8]),
        (LOSS, "# loss.backward()", STEP, [8]),
        (LOSS, "losses.append(loss)", STEP, [8]),
        ("model(x).square().mean()", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", STEP, [8]),
        (LOSS, "loss.backward()", STEP, []),
        (LOSS, "propagate(loss)", STEP, []),
        (LOSS, "accumulate_gradients(model)", STEP, []),
        ("train_on(model, x, y)", "pass", STEP, []),
        (LOSS, "pass", "optimizer.step(compute)", []),
        (LOSS, "pass", "pass", []),
    ],
)
def test_a_step_in_a_file_that_computes_no_gradients(loss, use, step, expected):
    """A loop that clears, steps and only reports its loss trains nothing, unless a call may run the backward elsewhere."""
    text = SILENT.format(loss=loss, use=use if not use.startswith("#") else f"pass  {use}", step=step)
    assert lines(text, "HS156") == expected
