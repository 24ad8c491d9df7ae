"""HS152, HS166, HS277: options that turn adapters off, in the forms that scripts have, and checkpoints named by a caller."""

import pytest

from check_scripts import findings

HEAD = """\
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
"""
LOAD = "model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)\n"
TRAIN = "args = TrainingArguments('out'{flags})\ntrainer = Trainer(model=model, args=args)\ntrainer.train()\n"
SCRIPT = HEAD + LOAD + "{adapters}" + TRAIN
OPTIONAL = "if not opt.no_lora:\n    model = get_peft_model(model, LoraConfig())\n"


def codes(text, *names):
    return [f.code for f in findings(text, *names)]


@pytest.mark.parametrize(
    "adapters",
    [
        "add_lora_config_args(parser)\n" + OPTIONAL,
        "lora_config = make_lora_config(opt)\n" + OPTIONAL,
        "if not opt.no_lora:\n    if opt.adapter:\n        model = PeftModel.from_pretrained(model, opt.adapter, is_trainable=True)\n"
        "    else:\n        model = get_peft_model(model, LoraConfig())\n",
        "if opt.tuning == 'qlora':\n    model = get_peft_model(prepare(model), LoraConfig())\n"
        "elif opt.tuning == 'lora':\n    model = get_peft_model(model, LoraConfig())\n",
        "if opt.tuning == 'lora':\n    model = get_peft_model(model, LoraConfig())\nelif opt.tuning != 'full':\n    raise ValueError\n",
        "if opt.lora:\n    model = get_peft_model(model, LoraConfig())\nelse:\n    model.embed.requires_grad_(False)\n",
        "if opt.tuning == 'full':\n    pass\nelif opt.lora_path:\n    model = PeftModel.from_pretrained(model, opt.lora_path)\n",
    ],
)
def test_a_path_without_adapters_trains_all_weights(adapters):
    """A branch that attaches none leaves 16-bit weights, whatever else is called after an adapter."""
    assert codes(SCRIPT.format(adapters=adapters, flags=", bf16=True"), "HS277") == ["HS277"]


QUANTIZED = """\
if opt.load_in_4bit:
    config = BitsAndBytesConfig(load_in_4bit=True)
    {low}
else:
    config = None
    {other}
model = AutoModelForCausalLM.from_pretrained(name, quantization_config=config, torch_dtype=weights)
peft_config = LoraConfig() if opt.use_peft else None
trainer = Trainer(model=model, args=TrainingArguments('out', bf16=True), peft_config=peft_config)
trainer.train()
"""


@pytest.mark.parametrize(
    ("low", "other", "expected"),
    [
        ("weights = torch.bfloat16", "weights = torch.float32", []),
        ("weights = torch.float32", "weights = torch.bfloat16", ["HS277"]),
        ("weights = torch.bfloat16", "weights = torch.bfloat16", ["HS277"]),
    ],
)
def test_a_dtype_beside_quantization_is_not_that_of_a_model_that_trains_in_full(low, other, expected):
    """A quantized model trains adapters only, so the branch that quantizes trains no 16-bit weights."""
    assert codes(HEAD + QUANTIZED.format(low=low, other=other), "HS277") == expected


@pytest.mark.parametrize(
    "adapters",
    [
        "if opt.adapter:\n    model = PeftModel.from_pretrained(model, opt.adapter)\nelse:\n    model = get_peft_model(model, LoraConfig())\n",
        "if opt.tuning == 'qlora':\n    model = get_peft_model(prepare(model), LoraConfig())\n"
        "elif opt.tuning == 'dora':\n    model = get_peft_model(model, LoraConfig(use_dora=True))\n"
        "else:\n    model = get_peft_model(model, LoraConfig())\n",
        "config = make_lora_config(opt)\nmodel = get_peft_model(model, config)\n",
        "if opt.tuning == 'lora':\n    model = get_peft_model(model, LoraConfig())\nelse:\n    raise ValueError(opt.tuning)\n",
        "if opt.tuning == 'lora':\n    model = get_peft_model(model, LoraConfig())\n"
        "elif opt.tuning == 'freeze':\n    for name, p in model.named_parameters():\n        p.requires_grad = False\n"
        "elif opt.tuning == 'dora':\n    model = get_peft_model(model, LoraConfig(use_dora=True))\nelse:\n    raise ValueError\n",
        "if opt.lora:\n    model = get_peft_model(model, LoraConfig())\nelse:\n    model.requires_grad_(False)\n",
    ],
)
def test_adapters_on_every_path_are_silent(adapters):
    """Each branch attaches adapters, which are float32, freezes the model or raises."""
    assert codes(SCRIPT.format(adapters=adapters, flags=", bf16=True"), "HS166", "HS277") == []


