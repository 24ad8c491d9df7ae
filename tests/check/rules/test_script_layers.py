"""HS151: layers that a loop over the modules of a model casts to 16 bits, or that classes of the file create so."""

import pytest

from check_scripts import findings

LOOP = """\
import torch
from torch import nn
{head}
model = GPT().cuda()
{cast}
optimizer = {optimizer}(model.parameters(), lr=1e-3)
for x, y in loader:
    loss = model(x, y)
    loss.backward()
    optimizer.step()
"""
OWN = "class Muon(torch.optim.Optimizer):\n    def step(self):\n        for p in self.params:\n            p.add_({update})\n"
EACH = "for m in model.modules():\n    if isinstance(m, {layers}):\n        {cast}"


def text(cast, optimizer="torch.optim.AdamW", head=""):
    return LOOP.format(cast=cast, optimizer=optimizer, head=head)


@pytest.mark.parametrize(
    ("layers", "cast"),
    [
        ("nn.Linear", "m.bfloat16()"),
        ("(nn.Embedding, nn.Linear)", "m.weight.data = m.weight.data.bfloat16()"),
        ("(nn.Linear, nn.Conv2d)", "m.to(torch.bfloat16)"),
        ("nn.Linear", "m.weight.data = m.weight.to(dtype=torch.bfloat16)"),
    ],
)
def test_layers_that_a_plain_optimizer_updates(layers, cast):
    """The weights of these layers are 16-bit, and the optimizer has no other copy."""
    body = EACH.format(layers=layers, cast=cast)
    assert [f.line for f in findings(text(body), "HS151")] == [7]
    own = OWN.format(update="p.grad")
    assert len(findings(text(body, "Muon", own), "HS151")) == 1


@pytest.mark.parametrize(
    ("body", "head", "optimizer"),
    [
        (EACH.format(layers="nn.Embedding", cast="m.bfloat16()"), "", "torch.optim.AdamW"),
        (EACH.format(layers="nn.Linear", cast="m.float()"), "", "torch.optim.AdamW"),
        (EACH.format(layers="nn.Linear", cast="m.bias.data = m.bias.data.float()"), "", "torch.optim.AdamW"),
        (EACH.format(layers="nn.Linear", cast="m.bfloat16()").replace("model.", "teacher."), "", "torch.optim.AdamW"),
        (EACH.format(layers="nn.Linear", cast="m.bfloat16()") + "\nfreeze_backbone(model)", "", "torch.optim.AdamW"),
        (EACH.format(layers="nn.Linear", cast="m.bfloat16()"), OWN.format(update="self.mantissa[p]"), "Muon"),
        (EACH.format(layers="nn.Linear", cast="m.bfloat16()"), "from halfstep.optim import AdamW", "AdamW"),
    ],
)
def test_other_layers_models_and_optimizers_are_silent(body, head, optimizer):
    """Embeddings alone are a choice; frozen layers are not trained; an optimizer may keep the low bits."""
    assert findings(text(body, optimizer, head), "HS151") == []


CLASSES = """\
class Block(nn.Module):
    def __init__(self, linear=None):
        super().__init__()
        {layer}
class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
"""


@pytest.mark.parametrize(
    ("layer", "count"),
    [
        ("self.w = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))", 1),
        ("self.w = nn.Parameter(torch.randn(4, 4).bfloat16())", 1),
        ("w = torch.empty(4, 4, dtype=torch.bfloat16)\n        self.w = nn.Parameter(w)", 1),
        ("self.fc = nn.Linear(4, 4, dtype=torch.bfloat16)", 1),
        ("self.w = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16), requires_grad=False)", 0),
        ("self.w = nn.Parameter(torch.zeros(4, 4))", 0),
        ("self.register_buffer('w', torch.zeros(4, 4, dtype=torch.bfloat16))", 0),
    ],
)
def test_weights_that_a_part_of_the_model_creates(layer, count):
    """Parameters have the dtype of their tensor, also in a class that another one creates."""
    assert len(findings(text("", head=CLASSES.format(layer=layer)), "HS151")) == count


