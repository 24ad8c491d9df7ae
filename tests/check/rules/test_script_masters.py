"""HS151, HS152, HS160-HS162, HS166, HS277: every form of 16-bit weights that are trained, and those that are not."""

import dataclasses

import pytest

from check_scripts import codes, findings, script
from halfstep.check.registry import rules_of
from halfstep.check.settings import Settings

LOOP = """\
import copy, torch
{setup}
optimizer = {optimizer}
for x in loader:
    loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
HF = "from transformers import AutoModelForCausalLM\n"
TRAINER = """\
import torch
from transformers import AutoModelForCausalLM, TrainingArguments, Trainer
{setup}
args = TrainingArguments("out", {flags})
trainer = Trainer(model=model, args=args{more})
trainer.train()
"""


def loop(setup, optimizer="torch.optim.AdamW(model.parameters(), lr=1e-5)"):
    return LOOP.format(setup=setup, optimizer=optimizer)


def trainer(setup, flags="bf16=True", more=""):
    return TRAINER.format(setup=setup, flags=flags, more=more)


def reported(text, **settings):
    """The codes of the rules about weights, under some settings."""
    facts = dataclasses.replace(script(text), settings=Settings(**settings))
    return [f.code for rule in rules_of("script") if rule.code in {"HS151", "HS152"} for f in rule().check(facts)]


@pytest.mark.parametrize(
    "setup",
    [
        "model = Net().bfloat16()",
        "model = Net()\nmodel.to(torch.bfloat16)",
        "model = Net()\nmodel = model.to(device, torch.bfloat16)",
        "ptdtype = {'fp32': torch.float32, 'bf16': torch.bfloat16}['bf16']\nmodel = Net()\nmodel.to(dtype=ptdtype)",
        "def pick(name):\n    return {'bf16': torch.bfloat16, 'fp32': torch.float32}[name]\nmodel = Net().to('cuda', pick('bf16'))",
        "model = Net(config, dtype=torch.bfloat16)",
        "model = torch.compile(Net().bfloat16())",
        "model = DistributedDataParallel(Net().bfloat16())",
        "model = Net().to(torch.bfloat16)\nfor layer in model.layers:\n    fully_shard(layer)\nfully_shard(model)",
        HF + "with torch.device('cuda'):\n    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)",
        HF + "model = AutoModelForCausalLM.from_pretrained(name, torch_dtype='bfloat16')",
        HF + "kwargs = {'torch_dtype': torch.bfloat16}\nmodel = AutoModelForCausalLM.from_pretrained(name, **kwargs)",
        HF
        + "def load(name):\n    net = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)\n    return net, 1\nmodel, _ = load(name)",
        "base = Net().bfloat16()\nmodel = copy.deepcopy(base)",
    ],
)
def test_bf16_weights_and_a_plain_optimizer_are_reported(setup):
    """Each way to get bfloat16 weights is reported once, at the cast or load."""
    assert [code.partition(":")[0] for code in codes(loop(setup))] == ["HS151"]


@pytest.mark.parametrize(
    "optimizer",
    [
        "torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)",
        "torch.optim.AdamW([{'params': [p for n, p in model.named_parameters()], 'weight_decay': 0.1}])",
        "torch.optim.AdamW(param_groups_weight_decay(model, 0.1))",
        "bitsandbytes.optim.AdamW8bit(model.parameters())",
        "transformers.Adafactor(model.parameters())",
        "apex.optimizers.FusedAdam(model.parameters())",
        "torchao.optim.AdamW8bit(model.parameters())",
    ],
)
def test_optimizers_without_master_weights_are_reported(optimizer):
    """Parameters reach the optimizer directly, in groups, or through a function of another file."""
    setup = "import apex, bitsandbytes, torchao, transformers\nmodel = Net().bfloat16()"
    assert codes(loop(setup, optimizer)) == ["HS151:3"]


@pytest.mark.parametrize(
    "optimizer",
    [
        "make_optimizer(cfg, model)",
        "build_optimizer(model.parameters(), lr=0.1)",
        "instantiate(cfg.optim, model.parameters())",
    ],
)
def test_the_optimizer_of_another_file_is_reported_with_the_condition(optimizer):
    """Most functions that build an optimizer build a plain one; the message says that this one may not."""
    reported = findings(loop("model = Net().bfloat16()", optimizer), "HS151")
    assert [f.line for f in reported] == [2]
    assert "unless `" in reported[0].message


@pytest.mark.parametrize(
    "optimizer",
    [
        "halfstep.optim.AdamW(model.parameters(), master='split')",
        "flashoptim.FlashAdamW(model.parameters())",
        "apex.optimizers.FusedAdam(model.parameters(), master_weights=True)",
        "torchao.optim.AdamW8bit(model.parameters(), bf16_stochastic_round=True)",
        "optimi.AdamW(model.parameters())",
        "torch.optim.AdamW([p.clone().float() for p in model.parameters()])",
        "torch.optim.AdamW(head.parameters())",
        "torch.optim.AdamW(other.parameters())",
        "make_optimizer(head)",
        "build_halfstep_optimizer(params)",
    ],
)
def test_optimizers_that_keep_masters_or_train_something_else_are_silent(optimizer):
    """Master weights, compensation, copies by hand and the parameters of other modules give no finding."""
    setup = "import apex, flashoptim, halfstep, optimi, torchao\nmodel = Net().bfloat16()"
    assert codes(loop(setup, optimizer)) == []


@pytest.mark.parametrize(
    "setup",
    [
        "model = Net()",
        "model = Net().bfloat16()\nmodel.float()",
        "model = Net().bfloat16()\nmodel.requires_grad_(False)",
        "model = Net().bfloat16()\nfor p in model.parameters():\n    p.requires_grad = False",
        "model = Net().bfloat16()\nfor p in model.parameters():\n    p.data = p.data.float()",
        "model = Net().bfloat16()\nfreeze_backbone(model)",
        "model = Net()\nif args.evaluate:\n    model.bfloat16()",
        "model = Net()\nif args.export:\n    save(model.bfloat16())\n    raise SystemExit",
        "model = Net()\nmodel = fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))",
        "model = Net()\nmodel = FSDP(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))",
        "import peft\nmodel = peft.get_peft_model(Net().bfloat16(), config)",
        HF + "model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, quantization_config=q)",
        "import deepspeed\nmodel = Net().bfloat16()",
        "teacher = Net().bfloat16()\nmodel = Net()",
        "def evaluate():\n    model = Net().bfloat16()\nmodel = Net()",
        "from accelerate import FullyShardedDataParallelPlugin\nplugin = FullyShardedDataParallelPlugin()\nmodel = Net().bfloat16()",
    ],
)
def test_weights_that_are_not_trained_in_16_bits_are_silent(setup):
    """Frozen, adapted, quantized, restored and evaluated models, other models, and mixed-precision policies."""
    assert codes(loop(setup)) == []


CHOSEN = "for n, p in model.named_parameters():\n    if 'head' in n:\n        p.requires_grad = True\n    else:\n        p.requires_grad = False"


def test_layers_chosen_before_the_cast_are_trained_in_16_bits():
    """A cast of the model includes the layers that stay trainable; layers chosen after it may have been replaced."""
    assert codes(loop(f"model = Net()\n{CHOSEN}\nmodel = model.bfloat16()")) == ["HS151:8"]
    assert codes(loop(f"model = Net().bfloat16()\n{CHOSEN}")) == []


def test_a_cast_after_training_is_for_saving():
    """A model that is cast after its last backward was trained in float32."""
    assert codes(loop("model = Net()") + "model.bfloat16()\ntorch.save(model.state_dict(), 'x')\n") == []


def test_the_branches_of_one_condition_exclude_each_other():
    """A text encoder that is cast only if it is not trained is no finding."""
    text = loop(
        "model = Net()\nencoder = Net()\nif not args.train_encoder:\n    encoder.to(torch.bfloat16)\n"
        "params = encoder.parameters() if args.train_encoder else model.parameters()",
        "torch.optim.AdamW(params)",
    )
    assert codes(text) == []


def test_a_dtype_that_may_be_float32_is_advice_with_its_condition():
    """A dtype that the text leaves open is reported with the condition, as advice."""
    (finding,) = findings(loop("dtype = torch.bfloat16 if args.bf16 else torch.float32\nmodel = Net().to(dtype)"))
    assert (finding.code, finding.severity) == ("HS151", "advice")
    assert "when `dtype` is bfloat16" in finding.message


def test_methods_of_the_model_class_create_its_optimizer():
    """`model.configure_optimizers()` of this file trains the parameters of the instance that was cast."""
    text = loop(
        "class Net(torch.nn.Module):\n    def configure_optimizers(self):\n"
        "        return torch.optim.AdamW(self.parameters())\nmodel = Net()\nmodel.to(torch.bfloat16)",
        "model.configure_optimizers()",
    )
    assert [code.partition(":")[0] for code in codes(text)] == ["HS151"]


@pytest.mark.parametrize(
    "setup",
    [
        HF + "model = AutoModelForCausalLM.from_pretrained('x', torch_dtype=torch.float16)",
        "net = Net()\nmodel = torch.compile(net.half())",
        "dtype = torch.float16\nmodel = Net().to('cuda', dtype)",
    ],
)
def test_float16_weights_stepped_by_a_scaler_are_an_error(setup):
    """The scaler rejects float16 gradients however the weights got their dtype."""
    text = loop(setup + "\nscaler = torch.amp.GradScaler('cuda')").replace(
        "loss.backward()", "scaler.scale(loss).backward()"
    )
    text = text.replace("optimizer.step()", "scaler.step(optimizer)\n    scaler.update()")
    assert [code.partition(":")[0] for code in codes(text)] == ["HS160"]


def test_a_bfloat16_default_dtype_counts_until_it_is_reset():
    """Weights created under the default are reported; those created after the reset are not."""
    setup = "torch.set_default_dtype(torch.bfloat16)\n{}\ntorch.set_default_dtype(torch.float32)\n{}"
    assert codes(loop(setup.format("model = Net()", ""))) == ["HS162:2"]
    assert codes(loop(setup.format("frozen = Net()", "model = Net()"))) == []


@pytest.mark.parametrize(
    ("setup", "flags", "more", "expected"),
    [
        ("model = AutoModelForCausalLM.from_pretrained('x', dtype=torch.bfloat16)", "bf16=True", "", ["HS277:3"]),
        ("model = AutoModelForCausalLM.from_pretrained('x', dtype=torch.bfloat16)", "", "", ["HS277:3"]),
        ("model = AutoModelForCausalLM.from_pretrained('x', torch_dtype=torch.float16)", "fp16=True", "", ["HS166:3"]),
        ("model = AutoModelForCausalLM.from_pretrained('x', torch_dtype=torch.float16)", "", "", ["HS277:3"]),
        ("model = AutoModelForCausalLM.from_pretrained('x', dtype=torch.float32)", "bf16=True", "", []),
        ("model = AutoModelForCausalLM.from_pretrained('x', dtype=torch.bfloat16)", "deepspeed='ds.json'", "", []),
        ("model = AutoModelForCausalLM.from_pretrained('x', dtype=torch.bfloat16)", "fsdp='full_shard'", "", []),
        ("model = AutoModelForCausalLM.from_pretrained('x', dtype=torch.bfloat16)", "", ", peft_config=c", []),
        ("model = AutoModelForCausalLM.from_pretrained('x', dtype=torch.bfloat16)", "", ", optimizers=(o, None)", []),
    ],
)
def test_trainers_report_16_bit_weights_once(setup, flags, more, expected):
    """A Trainer over 16-bit weights gives one finding; DeepSpeed, FSDP, adapters and own optimizers give none."""
    assert codes(trainer(setup, flags, more)) == expected


LOAD = "AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-8B')"
FULL = LOAD.replace(")", ", dtype=torch.float32)")


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (f"if low:\n    model = {LOAD}.to(torch.bfloat16)\nelse:\n    model = {LOAD}", ["HS277:4", "HS152:6"]),
        (
            f"if low:\n    model = {LOAD}\n    model.to(torch.bfloat16)\nelse:\n    model = {LOAD}",
            ["HS277:5", "HS152:7"],
        ),
        (f"model = {LOAD}.to(torch.bfloat16) if low else {LOAD}", ["HS277:3", "HS152:3"]),
        (f"if low:\n    model = {LOAD}.to(torch.bfloat16)\nelse:\n    model = {FULL}", ["HS277:4"]),
        (f"model = {LOAD}\nif low:\n    model = model.to(torch.bfloat16)", ["HS277:5"]),
        (f"if large:\n    model = {LOAD}\nelse:\n    model = {LOAD}\nmodel = model.to(torch.bfloat16)", ["HS277:7"]),
    ],
)
def test_a_cast_in_the_other_branch_says_nothing_about_a_load(setup, expected):
    """A load without a dtype is reported next to the cast of another branch, and not twice where the cast is its own."""
    assert sorted(codes(trainer(setup)), reverse=True) == expected


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("'Qwen/Qwen3-8B'", (5, 0, 0), ["HS152"]),
        ("'Qwen/Qwen3-8B'", None, ["HS152"]),
        ("'Qwen/Qwen3-8B'", (4, 57, 1), []),
        ("'gpt2'", (5, 0, 0), []),
        ("sys.argv[1]", (5, 0, 0), ["HS152"]),
        ("sys.argv[1]", None, ["HS152"]),
    ],
)
def test_a_load_without_a_dtype_is_judged_by_version_and_checkpoint(name, version, expected):
    """Transformers 5 loads the checkpoint's dtype; version 4 loads float32, and so do float32 checkpoints."""
    text = trainer(f"import sys\nmodel = AutoModelForCausalLM.from_pretrained({name})")
    assert reported(text, transformers=version) == expected


