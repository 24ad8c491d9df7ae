"""Mixup and CutMix: each image of a batch is mixed with another one, and so are their labels.

How it works. A share s is drawn from Beta(alpha, alpha), once for a batch; image i is mixed with image n - 1 - i.

    Mixup (Zhang et al. 2018)   s * image + (1 - s) * other
    CutMix (Yun et al. 2019)    a rectangle of (1 - s) of the area is replaced by the other's; at the border it is cut off,
                                and s becomes the share of the area that is left

The labels become probabilities with s for the image's class and 1 - s for the other's, which add up to 1. With both kinds
on, either is drawn with probability 1/2. Random numbers come from the seed of the caller, not from the global generator.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import SettingError

__all__ = ["Mixing"]


@dataclass(frozen=True)
class Mixing:
    """Alphas of the Beta distributions (0: off) and the number of classes; calling it mixes one batch."""

    mixup: float
    cutmix: float
    num_classes: int

    def __post_init__(self) -> None:
        if min(self.mixup, self.cutmix) < 0 or self.num_classes < 1:
            raise SettingError(
                f"mixup={self.mixup} and cutmix={self.cutmix} must be at least 0 (0: off), and num_classes={self.num_classes} at least 1."
            )

    def __call__(self, images: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Mixed images and label probabilities (batch, num_classes); plain labels if both kinds are off."""
        if not self.mixup and not self.cutmix:
            return images, labels
        draw = random.Random(seed)  # noqa: S311 - not for secrets
        uses_cutmix = draw.random() < 0.5 if self.mixup and self.cutmix else bool(self.cutmix)
        alpha = self.cutmix if uses_cutmix else self.mixup
        share = draw.betavariate(alpha, alpha)
        if uses_cutmix:
            height, width = images.shape[-2:]
            top, bottom, left, right = _rectangle(height, width, share, draw)
            share = 1 - (bottom - top) * (right - left) / (height * width)
            other = images[..., top:bottom, left:right].flip(0)  # a copy: the images are overwritten
            images[..., top:bottom, left:right] = other
        else:
            images = images.mul(share).add_(images.flip(0), alpha=1 - share)
        targets = F.one_hot(labels, self.num_classes).to(images.dtype)
        return images, targets.mul(share).add_(targets.flip(0), alpha=1 - share)


def _rectangle(height: int, width: int, share: float, draw: random.Random) -> tuple[int, int, int, int]:
    """(top, bottom, left, right) of a rectangle of 1 - share of the area around a random centre, cut off at the border."""
    side = math.sqrt(1 - share)
    half_height, half_width = int(height * side) // 2, int(width * side) // 2
    y, x = draw.randrange(height), draw.randrange(width)
    return max(0, y - half_height), min(height, y + half_height), max(0, x - half_width), min(width, x + half_width)
