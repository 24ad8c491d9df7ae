"""The Adam reference: one step against float64, many steps against torch's own classes."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.kernels.adamw import AdamSettings, adamw_update

EPS32 = torch.finfo(torch.float32).eps


def stated_in_float64(p, g, m, v, largest, t, settings):
    """Adam as its paper and torch's documentation state it, in float64, by scalars; and the size of its terms."""
    lr, (b1, b2) = float(settings.lr), settings.betas
    p, g, m, v = (x.double() for x in (p, g, m, v))
    g = -g if settings.maximize else g
    g_size = g.abs()  # of its terms, which may cancel
    if settings.decoupled:
        p = p - lr * settings.weight_decay * p
    else:
        g_size = torch.maximum(g_size, settings.weight_decay * p.abs())
        g = g + settings.weight_decay * p
    m_size = torch.maximum(m.abs(), g_size)
    v_size = torch.maximum(v, g_size**2)
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    if settings.amsgrad:
        largest = torch.maximum(largest.double(), v)
    m_hat, v_hat = m / (1 - b1**t), (largest if settings.amsgrad else v) / (1 - b2**t)
    update = lr * m_hat / (v_hat.sqrt() + settings.eps)
    size = lr * m_size / (1 - b1**t) / (v_hat.sqrt() + settings.eps)
    return p - update, m, v, largest, torch.maximum(p.abs(), size), m_size, v_size


any_settings = st.builds(
    AdamSettings,
    lr=st.sampled_from([1e-5, 1e-3, 0.1, 1.0]),
    betas=st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.9, 0.99, 0.999, 0.99999])),
    eps=st.sampled_from([1e-8, 1e-6, 1e-3]),
    weight_decay=st.sampled_from([0.0, 1e-2, 0.3]),
    decoupled=st.booleans(),
    maximize=st.booleans(),
    amsgrad=st.booleans(),
)


@given(any_settings, st.integers(1, 200_000), st.integers(0, 9999), st.integers(-20, 6))
def test_one_step_is_float64s_within_a_few_ulp(settings, t, seed, exponent):
    """Weights and moments of one step differ from float64 by a few ulp of their largest term, at any step number."""
    generator = torch.Generator().manual_seed(seed)
    p, g, m = (torch.randn(64, generator=generator) for _ in range(3))
    g, m = g * 2.0**exponent, m * 2.0**exponent
    v = torch.rand(64, generator=generator) * 2.0 ** (2 * exponent)
    largest = v * 1.5 if settings.amsgrad else None
    new = adamw_update(p, g, m, v, largest, torch.tensor(float(t)), settings)
    *stated, p_size, m_size, v_size = stated_in_float64(p, g, m, v, largest, t, settings)
    for ours, exact, size in zip(new, stated, (p_size, m_size, v_size, v_size), strict=True):
        if exact is None:
            assert ours is None
            continue
        assert ours.dtype is torch.float32
        bound = 8 * EPS32 * torch.maximum(size, exact.abs()) + 1e-44
        assert ((ours.double() - exact).abs() <= bound).all()


def test_the_first_step_moves_by_the_learning_rate():
    """At step 1 the corrections cancel the decay factors: the update is lr times the gradient's sign."""
    settings = AdamSettings(1e-3, (0.9, 0.999), 0.0, 0.0, decoupled=True)
    grad = torch.tensor([1e-10, -3e-6, 0.5, -2000.0])
    zeros = torch.zeros(4)
    new = adamw_update(zeros, grad, zeros, zeros, None, torch.tensor(1.0), settings)[0]
    assert torch.allclose(new, -1e-3 * grad.sign(), rtol=4 * EPS32, atol=0)


def test_without_memory_the_first_moment_is_the_gradient():
    """With beta1 = 0 an old moment leaves no trace, however much larger than the gradient it was; torch's does not."""
    settings = AdamSettings(1e-3, (0.0, 0.999), 1e-8, 0.0, decoupled=True)
    grad, old = torch.tensor([1e-5, -3.3e-3, 1.0]), torch.tensor([1e4, 7.7, -123.0])
    m = adamw_update(torch.zeros(3), grad, old, torch.ones(3), None, torch.tensor(9.0), settings)[1]
    assert torch.equal(m, grad)


def test_inputs_are_left_alone():
    """The reference returns new tensors, so that a skipped step can keep the old ones."""
    tensors = [torch.randn(5) for _ in range(3)] + [torch.rand(5), torch.rand(5)]
    before = [t.clone() for t in tensors]
    settings = AdamSettings(0.1, (0.9, 0.99), 1e-8, 0.1, decoupled=True, maximize=True, amsgrad=True)
    adamw_update(*tensors, torch.tensor(3.0), settings)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64)], ids=repr)
@pytest.mark.parametrize("decoupled", [True, False])
def test_results_are_fp32_in_the_shape_that_came(shape, lr, decoupled):
    """A parameter of no dimensions, such as a temperature, must not become float64 by promotion."""
    settings = AdamSettings(lr, (0.9, 0.99), 1e-8, 0.1, decoupled=decoupled, amsgrad=True)
    tensors = [torch.rand(shape) for _ in range(5)]
    for new in adamw_update(*tensors, torch.tensor(2.0), settings):
        assert new.dtype is torch.float32
        assert new.shape == shape


CASES = list(itertools.product([True, False], [False, True], [False, True], [0.0, 0.1], [False, True]))


@pytest.mark.parametrize(("decoupled", "amsgrad", "maximize", "weight_decay", "tensor_lr"), CASES)
def test_tracks_torch_over_200_steps(decoupled, amsgrad, maximize, weight_decay, tensor_lr):
    """Every combination of arguments follows torch.optim in float64, on noisy gradients of a moving target."""
    lr = torch.tensor(0.01) if tensor_lr else 0.01
    stock = torch.optim.AdamW if decoupled else torch.optim.Adam
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(6, 5, generator=generator)
    param = torch.nn.Parameter(start.double())
    arguments = {"weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize}
    optimizer = stock([param], lr=lr, betas=(0.8, 0.95), **arguments)
    settings = AdamSettings(
        lr, (0.8, 0.95), 1e-8, weight_decay, decoupled=decoupled, maximize=maximize, amsgrad=amsgrad
    )
    p, m, v = start.clone(), torch.zeros(6, 5), torch.zeros(6, 5)
    largest = torch.zeros(6, 5) if amsgrad else None
    for t in range(1, 201):
        grad = torch.sin(p) + torch.randn(6, 5, generator=generator) * (1 + t % 7)
        param.grad = grad.double()
        optimizer.step()
        p, m, v, largest = adamw_update(p, grad, m, v, largest, torch.tensor(float(t)), settings)
    state = optimizer.state[param]
    # fp32 steps of 0.01 on numbers near 1: 200 of them wander by some ulp each.
    assert torch.allclose(p.double(), param.detach(), rtol=0, atol=200 * EPS32)
    assert torch.allclose(m.double(), state["exp_avg"], rtol=0, atol=100 * EPS32)
    assert torch.allclose(v.double(), state["exp_avg_sq"], rtol=100 * EPS32, atol=0)
    if amsgrad:
        assert torch.allclose(largest.double(), state["max_exp_avg_sq"], rtol=100 * EPS32, atol=0)
