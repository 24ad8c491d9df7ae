"""Pairs of a mistake and right code where a choice, a branch or a later line of the file decides."""

import pytest

from check_scripts import findings

HEAD = 'import torch\nscaler = torch.amp.GradScaler("cuda")\n'
EITHER = (
    "import torch\ndtype = torch.bfloat16 if args.bf16 else torch.float16\nfor x in loader:\n    optimizer.zero_grad()\n    if {test}:\n"
    "        with torch.autocast('cuda', dtype=dtype):\n            loss = model(x)\n    else:\n        loss = model(x)\n"
    "    loss.backward()\n    optimizer.step()\n"
)
PREPARED = (
    "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator(mixed_precision=args.mixed_precision)\nnet = Net()\n"
    "optimizer = torch.optim.AdamW(net.parameters())\nnet, optimizer = accelerator.prepare(net, optimizer)\nweight_dtype = torch.float32\n"
    "if accelerator.mixed_precision == 'fp16':\n    weight_dtype = torch.{half}\nelif accelerator.mixed_precision == 'bf16':\n"
    "    weight_dtype = torch.bfloat16\nnet.to(accelerator.device, dtype=weight_dtype)\nfor x in loader:\n    loss = net(x)\n"
    "    accelerator.backward(loss)\n    optimizer.step()\n    optimizer.zero_grad()\n"
)
ENABLED = (
    "import torch\ndtype = torch.bfloat16 if newer else torch.float16\nnet = Net().to({cast})\noptimizer = torch.optim.AdamW(net.parameters())\n"
    "scaler = torch.amp.GradScaler('cuda', enabled=(dtype == torch.float16))\nfor x in loader:\n    optimizer.zero_grad()\n"
    "    with torch.autocast('cuda', dtype=dtype):\n        loss = net(x)\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n"
    "    scaler.update()\n"
)
NORM = (
    HEAD + "for x in loader:\n    scaler.scale(model(x)).backward()\n    scaler.unscale_(optimizer)\n"
    "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n{test}    scaler.step(optimizer)\n    scaler.update()\n"
    "    optimizer.zero_grad()\n    scheduler.step()\n"
)
TESTED = "    if {test}:\n        optimizer.zero_grad()\n        scaler.update()\n        continue\n"
SKIPPED = (
    HEAD
    + "for x in loader:\n    optimizer.zero_grad()\n    scaler.scale(model(x)).backward()\n    scaler.unscale_(optimizer)\n"
    "    if args.skip:\n        if fixable:\n            repair()\n        else:\n            scaler.update()\n{leave}"
    "    scaler.step(optimizer)\n    scaler.update()\n"
)
TRAINER = (
    "import os\nimport torch\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
    "model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)\nworld_size = int(os.environ.get('WORLD_SIZE', 1))\n"
    "several = world_size > 1\nargs = TrainingArguments('out', bf16=True, fsdp={fsdp})\nTrainer(model=model, args=args).train()\n"
)
MERGED = (
    "import torch\nfrom peft import LoraConfig, PeftModel\nfrom transformers import AutoModelForCausalLM\nfrom trl import SFTConfig, SFTTrainer\n"
    "model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)\nif args.no_lora:\n    config = {none}\nelse:\n    config = LoraConfig()\n"
    "trainer = SFTTrainer(model=model, args=SFTConfig(bf16=True), peft_config=config)\ntrainer.train()\n"
    "base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)\nadapted = PeftModel.from_pretrained(base, 'out')\n"
    "adapted.merge_and_unload().save_pretrained('merged')\n"
)
DEVICES = (
    "import torch\ndtype = torch.bfloat16 if newer else torch.float16\nif device.type == 'cuda':\n    scaler = torch.amp.GradScaler('cuda')\n"
    "else:\n    scaler = Nothing()\nfor x in loader:\n    optimizer.zero_grad()\n    with torch.autocast('cuda', dtype=dtype):\n"
    "        loss = model(x)\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
)
INNER = (
    "import torch\nfor batch in loader:\n    for x in batch:\n        with torch.autocast('cuda', dtype=torch.bfloat16):\n"
    "            loss = model(x)\n        loss.backward()\n{steps}    optimizer.zero_grad()\n"
)
PLUGIN = (
    "import torch\nfrom accelerate import Accelerator\n{plugin}accelerator = Accelerator()\nmodel = Net().to(torch.bfloat16)\n"
    "optimizer = torch.optim.AdamW(model.parameters())\nmodel, optimizer = accelerator.prepare(model, optimizer)\nfor x in loader:\n"
    "    loss = model(x)\n    accelerator.backward(loss)\n    optimizer.step()\n    optimizer.zero_grad()\n"
)
SHADOWED = "from apex import amp\n{later}with amp.autocast():\n    loss = model(x)\n"
IDLE = (
    "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator(mixed_precision='bf16')\n"
    "optimizer = torch.optim.AdamW(model.parameters())\nscheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, f)\n"
    "model, optimizer = accelerator.prepare(model, optimizer)\nfor x in loader:\n    loss = model(x)\n    accelerator.backward(loss)\n"
    "{step}    optimizer.zero_grad()\n    scheduler.step()\n"
)
QUANTIZED = (
    "import torch\nfrom transformers import AutoModelForCausalLM, BitsAndBytesConfig\n"
    "config = BitsAndBytesConfig(load_in_4bit={on}, bnb_4bit_quant_type='nf4')\n"
    "model = AutoModelForCausalLM.from_pretrained(name, quantization_config=config)\n"
)
FLAGGED = (
    "import torch\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
    "model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)\nargs = TrainingArguments('out', {flag}=True)\n"
    "Trainer(model=model, args=args).train()\n"
)
BY_HAND = (
    "import torch\nfor x in loader:\n    model.zero_grad()\n    loss = model(x.half())\n    {target} = loss * loss_scale\n    {target}.backward()\n"
    "    for p in masters:\n        p.grad.data = p.grad.data / loss_scale\n    optimizer.step()\n    total += loss.item()\n"
)
# rule: the mistake, and right code, or code that decides nothing
PAIRS = {
    "one region for both formats": ("HS123", EITHER.format(test="args.bf16 or args.fp16"), EITHER.format(test="args.bf16")),
    "the Accelerator's precision chooses the weights": ("HS199", PREPARED.format(half="float16"), PREPARED.format(half="float32")),
    "the scaler's own test chooses the weights": ("HS160", ENABLED.format(cast="dtype"), ENABLED.format(cast="device")),
    "a norm that is only not NaN": (
        "HS196", NORM.format(test=TESTED.format(test="torch.isnan(norm)")),
        NORM.format(test=TESTED.format(test="torch.isnan(norm) or torch.isinf(norm)")),
    ),
    "an update in a branch that does not leave": ("HS108", SKIPPED.format(leave=""), SKIPPED.format(leave="            continue\n")),
    "sharded on several GPUs only": ("HS277", TRAINER.format(fsdp="'full_shard' if several else ''"), TRAINER.format(fsdp="'full_shard'")),
    "an adapter that is merged after training": ("HS277", MERGED.format(none="None"), MERGED.format(none="LoraConfig(r=4)")),
    "a scaler for one kind of device": ("HS120", DEVICES, DEVICES.replace("bfloat16 if newer else torch.float16", "float16")),
    "a schedule after accumulated backwards": (
        "HS195", INNER.format(steps="    scheduler.step()\n    optimizer.step()\n"),
        INNER.format(steps="    optimizer.step()\n    scheduler.step()\n"),
    ),
    "a file that imports DeepSpeed's plugin": (
        "HS151", PLUGIN.format(plugin=""), PLUGIN.format(plugin="from accelerate.utils import DeepSpeedPlugin\n"),
    ),
    "a later import replaces apex's amp": ("HS190", SHADOWED.format(later="import torch.cuda.amp as amp\n"), SHADOWED.format(later="")),
    "a step that is commented out": ("HS156", IDLE.format(step=""), IDLE.format(step="    optimizer.step()\n")),
    "4-bit settings that are switched off": ("HS289", QUANTIZED.format(on=False), QUANTIZED.format(on=True)),
    "a loss that is scaled by hand": ("HS111", BY_HAND.format(target="loss"), BY_HAND.format(target="scaled")),
    "bfloat16 weights with fp16=True": ("HS166", FLAGGED.format(flag="fp16"), FLAGGED.format(flag="bf16")),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "wrong", "right"), PAIRS.values(), ids=PAIRS.keys())