def test_an_unknown_checkpoint_without_bf16_is_silent():
    """A checkpoint that the text does not name may be float32: neither a plain loop nor a plain Trainer is reported."""
    load = "import sys\nmodel = AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    assert reported(trainer(load, flags=""), transformers=(5, 0, 0)) == []
    assert reported(loop(HF + load), transformers=(5, 0, 0)) == []


def test_the_remedy_names_the_argument_of_the_version():
    """`dtype=` since transformers 4.56, `torch_dtype=` before; never "no dtype", which is the checkpoint's own since 5."""
    text = trainer("model = AutoModelForCausalLM.from_pretrained('x', torch_dtype=torch.bfloat16)")
    rule = next(rule for rule in rules_of("script") if rule.code == "HS277")
    for version, remedy in (
        ((4, 40), "torch_dtype=torch.float32"),
        ((5, 22), " dtype=torch.float32"),
        (None, " dtype=torch.float32"),
    ):
        facts = dataclasses.replace(script(text), settings=Settings(transformers=version))
        (finding,) = rule().check(facts)
        assert remedy in finding.instead
        assert "without" not in finding.instead


def test_trained_parameters_that_are_cast_one_by_one_are_reported():
    """Adapters are float32 until their parameters are cast; frozen parameters may have any dtype."""
    setup = "import peft\nmodel = peft.get_peft_model(Net(), config)\nfor p in model.parameters():\n    if {}:\n        p.data = p.data.to({})"
    assert codes(loop(setup.format("p.requires_grad", "torch.bfloat16"))) == ["HS151:6"]
    assert codes(loop(setup.format("not p.requires_grad", "torch.bfloat16"))) == []
    assert codes(loop(setup.format("p.requires_grad", "torch.float32"))) == []


