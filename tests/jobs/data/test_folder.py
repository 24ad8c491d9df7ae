import io
import json
import logging
import random
import sys

import numpy as np
import pytest
import torch

from halfstep.errors import MissingError, SettingError
from halfstep.jobs.data import FolderImages, folder, pictures, scan_folder
from halfstep.jobs.data.augment import RandAugment
from halfstep.jobs.data.mixing import Mixing

Image = pytest.importorskip("PIL.Image", reason="Requires: [pillow]")

# Python 3.12 and later warn whenever a process with threads forks, as every DataLoader with workers does on Linux.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")

COLOURS = {"blue": (20, 30, 220), "green": (30, 200, 40), "red": (210, 20, 30)}
NUM_PER_CLASS = 5


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of 15 train and 15 val images of many shapes and modes, three classes."""
    root = tmp_path_factory.mktemp("images")
    draw = random.Random(0)
    for split in ("train", "val"):
        for name, colour in COLOURS.items():
            (root / split / name).mkdir(parents=True)
            for number in range(NUM_PER_CLASS):
                size = (draw.randint(20, 60), draw.randint(20, 60))
                Image.new("RGB", size, colour).save(root / split / name / f"{number}.jpeg", quality=95)
    return root


def make(root, split="train", batch_size=4, **options):
    """A loader that decodes in this process by default."""
    return FolderImages(scan_folder(root), split, batch_size, **{"image_size": 16, "num_workers": 0, **options})


def equal(first, second):
    """Whether two lists of batches are the same, bit for bit."""
    return len(first) == len(second) and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True)
    )


def save(path, image):
    """Write an image, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def small_folder(root, image=None):
    """A folder with one class and one image per split."""
    for split in ("train", "val"):
        save(root / split / "one" / "1.png", image or Image.new("RGB", (9, 7), (1, 2, 3)))
    return root


def test_classes_are_the_sorted_folders(root):
    """The label of a class is its index in the sorted list, in both splits."""
    images = scan_folder(root)
    assert images.classes == ("blue", "green", "red")
    assert [label for _, label in images.files["val"]] == [0] * 5 + [1] * 5 + [2] * 5


def test_val_covers_every_image_once_in_order(root):
    """Validation covers the entire folder, normalized, with a short last batch."""
    batches = list(make(root, "val"))
    assert [len(labels) for _, labels in batches] == [4, 4, 4, 3]
    images = torch.cat([x for x, _ in batches])
    labels = torch.cat([y for _, y in batches])
    assert images.shape == (15, 3, 16, 16)
    for label, colour in enumerate(COLOURS.values()):
        expected = (torch.tensor(colour) / 255 - torch.tensor(pictures.MEAN)) / torch.tensor(pictures.DEVIATION)
        mean = images[labels == label].mean((0, 2, 3))
        torch.testing.assert_close(mean, expected, atol=0.05, rtol=0.05)


def test_train_drops_the_short_last_batch(root):
    """Fifteen images make three batches of four."""
    loader = make(root)
    assert len(loader) == 3
    assert [len(labels) for _, labels in loader] == [4, 4, 4]


def test_workers_change_nothing(root):
    """Crops and order depend on (seed, epoch, example), not on the workers; the global generator is not used."""
    alone = make(root, seed=3)
    state = torch.get_rng_state()
    reference = [*alone, *alone]
    helped = make(root, seed=3, num_workers=2)
    assert equal(reference, [*helped, *helped])
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_resuming_continues_with_exactly_the_following_batches(root, num_workers):
    """The position counts returned batches, whatever the workers have prefetched."""
    reference = make(root, seed=5, epoch=1)
    every = [*reference, *reference]
    loader = make(root, seed=5, epoch=1, num_workers=num_workers)
    for _ in loader:
        state = json.loads(json.dumps(loader.state_dict()))
        break
    fresh = make(root, seed=5, num_workers=num_workers)
    fresh.load_state_dict(state)
    assert equal(every[1:], [*fresh, *fresh])


