"""Jobs on FSDP2: initial values, resumes, validation, and the loss curves of single, ddp, fsdp and ZeRO."""

import itertools
import shutil
from pathlib import Path

import pytest

from halfstep.train import TrainConfig, train
from launch_commands import digest_of, torchrun
from launch_job import make_job
from launch_program import CONFIG
from rank_processes import DEEPSPEED, cases_of_ranks
from sharded_jobs import Uneven
from sharded_program import curve

PROGRAM = Path(__file__).resolve().parents[1] / "sharded_program.py"
SETTINGS = TrainConfig(**CONFIG)
NUM_PERMUTED = 7


def by_case(lines):
    """For each case the result of every rank."""
    cases = {}
    for rank in lines:
        for line in rank:
            cases.setdefault(line.pop("case"), []).append(line)
    return cases


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The folder of the runs and the results of two ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    config = TrainConfig(**(CONFIG | {"steps": 6}))
    train(make_job(dropout=0.0), config, precision="fp32", out=folder / "from-single")
    cases = ("initial", "resumes", "uneven", "trains", "rejected", "moved", "curves")
    return folder, by_case(cases_of_ranks(PROGRAM, folder, *cases, timeout=400))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process, without dropout."""
    out = tmp_path_factory.mktemp("alone") / "run"
    return train(make_job(dropout=0.0), SETTINGS, precision="fp32", out=out)


@pytest.fixture(scope="module")
def singles(tmp_path_factory):
    """The losses of one process by precision: the run itself, with the examples of each update in other orders, and of half of them."""
    folder = tmp_path_factory.mktemp("singles")
    return {
        precision: [
            curve(folder / f"{precision}-{order}", precision, order=order)["losses"]
            for order in (None, *range(1, NUM_PERMUTED + 1), "half")
        ]
        for precision in ("fp32", "bf16")
    }


# --- initial values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Model", "ReadsValues", "PlainAttribute"])
def test_every_rank_starts_from_its_shards_of_the_single_run(launched, kind):
    """Parameters and buffers bit for bit, tied ones still tied, with attributes; each rank stores its part."""
    _, cases = launched
    results = [rank[kind] for rank in cases["initial"]]
    assert all(r["equal"] and r["buffers"] and r["shared"] and r["flag"] for r in results)
    assert sum(r["local"] for r in results) == results[0]["num_params"]
    assert all(r["local"] < 0.6 * r["num_params"] for r in results)
    assert all(r["alive"] == [4, 2, 0] for r in results)  # of two blocks, then the model: one unit after the other


def test_only_rank_0_initialises_the_model_where_its_constructor_allows_that(launched):
    """The other rank builds on the meta device; where that fails it builds on the CPU, and the reason is logged."""
    _, cases = launched
    first, second = cases["initial"]
    kinds = ("Model", "ReadsValues", "PlainAttribute")
    assert [first[kind]["built_on"] for kind in kinds] == [["cpu"]] * 3
    assert [second[kind]["built_on"] for kind in kinds] == [["meta"], ["meta", "cpu"], ["meta", "cpu"]]
    reads, plain = first["messages"]
    assert "does not work on the meta device (RuntimeError: Tensor.item()" in reads
    assert "the attribute scales is a tensor, but not a buffer" in plain


def test_a_model_with_everything_trains(launched):
    """Tied, frozen, scalar and replicated parameters in bf16-lean; the loss falls, the same on both ranks."""
    _, cases = launched
    first, second = cases["trains"]
    assert first["losses"] == second["losses"]
    assert "379 trainable, 222 of them on this rank" in first["parameters"]
    assert sum(first["losses"][-4:]) < 0.9 * sum(first["losses"][:4])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("rank 0", "ValueError: no such file"),
        ("params", "names params, which are shards with backend=fsdp"),
        ("shard", "'layers.*', which is no module of Model"),
    ],
)
def test_what_cannot_run_is_an_error_on_every_rank(launched, case, message):
    """Failures of rank 0 alone, and jobs that shards cannot carry out."""
    _, cases = launched
    assert all(message in rank[case] for rank in cases["rejected"])


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_a_signal_to_one_rank_stops_all_and_the_resumed_run_is_exact(launched):
    """With dropout, EMA and saves in the background: the weights, and the random numbers of each rank."""
    _, cases = launched
    results = cases["resumes"]
    for rank in results:
        assert rank["stopped"]["stopped_by"] == "SIGTERM"
        assert rank["stopped"]["steps"] == results[0]["stopped"]["steps"] < 16
        assert rank["resumed"] == rank["undisturbed"]
    assert results[0]["undisturbed"]["random"] != results[1]["undisturbed"]["random"]


@pytest.mark.parametrize("start", ["single", "ddp", "fsdp"])
def test_a_run_moves_between_backends(launched, alone, start):
    """single to fsdp, ddp to fsdp and fsdp to ddp: the curve of one process, to rounding."""
    _, cases = launched
    for rank in cases["moved"]:
        assert rank[start]["steps"] == 16
        assert rank[start]["loss"] == pytest.approx(alone.loss, rel=1e-4)
        assert rank[start]["validation"] == pytest.approx(alone.validation, rel=1e-4)


def test_a_run_of_two_ranks_resumes_in_one_process(launched, alone, tmp_path):
    """The curve of one process, to rounding."""
    folder, _ = launched
    shutil.copytree(folder / "to-single", tmp_path / "run")
    outcome = train(make_job(dropout=0.0), SETTINGS, precision="fp32", out=tmp_path / "run", resume=True)
    assert outcome.loss == pytest.approx(alone.loss, rel=1e-4)
    assert outcome.validation == pytest.approx(alone.validation, rel=1e-4)


def test_ranks_with_fewer_validation_batches_repeat_one_without_effect(launched, tmp_path):
    """One batch on rank 1 and five on rank 0: every rank runs the same forwards, and the means are those of one process."""
    _, cases = launched
    config = TrainConfig(**(CONFIG | {"epochs": 1}))
    alone = train(make_job(dropout=0.0, data=Uneven), config, precision="fp32", out=tmp_path / "run")
    for rank in cases["uneven"]:
        assert rank["validation"] == pytest.approx(alone.validation, rel=1e-4)


@pytest.fixture(scope="module")
def four(launched, tmp_path_factory):
    """The results of four ranks, of which one is a run that two have started."""
    folder = tmp_path_factory.mktemp("four")
    shutil.copytree(launched[0] / "to-single", folder / "to-four")
    return by_case(cases_of_ranks(PROGRAM, folder, "resumed", "curves", ranks=4, timeout=600))


@pytest.mark.slow
def test_a_run_of_two_ranks_resumes_on_four(four, alone):
    """The curve of one process, to rounding."""
    for rank in four["resumed"]:
        assert rank["loss"] == pytest.approx(alone.loss, rel=1e-4)
        assert rank["validation"] == pytest.approx(alone.validation, rel=1e-4)


@pytest.mark.slow
def test_a_killed_rank_is_restarted_by_torchrun_and_changes_nothing(launched, tmp_path):
    """SIGKILL of rank 1 between two checkpoints; saves in the background."""
    folder, _ = launched
    options = ("--backend", "fsdp", "--set", "ema=0.9", "--set", "async_save=on")
    code, output = torchrun(tmp_path / "run", *options, fault="kill:1:8", restarts=1)
    assert code == 0, output
    assert "was restarted by torchrun" in output
    assert digest_of(tmp_path / "run") == digest_of(folder / "undisturbed")


# --- the same curve on every backend ----------------------------------------------------------------------------------


def check_curves(ranks, singles, backends=("ddp", "fsdp")):
    """Compare backends with single runs, and the ranks with each other.

    The bound is the spread of the 8 single runs: the largest distance of any two. A run on ranks must be as close to one of
    them. Its distance to a given one would be no test: if only the order of its sums differs, that is the largest of all with
    probability 1 / 36, and always the same on a given CPU.
    """
    for precision, (*orders, half) in singles.items():
        reference, bound = orders[0], max(distance(a, b) for a, b in itertools.combinations(orders, 2))
        assert min(distance(half, order) for order in orders) > 10 * bound  # a fault is far outside
        for name in (f"{backend} {precision}" for backend in backends):
            for rank in ranks:
                losses = rank[name]["losses"]
                assert len(losses) == 50
                assert min(distance(losses, order) for order in orders) <= bound, name
                assert precision != "fp32" or losses[0] == pytest.approx(reference[0], rel=1e-6)
    for name in (f"{backend} fp16" for backend in backends):
        decisions = [rank[name]["decisions"] for rank in ranks]
        assert all(other == decisions[0] for other in decisions), name
        assert {skipped for skipped, _ in decisions[0]} == {True, False}
        assert len({scale for _, scale in decisions[0]}) > 2


def distance(losses, others):
    """The largest difference at any step."""
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


def test_the_same_job_has_the_same_curve_on_single_ddp_and_fsdp(launched, singles):
    """50 updates with accumulation and clipping: fp32 and bf16 within the spread of 8 single runs; in fp16 ranks agree."""
    _, cases = launched
    check_curves(cases["curves"], singles)


@pytest.mark.slow
def test_the_same_curve_on_four_ranks(four, singles):
    """As on two."""
    check_curves(four["curves"], singles)


@pytest.fixture(scope="module")
def zero(tmp_path_factory):
    """The curves of every ZeRO stage on two ranks."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install halfstep[deepspeed]")
    folder = tmp_path_factory.mktemp("zero")
    return by_case(cases_of_ranks(PROGRAM, folder, "zero_curves", timeout=600, imports=DEEPSPEED))["zero_curves"]


@pytest.mark.slow
def test_the_same_job_has_the_same_curve_on_every_zero_stage(zero, singles):
    """As on ddp and fsdp, at stages 0 to 3."""
    check_curves(zero, singles, [f"zero{stage}" for stage in range(4)])
    for stage in (1, 2, 3):
        assert f"ZeRO stage {stage}, " in zero[0][f"zero{stage} bf16"]["backend"]
