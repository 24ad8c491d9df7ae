"""What was reported on public code without being wrong, and the twin of each that is."""

import pytest

from check_scripts import findings
from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings
from halfstep.check.runner import check_document
from halfstep.check.select import Selection

BRANCHES = """\
import torch
def region(args):
    return {{"device_type": "cuda", "enabled": args.amp, "dtype": torch.float16}}
def train(model, loader, optimizer, scaler, args):
    for x, y in loader:
        with torch.autocast(**region(args)):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
@torch.no_grad()
def evaluate(model, loader, args=None):
    model.eval()
    for x, y in loader:
        if {test}:
            with torch.autocast(**region(args)):
                out = model(x)
        else:
            out = model(x)
"""


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("args is not None and args.amp", []),
        ("args and args.amp", []),
        ("y is not None and args.amp", [20]),
    ],
)
def test_the_branch_without_mixed_precision_of_optional_settings(test, expected):
    """A test that settings were passed at all does not say that the other branch runs with mixed precision."""
    assert [f.line for f in findings(BRANCHES.format(test=test), "HS149")] == expected


OPTIONAL_APEX = """\
import torch
from apex import amp
from timm.utils import ApexScaler
def main(args, model, optimizer, loader):
    loss_scaler = None
    if args.amp == "apex":
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        loss_scaler = ApexScaler()
    for x, y in loader:
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
{step}
"""
SCALER = """\
        if loss_scaler is not None:
            loss_scaler(loss, optimizer, clip_grad=args.clip)
        else:
            loss.backward(create_graph=args.second_order)
            optimizer.step()"""
NO_SCALER = """\
        loss.backward(create_graph=args.second_order)
        optimizer.step()"""


@pytest.mark.parametrize(("step", "expected"), [(SCALER, []), (NO_SCALER, [12])])
def test_an_object_that_scales_with_apex_in_the_other_branch(step, expected):
    """Where an object made with `amp.initialize` steps, the plain backward of the other branch runs without Apex."""
    assert [f.line for f in findings(OPTIONAL_APEX.format(step=step), "HS184")] == expected


UNREAD = """\
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--amp", {option})
args = parser.parse_args()
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ('default=2, type=int, help="amplification of the kernel"', []),
        ('default=1, type=float, help="amplitude of the noise"', []),
        ("default=0.5, type=float", []),
        ("default=1, type=int", [4]),
        ('default=True, type=int, help="automatic mixed precision"', [4]),
        ('action="store_true"', [4]),
    ],
)
def test_an_amplitude_is_no_precision_option(option, expected):
    """`--amp` is also short for amplitude and amplification."""
    assert [f.line for f in findings(UNREAD.format(option=option), "HS139")] == expected


STEPS = """\
import torch
def one(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).sum()
    loss.backward()
    optimizer.step()
def other(model, p):
{made}    {written}
    optimizer.step()
one(net)
other(net, weight)
"""
MADE = "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
TWICE = """\
import torch
def step(p, optimizer, value):
    {written}
    optimizer.step()
def train(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        step(model.head.weight, optimizer, 1.0)
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (STEPS.format(made=MADE, written="print(p)"), []),
        (TWICE.format(written="p.grad = torch.full_like(p, value)"), []),
        (TWICE.format(written="print(p)"), [4]),
    ],
)
def test_a_second_step_of_new_gradients_or_another_optimizer(text, expected):
    """A step repeats another only if both are of one optimizer object, and no line writes gradients between them."""
    assert [f.line for f in findings(text, "HS114")] == expected


QUANTIZED = """\
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
def fit(name):
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=quantized)
    Trainer(model, TrainingArguments("out", bf16=True)).train()
    return model
def main(args):
    if args.eval_only:
        tokenizer.pad_token = tokenizer.eos_token
        quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)
        base = AutoModelForCausalLM.from_pretrained(args.name, quantization_config=quantized)
        model = {loaded}
    else:
        model = fit(args.name)
    {after}
"""
ADAPTED = "PeftModel.from_pretrained(base, args.adapter)"


@pytest.mark.parametrize(
    ("loaded", "after", "expected"),
    [
        (ADAPTED, "evaluate(model)", []),
        ("base", "print(model.generate(**tokens))", []),
        (ADAPTED, "Trainer(model, args).train()", [12]),
        (ADAPTED, "return model", []),
    ],
)
def test_a_branch_whose_model_no_trainer_gets(loaded, after, expected):
    """A model that is quantized for an evaluation is not in the bf16 run, whose Trainer gets another one."""
    assert [f.line for f in findings(QUANTIZED.format(loaded=loaded, after=after), "HS268")] == expected