def test_tests_and_benchmarks_are_silent():
    """A test that trains two steps in bfloat16 loses nothing that matters."""
    text = loop("model = Net().bfloat16()")
    rule = next(rule for rule in rules_of("script") if rule.code == "HS151")
    for path in ("tests/optim/test_adam.py", "benchmarks/step.py", "adam_test.py"):
        facts = script(text)
        facts.source = dataclasses.replace(facts.source, path=path)
        assert list(rule().check(facts)) == []


@pytest.mark.parametrize(
    ("rate", "severity"), [("1e-6", "error"), ("2e-5", "error"), ("3e-4", "warning"), ("args.lr", "warning")]
)
def test_a_small_learning_rate_makes_bfloat16_weights_an_error(rate, severity):
    """At 2e-5 and below most updates of bfloat16 weights are lost; at larger or unknown rates it is a warning."""
    text = LOOP.format(setup="model = Net().bfloat16()", optimizer=f"torch.optim.AdamW(model.parameters(), lr={rate})")
    assert [f.severity for f in findings(text, "HS151")] == [severity]


LOAD = HF + "model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16{more})\n"
PEFT = "from peft import LoraConfig, PeftModel, get_peft_model\n"


@pytest.mark.parametrize(
    "setup",
    [
        PEFT + LOAD.format(more="") + "if args.lora_r:\n    model = get_peft_model(model, LoraConfig(r=args.lora_r))",
        PEFT + LOAD.format(more="") + "model = get_peft_model(model, LoraConfig()) if use_lora else model",
        PEFT
        + HF
        + "if is_adapter:\n    base = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16)\n"
        "    model = PeftModel.from_pretrained(base, path).merge_and_unload()\nelse:\n"
        "    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16)\n"
        "for p in model.parameters():\n    p.requires_grad_(True)",
        "bnb = BitsAndBytesConfig(load_in_4bit=True) if args.qlora else None\n"
        + LOAD.format(more=", quantization_config=bnb"),
    ],
)
def test_optional_adapters_leave_a_path_that_trains_all_weights(setup):
    """Where an option attaches the adapter or quantizes, the run without it is reported, with its condition."""
    (finding,) = findings(loop(setup), "HS151")
    assert finding.message.startswith("when ")
    assert "adapter" in finding.message


