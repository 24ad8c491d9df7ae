"""Further forms of public scripts that look like a mistake and are none, each with the nearest form that is one."""

import pytest

from check_scripts import findings


def lines(text, code):
    """The lines at which a rule reports something."""
    return [f.line for f in findings(text, code)]


UNWRITTEN = """\
import torch
scaler = torch.amp.GradScaler("cuda")
if resume:
    checkpoint = torch.load(path)
    optimizer.load_state_dict(checkpoint["optimizer"])
for x in loader:
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
    scaler.update()
    checkpoint = {{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
    {write}
"""


@pytest.mark.parametrize(
    ("write", "expected"), [("# torch.save(checkpoint, path)", []), ("torch.save(checkpoint, path)", [10])]
)
def test_a_checkpoint_that_is_never_written_lacks_nothing(write, expected):
    """A dictionary of a script whose `torch.save` is commented out is no checkpoint."""
    assert lines(UNWRITTEN.format(write=write), "HS170") == expected


MANAGED = """\
import torch
from .saving import Manager
class Trainer:
    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.states = Manager(self.folder, {owner})
    def fit(self):
        self.optimizer.load_state_dict(torch.load(self.path))
        for x in self.loader:
            scaler = self.accelerator.scaler
            self.accelerator.backward(self.model(x))
            scaler.step(self.optimizer)
            scaler.update()
            self.store()
    def store(self):
        self.states.save_checkpoint(self.step, self.optimizer)
"""


@pytest.mark.parametrize(("owner", "expected"), [("self.accelerator", []), ("self.model", [17])])
def test_an_object_that_has_the_owner_of_the_scaler_may_save_its_state(owner, expected):
    """The class of another file that writes the checkpoint received the accelerator, whose scaler it can save."""
    assert lines(MANAGED.format(owner=owner), "HS170") == expected


DEVICES = """\
import torch
{imports}
scaler = torch.amp.GradScaler("cuda")
optimizer.load_state_dict(torch.load(path))
for x in loader:
    scaler.scale(model(x)).backward()
    if has_tpu():
        xm.optimizer_step(optimizer)
    else:
        scaler.step(optimizer)
        scaler.update()
    if {condition}:
        {module}.save(optimizer.state_dict(), path)
"""


@pytest.mark.parametrize(
    ("imports", "condition", "module", "expected"),
    [
        ("import torch_xla.core.xla_model as xm", "step % 100 == 0", "xm", []),
        ("", "has_tpu()", "xm", []),
        ("", "is_main()", "torch", [13]),
    ],
)
def test_a_tpu_has_no_scaler(imports, condition, module, expected):
    """What only a TPU writes belongs to steps that no scaler takes."""
    text = DEVICES.format(imports=imports, condition=condition, module=module)
    assert lines(text, "HS170") == expected


