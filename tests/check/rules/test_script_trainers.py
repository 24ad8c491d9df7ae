"""HS166, HS271, HS277: Trainers created from dictionaries and subclasses, options that are off by default, and frozen parts."""

import pytest

from check_scripts import findings
from halfstep.check.cases import check_case
from halfstep.check.registry import rules_of

LOAD = """\
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.{dtype})
{rest}"""
TRAIN = "Trainer(model=model, args=TrainingArguments('out', bf16=True)).train()\n"


def config_findings(text, code):
    (rule,) = [rule for rule in rules_of("config") if rule.code == code]
    return [f for f in check_case(rule, text) if f.code == code]


def lines(rest, dtype="bfloat16", code="HS277"):
    return [f.line for f in findings(LOAD.format(dtype=dtype, rest=rest), code)]


@pytest.mark.parametrize(
    "rest",
    [
        "options = {'model': model, 'args': TrainingArguments('out', bf16=True)}\nTrainer(**options).train()\n",
        "options = dict(model=model, args=TrainingArguments('out', bf16=True))\ntrainer = Trainer(**options)\ntrainer.train()\n",
        "options = {'model': model, 'args': TrainingArguments('out', bf16=True)}\n"
        "if cfg.use_lora:\n    options['peft_config'] = config\nMyTrainer(**options).train()\n",
        "class Weighted(Trainer):\n    pass\nWeighted(model, TrainingArguments('out', bf16=True)).train()\n",
        "class Run:\n    def __init__(self, data):\n        self.args = TrainingArguments('out', bf16=True)\n"
        "        self.trainer = Trainer(model=model, args=self.args)\n    def run(self):\n        self.trainer.train()\n",
    ],
)
def test_a_trainer_is_found_however_it_is_created(rest):
    """Its model and arguments may come from a dictionary, its class from this file, its call from another method."""
    assert lines(rest) == [3]
    assert lines(rest, "float32") == []


@pytest.mark.parametrize(
    ("before", "value", "expected"),
    [
        ("class Options:\n    deepspeed: str = None\n", "opt.deepspeed", [3]),
        ("class Options:\n    deepspeed: str = field(default=None)\n", "opt.deepspeed", [3]),
        ("class Options:\n    deepspeed: str = field(default='zero2.json')\n", "opt.deepspeed", []),
        ("", "opt.deepspeed", []),
        ("", "'zero2.json'", []),
    ],
)
def test_an_option_that_is_off_by_default_shards_nothing(before, value, expected):
    """Without --deepspeed the weights have no float32 copy; a default, or an option of another file, may have one."""
    rest = f"{before}args = TrainingArguments('out', bf16=True, deepspeed={value})\nTrainer(model=model, args=args).train()\n"
    assert lines(rest) == expected


@pytest.mark.parametrize(
    ("parameter", "call", "expected"), [("None", "", [3]), ("'zero2.json'", "", []), ("None", "'z.json'", [])]
)
def test_a_parameter_that_nobody_sets_shards_nothing(parameter, call, expected):
    """`def main(deepspeed=None)` runs without DeepSpeed unless a call of this file passes a configuration."""
    rest = (
        f"def main(deepspeed={parameter}):\n    args = TrainingArguments('out', bf16=True, deepspeed=deepspeed)\n"
        f"    Trainer(model=model, args=args).train()\nmain({call})\n"
    )
    assert lines(rest) == expected


@pytest.mark.parametrize(
    ("freeze", "expected"),
    [
        ("for name, p in model.named_parameters():\n    if 'visual' in name:\n        p.requires_grad = False\n", [3]),
        ("for name, p in model.named_parameters():\n    if 'head' not in name:\n        p.requires_grad = False\n", []),
        ("for name, p in model.named_parameters():\n    if 'model' in name:\n        p.requires_grad = False\n", []),
        ("for p in model.parameters():\n    p.requires_grad = False\n", []),
        ("if opt.freeze_backbone:\n    freeze(model)\n", [3]),
        ("freeze(model)\n", []),
    ],
)
def test_only_what_is_certainly_frozen_is_spared(freeze, expected):
    """Layers of other names, and runs without the option, are trained in 16 bits."""
    assert lines(freeze + TRAIN) == expected


def test_the_message_has_the_option_that_freezes():
    """A condition of the finding is part of its message."""
    (finding,) = findings(LOAD.format(dtype="bfloat16", rest=f"if opt.freeze:\n    freeze(model)\n{TRAIN}"), "HS277")
    assert finding.message.startswith("when `not opt.freeze`, ")