@pytest.mark.parametrize(
    "setup",
    [
        PEFT + LOAD.format(more="") + "model = get_peft_model(model, LoraConfig())",
        PEFT + LOAD.format(more="") + "if verbose:\n    model = get_peft_model(model, LoraConfig())",
        PEFT
        + LOAD.format(more="")
        + "if args.qlora:\n    model = prepare_model_for_kbit_training(model)\nmodel = get_peft_model(model, LoraConfig())",
        PEFT + HF + "if lora:\n    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16)\n"
        "    model = get_peft_model(model, LoraConfig())\nelse:\n    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float32)",
        "bnb = BitsAndBytesConfig(load_in_4bit=True)\n" + LOAD.format(more=", quantization_config=bnb"),
        LOAD.format(more="") + "for p in model.parameters():\n    p.requires_grad_(False)",
    ],
)
def test_adapters_that_are_always_attached_are_silent(setup):
    """An adapter outside every option, a float32 load in the other branch, and frozen weights are right."""
    assert findings(loop(setup), "HS151") == []


def test_parts_of_a_loaded_model_have_its_dtype():
    """`wrapper.model.parameters()` of a wrapper that `from_pretrained` loaded in 16 bits."""
    setup = "from voices import Talker\nmodel = Talker.from_pretrained(name, torch_dtype=torch.bfloat16)"
    assert len(findings(loop(setup, "torch.optim.AdamW(model.talker.parameters(), lr=1e-5)"), "HS151")) == 1


