"""Where in a forward pass a value that is not finite came from."""

import math

import pytest
import torch
from torch import nn

from halfstep.watching.forward_trace import ForwardTrace
from halfstep.watching.places import Places
from halfstep.watching.probes import Probes


def trace_of(compute, **named):
    """The origin of the result of a function, with the trace and the ranges."""
    probes = Probes()
    trace = ForwardTrace(Places(nn.Identity()), probes, named)
    with trace:
        result = compute()
    probe = trace.look(result)
    ranges = probes.read()
    return trace.origins(ranges).get(probe), trace, ranges


def name_of(compute, **named):
    """The operation at which the result stopped being finite, or "entered NAME"."""
    origin, trace, _ = trace_of(compute, **named)
    if origin is None:
        return None
    if origin.entered:
        return f"entered {trace.named.get(origin.probe, 'data')}"
    return trace.operations[origin.operation].name


X = torch.tensor([1.0, 2.0, 3.0])


def test_an_operation_that_overflows_is_the_origin():
    """Also where many operations follow."""
    assert name_of(lambda: ((X * 1e38).exp() + 1).tanh() / 0.0 * 0.0) == "div"
    assert name_of(lambda: (X * 1e3).exp().sum() * 2 + 1) == "exp"
    assert name_of(lambda: (X - 5).log().mean()) == "log"


def test_a_finite_result_has_no_origin():
    """Nothing is reported for a healthy pass."""
    assert name_of(lambda: (X * 2).sum(0)) is None


def test_a_mask_that_softmax_absorbs_is_no_fault():
    """Attention masks are -inf; the fault is what came later."""
    mask = torch.tensor([0.0, 0.0, -math.inf])
    assert name_of(lambda: torch.softmax(X + mask, 0).sum()) is None
    assert name_of(lambda: (torch.softmax(X + mask, 0) * 1e3).exp().sum()) == "exp"


@pytest.mark.parametrize("mask", ["added", "filled"])
def test_a_fault_in_masked_scores_is_named_and_not_the_mask(mask):
    """NaN or +inf in the scores meets -inf of the mask in one operation."""
    blocked = torch.tensor([False, False, True])

    def compute():
        scores = (X * 100).exp()
        if mask == "added":
            scores = scores + torch.zeros(3).masked_fill(blocked, -math.inf)
        else:
            scores = scores.masked_fill(blocked, -math.inf)
        return torch.softmax(scores, 0).sum()

    assert name_of(compute) == "exp"


def test_tensors_that_entered_are_told_apart():
    """A parameter by its name, anything else as data."""
    weight, x = torch.tensor([math.inf, 1.0]), torch.tensor([1.0, 2.0])
    assert name_of(lambda: (x * weight).sum(0), weight=weight) == "entered weight"
    assert name_of(lambda: (x * weight).sum(0)) == "entered data"
    assert name_of(lambda: (x.to(torch.float64) * weight.t()[:1].half()).sum(0), weight=weight) == "entered weight"


def test_a_constant_that_is_made_in_the_loss_counts_as_data():
    """No operation computed it; int tensors that are divided did."""
    assert name_of(lambda: (X * torch.full((3,), math.nan)).sum(0)) == "entered data"
    assert name_of(lambda: (X * torch.tensor([1.0, math.nan, 0.0])).sum(0)) == "entered data"
    assert name_of(lambda: X.long().sum() / torch.zeros(1, dtype=torch.int64)) == "div"


def test_writes_into_a_part_of_a_tensor_are_followed():
    """As in an LSTM: one product, four gates as views of it, each changed in place."""

    def compute():
        gates = (X.repeat(2) * 1e38 * 1e10).view(2, 3)
        a, b = gates.unbind(0)
        a.sigmoid_()
        return (b * 2).sum() + a.sum()

    assert name_of(compute) == "mul"


def test_in_place_results_replace_what_was_known():
    """A tensor that became bad in place, and one that was repaired in place."""

    def ruined():
        y = X.clone()
        y.div_(0.0)
        return y.view(1, 3).sum()

    def repaired():
        y = X / 0.0
        y.copy_(X)
        return y.sum()

    assert name_of(ruined) == "div_"
    assert name_of(repaired) is None


def test_memory_that_was_never_written_is_no_origin():
    """torch.empty may contain anything."""

    def compute():
        y = torch.empty(1000)
        y.fill_(2.0)
        return y.sum() / 0.0

    assert name_of(compute) == "div"


def test_a_cast_only_passes_data_on():
    """The entry of a tensor is the operation that computes with it."""
    x = torch.tensor([math.nan])
    origin, trace, ranges = trace_of(lambda: (x.half().clone() @ torch.ones(1, dtype=torch.float16)).to(torch.float32))
    assert origin.entered
    assert trace.entry(origin, ranges).name == "dot"


def test_what_was_absorbed_is_known_for_the_node_of_its_operation():
    """tanh maps inf to 1; its origin is still known where the backward pass asks for it."""
    x = torch.tensor([math.inf, 1.0])
    w = torch.ones(2, requires_grad=True)
    results = []
    origin, trace, ranges = trace_of(lambda: results.append(torch.tanh(w * x)) or results[0].sum())
    assert origin is None
    mul = results[0].grad_fn.next_functions[0][0]
    behind = trace.behind(mul._sequence_nr(), ranges)
    assert behind.entered
    assert trace.of_node(mul._sequence_nr()).name == "mul"


def test_what_a_nanmean_leaves_out_is_the_origin_of_its_nan():
    """All elements are NaN: the mean is 0 / 0, but the fault is where they came from."""
    assert name_of(lambda: (X - 5).log().nanmean()) == "log"
    assert name_of(lambda: torch.cat([X, (X - 5).log()]).nanmean()) is None
    assert name_of(X[X > 5].nanmean) == "div"
