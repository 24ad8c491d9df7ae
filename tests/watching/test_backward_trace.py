"""Which node of a backward pass first gave a gradient that is not finite."""

import math

import torch

from halfstep.watching.backward_trace import BackwardTrace
from halfstep.watching.probes import Probes


def origin_of(loss):
    """The origin in the backward pass of a loss, and the name of its node."""
    probes = Probes()
    trace = BackwardTrace(probes)
    with trace.of_graph([loss]):
        loss.backward()
    ranges = probes.read()
    origin = trace.origin(ranges)
    return (None, None) if origin is None else (origin, trace.nodes[origin.node].name)


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


def test_a_healthy_pass_has_no_origin():
    """Finite gradients everywhere."""
    assert origin_of((leaf(1.0, 2.0) * 3).sum()) == (None, None)


def test_the_node_whose_result_is_not_finite_is_named():
    """sqrt at 0, with nodes before and after it."""
    origin, name = origin_of(((leaf(0.0, 1.0) * 2).sqrt() * 3).sum())
    assert name == "SqrtBackward0"
    assert not origin.arrived


def test_the_parameter_is_known_where_the_node_leads_to_it():
    """The identity of the leaf."""
    x = leaf(0.0)
    origin, _ = origin_of(x.sqrt().sum())
    assert origin.parameter == id(x)


def test_a_hook_that_ruins_a_gradient_is_told_from_the_node_that_receives_it():
    """All producers were finite, so it happened on the way."""
    y = leaf(1.0) * 2
    y.register_hook(lambda g: g * math.inf)
    origin, name = origin_of((y * 3).sum())
    assert name == "MulBackward0"
    assert origin.arrived


def test_a_sum_of_branches_that_overflows_is_told_too():
    """Each branch is finite in fp16, and their sum is not."""
    x = leaf(1.0)
    y = x.half() * 1
    origin, _ = origin_of((y * 60000).float().sum() + (y * 60001).float().sum())
    assert origin.arrived


def test_a_gradient_that_is_absorbed_is_no_fault():
    """inf at a unit that relu switched off becomes 0."""
    x = leaf(-1.0, 1.0)
    y = torch.relu(x)
    y.register_hook(lambda g: g + torch.tensor([math.inf, 0.0]))
    assert origin_of(y.sum()) == (None, None)
    assert x.grad.tolist() == [0.0, 1.0]


def test_hooks_are_gone_afterwards():
    """Also those on the accumulation of a parameter, which lives longer than the graph."""
    x = leaf(1.0)
    kept = x.expand_as(x).grad_fn.next_functions[0][0]
    probes = Probes()
    with BackwardTrace(probes).of_graph([x * 2]):
        pass
    (x * 2).sum().backward()
    assert kept is not None
    assert probes.read() == []
