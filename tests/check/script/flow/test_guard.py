"""Which guards are possible together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.check.script.flow.guard import Guard, possible

TESTS = ["x > 0", "x >= 1", "x < 1", "x == 0", "x == 2", "x in (1, 2)", "x <= 2"]


def contradict(a, b):
    """Whether two guards, written as `not x` or `x`, contradict each other."""
    guards = [Guard(text.removeprefix("not "), not text.startswith("not ")) for text in (a, b)]
    return not possible((guards[0],), (guards[1],))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("x", "not x"),
        ("x > 0", "x == 0"),
        ("x >= 1", "x < 1"),
        ("x >= 1", "x == 0"),
        ("not x > 0", "x == 2"),
        ("not x", "x > 0"),
        ("x", "x == 0"),
        ("x == 'a'", "x == 'b'"),
        ("x == 'a'", "x in ('b', 'c')"),
        ("x == 'a'", "not x in ('a', 'b')"),
    ],
)
def test_contradictions(a, b):
    """No value of the variable satisfies both, in either order."""
    assert contradict(a, b)
    assert contradict(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("x > 0", "x >= 1"),
        ("x > 0", "x == 1"),
        ("not x", "x >= 0"),
        ("x", "x > 0"),
        ("x", "y"),
        ("x == 'a'", "x in ('a', 'b')"),
        ("x == 'a'", "not x == 'b'"),
        ("clip", "(i + 1) % n == 0"),
    ],
)
def test_guards_that_are_possible_together(a, b):
    """Some value satisfies both, or they are about different variables."""
    assert not contradict(a, b)


def test_a_conjunction_is_refuted_by_its_parts():
    """`a and b` is not false where both are true."""
    assert not possible((Guard("a and b", is_true=False),), (Guard("a", is_true=True), Guard("b", is_true=True)))
    assert possible((Guard("a and b", is_true=False),), (Guard("a", is_true=True),))
    calls = (Guard("f(x)", is_true=True), Guard("g(y)", is_true=True))
    assert not possible((Guard("f(x) and g(y)", is_true=False),), calls)
    assert possible((Guard("f(x and g(y))", is_true=False),), calls)


@given(st.sampled_from(TESTS), st.booleans(), st.sampled_from(TESTS), st.booleans(), st.integers(-1, 4))
def test_tests_that_one_value_satisfies_are_possible(a, is_a, b, is_b, x):
    """A value that satisfies two tests proves that they do not contradict each other."""
    if eval(a, {"x": x}) == is_a and eval(b, {"x": x}) == is_b:
        assert possible((Guard(a, is_a),), (Guard(b, is_b),))