def test_trainer_with_an_optional_adapter():
    """`peft_config` that is None without an option leaves full fine-tuning in bfloat16."""
    load = "model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)\n"
    choice = "from peft import LoraConfig\nlora = LoraConfig() if args.use_lora else None\n"
    assert len(findings(trainer(choice + load, more=", peft_config=lora"), "HS277")) == 1
    assert findings(trainer(choice.partition(" if ")[0] + "\n" + load, more=", peft_config=lora"), "HS277") == []


@pytest.mark.parametrize(
    ("dtype", "flag", "count"),
    [
        ("torch.float16 if opt.fp16 else torch.float32", "opt.fp16", 1),
        ("torch.float16", "torch.cuda.is_available()", 1),
        ("torch.float16 if opt.half else torch.float32", "opt.fp16", 0),
        ("torch.float32 if opt.fp16 else torch.float16", "opt.fp16", 0),
    ],
)
def test_one_flag_that_casts_the_weights_and_scales_is_reported(dtype, flag, count):
    """The load is float16 exactly when fp16 is on; two independent flags are no finding of HS166."""
    text = trainer(f"model = AutoModelForCausalLM.from_pretrained('gpt2', torch_dtype={dtype})", f"fp16={flag}")
    assert len(findings(text, "HS166")) == count


@pytest.mark.parametrize(
    ("dtype", "code"), [("torch.bfloat16", "HS277"), ("'bfloat16'", "HS277"), ("torch.float32", None)]
)
def test_the_dtype_with_which_trl_loads_a_model_is_read(dtype, code):
    """`model_init_kwargs` of a configuration decides the dtype of a model that is passed by its name."""
    text = (
        "import torch\nfrom trl import SFTConfig, SFTTrainer\n"
        f"args = SFTConfig('out', bf16=True, model_init_kwargs={{'torch_dtype': {dtype}}})\n"
        "SFTTrainer(model='Qwen/Qwen3-0.6B', args=args).train()\n"
    )
    assert [f.code for f in findings(text, "HS277")] == ([code] if code else [])


@pytest.mark.parametrize(
    ("setup", "count"),
    [
        (
            "class Net(torch.nn.Module):\n    def __init__(self):\n        self.fc = torch.nn.Linear(4, 4, dtype=torch.{0})\nmodel = Net()",
            1,
        ),
        ("model = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.{0}))", 1),
        ("class Config:\n    dtype = torch.{0}\nmodel = Net().to(Config.dtype)", 1),
        ("def build(dtype=torch.{0}):\n    return Net().to(dtype)\nmodel = build()", 1),
        ("def build(dtype=torch.{0}):\n    return Net().to(dtype)\nmodel = build(torch.float32)", 0),
    ],
)
def test_a_dtype_of_layers_classes_and_defaults_is_followed(setup, count):
    """Layers with a dtype, class attributes and parameter defaults give the weights their format."""
    assert len(findings(loop(setup.format("bfloat16")), "HS151")) == count
    assert findings(loop(setup.format("float32")), "HS151") == []


