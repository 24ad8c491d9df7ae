"""Golden runs: 100 losses of a small model per preset and optimizer, and a digest of the checkpoint at the end.

    python tests/golden_runs.py record DIR      train every case, write DIR/<case>.txt
    python tests/golden_runs.py compare A B     exit 1 unless losses and checkpoint tensors in A and B are bit-identical
    python tests/golden_runs.py merge KIND DIR  put DIR's losses into tests/golden as the column of a CPU kind

A change that must not alter numerics is recorded before and after on the same machine, and compared. The files in
tests/golden have one column per CPU kind; `tests/engine/test_golden.py` trains every case again and accepts what lies within
the spread between those columns. A change that alters numerics on purpose merges new columns and states why in its commit.
"""

import hashlib
import itertools
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep import optim

GOLDEN = Path(__file__).parent / "golden"
NUM_STEPS = 100
PRESETS = ("fp32", "bf16", "fp16", "bf16-lean", "fp16-lean")
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.05),
    "adam": lambda params: torch.optim.Adam(params, lr=3e-3, betas=(0.8, 0.95)),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "lion": lambda params: optim.Lion(params, lr=3e-4, weight_decay=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
}
# case -> (precision, optimizer, further arguments of the Engine)
CASES = {
    f"{preset}_{name}": (preset, name, {"max_norm": 1.0})
    for preset, name in itertools.product(PRESETS, OPTIMIZERS)
    if name != "rmsprop" or not preset.endswith("lean")
}
CASES |= {
    "bf16-lean-8bit_adamw": ("bf16-lean,states=8bit", "adamw", {"max_norm": 1.0}),
    "bf16-lean-bf16_adamw": ("bf16-lean,states=bf16", "adamw", {"max_norm": 1.0}),
    "bf16-lean-master-fp32_adamw": ("bf16-lean,master=fp32", "adamw", {"max_norm": 1.0}),
    "fp16-lean-8bit_lion": ("fp16-lean,states=8bit", "lion", {"max_norm": 1.0}),
    "bf16-lean-accumulate_adamw": ("bf16-lean", "adamw", {"max_norm": 1.0, "accumulate": 2, "ema": 0.95}),
    "fp16-accumulate_sgd": ("fp16", "sgd", {"accumulate": 2, "ema": 0.95}),
    "bf16-lean-release_adamw": ("bf16-lean", "adamw", {"gradient_release": True}),
}


class SmallNet(nn.Module):
    """A convolution with batch norm, one attention block with layer norms, and a head: the layers that precision treats apart."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 2, stride=2)
        self.norm = nn.BatchNorm2d(16)
        self.attend = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.norm(self.stem(x)).flatten(2).transpose(1, 2)
        return self.head(self.attend(x).mean(1))


def batches():
    """Eight batches of six images, made by integer arithmetic, so that they are the same on every machine."""
    numbers = torch.arange(8 * 6 * 36)
    images = ((numbers * 7919 + numbers // 36 * 31) % 509).float().view(8, 6, 1, 6, 6) / 256 - 1
    labels = (images[..., :3, :3].sum((2, 3, 4)) > 0).long() + 2 * (images[..., 3:, 3:].sum((2, 3, 4)) > 0).long()
    return list(zip(images, labels, strict=True))


def train(case, path, num_steps=NUM_STEPS):
    """Losses of the micro-batches of one case, and a digest of the tensors in its checkpoint."""
    precision, optimizer, options = CASES[case]
    torch.manual_seed(0)
    model = SmallNet()
    losses = []
    with halfstep.Engine(model, OPTIMIZERS[optimizer](model.parameters()), precision, **options) as engine:
        for x, y in itertools.islice(itertools.cycle(batches()), num_steps):
            with engine.forward():
                loss = F.cross_entropy(model(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.save(path)
    return losses, digest(path)


def digest(path):
    """One hash over names, dtypes, shapes and bytes of all tensors of a checkpoint, generators left out."""
    from safetensors.torch import load_file

    total = hashlib.sha256()
    for file in sorted(Path(path).glob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            if name.split("/")[0].split(".")[0] != "rng":
                total.update(f"{file.name} {name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def record(folder):
    """Train every case and write what came out."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            losses, checksum = train(case, Path(scratch) / "checkpoint")
        lines = [f"# {checksum}", *(loss.hex() for loss in losses)]
        (folder / f"{case}.txt").write_text("\n".join(lines) + "\n")


def compare(a, b):
    """The cases whose losses or tensors differ."""
    return [case for case in CASES if (a / f"{case}.txt").read_text() != (b / f"{case}.txt").read_text()]


def read_golden(case):
    """Losses of a case by CPU kind."""
    header, *rows = (GOLDEN / f"{case}.txt").read_text().splitlines()
    columns = zip(*(map(float, row.split()) for row in rows), strict=True)
    return dict(zip(header.split(), map(list, columns), strict=True))


def merge(kind, folder):
    """Put recorded losses into tests/golden as the column of this CPU kind."""
    for case in CASES:
        columns = read_golden(case) if (GOLDEN / f"{case}.txt").exists() else {}
        rows = (folder / f"{case}.txt").read_text().splitlines()[1:]
        columns[kind] = [float.fromhex(row) for row in rows]
        lines = [" ".join(columns), *(" ".join(f"{v:.9g}" for v in row) for row in zip(*columns.values(), strict=True))]
        (GOLDEN / f"{case}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["record", folder]:
            record(Path(folder))
        case ["compare", a, b]:
            different = compare(Path(a), Path(b))
            print(f"{len(CASES) - len(different)} of {len(CASES)} cases are bit-identical. {' '.join(different)}")
            sys.exit(bool(different))
        case ["merge", kind, folder]:
            merge(kind, Path(folder))
        case _:
            sys.exit(__doc__)
