"""Images from WebDataset shards: real tar files, found by folder or pattern, divided by rank and worker, resumed exactly."""

import io
import json
import random
import sys
import tarfile

import pytest
import torch

from halfstep.errors import MissingError, SettingError
from halfstep.jobs.data import ShardImages, find_shards
from halfstep.jobs.data.augment import RandAugment
from halfstep.jobs.data.mixing import Mixing
from halfstep.jobs.data.pictures import Augmentation
from halfstep.jobs.data.shards import has_shards
from halfstep.jobs.recipes import read_recipe
from halfstep.jobs.targets import load_target

Image = pytest.importorskip("PIL.Image", reason="Requires: [pillow]")
webdataset = pytest.importorskip("webdataset", reason="Requires: [webdataset]")

# Python 3.12 and later warn whenever a process with threads forks, as every DataLoader with workers does on Linux.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")

SIZES = (7, 5, 9, 4, 6)  # examples per shard: 31


def picture(number, suffix="png"):
    """An image file whose colour is the number."""
    stream = io.BytesIO()
    Image.new("RGB", (10, 8), (number, 0, 0)).save(stream, {"jpg": "JPEG"}.get(suffix, suffix))
    return stream.getvalue()


def write(path, examples):
    """Write a shard with webdataset's own writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for example in examples:
            writer.write(example)


def example(number, suffix="png", **fields):
    return {"__key__": f"ex{number:03d}", suffix: picture(number, suffix), "cls": number} | fields


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Five shards per split, of different sizes; the label of each example is its number."""
    root = tmp_path_factory.mktemp("shards")
    for split in ("train", "val"):
        number = 0
        for index, size in enumerate(SIZES):
            suffix = ("png", "jpg", "webp")[index % 3]
            write(root / split / f"{index:02d}.tar", [example(number + i, suffix) for i in range(size)])
            number += size
    (root / "classes.txt").write_text("".join(f"class {i}\n" for i in range(31)))
    return root


def make(root, split="train", batch_size=3, **options):
    """A loader that decodes in this process by default."""
    settings = {"image_size": 8, "num_workers": 0, "shuffle": 4, "seed": 1, **options}
    return ShardImages(find_shards(str(root)), split, batch_size, **settings)


def labels_of(loader):
    return [labels.tolist() for _, labels in loader]


def flat(batches):
    return [label for batch in batches for label in batch]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_validation_reads_every_example_once(root, num_workers):
    """In complete batches and a short last one; the pixels are those of the example."""
    batches = list(make(root, "val", num_workers=num_workers))
    assert sorted(flat(labels.tolist() for _, labels in batches)) == list(range(31))
    assert [len(labels) for _, labels in batches] == [3] * 10 + [1]
    for images, labels in batches:
        red = images[:, 0].mean((1, 2)) * 0.229 + 0.485
        torch.testing.assert_close(red * 255, labels.float(), atol=3.0, rtol=0)


def test_training_is_shuffled_by_seed_and_epoch(root):
    """Examples once per epoch, in complete batches, another order and other crops in each; equal for equal seeds."""
    loader = make(root)
    first, second = labels_of(loader), labels_of(loader)
    assert first != second
    assert all(len(set(flat(each))) == 30 for each in (first, second))
    assert flat(first) != sorted(flat(first))
    assert labels_of(make(root)) == first
    assert labels_of(make(root, epoch=1)) == second
    assert labels_of(make(root, seed=2)) != first


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("world_size", [2, 5])
def test_ranks_divide_the_shards(root, split, world_size):
    """Every example is on one rank only; training leaves out what does not fill a rank's batch."""
    parts = [flat(labels_of(make(root, split, 2, rank=rank, world_size=world_size))) for rank in range(world_size)]
    together = flat(parts)
    assert len(set(together)) == len(together)
    assert len(together) == 31 if split == "val" else 31 - world_size <= len(together) <= 31


def test_validation_with_fewer_shards_than_ranks_divides_the_examples(root):
    """Seven ranks read five shards; for training they are rejected."""
    parts = [labels_of(make(root, "val", rank=rank, world_size=7)) for rank in range(7)]
    assert sorted(flat(map(flat, parts))) == list(range(31))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(SettingError, match="There are 5 train shards for 7 ranks.*Start at most 5 ranks, or write"):
        make(root, world_size=7)


@pytest.mark.parametrize(("num_workers", "stops"), [(0, (1, 5, 8, 10)), (2, (1, 9))])
def test_resuming_continues_with_exactly_the_following_batches(root, num_workers, stops):
    """Batch by batch and bit by bit, whatever number of workers the new loader would have."""
    for stop in stops:
        loader = make(root, num_workers=num_workers, epoch=1)
        batches = iter(loader)
        for _ in range(stop):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = list(batches)
        again = make(root, num_workers=1)
        again.load_state_dict(state)
        following = list(again)
        assert len(rest) == len(following)
        assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(rest, following, strict=True))
        assert again.epoch == 2


