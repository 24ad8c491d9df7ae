"""HS151, HS152, HS154, HS160-HS162, HS166, HS277: adapters that are cast, parts of models, and options that quantize."""

import pytest

from check_scripts import codes, findings

LOOP = """\
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
{setup}
optimizer = torch.optim.AdamW({params}, lr=1e-4)
for x in loader:
    loss = model(x).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOAD = "model = AutoModelForCausalLM.from_pretrained('x', dtype=torch.bfloat16)\n"
TRAIN = "Trainer(model=model, args=TrainingArguments('out', {flags})).train()\n"
HEAD = "import torch\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"


def loop(setup, params="model.parameters()"):
    return LOOP.format(setup=setup, params=params)


def plain(setup, params="model.parameters()"):
    """The loop without the import of peft."""
    return "".join(line for line in loop(setup, params).splitlines(keepends=True) if "peft" not in line)


@pytest.mark.parametrize(
    ("setup", "code"),
    [
        ("model = get_peft_model(base, config)\nmodel = model.to(torch.bfloat16)", "HS151"),
        ("model = get_peft_model(base, config)\nmodel.half()", "HS161"),
        ("model = get_peft_model(base, config).to(device).bfloat16()", "HS151"),
        ("model, tokenizer = build_peft_model(name)\nmodel.to(torch.bfloat16)", "HS151"),
        ("model = PeftModel.from_pretrained(base, path, is_trainable=True)\nmodel = model.half().cuda()", "HS161"),
    ],
)
def test_a_cast_after_the_adapters_are_attached_casts_them_too(setup, code):
    """Adapters are float32 until the whole model is cast."""
    assert [c.partition(":")[0] for c in codes(loop(setup))] == [code]


@pytest.mark.parametrize(
    "setup",
    [
        "base.to(torch.bfloat16)\nmodel = get_peft_model(base, config)",
        "model = get_peft_model(base, config)\nmodel.to(device)",
        "model = get_peft_model(base, config)\nmodel.half()\nfor p in model.parameters():\n    if p.requires_grad:\n        p.data = p.data.float()",
        "model = get_peft_model(base, config)\nteacher.half()",
    ],
)
def test_float32_adapters_on_a_16_bit_model_are_silent(setup):
    """A cast before the adapters, or one that is undone for what is trained."""
    assert codes(loop(setup)) == []


def test_cast_adapters_under_a_trainer_with_fp16():
    """The Trainer's scaler rejects float16 adapters; in bfloat16 their updates are lost."""
    text = "from peft import get_peft_model\n" + HEAD + "model = get_peft_model(base, config)\nmodel = model.{cast}\n"
    assert [f.line for f in findings(text.format(cast="half()") + TRAIN.format(flags="fp16=True"), "HS166")] == [5]
    assert [f.line for f in findings(text.format(cast="bfloat16()") + TRAIN.format(flags="bf16=True"), "HS277")] == [5]
    assert codes(text.format(cast="cuda()") + TRAIN.format(flags="bf16=True")) == []


@pytest.mark.parametrize(
    ("setup", "params"),
    [
        (LOAD, "model.transformer.wte.parameters()"),
        (LOAD, "list(model.lm_head.parameters()) + list(critic.parameters())"),
        (LOAD + "model.requires_grad_(False)\nmodel.lm_head.requires_grad_(True)", "model.parameters()"),
        (
            LOAD + "for p in model.parameters():\n    p.requires_grad = False\n"
            "for p in model.model.layers[-1].parameters():\n    p.requires_grad = True",
            "[p for p in model.parameters() if p.requires_grad]",
        ),
        (LOAD + "for p in model.vision_tower.parameters():\n    p.requires_grad = False", "model.parameters()"),
        (LOAD + "groups = []\ngroups.extend([{'params': model.parameters()}])", "groups"),
    ],
)
def test_trained_parts_of_a_16_bit_model_are_reported(setup, params):
    """A part has the dtype of its model, and what remains after another part is frozen too."""
    assert codes(plain(setup, params)) == ["HS151:3"]


