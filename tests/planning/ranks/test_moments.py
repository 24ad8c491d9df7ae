"""The moments at which one GPU out of several could need the most memory."""

from hypothesis import given
from hypothesis import strategies as st

from halfstep.planning.ledger import Event
from halfstep.planning.ranks.moments import moments


def backward(num_layers, activation, gradient):
    """A forward that saves an activation per layer, and a backward that replaces them by gradients."""
    events = [Event(i, activation, "activations") for i in range(num_layers)]
    for i in reversed(range(num_layers)):
        events += [Event(num_layers + i, gradient, "gradients"), Event(i, None)]
    return events


def test_both_ends_of_the_backward_are_moments():
    """A large model has its peak with all gradients, and with sharded ones where all activations are allocated."""
    start, end = moments(backward(4, 10, 100))[0], moments(backward(4, 10, 100))[-1]
    assert start == {"activations": 40, "gradients": 100}
    assert end == {"activations": 10, "gradients": 400}


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 50), st.booleans()), min_size=1, max_size=40),
    st.fractions(0, 3),
)
def test_no_other_moment_needs_more(changes, factor):
    """Whatever share of its gradients a GPU has."""
    events, alive, sizes, largest = [], {}, {"gradients": 0, "activations": 0}, 0
    for block, size, is_gradient in changes:
        if block in alive:
            category, freed = alive.pop(block)
            events.append(Event(block, None))
            sizes[category] -= freed
        else:
            category = "gradients" if is_gradient else "activations"
            alive[block] = category, size
            events.append(Event(block, size, category))
            sizes[category] += size
        largest = max(largest, sizes["activations"] + factor * sizes["gradients"])
    needs = [m.get("activations", 0) + factor * m.get("gradients", 0) for m in moments(events)]
    assert max(needs) == largest
