"""Published training recipes for the built-in ViTs: `halfstep train vit_b_16 --data DIR --recipe imagenet`.

`imagenet` is the supervised recipe of He et al., "Masked Autoencoders Are Scalable Vision Learners", CVPR 2022
(arXiv:2111.06377), appendix A.2, Table 11, "Supervised training ViT from scratch": one recipe for ViT-B, ViT-L and ViT-H on ImageNet-1k
without other data. What the table leaves open is taken from the authors' code for supervised training (fine-tuning),
facebookresearch/mae at efb2a80:

    main_finetune.py       RandAugment `rand-m9-mstd0.5-inc1`; Mixup or CutMix with probability 1/2, one share per batch;
                           no clipping (`clip_grad` None); min_lr 1e-6; lr = base_lr * global batch / 256
    util/lr_sched.py       linear warm-up from 0, then half a cosine, by the fraction of the epoch at every step
    util/lr_decay.py       no weight decay for 1-D parameters (norms, biases), class token and positions
    util/datasets.py       bicubic resizing; validation on the centre 224 of 256

Not from the source: the model is Halfstep's ViT (learned positions, class token, its own initialization), and training JPEGs
are decoded at a reduced size where the crop allows it. Layer-wise learning rates and random erasing belong to fine-tuning: the
appendix uses the regularizations of the table and disables others.

A recipe is a value. `batch`, `accumulate`, `epochs`, `ema` and `max_norm` become defaults of `TrainConfig`; the other fields
can be replaced one by one with `--set`.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from halfstep.errors import SettingError, unknown

__all__ = ["RECIPES", "Recipe", "read_recipe", "split_settings"]

RECIPES = ("imagenet",)
LR_BATCH = 256  # the global batch of base_lr
SOURCE = 'He et al., "Masked Autoencoders Are Scalable Vision Learners", CVPR 2022 (arXiv:2111.06377), Table 11'
# The top-1 accuracy on ImageNet-1k that the source reports (Table 3, A.2) for its own model and code with EMA, in percent.
PUBLISHED_ACCURACY = {"vit_b_16": 82.3, "vit_l_16": 82.6, "vit_h_14": 83.1}
_RUN_FIELDS = (
    "name",
    "target",
    "batch",
    "accumulate",
    "epochs",
    "ema",
    "max_norm",
)  # set by TrainConfig, not by a recipe's --set
_MACHINE_FIELDS = ("num_workers", "num_images")  # nothing of them is published


@dataclass(frozen=True)
class Recipe:
    """The values of a recipe for one target, those of the `imagenet` recipe for ViT-B by default."""

    name: str = "imagenet"
    target: str = "vit_b_16"
    batch: int = 4096  # micro-batch of all ranks together
    accumulate: int = 1
    epochs: int = 300
    ema: float | None = 0.9999
    max_norm: float | None = None
    base_lr: float = 1e-4  # for a global batch of LR_BATCH
    min_lr: float = 1e-6
    warmup_epochs: float = 20
    weight_decay: float = 0.3
    beta1: float = 0.9
    beta2: float = 0.95
    drop_path: float = 0.1
    label_smoothing: float = 0.1
    mixup: float = 0.8  # alpha; 0: off
    cutmix: float = 1.0  # alpha; 0: off
    randaugment: float = 9.0  # magnitude, of 10
    randaugment_std: float = 0.5
    randaugment_ops: int = 2
    image_size: int = 224
    num_workers: int | None = (
        None  # decoding processes of each rank; None: the CPU cores per rank of this machine, 1 to 32
    )
    num_images: int | None = None  # in the training split; None: counted, which shards cannot

    def __post_init__(self) -> None:
        for field in ("base_lr", "warmup_epochs", "weight_decay", "min_lr"):
            if getattr(self, field) < 0:
                raise SettingError(f"{field}={getattr(self, field)} of the recipe {self.name} must be at least 0.")
        for field in ("drop_path", "label_smoothing", "beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                raise SettingError(
                    f"{field}={getattr(self, field)} of the recipe {self.name} must be from 0 to below 1."
                )
        if self.num_images is not None and self.num_images < 1:
            raise SettingError(f"num_images={self.num_images} of the recipe {self.name} must be at least 1.")
        if self.num_workers is not None and self.num_workers < 0:
            raise SettingError(f"num_workers={self.num_workers} of the recipe {self.name} must be at least 0.")

    @property
    def global_batch(self) -> int:
        """Examples of one update."""
        return self.batch * self.accumulate

    @property
    def lr(self) -> float:
        """The peak learning rate: base_lr, scaled linearly with the global batch."""
        return self.base_lr * self.global_batch / LR_BATCH

    def lr_factor(self, step: int, steps_per_epoch: int) -> float:
        """The learning rate of an update, from 0, as a share of the peak."""
        epoch = step / steps_per_epoch
        if epoch < self.warmup_epochs:
            return epoch / self.warmup_epochs
        done = min(1.0, (epoch - self.warmup_epochs) / (self.epochs - self.warmup_epochs))
        least = min(1.0, self.min_lr / self.lr) if self.lr else 0.0
        return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done))

    def steps_per_epoch(self, num_images: int) -> int:
        """Updates in an epoch; a short last micro-batch is dropped, a short last window is not."""
        return max(1, math.ceil(num_images // self.batch / self.accumulate))

    def decays(self, name: str, num_dimensions: int) -> bool:
        """Whether a parameter has weight decay: not norms, biases, class token and positions."""
        return num_dimensions > 1 and name.rpartition(".")[2] not in {"class_token", "positions"}

    def published(self) -> Recipe:
        """The values of the source for this target."""
        return _PUBLISHED[self.target]

    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Fields that can be set with --set and differ from the source, as name: (published, now)."""
        own, source = dataclasses.asdict(self), dataclasses.asdict(self.published())
        return {field: (source[field], own[field]) for field in _settable() if own[field] != source[field]}

    def trains_like(self, other: Recipe) -> bool:
        """Whether both train in the same way: the number of workers changes no image."""
        return dataclasses.replace(self, num_workers=None) == dataclasses.replace(other, num_workers=None)

    def __str__(self) -> str:
        """The text that `read_recipe` reads to the same value: the name, and what differs from the source."""
        return ",".join([self.name, *(f"{field}={now}" for field, (_, now) in self.changed().items())])

    def settings(self) -> dict[str, Any]:
        """The fields of TrainConfig that the recipe decides, unless they are set."""
        return {"batch": self.batch, "epochs": self.epochs, "ema": self.ema, "max_norm": self.max_norm}

    def for_run(self, *, batch: int, accumulate: int, epochs: int, ema: float | None, max_norm: float | None) -> Recipe:
        """This recipe with the batch and the length of a run."""
        if self.warmup_epochs >= epochs:
            raise SettingError(
                f"The recipe {self.name} warms up for {self.warmup_epochs:g} epochs, and the run has {epochs}. Train longer, or set "
                "--set warmup_epochs=N; to stop early without another schedule, use --steps."
            )
        return dataclasses.replace(self, batch=batch, accumulate=accumulate, epochs=epochs, ema=ema, max_norm=max_norm)

    def describe(self) -> list[str]:
        """What the log shows at the start: source, published accuracy, learning rate, and every change."""
        source = self.published()
        accuracy = PUBLISHED_ACCURACY.get(self.target)
        cited = (
            f"The source reports {accuracy} % top-1 on ImageNet-1k for its own model and code; Halfstep has not reproduced it."
            if accuracy is not None
            else f"The source has no values for {self.target}; those of vit_b_16 are used."
        )
        lines = [f"Recipe {self.name}: {SOURCE}. {cited}"]
        rate = f"Learning rate {self.lr:.4g} = {self.base_lr:g} * {self.global_batch} / {LR_BATCH}"
        batch = f"global batch {self.global_batch} ({self.batch} x {self.accumulate} accumulated)"
        if self.global_batch == source.global_batch:
            lines.append(f"{rate}: {batch}, as published.")
        else:
            lines.append(
                f"{rate}: {batch}, scaled linearly from the published {source.global_batch} ({source.lr:.4g})."
            )
        changes = {field: pair for field, pair in self.changed().items() if field not in _MACHINE_FIELDS}
        for field in ("epochs", "ema", "max_norm"):
            pair = (getattr(source, field), getattr(self, field))
            changes |= {field: pair} if pair[0] != pair[1] else {}
        if changes:
            listed = ", ".join(f"{field} {before} -> {now}" for field, (before, now) in changes.items())
            lines.append(f"Changed from the published recipe: {listed}.")
        return lines


