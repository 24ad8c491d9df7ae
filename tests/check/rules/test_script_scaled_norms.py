"""Scaled gradients that are logged: norms of a clip without a limit, and the hooks of W&B."""

import pytest

from check_scripts import findings

NORM = """\
import torch
scaler = torch.amp.GradScaler("cuda")
{before}
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    if {test}:
        scaler.unscale_(optimizer)
    {norm}torch.nn.utils.clip_grad_norm_(model.parameters(), {limit})
    scaler.step(optimizer)
    scaler.update()
"""
CHOICE = "float('inf') if clip is None else clip"


@pytest.mark.parametrize(
    ("before", "test", "norm", "limit", "expected"),
    [
        ("", "clip is not None", "total += ", CHOICE, [11]),
        ("", "clip", "norm = ", "clip or float('inf')", [11]),
        (f"limit = {CHOICE}", "clip is not None", "norm = ", "limit", [11]),
        ("", "clip is not None", "norm = ", "clip if clip is not None else 1e9", [11]),
        ("", "use_amp", "norm = ", CHOICE, []),
        ("", "clip is not None", "", CHOICE, []),
        ("", "False", "norm = ", CHOICE, []),  # HS104
        ("", "clip is None", "norm = ", "clip if clip is None else 1.0", []),
    ],
)
def test_the_norm_of_a_clip_without_a_limit_is_scaled(before, test, norm, limit, expected):
    """HS110 reports a norm that is only measured where the condition of unscale_ is false."""
    text = NORM.format(before=before, test=test, norm=norm, limit=limit)
    assert [f.line for f in findings(text, "HS110")] == expected


WATCHED = """\
import torch
import wandb
def train(model, optimizer, loader):
    run = wandb.init()
    {watch}
    scaler = torch.amp.GradScaler("cuda"{enabled})
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.{dtype}):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("watch", "enabled", "dtype", "expected"),
    [
        ("wandb.watch(model, log='all')", "", "float16", [5]),
        ("wandb.watch(model)", "", "float16", [5]),
        ("run.watch(model, None, 'gradients')", "", "float16", [5]),
        ("wandb.watch(model, log='all')", ", enabled=amp", "float16", [5]),
        ("wandb.watch(model, log='parameters')", "", "float16", []),
        ("wandb.watch(model, log=None)", "", "float16", []),
        ("wandb.watch(model, log=kind)", "", "float16", []),
        ("wandb.watch(model)", ", enabled=False", "float16", []),
        ("wandb.watch(model)", "", "bfloat16", []),
        ("files.watch(model)", "", "float16", []),
    ],
)
def test_the_hooks_of_wandb_log_scaled_gradients(watch, enabled, dtype, expected):
    """HS110 reports wandb.watch with gradients where a scaler scales the loss."""
    text = WATCHED.format(watch=watch, enabled=enabled, dtype=dtype)
    assert [f.line for f in findings(text, "HS110")] == expected


MADE = """\
import torch
def start(args):
    if args.quiet:
        return None
    import wandb
    {made}
def train(model, optimizer, loader):
    run = start(args)
    if run:
        run.watch(model)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ("wandb.init()\n    return wandb", [11]),
        ("return wandb.init(config=vars(args))", [10]),
        ("run = wandb.init()\n    return run", [11]),
        ("return Observer(wandb)", []),
    ],
)
def test_a_run_that_a_function_of_the_file_returns(made, expected):
    """HS110 knows what `watch` belongs to through the function that starts the run."""
    assert [f.line for f in findings(MADE.format(made=made), "HS110")] == expected


SHOWN = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, x in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    {first}
    scaler.unscale_(optimizer)
    {then}
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("shown", "is_read"),
    [
        ("plot_grad_flow(model.named_parameters())", True),
        ("logger.log_grads_tb(i, model)", True),
        ("self.writer.log_gradients(self.model, i)", True),
        ("for n, p in model.named_parameters(): writer.add_histogram(n, p.grad, i)", True),
        ("wandb.log({'g': wandb.Histogram(model.fc.weight.grad.cpu())})", True),
        ("norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])", True),
        ("log_grad_norm(norm)", False),
        ("for n, p in model.named_parameters(): writer.add_histogram(n, p, i)", False),
        ("log_gradients(enabled)", False),
    ],
)
def test_what_logs_gradients_reads_them(shown, is_read):
    """HS110 reports functions of other files that are named for it and get the model, and histograms of a gradient."""
    assert [f.line for f in findings(SHOWN.format(first=shown, then="pass"), "HS110")] == [7] * is_read
    assert findings(SHOWN.format(first="pass", then=shown), "HS110") == []


LIGHTNING = """\
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
class Net(LightningModule):
    def training_step(self, batch, index):
        return self.net(batch).mean()
logger = WandbLogger(project="p")
model = Net()
logger.watch(model{log})
Trainer(precision="{precision}", logger=logger).fit(model)
"""


@pytest.mark.parametrize(
    ("precision", "log", "expected"),
    [
        ("16-mixed", "", [8]),
        ("16-mixed", ", 'all'", [8]),
        ("16-mixed", ", 'parameters'", []),
        ("bf16-mixed", "", []),
    ],
)
def test_the_logger_of_lightning_logs_scaled_gradients(precision, log, expected):
    """HS110 reports WandbLogger.watch where the Trainer is in fp16."""
    text = LIGHTNING.format(precision=precision, log=log)
    assert [f.line for f in findings(text, "HS110")] == expected


TRAINER = """\
import wandb
from transformers import Trainer, TrainingArguments
class OwnTrainer(Trainer):
    pass
wandb.watch(model, log="{log}")
trainer = {trainer}(model=model, args=TrainingArguments("out", {flags}))
trainer.{run}()
"""


@pytest.mark.parametrize(
    ("flags", "log", "trainer", "run", "expected"),
    [
        ("fp16=True", "all", "Trainer", "train", [5]),
        ("fp16=True, deepspeed='ds.json'", "gradients", "OwnTrainer", "train", [5]),
        ("fp16=True", "parameters", "Trainer", "train", []),
        ("fp16=True", "all", "Trainer", "evaluate", []),
        ("bf16=True", "all", "Trainer", "train", []),
        ("fp16=args.fp16", "all", "Trainer", "train", []),
        ("fp16=not has_bf16, bf16=has_bf16", "all", "Trainer", "train", []),
    ],
)
def test_the_hooks_of_wandb_log_scaled_gradients_of_a_trainer(flags, log, trainer, run, expected):
    """HS110 reports wandb.watch where the Trainer of transformers trains in fp16."""
    text = TRAINER.format(flags=flags, log=log, trainer=trainer, run=run)
    assert [f.line for f in findings(text, "HS110")] == expected


MEASURED = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    {early}
    {measure}
    scaler.unscale_(optimizer)
    {late}
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    "measure",
    [
        "log(torch.cat([p.grad.flatten() for p in model.parameters()]).std())",
        "flat = torch.cat([p.grad.view(-1) for p in model.parameters()]); log(flat.norm())",
        "grads = [p.grad for p in model.parameters()]; log(torch.stack(torch._foreach_norm(grads)).max())",
    ],
)
def test_a_number_of_all_gradients(measure):
    """Gradients that are joined to one tensor, or measured as a list, are gradients."""
    text = MEASURED.format(early="pass", measure=measure, late="pass")
    assert [f.line for f in findings(text, "HS110")] == [9]
    assert findings(MEASURED.format(early="pass", measure="pass", late=measure), "HS110") == []
