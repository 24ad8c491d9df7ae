"""Gradients that are rounding noise in fp32 itself, against those that are only small."""

import functools
from dataclasses import replace

import pytest
import torch

import rehearsal_jobs as jobs
from halfstep.precision.policy import Policy
from halfstep.rehearsal import rehearse
from halfstep.rehearsal.noise import STRENGTH, Probe, changed
from halfstep.rehearsal.proposal import propose

FP16 = Policy.parse("fp16")


@functools.cache
def run(build):
    return rehearse(jobs.stack(build), steps=2, batch=16)


def test_a_gradient_that_is_zero_in_exact_arithmetic_keeps_nothing():
    """The gate of a router with one expert per row; it would be kept if it did not count as noise."""
    result = rehearse(jobs.routed, steps=2, batch=16)
    assert {name for kind, name in result.ledger.noise if kind == "weight gradient"} == {"gate.weight"}
    assert (result.troubles, result.proposal.keep_fp32) == ((), ())
    assert propose(replace(result.ledger, noise=frozenset()), FP16).keep_fp32 == ("gate",)


@pytest.mark.parametrize("build", [jobs.Sigmoids, jobs.DropSigmoids], ids=["plain", "dropout"])
def test_small_gradients_are_not_noise(build):
    """Those behind a deep stack are determined by the model; dropout draws the same numbers in both steps."""
    result = run(build)
    assert result.ledger.noise == frozenset()
    assert "embed" in result.proposal.keep_fp32


def test_the_probe_does_not_count():
    """Rows have the elements of the steps of the rehearsal, though two more were computed."""
    row = next(r for r in run(jobs.Sigmoids).rows if (r.module, r.kind) == ("embed", "activation gradient"))
    assert row.stats.numel == 2 * 16 * jobs.WIDTH


def test_checkpointed_models_are_probed():
    """What is computed again in the backward pass is not disturbed, and the proposal is that of the plain model."""
    assert run(jobs.CheckpointedSigmoids).proposal == run(jobs.Sigmoids).proposal


def test_healthy_models_are_not_probed():
    """Without a finding, the loss is computed once per step."""
    calls = []

    def loss(model, batch):
        calls.append(1)
        return jobs.mlp.loss(model=model, batch=batch)

    rehearse(replace(jobs.mlp, loss=loss), steps=2, batch=16)
    assert len(calls) == 2


def test_values_are_disturbed_by_the_strength_and_masks_stay_finite():
    """By 2^-20 at most, towards 0; strength 0 changes nothing."""
    x = torch.cat([torch.linspace(1.0, 2.0, 100), torch.tensor([torch.finfo(torch.float32).min])])
    y = x.clone()
    Probe(STRENGTH).disturb(y)
    relative = (x.double() - y.double()) / x.double()
    assert relative.min() >= 0
    assert 0.5 * STRENGTH < relative.max() < 1.1 * STRENGTH
    assert y.isfinite().all()
    assert torch.equal(Probe(0.0).disturbed(x), x)


def test_long_gradients_are_sampled_evenly():
    """At most 4096 elements, from the first part to the last."""
    probe = Probe(0.0)
    probe.add(("gradient", "x"), torch.arange(10_000.0).reshape(100, 100))
    (sample,) = probe.samples["gradient", "x"]
    assert 2048 < sample.numel() <= 4096
    assert sample[0] == 0
    assert sample[-1] > 9_990


def test_what_changes_by_half_is_noise():
    """Gradients of other sizes, without a counterpart or with only zeros are not compared."""
    one = torch.ones(4, dtype=torch.float64)
    before = {("g", name): [one] for name in ("same", "near", "far", "longer", "gone")} | {("g", "zero"): [0 * one]}
    after = {
        ("g", "same"): [one],
        ("g", "near"): [1.4 * one],
        ("g", "far"): [1.6 * one],
        ("g", "longer"): [torch.ones(5)],
    }
    assert changed(before, after | {("g", "zero"): [one]}) == {("g", "far")}
