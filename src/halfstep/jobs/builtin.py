"""The jobs that ship with Halfstep: `digits`, the plain ViTs, and models of timm and torchvision.

`digits` is tuned to be a fair test of a precision in half a minute on two CPU cores: 26,538 parameters, no dropout, the
same batches in every precision, and at least 97 % validation accuracy in fp32 after 20 epochs for every seed tried. The
image jobs are meant for measurements: AdamW, 3e-4, a short warm-up. A `Recipe` replaces that by a published recipe.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from halfstep.backends.launch import read_launch
from halfstep.errors import MissingError, SettingError, nearest
from halfstep.jobs.data import (
    DigitsLoader,
    FolderImages,
    ImageFolder,
    Loader,
    ShardImages,
    SyntheticImages,
    find_shards,
    scan_folder,
)
from halfstep.jobs.data.augment import RandAugment
from halfstep.jobs.data.digits import NUM_TRAIN
from halfstep.jobs.data.mixing import Mixing
from halfstep.jobs.data.pictures import Augmentation, default_workers, num_cores
from halfstep.jobs.data.shards import NUM_CLASSES, has_shards
from halfstep.jobs.job import Job
from halfstep.jobs.models import Block, ViT
from halfstep.jobs.models import vit as sizes
from halfstep.jobs.recipes import Recipe

__all__ = ["DIGITS_BATCH", "DIGITS_EPOCHS", "IMAGE_BATCH", "digits_job", "library_job", "vit_job"]

BuildModel = Callable[[int], nn.Module]  # takes the number of classes

# Best of learning rates 2e-3 to 1e-2, decays 0.01 to 1 and batches 16 to 64, with three to four seeds each.
# These settings: 98.1 to 98.9 % in fp32 over five seeds, 3 to 7 s per run on two cores.
DIGITS_BATCH = 64
DIGITS_EPOCHS = 20  # the length of the learning-rate schedule; afterwards the rate stays constant
DIGITS_LR, DIGITS_DECAY = 5e-3, 0.1
IMAGE_BATCH = 128
IMAGE_LR, IMAGE_DECAY, IMAGE_WARMUP = 3e-4, 0.1, 500
IMAGE_SIZE = 224  # ImageNet's
RECIPE_MAX_WORKERS = 32


def digits_job() -> Job:
    """A small ViT on the embedded handwritten digits."""
    return Job(
        model=_digits_model,
        data=_digits_data,
        loss=_loss,
        optimizer=_digits_optimizer,
        metric=_accuracy,
        scheduler=_digits_scheduler,
        shard=(Block,),
        name="digits",
    )


def _digits_model() -> ViT:
    return ViT(image_size=8, patch=4, dim=32, depth=2, heads=4, num_classes=10, channels=1)


def _digits_data(
    split: str,
    batch_size: int = DIGITS_BATCH,
    seed: int = 0,
    epoch: int = 0,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
) -> Loader:
    return DigitsLoader(split, batch_size, seed=seed, epoch=epoch, rank=rank, world_size=world_size, device=device)


def _digits_optimizer(params: list[nn.Parameter]) -> Optimizer:
    return AdamW(params, lr=DIGITS_LR, weight_decay=DIGITS_DECAY)


def _digits_scheduler(optimizer: Optimizer, batch_size: int = DIGITS_BATCH, world_size: int = 1) -> LambdaLR:
    """Linear warm-up over a tenth of the planned steps, then cosine decay to a hundredth."""
    total = DIGITS_EPOCHS * max(1, NUM_TRAIN // (batch_size * world_size))
    warmup = max(1, total // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


def vit_job(name: str, data_dir: str | None = None, recipe: Recipe | None = None) -> Job:
    """One of the plain ViTs, on synthetic images, an ImageNet-style folder or WebDataset shards, optionally with a recipe."""
    build = getattr(sizes, name)
    if recipe is not None:

        def with_drop_path(num_classes: int) -> nn.Module:
            model: nn.Module = build(recipe.image_size, num_classes, drop_path=recipe.drop_path)
            return model

        return _image_job(name, with_drop_path, recipe.image_size, data_dir, shard=(Block,), recipe=recipe)
    return _image_job(name, lambda num_classes: build(IMAGE_SIZE, num_classes), IMAGE_SIZE, data_dir, shard=(Block,))


def library_job(library: str, name: str, data_dir: str | None = None) -> Job:
    """A timm or torchvision classifier with random weights, on synthetic images, an ImageNet-style folder or WebDataset shards."""
    try:
        module = importlib.import_module(library)
    except ImportError as error:
        raise MissingError(
            f"The target {library}:{name} needs {library}, which cannot be imported ({error}). "
            'Install it with: pip install "halfstep[vision]"'
        ) from error
    except (RuntimeError, OSError) as error:  # raised by a torchvision that was compiled for another torch
        raise MissingError(
            f"The target {library}:{name} needs {library}, which is installed but fails on import ({error}). Its build, or that of "
            f"the torchvision it uses, does not match torch {torch.__version__}; reinstall both from the same source."
        ) from error
    build, image_size = _LIBRARIES[library](module, name)
    return _image_job(f"{library}:{name}", build, image_size, data_dir)


def _timm(timm: Any, name: str) -> tuple[BuildModel, int]:
    architecture = name.partition(".")[0]  # after the dot: the name of pretrained weights, which are not loaded
    _check_model("timm", architecture, timm.list_models())
    settings = timm.get_pretrained_cfg(architecture)
    image_size = settings.input_size[-1] if settings is not None else IMAGE_SIZE
    return lambda num_classes: timm.create_model(architecture, num_classes=num_classes), image_size


def _torchvision(torchvision: Any, name: str) -> tuple[BuildModel, int]:
    models = torchvision.models
    _check_model("torchvision", name, models.list_models(module=models))  # models.* are the classifiers
    image_size = models.get_model_weights(name).DEFAULT.transforms().crop_size[0]
    return lambda num_classes: models.get_model(name, weights=None, num_classes=num_classes), image_size


_LIBRARIES: dict[str, Callable[[Any, str], tuple[BuildModel, int]]] = {"timm": _timm, "torchvision": _torchvision}


def _check_model(library: str, name: str, known: list[str]) -> None:
    if name not in known:
        close = nearest(name, known)
        hint = f" Did you mean {library}:{close}?" if close else ""
        raise SettingError(
            f"{library} has no classifier {name!r} among its {len(known)} models.{hint} List them with {library}'s list_models()."
        )


def _image_job(
    name: str,
    build: BuildModel,
    image_size: int,
    data_dir: str | None,
    shard: tuple[type, ...] = (),
    recipe: Recipe | None = None,
) -> Job:
    """An image classifier trained with AdamW and cross-entropy."""
    shards = find_shards(data_dir) if data_dir is not None and has_shards(data_dir) else None
    folder = scan_folder(data_dir) if data_dir is not None and shards is None else None
    num_classes = NUM_CLASSES
    if folder is not None:
        num_classes = len(folder.classes)
    elif shards is not None:
        num_classes = shards.num_classes
    elif recipe is not None:
        raise SettingError(
            f"The recipe {recipe.name} augments images, and {name} without --data trains on synthetic ones; pass --data DIR."
        )
    options: dict[str, Any] = {}
    if recipe is not None:
        num_workers = recipe.num_workers
        if num_workers is None:  # RandAugment needs more cores than a crop
            num_workers = default_workers(num_cores(), read_launch().local_world_size, RECIPE_MAX_WORKERS)
        options = {"augmentation": _augmentation(recipe, num_classes), "num_workers": num_workers}

    def data(
        split: str,
        batch_size: int = IMAGE_BATCH,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> Loader | None:
        position: dict[str, Any] = {"seed": seed, "epoch": epoch, "rank": rank, "world_size": world_size, **options}
        if folder is not None:
            return FolderImages(folder, split, batch_size, image_size=image_size, device=device, **position)
        if shards is None:
            return SyntheticImages(split, batch_size, image_size=image_size, device=device, **position)
        if split == "val" and not shards.files["val"]:
            return None
        return ShardImages(shards, split, batch_size, image_size=image_size, device=device, **position)

    return Job(
        model=lambda: build(num_classes),
        data=data,
        loss=_loss if recipe is None else _smoothed_loss(recipe),
        optimizer=_image_optimizer if recipe is None else _recipe_optimizer(recipe),
        metric=_accuracy,
        scheduler=_image_scheduler if recipe is None else _recipe_scheduler(recipe, folder),
        shard=shard,
        name=name,
    )


def _augmentation(recipe: Recipe, num_classes: int) -> Augmentation:
    randaugment = RandAugment(recipe.randaugment, recipe.randaugment_std, recipe.randaugment_ops)
    mixing = Mixing(recipe.mixup, recipe.cutmix, num_classes)
    return Augmentation(randaugment, mixing, resample="bicubic", reduced=True)


def _recipe_optimizer(recipe: Recipe) -> Callable[..., Optimizer]:
    def optimizer(named_params: list[tuple[str, nn.Parameter]]) -> Optimizer:
        decaying = [parameter for name, parameter in named_params if recipe.decays(name, parameter.ndim)]
        others = [parameter for name, parameter in named_params if not recipe.decays(name, parameter.ndim)]
        groups = [
            {"params": decaying, "weight_decay": recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2))

    return optimizer


def _recipe_scheduler(recipe: Recipe, folder: ImageFolder | None) -> Callable[..., LambdaLR]:
    num_images = recipe.num_images
    if num_images is None and folder is not None:
        num_images = len(folder.files["train"])
    if num_images is None:
        raise SettingError(
            f"The schedule of the recipe {recipe.name} needs the number of training images, which shards do not have; set it with "
            "--set num_images=N (ImageNet-1k: 1281167)."
        )
    steps = recipe.steps_per_epoch(num_images)
    return lambda optimizer: LambdaLR(optimizer, lambda step: recipe.lr_factor(step, steps))


def _smoothed_loss(recipe: Recipe) -> Callable[..., Tensor]:
    def loss(model: Callable[[Tensor], Any], batch: tuple[Tensor, Tensor], split: str = "train") -> Tensor:
        images, labels = batch  # of training: probabilities, if they are mixed
        smoothing = recipe.label_smoothing if split == "train" else 0.0
        return F.cross_entropy(_logits(model(images)).float(), labels, label_smoothing=smoothing)

    return loss


def _image_optimizer(params: list[nn.Parameter]) -> Optimizer:
    return AdamW(params, lr=IMAGE_LR, weight_decay=IMAGE_DECAY)


def _image_scheduler(optimizer: Optimizer) -> LambdaLR:
    """Linear warm-up, then constant, because the length of the run is not known here."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / IMAGE_WARMUP))


def _loss(model: Callable[[Tensor], Any], batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(_logits(model(images)).float(), labels)


def _accuracy(model: Callable[[Tensor], Any], batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return (_logits(model(images)).argmax(-1) == labels).float().mean()


def _logits(output: Any) -> Tensor:
    """The main logits; Inception and GoogLeNet also return auxiliary ones, which this job does not train."""
    logits: Tensor = output if isinstance(output, Tensor) else output[0]
    return logits
