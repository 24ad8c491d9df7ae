"""A loop that freezes only the parameters of some names leaves the rest to be trained in 16 bits."""

import pytest

from check_scripts import findings

SCRIPT = """\
import torch
from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments

def load(name):
    model = AutoModelForImageTextToText.from_pretrained(name, dtype=torch.bfloat16)
    for n, p in model.named_parameters():
        {body}
    return model

args = TrainingArguments("out", bf16=True, learning_rate=1e-5)
Trainer(model=load("Qwen/Qwen2.5-VL-3B-Instruct"), args=args, train_dataset=data).train()
"""
FREEZE = "if {test}:\n            p.requires_grad = False\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (FREEZE.format(test="'visual' in n and 'merger' not in n"), True),
        (FREEZE.format(test="n.startswith(('visual.', 'audio_tower.'))"), True),
        (FREEZE.format(test="any(part in n for part in ('visual', 'audio'))") + "        print(n)", True),
        (FREEZE.format(test="'visual' in n") + "        else:\n            p.requires_grad = True", True),
        (FREEZE.format(test="'lora' not in n"), False),
        (FREEZE.format(test="not any(part in n for part in ('lora', 'adapter'))"), False),
        (FREEZE.format(test="'visual' in n or 'model' in n"), False),
        ("p.requires_grad = False\n        " + FREEZE.format(test="'visual' in n"), False),
    ],
)
def test_the_layers_of_other_names_are_trained(body, expected):
    """A name that is contained narrows what is frozen; one that is excluded, or that every parameter has, does not."""
    assert bool(findings(SCRIPT.format(body=body), "HS277")) == expected
