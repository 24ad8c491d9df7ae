"""Models that ship with Halfstep: the plain Vision Transformer."""

from __future__ import annotations

from halfstep.jobs.models.vit import SIZES, Block, ViT, ViTSize, vit_b_16, vit_h_14, vit_l_16, vit_s_16, vit_t_16

__all__ = ["SIZES", "Block", "ViT", "ViTSize", "vit_b_16", "vit_h_14", "vit_l_16", "vit_s_16", "vit_t_16"]
