"""HS151 and HS277: 16-bit parts of models that are trained: attributes of classes, copies next to adapters, chosen layers."""

import pytest

from check_scripts import findings

STEP = """\
for x, y in loader:
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CLASS = """\
import torch
from torch import nn
from transformers import AutoModel
class Classifier(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.{part} = AutoModel.from_pretrained(name, dtype=torch.bfloat16)
        {more}
        self.head = nn.Linear(8, 2)
    def forward(self, x):
        {run}
model = Classifier("x/y").cuda()
optimizer = torch.optim.AdamW({params}.parameters(), lr=1e-5)
"""
RUN = "return self.head(self.{part}(x)[0])"


def classifier(part="body", more="pass", run=RUN, params="model"):
    return CLASS.format(part=part, more=more, run=run.format(part=part), params=params) + STEP


@pytest.mark.parametrize(("part", "more"), [("body", "pass"), ("encoder", "self.size = 8")])
def test_a_part_that_a_class_loads_in_16_bits_is_trained_with_it(part, more):
    """`model.parameters()` contains the parameters of every attribute."""
    assert [f.line for f in findings(classifier(part, more), "HS151")] == [7]


@pytest.mark.parametrize(
    "text",
    [
        classifier(more="self.body.requires_grad_(False)"),
        classifier(more="for p in self.body.parameters(): p.requires_grad = False"),
        classifier(more="freeze(self.body)"),
        classifier(more="self.body.eval()"),
        classifier(more="self.body = self.body.float()"),
        classifier(part="teacher"),
        classifier(params="model.head"),
        classifier(run="with torch.no_grad():\n            h = self.{part}(x)[0]\n        return self.head(h)"),
    ],
)
def test_a_part_that_is_frozen_or_lifted_is_silent(text):
    """Frozen, evaluated, run without gradients, returned to float32, or not among the parameters."""
    assert findings(text, "HS151") == []


MODULE = """\
import torch
import lightning as L
from transformers import AutoModel
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModel.from_pretrained("x/y", dtype={dtype})
    def training_step(self, batch, index):
        return self.model(**batch).loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-5)
"""


@pytest.mark.parametrize(("dtype", "found"), [("torch.bfloat16", [7]), ("torch.float32", [])])
def test_the_parameters_of_a_lightning_module_that_another_file_creates(dtype, found):
    """`self.parameters()` contains those of `self.model`."""
    assert [f.line for f in findings(MODULE.format(dtype=dtype), "HS151")] == found


ADAPTED = """\
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("x/y", dtype={dtype})
{before}
config = LoraConfig(r=8, modules_to_save={layers})
tuned = get_peft_model(model, config)
{after}
args = TrainingArguments("out", bf16=True{options})
Trainer(model=tuned, args=args, train_dataset=data).train()
"""


def adapted(dtype="torch.bfloat16", before="", layers='["embed_tokens", "lm_head"]', after="", options=""):
    text = ADAPTED.format(dtype=dtype, before=before, layers=layers, after=after, options=options)
    return text if "kbit" in before else text.replace(", prepare_model_for_kbit_training", "")


def test_layers_that_modules_to_save_trains_in_16_bits():
    """PEFT casts adapters to float32, and copies of whole layers not."""
    (finding,) = findings(adapted(), "HS277")
    assert finding.line == 4
    assert finding.message.startswith("`modules_to_save=['embed_tokens', 'lm_head']` has bfloat16 weights")


def test_layers_that_modules_to_save_trains_in_a_loop():
    """The same with an optimizer of the script."""
    text = adapted().split("args =")[0] + "optimizer = torch.optim.AdamW(tuned.parameters(), lr=1e-4)\n"
    assert [f.line for f in findings(text + STEP.replace("model(", "tuned("), "HS151")] == [4]


@pytest.mark.parametrize(
    "text",
    [
        adapted(layers="None"),
        adapted(layers="[]"),
        adapted(dtype="torch.float32"),
        adapted(before="model = prepare_model_for_kbit_training(model)"),
        adapted(after="for p in tuned.parameters():\n    if p.requires_grad:\n        p.data = p.data.float()"),
        adapted(options=", deepspeed='ds.json'"),
    ],
)
def test_adapters_without_16_bit_copies_are_silent(text):
    """No layer is saved, or the copies are float32."""
    assert findings(text, "HS277") == []


CHOSEN = """\
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("x/y", dtype=torch.bfloat16)
{attach}
for name, p in model.named_parameters():
    p.requires_grad = any(word in name for word in [{words}])
