"""Random sequences of calls: the Engine makes of them what a float64 reference does, and rejects the rest without a trace.

A failure prints the shortest failing sequence as a program.
"""

from pathlib import Path

import pytest

from fuzz_driver import Config, Mismatch, replay, shrink
from fuzz_moves import FP32_WEIGHTS, LEAN, random_run
from rank_processes import run_ranks

RANKS_PROGRAM = Path(__file__).parents[1] / "fuzz_ddp_program.py"
PRECISIONS = FP32_WEIGHTS + LEAN
NUM_QUICK, NUM_SLOW = 3, 1000 // (10 * len(PRECISIONS)) + 1  # sequences of each test below


def check_sequences(precision, seeds):
    """Run the sequences of these seeds."""
    for seed in seeds:
        config, moves = random_run(seed, (precision,))
        try:
            replay(config, moves)
        except Exception:
            pytest.fail(f"seed {seed}:\n\n{shrink(config, moves)}")


@pytest.mark.no_cover
@pytest.mark.parametrize("precision", PRECISIONS)
def test_random_calls_match_the_reference(precision):
    """After every call all weights, masters, moments, averages, buffers, rates and counters are as the reference has them."""
    check_sequences(precision, range(NUM_QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_many_random_calls_match_the_reference(precision, part):
    """The same over more than 1,000 sequences."""
    check_sequences(precision, range(1000 + part * NUM_SLOW, 1000 + (part + 1) * NUM_SLOW))


@pytest.mark.parametrize(
    ("seeds", "kind"),
    [
        ((0, 8), "wrapped"),
        ((0, 8), "plain"),
        pytest.param((1000, 50), "wrapped", marks=pytest.mark.slow),
        pytest.param((1000, 50), "plain", marks=pytest.mark.slow),
    ],
)
def test_random_calls_on_two_ranks_match_one_process_over_all_data(seeds, kind):
    """Under DistributedDataParallel or backend="ddp", with other data, weights and overflows on each rank, in equal bits."""
    output = run_ranks(RANKS_PROGRAM, *seeds, kind, timeout=1200, options=("-W", "error"))
    assert [text.splitlines()[-1] for text in output] == [f"rank {rank}: {seeds[1]} runs" for rank in range(2)]


@pytest.mark.parametrize("seeds", [pytest.param((0, 20), marks=pytest.mark.slow)], ids=str)
def test_random_calls_on_shards_match_one_process_over_all_data(seeds):
    """Under backend="fsdp": the same decisions, scales and counters, and masters and norms up to rounding."""
    program = RANKS_PROGRAM.with_name("fuzz_fsdp_program.py")
    output = run_ranks(program, *seeds, timeout=1200)
    assert [text.splitlines()[-1] for text in output] == [f"rank {rank}: {seeds[1]} runs" for rank in range(2)]


ADAMW = (("adamw", 0.01, (("first.weight", "first.bias", "second.weight", "second.bias", "spare"),)),)


def test_a_wrong_number_is_detected(monkeypatch):
    """An Engine whose EMA decays at another rate fails, and the failure is a program with the two moves that it takes."""
    from halfstep.engine.ema import Ema

    monkeypatch.setattr(Ema, "decay", property(lambda _: 0.899, lambda *_: None), raising=False)
    noise = [("evaluate", {"seed": 1, "ema": True}), ("set_lr", {"name": "spare", "value": 0.05})]
    moves = [*noise, ("micro_batch", {"seed": 5, "weight": ("int", 3)}), *noise, ("step", {}), *noise]
    config = Config("fp32", ADAMW, max_norm=1.0, ema=0.9)
    with pytest.raises(Mismatch, match="ema first.bias"):
        replay(config, moves)
    text = shrink(config, moves)
    assert "('micro_batch', {'seed': 5}),\n    ('step', {})," in text
    assert "set_lr" not in text
    with pytest.raises(Mismatch):
        exec(text, {})
