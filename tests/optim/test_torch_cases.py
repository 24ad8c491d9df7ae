"""torch's own optimizer cases (`optim_db` of its test package), run over the lean class of each."""

import builtins
import inspect
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from halfstep.errors import SettingError
from halfstep.optim.adopt import ADOPTS

PROGRAM = Path(__file__).parents[1] / "torch_optimizer_cases.py"
HOW_NOT_WHAT = {"foreach", "fused", "capturable", "differentiable"}  # arguments that choose torch's implementation
SHAPES = ((5, 3), (7,), (), (0,), (0, 4), (1,))
NAMES = sorted(stock.__name__ for stock in ADOPTS)
every_class = pytest.mark.parametrize("name", NAMES)
from_torch = pytest.mark.slow  # importing torch's test package takes ten seconds on a slow machine


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Inputs and error inputs of every class, by its name."""
    path = tmp_path_factory.mktemp("cases") / "cases.pt"
    subprocess.run([sys.executable, str(PROGRAM), str(path)], check=True, capture_output=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse invariant checks", category=UserWarning)  # torch 2.11
        return torch.load(path, weights_only=False)


def classes(name):
    """Our class and torch's."""
    stock = getattr(torch.optim, name)
    return ADOPTS[stock], stock


def applies(kwargs, cls):
    """Whether a case is about arguments that ours has; the others may only choose an implementation."""
    others = kwargs.keys() - inspect.signature(cls).parameters.keys()
    assert others <= HOW_NOT_WHAT, f"{cls.__name__} lacks {others - HOW_NOT_WHAT}"
    return not others


def inputs_of(cases, name):
    """The arguments of every case of a class that applies to ours."""
    inputs = [kwargs for _, kwargs in cases[name][0] if applies(kwargs, classes(name)[0])]
    assert len(inputs) >= 4
    return inputs


def params(seed=0, shapes=SHAPES):
    """fp32 parameters, 0-dim and empty ones among them."""
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def step_both(ours, theirs, seeds):
    """Step two optimizers on the same gradients, small enough that neither leaves the region where it is smooth."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
            for p, q in zip(group["params"], other["params"], strict=True):
                p.grad = torch.randn(p.shape, generator=generator)
                q.grad = p.grad.clone()
        ours.step()
        theirs.step()


def assert_same(ours, theirs):
    """Weights agree to a few ulp of 1, and states to a few of their own."""
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
            for name, value in theirs.state[q].items():
                if value is not None and not (name == "step" and isinstance(theirs, torch.optim.SGD)):  # it counts none
                    mine = ours.state[p][name].to(value.dtype)
                    torch.testing.assert_close(mine, value, rtol=3e-6, atol=1e-6, check_device=False)


@from_torch
@every_class
def test_every_case_follows_torch(name, cases):
    """Over six steps weights and states are those of torch's single-tensor implementation, to a few ulp."""
    mine, stock = classes(name)
    for kwargs in inputs_of(cases, name):
        ours, theirs = mine(params(), **kwargs), stock(params(), **kwargs, foreach=False)
        step_both(ours, theirs, range(6))
        assert_same(ours, theirs)


@from_torch
@every_class
def test_all_cases_as_groups_of_one_optimizer(name, cases):
    """Groups with different options are stepped by their own."""
    mine, stock = classes(name)
    inputs = inputs_of(cases, name)
    pair = [
        cls([{"params": params(i), **kwargs} for i, kwargs in enumerate(inputs)], lr=1e-3, **how)
        for cls, how in ((mine, {}), (stock, {"foreach": False}))
    ]
    step_both(*pair, range(4))
    assert_same(*pair)


@from_torch
@every_class
def test_state_dicts_go_both_ways(name, cases):
    """In the middle of a run each side loads the other's state and weights, and continues as the other."""
    mine, stock = classes(name)
    for kwargs in inputs_of(cases, name):
        ours, theirs = mine(params(), **kwargs), stock(params(), **kwargs, foreach=False)
        step_both(ours, theirs, range(3))
        new_ours, new_theirs = mine(params(8), **kwargs), stock(params(8), **kwargs, foreach=False)
        for new, old in ((new_ours, theirs), (new_theirs, ours)):
            for p, q in zip(new.param_groups[0]["params"], old.param_groups[0]["params"], strict=True):
                p.data.copy_(q.data)
        new_ours.load_state_dict(theirs.state_dict())
        new_theirs.load_state_dict(ours.torch_state_dict())
        for group in new_theirs.param_groups:
            group["foreach"] = False  # which ours does not save
        step_both(new_ours, theirs, range(3, 6))
        assert_same(new_ours, theirs)
        step_both(ours, new_theirs, range(3, 6))
        assert_same(ours, new_theirs)


@every_class
def test_a_learning_rate_may_be_a_tensor_of_one_element(name):
    """Of no dimension or of one, as in torch; changing it in place changes the next step."""
    cls, _ = classes(name)
    for rate in (torch.tensor(1e-2), torch.tensor([1e-2])):
        ours, reference = cls(params(), lr=rate), cls(params(), lr=1e-2)
        step_both(ours, reference, range(2))
        rate.mul_(0.5)
        reference.param_groups[0]["lr"] = 5e-3
        step_both(ours, reference, range(2, 4))
        assert_same(ours, reference)


@from_torch
@every_class
def test_error_inputs_raise(name, cases):
    """What torch rejects or warns about, ours does as well."""
    cls, _ = classes(name)
    for bad, kwargs, error, at_construction in cases[name][1]:
        if not applies(kwargs, cls):
            continue
        expected = getattr(builtins, error)
        assert at_construction or expected is not Warning
        with warnings.catch_warnings(), pytest.raises(expected):
            warnings.simplefilter("error")
            optimizer = cls(params() if bad is None else bad, **kwargs)
            assert not at_construction, f"{cls.__name__}({kwargs}) was accepted"
            optimizer.step()


@every_class
def test_complex_parameters_and_sparse_gradients_are_rejected_by_name(name):
    """Before anything is changed, with the class and the kind in the message."""
    cls, _ = classes(name)
    other = nn.Parameter(torch.ones(3))
    for kind, param, grad in (
        ("complex parameter", nn.Parameter(torch.ones(2, dtype=torch.complex64)), torch.ones(2, dtype=torch.complex64)),
        ("sparse gradient", nn.Parameter(torch.ones(2)), torch.ones(2).to_sparse()),
    ):
        optimizer = cls([other, param])
        other.grad, param.grad = torch.ones(3), grad
        with pytest.raises(SettingError, match=f"{name} does not support a {kind}"):
            optimizer.step()
        assert torch.equal(other, torch.ones(3))
