"""Random faults over four models: the autopsy names module and cause, and training is undisturbed."""

import importlib
import sys
from collections import Counter
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def program(monkeypatch):
    """The program of the benchmarks folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("fault_injection")
    for name in ("fault_injection", "fault_models", "fault_runs"):
        sys.modules.pop(name, None)


def check(outcomes, share):
    outcomes = list(outcomes)
    wrong = [o for o in outcomes if not o.right]
    assert all(o.undisturbed for o in outcomes)
    assert len(wrong) <= (1 - share) * len(outcomes), "\n".join(f"{o.fault}\n{o.autopsy}" for o in wrong)
    return Counter(o.fault.cause for o in outcomes)


def test_a_few_random_faults_are_all_named(program):
    """Eager runs, each compared with one that has no watch."""
    check(program.outcomes(14, seed=11, compiled=False), share=1.0)


@pytest.mark.slow
def test_faults_of_compiled_models_are_named(program, monkeypatch):
    """By a replay in eager mode."""
    monkeypatch.setattr("halfstep.engine.compiling._options", lambda mode, budget: {"backend": "eager"})
    check(program.outcomes(3, seed=5, compiled=True), share=1.0)


@pytest.mark.slow
def test_98_percent_of_200_faults_are_named(program):
    """All five causes occur."""
    assert set(check(program.outcomes(200, seed=0, compiled=False), share=0.98)) == set(program.CAUSES)