FREE = """\
import torch
import schedulefree
from accelerate import Accelerator
accelerator = Accelerator()
optimizer = {made}
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for i, batch in enumerate(loader):
    accelerator.backward(model(**batch).loss)
    {step}
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("made", "step", "expected"),
    [
        ("schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-3)", "optimizer.step()", []),
        ("schedulefree.ScheduleFreeWrapper(base)", "optimizer.step()", []),
        ("torch.optim.AdamW(model.parameters())", "lr_scheduler.step()", ["HS156"]),
        ("schedulefree.SGDScheduleFree(model.parameters())", "lr_scheduler.step()", ["HS156"]),
    ],
)
def test_an_optimizer_without_a_schedule(made, step, expected):
    """An optimizer that is called schedule-free is no learning-rate schedule."""
    assert [f.code for f in findings(FREE.format(made=made, step=step), "HS156")] == expected


CASES = """\
import torch
def test_quantized():
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)
    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=quantized)
    SFTTrainer(model, SFTConfig(output_dir="out"{bf16})).train()
def test_plain():
    SFTTrainer(small, SFTConfig(output_dir="out", bf16=True)).train()
"""
IMPORTS = "from transformers import AutoModelForCausalLM, BitsAndBytesConfig\nfrom trl import SFTConfig, SFTTrainer\n"


@pytest.mark.parametrize(("bf16", "expected"), [("", []), (", bf16=True", [5])])
def test_a_function_with_a_run_of_its_own(bf16, expected):
    """A compute dtype is compared with the run of its function, not with that of another one."""
    assert [f.line for f in findings(IMPORTS + CASES.format(bf16=bf16), "HS268")] == expected


REPLICAS = """\
import torch
def test_save():
    wrapped = torch.nn.DataParallel(net)
    save(wrapped)
{between}    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = net(x).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("between", "expected"), [("def test_region():\n", []), ("", [3])])
def test_replicas_of_another_test_case(between, expected):
    """DataParallel in one test case does not run in the region of another."""
    assert [f.line for f in findings(REPLICAS.format(between=between), "HS147")] == expected


TIMED = """\
import time
import torch
def timed_call(fn):
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start
def {name}(model, optimizer, {data}):
    def step():
        with torch.autocast("cuda"):
            loss = model({data}).mean()
        loss.backward()
        optimizer.step()
    return {call}(step)
"""


@pytest.mark.parametrize(
    ("name", "data", "call", "expected"),
    [
        ("run", "inputs", "timed_call", []),
        ("benchmark_training", "inputs", "repeat", []),
        ("run", "inputs", "repeat", [11]),
        ("train_on_benchmark", "loader", "repeat", [11]),
    ],
)
def test_steps_that_are_only_timed(name, data, call, expected):
    """A benchmark with random inputs learns nothing, so that gradients that become zero change nothing."""
    text = TIMED.format(name=name, data=data, call=call)
    found = check_document(read_document("train.py", text.encode(), "python"), Settings(), Selection())
    assert [f.line for f in found if f.code == "HS123"] == expected


SOFTMAX = """\
import torch
from torch.nn import functional as F
def attend(weights, amp):
    if {test}:
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(torch.float16)
{other}        weights = F.softmax(weights, dim=-1)
    return weights
"""


@pytest.mark.parametrize(
    ("test", "other", "expected"),
    [
        ("weights.dtype == torch.float16", "    else:\n", []),
        ("amp", "    else:\n", []),
        ("amp", "", [6]),
    ],
)
def test_a_softmax_in_the_other_branch_of_a_cast(test, other, expected):
    """What one branch casts to float16 is not float16 in the other."""
    assert [f.line for f in findings(SOFTMAX.format(test=test, other=other), "HS165")] == expected


WARMED = """\
import torch
with torch.no_grad():
    for x, y in loader:
        {target}model(x)
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("target", "expected"), [("_ = ", []), ("", []), ("out = ", [4]), ("out, _ = ", [4])])
def test_a_forward_whose_result_nobody_uses(target, expected):
    """A pass that only shows that the model works is no validation."""
    assert [f.line for f in findings(WARMED.format(target=target), "HS149")] == expected
