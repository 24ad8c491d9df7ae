"""Forms of public scripts that looked like a mistake and are none, each with the nearest form that is one."""

import pytest

from check_scripts import findings


def lines(text, code):
    """The lines at which a rule reports something."""
    return [f.line for f in findings(text, code)]


AVERAGED = """\
import torch
from torch.optim.swa_utils import AveragedModel
scaler = torch.amp.GradScaler("cuda")
average = AveragedModel(model)
for epoch in range(9):
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
    best = average if average is not None else model
    torch.save({saved}.state_dict(), path)
"""


@pytest.mark.parametrize(("saved", "expected"), [("best", []), ("average", []), ("optimizer", [11])])
def test_an_averaged_model_is_no_optimizer(saved, expected):
    """`torch.optim.swa_utils` has models too: the file of one is not a checkpoint without its scaler."""
    assert lines(AVERAGED.format(saved=saved), "HS170") == expected


MEMORY = """\
import torch
def main():
    scaler = torch.amp.GradScaler("cuda")
    optimizer.load_state_dict(torch.load(path)["optimizer"])
    best = None
    for epoch in range(9):
        for x in loader:
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()
        best = {{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
    if best is not None:
        {use}
"""


@pytest.mark.parametrize(
    ("use", "expected"),
    [('model.load_state_dict(best["model"])', []), ("torch.save(best, path)", [11]), ("return best", [11])],
)
def test_states_that_stay_in_memory_are_no_checkpoint(use, expected):
    """The best states of a run, restored at its end, are no file from which another run resumes."""
    assert lines(MEMORY.format(use=use), "HS170") == expected


ACCUMULATE = """\
from accelerate import Accelerator
accelerator = Accelerator({options})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    with accelerator.accumulate(model):
        optimizer.zero_grad()
        accelerator.backward(model(x))
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [("mixed_precision='fp16'", []), ("gradient_accumulation_steps=args.steps", [6])],
)
def test_an_accelerator_without_steps_accumulates_nothing(options, expected):
    """The default of gradient_accumulation_steps is 1: each micro-batch is a window."""
    assert lines(ACCUMULATE.format(options=options), "HS181") == expected


COUNTED = """\
import torch
class Trainer:
    def train_step(self, x):
        missing = [key for key in self.keys if key not in x]
        if missing:
            raise ValueError(missing)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.model(x)
        scaled_loss = loss / self.args.grad_accum
        scaled_loss.backward()
    def train(self):
        accum_step = 0
        for x in self.loader:
            {first}
                self.train_step(x)
            else:
                with self.model.no_sync():
                    self.train_step(x)
            accum_step += 1
            {last}
                self.optimizer.step()
                self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        ("if accum_step % self.args.grad_accum == 0:", "if accum_step % self.args.grad_accum == 0:", []),
        ("if self.is_single:", "if True:", [22]),
    ],
)
def test_one_condition_before_and_after_the_count_is_two(first, last, expected):
    """The same text at the start and at the end of a window, with the counter increased in between."""
    assert lines(COUNTED.format(first=first, last=last), "HS181") == expected


SCALED = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="no")
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    accelerator.backward({loss})
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(("loss", "expected"), [("scaler.scale(loss)", []), ("loss", [6])])
def test_an_engine_may_receive_a_scaled_loss(loss, expected):
    """The script's own scaler multiplies the loss that the Accelerator runs its backward on."""
    assert lines(SCALED.format(loss=loss), "HS123") == expected


MUON = """\
import torch
def orthogonalize(g):
    return g.to(torch.bfloat16)
class Muon({base}):
    def step(self):
        for group in self.groups:
            g = group["grads"]
            torch._foreach_lerp_(g, group["buffers"], 0.05)
            g = orthogonalize(torch.stack(g))
"""


@pytest.mark.parametrize(("base", "expected"), [("torch.optim.Optimizer", []), ("Average", [8])])
def test_an_optimizer_averages_gradients(base, expected):
    """The momentum of an optimizer is no average of weights."""
    assert lines(MUON.format(base=base), "HS153") == expected


