"""HS180: divisions that do not reach the backward, and windows that are longer than the divisor."""

import pytest

from check_scripts import findings


def reported(text):
    """The lines at which HS180 is reported."""
    return [f.line for f in findings(text, "HS180")]


VALIDATED = """\
import torch
class Trainer:
    def fit(self):
        for i, x in enumerate(self.loader):
            with torch.autocast('cuda'):
                loss = self.model(x)
            {divided}
            self.scaler.scale(loss).backward()
            if (i + 1) % self.accumulation == 0:
                self.scaler.step(self.optimizer); self.scaler.update(); self.optimizer.zero_grad()
    {decorator}
    def validate(self):
        for x in self.val_loader:
            loss = self.model(x) / self.accumulation
"""


@pytest.mark.parametrize(
    ("decorator", "divided", "expected"),
    [
        ("@torch.no_grad()", "pass", [8]),
        ("@torch.inference_mode()", "pass", [8]),
        ("@torch.no_grad()", "loss = loss / self.accumulation", []),
        ("@torch.no_grad()", "loss /= self.accumulation", []),
        ("@staticmethod", "pass", []),  # may compute a loss for the backward
    ],
)
def test_the_loss_of_a_validation_is_not_the_one_of_the_backward(decorator, divided, expected):
    """A division where no gradients are computed does not divide the gradients."""
    assert reported(VALIDATED.format(decorator=decorator, divided=divided)) == expected


def test_a_model_that_receives_the_window_may_divide_its_loss():
    """`loss = model(x, n_accum)` of another file; one that does not receive it is reported."""
    text = LOGGED.format(log="loss = model(x{window})", name="loss")
    assert reported(text.format(window=", n_accum")) == []
    assert reported(text.format(window="")) == [7]


LOGGED = """\
import torch
optimizer.zero_grad()
for i, x in enumerate(loader):
    with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = model(x)
    {log}
    {name}.backward()
    if (i + 1) % n_accum == 0:
        optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("log", "name", "expected"),
    [
        ("running += loss / n_accum", "loss", [7]),
        ("self.running += loss / n_accum", "loss", [7]),
        ("running += loss / n_accum / world_size", "loss", [7]),
        ("running += loss / n_accum", "running", []),
        ("total += loss / n_accum; final = total", "final", []),
        ("loss = loss / n_accum; running += loss", "loss", []),
        ("loss_avg += loss.item(); loss_avg = loss_avg / n_accum", "loss", [7]),
        ("loss_sum += loss; loss_sum = loss_sum / n_accum", "loss_sum", []),
    ],
)
def test_a_sum_that_is_only_logged_does_not_divide_the_loss(log, name, expected):
    """`running += loss / n` matters only if `running` reaches the backward."""
    assert reported(LOGGED.format(log=log, name=name)) == expected


def test_no_grad_around_a_division_of_gradients_is_respected():
    """Gradients divided by hand before the step need no divided loss."""
    text = LOGGED.format(log="pass", name="loss").replace(
        "        optimizer.step()",
        "        with torch.no_grad():\n            for p in model.parameters(): p.grad = p.grad / n_accum\n        optimizer.step()",
    )
    assert reported(text) == []


PATCHES = """\
import torch
data = make_dataset(cfg, batch_size=cfg.{size})
for step in range(steps):
    optimizer.zero_grad()
    for micro in range({count}):
        x = next(data)
        {inner}
            with torch.autocast('cuda', dtype=torch.bfloat16):
                loss = model(x)
            loss = {loss}
            loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("inner", "loss", "expected"),
    [
        ("for patch in patches:", "loss.mean()", [11]),
        ("for patch in patches:", "loss.sum() / batch_size", [11]),
        ("for patch in patches:", "loss.sum() / batch_size / accum_rounds", []),
        ("for patch in patches:", "loss.sum() / (accum_rounds * batch_size)", []),
        ("for patch in patches:", "loss.sum() / total_batch", []),  # may be the batch of the window
        ("for patch in patches:", "loss / batch_size", []),
        ("if True:", "loss.sum() / batch_size", [11]),
    ],
)
def test_a_mean_over_one_micro_batch_is_not_divided_by_their_number(inner, loss, expected):
    """`loss.sum() / batch_size` of the loader is a mean over a micro-batch, also in a loop over patches of it."""
    assert reported(PATCHES.format(size="batch_size", count="accum_rounds", inner=inner, loss=loss)) == expected