@pytest.mark.parametrize(("mode", "count"), [("fp16", 1), ("bf16", 0), ("no", 0)])
def test_accelerate_rejects_float16_weights_in_fp16(mode, count):
    """Accelerate steps through a GradScaler in fp16, which rejects float16 gradients."""
    text = (
        f"import torch\nfrom accelerate import Accelerator\n{HF}accelerator = Accelerator(mixed_precision='{mode}')\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2', torch_dtype=torch.float16)\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)\nmodel, optimizer = accelerator.prepare(model, optimizer)\n"
        "for x in loader:\n    loss = model(x)\n    accelerator.backward(loss)\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    assert len(findings(text, "HS199")) == count
    assert findings(text, "HS160") == []  # one mistake, one finding


@pytest.mark.parametrize(("enabled", "count"), [("opt.fp16", 1), ("opt.amp", 0)])
def test_a_flag_that_casts_and_enables_the_scaler_is_reported(enabled, count):
    """`if opt.fp16: model.half()` meets a scaler that the same flag enables."""
    text = (
        "import torch\nmodel = Net().cuda()\nif opt.fp16:\n    model = model.half()\n"
        f"optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\nscaler = torch.amp.GradScaler('cuda', enabled={enabled})\n"
        "for x in loader:\n    optimizer.zero_grad()\n    loss = model(x)\n    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n"
    )
    assert len(findings(text, "HS160")) == count


PARSED = """\
import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, TrainingArguments, Trainer
parser = HfArgumentParser((ModelArguments, TrainingArguments))
model_args, args = parser.parse_args_into_dataclasses()
{dtype}
model = AutoModelForCausalLM.from_pretrained(model_args.name, dtype=dtype)
Trainer(model=model, args=args, train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("dtype = torch.bfloat16", ["HS277"]),
        ("dtype = torch.float16 if args.fp16 else torch.float32", ["HS166"]),
        ("if args.fp16:\n    dtype = torch.float16\nelse:\n    dtype = torch.float32", ["HS166"]),
        (
            "dtype = torch.bfloat16 if args.bf16 else (torch.float16 if args.fp16 else torch.float32)",
            ["HS166", "HS277"],
        ),
        ("dtype = torch.float32", []),
        ("dtype = torch.bfloat16  # run with --deepspeed zero3.json", []),
    ],
)
def test_arguments_of_the_command_line_are_those_of_the_trainer(dtype, expected):
    """The Trainer's own flags choose the dtype of the weights; a file that names DeepSpeed is left alone."""
    reported = findings(PARSED.format(dtype=dtype), "HS166", "HS277")
    assert sorted({f.code for f in reported}) == expected


CHOICE = """import torch
from transformers import AutoModelForCausalLM, TrainingArguments, Trainer
if cfg.deepspeed:
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
else:
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.{dtype}, device_map="auto")
args = TrainingArguments("out", bf16=True, deepspeed=cfg.deepspeed if cfg.deepspeed else None)
Trainer(model=model, args=args, train_dataset=data).train()
"""


@pytest.mark.parametrize(("dtype", "lines"), [("bfloat16", [6]), ("float32", [])])
def test_only_the_branch_without_deepspeed_has_no_float32_copy(dtype, lines):
    """DeepSpeed keeps masters where it is used; the other branch trains bfloat16 weights alone."""
    assert [f.line for f in findings(CHOICE.format(dtype=dtype), "HS277")] == lines


EVERY = """import torch
model = Net()
for p in model.parameters():
    {frozen}p.data = p.data.to(torch.bfloat16)
optimizer = build_optimizer(cfg, model)
for x in loader:
    model(x).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("frozen", "lines"), [("", [4]), ("p.requires_grad = False; ", [])])
def test_a_cast_of_every_parameter_is_a_cast_of_the_trained_ones(frozen, lines):
    """A loop over all parameters casts what is trained, unless it freezes them."""
    assert [f.line for f in findings(EVERY.format(frozen=frozen), "HS151")] == lines


OPTION = """import torch
def build(config):
    model = Net()
    if config["train"]["precision"] == "bf16":
        model = model.bfloat16()
    elif config["train"]["precision"] == "{cast}":
        model = model.half()
    return model
def make(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)
def main(config):
    model = build(config)
    optimizer = make(model)
    train = config["train"]
    scaler = torch.amp.GradScaler("cuda", enabled=train["precision"] == "fp16")
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(("cast", "lines"), [("fp16", [7]), ("fp16-pure", [])])
def test_one_option_under_two_names_casts_and_enables_the_scaler(cast, lines):
    """`config["train"]["precision"]` and `train["precision"]` are one option, and the optimizer may be returned."""
    assert [f.line for f in findings(OPTION.format(cast=cast), "HS160")] == lines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "if quantize:\n    kw['quantization_config'] = q\nelse:\n    kw['torch_dtype'] = torch.bfloat16\n",
            "when `not quantize`, ",
        ),
        (
            "if not quantize:\n    kw['dtype'] = torch.bfloat16\nelse:\n    kw['load_in_4bit'] = True\n",
            "when `not quantize`, ",
        ),
        ("if full:\n    kw['dtype'] = torch.bfloat16\n", "when `full`, "),
        ("kw['dtype'] = torch.bfloat16\n", "`model` has"),
        ("kw['dtype'] = torch.bfloat16\nkw['quantization_config'] = q\n", None),
        ("if quantize:\n    kw['dtype'] = torch.bfloat16\n    kw['quantization_config'] = q\n", None),
    ],
)
def test_options_of_a_load_are_set_in_branches(options, message):
    """A dtype that is set where quantization is not is the dtype of the weights that the Trainer updates."""
    text = (
        "import torch\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\nkw = {'revision': 'main'}\n"
        f"{options}model = AutoModelForCausalLM.from_pretrained('m', **kw)\n"
        "trainer = Trainer(model=model, args=TrainingArguments('out', bf16=True), train_dataset=data)\ntrainer.train()\n"
    )
    reports = findings(text, "HS277")
    assert [f.message.startswith(message) for f in reports] == ([True] if message else [])


