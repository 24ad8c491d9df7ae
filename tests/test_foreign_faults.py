"""Faults in tiny models of transformers: the autopsy names module and cause, and training is undisturbed."""

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def program(monkeypatch):
    """The program of the benchmarks folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("foreign_faults")
    for name in ("foreign_faults", "foreign_models", "fault_injection", "fault_models", "fault_runs"):
        sys.modules.pop(name, None)


def check(outcomes):
    outcomes = list(outcomes)
    wrong = [o for o in outcomes if not o.right or not o.undisturbed]
    assert not wrong, "\n".join(f"{o.fault}\n{o.autopsy}" for o in wrong)
    return outcomes


@pytest.mark.filterwarnings("ignore")
def test_a_few_faults_in_foreign_models_are_named(program):
    """Models whose code nobody here wrote, in loops with random settings."""
    check(program.outcomes(4, seed=11))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_faults_in_foreign_models_are_named(program):
    """Several kinds of faults, and runs that continue bit for bit."""
    outcomes = check(program.outcomes(25, seed=12))
    assert len({o.fault.kind for o in outcomes}) > 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_faults_in_compiled_foreign_models_are_named(program):
    """By a replay in eager mode."""
    check(program.outcomes(2, seed=13, backends=("aot_eager",)))
