"""The SGD reference: one step against float64, many steps against torch's own class."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.kernels.sgd import SGDSettings, sgd_update

EPS32 = torch.finfo(torch.float32).eps


def stated_in_float64(p, g, b, t, settings):
    """SGD as torch's documentation states it, in float64; and the size of its terms."""
    lr = float(settings.lr)
    p, g = p.double(), g.double()
    g = -g if settings.maximize else g
    g_size = g.abs() + settings.weight_decay * p.abs()
    g = g + settings.weight_decay * p
    direction, size = g, g_size
    if b is not None:
        b_size = g_size if t == 1 else settings.momentum * b.double().abs() + g_size
        b = g if t == 1 else settings.momentum * b.double() + (1 - settings.dampening) * g
        direction, size = (g + settings.momentum * b, g_size + b_size) if settings.nesterov else (b, b_size)
    return p - lr * direction, b, torch.maximum(p.abs(), lr * size), size


any_settings = st.builds(
    SGDSettings,
    lr=st.sampled_from([1e-4, 0.1, 1.0]),
    momentum=st.sampled_from([0.5, 0.9, 0.99]),
    dampening=st.sampled_from([0.0, 0.1, 0.9]),
    weight_decay=st.sampled_from([0.0, 1e-4, 0.3]),
    nesterov=st.booleans(),
    maximize=st.booleans(),
)


@given(any_settings, st.booleans(), st.sampled_from([1, 2, 1000]), st.integers(0, 9999), st.integers(-20, 10))
def test_one_step_is_float64s_within_a_few_ulp(settings, has_momentum, t, seed, exponent):
    """Weights and buffer of one step differ from float64 by a few ulp of their largest term."""
    generator = torch.Generator().manual_seed(seed)
    p, g, b = (torch.randn(64, generator=generator) for _ in range(3))
    g, b = g * 2.0**exponent, b * 2.0**exponent if has_momentum else None
    new, buffer = sgd_update(p, g, b, torch.tensor(float(t)), settings)
    exact, exact_buffer, size, buffer_size = stated_in_float64(p, g, b, t, settings)
    assert new.dtype is torch.float32
    assert ((new.double() - exact).abs() <= 6 * EPS32 * torch.maximum(size, exact.abs())).all()
    if has_momentum:
        assert buffer.dtype is torch.float32
        assert ((buffer.double() - exact_buffer).abs() <= 6 * EPS32 * buffer_size).all()
    else:
        assert buffer is None


def test_the_first_gradient_enters_undamped_whatever_is_in_the_buffer():
    """At step 1 the buffer becomes the gradient, even if it contains garbage."""
    settings = SGDSettings(0.1, 0.9, 0.5, 0.0, nesterov=False)
    grad = torch.tensor([1.0, -2.0])
    new, buffer = sgd_update(torch.zeros(2), grad, torch.full((2,), torch.nan), torch.tensor(1.0), settings)
    assert torch.equal(buffer, grad)
    assert torch.equal(new, grad * -0.1)


def test_inputs_are_left_alone():
    """The reference returns new tensors, so that a skipped step can keep the old ones."""
    tensors = [torch.randn(5) for _ in range(3)]
    before = [t.clone() for t in tensors]
    sgd_update(*tensors, torch.tensor(3.0), SGDSettings(0.1, 0.9, 0.0, 0.1, nesterov=True, maximize=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64)], ids=repr)
def test_results_are_fp32_in_the_shape_that_came(shape, lr):
    """A parameter of no dimensions must not become float64 by promotion, even with a float64 learning rate."""
    settings = SGDSettings(lr, 0.9, 0.0, 0.1, nesterov=True)
    for new in sgd_update(torch.rand(shape), torch.rand(shape), torch.rand(shape), torch.tensor(2.0), settings):
        assert new.dtype is torch.float32
        assert new.shape == shape


MOMENTA = [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.4, False), (0.9, 0.0, True)]


@pytest.mark.parametrize(
    ("momentum", "maximize", "weight_decay", "tensor_lr"),
    list(itertools.product(MOMENTA, [False, True], [0.0, 0.01], [False, True])),
)
def test_tracks_torch_over_200_steps(momentum, maximize, weight_decay, tensor_lr):
    """Every combination of options follows torch.optim.SGD in float64."""
    momentum, dampening, nesterov = momentum
    lr = torch.tensor(0.01) if tensor_lr else 0.01
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(6, 5, generator=generator)
    param = torch.nn.Parameter(start.double())
    # torch multiplies float64 weights by the tensor as it is: 0.01 in fp32, as here.
    optimizer = torch.optim.SGD(
        [param],
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
    )
    settings = SGDSettings(lr, momentum, dampening, weight_decay, nesterov, maximize)
    p, buffer = start.clone(), torch.zeros(6, 5) if momentum else None
    for t in range(1, 201):
        grad = torch.sin(p) + torch.randn(6, 5, generator=generator)
        param.grad = grad.double()
        optimizer.step()
        p, buffer = sgd_update(p, grad, buffer, torch.tensor(float(t)), settings)
    scale = max(1.0, p.abs().max().item())
    assert torch.allclose(p.double(), param.detach(), rtol=0, atol=200 * EPS32 * scale)
    if momentum:
        expected = optimizer.state[param]["momentum_buffer"]
        assert torch.allclose(buffer.double(), expected, rtol=0, atol=200 * EPS32 * expected.abs().max().item())
