"""When two events can happen in one pass."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.check.script.flow.event import Event, Guard, compatible, is_accumulation
from halfstep.check.script.syntax.outline import Function

MODULE = Function(ast.Module([], []), "<module>")


def event(*guards):
    return Event("step", ast.Pass(), MODULE, guards=tuple(Guard(*guard) for guard in guards))


GUARDS = st.lists(st.tuples(st.sampled_from(["a", "b", "m == 'x'", "m == 'y'", "n == 3"]), st.booleans()), max_size=4)


@given(GUARDS, GUARDS)
def test_compatibility_has_no_direction(a, b):
    """Compatibility is symmetric."""
    assert compatible(event(*a), event(*b)) == compatible(event(*b), event(*a))


@given(GUARDS)
def test_an_unconditional_event_is_compatible_with_any(guards):
    """An event without guards can happen with every other."""
    assert compatible(event(), event(*guards))


@pytest.mark.parametrize(
    ("a", "b", "both"),
    [
        ([("amp", True)], [("amp", False)], False),
        ([("amp", True)], [("amp", True)], True),
        ([("amp", True)], [("clip", False)], True),
        ([("m == 'x'", True)], [("m == 'y'", True)], False),
        ([("m == 'x'", True)], [("m == 'y'", False)], True),
        ([("m == a", True)], [("m == b", True)], True),
    ],
)
def test_opposite_conditions_exclude_each_other(a, b, both):
    """A condition and its opposite, or two values of one variable, are never true together."""
    assert compatible(event(*a), event(*b)) is both


@pytest.mark.parametrize(
    ("text", "ends"),
    [("(i + 1) % n == 0", True), ("sync_gradients", True), ("self.update_grad", True), ("args.clip", False)],
)
def test_the_end_of_a_window_is_recognised(text, ends):
    """Conditions on a remainder, or named for updating, end an accumulation window."""
    assert is_accumulation(Guard(text, is_true=True)) is ends