def test_mixed_and_augmented_batches_resume_exactly(root):
    """A recipe's augmentation follows from the position; mixed labels add up to 1, and validation has plain ones."""
    augmentation = Augmentation(RandAugment(), Mixing(0.8, 1.0, 31), "bicubic", reduced=True)
    loader = make(root, epoch=1, augmentation=augmentation)
    batches = iter(loader)
    mixed = [next(batches) for _ in range(4)]
    assert all(labels.shape == (3, 31) for _, labels in mixed)
    assert all(torch.allclose(labels.sum(1), torch.ones(3)) for _, labels in mixed)
    assert any(((labels > 0).sum(1) == 2).any() for _, labels in mixed)
    state, rest = loader.state_dict(), list(batches)
    again = make(root, augmentation=augmentation)
    again.load_state_dict(state)
    following = list(again)
    assert len(rest) == len(following) > 0
    assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(rest, following, strict=True))
    assert {labels.dtype for _, labels in make(root, "val", augmentation=augmentation)} == {torch.int64}


def test_a_recipe_on_shards_needs_the_number_of_images(root):
    """The schedule counts epochs, and shards have no length."""
    for text, fits in (("imagenet", False), ("imagenet,num_images=31", True)):
        recipe = read_recipe(text, "vit_t_16")
        if fits:
            assert load_target("vit_t_16", data_dir=root, recipe=recipe).job.scheduler is not None
            continue
        with pytest.raises(SettingError, match="num_images=N"):
            load_target("vit_t_16", data_dir=root, recipe=recipe)


def test_batches_before_the_position_are_not_decoded(root, monkeypatch):
    """Only a few: one worker reads 8 batches and decodes the last two of them, and those that follow."""
    from halfstep.jobs.data import shard_images

    num_decoded = []
    monkeypatch.setattr(shard_images, "decode", lambda *args: num_decoded.append(1) or torch.zeros(8, 8, 3).numpy())
    loader = make(root)
    loader.load_state_dict({**loader.state_dict(), "batch": 8})
    assert len(list(loader)) == 2
    assert len(num_decoded) == 31 - 6 * 3


def test_a_position_of_other_shards_or_ranks_is_rejected(root, tmp_path):
    """The order would be a different one; and shards that became fewer examples are noticed."""
    state = make(root, rank=1, world_size=2).state_dict()
    with pytest.raises(SettingError, match="world_size=2, but world_size is now 1"):
        make(root).load_state_dict(state)
    write(tmp_path / "x-train-0.tar", [example(0), example(1)])
    with pytest.raises(SettingError, match="with shards="):
        make(tmp_path).load_state_dict(make(root).state_dict())
    shrunk = make(tmp_path, batch_size=1)
    shrunk.load_state_dict({**shrunk.state_dict(), "batch": 3})
    with pytest.raises(SettingError, match="after 3 batches, and the shards of rank 0 now have only 2"):
        list(shrunk)


def test_the_loader_has_no_length(root):
    """Counting the examples would be a pass over all shards."""
    with pytest.raises(TypeError, match="has no length"):
        len(make(root))