def test_gradients_cleared_inside_the_outer_loop_do_not_accumulate():
    """A clearing on each micro-batch ends the window, also where a loop over patches is inside it."""
    text = PATCHES.format(size="b", count="accum_rounds", inner="for patch in patches:", loss="loss.mean()")
    assert reported(text.replace("x = next(data)", "x = next(data); optimizer.zero_grad()")) == []


PRODUCT = """\
import torch
for step in range(steps):
    for micro in range({count}):
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(x)
            {divide}
        loss.backward()
    optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("count", "divide", "expected"),
    [
        ("accum * world_size", "loss = loss / accum", [7]),
        ("accum * world_size", "loss /= accum", [7]),
        ("args.accum * dist.world_size", "loss = loss.div(args.accum)", [7]),
        ("accum_steps * 2", "loss = loss / accum_steps", [7]),
        ("num_views * accum", "loss = loss / accum", [7]),
        ("accum * world_size", "loss = loss / (accum * world_size)", []),
        ("accum * world_size", "loss = loss / accum / world_size", []),
        ("accum * world_size", "loss = loss / (world_size * accum)", []),
        ("accum * 1", "loss = loss / accum", []),
        ("accum", "loss = loss / accum", []),
    ],
)
def test_a_loss_is_divided_by_every_factor_of_the_window(count, divide, expected):
    """A loop over `accum * world_size` micro-batches sums more gradients than a division by `accum` makes up for."""
    assert reported(PRODUCT.format(count=count, divide=divide)) == expected


ACCELERATED = """\
from accelerate import Accelerator
accelerator = Accelerator({options})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for i, x in enumerate(loader):
    loss = model(x){divided}
    accelerator.backward(loss)
    if (i + 1) % accum == 0:
        optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("options", "divided", "expected"),
    [
        ("mixed_precision='bf16'", "", [6]),
        ("", "", [6]),
        ("mixed_precision='bf16'", " / accum", []),
        ("gradient_accumulation_steps=accum", "", []),
        ("gradient_accumulation_plugin=plugin", "", []),
        ("deepspeed_plugin=plugin", "", []),
        ("**options", "", []),
    ],
)
def test_an_accelerator_divides_only_by_the_steps_it_is_set_to(options, divided, expected):
    """Without gradient_accumulation_steps accelerator.backward uses the loss as it is; the launcher can still set them."""
    text = ACCELERATED.format(options=options, divided=divided)
    assert reported(text) == expected
    assert all("unless the launcher sets it" in f.message for f in findings(text, "HS180"))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("Accelerator(mixed_precision='bf16')", [7]),
        ("Accelerator(gradient_accumulation_steps=accum)", []),
        ("Accelerator(deepspeed_plugin=second)", []),
    ],
)
def test_the_runs_without_deepspeed_leave_the_loss_undivided(other, expected):
    """Where one branch creates the Accelerator with DeepSpeed, which counts itself, the other branch decides."""
    text = ACCELERATED.format(options="deepspeed_plugin=plugin", divided="")
    created = "accelerator = Accelerator(deepspeed_plugin=plugin)\n"
    text = text.replace(created, f"if zero: {created}else: accelerator = {other}\n")
    assert reported(text) == expected