@pytest.mark.parametrize(("field", "expected"), [("bfloat16", [6]), ("float32", [])])
def test_a_dtype_named_by_a_class_attribute_is_followed(field, expected):
    """`getattr(torch, cfg.dtype)` of a configuration class names the dtype."""
    text = (
        "import torch\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        f"class Cfg:\n    dtype = '{field}'\ncfg = Cfg()\n"
        f"model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=getattr(torch, cfg.dtype))\n{TRAIN}"
    )
    assert [f.line for f in findings(text, "HS277")] == expected


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("fp16=True, bf16=torch.cuda.is_bf16_supported()", 1),
        ("fp16=torch.cuda.is_available(), bf16=torch.cuda.is_bf16_supported()", 1),
        ("fp16=not torch.cuda.is_bf16_supported(), bf16=torch.cuda.is_bf16_supported()", 0),
        ("fp16=use_fp16, bf16=torch.cuda.is_bf16_supported()", 0),
        ("fp16=True, bf16=torch.cuda.is_bf16_supported() and not old", 0),
    ],
)
def test_two_flags_that_a_gpu_with_bf16_makes_true(flags, count):
    """`fp16=True` next to a query that is true on the same GPU raises there."""
    text = f"import torch\nfrom transformers import TrainingArguments\nargs = TrainingArguments('out', {flags})\n"
    assert len(config_findings(text, "HS271")) == count


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ("options['bf16'] = True\n", 1),
        ("options['bf16'] = True\noptions['fp16'] = False\n", 0),
        ("if modern:\n    options['bf16'] = True\n    options['fp16'] = False\n", 0),
        ("if modern:\n    options['bf16'] = True\n", 1),
        ("options.update(load())\n", 0),
    ],
)
def test_flags_that_are_set_in_the_dictionary_later(changes, count):
    """`TrainingArguments(**options)` receives what the script has set in `options` by then."""
    text = (
        "from transformers import TrainingArguments\noptions = {'output_dir': 'out', 'fp16': True}\n"
        f"{changes}args = TrainingArguments(**options)\n"
    )
    assert len(config_findings(text, "HS271")) == count


@pytest.mark.parametrize(
    "rest",
    [
        "def get_config():\n    config = TrainingArguments('out', bf16=True)\n    return config\n"
        "config = get_config()\nTrainer(model=model, args=config).train()\n",
        "from mine import DRPOConfig, DRPOTrainer\nconfig = DRPOConfig(output_dir='out', num_train_epochs=1, bf16=True)\n"
        "DRPOTrainer(model=model, args=config).train()\n",
        "from peft import LoraConfig, get_peft_model\n" + TRAIN,
        "from peft import LoraConfig, TaskType\nlora_config = LoraConfig(r=8, task_type=TaskType.CAUSAL_LM)\n" + TRAIN,
        "from peft import LoraConfig\nclass Run:\n    def __init__(self):\n        self.lora = LoraConfig(r=8)\n"
        + TRAIN,
    ],
)
def test_arguments_and_adapters_count_where_they_are_used(rest):
    """A function returns the arguments under the same name, a class of another file extends them, an unused config adapts nothing."""
    assert lines(rest) == [3]


@pytest.mark.parametrize(
    "rest",
    [
        "from mine import DRPOConfig, DRPOTrainer\nconfig = DRPOConfig(num_layers=2)\nDRPOTrainer(model=model, args=config).train()\n",
        "from peft import LoraConfig, get_peft_model\ndef wrap(m):\n    return get_peft_model(m, LoraConfig(r=8))\nmodel = wrap(model)\n"
        + TRAIN,
        "from peft import LoraConfig\nconfig = LoraConfig(r=8)\noptions = {'peft_config': config}\n"
        "Trainer(model=model, args=TrainingArguments('out', bf16=True), **options).train()\n",
        "from peft import LoraConfig\nmodel = attach(model, LoraConfig(r=8))\n" + TRAIN,
    ],
)
def test_an_adapter_that_is_passed_on_is_trained_instead(rest):
    """A configuration that something reads may be attached there."""
    assert lines(rest) == []


QLORA = """\
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser, Trainer, TrainingArguments
args, training_args = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained(
    args.name,
    load_in_4bit=args.bits == 4,
    quantization_config=BitsAndBytesConfig(
        load_in_4bit={four},
        load_in_8bit=args.bits == 8,
        bnb_4bit_compute_dtype=torch.bfloat16,
    ),
    torch_dtype=torch.bfloat16 if args.bf16 else torch.float32,
)
if {attach}:
    model = prepare_model_for_kbit_training(model)
    model = get_peft_model(model, LoraConfig())
setattr(model, 'is_parallelizable', True)
for name, module in model.named_modules():
    {restore}
        module = module.to(torch.float32)
Trainer(model=model, args=training_args).train()
"""
NORMS = "if 'norm' in name:"


@pytest.mark.parametrize(
    ("four", "attach", "restore", "expected"),
    [
        ("args.bits == 4", "not args.full_finetune", NORMS, [13]),
        ("args.bits == 4", "not args.full_finetune", "if isinstance(module, torch.nn.LayerNorm):", [13]),
        ("args.bits == 4", "args.use_lora", NORMS, [13]),
        ("True", "not args.full_finetune", NORMS, []),
        ("args.bits == 4", "True", NORMS, []),
        ("args.bits == 4", "not args.full_finetune", "if True:", []),
        ("args.bits == 4", "not args.full_finetune", "if 'lora' in name:", []),
    ],
)
def test_full_finetuning_of_a_script_for_adapters(four, attach, restore, expected):
    """Without quantization and adapters all weights are trained in 16 bits, except the norms that a loop returns to float32."""
    text = QLORA.format(four=four, attach=attach, restore=restore)
    assert [f.line for f in findings(text, "HS277")] == expected


