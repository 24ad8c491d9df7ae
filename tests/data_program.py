"""What `tests/train/test_data_ranks.py` runs on each of two gloo ranks: one JSON line per case."""

import io
import json
import logging
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import halfstep
from halfstep.backends.context import RunContext
from halfstep.checkpoint.rng import restore_rng, rng_state
from halfstep.errors import HalfstepError
from halfstep.jobs.data import DigitsLoader, ShardImages, find_shards
from halfstep.jobs.job import Job
from halfstep.train.stream import DataStream

EXAMPLES = torch.arange(22)


def distributed(kind, batch_size, rank, world_size, seed, **options):
    sampler = DistributedSampler(EXAMPLES, world_size, rank, seed=seed, drop_last=True)
    return kind(EXAMPLES, batch_size, sampler=sampler, **options)


class Part(IterableDataset):
    """Every W-th number: 22 on 3 ranks or 7 on 2 are uneven; no length."""

    def __init__(self, num, rank, world_size):
        self.numbers = range(rank, num, world_size)

    def __iter__(self):
        return iter(self.numbers)


DATA = {
    "sampler": lambda batch_size, rank, world_size, seed: distributed(DataLoader, batch_size, rank, world_size, seed),
    "stateful": lambda batch_size, rank, world_size, seed: distributed(
        StatefulDataLoader, batch_size, rank, world_size, seed
    ),
    "workers": lambda batch_size, rank, world_size, seed: distributed(
        StatefulDataLoader, batch_size, rank, world_size, seed, num_workers=1
    ),
    "uneven": lambda batch_size, rank, world_size: DataLoader(Part(15, rank, world_size), batch_size),
    "one rank has none": lambda batch_size, rank, world_size: DataLoader(Part(7, rank, world_size), batch_size),
    "tail": lambda batch_size, rank, world_size, seed: DigitsLoader(
        "train", 718 if batch_size == 3 else 359, rank=rank, world_size=world_size, seed=seed, drop_last=False
    ),
}
REJECTED = {
    "same list": lambda: [torch.ones(2), torch.zeros(2)],
    "whole dataset": lambda batch_size: DataLoader(EXAMPLES, batch_size, shuffle=True),
    "wrong sampler": lambda batch_size, rank: DataLoader(
        EXAMPLES, batch_size, sampler=DistributedSampler(EXAMPLES, 3, 0)
    ),
    "constant on purpose": lambda rank: [torch.ones(2), torch.zeros(2)],
}


def job(data):
    return Job(model=lambda: torch.nn.Linear(1, 1), data=data, loss=lambda model: None, optimizer=lambda params: None)


def stream(data, batch_size=3, rank=None, world_size=None):
    rank, world_size = rank if rank is not None else dist.get_rank(), world_size or dist.get_world_size()
    return DataStream(
        job(data), RunContext(batch_size=batch_size, rank=rank, world_size=world_size, seed=5), split="train"
    )


def plain(batch):
    return (batch[1] if isinstance(batch, list | tuple) else batch).tolist()


def epoch_of(data, epoch):
    return [(plain(batch), data.share.num_examples, data.share.weight) for batch in data.batches(epoch)]


def show(**values):
    print(json.dumps(values), flush=True)


def sharing():
    """Two epochs of each kind of data."""
    for name, data in DATA.items():
        source = stream(data)
        show(case="epochs", name=name, epochs=[epoch_of(source, 0), epoch_of(source, 1)])


def shards():
    """Two epochs of shards of 3, 2, 4 and 4 images, resumed after the second batch."""
    from PIL import Image
    from webdataset import TarWriter

    with tempfile.TemporaryDirectory() as folder:
        number = 0
        for index, size in enumerate((3, 2, 4, 4)):
            with TarWriter(f"{folder}/train-{index}.tar") as writer:
                for _ in range(size):
                    image = io.BytesIO()
                    Image.new("RGB", (9, 9), (number, 0, 0)).save(image, "PNG")
                    writer.write({"__key__": str(number), "png": image.getvalue(), "cls": number})
                    number += 1
        found = find_shards(folder)

        def data(batch_size, rank, world_size, seed):
            settings = {"rank": rank, "world_size": world_size, "seed": seed, "image_size": 8, "num_workers": 0}
            return ShardImages(found, "train", batch_size, **settings)

        source = stream(data, 2)
        epochs = [epoch_of(source, 0), epoch_of(source, 1)]
        first = stream(data, 2)
        batches = first.batches(1)
        next(batches), next(batches)
        again = stream(data, 2)
        again.restore(first.state())
        rest = [(plain(batch), again.share.num_examples, again.share.weight) for batch in again.batches(1)]
        show(case="epochs", name="shards", epochs=epochs, same=rest == epochs[1][2:])