@pytest.mark.parametrize(
    ("flags", "condition"),
    [
        (", fp16=dtype == torch.float16", "when `dtype == torch.float16` and no adapter is used, "),
        (", bf16=bool(dtype == torch.bfloat16), fp16=bool(dtype == torch.float16)", "when `dtype == torch.float16`"),
        (", fp16=not torch.cuda.is_bf16_supported()", "when not `torch.cuda.is_bf16_supported()`"),
        (", **{'fp16': not torch.cuda.is_bf16_supported()}", "when not `torch.cuda.is_bf16_supported()`"),
    ],
)
def test_one_choice_of_dtype_decides_the_weights_and_fp16(flags, condition):
    """The scaler is on exactly where the weights are float16."""
    (finding,) = findings(SCRIPT.format(adapters=OPTIONAL, flags=flags), "HS166")
    assert finding.message.startswith(condition)


@pytest.mark.parametrize(
    "flags",
    [
        ", fp16=dtype == torch.bfloat16",
        ", fp16=not opt.bf16",
        ", fp16=other == torch.float16",
        ", bf16=not torch.cuda.is_bf16_supported()",
    ],
)
def test_fp16_where_the_weights_are_not_float16_is_silent(flags):
    """Two choices that exclude each other, or that have nothing to do with each other."""
    assert codes(SCRIPT.format(adapters=OPTIONAL, flags=flags), "HS166") == []


def test_fp16_where_the_weights_are_bfloat16_is_reported():
    """The scaler has no kernel for bfloat16 gradients."""
    (finding,) = findings(SCRIPT.format(adapters=OPTIONAL, flags=", fp16=torch.cuda.is_bf16_supported()"), "HS166")
    assert finding.message.startswith("when `torch.cuda.is_bf16_supported()`")


def test_a_variable_that_stands_for_the_choice_of_dtype():
    """`use_bf16` has the value that the dtype was chosen by."""
    adapters = OPTIONAL + "use_bf16 = torch.cuda.is_bf16_supported()\n"
    assert codes(SCRIPT.format(adapters=adapters, flags=", bf16=use_bf16, fp16=not use_bf16"), "HS166") == ["HS166"]
    head = HEAD.replace("dtype = ", "use_bf16 = torch.cuda.is_bf16_supported()\ndtype = ").replace(
        "if torch.cuda.is_bf16_supported()", "if use_bf16"
    )
    assert codes(head + LOAD + OPTIONAL + TRAIN.format(flags=", fp16=not use_bf16"), "HS166") == ["HS166"]


def test_options_that_a_function_passes_on_to_the_arguments():
    """A helper drops what the installed version does not know and creates the arguments."""
    helper = "def build(**options):\n    return TrainingArguments(**{k: v for k, v in options.items() if k in known})\n"
    options = "options = {'fp16': not torch.cuda.is_bf16_supported()}\n"
    train = TRAIN.format(flags="").replace("TrainingArguments('out')", "build(**options)")
    assert codes(HEAD + helper + LOAD + OPTIONAL + options + train, "HS166") == ["HS166"]


