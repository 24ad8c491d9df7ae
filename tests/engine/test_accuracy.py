"""How accurate the presets are: gradients compared with float64, long sums, large vocabularies, and the range of fp16.

The sizes on a CPU are tiny, because one without 16-bit arithmetic takes long for 16-bit products; on a GPU they are those of
real models.
"""

import copy
import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.engine.engine import Engine
from halfstep.engine.region import compute_region
from halfstep.precision.formats import COMPUTE_DTYPES

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)
every_compute = pytest.mark.parametrize("compute", ["bf16", "fp16"])
every_rule = pytest.mark.parametrize("lean", [False, True], ids=["autocast", "lean"])
UNIT = {"bf16": 2**-8, "fp16": 2**-11}  # half an ulp of 1
SCALE = 1024.0  # fp16's gradients are computed with this loss scale, as in training
MARGIN = 1.10  # how much more error than a pure 16-bit model a lean one may have


# --- gradients of whole models --------------------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm transformer block with torch's attention."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A pre-norm decoder."""

    def __init__(self, width, depth, vocabulary, block=Block):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(block(width, max(2, width // 64)) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.tokens(x))))


class HandWritten(nn.Module):
    """What people write themselves: RMSNorm with pow and rsqrt, attention with softmax, GELU with a cube."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.scale = heads, nn.Parameter(torch.ones(width))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def rms_norm(self, x):
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def forward(self, x):
        q, k, v = self.qkv(self.rms_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        h = self.up(self.rms_norm(x))
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h.pow(3))))
        return x + self.down(h)


def library(name):
    """A library with models; skips where it or something that it imports is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"Requires: [{name}] ({error})")


def gpt2(width, depth, vocabulary, length):
    """transformers' GPT-2."""
    config = library("transformers").GPT2Config(
        vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=depth, n_head=max(2, width // 64), resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return library("transformers").GPT2LMHeadModel(config)


def llama(width, depth, vocabulary, length):
    """transformers' Llama, with grouped queries."""
    heads = max(4, width // 64)
    config = library("transformers").LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=depth, num_attention_heads=heads,
        num_key_value_heads=heads // 2, max_position_embeddings=length, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return library("transformers").LlamaForCausalLM(config)


def timm_vit(width, depth, vocabulary, length):
    """timm's ViT, whose normalisation layers are subclasses of torch's."""
    side = 4 * math.isqrt(length)
    return library("timm").create_model(
        "vit_tiny_patch16_224", img_size=side, patch_size=4, embed_dim=width, depth=depth, num_heads=max(2, width // 64),
        num_classes=vocabulary,
    )  # fmt: skip


MODELS = {
    "pre-norm decoder": lambda width, depth, vocabulary, length: Decoder(width, depth, vocabulary),
    "hand-written operations": lambda width, depth, vocabulary, length: Decoder(width, depth, vocabulary, HandWritten),
    "transformers GPT-2": gpt2,
    "transformers Llama": llama,
    "timm ViT": timm_vit,
}
SIZES = {"cpu": (16, 2, 32, 9), "cuda": (256, 12, 1024, 256)}  # width, depth, vocabulary or classes, length


def batch_of(name, size, dtype):
    """Inputs that are exact in 16 bits, and targets."""
    _, _, vocabulary, length = size
    if name == "timm ViT":
        side = 4 * math.isqrt(length)
        return torch.randn(2, 3, side, side).to(dtype).float(), torch.randint(vocabulary, (2,))
    return torch.randint(vocabulary, (2, length)), torch.randint(vocabulary, (2, length))


def loss_of(model, x, y):
    """Cross-entropy of the model's logits, in fp32 at least."""
    output = model(x)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(widen(logits).flatten(0, -2), y.flatten())


def plain_gradients(model, x, y, dtype, scale=1.0):
    """Of the model cast to `dtype`, in float64."""
    model = copy.deepcopy(model).to(dtype)
    (loss_of(model, x.to(dtype) if x.is_floating_point() else x, y) * scale).backward()
    return {n: p.grad.double() / scale for n, p in model.named_parameters() if p.grad is not None}


def lean_gradients(model, x, y, precision, scale):
    """Of the model trained by the Engine, in float64."""
    model = copy.deepcopy(model)
    engine = Engine(model, torch.optim.AdamW(model.parameters()), precision)
    with engine.forward():
        loss = loss_of(model, x, y)
    assert loss.dtype is torch.float32
    engine.backward(loss)
    gradients = {n: p.grad.double() / scale for n, p in model.named_parameters() if p.grad is not None}
    engine.close()
    return gradients


def squared_error(gradients, exact):
    """Relative to the length of the exact ones."""
    assert gradients.keys() == exact.keys()
    error = sum((gradients[n] - exact[n]).square().sum() for n in exact)
    return (error / sum(g.square().sum() for g in exact.values())).item()


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)  # of libraries
@every_device
@every_compute
@pytest.mark.parametrize("name", MODELS)
def test_lean_gradients_are_as_accurate_as_those_of_a_pure_16_bit_model(name, compute, device):
    """Relative error with respect to float64 from the same weights: at most 1.10 times as large, over two seeds."""
    dtype, size = COMPUTE_DTYPES[compute], SIZES[device]
    scale, precision = (SCALE, f"fp16-lean,loss_scale={SCALE:.0f}") if compute == "fp16" else (1.0, "bf16-lean")
    lean = pure = 0.0
    for seed in range(2):
        torch.manual_seed(seed)
        model = MODELS[name](*size)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype).float()  # so that all three have the same weights
        x, y = (tensor.to(device) for tensor in batch_of(name, size, dtype))
        model = model.to(device)
        exact = plain_gradients(model, x, y, torch.float64)
        pure += squared_error(plain_gradients(model, x, y, dtype, scale), exact)
        lean += squared_error(lean_gradients(model, x, y, precision, scale), exact)
    assert 0 < lean <= MARGIN**2 * pure


# --- attention ------------------------------------------------------------------------------------------------------


def torch_attention(q, k, v):
    """torch's fused attention."""
    return F.scaled_dot_product_attention(q, k, v)


def explicit_attention(q, k, v):
    """Scores, softmax and product as separate operations."""
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v


@pytest.mark.parametrize(
    ("device", "length"), [("cpu", 512), *(pytest.param("cuda", n, marks=pytest.mark.gpu) for n in (4096, 16384))]
)
@every_compute
@pytest.mark.parametrize("spread", [1.0, 4.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("attention", [torch_attention, explicit_attention])
def test_attention_over_many_keys_is_accurate(attention, spread, compute, device, length):
    """Result and gradients in a lean region have at most 1.10 times the error of the same operations in 16 bits alone."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 1, 16, 32), (1, 1, length, 32), (1, 1, length, 32))
    inputs = [torch.randn(s, generator=generator).to(device, COMPUTE_DTYPES[compute]) for s in shapes]
    inputs[0] *= spread
    upstream = 64 * torch.randn(shapes[0], generator=generator).to(device)  # a loss scale for fp16

    def run(dtype, lean):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in inputs]
        with compute_region(device, compute if lean else "fp32", lean=lean):
            result = attention(*leaves)
        assert result.dtype is dtype
        (result * upstream.to(dtype)).sum(dtype=torch.float64).backward()
        return [t.double() for t in (result.detach(), *(leaf.grad for leaf in leaves))]

    exact = run(torch.float64, lean=False)
    pure, lean = run(COMPUTE_DTYPES[compute], lean=False), run(COMPUTE_DTYPES[compute], lean=True)
    for mine, plain, true in zip(lean, pure, exact, strict=True):
        error = (mine - true).norm() / true.norm()
        assert error <= MARGIN * (plain - true).norm() / true.norm() + UNIT[compute] / 8
        assert error < 8 * UNIT[compute]


# --- losses over large vocabularies ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "rows"), [("cpu", 8), pytest.param("cuda", 4096, marks=pytest.mark.gpu)], ids=["cpu", "cuda"]
)
@every_compute
@every_rule
def test_cross_entropy_over_many_classes_is_that_of_fp32(lean, compute, device, rows):
    """From 16-bit logits over 32,768 classes: the loss agrees with float64 to 1e-6, its gradient to a rounding."""
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(rows, 32768, generator=generator)).to(device, COMPUTE_DTYPES[compute]).requires_grad_()
    labels = torch.randint(32768, (rows,), generator=generator).to(device)
    with compute_region(device, compute, lean=lean):
        loss = F.cross_entropy(logits, labels)
    (loss * rows * SCALE).backward()
    wide = logits.detach().double().requires_grad_()
    exact = F.cross_entropy(wide, labels)
    (exact * rows * SCALE).backward()
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=1.1 * UNIT[compute], atol=1.1 * 2**-25)


@every_device
@every_compute
@every_rule
@pytest.mark.parametrize("code", ["log_softmax(-1)", "logsumexp(-1)"])
def test_log_probabilities_over_many_classes_are_those_of_fp32(code, lean, compute, device):
    """What losses are made of is fp32 in every region: log-probabilities near -10 would have an error of 0.03 in bf16."""
    logits = torch.randn(4, 32768, generator=torch.Generator().manual_seed(0)).to(device, COMPUTE_DTYPES[compute])
    run = lambda h: h.log_softmax(-1) if code == "log_softmax(-1)" else h.logsumexp(-1)  # noqa: E731
    with compute_region(device, compute, lean=lean):
        result = run(logits)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result.double(), run(logits.double()), rtol=1e-6, atol=1e-5)


# --- the range of fp16 ----------------------------------------------------------------------------------------------


def widen(x):
    """fp32 at least."""
    return x if x.dtype is torch.float64 else x.float()


# Losses of fp16 activations x of (4, 8192) with values up to 300, in which something passes 65504.
BEYOND = {
    "squares": lambda x: x.pow(2).mean(),
    "squares as an operator": lambda x: (x**2).mean(),
    "fourth power": lambda x: (x**4).mean().sqrt(),
    "hand-written RMSNorm": lambda x: widen(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).sum(),
    "exponential": lambda x: (x / 20).exp().sum().log(),
    "expm1": lambda x: (x / 20).expm1().sum() * 1e-6,
    "cosh": lambda x: (x / 20).cosh().log().sum(),
    "reciprocal of a small number": lambda x: (x.abs() * 2**-23 + 2**-24).reciprocal().log().sum() * 1e-3,
    "sum of a long row": lambda x: x.abs().sum(-1).log().sum(),
    "sum that keeps its dimension": lambda x: widen(x / x.abs().sum(-1, keepdim=True)).square().sum().sqrt(),
    "norm of a long row": lambda x: torch.linalg.vector_norm(x, dim=-1).sum(),
    "squared norm of a long row": lambda x: x.norm(dim=-1).pow(2).sum().log(),
    "layer norm": lambda x: widen(F.layer_norm(x, (8192,))).relu().pow(3).sum(),
    "RMS norm": lambda x: widen(F.rms_norm(x, (8192,))).relu().pow(3).sum(),
    "group norm": lambda x: widen(F.group_norm(x[..., None], 2)).relu().pow(3).sum(),
    "softmax": lambda x: widen((x * 200).softmax(-1)).square().sum(),
    "log-softmax": lambda x: (x * 200).log_softmax(-1)[:, 0].sum(),
    "logsumexp": lambda x: (x * 200).logsumexp(-1).sum(),
    "cross-entropy": lambda x: F.cross_entropy(x * 200, torch.zeros(4, dtype=torch.long, device=x.device)),
    "summed cross-entropy": lambda x: F.cross_entropy(
        (x * 200).view(-1, 8), torch.zeros(4096, dtype=torch.long, device=x.device), reduction="sum"
    ),
    "mean squared error": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "summed squared error": lambda x: F.mse_loss(x, torch.zeros_like(x), reduction="sum"),
    "summed absolute error": lambda x: F.l1_loss(x, torch.zeros_like(x), reduction="sum"),
    "binary cross-entropy": lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x), reduction="sum"),
    "GELU with a cube": lambda x: widen(0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x.pow(3))))).sum(),
}


@every_device
@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
@pytest.mark.parametrize("name", BEYOND)
def test_values_beyond_fp16_are_finite(name, precision, device):
    """Loss and gradients are finite, fp32 and close to float64's, where a plain fp16 computation overflows."""
    x = torch.randn(4, 8192, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) * 100
    x = x.to(device, torch.float16)
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    with compute_region(device, "fp16", lean=precision == "fp16-lean"):
        loss = BEYOND[name](leaf)
    exact = BEYOND[name](wide)
    loss.backward()
    exact.backward()
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=2e-3, atol=1e-2)
    assert leaf.grad.isfinite().all()
    assert (leaf.grad.double() - wide.grad).norm() <= 0.01 * wide.grad.norm() + 0.01


# --- dtypes ---------------------------------------------------------------------------------------------------------

FP32_RESULTS = {
    "sum": lambda h: h.sum(),
    "sum over rows": lambda h: h.sum(0),
    "norm": lambda h: h.norm(),
    "vector norm": lambda h: torch.linalg.vector_norm(h, dim=0),
    "product": lambda h: h.prod(),
    "cumulative sum": lambda h: h.cumsum(0),
    "logsumexp": lambda h: h.logsumexp(0),
    "log-softmax": lambda h: h.log_softmax(-1),
    "cross-entropy": lambda h: F.cross_entropy(h, torch.zeros(len(h), dtype=torch.long, device=h.device)),
    "mean squared error": lambda h: F.mse_loss(h, torch.zeros_like(h)),
    "absolute error": lambda h: F.l1_loss(h, torch.zeros_like(h)),
    "smooth absolute error": lambda h: F.smooth_l1_loss(h, torch.zeros_like(h)),
    "Huber": lambda h: F.huber_loss(h, torch.zeros_like(h)),
    "binary cross-entropy with logits": lambda h: F.binary_cross_entropy_with_logits(h, torch.zeros_like(h)),
    "Kullback-Leibler": lambda h: F.kl_div(h, torch.ones_like(h), reduction="batchmean"),
    "triplets": lambda h: F.triplet_margin_loss(h, h + 1, h + 2),
    "cosine embedding": lambda h: F.cosine_embedding_loss(h, h, torch.ones(len(h), device=h.device)),
}
LEAN_RESULTS = {
    "layer norm": lambda h: F.layer_norm(h, (8,)),
    "layer norm with weights": lambda h: F.layer_norm(h, (8,), h[0], h[1]),
    "RMS norm": lambda h: F.rms_norm(h, (8,), h[0]),
    "group norm": lambda h: F.group_norm(h, 2, h[0], h[1]),
    "softmax": lambda h: h.softmax(-1),
    "square": lambda h: h.pow(2),
    "square as an operator": lambda h: h**2,
    "cube": lambda h: h.pow(3),
    "exponential": lambda h: h.exp(),
    "logarithm": lambda h: h.abs().log(),
    "inverse square root": lambda h: h.abs().rsqrt(),
    "softplus": F.softplus,
    "upsampling": lambda h: F.interpolate(h[None, None], scale_factor=2.0, mode="bilinear"),
    "GELU": F.gelu,
}


def matrix(device, compute):
    """A small matrix in 16 bits."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(device, COMPUTE_DTYPES[compute])


@every_device
@every_compute
@every_rule
@pytest.mark.parametrize("name", FP32_RESULTS)
def test_reductions_and_losses_are_fp32(name, lean, compute, device):
    """In every region, from 16-bit inputs; the value is that of the same inputs in fp32."""
    h = matrix(device, compute)
    with compute_region(device, compute, lean=lean):
        result = FP32_RESULTS[name](h)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, FP32_RESULTS[name](h.float()), rtol=1e-5, atol=1e-6)


@every_device
@pytest.mark.parametrize("name", LEAN_RESULTS)
def test_what_is_as_large_as_its_input_stays_16_bit_in_bf16_lean(name, device):
    """It gives bf16, and the value is that of the same inputs in fp32, to within an ulp (torch's rsqrt rounds twice on a CPU)."""
    h = matrix(device, "bf16")
    with compute_region(device, "bf16", lean=True):
        result = LEAN_RESULTS[name](h)
    assert result.dtype is torch.bfloat16
    # CUDA's group norm rounds mean and 1 / std of a group to the input's dtype, in a pure 16-bit model too.
    atol = 2 * UNIT["bf16"] * result.abs().max().item() if (name, device) == ("group norm", "cuda") else 1e-6
    torch.testing.assert_close(result.float(), LEAN_RESULTS[name](h.float()), rtol=2 * UNIT["bf16"], atol=atol)
