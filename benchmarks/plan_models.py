"""The models whose memory is measured and predicted: plain torch, and some of transformers and timm if installed.

Each case is a function without arguments that returns a Job; its data are random batches of the right shapes. Sizes are
chosen so that a step is short on a large GPU and activations are a large part of its memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.jobs.job import Job
from halfstep.jobs.targets import load_target

__all__ = ["CASES", "available_cases"]


def _batches(make: Callable[[int], Any]) -> Callable[..., Iterator[Any]]:
    def data(batch_size: int) -> Iterator[Any]:
        yield make(batch_size)

    return data


def _adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


def _images(size: int, num_classes: int = 1000) -> Callable[[int], Any]:
    return lambda n: (torch.randn(n, 3, size, size), torch.randint(num_classes, (n,)))


def _tokens(length: int, vocab: int) -> Callable[[int], Any]:
    return lambda n: (torch.randint(vocab, (n, length)), torch.randint(vocab, (n, length)))


def _classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _next_token(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[1].reshape(-1))


def _job(model: Callable[[], nn.Module], batch: Callable[[int], Any], loss: Callable[..., Tensor], name: str) -> Job:
    return Job(model=model, data=_batches(batch), loss=loss, optimizer=_adamw, name=name)


# --- convolutions ---------------------------------------------------------------------------------------------------


class _Bottleneck(nn.Module):
    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        same = stride == 1 and in_channels == out
        self.skip = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(in_channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x), inplace=True)


def resnet50() -> nn.Module:
    """ResNet-50: 25,557,032 parameters (He et al. 2015)."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    in_channels = 64
    for depth, width, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for index in range(depth):
            layers.append(_Bottleneck(in_channels, width, stride if index == 0 else 1))
            in_channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, 1000))


def _double(in_channels: int, out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU(),
        nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """A U-Net with group norm, as in segmentation and diffusion models."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(_double(i, o) for i, o in zip([3, *widths], widths, strict=False))
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.merge = nn.ModuleList(_double(2 * w, w) for w in reversed(widths[:-1]))
        self.out = nn.Conv2d(width, 21, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else self.pool(x))
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), skips.pop()], dim=1))
        return self.out(x)


class _ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.gamma = nn.Parameter(torch.full((dim,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = (self.gamma * self.mlp(self.norm(y))).permute(0, 3, 1, 2)
        return x + y


class _ChannelsNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext_tiny() -> nn.Module:
    """ConvNeXt-T (Liu et al. 2022)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), _ChannelsNorm(96)]
    dims = (96, 192, 384, 768)
    for index, (dim, depth) in enumerate(zip(dims, (3, 3, 9, 3), strict=True)):
        if index:
            layers += [_ChannelsNorm(dims[index - 1]), nn.Conv2d(dims[index - 1], dim, 2, 2)]
        layers += [_ConvNeXtBlock(dim) for _ in range(depth)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(768), nn.Linear(768, 1000))


# --- tokens ---------------------------------------------------------------------------------------------------------


