"""HS151, HS153 and HS199: weights in a dtype that a field of a configuration names, models of a list, parameters that a model lists."""

import pytest

from check_scripts import findings
from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings
from halfstep.check.runner import check_document
from halfstep.check.select import Selection

CONFIGURED = """\
import torch
from accelerate import Accelerator
from dataclasses import dataclass

def dtype_of(value):
    table = {{"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}}
    return table[str(value).lower()]

@dataclass
class Config:
    weights: torch.dtype
    mixed_precision: str

    @classmethod
    def load(cls, data):
        return cls(weights={weights}, mixed_precision=data["mixed_precision"])

class Loop:
    def __init__(self, config):
        self.cfg = config
        self.accelerator = Accelerator(mixed_precision=config.model.mixed_precision)
        self.net = self.load()
        self.optimizer = torch.optim.AdamW(self.groups())
        self.net, self.optimizer = self.accelerator.prepare(self.net, self.optimizer)

    def load(self):
        cfg = self.cfg.model
        return Net().to(cfg.weights)

    def groups(self):
        {modules}
        params = []
        for module in modules:
            for name, p in module.named_parameters():
                params.append(p)
        return params

    def step(self, x):
        self.accelerator.backward(self.net(x).mean())
        self.optimizer.step()
"""
CHOSEN = 'dtype_of(data["weights"])'


def reported(text):
    """The codes of the findings about weights, each value of a setting included."""
    document = read_document("train.py", text.encode(), "python")
    codes = {f.code for f in check_document(document, Settings(), Selection())}
    return codes & {"HS151", "HS161", "HS199"}


@pytest.mark.parametrize("modules", ["modules = [self.net]", "modules = []\n        modules.append(self.net)"])
def test_weights_that_a_field_chooses_are_reported(modules):
    """The dtype comes from where the class is created, and the precision of the Accelerator from another option."""
    assert reported(CONFIGURED.format(weights=CHOSEN, modules=modules)) == {"HS151", "HS199"}


@pytest.mark.parametrize(
    ("weights", "modules"),
    [
        ("torch.float32", "modules = [self.net]"),
        (CHOSEN, "modules = [self.other]"),
        ("load_dtype(data)", "modules = [self.net]"),
    ],
)
def test_float32_weights_and_other_models_are_silent(weights, modules):
    """The field is float32, or the text does not show what it is, or another model is trained."""
    assert reported(CONFIGURED.format(weights=weights, modules=modules)) == set()


LISTED = """\
import torch
model = Policy(cfg)
model.{prepare}
model.to(torch.bfloat16)
optimizer = torch.optim.AdamW({params}, lr=1e-4)
for x in loader:
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("prepare", "params", "count"),
    [
        ("freeze_unused_weights()", "model.expert_parameters", 1),
        ("load(path)", "model.expert_params", 1),
        ("freeze_unused_weights()", "model.parameters()", 0),
        ("freeze_unused_weights()", "model.lora_parameters", 0),
        ("upcast_trained_weights()", "model.expert_parameters", 0),
        ("freeze_unused_weights()", "model.num_parameters()", 0),
    ],
)
def test_parameters_that_a_model_lists_are_trained(prepare, params, count):
    """What is frozen is not among them; adapters, and weights that a method of another file casts, may be float32."""
    assert len(findings(LISTED.format(prepare=prepare, params=params), "HS151")) == count
