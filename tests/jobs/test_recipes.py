"""The published recipes."""

import dataclasses
import math

import pytest
import torch

from halfstep.errors import SettingError
from halfstep.jobs.models import vit_t_16
from halfstep.jobs.recipes import PUBLISHED_ACCURACY, Recipe, read_recipe, split_settings
from halfstep.jobs.targets import load_target


def test_values_are_those_of_the_source():
    """He et al. 2022, Table 11, and for what it leaves open the authors' main_finetune.py."""
    base, large, huge = (read_recipe("imagenet", name) for name in ("vit_b_16", "vit_l_16", "vit_h_14"))
    assert dataclasses.asdict(base) == {
        "name": "imagenet", "target": "vit_b_16", "batch": 4096, "accumulate": 1, "epochs": 300, "ema": 0.9999, "max_norm": None,
        "base_lr": 1e-4, "min_lr": 1e-6, "warmup_epochs": 20, "weight_decay": 0.3, "beta1": 0.9, "beta2": 0.95, "drop_path": 0.1,
        "label_smoothing": 0.1, "mixup": 0.8, "cutmix": 1.0, "randaugment": 9.0, "randaugment_std": 0.5, "randaugment_ops": 2,
        "image_size": 224, "num_workers": None, "num_images": None,
    }  # fmt: skip
    assert large == dataclasses.replace(base, target="vit_l_16", epochs=200, drop_path=0.2)
    assert huge == dataclasses.replace(large, target="vit_h_14")
    assert PUBLISHED_ACCURACY == {"vit_b_16": 82.3, "vit_l_16": 82.6, "vit_h_14": 83.1}
    assert base.settings() == {"batch": 4096, "epochs": 300, "ema": 0.9999, "max_norm": None}


def run_of(recipe, **values):
    """The recipe for a run that differs in some values."""
    own = {name: getattr(recipe, name) for name in ("batch", "accumulate", "epochs", "ema", "max_norm")}
    return recipe.for_run(**{**own, **values})


def test_the_learning_rate_scales_with_the_global_batch():
    """lr = base_lr * batch * accumulate / 256; accumulating to the published batch changes nothing, and both are logged."""
    base = read_recipe("imagenet", "vit_b_16")
    assert base.lr == pytest.approx(1.6e-3)
    accumulated = run_of(base, batch=512, accumulate=8)
    assert accumulated.lr == base.lr
    assert "as published" in accumulated.describe()[1]
    smaller = run_of(base, batch=1024)
    assert smaller.lr == pytest.approx(4e-4)
    assert "scaled linearly from the published 4096 (0.0016)" in smaller.describe()[1]


def test_the_log_cites_and_names_changes():
    """The source's accuracy is cited as the source's, and every changed value is listed with the published one."""
    text = "\n".join(run_of(read_recipe("imagenet,drop_path=0.3", "vit_l_16"), epochs=100, max_norm=1.0).describe())
    assert "82.6 % top-1" in text
    assert "Halfstep has not reproduced it" in text
    assert "Changed from the published recipe: drop_path 0.2 -> 0.3, epochs 200 -> 100, max_norm None -> 1.0." in text
    assert "no values for vit_s_16" in read_recipe("imagenet", "vit_s_16").describe()[0]
    assert len(read_recipe("imagenet,num_workers=4", "vit_b_16").describe()) == 2


def test_the_schedule_is_a_warm_up_and_half_a_cosine():
    """The formula of the source's lr_sched.py at every kind of step; afterwards the rate stays at min_lr."""
    recipe = read_recipe("imagenet", "vit_b_16")
    steps = recipe.steps_per_epoch(1_281_167)
    assert steps == 312

    def rate(epoch):
        return recipe.lr * recipe.lr_factor(round(epoch * steps), steps)

    assert rate(0) == 0
    assert rate(10) == pytest.approx(0.8e-3)
    assert rate(20) == pytest.approx(1.6e-3)
    assert rate(160) == pytest.approx(1e-6 + (1.6e-3 - 1e-6) * 0.5)
    assert rate(300) == rate(400) == pytest.approx(1e-6)
    expected = 1e-6 + (1.6e-3 - 1e-6) * 0.5 * (1 + math.cos(math.pi * 30 / 280))
    assert rate(50) == pytest.approx(expected)
    assert run_of(recipe, batch=512, accumulate=8).steps_per_epoch(1_281_167) == 313  # 2502 micro-batches
    flat = run_of(read_recipe("imagenet,warmup_epochs=0,min_lr=1", "vit_b_16"), batch=8)
    assert {flat.lr_factor(step, 10) for step in (0, 1500, 3000)} == {1.0}


