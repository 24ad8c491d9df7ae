"""RandAugment in Pillow: two random operations per image, of about the same strength.

How it works (Cubuk et al., "RandAugment", 2020, in the variant that ViT recipes call (9, 0.5), `rand-m9-mstd0.5-inc1` in
timm's notation). Two of 15 operations are drawn, with replacement; each is applied with probability 1/2. The strength is
drawn from a normal distribution around `magnitude` with standard deviation `deviation`, and clipped to 0 to 10; a higher
strength changes the image more in every operation ("inc"). At strength 10:

    rotate              30 degrees                        posterize     0 of 8 bits are left
    shear x, y          by 0.3                            solarize      every pixel is inverted
    translate x, y      0.45 of the width, the height     solarize add  110 is added to pixels below 128
    colour, contrast, brightness, sharpness               factor 0.1 or 1.9

Auto-contrast, equalize and invert have no strength. Geometric operations, colour, contrast, brightness and sharpness take a
random direction. Pixels from outside the image have ImageNet's mean colour.

All random numbers come from the `draw` of the caller, so an image's augmentation is a function of its seed.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from halfstep.errors import SettingError

__all__ = ["OPERATIONS", "RandAugment"]

MAX_STRENGTH = 10
APPLY_PROBABILITY = 0.5
FILL = (124, 116, 104)  # ImageNet's mean, 255 * (0.485, 0.456, 0.406)
_SOLARIZE_ADD_BELOW = 128
_ENHANCE_SPAN, _LEAST_ENHANCE = 0.9, 0.1

Change = Callable[[Any, float], Any]  # takes an RGB image and a share of the maximum strength


@dataclass(frozen=True)
class Operation:
    """A change of an image, and whether it takes a random direction: a negative share."""

    apply: Change
    has_direction: bool = False


@dataclass(frozen=True)
class RandAugment:
    """The settings of RandAugment; calling it augments one RGB image."""

    magnitude: float = 9.0  # of 10
    deviation: float = 0.5
    num_operations: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.magnitude <= MAX_STRENGTH or self.deviation < 0 or self.num_operations < 0:
            raise SettingError(
                f"RandAugment has magnitude={self.magnitude}, deviation={self.deviation} and num_operations={self.num_operations}; the "
                f"magnitude must be from 0 to {MAX_STRENGTH} and the others at least 0."
            )

    def __call__(self, image: Any, draw: random.Random) -> Any:
        """The augmented image, with the same size."""
        for operation in draw.choices(tuple(OPERATIONS.values()), k=self.num_operations):
            if draw.random() < APPLY_PROBABILITY:
                strength = min(max(draw.gauss(self.magnitude, self.deviation), 0), MAX_STRENGTH)
                share = strength / MAX_STRENGTH
                if operation.has_direction and draw.random() < 0.5:
                    share = -share
                image = operation.apply(image, share)
        return image


def _module(name: str) -> Any:
    return importlib.import_module(f"PIL.{name}")  # as everywhere here, Pillow is imported where it is needed


def _affine(image: Any, matrix: tuple[float, ...]) -> Any:
    pillow = _module("Image")
    return image.transform(image.size, pillow.Transform.AFFINE, matrix, pillow.Resampling.BICUBIC, fillcolor=FILL)


def _rotate(image: Any, share: float) -> Any:
    return image.rotate(30 * share, _module("Image").Resampling.BICUBIC, fillcolor=FILL)


def _enhance(kind: str) -> Operation:
    def apply(image: Any, share: float) -> Any:
        return getattr(_module("ImageEnhance"), kind)(image).enhance(max(_LEAST_ENHANCE, 1 + _ENHANCE_SPAN * share))

    return Operation(apply, has_direction=True)


def _simple(name: str) -> Operation:
    return Operation(lambda image, _: getattr(_module("ImageOps"), name)(image))


def _posterize(image: Any, share: float) -> Any:
    bits = 4 - int(4 * share)
    # Pillow takes 1 to 8 bits; with none, every pixel is black.
    return _module("ImageOps").posterize(image, bits) if bits else image.point(lambda value: 0 * value)


def _solarize(image: Any, share: float) -> Any:
    return _module("ImageOps").solarize(image, 256 - int(256 * share))


def _solarize_add(image: Any, share: float) -> Any:
    added = int(110 * share)
    table = [min(255, value + added) if value < _SOLARIZE_ADD_BELOW else value for value in range(256)]
    return image.point(table * 3)


OPERATIONS = {
    "auto_contrast": _simple("autocontrast"),
    "equalize": _simple("equalize"),
    "invert": _simple("invert"),
    "posterize": Operation(_posterize),
    "solarize": Operation(_solarize),
    "solarize_add": Operation(_solarize_add),
    "colour": _enhance("Color"),
    "contrast": _enhance("Contrast"),
    "brightness": _enhance("Brightness"),
    "sharpness": _enhance("Sharpness"),
    "rotate": Operation(_rotate, has_direction=True),
    "shear_x": Operation(lambda image, share: _affine(image, (1, 0.3 * share, 0, 0, 1, 0)), has_direction=True),
    "shear_y": Operation(lambda image, share: _affine(image, (1, 0, 0, 0.3 * share, 1, 0)), has_direction=True),
    "translate_x": Operation(
        lambda image, share: _affine(image, (1, 0, 0.45 * share * image.width, 0, 1, 0)), has_direction=True
    ),
    "translate_y": Operation(
        lambda image, share: _affine(image, (1, 0, 0, 0, 1, 0.45 * share * image.height)), has_direction=True
    ),
}