@pytest.mark.parametrize(
    ("setup", "params"),
    [
        (LOAD + "model.requires_grad_(False)", "model.parameters()"),
        (LOAD + "model.lm_head = torch.nn.Linear(8, 2)", "model.lm_head.parameters()"),
        (LOAD + "model.lm_head.float()", "model.lm_head.parameters()"),
        (
            LOAD
            + "model.score = torch.nn.Linear(8, 2)\nfor p in model.model.parameters():\n    p.requires_grad = False",
            "model.parameters()",
        ),
        (
            LOAD + "model.initialize_vision_modules(args)\nmodel.requires_grad_(False)\n"
            "for p in model.projector.parameters():\n    p.requires_grad = True",
            "model.parameters()",
        ),
    ],
)
def test_float32_parts_of_a_16_bit_model_are_silent(setup, params):
    """New layers are created in float32, and a part can be cast back."""
    assert codes(plain(setup, params)) == []


def test_an_option_that_quantizes_leaves_the_other_branch():
    """`options["quantization_config"]` under a condition: without it the weights have 16 bits."""
    text = HEAD + (
        "options = {}\nif args.quantize:\n    options['quantization_config'] = BitsAndBytesConfig(load_in_4bit=True)\n"
        "else:\n    options['torch_dtype'] = torch.bfloat16\n"
        "model = AutoModelForCausalLM.from_pretrained('x', **options)\n"
    )
    assert codes(text + TRAIN.format(flags="bf16=True")) == ["HS277:8"]
    always = text.replace("if args.quantize:\n    ", "").replace("else:\n    ", "")
    assert codes(always + TRAIN.format(flags="bf16=True")) == []


def test_a_helper_that_returns_the_model_unchanged_is_optional():
    """`if not args.lora: return model` trains all weights in that case."""
    helper = "def maybe_add_lora(model, args):\n    if not args.lora:\n        return model\n    return get_peft_model(model, config)\n"
    text = "from peft import get_peft_model\n" + HEAD + helper + LOAD + "model = maybe_add_lora(model, args)\n"
    reported = findings(text + TRAIN.format(flags="bf16=True"), "HS277")
    assert [f.line for f in reported] == [8]
    assert "no adapter is used" in reported[0].message
    always = text.replace("    if not args.lora:\n        return model\n", "")
    assert codes(always + TRAIN.format(flags="bf16=True")) == []


@pytest.mark.parametrize(
    "call", ["PPOTrainer(config, model, None, tokenizer)", "PPOTrainer(config=config, model=model)"]
)
def test_the_first_ppo_trainer_of_trl_is_a_trainer(call):
    """It gets its configuration first and has `step` instead of `train`."""
    text = (
        "import torch\nfrom trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer\n"
        "model = AutoModelForCausalLMWithValueHead.from_pretrained('x', torch_dtype={dtype})\n"
        "config = PPOConfig(learning_rate=1e-5)\ntrainer = {call}\nfor batch in data:\n    trainer.step(*batch)\n"
    )
    assert codes(text.format(dtype="torch.bfloat16", call=call)) == ["HS277:3"]
    assert codes(text.format(dtype="torch.float32", call=call)) == []


def test_anyprecision_without_kahan_summation_keeps_no_masters():
    """The recipe with `pure_bf16`: its AdamW branch has no master weights, and its own optimizer has none either."""
    setup = (
        "if config.pure_bf16:\n    model.to(torch.bfloat16)\n"
        "if config.optimizer == 'anyprecision':\n    optimizer = AnyPrecisionAdamW(model.parameters(), use_kahan_summation={kahan})\n"
    )
    assert codes(plain("model = Net()\n" + setup.format(kahan=False))) == ["HS151:5"]
    assert codes(plain("model = Net()\n" + setup.format(kahan=True))) == []


def test_the_main_guard_is_no_condition():
    """`if __name__ == "__main__"` is true in every run of a script: at a small learning rate this is an error."""
    text = "import torch\nif __name__ == '__main__':\n    model = Net().bfloat16()\n    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)\n"
    (finding,) = findings(text + "    model(x).backward()\n    optimizer.step()\n", "HS151")
    assert finding.severity == "error"
    assert "__name__" not in finding.message