BRANCHES = """\
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
def create(args, name):
    if args.tuning == "qlora":
        base = AutoModelForCausalLM.from_pretrained(name, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
        model = get_peft_model(base, LoraConfig())
    elif args.tuning == "lora":
        base = AutoModelForCausalLM.from_pretrained(name)
        model = get_peft_model(base, LoraConfig())
    else:
        {full}
    return model
def main(args):
    model = create(args, {name})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for x in loader:
        model(x).loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("full", "name", "lines"),
    [
        ("model = AutoModelForCausalLM.from_pretrained(name)", "'meta-llama/Llama-3.2-1B'", [12]),
        ("model = AutoModelForCausalLM.from_pretrained(name)", "'gpt2'", []),
        ("model = AutoModelForCausalLM.from_pretrained(name)", "args.name", []),
        ("model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)", "'meta-llama/Llama-3.2-1B'", []),
        ("raise ValueError(args.tuning)", "'meta-llama/Llama-3.2-1B'", []),
    ],
)
def test_the_branch_that_trains_the_checkpoint_in_full(full, name, lines):
    """Only the branch without adapters trains the weights that its checkpoint has, and a caller names the checkpoint."""
    assert [f.line for f in findings(BRANCHES.format(full=full, name=name), "HS152")] == lines


@pytest.mark.parametrize(
    ("name", "flags", "count"),
    [
        ("'./model'", ", bf16=True", 1),
        ("'model'", ", bf16=True", 1),
        ("args.path", ", bf16=True", 1),
        ("'./model'", "", 0),
        ("'gpt2'", ", bf16=True", 0),
        ("'facebook/bart-large'", ", bf16=True", 0),
    ],
)
def test_a_checkpoint_that_only_a_run_knows_is_advice(name, flags, count):
    """bf16=True shows that a model of today is meant; the message states the version of transformers."""
    load = f"model = AutoModelForCausalLM.from_pretrained({name})\n"
    reported = findings(
        HEAD.replace("from peft import LoraConfig, PeftModel, get_peft_model\n", "").replace("BitsAndBytesConfig, ", "")
        + load
        + TRAIN.format(flags=flags),
        "HS152",
    )
    assert [f.severity for f in reported] == ["advice"] * count
    assert all("on transformers 5" in f.message for f in reported)


def test_a_loop_that_mentions_no_precision_is_read():
    """The name of the checkpoint decides it."""
    text = (
        "import torch\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('/models/Meta-Llama-3.1-8B').cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\nloss = model(**batch).loss\nloss.backward()\noptimizer.step()\n"
    )
    assert [f.line for f in findings(text, "HS152")] == [3]
    assert findings(text.replace("Meta-Llama-3.1-8B", "gpt2-large"), "HS152") == []


LOOP = """\
import torch
from transformers import AutoModelForCausalLM

def train(args, loader):
    {load}
    {adapters}
    optimizer = torch.optim.AdamW({params})
    for x in loader:
        optimizer.zero_grad()
        loss = model(x).loss
        loss.backward()
        optimizer.step()

