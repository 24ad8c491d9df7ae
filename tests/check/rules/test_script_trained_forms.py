"""HS151, HS160, HS161 and HS199: 16-bit weights in the forms that models are built, loaded and frozen."""

import pytest

from check_scripts import findings, reported

LOOP = """\
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
{setup}
for x, y in loader:
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)"
LOAD = "AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)"
WRAPPED = """\
class Objective(torch.nn.Module):
    def __init__(self, {part}, weight):
        super().__init__()
        self.{part} = {part}
        self.weight = weight

    def forward(self, x):
        return self.{part}(x) * self.weight

net = Net().to(torch.bfloat16)
model = Objective(net, 0.5)
"""
FUNCTION = f"def prepare(net, names):\n    {{body}}\nmodel = {LOAD}\nprepare_trainable(model, names)\n{ADAMW}"


def lines(setup, code):
    return [f.line for f in findings(LOOP.format(setup=setup), code)]


@pytest.mark.parametrize(
    "setup",
    [
        WRAPPED.format(part="student") + ADAMW,
        f"lm = {LOAD}\nmodel = Speech(encoder, lm)\ngroups = [{{'params': model.head.parameters()}}]\n"
        "groups += [{'params': model.lm.parameters()}]\noptimizer = torch.optim.AdamW(groups)",
        f"model = {LOAD}\noptimizer = model.configure_optimizers(1e-5)",
        f"def build():\n    net = {LOAD}\n    return net, 1\nmodel, _ = build()\n{ADAMW}",
    ],
    ids=["part", "constructor", "receiver", "unpacked"],
)
def test_the_model_is_followed_to_its_cast(setup):
    """A part of a class, an argument of a constructor, the receiver of a factory and one of two results."""
    assert len(lines(setup, "HS151")) == 1


@pytest.mark.parametrize(
    "setup",
    [
        WRAPPED.format(part="teacher") + ADAMW,
        WRAPPED.format(part="student").replace("        return", "        self.student.eval()\n        return") + ADAMW,
        f"{ADAMW}\nmodel = {LOAD}",
    ],
    ids=["teacher", "evaluated", "later"],
)
def test_what_the_optimizer_does_not_train(setup):
    """A teacher, a part that the class puts into evaluation, and a model that is loaded after the optimizer was made."""
    assert lines(setup, "HS151") == []


@pytest.mark.parametrize(
    ("body", "is_reported"),
    [
        ("return sum(p.numel() for p in net.parameters() if p.requires_grad)", True),
        ("for n, p in net.named_parameters():\n        p.requires_grad_(n in names)", True),
        ("for n, p in net.named_parameters():\n        p.requires_grad = any(s in n for s in names)", True),
        ("for n, p in net.named_parameters():\n        p.requires_grad = False", False),
        ("for n, p in net.named_parameters():\n        p.data = p.data.float()", False),
    ],
    ids=["counts", "chooses", "chooses-attribute", "freezes", "restores"],
)
def test_a_function_of_the_file_is_judged_by_its_body(body, is_reported):
    """One that counts or chooses parameters leaves those that are trained in 16 bits."""
    setup = FUNCTION.format(body=body).replace("def prepare(", "def prepare_trainable(")
    assert bool(lines(setup, "HS151")) is is_reported


def test_the_load_without_quantization_trains_in_full():
    """`options["quantization_config"]` is set in the other branch than this load."""
    setup = (
        "def load(bits):\n    options = {'dtype': torch.bfloat16}\n    if bits == 'quant4':\n"
        "        options['quantization_config'] = BitsAndBytesConfig(load_in_4bit=True)\n"
        "        model = AutoModelForCausalLM.from_pretrained(name, **options)\n    else:\n"
        f"        model = AutoModelForCausalLM.from_pretrained(name, **options)\n    return model\nmodel = load(bits)\n{ADAMW}"
    )
    assert lines(setup, "HS151") == [9]


def test_adapters_that_are_cast_by_an_option():
    """`get_peft_model` comes first, so the cast lowers the adapters where the option asks for bfloat16."""
    setup = (
        "from peft import get_peft_model\nmodel = get_peft_model(base, config)\n"
        f"model.to(dtype=torch.bfloat16 if low else torch.float32)\n{ADAMW}"
    )
    assert lines(setup, "HS151") == [5]


def test_the_finding_is_where_the_dtype_is_chosen():
    """A function that loads what it is asked for is not to blame."""
    setup = (
        "def load(name, dtype):\n    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)\n"
        f"model = load(name, torch.bfloat16 if low else torch.float32)\n{ADAMW}"
    )
    assert lines(setup, "HS151") == [5]


PLUGIN = """\
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from transformers import AutoModelForCausalLM
plugin = None
{condition}
    plugin = DeepSpeedPlugin(hf_ds_config=args.deepspeed)