HOOK = """\
import torch
import apex
class Hook:
    def after_iteration(self, runner):
        {divide}
        with apex.amp.scale_loss(runner.outputs["loss"], runner.optimizer) as scaled_loss:
            scaled_loss.backward()
        if self.every_n_iters(runner, self.cumulative_iters):
            runner.optimizer.step()
            runner.optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("divide", "expected"),
    [
        ('runner.outputs["loss"] /= self.cumulative_iters', []),
        ("runner.total /= self.cumulative_iters", [7]),
        ("pass", [7]),
    ],
)
def test_an_entry_is_divided_in_place(divide, expected):
    """The loss of a backward may be an entry of a dictionary."""
    assert lines(HOOK.format(divide=divide), "HS180") == expected


FACTOR = """\
import torch
from torch.cuda.amp import autocast
class Hook:
    def after_iteration(self, runner):
        factor = self.cumulative_iters if runner.iter < self.whole else self.rest
        loss = runner.outputs["loss"]{divide}
        scaled_loss = loss * self.loss_scaler.loss_scale
        scaled_loss.backward()
        if self.every_n_iters(runner, self.cumulative_iters):
            runner.optimizer.step()
            runner.optimizer.zero_grad()
"""


@pytest.mark.parametrize(("divide", "expected"), [(" / factor", []), ("", [8])])
def test_a_loss_is_divided_before_it_is_scaled(divide, expected):
    """The divisor of the loss that a scaled one is the product of."""
    assert lines(FACTOR.format(divide=divide), "HS180") == expected


APEX = """\
import torch
from apex import amp
def main():
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    optimizer.load_state_dict(torch.load(path)["optimizer"])
    for x in loader:
        with amp.scale_loss(model(x), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        best = {{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
    {use}
"""


@pytest.mark.parametrize(
    ("use", "expected"), [('model.load_state_dict(best["model"])', []), ("torch.save(best, path)", [10])]
)
def test_states_that_stay_in_memory_need_no_state_of_apex(use, expected):
    """Apex's scale belongs into a file from which another run resumes."""
    assert lines(APEX.format(use=use), "HS173") == expected


LIFTED = """\
import torch
from transformers import LlavaForConditionalGeneration

def find_projector(model):
    return model.model.projector

def tune(model, loader):
    optimizer = torch.optim.AdamW({trained}, lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

def main(path, loader):
    model = LlavaForConditionalGeneration.from_pretrained(path, dtype=torch.float16)
{setup}    tune(model, loader)

main(path, loader)
"""
CHOOSE = """\
    for name, p in model.named_parameters():
        if "projector" in name:
            p.requires_grad_(True)
        else:
            p.requires_grad_(False)
"""
TRAINABLE = "[p for p in model.parameters() if p.requires_grad]"
PART = "model.projector.parameters()"


@pytest.mark.parametrize(
    ("trained", "setup", "expected"),
    [
        (TRAINABLE, CHOOSE, [19]),
        (TRAINABLE, "    model.projector.float()\n" + CHOOSE, []),
        (TRAINABLE, "    model.projector.to(torch.float32)\n" + CHOOSE, []),
        (TRAINABLE, "    part = model.model.projector\n    part.float()\n" + CHOOSE, []),
        (TRAINABLE, "    projector = find_projector(model)\n    projector.float()\n" + CHOOSE, []),
        (TRAINABLE, "    model.vision.float()\n" + CHOOSE, [19]),
        (TRAINABLE, "    model.projector.half()\n" + CHOOSE, [19]),
        (TRAINABLE, "    copy = model.projector.float()\n" + CHOOSE, [19]),
        (PART, "", [19]),
        (PART, "    model.projector.float()\n", []),
        (PART, "    model.vision.float()\n", [19]),
        (TRAINABLE, "    model.requires_grad_(False)\n    model.projector.requires_grad_(True)\n", [19]),
        (
            TRAINABLE,
            "    model.requires_grad_(False)\n    model.projector.float()\n    model.projector.requires_grad_(True)\n",
            [],
        ),
    ],
)
def test_a_trained_part_may_be_cast_to_float32(trained, setup, expected):
    """The scaler rejects float16 gradients; the only part of a float16 model that has gradients may be float32."""
    assert lines(LIFTED.format(trained=trained, setup=setup), "HS160") == expected


RELOADED = """\
import torch
from transformers import AutoModelForCausalLM

def tune(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

def main(path, loader):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
{body}
"""
RELOAD = 'model = AutoModelForCausalLM.from_pretrained("out", dtype=torch.float16)'


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"    tune(model, loader)\n    {RELOAD}\n    score(model)", []),
        (f"    for part in loader:\n        tune(model, part)\n    {RELOAD}\n    score(model)", []),
        (f"    {RELOAD}\n    tune(model, loader)", [17]),
        (f"    tune(model, loader)\n    {RELOAD}\n    tune(model, loader)", [18]),
        (f"    for part in loader:\n        tune(model, part)\n        {RELOAD}", [19]),
    ],
)
def test_a_model_that_is_loaded_after_training_is_not_trained(body, expected):
    """A function of the file trains the first model; the one that is loaded below its last call is evaluated."""
    assert lines(RELOADED.format(body=body), "HS160") == expected