{run}
"""
LOADED = "model = AutoModelForCausalLM.from_pretrained(args.name, dtype=torch.bfloat16)"


def loop(load=LOADED, adapters="pass", params="model.parameters()", run="train(args, loader)"):
    return codes(LOOP.format(load=load, adapters=adapters, params=params, run=run), "HS151")


@pytest.mark.parametrize(
    ("adapters", "expected"),
    [
        ("lora = getattr(model, 'lora', None)\n    print(len(lora.A), lora.rank)", ["HS151"]),
        ("lora = getattr(model, 'lora', None)\n    prepare(model, lora)", []),
    ],
)
def test_a_part_that_is_only_looked_into_attaches_nothing(adapters, expected):
    """A model with low-rank parts of its own is trained in its dtype; a variable that is passed on may attach adapters."""
    assert loop(adapters=adapters) == expected


@pytest.mark.parametrize(("options", "expected"), [("['full', 'lora']", ["HS151"]), ("['qlora', 'lora']", [])])
def test_a_test_for_several_kinds_of_training_may_be_one_without_adapters(options, expected):
    """`kind in ["full", "lora"]` loads the weights of both; what is frozen for `lora` is trained in full otherwise."""
    load = f"if args.kind in {options}:\n        {LOADED}"
    adapters = "if args.kind == 'lora':\n        for p in model.parameters():\n            p.requires_grad = False\n"
    adapters += "        model = add_lora_layers(model)"
    assert loop(load=load, adapters=adapters) == expected


def test_a_function_that_trains_is_no_adapter_by_its_name():
    """`train_qlora(args)` gets no model: the calls in it decide."""
    adapters = "if args.lora:\n        model = get_peft_model(model, config)"
    run = "def train_qlora(args, loader):\n    train(args, loader)\n\ntrain_qlora(args, loader)"
    assert loop(adapters=adapters, run=run) == ["HS151"]
    assert loop(adapters=adapters, run="model = wrap_qlora(model)") == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [("args.folder / 'model.bin'", ["HS151"]), ("'weights/gold.pt'", ["HS151"]), ("[p.float() for p in weights]", [])],
)
def test_a_file_of_weights_is_no_copy_of_them(path, expected):
    """`master_weights` that is a path names a checkpoint; a list of tensors may be the float32 copies."""
    assert loop(load=f"master_weights = {path}\n    {LOADED}") == expected


@pytest.mark.parametrize(("attached", "expected"), [("model", ["HS151"]), ("head", [])])
def test_a_model_next_to_the_one_with_adapters_is_trained_in_full(attached, expected):
    """Adapters of `model` do not change the weights of `head`, which the same optimizer gets."""
    load = "head = Head().to(torch.bfloat16)\n    model = AutoModelForCausalLM.from_pretrained(args.name)"
    adapters = f"{attached} = get_peft_model({attached}, config)"
    assert loop(load=load, adapters=adapters, params="head.parameters()") == expected


ATTACHING = HEAD + "def {name}(model):\n    return get_peft_model(model, LoraConfig())\n\n\n" + LOAD


@pytest.mark.parametrize("name", ["setup_dora", "add_adapters", "prepare", "apply_lora"])
def test_the_calls_of_a_function_decide_whether_its_adapters_are_attached(name):
    """A function that attaches adapters runs always, or only where an option asks for it, whatever its name is."""
    script = ATTACHING.format(name=name) + "{call}" + TRAIN.format(flags=", bf16=True")
    always = f"model = {name}(model)\n"
    assert codes(script.format(call=always), "HS277") == []
    assert codes(script.format(call=f"if opt.use_lora:\n    {always}"), "HS277") == ["HS277"]
    assert codes(script.format(call=f"if opt.resume:\n    {always}"), "HS277") == []


@pytest.mark.parametrize(("test", "expected"), [("", []), ("if self.config.dora:\n            ", ["HS151"])])
def test_a_method_attaches_adapters_where_another_method_calls_it(test, expected):
    """The setup methods of a class run one after the other."""
    script = (
        "import torch\nfrom peft import LoraConfig, get_peft_model\nclass Runner:\n    def load(self):\n"
        "        self.model = build().to(torch.bfloat16)\n    def setup_dora(self):\n"
        "        self.model = get_peft_model(self.model, LoraConfig(use_dora=True))\n    def train(self):\n        self.load()\n"
        f"        {test}self.setup_dora()\n        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)\n"
        "        for x in loader:\n            self.model(x).backward()\n            optimizer.step()\n"
    )
    assert codes(script, "HS151") == expected


FIELD = """\
from dataclasses import dataclass, field
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

@dataclass
class Options:
    path: str = {default}

def main():
    options, args = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_pretrained(options.path{dtype})
    Trainer(model=model, args=args, train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("default", "dtype", "lines"),
    [
        ("'Qwen/Qwen2-7B'", "", [10]),
        ("field(default='Qwen/Qwen2-7B')", "", [10]),
        ("field(default='Qwen/Qwen2-7B')", ", dtype=torch.float32", []),
        ("field(default='gpt2')", "", []),
        ("field(default=None)", "", []),
        ("field(metadata={'help': 'the model'})", "", []),
    ],
)
def test_the_default_of_a_field_names_the_checkpoint(default, dtype, lines):
    """HfArgumentParser makes an option of a field: its default says which checkpoint is meant, as that of argparse does."""
    text = FIELD.format(default=default, dtype=dtype)
    assert [f.line for f in findings(text, "HS152")] == lines
    assert findings(text + "\nimport deepspeed\n", "HS152") == []  # the command line names it
