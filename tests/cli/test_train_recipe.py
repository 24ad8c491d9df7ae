"""`halfstep train --recipe` at the command line."""

import json
import logging
import random

import pytest
import torch
from click.testing import CliRunner

from halfstep.checkpoint.directory import load_checkpoint
from halfstep.checkpoint.export import masters_of
from halfstep.checkpoint.runlog import read_runlog
from halfstep.cli import cli
from halfstep.train.resume import saved_settings

Image = pytest.importorskip("PIL.Image", reason="Requires: [pillow]")

# Python 3.12 and later warn whenever a process with threads forks, as every DataLoader with workers does on Linux.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")

TINY = ("-p", "fp32", "--batch", 4, "--set", "accumulate=1", "--set", "image_size=16", "--set", "warmup_epochs=1")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of 32 training images and 4 validation images, two classes."""
    root = tmp_path_factory.mktemp("images")
    draw = random.Random(0)
    for split, num in (("train", 16), ("val", 2)):
        for name, colour in {"blue": (20, 30, 220), "red": (210, 20, 30)}.items():
            (root / split / name).mkdir(parents=True)
            for number in range(num):
                size = (draw.randint(40, 90), draw.randint(40, 90))
                Image.new("RGB", size, colour).save(root / split / name / f"{number}.jpeg")
    return root


def run(*args):
    """The result of a command."""
    return CliRunner().invoke(cli, [str(a) for a in args])


def train(root, out, *args):
    """The outcome of a run with the recipe."""
    result = run("train", "vit_t_16", "--data", root, "--recipe", "imagenet", *TINY, "--out", out, "--json", *args)
    assert result.exit_code == 0, result.output + str(result.exception)
    return json.loads(result.stdout)


@pytest.mark.slow
def test_a_recipe_trains_and_resumes_bit_for_bit(root, tmp_path, caplog):
    """A few steps of the recipe; stopped after 5 of 12 steps and resumed with another number of workers, the weights and EMA are equal."""
    caplog.set_level(logging.INFO)
    whole = train(root, tmp_path / "whole", "--epochs", 2, "--steps", 12, "--set", "num_workers=1")
    text = caplog.text
    assert "Learning rate 1.563e-06 = 0.0001 * 4 / 256" in text
    assert "image_size 224 -> 16" in text
    assert "epochs 300 -> 2" in text
    assert "Loader: " in text

    log = read_runlog(tmp_path / "whole" / "run.jsonl")
    rates = [step["lr"] for step in log.records]
    assert rates[0] == 0  # the warm-up of one epoch, of 8 steps, is linear from 0
    assert rates[4] == pytest.approx(1e-4 * 4 / 256 / 2)
    assert max(rates) == pytest.approx(rates[8])
    feed = next(event for event in log.events if event["event"] == "feed")
    assert feed["limit"] in {"loader", "model"}
    assert min(feed["loader_images_per_second"], feed["model_images_per_second"]) > 0
    assert feed["num_workers"] == 1
    assert (log.header["config"]["ema"], log.header["config"]["max_norm"]) == (0.9999, None)

    out = tmp_path / "parts"
    train(root, out, "--epochs", 2, "--steps", 5, "--set", "num_workers=0")
    assert saved_settings(out).source.recipe == "imagenet,warmup_epochs=1.0,image_size=16,num_workers=0"
    resumed = run("train", "--resume", "--out", out, "--steps", 12, "--json")
    assert resumed.exit_code == 0, resumed.output
    first, second = (load_checkpoint(c) for c in (whole["checkpoint"], json.loads(resumed.stdout)["checkpoint"]))
    for ema in (False, True):
        tensors, others = masters_of(first, ema=ema), masters_of(second, ema=ema)
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensors[key], others[key]) for key in tensors)

    for args, message in (
        (("--recipe", "imagenet", "--set", "mixup=0"), "and is resumed with --recipe imagenet,mixup=0.0"),
        (("--epochs", 5), "is over 2 epochs and cannot be changed to 5"),
    ):
        result = run("train", "vit_t_16", "--resume", "--out", out, *args)
        assert result.exit_code != 0
        assert message in str(result.exception)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("train", "digits", "--recipe", "imagenet"), "no values for the target 'digits'"),
        (("train", "--recipe", "imagenet"), "no values for the target 'digits'"),
        (("train", "vit_b_16", "--recipe", "imagenet"), "pass --data DIR"),
        (("train", "vit_b_16", "--recipe", "cifar"), "Unknown recipe 'cifar'"),
        (("train", "vit_b_16", "--set", "mixup=0"), "Unknown setting 'mixup'"),
        (("train", "vit_b_16", "--recipe", "imagenet", "--set", "optimizer=onebit-adam"), "both decide the optimizer"),
        (("train", "vit_b_16", "--recipe", "imagenet", "--epochs", 10), "warms up for 20 epochs, and the run has 10"),
        (("train", "vit_b_16", "--recipe", "imagenet", "--set", "epochs=none"), "needs the epochs"),
        (("train", "vit_b_16", "--recipe", "imagenet", "--set", "batch=none"), "needs the batch"),
    ],
)
def test_combinations_that_contradict_the_recipe_are_rejected(args, message, tmp_path):
    """Targets without images, no folder, another optimizer, a run shorter than its warm-up: rejected before anything is written."""
    out = tmp_path / "run"
    result = run(*args, "--out", out)
    assert result.exit_code != 0
    assert message in str(result.exception)
    assert not out.exists()


def test_a_smaller_micro_batch_is_accumulated_to_the_published_batch():
    """--batch alone keeps the global batch of 4096; with accumulate the rate is scaled instead."""
    from halfstep.cli.train import _config_of_recipe
    from halfstep.jobs.recipes import read_recipe

    recipe = read_recipe("imagenet", "vit_l_16")
    config, own = _config_of_recipe(recipe, {"batch": 512}, None)
    assert (config.accumulate, own.global_batch, own.lr) == (8, 4096, recipe.lr)
    config, own = _config_of_recipe(recipe, {"batch": 512, "accumulate": 1}, None)
    assert (config.accumulate, own.lr) == (1, pytest.approx(recipe.lr / 8))
    config, _ = _config_of_recipe(recipe, {"steps": 100}, None)
    assert (config.epochs, config.steps) == (200, 100)  # the schedule is that of 200 epochs
