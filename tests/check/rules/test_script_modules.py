"""HS123, HS140, HS180, HS186, HS188, HS198, HS199: Lightning modules and losses of engines."""

import pytest

from check_scripts import findings

MANUAL = """\
import torch
import lightning as L
class Net(L.LightningModule):
    def __init__(self):
        self.automatic_optimization = False
        self.raw = torch.optim.Adam(self.layers.parameters())
    def training_step(self, batch, batch_idx):
        opt = {optimizer}
        opt.zero_grad()
        self.manual_backward(self.compute(batch))
        {step}
{trainer}
"""
AUTOMATIC = """\
import torch
import lightning as L
class Net(L.LightningModule):
    def training_step(self, batch, batch_idx):
{body}
    def {hook}(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
{trainer}
"""
FP16 = "L.Trainer(precision='16-mixed').fit(Net())"
BF16 = "L.Trainer(precision='bf16-mixed').fit(Net())"
FP32 = "L.Trainer(max_epochs=3).fit(Net())"


def reported(text, *codes):
    return [f"{f.severity}:{f.line}" for f in findings(text, *codes)]


@pytest.mark.parametrize(
    ("optimizer", "step", "trainer", "expected"),
    [
        ("self.optimizers(use_pl_optimizer=False)", "opt.step()", FP16, ["error:11"]),
        ("self.raw", "self.raw.step()", FP16, ["error:11"]),
        ("self.raw", "self.raw.step()", "", ["warning:11"]),
        ("self.trainer.optimizers[0]", "opt.step()", FP16, ["error:11"]),
        ("self.optimizers()", "opt.step()", FP16, []),
        ("self.raw", "self.raw.step()", BF16, []),
    ],
)
def test_a_torch_optimizer_in_a_module_steps_with_scaled_gradients(optimizer, step, trainer, expected):
    """Only what `self.optimizers()` returns unscales before it steps."""
    assert reported(MANUAL.format(optimizer=optimizer, step=step, trainer=trainer), "HS198") == expected


@pytest.mark.parametrize(
    ("hook", "trainer", "expected"),
    [
        ("on_after_backward", FP16, ["error:7"]),
        ("on_after_backward", "", ["warning:7"]),
        ("on_after_backward", BF16, []),
        ("on_before_optimizer_step", FP16, []),
    ],
)
def test_a_hook_before_the_unscaling_clips_scaled_gradients(hook, trainer, expected):
    """Lightning unscales between `on_after_backward` and `on_before_optimizer_step`."""
    text = AUTOMATIC.format(body="        return self.compute(batch)", hook=hook, trainer=trainer)
    assert reported(text, "HS186") == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return self.compute(batch) / self.trainer.accumulate_grad_batches", ["warning:5"]),
        ("loss = self.compute(batch)\nloss = loss / self.trainer.accumulate_grad_batches\nreturn loss", ["warning:6"]),
        (
            "loss = self.compute(batch)\nloss /= self.trainer.accumulate_grad_batches\nreturn {'loss': loss}",
            ["warning:6"],
        ),
        ("loss = self.compute(batch)\nself.log('x', loss / self.trainer.accumulate_grad_batches)\nreturn loss", []),
        ("return self.compute(batch)", []),
    ],
)
def test_lightning_divides_what_training_step_returns(body, expected):
    """With automatic optimization a division by accumulate_grad_batches is the second one."""
    indented = "\n".join(f"        {line}" for line in body.splitlines())
    assert reported(AUTOMATIC.format(body=indented, hook="unused", trainer=FP32), "HS188") == expected


def test_manual_optimization_has_no_accumulation_of_the_trainer():
    """Lightning raises for accumulate_grad_batches above 1, so a window of that length has one micro-batch."""
    text = MANUAL.format(
        optimizer="self.optimizers()", step="if batch_idx % {} == 0:\n            opt.step()", trainer=""
    ).replace("        opt.zero_grad()\n", "")
    text = text.replace("opt.step()", "opt.step()\n            opt.zero_grad()")
    assert reported(text.format("self.trainer.accumulate_grad_batches"), "HS180") == []
    assert reported(text.format("self.num_batches"), "HS180") == ["warning:9"]


