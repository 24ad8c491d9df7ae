"""Each optimizer against a slow float64 simulation of its paper: whole runs through every stage, ranks as threads."""

import numpy as np
import pytest
import torch

import onebit_simulation as simulation
from halfstep.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from onebit_cases import SHAPES, gradients, run, start
from thread_ranks import on_threads

COMMON = {"lr": 1e-2, "weight_decay": 0.01}
ZERO_ONE = {"var_freeze_step": 9, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 4}
CASES = {  # class, simulation, steps, settings; each goes through all stages of its schedule
    "adam": (OneBitAdam, simulation.Adam, 11, {"freeze_step": 4}),
    "adam-bias": (OneBitAdam, simulation.Adam, 11, {"freeze_step": 4, "bias_correction": True}),
    "zero-one": (ZeroOneAdam, simulation.ZeroOne, 22, ZERO_ONE),
    "zero-one-bias": (ZeroOneAdam, simulation.ZeroOne, 22, ZERO_ONE | {"bias_correction": True}),
    "lamb": (OneBitLamb, simulation.Lamb, 16, {"freeze_step": 8, "coeff_beta": 0.8}),
    "lamb-bias": (OneBitLamb, simulation.Lamb, 16, {"freeze_step": 8, "coeff_beta": 0.8, "bias_correction": True}),
    "lamb-no-decay": (OneBitLamb, simulation.Lamb, 16, {"freeze_step": 8, "coeff_beta": 0.8, "weight_decay": 0.0}),
}
RANKS = [(name, n) for name in CASES for n in ((1, 2, 3, 4) if "-" not in name.replace("zero-one", "") else (2,))]


@pytest.mark.parametrize(("name", "num_ranks"), RANKS)
def test_runs_are_those_of_the_paper(name, num_ranks):
    """Weights of every rank at every step, within rounding; no sign in these runs depends on rounding."""
    kind, paper, steps, settings = CASES[name]
    settings = COMMON | settings
    history = on_threads(num_ranks, lambda wire: run(wire, kind, settings, steps))
    expected = paper([w.numpy() for w in start()], num_ranks, simulation.Settings(**settings))
    for step in range(steps):
        expected.step([[g.double().numpy().reshape(-1) for g in gradients(step, r)] for r in range(num_ranks)])
        for rank in range(num_ranks):
            for k, shape in enumerate(SHAPES):
                wanted = torch.from_numpy(expected.p[rank][k]).reshape(shape)
                assert (history[rank][step][k].double() - wanted).abs().max() < 3e-6, (step, rank, shape)
    assert expected.closest > 1e-6


def test_a_mask_keeps_untouched_elements_at_rest():
    """Elements that never have a gradient keep their weight under a mask, and others are those of the paper."""
    mask = torch.ones(6, 4)
    mask[3:] = 0
    first = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

    def masked_run(wire):
        param = torch.nn.Parameter(first.clone())
        groups = [{"params": [param], "exp_avg_mask": mask}]
        optimizer = OneBitAdam(groups, lr=1e-2, freeze_step=4, allow_unverified=True)
        optimizer._wire = wire
        for step in range(12):
            generator = torch.Generator().manual_seed(100 * step + wire.rank)
            param.grad = torch.randn(6, 4, generator=generator) * mask
            optimizer.step()
        return param.detach()

    weights = on_threads(2, masked_run)
    expected = simulation.Adam(
        [first.numpy()], 2, simulation.Settings(lr=1e-2, freeze_step=4), masks=[mask.double().numpy().reshape(-1)]
    )
    for step in range(12):
        grads = [
            torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + r)).double() * mask for r in range(2)
        ]
        expected.step([[g.numpy().reshape(-1)] for g in grads])
    for weight in weights:
        assert torch.equal(weight[3:], first[3:])
        assert np.abs(weight.double().numpy().reshape(-1) - expected.p[0][0]).max() < 3e-6
