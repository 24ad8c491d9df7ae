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


@pytest.mark.parametrize(
    ("text", "code", "num"),
    [
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