TWO_STAGES = """\
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
def adapt(data):
    {load}
    {attach}
    SFTTrainer(model={name}, args=SFTConfig('lora', bf16=True), train_dataset=data{config}).train()
model = AutoModelForCausalLM.from_pretrained('x/y', dtype=torch.bfloat16)
{before}
SFTTrainer(model=model, args=SFTConfig('full', bf16=True), train_dataset=data).train()
"""
STAGE = {
    "load": "base = AutoModelForCausalLM.from_pretrained('x/y', dtype=torch.bfloat16)",
    "attach": "base = get_peft_model(base, LoraConfig())",
    "name": "base",
    "config": "",
    "before": "",
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [9]),
        ({"attach": "pass", "config": ", peft_config=LoraConfig()"}, [9]),
        ({"before": "model = get_peft_model(model, LoraConfig())"}, []),
        ({"before": "def wrap(m):\n    return get_peft_model(m, LoraConfig())\nmodel = wrap(model)"}, []),
        (
            {
                "before": "class Net:\n    def __init__(self):\n        self.m = get_peft_model(self.m, LoraConfig())\nmodel = Net(model)"
            },
            [],
        ),
        ({"before": "from unsloth import FastLanguageModel"}, [9]),
        (
            {"before": "from unsloth import FastLanguageModel\nmodel = FastLanguageModel.get_peft_model(model, r=16)"},
            [],
        ),
        ({"before": "SFTTrainer(model=model, args=SFTConfig('a', bf16=True), peft_config=LoraConfig()).train()"}, []),
    ],
)
def test_adapters_of_another_model_leave_this_one_trained_in_full(changes, expected):
    """A file may train one model in full and adapters of another."""
    text = TWO_STAGES.format(**STAGE | changes)
    assert [f.line for f in findings(text, "HS277")] == expected


RENAMED = """\
import torch
from transformers import AutoModelForCausalLM
from trl import PPOConfig, PPOTrainer{alias}
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16)
trainer = {name}(PPOConfig(learning_rate=1e-5), model, None, tokenizer)
for batch in loader:
    trainer.step(*batch)
"""


@pytest.mark.parametrize(("alias", "name"), [("", "PPOTrainer"), (" as TRLTrainer", "TRLTrainer"), (" as PPO", "PPO")])
def test_a_trainer_under_another_name_is_that_trainer(alias, name):
    """The import decides which class it is, and so where its model stands."""
    assert [f.code for f in findings(RENAMED.format(alias=alias, name=name), "HS277")] == ["HS277"]


NAMED = """\
import torch
from trl import GRPOConfig, GRPOTrainer
{before}
options = {{"torch_dtype": torch.bfloat16}}
config = GRPOConfig("out", bf16=True, model_init_kwargs=options)
GRPOTrainer(model=path, args=config, reward_funcs=rewards).train()
"""


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (
            "def resolve(cfg):\n    if cfg.last:\n        return str(newest(cfg))\n    return cfg['model_path']\npath = resolve(cfg)",
            1,
        ),
        ("path = str(folder / 'merged')", 1),
        ("path = os.environ.get('MODEL', 'Qwen/Qwen3-0.6B')", 1),
        ("path = get_model_path(cfg)", 1),
        ("path = load_policy(cfg)", 0),
        ("def resolve(cfg):\n    return Policy(cfg)\npath = resolve(cfg)", 0),
    ],
)
def test_model_init_kwargs_count_for_a_model_that_is_a_name(before, expected):
    """Its dtype is that of the weights where a call returns the path of the checkpoint; what another call returns is unknown."""
    assert len(findings(NAMED.format(before=before), "HS277")) == expected


PREPARED = """\
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
def prepare_model(args, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(args.name, dtype=torch.{dtype})
    model.resize_token_embeddings(len(tokenizer))
    return model
{rest}
Trainer(model=model, args=TrainingArguments("out", bf16=True)).train()
"""


@pytest.mark.parametrize(
    "rest",
    [
        "model = prepare_model(args, tokenizer)",
        "model = prepare_model(args=args, tokenizer=tokenizer)",
        "def main():\n    return prepare_model(args, tokenizer)\nmodel = main()",
    ],
)
def test_a_function_of_the_file_that_is_named_like_a_wrapper_is_followed(rest):
    """`prepare_model` of this file loads the model; that of a library wraps its first argument."""
    assert [f.line for f in findings(PREPARED.format(dtype="bfloat16", rest=rest), "HS277")] == [4]
    assert findings(PREPARED.format(dtype="float32", rest=rest), "HS277") == []