def test_a_cast_after_a_load_without_dtype_is_one_finding():
    """The cast decides the dtype; that of the checkpoint does not matter."""
    text = HEAD + "model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-0.6B')\nmodel.to(torch.bfloat16)\n"
    assert codes(
        text + "optimizer = torch.optim.AdamW(model.parameters())\nmodel(x).loss.backward()\noptimizer.step()\n"
    ) == ["HS151:4"]


def test_one_option_decides_accelerate_and_the_cast():
    """`Accelerator(mixed_precision=cfg.precision)` and a cast under `cfg.precision == "fp16"` meet in every such run."""
    text = (
        "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator(mixed_precision=cfg.precision)\n"
        "model = Net()\nif cfg.precision == '{value}':\n    model = model.to(torch.float16)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\nmodel, optimizer = accelerator.prepare(model, optimizer)\n"
        "for x in loader:\n    accelerator.backward(model(x))\n    optimizer.step()\n"
    )
    assert [f.line for f in findings(text.format(value="fp16"), "HS199")] == [6]
    assert findings(text.format(value="half"), "HS199") == []


def test_a_16_bit_default_next_to_an_optional_adapter():
    """Without the adapter the weights are created in 16 bits; the message has the option that decides."""
    text = (
        "import torch\ndtype = {'float32': torch.float32, 'bfloat16': torch.bfloat16}[cfg.dtype]\ntorch.set_default_dtype(dtype)\n"
        "model = Net()\nif cfg.use_lora:\n    add_lora(model)\nfor x in loader:\n    model(x).backward()\n    optimizer.step()\n"
    )
    (finding,) = findings(text, "HS162")
    assert finding.message.startswith("when `dtype` is bfloat16, ")
    assert findings(text.replace("if cfg.use_lora:\n    ", ""), "HS162") == []


LOSS = "import torch\nimport torch.nn.functional as F\nfrom transformers import AutoModelForCausalLM\n"


@pytest.mark.parametrize(
    "text",
    [
        LOAD + "logp = model(ids).logits[:, :-1].log_softmax(dim=-1)\n",
        LOAD + "lse = torch.logsumexp(model(ids).logits, dim=-1)\n",
        "model = AutoModelForCausalLM.from_pretrained(name)\nmodel = model.to(torch.bfloat16)\nlogp = F.log_softmax(model(ids).logits, -1)\n",
        "model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-0.6B', dtype='auto')\nlogp = F.log_softmax(model(ids).logits, -1)\n",
    ],
)
def test_log_probabilities_of_16_bit_logits_in_every_spelling(text):
    """Methods, logsumexp, a cast after the load, and the dtype of a known checkpoint."""
    assert [f.severity for f in findings(LOSS + text, "HS154")] == ["warning"]


@pytest.mark.parametrize(
    "text",
    [
        LOAD + "logp = model(ids).logits.float().log_softmax(dim=-1)\n",
        LOAD + "logp = model(ids).logits.log_softmax(dim=-1, dtype=torch.float32)\n",
        LOAD + "logp = F.log_softmax(model(ids).logits, dim=-1, dtype=torch.float32)\n",
        "model = AutoModelForCausalLM.from_pretrained('gpt2', dtype='auto')\nlogp = F.log_softmax(model(ids).logits, -1)\n",
        LOAD + "model.float()\nlogp = F.log_softmax(model(ids).logits, -1)\n",
    ],
)
def test_float32_log_probabilities_are_silent(text):
    """A cast of the logits, the dtype argument, and float32 models."""
    assert findings(LOSS + text, "HS154") == []


def test_an_optional_dtype_is_advice_once():
    """One arm of the dtype has 16 bits: the first loss is reported, with the condition."""
    text = (
        LOSS
        + "model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16 if args.half else torch.float32)\n"
        "a = F.log_softmax(model(x).logits, -1)\nb = F.log_softmax(model(y).logits, -1)\n"
    )
    (finding,) = findings(text, "HS154")
    assert (finding.line, finding.severity) == (5, "advice")
    assert finding.message.startswith("when the model is loaded in float16")


