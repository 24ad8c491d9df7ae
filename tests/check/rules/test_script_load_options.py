"""HS152, HS166, HS199, HS277: dtypes that a load takes from a dictionary, and options that choose weights and precision alike."""

import pytest

from check_scripts import findings

HEAD = "import torch\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
LOAD = "model = AutoModelForCausalLM.from_pretrained(name, **options)\n"
TRAIN = "args = TrainingArguments('out'{flags})\ntrainer = Trainer(model=model, args=args)\ntrainer.train()\n"
BRANCHES = (
    "options = {'trust_remote_code': True}\nif opt.bf16:\n    options['torch_dtype'] = torch.bfloat16\n"
    "elif opt.fp16:\n    options['torch_dtype'] = torch.float16\n"
)
FLAGS = ", bf16=opt.bf16, fp16=opt.fp16"


def codes(text, *names):
    return [f.code for f in findings(text, *names)]


@pytest.mark.parametrize(
    "options",
    [
        BRANCHES,
        BRANCHES.replace("torch_dtype", "dtype"),
        "options = dict(device_map='auto')\nif opt.fp16:\n    options['dtype'] = torch.float16\nif opt.bf16:\n    options['dtype'] = torch.bfloat16\n",
        "options = {}\nif opt.bf16:\n    options['dtype'] = torch.bfloat16\nelse:\n    if opt.fp16:\n        options['dtype'] = torch.float16\n",
    ],
)
def test_each_branch_that_sets_the_dtype_of_a_load_counts(options):
    """bfloat16 weights with one option, float16 weights under a scaler with the other."""
    reported = findings(HEAD + options + LOAD + TRAIN.format(flags=FLAGS), "HS166", "HS277")
    assert sorted(f.code for f in reported) == ["HS166", "HS277"]
    scaled, plain = sorted(reported, key=lambda f: f.code)
    assert "when `opt.fp16`, " in scaled.message
    assert "bfloat16" in plain.message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (BRANCHES.replace("torch.float16", "torch.float32"), ["HS277"]),
        (BRANCHES.replace("torch.float16", "torch.float32").replace("torch.bfloat16", "torch.float32"), []),
        ("options = {}\nif opt.use_lora:\n    options['dtype'] = torch.float16\n", []),
    ],
)
def test_branches_in_float32_and_of_adapters_are_silent(options, expected):
    """Only a branch that sets a 16-bit dtype of trained weights is reported."""
    text = HEAD + options + LOAD + TRAIN.format(flags=FLAGS)
    assert codes(text, "HS166", "HS277") == expected


@pytest.mark.parametrize("flag", ["opt.bf16", "precision == 'bf16'", "torch.cuda.is_bf16_supported()", "True"])
@pytest.mark.parametrize(
    "load", ["", ", **options", ", **{'attn_implementation': 'sdpa'}", ", device_map='auto'"], ids=str
)
def test_a_load_without_a_dtype_is_advice_where_bf16_may_be_set(flag, load):
    """The keys of a dictionary that the text shows name no dtype either."""
    options = "options = {}\nif opt.attention:\n    options['attn_implementation'] = opt.attention\n"
    text = HEAD + options + f"model = AutoModelForCausalLM.from_pretrained(opt.name{load})\n"
    (finding,) = findings(text + TRAIN.format(flags=f", bf16={flag}"), "HS152")
    assert finding.severity == "advice"


@pytest.mark.parametrize(("flag", "expected"), [("True", ["HS152"]), ("opt.bf16", [])])
def test_an_encoder_decoder_model_needs_bf16_in_every_run(flag, expected):
    """Most checkpoints of T5 and Whisper are float32."""
    text = HEAD.replace("AutoModelForCausalLM", "WhisperForConditionalGeneration")
    text += "model = WhisperForConditionalGeneration.from_pretrained(opt.name)\n"
    assert codes(text + TRAIN.format(flags=f", bf16={flag}"), "HS152") == expected


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ("options = {}\n", ""),
        ("options = {}\n", ", bf16=False"),
        ("options = {}\n", ", fp16=opt.fp16"),
        ("options = load_options(opt)\n", ", bf16=opt.bf16"),
        ("options = {**defaults}\n", ", bf16=opt.bf16"),
        ("options = {}\noptions.update(defaults)\n", ", bf16=opt.bf16"),
        ("options = {'dtype': torch.float32}\n", ", bf16=opt.bf16"),
    ],
)
def test_a_load_whose_options_may_name_a_dtype_is_silent(options, flags):
    """So is a Trainer that never computes in bfloat16: the checkpoint may be of any kind."""
    assert codes(HEAD + options + LOAD + TRAIN.format(flags=flags), "HS152") == []


