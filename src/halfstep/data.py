"""Data that the built-in jobs train on, under its public name; `halfstep.jobs.data` defines it."""

from halfstep.jobs.data import (
    Batch,
    Digits,
    DigitsLoader,
    FolderImages,
    ImageFolder,
    Loader,
    Order,
    SyntheticImages,
    load_digits,
    mix,
    scan_folder,
)

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
