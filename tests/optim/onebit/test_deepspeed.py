"""DeepSpeed: its recorded trajectories, and the optimizer blocks of its configurations."""

import json
import logging
from pathlib import Path

import pytest
import torch

from halfstep import optim
from halfstep.errors import SettingError
from onebit_cases import COMPARED, SHAPES, run
from thread_ranks import on_threads

RECORDED = json.loads(Path(__file__).with_name("deepspeed_0196.json").read_text())["weights of rank 0 by step"]


@pytest.mark.parametrize("name", COMPARED)
def test_trajectories_of_deepspeed_are_reproduced(name):
    """60 to 90 fp32 steps on 2 ranks, within 2e-6; `benchmarks/compare_onebit.py` recorded DeepSpeed 0.19.6."""
    settings, steps = COMPARED[name]
    settings = settings | {"deepspeed_compat": True}
    history = on_threads(2, lambda wire: run(wire, getattr(optim, name), settings, steps + 1))[0]
    assert len(RECORDED[name]) == steps // 10
    for step, weights in RECORDED[name].items():
        for shape, actual, expected in zip(SHAPES, history[int(step)], weights, strict=True):
            assert (actual.double() - torch.tensor(expected, dtype=torch.float64).view(shape)).abs().max() < 2e-6


def block(kind, **params):
    return {"type": kind, "params": params}


def params():
    return [torch.nn.Parameter(torch.ones(4))]


def test_a_block_of_each_type_is_read():
    """Values of the file arrive, in any case of the type's name."""
    adam = optim.from_deepspeed(block("OneBitAdam", lr=2e-4, freeze_step=400, betas=[0.8, 0.9]), params())
    assert type(adam) is optim.OneBitAdam
    assert adam.policy.freeze_step == 400
    assert (adam.param_groups[0]["lr"], adam.param_groups[0]["betas"]) == (2e-4, (0.8, 0.9))
    zero_one = optim.from_deepspeed(block("zerooneadam", var_freeze_step=10, local_step_clipper=8), params())
    assert type(zero_one) is optim.ZeroOneAdam
    assert (zero_one.policy.var_freeze_step, zero_one.policy.local_step_clipper) == (10, 8)
    assert zero_one.policy.local_step_scaler == 32678
    lamb = optim.from_deepspeed(block("OneBitLamb", max_coeff=0.3, freeze_step=1000, factor_max=2.0), params())
    assert type(lamb) is optim.OneBitLamb
    assert (lamb.param_groups[0]["max_coeff"], lamb.factor_max) == (0.3, 2.0)


def test_halfsteps_own_settings_are_passed_along():
    """Keyword arguments go to the class, and replace those of the block."""
    optimizer = optim.from_deepspeed(
        block("OneBitAdam", lr=1.0), params(), lr=0.5, allow_unverified=True, master="fp32"
    )
    assert optimizer.allow_unverified
    assert (optimizer.master, optimizer.param_groups[0]["lr"]) == ("fp32", 0.5)


def test_keys_without_effect_are_logged(caplog):
    """DeepSpeed's transport and its unused bias_correction are left out, which is logged; the setting of the call counts."""
    caplog.set_level(logging.INFO, "halfstep")
    made = optim.from_deepspeed(
        block("OneBitAdam", comm_backend_name="nccl", cuda_aware=False, bias_correction=True, eps_inside_sqrt=False),
        params(),
    )
    assert not made.param_groups[0]["bias_correction"]
    assert "comm_backend_name='nccl'" in caplog.text
    assert "bias_correction=true of the file is left out" in caplog.text
    corrected = optim.from_deepspeed(block("OneBitAdam", bias_correction=True), params(), bias_correction=True)
    assert corrected.param_groups[0]["bias_correction"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (block("AdamW"), "Unknown optimizer type 'AdamW'"),
        (block("OneBitAdam", freeze_stp=3), "Did you mean 'freeze_step'"),
        (block("OneBitAdam", max_coeff=3), "Unknown parameter of OneBitAdam 'max_coeff'"),
        (block("OneBitAdam", lr="auto"), "optimizer.params.lr is 'auto'"),
        (block("OneBitLamb", max_grad_norm=1.0), "never clipped"),
        (block("OneBitAdam", eps_inside_sqrt=True), "eps_inside_sqrt"),
        (block("ZeroOneAdam", amsgrad=True), "does not support amsgrad"),
    ],
)
def test_what_cannot_be_used_is_rejected(bad, message):
    """By name, with the reason."""
    with pytest.raises(SettingError, match=message):
        optim.from_deepspeed(bad, params())
