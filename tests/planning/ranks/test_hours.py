"""GPU-hours: from given or recorded rates, never from guesses."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from comparison_cases import write_case
from halfstep.comparison import read_comparison
from halfstep.errors import SettingError
from halfstep.jobs.targets import load_target
from halfstep.planning.ranks.hours import Budget, count_examples, make_budget, parse_rates, read_record
from planning_jobs import small_job

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
VIT_L = RESULTS / "compare_vit_l_16_h200_2026-11-15.json"
NUM_PARAMS = 304_326_632


def test_hours_and_cost():
    """3600 examples at one per second are an hour; the price is per hour."""
    assert Budget(2, 1800).gpu_hours(1.0) == 1.0
    assert Budget(2, 1800).cost(1.0) is None
    assert Budget(2, 1800, price=2.5).cost(0.5) == 5.0


def test_examples_are_those_of_the_data():
    """Of a Halfstep loader or a DataLoader's dataset; generated data and generators have none."""
    dataset = TensorDataset(torch.randn(37, 16), torch.randint(4, (37,)))
    assert count_examples(small_job(data=lambda batch_size: DataLoader(dataset, batch_size))) == 37
    assert count_examples(load_target("digits").job) > 1000
    assert count_examples(load_target("vit_s_16").job) is None
    with pytest.raises(SettingError, match="--examples"):
        make_budget(1, None, None, load_target("vit_s_16").job)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((None, 5, None), "--examples has no effect"),
        ((None, None, 2.0), "--price has no effect"),
        ((0, 5, None), "--epochs"),
        ((1, -5, None), "--examples"),
        ((1, 5, float("nan")), "--price"),
    ],
)
def test_settings_without_effect_or_meaning_are_rejected(settings, message):
    """Options that need --epochs, and numbers that are not positive."""
    with pytest.raises(SettingError, match=message):
        make_budget(*settings)


def test_rates_belong_to_precisions():
    """A number alone only where one precision is planned; policies may contain the sign."""
    assert parse_rates(["930"], ["bf16"])["bf16"].examples_per_second == 930
    names = ["bf16", "bf16-lean,states=8bit"]
    rates = parse_rates(["bf16-lean,states=8bit=1066", "bf16=930"], names)
    assert [rates[name].examples_per_second for name in names] == [930, 1066]


@pytest.mark.parametrize("text", ["930", "fp32=5", "bf16=fast", "bf16=-1", "bf16-lean,states=8bit"])
def test_ambiguous_rates_are_rejected(text):
    """No rate is applied to a precision that it was not written for."""
    with pytest.raises(SettingError, match="--rate"):
        parse_rates([text], ["bf16", "bf16-lean,states=8bit"])


def test_a_record_has_rates_at_the_mean_step(tmp_path):
    """What halfstep compare writes is read back, at the mean time of a step."""
    comparison = read_comparison([write_case(tmp_path / "c")])
    file = tmp_path / "comparison.json"
    file.write_text(json.dumps(comparison.as_dict()))
    survey, row = comparison.surveys[0], comparison.row("bf16")
    record = read_record(file, None, survey.num_params)
    expected = row.samples_per_second.value * row.step_seconds.value / row.mean_seconds
    assert record.rates["bf16"].examples_per_second == pytest.approx(expected)
    assert survey.machine in record.rates["bf16"].source
    assert read_record(tmp_path, None, survey.num_params) == record  # a directory is its file


def test_the_committed_record_is_that_of_its_table():
    """The JSON next to the table of ViT-L/16 has its numbers."""
    table = VIT_L.with_suffix(".md").read_text()
    for row in json.loads(VIT_L.read_text())["rows"]:
        cells = f"| {row['label']} | {row['samples_per_second']['value']:,.1f} ("
        times = f"| {1e3 * row['step_seconds']['value']:.2f} | {1e3 * row['mean_seconds']:.2f} |"
        assert [line for line in table.splitlines() if line.startswith(cells) and times in line], row["label"]
    rate = read_record(VIT_L, "NVIDIA H200", NUM_PARAMS).rates["bf16"].examples_per_second
    assert rate == pytest.approx(128 / 0.13976, rel=1e-3)


@pytest.mark.parametrize(
    ("gpu", "num_params", "message"),
    [("NVIDIA A100 40GB", NUM_PARAMS, "would be a guess"), ("NVIDIA H200", 5, "not the same")],
)
def test_a_record_of_something_else_is_rejected(gpu, num_params, message):
    """Another GPU's or another model's speed is not this one's."""
    with pytest.raises(SettingError, match=message):
        read_record(VIT_L, gpu, num_params)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [], "machines": [{}]}'])
def test_other_files_are_rejected(text, tmp_path):
    """By name, and not with a traceback."""
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(SettingError, match="not a result of halfstep compare"):
        read_record(tmp_path / "x.json", None, 1)
    with pytest.raises(SettingError, match="cannot be read"):
        read_record(tmp_path / "missing.json", None, 1)