MASKED = """\
import torch
def contrast(a, b, mask):
    scores = torch.matmul(a, b.T)
    scores = scores.masked_fill(mask, -1e9)
    return torch.nn.functional.cross_entropy(scores, labels)
def train(model, loader):
    for x, mask in loader:
{train}
        loss.backward()
def evaluate(model, loader):
    for x, mask in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            a, b = model(x)
{more}
"""


@pytest.mark.parametrize(
    ("train", "more", "count"),
    [
        ("        loss = contrast(*model(x), mask)", "", 0),
        ("        pass", "", 0),
        ("        with torch.no_grad():\n            loss = contrast(*model(x), mask)", "", 0),
        (
            "        with torch.autocast('cuda', dtype=torch.float16):\n            loss = contrast(*model(x), mask)",
            "",
            1,
        ),
        ("        with amp_context():\n            loss = contrast(*model(x), mask)", "", 1),
        ("        loss = contrast(*model(x), mask)", "            loss = contrast(a, b, mask)", 1),
        ("        loss = run(model, x, contrast)", "", 1),
        ("        loss = contrast(*model(x), mask)", "with torch.autocast('cuda'):\n    train(model, loader)", 1),
    ],
)
def test_a_loss_outside_the_region_is_not_float16(train, more, count):
    """A mask value overflows where its function runs under autocast, not because another function has a region."""
    assert len(findings(MASKED.format(train=train, more=more), "HS163")) == count


@pytest.mark.parametrize(
    ("steps", "count"), [("1", 0), ("4", 1), ("args.accumulation_steps", 1), ("1 if small else 4", 1)]
)
def test_one_micro_batch_is_a_window(steps, count):
    """A loss that is divided by 1 is stepped on every micro-batch rightly."""
    text = f"""\
import torch
scaler = torch.amp.GradScaler("cuda")
def train(model, loader, optimizer, args):
    accumulation_steps = {steps}
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x) / accumulation_steps
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
    assert len(findings(text, "HS181")) == count


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        ("model.parameters()", 1),
        ("group_params(model)", 1),
        ("unet_adapter.parameters()", 0),
        ("select_lora_params(model)", 0),
        ("unet_adapter.parameters() if config.kind == 'b' else select_lora_params(model)", 0),
        ("unet_adapter.parameters() if config.adapter == 'b' else select_lora_params(model)", 0),
    ],
)
def test_a_function_may_choose_the_parameters_of_adapters(chosen, count):
    """A function of another file that is named for adapters does not return the model's own weights."""
    text = f"""\
import torch
from project import group_params, load_unet, select_lora_params
model, unet_adapter = load_unet(path, dtype=torch.bfloat16)
optimizer = torch.optim.AdamW({chosen}, lr=1e-4)
for x in loader:
    loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert len(findings(text, "HS151")) == count