Trainer(model=model, args=TrainingArguments("out", bf16=True), train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("words", "attach", "found"),
    [
        ("'x_proj', 'dt_proj'", "", [3]),
        ("'norm', 'lm_head'", "", [3]),
        ("'lora'", "", []),
        ("'x_proj'", "model = wrap_vision(model)", []),
        ("'proj'", "model.proj = torch.nn.Linear(8, 8)", []),
    ],
)
def test_layers_of_a_loaded_model_that_a_loop_chooses_by_name(words, attach, found):
    """All layers of a loaded model have its dtype, whatever they are called; parts that are attached later may not."""
    assert [f.line for f in findings(CHOSEN.format(words=words, attach=attach), "HS277")] == found


SORTED = """\
import torch
net = Net().cuda()
{cast}
for name, p in net.named_parameters():
    if "prompt_encoder" in name:
        p.requires_grad_(False)
    else:
        p.requires_grad_(True)
head, rest = [], []
for name, p in net.named_parameters():
    (head if p.requires_grad else rest).append(p)
optimizer = torch.optim.AdamW([{{"params": head}}], lr=1e-4)
"""


@pytest.mark.parametrize(("cast", "found"), [("net.to(dtype=torch.bfloat16)", [3]), ("", []), ("ref.bfloat16()", [])])
def test_parameters_that_a_loop_sorts_into_one_of_two_lists(cast, found):
    """`(head if p.requires_grad else rest).append(p)` fills both lists."""
    text = SORTED.format(cast=cast) + STEP.replace("model(", "net(")
    assert [f.line for f in findings(text, "HS151")] == found


OPTIONAL = """\
import torch
from peft import LoraConfig
class Runner:
    def add_lora(self, model):
        model.add_adapter(LoraConfig(r=8))
        return model
    def build(self):
        self.model = Net().bfloat16()
        {test}
            self.model = self.add_lora(self.model)
    def optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-5)
"""


@pytest.mark.parametrize(("test", "found"), [("if self.args.use_lora:", [8]), ("if self.args.resume:", [])])
def test_a_function_that_attaches_adapters_where_an_option_asks_for_it(test, found):
    """Without the option, all weights are trained."""
    assert [f.line for f in findings(OPTIONAL.format(test=test), "HS151")] == found


BRIDGE = """\
import torch
from torch import nn
from peft import get_peft_model
class Bridged(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = get_peft_model(base, config)
        self.bridge = nn.Linear(8, 8{dtype})
model = Bridged(base)
optimizer = torch.optim.AdamW(model.bridge.parameters(), lr=1e-4)
"""


@pytest.mark.parametrize(("dtype", "found"), [(", dtype=torch.bfloat16", [8]), ("", [])])
def test_a_layer_that_is_created_in_16_bits_next_to_adapters(dtype, found):
    """No adapter replaces it: it is trained itself."""
    text = BRIDGE.format(dtype=dtype) + STEP
    assert [f.line for f in findings(text, "HS151")] == found


LAYER = """\
import torch
from torch import nn
{setup}
optimizer = torch.optim.AdamW({params}, lr=1e-4)
"""
ENDS = "for p in model.parameters():\n    p.requires_grad = False\nfor layer in {layers}:\n    for p in layer.parameters():\n        p.requires_grad = True"
OWN_EMBEDDING = """\
class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.embed.to({dtype})
    def forward(self, x):
        return self.embed(x)
model = Small()"""
SELECT = "def select(net):\n    return [p for p in net.parameters() if p.requires_grad]\nmodel = Net(){cast}"
PAIR = "model, other = Net(), Net()\nfor m in ({names}):\n    m.to(dtype=torch.bfloat16)"
FIELD = "class Config:\n    dtype: torch.dtype = {dtype}\ndef build(cfg):\n    return Net().to(cfg.dtype)\nmodel = build(cfg)"
LOADED = "from transformers import AutoModel\nmodel = AutoModel.from_pretrained('x/y', dtype=torch.bfloat16)\n"