def test_choice_is_reported_and_its_repair_is_not(rule, wrong, right):
    """The mistake has one finding of the rule, and the other script has none."""
    assert [f.code for f in findings(wrong, rule)] == [rule]
    assert not list(findings(right, rule))


@pytest.mark.parametrize(
    "other",
    [
        "# launched with deepspeed\n",
        "update(optimizer)\n",
        "def closure(o):\n    o.step()\n",
    ],
)
def test_a_step_that_another_function_may_do_is_no_finding(other):
    """An optimizer that DeepSpeed, another file or a function steps is not reported as never stepping."""
    assert not findings(IDLE.format(step="") + other, "HS156")


FORMS = """\
import torch
from torch import nn
from transformers import AutoModelForCausalLM
{setup}
for x, y in loader:
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOW = "model = Net().cuda().bfloat16()\n"
TABLE = "OPTIMIZERS = {{'adam': torch.optim.Adam, 'other': {other}}}\noptimizer = OPTIMIZERS[name](model.parameters())"
OPTION = (
    "options = {{}}\n{add}\nmodel = AutoModelForCausalLM.from_pretrained('x/y', **options)\n"
    "optimizer = torch.optim.AdamW(model.parameters())"
)
PARTS = (
    "def build():\n    return {{'student': Net(){student}, 'teacher': Net().bfloat16()}}\nparts = build()\n"
    "model = parts['student']\noptimizer = torch.optim.AdamW(parts['student'].parameters())"
)
OWN_STEP = (
    "class Own(torch.optim.Optimizer):\n    def step(self):\n        for p in self.params:\n            {update}\n"
    "optimizer = Own(model.parameters())"
)
INIT = (
    "class Small(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(4, 4)\n"
    "        self.to({dtype})\nmodel = Small()\noptimizer = torch.optim.AdamW(model.parameters())"
)
VECTOR = "model = nn.Parameter(torch.zeros(8{dtype}))\noptimizer = torch.optim.Adam([model])"


@pytest.mark.parametrize(
    ("setup", "count"),
    [
        (LOW + TABLE.format(other="torch.optim.SGD"), 1),
        (LOW + TABLE.format(other="mine.MasterAdam"), 0),
        (LOW + "optimizer = getattr(torch.optim, name)(model.parameters())", 1),
        (LOW + "optimizer = getattr(mine, name)(model.parameters())", 0),
        (LOW + "from muon import Muon\noptimizer = Muon(model.parameters())", 1),
        (LOW + "from adams import AdamWBF16\noptimizer = AdamWBF16(model.parameters())", 0),
        (LOW + OWN_STEP.format(update="p.add_(p.grad, alpha=-0.1)"), 1),
        (LOW + OWN_STEP.format(update="self.state[p]['w'] = p.float().clone()"), 0),
        (OPTION.format(add="options.update(dtype=torch.bfloat16)"), 1),
        (OPTION.format(add="options.setdefault('dtype', torch.bfloat16)"), 1),
        (OPTION.format(add="options.update(dtype=torch.float32)"), 0),
        (PARTS.format(student=".bfloat16()"), 1),
        (PARTS.format(student=""), 0),
        (INIT.format(dtype="torch.bfloat16"), 1),
        (INIT.format(dtype="device"), 0),
        (VECTOR.format(dtype=", dtype=torch.bfloat16"), 1),
        (VECTOR.format(dtype=""), 0),
    ],
)
def test_optimizers_and_weights_that_are_chosen_or_created_indirectly(setup, count):
    """Each form of an optimizer without master weights, and of weights with 16 bits, next to one that is right."""
    assert len(findings(FORMS.format(setup=setup), "HS151")) == count
