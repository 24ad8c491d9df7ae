"""16-bit weights that are chosen in another file, by a checkpoint or by Unsloth, and how they reach an optimizer or a Trainer."""

import pytest

from check_scripts import findings

STARRED = """\
import torch
from helpers import *

model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.bfloat16)
for name, p in model.named_parameters():
    p.requires_grad = any(part in name for part in ["gate_proj", "up_proj"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in loader:
    model(x).loss.backward()
    optimizer.step()
"""
OWN = """\
import torch
from transformers import AutoModelForCausalLM, Trainer

class Own(Trainer):
    def {method}(self):
        self.second = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def training_step(self, model, inputs, num_items_in_batch=None):
        model(**inputs).loss.backward()
        self.second.step()
        return 0

model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
Own(model=model, train_dataset=data).train()
"""
RESOLVED = """\
import torch
from helpers import resolve_dtype
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

def main(args):
    dtype = resolve_dtype(args.dtype)
    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=dtype)
    arguments = TrainingArguments("out", bf16={bf16})
    Trainer(model=model, args=arguments, train_dataset=data).train()
"""
WHISPER = """\
import argparse
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, WhisperForConditionalGeneration

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="{name}")
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--freeze_encoder_layers", type=int, default=None)
args = parser.parse_args()
model = WhisperForConditionalGeneration.from_pretrained(args.model)
if args.freeze_encoder_layers is not None:
    model.freeze_encoder()
arguments = Seq2SeqTrainingArguments("out", fp16=args.fp16)
Seq2SeqTrainer(model=model, args=arguments, train_dataset=data).train()
"""


def codes(text):
    """The findings on weights in a script, as (code, line, severity)."""
    rules = ("HS151", "HS152", "HS166", "HS277")
    return [(f.code, f.line, f.severity) for rule in rules for f in findings(text, rule)]


def test_an_auto_class_of_a_star_import_loads_the_whole_model():
    """`AutoModel...` from `import *` is of transformers: the layers that a loop chooses have the dtype of the load."""
    assert codes(STARRED) == [("HS151", 4, "warning")]


@pytest.mark.parametrize(
    "use",
    ["for name, m in trainable_modules(model):\n    print(name)", "names = [n for n, _ in trainable_modules(model)]"],
)
def test_a_function_that_is_iterated_changes_no_weights(use):
    """A function that lists modules, by its place after `in`, does not decide what is trained in which dtype."""
    assert codes(STARRED.replace("for x in loader", f"{use}\nfor x in loader")) == [("HS151", 4, "warning")]
    assert codes(STARRED.replace("for x in loader", "model = trainable_modules(model)\nfor x in loader")) == []


def test_an_optimizer_of_a_trainer_subclass_updates_the_model_that_it_gets():
    """`self.model` of a Trainer of the file is what it is created with; `create_optimizer` replaces the Trainer's own."""
    assert codes(OWN.format(method="setup")) == [("HS151", 13, "warning")]
    assert codes(OWN.format(method="create_optimizer")) == []


def test_a_comparison_shows_what_a_resolved_dtype_may_be():
    """A dtype that another file resolves may be the 16-bit format that the function compares it with."""
    assert codes(RESOLVED.format(bf16="dtype == torch.bfloat16")) == [("HS277", 7, "advice")]
    assert codes(RESOLVED.format(bf16="args.bf16")) == []


def test_checkpoints_that_are_stored_in_float16_are_trained_so():
    """whisper-large-v3 is stored in float16, which transformers 5 keeps; a Trainer with fp16 rejects it, and whisper-small is float32."""
    assert codes(WHISPER.format(name="openai/whisper-large-v3-turbo")) == [
        ("HS152", 9, "warning"),
        ("HS166", 12, "error"),
    ]
    assert codes(WHISPER.format(name="openai/whisper-small")) == []
