"""HS151 and HS152: the ways from a 16-bit load or cast to the optimizer, through merged adapters, properties and chosen classes."""

import pytest

from check_scripts import findings

STEP = """\
for x, y in loader:
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PLUGIN = """\
import torch
from accelerate import Accelerator, DeepSpeedPlugin
def main(args, data):
    plugin = {plugin}
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = Net().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for x, y in data:
        accelerator.backward(loss_fn(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
"""
MERGED = """\
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
def load(path):
    base = AutoModelForCausalLM.from_pretrained("x/y", dtype=torch.bfloat16)
    {merge}
    return model.cuda()
def main(path, loader):
    model = load(path)
    {enable}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for x, y in loader:
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
ENABLE = "for p in model.parameters():\n        p.requires_grad = True"
AT_ONCE = "model = PeftModel.from_pretrained(base, path).merge_and_unload()"
NAMED = "model = PeftModel.from_pretrained(base, path)\n    model = model.merge_and_unload()"
CHOSEN = """\
import torch
class Runner:
    def __init__(self, cfg):
        self.model = Net(){cast}
        optim_class = {choice}
        self.optimizer = optim_class(self.model.parameters(), **cfg.options)
        self.loss_adapter = make_loss(cfg)
    def step(self, x):
        loss = self.{run}(self.model, x)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
"""
PIPELINE = """\
import torch
from diffusers import StableDiffusionPipeline
def load(path):
    pipe = StableDiffusionPipeline.from_pretrained(path, torch_dtype=torch.bfloat16).to("cuda")
    unet = pipe.unet
    return pipe.vae, unet
def freeze_others(unet):
    for p in unet.parameters():
        p.requires_grad = False
    for name, module in unet.named_modules():
        if {test}:
            for p in module.parameters():
                p.requires_grad = True
class Runner:
    def __init__(self, path):
        self.vae, self.unet = load(path)
        freeze_others(self.unet)
        self.optimizer = torch.optim.AdamW((p for p in self.unet.parameters() if p.requires_grad), lr=1e-5)
    def step(self, x, y):
        loss = loss_fn(self.unet(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
"""
PROPERTY = """\
import torch
from transformers import AutoModelForCausalLM
class Runner:
    def __init__(self, name):
        self.name = name
        self._model = None
    @property
    def dtype(self):
        return torch.{dtype}
    @property
    def model(self):
        if self._model is None:
            self._model = AutoModelForCausalLM.from_pretrained(self.name, dtype=self.dtype)
        return self._model
    def train(self, loader):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        for x in loader:
            loss = self.model(x).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""
AUTO = """\
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("{name}"{dtype})
SFTTrainer(model=model, args=SFTConfig("out", learning_rate=1e-6), train_dataset=data).train()
"""


def lines(text, code="HS151"):
    """The lines at which a rule reports something."""
    return [f.line for f in findings(text, code)]


@pytest.mark.parametrize("option", ["args.use_ds", "args.ds_config", "args.zero_stage > 0", "args.use_deepspeed"])
def test_a_plugin_that_an_option_asks_for_is_left_out_without_it(option):
    """Accelerate keeps float32 copies only with the plugin."""
    assert lines(PLUGIN.format(plugin=f"DeepSpeedPlugin() if {option} else None")) == [6]


@pytest.mark.parametrize("plugin", ["DeepSpeedPlugin(zero_stage=2)", "DeepSpeedPlugin() if args.seeds else None"])
def test_a_plugin_of_every_run_keeps_copies(plugin):
    """Also under a condition that does not name DeepSpeed."""
    assert lines(PLUGIN.format(plugin=plugin)) == []


@pytest.mark.parametrize("merge", [AT_ONCE, NAMED])
def test_a_merged_adapter_leaves_the_weights_of_its_model(merge):
    """All weights are enabled again, and have the dtype of the load."""
    assert lines(MERGED.format(merge=merge, enable=ENABLE)) == [5]


@pytest.mark.parametrize(
    ("merge", "enable"),
    [
        ("model = PeftModel.from_pretrained(base, path)", "pass"),
        (AT_ONCE, "pass"),
        (AT_ONCE, "model.float()"),
        (NAMED.replace("model = model", "other = other"), ENABLE),
    ],
)
def test_an_adapter_that_is_trained_is_float32(merge, enable):
    """It is not merged, or what was merged stays frozen or is cast to float32."""
    assert lines(MERGED.format(merge=merge, enable=enable)) == []


@pytest.mark.parametrize("choice", ["import_string(cfg.optimizer)", "registry.get(cfg.optimizer)"])
@pytest.mark.parametrize("run", ["loss_adapter", "loss_fn"])
def test_an_optimizer_class_that_only_a_run_knows(choice, run):
    """Most keep no master weights; a function for the loss prepares no model."""
    assert lines(CHOSEN.format(cast=".to(torch.bfloat16)", choice=choice, run=run)) == [4]


@pytest.mark.parametrize(
    ("cast", "choice"), [("", "import_string(cfg.optimizer)"), (".to(torch.bfloat16)", "halfstep.optim.AdamW")]
)
def test_a_chosen_optimizer_of_float32_weights(cast, choice):
    """No cast, or a class that is written and keeps master weights."""
    assert lines(CHOSEN.format(cast=cast, choice=choice, run="loss_fn")) == []


@pytest.mark.parametrize("test", ['"attn" in name', "isinstance(module, Attention)", 'name.endswith("ff")'])
def test_modules_of_a_loaded_pipeline_that_a_loop_enables(test):
    """They are a part of what was loaded in 16 bits, under the name of an attribute of the class as well."""
    assert lines(PIPELINE.format(test=test)) == [4]


@pytest.mark.parametrize("test", ['"lora" in name', '"adapter" in name', "isinstance(module, NewHead)"])
def test_modules_that_were_attached_may_be_float32(test):
    """Another file may have created them."""
    assert lines(PIPELINE.format(test=test)) == []


def test_the_model_and_its_dtype_are_properties():
    """A property stands for what it returns."""
    assert lines(PROPERTY.format(dtype="bfloat16")) == [13]
    assert lines(PROPERTY.format(dtype="float32")) == []


@pytest.mark.parametrize("name", ["x-labs/X-pro-it-1.0", "someone/large-chat-v2"])
def test_a_checkpoint_of_an_unknown_family_in_its_own_dtype(name):
    """`dtype="auto"` asks for it, and most language models are stored in 16 bits."""
    assert lines(AUTO.format(name=name, dtype=', dtype="auto"'), "HS152") == [3]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("openai-community/gpt2-large", ', dtype="auto"'),
        ("x/TinyStories-33M", ', dtype="auto"'),
        ("x/bert-base", ', dtype="auto"'),
        ("x-labs/X-pro-it-1.0", ""),
        ("x-labs/X-pro-it-1.0", ', dtype="float32"'),
    ],
)
def test_checkpoints_in_float32(name, dtype):
    """By their family or their size; without "auto" nothing asks for the checkpoint's dtype."""
    assert lines(AUTO.format(name=name, dtype=dtype), "HS152") == []
