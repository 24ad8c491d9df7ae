"""HS151, HS153, HS168 and HS277: parts of 16-bit models that are trained again, models of loaders and callbacks, flags off by default."""

import pytest

from check_scripts import findings

LOOP = """\
for x in loader:
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
EMBEDDINGS = """\
import torch

def freeze_all_but_embeddings(model):
    for module in model:
        inner = module.auto_model
    for p in model.parameters():
        p.requires_grad = False
    layer = {layer}
    count = 0
    for p in layer.parameters():
        {enable}
        count += p.numel()
    return count

model = Encoder(path)
model = model.to(dtype=torch.bfloat16)
freeze_all_but_embeddings(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
"""


@pytest.mark.parametrize(
    ("layer", "enable", "count"),
    [
        ("inner.embed_tokens", "p.requires_grad = True", 1),
        ("inner.embed_tokens", "p.requires_grad_()", 1),
        ("inner.embed_tokens", "p.requires_grad = False", 0),
        ("inner.embed_tokens.float()", "p.requires_grad = True", 0),
        ("inner.new_adapter", "p.requires_grad = True", 0),
        ("torch.nn.Embedding(9, 9)", "p.requires_grad = True", 0),
    ],
)
def test_a_part_that_a_function_looks_up_and_enables_is_trained(layer, enable, count):
    """The embeddings of a bfloat16 model are trained in bfloat16; a new layer or one that is cast is another matter."""
    assert len(findings(EMBEDDINGS.format(layer=layer, enable=enable) + LOOP, "HS151")) == count


CHOSEN = """\
import torch
model = Net()
model.requires_grad_(False)
for name, p in model.named_parameters():
    for word in args.{words}:
        if word in name:
            p.requires_grad = {state}
model.to(torch.bfloat16)
optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-4)
"""


@pytest.mark.parametrize(
    ("words", "state", "count"), [("modules", "True", 1), ("modules", "False", 0), ("lora_modules", "True", 0)]
)
def test_parameters_that_a_loop_enables_by_name_are_trained(words, state, count):
    """`requires_grad_(False)` is undone for the parameters of chosen names, which have the dtype of the model."""
    assert len(findings(CHOSEN.format(words=words, state=state) + LOOP, "HS151")) == count


CLASSES = """\
import torch
import bitsandbytes as bnb
if args.optimizer == "adamw8bit":
    optimizer_class = bnb.optim.AdamW8bit
else:
    optimizer_class = {other}
model = Net().to(torch.bfloat16)
optimizer = optimizer_class(model.parameters(), lr=1e-4)
"""


@pytest.mark.parametrize("other", ["torch.optim.AdamW", "getattr(module, name)"])
def test_one_plain_class_of_several_trains_without_masters(other):
    """A class that only a run knows in one branch changes nothing about the other."""
    assert len(findings(CLASSES.format(other=other) + LOOP, "HS151")) == 1


def test_classes_that_only_a_run_knows_may_keep_masters():
    """No branch is known to train without master weights, which the message says."""
    text = CLASSES.format(other="getattr(module, name)").replace("bnb.optim.AdamW8bit", "load(name)")
    (finding,) = findings(text + LOOP, "HS151")
    assert "unless `optimizer_class` adds them" in finding.message


PARTS = """\
import torch
from accelerate import Accelerator
from peft import LoraConfig
from project.loading import load_parts

class Loop:
    def __init__(self, cfg):
        self.cfg = cfg
        self.accelerator = Accelerator()
        self.load()
        self.adapt()
        self.params = {params}

    def load(self):
        parts = load_parts(self.cfg.path, {dtype})
        self.net = parts.{part}
        self.net.requires_grad_(False)

    def adapt(self):
        self.net.add_adapter(LoraConfig(r=8))

    def train(self):
        optimizer = torch.optim.AdamW(self.params, lr=1e-4)
        for x in self.loader:
            self.accelerator.backward(self.net(x).mean())
            optimizer.step()
            optimizer.zero_grad()
"""
OWN = "[p for p in self.net.parameters() if p.requires_grad]"


@pytest.mark.parametrize(
    ("dtype", "part", "params", "count"),
    [
        ("transformer_dtype=torch.bfloat16", "transformer", OWN, 1),
        ("transformer_dtype=torch.bfloat16", "transformer", "list(self.net.parameters())", 1),
        ("transformer_dtype=torch.float32", "transformer", OWN, 0),
        ("vae_dtype=torch.bfloat16", "transformer", OWN, 0),
        ("transformer_dtype=torch.bfloat16", "transformer", "[p for p in self.other.parameters()]", 0),
    ],
)
def test_a_loader_of_another_file_gets_the_dtype_of_each_part(dtype, part, params, count):
    """`load_parts(transformer_dtype=...)` decides the dtype of `parts.transformer`, and `add_adapter` gives its adapters the same one."""
    assert len(findings(PARTS.format(dtype=dtype, part=part, params=params), "HS151")) == count


QUANTIZED = """\
import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig
unet = UNet2DConditionModel.from_pretrained(path)
if args.{option}:
    unet.to(torch.bfloat16)
    prepare(unet)