@pytest.mark.parametrize(
    ("setup", "params", "count"),
    [
        ("model = Net()\nmodel.transformer.wte.to(torch.bfloat16)", "model.parameters()", 1),
        ("model = Net()\nmodel.lm_head.bfloat16()", "model.parameters()", 1),
        ("model = Net()\nmodel.lm_head.bfloat16().requires_grad_(False)", "model.parameters()", 0),
        ("model = Net()\nother.wte.to(torch.bfloat16)", "model.parameters()", 0),
        (OWN_EMBEDDING.format(dtype="torch.bfloat16"), "model.parameters()", 1),
        (OWN_EMBEDDING.format(dtype="device"), "model.parameters()", 0),
        (SELECT.format(cast=".bfloat16()"), "select(model)", 1),
        (SELECT.format(cast=""), "select(model)", 0),
        ("model = Net().bfloat16()", "model.get_param_groups(0.1)", 1),
        ("model = Net().bfloat16()", "other.get_param_groups(0.1)", 0),
        (PAIR.format(names="model, other"), "model.parameters()", 1),
        (PAIR.format(names="other, third"), "model.parameters()", 0),
        (FIELD.format(dtype="torch.bfloat16"), "model.parameters()", 1),
        (FIELD.format(dtype="torch.float32"), "model.parameters()", 0),
        (LOADED + ENDS.format(layers="model.layers[-2:]"), "model.parameters()", 1),
        (LOADED + ENDS.format(layers="adapters"), "model.parameters()", 0),
    ],
)
def test_layers_and_parameters_that_are_reached_indirectly(setup, params, count):
    """Each way to a 16-bit layer that an optimizer updates, next to one that leads elsewhere."""
    assert len(findings(LAYER.format(setup=setup, params=params) + STEP, "HS151")) == count


EMBEDDER = """\
import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
model = SentenceTransformer("x/y", model_kwargs={{"dtype": {dtype}}})
args = SentenceTransformerTrainingArguments(output_dir="out", bf16=True)
SentenceTransformerTrainer(model=model, args=args, train_dataset=data).train()
"""


@pytest.mark.parametrize(("dtype", "found"), [("torch.bfloat16", [3]), ("torch.float32", [])])
def test_options_with_which_a_class_loads_its_model(dtype, found):
    """`model_kwargs` are passed to `from_pretrained`."""
    assert [f.line for f in findings(EMBEDDER.format(dtype=dtype), "HS277")] == found


AUDIO = """\
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
def unfreeze_audio(model):
    {setup}
    for p in model.parameters():
        p.requires_grad = False
    for part in {parts}:
        for p in part.parameters():
            p.requires_grad = {value}{more}
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
unfreeze_audio(model)
args = TrainingArguments("out", bf16=True{flags})
Trainer(model=model, args=args).train()
"""


def audio_model(setup="pass", parts="[model.audio]", value="True", more="", flags=""):
    return AUDIO.format(setup=setup, parts=parts, value=value, more=more, flags=flags)


@pytest.mark.parametrize(
    ("setup", "parts"),
    [
        ("pass", "[model.audio.encoder, model.audio.projector]"),
        ("audio = model.model.audio\n    encoder = audio.encoder", "(audio, encoder)"),
        ("pass", "model.audio.layers[-2:]"),
        ("audio = model.audio", "audio.layers"),
    ],
)
def test_a_function_that_trains_parts_again_leaves_them_in_16_bits(setup, parts):
    """A list of parts, and variables for them, name layers of the loaded model."""
    assert [f.code for f in findings(audio_model(setup, parts), "HS277")] == ["HS277"]


@pytest.mark.parametrize(
    "text",
    [
        audio_model(value="False"),
        audio_model(more="\n            p.data = p.data.float()"),
        audio_model("model.adapter = torch.nn.Linear(8, 8)", "[model.adapter]"),
        audio_model("other = build()", "[other.head]"),
    ],
)
def test_a_function_that_freezes_all_or_casts_what_it_trains_is_silent(text):
    """Nothing of the loaded model is trained in 16 bits."""
    assert findings(text, "HS277") == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (", fsdp='', fsdp_config={}", ["HS277"]),
        (", fsdp=[], deepspeed=None", ["HS277"]),
        (", fsdp='full_shard', fsdp_config={}", []),
        (", fsdp_config={'min_num_params': 1}", []),
    ],
)
def test_empty_settings_of_fsdp_shard_nothing(flags, expected):
    """`fsdp=""` and `fsdp_config={}` are the defaults."""
    assert [f.code for f in findings(audio_model(flags=flags), "HS277")] == expected


