"""Mistakes on one path of a script: in a handler, behind an option, or through a wrapper."""

import pytest

from check_scripts import findings


def lines(text, code):
    """The lines at which a rule reports something, with the severity."""
    return [(f.line, f.severity) for f in findings(text, code)]


CAUGHT = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    try:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        {step}
        optimizer.zero_grad()
    except {error} as e:
        {handler}
        optimizer.zero_grad()
"""
BOTH = "scaler.step(optimizer)\n        scaler.update()"


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, [(12, "error")]),
        ({"error": "torch.cuda.OutOfMemoryError"}, [(12, "error")]),
        ({"error": "(ValueError, RuntimeError)"}, [(12, "error")]),
        ({"handler": "if 'memory' in str(e):\n            scaler.update()"}, [(13, "error")]),
        ({"step": f"scaler.unscale_(optimizer)\n        {BOTH}"}, [(13, "error")]),
        # Nothing that a model raises, a new scale, an update whose error is caught, and one that reads the scaler's state.
        ({"error": "KeyboardInterrupt"}, []),
        ({"handler": "scaler.update(1024.0)"}, []),
        ({"handler": "pass"}, []),
        ({"handler": "try: scaler.update()\n        except AssertionError: pass"}, []),
        ({"handler": "if scaler._per_optimizer_states:\n            scaler.update()"}, []),
        # The step may have been done, or the gradients may have been checked, in an earlier pass.
        ({"step": "scaler.step(optimizer)"}, []),
        (
            {
                "step": f"scaler.unscale_(optimizer)\n        if i % 2:\n            {BOTH.replace('        ', '            ')}"
            },
            [],
        ),
        ({"handler": "scaler.step(optimizer)\n        scaler.update()"}, []),
    ],
)
def test_an_update_in_a_handler_finds_nothing_checked(parts, expected):
    """HS115 reports an update after an exception in the forward, where each check has had its own update."""
    text = CAUGHT.format(**({"step": BOTH, "error": "RuntimeError", "handler": "scaler.update()"} | parts))
    assert lines(text, "HS115") == expected


WRAPPED = """\
import torch
from lookahead import {imported}
inner = torch.optim.AdamW(model.parameters())
optimizer = {wrapper}(inner)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    {first}
    with torch.autocast("cuda"):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("wrapper", "first", "expected"),
    [
        ("Lookahead", "pass", [(11, "warning")]),
        ("Lookahead", "optimizer.zero_grad()", []),
        ("ClearingOptimizer", "pass", []),
    ],
)
def test_gradients_under_a_known_wrapper_are_never_cleared(wrapper, first, expected):
    """HS156 knows that the step of Lookahead clears nothing; an unknown wrapper may."""
    text = WRAPPED.format(imported=wrapper, wrapper=wrapper, first=first)
    assert lines(text, "HS156") == expected


def test_a_wrapper_of_this_file_may_clear_the_gradients():
    """HS156 stays silent for a class called Lookahead that the file defines itself."""
    own = "class Lookahead(torch.optim.Optimizer):\n    def __init__(self, inner):\n        self.inner = inner\n"
    text = WRAPPED.format(imported="other", wrapper="Lookahead", first="pass").replace("inner =", f"{own}inner =", 1)
    assert lines(text, "HS156") == []


OPTION = """\
import torch

class Run:
    def __init__(self, config):
        if config.precision == "bf16":
            self.model = Net().to(torch.bfloat16)
        elif config.precision == "fp16":
            self.model = Net().to(torch.float16)
        else:
            self.model = Net(){restored}
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scaler = None
        if {test}:
            self.scaler = torch.amp.GradScaler("cuda")

    def fit(self):
        for x in self.loader:
            loss = self.model(x)
            if self.scaler is not None:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                loss.backward()
                self.optimizer.step()
            self.optimizer.zero_grad()
"""


@pytest.mark.parametrize("restored", ["", ".float()"])
@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("config.precision == 'fp16' and self.device == 'cuda'", [(8, "error")]),
        ("config.precision == 'fp16'", [(8, "error")]),
        ("config.precision == 'amp'", []),
        ("config.precision == 'amp' or config.use_scaler", []),
    ],
)
def test_one_option_casts_the_model_and_creates_the_scaler(test, restored, expected):
    """HS160 compares the condition of a cast with that of the scaler; the `else` that casts to float32 changes nothing."""
    assert lines(OPTION.format(test=test, restored=restored), "HS160") == expected