def test_the_average_of_a_wrapped_model_is_of_that_model():
    """`EMAModel(accelerator.unwrap_model(unet))` does not average what `prepare` received next to it."""
    text = (
        "import torch\nfrom diffusers.training_utils import EMAModel\n"
        "optimizer = torch.optim.AdamW(list(unet.parameters()) + list(text_encoder.parameters()))\n"
        "unet, optimizer = accelerator.prepare(unet, optimizer)\ntext_encoder.to(dtype=torch.float16)\n"
        "ema = EMAModel(accelerator.unwrap_model(unet))\n"
    )
    assert findings(text, "HS153") == []
    assert len(findings(text.replace("text_encoder.to(", "unet.to("), "HS153")) == 1


METHODS = """\
import torch
from peft import LoraConfig
class Runner:
    def __init__(self, config):
        self.net = load(config)
        self.net.requires_grad_(False)
{order}
        self.optimizer = torch.optim.AdamW([p for p in self.net.parameters() if p.requires_grad], lr=1e-4)
    def attach(self):
        self.net.add_adapter(LoraConfig(r=8))
    def lower(self):
        self.net = self.net.to(dtype=torch.bfloat16)
    def step(self, x):
        self.net(x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("order", "count"),
    [
        (("self.attach()", "self.lower()"), 1),
        (("if config.use_lora: self.attach()", "self.lower()"), 1),
        (("self.lower()", "self.attach()"), 0),
        (("if config.lora: self.attach()", "if not config.lora: self.optimize = False"), 0),
    ],
)
def test_methods_attach_adapters_and_cast_the_model(order, count):
    """The order of the calls decides whether the adapters are cast too, whatever the order of the methods."""
    body = "\n".join(f"        {line}" for line in order)
    assert len(findings(METHODS.format(order=body), "HS151")) == count


ADDED = """\
import torch
from accelerate import Accelerator
from diffusers import UNet2DConditionModel
from peft import LoraConfig
accelerator = Accelerator(mixed_precision={precision})
weight_dtype = torch.float16 if accelerator.mixed_precision == "fp16" else torch.float32
unet = UNet2DConditionModel.from_pretrained("x", subfolder="unet")
unet.requires_grad_(False)
{before}
unet.add_adapter(LoraConfig(r=8))
{after}
optimizer = torch.optim.AdamW([p for p in unet.parameters() if p.requires_grad], lr=1e-4)
unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
for x in loader:
    accelerator.backward(unet(x))
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("precision", "before", "after", "expected"),
    [
        ("'fp16'", "unet.to(torch.float16)", "", ["HS199"]),
        ("args.precision", "unet.to('cuda', dtype=weight_dtype)", "", ["HS199"]),
        ("'no'", "unet.to(torch.bfloat16)", "", ["HS151"]),
        ("'fp16'", "", "", []),
        ("'fp16'", "unet.to(torch.float16)", "cast_training_params(unet, dtype=torch.float32)", []),
        ("'fp16'", "unet.to(torch.float16)", "upcast_adapters(unet)", []),
        ("'fp16'", "vae.to(torch.float16)", "", []),
    ],
)
def test_adapters_of_add_adapter_have_the_dtype_of_their_layers(precision, before, after, expected):
    """Only the functions of PEFT cast them to float32; scripts do it themselves, or float16 gradients meet a scaler."""
    found = findings(ADDED.format(precision=precision, before=before, after=after))
    assert [f.code for f in found if f.severity != "advice" and f.code != "HS139"] == expected


@pytest.mark.parametrize(("option", "count"), [(", autocast_adapter_dtype=False", 1), ("", 0)])
def test_adapters_that_peft_does_not_cast(option, count):
    """PEFT leaves them in the dtype of the model on request."""
    setup = LOAD.replace("model =", "base =") + f"model = get_peft_model(base, LoraConfig(){option})"
    assert len(findings(loop(setup), "HS151")) == count
