"""What the Engine rejects before it changes anything: each error with the values seen and what to write instead."""

import logging

import pytest
import torch
from torch import nn

from halfstep.engine.checks import check_loss, check_scaler, check_settings, choose_scaler, named_trainables
from halfstep.errors import SettingError
from halfstep.precision.policy import PRESETS
from halfstep.scaling.gradscaler import GradScaler
from halfstep.scaling.scaler import LossScaler, NoScaler, StaticScaler

lr_scheduler = torch.optim.lr_scheduler


def layer():
    return nn.Linear(3, 2)


# --- losses -----------------------------------------------------------------------------------------------------------


def test_a_loss_that_can_be_backpropagated_passes():
    """A scalar, or one element in any shape, with a graph."""
    x = torch.ones(1, requires_grad=True)
    for loss in (x.sum(), x * 2, (x * 2).reshape(1, 1)):
        check_loss(loss)


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (0.5, r"takes the loss tensor, not float; do not call .item\(\)"),
        (None, "not NoneType"),
        ((torch.ones(()),), "not tuple"),
        (torch.ones(4, requires_grad=True) * 2, r"not a loss of shape \(4,\); reduce it first"),
        (torch.zeros(0, requires_grad=True) * 2, r"not a loss of shape \(0,\)"),
        (torch.ones(()), r"that has no graph: it was computed under no_grad \(engine.evaluate\(\)\?\), detached"),
    ],
    ids=["number", "None", "tuple", "vector", "empty", "no graph"],
)
def test_other_losses_are_rejected(loss, match):
    """The message says what came and what to pass."""
    with pytest.raises(SettingError, match=match):
        check_loss(loss)


# --- scalers ----------------------------------------------------------------------------------------------------------


def test_scalers_that_fit_pass():
    """fp16 takes a scaler that scales, the others take none."""
    check_scaler(LossScaler(), "fp16")
    check_scaler(StaticScaler(1), "fp16")
    for compute in ("fp32", "tf32", "bf16"):
        check_scaler(NoScaler(), compute)


def test_fp16_without_a_scaler_is_rejected():
    """The reason and the way to insist are in the message."""
    with pytest.raises(SettingError, match=r"below 6e-08 vanish; use LossScaler\(\), or StaticScaler\(1\)"):
        check_scaler(NoScaler(), "fp16")


