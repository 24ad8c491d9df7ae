"""HS151: adapters that are layers of a model which is cast as a whole, in the style of loralib and lit-llama."""

import pytest

from check_scripts import findings

CODE = """\
import torch
import loralib as lora
from lit_model import {names}

def main():
    {code}
    optimizer = torch.optim.AdamW({params}, lr=3e-4)
    for x, y in loader:
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

main()
"""


def report(code, params="model.parameters()", names="mark_only_lora_as_trainable, mark_only_adapter_v2_as_trainable"):
    return findings(CODE.format(code=code.replace("\n", "\n    "), params=params, names=names), "HS151")


@pytest.mark.parametrize(
    ("code", "params"),
    [
        ("model = LLaMA(config).bfloat16()\nmark_only_lora_as_trainable(model)", "model.parameters()"),
        (
            "model = GPT(config)\nmodel.to(torch.bfloat16)\nlora.mark_only_lora_as_trainable(model)",
            "model.parameters()",
        ),
        (
            "model = GPT(config).cuda().to(dtype=torch.bfloat16)\nmodel.load_state_dict(torch.load(path), strict=False)\n"
            "lora.mark_only_lora_as_trainable(model, bias='lora_only')",
            "[p for p in model.parameters() if p.requires_grad]",
        ),
        (
            "with lora_layers(r=8):\n    model = GPT(config)\nmark_only_adapter_v2_as_trainable(model)\nmodel = model.bfloat16()",
            "filter(lambda p: p.requires_grad, model.parameters())",
        ),
    ],
)
def test_adapters_in_the_dtype_of_their_model(code, params):
    """Nothing keeps layers of the model in float32 when it is cast."""
    assert len(report(code, params)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "model = LLaMA(config)\nmark_only_lora_as_trainable(model)",
        "model = LLaMA(config).bfloat16()\nadd_lora_layers(model, r=8)\nmark_only_lora_as_trainable(model)",
        "model = LLaMA(config).bfloat16()\nmodel.head = lora.Linear(64, 10, r=4)\nmark_only_lora_as_trainable(model)",
        "model = LLaMA(config).bfloat16()\nmark_only_lora_as_trainable(model)\n"
        "for p in model.parameters():\n    if p.requires_grad:\n        p.data = p.data.float()",
        "model = LLaMA(config).bfloat16()\nmodel.float()\nmark_only_lora_as_trainable(model)",
        "teacher = LLaMA(config).bfloat16()\nmodel = GPT(config)\nmark_only_lora_as_trainable(model)",
    ],
)
def test_adapters_in_float32(code):
    """Layers that are attached after the cast, or cast back, are float32."""
    assert not report(code)