FREEZES = """\
import torch
model = Net().bfloat16()
{freeze}
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
for x in loader:
    model(x).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        ("if args.freeze:\n    model.requires_grad_(False)", "when `not args.freeze`, "),
        ("if cfg.frozen and head:\n    freeze(model)", "when `not (cfg.frozen and head)`, "),
        (
            "if tune_head_only:\n    for p in model.parameters():\n        p.requires_grad = False",
            "when `not tune_head_only`",
        ),
        ("model.requires_grad_(False)", ""),
        ("if not args.train_all:\n    model.requires_grad_(False)", ""),
        ("if not args.no_freeze:\n    freeze(model)", ""),
        ("if args.freeze:\n    model.requires_grad_(False)\nmodel.requires_grad_(False)", ""),
    ],
)
def test_an_option_that_freezes_a_model_leaves_a_path_that_trains_it(freeze, message):
    """`if args.freeze:` freezes nothing in the other case; a freeze without such an option leaves nothing to train."""
    messages = [f.message for f in findings(FREEZES.format(freeze=freeze), "HS151")]
    assert len(messages) == bool(message)
    assert all(m.startswith(message) for m in messages)


def test_a_trainer_that_is_created_from_a_dictionary_is_read():
    """`Trainer(**options)`: the model and the arguments come from the dictionary, and an optional adapter with them."""
    text = (
        "import torch\nfrom transformers import AutoModelForCausalLM, TrainingArguments, Trainer\n"
        "model = AutoModelForCausalLM.from_pretrained(name, dtype={dtype})\n"
        'options = {{"model": model, "args": TrainingArguments("out", bf16=True), "train_dataset": data}}\n'
        '{adapter}options["peft_config"] = LoraConfig(r=8)\n'
        "trainer = Trainer(**options)\ntrainer.train()\n"
    )
    optional = "if args.use_lora:\n    "
    assert [f.code for f in findings(text.format(dtype="torch.bfloat16", adapter=optional), "HS277")] == ["HS277"]
    assert findings(text.format(dtype="torch.bfloat16", adapter=""), "HS277") == []
    assert findings(text.format(dtype="torch.float32", adapter=optional), "HS277") == []


@pytest.mark.parametrize(("module", "count"), [("energon", 1), ("core", 0)])
def test_the_data_loader_of_megatron_trains_nothing(module, count):
    """`megatron.energon` loads data; other modules of Megatron keep float32 copies of the weights."""
    text = f"from megatron.{module} import Thing\n" + FREEZES.format(freeze="")
    assert len(findings(text, "HS151")) == count


@pytest.mark.parametrize(
    ("create", "count"),
    [
        ("create_model(name, dtype=torch.bfloat16)", 1),
        ("build_policy_network(cfg, dtype=torch.bfloat16)", 1),
        ("models.load_model(cfg, torch_dtype='bfloat16')", 1),
        ("create_model(name, dtype=torch.float32)", 0),
        ("create_model(name, dtype=torch.bfloat16).float()", 0),
        ("create_dataset(name, dtype=torch.bfloat16)", 0),
    ],
)
def test_a_function_of_another_file_that_receives_a_dtype_is_assumed_to_use_it(create, count):
    """`create_model(..., dtype=torch.bfloat16)` most likely creates such weights: advice that states the condition."""
    results = findings(loop(f"model = {create}"), "HS151")
    assert [f.severity for f in results] == ["advice"] * count
    assert all("creates bfloat16 weights" in f.message for f in results)


@pytest.mark.parametrize(("flags", "count"), [("bf16=True", 1), ("bf16=True, deepspeed='ds.json'", 0)])
def test_a_16_bit_default_of_a_trainer_is_reported(flags, count):
    """A Trainer trains what is created under the default dtype; DeepSpeed keeps float32 copies."""
    text = trainer("torch.set_default_dtype(torch.bfloat16)\nmodel = Net()", flags)
    assert len(findings(text, "HS162")) == count


@pytest.mark.parametrize(
    ("optional", "count"), [("", 0), ("if use_lora:\n", 1)], ids=["in-both-branches", "in-both-branches-of-an-option"]
)
def test_an_adapter_in_both_branches_is_always_attached(optional, count):
    """`if adapter_path:` chooses a stored adapter, else a new one: both train adapters, unless an option decides on them."""
    attach = (
        "if adapter_path:\n    model = PeftModel.from_pretrained(model, adapter_path)\n"
        "else:\n    model = get_peft_model(model, config)\n"
    )
    if optional:
        attach = optional + "".join(f"    {line}\n" for line in attach.splitlines())
    setup = "from peft import PeftModel, get_peft_model\nmodel = Net().bfloat16()\n" + attach
    assert len(findings(loop(setup), "HS151")) == count


HOOKS = """\
import torch
import lightning as L
from transformers import AutoModelForCausalLM
class Module(L.LightningModule):
    def {hook}(self):
        self.model = {model}
    def training_step(self, batch, index):
        return self.model(**batch).loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-5)