_BASE = Recipe()
_LARGE = Recipe(epochs=200, drop_path=0.2)  # the table's column for ViT-L and ViT-H
_PUBLISHED = {
    "vit_t_16": dataclasses.replace(_BASE, target="vit_t_16"),
    "vit_s_16": dataclasses.replace(_BASE, target="vit_s_16"),
    "vit_b_16": _BASE,
    "vit_l_16": dataclasses.replace(_LARGE, target="vit_l_16"),
    "vit_h_14": dataclasses.replace(_LARGE, target="vit_h_14"),
}


def read_recipe(text: str, target: str | None, pairs: Iterable[str] = ()) -> Recipe:
    """The recipe that a text such as `imagenet` or `imagenet,drop_path=0.2` names, for a target; `pairs` are further key=value."""
    name, *own = (part.strip() for part in text.split(","))
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    if target not in _PUBLISHED:
        raise SettingError(
            f"The recipe {name} is one for images and has no values for the target {target or 'digits'!r}; use it with "
            f"{', '.join(_PUBLISHED)}, or write a job file with its own recipe."
        )
    settings: dict[str, Any] = {}
    hints = typing.get_type_hints(Recipe)
    for pair in (*own, *pairs):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if key not in _settable():
            raise unknown(f"setting of the recipe {name}", key, _settable())
        if key in settings:
            raise SettingError(f"{key} of the recipe {name} is set twice; remove one.")
        if not equals or not value:
            raise SettingError(f"{key} of the recipe {name} has no value; write {key}=VALUE.")
        settings[key] = _parse(name, key, value, hints[key])
    return dataclasses.replace(_PUBLISHED[target], **settings)


def split_settings(pairs: Iterable[str]) -> tuple[list[str], list[str]]:
    """The `key=value` texts that set a field of a recipe, and the others."""
    own: list[str] = []
    others: list[str] = []
    for pair in pairs:
        (own if pair.partition("=")[0].strip() in _settable() else others).append(pair)
    return own, others


def _settable() -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(Recipe) if field.name not in _RUN_FIELDS)


def _parse(name: str, key: str, text: str, hint: Any) -> Any:
    kinds = typing.get_args(hint) or (hint,)
    if type(None) in kinds and text.casefold() in {"none", "off"}:
        return None
    kind = int if int in kinds else float
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise SettingError(f"{key}={text} of the recipe {name} is not a value of type {kind.__name__}.")
    return value
