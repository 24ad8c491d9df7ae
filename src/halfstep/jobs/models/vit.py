"""The plain Vision Transformer, in one file that reads from top to bottom.

How it works (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021). The image is cut into patches; a
convolution whose stride equals its kernel size turns each into a vector of `dim` numbers. A learned class token is
prepended, learned positions are added, and `depth` pre-norm blocks follow:

    x = x + attention(norm(x))        every token attends to every token, in `heads` heads
    x = x + mlp(norm(x))              dim -> mlp_ratio * dim -> dim, with GELU

One linear layer computes the logits from the normalized class token.

Shapes, parameter counts and the order of operations are torchvision's, so results are comparable: ViT-L/16 at 224
pixels and 1000 classes has 304,326,632 parameters in 296 tensors. So is the initialization (Xavier for the linear
layers, truncated normal for the patches, normal 0.02 for positions), except for the last layer: torchvision
initializes it to zero, which makes the gradient of every other layer exactly zero in the first step. A tool that
searches for dead gradients would report all of them, so here it is a truncated normal with standard deviation 0.02.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.errors import SettingError

__all__ = ["SIZES", "Block", "ViT", "ViTSize", "vit_b_16", "vit_h_14", "vit_l_16", "vit_s_16", "vit_t_16"]

NORM_EPS = 1e-6  # as in the paper; published weights were not trained with torch's default of 1e-5


class Attention(nn.Module):
    """Multi-head self-attention with one fused matrix for queries, keys and values."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj(x.transpose(1, 2).reshape(batch, tokens, dim))
        return out


class MLP(nn.Module):
    """Two linear layers with GELU between them, applied to each token separately."""

    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.dropout(F.gelu(self.up(x))))
        return out


