"""HS165 and HS154: reductions whose input is float16 by its origin, a loaded model or a layer before a disabled region."""

import pytest

from check_scripts import findings

LOAD = """\
import torch
import torch.nn.functional as F
from transformers import CLIPModel
model = CLIPModel.from_pretrained(name, torch_dtype=torch.{dtype}).cuda()
optimizer = torch.optim.SGD(model.parameters())
for batch, labels in loader:
{body}
    loss.backward()
    optimizer.step()
"""
IMAGE = "image = model.get_image_features(batch.x)"
TEXT = "text = model.get_text_features(batch.ids)"


def reported(body, code, dtype="float16"):
    """The numbers of the lines of a loop's body where a rule is reported."""
    text = LOAD.format(dtype=dtype, body="\n".join(f"    {line}" for line in body))
    return [f.line - 6 for f in findings(text, code)]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([IMAGE, TEXT, "loss = F.cross_entropy(image @ text.t(), labels)"], [3]),
        ([IMAGE, TEXT, "loss = F.cross_entropy(model.logit_scale.exp() * image @ text.T, labels)"], [3]),
        (
            [
                IMAGE,
                "image = F.normalize(image, dim=-1)",
                "loss = F.cross_entropy(torch.matmul(image, bank) / 0.07, labels)",
            ],
            [3],
        ),
        (["image = model.encode_image(batch.x)", "image = image / image.norm(dim=-1, keepdim=True)"], []),
        (["out = model(**batch)", "loss = F.cross_entropy(out.logits_per_image, labels)"], [2]),
        (["out = model(**batch)", "loss = F.cross_entropy(out.image_embeds @ out.text_embeds.T, labels)"], [2]),
        ([IMAGE + ".float()", TEXT + ".float()", "loss = F.cross_entropy(image @ text.t(), labels)"], []),
        ([IMAGE, TEXT, "loss = F.cross_entropy((image @ text.t()).float(), labels)"], []),
        ([IMAGE, "image = head(image)", "loss = F.cross_entropy(image @ bank.t(), labels)"], []),
        ([IMAGE, TEXT, "loss = F.cross_entropy(image / text, labels)"], []),
    ],
)
def test_similarities_of_a_model_with_16_bit_weights(lines, expected):
    """A matrix product has the dtype of its factors, and a division by its own norm changes none."""
    assert reported(lines, "HS154") == expected
    assert reported(lines, "HS154", "float32") == []


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([IMAGE, "loss = (image / image.norm(dim=-1)).mean()"], [2]),
        (["out = model(**batch)", "loss = F.softmax(out.logits_per_text, dim=-1)[0].mean()"], [2]),
        ([IMAGE, "loss = (image / image.float().norm(dim=-1)).mean()"], []),
        (["with torch.no_grad():", f"    {IMAGE}", "    size = image.norm()", "loss = f(size)"], []),
    ],
)
def test_reductions_of_a_model_with_float16_weights(lines, expected):
    """Without autocast and without a cast, the norm of what such a model returns is float16 as well."""
    assert reported(lines, "HS165") == expected
    assert reported(lines, "HS165", "bfloat16") == []


ATTENTION = """\
import torch, math
import torch.nn.functional as F
from torch import nn
class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, dim * 3)
        self.norm = nn.LayerNorm(dim)
        self.scale = {scale}
        self.head_dim = dim
    def forward(self, x):
        {first}
        with torch.autocast("cuda", enabled=False):
            attn = {scores}
            attn = {softmax}
        return attn @ v
scaler = torch.amp.GradScaler("cuda")
model = Attention(64)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.{dtype}):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
SPLIT = "qkv = self.qkv(x).reshape(3, 4, -1).permute(1, 0, 2)\n        q, k, v = qkv[0], qkv[1], qkv[2]"
CHUNK = "q, k, v = self.qkv(x).chunk(3, dim=-1)"


@pytest.mark.parametrize(
    ("first", "scores", "softmax", "scale", "dtype", "is_reported"),
    [
        (SPLIT, "(q @ k.transpose(-2, -1)) * self.head_dim ** -0.5", "F.softmax(attn, dim=-1)", "1", "float16", True),
        (CHUNK, "torch.matmul(q, k.mT) / math.sqrt(self.head_dim)", "attn.softmax(-1)", "1", "float16", True),
        (CHUNK, "q @ k.mT * self.scale", "attn.softmax(-1)", "dim ** -0.5", "float16", True),
        (CHUNK, "q.float() @ k.float().mT * self.scale", "attn.softmax(-1)", "dim ** -0.5", "float16", False),
        (CHUNK, "q @ k.mT * self.scale", "attn.float().softmax(-1)", "dim ** -0.5", "float16", False),
        (CHUNK, "q @ k.mT * self.scale", "F.softmax(attn, -1, dtype=torch.float32)", "dim ** -0.5", "float16", False),
        (CHUNK, "q @ k.mT * self.scale", "attn.softmax(-1)", "nn.Parameter(torch.ones(dim))", "float16", False),
        (CHUNK, "q @ k.mT * self.scale", "attn.softmax(-1)", "dim ** -0.5", "bfloat16", False),
        ("q = k = v = self.norm(x)", "q @ k.mT * self.scale", "attn.softmax(-1)", "dim ** -0.5", "float16", False),
        ("q = k = v = x", "q @ k.mT * self.scale", "attn.softmax(-1)", "dim ** -0.5", "float16", False),
    ],
)
def test_a_disabled_region_casts_nothing_back(first, scores, softmax, scale, dtype, is_reported):
    """What a linear layer returns under the outer region stays float16 in the inner one, unless it is cast."""
    text = ATTENTION.format(first=first, scores=scores, softmax=softmax, scale=scale, dtype=dtype)
    assert [f.line for f in findings(text, "HS165")] == [15 + first.count("\n")] * is_reported


HELPER = """\
import torch
import torch.nn.functional as F
def forward_batch(model, x):
    {lines}
    return {returned}
def train(model, loader, optimizer, scaler):
    for x, y, t in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            logits = forward_batch(model, x)
        loss = {loss}
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("lines", "returned", "loss", "expected"),
    [
        ("x = x.cuda()", "model(x)", "F.cross_entropy(logits, y)", [11]),
        ("if cached: return model.features(x)", "model(x)", "F.cross_entropy(logits / 2, y)", [11]),
        ("x = x.cuda()", "model(x).float()", "F.cross_entropy(logits, y)", []),
        ("x = x.cuda()", "model(x)", "F.cross_entropy(logits.float(), y)", []),
        ("if cached: return bank(x)", "model(x)", "F.cross_entropy(logits, y)", []),
    ],
)
def test_a_function_that_returns_what_a_model_does(lines, returned, loss, expected):
    """A region around the call of such a function is one around the model; which class the model has is not known."""
    text = HELPER.format(lines=lines, returned=returned, loss=loss)
    assert [(f.line, f.severity) for f in findings(text, "HS154")] == [(line, "advice") for line in expected]