def resuming():
    """Stop in the second epoch after some batches, save, and continue in a new stream."""
    for name in ("sampler", "stateful", "workers", "uneven"):
        torch.manual_seed(dist.get_rank())
        first = stream(DATA[name])
        list(first.batches(0))
        batches = first.batches(1)
        for _ in range(2):
            next(batches)
        state, rng = first.state(), rng_state()
        expected = [(plain(batch), first.share.weight) for batch in batches]
        torch.rand(9)
        again = stream(DATA[name])
        again.restore(state)
        restore_rng(rng)
        rest = [(plain(batch), again.share.weight) for batch in again.batches(1)]
        show(case="resume", name=name, same=rest == expected, rest=len(rest))


def moving():
    """A position saved by one process, restored on the two ranks: what one process has left is what they have together."""
    for name, data, sizes in (
        ("sampler", DATA["sampler"], (6, 3)), ("stateful", DATA["stateful"], (6, 3)), ("tail", DATA["tail"], (3, 0)), ("uneven", DATA["sampler"], (5, 3)),
    ):  # fmt: skip
        one = stream(data, sizes[0], 0, 1)
        list(one.batches(0))
        batches = one.batches(1)
        next(batches)
        state = one.state()
        rest = [number for batch in batches for number in plain(batch)]
        again = stream(data, sizes[1])
        again.restore(state)
        try:
            own = [number for batch in again.batches(1) if again.share.num_examples for number in plain(batch)]
        except HalfstepError as error:
            show(case="move", name=name, error=str(error))
            continue
        parts = [None, None]
        dist.all_gather_object(parts, own)
        show(case="move", name=name, rest=sorted(rest), parts=sorted(parts[0] + parts[1]))
    alone = stream(DATA["sampler"])
    next(alone.batches(0))
    other = stream(DATA["sampler"])
    other.restore(alone.state() | {"rank": 1 - dist.get_rank()})
    try:
        next(other.batches(0))
    except HalfstepError as error:
        show(case="move", name="other rank", error=str(error))


def rejecting():
    """Data that does not know about ranks."""
    for name, data in REJECTED.items():
        records = []
        handler = logging.Handler()
        handler.emit = lambda record, records=records: records.append(record.getMessage())
        logging.getLogger("halfstep").addHandler(handler)
        try:
            result = len(list(stream(data).batches(0)))
        except HalfstepError as error:
            result = str(error)
        logging.getLogger("halfstep").removeHandler(handler)
        show(case="reject", name=name, result=result, warnings=records)


def training():
    """Uneven data trains as one process with all examples in one batch: the weights after an epoch."""
    inputs = torch.linspace(-1, 1, 17).reshape(-1, 1)
    targets = (inputs * 3).sin()
    for accumulate in (1, 2):
        for ranks in (1, 2):
            rank = dist.get_rank() if ranks == 2 else 0
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
            module = torch.nn.parallel.DistributedDataParallel(model) if ranks == 2 else model
            engine = halfstep.Engine(module, torch.optim.SGD(model.parameters(), 0.3), "fp32", accumulate=accumulate)

            def data(batch_size, rank, world_size):
                chunks = torch.arange(len(inputs)).split(batch_size * world_size)
                parts = [chunk.tensor_split(world_size)[rank] for chunk in chunks]
                return [(inputs[part], targets[part]) for part in parts if len(part)]

            source = stream(data, 8 // ranks, rank, ranks)
            for x, y in source.batches(0):
                with engine.forward():
                    loss = F.mse_loss(module(x), y)
                engine.backward(loss, weight=source.share.weight)
                engine.step()
            if engine.in_window:
                engine.step(last=True)
            engine.close()
            weights = [number for p in model.parameters() for number in p.flatten().tolist()]
            show(
                case="training",
                accumulate=accumulate,
                world_size=ranks,
                weights=weights,
                steps=engine.progress.attempts,
            )


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "This process .* is multi-threaded")
    dist.init_process_group("gloo")
    for part in sys.argv[1:]:
        globals()[part]()
    dist.destroy_process_group()