CHOSEN = """\
import torch
ctx = torch.amp.autocast("cuda", dtype=torch.float32)
scaler = torch.amp.GradScaler("cuda", enabled={enabled})
for x, y in loader:
    with ctx:
        loss = model(x, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(("enabled", "expected"), [('(args.dtype == "float16")', []), ("args.amp", [7])])
def test_a_scaler_that_is_only_for_float16_is_off_in_a_float32_region(enabled, expected):
    """Where the region has another dtype than float16, the scaler passes everything through."""
    assert lines(CHOSEN.format(enabled=enabled), "HS134") == expected


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ('write_json(path, {"bf16": torch.cuda.is_bf16_supported()})', []),
        ("print('bf16', torch.cuda.is_bf16_supported())", []),
        ("print('bf16' if torch.cuda.is_bf16_supported() else 'fp16')", [2]),
        ("if ready and torch.cuda.is_bf16_supported():\n    print('bf16')\nelse:\n    print('none')", []),
        ("if ready and torch.cuda.is_bf16_supported():\n    print('bf16')\n    dtype = torch.bfloat16", [2]),
        ("train({'bf16': torch.cuda.is_bf16_supported()})", [2]),
        ("settings = {'bf16': torch.cuda.is_bf16_supported()}", [2]),
    ],
)
def test_an_answer_that_is_only_recorded_chooses_no_format(use, expected):
    """A record of the machine may say that bfloat16 is emulated."""
    assert lines(f"import torch\n{use}\n", "HS167") == expected


TRAINER = """\
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from .parts import {function}
{cls}
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
{function}(model, 3)
{asked}
trainer = {trainer}(model=model, args=TrainingArguments(output_dir="x", bf16=True), train_dataset=data)
trainer.train()
"""


@pytest.mark.parametrize(
    ("cls", "expected"),
    [("class OwnTrainer: pass", []), ("class OwnTrainer(object): pass", []), ("class OwnTrainer(Trainer): pass", [5])],
)
def test_a_class_with_its_own_loop_is_no_trainer_of_transformers(cls, expected):
    """Only the name ends in Trainer: what trains the weights is in the class."""
    text = TRAINER.format(function="report", cls=cls, asked="", trainer="OwnTrainer")
    assert lines(text, "HS277") == expected


@pytest.mark.parametrize(
    ("function", "asked", "expected"),
    [
        ("add_vectors", "model.enable_input_require_grads()", []),
        ("add_vectors", "", [5]),
        ("report", "model.enable_input_require_grads()", [5]),
    ],
)
def test_parts_of_another_file_may_be_all_that_is_trained(function, asked, expected):
    """A model needs gradients of its inputs where its embeddings are frozen, here by the function that attaches the parts."""
    text = TRAINER.format(function=function, cls="", asked=asked, trainer="Trainer")
    assert lines(text, "HS277") == expected


STEP = """\
import torch
for x, y in loader:
    {before}
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    {after}
"""
FAKES = "with torch.no_grad(): fakes = model(x)"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(FAKES, "", []), ("", FAKES, [8]), (FAKES, "model.eval()", [3])],
)
def test_a_forward_without_gradients_before_the_backward_is_part_of_training(before, after, expected):
    """What a step computes for its own loss validates nothing; after the backward it may."""
    assert lines(STEP.format(before=before, after=after), "HS149") == expected


BUILT = """\
import torch
from .saving import build_checkpoint
optimizer.load_state_dict(torch.load(path)["optimizer"])
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.save(build_checkpoint(model=model, {parts}), path)
"""


@pytest.mark.parametrize(
    ("parts", "expected"),
    [("optimizer=optimizer, scaler=scaler", []), ("epoch=epoch", []), ("optimizer=optimizer", [9])],
)
def test_a_checkpoint_that_another_file_puts_together_has_what_it_receives(parts, expected):
    """The arguments of the function whose result is saved are the parts of the checkpoint."""
    assert lines(BUILT.format(parts=parts), "HS170") == expected


LITERAL = """\
import torch
def main():
    amp = {amp}
    scaler = {scaler}
    state = torch.load(path)
    optimizer.load_state_dict(state["optimizer"])
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, path)
"""


@pytest.mark.parametrize(
    ("amp", "scaler", "expected"),
    [
        ("False", 'torch.amp.GradScaler("cuda") if amp else None', []),
        ("True", 'torch.amp.GradScaler("cuda") if amp else None', [11]),
        ("True", 'None if amp else torch.amp.GradScaler("cuda")', []),
        ("False", 'None if amp else torch.amp.GradScaler("cuda")', [11]),
        ("args.amp", 'torch.amp.GradScaler("cuda") if amp else None', [11]),
    ],
)
def test_a_scaler_that_a_literal_leaves_out_has_no_state(amp, scaler, expected):
    """With `amp = False` in the script no scaler is created, so that a checkpoint lacks nothing."""
    assert lines(LITERAL.format(amp=amp, scaler=scaler), "HS170") == expected


TWO_LOSSES = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=args.steps)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = model(x, y)
        accelerator.backward(loss)
        {step}
        optimizer.zero_grad()
        second = model(x, None)
        accelerator.backward(second)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("step", "expected"), [("optimizer.step()", []), ("pass", [10])])
def test_a_zero_grad_after_a_step_of_the_same_window_discards_nothing(step, expected):
    """The step of the first loss has used what the zero_grad before the second backward clears."""
    assert lines(TWO_LOSSES.format(step=step), "HS181") == expected


FIRST_STATEMENT = """\
import torch
def load_model(folder, dtype=torch.float16):
    {first}
    config = read(folder)
    model = Model(config)
    model.load_state_dict(torch.load(folder))
    return model
model = load_model("weights", dtype=torch.bfloat16)
for x in loader:
    model(x).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("first", "expected"), [("torch.set_default_dtype(dtype)", []), ('"""Weights in `dtype`."""', [2])]
)
def test_a_parameter_that_the_first_call_reads_is_used(first, expected):
    """Only a docstring is no code: a call as the first statement of a function counts."""
    assert lines(FIRST_STATEMENT.format(first=first), "HS139") == expected


INSIDE_OUT = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator({options})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("options", "expected"), [('mixed_precision="bf16"', []), ('mixed_precision="no"', [6]), ("", [6])]
)
def test_a_prepared_model_computes_in_the_format_of_its_accelerator(options, expected):
    """The region that Accelerate opens in the forward is inside the script's: a float16 region around it changes nothing."""
    assert lines(INSIDE_OUT.format(options=options), "HS123") == expected


SWITCHED = """\
import torch
settings = {{"lr": 1e-4, {entry}}}
scaler = torch.amp.GradScaler("cuda", enabled=settings["use_scaler"])
state = torch.load(path)
optimizer.load_state_dict(state["optimizer"])
for x in loader:
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, path)
"""


@pytest.mark.parametrize(
    ("entry", "expected"),
    [('"use_scaler": True', [10]), ('"enable_grad_scaler": args.amp', [10]), ('"scaler": scaler.state_dict()', [])],
)
def test_a_setting_named_for_the_scaler_does_not_save_it(entry, expected):
    """`"use_scaler": True` among the settings is no state of a scaler; a key with its state is."""
    assert lines(SWITCHED.format(entry=entry), "HS170") == expected


COMPARED = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision=args.mixed_precision)
weight_dtype = torch.float32
if accelerator.mixed_precision == "fp16":
    weight_dtype = torch.float16
elif accelerator.mixed_precision == "bf16":
    weight_dtype = torch.bfloat16
model = Model()
if {test}:
    model.to(accelerator.device, dtype=weight_dtype)
else:
    model.to(accelerator.device)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    accelerator.backward(model(x).mean())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("weight_dtype == torch.bfloat16", []),
        ("weight_dtype != torch.float16 and args.cast", []),
        ("weight_dtype == torch.float16", [11]),
        ("weight_dtype in (torch.float16, torch.bfloat16)", [11]),
        ("args.cast", [11]),
    ],
)
def test_a_condition_on_a_dtype_leaves_only_its_formats(test, expected):
    """`if weight_dtype == torch.bfloat16:` around a cast: float16 weights never meet the scaler."""
    assert lines(COMPARED.format(test=test), "HS199") == expected
