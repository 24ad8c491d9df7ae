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

from collections.abc import Callable, Iterator
from typing import Any

import pytest

__all__ = ["inspect_precision", "pytest_collection_modifyitems", "pytest_configure"]

_MARKER = "precision"
_FIXTURE = "inspect_precision"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(**formats): what the objects passed to the fixture {_FIXTURE} must store and compute in (halfstep)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test with the marker uses the fixture, whether it names it or not, so that one that inspects nothing fails."""
    for item in items:
        names = getattr(item, "fixturenames", None)
        if names is not None and _FIXTURE not in names and item.get_closest_marker(_MARKER) is not None:
            names.append(_FIXTURE)


@pytest.fixture
def inspect_precision(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`halfstep.inspect`, with the formats of the test's marker asserted when the test ends."""
    from halfstep.errors import HalfstepError
    from halfstep.inspection import inspector

    marker = request.node.get_closest_marker(_MARKER)
    inspections: list[Any] = []

    def inspect(*args: Any, **kwargs: Any) -> Any:
        inspections.append(inspector.inspect(*args, **kwargs))
        return inspections[-1]

    yield inspect
    if marker is None:
        return
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