@pytest.mark.parametrize(
    ("region", "trainer", "expected"),
    [
        ("torch.autocast('cuda', dtype=torch.float16)", FP32, ["error:5"]),
        ("torch.cuda.amp.autocast()", BF16, ["error:5"]),
        ("torch.autocast('cuda', dtype=torch.bfloat16)", FP32, []),
        ("torch.autocast('cuda', enabled=False)", FP32, []),
        ("torch.autocast('cuda', dtype=torch.float16)", FP16, []),
        ("torch.autocast('cuda', dtype=torch.float16)", "", []),
    ],
)
def test_a_float16_region_of_a_module_needs_the_scaler_of_the_trainer(region, trainer, expected):
    """A Trainer in another precision scales nothing; one of another file may."""
    body = f"        with {region}:\n            return self.compute(batch)"
    assert reported(AUTOMATIC.format(body=body, hook="unused", trainer=trainer), "HS123") == expected


def test_a_frozen_teacher_in_float16_needs_no_scaler():
    """A region under no_grad has no gradients."""
    body = (
        "        with torch.no_grad():\n            with torch.autocast('cuda', dtype=torch.float16):\n"
        "                target = self.teacher(batch)\n        return self.compute(batch, target)"
    )
    assert reported(AUTOMATIC.format(body=body, hook="unused", trainer=FP32), "HS123") == []


@pytest.mark.parametrize(("cast", "trainer", "count"), [(".half()", FP16, 1), ("", FP16, 0), (".half()", BF16, 0)])
def test_the_scaler_of_lightning_rejects_float16_weights(cast, trainer, count):
    """float16 weights have float16 gradients, in a module as elsewhere."""
    text = (
        "import torch\nimport lightning as L\nclass Net(L.LightningModule):\n    def __init__(self):\n"
        f"        self.layers = Layers(){cast}\n    def training_step(self, batch, i):\n        return self.layers(batch)\n"
        f"    def configure_optimizers(self):\n        return torch.optim.Adam(self.layers.parameters())\n{trainer}\n"
    )
    assert len(findings(text, "HS199")) == count


ENGINE = """\
import torch
from accelerate import Accelerator
class Loop:
    def __init__(self, args):
        self.accelerator = Accelerator(gradient_accumulation_steps=args.steps)
    def compute(self, batch):
        loss = self.model(**batch).loss
        return loss{divide}
    def train(self):
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.compute(batch)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(("divide", "expected"), [(" / args.steps", ["warning:13"]), ("", []), (" / 2", [])])
def test_a_helper_may_divide_the_loss_of_an_accelerator(divide, expected):
    """The division of a function of this file counts like one before the backward."""
    assert reported(ENGINE.format(divide=divide), "HS188") == expected


@pytest.mark.parametrize(("indent", "expected"), [("    ", ["warning:7"]), ("", [])])
def test_the_backward_of_an_engine_may_run_inside_torch_autocast(indent, expected):
    """`accelerator.backward` inside torch's own region is a backward inside autocast too."""
    text = (
        "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator(mixed_precision='bf16')\nfor x in loader:\n"
        "    with torch.autocast('cuda', dtype=torch.bfloat16):\n        loss = model(x)\n"
        f"    {indent}accelerator.backward(loss)\n    optimizer.step()\n"
    )
    assert reported(text, "HS140") == expected


CLIPS = """\
from accelerate import Accelerator
accelerator = Accelerator({options})
g, d, opt_g, opt_d, loader = accelerator.prepare(g, d, opt_g, opt_d, loader)
for batch in loader:
    accelerator.backward(loss_fn(g, d, batch))
    accelerator.clip_grad_norm_(g.parameters(), 1.0)
{between}    accelerator.clip_grad_norm_(d.parameters(), 1.0)
    opt_g.step()
"""


@pytest.mark.parametrize(
    ("options", "between", "expected"),
    [
        ("mixed_precision='fp16'", "", ["error:7"]),
        ("mixed_precision=args.precision", "", ["warning:7"]),
        ("mixed_precision='bf16'", "", []),
        ("", "", []),
        ("mixed_precision='fp16'", "    opt_g.step()\n    accelerator.backward(other(g, d, batch))\n", []),
    ],
)
def test_a_second_clip_of_an_accelerator_unscales_again(options, between, expected):
    """In fp16 each `accelerator.clip_grad_norm_` unscales every optimizer, which raises until one has stepped."""
    assert reported(CLIPS.format(options=options, between=between), "HS105") == expected


def test_clips_of_two_branches_are_no_second_clip():
    """Only one of them runs."""
    text = CLIPS.format(options="mixed_precision='fp16'", between="")
    text = text.replace("    accelerator.clip_grad_norm_(g", "    if joint:\n        accelerator.clip_grad_norm_(g")
    text = text.replace("    accelerator.clip_grad_norm_(d", "    else:\n        accelerator.clip_grad_norm_(d")
    assert reported(text, "HS105") == []