TRAINER = """\
import torch
from transformers import Trainer, TrainingArguments

def convert(model, use_bf16, use_fp16):
    if use_bf16:
        model = model.to(dtype=torch.bfloat16)
    elif use_fp16:
        model = model.to(dtype=torch.float16)
    else:
        model = model.to(dtype=torch.float32)
    return model

def main(t):
    use_bf16 = bool(t.bf16)
    use_fp16 = bool(t.fp16 and not use_bf16)
    model = convert(create(t), use_bf16=use_bf16, use_fp16=use_fp16)
    {restored}
    args = TrainingArguments("out", learning_rate=1e-5, {flags})
    Trainer(model=model, args=args, train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("code", "parts", "expected"),
    [
        ("HS166", {}, [(8, "error")]),
        ("HS277", {}, [(6, "warning")]),
        ("HS166", {"flags": "bf16=use_bf16"}, []),
        ("HS166", {"restored": "model = model.float()"}, []),
        ("HS277", {"restored": "model = model.float()"}, []),
    ],
)
def test_an_option_casts_the_model_of_a_trainer(code, parts, expected):
    """HS166 and HS277 report casts under an option; a cast to float32 in another branch does not undo them."""
    text = TRAINER.format(**({"restored": "pass", "flags": "bf16=use_bf16, fp16=use_fp16"} | parts))
    assert lines(text, code) == expected


CHOSEN = """\
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTTrainer
model = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.bfloat16)
args = TrainingArguments("out", learning_rate=1e-5, bf16=True)
runner = {chosen}
runner(model=model, args=args, train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("Trainer if plain else SFTTrainer", 1), ("Trainer", 1), ("Trainer if plain else Evaluator", 0), ("make(x)", 0)],
)
def test_a_variable_that_chooses_between_trainers_is_one(chosen, expected):
    """HS277 follows `runner = A if x else B` where both are Trainers."""
    assert len(lines(CHOSEN.format(chosen=chosen), "HS277")) == expected


FROZEN = """\
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.bfloat16)
if {test}:
    model.freeze_main_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for x in loader:
    loss = model(**x).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("test", "expected"), [("args.warmup_stage", 1), ("model.config.tied", 0), ("True", 0), ("not args.whole", 0)]
)
def test_weights_that_an_option_freezes_are_trained_without_it(test, expected):
    """HS151 reports 16-bit weights that only an option of the run freezes."""
    assert len(lines(FROZEN.format(test=test), "HS151")) == expected


REGION = """\
import torch
{head}scaler = torch.amp.GradScaler("cuda")
optimizer = torch.optim.SGD(model.parameters())
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype={dtype}):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("dtype", "head", "expected"),
    [
        ("torch.float32", "", 1),
        ("dtype", "dtype = torch.float32\n", 1),
        ("torch.float16", "", 0),
        ("dtype", "dtype = torch.float16 if half else torch.float32\n", 0),
        ("torch.float32", "model = model.half()\n", 0),
    ],
)
def test_a_region_in_float32_leaves_the_scaler_without_use(dtype, head, expected):
    """HS134 reports a scaled loss that autocast computes in float32."""
    assert len(lines(REGION.format(dtype=dtype, head=head), "HS134")) == expected


@pytest.mark.parametrize("name", ["--load_in_4bit", "--use-8bit", "--load_4bits"])
def test_an_option_of_quantization_cannot_be_switched_off(name):
    """HS133 knows 4-bit and 8-bit options as precision options."""
    head = "import argparse\nparser = argparse.ArgumentParser()\n"
    assert len(lines(f"{head}parser.add_argument('{name}', action='store_true', default=True)\n", "HS133")) == 1
    assert lines(f"{head}parser.add_argument('{name}', action='store_true')\n", "HS133") == []
    assert lines(f"{head}parser.add_argument('--habit', action='store_true', default=True)\n", "HS133") == []


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("torch_module.cuda.is_bf16_supported()", 1),
        ("self.torch.cuda.is_bf16_supported()", 1),
        ("torch_module.cuda.is_bf16_supported(including_emulation=False)", 0),
        ("hardware.is_bf16_supported()", 0),
    ],
)
def test_a_module_that_is_passed_answers_the_query_alike(call, expected):
    """HS167 also reads the query of a torch module that a function receives."""
    assert (
        len(lines(f"import torch\ndef choose(self, torch_module, hardware):\n    return {call}\n", "HS167")) == expected
    )