accelerator = Accelerator(mixed_precision={precision}, deepspeed_plugin=plugin)
dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
"""
ALIKE = '"bf16" if args.bf16 else "fp16" if args.fp16 else "no"'


def test_a_plugin_that_an_option_leaves_out():
    """Without the option Accelerate trains the weights as they are; the same options choose fp16 for both."""
    text = PLUGIN.format(condition="if args.deepspeed:", precision=ALIKE)
    assert {"HS151", "HS199"} <= reported(text)
    always = PLUGIN.format(condition="if True:", precision=ALIKE)
    assert not {"HS151", "HS199"} & reported(always)
    assert "HS199" not in reported(PLUGIN.format(condition="if args.deepspeed:", precision="'bf16'"))


DEFAULT = """\
import torch
{setup}
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda"{flag})
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("setup", "flag", "expected"),
    [
        ("torch.set_default_dtype(torch.float16)", "", [2]),
        ("if args.half:\n    torch.set_default_dtype(torch.float16)", "", [3]),
        ("torch.set_default_dtype(torch.bfloat16)", "", []),
        ("torch.set_default_dtype(torch.float16)", ", enabled=False", []),
    ],
)
def test_a_scaler_and_weights_created_in_float16(setup, flag, expected):
    """The scaler raises on the gradients of weights that the default dtype made float16."""
    assert [f.line for f in findings(DEFAULT.format(setup=setup, flag=flag), "HS160")] == expected


@pytest.mark.parametrize(
    ("load", "expected"),
    [("model.load_state_dict(state, assign=True)", [6]), ("model.load_state_dict(state)", [])],
)
def test_a_state_dict_that_replaces_the_weights(load, expected):
    """`assign=True` gives the model the dtype of the state dict; without it the values are copied into float32."""
    setup = (
        "state = torch.load(path)\nmodel = Net()\nfor key, value in state.items():\n    state[key] = value.half()\n"
        f"{load}\n{ADAMW}"
    )
    assert lines(setup, "HS161") == expected


def test_the_finding_is_at_the_variable_that_the_caller_passes():
    """The caller chooses the dtype on a line of its own."""
    setup = (
        "def load(name, dtype):\n    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)\n"
        f"chosen = torch.bfloat16 if low else torch.float32\nmodel = load(name, chosen)\n{ADAMW}"
    )
    assert lines(setup, "HS151") == [5]


PIPELINE = """\
import torch
from accelerate import Accelerator
from diffusers import StableDiffusionPipeline

accelerator = Accelerator(mixed_precision=config.mixed_precision)
pipeline = StableDiffusionPipeline.from_pretrained(config.name, torch_dtype=torch.float16)
pipeline.vae.requires_grad_(False)
pipeline.unet.requires_grad_(not config.use_lora)
dtype = torch.float32
if accelerator.mixed_precision == "fp16":
    dtype = torch.float16
{cast}
if config.use_lora:
    pipeline.unet.set_attn_processor(processors)
    trained = AttnProcsLayers(pipeline.unet.attn_processors)
else:
    trained = pipeline.unet
optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)
trained, optimizer = accelerator.prepare(trained, optimizer)
for x in loader:
    {step}
"""
TRAIN = "accelerator.backward(pipeline.unet(x).mean()); optimizer.step(); optimizer.zero_grad()"


def test_weights_that_an_option_freezes_are_trained_without_it():
    """`requires_grad_(not config.use_lora)` leaves the weights trained, in the dtype that the scaler rejects."""
    text = PIPELINE.format(cast="pipeline.unet.to(accelerator.device, dtype=dtype)", step=TRAIN)
    assert [f.line for f in findings(text, "HS199")] == [12]
    frozen = text.replace("(not config.use_lora)", "(False)")
    assert findings(frozen, "HS199") == []


def test_a_load_that_a_cast_always_replaces_is_not_reported():
    """The dtype of the load is gone when training starts; in another branch it is not."""
    always = PIPELINE.format(cast="pipeline.unet.to(accelerator.device, dtype=dtype)", step=TRAIN)
    assert 6 not in [f.line for f in findings(always, "HS161")]
    sometimes = PIPELINE.format(cast="if config.use_lora:\n    pipeline.unet.to(dtype=dtype)", step=TRAIN)
    assert 6 in [f.line for f in findings(sometimes, "HS161")]