"""


LOADED = "AutoModelForCausalLM.from_pretrained('x/y', dtype=torch.bfloat16)"


@pytest.mark.parametrize(
    ("hook", "model", "after", "messages"),
    [
        ("setup", LOADED, "", ["without DeepSpeed or FSDP"]),
        ("configure_model", LOADED, "", []),
        ("configure_model", "Net().bfloat16()", "", ["without DeepSpeed or FSDP"]),
        ("configure_model", "Net()", "", []),
        ("setup", LOADED, "L.Trainer(precision='bf16-mixed').fit(Module())\n", ["`self.model` is trained"]),
    ],
)
def test_a_lightning_module_leaves_the_strategy_to_another_file(hook, model, after, messages):
    """Without its Trainer the finding is conditional, and a model that is loaded in a hook for sharding is not reported."""
    results = findings(HOOKS.format(hook=hook, model=model) + after, "HS151")
    assert [f.message.startswith(start) for f, start in zip(results, messages, strict=True)] == [True] * len(messages)


LOOPED = """\
import torch
model = Net().cuda().bfloat16()
for name, m in model.named_modules():
    {test}
        m.float()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("test", "severities"),
    [
        ("if isinstance(m, torch.nn.LayerNorm):", ["warning"]),
        ("if 'norm' in name:", ["warning"]),
        ("if isinstance(m, CastedLinear):", ["advice"]),
        ("if isinstance(m, (torch.nn.Linear, torch.nn.Embedding)):", []),
        ("if not isinstance(m, torch.nn.LayerNorm):", []),
        ("if 'lora' in name:", []),
        ("if True:", []),
    ],
)
def test_layers_that_a_loop_returns_to_float32(test, severities):
    """Norms in float32 leave the matrices in 16 bits; where the matrices are restored, the rest is advice."""
    results = findings(LOOPED.format(test=test), "HS151")
    assert [f.severity for f in results] == severities
    assert all("except the layers of line 3" in f.message for f in results)


SELECTED = """\
import torch
model = build(config)
model.to(torch.bfloat16)
{added}
for name, p in model.named_parameters():
    p.requires_grad = False
    if {test}:
        p.requires_grad = True
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for x, y in loader:
    loss_fn(model(x), y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("added", "test", "count"),
    [
        ("", "'visual' not in name", 1),
        ("", "any(word in name for word in words)", 1),
        ("", "'lora' in name", 0),
        ("model.attach_layers = Layers()", "'visual' not in name", 0),
    ],
)
def test_layers_that_a_loop_chooses_have_the_dtype_of_the_model(added, test, count):
    """What a loop trains was cast with the model, unless it may have been attached later, in float32."""
    assert len(findings(SELECTED.format(added=added, test=test), "HS151")) == count


DEFAULT = """\
import torch
torch.set_default_dtype(torch.float16)
model = Net(){cast}
torch.set_default_dtype(torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for x, y in loader:
    loss_fn(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_default_dtype_that_is_restored():
    """The message names the line that ends it, and a model that is cast too is reported once."""
    (finding,) = findings(DEFAULT.format(cast=""), "HS162")
    assert "created before line 4 is float16" in finding.message
    assert codes(DEFAULT.format(cast=".bfloat16()")) == ["HS151:3"]


@pytest.mark.parametrize(("name", "expected"), [("amp_ctx", ["HS151"]), ("amp_context", ["HS151"]), ("amp_C", [])])
def test_the_name_of_a_context_is_no_sign_of_master_weights(name, expected):
    """`amp_C` is Apex's extension, which keeps float32 copies; a variable whose name starts like it is not."""
    text = (
        "import torch\nmodel = Net().cuda().bfloat16()\noptimizer = torch.optim.AdamW(model.parameters())\n"
        f"{name} = torch.autocast('cuda', dtype=torch.bfloat16)\nfor x in loader:\n    with {name}:\n        loss = model(x)\n"
        "    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    assert [f.code for f in findings(text, "HS151")] == expected


ENABLED = """import torch
model = Net.from_pretrained(name, torch_dtype=torch.bfloat16)
for name, p in model.named_parameters():
    if any(part in name for part in trained):
        {enabled}
        p.data = p.data.to({dtype})
    else:
        p.requires_grad = False
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for x in loader:
    model(x).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("enabled", "dtype", "lines"),
    [
        ("p.requires_grad = True", "torch.bfloat16", [6]),
        ("p.requires_grad_(True)", "torch.bfloat16", [6]),
        ("p.requires_grad = True", "torch.float32", []),
        ("other.requires_grad = True", "torch.bfloat16", []),
    ],
)
def test_a_cast_next_to_the_switch_for_gradients_is_of_a_trained_parameter(enabled, dtype, lines):
    """The loop chooses what is trained, and casts it."""
    assert [f.line for f in findings(ENABLED.format(enabled=enabled, dtype=dtype), "HS151")] == lines