def damaged(kind):
    """The content of a shard with some damage."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        noise = random.Random(0).randbytes(30_000)
        for name, content in [
            ("a.png", picture(1)),
            ("a.cls", b"1"),
            ("b.png", picture(2)),
            ("b.cls", b"2"),
            ("c.png", noise),
        ]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    content = stream.getvalue()
    second = content.index(b"b.png")
    return {
        "empty": b"",
        "text": b"not a tar file" * 100,
        "cut": content[: second + 512 + 20],
        "later": content[:-12_000],
        "header": content[:second] + b"\xff" * 512 + content[second + 512 :],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty", "cannot be read near its start: ReadError"),
        ("text", "cannot be read near its start: ReadError"),
        ("cut", "cannot be read near its start: ReadError: unexpected end of data"),
        ("later", "cannot be read after the example 'a': ReadError: unexpected end of data"),
        ("header", "has a damaged header after the example 'a'"),
    ],
)
def test_a_damaged_shard_raises_its_name(tmp_path, kind, message):
    """Whatever webdataset and tarfile make of it; nothing is skipped silently."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "bad.tar").write_bytes(damaged(kind))
    with pytest.raises(SettingError, match=message) as caught:
        list(make(tmp_path, batch_size=1))
    assert str(tmp_path / "train" / "bad.tar") in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"__key__": "k7", "cls": "1"}, "the example 'k7' has no image: none of jpg, jpeg, png, webp is among cls"),
        ({"__key__": "k7", "png": picture(1)}, "the example 'k7' has no label: cls is not among png"),
        ({"__key__": "k7", "png": picture(1), "cls": "cat"}, "the example 'k7' has the label b'cat' in cls"),
        ({"__key__": "k7", "png": picture(1), "cls": 1000}, "the label 1000, but there is no classes.txt next to the shards, so there are 1000"),
        ({"__key__": "k7", "png": b"none", "cls": 1}, "the example 'k7' cannot be decoded .png.: it is not an image in a format"),
    ],
)  # fmt: skip
def test_an_unusable_example_raises_its_shard_and_key(tmp_path, fields, message):
    """Read in a process for the example without an image: the message has no worker's traceback."""
    num_workers = int("png" not in fields)
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        for suffix, content in fields.items():
            if suffix != "__key__":
                content = content if isinstance(content, bytes) else str(content).encode()  # noqa: PLW2901
                member = tarfile.TarInfo(f"k7.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    with pytest.raises(SettingError, match=message) as caught:
        list(make(tmp_path, batch_size=1, num_workers=num_workers))
    assert f"The shard {tmp_path / 'train-0.tar'} " in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_shards_are_found_by_folder_and_pattern(tmp_path):
    """Two layouts of folders, braces, globs and `::`; the file name decides about the split, then the folder."""
    for name in ("in-train-00.tar", "in-train-01.tar", "in-val-0.tar", "train/3.tar", "train/x-validation.tar"):
        write(tmp_path / name, [example(0)])

    def names(shards):
        return {split: [file.removeprefix(f"{tmp_path}/") for file in files] for split, files in shards.files.items()}

    assert names(find_shards(str(tmp_path))) == {
        "train": ["in-train-00.tar", "in-train-01.tar", "train/3.tar"],
        "val": ["in-val-0.tar", "train/x-validation.tar"],
    }
    pattern = f"{tmp_path}/in-train-{{00..01}}.tar::{tmp_path}/*-val-*.tar"
    assert names(find_shards(pattern)) == {"train": ["in-train-00.tar", "in-train-01.tar"], "val": ["in-val-0.tar"]}
    assert has_shards(pattern)
    assert has_shards(str(tmp_path))
    assert not has_shards(str(tmp_path / "nowhere"))


def test_wrong_patterns_are_rejected(tmp_path):
    """Missing files, unknown splits, no training shards, a shard named twice, and anything but a local file."""
    for name in ("train-0.tar", "val-0.tar", "other-0.tar"):
        write(tmp_path / name, [example(0)])
    for pattern, message in [
        (f"{tmp_path}/train-{{0..1}}.tar", f"The shard {tmp_path}/train-1.tar of"),
        (f"{tmp_path}/nothing-*.tar", f"The shard {tmp_path}/nothing-*.tar of"),
        (f"{tmp_path}/other-0.tar", "must contain train or val; rename it"),
        (f"{tmp_path}/val-0.tar", "has no training shards"),
        (f"{tmp_path}/train-0.tar::{tmp_path}/train*.tar", "train-0.tar twice"),
        ("pipe:cat train-0.tar", "is not a file on this machine"),
        ("https://example.com/train-0.tar", "is not a file on this machine"),
    ]:
        with pytest.raises(SettingError) as caught:
            find_shards(pattern)
        assert message in str(caught.value)


def test_a_built_in_target_reads_shards(root, tmp_path, monkeypatch):
    """The number of classes is that of classes.txt; a relative pattern is made absolute; no validation shards, no validation."""
    target = load_target("vit_t_16", data_dir=root)
    assert target.job.call("model").head.out_features == 31
    loader = target.job.call("data", split="val", batch_size=4)
    assert isinstance(loader, ShardImages)
    write(tmp_path / "train-0.tar", [example(0)])
    monkeypatch.chdir(tmp_path)
    pattern = load_target("vit_t_16", data_dir="train-{0..0}.tar")
    assert pattern.data_dir == f"{tmp_path}/train-{{0..0}}.tar"
    assert pattern.job.call("data", split="val", batch_size=4) is None
    with pytest.raises(SettingError, match="is not a file on this machine"):
        load_target("vit_t_16", data_dir="pipe:cat x.tar")


def test_missing_webdataset_raises_an_install_command(root, monkeypatch):
    """The error is raised when the loader is built, not in a worker."""
    monkeypatch.setitem(sys.modules, "webdataset.tariterators", None)
    with pytest.raises(MissingError, match=r'pip install "halfstep\[vision\]"'):
        make(root)


def test_invalid_settings_are_rejected(root):
    """Sizes are checked where they are passed."""
    with pytest.raises(SettingError, match="image_size=0 and shuffle=4 must be at least 1"):
        make(root, image_size=0)
    with pytest.raises(SettingError, match="num_workers='x'"):
        make(root).load_state_dict({**make(root).state_dict(), "num_workers": "x"})