def test_an_accelerator_that_accumulates_is_left_alone():
    """`accumulate`, or a number of steps assigned later, shows that the Accelerator knows of the accumulation."""
    text = ACCELERATED.format(options="", divided="")
    assert reported(text.replace("for i", "accelerator.gradient_accumulation_steps = accum\nfor i")) == []
    assert (
        reported(text.replace("    loss = model(x)", "    with accelerator.accumulate(model): loss = model(x)")) == []
    )


DIVIDED_BY_MODEL = """\
import torch
class Net(torch.nn.Module):
    def forward(self, x):
        loss = self.compute(x)
        {returned}
        return loss
def train():
    running = 0.0
    for i, x in enumerate(loader):
        with torch.autocast('cuda'):
            loss = model(x)
        total = loss + penalty
        running += total.item()
        scaler.scale(total).backward()
        if (i + 1) % CFG.ACC == 0:
            scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
            {logged}
"""


@pytest.mark.parametrize(
    ("returned", "logged", "expected"),
    [
        ("pass", "running /= CFG.ACC", [14]),
        ("pass", "print(running)", [14]),
        ("loss = loss / CFG.ACC", "print(running)", []),
        ("loss /= CFG.ACC", "running /= CFG.ACC", []),
        ("loss = loss.div(CFG.ACC)", "print(running)", []),
    ],
)
def test_a_model_may_divide_its_loss_and_a_log_its_sum(returned, logged, expected):
    """A division counts wherever the file has it, except of a sum that no backward uses."""
    assert reported(DIVIDED_BY_MODEL.format(returned=returned, logged=logged)) == expected


WINDOWS = """\
import torch
accum = {length}
for step in range(steps):
    {clear}
    for micro in range(accum):
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = {loss}
        {test}
        loss.backward()
    {advance}
{log}
"""
WINDOW_PARTS = {
    "length": "total_batch_size // (batch_size * world_size)",
    "clear": "optimizer.zero_grad()",
    "loss": "model(next(batches))",
    "test": "pass",
    "advance": "optimizer.step()",
    "log": "",
}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, [9]),
        ({"length": "max(round(nbs / batch_size), 1)"}, []),  # YOLO sums over the batch
        ({"length": "max(round(nbs / batch_size), 1)", "test": "loss = loss.mean()"}, [9]),
        ({"length": "max(round(nbs / batch_size), 1)", "test": "part_loss = part.mean(); loss = 2 * part_loss"}, [9]),
        ({"length": "max(round(nbs / batch_size), 1)", "test": "seen = hits.mean()"}, []),
        ({"length": "min(accumulation_steps, rest)"}, [9]),
        ({"advance": "for o in optimizers: o.step()"}, [9]),
        ({"advance": "for o in optimizers: o.step()", "loss": "model(next(batches)) / accum"}, []),
        ({"test": "if torch.isnan(loss): optimizer.zero_grad(); continue"}, [9]),
        ({"test": "optimizer.zero_grad()"}, []),
        ({"loss": "(model(next(batches)) * mask).sum() / mask.sum()"}, [9]),
        ({"loss": "(model(next(batches)) * mask).sum() / num_tokens"}, []),
        ({"loss": "sum(losses) / len(losses)"}, [9]),
        ({"log": "    time_per_batch = elapsed / accum"}, [9]),
        ({"log": "    metrics = running_reward / accum"}, [9]),
        ({"test": "factor = 1 / accum; loss = loss * factor"}, []),
        ({"test": "scaled = loss / accum; loss = scaled"}, []),
        ({"clear": "optimizer.zero_grad(); model.criterion = rescale(criterion, accum)"}, []),  # may divide
        ({"clear": "optimizer.zero_grad(); print('loss', accum)"}, [9]),
        ({"clear": "optimizer.zero_grad(); batch['loss_scale'] = 1 / (tokens * accum)"}, []),  # the model may apply it
    ],
)
def test_the_length_of_a_window_may_follow_from_batch_sizes(parts, expected):
    """HS180 reports a loss that nothing divides, however the number of micro-batches is computed and whatever is logged."""
    assert reported(WINDOWS.format(**(WINDOW_PARTS | parts))) == expected