def test_abandoning_an_epoch_restarts_it(root):
    """A loop that ends early does not affect the next one, although the workers stay alive."""
    loader = make(root, num_workers=1)
    first = next(iter(loader))
    assert equal([first], list(loader)[:1])


def test_crops_differ_between_epochs_and_seeds(tmp_path):
    """The crop and flip of an image differ for each (seed, epoch)."""
    pattern = Image.effect_noise((40, 40), 100).convert("RGB")
    images = scan_folder(small_folder(tmp_path, pattern))
    decoder = folder._Decoder(images.files["train"], 16, seed=0, train=True)
    pictures = [decoder[epoch, [0]][0] for epoch in range(4)]
    assert not any(torch.equal(pictures[0], other) for other in pictures[1:])
    other_seed = folder._Decoder(images.files["train"], 16, seed=1, train=True)
    assert not torch.equal(pictures[0], other_seed[0, [0]][0])
    assert torch.equal(pictures[0], decoder[0, [0]][0])


def test_random_crops_stay_within_their_limits():
    """A crop box is inside the image, and its area and aspect are within the stated limits."""
    draw = random.Random(1)
    for _ in range(300):
        left, top, right, bottom = pictures.random_crop(100, 60, draw)
        assert 0 <= left < right <= 100
        assert 0 <= top < bottom <= 60
        area, aspect = (right - left) * (bottom - top) / 6000, (right - left) / (bottom - top)
        assert 0.07 < area <= 1
        assert 0.7 < aspect < 1.4


def test_a_very_long_image_is_cropped_at_its_centre():
    """If no allowed aspect ratio fits, the crop is the largest square in the middle."""
    assert pictures.random_crop(1000, 2, random.Random(0)) == (499, 0, 501, 2)


def test_val_crops_the_centre():
    """The box is the centre 87.5 % of the shorter side."""
    assert pictures.centre(80, 40) == (22.5, 2.5, 57.5, 37.5)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_every_mode_becomes_three_channels(tmp_path, mode):
    """Grey, palette, transparent and print images decode without a warning."""
    suffix = "jpg" if mode == "CMYK" else "png"
    for split in ("train", "val"):
        image = Image.new("RGBA" if mode in {"P", "LA"} else "RGB", (12, 10), (200, 100, 50)).convert(mode)
        options = {"transparency": b"\x00\xff"} if mode == "P" else {}
        (tmp_path / split / "one").mkdir(parents=True)
        image.save(tmp_path / split / "one" / f"1.{suffix}", **options)
    ((images, _),) = list(make(tmp_path, "val", 1))
    assert images.shape == (1, 3, 16, 16)


def test_16_bit_grey_keeps_its_values(tmp_path):
    """A grey level of half the 16-bit range decodes to half the 8-bit range, not to white."""
    pixels = np.full((12, 10), 32768, dtype=np.uint16)
    small_folder(tmp_path, Image.fromarray(pixels))
    content = (tmp_path / "val" / "one" / "1.png").read_bytes()
    assert Image.open(io.BytesIO(content)).mode.startswith("I")
    assert np.unique(pictures.decode(content, 16, None)).tolist() == [128]


def test_float_pixels_are_rejected():
    """Their range is unknown; Pillow's conversion makes an image from 0 to 1 black."""
    content = io.BytesIO()
    Image.fromarray(np.full((4, 4), 0.5, dtype=np.float32)).save(content, "TIFF")
    with pytest.raises(ValueError, match="floating-point pixels have no fixed range"):
        pictures.decode(content.getvalue(), 16, None)


def test_the_reason_why_an_image_cannot_be_decoded_is_about_the_file(tmp_path):
    """An empty file and one in another format are named as such, without a buffer's address in memory."""
    small_folder(tmp_path)
    bad = tmp_path / "val" / "one" / "2.png"
    for content, reason in [(b"", "the file is empty"), (b"text", "it is not an image in a format that Pillow reads")]:
        bad.write_bytes(content)
        with pytest.raises(SettingError) as caught:
            list(make(tmp_path, "val", 1))
        assert f"{bad} cannot be decoded: {reason}. Repair" in str(caught.value)


