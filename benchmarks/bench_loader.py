"""Measures the loader of image folders: images per second by workers, image size and augmentation.

    python benchmarks/bench_loader.py [--data DIR] [--workers 1 2 4 8] [--sizes 224] [--batch 128] [--batches 20]

`--data` is an ImageNet-style folder; without it, JPEGs of 500 x 375 pixels, about ImageNet's mean size, are generated in a
temporary folder. Rows: the plain loader (crop and flip), the `imagenet` recipe at full and at reduced decoding size. The first
batches, during which workers start, are not counted. Nothing is recorded; the table is printed as Markdown.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from halfstep.hardware.environment import environment
from halfstep.jobs.data import FolderImages, scan_folder
from halfstep.jobs.data.augment import RandAugment
from halfstep.jobs.data.mixing import Mixing
from halfstep.jobs.data.pictures import Augmentation

WARM_UP = 3  # batches for each worker
NUM_FILES = 64


def generate(root):
    """A folder with two classes of JPEGs: smooth noise, which compresses to about the size of a photograph."""
    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("one", "two"):
            (root / split / name).mkdir(parents=True)
            for number in range(NUM_FILES if split == "train" else 1):
                noise = Image.fromarray(draw.integers(0, 256, (94, 125, 3), dtype=np.uint8))
                noise.resize((500, 375), Image.Resampling.BICUBIC).save(
                    root / split / name / f"{number}.jpeg", quality=90
                )


def augmentations(num_classes):
    """What is measured, by name."""
    recipe = {"randaugment": RandAugment(), "mixing": Mixing(0.8, 1.0, num_classes), "resample": "bicubic"}
    return {
        "crop and flip": Augmentation(),
        "imagenet, decoded at full size": Augmentation(**recipe),
        "imagenet": Augmentation(**recipe, reduced=True),
    }


def rate(folder, augmentation, num_workers, size, args):
    """Images per second of one loader, over as many epochs as it takes."""
    loader = FolderImages(
        folder, "train", args.batch, image_size=size, num_workers=num_workers, augmentation=augmentation
    )
    skipped, counted, start = WARM_UP * max(1, num_workers), 0, 0.0
    while True:
        for _ in loader:
            if skipped:
                skipped -= 1
                start = time.perf_counter()
                continue
            counted += 1
            if counted == args.batches:
                return counted * args.batch / (time.perf_counter() - start)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=[224])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--batches", type=int, default=20)
    args = parser.parse_args()
    machine = environment()
    with tempfile.TemporaryDirectory() as temporary:
        if args.data is None:
            generate(Path(temporary))
        folder = scan_folder(args.data or temporary)
        print(f"{machine['cpu']}, {machine['num_cpus']} CPUs; batches of {args.batch}, {args.batches} counted\n")
        print("| images | size | " + " | ".join(f"{n} workers" for n in args.workers) + " |")
        print("|---|---|" + "---|" * len(args.workers))
        for size in args.sizes:
            for name, augmentation in augmentations(len(folder.classes)).items():
                rates = [f"{rate(folder, augmentation, workers, size, args):,.0f}" for workers in args.workers]
                print(f"| {name} | {size} | " + " | ".join(rates) + " |", flush=True)


if __name__ == "__main__":
    main()