PIECES = """\
import torch
import torch.nn.functional as F
for x, y in loader:
    pieces = x.split(size)
    optimizer.zero_grad()
    for piece in pieces:
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = {loss}
        loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("F.mse_loss(model(piece), y)", [9]),
        ("F.mse_loss(model(piece), y) / len(pieces)", []),
        ("model(piece)", []),  # may be a share of the sum over the batch
    ],
)
def test_the_mean_over_a_piece_of_a_batch_is_divided_by_their_number(loss, expected):
    """HS180 reports the mean over each of the pieces into which a script splits its batch."""
    assert reported(PIECES.format(loss=loss)) == expected


EXCLUSIVE = """\
import torch
for it, x in enumerate(loader):
    with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = model(x){divide}
    if it % accum_steps == 0 or it == last:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        with model.no_sync():
            loss.backward()
"""


@pytest.mark.parametrize(("divide", "expected"), [("", [6]), (" / accum_steps", [])])
def test_a_window_may_end_under_one_of_two_conditions(divide, expected):
    """HS180 reads `a or b` around the last backward of a window, with the others in the else branch."""
    assert reported(EXCLUSIVE.format(divide=divide)) == expected


SIMULATED = """\
import torch
gradient_accumulation_steps = 5
{scale}
scaler = torch.amp.GradScaler("cuda")
for epoch in range(9):
    for micro_step in range(gradient_accumulation_steps):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(next(batches))
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("gradient_accumulation_steps *= 8", [9]),
        ("grad_acc //= world_size", [9]),
        ("for p in model.parameters():\n    p.grad /= 5", []),
    ],
)
def test_a_number_of_steps_is_no_gradient(scale, expected):
    """A window that is multiplied by the number of processes divides no gradients."""
    assert [f.line for f in findings(SIMULATED.format(scale=scale), "HS180")] == expected


WEIGHTED = """\
import torch
from planner import compute_loss, criterion, log_loss, record, weighted
def step(ddp, stream, scaler, optimizer, plan, args):
    optimizer.zero_grad()
    for i in range(plan.micro_batches):
        x, y = next(stream)
        with torch.autocast('cuda', dtype=torch.float16):
            loss = criterion(ddp(x), y)
        {after}
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("loss = weighted(loss, len(x), plan)", []),
        ("loss = loss * weighted(loss.detach(), plan=plan)", []),
        ("pass", [10]),
        ("record(loss, plan)", [10]),
        ("loss = weighted(loss, args)", [10]),
        ("stats = compute_loss(plan)", [10]),
    ],
)
def test_another_file_weights_the_loss_with_a_plan(after, expected):
    """A function that makes a loss from a loss and the object with the number of micro-batches may divide."""
    assert reported(WEIGHTED.format(after=after)) == expected


ACCUMULATED = """\
import torch
def train(model, loader, optimizer, scaler, args):
    total, seen = 0.0, 0
    for i, x in enumerate(loader):
        is_waiting = (i + 1) % args.accum_steps != 0 and i + 1 != len(loader)
        try:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).mean(){divide}
            scaler.scale(loss).backward()
        except torch.cuda.OutOfMemoryError:
            optimizer.zero_grad(set_to_none=True)
            continue
        total += loss.item()
        seen += 1
        if not is_waiting:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            log(loss=total / {log})
            total, seen = 0.0, 0
"""


@pytest.mark.parametrize(
    ("divide", "log", "expected"),
    [
        ("", "seen", [9]),
        ("", "args.accum_steps", [9]),
        (" / args.accum_steps", "seen", []),
        (" / args.accum_steps", "args.accum_steps", []),
    ],
)
def test_a_window_with_a_handler_and_a_sum_for_the_log(divide, log, expected):
    """Gradients that an exception handler clears are those of a lost window, and a quotient of logged numbers divides no gradient."""
    assert reported(ACCUMULATED.format(divide=divide, log=log)) == expected