BRANCH = """\
import torch
from diffusers import UNet2DConditionModel
from layers import inject_layers
unet = UNet2DConditionModel.from_pretrained(name, torch_dtype=torch.bfloat16)
if opt.{option}:
    unet = inject_layers(unet, opt)
{otherwise}
    for name, p in unet.named_parameters():
        p.requires_grad = True
        if any(word in name for word in opt.excluded):
            p.requires_grad = False
optimizer = torch.optim.AdamW([p for p in unet.parameters() if p.requires_grad], lr=1e-5)
for x, y in loader:
    loss_fn(unet(x), y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("option", "otherwise", "expected"),
    [("use_lora", "else:", ["HS151"]), ("resume", "else:", ["HS151"]), ("resume", "if True:", [])],
)
def test_layers_of_the_other_branch_are_not_those_that_a_loop_chooses(option, otherwise, expected):
    """Without the injected layers, the loop trains the loaded ones."""
    assert [f.code for f in findings(BRANCH.format(option=option, otherwise=otherwise), "HS151")] == expected


PREPARED = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="fp16")
net = Net(size)
optimizer = torch.optim.AdamW({params})
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
{cast}
for x in loader:
    accelerator.backward(net(x).mean())
    optimizer.step()
    optimizer.zero_grad()
"""
CAST = "net.to(accelerator.device, dtype=torch.float16)"


@pytest.mark.parametrize(
    ("params", "cast", "expected"),
    [
        ("net.parameters()", CAST, [7]),
        ("net.decoder.head.parameters()", CAST, [7]),
        ("[*net.decoder.parameters(), *net.head.parameters()]", "net.half()", [7]),
        ("net.decoder.parameters()", "net.to(accelerator.device)", []),
        ("net.decoder.parameters()", f"{CAST}\nnet.decoder.float()", []),
        ("net.decoder.parameters()", "copy = net.half()", []),  # perhaps a tensor, which that leaves as it is
        ("other.decoder.parameters()", CAST, []),
    ],
)
def test_the_cast_of_a_whole_model_is_that_of_its_trained_part(params, cast, expected):
    """A statement `net.to(dtype=...)` changes only a module, so `net.decoder` is one of its layers."""
    assert [f.line for f in findings(PREPARED.format(params=params, cast=cast), "HS199")] == expected


FROZEN_PART = """\
import torch
from torch import nn
from transformers import AutoModel
class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = AutoModel.from_pretrained("v", dtype=torch.bfloat16)
        {freeze}
        self.connector = nn.Linear(8, 8){cast}
    def forward(self, x):
        return self.connector(self.vision(x))
model = Captioner().cuda()
{after}
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
"""
LOWER = ".to(torch.bfloat16)"


@pytest.mark.parametrize(
    ("freeze", "cast", "after", "count"),
    [
        ("self.vision.requires_grad_(False)", LOWER, "", 1),
        ("for p in self.vision.parameters(): p.requires_grad = False", LOWER, "", 1),
        ("pass", LOWER, "model.vision.requires_grad_(False)", 1),
        ("self.vision.requires_grad_(False)", "", "", 0),
        ("self.vision.requires_grad_(False)", LOWER, "model.connector.requires_grad_(False)", 0),
        ("self.vision.requires_grad_(False)", LOWER, "freeze_layers(model)", 0),
        ("self.vision.requires_grad_(False)", LOWER, "for p in model.parameters(): p.requires_grad = choose(p)", 0),
    ],
)
def test_a_part_next_to_a_frozen_one(freeze, cast, after, count):
    """What the file freezes is another part by name; where it may be this one, nothing is reported."""
    text = FROZEN_PART.format(freeze=freeze, cast=cast, after=after) + STEP
    assert [f.line for f in findings(text, "HS151")] == [9] * count


REPLACED = """\
import torch
import torchvision
from torch import nn
model = torchvision.models.resnet50()
for p in model.parameters():
    p.requires_grad = False
{before}
model.fc = nn.Linear(2048, 2)
{after}
optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "model = model.to(torch.float16).to(device)", [9]),
        ("", "model.half()", [9]),
        ("model.half()", "", []),
        ("", "model.half(); model.fc.float()", []),
        ("", "model.half(); model.float()", []),
        ("", "other.half()", []),
    ],
)
def test_a_replaced_layer_is_cast_with_its_model(before, after, expected):
    """HS161 reports the cast of a model after its last layer was replaced, if the optimizer has only that layer."""
    assert [f.line for f in findings(REPLACED.format(before=before, after=after), "HS161")] == expected