ACCELERATE = """\
import torch
from accelerate import Accelerator
def choose_dtype(kind):
    if kind == "fp16":
        return torch.float16
    return torch.float32
def choose_precision(kind):
    if not torch.cuda.is_available():
        return "no"
    return kind
accelerator = Accelerator(mixed_precision={precision})
model = Net().to({dtype})
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    accelerator.backward(loss_fn(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "precision",
    [
        "choose_precision(opt.mixed_precision)",
        "opt.mixed_precision",
        "opt.mixed_precision if opt.amp else 'no'",
        "'fp16' if opt.mixed_precision == 'fp16' else 'no'",
    ],
)
@pytest.mark.parametrize("dtype", ["choose_dtype(opt.mixed_precision)", "choose_dtype(kind=opt.mixed_precision)"])
def test_one_option_that_chooses_weights_and_precision_is_reported(precision, dtype):
    """The functions that pass the option on do not hide that both are float16 with it."""
    (finding,) = findings(ACCELERATE.format(precision=precision, dtype=dtype), "HS199")
    assert "`opt.mixed_precision == 'fp16'`" in finding.message


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("choose_precision(opt.mixed_precision)", "choose_dtype(opt.weights)"),
        ("opt.precision", "choose_dtype(opt.mixed_precision)"),
        ("'bf16' if opt.mixed_precision == 'fp16' else 'no'", "choose_dtype(opt.mixed_precision)"),
        ("'no'", "choose_dtype(opt.mixed_precision)"),
    ],
)
def test_different_options_are_silent(precision, dtype):
    """No run is known in which the weights are float16 and the loss is scaled."""
    assert codes(ACCELERATE.format(precision=precision, dtype=dtype), "HS199") == []


FACTORY = """\
import torch
from accelerate import Accelerator
from training import get_optimizer
accelerator = Accelerator(mixed_precision=opt.mixed_precision)
if accelerator.mixed_precision == "fp16":
    dtype = torch.float16
else:
    dtype = torch.float32
{model} = Net().to(dtype=dtype)
{params}
optimizer = get_optimizer({argument})
{model}, optimizer, loader = accelerator.prepare({model}, optimizer, loader)
for x, y in loader:
    accelerator.backward(loss_fn({model}(x), y))
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("params", "argument"),
    [
        ("trained = [p for p in unet.parameters() if p.requires_grad]\ngroups = [{'params': trained}]", "groups, 1e-4"),
        ("weights = list(filter(lambda p: p.requires_grad, unet.parameters()))", "lr=1e-4, weights=weights"),
        ("", "[{'params': unet.parameters()}]"),
        ("", "unet, 1e-4"),
    ],
)
def test_a_factory_of_another_file_trains_the_parameters_it_receives(params, argument):
    """In a list under any name, in groups, or as a model."""
    assert codes(FACTORY.format(model="unet", params=params, argument=argument), "HS199") == ["HS199"]


@pytest.mark.parametrize("params", ["groups = settings", "groups = [p.clone() for p in unet.parameters()]"])
def test_a_factory_that_receives_other_parameters_is_silent(params):
    """Copies of the parameters may be float32."""
    assert codes(FACTORY.format(model="unet", params=params, argument="groups"), "HS199") == []


BESIDE = """\
import torch
from accelerate import Accelerator
from training import get_optimizer
accelerator = Accelerator()
if {test}:
    dtype = {first}
else:
    dtype = {second}
model = Net().to(dtype=dtype)
optimizer = get_optimizer(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    accelerator.backward(loss_fn(model(x), y))
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("test", "first", "second", "expected"),
    [
        ("accelerator.state.deepspeed_plugin", "torch.float32", "torch.bfloat16", ["HS151"]),
        ("accelerator.state.deepspeed_plugin", "torch.bfloat16", "torch.float32", []),
        ("accelerator.num_processes > 1", "torch.float32", "torch.bfloat16", []),
    ],
)
def test_a_dtype_chosen_for_runs_without_deepspeed_is_trained_without_it(test, first, second, expected):
    """DeepSpeed keeps float32 copies; a script that mentions it is silent unless it chooses the dtype without it."""
    text = "# deepspeed: see ds.json\n" + BESIDE.format(test=test, first=first, second=second)
    assert codes(text, "HS151") == expected


MADE = """\
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
def make_options(args):
    dtype = torch.float16
    {made}
def main(args):
    dtype = torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.name, **make_options(args))
    options = TrainingArguments("out"{flags})
    Trainer(model=model, args=options, train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ("return {'torch_dtype': torch.float16}", ["HS277:5"]),
        ("return dict(torch_dtype=torch.bfloat16)", ["HS277:5"]),
        ("options = {}\n    options['torch_dtype'] = torch.float16\n    return options", ["HS277:6"]),
        ("options = {}\n    if args.half:\n        options['dtype'] = torch.float16\n    return options", ["HS277:7"]),
        ("return {'torch_dtype': torch.float32}", []),
        ("return {'device_map': 'auto', 'quantization_config': None}", []),
        ("return {'torch_dtype': dtype}", []),  # a variable of that function
        ("return other(args)", []),
        ("return make_options(args)", []),
    ],
)
def test_options_that_a_function_returns(made, expected):
    """`**make_options()` has the entries of the dictionary that the function fills; the finding is where it names the dtype."""
    text = MADE.format(made=made, flags=", bf16=True")
    assert [f"{f.code}:{f.line}" for f in findings(text, "HS277", "HS166")] == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fp16=not torch.cuda.is_bf16_supported(), bf16=torch.cuda.is_bf16_supported()", ["HS166:9", "HS277:5"]),
        ("fp16=torch.cuda.is_available() and not torch.cuda.is_bf16_supported()", ["HS166:9", "HS277:5"]),
        ("fp16=not torch.cuda.is_bf16_supported() and args.half", []),
        ("fp16=args.half", []),
    ],
)
def test_float16_weights_with_fp16_on_gpus_without_bf16(flags, expected):
    """The scaler rejects the gradients on old GPUs, and on the others nothing keeps float32 weights."""
    text = MADE.format(made="return {'torch_dtype': torch.float16}", flags=f", {flags}")
    assert sorted(f"{f.code}:{f.line}" for f in findings(text, "HS277", "HS166")) == expected
