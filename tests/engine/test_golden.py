"""Golden runs: every preset and optimizer trains as it did when the files in tests/golden were recorded.

The files have one column per CPU kind. Kinds differ in how they round 16-bit products and in the order of sums, and training
amplifies that, so the tolerance at each step is taken from how far the recorded columns are apart up to that step. A file
with one column, and a step at which the columns agree, still allow a few roundings in the compute format.
"""

import itertools

import pytest

import golden_runs
from halfstep.precision.formats import get_format
from halfstep.precision.policy import Policy

FACTOR = 4  # of the spread between two recorded kinds; a third kind may lie outside of them
ROUNDINGS = 4  # of the compute format, where the columns agree
LONG = (
    "fp32_adamw", "bf16_lion", "fp16_sgd", "fp16_rmsprop", "bf16-lean_adam", "fp16-lean_adamw", "bf16-lean-8bit_adamw",
    "bf16-lean-bf16_adamw", "bf16-lean-master-fp32_adamw", "bf16-lean-accumulate_adamw", "bf16-lean-release_adamw",
)  # fmt: skip


def tolerances(columns, epsilon):
    """The relative difference allowed at each step."""
    spreads = ((max(row) - min(row)) / min(row) for row in zip(*columns, strict=True))
    return [FACTOR * spread + ROUNDINGS * epsilon for spread in itertools.accumulate(spreads, max)]


def check_losses(case, path, num_steps):
    """Train a case, and compare each of its losses with the recorded ones."""
    columns = [column[:num_steps] for column in golden_runs.read_golden(case).values()]
    epsilon = get_format(Policy.parse(golden_runs.CASES[case][0]).compute).epsilon
    losses, _ = golden_runs.train(case, path, num_steps)
    assert len(losses) == num_steps
    for step, (loss, row, allowed) in enumerate(
        zip(losses, zip(*columns, strict=True), tolerances(columns, epsilon), strict=True)
    ):
        nearest = min(row, key=lambda recorded: abs(recorded - loss))
        assert abs(loss / nearest - 1) <= allowed, f"step {step}: {loss} is not {row} within {allowed:.2g}"


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in LONG else pytest.mark.slow) for case in golden_runs.CASES]
)
def test_losses_are_within_the_spread_between_cpu_kinds(case, tmp_path):
    """40 losses per case, each as near to a recorded kind as the kinds are to each other; the tolerance grows with the steps."""
    check_losses(case, tmp_path / "checkpoint", 40)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG)
def test_long_runs_are_within_the_spread_between_cpu_kinds(case, tmp_path):
    """The same over 100 losses, for one optimizer of each preset and each layout of masters and states."""
    check_losses(case, tmp_path / "checkpoint", golden_runs.NUM_STEPS)


def test_a_wrong_update_is_outside_the_tolerance(tmp_path, monkeypatch):
    """A learning rate that is 1 % off does not pass for another CPU."""
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(
        golden_runs.OPTIMIZERS, "adamw", lambda params: torch.optim.AdamW(params, lr=3.03e-3, weight_decay=0.05)
    )
    with pytest.raises(AssertionError, match="step"):
        check_losses("fp32_adamw", tmp_path, 40)