def test_norms_biases_and_tokens_do_not_decay():
    """Weight matrices and the patch convolution decay; 1-D parameters, class token and positions do not."""
    recipe = Recipe()
    model = vit_t_16(32, 3)
    decaying = {name for name, p in model.named_parameters() if recipe.decays(name, p.ndim)}
    others = {name for name, _ in model.named_parameters()} - decaying
    assert {name.rpartition(".")[2] for name in decaying} == {"weight"}
    assert not [name for name in decaying if "norm" in name]
    assert {"class_token", "positions", "head.bias", "blocks.0.norm1.weight"} <= others
    assert len(decaying) == 4 * 12 + 2


def test_a_recipe_prints_and_reads_to_the_same_value():
    """str(recipe) names what differs from the source, and read_recipe returns an equal recipe."""
    recipe = read_recipe("imagenet, mixup=0", "vit_l_16", ["base_lr=2e-4", "num_workers=3"])
    assert str(recipe) == "imagenet,base_lr=0.0002,mixup=0.0,num_workers=3"
    assert read_recipe(str(recipe), "vit_l_16") == recipe
    assert recipe.trains_like(read_recipe("imagenet,mixup=0,base_lr=2e-4", "vit_l_16"))
    assert not recipe.trains_like(read_recipe("imagenet", "vit_l_16"))
    assert split_settings(["mixup=0", "seed=1"]) == (["mixup=0"], ["seed=1"])


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("imagenette", "vit_b_16", "Did you mean 'imagenet'"),
        ("imagenet", "digits", "no values for the target 'digits'"),
        ("imagenet", None, "no values for the target 'digits'"),
        ("imagenet", "job.py", "use it with vit_t_16"),
        ("imagenet,mixupp=1", "vit_b_16", "Did you mean 'mixup'"),
        ("imagenet,epochs=3", "vit_b_16", "Unknown setting of the recipe imagenet 'epochs'"),
        ("imagenet,mixup", "vit_b_16", "mixup=VALUE"),
        ("imagenet,mixup=1,mixup=2", "vit_b_16", "set twice"),
        ("imagenet,mixup=much", "vit_b_16", "not a value of type float"),
        ("imagenet,mixup=nan", "vit_b_16", "not a value of type float"),
        ("imagenet,beta2=1", "vit_b_16", "beta2=1.0 of the recipe imagenet must be from 0"),
        ("imagenet,base_lr=-1", "vit_b_16", "base_lr=-1.0"),
        ("imagenet,num_images=0", "vit_b_16", "num_images=0"),
        ("imagenet,num_workers=-1", "vit_b_16", "num_workers=-1"),
    ],
)
def test_bad_recipes_are_rejected(text, target, message):
    """Unknown names, targets without a recipe and impossible values are errors with the known names."""
    with pytest.raises(SettingError, match=message):
        read_recipe(text, target)


def test_what_a_recipe_needs_is_checked():
    """A run shorter than its warm-up, a target without images and a recipe of another target are rejected."""
    recipe = read_recipe("imagenet", "vit_t_16")
    with pytest.raises(SettingError, match="warms up for 20 epochs, and the run has 20"):
        run_of(recipe, epochs=20)
    with pytest.raises(SettingError, match="pass --data DIR"):
        load_target("vit_t_16", recipe=recipe)
    with pytest.raises(SettingError, match="was read for vit_t_16, not for vit_b_16"):
        load_target("vit_b_16", recipe=recipe)


@pytest.fixture
def folder(tmp_path):
    """Three images of one class, per split."""
    image = pytest.importorskip("PIL.Image", reason="Requires: [pillow]")
    for split in ("train", "val"):
        (tmp_path / split / "one").mkdir(parents=True)
        for number in range(3):
            image.new("RGB", (40, 30), (number, 2, 3)).save(tmp_path / split / "one" / f"{number}.png")
    return tmp_path


def test_the_job_has_the_groups_the_rate_and_the_labels_of_the_recipe(folder):
    """The optimizer has two groups with the scaled rate; training labels are probabilities, validation labels numbers."""
    recipe = read_recipe("imagenet,image_size=32,num_workers=0,drop_path=0.2", "vit_t_16")
    target = load_target("vit_t_16", data_dir=folder, recipe=run_of(recipe, batch=2))
    job = target.job
    assert target.recipe == str(recipe)
    model = job.call("model")
    assert (model.drop_path, model.image_size) == (0.2, 32)
    optimizer = job.call("optimizer", model=model)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == sum(
        p.numel() for p in model.parameters()
    )
    job.call("scheduler", optimizer=optimizer)
    assert [group["initial_lr"] for group in optimizer.param_groups] == [1e-4 * 2 / 256] * 2
    assert optimizer.param_groups[0]["lr"] == 0
    (images, labels), *_ = job.call("data", split="train", batch_size=2)
    assert images.shape == (2, 3, 32, 32)
    assert torch.equal(labels, torch.ones(2, 1))
    (_, labels), *_ = job.call("data", split="val", batch_size=2)
    assert labels.dtype == torch.int64
