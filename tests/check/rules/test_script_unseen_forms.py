"""Mistakes in forms that the rules' own examples do not have: other names, other places, one step further away."""

import pytest

from check_scripts import findings

UNREAD = """\
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
args = parser.parse_args()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
"""
QUERY = "import torch\nuse_bf16 = torch.cuda.is_bf16_supported\n{use}\n"
FORWARDED = """\
import torch
def project(features, k):
    u, s, v = torch.linalg.svd(features)
    return u[:, :k]
print(project({value}, 3))
"""
ADVERSARIAL = """\
import torch
from torch import nn
class Gan:
    def __init__(self, disc):
        self.disc = disc
        self.adv = nn.{loss}()
    def real(self, x):
        return self.adv(self.disc(x), torch.ones(len(x)))
    def step(self, x):
        with torch.autocast("cuda"):
            loss = self.real(x)
        return loss
"""
MASKED = """\
import torch
class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fill = {fill}
    def forward(self, q, k, mask):
        scores = q @ k.transpose(-1, -2)
        return scores.masked_fill(mask, self.fill)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
    def forward(self, q, k, mask):
        return self.attention(q, k, mask)
net = Net().cuda(){cast}
"""
STORED = """\
import torch
from torch.cuda.amp import autocast
class Learner:
    def __init__(self, net, dtype=torch.bfloat16):
        self.net, self.dtype = net, dtype
        self.amp_dtype = dtype
    def loss(self, x):
        with autocast({argument}):
            return self.net(x).mean()
"""
EVALUATED = """\
import torch
from transformers import AutoModelForCausalLM
class Judge:
    def __init__(self, name):
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).cuda()
        self.ce = torch.nn.CrossEntropyLoss()
    def score(self, ids, labels):
        out = self.model(ids).logits
        return self.ce(out{cast}.view(-1, 10), labels.view(-1))
"""
DEVICES = """\
import torch
def context(device):
    if device == "cuda":
        return torch.cuda.amp.autocast()
    return torch.amp.autocast({device}, dtype=torch.bfloat16)
"""
ACCUMULATED = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps={steps})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(x))
        if {test}:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
"""
ADAPTED = """\
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
base = AutoModelForCausalLM.from_pretrained("x", {options})
{prepare}model = get_peft_model(base, config)
for ids, labels in loader:
    logits = model(ids).logits
    torch.nn.functional.cross_entropy(logits.view(-1, n), labels.view(-1)).backward()
    optimizer.step()
"""
LIBRARY = """\
import torch
from transformers import AutoModelForCausalLM
def load_base(name):
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    return model.cuda()
def load_saved(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.{dtype})
    return model.cuda()
def train(model, optimizer, loader):
    for ids, labels in loader:
        logits = model(ids).logits
        torch.nn.functional.cross_entropy(logits.view(-1, n), labels.view(-1)).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("text", "code", "num"),
    [
        (DEVICES.format(device="'mps'"), "HS190", 1),
        (DEVICES.format(device="'cuda'"), "HS190", 0),
        (DEVICES.format(device="device"), "HS190", 0),
        (ACCUMULATED.format(steps="4", test="limit > 0"), "HS189", 1),
        (ACCUMULATED.format(steps="args.steps", test="limit > 0"), "HS189", 1),
        (ACCUMULATED.format(steps="1", test="limit > 0"), "HS189", 0),
        (ACCUMULATED.format(steps="4", test="accelerator.sync_gradients"), "HS189", 0),
        (ADAPTED.format(options="quantization_config=BitsAndBytesConfig(load_in_4bit=True)", prepare=""), "HS154", 1),
        (ADAPTED.format(options="dtype=torch.bfloat16", prepare=""), "HS154", 1),
        (ADAPTED.format(options="dtype=torch.float32", prepare=""), "HS154", 0),
        (
            ADAPTED.format(
                options="quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
                prepare="base = prepare_model_for_kbit_training(base)\n",
            ),
            "HS154",
            0,
        ),
        (LIBRARY.format(dtype="bfloat16"), "HS154", 1),
        (LIBRARY.format(dtype="float32"), "HS154", 0),
        (LIBRARY.format(dtype="bfloat16") + "train(build(), optimizer, loader)\n", "HS154", 0),
        (UNREAD, "HS139", 1),
        (UNREAD.replace("model(x)", "model(x, args.fp16)"), "HS139", 0),
        (QUERY.format(use="args = TrainingArguments('out', bf16=use_bf16)"), "HS269", 1),
        (QUERY.format(use="args = TrainingArguments('out', bf16=use_bf16())"), "HS269", 0),
        (QUERY.format(use="check(use_bf16)"), "HS269", 0),
        ("import torch\noptions = {'bf16': torch.cuda.is_bf16_supported}\n", "HS269", 1),
        (FORWARDED.format(value="x.half()"), "HS158", 1),
        (FORWARDED.format(value="x.half().float()"), "HS158", 0),
        (FORWARDED.format(value="x.half()") + "print(project(y, 3))\n", "HS158", 0),
        (ADVERSARIAL.format(loss="BCELoss"), "HS146", 1),
        (ADVERSARIAL.format(loss="BCEWithLogitsLoss"), "HS146", 0),
        (MASKED.format(fill="-1e9", cast=".half()"), "HS163", 1),
        (MASKED.format(fill="-1e4", cast=".half()"), "HS163", 0),
        (MASKED.format(fill="-1e9", cast="").replace("import torch", "import torch  # float16"), "HS163", 0),
        (EVALUATED.format(cast=""), "HS154", 1),
        (EVALUATED.format(cast=".float()"), "HS154", 0),
        (STORED.format(argument="self.amp_dtype"), "HS143", 1),
        (STORED.format(argument="dtype=self.amp_dtype"), "HS143", 0),
        ("import torch  # float16\nNAME = 'fp16'\ndtype = getattr(torch, NAME)\n", "HS267", 1),
        ("import torch  # float16\nNAME = 'float16'\ndtype = getattr(torch, NAME)\n", "HS267", 0),
        ("import torch  # float16\ndtype = getattr(torch, 'fp16', torch.float16)\n", "HS267", 0),
    ],
)
def test_the_mistake_is_found_and_its_right_version_is_silent(text, code, num):
    """Each form is reported once, and not without the mistake."""
    assert len(findings(text, code)) == num