def test_a_prepared_optimizer_without_any_backward_trains_nothing():
    """A script that only samples prepares the optimizer as the training script does."""
    assert findings(PIPELINE.format(cast="", step="pipeline(x)"), "HS161") == []


SAVED = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")
model = Net().to(torch.float16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer = accelerator.prepare(model, optimizer)
for epoch in range(3):
    for x in loader:
        accelerator.backward(model(x).mean())
        optimizer.step()
{end}"""


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("model = accelerator.unwrap_model(model).to(torch.float32)\nmodel.save_pretrained('out')\n", [5]),
        ("    model.to(torch.float32)\n", []),
    ],
)
def test_a_cast_to_float32_for_saving_restores_nothing(end, expected):
    """Below the training loop it changes what is saved; inside the loop of epochs it changes what is trained."""
    assert [f.line for f in findings(SAVED.format(end=end), "HS199")] == expected


BY_NAME = """\
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", dtype=torch.bfloat16)
{before}
for p in model.parameters():
    p.requires_grad = False
for name, p in model.named_parameters():
    if {test}:
        p.requires_grad = True
{after}
Trainer(model=model, args=TrainingArguments("out", bf16=True), train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("test", "before", "after", "num"),
    [
        ("'embed_tokens' in name or 'lm_head' in name", "", "", 1),
        ("'layers.23.' in name", "", "", 1),
        ("'layers.23.' not in name", "", "", 0),
        ("not 'layers.23.' in name", "", "", 0),
        ("'adapter' in name", "", "", 0),
        ("name in chosen", "", "", 0),
        ("'lm_head' in name", "model.lm_head = torch.nn.Linear(8, 8)", "", 0),
        ("'lm_head' in name", "", "model.lm_head.float()", 0),
        ("'lm_head' in name", "", "model.lm_head.to(torch.float32)", 0),
    ],
)
def test_layers_that_are_trained_again_by_name(test, before, after, num):
    """HS277: after a freeze, layers of the loaded model that a loop enables have its 16 bits; added layers do not."""
    assert len(findings(BY_NAME.format(test=test, before=before, after=after), "HS277")) == num


PARTLY = """\
import torch
from diffusers import UNet2DConditionModel
class Config{base}:
    def __init__(self, values):
        for key, value in values.items():
            setattr(self, key, value)
        self.dtype = torch.bfloat16
def pad(unet):
    for name, layer in list(unet.named_modules()):
        setattr(unet, name, wrap(layer, input_dtype=torch.bfloat16))
def main(values):
    config = Config(values)
    unet = UNet2DConditionModel.from_pretrained(config.path, torch_dtype=config.dtype)
    {test}
        pad(unet)
    for name, param in unet.named_parameters():
        param.requires_grad = True
        if any(part in name for part in config.excluded):
            param.requires_grad = False
    optimizer = torch.optim.AdamW([p for p in unet.parameters() if p.requires_grad])
    for x in loader:
        optimizer.zero_grad()
        unet(x).mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("base", "test", "expected"),
    [
        ("", "if config.pad:", [13]),
        ("", "if getattr(config, 'PAD', False):", [13]),
        ("", "if True:", []),  # the layers that are set may be float32
        ("(torch.nn.Module)", "if config.pad:", []),
    ],
)
def test_attributes_that_are_no_layers(base, test, expected):
    """`setattr` on settings sets no layer, and one in a function that an option calls sets none without it."""
    assert [f.line for f in findings(PARTLY.format(base=base, test=test), "HS151")] == expected


TWICE = """\
import torch
from diffusers import StableDiffusionPipeline
def main(args, config):
    if args.cache:
        pipe = StableDiffusionPipeline.from_single_file(args.path, torch_dtype=torch.bfloat16)
        cache(pipe.vae)
    {test}
        pipe = StableDiffusionPipeline.from_single_file(args.path, torch_dtype={dtype})
    unet = pipe.unet
    optimizer = torch.optim.AdamW(unet.parameters())
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = unet(x).mean()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("test", "dtype", "expected"),
    [
        ("with quiet():", "torch.float32", []),
        ("with quiet():", "torch.bfloat16", [8]),
        ("if not args.cache:", "torch.float32", [5]),
    ],
)
def test_a_load_that_another_one_replaces(test, dtype, expected):
    """A pipeline that is loaded again before its model is trained is another one, unless the second load may be left out."""
    assert [f.line for f in findings(TWICE.format(test=test, dtype=dtype), "HS151")] == expected
