"""Modules of a model that are cast to 16 bits and trained by a Trainer, as in LLaVA's code."""

import pytest

from check_scripts import findings

CODE = """\
import torch
from llava.model import LlavaLlamaForCausalLM
from transformers import HfArgumentParser, Trainer, TrainingArguments
{head}
model_args, args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
compute_dtype = torch.float16 if args.fp16 else (torch.bfloat16 if args.bf16 else torch.float32)
model = LlavaLlamaForCausalLM.from_pretrained(model_args.model_name_or_path)
model.requires_grad_(False)
model.get_model().initialize_vision_modules(model_args=model_args)
{code}
Trainer(model=model, args=args, **data_module).train()
"""
ENABLE = "for p in model.get_model().mm_projector.parameters():\n    p.requires_grad = True\n"
CAST = "model.get_model().mm_projector.to(dtype=compute_dtype, device=args.device)"


@pytest.mark.parametrize(
    "code",
    [
        ENABLE + CAST,
        f"if model_args.tune_mm_mlp_adapter:\n    {ENABLE.replace('    ', '        ')}if args.bits in [4, 8]:\n    {CAST}",
        ENABLE.replace("True", "model_args.tune_mm_mlp_adapter") + CAST,
        "model.get_model().mm_projector.requires_grad_(True)\n" + CAST,
        "core = model.get_model() if hasattr(model, 'get_model') else model\n"
        "for n, p in core.mm_projector.named_parameters():\n    if n.startswith('bridge'):\n        p.requires_grad = True\n"
        "    else:\n        p.requires_grad = False\n" + CAST,
        "for n, p in model.named_parameters():\n    if 'mm_projector' in n:\n        p.requires_grad = True\n" + CAST,
        "for p in model.get_projector().parameters():\n    p.requires_grad_(True)\nmodel.get_projector().to(compute_dtype)",
        "tower = model.get_vision_tower()\ntower.requires_grad_(True)\ntower.to(dtype=compute_dtype, device=args.device)",
        "projector = model.get_model().mm_projector\nfor p in projector.parameters():\n    p.requires_grad = True\nprojector.to(compute_dtype)",
    ],
)
def test_a_module_that_is_cast_and_trained(code):
    """A module reached through getters has the dtype of its cast, which a scaler rejects in float16."""
    text = CODE.format(head="", code=code)
    assert [f.severity for f in findings(text, "HS166")] == ["error"]
    assert len(findings(text, "HS277")) == 1


@pytest.mark.parametrize(
    "code",
    [
        CAST,  # and frozen
        ENABLE + "model.get_vision_tower().to(dtype=compute_dtype, device=args.device)",
        ENABLE + CAST + "\nmodel.get_model().mm_projector.float()",
        ENABLE + "model.get_model().mm_projector.to(dtype=torch.float32, device=args.device)",
        ENABLE.replace("True", "False") + CAST,
        ENABLE + "other = load_teacher()\nother.get_model().mm_projector.to(dtype=compute_dtype)",
        "for n, p in model.named_parameters():\n    if 'mm_projector' not in n:\n        p.requires_grad = True\n"
        + CAST,
    ],
)
def test_a_module_that_is_frozen_or_float32(code):
    """A cast of what no optimizer updates, or that is cast back, is no mistake."""
    text = CODE.format(head="", code=code)
    assert not findings(text, "HS166")
    assert not findings(text, "HS277")


@pytest.mark.parametrize(
    ("condition", "count"), [("args.bits in [4, 8]", 1), ("args.bits == 4", 1), ("args.bits == 16", 0)]
)
def test_a_quantized_model_in_a_file_for_deepspeed(condition, count):
    """Where the model is quantized, DeepSpeed is less likely than a single GPU; else the file that names it is believed."""
    code = f"{ENABLE}if {condition}:\n    {CAST}"
    found = findings(CODE.format(head="from deepspeed import zero", code=code), "HS166")
    assert len(found) == count
    assert all("without DeepSpeed" in f.message for f in found)


PARSED = """\
# trains with DeepSpeed or FSDP
import torch
from dataclasses import dataclass
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
{field}
args = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]
dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=dtype{options})
Trainer(model=model, args=args, train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (", device_map='auto'", 1),
        (", device_map='balanced'", 1),
        (", device_map=None", 0),
        (", device_map='auto' if args.fsdp else None", 0),
        (", device_map={'': 0}", 0),
        ("", 0),
    ],
)
def test_a_model_that_every_run_spreads_over_the_gpus(options, count):
    """`device_map="auto"` excludes DeepSpeed and FSDP, whatever a comment says."""
    assert len(findings(PARSED.format(field="", options=options), "HS277")) == count


FIELD = """\

@dataclass
class Arguments(TrainingArguments):
    deepspeed: str = None

"""


@pytest.mark.parametrize(
    ("use", "count"), [("", 1), ("build(fsdp=args.fsdp)", 1), ("args.fsdp = 'full_shard'", 0), ("FSDP(model)", 0)]
)
def test_options_of_the_trainer_that_are_passed_on(use, count):
    """The file's own `deepspeed` is None by default, and `args.fsdp` empty: a mention of both asks for no engine."""
    text = PARSED.format(field=FIELD, options="").replace("DeepSpeed or FSDP", "a GPU")
    text = text.replace("TrainingArguments).parse", "Arguments).parse").replace(
        "Trainer(model", f"{use}\nTrainer(model"
    )
    assert len(findings(text, "HS277")) == count
