"""Data of the built-in jobs: embedded digits, synthetic images, ImageNet-style folders."""

from __future__ import annotations

from halfstep.jobs.data.digits import Digits, DigitsLoader, load_digits
from halfstep.jobs.data.folder import FolderImages, ImageFolder, scan_folder
from halfstep.jobs.data.loader import Batch, Loader, Order, mix
from halfstep.jobs.data.synthetic import SyntheticImages

__all__ = [
    "Batch",
    "Digits",
    "DigitsLoader",
    "FolderImages",
    "ImageFolder",
    "Loader",
    "Order",
    "SyntheticImages",
    "load_digits",
    "mix",
    "scan_folder",
]