ADAPTER = """\
import torch
from torch import nn
from transformers import AutoModelForCausalLM
class LoRALinear(nn.Module):
    def __init__(self, linear, rank):
        super().__init__()
        self.linear = linear
        dtype = linear.weight.dtype
        {weights}
model = AutoModelForCausalLM.from_pretrained(name{load})
model.requires_grad_(False)
for layer in model.model.layers:
    layer.q_proj = LoRALinear(layer.q_proj, 8)
{after}
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for x in loader:
    model(x).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOW = ", dtype=torch.bfloat16"
LIFT = "for p in model.parameters():\n    if p.requires_grad:\n        p.data = p.data.float()"


@pytest.mark.parametrize(
    ("weights", "load", "after", "count"),
    [
        ("self.a = nn.Parameter(torch.zeros(rank, 64, dtype=torch.bfloat16))", LOW, "", 1),
        ("self.a = nn.Linear(64, rank, bias=False, dtype=dtype)", LOW, "", 1),
        ("self.a = nn.Parameter(torch.zeros(rank, 64, dtype=linear.weight.dtype))", LOW, "", 1),
        ("self.a = nn.Linear(64, rank, bias=False)", LOW, "", 0),
        ("self.a = nn.Linear(64, rank, bias=False, dtype=dtype)", "", "", 0),
        ("self.a = nn.Linear(64, rank, bias=False, dtype=dtype)", f"{LOW}, quantization_config=four_bits", "", 0),
        ("self.a = nn.Linear(64, rank, bias=False, dtype=dtype)", LOW, LIFT, 0),
    ],
)
def test_adapters_that_a_class_of_the_file_creates(weights, load, after, count):
    """In 16 bits, or in the dtype of a layer that is loaded so; PEFT would keep them in float32."""
    assert len(findings(ADAPTER.format(weights=weights, load=load, after=after), "HS151")) == count


CASTS = "unet, encoder = UNet(), Encoder()\nparts = {parts}\nfor {name} in {each}:\n    {cast}"


@pytest.mark.parametrize(
    ("parts", "name", "each", "cast", "count"),
    [
        ("[unet, encoder]", "m", "parts", "m.to('cuda', torch.bfloat16)", 1),
        ("{'unet': unet, 'encoder': encoder}", "m", "parts.values()", "m.bfloat16()", 1),
        ("{'unet': unet, 'encoder': encoder}", "k, m", "parts.items()", "if m is not None: m.bfloat16()", 1),
        ("[encoder]", "m", "parts", "m.bfloat16()", 0),
        ("{'unet': unet, 'encoder': encoder}", "k, m", "parts.items()", "if k != 'unet': m.bfloat16()", 0),
        ("[unet, encoder]", "m", "parts", "m.to('cuda')", 0),
    ],
)
def test_models_of_a_list_or_dictionary(parts, name, each, cast, count):
    """A loop casts each of them, unless it chooses."""
    setup = CASTS.format(parts=parts, name=name, each=each, cast=cast) + "\nmodel = unet"
    assert len(findings(text(setup).replace("model = GPT().cuda()\n", ""), "HS151")) == count


SKIPPING = """\
import torch
def prepare(model):
    for name, p in model.named_parameters():
{before}        p.data = p.data.to(torch.{dtype})
prepare(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for x in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("        if not p.requires_grad:\n            continue\n", 1),
        ("        if 'norm' in name or not p.requires_grad:\n            continue\n        print(name)\n", 1),
        (
            "        if not p.requires_grad:\n            frozen += 1\n            continue\n        count += p.numel()\n",
            1,
        ),
        ("        if p.requires_grad:\n            continue\n", 0),
        ("        if 'norm' in name:\n            continue\n", 0),
        ("        p.requires_grad = False\n", 0),
    ],
)
def test_a_loop_that_skips_what_is_frozen_casts_what_is_trained(before, expected):
    """`if not p.requires_grad: continue` before a cast is the same as the cast under `if p.requires_grad:`."""
    assert len(findings(SKIPPING.format(before=before, dtype="bfloat16"), "HS151")) == expected
    assert findings(SKIPPING.format(before=before, dtype="float32"), "HS151") == []