@pytest.mark.parametrize("compute", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("scaler", [LossScaler(), StaticScaler(128)], ids=repr)
def test_a_scaler_without_use_is_rejected(scaler, compute):
    """Formats with fp32's range need none."""
    with pytest.raises(SettingError, match=f"has no effect under {compute} compute.*omit scaler="):
        check_scaler(scaler, compute)


# --- settings ---------------------------------------------------------------------------------------------------------


def settings(model=None, optimizers=None, schedulers=(), max_norm=1.0, accumulate=1):
    model = model or layer()
    optimizers = [torch.optim.SGD(model.parameters())] if optimizers is None else optimizers
    check_settings(optimizers, list(schedulers), max_norm, accumulate, None)


@pytest.mark.parametrize(("max_norm", "accumulate"), [(None, 1), (1, 4), (0.5, 100), (1e-3, 1)])
def test_settings_that_work_pass(max_norm, accumulate):
    """Whole and broken norms, None for no clipping, any number of micro-batches."""
    settings(max_norm=max_norm, accumulate=accumulate)


@pytest.mark.parametrize("bad", [0, -1.0, float("inf"), float("nan"), "1.0", True, torch.tensor(1.0)], ids=repr)
def test_a_norm_that_cannot_clip_is_rejected(bad):
    """The message repeats the value and says how not to clip."""
    with pytest.raises(SettingError, match=r"max_norm=.* must be a number above 0; max_norm=None"):
        settings(max_norm=bad)


@pytest.mark.parametrize("bad", [0, -1, 1.0, "2", True, None], ids=repr)
def test_accumulate_is_a_whole_number(bad):
    """The message repeats the value."""
    with pytest.raises(SettingError, match=r"accumulate=.* must be a whole number of micro-batches"):
        settings(accumulate=bad)


def test_optimizers_must_be_torchs():
    """None at all, something else, and LBFGS are rejected by name."""
    with pytest.raises(SettingError, match="is empty"):
        settings(optimizers=[])
    with pytest.raises(SettingError, match="takes torch.optim optimizers, not str"):
        settings(optimizers=["adam"])
    with pytest.raises(SettingError, match="LBFGS calls the model again"):
        settings(optimizers=[torch.optim.LBFGS(layer().parameters())])


def test_schedulers_must_move_the_engines_optimizer():
    """Something without step() and a scheduler of another optimizer are rejected."""
    model, other = layer(), layer()
    mine, foreign = (torch.optim.SGD(m.parameters()) for m in (model, other))
    settings(model, [mine], [lr_scheduler.StepLR(mine, 1)])
    settings(model, [mine, foreign], [lr_scheduler.StepLR(foreign, 1), lr_scheduler.StepLR(mine, 1)])
    settings(model, [mine], [lr_scheduler.ReduceLROnPlateau(mine)])
    with pytest.raises(SettingError, match=r"scheduler='cosine' has no step\(\)"):
        settings(model, [mine], ["cosine"])
    with pytest.raises(SettingError, match="built on another optimizer"):
        settings(model, [mine], [lr_scheduler.StepLR(foreign, 1)])


def test_a_custom_scheduler_is_accepted():
    """Anything with a step() and no optimizer attribute is trusted."""

    class Own:
        def step(self):
            pass

    settings(schedulers=[Own()])


# --- parameters ---------------------------------------------------------------------------------------------------------


def test_trainables_are_found_by_the_models_names():
    """In the optimizers' order, tied ones once, frozen ones included if an optimizer holds them."""
    model = nn.Sequential(layer(), nn.Linear(2, 2))
    model[0].bias.requires_grad_(requires_grad=False)
    first = torch.optim.SGD(model[1].parameters())
    second = torch.optim.SGD(model[0].parameters())
    found = named_trainables(model, [first, second])
    assert list(found) == ["1.weight", "1.bias", "0.weight", "0.bias"]
    assert found["0.weight"] is model[0].weight


def test_a_foreign_parameter_is_rejected():
    """An optimizer of another model, or of the model before .to(), trains nothing."""
    with pytest.raises(
        SettingError, match=r"SGD has 2 of 2 parameters that are not in the model: .* of shape \(2, 3\)"
    ):
        named_trainables(layer(), [torch.optim.SGD(layer().parameters())])


def test_a_parameter_in_two_optimizers_is_rejected():
    """It would be stepped twice."""
    model = layer()
    optimizers = [torch.optim.SGD(model.parameters()), torch.optim.Adam([model.bias])]
    with pytest.raises(SettingError, match="Parameter bias is in two optimizers"):
        named_trainables(model, optimizers)


def test_a_model_without_anything_to_train_is_rejected():
    """All frozen is a mistake."""
    model = layer().requires_grad_(requires_grad=False)
    with pytest.raises(SettingError, match="nothing to train"):
        named_trainables(model, [torch.optim.SGD(model.parameters())])


def test_a_model_on_two_kinds_of_device_is_rejected():
    """Its 16-bit region would be one device's only; the message names what is where."""
    model = torch.nn.Sequential(layer(), torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(SettingError, match=r"on cpu \(0\.weight.*\) and on meta \(1\.weight"):
        named_trainables(model, [torch.optim.SGD(model.parameters())])


def test_idle_parameters_are_logged(caplog):
    """Trainable parameters that no optimizer holds stay as they are, and that is said."""
    model = nn.Sequential(layer(), nn.Linear(2, 2))
    with caplog.at_level(logging.INFO, logger="halfstep"):
        named_trainables(model, [torch.optim.SGD(model[0].parameters())])
    assert "in no optimizer are not updated: 1.weight, 1.bias." in caplog.text


@pytest.mark.parametrize("make", [torch.amp.GradScaler, GradScaler])
def test_a_gradscaler_is_rejected_with_the_same_settings_to_write(make):
    """The message has the LossScaler that behaves like it."""
    theirs = make("cpu", init_scale=256.0, growth_interval=7)
    with pytest.raises(SettingError, match="not GradScaler") as error:
        choose_scaler(theirs, PRESETS["fp16"])
    text = str(error.value).partition("scaler=halfstep.")[2].rstrip(".")
    scaler = eval(text, {"LossScaler": LossScaler})
    assert (scaler.get_scale(), scaler.settings.growth_interval, scaler.settings.semantics) == (256.0, 7, "torch")
    with pytest.raises(SettingError, match="disabled: omit scaler="):
        choose_scaler(make("cpu", enabled=False), PRESETS["fp16"])
    with pytest.raises(SettingError, match="not str"):
        choose_scaler("dynamic", PRESETS["fp16"])
