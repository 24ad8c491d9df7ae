"""The zoo benchmark: its statistics and bars, and that it runs on tiny models of each library on a CPU."""

import importlib
import json
import logging
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from halfstep.jobs.job import Job

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
BF16_ROWS = ("torch AMP bf16", "bf16", "pure bf16", "bf16-lean", "bf16-lean,states=8bit")


@pytest.fixture(autouse=True)
def quiet_log():
    """The program lowers the log level of its process."""
    logger = logging.getLogger("halfstep")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def program(monkeypatch):
    """Imports a module of the benchmarks folder by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in ("bench_zoo", "zoo_gradients", "zoo_models", "zoo_results", "zoo_rows"):
        sys.modules.pop(name, None)


def small_case(zoo_models):
    """A case without any library."""
    batch = torch.randn(4, 8), torch.randint(3, (4,))
    job = Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 3)),
        data=lambda batch_size: iter([batch]),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=torch.optim.AdamW,
    )
    return zoo_models.Case("small", "torch", 4, lambda tiny: job)


def record_of(rates, peaks=None, *, fp32_buffers=False):
    """A record with the rates and peaks of some rows."""
    rows = [{"name": name, "rates": values, "peak_bytes": (peaks or {}).get(name)} for name, values in rates.items()]
    about = {"kind": "eager", "model": "m", "library": "l", "batch": 1, "tiny": False, "parameters": 1000}
    return about | {"fp32_buffers": fp32_buffers, "rows": rows}


def verdicts(program, record):
    return {bar["bar"]: bar["met"] for bar in program("zoo_results").bars_of(record)}


def run(program, monkeypatch, tmp_path, *arguments, case=None):
    """The records that one call of the program appends to its file."""
    bench = program("bench_zoo")
    if case is not None:
        monkeypatch.setattr(bench, "CASES", {case.name: case})
    path = tmp_path / "zoo.jsonl"
    bench.main(["--tiny", "--device", "cpu", "--rounds", "1", "--seconds", "0.001", "--json", str(path), *arguments])
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_option(names):
    return [part for name in names for part in ("--row", name)]


def test_zoo_has_every_kind_of_model(program):
    """At least twelve models of three libraries, compiled and held-back ones among them, under distinct names."""
    zoo = program("zoo_models")
    assert len(zoo.CASES) >= 14
    assert {case.library for case in zoo.CASES.values()} == {"timm", "transformers", "diffusers"}
    assert len(zoo.HELD_BACK) >= 4
    assert not zoo.CASES.keys() & zoo.HELD_BACK.keys()
    assert len(zoo.COMPILED) == 4
    assert set(zoo.COMPILED) <= zoo.CASES.keys()


def test_interval_leaves_out_what_ninety_percent_allow(program):
    """Five values give the smallest and largest, eight the second of each end, and 20 the sixth: binomial tables."""
    interval = program("zoo_results").interval
    assert interval([3.0, 1.0, 5.0, 2.0, 4.0]) == (1.0, 5.0)
    assert interval(list(range(8))) == (1, 6)
    assert interval(list(range(20))) == (5, 14)
    assert interval([7.0]) == (7.0, 7.0)


def test_ratio_compares_rows_of_the_same_round(program):
    """A drift that both rows share does not widen the interval of their ratio."""
    record = record_of({"a": [50.0, 100.0, 200.0], "b": [100.0, 200.0, 400.0]})
    ratio = program("zoo_results").ratio_of(record, "a", "b")
    assert (ratio["median"], ratio["low"], ratio["high"]) == (0.5, 0.5, 0.5)
    assert program("zoo_results").ratio_of(record, "a", "missing") is None


def test_speed_bar_is_met_if_the_interval_reaches_it(program):
    """One round at 0.98 of the pure model suffices; below it only fp32 buffers excuse down to 0.95."""
    pure = [100.0] * 5
    bar = "bf16-lean: speed / pure bf16"
    assert verdicts(program, record_of({"bf16-lean": [97, 97, 97, 97, 98], "pure bf16": pure}))[bar]
    slow = {"bf16-lean": [96.0] * 5, "pure bf16": pure}
    assert not verdicts(program, record_of(slow))[bar]
    assert verdicts(program, record_of(slow, fp32_buffers=True))[bar]
    preset = {"bf16": [99.0] * 5, "torch AMP bf16": pure}
    assert not verdicts(program, record_of(preset))["bf16: speed / torch AMP bf16"]


def test_peak_bars_count_bytes_per_parameter(program):
    """Lean may use 6.1 B per parameter more than the pure model, its 8-bit form 0.4, a preset 0.5 % more than AMP."""
    rows = ("pure bf16", "bf16-lean", "bf16-lean,states=8bit", "torch AMP bf16", "bf16")
    rates = {name: [1.0] for name in rows}
    inside = dict(zip(rows, (10_000, 16_100, 10_400, 20_000, 20_100), strict=True))
    beyond = dict(zip(rows, (10_000, 16_101, 10_401, 20_000, 20_101), strict=True))
    names = [f"{name}: peak" for name in ("bf16-lean", "bf16-lean,states=8bit", "bf16")]
    assert all(verdicts(program, record_of(rates, inside))[name] for name in names)
    assert not any(verdicts(program, record_of(rates, beyond))[name] for name in names)


def test_compiled_lean_must_beat_every_peer_with_a_master(program):
    """The pure model has no master and is not among the peers."""
    rows = ("bf16-lean + compile", "torch AMP bf16 + compile", "FlashOptim bf16 + compile", "pure bf16 + compile")
    record = record_of(dict(zip(rows, ([10.0], [9.0], [11.0], [12.0]), strict=True)))
    assert verdicts(program, record) == {
        "bf16-lean + compile: speed / torch AMP bf16 + compile": True,
        "bf16-lean + compile: speed / FlashOptim bf16 + compile": False,
    }


def test_table_shows_the_last_record_and_marks_missed_bars(program):
    """A model that was measured again appears once, with its last ratio, and a bar that is not met has a mark."""
    first = record_of({"bf16-lean": [99.0] * 5, "pure bf16": [100.0] * 5})
    second = record_of({"bf16-lean": [90.0] * 5, "pure bf16": [100.0] * 5}, {"bf16-lean": 2**31, "pure bf16": 2**31})
    text = program("zoo_results").render_tables([first, second])
    assert "0.990" not in text
    assert "0.900 (0.900 to 0.900) (*)" in text
    assert "2.00" in text
    assert "bf16-lean: speed / pure bf16: 0.900 (0.900 to 0.900), bar 0.98" in text


def test_all_rows_train_one_model_in_one_process(program, monkeypatch, tmp_path):
    """Every row that can run on a CPU has a rate, a finite loss and no skipped step; the record has its settings and bars."""
    case = small_case(program("zoo_models"))
    [record] = run(program, monkeypatch, tmp_path, case=case)
    assert {row["name"]: row["error"] for row in record["rows"] if "error" in row} == {"FlashOptim bf16": "needs CUDA"}
    ran = [row for row in record["rows"] if "error" not in row]
    assert [row["name"] for row in ran] == [*BF16_ROWS, "torch AMP fp16", "fp16", "pure fp16", "fp16-lean"]
    assert all(len(row["rates"]) == 1 and row["rate"] > 0 and row["finite"] and not row["skipped"] for row in ran)
    assert {row["name"] for row in ran if "rate_before_engines" in row} == {"torch AMP bf16", "torch AMP fp16"}
    assert record["kind"] == "eager"
    assert record["parameters"] == 8 * 16 + 16 + 16 * 3 + 3
    assert {"cudnn_benchmark", "cudnn_tf32", "matmul_tf32"} <= record["settings"].keys()
    assert record["environment"]["torch"] == torch.__version__
    speeds = {bar["bar"] for bar in record["bars"]}
    assert {"bf16-lean: speed / pure bf16", "fp16-lean: speed / pure fp16", "bf16: speed / torch AMP bf16"} <= speeds


def test_row_that_fails_leaves_the_others(program, monkeypatch, tmp_path):
    """A model that cannot be cast to 16 bits is an error of those rows only."""

    class Fussy(torch.nn.Linear):
        def forward(self, x):
            if x.dtype is torch.bfloat16:
                raise RuntimeError("not in bf16")
            return super().forward(x)

    zoo = program("zoo_models")
    job = small_case(zoo).job()
    fussy = Job(model=lambda: Fussy(8, 3), data=job.data, loss=job.loss, optimizer=job.optimizer)
    names = ("torch AMP bf16", "pure bf16")
    case = zoo.Case("fussy", "torch", 4, lambda tiny: fussy)
    [record] = run(program, monkeypatch, tmp_path, *rows_option(names), case=case)
    by_name = {row["name"]: row for row in record["rows"]}
    assert "not in bf16" in by_name["pure bf16"]["error"]
    assert by_name["torch AMP bf16"]["rate"] > 0


def test_unknown_names_are_rejected_with_the_known_ones(program, monkeypatch, tmp_path):
    """A misspelt model or row ends the program with a list of names."""
    with pytest.raises(SystemExit, match="Unknown model 'vit'. Known: vit_large_patch16_224"):
        run(program, monkeypatch, tmp_path, "--models", "vit")
    with pytest.raises(SystemExit, match="Unknown row 'lean'. Known: torch AMP bf16"):
        run(program, monkeypatch, tmp_path, "--row", "lean")


def test_any_target_of_a_library_is_a_model(program, capsys):
    """`timm:NAME` needs no entry in the zoo; one that the library lacks, or a missing library, ends with a line."""
    zoo = program("zoo_models")
    case = zoo.case_of_target("transformers:BertConfig")
    assert (case.name, case.library, case.batch_size()) == ("transformers:BertConfig", "transformers", 8)
    assert zoo.case_of_target("timm:resnet18").batch_size() == 64
    program("bench_zoo").main(["--device", "cpu", "--models", "timm:no_such_model"])
    assert "timm:no_such_model did not run: " in capsys.readouterr().out


def test_gradient_errors_are_those_of_sixteen_bits(program, monkeypatch, tmp_path):
    """Against fp64 every bf16 row errs by 2^-12 to 2^-4 and every fp16 row by less, with dropout off."""
    [record] = run(program, monkeypatch, tmp_path, "--accuracy", case=small_case(program("zoo_models")))
    errors = {row["name"]: row["error_l2"] for row in record["rows"]}
    assert set(errors) == {f"{kind} {name}" for kind in ("torch AMP", "pure") for name in ("bf16", "fp16")} | {
        "bf16-lean",
        "fp16-lean",
    }
    for name, error in errors.items():
        low, high = (2**-12, 2**-4) if "bf16" in name else (2**-15, 2**-7)
        assert low < error < high, name
    text = program("zoo_results").render_tables([record])
    assert f"{errors['bf16-lean'] / errors['pure bf16']:.3f}" in text


def test_leaks_name_the_operation_where_fp32_starts(program):
    """A cast to fp32 in the middle of a 16-bit graph is the start; what it flows through is listed as well."""
    x = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
    every, starts = program("zoo_gradients").fp32_results((x * 2).float().sin().bfloat16().sum(), 1000)
    assert starts == {"ToCopyBackward0": 4 * 64 * 64}
    assert every == {"ToCopyBackward0": 4 * 64 * 64, "SinBackward0": 4 * 64 * 64}
    assert program("zoo_gradients").fp32_results((x * 2).sin().sum(), 1000) == ({}, {})


def test_removing_dropout_makes_losses_repeatable(program):
    """Two training-mode losses of the same batch are equal once dropout is removed."""
    zoo = program("zoo_models")
    job = small_case(zoo).job()
    model = zoo.without_dropout(job.call("model").train())
    x = torch.randn(4, 8)
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(("library", "model"), [("timm", "vit_large_patch16_224"), ("transformers", "llama_gqa")])
def test_tiny_model_of_a_library_runs(program, monkeypatch, tmp_path, library, model):
    """A tiny model of the library trains in the bf16 rows and has its peers' ratios."""
    pytest.importorskip(library, reason=f"Requires: [{library}]", exc_type=ImportError)
    names = ("torch AMP bf16", "pure bf16", "bf16-lean")
    [record] = run(program, monkeypatch, tmp_path, "--models", model, *rows_option(names))
    assert [row.get("error") for row in record["rows"]] == [None] * 3
    assert record["library"] == library
    assert {(ratio["row"], ratio["baseline"]) for ratio in record["ratios"]} >= {
        ("bf16-lean", "pure bf16"),
        ("bf16-lean", "torch AMP bf16"),
    }
