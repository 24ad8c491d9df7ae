"""The EMA of any library."""

import copy

import pytest
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfstep
from halfstep.errors import ExpectationError


class Shadow:
    """As diffusers' EMAModel."""

    def __init__(self, model):
        self.shadow_params = [p.detach().clone() for p in model.parameters()]


class First:
    """As timm's first ModelEma."""

    def __init__(self, model):
        self.ema = copy.deepcopy(model)


class Wrapped(nn.Module):
    """A model with a submodule called `module`, which is no wrapper."""

    def __init__(self):
        super().__init__()
        self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 2)


def averaged(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))


def as_dictionary(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "make", [averaged, Shadow, First, as_dictionary, lambda model: model, lambda model: list(model.parameters())]
)
def test_a_16_bit_ema_is_reported_with_names(make):
    """torch's AveragedModel, a list, a dictionary or a module of bf16 copies fails expect(ema="fp32")."""
    narrow, wide = Wrapped().bfloat16(), Wrapped()
    halfstep.inspect(wide, ema=make(wide)).expect(ema="fp32")
    with pytest.raises(ExpectationError, match="module.weight, module.bias, head.weight"):
        halfstep.inspect(narrow, ema=make(narrow)).expect(ema="fp32")
    assert halfstep.inspect(wide, ema=make(wide)).as_dict()["bytes_per_parameter"]["ema"] == 4.0


def test_a_bf16_ema_of_diffusers_is_reported():
    """diffusers' EMAModel of a bf16 model keeps bf16 copies."""
    training_utils = pytest.importorskip("diffusers.training_utils", reason="diffusers is not installed")
    model = Wrapped().bfloat16()
    with pytest.raises(ExpectationError, match="stop moving"):
        halfstep.inspect(model, ema=training_utils.EMAModel(model.parameters())).expect(ema="fp32")


def test_a_bf16_ema_of_timm_is_reported():
    """timm's ModelEmaV3 of a bf16 model keeps bf16 copies."""
    utils = pytest.importorskip("timm.utils", reason="timm is not installed")
    model = Wrapped().bfloat16()
    with pytest.raises(ExpectationError, match="stop moving"):
        halfstep.inspect(model, ema=utils.ModelEmaV3(model)).expect(ema="fp32")
    model = Wrapped()
    halfstep.inspect(model, ema=utils.ModelEmaV3(model)).expect(ema="fp32")