PREPARED = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="fp16")
optimizer = getattr(torch.optim, name)(params)
prepared = accelerator.prepare(*models, optimizer)
optimizer = prepared[{index}]
for x in loader:
    accelerator.backward(models[0](x))
    optimizer.step()
    optimizer.zero_grad()
    torch.save({{"step": 1, "optimizer": optimizer.state_dict()}}, "x.pt")
optimizer.load_state_dict(torch.load("x.pt")["optimizer"])
"""


@pytest.mark.parametrize("index", ["1", "i", "len(models)", "-1"])
def test_an_optimizer_is_one_of_several_prepared_objects(index):
    """HS170 knows an optimizer by its name, however the list that it comes from is indexed."""
    assert len(lines(PREPARED.format(index=index), "HS170")) == 1


BRANCHES = """\
import torch
scaler = torch.amp.GradScaler("cuda") if args.fp16 else None
for x, y in loader:
    {clear}
    if scaler is None:
        loss = loss_fn(model(x), y)
        {plain}
        optimizer.step({closure})
    else:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    {after}
"""


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, [(8, "error")]),
        ({"plain": "history.append(float(x.mean()))"}, [(8, "error")]),
        ({"plain": "loss.backward()"}, []),
        ({"plain": "accelerator.backward(loss)"}, []),
        ({"plain": "send_back(loss)"}, []),
        ({"plain": "model.compute_gradients()"}, []),
        ({"plain": "minimize(optimizer)"}, []),
        ({"closure": "closure"}, []),
        ({"clear": "pass"}, []),
        ({"after": "loss.backward()"}, []),
    ],
)
def test_a_branch_steps_without_a_backward(parts, expected):
    """HS156 reports the step of a branch whose loss only the other branch differentiates."""
    defaults = {"clear": "optimizer.zero_grad()", "plain": "pass", "closure": "", "after": "pass"}
    assert [line for line in lines(BRANCHES.format(**(defaults | parts)), "HS156") if line[1] == "error"] == expected


EARLY = """\
import torch

class Trainer{base}:
    {body}
    def __init__(self, config):
        self.model = config.model
        {call}
        self.use_amp = config.amp
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.use_amp)

    def setup(self):
        {read}
"""


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, [(12, "error")]),
        ({"call": "if config.fsdp: self.setup()"}, [(12, "error")]),
        ({"base": "(torch.nn.Module)"}, [(12, "error")]),
        ({"read": "if self.model is None: raise ValueError\n        print(self.use_amp)"}, [(13, "error")]),
        ({"call": "pass"}, []),
        ({"call": "self.hook = lambda: self.setup()"}, []),
        ({"call": "try: self.setup()\n        except AttributeError: pass"}, []),
        ({"base": "(Configured)"}, []),
        ({"body": "use_amp = False"}, []),
        ({"body": "use_amp: bool = False"}, []),
        ({"read": "if self.model is None: print(self.use_amp)"}, []),
        ({"read": "print(hasattr(self, 'use_amp') and self.use_amp)"}, []),
        ({"read": "if self.model is None: return\n        print(self.use_amp)"}, []),
        ({"read": "self.use_amp = True; print(self.use_amp)"}, []),
        ({"read": "return lambda: self.use_amp"}, []),
        ({"read": "def later(): return self.use_amp\n        return later"}, []),
        ({"read": "return [m for m in self.model if self.use_amp]"}, []),
    ],
)
def test_a_precision_flag_is_read_before_it_is_assigned(parts, expected):
    """HS132 reports a method that `__init__` calls above the line that assigns the flag which the method reads."""
    defaults = {"base": "", "body": "pass", "call": "self.setup()", "read": "if self.use_amp: print(self.model)"}
    assert lines(EARLY.format(**(defaults | parts)), "HS132") == expected
