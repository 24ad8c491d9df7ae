"""The faults of `benchmarks/unseen_faults.py`: some at random, in models that the autopsy was not written with."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark_of_faults(monkeypatch):
    """The benchmark as a module."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("unseen_faults")
    for name in (
        "unseen_faults",
        "unseen_models",
        "foreign_faults",
        "foreign_models",
        "fault_injection",
        "fault_models",
        "fault_runs",
    ):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("second", [False, True])
def test_faults_in_unseen_models_are_named(benchmark_of_faults, second):
    """At least 9 of 10, and every run continues as one without an autopsy."""
    results = list(benchmark_of_faults.outcomes(10, seed=17, second=second))
    assert sum(r.right for r in results) >= 9
    assert all(r.undisturbed for r in results)
