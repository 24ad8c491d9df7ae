"""Images from a folder: `train/CLASS/*.png` and `val/CLASS/*.png`, decoded by Pillow, as a job for every command.

`python examples/image_folder.py` writes a tiny folder (horizontal or vertical stripes) and trains on it. With your own images:

    IMAGES=/data/imagenet halfstep train examples/image_folder.py --epochs 10
"""

import functools
import importlib.util
import math
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import halfstep
from halfstep.data import FolderImages, scan_folder

SIZE = 16


def write_stripes(root, num_images=32):
    """A folder of two classes that a crop or a flip does not change: horizontal and vertical stripes."""
    from PIL import Image

    random = torch.Generator().manual_seed(0)
    places = torch.arange(SIZE).expand(SIZE, SIZE)
    for split in ("train", "val"):
        for name, place in (("horizontal", places.T), ("vertical", places)):
            folder = Path(root, split, name)
            folder.mkdir(parents=True)
            for i in range(num_images):
                phase = torch.rand(1, generator=random) * 2 * math.pi
                wave = (place * math.pi / 2 + phase).sin()
                pixels = (127.5 + 127.5 * wave).to(torch.uint8)
                Image.fromarray(pixels.numpy()).convert("RGB").save(folder / f"{i}.png")


@functools.cache
def images():
    return scan_folder(os.environ["IMAGES"])


def model():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(128, len(images().classes)),
    )


job = halfstep.Job(
    model=model,
    data=lambda batch_size, split, seed: FolderImages(
        images(), split, batch_size, image_size=SIZE, num_workers=0, seed=seed
    ),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    metric=lambda model, batch: (model(batch[0]).argmax(-1) == batch[1]).float().mean(),
)

if __name__ == "__main__":
    if importlib.util.find_spec("PIL") is None:
        print('Pillow is not installed: pip install "halfstep[vision]"')
        sys.exit(0)
    with tempfile.TemporaryDirectory() as root:
        write_stripes(root)
        os.environ["IMAGES"] = root
        torch.manual_seed(0)
        net = job.call("model")
        engine = halfstep.Engine(net, job.call("optimizer", model=net), "bf16", max_norm=1.0)
        for epoch in range(6):
            for batch in job.call("data", split="train", batch_size=8, seed=epoch):
                with engine.forward():
                    loss = job.call("loss", model=net, batch=batch)
                engine.backward(loss)
                engine.step()
        with engine.evaluate():
            right = [
                job.call("metric", model=net, batch=b) for b in job.call("data", split="val", batch_size=8, seed=0)
            ]
        print(f"loss {loss.item():.3f}, accuracy {torch.stack(right).mean():.2f} on {len(right) * 8} images")
        assert torch.stack(right).mean() > 0.9
        engine.close()
