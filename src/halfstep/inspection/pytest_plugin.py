"""pytest: `@pytest.mark.precision(master="fp32", ...)` states what a training test must store and compute in.

    @pytest.mark.precision(master="fp32", states="fp32", compute="bf16")
    def test_training(inspect_precision):
        model, optimizer = build()
        with inspect_precision(model, optimizer):
            train_one_step(model, optimizer)

`inspect_precision` is `halfstep.inspect`. When the test ends, each inspection that it made is compared with the marker; a test
with the marker that inspected nothing fails. torch and the rest of Halfstep are imported when a test uses the fixture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from halfstep.errors import HalfstepError

__all__ = ["inspect_precision", "pytest_configure", "pytest_runtest_call"]

_MARKER = "precision"
_FIXTURE = "inspect_precision"
_INSPECTIONS = pytest.StashKey[list[Any]]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(**formats): what the objects passed to the fixture {_FIXTURE} must store and compute in (halfstep)",
    )


@pytest.fixture
def inspect_precision(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`halfstep.inspect`; the formats of the test's marker are asserted when the test ends."""
    from halfstep.inspection import inspector

    inspections = request.node.stash.setdefault(_INSPECTIONS, [])

    def inspect(*args: Any, **kwargs: Any) -> Any:
        inspections.append(inspector.inspect(*args, **kwargs))
        return inspections[-1]

    return inspect


@pytest.hookimpl(trylast=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Compare what a test inspected with its marker; runs after the test, and not if that has failed."""
    marker = item.get_closest_marker(_MARKER)
    if marker is None:
        return
    inspections = item.stash.get(_INSPECTIONS, [])
    if not inspections:
        pytest.fail(
            f"This test has the marker {_MARKER} and inspected nothing. Call the fixture {_FIXTURE}(model, optimizer, scaler), as a context "
            "manager around one step to observe what it computes in.",
            pytrace=False,
        )
    for inspection in inspections:
        try:
            inspection.expect(*marker.args, **marker.kwargs)
        except HalfstepError as error:
            pytest.fail(str(error), pytrace=False)
