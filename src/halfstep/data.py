"""Public names of the data of the built-in jobs, which `halfstep.jobs.data` defines."""

from halfstep.jobs.data import (
    Batch,
    Digits,
    DigitsLoader,
    FolderImages,
    ImageFolder,
    Loader,
    Order,
    OrderedLoader,
    ShardImages,
    Shards,
    SyntheticImages,
    find_shards,
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
    "OrderedLoader",
    "ShardImages",
    "Shards",
    "SyntheticImages",
    "find_shards",
    "load_digits",
    "mix",
    "scan_folder",
]
