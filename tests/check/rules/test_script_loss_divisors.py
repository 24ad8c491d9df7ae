"""Losses that the script divides before an engine divides them again, wherever the script does it."""

import pytest

from check_scripts import reported

ACCELERATE = """\
import functools
import torch
from accelerate import Accelerator

{functions}
def main(args, model, optimizer, loader):
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=args.accum)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    {setup}
    for x, y in loader:
        with accelerator.accumulate(model):
            {loss}
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
"""
PARAMETER = "def objective(out, y, parts=1):\n    loss = ce(out, y)\n    return loss / parts\n"
TERMS = "def objective(out, y, n):\n    return {'loss': a(out, y) / n + b(out, y) / n, 'aux': 0}\n"
METHOD = (
    "class Loss:\n    def __init__(self, accum):\n        self.accum = accum\n"
    "    def __call__(self, out, y):\n        return ce(out, y).mean() / self.accum\n"
)
PAIR = "def step(model, x, y, steps):\n    out = model(x)\n    loss = ce(out, y)\n    loss /= steps\n    return out, loss\n"


def script(functions: str, setup: str, loss: str) -> str:
    """A loop of Accelerate with these functions, lines before the loop, and lines that compute the loss."""
    return ACCELERATE.format(functions=functions, setup=setup, loss=loss)


BAD = [
    script(PARAMETER, "objective_ = functools.partial(objective, parts=args.accum)", "loss = objective_(model(x), y)"),
    script(PARAMETER, "pass", "loss = objective(model(x), y, args.accum)"),
    script(PARAMETER, "f = objective", "loss = f(model(x), y, parts=args.accum)"),
    script(TERMS, "pass", "loss = objective(model(x), y, n=args.accum)['loss']"),
    script(TERMS, "pass", "out = objective(model(x), y, args.accum)\n            loss = out['loss']"),
    script(METHOD, "criterion = Loss(args.accum)", "loss = criterion(model(x), y)"),
    script(PAIR, "pass", "out, loss = step(model, x, y, args.accum)"),
    script("", "w = 1.0 / args.accum", "loss = w * ce(model(x), y)"),
    script("", "pass", "loss = ce(model(x), y).div(max(1, args.accum)).float()"),
    script("", "n = args.accum", "loss = ce(model(x), y) / n"),
    script("", "pass", "loss = torch.div(ce(model(x), y), float(args.accum)) * 0.5"),
    script("", "pass", "loss = ce(model(x), y)\n            loss = loss / args.accum if args.accum > 1 else loss"),
    script("", "pass", "loss = ce(model(x), y) / args.accum\n            loss = loss + aux(x) / args.accum"),
]
GOOD = [
    script(PARAMETER, "pass", "loss = objective(model(x), y)"),
    script(PARAMETER, "f = functools.partial(objective, parts=args.heads)", "loss = f(model(x), y)"),
    script(TERMS, "pass", "loss = objective(model(x), y, n=args.terms)['loss']"),
    script(TERMS, "pass", "loss = objective(model(x), y, n=args.accum)['aux']"),
    script("", "pass", "loss = ce(model(x), y)\n            shown = loss / args.accum\n            print(shown)"),
    script("", "pass", "loss = ce(model(x), y) / args.temperature"),
    script("", "pass", "loss = ce(model(x), y) * args.accum / args.accum if False else ce(model(x), y)"),
]


@pytest.mark.parametrize("text", BAD)
def test_a_loss_is_divided_twice(text: str) -> None:
    """A division by the steps of the Accelerator is found in functions, partials, dictionaries, products and sums."""
    assert "HS188" in reported(text)


@pytest.mark.parametrize("text", GOOD)
def test_a_loss_is_divided_once(text: str) -> None:
    """Divisions by another number, of another value, or by a parameter with its default are no second division."""
    assert "HS188" not in reported(text)


HELPER = "def update(accelerator, loss):\n    accelerator.backward(loss)\n"


def test_the_caller_or_a_lambda_may_divide():
    """A helper with the backward has the divisions of what every caller passes, and a lambda those of its body."""
    text = ACCELERATE.format(functions=HELPER, setup="pass", loss="loss = ce(model(x), y)")
    inner = "            accelerator.backward(loss)\n"
    assert "HS188" in reported(text.replace(inner, "            update(accelerator, loss / args.accum)\n"))
    assert "HS188" not in reported(text.replace(inner, "            update(accelerator, loss)\n"))
    both = "            update(accelerator, loss / args.accum)\n            update(accelerator, loss)\n"
    assert "HS188" not in reported(text.replace(inner, both))
    assert "HS188" in reported(script("", "f = lambda l: l / args.accum", "loss = f(ce(model(x), y))"))


COUNTED = """\
import deepspeed

def main(a, model, loader):
    conf = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": a.gas, "bf16": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=model, config=conf)
    micro = 0
    for batch in loader:
        engine.backward(engine(batch))
        micro += 1
        if micro == a.gas:
            engine.step()
            micro = 0
"""


def test_a_counter_ends_a_window():
    """`if micro == n:` with `micro += 1` calls the engine's step once per window, as a remainder does."""
    assert "HS188" in reported(COUNTED)
    assert "HS188" not in reported(COUNTED.replace("micro == a.gas", "micro == a.log_every"))


MODULE = """\
import lightning as L

class Net(L.LightningModule):
    def __init__(self, accum):
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).mean()
        {divide}
        return {returned}

trainer = L.Trainer(precision="bf16-mixed", accumulate_grad_batches={batches})
trainer.fit(Net(args.accum), loader)
"""


@pytest.mark.parametrize(
    ("divide", "returned", "batches", "is_bad"),
    [
        ("loss = loss / self.hparams.accum", "{'loss': loss}", "args.accum", True),
        ("pass", "loss / self.trainer.accumulate_grad_batches", "8", True),
        ("loss /= self.hparams.accum", "loss", "args.accum", True),
        ("loss = loss / self.hparams.num_heads", "loss", "args.accum", False),
        ("self.log('loss', loss / self.hparams.accum)", "loss", "args.accum", False),
        ("loss = loss / self.hparams.accum", "loss", "1", False),
    ],
)
def test_lightning_divides_what_training_step_returns(divide: str, returned: str, batches: str, is_bad: bool) -> None:
    """A loss that `training_step` divides by the batches that the Trainer accumulates is divided again."""
    assert ("HS188" in reported(MODULE.format(divide=divide, returned=returned, batches=batches))) is is_bad