class _Layer(nn.Module):
    def __init__(self, dim: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + F.dropout(self.proj(y.transpose(1, 2).reshape(b, s, d)), self.dropout, self.training)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A GPT-2-like decoder; with `recompute` each layer's activations are recomputed in the backward pass."""

    def __init__(self, vocab: int, length: int, dim: int, depth: int, heads: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.layers = nn.ModuleList(_Layer(dim, heads, causal=True, dropout=0.1) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    """A BERT-like encoder of torch's own layers, with dropout and a masked-language head."""

    def __init__(self, vocab: int = 30522, length: int = 512, dim: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, dim // 64, 4 * dim, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.layers(x))


class _MixerBlock(nn.Module):
    def __init__(self, dim: int, tokens: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.across = nn.Sequential(nn.Linear(tokens, dim // 2), nn.GELU(), nn.Linear(dim // 2, tokens))
        self.within = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer B/16 (Tolstikhin et al. 2021)."""

    def __init__(self, dim: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 16, 16)
        self.blocks = nn.Sequential(*(_MixerBlock(dim, 196) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class LanguageLSTM(nn.Module):
    """A word-level LSTM language model of three layers."""

    def __init__(self, vocab: int = 10000, dim: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, num_layers=3, batch_first=True, dropout=0.2)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


# --- other libraries ------------------------------------------------------------------------------------------------


def _hugging_face(kind: str, length: int, **settings: Any) -> Job:
    import transformers

    config = getattr(transformers, f"{kind.split(':', maxsplit=1)[0]}Config")(**settings)
    model = getattr(transformers, kind.replace(":", ""))
    vocab = config.vocab_size
    return Job(
        model=lambda: model(config),
        data=_batches(_tokens(length, vocab)),
        loss=lambda model, batch: model(input_ids=batch[0], labels=batch[1]).loss,
        optimizer=_adamw,
        name=kind.replace(":", ""),
    )


def _library(target: str) -> Job:
    return load_target(target).job


# name -> (needs, the two batch sizes, job)
CASES: dict[str, tuple[str, tuple[int, int], Callable[[], Job]]] = {
    "vit_s_16": ("", (64, 256), lambda: load_target("vit_s_16").job),
    "vit_b_16": ("", (32, 128), lambda: load_target("vit_b_16").job),
    "vit_l_16": ("", (16, 64), lambda: load_target("vit_l_16").job),
    "vit_h_14": ("", (8, 24), lambda: load_target("vit_h_14").job),
    "resnet50": ("", (32, 128), lambda: _job(resnet50, _images(224), _classify, "resnet50")),
    "unet": (
        "", (4, 16),
        lambda: _job(UNet, lambda n: (torch.randn(n, 3, 256, 256), torch.randint(21, (n, 256, 256))), _classify, "unet"),
    ),
    "gpt": ("", (4, 16), lambda: _job(lambda: Decoder(50257, 1024, 768, 12, 12), _tokens(1024, 50257), _next_token, "gpt")),
    "gpt_checkpointed": (
        "", (4, 16),
        lambda: _job(
            lambda: Decoder(50257, 1024, 768, 12, 12, recompute=True), _tokens(1024, 50257), _next_token, "gpt_checkpointed"
        ),
    ),
    "bert": ("", (8, 32), lambda: _job(Encoder, _tokens(512, 30522), _next_token, "bert")),
    "convnext_tiny": ("", (32, 96), lambda: _job(convnext_tiny, _images(224), _classify, "convnext_tiny")),
    "mixer_b_16": ("", (32, 128), lambda: _job(Mixer, _images(224), _classify, "mixer_b_16")),
    "lstm": ("", (32, 96), lambda: _job(LanguageLSTM, _tokens(128, 10000), _next_token, "lstm")),
    "hf_gpt2": ("transformers", (4, 12), lambda: _hugging_face("GPT2:LMHeadModel", 1024)),
    "hf_bert": ("transformers", (8, 32), lambda: _hugging_face("Bert:ForMaskedLM", 512)),
    "hf_llama": (
        "transformers", (4, 8),
        lambda: _hugging_face(
            "Llama:ForCausalLM", 1024, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12,
            num_attention_heads=16, num_key_value_heads=4, vocab_size=32000,
        ),
    ),
    "hf_t5": ("transformers", (4, 16), lambda: _hugging_face("T5:ForConditionalGeneration", 512, decoder_start_token_id=0, pad_token_id=0)),
    "timm_efficientnet_b0": ("timm", (64, 128), lambda: _library("timm:efficientnet_b0")),
    "timm_swin_tiny": ("timm", (16, 64), lambda: _library("timm:swin_tiny_patch4_window7_224")),
}  # fmt: skip


def available_cases() -> dict[str, tuple[tuple[int, int], Callable[[], Job]]]:
    """The cases whose libraries are installed."""
    return {
        name: (batches, job)
        for name, (needs, batches, job) in CASES.items()
        if not needs or importlib.util.find_spec(needs) is not None
    }