class Block(nn.Module):
    """One pre-norm transformer layer: attention, then MLP, each added to its input."""

    def __init__(self, dim: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp = MLP(dim, hidden, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scales: Tensor | None = None) -> Tensor:
        """The tokens after this layer, with the same shape; `scales` (2, batch, 1, 1) multiply what its two parts add."""
        if scales is None:
            x = x + self.dropout(self.attention(self.norm1(x)))
            x = x + self.dropout(self.mlp(self.norm2(x)))
        else:
            x = x + self.dropout(self.attention(self.norm1(x))) * scales[0]
            x = x + self.dropout(self.mlp(self.norm2(x))) * scales[1]
        return x


class ViT(nn.Module):
    """A Vision Transformer that classifies square images.

    Args:
        image_size: side of the image in pixels, a multiple of `patch`.
        patch: side of a patch in pixels.
        dim: length of a token's vector, a multiple of `heads`.
        depth: number of blocks.
        heads: number of attention heads.
        num_classes: number of logits.
        channels: image channels.
        mlp_ratio: hidden width of the MLP, in units of `dim`.
        dropout: after every linear layer but qkv and the last, and after the positions, as in the paper.
        drop_path: stochastic depth (Huang et al. 2016): the probability with which the last block's attention and MLP are
            each left out for an image in training; it grows linearly from 0 in the first block.
        activation_checkpointing: store only the input of each block and recompute the rest in backward: less
            memory, about a third more computation, the same gradients.
    """

    def __init__(
        self,
        image_size: int,
        patch: int,
        dim: int,
        depth: int,
        heads: int,
        num_classes: int,
        channels: int = 3,
        mlp_ratio: float = 4,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if image_size % patch:
            raise SettingError(
                f"image_size={image_size} is not a multiple of patch={patch}; choose an image_size that the patches cover exactly."
            )
        if dim % heads:
            raise SettingError(
                f"dim={dim} is not a multiple of heads={heads}; each head gets dim / heads channels, so choose a multiple."
            )
        if not 0 <= drop_path < 1:
            raise SettingError(f"drop_path={drop_path} must be a probability from 0 to below 1.")
        self.image_size, self.channels, self.drop_path = image_size, channels, drop_path
        self.activation_checkpointing = activation_checkpointing
        self.patches = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.empty(1, 1 + (image_size // patch) ** 2, dim))
        self.dropout = nn.Dropout(dropout)
        hidden = int(mlp_ratio * dim)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.head = nn.Linear(dim, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize all parameters from torch's global random generator."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        fan_in = self.patches.weight[0].numel()
        _truncated_normal(self.patches.weight, std=math.sqrt(1 / fan_in))
        assert self.patches.bias is not None
        nn.init.zeros_(self.patches.bias)
        nn.init.zeros_(self.class_token)
        nn.init.normal_(self.positions, std=0.02)
        _truncated_normal(self.head.weight, std=0.02)  # not zero: see the top of this file

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, num_classes) for images of shape (batch, channels, image_size, image_size)."""
        expected = (self.channels, self.image_size, self.image_size)
        if images.ndim != 4 or images.shape[1:] != expected:
            raise SettingError(
                f"This ViT takes images of shape (batch, {', '.join(map(str, expected))}), not {tuple(images.shape)}; "
                "resize the images or build the model with their image_size and channels."
            )
        # 16-bit weights need 16-bit images; under autocast the weights are fp32 and this cast does nothing.
        x = self.patches(images.to(self.patches.weight.dtype)).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1).to(x.dtype), x], dim=1)
        x = self.dropout(x + self.positions)
        scales = self._draw_scales(x) if self.training and self.drop_path else (None,) * len(self.blocks)
        for block, scale in zip(self.blocks, scales, strict=True):
            arguments = (x,) if scale is None else (x, scale)
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, *arguments, use_reentrant=False)
            else:
                x = block(*arguments)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits

    def _draw_scales(self, x: Tensor) -> Tensor:
        """Stochastic depth: (depth, 2, batch, 1, 1), 0 where a block's part is left out and 1 / probability elsewhere.

        Drawn for all blocks at once and passed as tensors: a rate stored in each block would compile each block separately.
        """
        depth = len(self.blocks)
        keep = 1 - torch.linspace(0, self.drop_path, depth, device=x.device).view(depth, 1, 1, 1, 1)
        return ((torch.rand(depth, 2, x.shape[0], 1, 1, device=x.device) < keep) / keep).to(x.dtype)


@torch.no_grad()
def _truncated_normal(tensor: Tensor, std: float) -> None:
    """Fill with a normal distribution truncated at two standard deviations.

    torch.nn.init.trunc_normal_ (torch 2.13) reads values back, which fails on fake tensors, and its default limits are
    -2 and 2 for any standard deviation.
    """
    limit = math.erf(2 / math.sqrt(2))
    tensor.uniform_(-limit, limit).erfinv_().mul_(std * math.sqrt(2))


@dataclass(frozen=True)
class ViTSize:
    """The dimensions of a standard ViT."""

    patch: int
    dim: int
    depth: int
    heads: int


# T and S are DeiT's (Touvron et al. 2021, table 1); B, L and H are the paper's (table 1).
SIZES = {
    "vit_t_16": ViTSize(patch=16, dim=192, depth=12, heads=3),
    "vit_s_16": ViTSize(patch=16, dim=384, depth=12, heads=6),
    "vit_b_16": ViTSize(patch=16, dim=768, depth=12, heads=12),
    "vit_l_16": ViTSize(patch=16, dim=1024, depth=24, heads=16),
    "vit_h_14": ViTSize(patch=14, dim=1280, depth=32, heads=16),
}


def _build(name: str, image_size: int, num_classes: int, options: dict[str, Any]) -> ViT:
    size = SIZES[name]
    return ViT(image_size, size.patch, size.dim, size.depth, size.heads, num_classes, **options)


def vit_t_16(image_size: int = 224, num_classes: int = 1000, **options: Any) -> ViT:
    """ViT-Ti/16: 5.7 million parameters."""
    return _build("vit_t_16", image_size, num_classes, options)


def vit_s_16(image_size: int = 224, num_classes: int = 1000, **options: Any) -> ViT:
    """ViT-S/16: 22 million parameters."""
    return _build("vit_s_16", image_size, num_classes, options)


def vit_b_16(image_size: int = 224, num_classes: int = 1000, **options: Any) -> ViT:
    """ViT-B/16: 86,567,656 parameters."""
    return _build("vit_b_16", image_size, num_classes, options)


def vit_l_16(image_size: int = 224, num_classes: int = 1000, **options: Any) -> ViT:
    """ViT-L/16: 304,326,632 parameters in 296 tensors."""
    return _build("vit_l_16", image_size, num_classes, options)


def vit_h_14(image_size: int = 224, num_classes: int = 1000, **options: Any) -> ViT:
    """ViT-H/14: 632,045,800 parameters."""
    return _build("vit_h_14", image_size, num_classes, options)