def test_hidden_folders_and_files_are_neither_classes_nor_images(tmp_path):
    """Notebooks leave .ipynb_checkpoints in one split, and macOS leaves ._1.png next to an image."""
    small_folder(tmp_path)
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "val" / "one" / "._1.png").write_bytes(b"x")
    listed = scan_folder(tmp_path)
    assert listed.classes == ("one",)
    assert [len(files) for files in listed.files.values()] == [1, 1]


def test_a_single_class_is_reported(tmp_path, caplog):
    """A folder one level too deep has one class; its loss of zero looks like success."""
    with caplog.at_level(logging.WARNING, "halfstep"):
        scan_folder(small_folder(tmp_path))
    assert "has one class, one: every prediction is right" in caplog.text


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_image_that_cannot_be_decoded_raises_its_name(tmp_path, num_workers):
    """The error names the file without a worker's traceback, and no other image is substituted."""
    small_folder(tmp_path)
    intact = (tmp_path / "val" / "one" / "1.png").read_bytes()
    for name, content in {"2.png": b"", "3.png": intact[: len(intact) // 2], "4.png": b"not an image"}.items():
        bad = tmp_path / "val" / "one" / name
        bad.write_bytes(content)
        loader = make(tmp_path, "val", 1, num_workers=num_workers)
        with pytest.raises(SettingError) as caught:
            list(loader)
        assert f"The image {bad} cannot be decoded: " in str(caught.value)
        assert "Traceback" not in str(caught.value)
        assert loader.state_dict()["examples"] == 1
        bad.unlink()
        if num_workers:
            break


def test_a_folder_with_the_wrong_layout_is_rejected(tmp_path):
    """Missing folders, missing splits, flat splits and different classes each raise their own error."""
    for path, message in [
        (tmp_path / "nowhere", "does not exist or is not a folder"),
        (tmp_path, "has no train and no val folder (it has: nothing)"),
    ]:
        with pytest.raises(SettingError) as caught:
            scan_folder(path)
        assert message in str(caught.value)
    small_folder(tmp_path / "a")
    save(tmp_path / "a" / "val" / "two" / "1.png", Image.new("RGB", (3, 3)))
    with pytest.raises(SettingError, match="train has 1 class folders and .*val has 2.*Only in one of them: two"):
        scan_folder(tmp_path / "a")
    (tmp_path / "b" / "train").mkdir(parents=True)
    (tmp_path / "b" / "val").mkdir()
    with pytest.raises(SettingError, match="train has no class folders; put the images into train/CLASS/"):
        scan_folder(tmp_path / "b")
    for split in ("train", "val"):
        (tmp_path / "b" / split / "one").mkdir()
    with pytest.raises(SettingError, match="There are no images under .*train; expected files ending in .jpg"):
        scan_folder(tmp_path / "b")


def test_ignored_files_are_reported(tmp_path, caplog):
    """Warnings report files that are not images and empty classes."""
    small_folder(tmp_path)
    (tmp_path / "train" / "one" / "notes.txt").write_text("x")
    for split in ("train", "val"):
        (tmp_path / split / "zero").mkdir()
    with caplog.at_level(logging.WARNING, "halfstep"):
        scan_folder(tmp_path)
    assert "1 file(s) under" in caplog.text
    assert "notes.txt" in caplog.text
    assert caplog.text.count("has no images") == 2


def test_missing_pillow_raises_an_install_command(root, monkeypatch):
    """The error is raised when the loader is built, not in a worker."""
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingError, match=r'pip install "halfstep\[vision\]"'):
        make(root)


def test_invalid_settings_are_rejected(root):
    """Image size and split are checked, and the error for a batch larger than the folder has the numbers."""
    with pytest.raises(SettingError, match="image_size=0 must be at least 1"):
        make(root, image_size=0)
    with pytest.raises(SettingError, match="Unknown split 'test'"):
        make(root, "test")
    with pytest.raises(SettingError, match="has 15 examples"):
        make(root, batch_size=16)
    with pytest.raises(SettingError, match="image_size=16, but image_size is now 8"):
        make(root, image_size=8).load_state_dict(make(root).state_dict())


def test_workers_follow_the_cores(root):
    """The default number of workers is the number of cores per process, from 1 to 8."""
    assert [pictures.default_workers(*case) for case in [(64, 1), (8, 2), (1, 2)]] == [8, 4, 1]
    assert make(root, num_workers=None)._workers.num_workers >= 1


def test_workers_share_the_cores_of_one_machine(monkeypatch):
    """Ranks on other machines take no core here; without a launcher all ranks are taken to be here."""
    assert pictures.ranks_here(16) == 16
    variables = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "a"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [pictures.ranks_here(16), pictures.ranks_here(1), pictures.ranks_here(4)] == [8, 1, 4]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("LOCAL_SIZE", "4")  # DeepSpeed's launcher
    assert pictures.ranks_here(16) == 4


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu(root):
    """Pinned pixels are normalized on the device, to the same values as on the CPU."""
    on_gpu, on_cpu = list(make(root, device="cuda", num_workers=1)), list(make(root))
    assert on_gpu[0][0].device.type == "cuda"
    torch.testing.assert_close([x.cpu() for x, _ in on_gpu], [x for x, _ in on_cpu])


def augmentation(**options):
    """What a recipe adds."""
    values = {"randaugment": RandAugment(), "mixing": Mixing(0.8, 1.0, 3), "resample": "bicubic", "reduced": True}
    return pictures.Augmentation(**{**values, **options})


def test_an_augmented_epoch_is_a_function_of_seed_and_epoch(root):
    """Augmentation and mixing depend on neither the workers, nor a resume, nor an earlier epoch; validation has none of them."""
    plain = list(make(root, epoch=3, seed=5))
    whole = list(make(root, epoch=3, seed=5, augmentation=augmentation()))
    assert equal(whole, list(make(root, epoch=3, seed=5, augmentation=augmentation(), num_workers=2)))
    assert not torch.equal(whole[0][0], plain[0][0])
    assert all(labels.shape == (4, 3) and torch.allclose(labels.sum(1), torch.ones(4)) for _, labels in whole)
    first = make(root, epoch=3, seed=5, augmentation=augmentation())
    batches = iter(first)
    next(batches)
    resumed = make(root, epoch=0, seed=5, augmentation=augmentation())
    resumed.load_state_dict(first.state_dict())
    assert equal(whole[1:], list(resumed))
    assert not equal(whole, list(make(root, epoch=4, seed=5, augmentation=augmentation())))
    assert equal(list(make(root, "val")), list(make(root, "val", augmentation=augmentation(resample="bilinear"))))


def test_a_jpeg_is_decoded_at_a_reduced_size(monkeypatch):
    """Decoding at a reduced size gives nearly the same picture from a quarter of the pixels, and never fewer than needed."""
    content = io.BytesIO()
    gradient = Image.linear_gradient("L").resize((640, 480)).convert("RGB")
    gradient.save(content, "JPEG", quality=95)
    sizes = []
    crop = pictures.Augmentation()
    reduced = pictures.Augmentation(reduced=True)
    resize = Image.Image.resize

    def spied(image, *args, **options):
        sizes.append(image.size)
        return resize(image, *args, **options)

    monkeypatch.setattr(Image.Image, "resize", spied)
    for seed in range(20):
        full, small = (
            pictures.decode(content.getvalue(), 64, random.Random(seed), each).astype(int) for each in (crop, reduced)
        )
        assert abs(full - small).max() <= 4
        assert sizes[-2] == (640, 480)
        assert sizes[-1][0] <= 640
        assert sizes[-1][1] >= 60
    assert (160, 120) in sizes
    pictures.decode(content.getvalue(), 64, None, reduced)
    assert sizes[-1] == (640, 480)


def test_the_loader_counts_what_its_workers_decode(root):
    """The number of images and the seconds of the workers give images per second."""
    loader = make(root, num_workers=0)
    assert loader.decoding.rate is None
    list(loader)
    assert loader.decoding.num_images == 12
    assert loader.decoding.rate > 0