unet.add_adapter(LoraConfig())
optimizer = torch.optim.AdamW([p for p in unet.parameters() if p.requires_grad], lr=1e-4)
"""


@pytest.mark.parametrize(("option", "count"), [("train_lora", 1), ("low_memory", 1), ("quantize", 0)])
def test_adapters_of_a_branch_have_the_dtype_of_its_model(option, count):
    """The option of the adapters leads to them; that of a quantized model leaves open which dtype its layers have."""
    text = QUANTIZED.format(option=option) + LOOP.replace("model(", "unet(")
    assert len(findings(text, "HS151")) == count


@pytest.mark.parametrize(
    ("load", "count"),
    [
        ("model, tok = load_chat(path, dtype=torch.bfloat16)", 1),
        ("model = load_chat(path, dtype=torch.bfloat16)", 1),
        ("model, tok = load_model_and_tokenizer(path, dtype=torch.bfloat16)", 1),
        ("model, tok = load_chat(path, dtype=torch.float32)", 0),
        ("model = measure(path, dtype=torch.bfloat16)", 0),
        ("batch = load_batch(path, dtype=torch.bfloat16)\nmodel = Net()", 0),
    ],
)
def test_a_function_that_loads_into_a_variable_called_model(load, count):
    """What is loaded with a dtype and called a model has it, whatever the function is called."""
    text = f"import torch\nfrom project import load_batch, load_chat, load_model_and_tokenizer, measure\n{load}\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\n{LOOP}"
    assert len(findings(text, "HS151")) == count


CALLBACK = """\
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

class Ema(TrainerCallback):
    def __init__(self, decay=0.999):
        self.decay = decay
        self.shadow = None

    def _part(self, model):
        return getattr(model, "head")

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        {shadow}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        head = self._part(model)
        with torch.no_grad():
            for k, v in head.state_dict().items():
                self.shadow[k].mul_(self.decay).add_(v.detach(), alpha=1.0 - self.decay)

model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.{dtype})
args = TrainingArguments("out", bf16=True)
Trainer(model=model, args=args, train_dataset=data, callbacks=[{callback}]).train()
"""
NAMED = "head = self._part(model)\n        self.shadow = {k: p.detach().clone() for k, p in head.state_dict().items()}"


@pytest.mark.parametrize(
    ("shadow", "dtype", "callback", "count"),
    [
        (NAMED, "bfloat16", "Ema()", 1),
        (NAMED, "float32", "Ema()", 0),
        (NAMED.replace("p.detach()", "p.detach().float()"), "bfloat16", "Ema()", 0),
        (NAMED, "bfloat16", "Logger()", 0),
    ],
)
def test_a_callback_averages_the_model_of_its_trainer(shadow, dtype, callback, count):
    """The Trainer passes its model to the methods of a callback, which averages a part of it in the dtype that it has."""
    text = CALLBACK.format(shadow=shadow, dtype=dtype, callback=callback)
    assert len(findings(text, "HS153")) == count


ADAPTED = """\
import argparse
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, Trainer, TrainingArguments
from trl import SFTConfig
parser = argparse.ArgumentParser()
parser.add_argument("--fp16", {option})
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()
base = AutoModel.from_pretrained(name, torch_dtype=torch.float16)
model = get_peft_model(base, LoraConfig())
config = {config}
Trainer(model=model, args=config).train()
"""
OFF = 'action="store_true"'


@pytest.mark.parametrize(
    ("option", "config", "count"),
    [
        (OFF, "TrainingArguments('out', fp16=args.fp16, bf16=args.bf16)", 1),
        (OFF, "TrainingArguments('out', fp16=bool(args.fp16))", 1),
        (OFF, "SFTConfig(output_dir='out', fp16=args.fp16, bf16=args.bf16)", 1),
        (OFF, "SFTConfig(output_dir='out', fp16=args.fp16)", 0),
        ('action="store_false"', "TrainingArguments('out', fp16=args.fp16)", 0),
        ("default=True, type=bool", "TrainingArguments('out', fp16=args.fp16)", 0),
        (OFF, "TrainingArguments('out', fp16=not args.bf16, bf16=args.bf16)", 0),
        (OFF, "TrainingArguments('out', bf16=torch.cuda.is_bf16_supported())", 1),
        (OFF, "TrainingArguments('out', bf16=torch.cuda.get_device_capability()[0] >= 8, fp16=args.fp16)", 1),
        (OFF, "TrainingArguments('out', bf16=supported, fp16=not supported)", 0),
        (OFF, "TrainingArguments('out', bf16=torch.cuda.is_available())", 0),
    ],
)
def test_flags_that_are_off_by_default_leave_float16_unscaled(option, config, count):
    """Without --fp16 nothing scales the gradients; nor does `bf16=is_bf16_supported()` on a GPU without bfloat16."""
    assert len(findings(ADAPTED.format(option=option, config=config), "HS168")) == count


PARSED = """\
# deepspeed train.py --deepspeed zero2.json
import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
own, args = HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()
options = dict(dtype=torch.bfloat16)
{options}
model = AutoModelForCausalLM.from_pretrained(name, **options)
Trainer(model=model, args=args, train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ("if own.spread and not args.deepspeed:\n    options['device_map'] = 'auto'", 1),
        ("if args.deepspeed is None:\n    options['device_map'] = 'auto'", 1),
        ("options['device_map'] = None if args.deepspeed else 'auto'", 1),
        ("options['device_map'] = 'auto' if args.deepspeed else None", 0),
        ("options['device_map'] = None", 0),
        ("", 0),
    ],
)
def test_a_model_that_is_spread_without_deepspeed_is_trained_so(options, count):
    """`device_map` excludes DeepSpeed: a branch for the runs without it shows that they are meant."""
    assert len(findings(PARSED.format(options=options), "HS277")) == count
