"""Data of the built-in jobs: embedded digits, synthetic images and tokens, ImageNet-style folders, WebDataset shards."""

from __future__ import annotations

from halfstep.jobs.data.augment import RandAugment
from halfstep.jobs.data.digits import Digits, DigitsLoader, load_digits
from halfstep.jobs.data.folder import FolderImages, ImageFolder, scan_folder
from halfstep.jobs.data.loader import Batch, Loader, Order, OrderedLoader, mix
from halfstep.jobs.data.mixing import Mixing
from halfstep.jobs.data.pictures import Augmentation
from halfstep.jobs.data.shard_images import ShardImages
from halfstep.jobs.data.shards import Shards, find_shards
from halfstep.jobs.data.synthetic import SyntheticImages
from halfstep.jobs.data.tokens import Draw, SyntheticInputs

__all__ = [
    "Augmentation",
    "Batch",
    "Digits",
    "DigitsLoader",
    "Draw",
    "FolderImages",
    "ImageFolder",
    "Loader",
    "Mixing",
    "Order",
    "OrderedLoader",
    "RandAugment",
    "ShardImages",
    "Shards",
    "SyntheticImages",
    "SyntheticInputs",
    "find_shards",
    "load_digits",
    "mix",
    "scan_folder",
]
