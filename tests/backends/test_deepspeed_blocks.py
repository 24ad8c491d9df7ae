"""The optimizer and scheduler blocks of a DeepSpeed configuration; `schedules` of deepspeed_program.py compares with DeepSpeed's own."""

import pytest
import torch

from halfstep.backends.deepspeed.blocks import build_optimizer, build_scheduler, is_left_open
from halfstep.errors import SettingError


def params():
    """One parameter."""
    return [torch.nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize(
    ("block", "cls", "settings"),
    [
        ({"type": "Adam"}, torch.optim.AdamW, {"weight_decay": 0.0, "lr": 1e-3}),
        ({"type": "AdamW", "params": {"lr": 0.1}}, torch.optim.AdamW, {"weight_decay": 0.0, "lr": 0.1}),
        ({"type": "adam", "params": {"adam_w_mode": False}}, torch.optim.Adam, {"weight_decay": 0.0}),
        ({"type": "AdamW", "params": {"torch_adam": True}}, torch.optim.AdamW, {"weight_decay": 0.01}),
        (
            {"type": "AdamW", "params": {"betas": [0.8, 0.9], "bias_correction": True}},
            torch.optim.AdamW,
            {"betas": (0.8, 0.9)},
        ),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_optimizers_are_those_that_deepspeed_would_build(block, cls, settings):
    """Adam is AdamW unless adam_w_mode is false, and DeepSpeed's own Adam does not decay weights by default."""
    optimizer = build_optimizer(block, params())
    assert type(optimizer) is cls
    assert {key: optimizer.param_groups[0][key] for key in settings} == settings


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "Lamb"}, "not a class of torch.optim"),
        ({"type": "Lion", "params": {"lr": 1e-4}}, "not a class of torch.optim"),
        ({"type": "sgd"}, "Did you mean 'SGD'"),
        ({"params": {"lr": 0.1}}, '"type" and "params"'),
        ({"type": "AdamW", "params": {"lr": "auto", "eps": 1e-8}}, "optimizer.params.lr"),
        ({"type": "AdamW", "params": {"bias_correction": False}}, "bias_correction"),
        ({"type": "AdamW", "params": {"learning_rate": 0.1}}, "cannot be built"),
        ({"type": "AdamW", "params": {"lr": -1}}, "Invalid learning rate"),
    ],
    ids=str,
)
def test_optimizers_that_torch_does_not_have_are_rejected(block, words):
    """With the key and the reason."""
    with pytest.raises(SettingError, match=words):
        build_optimizer(block, params())


def rates(scheduler, optimizer, count=30):
    """The learning rate of each update."""
    values = []
    for _ in range(count):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def test_a_schedule_rises_and_falls():
    """Two updates at the lowest rate, then up to the highest, then to zero; torch's own classes by name."""
    optimizer = torch.optim.SGD(params(), lr=1.0)
    settings = {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_max_lr": 0.4, "warmup_type": "linear"}
    values = rates(build_scheduler({"type": "WarmupDecayLR", "params": settings}, optimizer), optimizer, 9)
    assert values == pytest.approx([0, 0, 0.2, 0.4, 0.3, 0.2, 0.1, 0, 0])
    step = build_scheduler({"type": "StepLR", "params": {"step_size": 3}}, torch.optim.SGD(params(), lr=1.0))
    assert isinstance(step, torch.optim.lr_scheduler.StepLR)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}}, "class of DeepSpeed"),
        ({"type": "WarmupLr"}, "Did you mean 'WarmupLR'"),
        ({"type": "Optimizer"}, "Unknown scheduler|unknown scheduler"),
        ({"type": "WarmupDecayLR"}, "total_num_steps"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "at least 1"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, "'log' or 'linear'"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 0}}, "above 0"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": 0.1}}, "warmup_num_steps"),
    ],
    ids=str,
)
def test_schedules_that_cannot_be_built_are_rejected(block, words):
    """With the key and the reason."""
    with pytest.raises(SettingError, match=words):
        build_scheduler(block, torch.optim.SGD(params(), lr=1.0))


def test_a_block_of_auto_values_is_left_open():
    """Hugging Face's form: the program has the object."""
    assert is_left_open({"type": "AdamW", "params": {"lr": "auto", "eps": "auto"}})
    assert not is_left_open({"type": "AdamW", "params": {"lr": "auto", "eps": 1e-8}})
    assert not is_left_open({"type": "AdamW"})
