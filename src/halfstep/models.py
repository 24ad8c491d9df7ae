"""Public names of the models that ship with Halfstep, which `halfstep.jobs.models` defines."""

from halfstep.jobs.models import (
    SIZES,
    Block,
    ViT,
    ViTSize,
    vit_b_16,
    vit_h_14,
    vit_l_16,
    vit_s_16,
    vit_t_16,
)

__all__ = [
    "SIZES",
    "Block",
    "ViT",
    "ViTSize",
    "vit_b_16",
    "vit_h_14",
    "vit_l_16",
    "vit_s_16",
    "vit_t_16",
]
