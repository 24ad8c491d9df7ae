"""Errors estimated from exponents against real casts, and the loss scale against a brute-force sweep."""

import math

import pytest
import torch

import rehearsal_jobs as jobs
from halfstep.backends.context import RunContext
from halfstep.kernels.exponents import count_exponents
from halfstep.precision.formats import BF16, FP16
from halfstep.rehearsal import rehearse
from halfstep.rehearsal.rounding import best_scale, largest_magnitude, relative_error
from halfstep.watching.stats import StatsTable


def stats_of(x):
    return StatsTable(["x"], torch.tensor([x.numel()]).numpy(), count_exponents([x]).table.numpy()).row(0)


def real_error(x, dtype, exponent=0):
    """The relative L2 error of a real cast; inf if it overflows."""
    rounded = torch.ldexp(x, torch.tensor(exponent)).to(dtype).double()
    if not rounded.isfinite().all():
        return math.inf
    return ((rounded / 2.0**exponent - x.double()).norm() / x.double().norm()).item()


@pytest.mark.parametrize("spread", [1, 6, 20])
def test_estimates_equal_real_casts(spread):
    """Within 5 % of the error of a cast, from the normal range to values that are lost, in fp16 and bf16."""
    generator = torch.Generator().manual_seed(spread)
    x = torch.exp2(-spread * torch.rand(20_000, generator=generator)) * torch.randn(20_000, generator=generator).sign()
    stats = stats_of(x)
    for exponent in (-30, -26, -24, -20, -14, -8, 0, 14):
        assert relative_error(stats.bins, FP16, exponent) == pytest.approx(
            real_error(x, torch.float16, exponent), rel=0.05
        )
    assert relative_error(stats.bins, BF16) == pytest.approx(real_error(x, torch.bfloat16), rel=0.05)


def test_nothing_has_no_error():
    """Zeros are exact in every format, and all scales are equally good for them."""
    stats = stats_of(torch.zeros(8))
    assert relative_error(stats.bins, FP16) == 0
    assert best_scale([stats], FP16).error == 0
    assert best_scale([], FP16).error == 0


def test_masks_are_no_values():
    """The lowest number of fp32, which attention masks contain, is not the range of a tensor."""
    x = torch.tensor([1.0, 3.0, torch.finfo(torch.float32).min])
    assert largest_magnitude(stats_of(x)) == 4.0
    assert relative_error(stats_of(x).bins, FP16) < 1e-3


def test_the_scale_leaves_headroom():
    """Not more than a quarter of the largest scale without an overflow, and never one that overflows."""
    for exponent in (-40, -10, 0, 10):
        x = torch.ldexp(torch.randn(1000), torch.tensor(exponent))
        best = best_scale([stats_of(x)], FP16)
        assert best.exponent <= best.highest - 2
        assert math.isfinite(real_error(x, torch.float16, best.highest))
        assert math.isinf(real_error(x, torch.float16, best.highest + 1))


def gradients_of(job):
    """All gradients of one fp32 step: of every module's output, and of the weights of each module together."""
    run = RunContext(seed=0, batch_size=16)
    torch.manual_seed(0)
    model = job.call("model", run)
    gradients = []
    handles = [
        module.register_forward_hook(lambda m, args, y: y.register_hook(gradients.append) and None)
        for module in model.modules()
    ]
    job.call("loss", run, model=model, batch=job.call("data", run, split="train")[0]).backward()
    for handle in handles:
        handle.remove()
    owned = ([p.grad.flatten() for p in module.parameters(recurse=False)] for module in model.modules())
    gradients.extend(torch.cat(own) for own in owned if own)
    return [g for g in gradients if g.any()]


@pytest.mark.parametrize("name", ["mlp", "transformer", "sigmoids"])
def test_the_scale_is_as_good_as_the_best_of_a_sweep(name):
    """Real casts at every power of two: the proposed scale is within 1 % of the least error, or within a factor 4 of its scale."""
    job = getattr(jobs, name)
    gradients = gradients_of(job)

    def sweep(exponent):
        errors = [real_error(g, torch.float16, exponent) for g in gradients]
        return math.sqrt(sum(e * e for e in errors) / len(errors))

    errors = {exponent: sweep(exponent) for exponent in range(-20, 41)}
    best = min(errors, key=errors.get)
    chosen = rehearse(job, steps=1, batch=16).scale.exponent
    assert errors[chosen] <= 1.01 * errors[best] or abs(chosen - best) <= 2
    assert errors[-20] > 1.01 * errors[best]  # the sweep can fail
