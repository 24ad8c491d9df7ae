"""Tiny models for injected faults: a ViT, a GPT, a ResNet and an LSTM, each with its batches and loss."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from halfstep.models import ViT


@dataclass(frozen=True)
class Model:
    """How to build one, draw a batch (a dict of tensors) and compute its loss."""

    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], dict[str, torch.Tensor]]
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]
    entries: dict[str, str | None]  # where each floating-point tensor of the batch enters: a module, None for the loss


class _Attention(nn.Module):
    """Causal attention by hand: its mask is -inf, as in most models, and no fault."""

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj, self.drop = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Dropout(0.1)
        self.softmax = nn.Softmax(dim=-1)
        self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (dim // self.heads) ** 0.5 + self.mask[:tokens, :tokens].to(q.dtype)
        return self.proj(self.drop(self.softmax(scores) @ v).transpose(1, 2).reshape(batch, tokens, dim))


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = _Attention(dim, heads, length)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _GPT(nn.Module):
    """The head's weight is tied to the token embedding."""

    def __init__(self, vocabulary: int = 11, dim: int = 16, length: int = 6) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(_Block(dim, 2, length) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += x  # in place, as torchvision does
        return F.relu(y)


class _ResNet(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(_Residual(width), _Residual(width))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.blocks(self.stem(x))).flatten(1))


class _LSTM(nn.Module):
    def __init__(self, features: int = 5, hidden: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(features, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(torch.tanh(self.inner(x)))[0][:, -1])


def _images(classes: int) -> Callable[[torch.Generator], dict[str, torch.Tensor]]:
    def draw(g: torch.Generator) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(4, 3, 8, 8, generator=g), "y": torch.randint(classes, (4,), generator=g)}

    return draw


def _classify(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _text(g: torch.Generator) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(11, (4, 7), generator=g), "weights": torch.rand(4, 6, generator=g) + 0.5}


def _next_token(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["ids"][:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten(), reduction="none")
    return (losses * batch["weights"].flatten()).mean()


def _series(g: torch.Generator) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 6, 5, generator=g), "y": torch.randn(4, 1, generator=g)}


def _regress(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]).float(), batch["y"])


MODELS = {
    "vit": Model(lambda: ViT(8, 4, 16, 2, 2, 4, dropout=0.1), _images(4), _classify, {"x": "patches"}),
    "gpt": Model(_GPT, _text, _next_token, {"weights": None}),
    "resnet": Model(_ResNet, _images(4), _classify, {"x": "stem"}),
    "lstm": Model(_LSTM, _series, _regress, {"x": "inner", "y": None}),
}
